"""GC and imports: a reverted import goes whole, a stale one is aborted, leftover files go."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock, Store, bulk
from kvstore.errors import HistoryGoneError, StorageError
from tests.gc.garbage import KEYS, add_import
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_reverted_import_goes_whole_with_its_record(store: Store, tmp_path: Path) -> None:
    store.put(b"b", b"below")
    import_id, _ = add_import(store, tmp_path / "in", dict.fromkeys(KEYS, b"row"))
    store.revert_import(import_id)
    report = store.gc(before=store.now())
    assert (report.versions, report.imports) == (len(KEYS), 1)
    assert list(store.scan()) == [(b"b", b"below")]
    assert store.imports.all() == []


def test_record_of_a_large_import_stays_while_a_row_or_a_change_entry_is_left(
    store: Store, tmp_path: Path
) -> None:
    with bounds(SETTLE_ROWS_MAX=1):
        a_record_stays_while_a_row_or_a_change_entry_is_left(store, tmp_path)


def a_record_stays_while_a_row_or_a_change_entry_is_left(store: Store, tmp_path: Path) -> None:
    import_id, _ = add_import(store, tmp_path / "in", {b"a": b"row", b"b": b"row"})
    store.put(b"a", b"newer")
    store.gc(before=store.now())
    assert [record.import_id for record in store.imports.all()] == [import_id]
    assert list(store.scan()) == [(b"a", b"newer"), (b"b", b"row")]
    with pytest.raises(HistoryGoneError, match="delete its keys"):
        store.revert_import(import_id)
    gone = store.delete(b"b")
    store.gc(before=gone - 1)
    assert store.imports.all()
    store.gc(before=store.now())
    assert store.imports.all() == []


def test_stale_import_and_leftover_files_are_taken_back(tmp_path: Path) -> None:
    clock = ManualClock(2_000_000_000_000_000_000)
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        record = kvstore.ImportRecord(7, "digest", 0, 0, (kvstore.Span(b"a", b"b"),))
        store.imports.prepare(record)
        left = tmp_path / "db" / "ingest" / "00000000000000aa"
        left.mkdir(parents=True)
        os.utime(left, ns=(0, 0))
        plain = tmp_path / "db" / "ingest" / "plain"
        plain.touch()
        os.utime(plain, ns=(0, 0))
        link = tmp_path / "db" / "ingest" / "link"
        outside = tmp_path / "outside"
        outside.mkdir()
        link.symlink_to(outside)
        os.utime(link, ns=(0, 0), follow_symlinks=False)
        waiting = tmp_path / "db" / "ingest" / f"{7:016x}"
        waiting.mkdir()
        os.utime(waiting, ns=(0, 0))
        store.gc(before=0)
        assert waiting.exists()
        assert not left.exists()
        assert not plain.exists()
        assert not link.is_symlink()
        assert outside.exists()
        clock.advance(25 * 3600 * 1_000_000_000)
        assert store.gc(before=0).imports == 1
        assert store.imports.all() == []
        assert not waiting.exists()


def test_an_opening_removes_files_that_imports_left_long_ago(tmp_path: Path) -> None:
    old, young = (tmp_path / "db" / "ingest" / name for name in ("staging-a", "staging-b"))
    with kvstore.open(tmp_path / "db"):
        old.mkdir(parents=True)
        young.mkdir()
        os.utime(old, ns=(0, 0))
    kvstore.open(tmp_path / "db").close()
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize("call", ["stat", "listdir"])
def test_a_disk_that_fails_under_leftover_files_is_an_error_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with kvstore.open(tmp_path / "db") as store:
        place = tmp_path / "db" / "ingest"
        place.mkdir()
        real = getattr(os, call)

        def fail(path: object, *rest: object, **options: object) -> object:
            if str(path) == str(place):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *rest, **options)

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(StorageError):
            store.gc(before=0)
        monkeypatch.undo()
        store.gc(before=0)


def test_files_are_left_over_by_the_clock_that_dates_them(tmp_path: Path) -> None:
    """The store's clock was days ahead once. This must not make the files of a running job look
    days old."""
    clock = ManualClock(time.time_ns() + 3 * 24 * 3600 * 1_000_000_000)
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        staging = tmp_path / "db" / "ingest" / "staging-of-a-job-under-way"
        staging.mkdir(parents=True)
        store.gc(before=0)
        assert staging.exists()


def test_files_whose_owner_removes_them_do_not_disturb_a_run(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db") as store:
        ingest = tmp_path / "db" / "ingest"
        ingest.mkdir()
        (ingest / "gone-when-looked-at").symlink_to("nowhere")
        store.gc(before=0)


def test_an_import_being_added_is_not_stale_however_long_ago_it_was_begun(tmp_path: Path) -> None:
    clock = ManualClock()
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        staged = bulk.Import.create(tmp_path / "staged")
        with staged.writer() as writer:
            writer.put(b"a", b"1")
        staged.seal()

        def killed(step: str) -> None:
            if step == "add":
                raise RuntimeError("killed here")

        with pytest.raises(RuntimeError):
            bulk.ingest(store, tmp_path / "staged", move=True, progress=killed)
        clock.advance(25 * 3600 * 1_000_000_000)
        runs = []

        def collect(step: str) -> None:
            runs.append(store.gc(before=0).imports)

        bulk.ingest(store, tmp_path / "staged", move=True, progress=collect)
        assert store.gc(before=0).imports == 0  # the import was added meanwhile
        assert runs == [0, 0, 0]
        assert store.get(b"a") == b"1"
        store.verify().require_ok()


def test_a_run_goes_on_where_an_import_was_added_since_it_looked(store: Store) -> None:
    record = kvstore.ImportRecord(7, "digest", 0, 0, ())
    store.imports.prepare(record)
    leftovers = parts_of(store).collector.leftovers
    imports = parts_of(store).imports
    stale = imports.all()
    store.imports.add(record.import_id)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(imports, "all", lambda: stale)
        assert leftovers.abort_stale(-1) == 0


def test_import_without_rows_is_left_alone_by_every_run(store: Store, tmp_path: Path) -> None:
    made = bulk.Import.create(tmp_path / "empty")
    made.seal()
    stamp = bulk.ingest(store, tmp_path / "empty")
    for _ in range(2):
        store.put(b"k", b"v")
        assert store.gc(before=store.now()).imports == 0
    assert bulk.ingest(store, tmp_path / "empty") == stamp
    assert store.verify().problems == ()
