"""Adding a staged import to a store: one atomic step at one timestamp, whatever its size.

    fetch     files of an object store come to <store>/ingest/             a kill keeps them
    check     manifest and files; live keys, if `on_conflict="error"`     nothing is touched
    prepare   a record says that the import is coming                     durable
    bring     files are linked or copied to <store>/ingest/<id>/
    link      RocksDB takes the files from there, all or none             still invisible
    add       one record gives the rows their timestamp                   durable: the commit

Invariants
1. A crash at any point leaves an import that is either added or invisible. A repeated call
   continues.
2. The record is durable before the first file is brought.
3. An import has one timestamp. Adding it again returns that timestamp.

A linked file has one set of bytes under two names. A process that writes into the staged file
later damages the store, and RocksDB's block checksums find the damage when the block is read.
`move=True` removes the other name. Copy a staging directory that others may write to.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bulk.addresses import Staging, staging_place
from bulk.amending import Amending
from bulk.bucket import Bucket, BucketUrl
from bulk.conflicts import require_no_live_keys
from bulk.contents import damage_of, require_disjoint, require_rows, require_told
from bulk.definitions import require_definitions
from bulk.fetching import as_fetched, fetch, fetched_to
from bulk.formats import require_known_rows
from bulk.manifest import Manifest
from bulk.remote import How, OnConflict, ingest_there, require_no_check
from bulk.sst import prefetch
from bulk.stages import StageTimes
from bulk.staging import Identity, open_staged, opened_path, read_manifest, require_unaltered
from bulk.uniques import required_unique
from kvstore.arguments import require_count
from kvstore.arrivals import NoneCame
from kvstore.commit import After
from kvstore.control.scripts import StoreOrClient, as_store, client_of
from kvstore.errors import CorruptionError, ImportRefusedError, KeyOrderError, UsageError
from kvstore.errors.system import storage_errors
from kvstore.imports import INGEST_DIRECTORY, FoundKeys, ImportRecord
from kvstore.mvcc.expiry import EXPIRY, require_record
from kvstore.span import Span, merge_spans
from kvstore.store import Store
from kvstore.timestamp import Timestamp

_COPY_INSTEAD: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""Failures of a link after which a copy may succeed: the file system has no links, or source and
target lie on two."""

_COPY_BYTES: Final = 1 << 20


def ingest(
    store: StoreOrClient,
    staging: Staging,
    on_conflict: OnConflict = "overwrite",
    move: bool = False,
    *,
    thorough: bool = False,
    check: Callable[[], None] | None = None,
    progress: Callable[[str], None] | None = None,
    max_bytes: int | None = None,
    times: StageTimes | None = None,
    options: Mapping[str, Any] | None = None,
    patience: float | None = None,
    origin: str = "",
) -> Timestamp:
    """Add a sealed import to `store`. Returns the timestamp at which all its rows became visible.

    For a client by path this process checks and brings the files, and the owner of the store adds
    them. For a client of an address the server fetches and adds the import, from below the places
    of `kvstore serve --imports-from`; then `options` must be empty.

    Adding the same import again returns the first timestamp. `on_conflict="error"` looks up
    each key, and raises `KeyConflictError` with the first live keys. Files are linked, or copied
    from another file system. `move` removes the files from `staging` after they were added; it
    removes a symbolic link, not the file behind it. `thorough` is for files from a stranger: it
    reads each file, compares its digest and checks each row. A row of a table with the values of
    another row in a unique index raises `NotUniqueError`. `check` runs first, and under the commit
    lock just before the rows become visible; it calls the import off by raising an error. A client
    takes no `check`, and a client by path takes no rows of tables. `progress` is called with the
    name of each step before the step. An exception that it raises stops the import, and a later
    call continues it.

    `staging` may be a URL that backups take, such as `s3://bucket/staging/run-42`. Its files are
    fetched to the store's directory first, in bounded memory, and each digest is compared; the
    store needs room for them. A call after a kill fetches the rest. `move` removes the objects.
    `max_bytes` refuses a larger import before anything is fetched. `times` takes the seconds of the
    stages. `options` and `patience` are as in `Import.create`. `origin` is a note that the record
    of the import keeps: where its rows come from.

    Raises `ImportRefusedError` if a file is missing, altered, truncated or of another import, or if
    its bounds or rows differ from the manifest, or if a table of its rows was altered since they
    were encoded; `FormatVersionError` for rows of a newer release; `OutOfSpaceError` if the disk
    has no room for a fetch. Nothing was added then. Costs a few milliseconds, two fsyncs and the
    fetch.
    """
    require_on_conflict(on_conflict)
    tell = progress or (lambda step: None)
    how = How(on_conflict, move, thorough, check, tell, times or StageTimes(), origin=origin)
    found = staging_place(staging, options, patience)
    if not isinstance(store, Store) and getattr(store, "path", None) is None:
        return ingest_there(store, found, max_bytes, how)
    return _ingest_here(store, found, max_bytes, how)


def _ingest_here(
    store: StoreOrClient, found: Path | BucketUrl, max_bytes: int | None, how: How
) -> Timestamp:
    if client_of(store) is not None:
        require_no_check(how)
    place = found if isinstance(found, Path) else found.open()
    manifest = read_manifest(place) if isinstance(place, Path) else place.manifest()
    _require_size(manifest, max_bytes, place)
    with as_store(store) as into, into.imports.alone(manifest.import_id, adding=True):
        if isinstance(place, Path):
            return _ingest(into, place, manifest, record_of(manifest, how.origin), how)
        return _ingest_fetched(into, place, manifest, how)


def ingest_pushed(
    store: Store,
    bucket: Bucket,
    manifest: Manifest,
    after: After,
    *,
    amends: Amending | None,
    tell: Callable[[str], None],
    times: StageTimes,
    keeps: bool,
) -> Timestamp:
    """Add an import of a bucket, amended for this store, and right after it the writes of `after`,
    as one step. The caller has checked the manifest. Raises as `ingest`; with `keeps` the files
    that were fetched stay after a refusal."""
    how = How("overwrite", False, False, None, tell, times, after, amends)
    known = store.imports.get(manifest.import_id)
    if amends is not None and known is not None and known.added is None:
        store.imports.abort(known.import_id)  # its rows were amended for an older state
    with store.imports.alone(manifest.import_id, adding=True):
        return _ingest_fetched(store, bucket, manifest, how, keeps=keeps)


def _require_size(manifest: Manifest, max_bytes: int | None, where: object) -> None:
    if max_bytes is None:
        return
    if manifest.size_bytes > require_count(max_bytes, name="max_bytes", least=0):
        raise UsageError(
            f"the import {where} has {manifest.size_bytes:,} bytes, and max_bytes={max_bytes:,}",
            "load less at once, or raise max_bytes",
        )


def _ingest_fetched(
    store: Store, bucket: Bucket, manifest: Manifest, how: How, *, keeps: bool = False
) -> Timestamp:
    """Fetch an import and add it. The manifest is checked first."""
    record = record_of(manifest, how.origin)
    known = store.imports.find(record)
    if known is None or known.added is None:
        _checks_of_tables(store, record, manifest, bucket.where, how.check)
        with fetched_to(store.path, manifest, keeps=keeps) as directory:
            with how.times.stage("fetch"):
                fetch(bucket, manifest, directory, lambda done: how.tell(str(done)))
            here = replace(manifest, parts=tuple(as_fetched(directory, manifest)))
            added = _ingest(store, directory, here, record, how._replace(move=False))
    else:
        added = known.added
    if how.move:
        bucket.remove()
    return added


def require_on_conflict(given: str) -> None:
    """Raise `UsageError` on an unknown choice. Callers that build an import ask before."""
    if given not in ("overwrite", "error"):
        raise UsageError(f"on_conflict={given!r}", 'pass "overwrite" or "error"')


def _ingest(
    store: Store, directory: Path, manifest: Manifest, record: ImportRecord, how: How
) -> Timestamp:
    """Add the import `record`, whose files lie in `directory` as `manifest` tells."""
    on_conflict, move, thorough, check, tell, times, after, amends, _ = how
    known = store.imports.find(record)
    if known is not None and known.added is not None:
        if move:
            _take_away(directory, manifest)
        return known.added
    checks = _checks_of_tables(store, record, manifest, str(directory), check)
    incoming = _incoming(store, directory, manifest)
    linked = known is not None and store.imports.is_linked(record)
    tell("check")
    checked: dict[str, Identity] = {}
    keys: list[bytes] | None = None
    if not linked:
        with times.stage("check"):
            checked, keys = _checked(directory, manifest, thorough=thorough)
            store.imports.flush()
    with ExitStack() as held:
        further: list[Path] = []
        if on_conflict == "error" or manifest.tables or amends is not None:
            located = _located(directory, manifest)
            if not linked:
                require_known_rows(store, manifest, located)
            # Later commits are checked before the import is added, so GC must keep them.
            at = held.enter_context(store.snapshot()).as_of
            if on_conflict == "error":
                checks.insert(0, _live_keys(store, record, located, at, linked=linked))
            replaced = () if amends is None else amends.replaced
            checks += required_unique(held, store, manifest, located, at, replaced)
            if amends is not None:
                with times.stage("compare"):
                    record, keys, further = amends.begin(record, keys, at, located, incoming)
        held.enter_context(times.stage("add"))
        tell("prepare")
        store.imports.prepare(record, keys)
        if not linked:
            files = list(_brought(directory, incoming, manifest, checked, tell))
            tell("link")
            store.imports.link([*files, *further])
        amend = None if amends is None else amends.linked()
        tell("add")
        stamp = store.imports.add(record.import_id, check=_all(checks), after=after, amend=amend)
    _remove(incoming)
    if move:
        _take_away(directory, manifest)
    return stamp


def _brought(
    directory: Path,
    incoming: Path,
    manifest: Manifest,
    checked: Mapping[str, Identity],
    tell: Callable[[str], None],
) -> Iterator[Path]:
    """Put each part beside the store's files."""
    for number, part in enumerate(manifest.parts, 1):
        tell(f"bring {number} of {len(manifest.parts)}")
        yield _bring(directory, incoming, part.name, checked[part.name])


def _remove(incoming: Path) -> None:
    try:
        incoming.rmdir()  # RocksDB has moved the files; `rmtree` takes ten times as long
    except OSError:
        with suppress(OSError):  # `ignore_errors` does not cover a look at the directory
            shutil.rmtree(incoming, ignore_errors=True)


def _live_keys(
    store: Store, record: ImportRecord, files: Sequence[Path], at: int, *, linked: bool
) -> NoneCame:
    """The check of the commit that no key of an import is alive. Raises `KeyConflictError`."""
    if not linked:
        require_no_live_keys(store, files)
    return NoneCame(store, record, 0 if linked else at)


def _checks_of_tables(
    store: Store,
    record: ImportRecord,
    manifest: Manifest,
    where: str,
    check: Callable[[], None] | None,
) -> list[Callable[[], None]]:
    """The checks of the commit, `check` among them. Raises as `require_definitions`, and
    `UsageError` for keys of tables that the manifest does not name."""
    checks = [] if check is None else [check]
    for each in checks:
        each()
    checks += require_definitions(store, manifest.tables, where)  # names a table that is missing
    is_encoded, has_expiries = bool(manifest.tables), manifest.has_expiries
    for span in record.spans:
        store.layout.require_importable(span, is_encoded=is_encoded, has_expiries=has_expiries)
    _require_records(manifest, where)
    return checks


def _require_records(manifest: Manifest, where: str) -> None:
    """Raise `ImportRefusedError` for a part of expiries whose first or last key is no such
    record."""
    try:
        for part in manifest.parts:
            for key in (part.smallest, part.largest):
                require_record(key)
    except CorruptionError as error:
        problem = f"{error.where}: {error.problem}"
        raise ImportRefusedError(where, problem, "stage the import again") from error


def _all(checks: Sequence[Callable[[], None]]) -> Callable[[], None] | None:
    if len(checks) < 2:
        return checks[0] if checks else None

    def check() -> None:
        for each in checks:
            each()

    return check


@contextmanager
def staging_beside(store: Store) -> Iterator[Path]:
    """A new staging directory on the store's file system. It is removed at the end."""
    if store.path is None:  # `TemporaryDirectory` would remove it when a forked child exits
        path = Path(tempfile.mkdtemp(prefix="kvstore-staging-"))
    else:
        path = store.path / INGEST_DIRECTORY / f"staging-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def record_of(manifest: Manifest, origin: str = "") -> ImportRecord:
    """The record by which a store knows the import of `manifest`, with its origin."""
    # Spans of crossing parts are joined, so that each row is read once.
    spans = merge_spans(Span(part.smallest, part.largest + b"\x00") for part in manifest.parts)
    return ImportRecord(
        manifest.import_id,
        manifest.checksum,
        manifest.rows,
        manifest.size_bytes,
        tuple(spans),
        origin=origin,
    )


def _incoming(store: Store, directory: Path, manifest: Manifest) -> Path:
    """The directory from which the engine takes the files. A store without a directory only reads
    them, so they stay where they were staged."""
    name = f"{manifest.import_id:016x}{store.imports.place_suffix}"
    if store.path is None:
        return directory / f"{INGEST_DIRECTORY}-{name}"
    return store.path / INGEST_DIRECTORY / name


def _located(directory: Path, manifest: Manifest) -> list[Path]:
    """The parts with rows. A key whose expiry was cancelled keeps its records until the due
    time."""
    rows = (part for part in manifest.parts if not part.smallest.startswith(EXPIRY))
    return [directory / part.name for part in rows]


def _checked(
    directory: Path, manifest: Manifest, *, thorough: bool
) -> tuple[dict[str, Identity], list[bytes] | None]:
    """The file of each part by name, each checked to be the file that was sealed; and the keys of
    a small import.

    Raises `ImportRefusedError`. Reads a file only if it was copied, if the import is small, or if
    `thorough`.
    """
    found: dict[str, Identity] = {}
    listed = FoundKeys(record_of(manifest))
    try:
        for part in manifest.parts:
            path = directory / part.name
            with open_staged(directory, path) as file:
                with storage_errors(str(path)):
                    require_unaltered(directory, file, part, thorough=thorough)
                    found[part.name] = Identity.of(os.fstat(file.fileno()))
                prefetch(file.fileno())
                opened = opened_path(file, path)
                with damage_of(part):
                    require_told(part, opened, manifest.import_id)
                    listed.read(opened)
                    if thorough:
                        require_rows(part, opened, manifest.import_id)
        if thorough:
            require_disjoint(directory, manifest.parts)
    except CorruptionError as error:
        problem = f"{error.where}: {error.problem}"
        raise ImportRefusedError(str(directory), problem, "stage the import again") from error
    except KeyOrderError as error:
        raise ImportRefusedError(str(directory), error.what, "stage the import again") from error
    return found, listed.keys


def _bring(directory: Path, incoming: Path, name: str, identity: Identity) -> Path:
    """Put a part beside the store's files, so that RocksDB can take it by a rename.

    The staged file stays until the import is added. RocksDB has synced its files by then, so
    neither a crash nor a refusal loses a part.
    """
    source, target = directory / name, incoming / name
    with storage_errors(str(target)):
        incoming.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(source) and target.is_file():
            return target
        target.unlink(missing_ok=True)
        try:
            # Link the target of a symbolic link: the store must not depend on files outside it.
            os.link(os.path.realpath(source), target)
            if Identity.of(os.lstat(target)) != identity:
                target.unlink()
                raise _replaced(directory, name)
        except OSError as error:
            if error.errno not in _COPY_INSTEAD:
                raise
            _copy(directory, source, target, identity)
    return target


def _copy(directory: Path, source: Path, target: Path, identity: Identity) -> None:
    try:
        with open_staged(directory, source) as original, target.open("xb") as copy:
            shutil.copyfileobj(original, copy, _COPY_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
            if Identity.of(os.fstat(original.fileno())) != identity:
                raise _replaced(directory, source.name)
    except BaseException:
        target.unlink(missing_ok=True)  # half a copy would keep the disk full
        raise


def _take_away(directory: Path, manifest: Manifest) -> None:
    """Remove the staged parts of an import that was added. A file that cannot be removed stays."""
    for part in manifest.parts:
        with suppress(OSError):
            (directory / part.name).unlink()


def _replaced(directory: Path, name: str) -> ImportRefusedError:
    problem = f"{name} was replaced or written to while it was added"
    return ImportRefusedError(str(directory), problem, "stage the import again")
