"""Thin entries: a crash leaves a thin entry of a large commit, which reads like the full entry."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.base.timestamp import Timestamp
from kvstore.changes.index import OP_PUT, OP_PUT_LARGE
from kvstore.errors import OutOfSpaceError, PoisonedError
from kvstore.limits import THIN_FROM_BYTES
from kvstore.store import Store
from kvstore.testing.strategies import ops
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

LARGE = [(b"key%05d" % n, b"v%099d" % n) for n in range(6 * THIN_FROM_BYTES // 100)]


def put_large(store: Store) -> Timestamp:
    with store.batch() as batch:
        for key, value in LARGE:
            batch.put(key, value)
    return batch.timestamp


def crash(store: Store, tmp_path: Path) -> Path:
    """The directory that a kill would leave of an open store."""
    left = tmp_path / f"left-{len(list(tmp_path.iterdir()))}"
    shutil.copytree(parts_of(store).engine.path, left, ignore=shutil.ignore_patterns("lock"))  # type: ignore[attr-defined]
    return left


def stored(store: Store) -> set[int]:
    """The operations in the index."""
    found = parts_of(store).index.read(since=0, upto=store.upper)
    return {op for commit in found for op in bytes(commit.entry.ops)}


def every_way(store: Store) -> list[Any]:
    """The answers of all calls that read changes."""
    events = [list(store.events(0, images=how)) for how in ("none", "delta", "pre+post")]
    arrow = store.changes_batches(0, images="pre+post").read_all().to_pylist()
    latest = list(store.changes(0, revisions="latest"))
    return [events, arrow, latest, list(store.changes(0, order="time"))]


@pytest.mark.usual_limits
@pytest.mark.parametrize("streams", [1, 3])
def test_a_large_commit_is_full_and_after_a_crash_thin_and_the_same(
    tmp_path: Path, streams: int
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        if streams > 1:
            store.reshard(streams=streams)
        stamp = put_large(store)
        store.put(LARGE[0][0], b"small")
        before = every_way(store)
        left = crash(store, tmp_path)
        assert stored(store) == {OP_PUT}
    with kvstore.open(left) as again:
        assert stored(again) == {OP_PUT, OP_PUT_LARGE}
        assert every_way(again) == before
        again.gc(before=stamp)
        again.verify().require_ok()


@pytest.mark.usual_limits  # tiny chunks are never thin
def test_the_log_takes_the_values_once(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        put_large(store)
        left = crash(store, tmp_path)
        logs = [path for path in left.iterdir() if path.name.endswith((".log", "journal"))]
        held = b"".join(path.read_bytes() for path in logs)
        assert held.count(LARGE[-1][1]) == 1


@pytest.mark.usual_limits
def test_a_full_entry_that_cannot_be_written_poisons_and_its_commit_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kvstore.open(tmp_path / "store")
    store.put(b"before", b"1")
    write = parts_of(store).engine.write

    def refuse_unlogged(*what: Any, logged: bool = True) -> None:
        if not logged:
            raise OutOfSpaceError("store")
        write(*what, logged=logged)

    monkeypatch.setattr(parts_of(store).engine, "write", refuse_unlogged)
    with pytest.raises(OutOfSpaceError):
        put_large(store)
    monkeypatch.undo()
    with pytest.raises(PoisonedError):
        store.put(b"after", b"2")
    store.close()
    with kvstore.open(tmp_path / "store") as again:
        assert list(again.scan()) == [(b"before", b"1"), *LARGE]
        assert stored(again) == {OP_PUT, OP_PUT_LARGE}
        changed = again.changes(0, order="time")
        assert [(change.key, change.value) for change in changed] == [(b"before", b"1"), *LARGE]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ops, min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_any_history_reads_the_same_after_a_crash(
    tmp_path: Path, history: list[list[Any]], streams: int
) -> None:
    place = tmp_path / str(next(_numbers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.changes.index.THIN_FROM_BYTES", 1)
        with kvstore.open(place / "store", durability="async") as store:
            if streams > 1:
                store.reshard(streams=streams)
            for writes in history:
                with store.batch() as batch:
                    for op, *args in writes:
                        getattr(batch, op)(*(arg for arg in args if arg is not None))
            store.sync()
            before = every_way(store)
            left = crash(store, place)
    with kvstore.open(left) as again:
        assert every_way(again) == before


_numbers = itertools.count()
