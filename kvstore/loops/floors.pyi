from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.loops.contract import BackSeeker, LimitNode

def find_floors(
    reader: BackSeeker,
    check: Callable[[Any], None],
    places: Sequence[bytes],
    times: Sequence[int],
    least: bytes,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    steps: int,
    bytes_max: int,
) -> list[tuple[bytes, bytes] | None] | None: ...
