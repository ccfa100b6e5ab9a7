#!/usr/bin/env python3
"""Reads an image by readers of the seekable format of zstd: two of the Python Package Index, and a Go module.

    readers.py UZONE [GO_READER]    the program that packs the image, and the one that `main.go` makes

Each reader has to know how long the memory is, and to find parts of it at any place. `./check.sh readers` installs
them and runs this. The crate `zeekstd` reads images in `snapshot/tests`.
"""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

from indexed_zstd import IndexedZstdFile
from pyzstd import SeekableZstdFile

LEN = 3 * 1024 * 1024 + 777


def memory():
    """Returns bytes that compress, bytes that do not, and zeroes, each for some frames."""
    source = random.Random(7)
    parts = [source.randbytes(LEN // 3), b"\0" * (LEN // 3), b"uzone\n" * (LEN // 18)]
    return b"".join(parts).ljust(LEN, b"x")


def check(name, file, expected):
    """Fails unless a reader has exactly these bytes."""
    source = random.Random(11)
    assert file.seek(0, 2) == len(expected), f"{name}: {file.tell()} bytes"
    for _ in range(50):
        at = source.randrange(len(expected))
        size = source.randrange(1, 300_000)
        file.seek(at)
        # A reader may return less than it was asked for.
        found = b""
        while len(found) < size and (part := file.read(size - len(found))):
            found += part
        assert found == expected[at : at + size], f"{name}: {size} bytes at {at}"
    file.seek(0)
    assert file.read(len(expected)) == expected, f"{name}: all bytes"
    print(f"test result: ok. 1 passed: {name}")


def main(uzone, go_reader=None):
    with tempfile.TemporaryDirectory() as folder:
        raw, image = Path(folder, "raw"), Path(folder, "image")
        raw.write_bytes(memory())
        subprocess.run([uzone, "pack", raw, image, "--quiet"], check=True, stdout=subprocess.DEVNULL)
        with SeekableZstdFile(image) as file:
            check("pyzstd.SeekableZstdFile", file, memory())
        check("indexed_zstd.IndexedZstdFile", IndexedZstdFile(str(image)), memory())
        if go_reader:
            subprocess.run([go_reader, image, raw], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
