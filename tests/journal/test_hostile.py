"""Files and records that no writer wrote: each ends in the documented error, and changes
nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import tasks
from kvstore.engine import memory_engine
from kvstore.errors import CorruptionError, JournalDamagedError, KVStoreError, NotAStoreError
from kvstore.storage.journal import Journal, Sync, inspect, read
from kvstore.storage.journal.framing import (
    KIND_JOURNAL,
    KIND_SNAPSHOT,
    TYPE_MARK,
    Note,
    Opening,
    encode,
    encode_mark,
    encode_note,
    encode_opening,
    encode_seal,
)
from kvstore.tasks import Task
from tests.journal.folds import Payloads
from tests.journal.fuzz_records import fold_anything, queue_anything

LIVE = "0000000000000001-journal"
FIRST = (7 << 32) + 1


def open_at(path: Path) -> list[bytes]:
    fold = Payloads()
    with Journal.open(path, apply=fold.apply, restore=fold.restore, content="test"):
        return fold.items


def written(path: Path) -> Path:
    """A journal with a snapshot, a sealed and a live file."""
    with Journal.open(path, content="test", identity=7, file_records=2) as journal:
        journal.append_many([b"one", b"two"])
        journal.snapshot([(0, b"one"), (0, b"two")])
        for item in (b"three", b"four", b"five"):
            journal.append(item)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in path.iterdir() if f.is_file() and f.name != "LOCK"}


# -- names ------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    elsewhere.write_bytes(b"mine")
    path.symlink_to(elsewhere)


def dangling_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "nowhere")


@pytest.mark.parametrize("place", [pipe, link, dangling_link, Path.mkdir])
@pytest.mark.parametrize("suffix", ["-journal", "-journal-final", "-snapshot-final", "LOCK"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    tmp_path: Path, place: Callable[[Path], None], suffix: str
) -> None:
    path = written(tmp_path / "journal")
    (file,) = [found for found in path.iterdir() if found.name.endswith(suffix)]
    file.unlink()
    place(file)
    for looking in (open_at, inspect, lambda path: list(read(path))):
        if looking is open_at or suffix == "LOCK" or "snapshot" not in suffix:
            with pytest.raises(NotAStoreError, match="not a regular file"):
                looking(path)
    assert not (tmp_path / "nowhere").exists()
    for elsewhere in tmp_path.glob("elsewhere-*"):
        assert elsewhere.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "name",
    [
        "ffffffffffffffff-journal",
        "ffffffffffffffff-snapshot-final",
        "0000000000000001-journal",
        "0000000000000009-journal-final",
        "0000000000000009-index",
        "0000000000000005-journal-final",
    ],
)
def test_a_file_that_is_one_too_many_is_refused(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "journal")
    (path / name).write_bytes(encode_opening(FIRST, 1, Opening(KIND_JOURNAL, "test")))
    before = contents(path)
    with pytest.raises(KVStoreError):
        open_at(path)
    assert contents(path) == before


# -- files ------------------------------------------------------------------------------------


def test_records_that_no_writer_writes_are_refused(tmp_path: Path) -> None:
    opening = encode_opening(FIRST, 1, Opening(KIND_JOURNAL, "test"))
    record = encode(FIRST, 1, 0, b"x")
    hostile = {
        "a snapshot's opening": encode_opening(FIRST, 1, Opening(KIND_SNAPSHOT, "test")),
        "an unknown kind": encode_opening(FIRST, 1, Opening(9, "test")),
        "two openings": opening + opening[:-1] + b"!",
        "a second opening": opening + record + encode_opening(FIRST, 2, Opening(0, "other")),
        "a mark of the future": opening + encode_mark(FIRST, 1, synced=10_000) + record,
        "a mark of a wrong length": opening + encode(FIRST, 1, TYPE_MARK, b"") + record,
        "an unknown type": opening + encode(FIRST, 1, 0xF5, b"") + record,
        "a note": opening + encode_note(Note(FIRST, 1, 1, 1)) + record,
        "a seal that counts wrong": opening + record + encode_seal(FIRST, 2, records=9),
        "a record behind the seal": opening + encode_seal(FIRST, 1, records=0) + record,
        "an ordinal too far": opening + encode(FIRST, 2, 0, b"x"),
        "another journal's record": opening + encode(8 << 32, 1, 0, b"x"),
        "openings used up": encode_opening((8 << 32) - 1, 1, Opening(KIND_JOURNAL, "test")),
        "no opening": record,
        "junk": b"\xfe" * 5000,
        "zeros": bytes(5000),
    }
    for what, data in hostile.items():
        path = tmp_path / what
        path.mkdir()
        (path / LIVE).write_bytes(data)
        with pytest.raises(CorruptionError):
            open_at(path)
        assert contents(path).pop(LIVE) == data, what


_BOUNDED = """
import resource, sys
from kvstore.errors import JournalDamagedError
from kvstore.storage.journal import Journal, inspect
with open("/proc/self/statm") as memory:
    used = int(memory.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), resource.RLIM_INFINITY))
for look in (inspect, lambda path: Journal.open(path, apply=print, content="test").close()):
    try:
        look(sys.argv[1])
        print("sound")
    except JournalDamagedError:
        print("damaged")
"""


@pytest.mark.parametrize("front", ["nothing", "records", "a long head"])
def test_a_sparse_file_larger_than_memory_costs_none(tmp_path: Path, front: str) -> None:
    opening = encode_opening(FIRST, 1, Opening(KIND_JOURNAL, "test"))
    fronts = {
        "nothing": b"",
        "records": opening + encode(FIRST, 1, 0, b"x"),
        "a long head": opening + encode(FIRST, 1, 0, bytes(70_000))[:100],
    }
    (tmp_path / LIVE).write_bytes(fronts[front])
    os.truncate(tmp_path / LIVE, 128 << 20)
    assert resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY
    ran = subprocess.run(
        [sys.executable, "-c", _BOUNDED, str(tmp_path), str(64 << 20)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split()[-1] == ("damaged" if front == "nothing" else "sound")


# -- records ----------------------------------------------------------------------------------

PUT, RANGES = memory_engine.PUT, 1
HOSTILE_STATE = {
    "an unknown operation": (memory_engine.BATCH, memory_engine.encode(b"\x0c", [b"k"], [b"v"])),
    "keys that do not ascend": (
        memory_engine.STATE,
        memory_engine.encode(b"\0\0", [b"b", b"a"], [b"", b""]),
    ),
    "a key twice": (memory_engine.STATE, memory_engine.encode(b"\0\0", [b"a", b"a"], [b"", b""])),
    "two families": (memory_engine.STATE, memory_engine.encode(b"\0\1", [b"a", b"b"], [b"", b""])),
    "a delete": (memory_engine.STATE, memory_engine.encode(b"\4", [b"a"], [b""])),
    "a batch in a snapshot": (memory_engine.BATCH, memory_engine.encode(b"\0", [b"a"], [b""])),
    "a type beyond": (99, b""),
    "rows of meta": (memory_engine.ROWS, bytes(8) + memory_engine.encode(b"\3", [b"a"], [b""])),
    "no entries": (memory_engine.STATE, bytes(4)),
    "a huge count": (memory_engine.STATE, b"\xff" * 4 + bytes(100)),
    "a huge length": (memory_engine.STATE, b"\1\0\0\0\0" + b"\xff" * 8 + b"k"),
    "an id too long": (memory_engine.TAKEN, bytes(9)),
    "an id too short": (memory_engine.DROPPED, bytes(7)),
}


@pytest.mark.parametrize("what", HOSTILE_STATE)
def test_a_hostile_record_of_the_memory_engine_is_corruption(tmp_path: Path, what: str) -> None:
    kind, payload = HOSTILE_STATE[what]
    in_snapshot = kind == memory_engine.STATE or what == "a batch in a snapshot"
    assert fold_anything([(kind, payload)], snapshot=int(in_snapshot)) is None
    with Journal.open(tmp_path / "s", content=memory_engine.CONTENT, sync=Sync.never()) as journal:
        if in_snapshot:
            journal.snapshot([(kind, payload)])
        else:
            journal.append(payload, kind)
    for opening in (lambda path: kvstore.open(path, "memory"), kvstore.open_read_only):
        with pytest.raises(CorruptionError):
            opening(tmp_path / "s")


rows = st.lists(st.tuples(st.integers(0, 15), st.binary(max_size=3), st.binary(max_size=3)))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            rows.map(
                lambda r: memory_engine.encode(
                    bytes(op for op, _, _ in r),
                    [key for _, key, _ in r],
                    [value for _, _, value in r],
                )
            )
            | st.binary(max_size=40)
            | st.just(bytes(8)),
        ),
        max_size=8,
    ),
    st.integers(0, 3),
    st.integers(0, 400),
)
def test_no_records_break_the_memory_engine(
    records: list[tuple[int, bytes]], snapshot: int, flip: int
) -> None:
    fold_anything(records, snapshot=snapshot)
    kind, payload = records[-1] if records else (1, b"")
    if payload:
        damaged = bytearray(payload)
        damaged[flip // 8 % len(payload)] ^= 1 << flip % 8
        fold_anything([*records[:-1], (kind, bytes(damaged))], snapshot=snapshot)


HOSTILE_TASKS = {
    "nothing": b"",
    "the end of time": tasks.encode(1 << 63, []),
    "an id of bytes": tasks.RECORD_HEAD.pack(1, 1) + tasks.ENTRY_HEAD.pack(2, 1) + b"\xff",
    "an entry cut": tasks.RECORD_HEAD.pack(1, 1) + tasks.ENTRY_HEAD.pack(2, 9),
    "a text cut": tasks.RECORD_HEAD.pack(1, 1)
    + tasks.ENTRY_HEAD.pack(1, 40)
    + bytes(36)
    + b"\xff" * 4,
    "a version without a next": tasks.encode(1, [Task("a", 1 << 63, "q", 0)]),
    "an attempt without a next": tasks.encode(1, [Task("a", 1, "q", 0, attempt=(1 << 32) - 1)]),
    "a time beyond": tasks.encode(1, [Task("a", 1, "q", 1 << 63)]),
}


@pytest.mark.parametrize("what", HOSTILE_TASKS)
def test_a_hostile_record_of_tasks_is_corruption(tmp_path: Path, what: str) -> None:
    assert queue_anything([HOSTILE_TASKS[what]]) is None
    with Journal.open(tmp_path, content="kvstore.tasks") as journal:
        journal.append(HOSTILE_TASKS[what])
    with pytest.raises(CorruptionError):
        kvstore.tasks.Tasks.open(tmp_path)


texts = st.text(max_size=4)
made = st.builds(Task, texts, st.integers(0, 9), texts, st.integers(0, 9))


@given(
    st.lists(
        st.builds(
            tasks.encode,
            st.integers(0, 1 << 62),
            st.lists(made, max_size=3),
            st.lists(texts, max_size=2),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2000),
)
def test_no_records_break_the_task_queue(payloads: list[bytes], flip: int) -> None:
    assert queue_anything(payloads) is not None
    damaged = bytearray(payloads[-1])
    damaged[flip // 8 % len(damaged)] ^= 1 << flip % 8
    queue_anything([*payloads[:-1], bytes(damaged)])
    queue_anything([*payloads[:-1], payloads[-1][: flip % len(damaged)]])


def test_a_hostile_note_refuses_and_never_opens_less(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    items = open_at(path)
    for note in (
        Note(FIRST, 1 << 60, 5, 10),
        Note(9 << 32, 5, 5, 10),
        Note(FIRST, 5, 5, 1 << 60),
    ):
        (path / "LOCK").write_bytes(encode_note(note))
        with pytest.raises(JournalDamagedError):
            open_at(path)
    for junk in (b"", b"\xff" * 10_000, encode(FIRST, 1, 0, b"x"), encode_note(note)[:-1]):
        (path / "LOCK").write_bytes(junk)
        assert open_at(path) == items
