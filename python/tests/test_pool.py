"""Pools: blocks as buffers and tensors, waiting, registration, the end of an owner."""

import gc
import os
import signal
import socket
import threading
import weakref
from pathlib import Path

import numpy
import pytest
from conftest import run

import uzone


@pytest.fixture
def pool():
    return uzone.HostPool("16M", block="1M")


def test_a_block_is_zero_and_memory_without_a_copy(pool):
    block = pool.take()
    array = numpy.frombuffer(block, dtype=numpy.uint32)
    assert array.nbytes == block.nbytes == len(block) == 1 << 20
    assert not array.any()
    array[:] = 7
    assert (numpy.frombuffer(block, dtype=numpy.uint32) == 7).all()
    assert array.ctypes.data == block.address


def test_sizes_are_numbers_or_text():
    assert uzone.HostPool(1 << 20, block=4096).block_count == 256
    pool = uzone.HostPool("1.5M", block="64K")
    assert (pool.nbytes, pool.block_bytes, pool.block_count) == (3 << 19, 64 << 10, 24)
    for size in ("much", "1X", -1, 1.5, None):
        with pytest.raises(uzone.InputError):
            uzone.HostPool(size)
    with pytest.raises(uzone.InputError):
        uzone.HostPool("1M", block=1000)


def test_a_block_that_comes_back_is_zero_again(pool):
    for _ in range(40):
        with pool.take() as block:
            numpy.frombuffer(block, dtype=numpy.uint8)[:] = 255
        again = pool.take()
        assert not numpy.frombuffer(again, dtype=numpy.uint8).any()
        again.free()


def test_a_block_is_freed_by_free_by_with_and_as_garbage(pool):
    block = pool.take()
    block.free()
    with pytest.raises(ValueError, match="given back"):
        memoryview(block)
    with pool.take():
        assert pool.stats()["used"] == 1
    block = pool.take()
    del block
    gc.collect()
    assert pool.stats()["used"] == 0


def test_a_block_with_an_array_is_not_freed(pool):
    block = pool.take()
    array = numpy.frombuffer(block, dtype=numpy.uint8)
    with pytest.raises(BufferError):
        block.free()
    gone = weakref.ref(block)
    del block
    gc.collect()
    assert gone() is not None and pool.stats()["used"] == 1
    array[:] = 1
    del array
    gc.collect()
    assert gone() is None and pool.stats()["used"] == 0


def test_an_array_of_dlpack_keeps_the_memory_of_a_block(pool):
    block = pool.take()
    array = numpy.from_dlpack(block)
    array[5] = 9
    assert array.ctypes.data == block.address and array.dtype == numpy.uint8
    with pytest.raises(BufferError):
        block.free()
    del block
    gc.collect()
    assert pool.stats()["used"] == 1 and array[5] == 9
    del array
    gc.collect()
    assert pool.stats()["used"] == 0


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (2, 3)])
def test_a_capsule_that_is_not_used_frees_its_tensor(pool, version):
    block = pool.take()
    capsule = block.__dlpack__(max_version=version)
    name = "dltensor_versioned" if version and version[0] >= 1 else "dltensor"
    assert f'"{name}"' in repr(capsule)
    with pytest.raises(BufferError):
        block.free()
    del capsule
    block.free()


def test_dlpack_names_the_device_and_refuses_others(pool):
    block = pool.take()
    assert block.__dlpack_device__() == (1, 0)
    for refused in ({"dl_device": (2, 0)}, {"copy": True}):
        with pytest.raises(BufferError):
            block.__dlpack__(**refused)
    block.free()


def test_several_blocks_are_one_buffer(pool):
    run_of = pool.blocks(4)
    assert len(run_of.numbers) == 4 and len(run_of) == 4 << 20
    assert run_of.number == run_of.numbers.start
    run_of.free()
    whole = pool.blocks(pool.block_count)
    assert whole.numbers == range(16)
    with pytest.raises(uzone.OutOfMemoryError) as caught:
        pool.take()
    assert isinstance(caught.value, MemoryError)
    assert pool.try_take() is None


def test_the_buffer_of_the_pool_has_each_block_at_its_number(pool):
    table = numpy.frombuffer(pool, dtype=numpy.uint8).reshape(pool.block_count, pool.block_bytes)
    assert pool.buffer.nbytes == pool.nbytes
    blocks = [pool.take() for _ in range(8)]
    for block in blocks:
        table[block.number] = block.number + 1
    for block in blocks:
        assert (numpy.frombuffer(block, dtype=numpy.uint8) == block.number + 1).all()
    assert (numpy.from_dlpack(pool) == table.ravel()).all()
    with pytest.raises(BufferError):
        pool.close()


def test_blocks_outlive_their_pool(pool):
    block = pool.take()
    pool.close()
    assert pool.closed
    for call in (pool.take, pool.report, pool.stats, lambda: pool.ready, lambda: memoryview(pool)):
        with pytest.raises(ValueError, match="closed"):
            call()
    array = numpy.frombuffer(block, dtype=numpy.uint8)
    array[:] = 3
    assert array.sum(dtype=numpy.uint64) == 3 << 20


def test_all_memory_becomes_ready_and_the_report_says_how(pool):
    assert pool.wait_ready("4M") >= 4 << 20
    assert pool.wait_ready() == pool.nbytes == pool.ready
    report = pool.report()
    assert report["ready"] == report["nbytes"] == 16 << 20
    assert report["registered_by"] == "none"
    assert 0 < report["first_ready"] <= report["all_ready"]
    assert all(isinstance(note, str) for note in report["notes"])
    assert pool.stats()["zero"] == pool.block_count


@pytest.mark.parametrize("start", ["background", "eager", "demand"])
@pytest.mark.parametrize("clear", ["ahead", "take", "release", "never"])
def test_every_way_to_start_and_to_clear_hands_out_blocks(start, clear):
    with uzone.HostPool("4M", block="1M", start=start, clear=clear, pages="small") as pool:
        for _ in range(8):
            with pool.take(timeout=30) as block:
                array = numpy.frombuffer(block, dtype=numpy.uint8)
                assert clear == "never" or not array.any()
                array[:] = 1
                del array


def test_words_that_do_not_exist_are_refused():
    for options in ({"register": "rocm"}, {"start": "now"}, {"clear": "no"}, {"node": "all"}):
        with pytest.raises(uzone.InputError):
            uzone.HostPool("1M", block=4096, **options)


def test_mlock_registers(pool):
    locked = uzone.HostPool("1M", block="64K", register="mlock")
    try:
        locked.wait_ready(timeout=30)
    except uzone.Error as error:
        pytest.skip(f"this process may lock no memory: {error}")
    assert locked.report()["registered_by"] == "mlock"


def test_take_waits_without_the_lock_of_the_interpreter_until_memory_is_registered():
    go_on, calls = threading.Event(), []

    def register(address, nbytes):
        go_on.wait()
        calls.append((address, nbytes))

    with uzone.HostPool("4M", block="1M", register=(register, calls.remove), piece="1M") as pool:
        calls.clear()
        with pytest.raises(uzone.TimedOutError) as caught:
            pool.take(timeout=0)
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(TimeoutError):
            pool.wait_ready(timeout=0.01)
        # The thread of the pool sets it: this one has the lock only if `take` lets it go.
        threading.Timer(0.01, go_on.set).start()
        block = pool.take()
        pool.wait_ready()
        assert sum(nbytes for _, nbytes in calls) == 4 << 20
        assert block.address in [address for address, _ in calls]
        block.free()
        calls[:] = [address for address, _ in calls]
    assert calls == []


def test_a_signal_ends_a_take_that_waits():
    go_on = threading.Event()

    def register(address, nbytes):
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait()

    pool = uzone.HostPool("1M", block="64K", register=(register, lambda address: None))
    with pytest.raises(KeyboardInterrupt):
        pool.take()
    go_on.set()
    pool.close()


def test_an_exception_of_register_is_the_reason_that_take_gives():
    def register(address, nbytes):
        raise RuntimeError("no more slots")

    pool = uzone.HostPool("1M", block="64K", register=(register, lambda address: None))
    with pytest.raises(uzone.Error, match="no more slots"):
        pool.take()


def test_cuda_without_a_driver_is_refused_with_the_reason():
    with pytest.raises(uzone.NotSupportedError, match="libcuda|context"):
        uzone.HostPool("1M", block=4096, register="cuda")


def test_a_driver_registers_all_memory_and_lets_go_of_it(stub_driver):
    script = """
import numpy, uzone
pool = uzone.HostPool("8M", block="1M", register="cuda", piece="2M", pause=0)
pool.wait_ready()
block = pool.take()
assert block.__dlpack_device__() == (3, 0)
assert numpy.from_dlpack(block).ctypes.data == block.address
assert block.__dlpack__(dl_device=(1, 0)) is not None
assert pool.report()["registered_by"] == "CUDA" and pool.report()["pieces"] == 4
block.free()
pool.close()
"""
    done = run("-c", script, env={"UZONE_CUDA_LIBRARY": str(stub_driver)})
    assert done.returncode == 0, done.stderr
    calls = open(f"{stub_driver}.log").read()
    assert calls.count("unregister") == 4 and "WRONG" not in calls, calls


def test_a_forked_process_has_no_part_of_a_pool(pool):
    pool.wait_ready()
    child = os.fork()
    if child == 0:
        try:
            pool.take(timeout=5)
        except uzone.NotSupportedError:
            os._exit(0)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.take().free()


def test_threads_take_and_free_blocks_of_their_own(pool):
    def work(number):
        for _ in range(200):
            with pool.take(timeout=30) as block:
                array = numpy.frombuffer(block, dtype=numpy.uint8)
                array[::4096] = number
                assert (array[::4096] == number).all()
                del array

    failures = []

    def caught(number):
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=caught, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and pool.stats()["used"] == 0


def test_torch_has_the_memory_of_a_block_without_a_copy(pool):
    torch = pytest.importorskip("torch")
    block = pool.take()
    tensor = torch.frombuffer(block, dtype=torch.bfloat16)
    assert tensor.data_ptr() == block.address
    assert torch.from_dlpack(block).data_ptr() == block.address


SECOND = """
import os, sys, numpy, uzone
name, number = sys.argv[1], int(sys.argv[2])
seen = []
with uzone.AttachedPool(name, block="1M", register="cuda", progress=lambda *ready: seen.append(ready)) as pool:
    assert pool.wait_ready() == pool.ready == pool.nbytes == 16 << 20
    assert (pool.block_bytes, pool.block_count, pool.owner_alive) == (1 << 20, 16, True)
    assert pool.report()["registered_by"] == "CUDA"
    block = numpy.frombuffer(pool, numpy.uint8, pool.block_bytes, number * pool.block_bytes)
    assert (block == 5).all() and numpy.from_dlpack(pool).nbytes == pool.nbytes
    block[:] = 6
    try:
        pool.close()
    except BufferError:
        del block
assert pool.closed and seen[-1] == (16 << 20, 16 << 20)
"""


def test_a_second_process_attaches_by_name_and_is_told_blocks_by_number(stub_driver):
    owner = uzone.HostPool("16M", block="1M", shared=True)
    owner.wait_ready()
    block = owner.blocks(2)
    array = numpy.frombuffer(block, numpy.uint8)
    array[:] = 5
    env = {"UZONE_CUDA_LIBRARY": str(stub_driver)}
    done = run("-c", SECOND, owner.name, block.numbers[1], env=env)
    assert done.returncode == 0, done.stderr
    assert (array[: 1 << 20] == 5).all() and (array[1 << 20 :] == 6).all()
    calls = open(f"{stub_driver}.log").read()
    assert "unregister" in calls and "WRONG" not in calls, calls


def test_a_pool_is_attached_by_a_descriptor_and_the_number_of_its_owner():
    owner = uzone.HostPool("4M", block="1M", shared=True)
    here, there = socket.socketpair()
    socket.send_fds(here, [b"pool"], [owner.fileno()])
    _, [file], *_ = socket.recv_fds(there, 4, 1)
    view = uzone.AttachedPool(file, block="1M", owner=os.getpid())
    os.close(file)
    with owner.take() as block:
        numpy.frombuffer(block, numpy.uint8)[3] = 7
        assert memoryview(view)[(block.number << 20) + 3] == 7
    with pytest.raises(uzone.InputError):
        uzone.AttachedPool(0, block="1M")
    for name in ("/dev/null", "/proc/4194305/fd/3", owner.name + "99"):
        with pytest.raises(uzone.Error):
            uzone.AttachedPool(name, block="1M")


def test_a_pool_that_is_not_shared_has_no_name(pool):
    assert pool.name is None
    with pytest.raises(uzone.NotSupportedError):
        pool.fileno()


def test_progress_is_told_in_order_up_to_the_end():
    seen = []
    with uzone.HostPool("16M", block="1M", piece="2M", progress=lambda *now: seen.append(now)) as pool:
        pool.wait_ready()
    assert [of for _, of in seen] == [16 << 20] * 8
    assert [ready for ready, _ in seen] == [part << 21 for part in range(1, 9)]


def test_an_exception_of_progress_is_printed_and_ends_nothing():
    script = """
import uzone
def progress(ready, nbytes):
    raise RuntimeError("of progress")
uzone.HostPool("4M", block="1M", start="eager", progress=progress).take()
"""
    done = run("-c", script)
    assert done.returncode == 0 and "RuntimeError: of progress" in done.stderr


def test_a_driver_registers_in_the_context_that_is_given(stub_driver):
    Path(f"{stub_driver}.orders").write_text("")
    script = f"""
import ctypes, uzone
driver = ctypes.CDLL({str(stub_driver)!r})
try:
    uzone.HostPool("2M", register="cuda")
except uzone.NotSupportedError:
    pass
context = ctypes.c_void_p()
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
with uzone.HostPool("2M", register="cuda", context=context.value, start="eager") as pool:
    assert pool.ready == 2 << 20
"""
    done = run("-c", script, env={"UZONE_CUDA_LIBRARY": str(stub_driver)})
    assert done.returncode == 0, done.stderr
    with pytest.raises(uzone.InputError):
        uzone.HostPool("2M", register="mlock", context=1)


def test_clearing_and_filling_take_a_share_of_the_cpus():
    with uzone.HostPool("4M", block="1M", clear=10, spare_cpus=50) as pool:
        for _ in range(6):
            with pool.take() as block:
                array = numpy.frombuffer(block, numpy.uint8)
                assert not array.any()
                array[:] = 1
                del array
    for percent in (0, 101):
        with pytest.raises(uzone.InputError):
            uzone.HostPool("1M", block=4096, clear=percent)
