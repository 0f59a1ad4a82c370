"""A fleet of stores that take pushes from one bucket: `python -m benchmarks.fleet [STORES...]`.

The stores, their pullers and the bucket are in one process, and all code is the one that runs in
production. Time is simulated: each request of a store moves the clock of that store by a latency
and by its bytes at the store's bandwidth, and waits while the bucket is busy with requests of
others. So a run of hours takes seconds, and its figures do not depend on the machine. Processor
time and memory are measured.

    for each push: a job seals it -> each store looks every `PULL_EVERY_S` -> takes it -> reports

With `--faults` requests fail and lose their answers, and a puller in three crashes at one of its
requests; another puller continues with its store.
"""

from __future__ import annotations

import argparse
import heapq
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import kvstore
from kvstore.bulk.pushes import Push, Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.limits import PULL_EVERY_S
from kvstore.storage.contract import Blob, BlobInfo
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.storage.patience import Patience
from tests.harness.storage_faults import FaultRates, FaultyBlob, Weather

STORES: Final = (100, 300, 1000)
PUSHES: Final = 3
ROWS: Final = 1000
VALUE_BYTES: Final = 100
LATENCY_S: Final = 0.03
"""The median time of a small request of an object store, as providers tell it."""
HOST_BYTES_PER_S: Final = 125e6
"""The bandwidth of a host: 1 Gbit/s."""
BUCKET_REQUESTS_PER_S: Final = 5500
"""The requests that a bucket answers per second below one prefix, as providers tell it."""

SLOT_S: Final = 0.1
"""The simulated time in which the requests of all hosts are counted against the bucket's rate."""
_REQUESTS_MAX: Final = 12
"""Requests of a store for one push, about: a crash comes before one of them."""


def _at_once() -> Patience:
    return Patience(600, pause=lambda _: None)


class Crash(BaseException):
    """The end of a puller at one of its requests."""


class Clock:
    """The simulated time of one host."""

    def __init__(self) -> None:
        self.now_s = 0.0


@dataclass
class Bucket:
    """One bucket. All hosts share its bytes and its rate of requests."""

    pick: random.Random
    blob: MemoryBlob = field(default_factory=lambda: MemoryBlob(patience=_at_once()))
    requests: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    _slots: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, clock: Clock, kind: str, size: int) -> None:
        """Let a host wait for one request of `size` bytes."""
        with self._lock:
            self.requests[kind] += 1
            self.bytes += size
            slot = int(clock.now_s / SLOT_S)
            while self._slots[slot] >= BUCKET_REQUESTS_PER_S * SLOT_S:
                slot += 1
            self._slots[slot] += 1
            begins = max(clock.now_s, slot * SLOT_S)
            latency_s = LATENCY_S * self.pick.lognormvariate(0, 0.5)
            clock.now_s = begins + latency_s + size / HOST_BYTES_PER_S


class Remote:
    """The bucket, as one host reaches it. `spared` requests are left until its process dies."""

    def __init__(self, bucket: Bucket, clock: Clock) -> None:
        self._bucket, self._clock, self._blob = bucket, clock, bucket.blob
        self.patience = bucket.blob.patience
        self.spared: int | None = None

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`."""
        self._ask("put", len(data))
        self._blob.put(name, data)

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        return self._found(self._blob.get(name))

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        return self._found(self._blob.get_range(name, start=start, length=length))

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        self._ask("head", 0)
        return self._blob.size(name)

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`. An object store is asked for the size first."""
        self._ask("head", 0)
        self._ask("delete", 0)
        return self._blob.delete(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`. A request lists 1,000 names."""
        found = list(self._blob.list(prefix))
        for at in range(0, max(len(found), 1), 1000):
            self._ask("list", sum(len(each.name) + 200 for each in found[at : at + 1000]))
        yield from found

    def _found(self, data: bytes | None) -> bytes | None:
        self._ask("get", len(data or b""))
        return data

    def _ask(self, kind: str, size: int) -> None:
        if self.spared is not None:
            self.spared -= 1
            if self.spared < 0:
                self.spared = None
                raise Crash
        self._bucket.ask(self._clock, kind, size)


class Host:
    """A host with a store and its puller."""

    def __init__(self, bucket: Bucket, name: str, weather: Weather | None) -> None:
        self.clock, self.name = Clock(), name
        self.remote = Remote(bucket, self.clock)
        self.blob: Blob = self.remote if weather is None else FaultyBlob(self.remote, weather)
        self.store = kvstore.open(None, engine="memory")
        self.crashes = 0
        self.restart()

    def restart(self) -> None:
        """A new process with the same store."""
        self.puller = Puller(self.store, Pushes.over(self.blob, self.name), name=self.name)

    def step(self) -> bool:
        """One look at the bucket; the process may die, and is started again."""
        try:
            return self.puller.step()
        except Crash:
            self.crashes += 1
            self.restart()
            return True


class Fleet:
    """Hosts of one bucket. `model` has the rows that each store must have."""

    def __init__(self, stores: int, *, faults: bool = False, seed: int = 0) -> None:
        self._pick = random.Random(seed)
        self._has_faults = faults
        self.bucket = Bucket(random.Random(self._pick.random()))
        self.job = self._host("job")
        self.hosts = [self._host(f"s{number:05}") for number in range(stores)]
        self.model: dict[bytes, bytes] = {}
        self._before: dict[bytes, bytes] = {}

    def _host(self, name: str) -> Host:
        # Each has faults of its own: a late write of one host must not arrive in another's process.
        faults = Weather(self._pick.getrandbits(32), FaultRates()) if self._has_faults else None
        return Host(self.bucket, name, faults)

    def push(self, rows: int, value_bytes: int = VALUE_BYTES) -> Push:
        """A job seals a push, of whose keys half were pushed before."""
        self._before = dict(self.model)
        with Pushes.over(self.job.blob, self.job.name).begin() as building:
            with building.writer() as writer:
                start = len(self.model) // 2
                for number in range(start, start + rows):
                    key, value = b"key%08d" % number, self._pick.randbytes(value_bytes)
                    writer.put(key, value)
                    self.model[key] = value
            return building.seal()

    def revert(self, number: int) -> None:
        """Take back the last push."""
        Pushes.over(self.job.blob, self.job.name).revert(number)
        self.model = self._before

    def spread(self) -> float:
        """Let all hosts look until each has passed the whole log. Returns the simulated seconds
        until the last one has taken and reported everything."""
        began = max(host.clock.now_s for host in (self.job, *self.hosts))
        if self._has_faults:
            for host in self._pick.sample(self.hosts, len(self.hosts) // 3):
                host.remote.spared = self._pick.randrange(_REQUESTS_MAX)
        looks = [(began + self._pick.uniform(0, PULL_EVERY_S), n) for n in range(len(self.hosts))]
        heapq.heapify(looks)
        last = began
        while looks:
            at, number = heapq.heappop(looks)
            host = self.hosts[number]
            host.clock.now_s = max(host.clock.now_s, at)
            if host.step():
                heapq.heappush(looks, (host.clock.now_s, number))
                last = max(last, host.clock.now_s)
        return last - began

    def states(self, number: int) -> list[str]:
        """The state of a push in the report of each store."""
        found = Pushes.over(self.job.blob, self.job.name).status(number)
        return [each.state for each in found.stores]

    def require_exact(self, pushes: int) -> None:
        """Fail unless each store has added each push once, and has the rows of the model."""
        for host in self.hosts:
            added = [each for each in host.store.imports.all() if each.added is not None]
            assert len(added) == pushes, f"{host.name} has {len(added)} imports of {pushes}"
            assert dict(host.store.scan()) == self.model, f"{host.name} has other rows"

    def close(self) -> None:
        """Close all stores."""
        for host in (self.job, *self.hosts):
            host.store.close()


class Figures(NamedTuple):
    """The figures of one push, for each store."""

    stores: int
    requests: dict[str, float]
    bytes: float
    spread_s: float
    cpu_ms: float
    memory_kb: float

    def line(self) -> str:
        """A row of the table."""
        kinds = ", ".join(f"{count:.1f} {kind}" for kind, count in sorted(self.requests.items()))
        return (
            f"| {self.stores:,} | {sum(self.requests.values()):.1f} ({kinds}) "
            f"| {self.bytes / 1000:,.0f} kB | {self.spread_s:.1f} s | {self.cpu_ms:.1f} ms "
            f"| {self.memory_kb:,.0f} kB |"
        )


def measured(stores: int, rows: int, *, faults: bool) -> Figures:
    """Push some times to new stores. The figures are of the last push: a store has reported then,
    and knows the root."""
    before_kb = resident_kb()
    fleet = Fleet(stores, faults=faults)
    try:
        for _ in range(PUSHES):
            fleet.push(rows)
            fleet.bucket.requests.clear()
            fleet.bucket.bytes = 0
            began = time.process_time()
            spread_s = fleet.spread()
            cpu_s = time.process_time() - began
        grown_kb = resident_kb() - before_kb
        requests, size = dict(fleet.bucket.requests), fleet.bucket.bytes
        fleet.require_exact(PUSHES)
        fleet.revert(PUSHES)
        fleet.spread()
        fleet.require_exact(PUSHES)
    finally:
        fleet.close()
    return Figures(
        stores,
        {kind: count / stores for kind, count in requests.items()},
        size / stores,
        spread_s,
        1000 * cpu_s / stores,
        grown_kb / stores,
    )


def resident_kb() -> int:
    """The resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def main() -> None:
    """Measure fleets of some sizes, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("stores", nargs="*", type=int, default=list(STORES))
    parser.add_argument("--faults", action="store_true", help="requests fail, processes die")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a push")
    options = parser.parse_args()
    print("| stores | requests | bytes | last store has it | processor time | memory |")
    print("|--:|--:|--:|--:|--:|--:|")
    for stores in options.stores:
        print(measured(stores, options.rows, faults=options.faults).line(), flush=True)


if __name__ == "__main__":
    main()
