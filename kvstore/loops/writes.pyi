from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
def put_in_pieces(
    next_batch: Callable[[], Any],
    points: Mapping[bytes, bytes | None],
    suffix: bytes,
    family: Any,
    rows_max: int,
    bytes_max: int,
) -> Iterator[Any]: ...
