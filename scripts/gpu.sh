#!/bin/sh
# Measures the pool of host memory on a machine with CUDA, and prints one JSON object: {"pool": ..., "python": ...}.
# It takes four minutes or so, and 70 GiB of free memory. The machine needs the driver alone: no toolkit, no compiler.
#
#   scripts/gpu.sh [PROGRAM] [WHEEL]
#
# PROGRAM   `cargo build --release -p uzone-hostpool --example gpu`, by default target/release/examples/gpu
# WHEEL     the Python package, by default none; it wants python3 with torch and NumPy
set -eu
cd "$(dirname "$0")/.."
program=${1:-target/release/examples/gpu}
wheel=${2:-}
if [ ! -x "$program" ]; then
    echo "gpu.sh: no program at $program: cargo build --release -p uzone-hostpool --example gpu" >&2
    exit 66
fi
limit=
if command -v timeout >/dev/null; then
    limit='timeout 420'
fi
printf '{"pool": '
# A table that fails leaves the others.
$limit "$program" || echo '"the program ended early"'
printf ', "python": '
if [ -z "$wheel" ]; then
    echo 'null}'
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$folder" "$wheel" >&2
PYTHONPATH=$folder timeout 60 python3 - <<'PYTHON'
import json
import time

started = time.perf_counter()
import uzone

imported = time.perf_counter() - started
import numpy
import torch

torch.cuda.init()
device = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")
started = time.perf_counter()
pool = uzone.HostPool("8G", block="2M", register="cuda")
opened = time.perf_counter() - started
block = pool.take()
first = time.perf_counter() - started
tensor = torch.frombuffer(block, dtype=torch.bfloat16)
is_pinned, is_zero = tensor.is_pinned(), not tensor.any().item()
tensor.fill_(3)
device.copy_(tensor, non_blocking=True)
torch.cuda.synchronize()
is_copied = bool((device == 3).all().item())
array = numpy.frombuffer(block, dtype=numpy.float16)
is_shared = array.ctypes.data == tensor.data_ptr()
pool.wait_ready("8G")
ready = time.perf_counter() - started
del tensor, array, block
count, best = 10000, float("inf")
for _ in range(5):
    started = time.perf_counter()
    for _ in range(count):
        pool.take()
    best = min(best, (time.perf_counter() - started) / count)
print(json.dumps({
    "import_ms": round(imported * 1e3, 1),
    "open_ms": round(opened * 1e3, 2),
    "first_block_ms": round(first * 1e3, 2),
    "all_ready_s": round(ready, 3),
    "is_pinned": is_pinned,
    "is_zero": is_zero,
    "is_copied": is_copied,
    "is_shared_with_numpy": is_shared,
    "take_and_free_us": round(best * 1e6, 2),
    "torch": torch.__version__,
}) + "}")
PYTHON
