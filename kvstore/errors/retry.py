"""Errors of calls that were surely not carried out: the same call may succeed when repeated."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors.root import KVStoreError, printable, span_text


class RetryableError(KVStoreError):
    """The call surely changed nothing. The same call may succeed when repeated."""


class ConflictError(RetryableError):
    """A later commit changed a key that the transaction read. Nothing of it was written."""

    def __init__(self, *, read_at: int, written_at: int, where: str) -> None:
        super().__init__(
            f"{where} was written at {written_at}, after the transaction's reads at {read_at}",
            "run the transaction again (store.transact does)",
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
    """No process listens at the store at `path`: none has it open with `control=True`."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"no process listens at {path}",
            "open the store here; or have the process that has it open listen: "
            "kvstore.open(path, control=True)",
        )
        self.path = path


def _version_text(version: int | None) -> str:
    return "absent" if version is None else f"at version {version}"
