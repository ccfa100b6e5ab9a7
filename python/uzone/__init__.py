"""
Host memory for accelerators, and images of memory as buffers
=============================================================

======================  ======================================================
``open(path)``          an image of memory, packed or raw, mapped lazily
``pack``, ``unpack``    write an image, and its bytes
``HostPool(size)``      a pool of blocks that a GPU reads and writes directly
``AttachedPool(name)``  the shared pool of another process
``Error``               the base of every exception of this package
======================  ======================================================

Images and blocks have the buffer protocol: ``numpy.frombuffer``,
``torch.frombuffer`` and ``memoryview`` use them without a copy.

Examples
--------
>>> import numpy, uzone
>>> packed = uzone.pack(numpy.arange(1 << 20), "numbers.uz")
>>> image = uzone.open("numbers.uz", root=packed.root)
>>> int(numpy.frombuffer(image, dtype=numpy.int64)[1000])
1000
"""

from ._uzone import (
    AttachedPool,
    Block,
    DamageError,
    Error,
    HostPool,
    Image,
    InputError,
    IoError,
    NotFoundError,
    NotSupportedError,
    OutOfMemoryError,
    Packed,
    PermissionDeniedError,
    TimedOutError,
    open,
    pack,
    unpack,
    __version__,
)

__all__ = [
    "AttachedPool",
    "Block",
    "DamageError",
    "Error",
    "HostPool",
    "Image",
    "InputError",
    "IoError",
    "NotFoundError",
    "NotSupportedError",
    "OutOfMemoryError",
    "Packed",
    "PermissionDeniedError",
    "TimedOutError",
    "open",
    "pack",
    "unpack",
]
