"""A live reader: a store that another process writes, read as it moves.

Invariants
1. At `upper` a live reader shows the writer's state of that time: whole commits, in their order,
   imports and range deletes included. `upper` never goes back.
2. A read at an older time gives what the writer gives, or raises `HistoryGoneError`. GC of the
   writer does not wait for readers: the writer holds what must stay readable (`Store.hold`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final

from kvstore.base.arguments import INTEGER, SECONDS, WAIT
from kvstore.base.background import Failures
from kvstore.base.clock import Clock
from kvstore.base.forks import own
from kvstore.base.paths import require_path
from kvstore.base.timestamp import Timestamp
from kvstore.changes.index import OP_DELETE, OP_PUT, OP_PUT_LARGE
from kvstore.codec.keys import decode_range
from kvstore.engine import META, RANGES, chunks
from kvstore.engine.rocks import DEFAULTS, Options
from kvstore.engine.rocks_secondary import SecondaryEngine
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    KVStoreError,
    StaleReaderError,
    StorageError,
    UsageError,
)
from kvstore.feeds.replica import stored_policy
from kvstore.limits import (
    FOLLOW_INTERVAL_S_MIN,
    FOLLOW_REST_S,
    FOLLOW_REST_S_MAX,
    FOLLOW_RETRY_S_MAX,
    FOLLOW_TOLD_MAX,
    FOLLOW_WAIT_S,
)
from kvstore.mvcc import RangeTombstone
from kvstore.mvcc.fragments import Fragments
from kvstore.mvcc.meta import FORMAT, INDEX_FLOOR, SINCE, UPPER, Meta
from kvstore.opening import assemble, engine_at, require_format
from kvstore.store import Store
from kvstore.timeline.committer import Committer
from kvstore.timeline.durability import read_durable_mark
from kvstore.timeline.frontiers import read_only_policy
from kvstore.timeline.parts import Parts
from kvstore.timeline.request_notes import NOTES


def follow(
    path: str | os.PathLike[str], max_staleness: float = 0.05, durable_only: bool = False
) -> LiveReader:
    """A reader of the store at `path` that follows the process that writes it.

    `upper` moves by itself: a commit shows here at most about `max_staleness` seconds after it was
    written, unless the machine is overloaded. With `durable_only` a commit shows once it is
    durable, so a power cut takes back nothing that was shown. Any number of processes may follow a
    store, and none holds the writer up. Nothing is written at `path`, which may be read-only
    storage; the directory for temporary files (`TMPDIR`) takes a few links and a small log.

    Raises `NotAStoreError` where no store is, `FormatVersionError` if a newer release wrote it, and
    `UsageError` for a store in memory, whose rows are in its own process. Opening takes some 5 ms,
    and 5 ms per MB of unflushed log (`limits.LOG_BYTES_MAX`).
    """
    directory = require_path(path)
    staleness = SECONDS.check("max_staleness", max_staleness)
    if engine_at(directory) == "memory":
        raise UsageError(
            f"the store at {directory} is in memory: its own process alone can follow it",
            "open_read_only reads its journal, as of the time of opening; a store of the engine "
            "rocksdb can be followed",
        )
    return follow_as(directory, DEFAULTS, staleness, durable_only=durable_only)


def follow_as(
    directory: Path, knobs: Options, staleness: float = 0.05, *, durable_only: bool = False
) -> LiveReader:
    """As `follow`, of a store of RocksDB, within the memory that `knobs` allow."""
    engine = SecondaryEngine(directory)
    try:
        with engine.lock:
            require_format(directory, engine)
            reader = assemble(
                LiveReader,
                directory,
                engine,
                durability="async",
                clock=Clock(),
                read_only=True,
                knobs=knobs,
            )
            reader.pursue(engine, staleness, durable_only=durable_only)
        return reader
    except BaseException:
        engine.close()
        raise


class LiveReader(Store):
    """A store as another process writes it: get one by `kvstore.follow`, and use it from any
    thread. Reads have the arguments and errors of `Store`. Every write raises `UsageError`.

    If the state of the writer cannot be shown, every read raises the reason: `StaleReaderError`
    while a later look may succeed, and for good if the store was replaced by another copy;
    `NotAStoreError` if it was removed. Then call `kvstore.follow` again. A snapshot keeps no
    history at the writer: its reads raise `HistoryGoneError` once the writer has given it up. A
    scan keeps its state, and the files that it reads, on disk too, until it ends.
    """

    _pursuit: Pursuit | None = None
    _interval_s = 0.0
    _looked_at = _next_due = -1

    def pursue(self, engine: SecondaryEngine, max_staleness: float, *, durable_only: bool) -> None:
        """Begin to follow the writer. `kvstore.follow` calls this once."""
        records = LiveRecords(self._parts, engine)
        self._pursuit = Pursuit(self._committer, engine, records, durable_only=durable_only)
        self._pursuit.begin()
        self._interval_s = min(max(max_staleness / 2, FOLLOW_INTERVAL_S_MIN), threading.TIMEOUT_MAX)
        self._pursuit.start(self._interval_s)

    @property
    def durable(self) -> Timestamp:
        """Every change below this time survives a crash: the writer has noted it. 0 if the writer's
        release does not note it."""
        self._require_open()
        assert self._pursuit is not None, "follow began it"
        return Timestamp(min(self._pursuit.durable(), self.upper))

    def refresh(self) -> Timestamp:
        """Catch up with the writer now, and return `upper`: every commit that had returned in the
        writer before this call is below it.

        Costs 30 us where nothing was written, and 5 us a commit otherwise. Raises as the reads do.
        """
        self._require_open()
        assert self._pursuit is not None, "follow began it"
        return self._pursuit.refresh()

    @property
    def since(self) -> Timestamp:
        """See `Store.since`."""
        return self._settled(super().since)

    @property
    def whole_since(self) -> Timestamp:
        """See `Store.whole_since`."""
        return self._settled(super().whole_since)

    def _settled(self, since: Timestamp) -> Timestamp:
        """`since`, once `upper` is above it: a move of the reader raises `upper` last."""
        if since >= self._committer.frontiers.upper:
            with self._committer.lock:
                pass  # the move has ended
        return since

    @property
    def is_waiting(self) -> bool:
        """Whether a key has expired and the writer has not deleted it yet. The writer does so at
        its next commit, or its next read of the newest state. A look at the clock, and a seek
        behind each move of `upper` if the store has keys that expire."""
        if not self._parts.reserve.has_expiries:
            return False
        upper = self.upper
        if upper != self._looked_at:
            self._next_due = self._committer.expiries.first(upper)
            self._looked_at = upper
        return self._next_due <= self._committer.now()

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once `self.upper` is above `upper`, `stop()` is true, or after `timeout` seconds.

        The writer hands over the timestamp of its commit, and the reader waits for it: then it
        reads the commit. Looks at the writer's files after 2 ms, and then less and less often, down
        to the pace of the reader. Raises as the reads do.
        """
        upper = INTEGER.check("upper", upper)
        seconds = WAIT.check("timeout", timeout)
        end = None if seconds is None else time.monotonic() + seconds
        pause_s = FOLLOW_WAIT_S
        while self.refresh() <= upper and not stop():
            left = pause_s if end is None else min(end - time.monotonic(), pause_s)
            if left <= 0:
                return
            super().wait_beyond(upper, timeout=left, stop=stop)
            pause_s = max(min(pause_s * 1.2, self._interval_s), FOLLOW_WAIT_S)

    @property
    def pursuit(self) -> Pursuit:
        """What moves the state of this reader."""
        assert self._pursuit is not None, "follow began it"
        return self._pursuit

    @property
    def has_ended(self) -> bool:
        """Whether no later look can succeed: the store was replaced by another copy, or removed."""
        return self._pursuit is not None and self._pursuit.is_ended

    def retire(self) -> None:
        """End the pursuit, and keep what is open readable: scans give their rows. Repeatable."""
        if self._pursuit is not None:
            self._pursuit.close()

    def close(self) -> None:
        """End the pursuit and all work on the store. Repeatable. The writer is not touched."""
        if self._pursuit is not None:
            self._pursuit.close()
        super().close()


# --------------------------------------------------------------------------------------------------
# The records that a store has in memory, brought up to the state of its engine.
#
# A store reads its records once and then changes them with each commit of its own. In a live reader
# the commits come from another process: the engine has caught up, and the records follow it here.
#
# Invariants
# 1. `since` and clears are taken first and `upper` last. A read that began before learns afterwards
#    whether its history is still whole.
# 2. The records are of the store that was opened, and it still has every commit that was shown. If
#    the store was put back from an older copy, reads raise `StaleReaderError`: two readers would
#    otherwise see two histories.
# 3. Records are read only if their family was written since.
# 4. The cache of newest values is told of each commit, or emptied, before `upper` shows it.

_POINTS: Final = frozenset({OP_PUT, OP_PUT_LARGE, OP_DELETE})
"""Events that change one key each."""


class LiveRecords:
    """The records of one live reader. The caller holds the locks of the committer and the
    engine."""

    def __init__(self, parts: Parts, engine: SecondaryEngine) -> None:
        """`parts` were made from the present state of `engine`."""
        self._parts = parts
        self._engine = engine
        self._meta = Meta(engine)
        self._opened = engine.opened
        self._format = self._meta.read(FORMAT)
        self._marks = {family: engine.marks(family) for family in (META, RANGES)}
        self._ranges = self._stored_ranges()
        self._records: list[tuple[list[bytes], list[bytes]]] | None = None
        """The records as they are stored, but for the notes of requests: a commit of another
        process has one, and no reader needs it."""
        self._stored_upper = self._meta.timestamp(UPPER)
        self._newest = parts.index.last()
        self.upper: int = parts.committer.upper
        """The first time that is not complete in the engine. Readers see it once it is
        published."""
        self.is_replaced = False
        """Whether the store was put back from an older copy."""

    def reload(self) -> None:
        """Take all records but `upper` as the engine has them now.

        Costs 0.1 ms, and 1 us for each change up to `FOLLOW_TOLD_MAX`; behind more changes the
        cache of newest values is emptied. If any record was written, it costs also 2 us an import,
        1 us a hold and 1 us a range tombstone, and 10 us for each import and hold that was written.
        """
        marks, self._marks = self._marks, {}  # an error leaves none: all is read again
        is_reopened = self._opened is not self._engine.opened
        shown = self._shown()
        now = {family: self._engine.marks(family) for family in (META, RANGES)}
        if is_reopened or marks.get(META) != now[META]:
            former, self._records = self._records, None
            records = self._stored_records()
            if records != former:
                self._reload_meta()
            self._records = records
        if is_reopened:
            self._require_same()
            self._opened = self._engine.opened
        if not self._parts.reserve.knows_all:  # the writer may have made the first one
            self._parts.reserve.look()
        newest = self._parts.index.last()
        upper = max(self._stored_upper, newest + 1, self._parts.committer.since + 1)
        if upper < self.upper:
            raise self._put_back()
        if is_reopened or marks.get(RANGES) != now[RANGES]:
            self._reload_ranges()
        if is_reopened or not marks or shown != self._shown():
            self._parts.committer.recent.forget(upper)
        else:
            self._tell_cache(newest, upper)
        self._newest, self.upper, self._marks = newest, upper, now

    def _shown(self) -> tuple[object, ...]:
        """What decides, beside points, which values are the newest ones."""
        parts = self._parts
        view = parts.versions.view
        return view.stamps, self._ranges, parts.committer.frontiers.floor, parts.reads.indexed_since

    def _tell_cache(self, newest: int, upper: int) -> None:
        """Tell the cache of newest values which keys the commits up to `newest` wrote."""
        if newest == self._newest:
            return
        recent, told = self._parts.committer.recent, FOLLOW_TOLD_MAX
        rows = self._parts.index.rows(since=self._newest, upto=newest)
        written = [each.row for each in islice(rows, told + 1)]
        if len(written) > told or not all(row.op in _POINTS for row in written):
            recent.forget(upper)
        else:
            recent.add(newest, {row.key: None for row in written})

    def _reload_meta(self) -> None:
        parts, meta = self._parts, self._meta
        frontiers, committer = parts.committer.frontiers, parts.committer
        since = meta.timestamp(SINCE)
        if since < frontiers.since or meta.read(FORMAT) != self._format:
            raise self._put_back()
        frontiers.move_since(since)
        parts.clears.reload()
        frontiers.raise_floor(parts.clears.newest)
        parts.reads.raise_index_floor(meta.timestamp(INDEX_FLOOR))
        coming = stored_policy(meta, committer.where).coming
        committer.policy = read_only_policy(committer.where, coming=coming, is_live=True)
        parts.index.generations.reload()
        committer.capture.reload()
        parts.imports.reload()
        parts.holds.reload()
        self._stored_upper = meta.timestamp(UPPER)

    def _require_same(self) -> None:
        """Raise `StaleReaderError` unless the store has the newest commit that was shown, or has
        given it up since."""
        index, newest = self._parts.index, self._newest
        if newest > self._parts.reads.indexed_since and not any(
            index.headers(since=newest - 1, upto=newest)
        ):
            raise self._put_back()

    def _put_back(self) -> StaleReaderError:
        path = str(self._engine.path)
        self.is_replaced = True
        return StaleReaderError(
            path,
            f"the store at {path} was replaced by another copy: it lacks history before "
            f"{Timestamp(self.upper)} that this reader has shown",
            "call kvstore.follow again, and forget the answers of the replaced copy",
        )

    def _reload_ranges(self) -> None:
        """Show the new range tombstones. If GC or a clear has removed or cut some, the whole map is
        built anew."""
        before, self._ranges = self._ranges, self._stored_ranges()
        versions = self._parts.versions
        if before.items() - self._ranges.items():
            versions.publish_fragments(Fragments.of(_decoded(self._ranges.items())))
        else:
            versions.publish_ranges(_decoded(self._ranges.items() - before.items()))

    def _stored_records(self) -> list[tuple[list[bytes], list[bytes]]]:
        cursors = self._engine.cursor(META, b"", NOTES[0]), self._engine.cursor(META, NOTES[1])
        return [chunk for cursor in cursors for chunk in chunks(cursor)]

    def _stored_ranges(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for keys, values in chunks(self._engine.cursor(RANGES)):
            found.update(zip(keys, values, strict=True))
        return found


def _decoded(stored: Iterable[tuple[bytes, bytes]]) -> list[RangeTombstone]:
    return [RangeTombstone(*decode_range(key, value)) for key, value in sorted(stored)]


# --------------------------------------------------------------------------------------------------
# The pursuit: a live reader catches up with the process that writes its store.
#
#     pursuing <--a look fails, the next one succeeds--> suspended
#         |                                                  |
#         `------ the store is gone, or another one ---------`---> ended
#
# A thread looks at the writer's files at short intervals and moves the reader's state. `refresh`
# does the same at once. Nothing is asked of the writer, so a reader that is killed, stopped or slow
# does not hold it up.
#
# Invariants
# 1. One state is published at a time, whole, under the locks of the committer and the engine.
# 2. `upper` never goes back. With `durable_only` it stays at or below the writer's durable mark.
# 3. While the state may be torn, every read raises the error that is the reason.

_FINAL: Final = (UsageError, CorruptionError)
"""Errors that another look does not mend."""


class Pursuit:
    """Moves the state of one live reader."""

    def __init__(
        self,
        committer: Committer,
        engine: SecondaryEngine,
        records: LiveRecords,
        *,
        durable_only: bool,
    ) -> None:
        self._committer = committer
        self._engine = engine
        self._records = records
        self._durable_only = durable_only
        self._is_behind = False
        """Whether the records may be older than the state of the engine."""
        self.is_ended = False
        """Whether no later look can succeed."""
        self._durable = 0
        self._failures = Failures("kvstore.follow", Clock())
        committer.meters.watch("follow", self._failures)
        self.may_rest: Callable[[], bool] = lambda: False
        """Asked after each look: whether the next one may come later. Who lets it rest wakes it."""
        self._stopping, self._alarm = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        own(self, f"the live reader of {engine.path}")

    def begin(self) -> None:
        """Show the first state, of which no reader knows yet. Raises as `refresh`."""
        committer = self._committer
        durable = self.durable()
        if self._durable_only:
            if not durable:
                raise UsageError(
                    f"the store at {self._engine.path} has no durable mark",
                    "open it to write once with this release, or follow it without durable_only",
                )
            committer.frontiers.upper = Timestamp(min(durable, committer.upper))
            self._require_durable()
        self._engine.keep_a_reader()

    def durable(self) -> int:
        """The durable mark of the writer. It never goes back."""
        self._durable = max(self._durable, read_durable_mark(self._engine.path))
        return self._durable

    def start(self, interval_s: float) -> None:
        """Catch up every `interval_s` seconds, in a thread."""
        self._thread = threading.Thread(
            target=self._run, args=(interval_s,), name="kvstore-follow", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread. Repeatable."""
        self._stopping.set()
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def wake(self) -> None:
        """End a rest: the next look comes now."""
        self._alarm.set()

    def refresh(self) -> Timestamp:
        """Take the writer's state of now; returns `upper`. See `LiveReader.refresh`."""
        health, frontiers = self._committer.health, self._committer.frontiers
        with self._committer.lock, self._engine.lock:
            if self._stopping.is_set():
                raise ClosedError(self._committer.where)
            if self.is_ended:
                health.require()
            try:
                self._move()
                if not frontiers.is_sound:
                    health.suspend(None)
            except KVStoreError as error:
                self.is_ended = isinstance(error, _FINAL) or self._records.is_replaced
                health.suspend(error)
                raise
            except BaseException as error:  # an interrupt: the state may be half moved
                health.suspend(self._stale(f"a refresh was interrupted: {type(error).__name__}"))
                raise
        return frontiers.upper

    def _move(self) -> None:
        committer, records = self._committer, self._records
        if self._engine.catch_up() or self._is_behind:
            self._is_behind = True
            records.reload()
            self._engine.keep_a_reader()
            self._is_behind = False
        upper = records.upper
        if self._durable_only:
            upper = min(upper, self.durable())
        if upper > committer.frontiers.upper:
            committer.show_upto(Timestamp(upper))
        self._require_durable()

    def _require_durable(self) -> None:
        """Raise while the writer has given up the history of the durable commits, and has not
        synced the later ones yet."""
        since, upper = self._committer.since, self._committer.upper
        if upper <= since:
            raise self._stale(
                f"history below {since} of {self._engine.path} is gone, and the store is durable "
                f"up to {upper} only"
            )

    def _stale(self, what: str) -> StaleReaderError:
        return StaleReaderError(str(self._engine.path), what, "try again after `max_staleness`")

    def _run(self, interval_s: float) -> None:
        longest_s = max(interval_s, FOLLOW_RETRY_S_MAX)
        pause_s = interval_s
        rest_s = 0.0
        while True:
            self._alarm.wait(rest_s or self._failures.delay_s(pause_s, longest_s))
            self._alarm.clear()
            if self._stopping.is_set():
                return
            try:
                began = time.perf_counter()
                self.refresh()
                self._failures.succeeded()
                # RocksDB keeps the interpreter for as long as it catches up. Behind a long step the
                # next one comes sooner, so that it is short.
                took_s = time.perf_counter() - began
                pause_s = min(interval_s, max(interval_s / 8, FOLLOW_INTERVAL_S_MIN))
                pause_s = pause_s if took_s > interval_s / 4 else interval_s
                longer_s = min(max(4 * rest_s, FOLLOW_REST_S), FOLLOW_REST_S_MAX)
                rest_s = longer_s if self.may_rest() else 0.0
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # noted, and told to every reader
                rest_s = 0.0
                self._failures.note(f"following {self._engine.path}", error)
                if not isinstance(error, KVStoreError):  # a bug of ours must not look like silence
                    self.is_ended = True
                    self._committer.health.suspend(
                        StorageError(
                            f"following {self._engine.path} failed: {error!r}",
                            "close the reader, and follow the store again",
                        )
                    )
                if self.is_ended:
                    return
