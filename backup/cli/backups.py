"""`kvstore backup`: run, list, show, verify, compact, expire, scrub, restore, replicate, promote.

A collection is a path or a URL (`s3://`, `gs://`, `az://`). An encrypted one is opened with the
passphrase in the environment variable KVSTORE_PASSPHRASE, or with `--key-file`.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import backup
from backup.cli import reading, restores, retention
from backup.cli.drills import drill
from backup.cli.figures import backup_figures, collection_figures, disproved
from backup.cli.fleets import run_fleet
from backup.cli.options import (
    PASSPHRASE,
    CollectionArgument,
    KeyFileOption,
    open_collection,
    open_existing,
    stop_on_signals,
)
from backup.cli.options import patience as patience_s
from backup.collection import Collection
from backup.verify import DEPTHS
from backup.window import BackupInfo
from kvstore.cli.exits import NOT_FOUND
from kvstore.cli.options import (
    LISTED_MAX,
    Encoding,
    EncodingOption,
    JsonOption,
    ListLimitOption,
    iso,
    one_of,
    to_duration,
)
from kvstore.cli.output import (
    counting,
    note,
    print_figures,
    print_json,
    print_table,
    size_text,
    working,
)
from kvstore.cli.stores import open_here, open_to_write, reach
from kvstore.control.scripts import StoreOrClient
from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import RETRY_S
from kvstore.opening import engine_at, open_read_only
from kvstore.timestamp import Timestamp

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
    patience_s.set(to_duration(patience).total_seconds())


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

    A service may have the store open. It must listen: kvstore.open(path, control=True).
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
    age = None if max_age is None else to_duration(max_age)
    opened = open_collection(collection, key_file)
    if follow and any(once.values()):
        raise UsageError("--follow takes no --full, --token and --label", "run these once before")
    if follow:
        _follow(store, opened, age, every, as_json=as_json)
    else:
        _back_up(store, opened, age, once, as_json=as_json)


def _back_up(
    path: Path,
    collection: Collection,
    max_age: timedelta | None,
    once: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    with working(f"backing up {path}", quiet=as_json) as progress, open_to_write(path) as opened:
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
    wanted = one_of("--depth", depth, DEPTHS)
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
    age = None if delete is None else to_duration(delete)
    with working(f"looking through {collection}", quiet=as_json):
        report = open_existing(collection, key_file).scrub(delete_orphans_older_than=age)
    names = ("missing", "altered", "orphans", "deleted")
    print_figures({name: list(getattr(report, name)) for name in names}, as_json=as_json)
    if not report.is_sound:
        raise typer.Exit(NOT_FOUND)


reading.register(app)
restores.register(app)
retention.register(app)
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
    age = None if max_age is None else to_duration(max_age)
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

        upper = backup.replicate(
            origin, target, follow, stop=stop, max_age=age, progress=tell if follow else None
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
    path: Path, collection: Collection, max_age: timedelta | None, every: str, *, as_json: bool
) -> None:
    """Back a store up continuously, and print each backup, until a signal comes."""

    def tell(info: BackupInfo) -> None:
        print_figures(backup_figures(info, as_json=as_json), as_json=as_json)
        sys.stdout.flush()  # a reader of a pipe waits for this line

    stop = stop_on_signals()
    with (
        reach(path) as found,
        collection.follow(found, to_duration(every), max_age=max_age, progress=tell) as follower,
    ):
        stop.wakes(follower.stop)
        if not stop.is_set():
            follower.wait()
