"""Ctrl-C in a loop of commits: the store works on, each commit that had returned is there, and the
one under way is there or not, for this process and after a crash alike."""

from __future__ import annotations

import itertools
import linecache
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvstore
from kvstore import Store, bulk
from tests.harness.kills import run_until_killed
from tests.harness.seeds import seeded
from tests.harness.soak import soaked


def put(store: Store, number: int) -> None:
    store.put(b"k%d" % (number % 7), b"%d" % number)


def delete_range(store: Store, number: int) -> None:
    with store.batch() as batch:
        batch.delete_range(b"k2", b"k5")
        batch.put(b"k%d" % (number % 7), b"%d" % number)


def expire(store: Store, number: int) -> None:
    store.put(b"k%d" % (number % 7), b"%d" % number, expires=timedelta(days=1))


def transact(store: Store, number: int) -> None:
    store.transact(lambda txn: txn.put(b"k1", b"%d after " % number + (txn.get(b"k0") or b"")))


def large(store: Store, number: int) -> None:
    """The change index has an entry that names keys only."""
    store.put_many({b"k%d" % at: b"%d" % number * 400 for at in range(7)})


def sync(store: Store, number: int) -> None:
    put(store, number)
    store.sync()


COMMITS: Mapping[str, Callable[[Store, int], None]] = {
    "put": put,
    "delete_range": delete_range,
    "expires": expire,
    "transact": transact,
    "large": large,
    "sync": sync,
}


PLACES = (
    "commit",
    "written",
    "_show_commits",
    "guarded",
    "advance",
    "write_meta",
    "add",
    "note_health",
)
"""Functions in which the stored bytes and memory may differ."""


def at_line(
    call: Callable[[], object],
    line: int,
    *,
    opcodes: bool,
    within: Collection[str] = PLACES,
) -> bool:
    """Make the call, and raise `KeyboardInterrupt` at the line number `line`, or the bytecode, that
    it reaches in functions that are named in `within`. Whether it was reached."""
    left = itertools.count(line, -1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "/kvstore/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = opcodes
        wanted = "opcode" if opcodes else "line"
        if event == wanted and frame.f_code.co_name in within:
            # A signal is handled inside the block of a lock, and not where `with` enters or leaves.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not line.lstrip().startswith("with self.lock:") and not next(left):
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def check(store: Store, before: dict[bytes, bytes], after: dict[bytes, bytes]) -> None:
    """The store shows the state before the commit or after it, by every read."""
    found = dict(store.scan())
    assert found in (before, after)
    keys = [b"k%d" % number for number in range(7)]
    assert store.get_many(keys) == [found.get(key) for key in keys]
    assert [store.get(key) for key in keys] == [found.get(key) for key in keys]
    with store.transaction() as txn:
        assert dict(txn.scan()) == found
        txn.put(b"k6", b"again")
    assert store.get(b"k6") == b"again"


@pytest.mark.parametrize("opcodes", [False, *soaked(True)], ids=["lines", "opcodes"])
@pytest.mark.parametrize("name", COMMITS)
def test_a_commit_that_is_interrupted_at_any_line_leaves_a_store_that_works(
    tmp_path: Path, name: str, opcodes: bool
) -> None:
    """The store was poisoned, reads included."""
    commit = COMMITS[name]
    with kvstore.open(tmp_path / "store", durability="async") as store:
        for number in range(7):
            put(store, number)
        model = kvstore.open(None, engine="memory")
        count = itertools.count(10)
        interrupts = 0
        for line in itertools.count():
            number = next(count)
            before = dict(store.scan())
            model.put_many({b"k%d" % at: b"" for at in range(7)})
            model.delete_range(b"", b"z")
            model.put_many(before)
            commit(model, number)
            reached = at_line(lambda at=number: commit(store, at), line, opcodes=opcodes)  # type: ignore[misc]
            check(store, before, dict(model.scan()))
            if not reached:
                break
            interrupts += 1
        model.close()
        assert interrupts > 8
        upper, rows = store.upper, dict(store.scan())
        assert store.verify().problems == ()
    with kvstore.open(tmp_path / "store") as again:
        assert again.upper >= upper
        assert dict(again.scan()) == rows
        assert again.verify().problems == ()


RECORDS = (
    "write_meta",
    "announce",
    "commit_event",
    "written",
    "guarded",
    "show",
    "publish",
    "stage",
    "stage_trim",
    "forget",
    "stage_forget",
    "_write",
    "_forget",
    "_trim",
    "retire",
    "move_since",
    "publish_stamps",
    "publish_fragments",
    "take",
    "advance",
)
"""Functions in which records beside the timeline change, stored and in memory."""


@pytest.mark.parametrize("opcodes", [False, *soaked(True)], ids=["lines", "opcodes"])
def test_gc_holds_and_new_streams_that_are_interrupted_leave_a_sound_store(
    tmp_path: Path, opcodes: bool
) -> None:
    """GC dropped generations in memory whose removal was only staged: `verify` told of streams that
    nobody knows until the store was opened anew."""

    def work(store: Store) -> None:
        store.reshard(2)
        with store.hold("h") as held:
            held.move(store.upper - 1)
        store.gc(before=store.upper - 1)

    with kvstore.open(tmp_path / "store", durability="async") as store:
        interrupts = 0
        for line in itertools.count(step=1 if opcodes else 19):
            put(store, line)
            delete_range(store, line)
            if line % 2 == 0:
                made = bulk.Import.create(tmp_path / f"staged-{line}")
                with made.writer() as writer:
                    writer.put(b"k1", b"imported")
                made.seal()
                bulk.ingest(store, made.staging)
            rows = dict(store.scan())
            reached = at_line(lambda: work(store), line, opcodes=opcodes, within=RECORDS)
            assert dict(store.scan()) == rows
            assert store.verify().problems == ()
            generations, since = store.generations(), store.since
            imports, clears = store.imports.all(), store.stats()["clears"]
            with kvstore.follow(tmp_path / "store") as reader:  # it has what is stored
                assert reader.generations() == generations
                assert (reader.since, reader.stats()["clears"]) == (since, clears)
                assert reader.imports.all() == imports
                assert reader.holds.all() == store.holds.all()
            for left in store.holds.all():
                store.holds.drop(left.name)
            store.gc(before=store.upper - 1)
            if not reached:
                break
            interrupts += 1
        assert interrupts > 3


def put_until_interrupted(path: Path, said: Connection) -> None:
    """Put until Ctrl-C, again and again, and tell what is there."""
    is_putting = came = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if is_putting:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_signal)
    with kvstore.open(path, durability="async") as store:
        store.put(b"k", b"0")
        number, returned = 1, 0
        while True:
            came = False
            said.send(os.getpid())
            try:
                is_putting = True
                while not came:
                    store.put(b"k", b"%d" % number)
                    returned = number
                    number += 1
            except KeyboardInterrupt:
                pass
            is_putting = False
            found = store.get(b"k")
            assert found in (b"%d" % returned, b"%d" % (returned + 1)), (found, returned)
            assert [value for _, value in store.scan()] == [found]
            returned = int(found or b"0") + 1
            number = returned + 1
            store.put(b"k", b"%d" % returned)
            said.send("works")


@pytest.mark.parametrize("count", [150, *soaked(3000)])
def test_control_c_in_a_loop_of_puts_leaves_a_store_that_works(
    tmp_path: Path, spawn: Any, count: int
) -> None:
    """A real SIGINT, in a process of its own."""
    works, pick = 0, seeded("KVSTORE_SIGINT_SEED")

    def is_time(said: list[Any]) -> bool:
        nonlocal works
        works += said[-1] == "works"
        if works == count:
            return True
        if isinstance(said[-1], int):
            until = time.monotonic() + pick.random() * 0.005  # the moment is the subject here
            while time.monotonic() < until:
                pass
            os.kill(said[-1], signal.SIGINT)
        return False

    run_until_killed(spawn, put_until_interrupted, (tmp_path / "store",), is_time, 0.0)
    assert works == count
    with kvstore.open(tmp_path / "store") as store:
        assert store.verify().problems == ()
