from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

class Puts:
    _points: dict[bytes, bytes | None]
    _ranges: list[tuple[bytes, bytes]]
    _size: int
    expiring: dict[bytes, Any] | None
    def __init__(self, whose: str = ..., size_max: int = ...) -> None: ...
    @property
    def whose(self) -> str: ...
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

class SmallCommits:
    def __init__(self, stream: bytes, word: int, ops: bytes) -> None: ...
    def put(
        self,
        put: Callable[[bytes, bytes, Any], None],
        writes: Puts,
        timestamp: int,
        changeset: tuple[int, int],
        data: Any,
        changes: Any,
    ) -> bool: ...

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
