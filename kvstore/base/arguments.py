"""Checks of arguments: a wrong type or range raises `UsageError` before anything is done."""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

from typing_extensions import TypeIs

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, plain_integer
from kvstore.errors import UsageError, storage_errors
from kvstore.limits import VALUE_BYTES_MAX

_Key = TypeVar("_Key")

VALUE_COLUMNS: Final = ("value", "value_timestamp")
"""The columns that a join adds, unless its caller names others."""


def require_path(path: object, *, name: str = "path") -> Path:
    """`path` as a `Path`, if it is a text or a path: absolute and without links.

    The result names the same place after the process has changed its directory. One place has one
    name, because RocksDB compares names to find out whether this process has it open already.

    A URL is refused: as a path it would name a directory `s3:` in the working directory.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise UsageError(f"{name} must be a path, not {type(path).__name__}", "pass a str or Path")
    if not os.fspath(path):  # not the working directory: an unset variable in a script
        raise UsageError(f"{name} is empty", "pass the path of a directory")
    if is_url(os.fspath(path)):
        raise UsageError(
            f"{name} {os.fspath(path)} is a URL, and a directory of a file system is needed",
            "pass the path of a directory",
        )
    if "\0" in os.fspath(path):
        raise UsageError(f"{name} {os.fspath(path)!r} holds a zero byte", "pass another path")
    try:
        return Path(os.path.realpath(path))
    except (OSError, UnicodeError) as error:  # the working directory is gone; a lone surrogate
        raise UsageError(f"{name} {os.fspath(path)!r}: {error}", "pass another path") from error


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


def require_absent(path: Path, *, advice: str) -> None:
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
        raise UsageError(f"there is no directory {path.parent}", "make it first")
    require_syncable(path)


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
                f"{name} {path} lies inside {kind} at {above}", "choose a path beside it"
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


def require_span(span: object) -> Span:
    """`span`, or every key where it is None."""
    if span is None:
        return Span()
    if not isinstance(span, Span):
        raise UsageError(f"span must be a Span, not {type(span).__name__}", "pass Span(start, end)")
    return span


def require_count(count: object, *, name: str, least: int = 1, most: int | None = None) -> int:
    """`count`, if it is an integer from `least` to `most`."""
    if type(count) is not int or count < least or (most is not None and count > most):
        bound = f"at least {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name}={count!r}", f"pass {bound}")
    return count


def require_limit(limit: object) -> int | None:
    """The `limit` of a scan."""
    if limit is not None and (type(limit) is not int or not 0 <= limit <= sys.maxsize):
        raise UsageError(f"limit={limit!r}", "pass a count, or None for all")
    return limit


def require_flag(flag: object, *, name: str) -> bool:
    """`flag`, if it is True or False: a text such as "no" would count as True."""
    if flag is True or flag is False:
        return flag
    raise UsageError(f"{name}={flag!r}", "pass True or False")


def require_integer(number: object, *, name: str) -> int:
    """`number` as an integer, even if it is one of numpy. A bool is refused."""
    found = plain_integer(number)
    if found is None:
        raise UsageError(f"{name}={number!r}", "pass an integer")
    return found


def require_seconds(seconds: object, *, name: str) -> float:
    """`seconds`, if it is a number that is not negative."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise UsageError(f"{name}={seconds!r}", "pass seconds")
    return seconds


def require_wait(timeout: object) -> float | None:
    """The seconds of a wait, None for no bound. A negative number becomes 0, and a number above the
    longest wait of the system becomes that wait."""
    if timeout is None:
        return None
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        seconds = float(min(max(timeout, 0.0), threading.TIMEOUT_MAX))
        if not math.isnan(seconds):
            return seconds
    raise UsageError(f"timeout={timeout!r}", "pass seconds, or None")


def require_age(age: object, *, name: str) -> timedelta | None:
    """`age`, if it is None or a timedelta that is not negative."""
    if age is not None and (not isinstance(age, timedelta) or age < timedelta(0)):
        raise UsageError(f"{name}={age!r}", "pass a timedelta that is not negative")
    return age


def require_value(value: object, *, name: str = "value") -> bytes:
    """`value` as bytes, if it can be stored: a buffer is copied."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(
            f"{name} must be bytes, not {type(value).__name__}", "encode it; None: use delete"
        )
    size = value.nbytes if isinstance(value, memoryview) else len(value)
    if size > VALUE_BYTES_MAX:
        raise UsageError(
            f"{name} has {size} bytes, at most {VALUE_BYTES_MAX} are stored",
            "split it over several keys",
        )
    return bytes(value)


def key_list(keys: Iterable[_Key]) -> list[_Key]:
    """`keys` as a list. The type of each key is checked elsewhere."""
    try:
        return list(keys)
    except TypeError as error:
        raise UsageError(f"keys must be many, not {type(keys).__name__}", "pass a list") from error


def chosen_columns(columns: object) -> tuple[str, ...] | None:
    """The names of columns that a caller chose, None for all. A text would be its letters."""
    if columns is None:
        return None
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise UsageError(f"columns={columns!r}", "pass a list of names")
    return tuple(columns)


def is_many(as_of: TimeLike | Sequence[TimeLike] | None) -> TypeIs[Sequence[TimeLike]]:
    """Whether `as_of` is a time for each key, rather than one time."""
    if as_of is None or isinstance(as_of, _ONE_TIME):
        return False
    return hasattr(as_of, "__len__")


_ONE_TIME: Final = (int, str, bytes, datetime)
"""A tuple, because a call that writes `int | str` makes the union anew."""
