"""Backups as tasks: one window each, with progress, and no key in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.backup.tasks import handlers, submit_backup, submit_compact, submit_expire
from kvstore.base.clock import ManualClock
from kvstore.errors import UsageError
from kvstore.store import Store
from kvstore.tasks import Outcome, Retry, Worker, arguments_of, dead_letters
from kvstore.upkeep import submit_gc
from tests.tasks.progress import progress_seen
from tests.tasks.rivals import Stop, outcomes_of_rivals

SECOND = 1_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000 * SECOND)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        for number in range(100):
            store.put(b"%03d" % number, b"v", durability="async")
        yield store


def work(store: Store) -> Worker:
    return Worker(store.tasks, handlers(store), retry=Retry(attempts_max=2, first_s=0))


def test_a_backup_as_a_task_is_appended_and_reported(store: Store, tmp_path: Path) -> None:
    url = tmp_path / "backups"
    submit_backup(store, url, report_to="reports")
    assert work(store).run_one() is Outcome.DONE
    (report,) = store.tasks.list("reports")
    result = arguments_of(report)["result"]
    assert result["rows"] == 100
    assert result["upper"] == Collection(url).upper
    Collection(url).restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        assert list(restored.scan()) == list(store.scan())


def test_an_id_that_is_used_again_is_another_backup(
    store: Store, tmp_path: Path, clock: ManualClock
) -> None:
    url = tmp_path / "backups"
    for number in range(2):
        store.put(b"later", b"%d" % number)
        clock.advance(SECOND)
        submit_backup(store, url, task_id="nightly")
        assert work(store).run_one() is Outcome.DONE
    assert [info.rows for info in Collection(url).list()] == [101, 1]


def test_upkeep_of_a_collection_as_tasks(store: Store, tmp_path: Path, clock: ManualClock) -> None:
    url = tmp_path / "backups"
    for number in range(3):
        store.put(b"later", b"%d" % number)
        clock.advance(SECOND)
        submit_backup(store, url)
        assert work(store).run_one() is Outcome.DONE
    submit_compact(store, url)
    assert work(store).run_one() is Outcome.DONE
    assert Collection(url).show().batches == 1
    before = int(store.upper - 1)
    submit_expire(store, url, before, report_to="reports")
    assert work(store).run_one() is Outcome.DONE
    (report,) = store.tasks.list("reports")
    assert arguments_of(report)["result"]["since"] == Collection(url).since == before
    submit_expire(store, url, keep=timedelta(days=1))
    assert work(store).run_one() is Outcome.DONE
    assert Collection(url).since == before


def test_keys_are_given_to_the_worker_and_are_in_no_task(store: Store, tmp_path: Path) -> None:
    url, passphrase = str(tmp_path / "backups"), "correct horse battery"
    opened: list[str] = []

    def open_collection(wanted: str) -> Collection:
        opened.append(wanted)
        return Collection(wanted, passphrase)

    submit_backup(store, url)
    worker = Worker(store.tasks, handlers(store, open_collection=open_collection))
    assert worker.run_one() is Outcome.DONE
    assert opened == [url]
    assert Collection(url, passphrase).show().rows == 100
    assert store.path is not None
    for file in (store.path / "tasks").iterdir():
        assert passphrase.encode() not in file.read_bytes()


@pytest.mark.parametrize("url", ["", "s3:bucket/path"])
def test_an_address_that_no_collection_has_is_refused(store: Store, url: str) -> None:
    with pytest.raises(UsageError):
        submit_backup(store, url)
    assert store.tasks.sizes() == {}


def test_a_negative_age_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_age"):
        submit_backup(store, tmp_path, max_age=timedelta(-1))
    with pytest.raises(UsageError, match="keep"):
        submit_expire(store, tmp_path, keep=timedelta(-1))
    with pytest.raises(UsageError, match="keep"):
        submit_gc(store, keep=timedelta(-1))
    assert store.tasks.sizes() == {}


def test_a_url_with_a_password_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="password"):
        submit_backup(store, "s3://user:secret@bucket/path")
    assert store.tasks.sizes() == {}


def test_a_backup_of_another_store_is_a_dead_letter(store: Store, tmp_path: Path) -> None:
    with kvstore.open(None, engine="memory") as other:
        Collection(tmp_path / "backups").backup(other)
    submit_backup(store, tmp_path / "backups")
    assert work(store).run_one() is Outcome.DEAD
    assert "backups of store" in dead_letters(store.tasks, "backup")[0].error


def test_rows_written_are_seen_while_the_backup_runs(store: Store, tmp_path: Path) -> None:
    task_id = submit_backup(store, tmp_path / "backups")
    seen = progress_seen(store, task_id, "rows")
    Worker(store.tasks, handlers(store, every_s=0)).run_one()
    assert seen == sorted(seen)
    assert seen[-1] == 100


def test_a_full_backup_made_again_with_its_token_begins_no_other_chain(
    store: Store, tmp_path: Path
) -> None:
    collection = Collection(tmp_path / "backups")
    collection.backup(store)
    first = collection.backup(store, full=True, token="t")
    assert collection.backup(store, full=True, token="t") == first
    assert collection.show().chains == 2
    collection.backup(store, full=True, token="u")
    assert collection.backup(store, full=True, token="t") == first
    assert collection.show().chains == 3


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("told_every_s", [0, 3600])
def test_a_backup_given_to_another_worker_is_committed_by_that_one_and_appended_once(
    store: Store, tmp_path: Path, clock: ManualClock, told_every_s: float, full: bool
) -> None:
    """The first worker is told before its append that it lost the task, or learns it by its
    token."""
    url = tmp_path / "backups"
    submit_backup(store, url, full=full, report_to="reports")
    stop = Stop()
    store.replication.export = stop.before(store.replication.export)  # type: ignore[method-assign]
    told = handlers(store, every_s=told_every_s)
    outcomes = outcomes_of_rivals(store, told, clock, stop, second_ends_first=True)
    assert outcomes == (Outcome.LOST, Outcome.DONE)
    assert_backed_up_once(store, url)


def test_a_backup_that_was_appended_before_another_worker_took_it_is_not_appended_again(
    store: Store, tmp_path: Path, clock: ManualClock
) -> None:
    url = tmp_path / "backups"
    submit_backup(store, url, report_to="reports")
    stop = Stop()

    class Slow(Collection):
        def backup(self, *args: object, **options: object):  # type: ignore[no-untyped-def, override]
            info = super().backup(*args, **options)  # type: ignore[arg-type]
            stop.before(lambda: None)()
            return info

    told = handlers(store, open_collection=Slow)
    outcomes = outcomes_of_rivals(store, told, clock, stop, second_ends_first=True)
    assert outcomes == (Outcome.LOST, Outcome.DONE)
    assert_backed_up_once(store, url)


def assert_backed_up_once(store: Store, url: Path) -> None:
    info = Collection(url).show()
    assert (info.chains, info.batches, info.rows) == (1, 1, 100)
    (report,) = store.tasks.list("reports")
    assert arguments_of(report)["result"]["upper"] == info.upper
    assert store.tasks.list("backup") == []
    assert Collection(url).verify("contents", store)
