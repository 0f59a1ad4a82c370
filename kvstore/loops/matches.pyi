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
