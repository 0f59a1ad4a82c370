"""Adding a staged import to a store: one atomic step at one timestamp, whatever its size.

Checks come first: the manifest, the definitions of tables, conflicts with live keys, unique
indexes. Then the files are linked into the store's directory and handed to RocksDB, where nobody
sees their rows. One record gives them their timestamp.

    fetch     files of an object store come to <store>/ingest/             a kill keeps them
    check     manifest and files; live keys, if `on_conflict="error"`     nothing is touched
    prepare   a record says that the import is coming                     durable
    bring     files are linked or copied to <store>/ingest/<id>/
    link      RocksDB takes the files from there, all or none             still invisible
    add       one record gives the rows their timestamp                   durable: the commit

A process beside the owner of a store fetches, checks and brings, to a directory of its own in
`<store>/ingest/`. The owner does the rest, and checks everything anew: it trusts nobody's word.

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
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import Self

from kvstore.base.arguments import NUMBER, ArgumentKind, word
from kvstore.base.span import Span, merge_spans
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.bucket import Bucket, BucketUrl, as_fetched, fetch, fetched_to
from kvstore.bulk.gate import Force, Gate, NoneLoaded, pass_gate
from kvstore.bulk.manifest import MANIFEST_NAME, STAGE_AGAIN, Manifest, refused_as_damaged
from kvstore.bulk.part import prefetch
from kvstore.bulk.progress import StageTimes
from kvstore.bulk.staging import (
    Identity,
    Staging,
    check_definitions,
    damage_of,
    open_staged,
    opened_path,
    read_manifest,
    require_disjoint,
    require_metadata,
    require_rows,
    require_unaltered,
    staging_place,
)
from kvstore.changes import Change
from kvstore.codec.keys import (
    TAIL_BYTES,
    TOMBSTONE,
    VALUE,
    encode_reference,
    frame,
    span_bounds,
    unframe,
)
from kvstore.engine.loose_files import LooseDatabase, LooseFiles
from kvstore.errors import (
    KEYS_NAMED_MAX,
    AccessDeniedError,
    ConflictError,
    ImportRefusedError,
    KeyConflictError,
    KeyOrderError,
    NotFoundError,
    NotUniqueError,
    TableAlteredError,
    UsageError,
    storage_errors,
)
from kvstore.limits import SCAN_CHUNK
from kvstore.mvcc.arrow import binary_array
from kvstore.mvcc.expiry_records import EXPIRY, require_record
from kvstore.remote.control import StoreOrClient, as_store, client_of, imports_of
from kvstore.store import Store
from kvstore.tables import TableCodec
from kvstore.tables.definition import Index
from kvstore.tables.exact import as_python
from kvstore.tables.row_codec import schema_number
from kvstore.tables.sources import not_unique
from kvstore.timeline.committer import After
from kvstore.timeline.import_records import Amend, FoundKeys, ImportRecord
from kvstore.timeline.imports import INGEST_DIRECTORY, Imports
from kvstore.timeline.reserved import FIRST_ROW

if TYPE_CHECKING:
    from kvstore.remote.client import Client


OnConflict: TypeAlias = Literal["overwrite", "error"]
CONFLICTS: Final = ("overwrite", "error")
"""What an import does with the live keys that it would cover."""

ON_CONFLICT: Final[ArgumentKind[OnConflict]] = word(*CONFLICTS)

_COPY_INSTEAD: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""Failures of a link after which a copy may succeed: the file system has no links, or source and
target lie on two."""

_COPY_BYTES: Final = 1 << 20

_GATE_RUNS_MAX: Final = 4
"""How often the gate of one load runs, while other loads come during each run."""


class How(NamedTuple):
    """The choices of a call of `bulk.ingest`."""

    on_conflict: OnConflict
    move: bool
    thorough: bool
    check: Callable[[], None] | None
    tell: Callable[[str], None]
    times: StageTimes
    after: After | None = None
    amends: Amending | None = None
    origin: str = ""
    none_since: int | None = None
    """The import is called off if one of its keys was put after this time, and is alive."""
    gate: Gate | None = None
    force: Force | None = None
    report: str = ""
    """The report of a gate that a process beside this one has made."""


def ingest(
    store: StoreOrClient,
    staging: Staging,
    on_conflict: OnConflict = "overwrite",
    move: bool = False,
    *,
    thorough: bool = False,
    check: Callable[[], None] | Gate | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    max_bytes: int | None = None,
    times: StageTimes | None = None,
    options: Mapping[str, Any] | None = None,
    patience: float | None = None,
    origin: str = "",
    force: Force | str | None = None,
    none_since: Timestamp | None = None,
) -> Timestamp:
    """Add a sealed import to `store`. Returns the timestamp at which all its rows became visible.

    For a client by path this process brings the files, and the owner of the store checks and adds
    them. For a client of an address the server fetches and adds the import, from below the places
    of `kvstore serve --imports-from`; then `options` must be empty.

    Adding the same import again returns the first timestamp, and raises `UsageError` after it was
    reverted. `on_conflict="error"` looks up each key, and raises `KeyConflictError` with the first
    live keys. `none_since`, a time at which the caller has looked at the keys, raises it for a key
    that was put after that time and is alive: the commit looks under its lock. Files are linked, or
    copied from another file system. `move` removes the files from `staging` after they were added;
    it removes a symbolic link, not the file behind it. `thorough` is for files from a stranger: it
    reads each file, compares its digest and checks each row. A row of a table with the values of
    another row in a unique index raises `NotUniqueError`. `check` is a `Gate`, or a mapping of its
    fields: the staged rows pass it before they show, or the load is refused by `LoadRefusedError`,
    whose `report` has each figure with its bound and baseline; the staging stays. `force`, a
    `Force` or its reason, adds the load nevertheless. The record of the import keeps the report:
    see `kvstore imports show`.
    `check` may also be a function: it runs first, and under the commit lock just before the rows
    become visible; it calls the import off by raising an error. A client takes no function, and a
    client of an address takes no gate. `progress` is called with the
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
    has no room for a fetch; `ConflictError`, to be tried again, if another load came whenever the
    gate ran, or once for a client. Nothing was added then. Costs a few milliseconds, two fsyncs and
    the fetch.
    """
    ON_CONFLICT.check("on_conflict", on_conflict)
    tell = progress or (lambda step: None)
    gate = None if check is None or callable(check) else Gate.of(check)
    called = check if callable(check) else None
    how = How(on_conflict, move, thorough, called, tell, times or StageTimes(), origin=origin)
    how = how._replace(gate=gate, force=Force.of(force, gate), none_since=none_since)
    found = staging_place(staging, options, patience)
    if not isinstance(store, Store) and getattr(store, "path", None) is None:
        if gate is not None:
            raise UsageError("a gate of a load by an address", "load beside the store, by its path")
        if none_since is not None:
            raise UsageError("none_since has no effect at an address", "load by the store's path")
        return ingest_there(store, found, max_bytes, how)
    return _from_place(store, found, max_bytes, how)


def _from_place(
    store: StoreOrClient, found: Path | BucketUrl, max_bytes: int | None, how: How
) -> Timestamp:
    if client_of(store) is not None:
        require_no_check(how)
    place = found if isinstance(found, Path) else found.open()
    manifest = read_manifest(place) if isinstance(place, Path) else place.manifest()
    _require_size(manifest, max_bytes, place)
    with as_store(store) as into, _adding(into, manifest.import_id):
        if isinstance(place, Path):
            return _by_owner_or_here(into, place, manifest, manifest, how)
        return _from_bucket(into, place, manifest, how)


def ingest_brought(
    store: Store,
    directory: Path,
    *,
    none_since: int | None,
    origin: str,
    report: str,
    tell: Callable[[str], None],
) -> Timestamp:
    """Add the sealed import in `directory`, to which a process beside this one has brought it. Its
    files move into the store. `none_since` is as in `ingest`. Raises as `ingest`."""
    manifest = read_manifest(directory)
    how = How("overwrite", True, False, None, tell, StageTimes(), origin=origin)
    how = how._replace(none_since=none_since, report=report)
    with _adding(store, manifest.import_id):
        record = replace(record_of(manifest, origin), report=report)
        return _add(store, directory, manifest, record, how)


@contextmanager
def _adding(store: Store, import_id: int) -> Iterator[None]:
    """This thread has an import to itself, to add it. An import whose rows contradict their table
    is aborted: only other rows could continue it."""
    try:
        with store.imports.alone(import_id, adding=True):
            yield
    except (NotUniqueError, TableAlteredError):
        store.imports.abort_idle(import_id)
        raise


def added_before(
    store: StoreOrClient, import_id: int, *, may_be_reverted: bool = False
) -> ImportRecord | None:
    """The record of an import that was added before, for a job that runs again. Undoes one that a
    crash left half done. Raises `UsageError` if it was reverted, unless `may_be_reverted`."""
    imports = imports_of(store)
    # Wait for another thread that is adding it.
    with imports.alone(import_id) if isinstance(imports, Imports) else nullcontext():
        known = imports.get(import_id)
    if known is not None and known.added is None:
        imports.abort(import_id)
        return None
    if known is not None and not may_be_reverted:
        known.require_standing()
    return known


def give_up(store: StoreOrClient, import_id: int) -> None:
    """Abort an import that was refused, and whose staging is removed: nobody can continue it."""
    with suppress(UsageError):  # the caller tells the refusal
        imports_of(store).abort(import_id)


def check_for_ingest(
    store: StoreOrClient, check: Callable[[], None] | None
) -> Callable[[], None] | None:
    """The `check` to pass to `ingest` with rows of a table; `check` is that of its import target.
    The owner of a client's store takes no check, and compares definitions itself. For a client this
    function runs `check` now, and returns None."""
    if check is None or client_of(store) is None:
        return check
    check()
    return None


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
    gate: Gate | None = None,
) -> Timestamp:
    """Add an import of a bucket, amended for this store, and right after it the writes of `after`,
    as one step. The caller has checked the manifest. Raises as `ingest`; with `keeps` the files
    that were fetched stay after a refusal."""
    how = How("overwrite", False, False, None, tell, times, after, amends, gate=gate)
    known = store.imports.get(manifest.import_id)
    if amends is not None and known is not None and known.added is None:
        store.imports.abort(known.import_id)  # its rows were amended for an older state
    with store.imports.alone(manifest.import_id, adding=True):
        return _from_bucket(store, bucket, manifest, how, keeps=keeps)


def _require_size(manifest: Manifest, max_bytes: int | None, where: object) -> None:
    if max_bytes is None:
        return
    if manifest.size_bytes > NUMBER.check("max_bytes", max_bytes):
        raise UsageError(
            f"the import {where} has {manifest.size_bytes:,} bytes, and max_bytes={max_bytes:,}",
            "load less at once, or raise max_bytes",
        )


def _from_bucket(
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
            added = _by_owner_or_here(store, directory, here, manifest, how._replace(move=False))
    else:
        added = known.added
    if how.move:
        bucket.remove()
    return added


def _by_owner_or_here(
    store: Store,
    directory: Path,
    manifest: Manifest,
    sealed: Manifest,
    how: How,
) -> Timestamp:
    """Add an import whose files lie in `directory` as `manifest` tells, and which was `sealed` so.
    The owner of the store adds it, if this is another process."""
    owner, record = client_of(store), record_of(sealed, how.origin)
    if owner is None:
        return _add(store, directory, manifest, record, how)
    known = store.imports.find(record)
    if known is not None and known.added is not None:
        stamp = known.added
    else:
        stamp = _by_owner(store, owner, directory, manifest, sealed, how)
    if how.move:
        _take_away(directory, manifest)
    return stamp


def _by_owner(
    store: Store,
    owner: Client,
    directory: Path,
    manifest: Manifest,
    sealed: Manifest,
    how: How,
) -> Timestamp:
    """Bring the files of an import beside the store's, and have its owner add them. This process
    reads the files and looks up the live keys, which would cost the owner much; the owner does not
    rely on it."""
    assert store.path is not None, "it has an owner"
    record, tell = record_of(sealed), how.tell
    _checks_of_tables(store, record, manifest, str(directory), None)
    tell("check")
    with how.times.stage("check"):
        checked, _ = _checked(directory, manifest, thorough=how.thorough)
    none_since = how.none_since
    if how.on_conflict == "error":
        none_since = store.upper - 1  # a guest follows its owner while it looks
        require_no_live_keys(store, _located(directory, manifest))
    report = _gate_report(store, directory, manifest, how)
    name = f"{record.import_id:016x}-{secrets.token_hex(8)}"
    incoming = store.path / INGEST_DIRECTORY / name
    with how.times.stage("add"):
        try:
            with storage_errors(str(incoming)):
                incoming.mkdir(parents=True)
                (incoming / MANIFEST_NAME).write_text(sealed.to_json())
            for _ in _brought(directory, incoming, manifest, checked, tell):
                pass
            tell("add")
            asked = {"directory": name, "none_since": none_since, "origin": how.origin}
            asked["report"] = report or None
            return Timestamp(owner.work("add_import", None, **asked)["timestamp"])
        finally:
            _remove(incoming)


def _add(
    store: Store, directory: Path, manifest: Manifest, record: ImportRecord, how: How
) -> Timestamp:
    """Add the import `record`, whose files lie in `directory` as `manifest` tells."""
    tell, times, amends = how.tell, how.times, how.amends
    known = store.imports.find(record)
    if known is not None and known.added is not None:
        if how.move:
            _take_away(directory, manifest)
        return known.added
    checks = _checks_of_tables(store, record, manifest, str(directory), how.check)
    incoming = _incoming(store, directory, manifest)
    linked = known is not None and store.imports.is_linked(record)
    tell("check")
    checked: dict[str, Identity] = {}
    keys: list[bytes] | None = None
    if not linked:
        with times.stage("check"):
            checked, keys = _checked(directory, manifest, thorough=how.thorough)
            store.imports.flush()
    report = _gate_report(store, directory, manifest, how, known if linked else None)
    record = replace(record, report=report)
    if how.none_since is not None:
        # Where the changes since then are not whole, all live keys are looked at.
        is_whole = how.none_since >= store.whole_since
        checks.insert(0, NoneCame(store, record, how.none_since if is_whole else 0))
    with ExitStack() as held:
        further: list[Path] = []
        if how.on_conflict == "error" or manifest.tables or amends is not None:
            located = _located(directory, manifest)
            if not linked:
                require_known_rows(store, manifest, located)
            # Later commits are checked before the import is added, so GC must keep them.
            at = held.enter_context(store.snapshot()).as_of
            if how.on_conflict == "error":
                checks.insert(0, _live_keys(store, record, located, at, linked=linked))
            replaced = () if amends is None else amends.replaced
            checks += unique_checks(held, store, manifest, located, at, replaced)
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
        _remove(incoming)  # the engine has taken the files
        amend = None if amends is None else amends.linked()
        tell("add")
        for runs_left in reversed(range(_GATE_RUNS_MAX)):
            unmoved = NoneLoaded.of(store, record.import_id, report)
            check = _all([*checks, *unmoved])
            try:
                stamp = store.imports.add(
                    record.import_id, check=check, after=how.after, amend=amend, report=report
                )
                break
            except ConflictError:  # another load came while the gate compared
                if how.gate is None or not runs_left:
                    raise
            report = _gate_report(store, directory, manifest, how, record)
    if how.move:
        _take_away(directory, manifest)
    return stamp


def _gate_report(
    store: Store, directory: Path, manifest: Manifest, how: How, linked: ImportRecord | None = None
) -> str:
    """The report of the gate that the load passes, empty if there is none. The store may have
    `linked` its rows before. Raises as `pass_gate`."""
    if how.gate is None:
        return how.report
    how.tell("gate")
    located = _located(directory, manifest)
    if linked is None and not how.thorough:
        require_known_rows(store, manifest, located)
    where = str(directory)
    return pass_gate(how.gate, how.force, store, manifest, located, where, linked=linked)


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
    """The checks of the commit, `check` among them. Raises as `check_definitions`, and
    `UsageError` for keys of tables that the manifest does not name."""
    checks = [] if check is None else [check]
    for each in checks:
        each()
    checks += check_definitions(store, manifest.tables, where)  # names a table that is missing
    is_encoded, has_expiries = bool(manifest.tables), manifest.has_expiries
    for span in record.spans:
        store.layout.require_importable(span, is_encoded=is_encoded, has_expiries=has_expiries)
    _require_records(manifest, where)
    return checks


def _require_records(manifest: Manifest, where: str) -> None:
    """Raise `ImportRefusedError` for a part of expiries whose first or last key is no such
    record."""
    with refused_as_damaged(where):
        for part in manifest.parts:
            for key in (part.smallest, part.largest):
                require_record(key)


def _all(checks: Sequence[Callable[[], None]]) -> Callable[[], None] | None:
    if len(checks) < 2:
        return checks[0] if checks else None

    def check() -> None:
        for each in checks:
            each()

    return check


def new_staging(store: Path) -> Path:
    """A new staging directory beside the files of the store in a directory."""
    return store / INGEST_DIRECTORY / f"staging-{secrets.token_hex(8)}"


@contextmanager
def staging_beside(store: StoreOrClient) -> Iterator[Path]:
    """A new staging directory on the store's file system. It is removed at the end."""
    if store.path is None:  # `TemporaryDirectory` would remove it when a forked child exits
        path = Path(tempfile.mkdtemp(prefix="kvstore-staging-"))
    else:
        path = new_staging(store.path)
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
    name = f"{manifest.import_id:016x}"
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
    with refused_as_damaged(directory):
        for part in manifest.parts:
            path = directory / part.name
            with open_staged(directory, path) as file:
                with storage_errors(str(path)):
                    require_unaltered(directory, file, part, thorough=thorough)
                    found[part.name] = Identity.of(os.fstat(file.fileno()))
                prefetch(file.fileno())
                opened = opened_path(file, path)
                with damage_of(part):
                    require_metadata(part, opened, manifest.import_id)
                    listed.read(opened)
                    if thorough:
                        require_rows(part, opened, manifest.import_id)
        if thorough:
            try:
                require_disjoint(directory, manifest.parts)
            except KeyOrderError as error:
                raise ImportRefusedError(str(directory), error.what, STAGE_AGAIN) from error
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
    return ImportRefusedError(str(directory), problem, STAGE_AGAIN)


# --------------------------------------------------------------------------------------------------
# `on_conflict="error"` refuses an import that has a row, a put or a delete, for a live key.
#
# The keys are looked up before the files enter the store, without the commit lock: one look-up a
# row. Later commits are checked under the lock, just before the import is added (`NoneCame`).


def require_no_live_keys(store: Store, files: Sequence[Path]) -> None:
    """Raise `KeyConflictError` if a key of the staged files is alive."""
    with closing(LooseFiles(files).rows()) as rows:
        keys = (unframe(entry[:-TAIL_BYTES]) for entries, _ in rows for entry in entries)
        alive = list(islice((key for key in keys if store.get(key) is not None), KEYS_NAMED_MAX))
    if alive:
        raise KeyConflictError(alive)


@dataclass(frozen=True, slots=True)
class NoneCame:
    """The check that no key of the linked import `record` came alive after `since`.

    `since=0` checks all live keys: the newest state is always readable. The caller holds the commit
    lock, so no commit comes between. Costs a look-up for each key that was put since.
    """

    store: Store
    record: ImportRecord
    since: int

    def __call__(self) -> None:
        """Raise `KeyConflictError` for keys that came alive."""
        changes = self._changes(None)
        if any(span.start >= FIRST_ROW for span in self.record.spans):
            changes = chain(changes, self._changes(FIRST_ROW))
        keys = (
            change.key
            for change in changes
            if change.op == "put" and self.store.imports.stored.has(self.record, change.key)
        )
        alive = islice((key for key in keys if self.store.get(key) is not None), KEYS_NAMED_MAX)
        if named := list(dict.fromkeys(alive)):  # a key may have changed twice
            raise KeyConflictError(named)

    def _changes(self, start: bytes | None) -> Iterator[Change]:
        """The changes since the check, from the key `start` on; or of all plain keys."""
        if self.since:
            return self.store.changes(self.since, start=start, order="time")
        return self.store.changes(0, start=start, revisions="latest")


# --------------------------------------------------------------------------------------------------
# Rows of tables in an import, compared with the format of rows that this release reads.
#
# A definition of a table does not name the format of its rows. So a newer release may encode rows
# by a definition that this store has, in bytes that this release cannot read.
#
# Invariants
# 1. The first row of each part and of each table is looked at before the import is recorded. One
#    process of one release writes a part, so the other rows of the part have the same format.


def require_known_rows(store: Store, manifest: Manifest, files: Sequence[Path]) -> None:
    """Raise `FormatVersionError` for rows of a newer release, `ImportRefusedError` for bytes that
    are no rows. `files` are the parts with rows. Costs 0.3 ms for each part."""
    if not manifest.tables:
        return
    with refused_as_damaged(files[0].parent if files else ""):
        for made in manifest.tables:
            codec = store.table(made.table).codec()
            for value in _rows(files, codec.key.prefix):
                schema_number(value, codec.definition.where)


def _rows(files: Sequence[Path], prefix: bytes) -> Iterator[bytes]:
    """The first rows of a table in each part."""
    span = Span.of_prefix(prefix)
    start, end = span_bounds(span.start, span.end)
    for file in files:
        with closing(LooseFiles([file]).rows(start, end)) as chunks:
            keys, values = next(chunks, ([], []))
        for key, value in zip(keys, values, strict=True):
            if key[-1:] == VALUE and unframe(key[:-TAIL_BYTES]).startswith(prefix):
                yield value


# --------------------------------------------------------------------------------------------------
# An import that is amended for the store that takes it: rows that its files do not have, and rows
# that are left out.
#
#     begin     before the record is written: further files, and the record with their rows
#     linked    all rows are in the store, and nobody sees them


class Amending(Protocol):
    """The amendments to one import. The methods are called once each, in their order here."""

    @property
    def replaced(self) -> Sequence[Span]:
        """The spans in which the import deletes each key that it lacks."""
        ...

    def begin(
        self,
        record: ImportRecord,
        keys: list[bytes] | None,
        at: Timestamp,
        files: Sequence[Path],
        directory: Path,
    ) -> tuple[ImportRecord, list[bytes] | None, list[Path]]:
        """The record and the key list with all rows, and files in `directory` with further rows.

        `files` have the rows of the import, and `keys` is its key list. The history of the store is
        kept from `at`, its newest time, until the import is added.
        """
        ...

    def linked(self) -> Amend:
        """Look at the rows of the import in the store. Returns the call that makes the last
        changes, under the commit lock."""
        ...


# --------------------------------------------------------------------------------------------------
# Unique indexes and imports: no two rows have the same values in a unique index afterwards.
#
# The entries of the import and the entries of the store are read side by side, in the order of the
# index. Two entries with the same values are a suspicion, because an entry is a hint: the rows
# decide. For a key in both, the row of the import counts.
#
# Invariants
# 1. The whole import is compared with the store at one time, before its files enter the store. Rows
#    that are put later are compared under the commit lock, just before the import is added.
# 2. Memory holds two chunks of entries, whatever the number of rows that have the same values.
# 3. Entries with a null are passed: a null is equal to nothing.

_FIRST_KEYS: Final = 64
"""Entries of the store that are read at once where the import has few of the same values."""


class _Entry(NamedTuple):
    """An entry of an index: the bytes up to the end of its values, and the key of its row."""

    values: bytes
    row: bytes


class UniqueRows:
    """The check of the rows that one import brings to one table. Use it as a context manager."""

    def __init__(
        self,
        store: Store,
        codec: TableCodec,
        files: Sequence[Path],
        import_id: int,
        replaced: Sequence[Span] = (),
    ) -> None:
        """`files` are the staged files of the import, which deletes all other rows in the spans
        `replaced`."""
        self._replaced = replaced
        self._store, self._codec = store, codec
        self._where = str(files[0].parent) if files else "the import"
        self._reference = encode_reference(import_id)
        self._loose = LooseDatabase(files)
        self._since = 0

    def require(self, as_of: int) -> None:
        """Raise `NotUniqueError` if a row of the import has the values of another row. Costs a pass
        over the entries of the import, and reads the entries of the store near them."""
        self._since = as_of
        for index in _unique(self._codec):
            whole = Span.of_prefix(self._codec.index_codec(index).prefix)
            stored = _Forward(self._store, whole, as_of)
            entries = self._staged_entries(index, whole)
            for values, found in groupby(entries, key=lambda entry: entry.values):
                behind, rows = len(values), self._codec.key.prefix
                known = (_Entry(values, rows + e[behind:]) for e in stored.beginning(values))
                self._require_one(index, values, chain(found, known), as_of)

    def __call__(self) -> None:
        """Raise `NotUniqueError` if a row that was put since `require` has the values of a row of
        the import. The caller holds the commit lock. Costs a look-up for each such row."""
        rows = Span.of_prefix(self._codec.key.prefix)
        changes = self._store.changes(self._since, None, rows.start, rows.end, order="time")
        for change in changes:
            if change.op != "put" or self._staged_row(change.key) is not None:
                continue
            row = self._row(change.key, None)  # None for one that is replaced
            for index in _unique(self._codec) if row is not None else ():
                for entry in self._entries(index, [self._codec.entries(index, row).to_pylist()]):
                    staged = self._staged_entries(index, Span.of_prefix(entry.values))
                    self._require_one(index, entry.values, chain([entry], staged), None)

    def close(self) -> None:
        """Release the files."""
        self._loose.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------

    def _require_one(
        self, index: Index, values: bytes, entries: Iterable[_Entry], as_of: int | None
    ) -> None:
        """Raise `NotUniqueError` if two rows that `entries` lead to have the same values."""
        holder, is_sure = b"", False
        for _, key in entries:
            if not holder or key == holder:
                holder = key
                continue
            is_sure = is_sure or self._fits(index, values, holder, as_of)
            if not is_sure:
                holder = key
            elif self._fits(index, values, key, as_of):
                self._refuse(index, key, holder, as_of)

    def _fits(self, index: Index, values: bytes, key: bytes, as_of: int | None) -> bool:
        """Whether the row of a key will have `values`."""
        row = self._row(key, as_of)
        if row is None:
            return False
        entry: bytes = self._codec.entries(index, row)[0].as_py()
        return entry.startswith(values)

    def _row(self, key: bytes, as_of: int | None) -> pa.RecordBatch | None:
        """The row that a key will have, as a batch of one row."""
        value = self._staged_row(key)
        if value is None and not any(key in span for span in self._replaced):
            value = self._store.get(key, as_of)
        if not value:  # deleted: a row has bytes
            return None
        return self._codec.decode(binary_array([key]), binary_array([value]), is_checked=False)

    def _staged_row(self, key: bytes) -> bytes | None:
        """The value that the import has for a key; b"" if it deletes the key."""
        stem = frame(key) + self._reference
        value = self._loose.get(stem + VALUE)
        return b"" if value is None and self._loose.get(stem + TOMBSTONE) is not None else value

    def _staged_entries(self, index: Index, span: Span) -> Iterator[_Entry]:
        """The entries of the import. Raises `ImportRefusedError` for bytes that are none."""
        with refused_as_damaged(self._where):
            yield from self._entries(index, self._staged(span))

    def _staged(self, span: Span) -> Iterator[list[bytes]]:
        """The keys that the import sets in a span."""
        start, end = span_bounds(span.start, span.end)
        for stored, _ in self._loose.rows(start, end):
            keys = [unframe(each[:-TAIL_BYTES]) for each in stored if each[-1:] == VALUE]
            yield [key for key in keys if span.end is None or key < span.end]

    def _entries(self, index: Index, pieces: Iterable[list[bytes]]) -> Iterator[_Entry]:
        """Entries of an index; an entry with a null is left out."""
        keys, parts = self._codec.index_codec(index), len(index.parts)
        prefix = len(self._codec.key.prefix)
        for piece in pieces:
            columns = keys.arrays(binary_array(piece))[:parts]
            whole = columns[0].is_valid()
            for column in columns[1:]:
                whole = pc.and_(whole, column.is_valid())
            rows = self._codec.row_keys(index, piece)
            for entry, row, is_whole in zip(piece, rows, whole.to_pylist(), strict=True):
                if is_whole:
                    yield _Entry(entry[: prefix - len(row) or None], row)

    def _refuse(self, index: Index, key: bytes, other: bytes, as_of: int | None) -> None:
        one, two = (key, other) if self._staged_row(key) else (other, key)  # the store's last
        batch = self._row(one, as_of)
        assert batch is not None, "it fits the values"
        names = self._codec.definition.parts_named(index.parts)
        values = [as_python(batch.column(name), 0) for name in names]
        raise not_unique(self._codec, index, values, two)


class _Forward:
    """The live keys of a span at one time, looked up prefix by prefix, each above the last. It
    reads on where the next prefix is near, and seeks where it is far."""

    def __init__(self, store: Store, span: Span, as_of: int) -> None:
        self._store, self._as_of, self._span = store, as_of, span
        self._keys: list[bytes] = []
        self._count = _FIRST_KEYS
        self._is_last = False

    def beginning(self, prefix: bytes) -> Iterator[bytes]:
        """The keys that begin with a prefix."""
        at = bisect_left(self._keys, prefix)
        if at == len(self._keys):
            self._read(prefix, is_near=False)
            at = 0
        while self._keys[at : at + 1] and self._keys[at].startswith(prefix):
            yield self._keys[at]
            at += 1
            if at == len(self._keys):
                self._read(self._keys[-1] + b"\x00", is_near=True)
                at = 0

    def _read(self, start: bytes, *, is_near: bool) -> None:
        if self._is_last:
            self._keys = []
            return
        self._count = min(4 * self._count, SCAN_CHUNK) if is_near else _FIRST_KEYS
        found = self._store.keys(start, self._span.end, as_of=self._as_of, limit=self._count)
        self._keys = list(found)
        self._is_last = len(self._keys) < self._count


def _unique(codec: TableCodec) -> list[Index]:
    return [index for index in codec.definition.indexes if index.is_unique]


def unique_checks(
    held: ExitStack,
    store: Store,
    manifest: Manifest,
    files: Sequence[Path],
    as_of: int,
    replaced: Sequence[Span] = (),
) -> list[UniqueRows]:
    """Compare an import with the store at `as_of`, without the rows of the store in the spans that
    are `replaced`. Returns the checks of the commit, which `held` closes. Raises
    `NotUniqueError`."""
    checks = []
    for made in manifest.tables:
        codec = store.table(made.table).codec()
        if _unique(codec):
            rows = UniqueRows(store, codec, files, manifest.import_id, replaced)
            check = held.enter_context(rows)
            check.require(as_of)
            checks.append(check)
    return checks


# --------------------------------------------------------------------------------------------------
# The call that a client's server carries out.
#
# The rows travel from the staging place to the server, and not through the client. `bulk.served` is
# the verb of the server.

INGEST: Final = "ingest"
PLACES: Final = "import_places"
_TAKES_NONE: Final = (
    "name a place: kvstore serve --imports-from PLACE, or app(store, verbs=import_verbs([PLACE]))"
)


def require_no_check(how: How) -> None:
    """Raise `UsageError` for a check, which the process that owns the store cannot run."""
    if how.check is not None:
        raise UsageError("check has no effect at a server", "look at the store before the call")


def ingest_there(
    client: Client,
    place: Path | BucketUrl,
    max_bytes: int | None,
    how: How,
) -> Timestamp:
    """Have the server of `client` add the import at `place`. Raises as `bulk.ingest`, and
    `UsageError` for a check, for options of an object store, and for anything but a client."""
    from kvstore.remote.client import Client  # imported late: it brings TLS with it

    if not isinstance(client, Client):
        raise UsageError(
            f"an import goes into a Store or a Client, not {type(client).__name__}",
            "open or connect to the store; a coroutine calls asyncio.to_thread(bulk.ingest, ...)",
        )
    staging = place.url if isinstance(place, BucketUrl) else str(place.absolute())
    if isinstance(place, BucketUrl) and (place.options or place.patience_s is not None):
        raise UsageError(f"options for {staging} have no effect at a server", "pass none")
    require_no_check(how)
    with _taking_imports(client):
        done = client.work(
            INGEST,
            lambda steps: how.tell(f"step {steps} of the server"),
            staging=staging,
            on_conflict=how.on_conflict,
            move=how.move,
            thorough=how.thorough,
            max_bytes=max_bytes,
            origin=how.origin,
        )
    for stage, seconds in done["seconds"].items():
        how.times.add(stage, seconds)
    return Timestamp(done["timestamp"])


@contextmanager
def _taking_imports(client: Client) -> Iterator[None]:
    """Tell of a server that lacks the verbs of `bulk.served`."""
    try:
        yield
    except NotFoundError as error:
        if not error.what.startswith("no verb"):
            raise
        raise AccessDeniedError(repr(client), "the server takes no imports", _TAKES_NONE) from error


# --------------------------------------------------------------------------------------------------
# The place at which a load is built, found and asked for before anything is built.


def staging_for(store: StoreOrClient, staging: Path | BucketUrl | None) -> Path | BucketUrl:
    """The place at which to build a load into `store`: `staging`, or a new directory beside the
    files of the store, or a new place below the first one from which its server takes imports.

    The server of a client is asked. Raises `AccessDeniedError` without the right `admin`, and for a
    place from which the server takes no import; `UsageError` for a directory that it does not see.
    """
    if store.path is not None:
        return staging or new_staging(store.path)
    owner = client_of(store)
    if owner is None:
        if staging is None:
            raise UsageError("the store has no directory to stage in", "pass staging=")
        return staging
    if staging is None:
        staging = _below_first(owner)
    if isinstance(staging, BucketUrl):
        _places(owner, staging.url)
        return staging
    with storage_errors(str(staging)):
        is_new = not staging.exists()
        staging.mkdir(parents=True, exist_ok=True)
    try:
        _places(owner, str(staging.absolute()))
    except BaseException:
        if is_new:
            with suppress(OSError):
                staging.rmdir()
        raise
    return staging


def _below_first(client: Client) -> Path | BucketUrl:
    """A new place below the first one from which a server takes imports."""
    places = _places(client, None)
    if not places:
        raise AccessDeniedError(repr(client), "the server takes no imports", _TAKES_NONE)
    place, name = staging_place(places[0]), f"load-{secrets.token_hex(8)}"
    if isinstance(place, BucketUrl):
        return place.below(name)
    if not place.is_dir():
        raise UsageError(
            f"the server takes imports from {place}, which this process does not see",
            "pass staging=, a place that both see",
        )
    return place / name


def _places(client: Client, staging: str | None) -> list[str]:
    """The places from which a server takes imports. Raises unless it takes one from `staging`."""
    with _taking_imports(client):
        found: list[str] = client.call(PLACES, staging=staging)["places"]
    return found


def as_taken(store: StoreOrClient, place: Path | BucketUrl) -> Path | BucketUrl:
    """A staging place as `ingest` into `store` takes it: a server reaches a bucket with its own
    credentials."""
    is_served = store.path is None and client_of(store) is not None
    return BucketUrl(place.url) if is_served and isinstance(place, BucketUrl) else place
