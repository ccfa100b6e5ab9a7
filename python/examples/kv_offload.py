"""A second level for a key-value cache: blocks of keys and values leave the accelerator for host memory, and return.

    python kv_offload.py [--size 4G] [--quick]

A server keeps the keys and values of the last requests in blocks on the GPU. When that memory is full, the block that
was used least recently goes to a pool in host memory; when a request wants it again, it comes back. With torch and a GPU
the copies are asynchronous, because the pool is registered with CUDA; without, arrays stand for the GPU. Each block that
comes back is compared with the one that left.
"""

import argparse
import random
import time
from collections import OrderedDict

import numpy

import uzone

try:
    import torch

    HAS_GPU = torch.cuda.is_available()
except ImportError:
    HAS_GPU = False


class Gpu:
    """The blocks on the GPU, or in arrays in place of it."""

    def __init__(self, count: int, block_bytes: int):
        if HAS_GPU:
            self.memory = torch.empty((count, block_bytes), dtype=torch.uint8, device="cuda")
        else:
            self.memory = numpy.empty((count, block_bytes), dtype=numpy.uint8)

    def compute(self, slot: int, key: int) -> None:
        """Make the keys and values of a request."""
        self.memory[slot, :] = key % 251
        self.memory[slot, 0] = key % 256

    def is_right(self, slot: int, key: int) -> bool:
        row = self.memory[slot]
        return int(row[0]) == key % 256 and bool((row[1:] == key % 251).all())

    def store(self, slot: int, block: uzone.Block) -> None:
        self.host(block)[:] = self.memory[slot]

    def load(self, slot: int, block: uzone.Block) -> None:
        self.memory[slot, :] = self.host(block)

    @staticmethod
    def host(block: uzone.Block):
        if HAS_GPU:
            return torch.frombuffer(block, dtype=torch.uint8)
        return numpy.frombuffer(block, dtype=numpy.uint8)


class Cache:
    """Blocks of keys and values, on the GPU or in the pool."""

    def __init__(self, slots: int, pool: uzone.HostPool):
        self.gpu = Gpu(slots, pool.block_bytes)
        self.pool = pool
        self.free = list(range(slots))
        self.on_gpu: OrderedDict[int, int] = OrderedDict()
        self.in_pool: OrderedDict[int, uzone.Block] = OrderedDict()
        self.counts = {"hits": 0, "loads": 0, "stores": 0, "computed": 0, "dropped": 0}

    def want(self, key: int) -> None:
        if key in self.on_gpu:
            self.on_gpu.move_to_end(key)
            self.counts["hits"] += 1
            return
        slot = self.free.pop() if self.free else self.evict()
        block = self.in_pool.pop(key, None)
        if block is None:
            self.gpu.compute(slot, key)
            self.counts["computed"] += 1
        else:
            self.gpu.load(slot, block)
            block.free()
            self.counts["loads"] += 1
            if not self.gpu.is_right(slot, key):
                raise SystemExit(f"the block of {key} came back with other bytes")
        self.on_gpu[key] = slot

    def evict(self) -> int:
        """Move the block that was used least recently to the pool, and return its slot."""
        key, slot = self.on_gpu.popitem(last=False)
        block = self.pool.try_take()
        if block is None:
            # All blocks of the pool are in use: the oldest one is computed again if it is wanted.
            self.in_pool.popitem(last=False)[1].free()
            self.counts["dropped"] += 1
            block = self.pool.take()
        self.gpu.store(slot, block)
        self.in_pool[key] = block
        self.counts["stores"] += 1
        return slot


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--size", default="1G", help="the pool")
    arguments.add_argument("--block", default="2M", help="a block of keys and values")
    arguments.add_argument("--quick", action="store_true", help="a small pool and few requests")
    given = arguments.parse_args()
    size, block = ("16M", "256K") if given.quick else (given.size, given.block)
    if HAS_GPU:
        torch.zeros(1, device="cuda")  # the context in which the pool is registered

    started = time.perf_counter()
    pool = uzone.HostPool(size, block=block, register="cuda" if HAS_GPU else None)
    pool.take().free()
    print(f"first block of {pool.nbytes >> 20} MiB after {(time.perf_counter() - started) * 1e3:.1f} ms")

    cache = Cache(max(4, pool.block_count // 4), pool)
    dice = random.Random(1)
    keys, rounds = pool.block_count * 3 // 2, pool.block_count * 8
    started = time.perf_counter()
    for _ in range(rounds):
        # Some requests come again and again.
        cache.want(int(dice.triangular(0, keys, 0)))
    seconds = time.perf_counter() - started
    moved = (cache.counts["loads"] + cache.counts["stores"]) * pool.block_bytes
    print(f"{rounds} requests in {seconds:.2f} s, {moved / seconds / 1e9:.1f} GB/s moved: {cache.counts}")
    if not cache.counts["loads"]:
        raise SystemExit("no block came back")


if __name__ == "__main__":
    main()
