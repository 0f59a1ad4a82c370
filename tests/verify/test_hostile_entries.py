"""Crafted keys and entries in every family: each way to read gives the answer of a sound store or
an error that names the place, and a verification reports the entry."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock
from kvstore.backup import Collection
from kvstore.changes.index import FIRST_STREAM
from kvstore.codec.keys import encode_change_key
from kvstore.engine.api import CHANGES
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import CorruptionError, KVStoreError
from tests.harness.bounds import bounds
from tests.harness.crafted import Stored, outcome, outcomes, write_over
from tests.harness.parts import parts_of
from tests.harness.sound import WHOLE_ROWS, sound_entries
from tests.verify.hostile import (
    KEYS,
    LATE,
    cases,
    change_entries,
    data_keys,
    judgements,
    ranges,
)

pytestmark = pytest.mark.damages_store

PLACES = ("data key ", "ranges key ", "changes key ", "change entry ", "import ")
"""Beginnings of the errors of opening."""

WELL_FORMED = [
    "data: import 0",
    "data: an unknown import",
    "data: a key too long",
    "data: a time above upper",
    "data: time 0",
    "data: a tombstone with a value",
    "ranges: a time above upper",
    "changes: keys that are not in the versions",
    "changes: an import nobody knows",
]
"""Cases whose bytes keep the format: no single read can detect them, and a verification does."""

NOT_READ = ("open", "verify", "write: ", "splits")
"""Outcomes that are no reads. Splits only divide work, so any splits are right."""

Judgements = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def sound() -> Stored:
    return sound_entries()


@pytest.fixture(scope="module")
def judged(sound: Stored) -> Judgements:
    return judgements(sound)


NAMES = [f"data: {name}" for name in data_keys()]
NAMES += [f"ranges: {name}" for name in ranges()]
NAMES += [f"changes: {name}" for name in change_entries()]


def is_error(text: str) -> bool:
    return "is damaged: " in text or "has format version" in text


def test_a_sound_store_is_read_without_an_error(judged: Judgements) -> None:
    found = judged["sound"]
    assert found["verify"] == ""
    assert found["verify again"] == "True"
    assert [name for name, answer in found.items() if is_error(answer)] == []


@pytest.mark.parametrize("name", NAMES)
def test_crafted_bytes_are_told_by_a_verification(name: str, judged: Judgements) -> None:
    found = judged[name]
    if "open" in found:
        assert is_error(found["open"])
        assert found["open"].startswith(PLACES)
    else:
        assert found["verify"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WELL_FORMED])
def test_crafted_bytes_give_the_sound_answer_or_an_error(name: str, judged: Judgements) -> None:
    expected, found = judged["sound"], judged[name]
    wrong = [
        read
        for read, answer in found.items()
        if not (read.startswith(NOT_READ) or answer == expected[read] or is_error(answer))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["changes: falling offsets", "changes: unknown operations"])
def test_all_that_reads_the_index_tells_alike(name: str, judged: Judgements) -> None:
    """Record batches once wrapped unchecked offsets, which ended in a segmentation fault."""
    for read in ("changes by time, all", "changes_batches", "events, none", "export", "write: gc"):
        assert judged[name][read].startswith(f"change entry {LATE}/0 is damaged: ")


@pytest.mark.parametrize("name", ["data: kind 2", "changes: falling offsets", "ranges: no end"])
def test_processes_and_backups_tell_as_well(name: str, sound: Stored, tmp_path: Path) -> None:
    """Reads that need files: RocksDB, scans by several threads, backups."""
    case = dict(cases(sound))[name]
    engine = RocksEngine(tmp_path / "s")
    write_over(engine, case)
    engine.close()
    with bounds(WHOLE_ROWS_MIN=WHOLE_ROWS, COLUMNS_FLUSH_BYTES_MIN=0):
        opened = outcome(lambda: kvstore.open(tmp_path / "s", clock=ManualClock(1)))
        if isinstance(opened, KVStoreError):
            assert name == "ranges: no end"
            return
        assert isinstance(opened, kvstore.Store)
        with opened as store:
            assert not store.verify().ok
            found = outcomes(store, KEYS)
            assert any(isinstance(answer, CorruptionError) for answer in found.values())
            if name.startswith("data"):
                with pytest.raises(CorruptionError, match="data key "):
                    store.scan_batches(workers=2).read_all()
                with pytest.raises(CorruptionError, match="data key "):
                    Collection(str(tmp_path / "c")).backup(store)


def test_a_backup_of_what_changed_tells_an_entry_whose_offsets_fall(tmp_path: Path) -> None:
    """A batch once wrapped the entry's own buffers, which ended in a segmentation fault."""
    collection = Collection(str(tmp_path / "c"))
    with bounds(WHOLE_ROWS_MIN=WHOLE_ROWS), kvstore.open(tmp_path / "s") as store:
        collection.backup(store)
        at = store.put(b"a", b"1")
        _, falling = change_entries()["falling offsets"]
        write_over(
            parts_of(store).engine, {CHANGES: {encode_change_key(FIRST_STREAM, at): falling}}
        )
        with pytest.raises(CorruptionError, match=f"change entry {int(at)}/0"):
            collection.backup(store)
