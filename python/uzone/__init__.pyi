from collections.abc import Callable
from os import PathLike
from typing import Any, Literal, Self, TypeAlias, TypedDict, final

from typing_extensions import Buffer, CapsuleType

_Path: TypeAlias = str | PathLike[str]
_Size: TypeAlias = int | str
_Range: TypeAlias = slice | range
_Progress: TypeAlias = Callable[[int, int], object]
_Register: TypeAlias = (
    Literal["cuda", "hip", "mlock"]
    | tuple[Callable[[int, int], object], Callable[[int], object]]
)

class Error(Exception): ...
class InputError(Error, ValueError): ...
class OutOfMemoryError(Error, MemoryError): ...
class NotSupportedError(Error, OSError): ...
class PermissionDeniedError(Error, PermissionError): ...
class NotFoundError(Error, FileNotFoundError): ...
class TimedOutError(Error, TimeoutError): ...
class DamageError(Error, OSError): ...
class IoError(Error, OSError): ...

class _ImageStats(TypedDict):
    faults: int
    on_demand: int
    around: int
    populated: int
    evicted: int
    bad: int

class _PoolReport(TypedDict):
    nbytes: int
    block_bytes: int
    ready: int
    huge: int | None
    small: int | None
    node: int | None
    registered_by: str
    pieces: int
    populating: float
    registering: float
    longest_piece: float
    first_ready: float | None
    all_ready: float | None
    notes: list[str]

class _PoolStats(TypedDict):
    blocks: int
    used: int
    zero: int
    dirty: int
    in_work: int
    bad: int
    cleared_ahead: int
    cleared_on_demand: int
    cleared_on_release: int

@final
class Image:
    @property
    def name(self) -> str: ...
    @property
    def root(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mode(self) -> Literal["r", "c"]: ...
    @property
    def is_raw(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    def verify(self, range: _Range | None = None, progress: _Progress | None = None) -> None: ...
    def populate(self, range: _Range | None = None, progress: _Progress | None = None) -> None: ...
    def evict(self, range: _Range | None = None) -> int: ...
    def stats(self) -> _ImageStats: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Packed:
    @property
    def root(self) -> str: ...
    @property
    def image_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def zero_pages(self) -> int: ...

def open(
    path: _Path,
    root: str | None = None,
    mode: Literal["r", "c"] = "r",
    *,
    disk_cache: _Path | None = None,
) -> Image: ...
def pack(
    source: _Path | Buffer,
    path: _Path,
    *,
    codec: Literal["zstd", "lz4", "none"] = "zstd",
    level: int | None = None,
    frame: _Size = "64K",
    parent: _Path | None = None,
    progress: _Progress | None = None,
) -> Packed: ...
def unpack(
    source: _Path,
    path: _Path,
    *,
    root: str | None = None,
    progress: _Progress | None = None,
) -> None: ...

@final
class HostPool:
    def __new__(
        cls,
        size: _Size,
        block: _Size = "2M",
        register: _Register | None = None,
        *,
        pages: Literal["huge", "small"] | _Size = "huge",
        node: int | Literal["interleaved"] | None = None,
        clear: Literal["ahead", "take", "release", "never"] = "ahead",
        start: Literal["background", "eager", "demand"] = "background",
        piece: _Size = "64M",
        pause: float | None = None,
        all_or_nothing: bool = False,
    ) -> Self: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def block_count(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def buffer(self) -> memoryview: ...
    @property
    def closed(self) -> bool: ...
    def take(self, timeout: float | None = None) -> Block: ...
    def try_take(self) -> Block | None: ...
    def blocks(self, count: int, timeout: float | None = None) -> Block: ...
    def wait_ready(self, nbytes: _Size | None = None, timeout: float | None = None) -> int: ...
    def report(self) -> _PoolReport: ...
    def stats(self) -> _PoolStats: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Block:
    @property
    def number(self) -> int: ...
    @property
    def numbers(self) -> range: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...
    def free(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

__version__: str
__all__ = [
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
