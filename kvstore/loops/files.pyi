from collections.abc import Callable, Mapping

from kvstore.loops.shapes import Buffers, Nearby

class Files:
    def __init__(self, runs: list[list[tuple[int, int, int, int, bool]]]) -> None: ...

class Pass:
    rows: int
    entries: int
    blocks: int
    @property
    def size(self) -> int: ...
    def __init__(
        self,
        files: Files,
        begin: bytes,
        end: bytes | None,
        as_of: int,
        stamps: Mapping[bytes, tuple[int, int]],
        nearby: Callable[[bytes], Nearby] | None = None,
        *,
        keys_only: bool = False,
        whole: bool = False,
    ) -> None: ...
    def take(self, rows: int, bytes_max: int, entries: int) -> bool: ...
    def found(self) -> Buffers: ...
    def found_rows(self) -> tuple[list[bytes], list[bytes]]: ...
