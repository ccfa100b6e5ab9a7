"""Measure a pool that CUDA registers, and print the figures as JSON. It needs a GPU, torch and NumPy."""

import json
import os
import platform
import sys
import time

import numpy
import torch

import uzone

SIZE = 4 << 30
BLOCK = 2 << 20


def median_us(call, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return sorted(times)[rounds // 2] / 1e3


def take_and_free(pool: uzone.HostPool) -> None:
    pool.take().free()


def round_trip(block: uzone.Block, seed: int) -> bool:
    """Copy random bytes to the GPU and back into another array; return whether they are the same."""
    host = torch.frombuffer(block, dtype=torch.uint8)
    expected = numpy.random.default_rng(seed).integers(0, 256, len(block), dtype=numpy.uint8)
    host.numpy()[:] = expected
    on_gpu = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    host.zero_()
    host.copy_(on_gpu + 1, non_blocking=True)
    torch.cuda.synchronize()
    return bool((host.numpy() == expected + numpy.uint8(1)).all())


def copy_rate(block: uzone.Block) -> float:
    """Return the GB/s of copies from the host to the GPU."""
    host = torch.frombuffer(block, dtype=torch.uint8)
    target = torch.empty_like(host, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    rounds = 32
    for _ in range(rounds):
        target.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return rounds * len(block) / (time.perf_counter() - started) / 1e9


def main() -> int:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    figures: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "uzone": uzone.__version__,
        "pool_bytes": SIZE,
    }
    started = time.perf_counter()
    pool = uzone.HostPool(SIZE, block=BLOCK, register="cuda")
    figures["open_ms"] = (time.perf_counter() - started) * 1e3
    block = pool.take(timeout=30)
    figures["first_block_ms"] = (time.perf_counter() - started) * 1e3
    figures["first_block_is_pinned"] = torch.frombuffer(block, dtype=torch.uint8).is_pinned()
    figures["first_block_is_zero"] = not numpy.frombuffer(block, dtype=numpy.uint8).any()
    figures["first_block_round_trip"] = round_trip(block, 1)
    pool.wait_ready(timeout=60)
    figures["all_ready_s"] = time.perf_counter() - started
    figures["dlpack_device"] = block.__dlpack_device__()
    figures["dlpack_numpy_is_same"] = numpy.from_dlpack(block).ctypes.data == block.address
    tensor = torch.from_dlpack(block) if torch_takes(block) else None
    figures["dlpack_torch_is_same"] = None if tensor is None else tensor.data_ptr() == block.address
    del tensor
    block.free()

    several = pool.blocks(32, timeout=10)
    figures["run_is_pinned"] = torch.frombuffer(several, dtype=torch.bfloat16).is_pinned()
    figures["run_round_trip"] = round_trip(several, 2)
    figures["copy_to_gpu_gb_s"] = copy_rate(several)
    several.free()

    last = pool.buffer[-BLOCK:]
    figures["last_block_is_pinned"] = torch.frombuffer(last, dtype=torch.uint8).is_pinned()
    last.release()

    figures["take_free_us"] = median_us(lambda: take_and_free(pool), 2000)
    figures["report"] = pool.report()
    figures["stats"] = pool.stats()
    started = time.perf_counter()
    pool.close()
    figures["close_s"] = time.perf_counter() - started

    # It is alive when the interpreter ends.
    global left
    left = uzone.HostPool("256M", register="cuda")
    left.take(timeout=30)
    print(json.dumps(figures, indent=2))
    wanted = [
        "first_block_is_pinned",
        "first_block_is_zero",
        "first_block_round_trip",
        "run_is_pinned",
        "run_round_trip",
        "last_block_is_pinned",
        "dlpack_numpy_is_same",
    ]
    failed = [name for name in wanted if not figures[name]]
    if failed:
        print("not so:", ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def torch_takes(block: uzone.Block) -> bool:
    """Return whether this version of torch takes tensors in registered memory of the host."""
    try:
        torch.from_dlpack(block)
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        print("torch.from_dlpack:", error, file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
