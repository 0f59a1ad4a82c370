from collections.abc import Callable, Mapping, Sequence

from typing_extensions import Buffer

from kvstore.loops.shapes import Buffers, Keys, Nearby

class Files:
    def __init__(self, runs: list[list[tuple[int, int, int, int, bool]]]) -> None: ...

class Answers:
    is_given_up: bool
    def __init__(
        self,
        keys: Keys,
        starts: Buffer,
        times: Buffer,
        age_max: int,
        bytes_max: int,
        stretch: Callable[[bytes], tuple[bytes, bytes | None, Sequence[int]]] | None = None,
    ) -> None: ...
    def columns(self) -> tuple[Buffer, Buffer, Buffer]: ...

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
        answers: Answers | None = None,
    ) -> None: ...
    def take(self, rows: int, bytes_max: int, entries: int) -> bool: ...
    def found(self) -> Buffers: ...
    def found_rows(self) -> tuple[list[bytes], list[bytes]]: ...
