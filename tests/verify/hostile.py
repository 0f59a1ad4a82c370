"""Crafted entries of a store's families, and the answers of every way to read to each."""

from __future__ import annotations

import json
import pickle
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from kvstore.changes.index import FIRST_STREAM, OP_DELETE, OP_IMPORT, OP_PUT, column, pack
from kvstore.changes.streams import StreamFields, encode_stream
from kvstore.codec.keys import TERMINATOR, TOMBSTONE, VALUE, encode_change_key, encode_suffix, frame
from kvstore.engine.api import CHANGES, DATA, RANGES
from kvstore.errors import KVStoreError
from kvstore.limits import KEY_BYTES_MAX
from tests.harness.bounds import bounds
from tests.harness.crafted import Stored, crafted_store, outcome, outcomes, upkeep
from tests.harness.sound import WHOLE_ROWS

KEYS = [b"a", b"b\x00c", b"i", b"large", b"row0001"]
TAIL = encode_suffix(3) + VALUE
ENTRIES_OF_ONE = [b"k" * n for n in range(1, WHOLE_ROWS + 1)]


def data_keys() -> dict[str, bytes]:
    """Keys that no writer puts into `data`."""
    return {
        "empty": b"",
        "short": b"m\x00\x01" + TAIL[:8],
        "a tail alone": TAIL,
        "terminator missing": b"m" * 20,
        "terminator of another kind": b"m\x00\x02" + TAIL,
        "raw zero": b"m\x00m" + TERMINATOR + TAIL,
        "raw zero at the end": b"m\x00" + TERMINATOR + TAIL,
        "kind 2": frame(b"m") + TAIL[:8] + b"\x02",
        "kind 255": frame(b"a") + encode_suffix(1) + b"\xff",
        "bytes behind the tail": frame(b"a") + TAIL + b"\x00",
        "a tail twice": frame(b"a") + TAIL + TAIL,
        "half a suffix": frame(b"a") + TAIL[4:],
        "import 0": frame(b"m") + bytes(8) + VALUE,
        "an unknown import": frame(b"m") + bytes(7) + b"\x07" + VALUE,
        "a key too long": frame(b"m" * (KEY_BYTES_MAX + 1)) + TAIL,
        "a time above upper": frame(b"a") + encode_suffix(1 << 62) + VALUE,
        "time 0": frame(b"m") + encode_suffix(0) + VALUE,
        "a tombstone with a value": frame(b"a") + encode_suffix(1) + TOMBSTONE,
    }


def ranges() -> dict[str, tuple[bytes, bytes]]:
    """Entries that no writer puts into `ranges`."""
    return {
        "empty": (b"", b""),
        "short": (b"m", b"n"),
        "no frame": (b"mmm" + TAIL[:8], b"n"),
        "raw zero": (b"m\x00m" + TERMINATOR + TAIL[:8], b"n"),
        "an end too low": (frame(b"m") + TAIL[:8], b"m"),
        "no end": (frame(b"m") + TAIL[:8], b""),
        "a raw end": (frame(b"m") + TAIL[:8], b"n\x00"),
        "an import": (frame(b"m") + bytes(7) + b"\x07", b"n"),
        "a time above upper": (frame(b"m") + encode_suffix(1 << 62), b"n"),
    }


def change_entries() -> dict[str, tuple[bytes, bytes]]:
    """Entries that no writer puts into `changes`. They replace the entries of the commits at 2 and
    later."""
    at = encode_change_key(FIRST_STREAM, 2)
    late = encode_change_key(FIRST_STREAM, LATE)
    one = column([b"k"]), column([b"v"])
    many = column(ENTRIES_OF_ONE), column([b"v"] * WHOLE_ROWS)
    whole = pack(bytes([OP_PUT]) * WHOLE_ROWS, *many)
    falling, endless = bytearray(whole), bytearray(whole)
    struct.pack_into("<i", falling, 28 + 4 * 5, -1)
    struct.pack_into("<i", endless, 28 + 4 * 5, 1 << 30)
    deletes = pack(bytes([OP_DELETE]) * WHOLE_ROWS, many[0], column([b""] * WHOLE_ROWS))
    return {
        "a short key": (FIRST_STREAM + b"\x00", whole),
        "a long key": (late + b"\x00", whole),
        "a time beyond all": (FIRST_STREAM + b"\xff" * 12, whole),
        "nothing": (late, b""),
        "junk": (late, b"junk" * 20),
        "a header alone": (late, whole[:28]),
        "falling offsets": (late, bytes(falling)),
        "offsets that leave the entry": (late, bytes(endless)),
        "an unknown operation": (late, pack(bytes([99]), *one)),
        "unknown operations": (late, pack(bytes([99]) * WHOLE_ROWS, *many)),
        "an import of no id": (late, pack(bytes([OP_IMPORT]), *one)),
        "an import nobody knows": (
            late,
            pack(bytes([OP_IMPORT]), column([b"12345678"]), column([b""])),
        ),
        "a block larger than it is": (late, _lying(1 << 31)),
        "a block a little larger than it is": (late, _lying(1)),
        "keys that are not in the versions": (late, deletes),
        "chunk 1 alone": (encode_change_key(FIRST_STREAM, LATE, 1), whole),
        "a chunk that is not the last": (late, pack(bytes([OP_PUT]), *one, is_last=False)),
        "the same commit again": (at[:-4] + b"\x00\x00\x00\x01", whole),
        "an unknown stream": (encode_change_key(_STREAM, LATE), whole),
        "a changeset beyond all": (late, pack(bytes([OP_PUT]), *one, changeset=(1, (1 << 64) - 1))),
    }


LATE = 13
"""The time of a commit that every window of changes has."""
_STREAM = encode_stream(StreamFields(7, 7, 7))


def _lying(more: int) -> bytes:
    packed = bytearray(pack(bytes([OP_PUT]), column([b"k"]), column([b"v" * 40_000])))
    (size,) = struct.unpack_from("<I", packed, 8)
    struct.pack_into("<I", packed, 8, size + more)
    return bytes(packed)


def cases(sound: Stored) -> Iterator[tuple[str, Stored]]:
    """Each crafted store, with a name."""
    for name, key in data_keys().items():
        yield f"data: {name}", {**sound, DATA: {**sound[DATA], key: b"value"}}
    for name, (key, value) in ranges().items():
        yield f"ranges: {name}", {**sound, RANGES: {**sound[RANGES], key: value}}
    for name, (key, value) in change_entries().items():
        yield f"changes: {name}", {**sound, CHANGES: {**sound[CHANGES], key: value}}


def judgement(stored: Stored) -> dict[str, str]:
    """The outcome of opening if it fails, or of each way to read, to verify and to write: a short
    answer, or an error."""

    def judge() -> dict[str, str]:
        with crafted_store(stored) as store:
            found = {name: _shown(answer) for name, answer in outcomes(store, KEYS).items()}
            found["verify"] = "; ".join(map(str, store.verify().problems))
            for name, write in upkeep(store):
                answer = outcome(write)
                found[f"write: {name}"] = (
                    _shown(answer) if isinstance(answer, KVStoreError) else "done"
                )
            found["verify again"] = str(store.verify().ok)
            return found

    with bounds(WHOLE_ROWS_MIN=WHOLE_ROWS):
        found = outcome(judge)
    return found if isinstance(found, dict) else {"open": _shown(found)}


def _shown(answer: object) -> str:
    return str(answer) if isinstance(answer, KVStoreError) else repr(answer)


def judgements(sound: Stored) -> dict[str, dict[str, str]]:
    """The outcomes of all cases, and of the sound store."""
    return {"sound": judgement(sound)} | {n: judgement(stored) for n, stored in cases(sound)}


if __name__ == "__main__":
    json.dump(judgements(pickle.loads(Path(sys.argv[1]).read_bytes())), sys.stdout)
