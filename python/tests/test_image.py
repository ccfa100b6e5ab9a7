"""Images as buffers: open, touch, verify, populate, evict, pack and unpack."""

import os
import signal
from pathlib import Path

import numpy
import pytest
from conftest import run

import uzone


def damage(path: Path) -> None:
    """Change a byte of the frames that do not compress, which are the last ones."""
    at = path.stat().st_size * 3 // 4
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_an_image_has_the_bytes_that_were_packed(image_path, numbers):
    image = uzone.open(image_path)
    assert len(image) == image.nbytes == numbers.nbytes
    assert (numpy.frombuffer(image, dtype=numpy.uint64) == numbers).all()
    assert image.stats()["faults"] > 0
    assert bytes(memoryview(image)[:16]) == numbers[:2].tobytes()


def test_raw_memory_is_opened_without_hashes(tmp_path, numbers):
    numbers.tofile(tmp_path / "raw")
    image = uzone.open(tmp_path / "raw")
    assert image.is_raw
    assert (numpy.frombuffer(image, dtype=numpy.uint64) == numbers).all()
    with pytest.raises(uzone.NotSupportedError, match="without hashes"):
        image.verify()


def test_an_image_that_ends_within_a_page_has_its_length(tmp_path):
    uzone.pack(b"abc" * 5000, tmp_path / "image")
    image = uzone.open(tmp_path / "image")
    assert bytes(image) == b"abc" * 5000
    image.populate(slice(14000, None))
    assert image.evict() == 4 * 4096


def test_a_buffer_of_mode_r_is_read_only(image_path):
    image = uzone.open(image_path)
    assert memoryview(image).readonly
    array = numpy.frombuffer(image, dtype=numpy.uint8)
    with pytest.raises(ValueError):
        array[0] = 1


def test_writes_of_mode_c_stay_in_the_process_until_they_are_evicted(image_path, numbers):
    image = uzone.open(image_path, mode="c")
    array = numpy.frombuffer(image, dtype=numpy.uint64)
    array[:] += 1
    assert (array == numbers + 1).all()
    other = numpy.frombuffer(uzone.open(image_path), dtype=numpy.uint64)
    assert (other == numbers).all()
    assert image.evict(slice(0, 4096)) == 4096
    assert (array[:512] == numbers[:512]).all()
    assert (array[512:] == numbers[512:] + 1).all()


def test_the_root_hash_is_required(image_path):
    root = uzone.open(image_path).root
    assert uzone.open(image_path, root=root).root == root
    assert uzone.open(image_path, root=f"blake3:{root}").root == root
    with pytest.raises(uzone.DamageError, match="root hash"):
        uzone.open(image_path, root="0" * 64)
    with pytest.raises(uzone.InputError, match="64 hexadecimal digits"):
        uzone.open(image_path, root="abc")


def test_populate_makes_pages_present_so_that_no_touch_faults(image_path, numbers):
    image = uzone.open(image_path)
    calls = []
    image.populate(progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (numbers.nbytes, numbers.nbytes)
    before = image.stats()["faults"]
    assert numpy.frombuffer(image, dtype=numpy.uint64).sum() == numbers.sum()
    assert image.stats()["faults"] == before


def test_populate_of_a_range_leaves_the_others_alone(image_path):
    image = uzone.open(image_path)
    image.populate(range(0, 8192))
    assert image.stats()["populated"] >= 2
    assert image.stats()["populated"] < len(image) // 4096


@pytest.mark.parametrize("bad", [range(0, 1 << 40), range(0, 10, 2), range(-5, 5), "all", 5])
def test_a_range_that_is_not_inside_is_refused(image_path, bad):
    image = uzone.open(image_path)
    for call in (image.verify, image.populate, image.evict):
        with pytest.raises(uzone.InputError):
            call(bad)


def test_an_exception_of_progress_is_raised(image_path):
    def progress(done, total):
        raise RuntimeError("enough")

    image = uzone.open(image_path)
    for call in (image.verify, image.populate):
        with pytest.raises(RuntimeError, match="enough"):
            call(progress=progress)


def test_damage_is_found_by_verify_and_populate_and_nowhere_else(image_path, numbers):
    damage(image_path)
    image = uzone.open(image_path)
    for call in (image.verify, image.populate):
        with pytest.raises(uzone.DamageError, match="do not match their hash") as caught:
            call()
        assert isinstance(caught.value, OSError)
        assert image_path.name in str(caught.value)
    half = slice(0, numbers.nbytes // 2)
    image.verify(half)
    image.populate(half)
    array = numpy.frombuffer(image, dtype=numpy.uint64)
    assert (array[: 1 << 18] == numbers[: 1 << 18]).all()


def test_a_touch_of_a_damaged_page_is_a_signal_and_one_line_that_names_it(image_path):
    damage(image_path)
    script = f"import uzone; bytes(uzone.open({str(image_path)!r}))"
    died = run("-c", script)
    assert died.returncode == -signal.SIGBUS, died
    lines = [line for line in died.stderr.splitlines() if image_path.name in line]
    assert len(lines) == 1, died.stderr


def test_close_is_refused_while_an_array_has_the_memory(image_path):
    image = uzone.open(image_path)
    array = numpy.frombuffer(image, dtype=numpy.uint8)
    with pytest.raises(BufferError):
        image.close()
    del array
    image.close()
    assert image.closed
    image.close()
    for call in (image.populate, image.evict, image.stats, lambda: memoryview(image)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_an_array_keeps_the_memory_of_its_image(image_path, numbers):
    array = numpy.frombuffer(uzone.open(image_path), dtype=numpy.uint64)
    assert (array == numbers).all()


def test_a_context_manager_closes_the_image(image_path):
    with uzone.open(image_path) as image:
        assert not image.closed
    assert image.closed


def test_a_forked_process_has_no_part_of_an_image_and_opens_its_own(image_path, numbers):
    image = uzone.open(image_path)
    child = os.fork()
    if child == 0:
        try:
            image.populate()
        except uzone.InputError:
            own = numpy.frombuffer(uzone.open(image_path), dtype=numpy.uint64)
            os._exit(0 if (own == numbers).all() else 3)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    image.populate()


@pytest.mark.parametrize("codec", ["zstd", "lz4", "none"])
def test_unpack_writes_the_bytes_of_each_codec(tmp_path, numbers, codec):
    packed = uzone.pack(numbers, tmp_path / "image", codec=codec, frame="1M")
    assert packed.image_bytes == numbers.nbytes
    assert packed.file_bytes == (tmp_path / "image").stat().st_size
    assert packed.zero_pages >= (1 << 20) // 4096
    uzone.unpack(tmp_path / "image", tmp_path / "raw", root=packed.root)
    assert (numpy.fromfile(tmp_path / "raw", dtype=numpy.uint64) == numbers).all()


def test_pack_takes_a_file_and_a_parent(tmp_path, numbers):
    numbers.tofile(tmp_path / "raw")
    base = uzone.pack(tmp_path / "raw", tmp_path / "base")
    numbers[5] = 99
    child = uzone.pack(numbers, tmp_path / "child", parent=tmp_path / "base")
    assert child.file_bytes < base.file_bytes / 5
    opened = uzone.open(tmp_path / "child")
    assert (numpy.frombuffer(opened, dtype=numpy.uint64) == numbers).all()
    opened.verify()


def test_pack_refuses_bytes_that_do_not_follow_each_other_and_options_that_do_not_exist(tmp_path):
    with pytest.raises((TypeError, ValueError)):
        uzone.pack(numpy.zeros((64, 64))[:, ::2], tmp_path / "image")
    for options in ({"codec": "rar"}, {"level": 99}, {"frame": "5K"}, {"frame": "x"}):
        with pytest.raises(uzone.InputError):
            uzone.pack(b"x", tmp_path / "image", **options)
    assert not (tmp_path / "image").exists()


def test_what_is_missing_has_the_exception_of_python_too(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        uzone.open(tmp_path / "none")
    assert isinstance(caught.value, uzone.NotFoundError)
    assert isinstance(caught.value, uzone.Error)
    (tmp_path / "text").write_bytes(b"no image")
    with pytest.raises(uzone.DamageError):
        uzone.open(tmp_path / "text")


def test_an_image_in_object_storage_is_mapped(s3, monkeypatch, numbers):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    packed = uzone.pack(numbers, "s3://bucket/numbers.uz")
    image = uzone.open("s3://bucket/numbers.uz", root=packed.root)
    assert (numpy.frombuffer(image, dtype=numpy.uint64) == numbers).all()
    image.verify()
    with pytest.raises(FileNotFoundError):
        uzone.open("s3://bucket/none")


def test_torch_has_the_bytes_of_an_image_without_a_copy(image_path, numbers):
    torch = pytest.importorskip("torch")
    image = uzone.open(image_path, mode="c")
    tensor = torch.frombuffer(image, dtype=torch.int64)
    assert (tensor.numpy() == numbers.view(numpy.int64)).all()
