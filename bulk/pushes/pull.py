"""`pull` brings a store up to the pushes of a root: its place in the log, amendments by the mode of
a push, reverts.

    look for the next event -> fetch its import -> add it and move the position -> report

Invariants
1. The position moves in the step that adds or reverts a push (`kvstore.timeline.reserved`). So
   each push is added once, also after kills, and a store that is put back from a backup takes
   what it lacks.
2. A push that this store refuses changes nothing but the position, and the next push is taken.
   With `on_refusal="wait"` it changes nothing, and is tried again until it is reverted or
   expires.
3. Pushes are added in the order of their numbers. A push that was refused because the disk is
   full is tried again at each look that finds no event and more free space, until this push or a
   later one is added.
4. A failure that may pass, or a storage that refuses access, moves nothing: it is logged, told in
   the status, and tried again after a pause.
5. The thread ends with the `with` block, also in the middle of a fetch, which continues later,
   and beside a bucket that does not answer.
6. The store's directory has the fetched files of one push at most. They stay while this push may
   still be added, so no try fetches them again. A store in memory fetches them at each try.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kvstore.base.arguments import NUMBER, SECONDS, WAIT, ArgumentKind, word
from kvstore.base.background import Failures
from kvstore.base.clock import Clock
from kvstore.base.forks import own
from kvstore.base.notices import notice
from kvstore.base.span import RESERVED, Span, merge_spans
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.bulk.bucket import remove_fetched, require_space
from kvstore.bulk.gate import Gate
from kvstore.bulk.ingest import ingest_pushed, staging_beside
from kvstore.bulk.manifest import Manifest
from kvstore.bulk.part import UNFINISHED_SUFFIX, PartWriter, SstFile
from kvstore.bulk.progress import StageTimes
from kvstore.bulk.pushes.push_log import (
    ERROR_CHARS_MAX,
    PUSH,
    REVERT,
    STORE_NAME,
    Ahead,
    Push,
    PushEvent,
    PushLog,
    PushMode,
)
from kvstore.bulk.pushes.pushes import Pushes, import_id_of, pushes_until
from kvstore.bulk.staging import Staging, check_definitions
from kvstore.changes.events import Operation
from kvstore.codec.keys import TAIL_BYTES, TOMBSTONE, frame, unframe_all
from kvstore.engine.loose_files import LooseFiles
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
    NoBucketError,
    OutOfSpaceError,
    UsageError,
    storage_errors,
)
from kvstore.limits import PULL_EVERY_S, PULL_PAUSE_S_MAX, PUSHES_TOLD, SETTLE_ROWS_MAX
from kvstore.mvcc import Version, WriteSet
from kvstore.mvcc.expiry_records import CARRIED, EXPIRY, carried_key, decode_due, waiting_key
from kvstore.remote.control import StoreOrClient, client_of, present
from kvstore.storage.contract import FAILURES
from kvstore.store import Store
from kvstore.timeline.committer import After
from kvstore.timeline.import_records import Amend, FoundKeys, ImportRecord, RowChanges
from kvstore.timeline.reserved import FIRST_ROW

OnRefusal: TypeAlias = Literal["pass", "wait"]
ON_REFUSAL: Final[ArgumentKind[OnRefusal]] = word("pass", "wait")
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
    check: Gate | Mapping[str, Any] | None = None,
) -> Puller:
    """Keep `store` up to the pushes below `url`, until the puller is closed.

    `name` names the store in the statuses, and `shard` is the shard that it takes. The bucket is
    looked at every `every` seconds (`PULL_EVERY_S` by default), at one request each. The disk needs
    room for one push. A push that the store refuses is passed; with `on_refusal="wait"` later
    pushes wait until it is added, reverted or expired. `check` is a gate that each push must pass,
    as in `bulk.ingest`: a push that does not is refused, and its status tells the checks.

    `options` and `patience` are as in `bulk.Import.create`. Use it as a context manager. Raises
    `UsageError` at once for a bad argument or URL, and for a directory whose parent is missing;
    later failures are logged, and told by `status`.
    """
    pushes = Pushes(url, options=options, patience=patience)
    pushes.place.require_parent()
    how: dict[str, Any] = {"every": every, "on_refusal": on_refusal, "check": check}
    puller = Puller(store, pushes, name=name, shard=shard, **how)
    puller.start()
    return puller


class Puller:
    """The worker of one store. `pull` starts it; `step` does one step in the thread of a caller."""

    def __init__(
        self,
        store: StoreOrClient,
        pushes: Pushes,
        *,
        name: str,
        shard: int = 0,
        every: float | None = None,
        on_refusal: OnRefusal = "pass",
        check: Gate | Mapping[str, Any] | None = None,
    ) -> None:
        ON_REFUSAL.check("on_refusal", on_refusal)
        given = present(store)
        if client_of(given) is not None or not isinstance(given, Store):
            raise UsageError(
                f"{given!r} is open in another process",
                "pull there: kvstore serve --pull URL, or bulk.pull(store, url, name=...)",
            )
        self._waits = on_refusal == "wait"
        self._gate = None if check is None else Gate.of(check)
        self.name = STORE_NAME.check("name", name)
        self.shard = NUMBER.check("shard", shard)
        self._every = PULL_EVERY_S if every is None else SECONDS.check("every", every)
        self._stop = threading.Event()
        self._store, self._pushes = given, pushes_until(pushes, self._stop)
        self._failures = Failures("kvstore.pull", Clock())
        given.upkeep.watch("pull", self._failures)
        # Take the lock, never the condition: a signal in the entry of a condition leaves it locked.
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        log = self._pushes.log
        self._place = PushPlace(given, log, self.shard)
        self._reverts = Reverts(given, log, self._place, self.shard, self._tell)
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
            seconds = WAIT.check("timeout", timeout)
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
        push, times, began = event.push, StageTimes(), perf_counter()
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
                gate=self._gate,
            )
        except _ENDS:
            raise
        except (AccessDeniedError, NoBucketError) as error:
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
        if self._place.state_of(push.number) != "added":  # it was added by hand before
            self._store.positions.write(after(added))
        times.add_rest("other", perf_counter() - began)
        spent = {stage: round(seconds, 3) for stage, seconds in times.seconds.items()}
        self._spent = {str(push.number): spent}

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
            check_definitions(self._store, manifest.tables, bucket.where)
            tables = [self._store.table(each.table) for each in manifest.tables]
            push.how.require_tables(table.codec() for table in tables)
        self._require_remembered(push, fields["pushes"])
        return manifest

    def _require_remembered(self, push: Push, told: Mapping[str, Mapping[str, Any]]) -> None:
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


# --------------------------------------------------------------------------------------------------
# The place of a store in the log of pushes: how far it has come, and what became of the last
# pushes.
#
#     {"log": events passed, "shards": k | null, "pushes": {"<push>":
#         {"state", "error", "at": ns, "added": ns, "import", "retry": event, "by_rows": bool,
#          "event": event}}}
#
# `at` is the time of the state, and `added` the stamp of a reverted push. `retry` is the event of a
# refused push that may still be added. `by_rows` tells how a push was reverted. `event` is the
# event that made the state.
#
# The place tells the newest pushes, and the pushes whose states are the newest: an old push that is
# reverted is among them.
#
# Invariants
# 1. The place moves in the step that adds or reverts a push (`kvstore.timeline.reserved`).
# 2. A puller that begins refuses a log that lacks the newest push of the place: pushes of a log
#    that was put back from an older copy take the numbers of others, and the store would pass them.

_TAKEN: Final = ("added", "reverted")


class PushState(NamedTuple):
    """The state of one push in a store, as the place of the store has it."""

    state: str
    error: str = ""
    at: Timestamp | None = None
    added: Timestamp | None = None
    import_id: int | None = None
    retry: int | None = None
    by_rows: bool = False

    def fields(self) -> dict[str, Any]:
        """The fields of the state, as they are stored."""
        fields = self._asdict()
        fields["import"] = fields.pop("import_id")
        return {**fields, "error": self.error[:ERROR_CHARS_MAX]}


class PushPlace:
    """The place of `store` in a log, for one shard."""

    def __init__(self, store: Store, log: PushLog, shard: int) -> None:
        self._store, self._log, self._shard = store, log, shard
        self._root: str | None = None

    @property
    def name(self) -> str:
        """The name of the position. The first call costs a get."""
        if self._root is None:
            self._root = self._log.root_id()
        return f"pushes/{self._root}/{self._shard}"

    def fields(self) -> dict[str, Any]:
        """The place as it is stored."""
        found = self._store.positions.get(self.name)
        if found is None:
            return {"log": 0, "shards": None, "pushes": {}}
        return {
            "log": found.integer("log"),
            "shards": found.optional("shards", int),
            "pushes": found.field("pushes", dict),
        }

    def state_of(self, number: int) -> str | None:
        """The state of a push; None if the place does not tell it."""
        told = self.fields()["pushes"].get(str(number))
        return None if told is None else str(told["state"])

    def require_log(self) -> None:
        """Raise `CorruptionError` if the log lacks the newest push that this store has added: it
        was put back from an older copy. Costs a get where the store has added a push."""
        told = self.fields()["pushes"]
        newest = max((int(n) for n in told if told[n]["state"] == "added"), default=0)
        if not newest or not (position := told[str(newest)].get("event")):
            return
        event = self._log.event(position)
        if event is None or (
            event.push is not None
            and (event.number == newest or str(event.number) not in told)
            and not event.push.has_import(self._shard, told[str(newest)]["import"])
        ):
            raise CorruptionError(
                self._log.where,
                f"push {newest}, which this store has added, is not in the log: the log was put "
                "back from an older copy",
                "put back the newest copy of all its files, or push to another URL and pull from "
                "there",
            )

    def stamps(self) -> PushStamps:
        """The stamps of the pushes that the store has taken."""
        return PushStamps.of(self.fields()["pushes"].values())

    def moving(self, fields: dict[str, Any]) -> WriteSet:
        """The writes that move the place, to be committed with the rows of a push."""
        return self._store.positions.moving(self.name, fields)

    def move(
        self, fields: dict[str, Any], number: int, state: PushState | None = None
    ) -> Timestamp:
        """Pass the next event, which is about push `number`. There are no rows."""
        moved = {**fields, "log": fields["log"] + 1}
        return self.write(moved if state is None else with_state(moved, number, state))

    def write(self, fields: dict[str, Any]) -> Timestamp:
        """Move the place in a commit of its own."""
        return self._store.positions.move(self.name, fields)


def with_state(fields: dict[str, Any], number: int, state: PushState) -> dict[str, Any]:
    """The place with another state of a push. The oldest pushes and states are forgotten."""
    told = {**state.fields(), "event": fields["log"]}
    pushes = {**fields["pushes"], str(number): told}
    states = sorted(pushes, key=lambda each: int(pushes[each].get("event") or 0))
    kept = {*newest_told(pushes), *states[-PUSHES_TOLD:]}
    return {**fields, "pushes": {each: pushes[each] for each in pushes if each in kept}}


def newest_told(pushes: Iterable[str]) -> list[str]:
    """The newest of the pushes that a place tells: it has forgotten none between them."""
    return sorted(pushes, key=int)[-PUSHES_TOLD:]


def require_known_since(pushes: Mapping[str, Mapping[str, Any]], event: int) -> None:
    """Raise `UsageError` if a place may have forgotten a push whose state came after `event`."""
    events = sorted(int(told.get("event") or 0) for told in pushes.values())
    if len(events) >= PUSHES_TOLD and event < events[-PUSHES_TOLD]:
        raise UsageError(
            f"{PUSHES_TOLD} pushes were added or reverted since, and older states are forgotten",
            "push the right values",
        )


def first_refused(pushes: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first of the pushes that were refused and may still be added: no later push was."""
    last = max((int(n) for n, told in pushes.items() if told["state"] in _TAKEN), default=0)
    waiting = [n for n, told in pushes.items() if told["retry"] and int(n) > last]
    return min(waiting, key=int, default=None)


# --------------------------------------------------------------------------------------------------
# Keys of a store that were written after a time, by anything but a push.
#
# The change index names the keys, so the search costs what changed. Where the index is not whole,
# as in a store that was restored since, a pass over the versions finds them.
#
# Invariants
# 1. A row of a push has the stamp of the push, in every store: natively, and where a backup brought
#    it. So the stamps that the position of a store has tell pushed rows from live ones.
# 2. A reverted push has left versions at two stamps: when it was added and when it was reverted.
#    They are passed over: a reader sees a value of the newest version at another stamp. Where GC
#    has taken that version, the version of a revert has its value, unless a push below was reverted
#    later.
# 3. A push may have a delete over a key that is dead already: a service deleted the key after the
#    pass of a replace, or the job did not know that it is gone. Such a delete changes nothing, so
#    the delete below it is the last write.


@dataclass(frozen=True)
class PushStamps:
    """The stamps of the pushes that a store has taken. `standing` has the stamps of pushes that
    hold; `reverts` has two stamps of each reverted push, when it was added and when reverted."""

    standing: frozenset[int] = frozenset()
    reverts: frozenset[tuple[int, int]] = frozenset()

    @cached_property
    def passed(self) -> frozenset[int]:
        """The stamps of reverted pushes, and of their reverts."""
        return frozenset(chain(*self.reverts))

    def has(self, timestamp: int) -> bool:
        """Whether a push was added or reverted then."""
        return timestamp in self.standing or timestamp in self.passed

    @classmethod
    def of(cls, told: Iterable[Mapping[str, Any]]) -> PushStamps:
        """The stamps that a position has."""
        standing, reverts = set[int](), set[tuple[int, int]]()
        for each in told:
            if each["state"] == "added":
                standing.add(each["at"])
            elif each["state"] == "reverted":
                reverts.add((each.get("added") or each["at"], each["at"]))
        return cls(frozenset(standing), frozenset(reverts))

    def without(self, added: int) -> PushStamps:
        """The stamps as they are once the push that was added at `added` is reverted."""
        return PushStamps(self.standing - {added}, self.reverts | {(added, TIMESTAMP_MAX)})

    def last_write(self, store: Store, key: bytes, at: Timestamp) -> LastWrite:
        """The write that made the value of `key` which a reader sees at `at`. O(versions)."""
        for version in store.history(key):
            if version.timestamp <= at and version.timestamp not in self.passed:
                return LastWrite(version.timestamp, version.value)
        return LastWrite(Timestamp(0), None)

    def is_live(self, store: Store, key: bytes, at: Timestamp, *, since: int) -> bool:
        """Whether what a reader sees of `key` at `at` was written after `since` by anything but a
        push. O(versions)."""
        pushed: Version | None = None
        for version in store.history(key):
            if version.timestamp > at or version.timestamp in self.passed:
                continue
            if pushed is not None and version.value is not None:
                return False  # the push deleted a key that was alive
            if version.timestamp not in self.standing:
                return version.timestamp > since
            if version.value is not None:
                return False
            pushed = version
        return False

    def value(self, store: Store, key: bytes, at: Timestamp) -> bytes | None:
        """The value of `key` at `at` without the reverted pushes. O(versions). Raises
        `HistoryGoneError` if GC has taken the version that had it."""
        since, passed = store.since, list[Version]()
        for version in store.history(key):
            if version.timestamp <= at and version.timestamp not in self.passed:
                return version.value
            if version.timestamp <= at:
                passed.append(version)
        ends = {reverted for _, reverted in self.reverts}
        for version in passed:
            if version.timestamp in ends and not self._reverted_over(version.timestamp):
                return version.value
        for version in passed:
            under = self._reverted_over(version.timestamp, since)
            if version.timestamp <= since or any(added <= since for added in under):
                raise HistoryGoneError(as_of=version.timestamp, since=since)
        return None

    def _reverted_over(self, time: int, since: int = 0) -> list[int]:
        """The stamps of the pushes that were added before `time`, and reverted after it and after
        `since`."""
        later = max(time, since)
        return [added for added, reverted in self.reverts if added < time and reverted > later]


class LastWrite(NamedTuple):
    """The time and the value of a write. Time 0 means that the key was never written."""

    timestamp: Timestamp
    value: bytes | None


class NewerWrites(NamedTuple):
    """Keys and spans that were written in a window, each with the time of a write."""

    keys: Mapping[bytes, int]
    spans: Sequence[tuple[Span, int]]


NOTHING: Final = NewerWrites({}, ())


def written(
    store: Store, spans: Iterable[Span], stamps: PushStamps, *, since: int, upto: Timestamp
) -> NewerWrites:
    """The keys in `spans` that were written in `(since, upto]` by anything but a push.

    Raises `HistoryGoneError` if the history since then is gone.
    """
    low = store.to_time(since)
    keys: dict[bytes, int] = {}
    deleted: list[tuple[Span, int]] = []
    for span in spans:
        is_indexed = low >= store.indexed_since
        read = _from_index if is_indexed else _from_versions
        for start, end, time in read(store, span, stamps, low, upto):
            if end is None:
                keys[start] = time
            else:
                deleted.append((Span(start, end), time))
    return NewerWrites(keys, deleted)


_Found: TypeAlias = "Iterator[tuple[bytes, bytes | None, int]]"


def _from_index(
    store: Store, span: Span, stamps: PushStamps, since: int, upto: Timestamp
) -> _Found:
    for event in store.events(since, upto, span=span, images="none", expand="none"):
        if event.op not in (Operation.IMPORT, Operation.REVERT):
            yield event.key, event.end_key, event.timestamp
        elif not stamps.has(event.timestamp):
            for key, _ in store.imports.rows_in(event.key, span):
                yield key, None, event.timestamp


def _from_versions(
    store: Store, span: Span, stamps: PushStamps, since: int, upto: Timestamp
) -> _Found:
    for change in store.changes(since, upto, start=span.start, end=span.end, order="time"):
        if not stamps.has(change.timestamp):
            yield change.key, change.end_key, change.timestamp


# --------------------------------------------------------------------------------------------------
# The import of a push, amended for one store: what the mode of the push asks for.
#
#     replace      each live key of the spans that the push lacks gets a row that deletes it
#     built_at     each key that was written since then loses its row
#
# Invariants
# 1. Both are rows of the import, or rows that the import lacks. So they have the stamp of the push,
#    history, feeds and backups show them as they show the import, and its revert undoes them in
#    O(1).
# 2. A key that is kept has no row: no reader sees an older value of it at any time, its expiry
#    stays, and a revert does not touch it.
# 3. The pass over the spans and the search for newer writes run beside other commits. Under the
#    commit lock only keys that were written since are looked at.
#
# One pass over the live keys of the spans is the price of a replace. The keys that were written
# since `built_at` are held in memory.

_DELETED: Final = "deleted.sst"
"""The file of the rows that delete, beside the files of the push."""


class _Deletes(NamedTuple):
    """A file of rows that delete. `keys` are their keys, if they are few."""

    path: Path
    rows: int
    keys: list[bytes]


class AmendedPush:
    """See `kvstore.bulk.ingest.Amending`."""

    def __init__(
        self, store: Store, how: PushMode, stamps: PushStamps, tell: Callable[[str], None]
    ) -> None:
        """`stamps` are of the pushes that the store has taken. `tell` is called again and again
        while keys are compared. An error that it raises ends the work."""
        self._store, self._how, self._stamps = store, how, stamps
        self._tell = tell
        self._at = Timestamp(0)
        self._newer = NOTHING
        self._left_out: set[bytes] = set()

    @property
    def replaced(self) -> Sequence[Span]:
        """See `Amending.replaced`. A push that keeps newer writes names no span, because it may
        leave any key of its spans as it is."""
        return self._how.spans if self._how.built_at is None else ()

    def begin(
        self,
        record: ImportRecord,
        keys: list[bytes] | None,
        at: Timestamp,
        files: Sequence[Path],
        directory: Path,
    ) -> tuple[ImportRecord, list[bytes] | None, list[Path]]:
        """See `Amending.begin`."""
        self._at = at
        spans = tuple(merge_spans([*record.spans, *self._how.spans]))
        self._record = replace(record, spans=spans)
        built_at = self._how.built_at
        if built_at is not None and built_at < at:
            stamps = self._stamps
            found = written(self._store, self._searched(), stamps, since=built_at, upto=at)
            kept = {key: time for key, time in found.keys.items() if self._is_newer(key)}
            self._newer = found._replace(keys=kept)
        if not self._how.spans:
            return self._record, keys, []
        deletes = self._write_deletes(files, directory)
        if deletes is None:
            return self._record, keys, []
        size = record.size_bytes + deletes.path.stat().st_size
        self._record = replace(self._record, rows=record.rows + deletes.rows, size_bytes=size)
        listed = None if keys is None or not self._record.is_small else [*keys, *deletes.keys]
        return self._record, listed, [deletes.path]

    def _write_deletes(self, files: Sequence[Path], directory: Path) -> _Deletes | None:
        """Write the rows that delete the keys which the push lacks. None if there are none. Raises
        `OutOfSpaceError` before they take the room that a fetch leaves free."""
        path = directory / _DELETED
        with storage_errors(str(directory)):
            directory.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
            unfinished.unlink(missing_ok=True)  # a killed process left it
        file = SstFile(path)
        rows, listed = 0, list[bytes]()
        try:
            for keys in self._missing(files):
                stored = [frame(key) + self._record.reference + TOMBSTONE for key in keys]
                require_space(directory, sum(map(len, stored)))
                file.add(stored, [b""] * len(stored))
                rows += len(stored)
                if rows <= SETTLE_ROWS_MAX:
                    listed += keys
            return None if file.finish() is None else _Deletes(path, rows, listed)
        except BaseException:
            file.abandon()
            raise

    def linked(self) -> Amend:
        """See `Amending.linked`."""
        self._leave_out(self._newer.keys)
        for span, _ in self._newer.spans:
            self._leave_out(key for key in self._rows_in(span) if self._is_newer(key))
        return self._at_commit

    def _at_commit(self) -> RowChanges:
        upto = Timestamp(self._store.upper - 1)
        since = written(self._store, self._searched(), PushStamps(), since=self._at, upto=upto)
        newer = [key for key, time in since.keys.items() if self._keeps(time)]
        self._leave_out(newer)
        for span, time in since.spans:
            if self._keeps(time):
                self._leave_out(self._rows_in(span))
        return RowChanges(self._left_out, self._appeared(since.keys.keys() - {*newer}, upto))

    def _keeps(self, time: int) -> bool:
        return self._how.built_at is not None and time > self._how.built_at

    def _is_newer(self, key: bytes) -> bool:
        """Whether a reader sees a live write to `key` that is newer than the build of the push. A
        push that came after that write may cover it."""
        built_at, stamps = self._how.built_at, self._stamps
        if built_at is None:
            return False
        if all(stamp <= built_at for stamp in chain(stamps.standing, stamps.passed)):
            return True
        return stamps.is_live(self._store, key, self._at, since=built_at)

    def _searched(self) -> list[Span]:
        """The spans in which writes are looked for: plain keys, keys of tables, or both."""
        spans = self._record.spans
        plain = [Span().plain()] if any(each.start < FIRST_ROW for each in spans) else []
        tables = [Span(FIRST_ROW)] if any(_has_rows(each) for each in spans) else []
        return plain + tables

    def _missing(self, files: Sequence[Path]) -> Iterator[list[bytes]]:
        """The live keys of the spans that the files lack, ascending, without the newer ones."""
        newer = self._newer.keys
        loose = LooseFiles(files)
        for span in merge_spans(self._how.spans):
            live = self._store.scan_batches(span.start, span.end, as_of=self._at)
            keys = (batch.column("key").to_pylist() for batch in live)
            with closing(loose.rows(frame(span.start))) as rows:
                pushed = (_keys_of(stored) for stored, _ in rows)
                for missing in absent(keys, pushed):
                    self._tell("compare")
                    if gone := [key for key in missing if key not in newer]:
                        yield gone

    def _rows_in(self, span: Span) -> Iterator[bytes]:
        """The keys in a span that the linked import has."""
        name = self._record.import_id.to_bytes(8, "big")
        return (key for key, _ in self._store.imports.rows_in(name, span))

    def _leave_out(self, keys: Iterable[bytes]) -> None:
        """Leave out the rows that the import has for `keys`, and the records of their expiries."""
        stored = self._store.imports.stored
        found = sorted(keys)
        self._left_out.update(row.stored for row in stored.among(self._record, found))
        if not any(span.start.startswith(EXPIRY) for span in self._record.spans):
            return
        carried = [*stored.among(self._record, map(carried_key, found))]
        waiting = []
        for row in carried:
            key = row.key.removeprefix(CARRIED)
            waiting.append(waiting_key(decode_due(row.value, key), key))
        self._left_out.update(row.stored for row in carried)
        self._left_out.update(row.stored for row in stored.among(self._record, sorted(waiting)))

    def _appeared(self, keys: Iterable[bytes], upto: Timestamp) -> list[bytes]:
        """The keys that came alive since the pass, and that the push is to delete."""
        store, spans = self._store, self._how.spans
        return [
            key
            for key in sorted(keys)
            if any(key in span for span in spans)
            and not store.imports.stored.has(self._record, key)
            and store.get(key, upto) is not None
        ]


def absent(live: Iterable[list[bytes]], pushed: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    """The keys of `live` that are not in `pushed`. Both ascend, in chunks; a chunk of each is
    held."""
    known: set[bytes] = set()
    last: bytes | None = None
    for keys in live:
        while keys and (last is None or last < keys[-1]):
            chunk = next(pushed, None)
            if chunk is None:
                break
            known.update(chunk)
            last = chunk[-1]
        yield [key for key in keys if key not in known]
        known = {key for key in known if key > keys[-1]} if keys else known


def _keys_of(stored: Sequence[bytes]) -> list[bytes]:
    return unframe_all([entry[:-TAIL_BYTES] for entry in stored])


def _has_rows(span: Span) -> bool:
    return span.end is None or span.end > FIRST_ROW


# --------------------------------------------------------------------------------------------------
# A push is taken back: by the record of its import, or by rows in a store that has no such record.
#
# A store that was put back from a backup has the versions that a push made, at the stamp of the
# push. The revert there is an import of the store's own: each key whose value comes from the push
# gets the value that it would have without it, or a delete. A push that the place of the store has
# forgotten is found in the log, and its stamp in the record of its import.
#
# Invariants
# 1. The result is the same as of a revert by the record: live writes that came after the push stay,
#    and earlier pushes that were reverted show nothing.
# 2. All rows appear at one time, together with the position. A kill leaves them invisible, and the
#    next look begins again.
#
# Costs a pass over the versions of the store, and a look at the history of each key of the push. It
# raises `HistoryGoneError` where the state below the push is gone.


def revert_rows(
    store: Store,
    import_id: int,
    added: Timestamp,
    stamps: PushStamps,
    after: After,
    tell: Callable[[str], None],
) -> Timestamp:
    """Take the push back that was added at `added`. Returns the time.

    `import_id` is the id of the import that does so, and `after` makes the writes that belong to
    it. `stamps` are of all pushes of the store. `tell` is called between rows, and ends the work by
    an error.
    """
    imports = store.imports
    known = imports.get(import_id)
    if known is not None and known.added is None:
        imports.abort(import_id)  # its rows were made for an older state
    with (
        imports.alone(import_id, adding=True),
        store.snapshot() as snapshot,
        staging_beside(store) as directory,
    ):
        at = snapshot.as_of
        record, files = _written(store, import_id, added, at, stamps, directory, tell)
        amends = AmendedPush(store, PushMode(built_at=at), PushStamps(), tell)
        found = FoundKeys(record)
        for file in files:
            found.read(file)
        record, keys, _ = amends.begin(record, found.keys, at, files, directory)
        imports.prepare(record, keys)
        imports.link(files)
        return imports.add(import_id, after=after, amend=amends.linked())


def _written(
    store: Store,
    import_id: int,
    added: Timestamp,
    at: Timestamp,
    stamps: PushStamps,
    directory: Path,
    tell: Callable[[str], None],
) -> tuple[ImportRecord, list[Path]]:
    """The import that takes the push back, and its file."""
    with storage_errors(str(directory)):
        directory.mkdir(parents=True)
    writer = PartWriter(directory, import_id)
    for key, value in _below(store, added, at, stamps):
        tell("revert")
        writer.put(key, value) if value is not None else writer.delete(key)
    part = writer.finish()
    digest = f"revert of {added}"
    if part is None:
        return ImportRecord(import_id, digest, 0, 0, ()), []
    span = Span(part.smallest, part.largest + b"\x00")
    record = ImportRecord(import_id, digest, part.rows, part.size_bytes, (span,))
    return record, [directory / part.name]


def _below(
    store: Store, added: Timestamp, at: Timestamp, stamps: PushStamps
) -> Iterator[tuple[bytes, bytes | None]]:
    """The keys whose values at `at` come from the push, each with its value without the push."""
    without = stamps.without(added)
    for start, end in ((b"", RESERVED), (FIRST_ROW, None)):
        for change in store.changes(added - 1, added, start=start, end=end):
            if stamps.last_write(store, change.key, at).timestamp == added:
                yield change.key, without.value(store, change.key, at)


class Reverts:
    """Takes pushes back in one store, as the events of a log ask for it."""

    def __init__(
        self, store: Store, log: PushLog, place: PushPlace, shard: int, tell: Callable[[str], None]
    ) -> None:
        self._store, self._log, self._place, self._shard = store, log, place, shard
        self._tell = tell

    def take_back(self, event: PushEvent, fields: dict[str, Any]) -> None:
        """Take back the push of `event`, if the store has it, and pass the event. `fields` are the
        place. A store that cannot do it tells so in the state of the push."""
        told: Mapping[str, Any] | None = fields["pushes"].get(str(event.number))
        if told is None:
            told = self._forgotten(event, fields)
        if told is None or told["state"] != "added":
            state = None
            if told is not None and told["state"] == "refused":  # it is not tried again
                state = PushState("refused", told["error"], import_id=told["import"])
            self._place.move(fields, event.number, state)
            return
        added, import_id = Timestamp(told["at"]), told["import"]
        by_rows = self._by_rows(told, fields["pushes"])
        moved = {**fields, "log": event.position}

        def after(reverted: Timestamp) -> WriteSet:
            state = PushState("reverted", "", reverted, added, import_id, by_rows=by_rows)
            return self._place.moving(with_state(moved, event.number, state))

        try:
            if by_rows:
                require_known_since(fields["pushes"], told.get("event") or 0)
                own = import_id_of(f"revert/{self._place.name}/{event.number}", self._shard)
                stamps = self._place.stamps()
                reverted = revert_rows(self._store, own, added, stamps, after, self._tell)
            else:
                reverted = self._store.imports.revert(import_id, after=after)
        except (ClosedError, ForkedError):
            raise
        except (UsageError, HistoryGoneError) as error:
            problem = f"revert refused: {type(error).__name__}: {error}"
            kept = PushState("added", problem, added, import_id=import_id)
            self._place.move(fields, event.number, kept)
            return
        if self._place.state_of(event.number) != "reverted":  # it was reverted by hand before
            self._store.positions.write(after(reverted))

    def _forgotten(self, event: PushEvent, fields: dict[str, Any]) -> dict[str, Any] | None:
        """The state of a push that the place has forgotten, as the records of imports have it. None
        if the store never took the push."""
        if len(fields["pushes"]) < PUSHES_TOLD:
            return None
        push = self._log.push_of(event)
        if push is None or self._shard >= push.shards:
            return None
        import_id = push.imports[self._shard].import_id
        record = self._store.imports.get(import_id)
        if record is None or record.added is None:
            return PushState("refused", error=_NO_RECORD).fields()
        return PushState("added", at=record.added, import_id=import_id).fields()

    def _by_rows(self, told: Mapping[str, Any], pushes: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a push is taken back by rows. It is where the store has no record of its import,
        and after an earlier push was taken back by rows, which a revert by the record would show
        again."""
        record = self._store.imports.get(told["import"])
        if record is None or record.added != told["at"]:
            return True
        return any(each.get("by_rows") and each["added"] < told["at"] for each in pushes.values())


_NO_RECORD: Final = (
    "revert refused: the store has no record of this push; if it has its rows, push the right "
    "values"
)
