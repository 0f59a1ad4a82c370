from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.loops.contract import Column, Settable

class Puts:
    _points: dict[bytes, bytes | None]
    _ranges: list[tuple[bytes, bytes]]
    _size: int
    expiring: dict[bytes, Any] | None
    def __init__(self, size_max: int = ...) -> None: ...
    @property
    def points(self) -> Mapping[bytes, bytes | None]: ...
    @property
    def ranges(self) -> Sequence[tuple[bytes, bytes]]: ...
    @property
    def size(self) -> int: ...
    @property
    def size_max(self) -> int: ...
    def put(self, key: bytes, value: bytes) -> None: ...
    def put_otherwise(self, key: bytes, value: bytes) -> None: ...

def put_all(
    put: Callable[[bytes, bytes, Any], None],
    points: Mapping[bytes, bytes | None],
    suffix: bytes,
    family: Any,
) -> None: ...
def set_rows(
    target: Settable, keys: Column, values: Column, count: int, suffixes: bytes, kinds: bytes | None
) -> tuple[int, Exception | None]: ...
