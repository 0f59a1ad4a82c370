from collections.abc import Sequence

from typing_extensions import Buffer

from kvstore.loops.shapes import Column, Made

def encode_rows(
    number: int, columns: Sequence[Column], count: int
) -> tuple[bytes, bytes] | None: ...
def decode_rows(
    offsets: Buffer,
    data: Buffer,
    first: int,
    count: int,
    number: int,
    widths: Sequence[int],
    wanted: Sequence[int],
    where: str,
) -> list[Made]: ...
