"""What a server watches while it runs: the trends of the last hour, and who calls.

Everything is in memory, in bounded space, and begins with the server. A sample is a look at the
metrics of the store, every `TRENDS_EVERY_S`. A process that only follows a store asks its owner for
the metrics, if the owner listens. It counts commits by the entries that the change index got since
the sample before: the counters of an owner begin anew with the next one.

Invariants
1. `TRENDS_SAMPLES` samples and `CALLERS_MAX` callers are kept.
2. A sample keeps no commit waiting, and costs some 100 us; in memory as much as `Store.stats`.
3. No key, no value and no secret is kept: of a request its verb alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from kvstore.base.background import Failures
from kvstore.base.clock import Clock, WallClock
from kvstore.errors import ClosedError, KVStoreError
from kvstore.limits import (
    CALLER_CHARS_MAX,
    CALLERS_MAX,
    TRENDS_EVERY_S,
    TRENDS_SAMPLES,
)
from kvstore.metrics import Metric
from kvstore.remote.client import connect
from kvstore.remote.live import LiveReader
from kvstore.store import Store


def owners_metrics(store: Store) -> Mapping[str, Metric] | None:
    """The metrics of the process that owns a store which this one follows, one round trip away.
    None if this process owns the store, and where the owner does not listen."""
    if not isinstance(store, LiveReader) or store.path is None:
        return None
    with suppress(KVStoreError), connect(store.path, timeout=_OWNER_TIMEOUT_S) as owner:
        return owner.metrics()
    return None


_OWNER_TIMEOUT_S: Final = 2.0
"""A stopped owner keeps neither a view nor a sample longer than this."""


# --------------------------------------------------------------------------------------------------
# The trends of a store: samples of its metrics.


class Sample(NamedTuple):
    """The figures of a store at one moment. Counters count since its process opened it."""

    at: int
    upper: int
    commits: int
    changes: int
    requests: int
    fsyncs: int
    fsync_seconds: float
    feed_lag: float
    """The seconds by which the slowest feed is behind."""
    backup_behind: float
    disk_bytes: float
    memory_bytes: float


class Trends:
    """The samples of the last hour of one store."""

    def __init__(self, store: Store, clock: WallClock | None = None) -> None:
        self._store, self._clock = store, clock or Clock()
        self._samples: deque[Sample] = deque(maxlen=TRENDS_SAMPLES)
        self._lock = threading.Lock()

    @property
    def samples(self) -> list[Sample]:
        """The samples, oldest first."""
        with self._lock:
            return list(self._samples)

    @property
    def is_follower(self) -> bool:
        """Whether another process commits to the store."""
        return isinstance(self._store, LiveReader)

    def note(self) -> None:
        """Take a sample now. Raises as `Store.metrics`."""
        metrics = owners_metrics(self._store) or self._store.metrics()
        commits, changes = (int(_one(metrics, f"{name}_total")) for name in ("commits", "changes"))
        upper = int(self._store.upper)
        before = self._samples[-1] if self._samples else None
        if self.is_follower and before is not None:
            commits, changes = before.commits, before.changes
            if upper > before.upper:
                found = self._store.browsing.count_changes(before.upper - 1, upper - 1)
                commits, changes = commits + found.commits, changes + found.changes
        fsyncs = metrics["kvstore_fsync_seconds"].value
        found_sample = Sample(
            self._clock.wall_ns(),
            upper,
            commits,
            changes,
            int(sum(map(_number, metrics["kvstore_requests_total"].values.values()))),
            fsyncs.count,
            fsyncs.total,
            _most(metrics, "feed_lag_seconds"),
            _most(metrics, "backup_behind_seconds"),
            sum(map(_number, metrics["kvstore_disk_bytes"].values.values())),
            sum(map(_number, metrics["kvstore_memtable_bytes"].values.values())),
        )
        with self._lock:
            self._samples.append(found_sample)


def _number(value: Any) -> float:
    return float(value)


def _one(metrics: Mapping[str, Metric], name: str) -> float:
    return _number(metrics[f"kvstore_{name}"].value)


def _most(metrics: Mapping[str, Metric], name: str) -> float:
    return max(map(_number, metrics[f"kvstore_{name}"].values.values()), default=0.0)


# --------------------------------------------------------------------------------------------------
# The callers of a server: one for each connection, as far as the server knows them.


class Caller:
    """One connection, or all callers of a Unix socket, who have no addresses."""

    __slots__ = ("address", "agent", "first_at", "last", "last_at", "requests", "under_way")

    def __init__(self, address: str, agent: str, at: int) -> None:
        self.address, self.agent = address, agent
        self.first_at = self.last_at = at
        self.requests = self.under_way = 0
        self.last = ""


class Callers:
    """The callers that a server has heard of last."""

    def __init__(self, clock: WallClock | None = None) -> None:
        self._clock = clock or Clock()
        self._known: OrderedDict[str, Caller] = OrderedDict()

    def all(self) -> list[Caller]:
        """The callers, the one who called last first."""
        found = list(self._known.values())  # at once: calls come meanwhile
        return sorted(found, key=lambda caller: -caller.last_at)

    @contextmanager
    def calling(self, address: str, agent: str, what: str) -> Iterator[Caller]:
        """A request that is being answered. Costs 2 us."""
        caller, at = self._known.get(address), self._clock.wall_ns()
        if caller is None:
            caller = Caller(address, agent[:CALLER_CHARS_MAX], at)
            self._known[address] = caller
            while len(self._known) > CALLERS_MAX:
                with suppress(KeyError):  # another loop was faster
                    self._known.popitem(last=False)
        else:
            with suppress(KeyError):
                self._known.move_to_end(address)
        caller.last_at, caller.last = at, what
        caller.requests += 1
        caller.under_way += 1
        try:
            yield caller
        finally:
            caller.under_way -= 1
            caller.last_at = self._clock.wall_ns()


# --------------------------------------------------------------------------------------------------
# Both, and the thread that takes samples.

_PAUSES_PER_SAMPLE: Final = 100
"""A thread that takes samples works a hundredth of the time at most."""


class Watch:
    """What one server watches."""

    def __init__(self, store: Store, callers: Callers, clock: WallClock | None = None) -> None:
        self.trends, self.callers = Trends(store, clock), callers
        self._failures = Failures("kvstore.remote.server", clock or Clock())
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def start(self) -> None:
        """Take samples from now on. Repeatable."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="kvstore-trends", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End the thread. Repeatable."""
        self._stopping.set()
        if self._thread is not None and os.getpid() == self._process:
            self._thread.join()

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.trends.note()
                self._failures.succeeded()
            except ClosedError:  # each turn waits
                return
            except KVStoreError as error:
                self._failures.note("measuring a store for its page", error)
            # A store in memory counts its sizes: it is left alone for longer.
            pause_s = max(TRENDS_EVERY_S, (time.monotonic() - began) * _PAUSES_PER_SAMPLE)
            if self._stopping.wait(pause_s):
                return
