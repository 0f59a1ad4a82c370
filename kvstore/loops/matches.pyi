from array import array

from typing_extensions import Buffer

from kvstore.loops.shapes import Keys

def match(
    keys: Keys,
    times: Buffer,
    ops: Buffer,
    passed_op: int,
    label_keys: Keys,
    label_starts: Buffer,
    label_times: Buffer,
) -> tuple[array[int], array[int]]: ...
def runs_of(keys: Keys) -> array[int] | None: ...

class Neighbours:
    @property
    def is_over(self) -> bool: ...
    def __init__(self, places: Keys, stem_sizes: Buffer, is_behind: bool) -> None: ...
    def among(self, rows: Keys, is_last: bool = False) -> array[int]: ...
