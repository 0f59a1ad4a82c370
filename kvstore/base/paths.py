"""Checks of paths that callers pass: of the form of a path, of what lies there, and of its parents.

A check raises `UsageError` with the argument and with what to pass, or `AccessDeniedError` and
`StorageError` where the disk refuses.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstore.base.notices import notice
from kvstore.errors import Argument, UsageError, Words, storage_errors


def require_path(path: object, *, name: str = "path") -> Path:
    """`path` as a `Path`, if it is a text or a path: absolute and without links.

    The result names the same place after the process has changed its directory. One place has one
    name, because RocksDB compares names to find out whether this process has it open already.

    A URL is refused: as a path it would name a directory `s3:` in the working directory.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise UsageError(
            (Argument(name), f" must be a path, not {type(path).__name__}"), "pass a str or Path"
        )
    if not os.fspath(path):  # not the working directory: an unset variable in a script
        raise UsageError((Argument(name), " is empty"), "pass the path of a directory")
    if is_url(text := os.fspath(path)):
        raise UsageError(
            (
                Argument(name),
                f" {text} is a URL, and a directory of a file system is needed",
            ),
            "pass the path of a directory",
        )
    if "\0" in text:
        raise UsageError((Argument(name), f" {text!r} holds a zero byte"), "pass another path")
    require_no_home(text, name=name)
    try:
        return Path(os.path.realpath(path))
    except (OSError, UnicodeError) as error:  # the working directory is gone; a lone surrogate
        raise UsageError((Argument(name), f" {text!r}: {error}"), "pass another path") from error


def require_no_home(text: str, *, name: str = "path") -> None:
    """Raise `UsageError` for a path that begins with `~`. A shell makes the home directory of it,
    and Python does not: it would be a directory of that name, which nobody finds again."""
    if text.startswith("~"):
        raise UsageError(
            (Argument(name), f" {text!r} begins with ~, which stands for a home only in a shell"),
            f"pass os.path.expanduser({text!r}); or ./{text} for a file of that name",
        )


def require_absolute(path: str | os.PathLike[str], *, name: str = "path") -> Path:
    """`path` as an absolute `Path`, checked as by `require_path`. Links are not
    resolved, because a call that makes something at the path refuses a link."""
    require_path(path, name=name)
    return Path(path).absolute()


def is_url(path: str) -> bool:
    """Whether a text is a URL; also one with a single slash, as `Path("s3://b")` has."""
    scheme, colon, rest = path.partition(":")
    if not colon or "/" in scheme:  # `./a:` is a directory
        return False
    return rest.startswith("//") or (rest[:1] == "/" and scheme.lower() in URL_SCHEMES)


_OPENED: Final = ("file", "memory", "http", "https", "s3", "s3a", "s3n", "gs", "az")
_OF_HADOOP: Final = ("abfs", "abfss", "wasb", "wasbs", "hdfs", "webhdfs", "viewfs", "dbfs")
URL_SCHEMES: Final = frozenset((*_OPENED, *_OF_HADOOP))
"""The schemes of URLs that Spark and Hadoop also write with one slash, as `dbfs:/folder`."""


def require_absent(path: Path, *, advice: Words) -> None:
    """Raise `UsageError` with `advice` if something is at `path`, be it a link that leads nowhere.
    A disk that fails raises `StorageError`."""
    with storage_errors(str(path)):
        try:
            # `exists` takes a failing disk for a missing file, or raises an `OSError`
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
    raise UsageError(f"{path} exists", advice)


def require_parent(path: Path) -> None:
    """Raise `UsageError` unless `path` has a directory that it can be made in, durably: see
    `require_syncable`."""
    if not stat.S_ISDIR(_mode(path.absolute().parent)):
        raise UsageError(
            f"there is no directory {path.parent}",
            "make it first; or check the path, and whether the disk is mounted",
        )
    require_syncable(path)


def tell_of_parent(path: Path) -> None:
    """Warn that the directory of `path` is going to be made, if there is none: the path may be
    mistyped, or a disk not mounted."""
    if not stat.S_ISDIR(_mode(path.absolute().parent)):
        made = str(path.parent)
        notice("kvstore.store", "making a missing directory", level=logging.WARNING, path=made)


def require_syncable(path: Path) -> None:
    """Raise `AccessDeniedError` where the directory of `path`, if there is one, cannot be opened:
    a new name in it could not be made durable, and the error would come when all was written."""
    with storage_errors(str(path)), suppress(FileNotFoundError, NotADirectoryError):
        os.close(os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def require_outside(path: Path, *, name: str) -> None:
    """Raise `UsageError` if something new would lie inside a store, a collection or an import: what
    tidies, restores, moves or removes that directory would take it along. Links are followed.

    Looks at a few names in each directory above `path`.
    """
    for above in Path(os.path.realpath(path)).parents:
        kind = _kind_of(above)
        if kind is not None:
            raise UsageError(
                (Argument(name), f" {path} lies inside {kind} at {above}"),
                "choose a path beside it",
            )


_JOURNAL: Final = re.compile(r"[0-9a-f]{16}-(journal|snapshot)(-final)?")


def _kind_of(directory: Path) -> str | None:
    """What `directory` is, by the names in it: a store, a collection or an import. None for all
    else, and for a directory that cannot be searched."""
    with suppress(OSError):
        if (directory / "CURRENT").exists() and (directory / "IDENTITY").exists():
            return "the store"
        # Only a directory with a lock is listed: another one may have millions of names.
        if (directory / "LOCK").exists():
            with os.scandir(directory) as entries:
                if any(_JOURNAL.fullmatch(entry.name) for entry in entries):
                    return "the store"
        if (directory / "blob").is_dir() and (directory / "consensus").is_dir():
            return "the collection"
        if (directory / "import.json").exists():
            return "the import"
    return None


def require_place_of_copy(path: object, *, store: Path | None) -> Path:
    """`path` as a `Path`, if a checkpoint of the store at `store` can be made there: nothing is at
    the path, and the path is not inside the store's directory, which an opening tidies."""
    target = require_path(path)
    require_absent(target, advice="checkpoint into a path that does not exist")
    if store is not None and target.is_relative_to(os.path.realpath(store)):
        raise UsageError(f"{target} is inside the store", "checkpoint into a path beside the store")
    require_outside(target, name="path")
    require_parent(target)
    return target


def is_there(path: Path) -> bool:
    """Whether `path` leads to something. A disk that fails raises `StorageError`."""
    return _mode(path) != 0


def _mode(path: Path) -> int:
    """The mode of the file that `path` leads to, 0 if there is none."""
    with storage_errors(str(path)):
        try:
            return os.stat(path).st_mode
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            return 0
