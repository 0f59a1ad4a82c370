from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from typing_extensions import Buffer

T = TypeVar("T")

def join(items: Sequence[bytes]) -> tuple[bytes, bytes] | None: ...
def join_writes(
    points: Mapping[bytes, bytes | None],
    ranges: Sequence[tuple[bytes, bytes]],
    longest: int,
    places: bytes,
    ops: bytes,
    word: int,
    changeset: tuple[int, int],
) -> bytes | None: ...
def cut(offsets: memoryview, data: Buffer) -> list[bytes]: ...
def arrange(items: Sequence[T], keys: Sequence[bytes]) -> list[T]: ...
def gather(
    source: Iterator[tuple[Any, ...]],
    rows: list[Any],
    count: int,
    bytes_max: int,
    first: int,
    last: int,
) -> int: ...
def tuples(kind: type[T], count: int, fields: Sequence[Any]) -> Iterator[T]: ...
def survey(
    body: Buffer, count: int, is_sequenced: bool, rules: bytes, where: str
) -> tuple[int, int, int, int]: ...
