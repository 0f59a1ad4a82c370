"""Every error this project raises, in one tree, sorted by what the caller should do.

    KVStoreError
    |-- UsageError              fix the call, the option or the path; nothing was written
    |   |-- NotAStoreError          the directory holds something else
    |   |-- FormatVersionError      written by a newer or unknown release
    |   |   `-- OtherReleaseError       the owner of a shared store is of another release
    |   |-- AccessDeniedError       the storage refuses: see to permissions or credentials
    |   |-- NoBucketError           the bucket of an address does not exist: check its name
    |   |-- NotFoundError           the call names a table, a hold or a feed that is not there
    |   |-- NotACounterError        the value of a key is no counter
    |   |-- NotCompiledError        the compiled modules are missing here
    |   |-- ClosedError             the object was closed; open a new one
    |   |-- ForkedError             a handle belongs to the process that opened it
    |   |-- KeyOrderError           keys must come in ascending order, each once
    |   |-- ImportRefusedError      a staged import is incomplete, altered or foreign
    |   |   `-- LoadRefusedError    a load does not pass its gate
    |   |-- NotUniqueError          a row has the values of another one in a unique index
    |   `-- KeyConflictError        an import would cover live keys (on_conflict="error")
    |-- RetryableError          surely not done: try again
    |   |-- ConflictError           another commit changed a key that a transaction read
    |   |-- TableAlteredError       another call altered the table meanwhile
    |   |-- PreconditionError       a conditional write found another value than expected
    |   |-- DependencyError         tasks are not at the versions that a change depends on
    |   |-- HistoryHeldError        a hold or reader needs the history that the call would clear
    |   |-- DeterminateError        a blob or consensus call surely had no effect
    |   |-- UpperMismatchError      an append expected another upper; read it and decide anew
    |   |-- BusyError               another operation did not end in time
    |   |-- StaleReaderError        the writer took away what a reader needs; open it again
    |   |-- LockedError             another owner has it open; wait, or stop the owner
    |   `-- NotListeningError       no owner listens; open it, or open it there with shared=True
    |-- HistoryGoneError        read at a newer time
    |-- NotYetWrittenError      wait until `upper` has passed the time
    |-- FencedError             step down: a newer owner has taken over
    |   |-- HoldLostError           the hold was invalidated: its budget was exceeded
    |   |-- LeaseExpiredError       a shard reader's lease ran out; its parts may be gone
    |   `-- OpaqueMismatchError     a critical hold carries another owner's token
    |-- StorageError            the outcome is unknown: reopen and look before retrying
    |   |-- OutOfSpaceError         the disk is full
    |   |-- IndeterminateError      a blob or consensus call may or may not have had its effect
    |   |   `-- OwnerAwayError          the owner of a shared store does not answer
    |   `-- PoisonedError           an earlier write failed; the handle refuses until reopened
    `-- CorruptionError         stop: the bytes are not the bytes that were written
        |-- StatesLostError           a collection lacks its newest states: it is an older copy
        |-- EventsMissingError        the change index does not hold what its epochs count
        `-- JournalDamagedError       a journal file is damaged; `salvage` rescues records

`backup.shard` adds two for programs that read shards without a collection: `MissingShardError`, a
`UsageError`, and `MissingPartError`, a `CorruptionError`.

Each message says what happened, where, and what to do; the same facts are fields of the error.
Foreign exceptions are translated where they enter (`raise ... from`). A broken invariant of ours
is an assertion, never one of these errors.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "Argument",
    "KVStoreError",
    "UsageError",
    "NotACounterError",
    "NotAStoreError",
    "NotFoundError",
    "FormatVersionError",
    "OtherReleaseError",
    "AccessDeniedError",
    "NoBucketError",
    "NotCompiledError",
    "ClosedError",
    "ForkedError",
    "KeyOrderError",
    "ImportRefusedError",
    "NotUniqueError",
    "KeyConflictError",
    "RetryableError",
    "ConflictError",
    "TableAlteredError",
    "PreconditionError",
    "DependencyError",
    "HistoryHeldError",
    "DeterminateError",
    "UpperMismatchError",
    "BusyError",
    "StaleReaderError",
    "LockedError",
    "NotListeningError",
    "HistoryGoneError",
    "NotYetWrittenError",
    "FencedError",
    "HoldLostError",
    "LeaseExpiredError",
    "OpaqueMismatchError",
    "StorageError",
    "OutOfSpaceError",
    "IndeterminateError",
    "OwnerAwayError",
    "PoisonedError",
    "CorruptionError",
    "JournalDamagedError",
    "StatesLostError",
    "EventsMissingError",
    "printable",
    "KEYS_NAMED_MAX",
]


# --------------------------------------------------------------------------------------------------
# The root of the error tree, and the forms that facts take in messages.


def printable(key: bytes) -> str:
    """Render a key for a message: text as it is, other bytes as escapes, 64 bytes at most."""
    text = repr(bytes(key[:64]))
    return text if len(key) <= 64 else f"{text}... ({len(key)} bytes)"


class Argument(NamedTuple):
    """An argument of a call, or a call to make, where a message names it. Each door writes it in
    its own words: Python `limit=-1` and `store.holds.all()`, the shell `--limit -1` and
    `kvstore holds list`."""

    name: str
    shown: str = ""
    """Its value as Python writes it; empty where the message is about the argument itself."""

    @classmethod
    def of(cls, name: str, value: object) -> Argument:
        """The argument with its value, of which a message shows `VALUE_SHOWN_MAX` characters."""
        if type(value) is int and value.bit_length() > _BITS_SHOWN_MAX:
            return cls(name, f"<an integer of {value.bit_length()} bits>")
        shown = repr(value)
        return cls(
            name, shown if len(shown) <= VALUE_SHOWN_MAX else f"{shown[:VALUE_SHOWN_MAX]}..."
        )

    def __str__(self) -> str:
        return f"{self.name}={self.shown}" if self.shown else self.name


VALUE_SHOWN_MAX = 200
"""The characters of a value that a message shows: a time, a name, a short list."""
_BITS_SHOWN_MAX = 256
"""Python refuses to print integers of thousands of digits."""

Words: TypeAlias = "str | Argument | tuple[str | Argument, ...]"
"""A part of a message: a text, or texts and arguments in turn."""


class KVStoreError(Exception):
    """Root of the tree. `what` says what happened and where, `remedy` what the caller should do."""

    __module__ = "kvstore.errors"  # tracebacks and pickles name the public place
    words: tuple[tuple[str | Argument, ...], tuple[str | Argument, ...]] | None = None
    """What happened and what to do, with the arguments that they name; None if they name none."""

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith("kvstore.errors."):
            cls.__module__ = "kvstore.errors"

    def __init__(self, what: Words, remedy: Words = "") -> None:
        if not (type(what) is type(remedy) is str):
            self.words = _parts(what), _parts(remedy)
            what, remedy = ("".join(map(str, parts)) for parts in self.words)
        assert isinstance(what, str)
        assert isinstance(remedy, str)
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross processes (Spark's workers, pools). By default Python makes an error anew
        # from its message alone, which fails for each class that takes other arguments.
        return _restore, (type(self), self.args), self.__dict__

    def told(self, spell: Callable[[Argument], str]) -> str:
        """The message, with its arguments as `spell` writes them."""
        if self.words is None:
            return str(self)
        what, remedy = (
            "".join(spell(each) if isinstance(each, Argument) else each for each in parts)
            for parts in self.words
        )
        return f"{what}; {remedy}" if remedy else what


def _parts(words: Words) -> tuple[str | Argument, ...]:
    return (words,) if isinstance(words, str | Argument) else words


def _restore(kind: type[KVStoreError], args: tuple[object, ...]) -> KVStoreError:
    """Make the error that `__reduce__` took apart, without calling its `__init__`."""
    return kind.__new__(kind, *args)


def span_text(span: tuple[bytes, bytes | None]) -> str:
    """Render the span of keys `start <= key < end` for a message."""
    start, end = span
    return f"[{printable(start)}, {'end' if end is None else printable(end)})"


# --------------------------------------------------------------------------------------------------
# Errors of the call itself: fix the call, the option or the path. Nothing was written.

KEYS_NAMED_MAX = 5
"""How many keys a message spells out: enough to recognise the data, few enough to read."""


class UsageError(KVStoreError, ValueError):
    """The call cannot be carried out as it was made. Nothing was written. `argument` is the name
    of the argument that is wrong, if it is one."""

    @property
    def argument(self) -> str | None:
        """The argument that the message is about first; None if it is about none."""
        what = () if self.words is None else self.words[0]
        return next((each.name for each in what if isinstance(each, Argument)), None)

    def at(self, before: str = "", after: str = "", *, remedy: Words | None = None) -> UsageError:
        """The same refusal, with its place before or after what happened, or another remedy."""
        what, found = self.words or ((self.what,), (self.remedy,))
        return UsageError((before, *what, after), found if remedy is None else remedy)


class NotAStoreError(UsageError):
    """The directory at `path` holds something else than the caller wants to open."""

    def __init__(self, path: str, found: str, remedy: str) -> None:
        super().__init__(f"{path} is not usable: {found}", remedy)
        self.path = path
        self.found = found


class FormatVersionError(UsageError):
    """`path` carries a format version that this release does not know."""

    def __init__(self, path: str, *, found: object, supported: object) -> None:
        super().__init__(
            f"{path} has format version {found}, this release reads {supported}",
            "open it with the release that wrote it, or a newer one",
        )
        self.path = path
        self.found = found
        self.supported = supported


class OtherReleaseError(FormatVersionError):
    """Process `pid` owns the shared store at `path`, and its release shares stores by other rules
    than the caller's, by number `supported` and not `found`. Nothing was done."""

    def __init__(
        self, path: str, pid: int, *, release: str, caller: str, found: object, supported: object
    ) -> None:
        UsageError.__init__(
            self,
            f"process {pid} owns {path} with kvstore {release}, and this is kvstore {caller}: they "
            f"share a store by different rules ({supported} and {found})",
            "use one release in all processes that share the store: end those of the older one, "
            "and start them with the newer one",
        )
        self.path = path
        self.pid = pid
        self.found = found
        self.supported = supported


class AccessDeniedError(UsageError):
    """The storage at `where` refuses the call: a permission, a read-only place, credentials that
    are missing or wrong. Nothing was done."""

    def __init__(
        self, where: str, cause: str, remedy: str = "check the path and its permissions"
    ) -> None:
        super().__init__(f"{where} was refused: {cause}", remedy)
        self.where = where
        self.cause = cause


class NoBucketError(UsageError):
    """The bucket or the container that an address names does not exist. Nothing was done."""

    def __init__(self, where: str, cause: str) -> None:
        super().__init__(
            f"{where}: the bucket does not exist ({cause})", "check the bucket's name, or make it"
        )
        self.where = where
        self.cause = cause


class NotFoundError(UsageError):
    """The call names something that is not there: a table, an index, a hold, a feed, an import."""


class NotACounterError(UsageError):
    """The value of a key is no counter, or its sum would need more than 64 bits. Nothing was
    written."""


class NotCompiledError(UsageError, ImportError):
    """This installation lacks a compiled module for the interpreter `here`, such as "CPython 3.11.7
    on linux-x86_64"; `cause` says which one."""

    def __init__(self, here: str, cause: str) -> None:
        super().__init__(
            f"the loops of kvstore are not compiled for {here}: {cause}",
            "install a wheel of kvstore-mvcc that was built for it; in a checkout, `make setup` "
            "compiles them",
        )
        self.here = here
        self.cause = cause


class ClosedError(UsageError):
    """The object was used after it was closed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is closed", "open it again")


class ForkedError(UsageError):
    """The object at `where` was opened by process `owner`, and this process is a fork of it."""

    def __init__(self, where: str, *, owner: int, remedy: str) -> None:
        super().__init__(f"{where} belongs to process {owner}, of which this one is a fork", remedy)
        self.where = where
        self.owner = owner


class KeyOrderError(UsageError):
    """A sorted writer was given a key below the one before, or the same key twice."""

    def __init__(self, where: str, *, previous: bytes, key: bytes) -> None:
        twice = previous == key
        super().__init__(
            f"{where}: key {printable(key)} "
            + ("came twice" if twice else f"came after {printable(previous)}"),
            "remove duplicates" if twice else "sort the rows by key first",
        )
        self.previous = previous
        self.key = key


class ImportRefusedError(UsageError):
    """A staged import is incomplete, altered since it was sealed, or another than it claims."""

    def __init__(self, staging: str, problem: str, remedy: str) -> None:
        super().__init__(f"import {staging} refused: {problem}", remedy)
        self.staging = staging
        self.problem = problem


class LoadRefusedError(ImportRefusedError):
    """A load does not pass its gate. Nothing shows, and the staged rows are still in `staging`.

    A staging directory that the caller has named stays. One of the library's own lies in the
    `ingest/` of the store, where the newest three of a table stay for seven days. `report` has each
    check with its figure, bound and baseline, as JSON has it. Mend the rows, or add the load with a
    reason: `bulk.ingest(store, error.staging, check=..., force=...)`.
    """

    def __init__(
        self, staging: str, failed: Sequence[str], report: Mapping[str, Any], kept: str = ""
    ) -> None:
        remedy = f"{kept}mend the rows and load them again, or pass force= with a reason"
        super().__init__(staging, f"its gate fails: {'; '.join(failed)}", remedy)
        self.failed = list(failed)
        self.report = report


class NotUniqueError(UsageError):
    """A row has the values of another row in a unique index. Nothing was written."""

    def __init__(self, where: str, *, values: str, other: str) -> None:
        super().__init__(f"{where}: {values} is taken by the row {other}", "choose other values")
        self.where = where
        self.values = values
        self.other = other


class KeyConflictError(UsageError):
    """An import would cover live keys, which its caller asked to refuse. Nothing was added."""

    def __init__(
        self, keys: Sequence[bytes], name_of: Callable[[bytes], str] | None = None
    ) -> None:
        """`name_of` names a key: that of a row by its columns. Bytes are shown by default."""
        named = ", ".join(map(name_of or printable, keys[:KEYS_NAMED_MAX]))
        super().__init__(
            f"live keys are in the way of the import, first: {named}",
            ("delete them, or pass ", Argument.of("on_conflict", "overwrite")),
        )
        self.keys = tuple(keys)


# --------------------------------------------------------------------------------------------------
# Errors of calls that were surely not carried out: the same call may succeed when repeated.


class RetryableError(KVStoreError):
    """The call surely changed nothing. The same call may succeed when repeated."""


class ConflictError(RetryableError):
    """A later commit changed a key that the transaction read, or what a gate has compared a load
    with. Nothing of it was written."""

    def __init__(
        self, *, read_at: int, written_at: int, where: str, what: str = "", remedy: str = ""
    ) -> None:
        super().__init__(
            what
            or f"{where} was written at {written_at}, after the transaction's reads at {read_at}",
            remedy or "run the transaction again (store.transact does)",
        )
        self.read_at = read_at
        self.written_at = written_at
        self.where = where


class TableAlteredError(RetryableError):
    """Another call altered the table meanwhile. Nothing was written."""

    def __init__(self, table: str) -> None:
        super().__init__(
            f"table {table!r} was altered by another call meanwhile", "look at it and try again"
        )
        self.table = table


class PreconditionError(RetryableError):
    """A conditional write did not find what it expected; nothing was written."""

    def __init__(self, key: bytes, *, expected: object, found: object) -> None:
        super().__init__(
            f"key {printable(key)}: expected {expected!r}, found {found!r}",
            "read the key again and decide anew",
        )
        self.key = key
        self.expected = expected
        self.found = found


class DependencyError(RetryableError):
    """Tasks are not at the versions that a change of tasks depends on. Nothing was changed.

    Each of `failures` is a task id, the expected version and the found one. A found version is
    None where the task does not exist, an expected version where it must not exist.
    """

    def __init__(self, failures: Sequence[tuple[str, int | None, int | None]]) -> None:
        named = ", ".join(
            f"task {task} is {_version_text(found)}, not {_version_text(expected)}"
            for task, expected, found in failures
        )
        super().__init__(named, "read the tasks again and decide anew")
        self.failures = tuple(failures)


class HistoryHeldError(RetryableError):
    """`holder` needs the history of `span` that the call would destroy. Nothing was destroyed."""

    def __init__(self, span: tuple[bytes, bytes | None], *, holder: str) -> None:
        super().__init__(
            f"history of {span_text(span)} is needed by {holder}",
            "release or move it and clear again, or use delete_range, which keeps history",
        )
        self.span = span
        self.holder = holder


class DeterminateError(RetryableError):
    """A blob or consensus call at `where` failed and surely had no effect."""

    def __init__(self, where: str, cause: str) -> None:
        super().__init__(f"{where} failed and did nothing: {cause}", "try again")
        self.where = where
        self.cause = cause


class UpperMismatchError(RetryableError):
    """An append expected the shard's upper to be `expected`; nothing was appended.

    `writer_upper` is the upper this writer reached with its last append, None before its first.
    """

    def __init__(self, *, expected: int, upper: int, writer_upper: int | None = None) -> None:
        super().__init__(
            f"the append expects the shard's upper at {expected}, it is at {upper}",
            "another writer was here: read the upper, rebuild the batch from there, append again",
        )
        self.expected = expected
        self.upper = upper
        self.writer_upper = writer_upper


class BusyError(RetryableError):
    """Another operation did not end within `waited_s` seconds. Nothing was changed."""

    def __init__(self, what: str, *, waited_s: float, remedy: str) -> None:
        super().__init__(f"{what} after {waited_s:g} s", remedy)
        self.waited_s = waited_s


class StaleReaderError(RetryableError):
    """A handle that reads the store at `path` beside its writer can show no whole state: the writer
    has removed files that it needs, or the store was replaced by another copy."""

    def __init__(self, path: str, what: str = "", remedy: str = "") -> None:
        super().__init__(
            what or f"files of {path} were removed by the process that writes it",
            remedy or "open it to be read again, or read a copy made by store.checkpoint",
        )
        self.path = path


class LockedError(RetryableError):
    """Another owner holds `path` open for writing."""

    def __init__(
        self,
        path: str,
        owner: str = "another process",
        remedy: str = "close it there, or wait until it is closed",
    ) -> None:
        super().__init__(f"{path} is held by {owner}", remedy)
        self.path = path
        self.owner = owner


class NotListeningError(RetryableError):
    """No process listens at the store at `path`: none has it open with
    `shared=True` or `control=True`."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"no process listens at {path}",
            "open the store here; or have the process that has it open listen: "
            "kvstore.open(path, shared=True), or control=True",
        )
        self.path = path


def _version_text(version: int | None) -> str:
    return "absent" if version is None else f"at version {version}"


# --------------------------------------------------------------------------------------------------
# Errors of reads at a time below `since` or at or above `upper`.


class HistoryGoneError(KVStoreError):
    """History at `as_of` may be gone: it is kept from `since` on. Where `span` is given, `since`
    concerns this span, and the whole store otherwise. `nearest` has the nearest earlier and later
    instants that can be read, where history below `since` was thinned or has a hole."""

    def __init__(
        self,
        *,
        as_of: int,
        since: int,
        span: tuple[bytes, bytes | None] | None = None,
        remedy: str = "",
        nearest: tuple[int, ...] = (),
    ) -> None:
        where = "" if span is None else f" in {span_text(span)}"
        instants = " and ".join(map(str, nearest))
        if nearest:
            remedy = remedy or f"the nearest kept instants are {instants}: read at one of them"
        super().__init__(
            f"history{where} at {as_of} is gone: it is kept from {since} on",
            remedy or f"read at {since} or later; a hold keeps history for longer",
        )
        self.nearest = nearest
        self.as_of = as_of
        self.since = since
        self.span = span


class NotYetWrittenError(KVStoreError):
    """Commits at or below `as_of` may still come: the store is complete below `upper`."""

    def __init__(self, *, as_of: int, upper: int, remedy: str = "") -> None:
        super().__init__(
            f"time {as_of} is not complete: the store is complete below {upper}",
            remedy or f"read below {upper}, or wait",
        )
        self.as_of = as_of
        self.upper = upper


# --------------------------------------------------------------------------------------------------
# Errors of owners that a newer owner has replaced: step down.


class FencedError(KVStoreError):
    """A newer owner has taken over `name`; this one must stop."""

    def __init__(
        self, name: str, remedy: str = "stop this owner; the newer one carries on"
    ) -> None:
        super().__init__(f"{name} was taken over by a newer owner", remedy)
        self.name = name


class HoldLostError(FencedError):
    """The hold `name` was invalidated because it exceeded its budget; its history may be gone."""

    def __init__(self, name: str, *, held: int, budget_seconds: float) -> None:
        KVStoreError.__init__(
            self,
            f"hold {name!r} at {held} was invalidated: older than its {budget_seconds:g} s",
            "start over from a full read, and take a larger budget",
        )
        self.name = name
        self.held = held
        self.budget_seconds = budget_seconds


class LeaseExpiredError(FencedError):
    """The lease of shard reader `name` ran out; parts it was reading may have been collected."""

    def __init__(self, name: str) -> None:
        KVStoreError.__init__(
            self,
            f"the lease of reader {name!r} has expired",
            "register a new reader and start from a snapshot; renew it more often",
        )
        self.name = name


class OpaqueMismatchError(FencedError):
    """Critical hold `name` carries the token `opaque` of a newer owner, and stands at `since`."""

    def __init__(self, name: str, *, opaque: bytes, since: int) -> None:
        super().__init__(name)
        self.opaque = opaque
        self.since = since


# --------------------------------------------------------------------------------------------------
# Errors of storage whose outcome is unknown: reopen and look before trying again.


class StorageError(KVStoreError):
    """Storage failed during the call. Acknowledged writes stand; the last one may or may not."""


class OutOfSpaceError(StorageError):
    """The disk is full. Acknowledged writes stand.

    `needed` and `free` are bytes, if the error was found before anything was written.
    """

    def __init__(self, where: str, *, needed: int | None = None, free: int | None = None) -> None:
        what = f"no space left while writing {where}"
        remedy = "free space, then open the store again, or repeat the call"
        if needed is not None:
            what = f"{where} has {free:,} bytes free, and {needed:,} are needed"
            remedy = "free space, then try again: nothing was written"
        super().__init__(what, remedy)
        self.where = where
        self.needed, self.free = needed, free


class IndeterminateError(StorageError):
    """A blob or consensus call at `where` may or may not have had its effect.

    Only idempotent calls may be made again without looking first.
    """

    def __init__(self, where: str, cause: str) -> None:
        super().__init__(
            f"whether {where} took effect is unknown: {cause}",
            "look at the present state before trying again",
        )
        self.where = where
        self.cause = cause


class OwnerAwayError(IndeterminateError):
    """Process `pid` owns the shared store at `path`, and has not answered for `patience` seconds. A
    write may be done once it goes on. `pid` is 0 where it is unknown."""

    def __init__(self, path: str, pid: int, *, patience: float, is_stopped: bool) -> None:
        owner = f"process {pid}" if pid else "its process"
        state = f"{owner} is stopped, and" if is_stopped else owner
        go_on = f"let it go on (kill -CONT {pid})" if is_stopped else "wait for it"
        end = f"end it (kill -KILL {pid})" if pid else "end it"
        StorageError.__init__(
            self,
            f"the owner of {path} is away: {state} has not answered for {patience:g} s; it keeps "
            "the store, and may still do what was asked of it",
            f"{go_on}, or {end}: then a guest takes over; look at the present state before a write "
            "is sent again",
        )
        self.where = f"a request to the owner of {path}"
        self.cause = f"{state} has not answered"
        self.path = path
        self.pid = pid
        self.is_stopped = is_stopped


class PoisonedError(StorageError):
    """An earlier write or fsync failed: the bytes on disk are unknown. Every call raises this."""

    def __init__(self, where: str, cause: str) -> None:
        super().__init__(
            f"{where} refuses all calls since a write failed ({cause})",
            "close it and open it again; acknowledged durable commits are kept",
        )
        self.where = where
        self.cause = cause


# --------------------------------------------------------------------------------------------------
# Errors of damaged bytes: stop, and restore them from a backup.


class CorruptionError(KVStoreError):
    """The bytes at `where` are not the bytes that were written there."""

    def __init__(self, where: str, problem: str, remedy: str = "restore it from a backup") -> None:
        super().__init__(f"{where} is damaged: {problem}", remedy)
        self.where = where
        self.problem = problem


class JournalDamagedError(CorruptionError):
    """A journal file is damaged at `offset`; the records `first..last` cannot be read.

    `last` is None where no record can be read behind the damage, so that the number of lost records
    is unknown. It is below `first` where no record is lost.
    """

    def __init__(
        self, path: str, *, offset: int, first: int, last: int | None, problem: str
    ) -> None:
        if last is None:
            lost = f"ordinal {first} and all later ones cannot be read"
        elif last < first:
            lost = f"it stands between ordinals {last} and {first}"
        else:
            lost = f"ordinals {first}..{last} cannot be read"
        super().__init__(
            f"{path} at byte {offset}",
            f"{problem}; {lost}",
            "restore the file, or copy what is left with `kvstore journal salvage`",
        )
        self.path = path
        self.offset = offset
        self.first = first
        self.last = last


class StatesLostError(CorruptionError):
    """The newest states of a collection, or of a shard of it, are gone: it was cut, emptied or
    replaced by an older copy. `known` is the newest state that surely existed, `found` the newest
    that exists; both are versions of the state, or both are times."""

    def __init__(self, where: str, *, found: int, known: int, remedy: str = "") -> None:
        super().__init__(
            where,
            f"its newest state is {found}, and there was {known}: it is an older copy, or cut",
            remedy or "put back the newest copy of all its files; or restore an older state",
        )
        self.found = found
        self.known = known


class EventsMissingError(CorruptionError):
    """The change index does not hold the changes that its epochs count: some are missing, or some
    are too many."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem, "start over from a full read, and report it")


# --------------------------------------------------------------------------------------------------
# Errors of the operating system, translated into errors of this project.


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Translate errors of the operating system into errors of this project."""
    try:
        yield
    except OSError as error:
        raise storage_error(where, error) from error


def storage_error(where: str, error: OSError) -> KVStoreError:
    """The error of this project for an error of the operating system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(where)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDeniedError(where, str(error))
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close some files of this process, or raise `ulimit -n`; then open it again"
        return StorageError(f"{where}: {error}", remedy)
    return StorageError(f"{where}: {error}", "look at the disk, then open it again")
