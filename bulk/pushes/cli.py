"""`kvstore push`: files become a push, a store pulls; pushes are listed, reverted and expired."""

from __future__ import annotations

import logging
import re
import signal
import threading
from typing import Annotated, Final

import typer

from kvstore.base.arguments import AGE, word
from kvstore.bulk.cli import (
    DelimiterOption,
    DuplicatesOption,
    FileEncodingOption,
    FilesArgument,
    FormatOption,
    NamesOption,
    NestedOption,
    NoHeaderOption,
    QuotingOption,
    file_reads,
    local_files,
)
from kvstore.bulk.progress import Reading
from kvstore.bulk.pushes.pull import ON_REFUSAL, Puller
from kvstore.bulk.pushes.push_log import ADD, MODE
from kvstore.bulk.pushes.pushes import Pushes, send_rows
from kvstore.bulk.row_files import decoded_files
from kvstore.bulk.sort import DUPLICATES
from kvstore.cli.options import (
    Encoding,
    Encodings,
    JsonOption,
    KeyEncodingOption,
    ListLimitOption,
    StoreArgument,
    ValueEncodingOption,
    open_or_create,
    to_bytes,
)
from kvstore.cli.output import (
    counting,
    in_one_line,
    note,
    noted,
    print_figures,
    print_json,
    print_list,
    working,
)
from kvstore.cli.times import iso
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
    pause, pushes = AGE.check("every", every).total_seconds(), Pushes(url)
    pushes.place.require_parent()
    with open_or_create(store, "rocksdb", create=create) as opened:
        how = ON_REFUSAL.check("on_refusal", on_refusal)
        puller = Puller(opened, pushes, name=name, shard=shard, every=pause, on_refusal=how)
        _note_empty(pushes)
        if once:
            with noted("kvstore.pull", logging.WARNING), working(f"pulling {url}", quiet=as_json):
                while puller.step():
                    pass
        else:
            note(f"{store} follows {url} as {name}")
            with noted("kvstore.pull", logging.WARNING), puller:
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
  kvstore push make s3://bucket/pushes codes.csv --delimiter ';' --no-header
"""


@app.command(name="make", help=_MAKE_HELP)
def make_(
    url: UrlArgument,
    sources: FilesArgument,
    key: KeyOption = "key",
    value: ValueOption = "value",
    shards: ShardsOption = 1,
    mode: ModeOption = ADD,
    prefix: ReplacedOption = None,
    keep_newer: KeepNewerOption = False,
    built_at: BuiltAtOption = None,
    duplicates: DuplicatesOption = "error",
    format_: FormatOption = None,
    quoting: QuotingOption = "standard",
    delimiter: DelimiterOption = None,
    no_header: NoHeaderOption = False,
    names: NamesOption = None,
    nested: NestedOption = "error",
    encoding: FileEncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the options, and push."""
    usual = [key, value]
    reads = file_reads(quoting, delimiter, names, nested, no_header=no_header, usual_names=usual)
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    twice = word(*DUPLICATES).check("duplicates", duplicates)
    kind = MODE.check("mode", mode)
    with (
        working(f"pushing to {url}", quiet=as_json) as progress,
        local_files(sources, progress, format_) as files,
    ):
        reads.require_fitting(files)
        reading = Reading(files)
        found = decoded_files(
            files,
            {"key": key, "value": value},
            notation,
            reads._replace(reading=reading),
            has_expiries=True,
        )
        rows = reading.over(found, counting(progress, "rows read"))
        with Pushes(url).begin(
            shards,
            mode=kind,
            prefix=None if prefix is None else to_bytes(prefix, notation.key),
            keep_newer=keep_newer,
            built_at=built_at,
        ) as building:
            push = send_rows(building, rows, twice)
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
        gone = _made(url).expire(keep=int(keep) if _COUNT.fullmatch(keep) else keep)
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


def _set_by_signal() -> threading.Event:
    """An event that an interrupt or a request to end sets, from now on."""
    stopped = threading.Event()

    def on_signal(*_: object) -> None:
        # In a thread: the handler may have interrupted a holder of the lock that `set` needs.
        threading.Thread(target=stopped.set).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stopped
