"""Evidence: files that tell an auditor what was proved or found, when, by whom and with what.

    {"kind": "drill" | "doctor", "format": 1, "made": time, "by": {...}, "versions": {...}, ...}

A file is one object of JSON, whose schema is in docs/reference/evidence. It is written once, with
an fsync, and never over another file: `kvstore backup drill --evidence DIRECTORY` leaves one file a
night.
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from kvstore.base.paths import require_path
from kvstore.base.timestamp import Timestamp
from kvstore.errors import UsageError, storage_errors
from kvstore.version import __version__

EVIDENCE_FORMAT: Final = 1
_LIBRARIES: Final = ("rocksdict", "pyarrow", "numpy", "obstore", "cryptography")

EvidenceKind: TypeAlias = Literal["drill", "doctor"]


def write_evidence(
    path: str | os.PathLike[str], kind: EvidenceKind, made: Timestamp, fields: Mapping[str, Any]
) -> Path:
    """Write a file of evidence; returns its path. In a directory it is named by its kind and time.

    Raises `UsageError` if the file exists, `StorageError` if it cannot be written. Nothing of it is
    there then. Costs two fsyncs, and an empty database that tells the release of RocksDB, 10 ms.
    """
    target = require_path(path, name="evidence")
    if target.is_dir():
        moment = made.to_datetime().strftime("%Y%m%dT%H%M%S.%fZ")
        target = target / f"{kind}-{moment}.json"
    whole = {
        "kind": kind,
        "format": EVIDENCE_FORMAT,
        "made": str(made),
        "by": _by(),
        "versions": _versions(),
        **fields,
    }
    text = json.dumps(whole, indent=2, ensure_ascii=False, default=str) + "\n"
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    with storage_errors(f"evidence {target}"):
        try:
            with temporary.open("xb") as file:
                file.write(text.encode("utf-8", "backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, target)  # refuses a file that is there, where a rename replaces
            except FileExistsError as error:
                raise _taken(target) from error
            except OSError as error:  # a file system without links
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                    raise
                with target.open("xb") as copy:
                    copy.write(temporary.read_bytes())
                    os.fsync(copy.fileno())
        finally:
            temporary.unlink(missing_ok=True)
    return target


def require_new(path: str | os.PathLike[str]) -> Path:
    """The path for a file of evidence, looked at before the work that it will tell of. Raises
    `UsageError` if a file is there."""
    target = require_path(path, name="evidence")
    if target.exists() and not target.is_dir():
        raise _taken(target)
    return target


def _taken(target: Path) -> UsageError:
    remedy = "name another file, or a directory: each file gets a name of its own there"
    return UsageError(f"evidence {target} is there already", remedy)


def _by() -> dict[str, Any]:
    """Who wrote it: the user and the process of this machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container has users without a name
        user = str(os.getuid())
    return {"user": user, "host": platform.node(), "process": os.getpid()}


def _versions() -> dict[str, str]:
    """The releases that did the work."""
    from kvstore.engine.rocks import release  # imported late: a command may need no RocksDB

    found = {
        "kvstore": __version__,
        "rocksdb": release(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
