"""`kvstore push`: files become a push, a store pulls; pushes are listed, reverted and expired."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.base.arguments import word
from kvstore.bulk.delimited import QUOTINGS
from kvstore.bulk.files import FileReads, decoded_files, format_of, require_quoting
from kvstore.bulk.pushes.log import ADD, MODE
from kvstore.bulk.pushes.pull import ON_REFUSAL, Puller
from kvstore.bulk.pushes.pushes import Pushes, send_rows
from kvstore.bulk.sort import DUPLICATES
from kvstore.bulk.staging import Reading
from kvstore.cli.options import (
    Encoding,
    Encodings,
    JsonOption,
    ListLimitOption,
    StoreArgument,
    open_or_create,
    to_bytes,
)
from kvstore.cli.output import (
    counting,
    in_one_line,
    note,
    print_figures,
    print_json,
    print_list,
    working,
)
from kvstore.cli.times import iso, to_duration
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    NoBucketError,
    RetryableError,
    StorageError,
    UsageError,
)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Push loads through a bucket to many stores."
)

_COUNT: Final = re.compile(r"[0-9]{1,19}")

UrlArgument = Annotated[
    str,
    typer.Argument(metavar="URL", help="The root of the pushes.", show_default=False),
]
SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE",
        help="Files: .parquet, .csv, .tsv, .jsonl, .arrow, .feather.",
        show_default=False,
    ),
]
KeyOption = Annotated[str, typer.Option(metavar="COLUMN", help="The column with the keys.")]
ValueOption = Annotated[str, typer.Option(metavar="COLUMN", help="The column with the values.")]
ShardsOption = Annotated[int, typer.Option(help="The number of shards.")]
ModeOption = Annotated[
    str, typer.Option(help="add the rows, or replace the rows with --prefix by them.")
]
ReplacedOption = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        "-p",
        help="With --mode replace: the prefix of the replaced keys.",
        show_default=False,
    ),
]
KeepNewerOption = Annotated[
    bool, typer.Option("--keep-newer", help="Leave keys alone that are newer than --built-at.")
]
BuiltAtOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="When the rows were read.", show_default=False)
]
QuotingOption = Annotated[
    str,
    typer.Option(
        help="Quotes of CSV and TSV: standard (RFC 4180), or none: a quote is a letter as others."
    ),
]
DuplicatesOption = Annotated[
    str, typer.Option(help="A key that comes twice: error, or last: the last row counts.")
]
EncodingOption = Annotated[
    Encoding, typer.Option("--encoding", "-e", help="The notation of keys and values in the files.")
]
NumberArgument = Annotated[
    int, typer.Argument(metavar="PUSH", help="The number of a push.", show_default=False)
]
_LISTED = ["push", "at", "mode", "state", "shards", "rows", "bytes"]
_STATUS = ["name", "shard", "state", "at", "error"]


@app.command(name="pull")
def pull_(
    store: StoreArgument,
    url: UrlArgument,
    name: Annotated[str, typer.Option(help="The name of this store in the statuses.")],
    shard: Annotated[int, typer.Option(help="The shard that this store takes.")] = 0,
    every: Annotated[str, typer.Option(metavar="AGE", help="The pause between two looks.")] = "5s",
    on_refusal: Annotated[
        str, typer.Option(help="A push that does not fit: pass it, or wait until it does.")
    ] = "pass",
    once: Annotated[bool, typer.Option("--once", help="Take what is there, and end.")] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Create a store that does not exist.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep a store up to the pushes below a URL, until a signal. A push that does not fit
    is refused, with the reason in its status, and the next one is taken, unless --on-refusal
    is wait.

    \b
    Examples:
      kvstore push pull flights.db s3://bucket/pushes --name eu-1
      kvstore push pull flights.db s3://bucket/pushes --name eu-1 --shard 2 --once
    """
    pause, pushes = to_duration(every).total_seconds(), Pushes(url)
    pushes.place.require_parent()
    with open_or_create(store, "rocksdb", create=create) as opened:
        how = ON_REFUSAL.check("on_refusal", on_refusal)
        puller = Puller(opened, pushes, name=name, shard=shard, every=pause, on_refusal=how)
        _note_empty(pushes)
        if once:
            with _failures_noted(), working(f"pulling {url}", quiet=as_json):
                while puller.step():
                    pass
        else:
            note(f"{store} follows {url} as {name}")
            with _failures_noted(), puller:
                stopped = _set_by_signal()  # before the first line that the thread may print
                puller.start()
                stopped.wait()
        position = puller.status
    states = [told["state"] for told in position["pushes"].values()]
    figures = {state: states.count(state) for state in ("added", "reverted", "refused")}
    print_figures({"events": position["log"], **figures}, as_json=as_json)


_MAKE_HELP: Final = """\
Push the rows of files to all stores that pull from a URL. The formats are the formats of
kvstore import; a column expires has the times at which keys expire.

With --mode replace the push is the new whole of the keys with --prefix: stores delete the
other keys there. With --keep-newer, keys that were written after --built-at stay.

\b
Examples:
  kvstore push make s3://bucket/pushes fares.parquet --key trip --value fare
  kvstore push make s3://bucket/pushes codes.csv --mode replace --prefix code/
"""


@app.command(name="make", help=_MAKE_HELP)
def make_(
    url: UrlArgument,
    sources: SourcesArgument,
    key: KeyOption = "key",
    value: ValueOption = "value",
    shards: ShardsOption = 1,
    mode: ModeOption = ADD,
    prefix: ReplacedOption = None,
    keep_newer: KeepNewerOption = False,
    built_at: BuiltAtOption = None,
    duplicates: DuplicatesOption = "error",
    quoting: QuotingOption = "standard",
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Take the options, and push."""
    for source in sources:
        format_of(source)
    quotes = word(*QUOTINGS).check("quoting", quoting)
    require_quoting(sources, quotes)
    twice = word(*DUPLICATES).check("duplicates", duplicates)
    building = Pushes(url).begin(
        shards,
        mode=MODE.check("mode", mode),
        prefix=None if prefix is None else to_bytes(prefix, encoding),
        keep_newer=keep_newer,
        built_at=built_at,
    )
    with building, working(f"pushing to {url}", quiet=as_json) as progress:
        reading, notation = Reading(sources), Encodings(encoding, encoding)
        columns = {"key": key, "value": value}
        reads = FileReads(reading, quotes)
        found = decoded_files(sources, columns, notation, reads, has_expiries=True)
        push = send_rows(building, reading.over(found, counting(progress, "rows read")), twice)
    figures = {"push": push.number, "rows": push.rows, "bytes": push.size_bytes}
    print_figures(figures, as_json=as_json)


@app.command(name="list")
def list_(url: UrlArgument, limit: ListLimitOption = 100, as_json: JsonOption = False) -> None:
    """List the pushes below a URL, newest first.

    \b
    Examples:
      kvstore push list s3://bucket/pushes
    """
    pushes = _made(url).list(last=limit)
    found = [
        {
            "push": push.number,
            "at": iso(push.at),
            "mode": push.mode,
            "state": push.state,
            "shards": push.shards,
            "rows": push.rows,
            "bytes": push.size_bytes,
        }
        for push in reversed(pushes)
    ]
    print_list(found, _LISTED, limit, as_json=as_json)
    if pushes and pushes[0].number > 1:
        note("there are older pushes; pass --limit for more")


@app.command(name="status")
def status_(url: UrlArgument, push: NumberArgument, as_json: JsonOption = False) -> None:
    """Show what each store has done with a push.

    \b
    Examples:
      kvstore push status s3://bucket/pushes 7
    """
    found = [
        {
            "name": each.name,
            "shard": each.shard,
            "state": each.state,
            "at": None if each.at is None else iso(each.at),
            "error": each.error,
            "seconds": dict(each.seconds),
            "free": each.free,
        }
        for each in _made(url).status(push).stores
    ]
    print_list(found, _STATUS, max(len(found), 1), as_json=as_json)


@app.command(name="revert")
def revert_(url: UrlArgument, push: NumberArgument, as_json: JsonOption = False) -> None:
    """Take a push back on every store that pulls from a URL.

    \b
    Examples:
      kvstore push revert s3://bucket/pushes 7
    """
    _made(url).revert(push)
    if as_json:
        print_json({"push": push, "reverted": True})


@app.command(name="expire")
def expire_(
    url: UrlArgument,
    keep: Annotated[str, typer.Option(help="Newest pushes to keep, or an age: 5, 7d.")],
    as_json: JsonOption = False,
) -> None:
    """Remove the files of old pushes. Stores that have added them keep their rows.

    \b
    Examples:
      kvstore push expire s3://bucket/pushes --keep 5
    """
    with working(f"looking through {url}", quiet=as_json):
        gone = _made(url).expire(keep=int(keep) if _COUNT.fullmatch(keep) else to_duration(keep))
    print_figures(
        {"pushes": len(gone), "bytes": sum(push.size_bytes for push in gone)}, as_json=as_json
    )


def _made(url: str) -> Pushes:
    """The pushes below a URL. Raises `UsageError` if there are none, as for a mistyped URL."""
    pushes = Pushes(url)
    pushes.log.require_made()
    return pushes


def _note_empty(pushes: Pushes) -> None:
    """Tell of a root without a push: it waits for the first one, or its URL is mistyped.

    Raises `NoBucketError` for a missing bucket, `AccessDeniedError` for one that may not be read.
    The puller meets other failures itself.
    """
    try:
        pushes.log.require_made()
    except (AccessDeniedError, NoBucketError):
        raise
    except UsageError:
        note(f"{pushes.where} holds no push yet")
    except (CorruptionError, RetryableError, StorageError) as error:
        note(in_one_line(str(error)))


class _Notes(logging.Handler):
    """Prints what happens to pushes, and failures without their tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        note(in_one_line(record.getMessage()))


@contextmanager
def _failures_noted() -> Iterator[None]:
    logger, handler = logging.getLogger("kvstore.pull"), _Notes(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _set_by_signal() -> threading.Event:
    """An event that an interrupt or a request to end sets, from now on."""
    stopped = threading.Event()

    def on_signal(*_: object) -> None:
        # In a thread: the handler may have interrupted a holder of the lock that `set` needs.
        threading.Thread(target=stopped.set).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stopped
