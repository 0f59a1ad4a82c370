"""A policy is a value; the committer asks it before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from kvstore.errors import UsageError
from kvstore.timeline.committer import Committer
from kvstore.timeline.frontiers import OPEN, Policy, read_only_policy, replica_policy
from tests.commit.conftest import START, Bench, writes_of

READ_ONLY = read_only_policy("the bench")
REPLICA = replica_policy("the bench", "5ce")

Write = Callable[[Committer], object]

COMMITS: dict[str, Write] = {
    "commit": lambda committer: committer.commit(writes_of(a=b"1")),
    "announce": lambda committer: committer.announce(lambda batch, at: lambda: None),
    "require_commits": lambda committer: committer.require_commits(),
}
RECORDS: dict[str, Write] = {
    "write_meta": lambda committer: committer.write_meta(lambda batch: None),
    "move_since": lambda committer: committer.move_since(0),
    "require_writable": lambda committer: committer.require_writable(),
}


@pytest.mark.parametrize("write", [*COMMITS.values(), *RECORDS.values()], ids=[*COMMITS, *RECORDS])
def test_an_open_store_takes_every_write(bench: Bench, write: Write) -> None:
    write(bench.committer(OPEN))


@pytest.mark.parametrize(
    ("policy", "refused", "message"),
    [
        (READ_ONLY, {**COMMITS, **RECORDS}, "the bench was opened to be read only"),
        (REPLICA, COMMITS, "the bench is a replica of store 5ce.*or promote it"),
    ],
)
def test_a_refused_write_reaches_no_engine_and_poisons_nothing(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy,
    refused: dict[str, Write],
    message: str,
) -> None:
    committer = bench.committer(policy)
    calls = count()
    monkeypatch.setattr(bench.engine, "write", lambda *_, **__: next(calls))
    for write in refused.values():
        with pytest.raises(UsageError, match=message):
            write(committer)
    assert next(calls) == 0
    assert committer.frontiers.is_healthy
    assert committer.upper == 1


def test_a_replica_writes_records_of_its_own(bench: Bench) -> None:
    for write in RECORDS.values():
        write(bench.committer(REPLICA))


@pytest.mark.parametrize("policy", [READ_ONLY, REPLICA])
def test_time_stands_still_where_it_does_not_follow_the_clock(bench: Bench, policy: Policy) -> None:
    committer = bench.committer(policy, upper=7)
    bench.clock.advance(10**9)
    assert committer.close_upto_now() == committer.sync() == committer.upper == 7


def test_a_store_that_is_only_read_writes_nothing_when_it_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = bench.committer(READ_ONLY)
    calls = count()
    for name in ("write", "sync"):
        monkeypatch.setattr(bench.engine, name, lambda *_, **__: next(calls))
    committer.finish()
    assert next(calls) == 0


def test_a_promoted_replica_commits_above_what_it_took_however_far_ahead_of_its_clock(
    bench: Bench,
) -> None:
    committer = bench.committer(REPLICA)
    ahead = START * 1000
    committer.apply([(ahead - 5, writes_of(a=b"1")), (ahead, writes_of(a=b"2"))], ahead + 9)
    with committer.lock:
        committer.adopt(OPEN)
    assert committer.commit(writes_of(a=b"3")) == ahead + 9
    assert [bench.versions.get(b"a", at) for at in (ahead - 5, ahead + 8, ahead + 9)] == [
        b"1",
        b"2",
        b"3",
    ]
