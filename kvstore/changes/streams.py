"""Streams and generations: parts of the change index that consumers read in parallel, and the time
for which a division is in force.
"""

from __future__ import annotations

import bisect
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kvstore.base.arguments import integer
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.codec.json import JsonObject
from kvstore.engine.api import WriteBatch
from kvstore.errors import CorruptionError
from kvstore.limits import STREAMS_MAX
from kvstore.mvcc.meta import Meta

# --------------------------------------------------------------------------------------------------
# Streams: parts of the change index that consumers read in parallel.
#
#     stream id := | token u64 | random 38 bits | position 22 bits | version 4 bits |    big-endian
#
# The token of a key is a 64-bit hash, and the generation in force assigns tokens to streams. Ids
# sort by token, so neighbouring streams lie together. The random bits keep the streams of two
# generations apart.
#
# Invariants
# 1. The token of a key never changes: it is part of the format.
# 2. `CONTROL_STREAM` is in every generation. If it is the only stream it takes every change, and no
#    key is hashed. Otherwise it takes range deletes, imports and reverts, which concern many
#    tokens.
#
# Source: ScyllaDB's CDC stream ids.

TOKEN_BYTES: Final = 8
TOKEN_MAX: Final = (1 << 64) - 1
RANDOM_BITS: Final = 38
POSITION_BITS: Final = 22
VERSION_BITS: Final = 4
STREAM_VERSION: Final = 1
STREAM_ID_BYTES: Final = 16


class StreamFields(NamedTuple):
    """The fields of a stream id."""

    token: int
    random: int
    position: int


def encode_stream(fields: StreamFields) -> bytes:
    """The 16 bytes of a stream id."""
    token, random, position = fields
    assert token <= TOKEN_MAX
    assert random < 1 << RANDOM_BITS
    assert position < 1 << POSITION_BITS
    packed = ((token << RANDOM_BITS | random) << POSITION_BITS | position) << VERSION_BITS
    return (packed | STREAM_VERSION).to_bytes(STREAM_ID_BYTES, "big")


def decode_stream(stream: bytes) -> StreamFields:
    """The fields of a stream id. Raises `CorruptionError` on other bytes."""
    packed = int.from_bytes(stream, "big")
    if len(stream) != STREAM_ID_BYTES or packed & (1 << VERSION_BITS) - 1 != STREAM_VERSION:
        raise CorruptionError(f"stream id {stream.hex()}", "not a stream id of version 1")
    packed >>= VERSION_BITS
    position = packed & (1 << POSITION_BITS) - 1
    packed >>= POSITION_BITS
    return StreamFields(packed >> RANDOM_BITS, packed & (1 << RANDOM_BITS) - 1, position)


CONTROL_STREAM: Final = encode_stream(StreamFields(0, 0, 0))


def token_bytes(key: bytes) -> bytes:
    """The token of a key, as a stream id begins: 64 bits of the key's BLAKE2b hash. 0.7 us."""
    return hashlib.blake2b(key, digest_size=TOKEN_BYTES).digest()


# --------------------------------------------------------------------------------------------------
# Generations: the division of tokens among streams, and the time for which it is in force.
#
#     generation/<opened at, 16 hex> := streams [id hex], in the order of their tokens
#
# A stream takes the tokens above its predecessor's token and up to its own, so the streams of a
# generation split the ring. A generation is in force from the time it was opened until the next one
# opens: `opened_at <= t < closed_at`.
#
# Invariants
# 1. A generation is durable before the first commit that uses it, and opens above `upper`. So no
#    commit falls into the wrong generation, and no write is refused.
# 2. The generations of a store follow each other without a gap; the last one is open.
# 3. The timestamp of a change alone decides its generation.
#
# Source: ScyllaDB's CDC generations.

PREFIX: Final = "generation/"


@dataclass(frozen=True, slots=True)
class Generation:
    """A set of streams and the time it is in force: `opened_at <= t < closed_at`.

    `streams` take the changes of keys, `control` takes all other changes. A generation of one
    stream uses it for both. `closed_at` is None while the generation is open.
    """

    opened_at: Timestamp
    closed_at: Timestamp | None
    streams: tuple[bytes, ...]
    control: bytes = CONTROL_STREAM
    _tokens: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    @property
    def is_split(self) -> bool:
        """Whether keys are spread over streams of their own."""
        return len(self.streams) > 1

    @property
    def last(self) -> int:
        """The last timestamp of the generation."""
        return TIMESTAMP_MAX if self.closed_at is None else self.closed_at - 1

    def stream_of(self, key: bytes) -> bytes:
        """The stream that takes the changes of `key`."""
        return self.streams[self.positions([key])[0]] if self.is_split else self.control

    def positions(self, keys: Iterable[bytes]) -> list[int]:
        """The index of each key's stream in `streams`, for a split generation only. 1 us a key."""
        return [bisect.bisect_left(self._tokens, token_bytes(key)) for key in keys]

    def every_stream(self) -> tuple[bytes, ...]:
        """All streams that may hold entries, the control stream first."""
        return (self.control, *self.streams) if self.is_split else self.streams


def new_streams(count: int, random_bits: int) -> tuple[bytes, ...]:
    """Ids of `count` streams that split the ring evenly; a single stream is the control stream."""
    if count == 1:
        return (CONTROL_STREAM,)
    return tuple(
        encode_stream(StreamFields((index + 1) * (TOKEN_MAX + 1) // count - 1, random_bits, index))
        for index in range(count)
    )


def generation(opened_at: int, streams: Sequence[bytes]) -> Generation:
    """An open generation of the given streams."""
    tokens = tuple(stream[:TOKEN_BYTES] for stream in streams)
    return Generation(Timestamp(opened_at), None, tuple(streams), _tokens=tokens)


class GenerationWindow(NamedTuple):
    """The times `(since, upto]`, all of which lie in one generation."""

    generation: Generation
    since: int
    upto: int


class Generations:
    """The generations of one store. A reader may keep the tuple of `all()`, which never changes.

    Callers of the methods that write hold the commit lock.
    """

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self.reload()

    def reload(self) -> None:
        """Take the records as they are stored: another process may have written them."""
        found = [_read(opened_at, record) for opened_at, record in self._meta.numbered(PREFIX)]
        self._show(_closed(found or [generation(0, (CONTROL_STREAM,))]))

    def _show(self, found: tuple[Generation, ...]) -> None:
        self._all = found
        is_single = not found[-1].is_split
        self.single_from = found[-1].opened_at if is_single else TIMESTAMP_MAX + 1
        """The time from which on all changes go to the control stream. No commit has the time of a
        store whose open generation is split."""

    def all(self) -> tuple[Generation, ...]:
        """All stored generations, oldest first."""
        return self._all

    @property
    def current(self) -> Generation:
        """The open generation."""
        return self._all[-1]

    def at(self, timestamp: int) -> Generation:
        """The generation in force at `timestamp`: the newest in nearly all calls."""
        newest = self._all[-1]
        return newest if timestamp >= newest.opened_at else self._all[_place(self._all, timestamp)]

    def windows(self, *, since: int, upto: int) -> Iterator[GenerationWindow]:
        """The parts of `(since, upto]` that lie in one generation each, oldest first. Costs a
        search, and the parts."""
        stored = self._all
        for found in islice(stored, _place(stored, since + 1), None):
            if since >= upto:
                break
            yield GenerationWindow(found, since, min(upto, found.last))
            since = found.last

    def stage_next(self, batch: WriteBatch, opened_at: int, *, count: int) -> Generation:
        """Add the record of a generation of `count` streams to an engine batch."""
        integer(1, STREAMS_MAX).check("streams", count)
        opened = generation(opened_at, new_streams(count, secrets.randbits(RANDOM_BITS)))
        if self.current.opened_at == 0:
            # The first generation of a store is written when it gets a successor.
            self._meta.stage(batch, _name(0), _fields(self.current))
        self._meta.stage(batch, _name(opened_at), _fields(opened))
        return opened

    def publish(self, opened: Generation) -> None:
        """Show a generation whose record is durable. The generation before it closes at its
        time."""
        *older, current = self._all
        self._show((*older, *_closed([current, opened])))

    def stage_trim(self, batch: WriteBatch, since: int) -> None:
        """Add the removal of the generations that ended at or below `since`. `forget` drops them
        once the batch is written."""
        for found in self._all:
            if found.last <= since:
                self._meta.stage_delete(batch, _name(found.opened_at))

    def forget(self, since: int) -> None:
        """Drop the generations that `stage_trim` has removed."""
        self._show(tuple(found for found in self._all if found.last > since))


def _read(opened_at: int, record: JsonObject) -> Generation:
    """A generation from its record. Raises `CorruptionError` unless its streams split the ring."""
    streams = [record.unhexed(stream, name="streams") for stream in record.items_of("streams", str)]
    try:
        tokens = [decode_stream(stream).token for stream in streams]
    except CorruptionError as error:
        raise record.damaged(f"{error.where} is {error.problem}") from error
    is_whole = streams == [CONTROL_STREAM] or (
        len(streams) > 1
        and tokens[-1] == TOKEN_MAX
        and all(before < after for before, after in pairwise(tokens))
    )
    if not is_whole:
        raise record.damaged("its streams do not split the ring of tokens")
    return generation(opened_at, streams)


def _place(stored: Sequence[Generation], timestamp: int) -> int:
    """The place of the generation in force at `timestamp`. The oldest counts for all times before
    it too."""
    return max(bisect.bisect_right(stored, timestamp, key=attrgetter("opened_at")) - 1, 0)


def _closed(found: Sequence[Generation]) -> tuple[Generation, ...]:
    """The generations, each closed at the time at which the next one opens."""
    ends = [*(later.opened_at for later in found[1:]), None]
    return tuple(replace(each, closed_at=end) for each, end in zip(found, ends, strict=True))


def _name(opened_at: int) -> str:
    return f"{PREFIX}{opened_at:016x}"


def _fields(found: Generation) -> dict[str, Any]:
    return {"streams": [stream.hex() for stream in found.streams]}
