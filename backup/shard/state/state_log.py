"""The state log: it makes a shard's state last, and carries out commands.

Every version of the state is a diff in consensus. Now and then a version is written whole to blob
(a *rollup*). A state is read from the newest rollup and the diffs after it.

    <shard>/rollup/v<seqno, 20 digits>-<random>   in blob
    key <shard>, version <seqno>                  in consensus

Invariants
1. The earliest live version always has a rollup; the head's diff names the newest one.
2. A rollup is in blob before a state names it.
3. The state of a handle never goes back, even if a stale head is read.

Retry rules (`apply`): contention and *determinate* failures are tried again. So are *indeterminate*
failures, since all commands but a compare-and-append may be carried out twice without harm. A
compare-and-append is recognised by its token; where the token cannot tell either, the caller gets
`IndeterminateError`.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from kvstore.backup.shard.state import codec
from kvstore.backup.shard.state.codec import PUT_BACK
from kvstore.backup.shard.state.state import RULE, ShardState
from kvstore.base.clock import WallClock
from kvstore.base.digest import digest
from kvstore.base.forks import own
from kvstore.errors import (
    CorruptionError,
    DeterminateError,
    IndeterminateError,
    StatesLostError,
    UsageError,
)
from kvstore.limits import LOOKS_MAX, ROLLUP_EVERY, STATE_SCAN_VERSIONS
from kvstore.storage.contract import (
    FAILURES,
    Blob,
    Cas,
    Consensus,
    Versioned,
    require_consensus_key,
)
from kvstore.storage.patience import Patience

_T = TypeVar("_T")

Command: TypeAlias = "Callable[[ShardState], tuple[ShardState, _T]]"
"""A method of `ShardState` with its arguments: a decision, which is made anew on each new state."""

_LOST_AFTER = 20
"""Looks, in about two seconds, after which a missing rollup counts as lost."""


class _Missed:
    """Tells a lost blob from a collected one: counts how often in a row it is missing."""

    def __init__(self) -> None:
        self._what = ""
        self._times = 0

    def is_lost(self, what: str) -> bool:
        """Count one more look at which `what` is missing."""
        self._times = self._times + 1 if what == self._what else 1
        self._what = what
        return self._times >= _LOST_AFTER


class MissingShardError(UsageError):
    """The shard `name` does not exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"shard {name} does not exist", "create it, or check the name")
        self.name = name


@dataclass(frozen=True, slots=True)
class Applied(Generic[_T]):
    """The outcome of a command. `unsure`: an attempt on the way had an unknown outcome."""

    outcome: _T
    unsure: bool


class StateLog:
    """One handle's view of a shard. Not for several threads at once; make one handle each."""

    def __init__(
        self,
        blob: Blob,
        consensus: Consensus,
        shard: str,
        *,
        clock: WallClock,
        patience: Patience | None = None,
        known: ShardState | None = None,
    ) -> None:
        """`patience` is the blob's unless it is given. From a `known` state of the shard, opening
        reads only newer versions."""
        self.blob = blob
        self.consensus = consensus
        self.shard = require_consensus_key(shard)
        self.clock = clock
        self.patience = patience or blob.patience
        self._hostname = socket.gethostname()
        self._state: ShardState | None = known
        own(self, f"the handle on shard {shard}")

    @property
    def state(self) -> ShardState:
        """The newest state this handle has seen; `open` or `create` comes first."""
        assert self._state is not None
        return self._state

    def open(self, *, create: bool) -> ShardState:
        """Load the shard, creating it if it is missing and `create` says so.

        Raises `MissingShardError`, or `CorruptionError` if its rows are no versions.
        """
        tries = self.patience.tries()
        while True:
            try:
                self._catch_up()
                if self._state is None and create:
                    self._state = self._create()
            except (DeterminateError, IndeterminateError) as error:
                tries.wait(error)
                continue
            if self._state is not None or not create:
                break
            tries.wait(self._lost_race("creating"))
        if self._state is None:
            raise MissingShardError(self.shard)
        if self._state.rule != RULE:
            where = f"shard {self.shard}"
            raise CorruptionError(where, f"its rule is {self._state.rule!r:.40}", PUT_BACK)
        return self._state

    def refresh(self) -> ShardState:
        """Catch up with consensus: a scan of newer versions, or after a truncation a full load."""
        self.retrying(self._catch_up)
        return self.state

    def apply(self, command: Command[_T]) -> Applied[_T]:
        """Carry out `command`; the module says which failures are retried.

        Raises `IndeterminateError` for a compare-and-append with an unknown fate, and
        `DeterminateError` once patience has ended. Raises failures that cannot pass at once.
        """
        unsure = False
        tries = self.patience.tries()
        behind = _Missed()
        while True:
            before = self.state
            after, outcome = command(before)
            failure: DeterminateError | IndeterminateError | None = None
            try:
                if after is before:
                    if self.refresh().seqno == before.seqno:
                        return Applied(outcome, unsure)
                    # The decision was made on an old state: decide again.
                elif self._commit(before, after):
                    self._rollup_if_due()
                    return Applied(outcome, unsure)
            except DeterminateError as error:
                failure = error
            except IndeterminateError as error:
                unsure, failure = True, error
            # Refresh after the pause: otherwise a commit during the pause would beat us again.
            tries.wait(failure or self._lost_race("a command on"))
            if self.refresh().seqno == before.seqno:
                self._require_reached(behind)

    def _require_reached(self, behind: _Missed) -> None:
        """Raise `StatesLostError` if the head stays below the state that this handle has seen."""
        head = self.retrying(partial(self.consensus.head, self.shard))
        found = 0 if head is None else head.seqno
        if found < self.state.seqno and behind.is_lost(str(found)):
            raise StatesLostError(f"shard {self.shard}", found=found, known=self.state.seqno)

    def write_rollup(self, state: ShardState | None = None) -> None:
        """Write `state` (default: the newest) whole, and name the blob in the next version."""
        state = state or self.state
        if self.state.is_tombstone and self.state.rollup[0] >= self.state.tombstone_seqno:
            return  # the last version that there will be
        name = self._rollup_name(state.seqno)
        self.retrying(lambda: self.blob.put(name, codec.encode_state(state)))
        seqno = state.seqno
        added = self.apply(lambda state: state.add_rollup(seqno, name))
        if not added.outcome and not added.unsure:
            self.retrying(lambda: self.blob.delete(name))

    def retrying(self, call: Callable[[], _T]) -> _T:
        """Make an idempotent storage call again until it works, or patience ends."""
        return self.patience.over(call)

    def live_states(self) -> list[ShardState]:
        """Every live version, ascending. O(versions x batches)."""
        earliest, diffs = self.live_diffs()
        states = [earliest]
        for diff in diffs:
            where = self._where(diff.seqno)
            states.append(codec.apply_diffs(states[-1], [diff], where=where))
        return states

    def live_diffs(self) -> tuple[ShardState, list[codec.Diff]]:
        """The earliest live version, and the later diffs. O(versions): a scan of all."""
        missed = _Missed()
        for attempt in range(LOOKS_MAX):
            if attempt:
                self._pause(attempt)
                self.refresh()
            versions: list[Versioned] = self.retrying(lambda: self._scan(0))
            if not versions:
                continue  # a stale scan
            earliest = versions[0].seqno
            name = self.state.rollups.get(earliest)
            rollup = None if name is None else self.retrying(partial(self._read_rollup, name))
            if rollup is not None:
                return rollup, [self._decoded(version) for version in versions[1:]]
            if missed.is_lost(f"{earliest} {name}"):
                break  # not collected since the scan, and the scan was not stale
        where = f"shard {self.shard}"
        raise CorruptionError(where, "its earliest version has no rollup", PUT_BACK)

    # -- how ---------------------------------------------------------------------------------

    def _create(self) -> ShardState | None:
        """The first version and its rollup; None if another handle was faster."""
        name = self._rollup_name(1)
        state = self._stamped(ShardState(self.shard, RULE, seqno=1, rollups={1: name}))
        data = codec.encode_diff(None, state)
        state = replace(state, step_digest=digest(data))
        self.blob.put(name, codec.encode_state(state))
        cas = self.consensus.compare_and_set(self.shard, expected=None, new=Versioned(1, data))
        return state if cas is Cas.COMMITTED else None

    def _commit(self, before: ShardState, after: ShardState) -> bool:
        assert after.seqno == before.seqno + 1
        after = self._stamped(after)
        data = codec.encode_diff(before, after)
        new = Versioned(after.seqno, data)
        cas = self.consensus.compare_and_set(self.shard, expected=before.seqno, new=new)
        if cas is Cas.COMMITTED:
            self._state = replace(after, step_digest=digest(data))
        return cas is Cas.COMMITTED

    def _stamped(self, state: ShardState) -> ShardState:
        walltime_ns = max(self.clock.wall_ns(), state.walltime_ns)
        return replace(state, walltime_ns=walltime_ns, hostname=self._hostname)

    def _rollup_if_due(self) -> None:
        """Write a rollup if due. After a failure the next commit tries again."""
        state = self.state
        if state.seqno - state.rollup[0] < ROLLUP_EVERY or state.is_tombstone:
            return
        name = self._rollup_name(state.seqno)
        try:
            self.blob.put(name, codec.encode_state(state))
            after, _ = state.add_rollup(state.seqno, name)
            if not self._commit(state, after):
                self.blob.delete(name)  # surely named by no version
        except FAILURES:
            return

    def _catch_up(self) -> None:
        if self._state is None:
            self._state = self._load()
            return
        versions = self._scan(self._state.seqno + 1)
        if versions and versions[0].seqno == self._state.seqno + 1:
            self._state = self._after(self._state, versions)
        elif versions:  # the versions in between were truncated
            loaded = self._load()
            if loaded is not None and loaded.seqno > self._state.seqno:
                self._state = loaded

    def _load(self) -> ShardState | None:
        """The state at the head, from the rollup it names; None if there is no shard."""
        missed = _Missed()
        name = ""
        for attempt in range(LOOKS_MAX):
            if attempt:
                self._pause(attempt)
            head = self.consensus.head(self.shard)
            if head is None:
                return None
            where = self._where(head.seqno)
            name = codec.decode_diff(head.data, where=where).rollup[1]
            state = self._read_rollup(name)
            if state is None:
                if missed.is_lost(name):
                    break
                continue  # a stale head named a collected rollup: look again
            if state.seqno < head.seqno:
                versions = self._scan(state.seqno + 1)
                if not versions or versions[0].seqno != state.seqno + 1:
                    continue  # collected between the two reads
                state = self._after(state, versions)
            elif state.seqno == head.seqno and state.step_digest != digest(head.data):
                raise CorruptionError(
                    f"blob {name}", f"it is no rollup of this v{head.seqno}", PUT_BACK
                )
            return state
        raise CorruptionError(
            f"shard {self.shard}", f"the rollup its head names, {name}, is missing", PUT_BACK
        )

    def _pause(self, attempt: int) -> None:
        """Pause before another look: 1 ms, doubling up to a quarter of a second."""
        self.patience.pause(min(0.001 * 2 ** min(attempt, 10), 0.25))

    def _lost_race(self, what: str) -> DeterminateError:
        return DeterminateError(f"{what} shard {self.shard}", "other scripts were faster")

    def _scan(self, start: int) -> list[Versioned]:
        """The live versions from `start` on, without a gap."""
        found: list[Versioned] = []
        while True:
            page = self.consensus.scan(self.shard, start=start, limit=STATE_SCAN_VERSIONS)
            if found and page and page[0].seqno != start:
                found.clear()  # a collection has truncated these and more since they were read
            found.extend(page)
            if len(page) < STATE_SCAN_VERSIONS:
                return found
            start = page[-1].seqno + 1

    def _after(self, state: ShardState, versions: list[Versioned]) -> ShardState:
        """The state that `versions`, applied in order, lead to."""
        diffs = [self._decoded(version) for version in versions]
        return codec.apply_diffs(state, diffs, where=self._where(versions[-1].seqno))

    def _decoded(self, version: Versioned) -> codec.Diff:
        return codec.decode_diff(version.data, where=self._where(version.seqno))

    def _rollup_name(self, seqno: int) -> str:
        return f"{self.shard}/rollup/v{seqno:020}-{secrets.token_hex(6)}"

    def _read_rollup(self, name: str) -> ShardState | None:
        data = self.blob.get(name)
        return None if data is None else codec.decode_state(data, where=f"blob {name}")

    def _where(self, seqno: int) -> str:
        return f"shard {self.shard} v{seqno}"
