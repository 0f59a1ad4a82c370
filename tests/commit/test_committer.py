"""The order of a commit, by a committer without a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.base.timestamp import Timestamp
from kvstore.engine import WriteBatch
from kvstore.errors import ClosedError, PoisonedError, StorageError, UsageError
from kvstore.mvcc import WriteSet
from kvstore.mvcc.meta import nothing
from kvstore.timeline.committer import Committer
from kvstore.timeline.frontiers import replica_policy
from tests.commit.conftest import START, Bench, writes_of


def rows(bench: Bench, upto: int) -> list[tuple[int, bytes, bytes]]:
    """Time, key and value of each change that the index holds."""
    found = bench.index.rows(since=0, upto=upto)
    return [(row.timestamp, row.row.key, row.row.value) for row in found]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_commit_is_shown_whole_and_below_upper(bench: Bench) -> None:
    committer = bench.committer()
    at = committer.commit(writes_of(a=b"1", b=b"2"))
    assert at == START
    assert committer.upper == at + 1
    assert rows(bench, at) == [(at, b"a", b"1"), (at, b"b", b"2")]
    assert [bench.versions.get(key, at) for key in (b"a", b"b")] == [b"1", b"2"]


def test_a_commit_reads_the_clock_once_and_looks_once_whether_the_store_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = bench.committer()
    wall_ns, readings = bench.clock.wall_ns, []
    looks: list[str] = []

    class Watched(type(committer.frontiers)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name == "is_healthy":
                looks.append(name)
            return super().__getattribute__(name)

    def counted() -> int:
        readings.append(wall_ns())
        return readings[-1]

    monkeypatch.setattr(bench.clock, "wall_ns", counted)
    committer.frontiers.__class__ = Watched
    committer.commit(writes_of(a=b"1"))
    assert len(readings) == 1
    assert looks == ["is_healthy"]


def test_a_commit_that_its_check_calls_off_leaves_no_trace(bench: Bench) -> None:
    committer = bench.committer()
    with pytest.raises(KeyboardInterrupt):
        committer.commit(writes_of(a=b"1"), check=interrupt)
    assert committer.upper == 1
    assert committer.commit(writes_of(a=b"2")) == START


def test_entries_that_cannot_be_staged_leave_the_store_as_it_was(bench: Bench) -> None:
    committer = bench.committer()
    with pytest.raises(KeyboardInterrupt):
        committer.commit_event(interrupt, events=1, reload=nothing)  # type: ignore[arg-type]
    assert committer.frontiers.is_healthy
    at = committer.commit(writes_of(a=b"1"))
    assert rows(bench, at) == [(at, b"a", b"1")]


def test_readers_are_told_after_the_write_and_before_upper(bench: Bench) -> None:
    committer, told = bench.committer(), []

    def stage(batch: WriteBatch, timestamp: Timestamp, tag: tuple[int, int]) -> Callable[[], None]:
        told.append(("staged", committer.upper, tag[0] == committer.capture.domain))
        return lambda: told.append(("published", committer.upper, True))

    committer.commit_event(stage, events=0, reload=nothing)
    assert told == [("staged", 1, True), ("published", 1, True)]
    assert committer.upper == START + 1


def test_a_check_that_completes_the_time_of_its_commit_calls_it_off(bench: Bench) -> None:
    """While a key waits for its expiry, a commit takes its time before its check."""
    committer = bench.committer()
    committer.commit(writes_of(a=b"1"))
    expiring = WriteSet()
    expiring.put_expiring(b"b", b"1", START * 2)
    committer.commit(expiring)
    calls: list[Callable[[Callable[[], object]], object]] = [
        lambda check: committer.commit(writes_of(a=b"2"), check=check),  # type: ignore[arg-type]
        lambda check: committer.commit_event(
            lambda *_: lambda: None,
            events=1,
            reload=nothing,
            check=check,  # type: ignore[arg-type]
        ),
    ]
    for call in calls:
        bench.clock.advance(10)
        with pytest.raises(UsageError, match="in a check, write nothing"):
            call(committer.close_upto_now)
        upper = committer.upper
        assert bench.versions.get(b"a", upper - 1) == b"1"
        committer.commit(writes_of(c=b"1"))
        assert committer.upper > upper


STEPS: dict[str, Callable[[Bench, Committer], tuple[Any, str]]] = {
    "write": lambda bench, _: (bench.engine, "write"),
    "publish": lambda _, committer: (committer.recent, "add"),
    "advance": lambda _, committer: (committer.frontiers, "advance"),
    "count": lambda _, committer: (committer.capture, "finish_commit"),
}
WRITES: dict[str, Callable[[Committer], object]] = {
    "of its own": lambda committer: committer.commit(writes_of(a=b"1")),
    "of an event": lambda committer: committer.commit_event(
        lambda *_: lambda: None, events=1, reload=nothing, after=lambda at: writes_of(a=b"1")
    ),
    "of a source": lambda committer: committer.apply([(5, writes_of(a=b"1"))], 9),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("whose", WRITES)
def test_an_interrupt_in_the_middle_of_a_commit_is_mended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str, whose: str
) -> None:
    committer = bench.committer()
    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step](bench, committer), interrupt)
        with pytest.raises(KeyboardInterrupt):
            WRITES[whose](committer)
    committer.require_commits()
    found = bench.versions.get(b"a", committer.upper - 1)
    assert found == (None if step == "write" else b"1")
    at = committer.commit(writes_of(a=b"2"))
    assert bench.versions.get(b"a", at) == b"2"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("whose", WRITES)
def test_an_interrupt_in_the_middle_of_a_commit_poisons_where_the_engine_cannot_tell(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str, whose: str
) -> None:
    committer = bench.committer()
    monkeypatch.setattr(bench.engine, "look_again", lambda: False)
    monkeypatch.setattr(*STEPS[step](bench, committer), interrupt)
    with pytest.raises(KeyboardInterrupt):
        WRITES[whose](committer)
    for write in WRITES.values():
        with pytest.raises(PoisonedError, match="interrupted"):
            write(committer)


def test_commits_of_a_source_keep_their_times_and_complete_the_window(bench: Bench) -> None:
    committer = bench.committer(replica_policy("the bench", "5ce"))
    deletes = WriteSet()
    deletes.delete_range(b"a", b"b")
    committer.apply([(3, writes_of(a=b"1")), (5, deletes), (6, writes_of(b=b"2"))], 9)
    assert committer.upper == 9
    assert [at for at, _, _ in rows(bench, 8)] == [3, 5, 6]
    assert [bench.versions.get(b"a", at) for at in (2, 3, 5)] == [None, b"1", None]


def test_each_commit_ends_an_epoch_of_its_own(bench: Bench) -> None:
    committer = bench.committer()
    times = [committer.commit(writes_of(a=b"1")) for _ in range(3)]
    committer.apply([(at + 1, writes_of(a=b"2")) for at in times[2:]], times[2] + 5)
    _, epochs = committer.capture.pending()
    assert [epoch.events for epoch in epochs] == [1, 0] * 4
    assert [a.end for a in epochs[:-1]] == [b.begin for b in epochs[1:]]


def test_an_announced_time_is_durable_before_it_is_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer, seen = bench.committer(), []
    sync = bench.engine.sync

    def synced() -> None:
        seen.append(("synced", committer.upper))
        sync()

    monkeypatch.setattr(bench.engine, "sync", synced)
    begins_at = committer.announce(
        lambda batch, at: lambda: seen.append(("published", committer.upper))
    )
    assert seen == [("synced", 1), ("published", 1)]
    assert committer.upper == begins_at == START


def test_an_idle_store_completes_the_time_until_now(bench: Bench) -> None:
    committer = bench.committer()
    assert committer.close_upto_now() == START + 1
    bench.clock.advance(100)
    assert committer.readable(START + 100) == START + 100
    assert committer.upper == START + 101


def test_a_failed_write_ends_with_the_engines_error_and_the_next_call_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = bench.committer()

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(bench.engine, "write", fail)
    with pytest.raises(StorageError, match="the disk is gone"):
        committer.commit(writes_of(a=b"1"))
    with pytest.raises(PoisonedError, match="the disk is gone"):
        committer.commit(writes_of(a=b"1"))
    assert committer.upper == 1


def test_nothing_is_committed_after_the_end(bench: Bench) -> None:
    committer = bench.committer()
    committer.finish()
    for write in WRITES.values():
        with pytest.raises(ClosedError, match="the bench is closed"):
            write(committer)
