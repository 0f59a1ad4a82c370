"""Every error this project raises, in one tree, sorted by what the caller should do.

    KVStoreError
    |-- UsageError              fix the call, the option or the path; nothing was written
    |   |-- NotAStoreError          the directory holds something else
    |   |-- FormatVersionError      written by a newer or unknown release
    |   |-- AccessDeniedError       the storage refuses: see to permissions or credentials
    |   |-- ForeignPackageError     another package hides our `bulk` or `backup`
    |   |-- ClosedError             the object was closed; open a new one
    |   |-- ForkedError             a handle belongs to the process that opened it
    |   |-- KeyOrderError           keys must come in ascending order, each once
    |   |-- ImportRefusedError      a staged import is incomplete, altered or foreign
    |   `-- KeyConflictError        an import would cover live keys (on_conflict="error")
    |-- RetryableError          surely not done: try again
    |   |-- ConflictError           a transaction read what another commit changed
    |   |-- PreconditionError       a conditional write found something else than expected
    |   |-- DependencyError         tasks are not at the versions that a change depends on
    |   |-- HistoryHeldError        a hold or reader needs the history that was to be cleared
    |   |-- DeterminateError        a blob or consensus call surely had no effect
    |   |-- UpperMismatchError      an append expected another upper; read it and decide anew
    |   |-- BusyError               what had to end first did not end in time
    |   |-- StaleReaderError        the writer removed files that a reader needs; open it again
    |   `-- LockedError             another owner has it open; wait, or stop the owner
    |-- HistoryGoneError        read at a newer time
    |-- NotYetWrittenError      wait until `upper` has passed the time
    |-- FencedError             step down: a newer owner has taken over
    |   |-- HoldLostError           the hold was invalidated: its budget was exceeded
    |   |-- LeaseExpiredError       a shard reader's lease ran out; what it read may be gone
    |   `-- OpaqueMismatchError     a critical hold carries another owner's token
    |-- StorageError            the outcome is unknown: reopen and look before retrying
    |   |-- OutOfSpaceError         the disk is full
    |   |-- IndeterminateError      a blob or consensus call may or may not have had its effect
    |   `-- PoisonedError           an earlier write failed; the handle refuses until reopened
    `-- CorruptionError         stop: bytes are not what was written
        |-- StatesLostError           a collection lacks its newest states: it is an older copy
        |-- EventsMissingError        the change index does not hold what its epochs count
        `-- JournalDamagedError       a journal file; what can be saved, `salvage` saves

`backup.shard` has two more, for those who read shards by themselves: `MissingShardError`, a
`UsageError`, and `MissingPartError`, a `CorruptionError`.

Each message says what happened, where, and what to do; the same facts are fields of the
error. Foreign exceptions are translated where they enter (`raise ... from`). Broken
invariants of our own are assertions, never one of these.
"""

from __future__ import annotations

from collections.abc import Sequence

KEYS_NAMED_MAX = 5
"""How many keys a message spells out: enough to recognise the data, few enough to read."""


def printable(key: bytes) -> str:
    """Render a key for a message: text as it is, other bytes as escapes, 64 bytes at most."""
    text = repr(bytes(key[:64]))
    return text if len(key) <= 64 else f"{text}... ({len(key)} bytes)"


class KVStoreError(Exception):
    """Root of the tree. `what` happened (and where), and the `remedy`: what to do now."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross processes (Spark's workers, pools). By default they are made anew from
        # their message alone, which fails for all that take other arguments.
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[KVStoreError], args: tuple[object, ...]) -> KVStoreError:
    """Make the error that `__reduce__` took apart, without calling its `__init__`."""
    return kind.__new__(kind, *args)


# -- fix the call ---------------------------------------------------------------------------


class UsageError(KVStoreError, ValueError):
    """The call cannot be carried out as it was made. Nothing was written."""


class NotAStoreError(UsageError):
    """`path` is not what was to be opened there."""

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


class AccessDeniedError(UsageError):
    """The storage at `where` refuses the call: a permission, a read-only place, credentials that
    are missing or wrong. Nothing was done."""

    def __init__(
        self, where: str, cause: str, remedy: str = "check the path and its permissions"
    ) -> None:
        super().__init__(f"{where} was refused: {cause}", remedy)
        self.where = where
        self.cause = cause


class ForeignPackageError(UsageError, ImportError):
    """The package `package`, found at `found`, is not the one that comes with this library."""

    def __init__(self, package: str, found: str) -> None:
        super().__init__(
            f"the package {package!r} at {found} is not the one that comes with kvstore-mvcc",
            f"rename {found} if it is yours; if it was installed, uninstall {package!r} "
            "and reinstall kvstore-mvcc",
        )
        self.package = package
        self.found = found


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
    """Keys of a sorted writer came out of order, or one came twice."""

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
    """A staged import is not whole, not as it was sealed, or not the one it says it is."""

    def __init__(self, staging: str, problem: str, remedy: str) -> None:
        super().__init__(f"import in {staging} refused: {problem}", remedy)
        self.staging = staging
        self.problem = problem


class KeyConflictError(UsageError):
    """An import met live keys and was told to refuse them. Nothing was added."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        named = ", ".join(printable(key) for key in keys[:KEYS_NAMED_MAX])
        super().__init__(
            f"live keys are in the way of the import, first: {named}",
            'delete them, or ingest with on_conflict="overwrite"',
        )
        self.keys = tuple(keys)


# -- retry ----------------------------------------------------------------------------------


class RetryableError(KVStoreError):
    """Surely not done. The same call may succeed when made again."""


class ConflictError(RetryableError):
    """What a transaction read was changed by a later commit; none of it was written."""

    def __init__(self, *, read_at: int, written_at: int, where: str) -> None:
        super().__init__(
            f"{where} was written at {written_at}, after the transaction's reads at {read_at}",
            "run the transaction again (store.transact does)",
        )
        self.read_at = read_at
        self.written_at = written_at
        self.where = where


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
    """A change of tasks depends on what is no longer so; none of it was done.

    `failures` names every dependency that failed: (task id, expected version, found version);
    a version is None where the task does not exist, or was expected not to.
    """

    def __init__(self, failures: Sequence[tuple[str, int | None, int | None]]) -> None:
        named = ", ".join(
            f"task {task} is {_version_text(found)}, not {_version_text(expected)}"
            for task, expected, found in failures
        )
        super().__init__(named, "read the tasks again and decide anew")
        self.failures = tuple(failures)


class HistoryHeldError(RetryableError):
    """`holder` needs history of the span that was to be destroyed; nothing was."""

    def __init__(self, span: tuple[bytes, bytes | None], *, holder: str) -> None:
        super().__init__(
            f"history of {_span_text(span)} is needed by {holder}",
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
    """A wait ended before what it waited for did. Nothing was changed."""

    def __init__(self, what: str, *, waited_s: float) -> None:
        super().__init__(
            f"{what} still open after {waited_s:g} s", "end them, or wait longer (timeout=)"
        )
        self.waited_s = waited_s


class StaleReaderError(RetryableError):
    """The writer of the store at `path` has removed files that a read-only handle needs."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"files of {path} were removed by the process that writes it",
            "open it to be read again, or read a copy made by store.checkpoint",
        )
        self.path = path


class LockedError(RetryableError):
    """Another owner holds `path` open for writing."""

    def __init__(self, path: str, owner: str = "another process") -> None:
        super().__init__(f"{path} is held by {owner}", "close it there, or wait until it is closed")
        self.path = path
        self.owner = owner


# -- frontiers ------------------------------------------------------------------------------


class HistoryGoneError(KVStoreError):
    """History at `as_of` may be gone: it lies below `since` (of the span, where one is given)."""

    def __init__(
        self,
        *,
        as_of: int,
        since: int,
        span: tuple[bytes, bytes | None] | None = None,
        remedy: str = "",
    ) -> None:
        where = "" if span is None else f" in {_span_text(span)}"
        super().__init__(
            f"history{where} at {as_of} is gone: it is kept from {since} on",
            remedy or f"read at {since} or later; a hold keeps history for longer",
        )
        self.as_of = as_of
        self.since = since
        self.span = span


class NotYetWrittenError(KVStoreError):
    """`as_of` is not complete yet: commits below it may still come."""

    def __init__(self, *, as_of: int, upper: int) -> None:
        super().__init__(
            f"time {as_of} is not complete: the store is complete below {upper}",
            f"read below {upper}, or wait",
        )
        self.as_of = as_of
        self.upper = upper


# -- step down ------------------------------------------------------------------------------


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


# -- outcome unknown ------------------------------------------------------------------------


class StorageError(KVStoreError):
    """Storage failed in the middle. What was acknowledged stands; the last write may or may not."""


class OutOfSpaceError(StorageError):
    """The disk is full. What was acknowledged stands."""

    def __init__(self, where: str) -> None:
        super().__init__(f"no space left while writing {where}", "free space, then reopen")
        self.where = where


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


class PoisonedError(StorageError):
    """An earlier write or fsync failed, so what is on disk is not known. Every call raises this."""

    def __init__(self, where: str, cause: str) -> None:
        super().__init__(
            f"{where} refuses all calls since a write failed ({cause})",
            "close it and open it again; acknowledged durable commits are kept",
        )
        self.where = where
        self.cause = cause


# -- stop -----------------------------------------------------------------------------------


class CorruptionError(KVStoreError):
    """Bytes at `where` are not what was written there."""

    def __init__(self, where: str, problem: str, remedy: str = "restore it from a backup") -> None:
        super().__init__(f"{where} is damaged: {problem}", remedy)
        self.where = where
        self.problem = problem


class JournalDamagedError(CorruptionError):
    """A journal file is damaged at `offset`; the records `first..last` cannot be read.

    `last` is None where no record behind the damage tells how many are gone, and below `first`
    where no record is gone.
    """

    def __init__(
        self, path: str, *, offset: int, first: int, last: int | None, problem: str
    ) -> None:
        if last is None:
            lost = f"ordinal {first} and what follows cannot be read"
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
    """The newest states of a collection (or of a shard of it) are gone: it was cut, emptied or put
    back from an older copy. `known` is the newest that there surely was, `found` the newest that
    is there; both are versions of the state, or both are times."""

    def __init__(self, where: str, *, found: int, known: int, remedy: str = "") -> None:
        super().__init__(
            where,
            f"its newest state is {found}, and there was {known}: it is an older copy, or cut",
            remedy or "put the newest copy of all of it back; what is there can be restored as_of=",
        )
        self.found = found
        self.known = known


class EventsMissingError(CorruptionError):
    """Changes and the epochs that count them do not agree: some are missing, or too many."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem, "start over from a full read, and report it")


def _version_text(version: int | None) -> str:
    return "absent" if version is None else f"at version {version}"


def _span_text(span: tuple[bytes, bytes | None]) -> str:
    start, end = span
    return f"[{printable(start)}, {'end' if end is None else printable(end)})"
