"""Transactions of several threads at once are serialisable."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

import kvstore
from kvstore import Store
from kvstore.errors import ConflictError
from kvstore.timeline import recent
from tests.harness.parts import parts_of
from tests.txn.serialization import Record, cycle, edges

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_checker_finds_write_skew_and_lost_update() -> None:
    skew = [
        Record("t1", {b"x": 0, b"y": 0}, {b"x": 5}),
        Record("t2", {b"x": 0, b"y": 0}, {b"y": 6}),
    ]
    assert cycle(edges(skew))
    lost = [Record("t1", {b"x": 0}, {b"x": 5}), Record("t2", {b"x": 0}, {b"x": 6})]
    assert cycle(edges(lost))
    serial = [Record("t1", {b"x": 0}, {b"x": 5}), Record("t2", {b"x": 5}, {b"x": 6})]
    assert cycle(edges(serial)) is None


def test_checker_finds_a_read_of_the_past_by_its_times() -> None:
    wrote = Record("t1", writes={b"x": 5}, begin=1, end=2)
    for begin, is_stale in ((3, True), (2, False)):
        read = Record("t2", {b"x": 0}, begin=begin, end=4)
        assert (cycle(edges([wrote, read])) is not None) == is_stale
    between = Record("t3", begin=3, end=4)
    read = Record("t2", {b"x": 0}, begin=5, end=6)
    assert cycle(edges([wrote, between, read])) is not None  # t1 < t3 < t2 < t1


@pytest.mark.parametrize("memory", [1 << 18, 4])
def test_recorded_histories_of_threads_are_strictly_serialisable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """Each value names the transaction that wrote it, so a read shows which write it saw."""
    monkeypatch.setattr(recent, "RECENT_KEYS_MAX", memory)
    keys = [b"k%d" % number for number in range(6)]
    history: list[Record] = []
    conflicts: list[ConflictError] = []
    with kvstore.open(tmp_path / "db", durability="async") as store:

        def run(worker: int) -> None:
            draw = random.Random(worker)
            for number in range(60):
                name = f"{worker}.{number}"
                record, seen = Record(name, begin=time.monotonic_ns()), {}
                txn = store.transaction()
                if draw.random() < 0.4:
                    low, high = sorted(draw.sample(range(7), 2))
                    span = keys[low:high]
                    rows = dict(txn.scan(keys[low], b"k%d" % high))
                    seen.update({key: rows.get(key) for key in span})
                else:
                    seen.update({key: txn.get(key) for key in draw.sample(keys, 2)})
                written = draw.sample(keys, draw.randint(0, 2))
                for key in written:
                    txn.put(key, name.encode())
                try:
                    at = txn.commit()
                except ConflictError as error:
                    conflicts.append(error)
                    continue
                record.end = time.monotonic_ns()
                record.writes = dict.fromkeys(written, at or 0)
                observed.append((record, seen))
                history.append(record)

        observed: list[tuple[Record, dict[bytes, bytes | None]]] = []
        threads = [threading.Thread(target=run, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.verify().problems == ()
        written_at = {each.name.encode(): at for each in history for at in each.writes.values()}
        for record, seen in observed:
            for key, value in seen.items():
                record.reads[key] = 0 if value is None else written_at[value]
    assert cycle(edges(history)) is None
    assert len(history) + len(conflicts) == 240


def test_transaction_that_gave_way_in_vain_waits_for_the_commit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit holds its lock until the transaction has looked for the last time."""
    committer = parts_of(store).committer
    writing, looked = threading.Event(), threading.Event()
    write, give_way = parts_of(store).engine.write, committer.give_way

    def write_late(*what: object) -> None:
        writing.set()
        assert looked.wait(120)
        monkeypatch.setattr(parts_of(store).engine, "write", write)
        write(*what)  # type: ignore[arg-type]

    def give_way_and_tell() -> None:
        give_way()
        looked.set()

    monkeypatch.setattr(parts_of(store).engine, "write", write_late)
    monkeypatch.setattr(committer, "give_way", give_way_and_tell)
    writer = threading.Thread(target=store.put, args=(b"x", b"1"))
    writer.start()
    assert writing.wait(120)
    with store.transaction() as txn:
        assert txn.get(b"x") == b"1"
        txn.put(b"x", b"2")
    writer.join()
    assert store.get(b"x") == b"2"
    assert not committer.is_committing
