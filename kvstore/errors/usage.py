"""Errors of the call itself: fix the call, the option or the path. Nothing was written."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors.root import KVStoreError, printable

KEYS_NAMED_MAX = 5
"""How many keys a message spells out: enough to recognise the data, few enough to read."""


class UsageError(KVStoreError, ValueError):
    """The call cannot be carried out as it was made. Nothing was written."""


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


class NotUniqueError(UsageError):
    """A row has the values of another row in a unique index. Nothing was written."""

    def __init__(self, where: str, *, values: str, other: str) -> None:
        super().__init__(f"{where}: {values} is taken by the row {other}", "choose other values")
        self.where = where
        self.values = values
        self.other = other


class KeyConflictError(UsageError):
    """An import would cover live keys, which its caller asked to refuse. Nothing was added."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        named = ", ".join(printable(key) for key in keys[:KEYS_NAMED_MAX])
        super().__init__(
            f"live keys are in the way of the import, first: {named}",
            'delete them, or ingest with on_conflict="overwrite"',
        )
        self.keys = tuple(keys)
