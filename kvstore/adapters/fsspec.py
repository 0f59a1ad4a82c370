"""A store as a file system of fsspec: a key is a path, its value is the file.

    pandas.read_csv("kvstore:///data/flights.db@2026-11-01T00:00:00Z/reports/delays.csv")

    url := kvstore:// store @ time / key
           store   the path of a store, or the URL of a server; it ends at the first @
           time    as `Store.get` takes it, such as -1h; empty: the newest

Directories are the beginnings of keys up to a slash: none exists without a file in it. A path has
no slash at its ends, and keys that are no UTF-8 come as Python's file names do (surrogates).
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal

import fsspec
import pyarrow as pa
from fsspec.spec import AbstractFileSystem
from fsspec.transaction import Transaction

from kvstore.adapters.tree import children
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.errors import PreconditionError, UsageError
from kvstore.remote.handle import Handle, Where

PROTOCOL: Final = "kvstore"
_NAMES_AT_ONCE: Final = 256
"""Values that a listing with sizes reads at once."""


class _OfOpenStores(type(AbstractFileSystem)):  # type: ignore[misc]  # the class of fsspec's
    """fsspec keeps each file system that was made, by the text of its arguments. One of an open
    store is not kept: another store may be opened there."""

    def __call__(cls, store: Any = None, *args: Any, **options: Any) -> Any:
        if not isinstance(store, str | os.PathLike | None):
            options["skip_instance_cache"] = True
        return super().__call__(store, *args, **options)


class KVStoreFileSystem(AbstractFileSystem, metaclass=_OfOpenStores):
    """The files of one store, at one time or the newest. A file is written by one commit when it is
    closed, and all files of a `with fs.transaction:` block by one commit at its end."""

    protocol = PROTOCOL
    root_marker = ""

    def __init__(
        self,
        store: Where | None = None,
        as_of: TimeLike | None = None,
        *,
        token: str | None = None,
        **options: Any,
    ) -> None:
        """`store` is the path of a store, the URL of a server, or an open store. With `as_of` the
        file system is read only. A relative time moves on: each call looks that long back."""
        super().__init__(**options)
        if store is None:
            raise UsageError(
                "the URL names no store", "write kvstore://path@time/key, or pass store="
            )
        self.handle = Handle(store, token=token, read_only=as_of is not None)
        self.as_of = as_of

    @property
    def transaction_type(self) -> type[Transaction]:
        """The class of `fs.transaction`."""
        return OneCommit

    # -- names ------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path)
        if text.startswith(f"{PROTOCOL}://"):
            *_, text = _url(text)
        return text.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        store, time, _ = _url(path)
        return {} if store is None else {"store": store, "as_of": time or None}

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path, with the store and the time of this file system."""
        path = self._strip_protocol(name)
        return f"{PROTOCOL}://{self.handle.address}@{self.as_of or ''}/{path}"

    # -- reading ----------------------------------------------------------------------------

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type of a file or directory. Reads the whole file for its size."""
        path = self._strip_protocol(path)
        value = self._get(path)
        if value is not None:
            return _file(path, len(value))
        if not path or self._is_directory(path):
            return _directory(path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What lies in a directory. Costs a seek for each directory in it; `detail` reads the files
        for their sizes."""
        path = self._strip_protocol(path)
        below = _below(path)
        found = [each for each in children(self.handle.store, below, as_of=self.as_of) if each.name]
        names = [(_path(below + name), is_directory) for name, is_directory in found]
        if not names:
            return [self.info(path)] if detail else [self.info(path)["name"]]
        if not detail:
            return list(dict.fromkeys(name for name, _ in names))
        sizes = self._sizes([name for name, is_directory in names if not is_directory])
        listed = []
        for name, is_directory in names:
            if is_directory:
                listed.append(_directory(name))
            elif name in sizes:  # else another writer has deleted it meanwhile
                listed.append(_file(name, sizes[name]))
        return listed

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,
    ) -> Any:
        """All files below a path, by one pass over their keys."""
        if maxdepth is not None or withdirs:
            return super().find(path, maxdepth, withdirs, detail, **options)
        path = self._strip_protocol(path)
        keys = self.handle.store.keys(prefix=_below(path), as_of=self.as_of)
        names = [_path(key) for key in keys if not key.endswith(b"/")]
        if path and self._get(path) is not None:
            names.insert(0, path)
        if not detail:
            return names
        return {name: _file(name, size) for name, size in self._sizes(names).items()}

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """The bytes of a file, or of a part of it."""
        return self._require(self._strip_protocol(path))[start:end]

    def modified(self, path: str) -> datetime:
        """The time of the version that is read."""
        return self._version(path).to_datetime()

    def ukey(self, path: str) -> str:
        """A text that changes with each write of the file: the time of its version."""
        return str(self._version(path))

    # -- writing ----------------------------------------------------------------------------

    def pipe_file(
        self,
        path: str,
        value: bytes,
        mode: Literal["create", "overwrite"] = "overwrite",
        **_: Any,
    ) -> None:
        """Write a file by one commit. `mode="create"` raises `FileExistsError` for one that is
        there, also if another writer makes it at the same time."""
        self._require_writable(path)
        if self._intrans:
            with self.open(path, "xb" if mode == "create" else "wb") as file:
                file.write(value)
            return
        key = _key(self._strip_protocol(path))
        if mode != "create":
            self.handle.store.put(key, value)
            return
        try:
            self.handle.store.put_if(key, value, None)
        except PreconditionError as error:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy a file. Directories need no copy: they exist with their files."""
        source = self._strip_protocol(path1)
        value = self._get(source)
        if value is None:
            if self._is_directory(source):
                return
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path1)
        self.pipe_file(path2, value)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete files and, if `recursive`, all that lies below them, by one commit."""
        self._require_writable(path)
        deep = recursive and maxdepth is None
        found = self.expand_path(path, recursive=recursive and not deep, maxdepth=maxdepth)
        with self.handle.store.batch() as batch:
            for name in found:
                if not recursive:
                    self._require_file(name)
                elif deep:
                    if not self._is_there(name):
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
                    batch.delete_range(prefix=_below(name))
                if name:
                    batch.delete(_key(name))

    def rm_file(self, path: str) -> None:
        """Delete one file."""
        self._require_writable(path)
        self.handle.store.delete(_key(self._strip_protocol(path)))

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Does nothing: a directory exists as long as a file is in it."""
        self._require_writable(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing, as `mkdir`."""
        self._require_writable(path)

    def rmdir(self, path: str) -> None:
        """Raises `OSError` for a directory that has files; there are no others."""
        if self._is_directory(self._strip_protocol(path)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **_: Any,
    ) -> StoreFile:
        if mode == "rb":
            return StoreFile(self, path, mode, self._require(path))
        self._require_writable(path)
        old = self._get(path) if mode != "wb" else None
        if "x" in mode and old is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if mode.startswith("r") and old is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return StoreFile(self, path, mode, old or b"", autocommit=autocommit)

    # -- inside -----------------------------------------------------------------------------

    def _get(self, path: str) -> bytes | None:
        return self.handle.store.get(_key(path), as_of=self.as_of) if path else None

    def _require(self, path: str) -> bytes:
        value = self._get(path)
        if value is None:
            self._require_file(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return value

    def _is_there(self, path: str) -> bool:
        return not path or self._is_file(path) or self._is_directory(path)

    def _is_file(self, path: str) -> bool:
        key = _key(path)
        found = self.handle.store.keys(key, key + b"\0", as_of=self.as_of, limit=1)
        return bool(path) and next(found, None) is not None

    def _require_file(self, path: str) -> None:
        if self._is_file(path):
            return
        if not path or self._is_directory(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _is_directory(self, path: str) -> bool:
        keys = self.handle.store.keys(prefix=_below(path), as_of=self.as_of, limit=1)
        return next(keys, None) is not None

    def _sizes(self, names: list[str]) -> dict[str, int]:
        return dict(self._sized(names))

    def _sized(self, names: list[str]) -> Iterator[tuple[str, int]]:
        for at in range(0, len(names), _NAMES_AT_ONCE):
            some = names[at : at + _NAMES_AT_ONCE]
            values = self.handle.store.get_many([_key(name) for name in some], as_of=self.as_of)
            for name, value in zip(some, values, strict=True):
                if value is not None:
                    yield name, len(value)

    def _version(self, path: str) -> Timestamp:
        path = self._strip_protocol(path)
        self._require(path)
        labels: dict[str, Any] = {"id": pa.array([_key(path)], pa.binary())}
        store, at = self.handle.store, None
        if self.as_of is not None:
            with store.snapshot(self.as_of) as snapshot:
                labels["ts"], at = [snapshot.as_of], "ts"
        found = store.join(pa.table(labels), at=at).read_all()
        return Timestamp(found.column(found.num_columns - 1).cast(pa.int64())[0].as_py())

    def _require_writable(self, path: Any) -> None:
        if self.as_of is not None:
            raise OSError(errno.EROFS, "the past cannot be written", path)


class StoreFile(io.BytesIO):
    """An open file. Closing it writes the bytes by one commit; leaving its `with` block by an
    exception writes nothing."""

    def __init__(
        self,
        fs: KVStoreFileSystem,
        path: str,
        mode: str,
        data: bytes,
        *,
        autocommit: bool = True,
    ) -> None:
        super().__init__(data)
        self.fs, self.path = fs, path
        self.mode = mode  # type: ignore[misc]  # readers of fsspec look at it
        self._autocommit = autocommit
        self._is_dropped = mode == "rb"
        self.data: bytes | None = None
        """The bytes, once the file is closed and not written yet."""
        if mode.startswith("a"):
            self.seek(0, io.SEEK_END)

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self.getbuffer())

    def writable(self) -> bool:
        """Whether the file was opened to write."""
        return self.mode != "rb"

    def write(self, data: Any) -> int:
        """Add bytes at the place of the file."""
        if not self.writable():
            raise io.UnsupportedOperation("not writable")
        return super().write(data)

    def close(self) -> None:
        """Write the bytes, unless a transaction does. Repeatable."""
        if self.closed:
            return
        self.data = self.getvalue()
        super().close()
        if self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Write the bytes of a closed file."""
        if not self._is_dropped and self.data is not None:
            how: Literal["create", "overwrite"] = "create" if "x" in self.mode else "overwrite"
            self.fs.pipe_file(self.path, self.data, mode=how)
        self.discard()

    def discard(self) -> None:
        """Drop the bytes."""
        self._is_dropped, self.data = True, None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        self.discard()  # a file that was never closed was never finished

    def __reduce__(self) -> Any:
        if self.writable():
            raise UsageError("a file that is written belongs to its process", "close it first")
        return self.fs.open, (self.path, self.mode)


class OneCommit(Transaction):
    """The files of a transaction, written by one commit. Raises `ConflictError`, with nothing
    written, if another writer makes a file that the block creates."""

    fs: Any

    def complete(self, commit: bool = True) -> None:
        """Write all files that were closed in the block, or drop them."""
        fs, files = self.fs, list(self.files)
        self.files.clear()
        fs._intrans, fs._transaction, self.fs = False, None, None  # as its class does
        if commit:
            with fs.handle.store.transaction() as transaction:
                for file in files:
                    file.close()
                    if file.data is not None:
                        key = _key(fs._strip_protocol(file.path))
                        if "x" in file.mode and transaction.get(key) is not None:
                            raise FileExistsError(errno.EEXIST, "was made meanwhile", file.path)
                        transaction.put(key, file.data)
        for file in files:
            file.discard()


def _url(text: str) -> tuple[str | None, str, str]:
    """Store, time and key of a URL. A URL without an @ has a key alone."""
    rest = text.removeprefix(f"{PROTOCOL}://")
    store, at, behind = rest.partition("@")
    if not at:
        return None, "", rest
    time, _, key = behind.partition("/")
    return store, time, key


def _key(path: str) -> bytes:
    return path.encode(errors="surrogateescape")


def _path(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


def _below(path: str) -> bytes:
    return _key(path) + b"/" if path else b""


def _file(name: str, size: int) -> dict[str, Any]:
    return {"name": name, "size": size, "type": "file"}


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


fsspec.register_implementation(PROTOCOL, KVStoreFileSystem, clobber=True)
