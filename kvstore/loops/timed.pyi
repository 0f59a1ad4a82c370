from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import Buffer

from kvstore.loops.contract import Keys, LimitNode, Seeker

def find_timed(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    times: Buffer,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    age_max: int,
    steps: int,
    bytes_max: int,
) -> tuple[list[bytes | None], array[int]] | None: ...
def find_ordered(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Keys,
    starts: Buffer,
    times: Buffer,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    age_max: int,
    steps: int,
    bytes_max: int,
) -> tuple[array[int], bytes, array[int]] | None: ...
