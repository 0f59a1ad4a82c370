"""Epochs: sealed stretches of a domain's changesets, with the number of their events.

A consumer that received as many events as the epochs count, without a gap between epochs, has all
events. At a quiescent epoch no changeset was half done.

    epochs/<run, 16 hex> := domain, begin, count, quiet, columns      one record per run of epochs
    columns := base64 of | raw bytes u32 | lz4 of four columns: ends, closing times, events, flags |
    column  := count i64, as differences, byte-shuffled: first bytes of all, then second ...
    flags   := bit 0: quiescent | bit 1: ended (the domain ended; its open changesets were cut)

A bare put closes two epochs: its own, and an empty one that shows quiescence. Differences between
neighbours are small, and the shuffle puts their zero bytes together: the pair takes about 10 bytes.

Invariants
1. In a run the first epoch begins at `begin`, and each other epoch begins where the one before
   ended.
2. Runs are numbered in the order of time; `quiet` is the last time at which no changeset was open.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kvstore.changes.changeset import DOMAIN_MAX
from kvstore.changes.lz4 import CODEC, unpack_block
from kvstore.codec.json import JsonObject
from kvstore.meta import timestamp_of
from kvstore.timestamp import TIMESTAMP_MAX, Timestamp

PREFIX: Final = "epochs/"
FLAG_QUIESCENT: Final = 1
FLAG_ENDED: Final = 2
FIELDS: Final = 4
"""Numbers per epoch: end, closing time, events, flags."""

FEW: Final = 4
"""Runs of at most this many epochs are not compressed: four epochs take 130 bytes, and 80 bytes
with compression."""

_RAW_BYTES = struct.Struct("<I")
_DOMAIN_DIGITS = 16
_LENGTH_FULL = 15
_SERIAL_END_MAX = (1 << 64) - 1


class Epoch(NamedTuple):
    """The serials `[begin, end)` of a domain, complete with `events` change events.

    The timestamps of the events lie below `closed_at`. `quiescent`: no changeset was open then, so
    no changeset is half done in the state at `closed_at - 1`. `ended`: the store was closed or its
    process died, and this epoch holds the events of the changesets that were still open.
    """

    domain: int
    begin: int
    end: int
    events: int
    closed_at: Timestamp
    quiescent: bool
    ended: bool = False


def run_name(number: int) -> str:
    """The name of a run's record in `meta`."""
    return f"{PREFIX}{number:016x}"


def pack_run(domain: int, begin: int, numbers: Sequence[int], *, quiet: int) -> dict[str, Any]:
    """The record of a run; `numbers` has `FIELDS` items per epoch."""
    count = len(numbers) // FIELDS
    packed = _few_columns(numbers) if count <= FEW else _columns(numbers)
    return {
        "domain": f"{domain:016x}",
        "begin": begin,
        "count": count,
        "quiet": quiet,
        "columns": base64.b64encode(_RAW_BYTES.pack(len(numbers) * 8) + packed).decode(),
    }


def _columns(numbers: Sequence[int]) -> bytes:
    table = np.array(numbers, dtype=np.uint64).view(np.int64).reshape(-1, FIELDS)
    steps = np.diff(table, axis=0, prepend=np.zeros((1, FIELDS), np.int64)).T
    raw = np.ascontiguousarray(steps).view(np.uint8).reshape(-1, 8).T.tobytes()
    packed: bytes = pa.compress(raw, codec=CODEC, asbytes=True)
    return packed


def _few_columns(numbers: Sequence[int]) -> bytes:
    """The columns without numpy and Arrow: a process that puts one key never imports them."""
    if not numbers:
        return b""
    steps = [
        (number - before) % (1 << 64)
        for field in range(FIELDS)
        for before, number in pairwise([0, *numbers[field::FIELDS]])
    ]
    raw = struct.pack(f"<{len(steps)}Q", *steps)
    return _literal_block(b"".join(raw[at::8] for at in range(8)))


def _literal_block(raw: bytes) -> bytes:
    """A block of LZ4 that holds `raw` as it is. A length from 15 on takes more bytes."""
    length = len(raw)
    if length < _LENGTH_FULL:
        return bytes([length << 4]) + raw
    more, last = divmod(length - _LENGTH_FULL, 255)
    return bytes([_LENGTH_FULL << 4, *[255] * more, last]) + raw


def _unpack_few(packed: bytes, count: int) -> list[list[int]] | None:
    """The columns that `_few_columns` has packed; None for a block of another form."""
    if not count:
        return [[] for _ in range(FIELDS)]
    numbers = count * FIELDS
    raw = packed[max(len(packed) - 8 * numbers, 0) :]
    if len(raw) != 8 * numbers or packed != _literal_block(raw):
        return None
    steps = struct.unpack(f"<{numbers}Q", b"".join(raw[at::numbers] for at in range(numbers)))
    columns = (steps[at : at + count] for at in range(0, numbers, count))
    return [[total % (1 << 64) for total in accumulate(column)] for column in columns]


def record_of(epoch: Epoch) -> dict[str, Any]:
    """The record of a run that is one epoch."""
    flags = FLAG_QUIESCENT * epoch.quiescent | FLAG_ENDED * epoch.ended
    numbers = (epoch.end, epoch.closed_at, epoch.events, flags)
    return pack_run(epoch.domain, epoch.begin, numbers, quiet=epoch.closed_at)


def unpack_run(fields: JsonObject) -> list[Epoch]:
    """The epochs of a record. Raises `CorruptionError` where the record contradicts itself."""
    domain, begin, _ = run_head(fields)
    count = fields.integer("count")
    try:
        stored = base64.b64decode(fields.field("columns", str), validate=True)
        (size,) = _RAW_BYTES.unpack_from(stored)
    except (ValueError, struct.error) as error:
        raise fields.damaged(f"not a run of epochs: {error}") from error
    if size != count * FIELDS * 8:
        raise fields.damaged(f"{size} bytes for {count} epochs")
    packed = stored[_RAW_BYTES.size :]
    columns = _unpack_few(packed, count) if count <= FEW else None
    if columns is None:
        raw = unpack_block(packed, size, where=fields.where)
        shuffled = np.frombuffer(raw, np.uint8).reshape(8, -1).T
        steps = np.ascontiguousarray(shuffled).view(np.int64).reshape(FIELDS, count)
        columns = np.cumsum(steps, axis=1).view(np.uint64).tolist()
    epochs = []
    for end, closed_at, events, flags in zip(*columns, strict=True):
        if closed_at > TIMESTAMP_MAX or flags > FLAG_QUIESCENT | FLAG_ENDED:
            raise fields.damaged(f"an epoch closed at {closed_at}, with flags {flags}")
        epochs.append(epoch_of(domain, begin, end, closed_at, events, flags))
        begin = end
    return epochs


def run_head(fields: JsonObject) -> tuple[int, int, int]:
    """Domain and first serial of a run's record, and its last quiet time."""
    domain = int.from_bytes(fields.hexed("domain"), "big")
    if len(fields["domain"]) != _DOMAIN_DIGITS or domain > DOMAIN_MAX:
        raise fields.damaged(f"no domain is {fields['domain']!r}")
    return domain, fields.integer("begin", most=_SERIAL_END_MAX), timestamp_of(fields, "quiet")


def epoch_of(domain: int, begin: int, end: int, closed_at: int, events: int, flags: int) -> Epoch:
    """An epoch from its stored numbers."""
    quiescent, ended = bool(flags & FLAG_QUIESCENT), bool(flags & FLAG_ENDED)
    return Epoch(domain, begin, end, events, Timestamp(closed_at), quiescent, ended)
