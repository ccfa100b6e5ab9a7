"""Tensors of a model from a packed image: those that are used are read, and no others.

    python safetensors_image.py [--model FILE] [--url s3://BUCKET/KEY] [--quick]

A file of safetensors is packed into an image: compressed, and with a hash of each part. Opened as a lazily mapped image,
its header is parsed where it lies, and each tensor is an array over the memory. The time to the first tensor is printed
beside that of a program that reads and decodes the whole file first. Without a model, one of random weights is made.
With a URL, the image is written there and read from there.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy

import uzone

TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}


def write_model(path: Path, layers: int, width: int) -> None:
    """Write a model of random weights in the format of safetensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    random, tensors, at = numpy.random.default_rng(1), [], 0
    for layer in range(layers):
        # Few different values, as in weights that were quantised.
        tensor = random.integers(-8, 8, (width, width)).astype(numpy.float16) / 16
        offsets = [at, at + tensor.nbytes]
        header[f"layers.{layer}.weight"] = {"dtype": "F16", "shape": [width, width], "data_offsets": offsets}
        tensors.append(tensor)
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.tobytes())


def tensors_of(memory) -> dict[str, numpy.ndarray]:
    """Return the tensors of a file of safetensors in memory, as arrays over it."""
    view = memoryview(memory)
    header_len = int.from_bytes(view[:8], "little")
    header = json.loads(bytes(view[8 : 8 + header_len]))
    header.pop("__metadata__", None)
    data, tensors = view[8 + header_len :], {}
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        array = numpy.frombuffer(data[start:end], dtype=TYPES[tensor["dtype"]])
        tensors[name] = array.reshape(tensor["shape"])
    return tensors


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", type=Path, help="a file of safetensors")
    arguments.add_argument("--url", help="where the image is, in object storage")
    arguments.add_argument("--quick", action="store_true", help="a small model")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder) / "model.safetensors"
        if given.model is None:
            write_model(model, layers=8, width=256 if given.quick else 2048)
        target = given.url or str(Path(folder) / "model.uz")
        packed = uzone.pack(model, target)
        print(f"packed {packed.image_bytes >> 20} MiB into {packed.file_bytes >> 20} MiB, root {packed.root[:16]}...")

        started = time.perf_counter()
        raw = Path(folder) / "raw"
        uzone.unpack(target, raw, root=packed.root)
        whole = tensors_of(raw.read_bytes())
        name = list(whole)[len(whole) // 2]
        expected = float(whole[name].astype(numpy.float64).sum())
        print(f"all of it read first: {name} after {(time.perf_counter() - started) * 1e3:.1f} ms")

        started = time.perf_counter()
        image = uzone.open(target, root=packed.root)
        lazy = tensors_of(image)
        # A damaged file is an exception here, and a touch of memory is no request afterwards.
        start = lazy[name].ctypes.data - numpy.frombuffer(image, dtype=numpy.uint8).ctypes.data
        image.populate(slice(start, start + lazy[name].nbytes))
        found = float(lazy[name].astype(numpy.float64).sum())
        print(f"mapped lazily:        {name} after {(time.perf_counter() - started) * 1e3:.1f} ms")
        print(f"pages read: {sum(image.stats()[key] for key in ('on_demand', 'around', 'populated'))}")

        if found != expected or list(lazy) != list(whole):
            raise SystemExit(f"{name} has other values: {found} and {expected}")
        for name, tensor in whole.items():
            if not (lazy[name] == tensor).all():
                raise SystemExit(f"{name} has other values")
        print(f"all {len(whole)} tensors are the same")
        os.remove(raw)


if __name__ == "__main__":
    main()
