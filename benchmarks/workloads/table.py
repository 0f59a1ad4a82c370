"""The named workloads. A figure is the rate of a subject over the rate of its baseline.

Each group names who reads its rows; a row that nobody would ask for has no place here. Unless a
line says otherwise the baseline is raw rocksdict, one value a key.

Writing, for a service that commits
put                 puts, unsynced, against batches of one row
commit-100          durable commits of 100 updates
commit-100-8        the same from 8 threads, against one thread of raw rocksdict
commit-10k          durable commits of 10,000 updates, change log included where there is one
commit-index        the same with the change log, against the store without it: 1 less its share
delete-range        delete a tenth of all rows, history kept, against a synced put: 20 of each
delete-range-all    delete all rows, history kept, against a synced put: 20 of each
transact            transactions that read a key and write it, unsynced, against a get and a put
transact-8          the same from 8 threads, against 8 threads
transact-synced     the same, durable, against a get, a put and an fsync
transact-synced-8   the same from 8 threads, against 8 threads
update              updates in place, unsynced, against puts of the same rows
put-expiring        puts with an expiry, unsynced, in a store where as many other keys as rows wait
                    for their expiry (at most a million), against puts in a store without expiries
put-waiting         puts without an expiry, unsynced, beside these keys, against the same puts
                    beside none
get-waiting         point reads beside these keys, against the same reads beside none

Loading, for jobs that load in bulk
bulk-load           load all rows, sorted, into an empty store
bulk-load-2         the same by two processes, started before, with half of the rows each
import-commit       add an import of all rows, built before, against a move-ingest of as many
import-1mb          add a prebuilt import, against a move-ingest of a prebuilt file
import-1gb          the same at 1 GB (from 1,000,000 rows on)

Reading keys, for a service that answers
get                 point reads of the newest value, keys in no order
get-as-of           point reads at a time before all updates
get-many            one call for many sorted keys at that time
get-imported        point reads of rows that came by bulk load, then updated as all others
get-100-ranges      point reads beside 100 range tombstones, against none
get-many-100-ranges one call for many sorted keys beside 100 range tombstones, against none

Scanning, for analyses and exports
scan                all rows, newest values, one by one
scan-as-of          all rows at a time before all updates
scan-arrow          all rows as Arrow record batches
scan-arrow-as-of    the same at a time before all updates
scan-arrow-2        likewise by two threads
scan-imported       rows that came by bulk load
arrow-imported      Arrow batches of rows that came by bulk load
scan-100-ranges     rows beside 100 range tombstones, against none
arrow-100-ranges    Arrow batches beside 100 range tombstones, against none

Beside a writer, for services of several processes
get-live            point reads of a live reader, against point reads of the writer
puts-followed       single commits, not synced, beside a live reader, against the same beside none
stale-live          50 ms, which is promised, against the age of commits when a reader in another
                    process shows them, beside commits without a pause
beside-batch        20 ms, against the 99th percentile of gets beside one commit of 300,000 rows, in
                    the process that commits: 31 to 42 ms on two busy cores (64 to 70 as one batch)
beside-batch-live   the same in the process of a live reader: 6 to 7 ms (5.5 as one batch)
beside-batch-http   the same by a client of a server in the process that commits: 39 to 62 ms (215
                    to 228 as one batch)
open-live           live readers opened beside a writer and some MB of log, against open_read_only

YCSB, for a comparison of stores
ycsb-a...           half reads, half updates of zipfian keys, one call each; no write waits for the
                    disk; the store has a cache of newest values for a tenth of the rows; a peer's
                    name ends the name of the row, and without one the baseline is raw rocksdict
ycsb-b...           95 % reads, 5 % updates
ycsb-c...           reads only
ycsb-d...           95 % reads of the newest rows, 5 % inserts
ycsb-e...           95 % scans of up to 100 rows, 5 % inserts
ycsb-f...           half reads, half reads that are followed by a write

Tables, for services and jobs with typed rows
rows-load           load typed rows of 8 columns with two indexes from Parquet, against a load of as
                    many rows as bytes
rows-load-gated     a load behind a gate of five checks, against the load without one
rows-load-sqlite    the same, against inserts into SQLite, which has two indexes too
rows-get            point gets of rows as dicts, against gets of their bytes
rows-get-sqlite     the same, against SQLite
rows-scan           all rows as typed Arrow batches, against a scan of bytes to Arrow
rows-scan-duckdb    the same, against DuckDB
rows-scan-sqlite    the same, against SQLite
rows-find-sqlite    look-ups of 100 rows by an index, as dicts, against SQLite

Joins, for training sets and audits
join-store-...      labels, 0.1 to 100 % of as many as versions, against DuckDB's ASOF JOIN over
                    Parquet of the same history; two versions for each row of the table
join-collection-... the same straight from a collection
join-polars-...     the store, against Polars' join_asof, reading Parquet included
join-pandas-...     the store, against the merge_asof of pandas, reading Parquet included

Changes, for consumers of feeds
changes             windows of 10,000 changes each, against iterating over as many rows
changes-arrow       the same as Arrow record batches
changes-by-key      the same, sorted by key
changes-events      the same as events
changes-feed        the same through a feed, its position and one ack included
changes-loaded      the changes of a bulk load of a hundredth of all rows as Arrow, against a scan
                    of all rows as Arrow
changes-flat        changes-arrow in a store of all rows, against one of a tenth
feed-latency        a durable put and its delivery to a thread that follows, against a queue's

Upkeep, for operators after a year of it
gc                  remove the versions behind 10,000 updates, against looking up and deleting them
gc-flat             GC after 1 % of all rows changed, against as many changes in a tenth of the rows
open-flat           open a store that took 1,000 checkpoints, a row each, against 100
checkpoint-flat     another checkpoint of them, likewise
commits-open        open a store of as many commits of a row as rows (at most a million), against
                    one of 1,000 commits
commits-commit      another commit, unsynced, likewise
commits-get         point reads as of a time among these commits, likewise
commits-history     the ten versions of a key, likewise
commits-backup      an increment of 1,000 commits, likewise
commits-gc          give up the history of the oldest 1,000 commits, likewise
large-load          a bulk load of all rows, against a bulk load of a tenth: seconds a row
large-open          open the store that this load made, likewise
large-get           point reads in a stretch of 100,000 rows of it, likewise
large-scan          all rows of it as Arrow batches, likewise
large-changes       windows of 10,000 changes of it as Arrow batches, likewise
large-backup        increments of 10,000 changes of it, likewise
disk                bytes after the updates, history and log kept, against one value a key
disk-trimmed        the same once history and log are given up to the present

Backup, for operators who back up and restore
backup              20 increments, each of 10,000 changes just committed, against copying a raw
                    checkpoint's new files after each
backup-copied       the same, against copying the new files of the store's own checkpoints
backup-single       the median one, by a handle just opened, against the median copy
backup-full         all rows, against copying a checkpoint's files
backup-flat         a single increment in a store of all rows, against one of a tenth
backup-beside       the 99th percentile of the waits of a service's commits while a script backs its
                    store up in full, against the same service alone
backup-beside-calls the same for calls on its control socket, three of four a get
backup-scan         rows of a collection as of a time, against delta-rs at that version
restore             the newest state from a collection, against a bulk load from Parquet
restore-compacted   the same from a collection that was compacted, as a follower keeps it
increments-list     list many increments, against a quarter of them: seconds per byte
increments-verify   verify them, likewise
increments-restore  restore from them, likewise

Pushes, for fleets that serve what one job builds
push-gets           the 99th percentile of the waits of gets while a push of a tenth of the rows is
                    fetched and added, against the same without a push
push-add            10 ms, which is promised, against the time in which a push becomes visible
push-revert         10 ms, which is promised, against the time in which a push is taken back
push-puts           rows of a Parquet file, at most 100,000, sorted, pushed and taken by a new
                    store, against durable puts by a client of a server, one after the other
push-feast          rows of a Parquet file, at most 100,000, sorted, pushed and taken by a new
                    store, against Feast's materialisation into its sqlite online store

Server, for clients in other languages and places
serve-get-...       reads of one key by a client over the loopback, one after the other, against
                    redis, and against FastAPI with sqlite3
serve-put-...       durable puts, likewise: redis syncs its log, and sqlite3 its WAL

Shared, for a service of several workers
shared-get          gets of a guest, values in its cache, against gets of the owner
shared-put          durable puts of a guest, one after the other, against the owner's
shared-beside       puts of the owner, not synced, beside 4 idle guests, against the same beside
                    none
shared-closed       100 ms, which is promised, against the time from the owner's close until the
                    write of a guest that took over is done
shared-killed       1 s, which is promised, against the time from the owner's death until then

Journal and tasks, for programs that build on the parts
journal-append-...  append records of 100 B to 1 MB, against a plain log with the same checksum
journal-replay-...  read them back
journal-synced      append with an fsync each
tasks-claim         claim tasks while 100,000 wait, against 1,000

Spark, for its jobs
spark-import        bulk_import, against Spark's own read, range partition and sort
spark-import-delta  bulk_import, against the same job by delta-rs
spark-import-tiny   bulk_import of 40,000 rows in 10,000 partitions, against the same in 100
spark-apply         micro-batches of a change feed by apply_changes, against collecting the
                    micro-batches of Spark's own source of Parquet files
spark-read          a collection into a sink by read_collection, against Parquet of the same rows
spark-read-increments  a collection with five increments of a thousandth of the rows, likewise
spark-read-source   a collection by format("kvstore"), likewise
spark-read-checkpoint  a checkpoint, likewise
spark-read-changes  all changes of a collection, likewise
spark-read-delta    read_collection, against Spark's scan of the files that delta-rs names
spark-join-checkpoint-...  labels, 0.1 to 100 % of as many as versions, joined with a checkpoint,
                    against Spark's ASOF JOIN over Parquet of the same history
spark-join-collection-...  the same with a collection
spark-join-window-...  the join with a checkpoint, against a window function over Parquet
spark-backup        a full backup by tasks on two cores, against one process
spark-backup-delta  the same, against copying a table into another by delta-rs
"""

from __future__ import annotations


def section(workload: str) -> str:
    """The heading above a workload in the table."""
    return lines()[line_of(workload)]


def line_of(workload: str) -> str:
    """The name of the line that describes a workload."""
    for name in lines():
        if workload == name or (name.endswith("...") and workload.startswith(name[:-3])):
            return name
    raise ValueError(f"{workload} has no line at the top of {__file__}")


def lines() -> dict[str, str]:
    """The names at the top of this file, each with its heading."""
    found, heading = {}, ""
    for line in (__doc__ or "").splitlines()[5:]:
        name = line.partition(" ")[0]
        if name[:1].isupper():
            heading = line
        elif name:
            found[name] = heading
    return found
