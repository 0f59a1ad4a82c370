from collections.abc import Callable, Iterator, Mapping

from typing_extensions import Self

from kvstore.loops.shapes import Ahead, Buffers, Nearby, Walker

def collect(
    source: Iterator[tuple[bytes, bytes]],
    keys: list[bytes],
    values: list[bytes],
    count: int,
    bytes_max: int,
) -> bool: ...

class Entries:
    def __init__(self, reader: Walker, *, reverse: bool, bound: bytes | None = None) -> None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> tuple[bytes, bytes]: ...

class Live:
    last: bytes | None
    ahead: Ahead | None
    def __init__(
        self,
        as_of: int,
        stamps: Mapping[bytes, tuple[int, int]],
        nearby: Callable[[bytes], Nearby] | None = None,
    ) -> None: ...
    def pass_over(
        self, source: Iterator[tuple[bytes, bytes]], count: int, bytes_max: int = ...
    ) -> bool: ...
    def end(self) -> None: ...

class LiveRows(Live):
    def found(self) -> tuple[list[bytes], list[bytes]]: ...

class LiveColumns(Live):
    @property
    def rows(self) -> int: ...
    @property
    def size(self) -> int: ...
    def found(self) -> list[Buffers]: ...
