"""The journal against a plain log, and claims of a task queue, in one run.

`python -m benchmarks.journal [directory]`

The plain log has the same records, with ordinal, type and incarnation under the same checksum,
behind a length each; written in the same pieces and synced at the same moments, into one file.
So a ratio of 1 means that stuffing, the head's own check, rotation, locking and being able to
recover cost nothing. Both run in turns, in short rounds, so that the machine's moods meet both;
figures are medians over the rounds.
"""

from __future__ import annotations

import gc
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from zlib import crc32

from kvstore.journal import Journal, Record, Sync
from kvstore.tasks import NewTask, Tasks

ROUNDS = 15
BATCH = 100
WORKLOADS = ((100, 5_000), (1_000, 3_000), (10_000, 1_000), (1_000_000, 10))
"""(payload bytes, records of a round): small commits, rows, pages, blobs."""

SYNCED_RECORDS = 50
WAITING = (1_000, 100_000)
CLAIMS = 5_000
LENGTH = struct.Struct("<II")
HEAD = struct.Struct("<QQB")
FRONT = LENGTH.size + HEAD.size


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure: medians over the rounds; `ratio` is that of each round's journal to its plain
    log, where 1 is as fast."""

    name: str
    journal_per_s: float
    plain_per_s: float
    journal_mb_per_s: float
    ratio: float


class PlainLog:
    """| length u32 | CRC-32 u32 | incarnation u64 | ordinal u64 | type u8 | payload |, appended."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._sync = sync
        self._next = 1

    def append(self, payload: bytes) -> int:
        ordinal = self._next
        head = HEAD.pack(1, ordinal, 0)
        self._file.write(LENGTH.pack(len(payload), crc32(payload, crc32(head))) + head + payload)
        self._next += 1
        if self._sync:
            os.fsync(self._file.fileno())
        return ordinal

    def append_many(self, payloads: Sequence[bytes]) -> None:
        parts = []
        ordinal = self._next
        for payload in payloads:
            head = HEAD.pack(1, ordinal, 0)
            parts.append(LENGTH.pack(len(payload), crc32(payload, crc32(head))) + head + payload)
            ordinal += 1
        self._file.write(b"".join(parts))
        self._next = ordinal
        if self._sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def read_plain(path: Path, apply: Callable[[Record], object], *, piece: int = 256 << 10) -> None:
    """Read a plain log back, a piece at a time, checking every record and the order."""
    expected = 1
    with open(path, "rb", buffering=0) as file:
        data = b""
        while more := file.read(piece):
            data += more
            at, size = 0, len(data)
            while at + FRONT <= size:
                length, checksum = LENGTH.unpack_from(data, at)
                end = at + FRONT + length
                if end > size:
                    break
                incarnation, ordinal, kind = HEAD.unpack_from(data, at + LENGTH.size)
                payload = data[at + FRONT : end]
                found = crc32(payload, crc32(data[at + LENGTH.size : at + FRONT]))
                if found != checksum or ordinal != expected:
                    raise ValueError(f"damaged at {at}")
                apply(Record(ordinal, kind, payload, incarnation))
                expected += 1
                at = end
            data = data[at:]


def payloads_of(size: int, count: int) -> list[bytes]:
    """Half text, half noise: some contain the pair."""
    noise = os.urandom(size)
    text = (b"the quick brown fox jumps over the lazy dog; " * (size // 45 + 1))[: size // 2]
    payload = text + noise[: size - len(text)]
    return [payload[number % 7 :] + payload[: number % 7] for number in range(count)]


def seconds(action: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare(name: str, count: int, size: int, pairs: Sequence[tuple[float, float]]) -> Figure:
    """A figure of (journal, plain) seconds."""
    journal = median(pair[0] for pair in pairs)
    plain = median(pair[1] for pair in pairs)
    ratio = median(pair[1] / pair[0] for pair in pairs)
    return Figure(name, count / journal, count / plain, count * size / journal / 1e6, ratio)


def measure_log(directory: Path, size: int, count: int, *, rounds: int) -> Iterator[Figure]:
    """Append one by one, append in batches, replay: without syncs, since those drown the rest."""
    payloads = payloads_of(size, count)
    path, plain_path = directory / f"journal{size}", directory / f"plain{size}"
    single: list[tuple[float, float]] = []
    batched: list[tuple[float, float]] = []
    plain = PlainLog(plain_path, sync=False)
    with Journal.open(path, sync=Sync.never()) as journal:
        for _ in range(rounds):
            for results, many in ((single, False), (batched, True)):
                mine = seconds(lambda: fill(journal, payloads, many))  # noqa: B023
                results.append((mine, seconds(lambda: fill(plain, payloads, many))))  # noqa: B023
    plain.close()
    replayed = [
        (seconds(lambda: replay_journal(path)), seconds(lambda: replay_plain(plain_path)))
        for _ in range(rounds)
    ]
    shutil.rmtree(path)
    plain_path.unlink()
    yield compare(f"append {size:,} B", count, size, single)
    yield compare(f"append {size:,} B, {BATCH} at once", count, size, batched)
    yield compare(f"replay {size:,} B", 2 * rounds * count, size, replayed)


def fill(log: Journal | PlainLog, payloads: Sequence[bytes], many: bool) -> None:
    if many:
        for at in range(0, len(payloads), BATCH):
            log.append_many(payloads[at : at + BATCH])
    else:
        for payload in payloads:
            log.append(payload)


def replay_journal(path: Path) -> None:
    kept = Kept()
    Journal.open(path, apply=kept.apply, sync=Sync.never()).close()


def replay_plain(path: Path) -> None:
    kept = Kept()
    read_plain(path, kept.apply)


class Kept:
    """A state like any other: something in memory that each record changes."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}

    def apply(self, record: Record) -> None:
        self.payloads[record.ordinal % 1000] = record.payload


def measure_synced(directory: Path, *, rounds: int) -> Figure:
    """Append with an fsync each: what a durable commit costs."""
    payloads = payloads_of(1_000, SYNCED_RECORDS)
    pairs = []
    for number in range(rounds):
        with Journal.open(directory / f"synced{number}", sync=Sync.always()) as journal:
            mine = seconds(lambda: fill(journal, payloads, False))
        plain = PlainLog(directory / f"synced-plain{number}", sync=True)
        pairs.append((mine, seconds(lambda: fill(plain, payloads, False))))  # noqa: B023
        plain.close()
    return compare("append 1000 B, fsync each", SYNCED_RECORDS, 1_000, pairs)


def measure_claims(directory: Path, *, rounds: int) -> dict[int, float]:
    """Claims per second by number of tasks waiting: durable queue, claims as they come."""
    rates: dict[int, list[float]] = {waiting: [] for waiting in WAITING}
    for number in range(rounds):
        for waiting, found in rates.items():
            path = directory / f"tasks-{number}-{waiting}"
            with Tasks.open(path, sync=Sync.never()) as tasks:
                for at in range(0, waiting, 1_000):
                    tasks.modify(inserts=[NewTask("q", b"%d" % n, at + n) for n in range(1_000)])
                claims = min(CLAIMS, waiting)
                taken = seconds(lambda: claim_all(tasks, claims))  # noqa: B023
                found.append(claims / taken)
            shutil.rmtree(path)
    return {waiting: median(found) for waiting, found in rates.items()}


def claim_all(tasks: Tasks, count: int) -> None:
    for _ in range(count):
        if tasks.claim(["q"], hold=3600) is None:
            raise ValueError("a task is missing")


def measure(directory: Path, *, rounds: int = ROUNDS) -> tuple[list[Figure], dict[int, float]]:
    """Everything: the comparisons, and claims per second by tasks waiting."""
    figures = [measure_synced(directory, rounds=rounds)]
    for size, count in WORKLOADS:
        figures += measure_log(directory, size, count, rounds=rounds)
    return figures, measure_claims(directory, rounds=rounds)


def main() -> None:
    """Measure in a temporary directory (below the one given) and print."""
    parent = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        figures, claims = measure(Path(directory))
    for figure in figures:
        print(
            f"{figure.name:34} {figure.journal_per_s:11,.0f} /s "
            f"{figure.journal_mb_per_s:8,.1f} MB/s "
            f"  plain {figure.plain_per_s:11,.0f} /s   ratio {figure.ratio:.2f}"
        )
    few, many = (claims[waiting] for waiting in WAITING)
    print(
        f"claims, {WAITING[0]:,} waiting {few:,.0f} /s; {WAITING[1]:,} waiting {many:,.0f} /s;",
        end=" ",
    )
    print(f"ratio {many / few:.2f}")


if __name__ == "__main__":
    main()
