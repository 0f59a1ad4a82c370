"""The command `kvstore doctor`: is this environment fit for a store, and is a store well?"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import typer

import kvstore
from kvstore.base.clock import Clock
from kvstore.base.timestamp import NS_PER_SECOND, Timestamp
from kvstore.cli.main import NOT_FOUND
from kvstore.cli.options import JsonOption
from kvstore.cli.output import print_json, print_table
from kvstore.cli.times import in_words, iso
from kvstore.errors import KVStoreError
from kvstore.evidence import require_new, write_evidence
from kvstore.opening import engine_at, open_read_only
from kvstore.store import Store
from kvstore.version import __version__

Verdict: TypeAlias = Literal["ok", "note", "bad"]

_LIBRARIES: Final = ("rocksdict", "pyarrow", "numpy", "sortedcontainers", "typer")
_EXTRAS: Final = ("uvicorn", "obstore", "cryptography", "pyspark", "prometheus-client")
_OURS: Final = ("bulk", "backup", "spark_connector")
_FREE_LEAST: Final = 1 << 30
"""Bytes: compaction writes files anew before it removes the old ones, 64 MiB and more at a time."""
_OPEN_FILES_LEAST: Final = 1024
"""RocksDB keeps a file open for each sorted file: a store of 50 GB has about 800."""
_ROWS_NAMED: Final = 20
"""Rows that are named: a screen of them. A load may have brought a million."""
_EARLIEST_NS: Final = 1_700_000_000 * 10**9
"""November 2023. A clock before it has not been set."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    verdict: Verdict
    subject: str
    fact: str
    remedy: str = ""


def doctor(
    store: Annotated[
        Path | None,
        typer.Argument(metavar="[STORE]", help="A store's directory.", show_default=False),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Write a file for an auditor: this one, or one of its own name in this directory.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at the environment, and at a store: versions, disk, clock, holds, failures.

    Exits with 1 if something is bad. Costs the opening of the store and a pass over the rows of its
    tables; `kvstore verify` reads it whole.

    \b
    Examples:
      kvstore doctor
      kvstore doctor flights.db --json | jq 'select(.verdict != "ok")'
      kvstore doctor flights.db --report /var/lib/evidence
    """
    kept = None if report is None else require_new(report)
    found = [*_environment(), *([] if store is None else _store(store))]
    if kept is not None:
        write_evidence(kept, "doctor", Timestamp(Clock().wall_ns()), _reported(store, found))
    if as_json:
        for finding in found:
            print_json(finding._asdict())
    else:
        rows = [[each.verdict, each.subject, _told(each)] for each in found]
        print_table(["verdict", "subject", "fact"], rows)
    if any(finding.verdict == "bad" for finding in found):
        raise typer.Exit(NOT_FOUND)


def _reported(path: Path | None, found: list[Finding]) -> dict[str, Any]:
    """What the file for an auditor tells beside versions: findings, configuration, holds, ages."""
    fields: dict[str, Any] = {
        "outcome": "bad" if any(each.verdict == "bad" for each in found) else "well",
        "findings": [each._asdict() for each in found],
        "store": None,
    }
    if path is not None and engine_at(path) is not None:
        with suppress(KVStoreError), open_read_only(path) as opened:  # the findings tell why not
            fields["store"] = _described(path, opened)
    return fields


def _described(path: Path, store: Store) -> dict[str, Any]:
    now, stats = Clock().wall_ns(), store.stats()
    holds = [
        {
            "name": hold.name,
            "kind": hold.kind,
            "address": hold.address,
            "owner": hold.owner,
            "keeps_from": iso(hold.timestamp),
            "age_seconds": max(now - hold.timestamp, 0) / NS_PER_SECOND,
            "max_age_seconds": None if hold.max_age_ns is None else hold.max_age_ns / NS_PER_SECOND,
            "lost": hold.lost,
        }
        for hold in store.holds.all()
    ]
    return {
        "path": str(path.absolute()),
        "store_id": store.store_id,
        "engine": engine_at(path),
        "readable_from": iso(store.since),
        "readable_to": iso(store.upper),
        "history_seconds": max(now - store.since, 0) / NS_PER_SECOND if store.since else None,
        "holds": holds,
        "tables": {name: store.table(name).codec().definition.revision for name in store.tables()},
        "figures": {name: each for name, each in stats.items() if isinstance(each, int | float)},
    }


def _told(finding: Finding) -> str:
    return f"{finding.fact}; {finding.remedy}" if finding.remedy else finding.fact


def _environment() -> Iterator[Finding]:
    yield Finding("ok", "kvstore", f"{__version__} at {Path(kvstore.__file__).parent}")
    yield Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")
    yield Finding("ok", "platform", platform.platform())
    yield from map(_library, _LIBRARIES)
    extras = [f"{name} {found}" for name in _EXTRAS if (found := _version(name)) is not None]
    yield Finding("ok", "extras", ", ".join(extras) or "none")
    yield from map(_package, _OURS)
    yield _clock()
    yield _space("temporary files", Path(tempfile.gettempdir()))
    yield from _open_files()


def _library(name: str) -> Finding:
    found = _version(name)
    if found is None:
        return Finding("bad", name, "not installed", "pip install kvstore-mvcc")
    return Finding("ok", name, found)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _package(name: str) -> Finding:
    """Another distribution has packages of the same names, and may hide or overwrite ours."""
    ours = Path(kvstore.__file__).resolve().parent.parent
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return Finding("note", name, "not importable", "pip install kvstore-mvcc")
    place = Path(spec.origin).resolve().parent
    if place.parent != ours:
        remedy = f"remove it, or put {ours} before it on the path of Python"
        return Finding("bad", name, f"another package at {place} hides ours", remedy)
    return Finding("ok", name, f"at {place}")


def _clock() -> Finding:
    now = Clock().wall_ns()
    if now < _EARLIEST_NS:
        return Finding("bad", "clock", f"{iso(now)} is in the past", "set the system's clock")
    return Finding("ok", "clock", iso(now))


def _space(subject: str, path: Path) -> Finding:
    usage = shutil.disk_usage(path)
    fact = f"{usage.free >> 20:,} MiB free of {usage.total >> 20:,} MiB at {path}"
    if usage.free < _FREE_LEAST:
        return Finding("bad", subject, fact, "free some space")
    return Finding("ok", subject, fact)


def _open_files() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES_LEAST:
        remedy = f"ulimit -n {_OPEN_FILES_LEAST * 16}"
        yield Finding("note", "open files", f"at most {soft:,}", remedy)
    else:
        yield Finding("ok", "open files", f"at most {soft:,}" if soft >= 0 else "no limit")


def _store(path: Path) -> Iterator[Finding]:
    engine = engine_at(path)
    if engine is None:
        yield Finding("bad", "store", f"no store is at {path}", "check the path")
        return
    yield Finding("ok", "engine", engine)
    yield _space("disk", path)
    if not os.access(path, os.W_OK):
        yield Finding("note", "directory", "read-only for this user", "a writer needs more")
    try:
        with open_read_only(path) as opened:
            for look in (_times, _history, _records, _tables, _work):
                yield from look(opened)
    except KVStoreError as error:
        yield Finding("bad", "opening", error.what, error.remedy or "")


def _times(store: Store) -> Iterator[Finding]:
    now, upper = Clock().wall_ns(), store.upper
    if upper > now + 10**9:
        fact = f"its newest time {iso(upper)} is {in_words(upper - now)} ahead of the clock"
        yield Finding("note", "times", fact, "the clock was set back; writes continue above it")
    else:
        yield Finding("ok", "times", f"readable from {iso(store.since)} to {iso(upper)}")


def _history(store: Store) -> Iterator[Finding]:
    now = Clock().wall_ns()
    lost = [hold.name for hold in store.holds.all() if hold.lost]
    if lost:
        remedy = "their owners begin anew; then `kvstore holds drop`"
        yield Finding("bad", "holds", f"lost: {', '.join(lost[:10])}", remedy)
    oldest = next(iter(store.holds.needing()), None)
    if oldest is None:
        yield Finding("ok", "history", "no hold keeps it")
    else:
        yield Finding("ok", "history", f"kept by {oldest.describe(now)}")


def _records(store: Store) -> Iterator[Finding]:
    adding = [f"{each.import_id:016x}" for each in store.imports.all() if each.added is None]
    if adding:
        fact = f"not added yet: {', '.join(adding[:10])}"
        yield Finding("note", "imports", fact, "repeat `kvstore import` if its process died")


def _tables(store: Store) -> Iterator[Finding]:
    """The rows of tables that cannot be read."""
    parts = store.requests.parts
    if not parts.reserve.has_tables:
        return
    from kvstore.verify import unreadable_rows  # most stores need neither Arrow nor numpy

    rows = unreadable_rows(parts, store.upper - 1)
    found = list(islice(rows, _ROWS_NAMED))
    for where, problem in found:
        fact, _, remedy = problem.rpartition("; ")
        yield Finding("bad", "tables", f"{where}: {fact}", remedy)
    if len(found) == _ROWS_NAMED:
        yield Finding("note", "tables", "there may be more", "`kvstore verify` lists all")
    if not found:
        yield Finding("ok", "tables", f"each row of {len(store.tables())} can be read")


def _work(store: Store) -> Iterator[Finding]:
    stats = store.stats()
    looks: tuple[tuple[str, str, Callable[[int], bool], str], ...] = (
        ("writes_stopped", "writes", bool, "a compaction or a flush stops them: the disk is slow"),
    )
    for figure, subject, is_wrong, fact in looks:
        if is_wrong(stats.get(figure, 0)):
            yield Finding("note", subject, fact)
    size = sum(stats[f"{family}_bytes"] for family in ("data", "ranges", "changes", "meta"))
    yield Finding("ok", "size", f"{size >> 20:,} MiB in {stats.get('data_files', 0):,} data files")
