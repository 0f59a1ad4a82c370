"""The named workloads. A figure is the rate of a subject over the rate of its baseline.

Unless a line says otherwise the baseline is raw rocksdict, one value a key.

Writing
bulk-load           load all rows, sorted, into an empty store
bulk-load-2         the same by two processes, started before, with half of the rows each
commit-100          durable commits of 100 updates
commit-100-8        the same from 8 threads, against one thread of raw rocksdict
commit-10k          durable commits of 10,000 updates, change log included where there is one
commit-index        the same with the change log, against the store without it: 1 less its share
delete-range        delete a tenth of all rows, history kept, against a synced put: 20 of each
delete-range-all    delete all rows, history kept, against a synced put: 20 of each
import-commit       add an import of all rows, built before, against a move-ingest of as many
import-1mb          add a prebuilt import, against a move-ingest of a prebuilt file
import-100mb        the same at 100 MB
import-1gb          the same at 1 GB (from 1,000,000 rows on)
transact            transactions that read a key and write it, unsynced, against a get and a put
transact-8          the same from 8 threads, against 8 threads
transact-synced     the same, durable, against a get, a put and an fsync
transact-synced-8   the same from 8 threads, against 8 threads

Reading
get                 point reads of the newest value, keys in no order
get-as-of           point reads at a time before all updates
get-many            one call for many sorted keys at that time
scan                all rows, newest values, one by one
scan-as-of          all rows at a time before all updates
scan-arrow          all rows as Arrow record batches
scan-arrow-as-of    the same at a time before all updates
scan-arrow-2        likewise by two processes, started before; below 24 MB by one
get-imported        point reads of rows that came by bulk load, then updated as all others
scan-imported       rows that came by bulk load
arrow-imported      Arrow batches of rows that came by bulk load
get-1-range         point reads beside 1 range tombstone, against none
get-100-ranges      point reads beside 100 range tombstones, against none
get-many-1-range    one call for many sorted keys beside 1 range tombstone, against none
get-many-100-ranges the same beside 100
scan-1-range        rows beside 1 range tombstone, against none
scan-100-ranges     rows beside 100 range tombstones, against none
arrow-1-range       Arrow batches beside 1 range tombstone, against none
arrow-100-ranges    Arrow batches beside 100 range tombstones, against none

Changes
changes             windows of 10,000 changes each, against iterating over as many rows
changes-arrow       the same as Arrow record batches
changes-by-key      the same, sorted by key
changes-events      the same as events
changes-feed        the same through a feed, its position and one ack included
changes-flat        changes-arrow in a store of all rows, against one of a tenth
feed-latency        a durable put and its delivery to a thread that follows, against a queue's

Upkeep
gc                  remove the versions behind 10,000 updates, against looking up and deleting them
gc-flat             GC after 1 % of all rows changed, against as many changes in a tenth of the rows
disk                bytes after the updates, history and log kept, against one value a key
disk-trimmed        the same once history and log are given up to the present

Backup
backup              20 increments, each of 10,000 changes just committed: the sum, against that of
                    copying a raw checkpoint's new files after each
backup-copied       the same, against copying the new files of the store's own checkpoints
backup-single       the median one, by a handle just opened, against the median copy
backup-full         all rows, against copying a checkpoint's files
backup-flat         a single increment in a store of all rows, against one of a tenth
backup-scan         rows of a collection as of a time, against delta-rs at that version
restore             the newest state from a collection, against a bulk load from Parquet
increments-list     list many increments, against a quarter of them: seconds per byte
increments-verify   verify them, likewise
increments-restore  restore from them, likewise

Journal and tasks
journal-append-...  append records of 100 B to 1 MB, against a plain log with the same checksum
journal-batch-...   the same, 100 at once
journal-replay-...  read them back
journal-synced      append with an fsync each
tasks-claim         claim tasks while 100,000 wait, against 1,000

Spark
spark-import        bulk_import, against Spark's own read, range partition and sort
spark-import-delta  bulk_import, against the same job by delta-rs
spark-read          a collection into a sink by read_collection, against Parquet of the same rows
spark-read-increments  a collection with five increments of a thousandth of the rows, likewise
spark-read-source   a collection by format("kvstore"), likewise
spark-read-checkpoint  a checkpoint, likewise
spark-read-changes  all changes of a collection, likewise
spark-read-delta    read_collection, against Spark's scan of the files that delta-rs names
spark-backup        a full backup by tasks on two cores, against one process
spark-backup-delta  the same, against copying a table into another by delta-rs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

RAW = "benchmarks.raw:Raw"
OURS = "benchmarks.ours:Ours"
UNINDEXED = "benchmarks.ours:Unindexed"
SIDES = "benchmarks.ours:Sides"
IMPORTED = "benchmarks.ours:Imported"
TENTH = "benchmarks.ours:Tenth"
COPIED = "benchmarks.ours:Copied"
JOURNAL = "benchmarks.journal:JournalLog"
PLAIN = "benchmarks.journal:PlainLog"
SPARK = "benchmarks.spark:Jobs"
PEERS = {
    "lmdb": "benchmarks.peers.lmdb:Lmdb",
    "plyvel": "benchmarks.peers.plyvel:Plyvel",
    "sqlite3": "benchmarks.peers.sqlite:Sqlite",
    "duckdb": "benchmarks.peers.duckdb:Duckdb",
    "deltalake": "benchmarks.peers.deltalake:Deltalake",
    "pylance": "benchmarks.peers.pylance:Pylance",
    "pyiceberg": "benchmarks.peers.pyiceberg:Pyiceberg",
    "arcticdb": "benchmarks.peers.arcticdb:Arcticdb",
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything one run does."""

    rows: int
    rounds: int
    lookups: int
    commits_100: int
    commits_10k: int
    update_rows: int
    windows: int

    @classmethod
    def of(cls, rows: int, *, rounds: int) -> Size:
        """Fit a run to `rows`."""
        return cls(
            rows=rows,
            rounds=rounds,
            lookups=min(rows // 5, 200_000),
            commits_100=max(20, min(40, rows // 25_000)),
            commits_10k=max(1, min(20 // rounds, rows // 150_000)),
            update_rows=min(10_000, rows // 10),
            windows=max(4, min(20, rows // 50_000)),
        )

    @property
    def is_small(self) -> bool:
        """Whether this is a quick run: what takes a tenth of a second is taken again then."""
        return self.rows <= 300_000


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of a subject, with its arguments; `items`, where it differs from others'."""

    operation: str
    arguments: dict[str, Any] = field(default_factory=dict)
    items: int | None = None


class Contender(NamedTuple):
    """A subject and what it is asked; `label` tells two of one subject apart."""

    subject: str
    call: Call
    label: str = ""

    @property
    def name(self) -> str:
        """As figures have it."""
        return self.label or self.subject.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table. `items` is what each subject must report, None where that varies.

    `baseline` and `ours` are subjects beside the peers, which get `peers_call`. `reach` is the
    ratio that the project has set itself, `grows` whether the growth run has it. Of `repeats`
    runs in a turn the least time counts. `warm`: one round more comes first that does not count.
    `has_cpu`: the work is done in the subject's own process.
    """

    name: str
    baseline: Contender
    ours: Contender
    peers_call: Call | None = None
    items: int | None = None
    reach: float | None = None
    per: str = "item"
    grows: bool = False
    repeats: int = 1
    warm: bool = False
    has_cpu: bool = True
    slow_arguments: dict[str, Any] = field(default_factory=dict)


class Stage(NamedTuple):
    """Workloads after the same preparation, which every subject of the scene makes."""

    prepare: Sequence[Call]
    workloads: Sequence[Workload]


class Scene(NamedTuple):
    """Stages, one after the other, on the same subjects: processes that live as long as it."""

    stages: Sequence[Stage]
    has_peers: bool = False
    is_quick: bool = True
    """Whether a quick run has it too."""


def scenes(size: Size) -> list[Scene]:
    """All that is measured, in order."""
    warm_up = Call("commit", {"rows": 100, "count": 1, "step": 9_000})
    updates = {"rows": size.update_rows, "count": 1}
    change = Call("commit", {**updates, "step": 10_000})
    windows = [
        call
        for number in range(size.windows)
        for call in (
            Call("mark", {"name": f"window-{number}"}),
            Call("commit", {**updates, "step": 10_001 + number}),
        )
    ]
    fill, settle = Call("fill"), Call("settle")
    loaded = Call("mark", {"name": "loaded"})
    # Reads are measured with everything in the caches, as a service at work has it.
    warm_caches = (Call("scan"), Call("scan_arrow"))
    return [
        Scene(
            [
                Stage((), _loading(size)),
                # The first commits of a process pay for its imports and its first memtable.
                Stage((fill, loaded, warm_up), _committing(size)),
                Stage((change, settle, *warm_caches), _reading(size)),
                Stage((*windows, settle, Call("scan")), _changes(size)),
                Stage((), _ending(size)),
            ],
            has_peers=True,
        ),
        Scene([Stage((fill, settle, Call("scan")), _beside_ranges(size))]),
        Scene([Stage((fill, settle, *windows), _flat(size))]),
        Scene([Stage((fill, loaded, warm_up, change), _collections(size))], is_quick=False),
        Scene([Stage((), _journal(size))]),
        Scene([Stage((), _spark())], is_quick=False),
    ]


def workloads(size: Size) -> list[Workload]:
    """All workloads, in the order of the table above."""
    named = [name.removesuffix("...") for name in _lines()]
    found = [w for scene in scenes(size) for stage in scene.stages for w in stage.workloads]
    return sorted(found, key=lambda w: named.index(_line_of(w.name).removesuffix("...")))


def section(workload: str) -> str:
    """The heading above a workload at the top of this file."""
    return _lines()[_line_of(workload)]


def _line_of(workload: str) -> str:
    for name in _lines():
        if workload == name or (name.endswith("...") and workload.startswith(name[:-3])):
            return name
    raise ValueError(f"{workload} has no line at the top of {__file__}")


def _lines() -> dict[str, str]:
    """The names at the top of this file, each with its heading."""
    found, heading = {}, ""
    for line in (__doc__ or "").splitlines()[4:]:
        name = line.partition(" ")[0]
        if name[:1].isupper():
            heading = line
        elif name:
            found[name] = heading
    return found


def _raw(operation: str, **arguments: Any) -> Contender:
    return Contender(RAW, Call(operation, arguments))


def _ours(operation: str, **arguments: Any) -> Contender:
    return Contender(OURS, Call(operation, arguments))


def _loading(size: Size) -> list[Workload]:
    load, by_two = Call("bulk_load"), _ours("bulk_load_parts", workers=2)
    return [
        Workload("bulk-load", _raw("bulk_load"), _ours("bulk_load"), load, size.rows, 0.95),
        Workload(
            "bulk-load-2", _raw("bulk_load"), by_two, items=size.rows, reach=1.2, has_cpu=False
        ),
    ]


def _committing(size: Size) -> list[Workload]:
    hundred = {"rows": 100, "count": size.commits_100}
    many = {"rows": size.update_rows, "count": size.commits_10k}
    return [
        Workload(
            f"commit-{name}",
            _raw("commit", **each),
            _ours("commit", **each),
            Call("commit", each),
            reach=reach,
            slow_arguments={"count": slow},
        )
        for name, each, reach, slow in (("100", hundred, 0.95, 2), ("10k", many, 0.88, 1))
    ]


def _reading(size: Size) -> list[Workload]:
    again = {"repeats": 2 if size.is_small else 1}
    rows = {"items": size.rows, **again}
    # A look-up takes duckdb milliseconds: 30 at a time were some 15 s of a quick run of 240.
    found = {
        "items": size.lookups,
        "slow_arguments": {"count": 10 if size.is_small else 30},
        **again,
    }
    gets = {"count": size.lookups}
    get, scan = _raw("get", **gets), _raw("scan")

    def plain(name: str, operation: str, reach: float, **more: Any) -> list[Workload]:
        baseline, sizes = (get, found) if operation.startswith("get") else (scan, rows)
        arguments = gets if baseline is get else {}
        return [
            Workload(
                f"{name}{suffix}",
                baseline,
                _ours(operation, **arguments, **at),
                Call(operation, {**arguments, **at}),
                reach=target,
                grows=bool(more.get("grows")) and not at,
                **sizes,
            )
            for suffix, at, target in (
                ("", {}, reach),
                ("-as-of", {"as_of": "loaded"}, more["as_of"]),
            )
        ]

    get_many = _ours("get_many", **gets, as_of="loaded")
    imported = {
        name: Contender(IMPORTED, Call(operation, arguments))
        for name, operation, arguments in (
            ("get", "get", gets),
            ("scan", "scan", {}),
            ("arrow", "scan_arrow", {}),
        )
    }
    return [
        *plain("get", "get", 0.95, as_of=0.9),
        Workload("get-many", get, get_many, reach=2.2, **found),
        *plain("scan", "scan", 0.7, as_of=0.65, grows=True),
        *plain("scan-arrow", "scan_arrow", 0.6, as_of=0.55, grows=True),
        Workload(
            "scan-arrow-2",
            Contender(RAW, Call("scan")),
            _ours("scan_arrow", workers=2),
            reach=1.0,
            grows=True,
            has_cpu=False,
            **rows,
        ),
        Workload("get-imported", get, imported["get"], reach=0.95, **found),
        Workload("scan-imported", scan, imported["scan"], reach=0.7, **rows),
        Workload("arrow-imported", scan, imported["arrow"], reach=0.6, **rows),
    ]


def _beside_ranges(size: Size) -> list[Workload]:
    gets = {"count": size.lookups}
    calls = {
        "get": (Call("get", gets), size.lookups),
        "get-many": (Call("get_many", gets), size.lookups),
        "scan": (Call("scan"), size.rows),
        "arrow": (Call("scan_arrow"), size.rows),
    }

    def on(side: str, call: Call) -> Contender:
        return Contender(SIDES, Call(call.operation, {**call.arguments, "side": side}), side)

    def against(name: str, baseline: str, ours: str, reach: float) -> Workload:
        call, items = calls[name.rsplit("-", 2)[0]]
        sides = on(baseline, call), on(ours, call)
        return Workload(name, *sides, items=items, reach=reach, repeats=3)

    return [
        *(
            against(f"{name}-{what}", "none", side, reach)
            for name in calls
            for what, side, reach in (("1-range", "1", 0.95), ("100-ranges", "100", 0.85))
        ),
    ]


def _changes(size: Size) -> list[Workload]:
    """Windows that follow each other: one alone takes less than a process needs to wake up."""
    rows, windows = size.update_rows, size.windows
    last = {"since": f"window-{windows - 1}"}
    return [
        Workload(
            f"changes{name}",
            _raw("scan_rows", count=rows, windows=windows),
            _ours(f"changes{operation}", windows=windows),
            Call(f"changes{operation}", last, items=rows) if for_peers else None,
            items=rows * windows,
            reach=reach,
            grows=True,
            repeats=3,
        )
        for name, operation, for_peers, reach in (
            ("", "", True, 5.0),
            ("-arrow", "_arrow", True, 5.0),
            ("-by-key", "_by_key", False, 5.0),
            ("-events", "_events", False, None),
            ("-feed", "_feed", False, None),
        )
    ]


def _ending(size: Size) -> list[Workload]:
    """What must come last: it deletes, or writes more than the yardstick did."""
    hundred = {"rows": 100, "count": size.commits_100}
    many = {"rows": size.update_rows}
    twenty: dict[str, Any] = {"count": 20}
    tenth: dict[str, Any] = {"rows": size.rows // 10}
    ends: dict[str, Any] = {"baseline": _raw("put_synced", **twenty), "grows": True}
    eight = {**hundred, "count": 160, "threads": 8}
    return [
        Workload("disk", _raw("disk"), _ours("disk"), Call("disk"), per="bytes"),
        Workload("disk-trimmed", _raw("disk"), _ours("disk_trimmed"), reach=0.87, per="bytes"),
        *_transactions(),
        Workload(
            "feed-latency",
            _raw("deliver", count=200),
            _ours("deliver", count=200),
            items=200,
        ),
        Workload(
            "commit-100-8", _raw("commit", **hundred), _ours("commit_threads", **eight), reach=4.0
        ),
        Workload("gc", _raw("look_up_and_delete", **many), _ours("gc", **many), repeats=3),
        *_backups(size),
        Workload("restore", _raw("restore"), _ours("restore"), items=size.rows),
        *_imports(size),
        Workload(
            "delete-range",
            ours=_ours("delete_range", **tenth, **twenty),
            peers_call=Call("delete_range", tenth),
            reach=1.0,
            **ends,
        ),
        Workload(
            "delete-range-all",
            ours=_ours("delete_range", rows=size.rows, **twenty),
            reach=0.67,
            **ends,
        ),
    ]


def _backups(size: Size) -> list[Workload]:
    """Increments: all of a turn, as a checkpoint's new files come in bursts, and a single one."""
    rows, count = size.update_rows, 6 if size.is_small else 20
    each = {"rows": rows, "count": count}
    single = {**each, "is_single": True}
    return [
        Workload(
            "backup",
            _raw("backup", **each),
            _ours("backup", **each),
            items=rows * count,
            reach=4.5,
            grows=True,
        ),
        Workload("backup-single", _raw("backup", **single), _ours("backup", **single), items=rows),
    ]


def _transactions() -> list[Workload]:
    return [
        Workload(
            f"transact{'-synced' * synced}{'-8' * (threads == 8)}",
            _raw("read_and_put", count=count, threads=threads, synced=synced),
            _ours("transact", count=count, threads=threads, synced=synced),
            items=count,
        )
        for count, threads, synced in (
            (2_000, 1, False),
            (2_000, 8, False),
            (400, 1, True),
            (1_600, 8, True),
        )
    ]


def _imports(size: Size) -> list[Workload]:
    return [
        Workload(
            "import-commit",
            _raw("ingest_rows"),
            _ours("ingest_rows"),
            items=1,
            reach=0.5,
            grows=True,
        ),
        *(
            Workload(
                f"import-{name}",
                _raw("ingest", megabytes=megabytes),
                _ours("ingest", megabytes=megabytes),
                items=1,
                reach=0.5,
            )
            for name, megabytes in (("1mb", 1), ("100mb", 100), ("1gb", 1024))
            if megabytes <= 100 or not size.is_small
        ),
    ]


def _flat(size: Size) -> list[Workload]:
    """The same work in a store of all rows, against one of a tenth; and the share of the log."""
    rows = size.update_rows

    def flat(name: str, operation: str, reach: float, **arguments: Any) -> Workload:
        repeats = arguments.pop("repeats", 1)
        sides = (Contender(where, Call(operation, arguments)) for where in (TENTH, OURS))
        return Workload(name, *sides, reach=reach, repeats=repeats)

    commits = Call("commit", {"rows": rows, "count": 4})
    increments = {"rows": rows, "count": 6 if size.is_small else 20}
    return [
        flat("changes-flat", "changes_arrow", 0.8, windows=size.windows, repeats=3),
        flat("gc-flat", "gc", 0.33, rows=size.rows // 100, repeats=3),
        flat("backup-flat", "backup", 0.8, rows=size.rows // 100, count=5, is_single=True),
        Workload(
            "backup-copied",
            Contender(COPIED, Call("backup", increments)),
            Contender(OURS, Call("backup", increments)),
            items=rows * increments["count"],
            reach=4.5,
        ),
        Workload(
            "commit-index",
            Contender(UNINDEXED, commits),
            Contender(OURS, commits),
            reach=0.88,
            repeats=3,
        ),
    ]


def _collections(size: Size) -> list[Workload]:
    old, count = {"as_of": "loaded"}, 400
    delta = Contender(PEERS["deltalake"], Call("scan_arrow", old))
    found = [
        Workload("backup-full", _raw("backup_full"), _ours("backup_full"), items=size.rows),
        Workload("backup-scan", delta, _ours("scan_collection", **old), items=size.rows, reach=1.0),
    ]
    for name in ("list", "verify", "restore"):
        few, many = (
            _ours("increments", action=name, count=n)._replace(label=f"{n} increments")
            for n in (count // 4, count)
        )
        found.append(Workload(f"increments-{name}", few, many, reach=0.8))
    return found


_RECORDS = (
    ("100b", 100, 4_000),
    ("252b", 252, 4_000),
    ("1kb", 1_000, 2_000),
    ("10kb", 10_000, 300),
    ("64kb", 64_000, 60),
    ("300kb", 300_000, 12),
    ("1mb", 1_000_000, 4),
)
"""Name, payload bytes, records: small commits, rows, pages, blobs."""


def _journal(size: Size) -> list[Workload]:
    def against_plain(name: str, operation: str, **arguments: Any) -> Workload:
        call = Call(operation, arguments)
        return Workload(
            f"journal-{name}",
            Contender(PLAIN, call),
            Contender(JOURNAL, call),
            reach=0.6,
            repeats=3,
        )

    claims = [
        Contender(JOURNAL, Call("claim", {"waiting": waiting}), f"{waiting:,} waiting")
        for waiting in (1_000, 10_000 if size.is_small else 100_000)
    ]
    return [
        *(
            against_plain(f"{kind}-{name}", operation, record_bytes=length, count=count, **more)
            for name, length, count in _RECORDS
            for kind, operation, more in (
                ("append", "append", {}),
                ("batch", "append", {"at_once": 100}),
                ("replay", "replay", {}),
            )
        ),
        against_plain("synced", "append", record_bytes=1_000, count=25, synced=True),
        Workload("tasks-claim", *claims, reach=0.8),
    ]


def _spark() -> list[Workload]:
    def against(name: str, baseline: str, operation: str, reach: float | None) -> Workload:
        return Workload(
            f"spark-{name}",
            Contender(SPARK, Call(baseline), baseline),
            Contender(SPARK, Call(operation), operation),
            reach=reach,
            warm=True,
            has_cpu=False,
        )

    return [
        against("import", "sort", "bulk_import", 0.71),
        against("import-delta", "import_by_delta", "bulk_import", None),
        against("read", "read_parquet", "read_collection", 0.8),
        against("read-increments", "read_parquet", "read_increments", None),
        against("read-source", "read_parquet", "read_source", None),
        against("read-checkpoint", "read_parquet", "read_checkpoint", 0.4),
        against("read-changes", "read_parquet", "read_changes", None),
        against("read-delta", "read_by_delta", "read_collection", None),
        against("backup", "backup_alone", "backup_by_tasks", 1.5),
        against("backup-delta", "copy_by_delta", "backup_by_tasks", None),
    ]
