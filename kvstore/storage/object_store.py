"""Blobs and consensus on an object store (S3, GCS, Azure, or a folder), through obstore.

`put(mode="create")` writes an object only where none of that name exists. That is the
write-once rule of blobs, and all the compare-and-set that consensus needs.

Objects of consensus, below `<prefix>/<key>/`
    v<index, 20 digits>      the index-th version of the key: indexes are dense, from 1
    floor<index, 20 digits>  empty: versions below this index are truncated, even if listed
Bytes of a version object
    seqno  u64, big-endian
    nonce  16 random bytes of the one call that wrote it
    data   the rest

Invariants
1. Setting the version after index i creates index i + 1, which only one can do.
2. The floor is written before anything below it is deleted. A writer may sleep so long that its
   index is truncated away, and then create that index again: it finds a floor above the index.
   This looks the same as a truncation just after its own commit, so it raises
   `IndeterminateError`. The created object is ignored, because of rule 3.
3. The head is never deleted: the highest index is always the true head, and objects below the
   floor are never versions.
4. A client library may repeat a put whose reply was lost, and then learn that the object exists.
   The nonce shows that this was our own put, so a commit is never taken for a mismatch. Where a
   read behind the put fails, the outcome is unknown, and `IndeterminateError` says so.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import obstore
import obstore.store
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore, from_url

from kvstore.base.forks import own
from kvstore.base.meters import OnProgress, WorkCount
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    NoBucketError,
    StorageError,
    UsageError,
)
from kvstore.limits import (
    OBJECT_PIECE_BYTES,
    OBJECT_PIECES_AT_ONCE,
    OBJECT_REQUEST_S,
    OBJECT_RETRIES_MAX,
)
from kvstore.storage.contract import (
    BlobInfo,
    Cas,
    Versioned,
    name_taken,
    require_cas,
    require_consensus_key,
    require_name,
    require_truncation,
)
from kvstore.storage.local_files import not_done, translate_os_error
from kvstore.storage.patience import PATIENCE, Patience

_HEADER = struct.Struct(">Q16s")
_INDEX_DIGITS = 20
_CONNECT = timedelta(seconds=5)
_LOOKS_MAX = 100
"""How often a truncation may overtake a reader before it gives up."""
_PARALLEL_GETS = 8
"""Small objects that a scan fetches at a time: a scan waits for latency, not for bandwidth."""

_T = TypeVar("_T")


def open_object_store(
    url: str, *, patience: Patience = PATIENCE, **options: Any
) -> tuple[ObjectBlob, ObjectConsensus]:
    """Blob and consensus below `url`: s3://bucket/path, gs://, az://, or another URL of obstore.

    Providers' own addresses are https; where an endpoint is given as http, that is meant.
    Requests and retries of obstore itself are bounded, unless `client_options` and `retry_config`
    say otherwise; `patience` bounds the attempts on top of them. Raises `UsageError` if it does
    not understand the URL or an option.
    """
    store = _opened(url, patience, options)
    return ObjectBlob(store, "blob", patience=patience), ObjectConsensus(store, "consensus")


def open_object_blob(url: str, *, patience: Patience = PATIENCE, **options: Any) -> ObjectBlob:
    """A blob of the objects directly below `url`. Otherwise as `open_object_store`."""
    return ObjectBlob(_opened(url, patience, options), patience=patience)


def _opened(url: str, patience: Patience, options: dict[str, Any]) -> ObjectStore:
    try:
        client = _client(patience) | options.pop("client_options", {})
        retries = _retries(patience) | options.pop("retry_config", {})
        return from_url(url, client_options=client, retry_config=retries, **options)
    except BaseException as error:
        # obstore panics, by a `BaseException`, at client options among the store's options
        panicked = type(error).__name__ == "PanicException"
        if not panicked and not isinstance(error, BaseError | ValueError | TypeError):
            raise
        remedy = "check the URL, the provider's environment variables and options="
        if panicked:
            remedy = "put the options of the HTTP client into options={'client_options': {...}}"
        raise UsageError(f"{url!r} cannot be opened: {first_line(error)}", remedy) from error


def _client(patience: Patience) -> dict[str, Any]:
    request = timedelta(seconds=max(min(patience.seconds, OBJECT_REQUEST_S), 1))
    return {"allow_http": True, "timeout": request, "connect_timeout": min(request, _CONNECT)}


def _retries(patience: Patience) -> dict[str, Any]:
    """Few retries, soon: only the attempts of `patience` are reported."""
    return {
        "max_retries": OBJECT_RETRIES_MAX,
        "retry_timeout": timedelta(seconds=max(min(patience.seconds, OBJECT_REQUEST_S), 1)),
    }


class ObjectBlob:
    """Blobs as objects below `prefix` of an obstore `store`."""

    def __init__(
        self, store: ObjectStore, prefix: str = "", *, patience: Patience = PATIENCE
    ) -> None:
        self.patience = patience
        self._store = store
        self._prefix = _with_slash(prefix)

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`; always durable."""
        path = self._prefix + require_name(name)
        if not _create(self._store, path, data) and self.get(name) != data:
            raise name_taken(name)

    def put_file(self, name: str, path: Path) -> None:
        """See `TakesFiles.put_file`. Large files are sent in pieces, some of them at once."""
        target = self._prefix + require_name(name)
        with translated(f"put of {target}", IndeterminateError):
            obstore.put(
                self._store,
                target,
                path,
                chunk_size=OBJECT_PIECE_BYTES,
                max_concurrency=OBJECT_PIECES_AT_ONCE,
            )

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        return _get(self._store, self._prefix + name)

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`. One request, unless the range begins at the end or behind it."""
        path = self._prefix + name
        if length <= 0:
            return None if self.size(name) is None else b""
        try:
            return _get(self._store, path, {"range": (start, start + length)})
        except (DeterminateError, StorageError):
            size = self.size(name)  # stores refuse a range that begins behind the end
            if size is not None and start < size:
                raise
            return None if size is None else b""

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        path = self._prefix + name
        return _read(path, lambda: int(obstore.head(self._store, path)["size"]))

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`. Two deletes at once may both report the size."""
        size = self.size(name)
        if size is not None:
            _delete(self._store, self._prefix + name)
        return size

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`. Lists the folder the prefix lies in; O(its objects) memory."""
        folder, _, _ = (self._prefix + prefix).rpartition("/")
        found = _list(self._store, folder)
        for path, size in found:
            name = path.removeprefix(self._prefix)
            if path.startswith(self._prefix) and name.startswith(prefix):
                yield BlobInfo(name, size)


class ObjectConsensus:
    """Consensus as objects below `prefix` of an obstore `store`."""

    def __init__(self, store: ObjectStore, prefix: str = "consensus") -> None:
        self._store = store
        self._prefix = _with_slash(prefix)
        self._seqnos: dict[tuple[str, int], int] = {}  # versions never change: safe to keep

    def head(self, key: str) -> Versioned | None:
        """See `Consensus.head`. Costs one list and one get."""
        found = self._head(key)
        return None if found is None else found[1]

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        """See `Consensus.compare_and_set`. Costs one list, one get, one put and one list."""
        require_cas(key, expected=expected, new=new)
        found = self._head(key)
        index, head = (0, None) if found is None else found
        if (None if head is None else head.seqno) != expected:
            return Cas.MISMATCH
        path = self._version_path(key, index + 1)
        header = _HEADER.pack(new.seqno, secrets.token_bytes(16))
        is_created = _create(self._store, path, header + new.data)
        with unknown(f"compare-and-set of {path}"):
            if not is_created:
                existing = _get(self._store, path)
                if existing is None or not existing.startswith(header):
                    return Cas.MISMATCH
            if self._floor(key) > index + 1:
                raise IndeterminateError(f"compare-and-set of {path}", "it was truncated meanwhile")
        return Cas.COMMITTED

    def scan(self, key: str, *, start: int, limit: int) -> list[Versioned]:
        """See `Consensus.scan`. Costs a list, O(log n) gets to find the start, and the gets."""
        for _ in range(_LOOKS_MAX):
            indexes = self._live(key)
            first = self._first_at_or_above(key, indexes, start)
            if first is None:
                continue
            wanted = indexes[first : first + limit]
            with ThreadPoolExecutor(_PARALLEL_GETS) as pool:
                found = list(pool.map(lambda index: self._version(key, index), wanted))
            versions = [version for version in found if version is not None]
            if len(versions) == len(found):
                return versions
            # A truncation overtook the gets: list again, with its floor.
        raise DeterminateError(f"scan of {self._prefix}{key}", "truncations kept overtaking it")

    def truncate(self, key: str, seqno: int) -> int | None:
        """See `Consensus.truncate`. Costs a list, the floor's put, and a delete per version."""
        head = self.head(key)
        require_truncation(key, seqno, head)
        indexes = self._live(key)
        first = self._first_at_or_above(key, indexes, seqno)
        if not first:
            return 0
        floor = indexes[first]
        _create(self._store, f"{self._prefix}{key}/floor{floor:0{_INDEX_DIGITS}}", b"")
        for path, _ in _list(self._store, self._prefix + key):
            _, index = _parse(path)
            if index < floor:
                _delete(self._store, path)
                self._seqnos.pop((key, index), None)
        return first

    def list_keys(self) -> list[str]:
        """See `Consensus.list_keys`. Costs one list with a delimiter."""
        path = self._prefix.rstrip("/")
        with translated(f"list of {path}", DeterminateError):
            listed = obstore.list_with_delimiter(self._store, path or None)
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"])

    def _head(self, key: str) -> tuple[int, Versioned] | None:
        """The highest index and its version. Invariant 3 says why no floor is needed."""
        for _ in range(_LOOKS_MAX):
            versions = [i for kind, i in self._listed(key) if kind == "v"]
            if not versions:
                return None
            version = self._version(key, max(versions))
            if version is not None:
                return max(versions), version
        raise DeterminateError(f"head of {self._prefix}{key}", "it is listed and cannot be read")

    def _live(self, key: str) -> list[int]:
        """The indexes at or above the floor, ascending."""
        listed = self._listed(key)
        floor = max((i for kind, i in listed if kind == "floor"), default=0)
        return sorted(i for kind, i in listed if kind == "v" and i >= floor)

    def _floor(self, key: str) -> int:
        return max((i for kind, i in self._listed(key) if kind == "floor"), default=0)

    def _listed(self, key: str) -> list[tuple[str, int]]:
        found = _list(self._store, self._prefix + require_consensus_key(key))
        return [_parse(path) for path, _ in found]

    def _version_path(self, key: str, index: int) -> str:
        return f"{self._prefix}{key}/v{index:0{_INDEX_DIGITS}}"

    def _version(self, key: str, index: int) -> Versioned | None:
        path = self._version_path(key, index)
        data = _get(self._store, path)
        if data is None:
            return None
        if len(data) < _HEADER.size:
            raise CorruptionError(path, f"{len(data)} bytes are too few for a version")
        version = Versioned(_HEADER.unpack_from(data)[0], data[_HEADER.size :])
        self._seqnos[key, index] = version.seqno
        return version

    def _first_at_or_above(self, key: str, indexes: list[int], seqno: int) -> int | None:
        """Where in `indexes` the versions at or above `seqno` begin; None if one vanished."""
        low, high = 0, len(indexes)
        while low < high:
            middle = (low + high) // 2
            index = indexes[middle]
            found = self._seqnos.get((key, index))
            if found is None:
                version = self._version(key, index)
                if version is None:
                    return None
                found = version.seqno
            if found < seqno:
                low = middle + 1
            else:
                high = middle
        return low


def _with_slash(prefix: str) -> str:
    return prefix.strip("/") + "/" if prefix.strip("/") else ""


def _parse(path: str) -> tuple[str, int]:
    name = path.rpartition("/")[2]
    kind = name.rstrip("0123456789")
    if kind not in ("v", "floor") or len(name) != len(kind) + _INDEX_DIGITS:
        raise CorruptionError(path, "it is not a version of this consensus", "move it elsewhere")
    return kind, int(name[len(kind) :])


def _create(store: ObjectStore, path: str, data: bytes) -> bool:
    """Write a new object; False where one of that name exists."""
    with translated(f"put of {path}", IndeterminateError), suppress(AlreadyExistsError):
        # One request: a multipart upload would give up the create condition.
        obstore.put(store, path, data, mode="create", use_multipart=False)
        return True
    return False


def write_object(below: str, name: str, where: str, file: BinaryIO, progress: OnProgress) -> None:
    """See `kvstore.storage.address.fetch_object`. The object is `name` below the URL `below`, and
    errors call it `where`. Its name may have any characters. It is read in pieces, each of which is
    asked for again after failures that may pass."""
    store = _opened(below, PATIENCE, {})
    found = PATIENCE.over(lambda: _read(where, lambda: obstore.head(store, name)))
    if found is None:
        raise UsageError(f"{where} is not there", "check the URL")
    size, tag = found["size"], found["e_tag"]
    for start in range(0, size, OBJECT_PIECE_BYTES):
        progress(WorkCount.of(start, size))
        options: dict[str, Any] = {"range": (start, min(start + OBJECT_PIECE_BYTES, size))}
        if tag is not None:
            options["if_match"] = tag
        try:
            piece = PATIENCE.over(partial(_get, store, name, options))
        except StorageError as error:
            if not isinstance(error.__cause__, PreconditionError):
                raise
            piece = None
        if piece is None:
            raise StorageError(
                f"{where} was replaced or deleted while it was read", "run the command again"
            )
        file.write(piece)


def _get(store: ObjectStore, path: str, options: Any = None) -> bytes | None:
    return _read(path, lambda: bytes(obstore.get(store, path, options=options).bytes()))


def _read(path: str, call: Callable[[], _T]) -> _T | None:
    """The result of `call`; None where the object is not there."""
    with translated(f"read of {path}", DeterminateError), suppress(FileNotFoundError):
        return call()
    return None


def _delete(store: ObjectStore, path: str) -> None:
    with translated(f"delete of {path}", IndeterminateError), suppress(FileNotFoundError):
        obstore.delete(store, path)


def _list(store: ObjectStore, folder: str) -> list[tuple[str, int]]:
    """Path and size of every object below `folder`, ascending."""
    with translated(f"list of {folder}", DeterminateError):
        listed = [meta for chunk in obstore.list(store, folder or None) for meta in chunk]
    return sorted((meta["path"], meta["size"]) for meta in listed)


# --------------------------------------------------------------------------------------------------
# Failures of an object store, as errors of the one tree.
#
# Invariants
# 1. A failure that may pass becomes the error that the caller passes: the call had no effect, or
#    its effect is unknown.
# 2. A failure that another attempt would meet again is raised at once, with the remedy.

_METADATA_SERVICE = "169.254.169.254"
"""The address at which a provider's machines ask for credentials that are found nowhere else."""
_CREDENTIALS = (
    "check the credentials, in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY) or options=, and what they allow"
)
_PASSING = re.compile(
    r"status code: (408|409|425|429|500|502|503|504|509|52\d)\b"
    r"|\b(RequestTimeout|SlowDown|OperationAborted|ServerBusy|OperationTimedOut)\b"
    r"|error sending request|error decoding response body|timed out|connection closed"
)
"""Messages of obstore for failures that may pass: a status, a provider's code inside a status 400,
or no answer at all."""
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class _Client:
    """obstore's threads: one set for the process, which a forked child does not get."""

    def __init__(self) -> None:
        self._is_owned = False

    def use(self) -> None:
        """Call it before any request. Raises `ForkedError` where a request would hang."""
        if not self._is_owned:
            self._is_owned = True
            remedy = "start a fresh process (spawn, forkserver, subprocess), or fork before any use"
            own(self, "the client of object stores", remedy=remedy)


_CLIENT: Final = _Client()


@contextmanager
def translated(where: str, failure: type[DeterminateError | IndeterminateError]) -> Iterator[None]:
    """Translate the store's exceptions into errors of ours: `failure` where they may pass."""
    _CLIENT.use()
    try:
        yield
    except (BaseError, OSError) as error:
        raise _refusal(where, error) or _failure(where, error, failure) from error


@contextmanager
def unknown(where: str) -> Iterator[None]:
    """Raise `IndeterminateError` for a failed read that would have told the outcome of a put."""
    try:
        yield
    except (DeterminateError, AccessDeniedError, NoBucketError) as error:
        raise IndeterminateError(where, error.cause) from error


def _failure(
    where: str, error: Exception, failure: type[DeterminateError | IndeterminateError]
) -> KVStoreError:
    said = str(error).partition("\n\nDebug source")[0]
    if (number := _OS_ERROR.search(said)) is not None:
        cause = OSError(int(number[1]), first_line(error))
        is_unknown = failure is IndeterminateError
        return translate_os_error(where, cause) if is_unknown else not_done(where, cause)
    if _PASSING.search(said):
        return failure(where, first_line(error))
    remedy = "repair the storage; acknowledged writes stand"
    return StorageError(f"{where} failed: {first_line(error)}", remedy)


def _refusal(where: str, error: Exception) -> AccessDeniedError | NoBucketError | None:
    """The error of our tree if another attempt would meet `error` again, else None."""
    text = first_line(error)
    if _METADATA_SERVICE in text:
        return AccessDeniedError(where, f"no credentials were found ({text})", _CREDENTIALS)
    if _NO_BUCKET.search(str(error)) is not None:
        return NoBucketError(where, text)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return AccessDeniedError(where, text, _CREDENTIALS)
    # For an object 404 is no error: it is not there. For a list, the bucket is not there.
    if "404 Not Found" in text:
        return NoBucketError(where, text)
    return None


def first_line(error: BaseException) -> str:
    """The message of obstore without its debug output."""
    return str(error).partition("\n")[0]
