"""Verification finds and names each possible defect, and finds nothing in a sound store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvstore
from kvstore import Epoch, ManualClock, Store, bulk, verify
from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.changes.epochs import pack_run, run_name, unpack_run
from kvstore.changes.index import FIRST_STREAM, OP_DELETE, OP_PUT, column, pack
from kvstore.codec.json import JsonObject
from kvstore.codec.keys import (
    TOMBSTONE,
    VALUE,
    encode_change_key,
    encode_range_key,
    encode_reference,
    encode_suffix,
    frame,
)
from kvstore.engine.api import CHANGES, DATA, META, RANGES
from kvstore.errors import CorruptionError
from kvstore.mvcc.meta import Meta
from kvstore.timeline.read_times import Clear
from kvstore.verify import check_frontiers, newest_clears
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.damages_store]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    """A store with data of every kind."""
    with kvstore.open(tmp_path / "db", durability="async", clock=clock) as opened:
        for key in (b"a", b"b", b"\x00", b"b\x00c"):
            opened.put(key, b"v" + key)
        opened.put(b"large", b"v" * 5000)
        opened.delete(b"a")
        opened.delete_range(b"b", b"c")
        staged = bulk.Import.create(tmp_path / "in")
        with staged.writer() as writer:
            writer.put(b"i", b"row")
            writer.put(b"j", b"row")
        staged.seal()
        bulk.ingest(opened, tmp_path / "in")
        opened.hold("backup")
        yield opened


def write(store: Store, family: str, key: bytes, value: bytes | None) -> None:
    batch = parts_of(store).engine.batch()
    if value is None:
        batch.delete(key, parts_of(store).engine.families[family])
    else:
        batch.put(key, value, parts_of(store).engine.families[family])
    parts_of(store).engine.write(batch)


def problems(store: Store) -> list[str]:
    return [str(problem) for problem in store.verify().problems]


def version(key: bytes, timestamp: int, kind: bytes = VALUE) -> bytes:
    return frame(key) + encode_suffix(timestamp) + kind


def test_sound_store_has_no_problems_and_is_counted(store: Store) -> None:
    found = store.verify()
    assert found.ok
    assert found.complete
    assert (found.keys, found.versions) == (7, 8)
    assert (found.range_tombstones, found.change_entries) == (1, 8)
    found.require_ok()


def test_sound_after_gc_clear_revert_and_reopen(store: Store, tmp_path: Path) -> None:
    store.holds.drop("backup")
    (imported,) = store.imports.all()
    store.clear_range(b"b", b"k")
    store.put(b"b", b"again")
    store.revert_import(imported.import_id)
    assert problems(store) == []
    middle = store.upper - 1
    store.put(b"z", b"z")
    store.gc(before=middle)
    assert problems(store) == []
    store.close()
    with kvstore.open(tmp_path / "db", clock=ManualClock(1)) as again:
        assert problems(again) == []


Damage = Callable[[Store], object]


@pytest.mark.parametrize(
    ("damage", "where", "problem"),
    [
        (lambda s: write(s, DATA, b"short", b""), "data key", "too short"),
        (lambda s: write(s, DATA, b"\x00\x02\x00\x01" + bytes(9), b""), "data key", "framed"),
        (lambda s: write(s, DATA, version(b"k", 2)[:-1] + b"\x07", b""), "data key", "kind"),
        (lambda s: write(s, DATA, version(b"k", 999), b"v"), "b'k'", "at 999, with upper"),
        (
            lambda s: write(s, CHANGES, encode_change_key(FIRST_STREAM, 999), b"junk"),
            "change index",
            "has entries at 999",
        ),
        (lambda s: write(s, DATA, version(b"k", 3), b"v"), "b'k' at 3", "not in the change index"),
        (lambda s: write(s, DATA, version(b"b", 2), None), "b'b' at 2", "not in the versions"),
        (lambda s: write(s, DATA, version(b"b", 2), b"w"), "b'b' at 2", "another value"),
        (
            lambda s: write(s, DATA, version(b"a", 6, TOMBSTONE), b"x"),
            "b'a'",
            "tombstone with a value",
        ),
        (
            lambda s: write(s, DATA, frame(b"k") + encode_reference(77) + VALUE, b""),
            "b'k'",
            "no record",
        ),
        (
            lambda s: write(s, DATA, frame(b"z") + s.imports.all()[0].reference + VALUE, b""),
            "b'z'",
            "outside the spans",
        ),
        (
            lambda s: write(s, DATA, frame(b"i") + s.imports.all()[0].reference + VALUE, None),
            "import",
            "1 rows, 2 were added",
        ),
        (
            lambda s: write(s, CHANGES, encode_change_key(FIRST_STREAM, 8), None),
            "import",
            "not in the change index",
        ),
        (
            lambda s: write(s, CHANGES, encode_change_key(FIRST_STREAM, 2), None),
            "b'b' at 2",
            "not in the change index",
        ),
        (
            lambda s: write(s, CHANGES, encode_change_key(FIRST_STREAM, 7), None),
            "range tombstones",
            "differ from the change index",
        ),
        (
            lambda s: write(s, CHANGES, encode_change_key(FIRST_STREAM, 2), b"junk"),
            "change entry",
            "no change entry",
        ),
        (
            lambda s: write(
                s,
                CHANGES,
                encode_change_key(FIRST_STREAM, 2),
                pack(bytes([OP_PUT]), column([b"b"]), column([b"vb"]), is_last=False),
            ),
            "change entry",
            "chunks of a commit are missing",
        ),
        (
            lambda s: write(
                s,
                CHANGES,
                encode_change_key(FIRST_STREAM, 2),
                pack(bytes([OP_PUT, OP_PUT]), column([b"b", b"b"]), column([b"vb", b"vb"])),
            ),
            "change index",
            "more than once",
        ),
        (
            lambda s: write(
                s,
                CHANGES,
                encode_change_key(FIRST_STREAM, 2),
                pack(bytes([99, OP_DELETE]), column([b"b", b"q"]), column([b"vb", b""])),
            ),
            "change entry",
            "unknown operation 99",
        ),
        (
            lambda s: write(s, RANGES, encode_range_key(b"b", 7), b"d"),
            "range tombstones",
            "differ from the stored ones",
        ),
        (
            lambda s: write(s, META, b"since", b'{"v": 1, "timestamp": 5}'),
            "since",
            "5 is stored",
        ),
        (
            lambda s: write(s, META, b"upper", b'{"v": 1, "timestamp": 500}'),
            "upper",
            "below a stored entry",
        ),
        (lambda s: write(s, META, b"clear/x", b"not json"), "clear/x", "not JSON"),
        (
            lambda s: write(s, META, b"collected", b'{"v": 1, "timestamp": 5}'),
            "since",
            "below what GC has collected",
        ),
    ],
)
def test_each_kind_of_damage_is_found_and_named(
    store: Store, damage: Damage, where: str, problem: str
) -> None:
    damage(store)
    found = problems(store)
    assert any(where in text and problem in text for text in found), found
    with pytest.raises(CorruptionError):
        store.verify().require_ok()


def test_change_in_a_stream_that_is_not_its_own_is_found(store: Store) -> None:
    store.reshard(streams=4)
    for number in range(8):
        store.put(b"k%d" % number, b"v")
    store.delete_range(b"x", b"y")
    assert problems(store) == []
    (found,) = [part for part in store.generations() if part.is_split]
    at = store.put(b"odd", b"v")
    own = found.stream_of(b"odd")
    other = next(stream for stream in found.streams if stream != own)
    packed = parts_of(store).engine.get(CHANGES, encode_change_key(own, at))
    write(store, CHANGES, encode_change_key(own, at), None)
    write(store, CHANGES, encode_change_key(other, at), packed)
    assert any("not its own" in problem for problem in problems(store))


def test_records_that_contradict_each_other_are_found(store: Store) -> None:
    (record,) = store.imports.all()
    store.imports._records[record.import_id] = replace(record, reverted=Timestamp(2))
    hold = store.holds._records["backup"]
    store.holds._records["backup"] = replace(hold, timestamp=Timestamp(-1))
    found = " / ".join(problems(store))
    for problem in ("reverted at", "stamps in use", "hold 'backup'"):
        assert problem in found


def test_all_problems_are_listed_up_to_a_bound(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        write(store, DATA, version(b"k%d" % number, 3), b"v")
    assert len(problems(store)) == 10
    monkeypatch.setattr(verify, "VERIFY_PROBLEMS_MAX", 4)
    found = store.verify()
    assert len(found.problems) == 4
    assert not found.complete


def test_a_range_tombstone_that_ends_before_it_begins_is_named_at_the_next_open(
    tmp_path: Path,
) -> None:
    with kvstore.open(tmp_path / "db") as store:
        write(store, RANGES, frame(b"b") + encode_suffix(5), b"a")
    with pytest.raises(CorruptionError, match="ranges key 620001"):
        kvstore.open(tmp_path / "db")


def test_damaged_block_ends_the_pass_and_is_a_problem(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db", "rocksdb", durability="async") as store:
        with store.batch() as batch:
            for number in range(2000):
                batch.put(b"%05d" % number, b"%d" % number * 50)
        store.gc(before=store.now())
        for family in (DATA, CHANGES):
            parts_of(store).engine.compact(family)
    tables = sorted((tmp_path / "db").glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(tables[-1].read_bytes())
    content[len(content) // 3] ^= 0xFF
    tables[-1].write_bytes(content)
    with kvstore.open(tmp_path / "db") as store:
        found = store.verify()
        assert any("orruption" in problem.problem for problem in found.problems)
        assert not found.complete


def test_commits_go_on_while_a_store_is_verified(store: Store) -> None:
    stopping = threading.Event()

    def write_on() -> None:
        while not stopping.is_set():
            store.put(b"meanwhile", b"v" * 2000)
            store.delete_range(b"m", b"n")
            store.delete(b"meanwhile")

    writer = threading.Thread(target=write_on)
    writer.start()
    found = [problem for _ in range(5) for problem in problems(store)]
    stopping.set()
    writer.join()
    assert found == []


def test_time_that_is_closed_while_frontiers_are_compared_is_no_damage(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, closing = Meta.timestamp, threading.Thread(target=store.sync)

    def late(meta: Meta, name: str) -> int:
        if closing.ident is None:
            clock.advance(1_000_000)
            closing.start()
            closing.join(0.2)
        return read(meta, name)

    findings = verify.Findings()
    monkeypatch.setattr(Meta, "timestamp", late)
    check_frontiers(findings, Meta(parts_of(store).engine), parts_of(store).committer)
    closing.join()
    assert findings.problems == []


def test_stats_count_what_is_held(store: Store) -> None:
    figures = store.stats()
    assert figures["since"] == store.since
    assert figures["upper"] == store.upper
    assert (figures["imports"], figures["holds"], figures["range_fragments"]) == (1, 1, 2)
    assert figures["data_bytes"] + figures["data_memtable_bytes"] > 0


# -- epochs ---------------------------------------------------------------------------------


@pytest.fixture
def reopened(tmp_path: Path) -> Iterator[Store]:
    """A store with three runs of written epochs, of three domains, and an epoch that is not written
    yet."""
    for number in range(3):
        with kvstore.open(tmp_path / "e", durability="async") as opened:
            opened.put(b"bare", b"%d" % number)
            with opened.changeset():
                opened.put(b"a", b"%d" % number)
                opened.put(b"b", b"%d" % number)
    with kvstore.open(tmp_path / "e", durability="async") as opened:
        opened.put(b"c", b"1")
        yield opened


def run_of(store: Store, number: int) -> JsonObject:
    found = Meta(parts_of(store).engine).read(run_name(number))
    assert found is not None
    return found


def rewrite(store: Store, number: int, change: Callable[[list[Epoch]], list[Epoch]]) -> None:
    """Put other epochs in the place of a run's."""
    fields = run_of(store, number)
    epochs = change(unpack_run(fields))
    numbers: list[int] = []
    for epoch in epochs:
        numbers += (epoch.end, epoch.closed_at, epoch.events, 1 * epoch.quiescent)
    begin = epochs[0].begin if epochs else int(fields["begin"])
    record = pack_run(epochs[0].domain, begin, numbers, quiet=int(fields["quiet"]))
    batch = parts_of(store).engine.batch()
    Meta(parts_of(store).engine).stage(batch, run_name(number), record)
    parts_of(store).engine.write(batch)


def test_sound_epochs_have_no_problems(reopened: Store) -> None:
    assert problems(reopened) == []
    with reopened.changeset():
        reopened.put(b"open", b"1")
        assert problems(reopened) == [], "a changeset that is open is in no epoch yet"
    reopened.gc(before=reopened.now())
    reopened.put(b"d", b"1")
    assert problems(reopened) == []


def shifted(epochs: list[Epoch]) -> list[Epoch]:
    return [epochs[0]._replace(begin=epochs[0].begin + 1), *epochs[1:]]


def miscounted(epochs: list[Epoch]) -> list[Epoch]:
    return [epochs[0]._replace(events=epochs[0].events + 1), *epochs[1:]]


def early(epochs: list[Epoch]) -> list[Epoch]:
    return [epochs[0], epochs[1]._replace(closed_at=Timestamp(1)), *epochs[2:]]


def late(epochs: list[Epoch]) -> list[Epoch]:
    return [*epochs[:-1], epochs[-1]._replace(closed_at=Timestamp(1 << 62))]


def empty(epochs: list[Epoch]) -> list[Epoch]:
    return [epochs[0]._replace(end=epochs[0].begin), *epochs[1:]]


@pytest.mark.parametrize(
    ("damage", "where", "problem"),
    [
        (lambda s: write(s, META, run_name(1).encode(), None), f"{1:016x}", "run of epochs is mis"),
        (lambda s: write(s, META, run_name(1).encode(), None), "changes below", "in no epoch"),
        (lambda s: write(s, META, run_name(2).encode(), None), f"{2:016x}", "run of epochs is mis"),
        (lambda s: write(s, META, b"epochs/x", b'{"v": 1}'), "epochs/x", "its name does not"),
        (lambda s: rewrite(s, 1, shifted), "domain", "an epoch begins at 1, the one before ended"),
        (lambda s: rewrite(s, 1, lambda e: e[2:]), "domain", "an epoch begins at"),
        (lambda s: rewrite(s, 1, miscounted), "epoch", "it counts 2 events, 1 are there"),
        (lambda s: rewrite(s, 1, early), "epoch", "before the one before it"),
        (lambda s: rewrite(s, 1, late), "epoch", "ends or lies wrong"),
        (lambda s: rewrite(s, 1, empty), "epoch", "ends or lies wrong"),
        (lambda s: drop_commit(s, b"c"), "epoch", "it counts 1 events, 0 are there"),
    ],
)
def test_each_kind_of_damage_to_epochs_is_found_and_named(
    reopened: Store, damage: Damage, where: str, problem: str
) -> None:
    damage(reopened)
    found = problems(reopened)
    assert [line for line in found if where in line and problem in line], found


def drop_commit(store: Store, key: bytes) -> None:
    """Take the change entry of the newest commit of `key`."""
    at = next(iter(store.history(key))).timestamp
    write(store, CHANGES, encode_change_key(FIRST_STREAM, at), None)


def test_a_store_with_many_clears_is_verified_without_a_search_of_them_for_each_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvstore.open(tmp_path / "db", durability="async") as opened:
        for number in range(100):
            opened.put(b"k%03d" % number, b"v")
            opened.clear_range(b"k%03d" % (number // 2), b"k%03d" % (number + 1), compact=False)
            opened.put(b"k%03d" % (number // 2), b"v")
        asked: list[bytes] = []
        contains = Span.__contains__

        def noted(self: Span, key: bytes) -> bool:
            asked.append(key)
            return contains(self, key)

        with monkeypatch.context() as patched:
            patched.setattr(Span, "__contains__", noted)
            assert opened.verify().problems == ()
        assert len(asked) < 1000, "some for each version; each of 200 with each clear is 20,000"


def test_the_newest_clear_over_each_key_is_known() -> None:
    ends = [(b"b", b"y"), (b"d", b"f"), (b"a", b"c"), (b"e", b"m"), (b"e", b"g")]
    clears = [Clear(Span(*span), Timestamp(at)) for at, span in enumerate(ends, 10)]
    newest = newest_clears(clears)
    for key in (b"%c" % letter for letter in range(ord("a"), ord("z"))):
        over = [clear.timestamp for clear in clears if key in clear.span]
        assert newest.stack(key) == tuple(over[-1:])
