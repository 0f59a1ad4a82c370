"""Many stores and their collections, backed up by one process, as a file in TOML names them.

    concurrency = 4                    stores at once; 1 by default
    bandwidth = "20MB"                 bytes a second of all together; no bound by default

    [stores.flights]                   a table for each store
    path = "flights.db"                beside the file, unless it is absolute
    collection = "s3://bucket/flights"
    key_file = "flights.key"           or passphrase_env: an encrypted collection
    max_age = "30d"                    as in Collection.backup

Invariants
1. A store that fails stops no other one. Its outcome has the error.
2. Nothing is backed up unless the whole file is understood.
3. A caller that is interrupted waits for no backup: each ends at its next rows, and the next run
   takes over its parts.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.backup.collection import Collection
from kvstore.backup.window import BackupInfo
from kvstore.base.arguments import AGE, integer
from kvstore.base.paths import is_url, require_path
from kvstore.errors import KVStoreError, RetryableError, StorageError, UsageError, storage_errors
from kvstore.limits import FLEET_CONCURRENCY_MAX, FLEET_FILE_BYTES_MAX
from kvstore.remote.control import reach
from kvstore.storage.wrapped import Bandwidth

_RATE: Final = re.compile(r"(\d{1,12})\s*(B|kB|MB|GB)(/s)?")
_RATE_UNITS: Final = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_TEXTS: Final = ("path", "collection", "key_file", "passphrase_env", "max_age")


class FleetStore(NamedTuple):
    """A store of a fleet, and the collection of its backups."""

    name: str
    path: str
    collection: str
    key_file: str | None = None
    passphrase_env: str | None = None
    max_age: timedelta | None = None


class Fleet(NamedTuple):
    """The stores of a file, and the bounds of their backups."""

    stores: tuple[FleetStore, ...]
    concurrency: int = 1
    bandwidth: int | None = None


class FleetOutcome(NamedTuple):
    """The backup of one store, or the error that ended it."""

    name: str
    info: BackupInfo | None
    error: str = ""


def read_fleet(path: str | os.PathLike[str]) -> Fleet:
    """Read a file of stores. Raises `UsageError` that names the place of a mistake."""
    require_path(path, name="the file of stores")
    file = Path(path)  # not resolved: relative paths in the file start beside a link
    try:
        with storage_errors(str(file)), file.open("rb") as stream:
            text = stream.read(FLEET_FILE_BYTES_MAX + 1)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | IsADirectoryError):
            raise UsageError(f"no file is at {file}", "check the path") from error
        raise
    fields = _parsed(file, text)
    tables = fields.pop("stores", None)
    if not isinstance(tables, dict) or not tables:
        raise UsageError(f"{file} names no stores", "write a table [stores.NAME] for each")
    concurrency, rate = fields.pop("concurrency", 1), fields.pop("bandwidth", None)
    if fields:
        raise UsageError(
            f"{file} has unknown fields: {', '.join(sorted(fields))}",
            "at its top it has concurrency and bandwidth",
        )
    integer(1, FLEET_CONCURRENCY_MAX).check("concurrency", concurrency)
    stores = tuple(_store(file, name, table) for name, table in tables.items())
    place, count = Counter(store.collection for store in stores).most_common(1)[0]
    if count > 1:
        raise UsageError(
            f"{file}: several stores have the collection {place}",
            "a collection has the backups of one store",
        )
    return Fleet(stores, concurrency, None if rate is None else _rate(file, rate))


def back_up_fleet(fleet: Fleet) -> Iterator[FleetOutcome]:
    """Back up all stores; yields the outcome of each as it ends. Closing the iterator calls the
    other backups off."""
    off = threading.Event()
    # A backup that is called off ends its wait for bandwidth too.
    rate = None if fleet.bandwidth is None else Bandwidth(fleet.bandwidth, pause=off.wait)
    with ThreadPoolExecutor(fleet.concurrency, thread_name_prefix="kvstore-fleet") as pool:
        try:
            work = [pool.submit(back_up_one, store, rate, off.is_set) for store in fleet.stores]
            for done in as_completed(work):
                yield done.result()
        except BaseException:
            off.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def back_up_one(
    store: FleetStore,
    bandwidth: Bandwidth | None = None,
    is_off: Callable[[], bool] = lambda: False,
) -> FleetOutcome:
    """Back up one store. An error is part of the outcome. Once `is_off()` is true, the backup ends
    at its next rows."""

    def go_on(_: object) -> None:
        if is_off():
            raise RetryableError(f"the backup of {store.path} was called off", "run it again")

    try:
        passphrase = None
        if store.passphrase_env is not None:
            passphrase = os.environ.get(store.passphrase_env)
            if passphrase is None:
                raise UsageError(
                    f"the environment has no {store.passphrase_env}", "set it to the passphrase"
                )
        collection = Collection(
            store.collection,
            passphrase,
            key_file=store.key_file,
            on_wait=go_on,
            bandwidth=bandwidth,
        )
        with reach(store.path) as source:
            done = collection.backup(source, max_age=store.max_age, progress=go_on)
            return FleetOutcome(store.name, done)
    except (KVStoreError, OSError) as error:
        return FleetOutcome(store.name, None, f"{type(error).__name__}: {error}")


def _parsed(file: Path, text: bytes) -> dict[str, Any]:
    if len(text) > FLEET_FILE_BYTES_MAX:
        raise UsageError(
            f"{file} has more than {FLEET_FILE_BYTES_MAX:,} bytes", "write several files"
        )
    try:
        toml: Any = import_module("tomllib")
    except ImportError as error:  # Python 3.10
        raise UsageError("reading TOML needs Python 3.11", "use a newer Python") from error
    try:
        fields: dict[str, Any] = toml.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no TOML: {error}", "mend the file") from error
    return fields


def _store(file: Path, name: str, table: object) -> FleetStore:
    home = file.absolute().parent
    where = f"{file}, store {name}"
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is no table", "write [stores.NAME]")
    unknown = table.keys() - set(_TEXTS)
    if unknown or not all(isinstance(value, str) for value in table.values()):
        problem = (
            f"unknown fields {', '.join(sorted(unknown))}" if unknown else "a field is no text"
        )
        raise UsageError(f"{where}: {problem}", f"it takes the texts {', '.join(_TEXTS)}")
    if "path" not in table or "collection" not in table:
        raise UsageError(f"{where} lacks path or collection", "write both")
    place = table["collection"]
    key_file = table.get("key_file")
    return FleetStore(
        name,
        str(home / table["path"]),
        place if is_url(place) else str(home / place),
        None if key_file is None else str(home / key_file),
        table.get("passphrase_env"),
        None if "max_age" not in table else _age(where, table["max_age"]),
    )


def _age(where: str, text: str) -> timedelta:
    try:
        return AGE.check("max_age", text)
    except UsageError as error:
        raise error.at(f"{where}: ") from None


def _rate(file: Path, given: object) -> int:
    match = _RATE.fullmatch(given) if isinstance(given, str) else None
    if match is None or not int(match[1]):
        raise UsageError(f"{file}: bandwidth={given!r}", 'write "500kB", "20MB" or "1GB"')
    return int(match[1]) * _RATE_UNITS[match[2]]
