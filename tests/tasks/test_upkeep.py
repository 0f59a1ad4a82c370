"""GC and compaction as tasks: each is done, reported and continued after a kill, and never done
twice."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore.base.clock import ManualClock
from kvstore.errors import UsageError
from kvstore.store import Store
from kvstore.tasks import Outcome, Retry, Worker, arguments_of, dead_letters, progress_of
from kvstore.tasks import submit as submit_call
from kvstore.upkeep import handlers, submit_compact, submit_gc
from tests.harness.parts import parts_of
from tests.tasks.rivals import Stop, outcomes_of_rivals

SECOND = 1_000_000_000


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        yield store


def write(store: Store, clock: ManualClock, times: int) -> None:
    for number in range(times):
        store.put(b"k", b"%d" % number)
        clock.advance(SECOND)


def report_of(store: Store, queue: str = "reports") -> dict[str, int]:
    (task,) = store.tasks.list(queue)
    return dict(arguments_of(task)["result"])


def test_gc_as_a_task_does_what_gc_does_and_reports_it(store: Store, clock: ManualClock) -> None:
    write(store, clock, 10)
    submit_gc(store, before=store.upper - 1, report_to="reports")
    assert Worker(store.tasks, handlers(store)).run_one() is Outcome.DONE
    assert [version.value for version in store.history(b"k")] == [b"9"]
    report = report_of(store)
    assert report["versions"] == 9
    assert report["since"] == store.since


def test_keep_counts_from_when_the_task_is_done(store: Store, clock: ManualClock) -> None:
    write(store, clock, 2)
    submit_gc(store, keep=timedelta(seconds=60))
    clock.advance(1000 * SECOND)
    assert Worker(store.tasks, handlers(store)).run_one() is Outcome.DONE
    assert store.since == clock.wall_ns() - 60 * SECOND


def test_gc_takes_exactly_one_of_before_and_keep(store: Store) -> None:
    with pytest.raises(UsageError):
        submit_gc(store)
    with pytest.raises(UsageError):
        submit_gc(store, before=1, keep=timedelta(1))


def test_gc_that_was_given_to_another_worker_is_committed_by_that_one_alone(
    store: Store, clock: ManualClock
) -> None:
    write(store, clock, 10)
    submit_gc(store, before=store.upper - 1, report_to="reports")
    stop = Stop()
    parts_of(store).collector.at_step = stop.before(lambda step: None)
    outcomes = outcomes_of_rivals(store, handlers(store), clock, stop, second_ends_first=False)
    assert outcomes == (Outcome.LOST, Outcome.DONE)
    # the first worker had removed them, so they count once
    assert report_of(store)["versions"] == 0
    assert [version.value for version in store.history(b"k")] == [b"9"]
    assert store.tasks.list("gc") == []


def test_compaction_goes_on_behind_the_pieces_that_are_done(store: Store) -> None:
    for number in range(2000):
        store.put(b"%04d" % number, b"x" * 100, durability="async")
    store.upkeep.compact()
    submit_compact(store, report_to="reports")
    seen: list[tuple[bytes, bytes | None]] = []
    compact = store.upkeep.compact

    def break_down(span: kvstore.Span) -> None:
        if len(seen) == 5:
            raise OSError("the disk went away")
        seen.append((span.start, span.end))
        compact(span)

    store.upkeep.compact = break_down  # type: ignore[method-assign, assignment]
    retry = Retry(first_s=0)
    worker = Worker(store.tasks, handlers(store), retry=retry)
    assert worker.run_one() is Outcome.RETRY
    (task,) = store.tasks.list("compact")
    assert task.error == "OSError: the disk went away"
    facts = progress_of(task)
    assert facts["upto"] == (seen[-1][1] or b"").hex()
    assert (facts["piece"], facts["pieces"]) == (6, 16)
    store.upkeep.compact = compact  # type: ignore[method-assign]
    assert worker.run_one() is Outcome.DONE
    assert store.tasks.list("compact") == []
    assert len(list(store.scan())) == 2000


def test_a_call_of_a_later_release_goes_to_the_dead_letters_at_once(store: Store) -> None:
    submit_call(store.tasks, "gc", {"v": 2, "before": 1})
    assert Worker(store.tasks, handlers(store)).run_one() is Outcome.DEAD
    (dead,) = dead_letters(store.tasks, "gc")
    assert dead.error.startswith("FormatVersionError")


@pytest.mark.parametrize(
    ("queue", "value"),
    [
        ("compact", b'{"v": 1, "start": "not hex", "end": null}'),
        ("compact", b'{"v": 1, "start": 7, "end": null}'),
        ("compact", b'{"v": 1, "start": "62", "end": "61"}'),
        ("compact", b'{"v": 1, "end": null}'),
        ("gc", b'{"v": 1, "compact": false, "keep_s": "60"}'),
        ("gc", b'{"v": 1, "compact": false, "keep_s": 1e300}'),
        ("gc", b'{"v": 1, "compact": "no", "before": 1}'),
        ("gc", b'{"v": 1, "compact": false, "before": 1.5}'),
        ("gc", b'{"v": 1, "compact": false, "before": 1, "report_to": 5}'),
        ("gc", b"[" * 100_000),
        ("gc", b"\xff"),
    ],
)
def test_arguments_that_nobody_wrote_go_to_the_dead_letters_at_once(
    store: Store, queue: str, value: bytes
) -> None:
    store.tasks.insert(queue, value)
    assert Worker(store.tasks, handlers(store)).run_one() is Outcome.DEAD
    (dead,) = dead_letters(store.tasks, queue)
    assert dead.error.startswith("CorruptionError: task ")


@pytest.mark.parametrize("argument", [float("nan"), {1}, b"bytes"])
def test_arguments_that_are_not_json_are_refused(store: Store, argument: object) -> None:
    with pytest.raises(UsageError, match="not JSON"):
        submit_call(store.tasks, "compact", {"start": argument})
    assert store.tasks.list("compact") == []


def test_what_keeps_failing_goes_to_the_dead_letters(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(span: object) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr(store.upkeep, "compact", break_down)
    submit_compact(store)
    worker = Worker(store.tasks, handlers(store), retry=Retry(attempts_max=3, first_s=1))
    assert worker.run_one() is Outcome.RETRY
    clock.advance(10 * SECOND)
    assert worker.run_one() is Outcome.RETRY
    clock.advance(10 * SECOND)
    assert worker.run_one() is Outcome.DEAD
    assert dead_letters(store.tasks, "compact")[0].attempt == 3


def test_submitting_under_an_id_that_waits_changes_nothing(store: Store) -> None:
    assert submit_gc(store, before=1, task_id="nightly") == "nightly"
    assert submit_gc(store, before=2, task_id="nightly") == "nightly"
    (task,) = store.tasks.list("gc")
    assert arguments_of(task)["before"] == 1
