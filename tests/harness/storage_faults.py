"""Faults: a blob and a consensus that fail as real ones do, the same way for the same seed.

They wrap any implementation, and draw the fault of each call from one random generator:

    refused     `DeterminateError`, nothing done
    lost reply  done, then `IndeterminateError`
    torn        a blob put that stops half way: nothing visible (puts are atomic), but the caller
                hears `IndeterminateError`
    delayed     not done yet, `IndeterminateError` at once; done some steps (calls) later, if it
                still can be: the packet that arrives after its sender gave up
    stale       an older head, or a scan that lacks the newest versions

Time is counted in calls, so nothing sleeps. `calm()` ends all faults and lets delayed calls
arrive.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import DeterminateError, IndeterminateError, UsageError
from kvstore.storage.contract import Blob, BlobInfo, Cas, Consensus, Versioned

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probability of each fault per call, and how many calls a delay lasts at most."""

    refused: float = 0.05
    lost_reply: float = 0.05
    torn: float = 0.02
    delayed: float = 0.05
    stale: float = 0.1
    delay_calls_max: int = 20


class Weather:
    """The faults to come, shared by all blobs and consensuses that are wrapped with it."""

    def __init__(
        self,
        seed: int,
        rates: FaultRates | None = None,
        *,
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_call` runs before every call: a test lets other actors go first, or crashes one."""
        self._on_call = on_call
        self._random = random.Random(seed)
        self._rates = rates or FaultRates()
        self._calls = 0
        self._delayed: list[tuple[int, Callable[[], object]]] = []
        self.is_calm = False
        self.faults = 0

    def calm(self) -> None:
        """End all faults; delayed calls arrive now."""
        self.is_calm = True
        self._arrive(everything=True)

    def turn(self, rates: FaultRates) -> None:
        """From now on faults come at other rates."""
        self._rates = rates

    def write(self, where: str, call: Callable[[], _T], *, torn: bool = False) -> _T:
        """Carry out a call that changes something, or not, or later."""
        self._step()
        rates = self._rates
        if self._strikes(rates.refused):
            raise DeterminateError(where, "refused (injected)")
        if torn and self._strikes(rates.torn):
            raise IndeterminateError(where, "torn (injected)")
        if self._strikes(rates.delayed):
            due = self._calls + self._random.randint(1, rates.delay_calls_max)
            self._delayed.append((due, call))
            raise IndeterminateError(where, "timed out (injected)")
        result = call()
        if self._strikes(rates.lost_reply):
            raise IndeterminateError(where, "its reply was lost (injected)")
        return result

    def read(self, where: str, call: Callable[[], _T]) -> _T:
        """Carry out a call that changes nothing, or refuse to."""
        self._step()
        if self._strikes(self._rates.refused):
            raise DeterminateError(where, "refused (injected)")
        return call()

    def is_stale(self) -> bool:
        """Draw whether this read sees the past."""
        return self._strikes(self._rates.stale)

    def pick(self, count: int) -> int:
        """Draw a number below `count`."""
        return self._random.randrange(count)

    def _strikes(self, rate: float) -> bool:
        struck = not self.is_calm and self._random.random() < rate
        self.faults += struck
        return struck

    def _step(self) -> None:
        self._on_call()
        self._calls += 1
        self._arrive(everything=False)

    def _arrive(self, *, everything: bool) -> None:
        arriving = [call for due, call in self._delayed if everything or due <= self._calls]
        self._delayed = [d for d in self._delayed if not everything and d[0] > self._calls]
        for call in arriving:
            _unless_refused(call)


def _unless_refused(call: Callable[[], object]) -> None:
    """A delayed call: its sender has given up, so a refusal of the storage reaches no one."""
    try:
        call()
    except UsageError:
        return


class FaultyBlob:
    """A blob under `weather`."""

    def __init__(self, blob: Blob, weather: Weather) -> None:
        self.patience = blob.patience
        self._blob = blob
        self._weather = weather

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`."""
        self._weather.write(
            f"put of {name}", lambda: self._blob.put(name, data, durable=durable), torn=True
        )

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        return self._weather.read(f"get of {name}", lambda: self._blob.get(name))

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        return self._weather.read(
            f"get of {name}", lambda: self._blob.get_range(name, start=start, length=length)
        )

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        return self._weather.read(f"size of {name}", lambda: self._blob.size(name))

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        return self._weather.write(f"delete of {name}", lambda: self._blob.delete(name))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`."""
        yield from self._weather.read("list", lambda: list(self._blob.list(prefix)))


class FaultyConsensus:
    """A consensus under `weather`."""

    def __init__(self, consensus: Consensus, weather: Weather) -> None:
        self._consensus = consensus
        self._weather = weather

    def head(self, key: str) -> Versioned | None:
        """See `Consensus.head`; may be any live version."""
        head = self._weather.read(f"head of {key}", lambda: self._consensus.head(key))
        if head is None or not self._weather.is_stale():
            return head
        live = self._consensus.scan(key, start=0, limit=1_000_000)
        return live[self._weather.pick(len(live))]

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        """See `Consensus.compare_and_set`; never stale."""
        return self._weather.write(
            f"compare-and-set of {key} v{new.seqno}",
            lambda: self._consensus.compare_and_set(key, expected=expected, new=new),
        )

    def scan(self, key: str, *, start: int, limit: int) -> list[Versioned]:
        """See `Consensus.scan`; may lack the newest versions."""
        found = self._weather.read(
            f"scan of {key}", lambda: self._consensus.scan(key, start=start, limit=limit)
        )
        if found and self._weather.is_stale():
            return found[: self._weather.pick(len(found)) + (start == 0)]
        return found

    def truncate(self, key: str, seqno: int) -> int | None:
        """See `Consensus.truncate`."""
        return self._weather.write(
            f"truncation of {key}", lambda: self._consensus.truncate(key, seqno)
        )

    def list_keys(self) -> list[str]:
        """See `Consensus.list_keys`."""
        return self._weather.read("list of keys", self._consensus.list_keys)
