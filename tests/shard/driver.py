"""A driver of commands that checks the invariants of each, and values for commands.

shard(do("register_critical", "h"))     # a method of `ShardState`, with its arguments
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller as do
from typing import Any, TypeAlias

from kvstore.backup.shard.state.state import EMPTY, OPAQUE_INITIAL, LeasedReader, ShardState
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart

SECOND = 1_000_000_000

Command: TypeAlias = Callable[[ShardState], Any]


def part(name: str, **changes: Any) -> ShardPart:
    fields: dict[str, Any] = {
        "name": name, "rows": 10, "size": 1000, "checksum": "00",
        "key_min": b"a", "key_max": b"z", "time_min": 0, "time_max": 0,
    }  # fmt: skip
    return ShardPart(**{**fields, **changes})


def batch(lower: int, upper: int, *names: str, **changes: Any) -> ShardBatch:
    parts = tuple(part(name, time_min=lower, time_max=upper - 1) for name in names)
    return replace(ShardBatch(lower, upper, parts=parts), **changes)


def new_shard(**changes: Any) -> ShardState:
    return replace(ShardState("s", seqno=1, rollups={1: "r1"}), **changes)


class Driver:
    """Applies commands, and checks the invariants of every command."""

    def __init__(self, state: ShardState | None = None) -> None:
        self.state = state or new_shard()

    def __call__(self, command: Command, *, commits: bool = True) -> Any:
        before = self.state
        self.state, outcome = command(before)
        assert (self.state is not before) == commits, (command, outcome)
        assert self.state.seqno == before.seqno + commits
        assert self.state.since >= before.since
        assert self.state.upper >= before.upper
        assert self.state.seqno_since >= before.seqno_since
        assert self.state.problem() is None
        return outcome

    def write(self, lower: int, upper: int, *names: str, token: str = "") -> Any:
        token = token or f"t{lower}-{upper}"
        return self(caa(lower, upper, *names, token=token))

    def finished(self) -> Driver:
        """Move `since` and `upper` to the empty frontier."""
        self.write(self.state.upper, EMPTY, "last")
        self(do("register_critical", "end"))
        self(downgrade_critical("end", EMPTY))
        return self


def caa(lower: int, upper: int, *names: str, token: str = "t", writer: str = "w") -> Command:
    return append(batch(lower, upper, *names), token=token, writer=writer)


def append(
    appended: ShardBatch, *, token: str = "t", writer: str = "w", now_ns: int = SECOND
) -> Command:
    return do("compare_and_append", appended, writer=writer, token=token, now_ns=now_ns)


def downgrade(name: str, since: int, *, outstanding: int | None = None, now_ns: int = 0) -> Command:
    return do("downgrade_since", name, since, outstanding=outstanding, now_ns=now_ns)


def downgrade_critical(
    name: str, since: int, *, expected: bytes = OPAQUE_INITIAL, opaque: bytes = OPAQUE_INITIAL
) -> Command:
    return do("compare_and_downgrade", name, since, expected=expected, opaque=opaque)


def register(shard: Driver, name: str, now_ns: int = 0) -> LeasedReader:
    outcome = shard(do("register_leased", name, now_ns=now_ns, lease_ns=10 * SECOND))
    assert isinstance(outcome, LeasedReader)
    return outcome
