"""Adding a staged import to a store: one atomic step at one timestamp, whatever its size.

    check     manifest, files; live keys in the way, if they matter       nothing touched yet
    prepare   the store writes down that the import is coming             durable
    bring     files are linked (or moved, or copied) to <store>/ingest/<id>/
    link      they are moved into RocksDB, all or none                    still invisible
    add       one record gives them their timestamp                       durable: the commit

A crash at any point leaves an import that is added or invisible; calling again goes on from there.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal, TypeAlias

from bulk.staging import Manifest, read_manifest, require_unaltered
from kvstore.arguments import require_path
from kvstore.codec.keys import TAIL_BYTES, VALUE
from kvstore.codec.ordered import unframe
from kvstore.engine.rocks import read_rows
from kvstore.errors import KEYS_NAMED_MAX, KeyConflictError, UsageError
from kvstore.imports import INGEST_DIRECTORY, ImportRecord
from kvstore.journal import OS_FILES
from kvstore.journal.files import storage_errors
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import Timestamp

OnConflict: TypeAlias = Literal["overwrite", "error"]

_COPY_INSTEAD: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""Failures of a link or rename that say: this file system, or these two, cannot do it."""


def ingest(
    store: Store,
    staging: str | os.PathLike[str],
    on_conflict: OnConflict = "overwrite",
    move: bool = False,
    *,
    thorough: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Timestamp:
    """Add a sealed import to `store`; returns the timestamp at which all its rows became visible.

    Adding the same import again returns the first timestamp. `on_conflict="error"` refuses to
    cover live keys (`KeyConflictError` names the first; it compares key by key). `move` takes
    the files out of `staging` instead of linking them; on another file system they are
    copied. `thorough` reads every file to compare its checksum even if it looks untouched.
    `progress` is called with the name of each step before it is made; what it raises calls the
    import off, which can be made again.

    Raises `ImportRefusedError` if a file is missing, altered, truncated or of another import;
    nothing was added then. Costs a few milliseconds and two fsyncs, whatever the size.
    """
    require_on_conflict(on_conflict)
    directory = require_path(staging, name="staging")
    manifest = read_manifest(directory)
    tell = progress or (lambda step: None)
    with store.importing(manifest.import_id, adding=True):
        return _ingest(store, directory, manifest, on_conflict, move, thorough, tell)


def require_on_conflict(given: str) -> None:
    """Raise `UsageError` unless it is one. For callers that build an import before they add it."""
    if given not in ("overwrite", "error"):
        raise UsageError(f"on_conflict={given!r}", 'pass "overwrite" or "error"')


def _ingest(
    store: Store,
    directory: Path,
    manifest: Manifest,
    on_conflict: OnConflict,
    move: bool,
    thorough: bool,
    tell: Callable[[str], None],
) -> Timestamp:
    record = _record(manifest)
    known = store.find_import(record)
    if known is not None and known.added is not None:
        return known.added
    incoming = _incoming(store, directory, manifest)
    linked = known is not None and store.is_import_linked(record)
    tell("check")
    if not linked:
        for part in manifest.parts:
            path = _locate(directory, incoming, part.name)
            require_unaltered(directory, path, part, thorough=thorough)
    with ExitStack() as held:
        check = None
        if on_conflict == "error":
            # What is written from here on is looked at again: no GC may take it.
            checked_at = held.enter_context(store.snapshot()).as_of
            if not linked:
                _require_no_live_keys(store, manifest, directory, incoming)
            check = _recheck(store, record, 0 if linked else checked_at)
        tell("prepare")
        store.prepare_import(record)
        if not linked:
            files = []
            for number, part in enumerate(manifest.parts, 1):
                tell(f"bring {number} of {len(manifest.parts)}")
                files.append(_bring(directory, incoming, part.name, move=move))
            tell("link")
            store.link_import(files)
        tell("add")
        stamp = store.add_import(record, check=check)
    shutil.rmtree(incoming, ignore_errors=True)
    return stamp


@contextmanager
def staging_beside(store: Store) -> Iterator[Path]:
    """A new directory to stage an import for `store` in, on its file system; removed at the end."""
    if store.path is None:
        with tempfile.TemporaryDirectory(prefix="kvstore-staging-") as directory:
            yield Path(directory)
        return
    path = store.path / INGEST_DIRECTORY / f"staging-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _record(manifest: Manifest) -> ImportRecord:
    spans = tuple(Span(part.smallest, part.largest + b"\x00") for part in manifest.parts)
    return ImportRecord(
        manifest.import_id, manifest.checksum, manifest.rows, manifest.size_bytes, spans
    )


def _incoming(store: Store, directory: Path, manifest: Manifest) -> Path:
    """Where the engine takes the files from. A store without a directory only reads them: so they
    stay where they were staged."""
    name = f"{manifest.import_id:016x}"
    if store.path is None:
        return directory / f"{INGEST_DIRECTORY}-{name}"
    return store.path / INGEST_DIRECTORY / name


def _locate(directory: Path, incoming: Path, name: str) -> Path:
    """Where a part is: an interrupted move may have brought it to the store already."""
    staged = directory / name
    return staged if staged.exists() or not (incoming / name).exists() else incoming / name


def _bring(directory: Path, incoming: Path, name: str, *, move: bool) -> Path:
    """Put a part beside the store's files, so that RocksDB can take it by a rename.

    A crash finds it in one of the two places, or in both; it is lost from neither before RocksDB,
    which syncs what it takes, has it. So only the end of a copy's source waits for the disk.
    """
    source, target = directory / name, incoming / name
    with storage_errors(str(target)):
        incoming.mkdir(parents=True, exist_ok=True)
        if not source.exists() and target.exists():
            return target
        target.unlink(missing_ok=True)
        try:
            if move:
                os.rename(source, target)
            else:
                os.link(source, target)
        except OSError as error:
            if error.errno not in _COPY_INSTEAD:
                raise
            _copy(source, target)
            if move:
                OS_FILES.sync_directory(str(incoming))
                source.unlink()
    _advise(target)
    return target


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
    except OSError:
        target.unlink(missing_ok=True)  # half a copy would only keep the disk full
        raise


def _advise(path: Path) -> None:
    """Ask for the file in the page cache: first gets from a cold one run 15 times slower."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


# -- on_conflict="error" --------------------------------------------------------------------


def _require_no_live_keys(
    store: Store, manifest: Manifest, directory: Path, incoming: Path
) -> None:
    """Raise if a key of the import is alive. One look-up per row."""
    files = [_locate(directory, incoming, part.name) for part in manifest.parts]
    scratch = (store.path or directory) / f"check-{manifest.import_id:016x}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        _raise_if_any(key for key in _staged_keys(files, scratch) if store.get(key) is not None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _staged_keys(files: list[Path], scratch: Path) -> Iterator[bytes]:
    for entries, _ in read_rows(files, scratch):
        for entry in entries:
            if entry[-1:] == VALUE:
                yield unframe(entry[:-TAIL_BYTES])


def _recheck(store: Store, record: ImportRecord, since: int) -> Callable[[], None]:
    """Under the commit lock: has a key of the import come alive since it was looked at?"""

    def check() -> None:
        changed = (
            change.key
            for change in (
                store.changes(since, order="time")
                if since
                else store.changes(0, revisions="latest")  # the state: always readable
            )
            if change.op == "put" and store.is_imported(record, change.key)
        )
        _raise_if_any(key for key in changed if store.get(key) is not None)

    return check


def _raise_if_any(keys: Iterator[bytes]) -> None:
    found = [key for _, key in zip(range(KEYS_NAMED_MAX), keys, strict=False)]
    if found:
        raise KeyConflictError(found)
