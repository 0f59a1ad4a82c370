"""Every error this project raises, in one tree, sorted by what the caller should do.

    KVStoreError
    |-- UsageError              fix the call, the option or the path; nothing was written
    |   |-- NotAStoreError          the directory holds something else
    |   |-- FormatVersionError      written by a newer or unknown release
    |   |-- AccessDeniedError       the storage refuses: see to permissions or credentials
    |   |-- NoBucketError           the bucket of an address does not exist: check its name
    |   |-- ForeignPackageError     another package hides our `bulk` or `backup`
    |   |-- NotFoundError           the call names a table, a hold or a feed that is not there
    |   |-- NotACounterError        the value of a key is no counter
    |   |-- NotCompiledError        the compiled modules are missing here
    |   |-- ClosedError             the object was closed; open a new one
    |   |-- ForkedError             a handle belongs to the process that opened it
    |   |-- KeyOrderError           keys must come in ascending order, each once
    |   |-- ImportRefusedError      a staged import is incomplete, altered or foreign
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
    |   `-- NotListeningError       no owner listens; open it, or open it there with control=True
    |-- HistoryGoneError        read at a newer time
    |-- NotYetWrittenError      wait until `upper` has passed the time
    |-- FencedError             step down: a newer owner has taken over
    |   |-- HoldLostError           the hold was invalidated: its budget was exceeded
    |   |-- LeaseExpiredError       a shard reader's lease ran out; its parts may be gone
    |   `-- OpaqueMismatchError     a critical hold carries another owner's token
    |-- StorageError            the outcome is unknown: reopen and look before retrying
    |   |-- OutOfSpaceError         the disk is full
    |   |-- IndeterminateError      a blob or consensus call may or may not have had its effect
    |   `-- PoisonedError           an earlier write failed; the handle refuses until reopened
    `-- CorruptionError         stop: the bytes are not the bytes that were written
        |-- StatesLostError           a collection lacks its newest states: it is an older copy
        |-- EventsMissingError        the change index does not hold what its epochs count
        `-- JournalDamagedError       a journal file is damaged; `salvage` rescues records

`backup.shard` adds two for programs that read shards without a collection: `MissingShardError`, a
`UsageError`, and `MissingPartError`, a `CorruptionError`.

Each message says what happened, where, and what to do; the same facts are fields of the error.
Foreign exceptions are translated where they enter (`raise ... from`). A broken invariant of ours is
an assertion, never one of these errors.

Floors, from the top:

    system                      errors of the operating system, translated
    corruption fenced frontiers retry storage usage    a module for each branch of the tree
    root
"""

from kvstore.errors.corruption import (
    CorruptionError,
    EventsMissingError,
    JournalDamagedError,
    StatesLostError,
)
from kvstore.errors.fenced import (
    FencedError,
    HoldLostError,
    LeaseExpiredError,
    OpaqueMismatchError,
)
from kvstore.errors.frontiers import (
    HistoryGoneError,
    NotYetWrittenError,
)
from kvstore.errors.retry import (
    BusyError,
    ConflictError,
    DependencyError,
    DeterminateError,
    HistoryHeldError,
    LockedError,
    NotListeningError,
    PreconditionError,
    RetryableError,
    StaleReaderError,
    TableAlteredError,
    UpperMismatchError,
)
from kvstore.errors.root import (
    KVStoreError,
    printable,
)
from kvstore.errors.storage import (
    IndeterminateError,
    OutOfSpaceError,
    PoisonedError,
    StorageError,
)
from kvstore.errors.usage import (
    KEYS_NAMED_MAX,
    AccessDeniedError,
    ClosedError,
    ForeignPackageError,
    ForkedError,
    FormatVersionError,
    ImportRefusedError,
    KeyConflictError,
    KeyOrderError,
    NoBucketError,
    NotACounterError,
    NotAStoreError,
    NotCompiledError,
    NotFoundError,
    NotUniqueError,
    UsageError,
)

__all__ = [
    "KVStoreError",
    "UsageError",
    "NotACounterError",
    "NotAStoreError",
    "NotFoundError",
    "FormatVersionError",
    "AccessDeniedError",
    "NoBucketError",
    "ForeignPackageError",
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
    "PoisonedError",
    "CorruptionError",
    "JournalDamagedError",
    "StatesLostError",
    "EventsMissingError",
    "printable",
    "KEYS_NAMED_MAX",
]
