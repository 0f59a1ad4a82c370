"""The reads of tasks, without a session: checkpoint, collection and server equal the store.

Random histories with overwrites, deletes, range deletes, imports and reverts; every read is made
of pieces, as tasks make it, and compared with the live store's own answer.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import Change, Span, Store, bulk
from kvstore.backup import Collection
from kvstore.base.timestamp import NS_PER_SECOND, Timestamp, microseconds_of
from kvstore.changes import Revisions
from kvstore.errors import HistoryGoneError, NotAStoreError, NotYetWrittenError, UsageError
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.spark import origins as collection_module
from kvstore.spark import read as images
from kvstore.spark.format_options import Mode, read_options
from kvstore.spark.origins import Place, find, open_origin
from kvstore.spark.read import (
    CHANGES,
    POSTIMAGE,
    PREIMAGE,
    STATE,
    QueryReader,
    ReadPartition,
    StreamReader,
    arrow_schema,
    image_rows,
    plan_partitions,
    read_partition,
    require_window,
)
from tests.harness.bounds import bounds
from tests.harness.soak import soaked
from tests.harness.traced import traced

KEYS = [bytes([a, b]) for a in (0, 97, 98, 255) for b in (0, 1, 120)] + [b"", b"a", b"aaa"]


def write_history(store: Store, directory: Path, pick: random.Random, steps: int) -> None:
    """Random commits of every kind, and at random times a backup."""
    collection = Collection(directory / "collection")
    imports: list[int] = []
    for step in range(steps):
        kind = pick.random()
        if kind < 0.6:
            with store.batch() as batch:
                for key in pick.sample(KEYS, 3):
                    if pick.random() < 0.3:
                        batch.delete(key)
                    else:
                        batch.put(key, pick.randbytes(pick.randrange(5)))
        elif kind < 0.75:
            start, end = sorted(pick.sample(KEYS, 2))
            store.delete_range(start, end)
        elif kind < 0.85:
            staged = bulk.Import.create(directory / f"staging-{step}")
            with staged.writer() as writer:
                for key in sorted(pick.sample(KEYS, 4)):
                    writer.put(key, b"imported")
            staged.seal()
            bulk.ingest(store, staged.staging)
            imports.append(staged.import_id)
        elif kind < 0.9 and imports:
            store.revert_import(imports.pop())
        else:
            collection.backup(store)
            if pick.random() < 0.3:
                collection.compact()
    collection.backup(store)
    store.checkpoint(directory / "checkpoint")


def places(directory: Path) -> list[Place]:
    return [find(str(directory / name)) for name in ("checkpoint", "collection")]


@contextmanager
def places_of(store: Store, directory: Path, seed: int) -> Iterator[list[Place]]:
    """The places of a store; with the first seeds also the server of the open store itself."""
    if seed > 1:
        yield places(directory)
        return
    with serving(app(store), ListenAddress("127.0.0.1", 0)) as running:
        yield [*places(directory), find(running.url)]


def read(
    place: Place,
    span: Span,
    *,
    since: int | None,
    upto: int,
    revisions: Revisions = "all",
    partitions: int = 4,
    **more: str,
) -> pa.Table:
    schema = arrow_schema(STATE if since is None else CHANGES)
    text = {"path": place.path, "numpartitions": str(partitions), "batchrows": "3"}
    if since is not None:
        text |= {"readchangefeed": "true", "revisions": revisions, **more}
    options = read_options(text, "state" if since is None else "changes")
    with open_origin(place) as origin:
        latest = options.latest
        parts = plan_partitions(
            origin, [span], [Span()], options, since=since, upto=upto, latest=latest
        )
    batches = [
        batch
        for piece in parts
        if isinstance(piece, ReadPartition)
        for batch in read_partition(piece, options, schema)
    ]
    assert all(batch.schema == schema for batch in batches)
    assert since is not None or all(batch.num_rows <= 3 for batch in batches)
    return pa.Table.from_batches(batches, schema)


def spans() -> Sequence[Span]:
    return [Span(), Span(b"a", b"b"), Span(b"\x00\x01", b"bx\x00"), Span.of_prefix(b"\xff")]


def ordered(changes: Sequence[Change]) -> list[Change]:
    return sorted(changes, key=lambda c: (c.timestamp, c.op, c.key, c.end_key or b""))


@pytest.mark.parametrize("seed", [*range(4), *soaked(*range(4, 8))])
def test_state_and_changes_from_checkpoint_and_collection_equal_the_stores(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # a few rows of several runs exceed the bound of memory
        monkeypatch.setattr(collection_module, "SORTED_BYTES_MAX", 300)
        # More range deletes than fit into one batch.
        monkeypatch.setattr("kvstore.backup.rows.ARROW_ROWS_MAX", 2)
    pick = random.Random(seed)
    with kvstore.open(tmp_path / "store", durability="async") as store, ExitStack() as held:
        write_history(store, tmp_path, pick, 30)
        times = [0, *{change.timestamp for change in store.changes(0, order="time")}]
        for place in held.enter_context(places_of(store, tmp_path, seed)):
            for span in spans():
                since, upto = sorted(pick.sample(times, 2))
                state = read(place, span, since=None, upto=upto)
                rows = zip(state["key"].to_pylist(), state["value"].to_pylist(), strict=True)
                assert list(rows) == list(store.scan(span.start, span.end, as_of=upto))
                for revisions in ("all", "latest"):
                    for low in (since, 0):
                        expected = store.changes(low, upto, span.start, span.end, revisions)
                        found = read(place, span, since=low, upto=upto, revisions=revisions)
                        assert ordered(_changes(found)) == ordered(list(expected))


def test_a_time_in_microseconds_comes_back_as_its_commit(tmp_path: Path) -> None:
    """Each commit is two microseconds behind the one before, and not a whole number of them."""
    clock = kvstore.ManualClock(1_800_000_000 * NS_PER_SECOND + 1)
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        stamps = []
        for number in range(4):
            clock.advance(2000)
            stamps.append(store.put(b"k", b"%d" % number))
        Collection(tmp_path / "collection").backup(store)
        store.checkpoint(tmp_path / "checkpoint")
    told = [Timestamp(microseconds_of(stamp) * 1000) for stamp in stamps]
    assert all(one < out < one + 1000 for one, out in zip(stamps, told, strict=True))
    for place in places(tmp_path):
        for number, at in enumerate(told):
            assert asked(place, timestampAsOf=at) == [b"%d" % number]
            changes = {"readChangeFeed": "true", "startingTimestamp": "0"}
            assert len(asked(place, **changes, endingTimestamp=at)) == number + 1
            assert len(asked(place, **{**changes, "startingTimestamp": at})) == 3 - number
        options = {"path": place.path, "readChangeFeed": "true", "startingTimestamp": str(told[-1])}
        stream = StreamReader(read_options(options, "stream"), CHANGES)
        assert stream.initialOffset()["timestamp"] == stamps[-1]  # the next commit is not skipped
        with pytest.raises(NotYetWrittenError):
            asked(place, timestampAsOf=Timestamp(told[-1] + 1000))


def asked(place: Place, **options: object) -> list[bytes]:
    """The values of a read with these options."""
    mode: Mode = "changes" if "readChangeFeed" in options else "state"
    text = {"path": place.path, **{name: str(value) for name, value in options.items()}}
    schema = CHANGES if mode == "changes" else STATE
    reader = QueryReader(read_options(text, mode), schema, changes=mode == "changes")
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def _changes(table: pa.Table) -> list[Change]:
    names = ["_commit_version", "_change_type", "key", "end_key", "value"]
    columns = [table[name].to_pylist() for name in names]
    return [Change(*row) for row in zip(*columns, strict=True)]


def expected_images(
    store: Store, span: Span, since: int, upto: int, revisions: Revisions
) -> list[tuple[str, bytes, bytes | None, int]]:
    """Images by their definition: key by key, from the state before and after each commit."""
    rows: list[tuple[str, bytes, bytes | None, int]] = []
    for key in KEYS:
        if key not in span:
            continue
        times = [
            change.timestamp
            for change in store.changes(since, upto, order="time")
            if change.key == key
            or (change.end_key is not None and change.key <= key < change.end_key)
        ]
        if revisions == "latest":
            times = times[-1:]
        for at in sorted(set(times)):
            before = since if revisions == "latest" else at - 1
            old = store.get(key, as_of=before) if before > 0 else None
            new = store.get(key, as_of=at)
            if old is not None and new is None:
                rows.append(("delete", key, old, at))
            elif old is not None:
                rows += [("update_preimage", key, old, at), ("update_postimage", key, new, at)]
            elif new is not None:
                rows.append(("insert", key, new, at))
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_images_are_what_keys_were_and_have_become(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick = random.Random(300 + seed)
    if seed % 3:  # pieces end between two keys, and between two changes of one key
        monkeypatch.setattr(images, "PIECE_BYTES", pick.choice([1, 60, 400]))
        monkeypatch.setattr(images, "PIECE_EVENTS", pick.choice([1, 7, 1 << 18]))
        monkeypatch.setattr(collection_module, "SORTED_BYTES_MAX", pick.choice([1, 300]))
    with kvstore.open(tmp_path / "store", durability="async") as store, ExitStack() as held:
        write_history(store, tmp_path, pick, 30)
        times = [0, *{change.timestamp for change in store.changes(0, order="time")}]
        for place in held.enter_context(places_of(store, tmp_path, seed)):
            for span in spans():
                since, upto = sorted(pick.sample(times, 2))
                for revisions in ("all", "latest"):
                    found = read(
                        place,
                        span,
                        since=since,
                        upto=upto,
                        revisions=revisions,
                        includepreimage="true",
                    )
                    names = ["_change_type", "key", "value", "_commit_version"]
                    rows = zip(*(found[name].to_pylist() for name in names), strict=True)
                    wanted = expected_images(store, span, since, upto, revisions)
                    assert sorted(rows, key=_image_order) == sorted(wanted, key=_image_order)


@pytest.mark.traces_memory
@pytest.mark.parametrize("keys", [1, 48])
def test_changes_with_images_and_states_are_read_in_bounded_memory(
    tmp_path: Path, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 changes of 1 MiB, of one key or of as many, whose old values are as large. A task holds a
    few pieces of them: Python's bytes and Arrow's are counted."""
    monkeypatch.setattr(images, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(collection_module, "SORTED_BYTES_MAX", 2 << 20)
    names = ("SORTED_CHANGES_BYTES_MAX", "ROW_GROUP_BYTES_MAX", "ARROW_BYTES_MAX")
    few = dict.fromkeys(names, 1 << 20)
    with bounds(few), kvstore.open(tmp_path / "store", durability="async") as store:
        pick = random.Random(keys)
        for number in range(keys):
            store.put(b"k%02d" % number, pick.randbytes(1 << 20))
        since = store.upper - 1
        collection = Collection(tmp_path / "collection")
        collection.backup(store)
        for number in range(48):
            store.put(b"k%02d" % (number % keys), pick.randbytes(1 << 20))
            if number % 24 == 23:
                collection.backup(store)
        upto = store.upper - 1
        store.checkpoint(tmp_path / "checkpoint")
        for place in places(tmp_path):
            with open_origin(place) as origin, _counted() as counted:
                window: Any = {"since": since, "upto": upto, "latest": False, "rows": 1000}
                ops = [
                    op
                    for batch in image_rows(origin, Span(), **window)
                    for op in batch.column("op").to_pylist()
                ]
            assert ops == [PREIMAGE, POSTIMAGE] * 48
            assert counted[0] < 24 << 20, place.path
            with open_origin(place) as origin, _counted() as counted:
                state = origin.state(Span(), upto, ["key", "value"], 1000)
                found = [key for batch in state for key in batch.column("key").to_pylist()]
            assert found == [b"k%02d" % number for number in range(keys)]
            assert counted[0] < 24 << 20, place.path


_POOLS: list[pa.MemoryPool] = []
"""Pools that have counted: one is destroyed after the last of its bytes."""


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Counts the most bytes that Python and Arrow have held in the block."""
    pool, before = pa.proxy_memory_pool(pa.system_memory_pool()), pa.default_memory_pool()
    _POOLS.append(pool)
    found: list[int] = []
    with traced() as memory:
        pa.set_memory_pool(pool)
        try:
            yield found
        finally:
            pa.set_memory_pool(before)
    found.append(memory.peak + (pool.max_memory() or 0))


def _image_order(row: tuple[str, bytes, bytes | None, int]) -> tuple[bytes, int, str]:
    return row[1], row[3], row[0]


def test_an_older_chain_is_read_as_of_its_times_and_stays_chosen(tmp_path: Path) -> None:
    """This also holds for tasks that were planned before the newest chain began."""
    collection = Collection(tmp_path / "c")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        old = store.put(b"b", b"2")
        collection.backup(store)
        store.delete(b"a")
        then = store.put(b"c", b"3")
        collection.backup(store)
        store.put(b"d", b"4")
        planned = ReadPartition(
            find(str(tmp_path / "c"))._replace(chain=collection.chain().name),  # type: ignore[union-attr]
            Span(),
            [Span()],
            [Span()],
            None,
            old,
            False,
        )
        store.gc(before=store.upper - 1)
        collection.backup(store, full=True)
        assert collection.show().chains == 2
        assert collection.since > old
        place = find(str(tmp_path / "c"))

        def keys(**text: str) -> list[bytes]:
            mode: Mode = "changes" if "readChangeFeed" in text else "state"
            options = read_options({"path": str(tmp_path / "c"), **text}, mode)
            reader = QueryReader(options, STATE, changes=mode == "changes")
            batches = [b for piece in reader.partitions() for b in reader.read(piece)]
            return [key for batch in batches for key in batch.column("key").to_pylist()]

        assert keys() == [b"b", b"c", b"d"]
        assert keys(timestampAsOf=str(int(old))) == [b"a", b"b"]
        assert keys(timestampAsOf=str(int(then))) == [b"b", b"c"]
        window = {"readChangeFeed": "true", "startingTimestamp": str(int(old))}
        assert keys(**window, endingTimestamp=str(int(then))) == [b"a", b"c"]
        with pytest.raises(HistoryGoneError):
            keys(**window)  # the window ends now: no chain has all of it
        options = read_options({"path": place.path}, "state")
        (batch,) = read_partition(planned, options, arrow_schema(STATE))
        assert batch.column("key").to_pylist() == [b"a", b"b"]
        collection.expire(before=store.upper - 1)
        with pytest.raises(UsageError, match=r"no chain .* any more"):
            list(read_partition(planned, options, arrow_schema(STATE)))


@pytest.mark.parametrize("seed", range(4))
def test_windows_are_cut_between_commits_and_the_changes_that_are_left_are_counted(
    tmp_path: Path, seed: int
) -> None:
    part = Span(b"a", b"b")
    with kvstore.open(tmp_path / "store", durability="async") as store, ExitStack() as held:
        write_history(store, tmp_path, random.Random(100 + seed), 30)
        everything = list(store.changes(0, order="time"))
        in_part = list(store.changes(0, None, part.start, part.end))
        reverted = max(each.reverted or 0 for each in store.imports.every())
        for place in held.enter_context(places_of(store, tmp_path, seed)):
            origin = held.enter_context(open_origin(place))
            since, upto = 0, origin.frontiers().upper - 1
            seen = 0
            while since < upto:
                end = origin.cut(Span(), since=since, upto=upto, rows=7, size=None)
                window = [change for change in everything if since < change.timestamp <= end]
                commits = {change.timestamp for change in window}
                assert since < end <= upto
                assert len(window) <= 7 or len(commits) == 1
                seen += len(window)
                since = end
                left = origin.count(Span(), since=since, upto=upto)
                some = origin.count(part, since=since, upto=upto)
                assert left is not None
                assert some is not None
                is_exact = place.is_collection or since >= reverted
                assert left.is_exact == is_exact
                for count, known in ((left, everything), (some, in_part)):
                    rows = sum(since < change.timestamp for change in known)
                    assert count.rows == rows if count.is_exact else count.rows >= rows
            assert seen == len(everything)
            assert origin.cut(Span(), since=0, upto=upto, rows=None, size=1 << 40) == upto


def test_large_collection_is_read_row_group_by_row_group(tmp_path: Path) -> None:
    pick = random.Random(5)
    rows = {pick.randbytes(8): pick.randbytes(20) for _ in range(150_000)}
    staged = bulk.Import.create(tmp_path / "staging")
    with staged.writer() as writer:
        for key in sorted(rows):
            writer.put(key, rows[key])
    staged.seal()
    with kvstore.open(tmp_path / "store") as store:
        bulk.ingest(store, tmp_path / "staging")
        Collection(tmp_path / "collection").backup(store)
        store.checkpoint(tmp_path / "checkpoint")
        upto = store.upper - 1
    for place in places(tmp_path):
        schema = arrow_schema(STATE)
        options = read_options({"path": place.path, "numpartitions": "5"}, "state")
        with open_origin(place) as origin:
            upto = origin.frontiers().upper - 1
            whole = [Span()]
            parts = plan_partitions(
                origin, whole, whole, options, since=None, upto=upto, latest=False
            )
        sizes = []
        found: dict[bytes, bytes] = {}
        for piece in parts:
            assert isinstance(piece, ReadPartition)
            table = pa.Table.from_batches(read_partition(piece, options, schema), schema)
            sizes.append(table.num_rows)
            found |= dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        assert found == rows
        assert sum(sizes) == len(rows)
        assert len(sizes) == 5
        assert max(sizes) < 2 * min(sizes)


def test_batches_are_bounded_in_bytes(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        for number in range(40):
            store.put(b"%02d" % number, bytes(1000))
    place = find(str(tmp_path / "store"))
    options = read_options({"path": place.path, "batchbytes": "5000"}, "state")
    with open_origin(place) as origin:
        upto = origin.frontiers().upper - 1
    piece = ReadPartition(place, Span(), [Span()], [Span()], None, upto, False)
    batches = list(read_partition(piece, options, arrow_schema(STATE)))
    assert sum(batch.num_rows for batch in batches) == 40
    assert all(batch.nbytes <= 5000 for batch in batches)


def test_newest_of_several_checkpoints_is_found_and_half_made_ones_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "copies").mkdir()
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        store.checkpoint(tmp_path / "copies" / "b-older")
        store.put(b"a", b"2")
        store.checkpoint(tmp_path / "copies" / "a-newer")
    (tmp_path / "copies" / "c.tmp").mkdir()
    (tmp_path / "copies" / "c.tmp" / "CURRENT").touch()
    assert find(str(tmp_path / "copies")).path.endswith("a-newer")


def test_a_store_in_memory_is_read_once_closed_and_its_checkpoints_always(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    with kvstore.open(tmp_path / "store", "memory") as store:
        store.put(b"a", b"1")
        store.checkpoint(tmp_path / "copies" / "copy")
    for path in ("store", "copies", "copies/copy"):
        with open_origin(find(str(tmp_path / path))) as origin:
            upto = origin.frontiers().upper - 1
            found = [row for b in origin.state(Span(), upto, ["key"], 9) for row in b.to_pylist()]
        assert found == [{"key": b"a"}]


@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_who_only_asks_whether_a_store_is_open_is_in_nobodys_way(
    tmp_path: Path, engine: str
) -> None:
    """Two queries that are planned at once ask at the same time."""
    with kvstore.open(tmp_path / "store", engine) as store:
        store.put(b"a", b"1")
    hold = (
        "import fcntl, sys; lock = open(sys.argv[1], 'r+b'); fcntl.lockf(lock, fcntl.LOCK_SH);"
        "fcntl.flock(lock, fcntl.LOCK_SH); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / "store" / "LOCK")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert find(str(tmp_path / "store")).path == str(tmp_path / "store")
        other.communicate(b"\n")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError, match="neither a store, a checkpoint nor a collection"):
        find(str(tmp_path))


def test_windows_behind_the_history_are_refused() -> None:
    with pytest.raises(HistoryGoneError):
        require_window(4, 9, oldest=5, upper=10, latest=False)
    with pytest.raises(HistoryGoneError):
        require_window(0, 9, oldest=5, upper=10, latest=False)
    require_window(0, 9, oldest=5, upper=10, latest=True)  # this is the state, which is kept
    with pytest.raises(UsageError, match="ends before it starts"):
        require_window(9, 8, oldest=5, upper=10, latest=False)
    with pytest.raises(NotYetWrittenError):  # no end was given, so the end is the newest time
        require_window(11, 9, oldest=5, upper=10, latest=False)
