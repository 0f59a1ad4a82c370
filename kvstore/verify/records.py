"""Checks that the records beside the data agree: frontiers, holds, imports."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.changes.entry import OP_IMPORT, OP_REVERT
from kvstore.claims import HoldRecord
from kvstore.codec.keys import encode_reference
from kvstore.collected import collections
from kvstore.commit import Committer
from kvstore.errors import printable
from kvstore.imports import ImportRecord, Imports
from kvstore.imports.key_lists import KEYS_PREFIX, keys_name, read_keys
from kvstore.imports.past import PastImports
from kvstore.meta import COLLECTED, SINCE, UPPER, Meta
from kvstore.mvcc import Stamps
from kvstore.timestamp import Timestamp
from kvstore.verify.report import Findings

Events = set[tuple[int, int, int]]
"""Operation, import id and timestamp of each import and revert in the change index."""


def check_frontiers(findings: Findings, meta: Meta, committer: Committer) -> None:
    """`collected <= since < upper`, `durable <= upper`, and the stored values equal the values in
    use."""
    with findings.reading():
        for _ in meta.records(""):
            pass
    with findings.reading():
        collections(meta)
    add = findings.add
    with committer.lock:  # under it the stored values move together with the values in use
        since, upper, durable = committer.since, committer.upper, committer.durable
        stored = {SINCE: since, UPPER: upper, COLLECTED: 0}
        for name in stored:
            with findings.reading():
                stored[name] = meta.timestamp(name)
    if stored[SINCE] != since:
        add("since", f"is {since}, but {stored[SINCE]} is stored")
    if since >= upper:
        add("since", f"{since} is not below upper {upper}")
    if stored[UPPER] > upper:
        add("upper", f"is {upper}, below a stored entry")
    if stored[COLLECTED] > since:
        add("since", f"{since} is below what GC has collected")
    if durable > upper:
        add("durable", f"{durable} is above upper {upper}")


def check_expiries(findings: Findings, committer: Committer) -> None:
    """No key is due before the time that the schedule of expiries waits for."""
    if committer.policy.commits is not None:
        return
    with findings.reading(), committer.lock:
        missed = committer.expiries.missed()
        if missed is not None:
            where, due = f"expiry of key {printable(missed.key)}", Timestamp(missed.due.time)
            findings.add(where, f"is due at {due}, and the schedule waits for a later time")


def check_hold(findings: Findings, hold: HoldRecord, since: int) -> None:
    """Each valid hold lies at or above `since`."""
    if not hold.lost and hold.timestamp < since:
        findings.add(f"hold {hold.name!r}", f"at {hold.timestamp}, below since {since}")


def check_import(
    findings: Findings, record: ImportRecord, events: Events | None, *, floor: int, upto: int
) -> None:
    """Times of an import are in order, and in the change index where it is complete (`events`)."""
    where, add = f"import {record.import_id:016x}", findings.add
    added, reverted = record.added, record.reverted
    if reverted is not None and (added is None or added >= reverted):
        add(where, f"added at {added}, reverted at {reverted}")
    for op, at in ((OP_IMPORT, added), (OP_REVERT, reverted)):
        if at is None:
            continue
        if at > upto:
            add(where, f"dated {at}, with upper at {upto + 1}")
        elif at > floor and events is not None and (op, record.import_id, at) not in events:
            add(where, f"its event at {at} is not in the change index")


def check_rows(findings: Findings, record: ImportRecord, rows: int, *, is_whole: bool) -> None:
    """As many rows are there as were added. GC and clears may have removed some."""
    if rows > record.rows or (is_whole and rows != record.rows):
        findings.add(f"import {record.import_id:016x}", f"{rows} rows, {record.rows} were added")


def check_key_lists(findings: Findings, meta: Meta, imports: Imports, committer: Committer) -> None:
    """Each key list is of an import in the records, and has a key in its spans for each row. Past
    imports can be read. Imports come and go meanwhile."""
    with findings.reading():
        for import_id, stored in meta.numbered(KEYS_PREFIX):
            where = f"import {import_id:016x}"
            keys = read_keys(stored)
            with committer.lock:  # under it the stored list moves together with the record
                is_there = meta.read(keys_name(import_id)) is not None
                record = imports.get(import_id)
            if not is_there:
                continue
            if record is None:
                findings.add(where, "has a key list and no record")
            elif len(keys) != record.rows:
                findings.add(where, f"{len(keys)} keys are listed, {record.rows} rows were added")
            elif not all(any(key in span for span in record.spans) for key in keys):
                findings.add(where, "a listed key lies outside its spans")
    with findings.reading():
        for _ in PastImports(meta).all():
            pass


def check_stamps(
    findings: Findings, records: Mapping[bytes, ImportRecord], stamps: Stamps, events: Events
) -> None:
    """The lifetimes in use agree with the records, and each event has a record."""
    expected = {
        reference: record.lifetime
        for reference, record in records.items()
        if record.added is not None
    }
    if dict(stamps) != expected:
        findings.add("imports", "the stamps in use differ from the records")
    for op, import_id, timestamp in sorted(events):
        record = records.get(encode_reference(import_id))
        dated = record and (record.added if op == OP_IMPORT else record.reverted)
        if dated != timestamp:
            findings.add(f"import {import_id:016x}", f"the change index dates it {timestamp}")
