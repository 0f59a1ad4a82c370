"""A driver of the machine that checks the invariants of every command, and values for commands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backup.shard.state import commands as c
from backup.shard.state import machine
from backup.shard.state.holding import OPAQUE_INITIAL
from backup.shard.state.state import EMPTY, ShardBatch, ShardPart, ShardState

SECOND = 1_000_000_000


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
    return replace(ShardState("s", "versions", seqno=1, rollups={1: "r1"}), **changes)


class Driver:
    """Applies commands, and checks the invariants of every command."""

    def __init__(self, state: ShardState | None = None) -> None:
        self.state = state or new_shard()

    def __call__(self, command: c.Command, *, commits: bool = True) -> Any:
        before = self.state
        self.state, outcome = machine.apply(before, command)
        assert (self.state is not before) == commits, (command, outcome)
        assert self.state.seqno == before.seqno + commits
        assert self.state.since >= before.since
        assert self.state.upper >= before.upper
        assert self.state.seqno_since >= before.seqno_since
        self.state.check()
        return outcome

    def write(self, lower: int, upper: int, *names: str, token: str = "") -> Any:
        token = token or f"t{lower}-{upper}"
        return self(c.CompareAndAppend(batch(lower, upper, *names), "w", token, SECOND))

    def finished(self) -> Driver:
        """Move `since` and `upper` to the empty frontier."""
        self.write(self.state.upper, EMPTY, "last")
        self(c.RegisterCritical("end"))
        self(c.CompareAndDowngrade("end", OPAQUE_INITIAL, OPAQUE_INITIAL, EMPTY))
        return self


def caa(lower: int, upper: int, *names: str, token: str = "t", writer: str = "w") -> c.Command:
    return c.CompareAndAppend(batch(lower, upper, *names), writer, token, SECOND)


def register(shard: Driver, name: str, now_ns: int = 0, **kwargs: Any) -> c.ReaderRegistered:
    outcome = shard(c.RegisterLeasedReader(name, now_ns, 10 * SECOND, **kwargs))
    assert isinstance(outcome, c.ReaderRegistered)
    return outcome
