"""The named workloads. A figure is the rate of a subject over the rate of its baseline.

bulk-load           load all rows, sorted, into an empty store
commit-10k          durable commits of 10,000 updates, change log included where there is one
commit-100          durable commits of 100 updates
commit-100-8        the same from 8 threads, against one thread of raw rocksdict
get                 point reads of the newest value, keys in no order
get-as-of           point reads at a time before all updates
get-many            one call for many sorted keys at that time
scan                all rows, newest values, one by one
scan-as-of          all rows at a time before all updates
scan-arrow          all rows as Arrow record batches
scan-arrow-as-of    the same at a time before all updates
changes             the 10,000 changes of a window, against iterating over as many rows
changes-arrow       the same as Arrow record batches
changes-by-key      the same, sorted by key
delete-range        delete a tenth of all rows, history kept, against one synced put
get-no-ranges       point reads without any range tombstone, against the same code without the test
get-1-range         point reads beside 1 range tombstone, against none
get-100-ranges      point reads beside 100 range tombstones, against none
get-many-1-range    one call for many sorted keys beside 1 range tombstone, against none
get-many-100-ranges the same beside 100
scan-1-range        rows beside 1 range tombstone, against none
scan-100-ranges     rows beside 100 range tombstones, against none
arrow-1-range       Arrow batches beside 1 range tombstone, against none
arrow-100-ranges    Arrow batches beside 100 range tombstones, against none
get-imported        point reads of rows that came by bulk load, then updated as all others
scan-imported       rows that came by bulk load
arrow-imported      Arrow batches of rows that came by bulk load
disk                bytes after the updates, history and log kept, against one value a key
disk-trimmed        the same once history and log are given up to the present
import-1mb          add a prebuilt import, against a move-ingest of a prebuilt file
import-100mb        the same at 100 MB
import-1gb          the same at 1 GB (full runs only)
transact            transactions that read a key and write it, against a get and a put
gc                  remove the versions behind 10,000 updates, against deleting as many keys
backup              incremental backup of 10,000 changes, against copying a checkpoint's new files
restore             the newest state from a collection, against a bulk load of as many rows
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RAW = "benchmarks.raw:Raw"
OURS = "benchmarks.ours:Ours"
ONE_RANGE = "benchmarks.ours:OneTombstone"
UNTESTED = "benchmarks.ours:Untested"
IMPORTED = "benchmarks.ours:Imported"
HUNDRED_RANGES = "benchmarks.ours:HundredTombstones"
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

    @classmethod
    def of(cls, rows: int, *, rounds: int) -> Size:
        """Fit a run to `rows`."""
        return cls(
            rows=rows,
            rounds=rounds,
            lookups=min(rows // 5, 50_000),
            commits_100=max(20, min(40, rows // 25_000)),
            commits_10k=max(1, min(20 // rounds, rows // 150_000)),
            update_rows=min(10_000, rows // 10),
        )


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of a subject, with its arguments."""

    operation: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table. `items` is what each subject must report, None where that varies.

    `contenders` are (subject, call) pairs beside the peers, which get `peers_call`; the first is
    the baseline. `reach` is the ratio that the project has set itself.
    """

    name: str
    contenders: tuple[tuple[str, Call], ...]
    peers_call: Call | None = None
    items: int | None = None
    reach: float | None = None
    per: str = "row"
    grows: bool = False
    repeats: int = 1
    slow_arguments: dict[str, Any] = field(default_factory=dict)


def writing(size: Size) -> list[Workload]:
    """Workloads that change the stores, in the order they must run in."""
    hundred = {"rows": 100, "count": size.commits_100}
    many = {"rows": size.update_rows, "count": size.commits_10k}
    load = Call("bulk_load")
    return [
        Workload("bulk-load", ((RAW, load), (OURS, load)), load, size.rows, 0.95),
        Workload(
            "commit-100",
            ((RAW, Call("commit", hundred)), (OURS, Call("commit", hundred))),
            Call("commit", hundred),
            reach=0.95,
            slow_arguments={"count": 2},
        ),
        Workload(
            "commit-10k",
            ((RAW, Call("commit", many)), (OURS, Call("commit", many))),
            Call("commit", many),
            reach=0.88,
            slow_arguments={"count": 1},
        ),
    ]


def reading(size: Size) -> list[Workload]:
    """Workloads that only read."""
    gets = {"count": size.lookups}
    old = {"as_of": "loaded"}
    window = {"since": "window"}
    scan, get = Call("scan"), Call("get", gets)
    few = Call("scan_rows", {"count": size.update_rows})

    def against_raw(
        name: str, raw: Call, ours: Call, reach: float, *, peers: bool = True, **more: Any
    ) -> Workload:
        return Workload(
            name, ((RAW, raw), (OURS, ours)), ours if peers else None, reach=reach, **more
        )

    # What takes a tenth of a second is taken again: the machine is not ours alone.
    again = {"repeats": 1 if size.rows > 300_000 else 3}
    rows = {"items": size.rows, **again}
    found = {"items": size.lookups, "slow_arguments": {"count": 100}, **again}
    changed = {"items": size.update_rows, "repeats": 5, "grows": True}
    return [
        against_raw("get", get, get, 0.95, **found),
        against_raw("get-as-of", get, Call("get", {**gets, **old}), 0.9, **found),
        against_raw("get-many", get, Call("get_many", {**gets, **old}), 2.2, peers=False, **found),
        against_raw("scan", scan, scan, 0.7, grows=True, **rows),
        against_raw("scan-as-of", scan, Call("scan", old), 0.65, **rows),
        against_raw("scan-arrow", scan, Call("scan_arrow"), 0.6, grows=True, **rows),
        against_raw("scan-arrow-as-of", scan, Call("scan_arrow", old), 0.55, **rows),
        against_raw("changes", few, Call("changes", window), 5.0, **changed),
        against_raw("changes-arrow", few, Call("changes_arrow", window), 5.0, **changed),
        against_raw(
            "changes-by-key", few, Call("changes_by_key", window), 5.0, peers=False, **changed
        ),
        Workload("get-no-ranges", ((UNTESTED, get), (OURS, get)), reach=0.98, **found),
        *_beside_ranges("get", get, **found),
        *_beside_ranges("get-many", Call("get_many", gets), **found),
        *_beside_ranges("scan", scan, **rows),
        *_beside_ranges("arrow", Call("scan_arrow"), **rows),
        Workload("get-imported", ((RAW, get), (IMPORTED, get)), reach=0.95, **found),
        Workload("scan-imported", ((RAW, scan), (IMPORTED, scan)), reach=0.7, **rows),
        Workload(
            "arrow-imported", ((RAW, scan), (IMPORTED, Call("scan_arrow"))), reach=0.6, **rows
        ),
    ]


def ending(size: Size) -> list[Workload]:
    """What must come last: it deletes, or writes more than the yardstick did."""
    hundred = {"rows": 100, "count": size.commits_100}
    some = {"count": 2_000}
    many = {"rows": size.update_rows}
    put, delete = Call("put_synced"), Call("delete_range", {"rows": size.rows // 10})
    return [
        Workload("disk", ((RAW, Call("disk")), (OURS, Call("disk"))), Call("disk"), per="bytes"),
        Workload(
            "disk-trimmed",
            ((RAW, Call("disk")), (OURS, Call("disk_trimmed"))),
            reach=0.87,
            per="bytes",
        ),
        Workload(
            "delete-range",
            ((RAW, put), (OURS, delete)),
            delete,
            1,
            1.0,
            per="call",
            grows=True,
            repeats=5,
        ),
        *(
            Workload(
                f"import-{name}",
                (
                    (RAW, Call("ingest", {"megabytes": mb})),
                    (OURS, Call("ingest", {"megabytes": mb})),
                ),
                items=1,
                reach=0.5,
                per="call",
            )
            for name, mb in (("1mb", 1), ("100mb", 100), ("1gb", 1024))
            if mb <= 100 or size.rows > 300_000
        ),
        Workload("transact", ((RAW, Call("read_and_put", some)), (OURS, Call("transact", some)))),
        Workload("gc", ((RAW, Call("delete_many", many)), (OURS, Call("gc", many)))),
        Workload(
            "backup",
            ((RAW, Call("backup", many)), (OURS, Call("backup", many))),
            items=size.update_rows,
            reach=4.5,
            grows=True,
        ),
        Workload("restore", ((RAW, Call("bulk_load")), (OURS, Call("restore"))), items=size.rows),
        Workload(
            "commit-100-8",
            (
                (RAW, Call("commit", hundred)),
                (OURS, Call("commit_threads", {**hundred, "count": 160, "threads": 8})),
            ),
            reach=4.0,
        ),
    ]


def _beside_ranges(name: str, call: Call, **more: Any) -> list[Workload]:
    return [
        Workload(f"{name}-1-range", ((OURS, call), (ONE_RANGE, call)), reach=0.95, **more),
        Workload(f"{name}-100-ranges", ((OURS, call), (HUNDRED_RANGES, call)), reach=0.85, **more),
    ]


STEPPED: frozenset[str] = frozenset(
    {
        "backup",
        "commit",
        "commit_threads",
        "delete_many",
        "delete_range",
        "gc",
        "get",
        "get_many",
        "put_synced",
        "read_and_put",
        "transact",
    }
)
"""Operations that take another set of keys each round."""
