"""A pass that reads the sorted files itself has the rows of RocksDB's iterator."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.base.clock import ManualClock
from kvstore.base.span import Span
from kvstore.engine.api import HeldFiles
from kvstore.engine.held_files import live_files
from kvstore.errors import ClosedError, CorruptionError, KVStoreError
from kvstore.mvcc.versions import Versions
from kvstore.testing.histories import START_NS
from tests.harness.bounds import bounds
from tests.harness.parts import data_family, parts_of
from tests.harness.seeds import seed_of

BY_FILES = {
    "COLUMNS_ENTRIES_MIN": 1,
    "COLUMNS_FLUSH_BYTES_MIN": 0,
    "SCAN_CHUNK": 3,
    "JOIN_PASS_LABELS_MIN": 1,
    "JOIN_PASS_BYTES_MAX": 1 << 50,
}
BY_ITERATOR = {"HELD_FILES_MAX": -1, "SCAN_CHUNK": 3}

SEED = "KVSTORE_FILE_PASSES_SEED"

LETTERS = (b"\x00", b"\x01", b"\xff", b"a", b"b", b"a" * 8, b"")


def some_key(pick: random.Random) -> bytes:
    return b"".join(pick.choices(LETTERS, k=pick.randint(1, 4))) + b"%d" % pick.randrange(12)


def some_value(pick: random.Random) -> bytes:
    size = pick.choice([0, 1, 20, 20, 20, 3_000, 20_000])
    return pick.choice([pick.randbytes(size), b"ab" * (size // 2), bytes(size)])


class History:
    """Random writes and upkeep of one store."""

    def __init__(self, path: Path, pick: random.Random) -> None:
        self.path, self.pick = path, pick
        self.clock = ManualClock(START_NS)
        self.store = self._opened()
        self.times: list[int] = []
        self.imports: list[int] = []

    def _opened(self) -> kvstore.Store:
        return kvstore.open(self.path / "store", durability="async", clock=self.clock)

    def step(self) -> None:
        pick = self.pick
        self.clock.advance(pick.choice([1, 1_000, 3_600_000_000_000]))
        steps = [
            *[self.puts] * 6,
            *[self.deletes, self.delete_range, self.load, self.revert, self.clear, self.collect],
            *[self.flush, self.flush, self.compact, self.expires, self.settle, self.reopen],
        ]
        pick.choice(steps)()
        self.times.append(int(self.store.upper) - 1)

    def puts(self) -> None:
        with self.store.batch() as batch:
            for _ in range(self.pick.randint(1, 60)):
                batch.put(some_key(self.pick), some_value(self.pick))

    def deletes(self) -> None:
        for _ in range(5):
            self.store.delete(some_key(self.pick))

    def delete_range(self) -> None:
        start, end = sorted([some_key(self.pick), some_key(self.pick)])
        if start < end:
            self.store.delete_range(start, end)

    def clear(self) -> None:
        start, end = sorted([some_key(self.pick), some_key(self.pick)])
        if start < end:
            self.store.clear_range(start, end, compact=self.pick.random() < 0.5)

    def load(self) -> None:
        staging = self.path / f"staging-{len(self.times)}"
        load = bulk.Import.create(staging)
        with load.writer() as writer:
            for key in sorted({some_key(self.pick) for _ in range(40)}):
                writer.put(key, some_value(self.pick))
        load.seal()
        bulk.ingest(self.store, staging)
        self.imports.append(load.import_id)

    def revert(self) -> None:
        if self.imports:
            with suppress(KVStoreError):  # it is forgotten, or what it covered may be gone
                self.store.imports.revert(self.pick.choice(self.imports))

    def collect(self) -> None:
        self.store.gc(keep=timedelta(hours=self.pick.choice([0, 1, 5])))

    def settle(self) -> None:
        self.store.gc(keep=timedelta(days=900))

    def flush(self) -> None:
        data_family(self.store).flush()

    def compact(self) -> None:
        parts_of(self.store).engine.compact("data")

    def expires(self) -> None:
        for _ in range(5):
            lasts = timedelta(minutes=self.pick.choice([1, 50, 500]))
            self.store.put(some_key(self.pick), b"short", expires=lasts)

    def reopen(self) -> None:
        self.store.close()
        self.store = self._opened()

    def check(self) -> None:
        """Compare the two ways at some time that is kept, over some span."""
        pick, store = self.pick, self.store
        kept = [time for time in self.times if time >= store.whole_since]
        at = pick.choice([None, *kept])
        start, end = sorted([some_key(pick), some_key(pick)])
        span: dict[str, Any] = pick.choice(
            [{}, {"start": start}, {"end": end}, {"prefix": start[:2]}]
        )
        at = store.upper - 1 if at is None else at
        versions, whole = parts_of(store).versions, Span.of(**span)
        since = pick.choice([0, *kept])
        window = {"since": min(since, at), "upto": at}
        latest = pick.random() < 0.5
        labels = label_table(
            [(some_key(pick), int(pick.choice([at, *kept]))) for _ in range(pick.choice([1, 300]))]
        )
        with bounds(BY_ITERATOR):
            joined = store.join(labels, on_gone="null").read_all()
            rows = list(store.scan(**span, as_of=at))
            exported = export_of(versions, whole, **window)
            different = list(versions.diff(whole, **window, latest=latest))
        with bounds(BY_FILES):
            assert store.join(labels, on_gone="null").read_all().equals(joined)
            assert export_of(versions, whole, **window) == exported
            assert list(versions.diff(whole, **window, latest=latest)) == different
            assert list(store.scan(**span, as_of=at)) == rows
            assert list(store.keys(**span, as_of=at)) == [key for key, _ in rows]
            assert store.count(**span, as_of=at) == len(rows)
            batch_rows = pick.choice([1, 7, 4096])
            for workers in (1, 3):
                batches = list(
                    store.scan_batches(**span, as_of=at, batch_rows=batch_rows, workers=workers)
                )
                found = pa.Table.from_batches(batches, store.scan_batches(limit=0).schema)
                found.validate(full=True)
                assert found.to_pylist() == [{"key": key, "value": value} for key, value in rows]
                assert all(0 < batch.num_rows <= batch_rows for batch in batches)


def label_table(labels: list[tuple[bytes, int]]) -> pa.Table:
    keys, times = [key for key, _ in labels], [time for _, time in labels]
    at = pa.array(times, pa.int64()).cast(pa.timestamp("ns", "UTC"))
    return pa.table({"id": pa.array(keys, pa.binary()), "ts": at})


def export_of(versions: Versions, span: Span, *, since: int, upto: int) -> list[object]:
    columns, tombstones = versions.export(span, since=since, upto=upto)
    found: list[object] = [*tombstones]
    for each in columns:
        found += zip(
            each.keys.to_pylist(),
            each.timestamps.tolist(),
            each.is_value.tolist(),
            each.values,
            strict=True,
        )
    return found


def play(path: Path, seed: int, steps: int) -> dict[str, int]:
    pick = random.Random(seed)
    history = History(path, pick)
    passes = {"files": 0, "iterator": 0}
    for _ in range(steps):
        before = history.store
        history.step()
        if history.store is not before:
            for way, count in parts_of(before).versions.passes.items():
                passes[way] += count
        history.check()
    history.store.close()
    for way, count in parts_of(history.store).versions.passes.items():
        passes[way] += count
    return passes


def test_random_histories_read_alike(tmp_path: Path) -> None:
    seed = seed_of(SEED)
    assert sum(play(tmp_path / str(n), seed + n, 60)["files"] for n in range(2)) > 200


@pytest.mark.soak
def test_many_random_histories_read_alike(tmp_path: Path) -> None:
    seed = seed_of(SEED)
    for number in range(200):
        assert play(tmp_path / str(number), seed + number, 150)["files"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    """Rows in three runs: a merged file, an import, and updates."""
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(9_000):
                batch.put(b"k%06d" % number, b"first %d " % number * 5)
        parts_of(store).engine.compact("data")
        load = bulk.Import.create(tmp_path / "staging")
        with load.writer() as writer:
            for number in range(0, 9_000, 7):
                writer.put(b"k%06d" % number, b"imported")
        load.seal()
        bulk.ingest(store, tmp_path / "staging")
        store.delete_range(b"k003000", b"k005000")
        with store.batch() as batch:
            for number in range(0, 9_000, 3):
                batch.put(b"k%06d" % number, b"second")
        with bounds(COLUMNS_ENTRIES_MIN=100, COLUMNS_FLUSH_BYTES_MIN=0):
            yield store


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_labels_are_answered_over_many_blocks_of_which_some_have_none(tmp_path: Path) -> None:
    """Files lie above files, among imports and range tombstones of part of a key's history."""
    pick, clock = random.Random(1), ManualClock(START_NS)

    def key(number: int) -> bytes:
        return b"%05d" % number + b"\x00" * (number % 3)

    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        moments: list[int] = []
        for step in range(6):
            clock.advance(10_000)
            chosen = sorted(pick.sample(range(3000), 1500))
            if step == 3:
                made = bulk.Import.create(tmp_path / "staging")
                with made.writer() as writer:
                    for number in chosen:
                        writer.put(key(number), b"imported %d" % number)
                made.seal()
                bulk.ingest(store, made.staging)
            else:
                store.put_many({key(number): b"%d of %d" % (number, step) for number in chosen})
            start = pick.randrange(3000)
            store.delete_range(key(start), key(start) + b"\xff")
            store.delete_range(key(start // 2), key(start // 2 + 300))
            if step % 2:
                data_family(store).flush()
            moments.append(int(store.upper) - 1)
            if step == 1:
                parts_of(store).engine.compact("data")
        labels = [
            (key(number), pick.choice(moments))
            for number in [*range(20), 700, *range(2000, 3100, 7)]
            for _ in range(3)
        ]
        with bounds(BY_ITERATOR):
            expected = store.join(label_table(labels)).read_all()
        with bounds(BY_FILES):
            assert store.join(label_table(labels)).read_all().equals(expected)
            assert (
                store.join(label_table(labels[::-1]))
                .read_all()
                .equals(expected.take(list(reversed(range(len(labels))))))
            )
        assert parts_of(store).versions.passes["files"] == 2
        assert 0 < expected["value"].null_count < len(labels)


def test_few_labels_of_a_large_table_make_no_pass(tmp_path: Path) -> None:
    """The keys of tables lie closely in a corner of all keys."""
    schema = pa.schema([("k", pa.int64()), ("e", pa.int64()), ("text", pa.string())])
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", schema, key=["k"], event_time="e")
        texts = [os.urandom(20).hex() for _ in range(3000)]
        numbers = list(range(3000))
        table.put_batch(pa.table({"k": numbers, "e": numbers, "text": texts}, schema))
        data_family(store).flush()
        labels = pa.table({"k": [7, 2900], "at": [7, 2901]})
        with bounds(JOIN_PASS_LABELS_MIN=1):
            found = table.join(labels, "k", "at").read_all()
        assert found["text"].to_pylist() == [texts[7], texts[2900]]
        assert parts_of(store).versions.passes == {"files": 0, "iterator": 0}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_pass_sees_the_moment_of_its_beginning(store: kvstore.Store, workers: int) -> None:
    expected = store.scan_batches().read_all()
    scan = store.scan_batches(batch_rows=100, workers=workers)
    first = [scan.read_next_batch() for _ in range(5)]
    store.put_many({b"k%06d" % number: b"later" for number in range(9_000)})
    store.clear_range(b"k007000", b"k008000")
    store.gc(keep=timedelta(0))
    parts_of(store).engine.compact("data")
    assert pa.Table.from_batches([*first, *scan]).equals(expected)
    assert parts_of(store).versions.passes["files"] == 2


def test_a_clear_before_the_files_are_opened_leaves_the_pass_to_the_iterator(
    store: kvstore.Store,
) -> None:
    expected = list(store.scan())
    rows = store.scan()
    first = [next(rows)]  # by the iterator, which goes on when the files come too late
    store.clear_range(b"k007000", b"k008000")
    assert first + list(rows) == expected
    assert parts_of(store).versions.passes == {"files": 1, "iterator": 1}


@pytest.mark.parametrize("workers", [1, 3])
def test_every_end_lets_the_files_go(store: kvstore.Store, workers: int) -> None:
    store.scan_batches(workers=workers).read_all()
    before = descriptors()
    store.scan_batches(workers=workers).read_all()
    assert descriptors() == before
    for taken in (0, 1, 20):
        scan = store.scan_batches(batch_rows=100, workers=workers)
        for _ in range(taken):
            scan.read_next_batch()
        assert descriptors() > before or (workers, taken) == (1, 0)
        del scan
        assert descriptors() == before
    running = store.scan_batches(batch_rows=100, workers=workers)
    for _ in range(20):
        running.read_next_batch()
    store.close()
    with pytest.raises(ClosedError):
        running.read_all()
    assert descriptors() < before


def test_a_process_without_descriptors_reads_by_the_iterator(store: kvstore.Store) -> None:
    expected = store.scan_batches().read_all()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open("/dev/null", os.O_RDONLY)
    os.close(spare)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        assert store.scan_batches(workers=2).read_all().equals(expected)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert parts_of(store).versions.passes["iterator"] == 1


def test_a_pass_writes_nothing_where_the_disk_has_little_room(tmp_path: Path) -> None:
    """A flush that fails would stop the writes of the store, because of a read."""
    rows = {b"k%05d" % number: os.urandom(100) for number in range(4_000)}
    with kvstore.open(tmp_path / "store", durability="async") as store:
        store.put_many(rows)
        parts_of(store).engine.compact("data")
        store.put_many(rows)
        before = live_files(data_family(store))
        with bounds(BY_FILES, FLUSH_ROOM_FACTOR=1 << 50):
            assert dict(store.scan()) == rows
            assert store.scan_batches(workers=2).read_all().num_rows == len(rows)
        assert live_files(data_family(store)) == before
        assert parts_of(store).versions.passes == {"files": 0, "iterator": 2}


def test_batches_are_bounded_by_the_bytes_of_keys_too(tmp_path: Path) -> None:
    """An array of keys has room for 2 GiB, and a caller may ask for any number of rows."""
    with kvstore.open(tmp_path / "store", durability="async") as store:
        store.put_many({b"%0200d" % number: b"" for number in range(500)})
        parts_of(store).engine.compact("data")
        with bounds(BY_FILES, ARROW_BYTES_MAX=2_000, SCAN_CHUNK_BYTES=2_000):
            batches = list(store.scan_batches(batch_rows=1 << 40, workers=2))
        assert sum(batch.num_rows for batch in batches) == 500
        assert max(batch.nbytes for batch in batches) < 4_000
        assert parts_of(store).versions.passes["files"] == 1


def test_files_that_merges_remove_meanwhile(store: kvstore.Store) -> None:
    is_over = threading.Event()
    expected = store.count()

    def merge() -> None:
        while not is_over.is_set():
            parts_of(store).engine.compact("data")

    merging = threading.Thread(target=merge)
    merging.start()
    try:
        for _ in range(100):
            assert store.count() == expected
    finally:
        is_over.set()
        merging.join()


def test_other_threads_run_while_files_are_read(tmp_path: Path) -> None:
    turns = 0
    is_over = threading.Event()

    def turn() -> None:
        nonlocal turns
        while not is_over.is_set():
            turns += 1

    with kvstore.open(tmp_path / "store", durability="async") as store:
        for _ in range(4):
            store.put_many({b"%08d" % number: b"v" * 100 for number in range(60_000)})
        parts_of(store).engine.compact("data")
        held = parts_of(store).engine.hold_files(b"", None)
        assert held is not None
        view = parts_of(store).versions.view
        read = int(store.upper), view.stamps, None
        turning = threading.Thread(target=turn)
        turning.start()
        try:
            for _ in range(100):  # the system may leave the other thread out in one of them
                one = held.begin(b"", None, read, keys_only=False)
                before = turns
                assert not held.take(one, 1 << 40, 1 << 40, 1 << 40)
                if turns > before + 100:
                    break
            else:
                pytest.fail("no other thread has run")
        finally:
            is_over.set()
            turning.join()
            held.close()


def test_keys_and_values_of_every_size(tmp_path: Path) -> None:
    sizes = [0, 1, 127, 128, 16_383, 16_384, 60_000, 5 << 20]
    rows = {b"%03d" % at + bytes(min(size, 65_000)): b"v" * size for at, size in enumerate(sizes)}
    rows |= {b"x%05d" % number: os.urandom(300) for number in range(500)}
    with kvstore.open(tmp_path / "store") as store:
        store.put_many(rows)
        with bounds(BY_FILES):
            assert dict(store.scan()) == rows
            found = store.scan_batches(workers=2).read_all()
            assert dict(zip(*(column.to_pylist() for column in found), strict=True)) == rows
        assert parts_of(store).versions.passes == {"files": 2, "iterator": 0}


@pytest.mark.damages_store
@pytest.mark.parametrize("packs", [True, False])
def test_a_changed_byte_is_an_error_or_the_right_rows(tmp_path: Path, packs: bool) -> None:
    with kvstore.open(tmp_path / "store") as store:
        value = b"abc" * 20 if packs else os.urandom(60)
        rows = [(b"k%02d" % number, value) for number in range(40)]
        store.put_many(dict(rows))
        parts_of(store).engine.compact("data")
        (file,) = (
            tmp_path / "store" / f"{each.number:06d}.sst" for each in live_files(data_family(store))
        )
        sound = file.read_bytes()
        engine = parts_of(store).engine
        told = 0
        for at in range(len(sound)):
            for flipped in (sound[at] ^ 1, sound[at] ^ 0x80, None):
                with file.open("r+b") as damage:
                    damage.seek(at)
                    if flipped is None:
                        damage.truncate(at)
                    else:
                        damage.write(bytes([flipped]))
                held = engine.hold_files(b"", None)
                assert held is not None  # its footer is known
                found = outcome(held, int(store.upper))
                held.close()
                file.write_bytes(sound)
                told += found == str(file)
                assert found in (rows, str(file))
        assert told > len(sound)


def outcome(held: HeldFiles, at: int) -> list[tuple[bytes, bytes]] | str:
    """The rows of a whole pass, or the name of the damaged file."""
    one = held.begin(b"", None, (at, {}, None), keys_only=False)
    try:
        while held.take(one, 1 << 20, 1 << 20, 1 << 20):
            pass
    except CorruptionError as error:
        return error.where
    return list(zip(*one.found_rows(), strict=True))
