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
from contextlib import ExitStack, suppress
from contextvars import Context
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvstore
from kvstore import Store, bulk
from kvstore.engine.memory_engine import MemoryEngine
from tests.harness.bounds import bounds
from tests.harness.kills import run_until_killed
from tests.harness.parts import parts_of
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


def pieces(store: Store, number: int) -> None:
    with bounds(COMMIT_PIECE_BYTES=1, COMMIT_PIECE_ROWS=2, CHANGE_CHUNK_BYTES=3):
        delete_range(store, number)


def sync(store: Store, number: int) -> None:
    put(store, number)
    store.sync()


COMMITS: Mapping[str, Callable[[Store, int], None]] = {
    "put": put,
    "delete_range": delete_range,
    "expires": expire,
    "transact": transact,
    "large": large,
    "pieces": pieces,
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
    "write",
    "write_pieces",
    "_write_piece",
    "remove_pieces",
)
"""Functions in which the stored bytes and memory may differ."""


IN_MEMORY = (
    "_append",
    "append",
    "_make_room",
    "_rotate",
    "_write",
    "create_live",
    "seal",
    "_show",
    "_drafts",
    "apply",
    "put",
    "delete",
    "delete_range",
    "_own",
    "_split",
    "_cut",
    "_drop_empty",
)
"""Functions in which the memory engine changes its journal and its maps."""


WHOLE = (
    "with self.lock:",
    "with self._lock:",
    "with self._append_lock",
    "with self._writing:",
    "try:",
)
"""Lines at which no signal is handled: a lock is taken or released, or no code is run."""


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
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not line.lstrip().startswith(WHOLE) and not next(left):
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
@pytest.mark.parametrize("engine", ["rocksdb", "memory", "memory alone"])
def test_a_commit_that_is_interrupted_at_any_line_leaves_a_store_that_works(
    tmp_path: Path, engine: str, name: str, opcodes: bool
) -> None:
    """The store was poisoned, reads included."""
    commit = COMMITS[name]
    path = None if engine == "memory alone" else tmp_path / "store"
    small = {"CHUNK_ENTRIES_MAX": 4, "JOURNAL_FILE_RECORDS": 7}
    places = PLACES if engine == "rocksdb" else (*PLACES, *IN_MEMORY)
    with (
        bounds({} if engine == "rocksdb" else small),
        kvstore.open(path, engine.split()[0], durability="async") as store,
    ):
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
            call = partial(commit, store, number)
            reached = at_line(call, line, opcodes=opcodes, within=places)
            check(store, before, dict(model.scan()))
            if not reached:
                break
            interrupts += 1
        model.close()
        assert interrupts > 8
        upper, rows = store.upper, dict(store.scan())
        assert store.verify().problems == ()
    if path is None:
        return
    with kvstore.open(path, engine) as again:
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


EVENTS = (
    *(name for name in RECORDS if name != "_forget"),  # a finalizer of another module has this name
    "_transition",
    "add",
    "revert",
    "reload",
    "clear",
    "announce",
    "raise_floor",
    "_mend",
    "_mended_by",
    "_settle",
)
"""Functions in which an import, its revert or a clear changes what is stored and memory."""


@pytest.mark.parametrize("opcodes", [False, *soaked(True)], ids=["lines", "opcodes"])
@pytest.mark.parametrize("name", ["import", "revert", "clear", "expiring"])
def test_an_event_that_is_interrupted_at_any_line_leaves_a_store_that_works(
    tmp_path: Path, name: str, opcodes: bool
) -> None:
    """The store was poisoned by each of them."""
    path = tmp_path / "store"
    numbers = itertools.count()

    def staged(*, expires: bool) -> bulk.Import:
        made = bulk.Import.create(tmp_path / f"staged-{next(numbers)}")
        with made.writer() as writer:
            writer.put(b"k1", b"%d" % next(numbers), expires=due() if expires else None)
        made.seal()
        return made

    def due() -> kvstore.Timestamp:
        return kvstore.Timestamp(store.now() + 10**15)

    with kvstore.open(path, durability="async") as store:
        interrupts = 0
        for line in itertools.count(step=1 if opcodes else 7):
            put(store, line)
            delete_range(store, line)
            if name == "revert":
                before = dict(store.scan())
                made = staged(expires=False)
                bulk.ingest(store, made.staging)
                call: Callable[[], object] = partial(store.revert_import, made.import_id)
                after, before = before, dict(store.scan())
            elif name == "clear":
                before = dict(store.scan())
                call = partial(store.clear_range, b"k0", b"k3", compact=False)
                after = {key: value for key, value in before.items() if key >= b"k3"}
            else:
                before = dict(store.scan())
                made = staged(expires=name == "expiring")
                call = partial(bulk.ingest, store, made.staging)
                after = before | {b"k1": b"%d" % (next(numbers) - 1)}
            reached = at_line(call, line, opcodes=opcodes, within=EVENTS)
            found = dict(store.scan())
            assert found in (before, after)
            assert [store.get(key) for key in before] == [found.get(key) for key in before]
            with kvstore.follow(path) as reader:  # it has what is stored
                assert dict(reader.scan()) == found
                assert reader.imports.all() == store.imports.all()
                assert reader.whole_since == store.whole_since
            call()
            assert dict(store.scan()) == after
            assert store.verify().problems == ()
            if not reached:
                break
            interrupts += 1
        assert interrupts > 8
        upper, rows = store.upper, dict(store.scan())
    with kvstore.open(path) as again:
        assert again.upper >= upper
        assert dict(again.scan()) == rows
        assert again.verify().problems == ()


IN_CHANGESETS = (
    *PLACES,
    "begin_changeset",
    "finish_changeset",
    "finish_commit",
    "_begin",
    "_finish",
    "_release",
    "_close",
    "__exit__",
    "kept",
    "take_back",
    "again",
)
"""Functions in which a changeset begins and ends, and in which a commit of it is counted."""


def in_changesets(store: Store, number: int) -> None:
    with store.changeset():
        put(store, number)
        with store.changeset():
            large(store, number)
        put(store, number + 1)


@pytest.mark.parametrize("opcodes", [False, *soaked(True)], ids=["lines", "opcodes"])
@pytest.mark.parametrize("is_beside_another", [False, True])
def test_a_changeset_that_is_interrupted_at_any_line_ends_and_is_counted(
    tmp_path: Path, is_beside_another: bool, opcodes: bool
) -> None:
    """The store was poisoned, also where the changeset was not the caller's own."""
    with kvstore.open(tmp_path / "store", durability="async") as store, ExitStack() as opened:
        other = opened.enter_context(store.changeset()) if is_beside_another else None
        interrupts = 0
        for line in itertools.count(step=1 if opcodes else 2):
            reached = at_line(
                partial(Context().run, in_changesets, store, line),
                line,
                opcodes=opcodes,
                within=IN_CHANGESETS,
            )
            assert len(parts_of(store).committer.capture.open) == is_beside_another
            found = dict(store.scan())
            store.put(b"k6", b"again")
            assert dict(store.scan()) == found | {b"k6": b"again"}
            if not reached:
                break
            interrupts += 1
        assert interrupts > 20
        if other is not None:
            assert other.events == interrupts + 1
        opened.close()
        store.force_quiescence(timedelta(0))
        store.sync()
        assert store.verify().problems == ()
        events = list(store.events(store.since, expand="all"))
        assert sum(epoch.events for epoch in store.epochs()) == len(events)
    with kvstore.open(tmp_path / "store") as again:
        assert again.verify().problems == ()


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_load_into_memory_that_is_interrupted_leaves_a_store_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    """The store was poisoned, although nobody had seen a row."""
    plain = MemoryEngine._stage
    line = interrupts = 0
    within = ("_stage", "_note", "add_rows", "encode_rows")

    def stage(*arguments: Any) -> None:
        nonlocal interrupts
        if at_line(partial(plain, *arguments), line, opcodes=True, within=within):
            interrupts += 1
            raise KeyboardInterrupt

    made = bulk.Import.create(tmp_path / "staged")
    with made.writer() as writer:
        for number in range(7):
            writer.put(b"k%d" % number, b"imported")
    made.seal()
    path = tmp_path / "store" if is_stored else None
    with kvstore.open(path, engine="memory") as store:
        put(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(MemoryEngine, "_stage", stage)
            while interrupts == line:
                with suppress(KeyboardInterrupt):
                    bulk.ingest(store, made.staging)
                put(store, line)
                assert store.verify().problems == ()
                if interrupts > line:
                    assert len(dict(store.scan())) <= line + 2
                line += 1
        assert interrupts > 8
        assert set(dict(store.scan())) == {b"k%d" % number for number in range(7)}
        rows = dict(store.scan())
    if path is not None:
        with kvstore.open(path, engine="memory") as again:
            assert dict(again.scan()) == rows
            assert again.verify().problems == ()


def put_until_interrupted(path: Path, engine: str, said: Connection) -> None:
    """Put until Ctrl-C, again and again, and tell what is there."""
    is_putting = came = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if is_putting:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_signal)
    with kvstore.open(path, engine, durability="async") as store:
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


@pytest.mark.parametrize("count", [100, *soaked(3000)])
@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_control_c_in_a_loop_of_puts_leaves_a_store_that_works(
    tmp_path: Path, spawn: Any, engine: str, count: int
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

    path = tmp_path / "store"
    run_until_killed(spawn, put_until_interrupted, (path, engine), is_time, 0.0)
    assert works == count
    with kvstore.open(path, engine) as store:
        assert store.verify().problems == ()
