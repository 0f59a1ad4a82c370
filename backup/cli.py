"""The command `kvstore backup`."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvstore.backup.chains import no_backup
from kvstore.backup.collection import Collection
from kvstore.backup.drill import DRILL_DEPTHS, DrillReport
from kvstore.backup.fleet import back_up_fleet, read_fleet
from kvstore.backup.overview import ChainProof, CollectionInfo
from kvstore.backup.publish import FORMATS
from kvstore.backup.reading import CollectionReader
from kvstore.backup.replica import Stop
from kvstore.backup.replica import replicate as replicate_history
from kvstore.backup.restore import Restored
from kvstore.backup.verify import DEPTHS
from kvstore.backup.window import BackupInfo
from kvstore.base.arguments import AGE, word
from kvstore.base.timestamp import Timestamp
from kvstore.changes import Change
from kvstore.cli.main import NOT_FOUND
from kvstore.cli.options import (
    LISTED_MAX,
    Encoding,
    EncodingOption,
    EndOption,
    JsonOption,
    ListLimitOption,
    PrefixOption,
    StartOption,
    open_here,
    reach,
    to_bytes,
    to_json,
    to_span,
    to_text,
)
from kvstore.cli.output import (
    age_text,
    counting,
    note,
    print_figures,
    print_json,
    print_line,
    print_raw,
    print_table,
    size_text,
    working,
)
from kvstore.cli.times import iso
from kvstore.errors import CorruptionError, KVStoreError, UsageError
from kvstore.limits import RETRY_S
from kvstore.opening import engine_at, open_read_only
from kvstore.remote.control import StoreOrClient

# --------------------------------------------------------------------------------------------------
# Backups, collections and damage as commands print them: for people, or as JSON with exact
# numbers.


def backup_figures(info: BackupInfo, *, as_json: bool) -> dict[str, Any]:
    """The figures of a backup."""
    fields = {**info._asdict(), "lower": iso(info.lower), "upper": iso(info.upper)}
    fields["proven_at"] = _time(info.proven_at)
    fields["labels"] = list(info.labels)
    if not as_json:
        fields["bytes"] = size_text(info.bytes)
        fields["proven_at"] = fields["proven_at"] or "never"
        fields["labels"] = ", ".join(info.labels) or "none"
    return fields


def collection_figures(
    found: CollectionInfo, encoding: Encoding, *, as_json: bool
) -> dict[str, Any]:
    """The figures of a collection, with a line for the proof of each chain."""
    render = to_json if as_json else to_text
    spans = [(render(s.start, encoding), s.end and render(s.end, encoding)) for s in found.spans]
    fields = {**found._asdict(), "since": iso(found.since), "upper": iso(found.upper)}
    fields["labels"] = {label: iso(at) for label, at in found.labels.items()}
    fields["kept"] = [iso(at) for at in found.kept]
    age = found.proof_age_seconds
    del fields["proofs"]
    if as_json:
        fields["spans"] = [{"start": start, "end": end} for start, end in spans]
        fields["proof_age_seconds"] = None if math.isinf(age) else age
        fields["proofs"] = [_proof_fields(proof) for proof in found.proofs]
        return fields
    fields["bytes"] = size_text(found.bytes)
    del fields["recovery_point_age_seconds"]
    fields["recovery_point"] = f"{age_text(found.recovery_point_age_seconds)} old"
    fields["spans"] = ", ".join(f"[{start}, {end or 'end'})" for start, end in spans)
    labels = [f"{label} ({iso(at)})" for label, at in found.labels.items()]
    fields["labels"] = ", ".join(labels) or "none"
    fields["kept"] = ", ".join(map(iso, found.kept)) or "none"
    for number, proof in enumerate(found.proofs, 1):
        name = "proof" if len(found.proofs) == 1 else f"proof of chain {number}"
        fields[name] = _proof_text(proof)
    return fields


def disproved(error: CorruptionError, *, as_json: bool) -> typer.Exit:
    """Print the damage that a command was asked to look for, and return its exit."""
    problem = str(error)
    note(problem)
    if as_json:
        print_json({"ok": False, "problem": problem})
    return typer.Exit(NOT_FOUND)


def _proof_fields(proof: ChainProof) -> dict[str, Any]:
    return {
        **proof._asdict(),
        "since": iso(proof.since),
        "upper": iso(proof.upper),
        "proven": _time(proof.proven),
        "proven_at": _time(proof.proven_at),
        "problem": proof.problem,
        "age_seconds": None if math.isinf(proof.age_seconds) else proof.age_seconds,
    }


def _proof_text(proof: ChainProof) -> str:
    text = "never: `kvstore backup drill` restores it"
    if proof.proven is not None:
        text = f"{age_text(proof.age_seconds)} ago, as of {iso(proof.proven)}"
    return f"{text}; the newest drill failed: {proof.problem}" if proof.problem else text


def _time(at: Timestamp | None) -> str | None:
    return None if at is None else iso(at)


# --------------------------------------------------------------------------------------------------
# The arguments that all commands on a collection take, and how they open it.

PASSPHRASE: Final = "KVSTORE_PASSPHRASE"  # a name, not a secret

patience_s: Final[ContextVar[float]] = ContextVar("patience_s", default=RETRY_S)
"""How long passing failures of the storage are retried, in seconds."""

_COMPLETION_PATIENCE_S: Final = 1.0
"""A person waits for the completion, so a storage that does not answer is not retried for long."""


def complete_label(ctx: Any, incomplete: str) -> list[str]:
    """The labels of the collection that the command line names; empty if it cannot be read."""
    key_file = ctx.params.get("key_file")
    # The parser gives up at an option without its value, and leaves the arguments before it.
    collection = ctx.params.get("collection") or next(iter(ctx.args), None)
    if collection is None:
        return []
    try:
        passphrase = None if key_file is not None else os.environ.get(PASSPHRASE)
        how: Any = {"key_file": key_file, "patience": _COMPLETION_PATIENCE_S}
        labels = Collection(collection, passphrase, **how).show().labels
    except (KVStoreError, OSError):
        return []
    return sorted(label for label in labels if label.startswith(incomplete))


complete_label.__annotations__ = {"ctx": Any, "incomplete": str}  # Typer passes arguments by them

InstantOption = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="Read at this time, or at the instant of this label. Times are written as 2026-11-22, "
        "'1 hour ago', yesterday, -1h, ISO-8601 with a zone, or nanoseconds. Default: the newest.",
        show_default=False,
        autocompletion=complete_label,
    ),
]
CollectionArgument = Annotated[
    str,
    typer.Argument(
        metavar="COLLECTION", help="A path, s3://, gs:// or az:// URL.", show_default=False
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(help="File with the key: 32 bytes, or 64 hex digits.", show_default=False),
]


def open_collection(collection: str, key_file: Path | None) -> Collection:
    """Open a collection, which may be empty."""
    passphrase = None if key_file is not None else os.environ.get(PASSPHRASE)
    return Collection(
        collection,
        passphrase,
        key_file=key_file,
        patience=patience_s.get(),
        on_wait=lambda waiting: note(str(waiting)),
    )


def open_existing(collection: str, key_file: Path | None) -> Collection:
    """Open a collection. Raises `UsageError` for an empty one, such as a mistyped path."""
    found = open_collection(collection, key_file)
    if found.source is None:
        raise no_backup(collection)
    return found


def stop_on_signals() -> Stop:
    """A `Stop` that SIGINT and SIGTERM set: the follower then ends in order."""
    stop = Stop()

    def on_signal(*_: object) -> None:
        # In a thread: the handler may have interrupted a holder of the locks that `set` needs.
        threading.Thread(target=stop.set).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop


# --------------------------------------------------------------------------------------------------
# `kvstore backup drill`: a restore for real, which proves that the backups can be had back.

AtOption = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="The instant to restore, its label, or `random`.",
        autocompletion=complete_label,
    ),
]
DepthOption = Annotated[
    str,
    typer.Option(
        help="open: the restored store opens and verifies. contents: it also equals the store."
    ),
]
SourceOption = Annotated[
    Path | None,
    typer.Option(help="With --depth contents: the store to compare with.", show_default=False),
]
ScratchOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIRECTORY",
        help="Restore the store here, and remove it. Default: the directory of temporary files.",
        show_default=False,
    ),
]

EvidenceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Write a file for an auditor: this one, or one of its own name in this directory.",
        show_default=False,
    ),
]


def drill(
    collection: CollectionArgument,
    at: AtOption = "random",
    depth: DepthOption = "open",
    store: SourceOption = None,
    scratch: ScratchOption = None,
    evidence: EvidenceOption = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore an instant into scratch space, open and verify it, and record the outcome.

    Exits with 0 only if the instant was proved, and with 1 if it cannot be had back. A
    random instant each time covers the history. `show` tells the age of the newest proof.

    \b
    Examples:
      kvstore backup drill s3://bucket/flights
      kvstore backup drill /backups/flights --depth contents --store flights.db
      kvstore backup drill /backups/flights --at 2013-06-01T00:00Z --scratch /mnt/scratch
    """
    wanted = word(*DRILL_DEPTHS).check("depth", depth)
    with ExitStack() as stack:
        progress = stack.enter_context(working(f"restoring {collection}", quiet=as_json))
        opened = None if store is None else stack.enter_context(open_read_only(store))
        rows = counting(progress, "rows")
        try:
            source = open_existing(collection, key_file)
            report = source.drill(
                at, wanted, opened, scratch=scratch, progress=rows, evidence=evidence
            )
        except CorruptionError as error:
            raise disproved(error, as_json=as_json) from error
    print_figures(_figures(report, as_json=as_json), as_json=as_json)


def _figures(report: DrillReport, *, as_json: bool) -> dict[str, Any]:
    fields = {**report._asdict(), "at": iso(report.at), "drilled_at": iso(report.drilled_at)}
    if not as_json:
        fields["bytes"] = size_text(report.bytes)
    return {"ok": True, **fields}


# --------------------------------------------------------------------------------------------------
# `kvstore backup run --config`: many stores, one line for the outcome of each.


def run_fleet(config: Path, *, as_json: bool) -> None:
    """Back up the stores that a file names. Exits with 1 if one of them fails."""
    fleet = read_fleet(config)
    failed: list[str] = []
    with working(f"backing up {len(fleet.stores)} stores", quiet=as_json):
        for name, info, failure in back_up_fleet(fleet):
            if info is None:
                failed.append(name)
                note(f"store {name}: {failure}")
            figures = {} if info is None else backup_figures(info, as_json=as_json)
            if as_json:
                print_json({"store": name, "ok": info is not None, "error": failure, **figures})
            elif info is not None:
                text = f"up to {figures['upper']}, {info.rows:,} rows, {figures['bytes']}"
                print_line(f"{name}  {text}")
            sys.stdout.flush()  # a reader of a pipe waits for this line
    if failed:
        note(f"{len(failed)} of {len(fleet.stores)} stores failed: {', '.join(failed)}")
        raise typer.Exit(NOT_FOUND)


# --------------------------------------------------------------------------------------------------
# `kvstore backup`: get, scan, history, diff, find. They read a collection and restore nothing.

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="A key.", show_default=False)]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIRECTORY",
        help="Keep the fetched bytes here, for the next call and for other processes.",
        show_default=False,
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(min=0, help="Print this many at most.", show_default=False)
]


def register_reading(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (get, scan, history, diff, find):
        app.command()(command)


def get(
    collection: CollectionArgument,
    key: KeyArgument,
    as_of: InstantOption = None,
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
    no_newline: Annotated[
        bool, typer.Option("--no-newline", "-n", help="Print the value's bytes and nothing else.")
    ] = False,
) -> None:
    """Print the value of a key, straight from the backups. Exits with 1 if the key is absent.

    \b
    Examples:
      kvstore backup get /backups/flights AA1
      kvstore backup get s3://bucket/flights AA1 --as-of 2013-01-31T23:59:59Z
    """
    raw = to_bytes(key, encoding)
    with _reader(collection, key_file, cache) as reader:
        value = reader.get(raw, as_of)
    if value is None:
        note(f"no key {key!r} in {collection}" + (f" as of {as_of}" if as_of else ""))
        raise typer.Exit(NOT_FOUND)
    if as_json:
        print_json({"key": to_json(raw, encoding), "value": to_json(value, encoding)})
    elif encoding is Encoding.TEXT:
        print_raw(value, newline=not no_newline)
    else:
        print_raw(to_text(value, encoding).encode(), newline=not no_newline)


def scan(
    collection: CollectionArgument,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    as_of: InstantOption = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="In descending order.")] = False,
    limit: LimitOption = None,
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print keys and values in key order, straight from the backups, a tab between them.

    \b
    Examples:
      kvstore backup scan /backups/flights --prefix AA
      kvstore backup scan /backups/flights --as-of 2013-06-01T00:00Z --json
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    with _reader(collection, key_file, cache) as reader:
        rows = reader.scan(span.start, span.end, as_of=as_of, reverse=reverse, limit=limit)
        for key, value in rows:
            if as_json:
                print_json({"key": to_json(key, encoding), "value": to_json(value, encoding)})
            else:
                print_line(f"{to_text(key, encoding)}\t{to_text(value, encoding)}")


def history(
    collection: CollectionArgument,
    key: KeyArgument,
    limit: LimitOption = None,
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the versions of a key in the newest chain, newest first. Exits with 1 if there is none.

    `find` tells the changes of older chains too.

    \b
    Examples:
      kvstore backup history /backups/flights AA1
    """
    with _reader(collection, key_file, cache) as reader:
        versions = list(islice(reader.history(to_bytes(key, encoding)), limit))
    for version in versions:
        if as_json:
            fields = {"timestamp": iso(version.timestamp), "deleted": version.value is None}
            print_json({**fields, "value": to_json(version.value, encoding)})
        else:
            value = "(deleted)" if version.value is None else to_text(version.value, encoding)
            print_line(f"{iso(version.timestamp)}\t{value}")
    if not versions and limit != 0:
        note(f"no key {key!r} in {collection}")
        raise typer.Exit(NOT_FOUND)


def diff(
    collection: CollectionArgument,
    since: Annotated[
        str, typer.Argument(metavar="TIME", help="The earlier time.", show_default=False)
    ],
    upto: Annotated[
        str | None,
        typer.Argument(metavar="[TIME]", help="The later time; else the newest instant."),
    ] = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the last change of each key that changed between two times, in key order.

    \b
    Examples:
      kvstore backup diff /backups/flights 2013-06-01T00:00Z 2013-06-02T00:00Z
      kvstore backup diff /backups/flights 2013-06-01T00:00Z --prefix AA --json
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    with _reader(collection, key_file, cache) as reader:
        found = reader.changes(since, upto, span.start, span.end, "latest")
        _print_changes(found, encoding, as_json=as_json, values=True)


def find(
    collection: CollectionArgument,
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="A key, or its beginning.", show_default=False)
    ],
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the instants at which keys that begin with PREFIX changed, oldest first.

    Before an instant the key was as the instant before it left it: `get --as-of` tells the value.

    \b
    Examples:
      kvstore backup find /backups/flights AA1
    """
    span = to_span(encoding, start=None, end=None, prefix=prefix)
    with _reader(collection, key_file, cache) as reader:
        for low, high in _windows(reader):
            found = reader.changes(low, high, span.start, span.end, order="time")
            _print_changes(found, encoding, as_json=as_json, values=False)


def _windows(reader: CollectionReader) -> Iterator[tuple[Timestamp, Timestamp]]:
    """The windows whose changes the chains have, oldest first. A newer chain has the window from
    its `since` on."""
    chains = reader.held()
    for at, chain in enumerate(chains):
        high = min([chain.upper - 1, *(newer.since for newer in chains[at + 1 :])])
        if high > chain.since:
            yield Timestamp(chain.since), Timestamp(high)


def _reader(
    collection: str, key_file: Path | None, cache: Path | None
) -> AbstractContextManager[CollectionReader]:
    return open_existing(collection, key_file).open(cache=cache)


def _print_changes(
    changes: Iterable[Change], encoding: Encoding, *, as_json: bool, values: bool
) -> None:
    for change in changes:
        fields = {
            "timestamp": iso(change.timestamp),
            "op": change.op,
            "key": to_json(change.key, encoding),
            "end_key": to_json(change.end_key, encoding),
        }
        if as_json:
            value = {"value": to_json(change.value, encoding)} if values else {}
            print_json({**fields, **value})
            continue
        texts = [iso(change.timestamp), change.op, to_text(change.key, encoding)]
        if change.end_key is not None:
            texts.append(to_text(change.end_key, encoding))
        if values and change.value is not None:
            texts.append(to_text(change.value, encoding))
        print_line("\t".join(texts))


# --------------------------------------------------------------------------------------------------
# `kvstore backup restore`: a collection becomes a store, or rows of a live one.


def register_restores(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(restore)


PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="The place of the new store; must not exist.", show_default=False
    ),
]
StateOnlyOption = Annotated[
    bool,
    typer.Option("--state-only", help="Without history: only the rows that were alive then."),
]
IntoOption = Annotated[
    bool, typer.Option("--into", help="PATH is a live store: import into it, at one time.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue a restore that was killed or has failed.")
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Processes that work.", show_default=False)
]


def restore(
    collection: CollectionArgument,
    path: PathArgument,
    as_of: InstantOption = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    state_only: StateOnlyOption = False,
    into: IntoOption = False,
    resume: ResumeOption = False,
    workers: WorkersOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore a store, whole or in part, as of any instant that the collection covers.

    Prints the newest instant of the store, the time from which it is readable,
    and its rows. With --resume nothing that was fetched is fetched again.

    \b
    Examples:
      kvstore backup restore /backups/flights restored.db
      kvstore backup restore s3://bucket/flights restored.db --resume --workers 4
      kvstore backup restore /backups/flights june.db --as-of 2013-06-01T00:00Z
      kvstore backup restore /backups/flights flights.db --into --prefix AA
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    source = open_collection(collection, key_file)
    if into and (resume or workers is not None):
        raise UsageError("--into takes no --resume and no --workers", "leave them out")
    with working(f"restoring {path}", quiet=as_json) as progress:
        rows = counting(progress, "rows")
        how: dict[str, Any] = {"start": span.start, "end": span.end, "progress": rows}
        figures: dict[str, Any]
        if into:
            with reach(path) as opened:
                figures = {"timestamp": iso(source.restore_into(opened, as_of, **how))}
        else:
            how |= {"history": not state_only, "resume": resume, "workers": workers}
            figures = _restore_figures(source.restore(path, as_of, **how))
    print_figures(figures, as_json=as_json)


def _restore_figures(done: Restored) -> dict[str, Any]:
    return {"timestamp": iso(done), "since": iso(done.since), "rows": done.rows}


# --------------------------------------------------------------------------------------------------
# `kvstore backup`: expire, label. They say which instants stay.

KeepOption = Annotated[
    str | None,
    typer.Option(metavar="AGE", help="Keep this long: 12h, 30d, 4w.", show_default=False),
]
BeforeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Give up instants before this time, or before the instant of this label.",
        show_default=False,
        autocompletion=complete_label,
    ),
]
KeepWithinOption = Annotated[
    str | None,
    typer.Option(
        metavar="AGE", help="Keep every instant this long, and thin older ones.", show_default=False
    ),
]


def _count(what: str) -> object:
    return typer.Option(min=0, metavar="N", help=f"With --keep-within: keep the last N {what}.")


HourlyOption = Annotated[int, _count("whole hours (UTC)")]
DailyOption = Annotated[int, _count("midnights (UTC)")]
WeeklyOption = Annotated[int, _count("midnights before a Monday (UTC)")]


def register_retention(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (expire, label):
        app.command()(command)


def expire(
    collection: CollectionArgument,
    keep: KeepOption = None,
    before: BeforeOption = None,
    keep_within: KeepWithinOption = None,
    hourly: HourlyOption = 0,
    daily: DailyOption = 0,
    weekly: WeeklyOption = 0,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give up old instants and free their space; prints the instant from which all stay.

    Labelled instants stay. With --keep-within the states at some older
    instants stay too: `show` lists them.

    \b
    Examples:
      kvstore backup expire /backups/flights --keep 90d
      kvstore backup expire /backups/flights --keep-within 7d --hourly 24 --daily 30
    """
    with working(f"expiring {collection}", quiet=as_json) as progress:
        since = open_existing(collection, key_file).expire(
            before,
            keep=keep,
            keep_within=keep_within,
            hourly=hourly,
            daily=daily,
            weekly=weekly,
            progress=counting(progress, "rows"),
        )
    print_figures({"since": iso(since)}, as_json=as_json)


def label(
    collection: CollectionArgument,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The label.", show_default=False, autocompletion=complete_label
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The instant; else the newest.", show_default=False),
    ] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Take the label away.")] = False,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Name an instant: --as-of takes the name, and no expiry gives the instant up.

    Prints the instant.

    \b
    Examples:
      kvstore backup label /backups/flights before-migration
      kvstore backup label /backups/flights before-migration --drop
    """
    if drop and at is not None:
        raise UsageError("--drop takes no --at", "leave one of them out")
    opened = open_existing(collection, key_file)
    instant = opened.unlabel(name) if drop else opened.label(name, at)
    print_figures({"label": name, "timestamp": iso(instant)}, as_json=as_json)


# --------------------------------------------------------------------------------------------------
# `kvstore backup`: run, list, show, verify, compact, expire, scrub, restore, replicate, promote.
#
# A collection is a path or a URL (`s3://`, `gs://`, `az://`). An encrypted one is opened with the
# passphrase in the environment variable KVSTORE_PASSPHRASE, or with `--key-file`.

_HELP: Final = (
    "Back a store up, and restore it as of any instant.\n\n"
    f"Encrypted collections take the passphrase in {PASSPHRASE}, or a --key-file."
)

app = typer.Typer(help=_HELP, no_args_is_help=True, add_completion=False)


@app.callback(help=_HELP)
def main(
    patience: Annotated[
        str,
        typer.Option(
            metavar="AGE",
            help="How long passing failures of the storage are retried: 30s, 10m.",
        ),
    ] = f"{RETRY_S:g}s",
) -> None:
    """Take the options before a command."""
    patience_s.set(AGE.check("patience", patience).total_seconds())


MaxAgeOption = Annotated[
    str | None,
    typer.Option(
        metavar="AGE",
        help="The store keeps history for the next run this long at most: 12h, 30d.",
        show_default=False,
    ),
]


OptionalStoreArgument = Annotated[
    Path | None, typer.Argument(metavar="[STORE]", help="The store's directory.")
]
OptionalCollectionArgument = Annotated[
    str | None, typer.Argument(metavar="[COLLECTION]", help="A path, s3://, gs:// or az:// URL.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Instead of STORE and COLLECTION: the stores that a TOML file names.",
        show_default=False,
    ),
]
LabelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Name the newest instant of this backup: --as-of takes the name.",
        show_default=False,
    ),
]


FullOption = Annotated[
    bool, typer.Option("--full", help="Begin a new chain beside the present one.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        help="Name of this backup: a repeated run with it does nothing, until compaction."
    ),
]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Continue until interrupted (SIGINT, SIGTERM).")
]
EveryOption = Annotated[
    str, typer.Option(metavar="AGE", help="With --follow: a backup this often at most.")
]


@app.command()
def run(
    store: OptionalStoreArgument = None,
    collection: OptionalCollectionArgument = None,
    config: ConfigOption = None,
    full: FullOption = False,
    token: TokenOption = None,
    label: LabelOption = None,
    max_age: MaxAgeOption = None,
    follow: FollowOption = False,
    every: EveryOption = "1s",
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Back up all commits since the last backup; the first backup is full.

    A service may have the store open. It must listen: kvstore.open(path, shared=True), or
    control=True.
    With --follow the command waits for commits, and prints each backup. It merges
    backups beside that, and tries passing failures again. With --config it backs up
    many stores, and exits with 1 if one of them fails.

    \b
    Examples:
      kvstore backup run flights.db /backups/flights
      kvstore backup run flights.db s3://bucket/flights --token "$(date +%F)"
      kvstore backup run flights.db /backups/flights --label before-migration
      kvstore backup run flights.db s3://bucket/flights --follow --every 10s
      kvstore backup run --config backups.toml
    """
    once = {"full": full, "token": token, "label": label}
    if config is not None:
        others = (store, collection, max_age, key_file, follow or None)
        if any(once.values()) or any(given is not None for given in others):
            raise UsageError("--config takes no other arguments", "write them into the file")
        run_fleet(config, as_json=as_json)
        return
    if store is None or collection is None:
        raise UsageError("STORE or COLLECTION is missing", "give both, or --config FILE")
    opened = open_collection(collection, key_file)
    if follow and any(once.values()):
        raise UsageError("--follow takes no --full, --token and --label", "run these once before")
    if follow:
        _follow(store, opened, max_age, every, as_json=as_json)
    else:
        _back_up(store, opened, max_age, once, as_json=as_json)


def _back_up(
    path: Path,
    collection: Collection,
    max_age: str | None,
    once: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    with working(f"backing up {path}", quiet=as_json) as progress, reach(path) as opened:
        rows = counting(progress, "rows")
        info = collection.backup(opened, max_age=max_age, progress=rows, **once)
    print_figures(backup_figures(info, as_json=as_json), as_json=as_json)


@app.command(name="list")
def list_(
    collection: CollectionArgument,
    limit: ListLimitOption = LISTED_MAX,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the newest backups of a collection, the oldest of them first.

    \b
    Examples:
      kvstore backup list /backups/flights
      kvstore backup list /backups/flights --limit 10
      kvstore backup list /backups/flights --json | jq .upper
    """
    known = open_existing(collection, key_file).list()
    found = known[max(len(known) - limit, 0) :]
    if len(found) < len(known):
        note(f"these are the newest {limit:,} of {len(known):,}; pass --limit for more")
    if as_json:
        for info in found:
            print_json(backup_figures(info, as_json=True))
        return
    figures = [backup_figures(info, as_json=False) for info in found]
    print_table(
        ["from", "up to", "rows", "size", "parts", "proven", "labels"],
        [
            [
                *(f["lower"], f["upper"], f"{f['rows']:,}", f["bytes"], str(f["parts"])),
                *(f["proven_at"], f["labels"]),
            ]
            for f in figures
        ],
    )


@app.command()
def show(
    collection: CollectionArgument,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the times and keys of a collection, its size, and how old its newest backup is.

    \b
    Examples:
      kvstore backup show /backups/flights
    """
    found = open_existing(collection, key_file).show()
    print_figures(collection_figures(found, encoding, as_json=as_json), as_json=as_json)


@app.command()
def verify(
    collection: CollectionArgument,
    depth: Annotated[
        str,
        typer.Option(
            help="files: all parts exist, in their size. checksums: their bytes are as written. "
            "contents: they also equal the store."
        ),
    ] = "checksums",
    store: Annotated[
        Path | None,
        typer.Option(help="With --depth contents: the store to compare with.", show_default=False),
    ] = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that the backups are there and whole. Exits with 1 if they are not.

    \b
    Examples:
      kvstore backup verify /backups/flights
      kvstore backup verify /backups/flights --depth contents --store flights.db
    """
    wanted = word(*DEPTHS).check("depth", depth)
    with ExitStack() as stack:
        progress = stack.enter_context(working(f"reading {collection}", quiet=as_json))
        opened = None if store is None else stack.enter_context(open_read_only(store))
        source = open_collection(collection, key_file)
        try:
            total = source.show().rows
            report = source.verify(wanted, opened, progress=counting(progress, "rows", total))
        except CorruptionError as error:
            raise disproved(error, as_json=as_json) from error
    fields = report._asdict()
    if not as_json:
        fields["bytes"] = size_text(report.bytes)
    print_figures({"ok": True, **fields}, as_json=as_json)


@app.command()
def compact(
    collection: CollectionArgument, key_file: KeyFileOption = None, as_json: JsonOption = False
) -> None:
    """Merge the backups of the newest chain into one. All instants stay restorable.

    \b
    Examples:
      kvstore backup compact /backups/flights
    """
    with working(f"compacting {collection}", quiet=as_json) as progress:
        opened = open_existing(collection, key_file)
        opened.compact(progress=counting(progress, "rows"))
    print_figures(backup_figures(opened.list()[-1], as_json=as_json), as_json=as_json)


@app.command()
def scrub(
    collection: CollectionArgument,
    delete: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Delete orphans older than this: 7d. Choose more than the longest backup takes.",
            show_default=False,
        ),
    ] = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """List blobs that are missing or altered, and the orphans that interrupted backups left.

    Exits with 1 if anything is missing or altered. Orphans cost space and nothing else.

    \b
    Examples:
      kvstore backup scrub /backups/flights
      kvstore backup scrub /backups/flights --delete 7d
    """
    age = AGE.or_none.check("delete", delete)
    with working(f"looking through {collection}", quiet=as_json):
        report = open_existing(collection, key_file).scrub(delete_orphans_older_than=age)
    names = ("missing", "altered", "orphans", "deleted")
    print_figures({name: list(getattr(report, name)) for name in names}, as_json=as_json)
    if not report.is_sound:
        raise typer.Exit(NOT_FOUND)


register_reading(app)
register_restores(app)
register_retention(app)
app.command()(drill)


@app.command()
def replicate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A store's directory, or a collection.", show_default=False
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="REPLICA", help="Its directory; made if it is missing.", show_default=False
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until interrupted (SIGINT, SIGTERM).")
    ] = False,
    max_age: MaxAgeOption = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a replica up to a store or its collection, version for version.

    The replica resumes where it stood, whichever side crashed. With --follow
    its position is printed whenever it has moved on. `promote` makes it an
    ordinary store.

    \b
    Examples:
      kvstore backup replicate /backups/flights replica.db --follow
      kvstore backup replicate flights.db replica.db
    """
    with ExitStack() as stack:
        origin: StoreOrClient | Collection
        if engine_at(Path(source)) is None:
            origin = open_collection(source, key_file)
        else:
            origin = stack.enter_context(reach(Path(source)))
        stack.enter_context(working(f"copying {source}"))
        stop = stop_on_signals() if follow else None

        def tell(upper: Timestamp) -> None:
            print_figures({"upper": iso(upper)}, as_json=as_json)
            sys.stdout.flush()  # a reader of a pipe waits for this line

        upper = replicate_history(
            origin, target, follow, stop=stop, max_age=max_age, progress=tell if follow else None
        )
    if not follow:
        tell(upper)


@app.command()
def promote(
    replica: Annotated[
        Path, typer.Argument(metavar="REPLICA", help="Its directory.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Make a replica an ordinary store, which takes writes and follows no source any more.

    Prints the time from which its own writes begin.

    \b
    Examples:
      kvstore backup promote replica.db
    """
    with open_here(replica) as opened:
        print_figures({"upper": iso(opened.replication.promote())}, as_json=as_json)


def _follow(
    path: Path, collection: Collection, max_age: str | None, every: str, *, as_json: bool
) -> None:
    """Back a store up continuously, and print each backup, until a signal comes."""

    def tell(info: BackupInfo) -> None:
        print_figures(backup_figures(info, as_json=as_json), as_json=as_json)
        sys.stdout.flush()  # a reader of a pipe waits for this line

    stop = stop_on_signals()
    with (
        reach(path) as found,
        collection.follow(found, every, max_age=max_age, progress=tell) as follower,
    ):
        stop.wakes(follower.stop)
        if not stop.is_set():
            follower.wait()


# --------------------------------------------------------------------------------------------------
# `kvstore table publish`: a table of a collection for other systems.

publish_app = typer.Typer(add_completion=False)


@publish_app.command(name="publish")
def publish(
    collection: CollectionArgument,
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="The table's name.", show_default=False)
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The Parquet file, or the path or URL of the Delta table.",
            show_default=False,
        ),
    ],
    format_: Annotated[
        str,
        typer.Option("--format", help="parquet: the rows of one time. delta: a commit a backup."),
    ] = "parquet",
    as_of: InstantOption = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", "-c", metavar="NAMES", help="Only these columns: a,b,c."),
    ] = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a table of a collection of backups for systems that do not know kvstore.

    A Delta table, which needs the extra `delta`, is brought up to the newest backup: a repeated
    command continues behind the last commit. A Parquet file is replaced.

    \b
    Examples:
      kvstore table publish /backups/city trips trips.parquet --as-of yesterday
      kvstore table publish /backups/city trips s3://lake/trips --format delta
    """
    chosen = None if columns is None else [name.strip() for name in columns.split(",")]
    wanted = word(*FORMATS).check("format", format_)
    with working(f"publishing {table}", quiet=as_json) as progress:
        report = open_existing(collection, key_file).publish(
            table, target, wanted, as_of, columns=chosen, progress=counting(progress, "rows")
        )
    print_figures({**report._asdict(), "as_of": iso(report.as_of)}, as_json=as_json)
