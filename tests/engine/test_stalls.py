"""Writers wait outside RocksDB while it takes no writes, and other threads work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import kvstore
from kvstore.engine.api import DATA
from kvstore.errors import ClosedError
from tests.harness.bounds import bounds
from tests.harness.parts import data_family, parts_of

WAIT_S = 60


def set_triggers(store: kvstore.Store, *, slow: int, stop: int) -> None:
    """Have so many files slow or stop writes, and no compaction begin."""
    data_family(store).set_options(
        {
            "level0_file_num_compaction_trigger": "1000",
            "level0_slowdown_writes_trigger": str(slow),
            "level0_stop_writes_trigger": str(stop),
        }
    )


def read_while_a_writer_waits(path: str) -> None:
    """Read and scrape beside a writer, whose commit RocksDB does not take, until it is let in."""
    with bounds(STALL_LOOK_S=0.0), kvstore.open(path) as store:
        store.put(b"k", b"1")
        set_triggers(store, slow=1, stop=1)
        data_family(store).flush()
        began = threading.Event()

        def write() -> None:
            began.set()
            store.put(b"k", b"2")

        writer = threading.Thread(target=write)
        writer.start()
        assert began.wait(WAIT_S)
        for _ in range(100):
            assert store.get(b"k") == b"1"
            stopped = store.metrics()["kvstore_writes_stopped"].values[()]
            assert (stopped, writer.is_alive()) == (1, True)
        parts_of(store).engine.compact(DATA)
        writer.join(WAIT_S)
        assert store.get(b"k") == b"2"


def read_while_a_flush_stands(path: str) -> None:
    """Read and scrape beside a writer that fills memtables, while no flush can make its file."""
    store = kvstore.open(
        path, durability="async", options=kvstore.Options(write_buffer_bytes=1 << 22)
    )
    store.put(b"k", b"1")
    for number in range(1, 100):
        with suppress(FileExistsError):
            os.mkfifo(Path(path, f"{number:06d}.sst"))  # its opening waits for a reader

    def write() -> None:
        while True:
            store.put(b"other", bytes(200))

    threading.Thread(target=write, daemon=True).start()
    while not store.metrics()["kvstore_writes_stopped"].values[()]:
        assert store.get(b"k") == b"1"
    for _ in range(100):
        assert store.get(b"k") == b"1"
        assert store.metrics()["kvstore_writes_stopped"].values[()] == 1
    os._exit(0)  # closing would wait for the flush


@pytest.mark.parametrize("case", ["read_while_a_writer_waits", "read_while_a_flush_stands"])
def test_other_threads_work_while_rocksdb_takes_no_writes(tmp_path: Path, case: str) -> None:
    """In a process of its own: a writer that waits inside RocksDB would keep this one for ever."""
    code = f"import {__name__} as m; m.{case}({str(tmp_path / 's')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def test_a_write_that_is_only_slowed_down_does_not_wait(store: kvstore.Store) -> None:
    store.put(b"k", b"1")
    set_triggers(store, slow=1, stop=1000)
    data_family(store).flush()
    with bounds(STALL_LOOK_S=0.0):
        for number in range(20):
            store.put(b"k", b"%d" % number)
    assert store.get(b"k") == b"19"


def test_a_writer_that_waits_is_told_that_the_store_was_closed(tmp_path: Path) -> None:
    failures: list[ClosedError] = []
    with bounds(STALL_LOOK_S=0.0):
        store = kvstore.open(tmp_path / "s")
        set_triggers(store, slow=1, stop=1)
        store.put(b"k", b"1")
        data_family(store).flush()
        began = threading.Event()

        def write() -> None:
            began.set()
            with pytest.raises(ClosedError) as found:
                store.put(b"k", b"2")
            failures.append(found.value)

        writer = threading.Thread(target=write)
        writer.start()
        assert began.wait(WAIT_S)
        parts_of(store).engine.close()
        writer.join(WAIT_S)
        assert len(failures) == 1
        with suppress(ClosedError):
            store.close()
    with kvstore.open(tmp_path / "s") as store:
        assert store.get(b"k") == b"1"


def interrupted(_: float) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_of_a_writer_that_waits_commits_nothing_and_harms_nothing(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"k", b"1")
    set_triggers(store, slow=1, stop=1)
    data_family(store).flush()
    upper = store.upper
    with bounds(STALL_LOOK_S=0.0):
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", interrupted)  # a signal may be ignored by this process
            with pytest.raises(KeyboardInterrupt):
                store.put(b"k", b"2")
        assert (store.get(b"k"), store.upper) == (b"1", upper)
        parts_of(store).engine.compact(DATA)
        store.put(b"k", b"3")
    assert [version.value for version in store.history(b"k")] == [b"3", b"1"]
