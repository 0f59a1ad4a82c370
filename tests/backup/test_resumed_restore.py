"""Restores in pieces: by several processes, told in rows, and continued after a kill."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import backup
from kvstore.backup.restore import read_piece, read_plan
from kvstore.backup.workers import shared
from kvstore.errors import HistoryGoneError, StorageError, UsageError
from tests.backup import children
from tests.backup.histories import change, live_through, versions
from tests.backup.test_reader_requests import part_reads, proxy, url
from tests.harness.bounds import bounds
from tests.harness.proxy import Proxy
from tests.harness.seeds import seeded
from tests.shard.conftest import s3_bucket, s3_options, s3_server

__all__ = ["proxy", "s3_bucket", "s3_server", "url"]

LIMITS = {
    "PART_BYTES_MAX": 8_000,
    "PART_WHOLE_BYTES_MAX": 1_000,
    "ROW_GROUP_ROWS_MAX": 20,
    "RESTORE_PIECE_BYTES": 4_000,
    "FETCH_CHUNK_BYTES": 2_000,
}
"""Limits under which a few dozen rows are many pieces, fetched in chunks."""


def killed(spawn: Any, *arguments: Any) -> bool:
    """Run a child that continues a restore; whether it was killed before the end."""
    receiver, sender = spawn.Pipe(duplex=False)
    *before, limits = arguments
    process = spawn.Process(target=children.resume, args=(*before, sender, limits))
    process.start()
    sender.close()
    try:
        receiver.recv()
    except EOFError:
        process.join()
        assert process.exitcode == -signal.SIGKILL
        return True
    finally:
        receiver.close()
    process.join()
    return False


def some_steps(pick: random.Random) -> Iterator[int]:
    while True:
        yield pick.randrange(60, 200)


def each_step(_: random.Random) -> Iterator[int]:
    """Each process is killed one step later than the one before, so every step is met."""
    yield from count(1)


@pytest.mark.parametrize("steps", [some_steps, pytest.param(each_step, marks=pytest.mark.soak)])
def test_a_restore_that_is_killed_at_any_step_continues_and_fetches_nothing_twice(
    spawn: Any,
    store: kvstore.Store,
    proxy: Proxy,
    url: str,
    tmp_path: Path,
    steps: Callable[[random.Random], Iterator[int]],
) -> None:
    pick = seeded("KVSTORE_RESUME_SEED")
    options, place = s3_options(proxy.url), tmp_path / "restored"
    with bounds(LIMITS):
        collection = backup.Collection(url, options=options)
        for _ in range(3):
            change(store, pick, 60)
            collection.backup(store)
    proxy.taken()
    kills, drawn = 0, steps(pick)
    while killed(spawn, url, options, place, next(drawn), LIMITS):
        kills += 1
        assert kills < 2000
        if place.exists():  # the kill came behind the rename, before the files were removed
            break
    fetched = Counter((r.path, r.range) for r in part_reads(proxy) if r.method == "GET")
    # A kill between a fetch and its note may cost that chunk.
    assert kills >= 1
    assert sum(fetched.values()) - len(fetched) <= kills
    assert sum(fetched.values()) >= len(collection.list())
    with pytest.raises(UsageError, match="exists"):
        collection.restore(place, resume=True)
    assert not list(tmp_path.glob(".restored*"))
    at = collection.upper - 1
    with kvstore.open(place) as restored:
        assert versions(restored, at) == versions(store, at)


def test_pieces_survive_a_failure_and_compaction_and_an_expiry_between(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    with bounds(LIMITS):
        instants = live_through(store, collection, tmp_path / "staging", seed=3)
        told: list[int] = []

        def call_off(rows: int) -> None:
            told.append(rows)
            if rows > 60:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            collection.restore(tmp_path / "restored", resume=True, progress=call_off)
        begun = collection.upper - 1
        (left,) = tmp_path.glob(".restored.building-*")
        finished = [path.name for path in left.glob("[0-9]*.json")]
        assert finished
        since = collection.expire(instants[30])
        store.put(b"later", b"1")
        collection.backup(store)
        found = collection.restore(tmp_path / "restored", resume=True)
    assert found == begun < collection.upper - 1
    assert found.since == since
    assert not left.exists()
    with kvstore.open(tmp_path / "restored") as restored:
        for at in instants[30::20]:
            assert dict(restored.scan(as_of=at)) == dict(store.scan(as_of=at))


def test_another_restore_to_the_same_place_begins_anew(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=4)

    def call_off(rows: int) -> None:
        if rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collection.restore(tmp_path / "restored", resume=True, progress=call_off)
    found = collection.restore(
        tmp_path / "restored", instants[80], prefix=b"k1", history=False, resume=True
    )
    assert found == found.since == instants[80]
    with kvstore.open(tmp_path / "restored") as restored:
        expected = dict(store.scan(prefix=b"k1", as_of=instants[80]))
        assert dict(restored.scan()) == expected
        assert found.rows == len(expected)


def test_two_processes_build_the_same_store(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    with bounds(LIMITS):
        live_through(store, collection, tmp_path / "staging", seed=5)
        told: list[Any] = []
        found = collection.restore(tmp_path / "restored", workers=2, progress=told.append)
    assert told[0] == 0
    assert told[-1] == found.rows == told[-1].total
    with kvstore.open(tmp_path / "restored") as restored:
        assert versions(restored, found) == versions(store, found)
    with pytest.raises(UsageError, match="workers=0"):
        collection.restore(tmp_path / "other", workers=0)
    inside = backup.Collection("memory://two-processes")
    inside.backup(store)
    with pytest.raises(UsageError, match="other processes cannot open"):
        inside.restore(tmp_path / "other", workers=2)


def test_a_restore_finds_its_places_after_a_change_of_the_directory(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes begin later than the collection was opened."""
    (tmp_path / "away").mkdir()
    (tmp_path / "key").write_bytes(bytes(range(32)))
    monkeypatch.chdir(tmp_path)
    collection = backup.Collection("collection", key_file="key")
    with bounds(LIMITS):
        live_through(store, collection, tmp_path / "staging", seed=5)
        monkeypatch.chdir(tmp_path / "away")
        found = collection.restore("restored", workers=2)
    with kvstore.open(tmp_path / "away" / "restored") as restored:
        assert versions(restored, found) == versions(store, found)
    with pytest.raises(UsageError, match="is a URL"):
        collection.restore("s3://bucket/restored")
    assert [path.name for path in (tmp_path / "away").iterdir()] == ["restored"]


def end_here(piece: int, tell: Callable[[int], None]) -> int:
    if piece == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return piece


def double(piece: int, tell: Callable[[int], None]) -> int:
    tell(1)
    return 2 * piece


def fail(piece: int, tell: Callable[[int], None]) -> int:
    raise UsageError(f"piece {piece}", "mend it")


def test_work_is_shared_and_a_worker_that_dies_or_fails_ends_it() -> None:
    told: list[int] = []
    assert dict(shared(double, range(9), workers=1, tell=told.append))[8] == 16
    assert sum(told) == 9
    with pytest.raises(StorageError, match="ended with -9"):
        list(shared(end_here, [1] * 9, workers=2, tell=told.append, here=double))
    with pytest.raises(UsageError, match="piece 7"):
        list(shared(fail, [7] * 9, workers=2, tell=told.append, here=double))


def test_each_altered_byte_of_a_piece_and_of_the_plan_is_noticed(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"

    def keep(rows: int) -> None:
        (building,) = tmp_path.glob(".restored.building-*")
        if with_files(building) is not None and not kept.exists():
            shutil.copytree(building, kept)

    def with_files(directory: Path) -> int | None:
        found = ((n, read_piece(directory, n)) for n in range(30))
        return next((n for n, piece in found if piece is not None and piece.files), None)

    with bounds(LIMITS):
        change(store, random.Random(1), 200)
        collection.backup(store)
        collection.restore(tmp_path / "restored", progress=keep)
    number = with_files(kept)
    assert number is not None
    piece = read_piece(kept, number)
    assert piece is not None
    plan = read_plan(kept)
    assert plan is not None
    pick = seeded("KVSTORE_PIECE_SEED")
    for name in (f"{number}.json", "plan.json", piece.files[0].path):
        whole = (kept / name).read_bytes()
        cuts = [pick.randrange(len(whole)) for _ in range(40)]
        for at in cuts:
            flipped = bytearray(whole)
            flipped[at] ^= 1 << pick.randrange(8)
            for damaged in (bytes(flipped), whole[:at]):
                (kept / name).write_bytes(damaged)
                found = read_plan(kept) if name == "plan.json" else read_piece(kept, number)
                assert found is None
        (kept / name).write_bytes(whole)
    assert (read_piece(kept, number), read_plan(kept)) == (piece, plan)


def test_a_time_before_the_first_row_and_one_in_a_hole_are_errors(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    first = store.put(b"k", b"1")
    collection.backup(store)
    for number in count():
        store.put(b"k", b"%d" % number)
        if store.upper > collection.upper + 1:
            break
    hole = store.upper - 1
    store.put(b"k", b"new")
    store.drop_hold(store.holds.all()[0].name)
    store.gc(before=store.upper)
    collection.backup(store, full=True)
    for at in (first - 1, first - 10**9):
        with pytest.raises(HistoryGoneError, match="the first row") as caught:
            collection.restore(tmp_path / "restored", at)
        assert caught.value.since == first
    with pytest.raises(HistoryGoneError):
        collection.restore(tmp_path / "restored", hole)
    assert not list(tmp_path.glob("*restored*"))
    assert collection.restore(tmp_path / "restored", first).rows == 1
