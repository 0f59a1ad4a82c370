"""`pull` brings a store up to the pushes of a root, in a thread of its own.

    look for the next event -> fetch its import -> add it and move the position -> report

Invariants
1. The position moves in the step that adds or reverts a push (`kvstore.positions`). So each push is
   added once, also after kills, and a store that is put back from a backup takes what it lacks.
2. A push that this store refuses changes nothing but the position, and the next push is taken. With
   `on_refusal="wait"` it changes nothing, and is tried again until it is reverted or expires.
3. Pushes are added in the order of their numbers. A push that was refused because the disk is full
   is tried again at each look that finds no event and more free space, until this push or a later
   one is added.
4. A failure that may pass, or a storage that refuses access, moves nothing: it is logged, told in
   the status, and tried again after a pause.
5. The thread ends with the `with` block, also in the middle of a fetch, which continues later, and
   beside a bucket that does not answer.
6. The store's directory has the fetched files of one push at most. They stay while this push may
   still be added, so no try fetches them again. A store in memory fetches them at each try.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from bulk.addresses import Staging
from bulk.definitions import require_definitions
from bulk.fetching import remove_fetched
from bulk.ingest import ingest_pushed
from bulk.manifest import Manifest
from bulk.pushes.amended import AmendedPush
from bulk.pushes.log import PUSH, REVERT, Ahead, Push, PushEvent
from bulk.pushes.place import PushPlace, PushState, first_refused, newest_told, with_state
from bulk.pushes.pushes import Pushes, pushes_until
from bulk.pushes.reverting import Reverts
from bulk.pushes.statuses import ERROR_CHARS_MAX, require_name
from bulk.stages import StageTimes
from kvstore.arguments import require_count, require_seconds, require_wait
from kvstore.background import Failures
from kvstore.clock import Clock
from kvstore.errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    CorruptionError,
    ForkedError,
    FormatVersionError,
    HistoryGoneError,
    ImportRefusedError,
    KVStoreError,
    OutOfSpaceError,
    UsageError,
)
from kvstore.errors.system import storage_errors
from kvstore.forks import own
from kvstore.limits import PULL_EVERY_S, PULL_PAUSE_S_MAX, PUSHES_TOLD
from kvstore.mvcc import WriteSet
from kvstore.notices import notice
from kvstore.storage.contract import FAILURES
from kvstore.store import Store
from kvstore.timestamp import Timestamp

OnRefusal: TypeAlias = Literal["pass", "wait"]
_ENDS: Final = (ClosedError, ForkedError)
_TAKEN_NAME: Final = "give each store a name of its own"
_IN_THE_PARENT: Final = "the process that opened the store pulls; begin a puller after the fork"
_EXPIRED: Final = "keep as many pushes as a store may be away for"
_REFUSALS: Final = (UsageError, OutOfSpaceError, CorruptionError, HistoryGoneError)


class _Stopped(Exception):  # noqa: N818  # a signal to the thread itself
    """The puller was closed during a fetch."""


def pull(
    store: Store,
    url: Staging,
    *,
    name: str,
    shard: int = 0,
    every: float | None = None,
    on_refusal: OnRefusal = "pass",
    options: Mapping[str, Any] | None = None,
    patience: float | None = None,
) -> Puller:
    """Keep `store` up to the pushes below `url`, until the puller is closed.

    `name` names the store in the statuses, and `shard` is the shard that it takes. The bucket is
    looked at every `every` seconds (`PULL_EVERY_S` by default), at one request each. The disk needs
    room for one push. A push that the store refuses is passed; with `on_refusal="wait"` later
    pushes wait until it is added, reverted or expired.

    `options` and `patience` are as in `bulk.Import.create`. Use it as a context manager. Raises
    `UsageError` at once for a bad argument or URL, and for a directory whose parent is missing;
    later failures are logged, and told by `status`.
    """
    pushes = Pushes(url, options=options, patience=patience)
    pushes.place.require_parent()
    puller = Puller(store, pushes, name=name, shard=shard, every=every, on_refusal=on_refusal)
    puller.start()
    return puller


class Puller:
    """The worker of one store. `pull` starts it; `step` does one step in the thread of a caller."""

    def __init__(
        self,
        store: Store,
        pushes: Pushes,
        *,
        name: str,
        shard: int = 0,
        every: float | None = None,
        on_refusal: OnRefusal = "pass",
    ) -> None:
        if on_refusal not in ("pass", "wait"):
            raise UsageError(f"on_refusal={on_refusal!r}", "pass 'pass' or 'wait'")
        if not isinstance(store, Store):
            raise UsageError(
                f"a Store pulls, not {type(store).__name__}", "pull in the process that has it open"
            )
        self._waits = on_refusal == "wait"
        self.name = require_name(name)
        self.shard = require_count(shard, name="shard", least=0)
        self._every = PULL_EVERY_S if every is None else require_seconds(every, name="every")
        self._stop = threading.Event()
        self._store, self._pushes = store, pushes_until(pushes, self._stop)
        self._failures = Failures("kvstore.pull", Clock())
        store.upkeep.watch("pull", self._failures)
        # Take the lock, never the condition: a signal in the entry of a condition leaves it locked.
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        log = self._pushes.log
        self._place = PushPlace(store, log, self.shard)
        self._reverts = Reverts(store, log, self._place, self.shard, self._tell)
        self._ahead = Ahead(log)
        self._reported = self._end = 0
        self._is_told = self._is_checked = False
        self._failing: dict[str, str] = {}
        """The push that cannot be taken at present, and the reason. It has no number where the
        event cannot be read."""
        self._free_then: int | None = None
        """The free bytes of the disk when it was too full for a push."""
        self._spent: dict[str, dict[str, float]] = {}
        """The seconds of the stages of the push that was taken last."""
        own(self, f"the puller of {pushes.where}", remedy=_IN_THE_PARENT)

    # -- the worker -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvstore-pull", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for the thread. A fetch ends at its next piece, and a call that the
        storage does not answer is given up. Repeatable."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Puller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, number: int, *, timeout: float | None = None) -> None:
        """Wait until this store has taken or refused a push. Raises `BusyError` at the timeout."""

        def has_passed() -> bool:
            return str(number) in self._place.fields()["pushes"]

        with self._lock:
            seconds = require_wait(timeout)
            if not self._moved.wait_for(has_passed, seconds):
                remedy = "look at the puller's status, or wait longer (timeout=)"
                what = f"push {number} is not taken"
                raise BusyError(what, waited_s=seconds or 0.0, remedy=remedy)

    @property
    def status(self) -> dict[str, Any]:
        """The position, what became of the last pushes, and the failures that were tried again."""
        return {**self._place.fields(), **self._failures.figures("pull")}

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                did = self.step()
                self._failures.succeeded()
                pause = 0.0 if did else self._every
            except (_Stopped, *_ENDS):
                return
            except Exception as error:  # noqa: BLE001  # nobody waits for this thread
                self._failures.note(f"pulling {self._pushes.where}", error)
                pause = self._failures.delay_s(self._every, PULL_PAUSE_S_MAX)
            self._stop.wait(pause)

    # -- one step ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Take the next event of the log; False if there is none. A look without an event costs one
        request, and a few more where a refused push may be added now. An event costs one more
        request for the end of the log, which the metrics tell."""
        fields = self._place.fields()
        event = self._next(fields["log"] + 1)
        if not self._is_told:
            self._report()
        if event is not None:
            self._end = self._pushes.log.end(max(self._end, event.position))
            self._free_then = None
        self._note_pending()
        self._sweep(event)
        if event is None:
            if not self._try_again(fields):
                return False
        elif event.kind == PUSH:
            self._take(event, fields)
        elif event.kind == REVERT:
            self._reverts.take_back(event, fields)
        else:
            self._place.move(fields, event.number)
        self._log(fields["pushes"])
        self._note_pending()
        self._sweep()
        with self._lock:
            self._moved.notify_all()
        self._report()
        return True

    def _sweep(self, event: PushEvent | None = None) -> None:
        """Remove the files that were fetched for pushes of the past. The files of the push that
        `event` brings stay, or else of the push that is tried again."""
        if self._store.path is not None:
            pushes = self._place.fields()["pushes"]
            is_push = event is not None and event.kind == PUSH
            kept = str(event.number) if event is not None and is_push else first_refused(pushes)
            old = (told["import"] for number, told in pushes.items() if number != kept)
            remove_fetched(self._store, (each for each in old if each is not None))

    def _log(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        """Log the pushes that have another state, or another error, than `before`."""
        for number, told in self._place.fields()["pushes"].items():
            was = before.get(number, {})
            if any(told[each] != was.get(each) for each in ("state", "error")):
                level = logging.WARNING if told["error"] else logging.INFO
                facts = {"pushes": self._pushes.where, "name": self.name, "push": int(number)}
                what = f"push {told['state']}"
                notice("kvstore.pull", what, level=level, **facts, error=told["error"])

    def _note_pending(self) -> None:
        pending = max(self._end - self._place.fields()["log"], 0)
        self._store.positions.note_pending(self._pushes.log.where, pending)

    def _next(self, position: int) -> PushEvent | None:
        """The event of a position. An event that this release cannot read, and a log of which the
        store has other pushes, are told in the status: no later push is taken."""
        try:
            if not self._is_checked:
                self._place.require_log()
                self._is_checked = True
            event = self._pushes.log.event(position)
        except (CorruptionError, FormatVersionError) as error:
            self._tell_failure("", error)
            raise
        if self._failing.pop("", None) is not None:
            self._is_told = False
        return event

    def _try_again(self, fields: dict[str, Any]) -> bool:
        """Take the first push that was refused and may still be added. Whether that changed
        anything."""
        first, free = first_refused(fields["pushes"]), self._free_bytes()
        if first is None or (free is not None and free <= (self._free_then or 0)):
            return False
        event = self._pushes.log.event(fields["pushes"][first]["retry"])
        if event is None or event.push is None:
            raise CorruptionError(self._pushes.log.where, f"the event of push {first} is gone")
        self._take(event, fields)
        return self._place.fields() != fields

    def _take(self, event: PushEvent, fields: dict[str, Any]) -> None:
        """Add the push of an event, or refuse it."""
        push, times = event.push, StageTimes()
        assert push is not None
        moved = {**fields, "log": max(event.position, fields["log"])}

        def after(added: Timestamp) -> WriteSet:
            state = PushState("added", at=added, import_id=manifest.import_id)
            made = with_state({**moved, "shards": push.shards}, push.number, state)
            return self._place.moving(made)

        amends = None
        if not push.how.is_plain:
            amends = AmendedPush(self._store, push.how, self._place.stamps(), self._tell)
        try:
            manifest = self._checked(push, fields)
            bucket = self._pushes.bucket(push.job, self.shard)
            added = ingest_pushed(
                self._store,
                bucket,
                manifest,
                after,
                amends=amends,
                tell=self._tell,
                times=times,
                keeps=self._waits,
            )
        except _ENDS:
            raise
        except AccessDeniedError as error:
            self._tell_failure(str(push.number), error)
            raise
        except _REFUSALS as error:
            is_new, ahead = event.position > fields["log"], self._ahead
            if self._waits and is_new and not (ahead.is_expired(event) or ahead.is_reverted(event)):
                self._tell_failure(str(push.number), error)
                raise
            reason: KVStoreError = error
            if isinstance(error, ImportRefusedError) and ahead.is_expired(event):
                reason = ImportRefusedError(error.staging, "its files were expired", _EXPIRED)
            self._refuse(event, push, moved, reason)
            return
        self._failing = {}
        spent = {stage: round(seconds, 3) for stage, seconds in times.seconds.items()}
        self._spent = {str(push.number): spent}
        if self._place.state_of(push.number) != "added":  # it was added by hand before
            self._store.positions.write(after(added))

    def _tell_failure(self, number: str, error: KVStoreError) -> None:
        """Put the reason why a push waits into the status. The bucket may refuse the status too."""
        told = {number: _text_of(error)}
        if told != self._failing:
            self._failing = told
            with suppress(*FAILURES):
                self._report()

    def _checked(self, push: Push, fields: dict[str, Any]) -> Manifest:
        """The manifest of this store's shard. Raises an error that refuses the push."""
        known = fields["shards"]
        if self.shard >= push.shards or known not in (None, push.shards):
            taken = f"shard {self.shard}" + ("" if known is None else f" of {known}")
            raise UsageError(
                f"push {push.number} has {push.shards} shards, and this store takes {taken}",
                "push with the same number of shards, or fill a new store",
            )
        bucket, sealed = self._pushes.bucket(push.job, self.shard), push.imports[self.shard]
        manifest = bucket.manifest()
        if (manifest.import_id, manifest.checksum) != (sealed.import_id, sealed.checksum):
            raise bucket.refusal("another import lies there than was pushed")
        push.how.require_rows([manifest])
        if not push.how.is_plain:
            require_definitions(self._store, manifest.tables, bucket.where)
            tables = [self._store.table(each.table) for each in manifest.tables]
            push.how.require_tables(table.codec() for table in tables)
        self._require_told(push, fields["pushes"])
        return manifest

    def _require_told(self, push: Push, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise `UsageError` if the position has forgotten pushes that were added since the build:
        their rows would be taken for newer writes."""
        newest = [told[number]["at"] for number in newest_told(told)]
        times = [at for at in newest if at is not None]
        built_at = push.how.built_at
        if built_at is not None and len(told) >= PUSHES_TOLD and built_at < min(times, default=0):
            raise UsageError(
                f"push {push.number} was built before the last {PUSHES_TOLD} pushes",
                "read the data again, and push it with a later built_at",
            )

    def _refuse(
        self, event: PushEvent, push: Push, moved: dict[str, Any], error: KVStoreError
    ) -> None:
        """Take back a half-added import, and pass the push."""
        may_pass, import_id = isinstance(error, OutOfSpaceError), None
        if self.shard < push.shards:
            import_id = push.imports[self.shard].import_id
            known = self._store.imports.get(import_id)
            if known is not None and known.added is None:
                self._store.imports.abort(known.import_id)
        self._free_then = self._free_bytes() if may_pass else None
        known = moved["pushes"].get(str(push.number))
        if may_pass and known is not None:
            return  # it was refused for this reason before, and is tried again
        retry = event.position if may_pass else None
        state = PushState("refused", error=_text_of(error), import_id=import_id, retry=retry)
        self._failing = {}
        self._place.write(with_state(moved, push.number, state))

    def _tell(self, _: str) -> None:
        if self._stop.is_set():
            raise _Stopped

    # -- the report -------------------------------------------------------------------------

    def _report(self) -> None:
        """Put the status. A failure that may pass is tried again at the next step."""
        self._is_told = False
        fields = self._place.fields()
        told_of = fields["pushes"] if self._is_checked else {}  # of another log
        pushes = {
            number: {
                "state": told["state"],
                "error": told["error"],
                "at": told["at"],
                "seconds": self._spent.get(number, {}),
            }
            for number, told in told_of.items()
        }
        failing = dict(self._failing)
        blocked = failing.pop("", "")
        for number, error in failing.items():
            pushes[number] = {"state": "waiting", "error": error, "at": None, "seconds": {}}
        status = {
            "store": self._store.store_id,
            "shard": self.shard,
            "position": fields["log"],
            "told": Clock().wall_ns(),
            "free": self._free_bytes(),
            "error": blocked,
            "pushes": pushes,
        }
        if not self._reported:
            self._reported = self._pushes.statuses.last(self.name)
        written = self._pushes.statuses.write(self.name, status, after=self._reported)
        self._reported, self._is_told = written.number, True
        if written.other is not None:
            what = f"store {written.other} reports as {self.name!r} too, to {self._pushes.where}"
            self._failures.note("a report", UsageError(what, _TAKEN_NAME), delays=False)

    def _free_bytes(self) -> int | None:
        path = self._store.path
        if path is None:
            return None
        with storage_errors(str(path)):
            return shutil.disk_usage(path).free


def _text_of(error: KVStoreError) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
