"""Imports as tasks: each is added once, with progress, also if workers died or came late."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.base.clock import ManualClock
from kvstore.bulk.tasks import handlers, submit_import
from kvstore.errors import ImportRefusedError
from kvstore.store import Store
from kvstore.tasks import Outcome, Retry, Worker, arguments_of, dead_letters, revive
from tests.tasks.progress import progress_seen
from tests.tasks.rivals import Stop, outcomes_of_rivals

SECOND = 1_000_000_000


def stage(path: Path, rows: int = 10) -> Path:
    made = bulk.Import.create(path)
    with made.writer() as writer:
        for row in range(rows):
            writer.put(b"%04d" % row, b"v")
    made.seal()
    return path


@pytest.mark.parametrize("path", [Path("store"), None])
def test_an_import_as_a_task_is_added_and_reported(tmp_path: Path, path: Path | None) -> None:
    where, engine = (None, "memory") if path is None else (tmp_path / path, "rocksdb")
    staging = stage(tmp_path / "staging")
    with kvstore.open(where, engine) as store:
        submit_import(store, staging, report_to="reports")
        assert Worker(store.tasks, handlers(store)).run_one() is Outcome.DONE
        assert len(list(store.scan())) == 10
        (report,) = store.tasks.list("reports")
        assert arguments_of(report)["result"]["timestamp"] == store.imports.all()[0].added


def test_an_import_waits_in_the_queue_once(tmp_path: Path) -> None:
    staging = stage(tmp_path / "staging")
    with kvstore.open(tmp_path / "store") as store:
        assert submit_import(store, staging) == submit_import(store, staging)
        assert len(store.tasks.list("import")) == 1


def test_a_directory_without_a_sealed_import_is_refused_when_submitted(tmp_path: Path) -> None:
    bulk.Import.create(tmp_path / "staging")
    with kvstore.open(tmp_path / "store") as store:
        with pytest.raises(ImportRefusedError):
            submit_import(store, tmp_path / "staging")
        assert store.tasks.sizes() == {}


def test_each_step_is_seen_while_the_import_runs(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        task_id = submit_import(store, stage(tmp_path / "staging"))
        seen = progress_seen(store, task_id, "step")
        Worker(store.tasks, handlers(store)).run_one()
    assert seen == ["check", "prepare", "bring 1 of 1", "link", "add"]


def test_an_import_whose_files_are_gone_is_a_dead_letter_until_it_is_revived(
    tmp_path: Path,
) -> None:
    staging = stage(tmp_path / "staging")
    with kvstore.open(tmp_path / "store") as store:
        submit_import(store, staging)
        staging.rename(tmp_path / "away")
        worker = Worker(store.tasks, handlers(store), retry=Retry(attempts_max=2, first_s=0))
        outcomes = [worker.run_one() for _ in range(2)]
        assert Outcome.DEAD in outcomes
        (dead,) = dead_letters(store.tasks, "import")
        assert "staging" in dead.error
        (tmp_path / "away").rename(staging)
        revive(store.tasks, dead)
        assert worker.run_one() is Outcome.DONE
        assert len(list(store.scan())) == 10


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000 * SECOND)


@pytest.mark.parametrize("step", ["link", "add"])
def test_an_import_given_to_another_worker_is_committed_by_that_one_and_added_once(
    tmp_path: Path, clock: ManualClock, step: str
) -> None:
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        submit_import(store, stage(tmp_path / "staging"), report_to="reports")
        stop = Stop()
        setattr(store.imports, step, stop.before(getattr(store.imports, step)))
        outcomes = outcomes_of_rivals(store, handlers(store), clock, stop, second_ends_first=False)
        assert outcomes == (Outcome.LOST, Outcome.DONE)
        assert_added_once(store)


def assert_added_once(store: Store) -> None:
    (record,) = store.imports.all()
    (report,) = store.tasks.list("reports")
    assert arguments_of(report)["result"]["timestamp"] == record.added
    assert store.tasks.list("import") == []
    assert len(list(store.scan())) == 10
    assert [len(store.history(key)) for key, _ in store.scan()] == [1] * 10
    store.verify().require_ok()


def test_two_threads_that_add_one_import_add_it_once(tmp_path: Path, clock: ManualClock) -> None:
    staging = stage(tmp_path / "staging")
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        submit_import(store, staging, report_to="reports")
        stop = Stop()
        handler = handlers(store)["import"]
        told = {"import": stop.before(handler)}
        outcomes = outcomes_of_rivals(store, told, clock, stop, second_ends_first=True)
        assert outcomes == (Outcome.LOST, Outcome.DONE)
        assert_added_once(store)
        assert bulk.ingest(store, staging) == store.imports.all()[0].added
