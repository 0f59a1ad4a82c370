from collections.abc import Callable, Sequence
from typing import Any

from kvstore.loops.shapes import CellRead, KeyMade, KeyRead

class KeyMaker:
    def __init__(self, prefix: bytes, columns: Sequence[KeyMade]) -> None: ...
    def make(self, values: Sequence[Any]) -> bytes: ...
    def fits(
        self, entries: Sequence[bytes], rows: Sequence[dict[str, Any] | None], names: Sequence[str]
    ) -> list[bool]: ...

class RowDicts:
    def __init__(
        self,
        where: str,
        template: dict[str, Any],
        prefix: bytes,
        keys: Sequence[KeyRead],
        number: int,
        widths: Sequence[int],
        cells: Sequence[CellRead],
    ) -> None: ...
    def read(self, key: bytes, value: bytes) -> dict[str, Any] | None: ...
    def read_all(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        otherwise: Callable[[bytes, bytes], dict[str, Any]],
    ) -> list[dict[str, Any] | None]: ...

def row_keys(
    entries: Sequence[bytes],
    skip: int,
    columns: Sequence[tuple[int, int, bool, int]],
    prefix: bytes,
    where: str,
) -> list[bytes]: ...
