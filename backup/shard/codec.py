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
batches are keyed by their lower bound. A diff names the newest rollup of the state it leads to,
so a reader that knows only the head knows where to start.

`link` and `chain` make the diffs a chain: one that was changed, left out, or taken from another
history of the same shard does not link to its neighbours. Shards that were made without them go on
without them.

Invariants
1. decode(encode(x)) == x, and applying diff(a, b) to a gives b.
2. A newer format, a wrong checksum and a foreign file are told apart and refused.
3. A state with a `chain` is followed only by a diff that links to it.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backup.shard.state import (
    STATE_VERSION,
    Batch,
    Column,
    CriticalHold,
    LeasedReader,
    Part,
    State,
    WriterState,
)
from kvstore.digest import digest
from kvstore.errors import CorruptionError, FormatVersionError

FORMAT_VERSION = 1
_ENVELOPE = struct.Struct(">4sHI")
_TWO_HISTORIES = "put all of the collection back from one copy"
_ROLLUP = b"KVSR"
_DIFF = b"KVSD"

_SCALARS = (
    "shard",
    "rule",
    "seqno",
    "version",
    "walltime_ns",
    "hostname",
    "last_gc",
    "tombstone_seqno",
    "since",
    "upper",
)

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Diff:
    """One step: the sections' entries to set and to drop, values still as JSON."""

    seqno: int
    previous: int
    rollup: tuple[int, str]
    changed: Mapping[str, Mapping[str, Any]]
    dropped: Mapping[str, list[str]]
    link: str | None
    digest: str
    """Of its own bytes."""


def encode_state(state: State) -> bytes:
    """A rollup. O(batches)."""
    body: dict[str, Any] = {
        name: {key: _ENCODERS[name](value) for key, value in section.items()}
        for name, section in _sections(state).items()
    }
    if state.chain:
        body["chain"] = state.chain
    return _seal(_ROLLUP, body)


def decode_state(data: bytes, *, where: str) -> State:
    """Read a rollup. Raises `FormatVersionError` or `CorruptionError` naming `where`."""
    body = _open(_ROLLUP, data, where=where)
    try:
        sections: Sections = {
            name: {key: decode(value) for key, value in body[name].items()}
            for name, decode in _DECODERS.items()
        }
        return replace(_assemble(sections, where=where), chain=str(body.get("chain", "")))
    except FormatVersionError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(where, f"not a shard's rollup ({error!r})") from error


def encode_diff(before: State | None, after: State) -> bytes:
    """The step from `before` (None: nothing) to `after`. What they share costs next to nothing."""
    changed: dict[str, dict[str, Any]] = {}
    dropped: dict[str, list[str]] = {}
    seqno, previous, rollup = after.seqno, 0, list(after.rollup)
    link: str | None = ""
    if before is not None:
        previous, link = before.seqno, before.chain or None
        count = len(before.batches)
        if after.batches[:count] == before.batches:  # appended to: they are the same objects
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
    body: dict[str, Any] = {"seqno": seqno, "previous": previous, "rollup": rollup}
    body |= {"set": changed, "drop": dropped}
    if link is not None:
        body["link"] = link
    return _seal(_DIFF, body)


def decode_diff(data: bytes, *, where: str) -> Diff:
    """Read a step. Raises `FormatVersionError` or `CorruptionError` naming `where`."""
    body = _open(_DIFF, data, where=where)
    try:
        seqno, name = body["rollup"]
        return Diff(
            body["seqno"],
            body["previous"],
            (int(seqno), str(name)),
            body["set"],
            body["drop"],
            body.get("link"),
            digest(data),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(where, f"not a shard's diff ({error!r})") from error


def apply_diffs(state: State, diffs: Sequence[Diff], *, where: str) -> State:
    """The state that `diffs`, one after the other, lead to. O(batches) once, not for each.

    Raises `CorruptionError` if one does not start where the one before ends.
    """
    sections, at, chain = _sections(state), state.seqno, state.chain
    for diff in diffs:
        if diff.previous != at:
            raise CorruptionError(where, f"a step starts at v{diff.previous}, not v{at}")
        if (diff.link or "") != chain:
            problem = f"the step to v{diff.seqno} does not follow this v{at}, but another"
            raise CorruptionError(where, problem, _TWO_HISTORIES)
        try:
            for name, gone in diff.dropped.items():
                for key in gone:
                    del sections[name][key]
            for name, entries in diff.changed.items():
                sections[name].update({k: _DECODERS[name](v) for k, v in entries.items()})
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(where, f"a step does not fit v{at} ({error!r})") from error
        at = diff.seqno
        chain = "" if diff.link is None else diff.digest
    try:
        return replace(_assemble(sections, where=where), chain=chain)
    except FormatVersionError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(where, f"the steps do not fit v{state.seqno} ({error!r})") from error


def blobs_named(state: State, diffs: Iterable[Diff]) -> set[str]:
    """The blobs that `state`, or any of the states that `diffs` lead to from it, needs."""
    named = set(state.blobs())
    for diff in diffs:
        for batch in diff.changed.get("batches", {}).values():
            named |= decode_batch(batch).names()
        named.update(diff.changed.get("rollups", {}).values())
    return named


def _same(old: Any, new: Any) -> bool:
    return type(old) is type(new) and bool(old == new)


def _seal(magic: bytes, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return _ENVELOPE.pack(magic, FORMAT_VERSION, zlib.crc32(data)) + data


def _open(magic: bytes, data: bytes, *, where: str) -> dict[str, Any]:
    if len(data) < _ENVELOPE.size:
        raise CorruptionError(where, f"cut short at {len(data)} bytes")
    found, version, checksum = _ENVELOPE.unpack_from(data)
    if found != magic:
        raise CorruptionError(where, f"begins with {found!r}, not {magic!r}")
    if version != FORMAT_VERSION:
        raise FormatVersionError(where, found=version, supported=FORMAT_VERSION)
    body = data[_ENVELOPE.size :]
    if zlib.crc32(body) != checksum:
        raise CorruptionError(where, "its checksum does not match")
    try:
        opened = json.loads(body)
    except ValueError as error:
        raise CorruptionError(where, f"not JSON ({error})") from error
    if not isinstance(opened, dict):
        raise CorruptionError(where, "not a JSON object")
    return opened


def _sections(state: State) -> Sections:
    return {name: _section(state, name) for name in _ENCODERS}


def _section(state: State, name: str) -> dict[str, Any]:
    match name:
        case "head":
            return {name: getattr(state, name) for name in _SCALARS}
        case "batches":
            return {str(batch.lower): batch for batch in state.batches}
        case "slots":
            return {str(lower): upper for lower, upper in state.slots}
        case "rollups" | "schemas":
            return {str(number): value for number, value in getattr(state, name).items()}
    return dict(getattr(state, name))


def _assemble(sections: Sections, *, where: str) -> State:
    if sections["head"]["version"] > STATE_VERSION:
        raise FormatVersionError(
            where, found=sections["head"]["version"], supported=f"up to {STATE_VERSION}"
        )
    return State(
        **sections["head"],
        batches=tuple(sorted(sections["batches"].values(), key=lambda batch: batch.lower)),
        slots=tuple(sorted((int(low), high) for low, high in sections["slots"].items())),
        rollups={int(seqno): name for seqno, name in sections["rollups"].items()},
        leased=sections["leased"],
        critical=sections["critical"],
        writers=sections["writers"],
        schemas={int(schema): columns for schema, columns in sections["schemas"].items()},
    )


# -- values ----------------------------------------------------------------------------------


def encode_part(part: Part) -> dict[str, Any]:
    """A part as JSON; fields at their default are left out."""
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
    for name in ("run", "ranges", "drop_below"):
        if getattr(part, name):
            encoded[name] = getattr(part, name)
    if part.diff_sum is not None:
        encoded["diff_sum"] = part.diff_sum
    if part.inline is not None:
        encoded["inline"] = base64.b64encode(part.inline).decode()
    return encoded


def decode_part(encoded: Mapping[str, Any]) -> Part:
    """The part of `encode_part`."""
    fields = dict(encoded)
    fields["key_min"] = bytes.fromhex(fields["key_min"])
    if fields["key_max"] is not None:
        fields["key_max"] = bytes.fromhex(fields["key_max"])
    if "inline" in fields:
        fields["inline"] = base64.b64decode(fields["inline"])
    return Part(**fields)


def encode_batch(batch: Batch) -> dict[str, Any]:
    """A batch as JSON."""
    return {
        "lower": batch.lower,
        "upper": batch.upper,
        "since": batch.since,
        "parts": [encode_part(part) for part in batch.parts],
        "meta": dict(batch.meta),
    }


def decode_batch(encoded: Mapping[str, Any]) -> Batch:
    """The batch of `encode_batch`."""
    return Batch(
        lower=encoded["lower"],
        upper=encoded["upper"],
        since=encoded["since"],
        parts=tuple(decode_part(part) for part in encoded["parts"]),
        meta=tuple(sorted(encoded["meta"].items())),
    )


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
    "schemas": lambda columns: [[col.name, col.type, col.nullable] for col in columns],
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "head": _same_value,
    "batches": decode_batch,
    "slots": _same_value,
    "rollups": _same_value,
    "leased": lambda value: LeasedReader(*value),
    "critical": lambda value: CriticalHold(value[0], bytes.fromhex(value[1])),
    "writers": lambda value: WriterState(*value),
    "schemas": lambda value: tuple(Column(*column) for column in value),
}
