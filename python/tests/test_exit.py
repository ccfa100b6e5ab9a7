"""The end of the interpreter with objects that are still alive."""

import pytest
from conftest import run

ALIVE = """
import threading, numpy, uzone

image = uzone.open({path!r})
array = numpy.frombuffer(image, dtype=numpy.uint8)
idle = uzone.open({path!r})
pool = uzone.HostPool("64M", block="1M"{register})
block = pool.take()
view = numpy.frombuffer(block, dtype=numpy.uint8)

class Last:
    def __del__(self):
        # Pages that no thread has touched are still right.
        assert self.array[4096 * 700] == self.expected
        self.view[:] = 1
        print("touched", flush=True)

last = Last()
last.array, last.view, last.expected = array, view, {expected}

def touch():
    while True:
        array[:: 4096].sum()

threading.Thread(target=touch, daemon=True).start()
print("alive", flush=True)
"""


@pytest.mark.parametrize("register", ["", ', register="cuda"'])
def test_the_interpreter_ends_with_images_and_pools_in_the_globals(
    image_path, numbers, stub_driver, register
):
    expected = numbers.view("uint8")[4096 * 700]
    script = ALIVE.format(path=str(image_path), register=register, expected=expected)
    for _ in range(5):
        done = run("-c", script, env={"UZONE_CUDA_LIBRARY": str(stub_driver)}, timeout=60)
        assert done.returncode == 0, done
        assert "alive" in done.stdout and done.stderr == "", done


def test_functions_that_register_are_called_until_the_interpreter_ends_and_not_after():
    script = """
import numpy, uzone
registered = set()
def register(address, nbytes): registered.add(address)
def unregister(address):
    registered.remove(address)
    print("unregistered", flush=True)
pool = uzone.HostPool("4M", block="1M", register=(register, unregister), piece="1M")
pool.wait_ready()
used = uzone.HostPool("4M", block="1M", register=(register, lambda address: None), piece="1M")
array = numpy.frombuffer(used, dtype=numpy.uint8)
"""
    done = run("-c", script, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done
    assert done.stdout.count("unregistered") == 4, done


def test_nothing_is_opened_once_the_interpreter_ends():
    script = """
import atexit
atexit.register(lambda: use())
import uzone
def use():
    try:
        uzone.HostPool("1M", block=4096)
    except uzone.InputError as error:
        print(error)
"""
    done = run("-c", script, timeout=60)
    assert "the interpreter is ending" in done.stdout, done
