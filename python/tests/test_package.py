"""The package as others see it: types, documentation, names, the time to import it."""

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, run

import uzone


def test_the_types_are_those_of_the_package(tmp_path):
    pytest.importorskip("mypy")
    # Python shows these from 3.12 on.
    allowed = tmp_path / "allowed"
    allowed.write_text(r"uzone\.\w+\.__(release_)?buffer__")
    options = ["--allowlist", allowed, "--ignore-unused-allowlist", "--concise"]
    checked = run("-m", "mypy.stubtest", "uzone", *options)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_name_has_documentation_that_describes_each_argument():
    for name in uzone.__all__:
        made = getattr(uzone, name)
        assert made.__doc__, name
        members = [made] if callable(made) and not inspect.isclass(made) else vars(made).values()
        for member in members:
            if not callable(member) or getattr(member, "__name__", "_").startswith("_"):
                continue
            assert member.__doc__, f"{name}.{member.__name__}"
            for argument in inspect.signature(member).parameters:
                if argument != "self":
                    assert re.search(rf"^ *{argument} : ", member.__doc__, re.M), (name, argument)


def test_the_help_of_the_package_shows_classes_and_functions():
    text = pydoc.render_doc(uzone, renderer=pydoc.plaintext)
    for part in ("class HostPool", "class Image", "class Block", "open(path, root=None", "Examples"):
        assert part in text, part


def test_every_exception_derives_from_error_and_has_the_module_of_the_package():
    errors = [getattr(uzone, name) for name in uzone.__all__ if name.endswith("Error")]
    assert len(errors) == 9
    for error in errors:
        assert issubclass(error, uzone.Error) and error.__module__ == "uzone"


def test_import_takes_at_most_50_ms():
    script = "import time; t = time.perf_counter(); import uzone; print(time.perf_counter() - t)"
    assert min(float(run("-c", script).stdout) for _ in range(5)) <= 0.05


def test_the_package_imports_nothing_that_is_not_installed_with_python():
    script = "import sys, uzone; print('numpy' in sys.modules or 'torch' in sys.modules)"
    assert run("-c", script).stdout.strip() == "False"


def test_the_guide_runs_from_its_first_example_to_its_last(tmp_path):
    guide = (REPOSITORY / "docs/PYTHON.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)
    assert len(blocks) >= 4
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", ["kv_offload", "safetensors_image"])
def test_the_example_ends_well(example, tmp_path):
    done = run(REPOSITORY / f"python/examples/{example}.py", "--quick", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_reads_tensors_of_an_image_in_object_storage(s3):
    example = REPOSITORY / "python/examples/safetensors_image.py"
    done = run(example, "--quick", "--url", "s3://bucket/model.uz", env=s3)
    assert done.returncode == 0, done.stdout + done.stderr


def test_examples_stay_short():
    for example in Path(REPOSITORY / "python/examples").glob("*.py"):
        assert len(example.read_text().splitlines()) <= 150, example
