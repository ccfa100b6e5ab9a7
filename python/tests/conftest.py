"""Fixtures of the tests, and the lines that `check.sh` counts."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


def pytest_terminal_summary(terminalreporter, exitstatus):
    stats = terminalreporter.stats
    for report in stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"skipped: {report.nodeid}: {reason}")
    if exitstatus == 0:
        terminalreporter.write_line(f"test result: ok. {len(stats.get('passed', []))} passed")


def run(*arguments, env=None, timeout=120):
    """Run a program of Python with the package of this test."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, **(env or {})}, timeout=timeout, capture_output=True, text=True
    )


@pytest.fixture
def numbers():
    """Bytes of which a half compresses well, a quarter does not, and a quarter is zero."""
    random = numpy.random.default_rng(1)
    plain = numpy.arange(1 << 18, dtype=numpy.uint64)
    dense = random.integers(0, 1 << 63, 1 << 17, dtype=numpy.uint64)
    return numpy.concatenate([plain, dense, numpy.zeros(1 << 17, dtype=numpy.uint64)])


@pytest.fixture
def image_path(tmp_path, numbers):
    import uzone

    uzone.pack(numbers, tmp_path / "numbers.uz")
    return tmp_path / "numbers.uz"


@pytest.fixture
def s3():
    """A server of S3 in a process of its own: a fault of this process keeps the interpreter's lock while it waits."""
    server = subprocess.Popen([sys.executable, HERE / "s3.py"], stdout=subprocess.PIPE, text=True)
    endpoint = server.stdout.readline().strip()
    env = {
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    yield env
    server.terminate()
    server.wait()


@pytest.fixture
def stub_driver(tmp_path):
    """A driver in place of that of CUDA, which checks its calls; with a context."""
    library = tmp_path / "stub.so"
    source = REPOSITORY / "hostpool/tests/stub_driver.c"
    flags = ["-O1", "-shared", "-fPIC", "-o"]
    try:
        subprocess.run(["cc", *flags, library, source, "-lpthread"], check=True)
    except FileNotFoundError:
        pytest.skip("no compiler of C")
    Path(f"{library}.orders").write_text("context")
    return library
