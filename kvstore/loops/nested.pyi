from collections.abc import Sequence

from typing_extensions import Buffer

from kvstore.loops.shapes import NestedColumn, NestedMade, NestedNode

def encode_nested(
    shape: Sequence[NestedNode], columns: Sequence[NestedColumn], count: int, most: int
) -> tuple[bytes, bytes] | None: ...
def decode_nested(
    shape: Sequence[NestedNode],
    valid: Buffer | None,
    offsets: Buffer,
    data: Buffer,
    first: int,
    count: int,
    most: int,
    where: str,
) -> list[NestedMade]: ...
