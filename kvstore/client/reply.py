"""An answer of a server: its head, parsed from bytes, and its body as one of the types we know.

Invariants
1. A head is bounded. A body takes memory for the bytes that have come, and not for the bytes that
   it declares. A server may be hostile too.
2. An answer that does not parse raises `StorageError`: nobody knows whether the server did the
   work.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import pyarrow as pa

from kvstore.errors import KVStoreError, StorageError
from kvstore.protocol import ARROW_TYPE, ERROR_NAME, JSON_TYPE, failure_of

_PASSED: Final = frozenset(
    {
        *(b"allow", b"location", b"set-cookie", b"referrer-policy"),
        *(b"content-security-policy", b"x-content-type-options", b"x-frame-options"),
        *(b"cross-origin-opener-policy", b"cross-origin-resource-policy"),
    }
)


class ReplyHead(NamedTuple):
    """The head of an answer. `length` is None where the body comes in chunks."""

    status: int
    kind: str
    length: int | None
    is_last: bool
    """Whether the server closes the connection behind the answer."""
    passed: tuple[tuple[bytes, bytes], ...] = ()
    """The headers for whoever is behind the caller: of a page, and of an error."""


class Reply(NamedTuple):
    """A whole answer. `where` names the server."""

    status: int
    kind: str
    body: bytes
    where: str

    def json(self) -> dict[str, Any]:
        """The JSON object of the answer. Raises `StorageError` for anything else."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise strange(self.where, f"no JSON: {error}") from error
        if not isinstance(found, dict):
            raise strange(self.where, "no JSON object")
        return _Fields(found, self.where)

    def table(self) -> pa.Table:
        """The rows of the answer. Raises `StorageError`."""
        try:
            with pa.ipc.open_stream(self.body) as reader:
                return reader.read_all()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise strange(self.where, f"no Arrow stream: {error}") from error

    @property
    def error(self) -> KVStoreError | None:
        """The error that the server answered with, if it did."""
        if self.status < 400:
            return None
        fields: Any = None
        if self.kind == JSON_TYPE:
            try:
                fields = json.loads(self.body)
            except (ValueError, RecursionError):
                fields = None
            if self.status == 404 and isinstance(fields, dict) and fields.get("found") is False:
                return None  # the key is absent
        return failure_of(fields, status=self.status, where=self.where)


class _Fields(dict[str, Any]):
    """The fields of an answer. A field that is missing raises `StorageError`: another server is at
    the address."""

    def __init__(self, found: dict[str, Any], where: str) -> None:
        super().__init__(found)
        self._where = where

    def __missing__(self, name: str) -> Any:
        raise strange(self._where, f"JSON without {name!r}")


def read_head(head: bytes, where: str) -> ReplyHead:
    """Parse the head of an answer, up to the empty line. Raises `StorageError`."""
    lines = head.split(b"\r\n")
    status = lines[0][9:12]
    if not lines[0].startswith(b"HTTP/1.") or not status.isdigit():
        raise strange(where, f"no HTTP: {lines[0][:80]!r}")
    kind, length, is_last = "", None, False
    passed: tuple[tuple[bytes, bytes], ...] = ()
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == b"content-length":
            text = value.strip()
            if not text.isdigit() or len(text) > 18:
                raise strange(where, "a content-length that is no number")
            length = int(text)
        elif name == b"content-type":
            kind = value.partition(b";")[0].strip().decode("latin-1")
        elif name == b"connection":
            is_last = value.strip().lower() == b"close"
        elif name in _PASSED:
            passed += ((name, value.strip()),)
    return ReplyHead(int(status), kind, length, is_last, passed)


def told_at_end(body: bytes, kind: str, where: str) -> KVStoreError | None:
    """The error in the last batch of an Arrow stream that broke off, if the server told it."""
    if kind != ARROW_TYPE:
        return None
    try:
        with pa.ipc.open_stream(body) as reader:
            while True:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
                if not batch.num_rows:
                    return told_by(metadata, where)
    except (StopIteration, pa.ArrowException, OSError, ValueError):
        return None


def told_by(metadata: pa.KeyValueMetadata | None, where: str) -> KVStoreError:
    """The error in the metadata of a batch without rows."""
    told = None if metadata is None else dict(metadata).get(ERROR_NAME)
    if told is None:
        return strange(where, "a batch without rows")
    try:
        found = json.loads(told)
    except (ValueError, RecursionError) as error:
        return strange(where, f"an error that is no JSON: {error}")
    return failure_of(found, status=500, where=where)


def strange(where: str, problem: str) -> StorageError:
    """The error for an answer that no server of ours gives."""
    return StorageError(
        f"{where} answered with {problem}", "check the address, and the proxies on the way"
    )
