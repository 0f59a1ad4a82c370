from collections.abc import Sequence

from typing_extensions import Buffer

from kvstore.loops.shapes import KeyColumn, Made

def encode_keys(
    prefix: bytes, columns: Sequence[KeyColumn], count: int
) -> tuple[bytes, bytes] | None: ...
def decode_keys(
    offsets: Buffer,
    data: Buffer,
    first: int,
    count: int,
    skip: int,
    columns: Sequence[tuple[int, int, bool, int]],
    where: str,
) -> tuple[list[Made], bytes]: ...
