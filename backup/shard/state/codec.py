"""The bytes of a shard's state: whole states (rollups, in blob) and steps (diffs, in consensus).

Both are an envelope around JSON, which stays readable in an editor when something has gone wrong.

    magic    4 bytes  "KVSR" a rollup, "KVSD" a diff
    version  u16      of this format, big-endian
    crc32    u32      of the body, big-endian
    body     UTF-8    JSON, keys sorted, no spaces

    rollup body  {section: {key: value}, "chain": digest of the diff that led here}
    diff body    {"seqno", "previous", "rollup": [seqno, name], "link": digest of the diff before,
                  "set": {section: {key: value}}, "drop": {section: [key]}}

A *section* is a flat mapping: `head` for the scalars, and one for each mapping of the state;
batches are keyed by their lower bound. A diff names the newest rollup of the state it leads to, so
a reader that knows only the head can find that rollup.

`link` and `chain` make the diffs a chain: a diff that was changed, left out, or taken from another
history of the same shard does not link to its neighbours. The link of the first diff is empty.

The number `version` is kept as it is read: no command changes it.

Invariants
1. decode(encode(x)) == x, and applying diff(a, b) to a gives b.
2. A newer format, a wrong checksum and a foreign file are refused, each by an error of its own.
3. A state is followed only by a diff that links to its `step_digest`, the `chain` of a rollup.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, Final

from kvstore.backup.shard.state.state import (
    EMPTY,
    STATE_VERSION,
    CriticalHold,
    LastAppend,
    LeasedReader,
    ShardState,
)
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.digest import digest
from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.limits import STATE_BYTES_MAX
from kvstore.storage.contract import require_name

PUT_BACK: Final = (
    "put it back from a copy of the collection; `kvstore backup verify` names all damage, "
    "and `kvstore backup run --full`, or full=True, begins another chain"
)
"""The step after damage in a collection, which cannot be restored from a backup: it is one."""

FORMAT_VERSION = 1
ENVELOPE = struct.Struct(">4sHI")
_TWO_HISTORIES = "put all of the collection back from one copy"
ROLLUP = b"KVSR"
DIFF = b"KVSD"

_TEXTS = ("shard", "rule", "hostname")
_NUMBERS = ("seqno", "version", "walltime_ns", "last_gc", "tombstone_seqno", "since", "upper")
_SCALARS = (*_TEXTS, *_NUMBERS)

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Diff:
    """One step: the sections' entries to set and to drop, values still as JSON."""

    seqno: int
    previous: int
    rollup: tuple[int, str]
    changed: Mapping[str, Mapping[str, Any]]
    dropped: Mapping[str, list[str]]
    link: str
    digest: str
    """The digest of the diff's own bytes."""


def encode_state(state: ShardState) -> bytes:
    """A rollup. O(batches)."""
    body: dict[str, Any] = {
        name: {key: _ENCODERS[name](value) for key, value in section.items()}
        for name, section in _sections(state).items()
    }
    return _seal(ROLLUP, body | {"chain": state.step_digest})


def decode_state(data: bytes, *, where: str) -> ShardState:
    """Read a rollup. Raises `FormatVersionError` or `CorruptionError` naming `where`."""
    found = _open(ROLLUP, data, where=where)
    with _strictly(where, "not a shard's rollup"):
        sections: Sections = {
            name: {key: decode(value) for key, value in found.field(name, dict).items()}
            for name, decode in _DECODERS.items()
        }
        return replace(_assemble(sections, where=where), step_digest=found.text("chain"))


def encode_diff(before: ShardState | None, after: ShardState) -> bytes:
    """The step from `before` (None: nothing) to `after`. Shared sections cost next to nothing."""
    changed: dict[str, dict[str, Any]] = {}
    dropped: dict[str, list[str]] = {}
    seqno, previous, link, rollup = after.seqno, 0, "", list(after.rollup)
    if before is not None:
        previous, link = before.seqno, before.step_digest
        count = len(before.batches)
        if (
            after.batches[:count] == before.batches
        ):  # an append: the older batches are the same objects
            after = replace(after, batches=after.batches[count:])
            before = replace(before, batches=())
    for name, encode in _ENCODERS.items():
        if before is not None and name != "head" and getattr(before, name) is getattr(after, name):
            continue
        old = {} if before is None else _section(before, name)
        new = _section(after, name)
        entries = {
            key: encode(value)
            for key, value in new.items()
            if (known := old.get(key)) is not value and not _same(known, value)
        }
        if entries:
            changed[name] = entries
        if gone := sorted(old.keys() - new.keys()):
            dropped[name] = gone
    body = {"seqno": seqno, "previous": previous, "link": link, "rollup": rollup}
    return _seal(DIFF, body | {"set": changed, "drop": dropped})


def decode_diff(data: bytes, *, where: str) -> Diff:
    """Read a step. Raises `FormatVersionError` or `CorruptionError` naming `where`."""
    body = _open(DIFF, data, where=where)
    with _strictly(where, "not a shard's diff"):
        seqno, name = body.field("rollup", list)
        changed, dropped = body.inner("set"), body.inner("drop")
        for section in changed:
            changed.field(section, dict)
        for section in dropped:
            dropped.items_of(section, str)
        return Diff(
            body.integer("seqno"),
            body.integer("previous"),
            (_count(seqno), require_name(name)),
            changed,
            dropped,
            body.text("link"),
            digest(data),
        )


def apply_diffs(state: ShardState, diffs: Sequence[Diff], *, where: str) -> ShardState:
    """The state that `diffs`, applied in order, lead to. O(batches) in all, not for each diff.

    Raises `CorruptionError` if a diff does not start where the diff before it ends.
    """
    sections, at, previous = _sections(state), state.seqno, state.step_digest
    for diff in diffs:
        if diff.previous != at:
            raise CorruptionError(where, f"a step starts at v{diff.previous}, not v{at}", PUT_BACK)
        if diff.link != previous:
            problem = f"the step to v{diff.seqno} does not follow this v{at}, but another"
            raise CorruptionError(where, problem, _TWO_HISTORIES)
        with _strictly(where, f"a step does not fit v{at}"):
            for name, gone in diff.dropped.items():
                for key in gone:
                    del sections[name][key]
            for name, entries in diff.changed.items():
                sections[name].update({k: _DECODERS[name](v) for k, v in entries.items()})
        at, previous = diff.seqno, diff.digest
    with _strictly(where, f"the steps do not fit v{state.seqno}"):
        return replace(_assemble(sections, where=where), step_digest=previous)


def blobs_named(state: ShardState, diffs: Iterable[Diff]) -> set[str]:
    """The blobs that `state`, or any of the states that `diffs` lead to from it, needs."""
    named = set(state.blobs())
    for diff in diffs:
        for batch in diff.changed.get("batches", {}).values():
            named |= decode_batch(batch).names()
        with _strictly(f"step to v{diff.seqno}", "its rollups have no names"):
            named.update(map(_DECODERS["rollups"], diff.changed.get("rollups", {}).values()))
    return named


def _same(old: Any, new: Any) -> bool:
    return type(old) is type(new) and bool(old == new)


def _seal(magic: bytes, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return ENVELOPE.pack(magic, FORMAT_VERSION, zlib.crc32(data)) + data


def _open(magic: bytes, data: bytes, *, where: str) -> JsonObject:
    if len(data) < ENVELOPE.size:
        raise CorruptionError(where, f"cut short at {len(data)} bytes", PUT_BACK)
    found, version, checksum = ENVELOPE.unpack_from(data)
    if found != magic:
        raise CorruptionError(where, f"begins with {found!r}, not {magic!r}", PUT_BACK)
    if version != FORMAT_VERSION:
        raise FormatVersionError(where, found=version, supported=FORMAT_VERSION)
    body = data[ENVELOPE.size :]
    if zlib.crc32(body) != checksum:
        raise CorruptionError(where, "its checksum does not match", PUT_BACK)
    return read_object(body, where=where, bytes_max=STATE_BYTES_MAX)


@contextmanager
def _strictly(where: str, problem: str) -> Iterator[None]:
    """Turn the exceptions of code that takes JSON apart into `CorruptionError`."""
    try:
        yield
    except (CorruptionError, FormatVersionError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptionError(where, f"{problem} ({error!r:.200})", PUT_BACK) from error


def _sections(state: ShardState) -> Sections:
    return {name: _section(state, name) for name in _ENCODERS}


def _section(state: ShardState, name: str) -> dict[str, Any]:
    match name:
        case "head":
            return {name: getattr(state, name) for name in _SCALARS}
        case "batches":
            return {str(batch.lower): batch for batch in state.batches}
        case "slots":
            return {str(lower): upper for lower, upper in state.slots}
        case "rollups" | "kept":
            return {str(number): value for number, value in getattr(state, name).items()}
    return dict(getattr(state, name))


def _assemble(sections: Sections, *, where: str) -> ShardState:
    if _count(sections["head"]["version"]) > STATE_VERSION:
        raise FormatVersionError(
            where, found=sections["head"]["version"], supported=f"up to {STATE_VERSION}"
        )
    head = sections["head"]
    scalars = {name: head[name] for name in _SCALARS}
    for name, value in scalars.items():
        # Not `type(value) is int`: a state of this process holds `Timestamp`s.
        if not (isinstance(value, str) if name in _TEXTS else 0 <= value <= EMPTY):
            raise ValueError(f"its {name} is {value!r:.40}")
    state = ShardState(
        **scalars,
        batches=tuple(_by_number(sections["batches"]).values()),
        slots=tuple(_by_number(sections["slots"]).items()),
        rollups=_by_number(sections["rollups"]),
        leased=sections["leased"],
        critical=sections["critical"],
        writers=sections["writers"],
        kept=_by_number(sections["kept"]),
    )
    if head.keys() - set(_SCALARS):
        raise ValueError(f"unknown fields {sorted(head.keys() - set(_SCALARS))}")
    if any(key != str(batch.lower) for key, batch in sections["batches"].items()):
        raise ValueError("a batch is under another number than its own")
    if (problem := state.problem()) is not None:
        raise ValueError(problem)
    # Collection deletes by these names, so a name of another shard must not pass.
    if not all(name.startswith(f"{state.shard}/") for name in state.blobs()):
        raise ValueError("it names blobs that are not its own")
    return state


def _by_number(section: Mapping[str, Any]) -> dict[int, Any]:
    """A section whose keys are numbers, ascending."""
    if any(str(int(key)) != key for key in section):
        raise ValueError("a number is not written as such")
    return {int(key): section[key] for key in sorted(section, key=int)}


# -- values ----------------------------------------------------------------------------------


def encode_part(part: ShardPart) -> dict[str, Any]:
    """A part as JSON, without the fields that have their default."""
    encoded: dict[str, Any] = {
        "name": part.name,
        "rows": part.rows,
        "size": part.size,
        "checksum": part.checksum,
        "key_min": part.key_min.hex(),
        "key_max": None if part.key_max is None else part.key_max.hex(),
        "time_min": part.time_min,
        "time_max": part.time_max,
    }
    for name in ("run", "ranges"):
        if getattr(part, name):
            encoded[name] = getattr(part, name)
    return encoded


def decode_part(encoded: Mapping[str, Any]) -> ShardPart:
    """The part that `encode_part` encoded. Raises `CorruptionError` for anything else."""
    where = "a part of a shard's state"
    with _strictly(where, "not a part"):
        fields = JsonObject(dict(encoded), where=where)
        if fields.keys() - _PART_FIELDS:
            raise ValueError(f"unknown fields {sorted(fields.keys() - _PART_FIELDS)}")
        return ShardPart(
            name=require_name(fields.text("name")),
            rows=fields.integer("rows"),
            size=fields.integer("size"),
            checksum=fields.text("checksum"),
            key_min=fields.hexed("key_min"),
            key_max=None if fields["key_max"] is None else fields.hexed("key_max"),
            time_min=fields.integer("time_min"),
            time_max=fields.integer("time_max"),
            run=fields.optional_integer("run") or 0,
            ranges=fields.optional_integer("ranges") or 0,
        )


def encode_batch(batch: ShardBatch) -> dict[str, Any]:
    """A batch as JSON."""
    return {
        "lower": batch.lower,
        "upper": batch.upper,
        "since": batch.since,
        "parts": [encode_part(part) for part in batch.parts],
        "meta": dict(batch.meta),
    }


def decode_batch(encoded: Mapping[str, Any]) -> ShardBatch:
    """The batch that `encode_batch` encoded. Raises `CorruptionError` for anything else."""
    where = "a batch of a shard's state"
    with _strictly(where, "not a batch"):
        fields = JsonObject(dict(encoded), where=where)
    meta = fields.inner("meta")
    return ShardBatch(
        lower=fields.integer("lower", most=EMPTY),
        upper=fields.integer("upper", most=EMPTY),
        since=fields.integer("since", most=EMPTY),
        parts=tuple(decode_part(part) for part in fields.objects("parts")),
        meta=tuple((name, meta.text(name)) for name in sorted(meta)),
    )


def _count(value: object) -> int:
    """A number that is not negative."""
    if type(value) is not int or not 0 <= value <= EMPTY:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _counts(values: Any, count: int) -> list[int]:
    if len(_listed(values)) != count:
        raise ValueError(f"{values!r:.40} is no list of {count}")
    return [_count(value) for value in values]


def _listed(values: Any) -> list[Any]:
    if type(values) is not list:
        raise ValueError(f"{values!r:.40} is no list")
    return values


def _scalar(value: object) -> object:
    return value if type(value) is str else _count(value)


def _named(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _decode_critical(value: Any) -> CriticalHold:
    since, opaque = value
    return CriticalHold(_count(since), bytes.fromhex(opaque))


def _decode_writer(value: Any) -> LastAppend:
    token, upper, heartbeat_ns = value
    return LastAppend(_named(token), _count(upper), _count(heartbeat_ns))


def _same_value(value: Any) -> Any:
    return value


_ENCODERS: dict[str, Callable[[Any], Any]] = {
    "head": _same_value,
    "batches": encode_batch,
    "slots": _same_value,
    "rollups": _same_value,
    "leased": lambda r: [r.seqno, r.since, r.heartbeat_ns, r.lease_ns],
    "critical": lambda hold: [hold.since, hold.opaque.hex()],
    "writers": lambda writer: [writer.token, writer.upper, writer.heartbeat_ns],
    "kept": list,
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "head": _scalar,
    "batches": decode_batch,
    "slots": _count,
    "rollups": lambda value: require_name(_named(value)),
    "leased": lambda value: LeasedReader(*_counts(value, 4)),
    "critical": _decode_critical,
    "writers": _decode_writer,
    "kept": lambda labels: tuple(map(_named, _listed(labels))),
}

_PART_FIELDS = frozenset(field.name for field in fields_of(ShardPart))
