"""Feast's online store: the newest row of each entity, with its history.

The keys below the prefix, `VIEW` being the project, the name and the version of a feature view:

    l | layout                 the names of features, in the order in which rows have them
    r | VIEW | entity key      event time i64 | created i64 | layout 8 bytes | values

Times are microseconds since 1970, and a row without a time of creation has -1. `values` is a
`RepeatedValue` of Feast, one value for each name: a row is parsed in one call.

Invariants
1. A row is replaced, as a whole, by one whose event time is not older, and by no other, in whatever
   order they come. Of rows of one event time the one that was created later stays, and of those the
   one that was written later. A row without a time of creation is older than one that has it.
2. A batch of rows is one commit: a reader sees all of it or nothing. Only rows that are within a
   minute of their TTL come behind it, each by itself. `kvstore.feast.compute` writes a
   materialisation by one import, under the same rules.
3. With `expire`, a row is deleted when it is older than the TTL of its view, at that time exactly:
   so the online answer at T is the answer of the join at T.
4. A layout is named by the digest of its names, and never changes. Each commit makes sure that the
   layouts of its rows are there: a revert may have undone the commit that brought them. An import
   brings none, because a revert of the import would take them from the rows of others.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from feast.infra.key_encoding_utils import serialize_entity_key
from feast.infra.online_stores.helpers import compute_versioned_name
from feast.infra.online_stores.online_store import OnlineStore as FeastOnlineStore
from feast.infra.supported_async_methods import SupportedAsyncMethods
from feast.protos.feast.types.Value_pb2 import RepeatedValue
from feast.repo_config import FeastConfigBaseModel
from pydantic import StrictStr

from kvstore.base.timestamp import Timestamp
from kvstore.errors import CorruptionError, UsageError
from kvstore.feast.handles import address_of, opened

HEAD: Final = struct.Struct("<qq8s")
"""Event time, time of creation, and the digest of the layout."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND: Final = timedelta(microseconds=1)
NOT_CREATED: Final = -1
"""The time of creation of a row that has none."""
DUE_END: Final = (datetime(2262, 1, 1, tzinfo=timezone.utc) - _EPOCH) // _MICROSECOND
"""A row that would expire behind it stays."""
_EXPIRED: Final = -(1 << 63)
MARGINS: Final = (60_000_000, 600_000_000)
"""Microseconds that a commit of many rows may take; the second if it took longer than the first."""


class OnlineStoreConfig(FeastConfigBaseModel):
    """The section `online_store` of `feature_store.yaml`."""

    type: Literal["kvstore.feast.OnlineStore"] = "kvstore.feast.OnlineStore"
    path: StrictStr = "data/online.db"
    """A path, from the repository on, which is opened shared; or the URL of a server."""
    token: StrictStr | None = None
    """The token of a server."""
    follow: bool = False
    """Only read, beside the process that writes: writes raise `UsageError`."""
    as_of: StrictStr | None = None
    """Read as of a time (`2026-11-22T10:00Z`, `-1h`): what was served then. Writes raise
    `UsageError`."""
    prefix: StrictStr = "feast/"
    """The keys of all feature views begin with it."""
    expire: bool = True
    """Whether rows are deleted when they are older than the TTL of their view."""


class OnlineStore(FeastOnlineStore):
    """Feast's interface over a store. Safe for threads."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, tuple[str, ...]] = {}

    @property
    def async_supported(self) -> SupportedAsyncMethods:
        """Both: a call is done by a thread."""
        return SupportedAsyncMethods(read=True, write=True)

    def _is_versioned_read_supported(self) -> bool:
        return True

    # -- writing ----------------------------------------------------------------------------

    def online_write_batch(
        self,
        config: Any,
        table: Any,
        data: Sequence[tuple[Any, dict[str, Any], datetime, datetime | None]],
        progress: Callable[[int], Any] | None,
    ) -> None:
        """Write rows by one commit; a time without a zone is UTC, as Feast has it. Costs a look-up
        and a put for each entity."""
        store = self.to_write(config)
        place = ViewKeys.of(config, table)
        newest: dict[bytes, _Row] = {}
        for entity, values, event, created in data:
            key = place.key_of(entity)
            row = _Row(_event_of(event, place), _created(created), values)
            if key not in newest or not row.is_older_than(newest[key]):
                newest[key] = row
        ttl = getattr(table, "ttl", None) or None  # a view on demand has none
        if ttl is None or not config.online_store.expire:
            store.transact(partial(_write, place, newest, {}))
        else:
            _write_expiring(store, place, newest, ttl // _MICROSECOND)
        if progress is not None:
            progress(len(data))

    async def online_write_batch_async(
        self, config: Any, table: Any, data: Any, progress: Callable[[int], Any] | None
    ) -> None:
        """As `online_write_batch`, by a thread."""
        await asyncio.to_thread(self.online_write_batch, config, table, data, progress)

    # -- reading ----------------------------------------------------------------------------

    def online_read(
        self,
        config: Any,
        table: Any,
        entity_keys: Sequence[Any],
        requested_features: Sequence[str] | None = None,
    ) -> list[tuple[datetime | None, dict[str, Any] | None]]:
        """The event time and the features of each entity, or two Nones. A feature that the view did
        not have when the row was written is missing. Costs a look-up for each entity."""
        store = self._store(config)
        place = ViewKeys.of(config, table)
        keys = [place.key_of(entity) for entity in entity_keys]
        when = {} if config.online_store.as_of is None else {"as_of": config.online_store.as_of}
        found: list[tuple[datetime | None, dict[str, Any] | None]] = []
        for stored in store.get_many(keys, **when):
            if stored is None:
                found.append((None, None))
                continue
            row = self._row_of(store, place, stored, when)
            values = row.values
            if requested_features is not None:
                values = {name: values[name] for name in requested_features if name in values}
            found.append((_EPOCH + row.event * _MICROSECOND, values))
        return found

    async def online_read_async(
        self,
        config: Any,
        table: Any,
        entity_keys: Sequence[Any],
        requested_features: Sequence[str] | None = None,
    ) -> list[tuple[datetime | None, dict[str, Any] | None]]:
        """As `online_read`, by a thread."""
        return await asyncio.to_thread(
            self.online_read, config, table, entity_keys, requested_features
        )

    # -- views ------------------------------------------------------------------------------

    def update(
        self,
        config: Any,
        tables_to_delete: Sequence[Any],
        tables_to_keep: Sequence[Any],
        entities_to_delete: Sequence[Any],
        entities_to_keep: Sequence[Any],
        partial: bool,
    ) -> None:
        """Delete the rows of views that go, of all their versions: one write each, and their
        history stays. A new view needs nothing."""
        if not tables_to_delete:
            self._store(config)  # the path, the server and its token are right
            return
        store = self.to_write(config)
        for table in tables_to_delete:
            store.delete_range(prefix=_view_prefix(config, table.name))

    def teardown(self, config: Any, tables: Sequence[Any], entities: Sequence[Any]) -> None:
        """Delete the rows of the views. The store stays, and the history in it."""
        self.update(config, tables, (), entities, (), False)

    # -- the store --------------------------------------------------------------------------

    def _store(self, config: Any) -> Any:
        place = config.online_store
        address = address_of(place.path, config.repo_path)
        return opened(address, place.token, follows=place.follow)

    def to_write(self, config: Any) -> Any:
        """The handle by which rows are written. Raises `UsageError` where the store only reads."""
        if config.online_store.follow or config.online_store.as_of is not None:
            raise UsageError(
                "an online store with follow: or as_of: only reads",
                "leave both out of feature_store.yaml where features are written",
            )
        return self._store(config)

    def _row_of(self, store: Any, place: ViewKeys, stored: bytes, when: Mapping[str, Any]) -> _Row:
        try:
            event, created, layout = HEAD.unpack_from(stored)
            values = RepeatedValue.FromString(stored[HEAD.size :]).val
        except Exception as error:  # protobuf has several classes of errors
            raise CorruptionError(f"a row of {place.view}", "not a row of features") from error
        names = self._layouts.get(layout)
        if names is None:
            raw = store.get(place.layout_key(layout), **when)
            if raw is None:
                raise CorruptionError(f"a row of {place.view}", "its names of features are lost")
            names = self._layouts[layout] = tuple(raw.decode().split("\0"))
        if len(names) != len(values):
            raise CorruptionError(f"a row of {place.view}", "it has other values than names")
        return _Row(event, created, dict(zip(names, values, strict=True)))


class _Row(NamedTuple):
    """A row: microseconds, and the features by name."""

    event: int
    created: int
    values: dict[str, Any]

    def is_older_than(self, other: _Row) -> bool:
        """Whether the other one stays, although this one comes later."""
        return (self.event, self.created) < (other.event, other.created)


class ViewKeys(NamedTuple):
    """The keys of one view."""

    view: str
    rows: bytes
    layouts: bytes
    serialization: int

    @classmethod
    def of(cls, config: Any, table: Any) -> ViewKeys:
        is_versioned = config.registry.enable_online_feature_view_versioning
        version = compute_versioned_name(table, is_versioned)[len(table.name) :]
        return cls(
            table.name,
            _view_prefix(config, table.name) + version.encode() + b"\0",
            config.online_store.prefix.encode() + b"l",
            config.entity_key_serialization_version,
        )

    def key_of(self, entity: Any) -> bytes:
        """The key of an entity's row."""
        key: bytes = serialize_entity_key(
            entity, entity_key_serialization_version=self.serialization
        )
        return self.rows + key

    def layout_key(self, layout: bytes) -> bytes:
        """The key of a layout."""
        return self.layouts + layout


def _view_prefix(config: Any, name: str) -> bytes:
    """What the keys of all versions of a view begin with. Names of Feast have no zero byte."""
    prefix: str = config.online_store.prefix
    return f"{prefix}r{config.project}\0{name}\0".encode()


class FeatureNames(NamedTuple):
    """The names of the features of rows."""

    digest: bytes
    names: bytes

    @classmethod
    def of(cls, names: Iterable[str]) -> FeatureNames:
        """The layout of these names, in their order."""
        raw = "\0".join(names).encode()
        return cls(hashlib.blake2b(raw, digest_size=8).digest(), raw)


def put_layouts(place: ViewKeys, layouts: Iterable[FeatureNames], transaction: Any) -> None:
    """Write the layouts that are not there."""
    wanted = {place.layout_key(layout.digest): layout.names for layout in layouts}
    for key, known in zip(wanted, transaction.get_many(list(wanted)), strict=True):
        if known is None:
            transaction.put(key, wanted[key])


def _write(
    place: ViewKeys, rows: Mapping[bytes, _Row], dues: Mapping[bytes, int], transaction: Any
) -> None:
    """Write the rows that are not older than the stored ones. `dues` has the microsecond of some at
    whose end they expire; a row whose time is `_EXPIRED` leaves nothing."""
    layouts: set[FeatureNames] = set()
    keys = list(rows)
    for key, stored in zip(keys, transaction.get_many(keys), strict=True):
        row, due = rows[key], dues.get(key)
        if stored is not None:
            event, created, _ = HEAD.unpack_from(stored)
            if row.is_older_than(_Row(event, created, {})):
                continue
        if due == _EXPIRED:
            if stored is not None:
                transaction.delete(key)
            continue
        layout = FeatureNames.of(row.values)
        layouts.add(layout)
        values = RepeatedValue(val=row.values.values()).SerializeToString()
        raw = HEAD.pack(row.event, row.created, layout.digest) + values
        if due is None:
            transaction.put(key, raw)
        else:
            transaction.put(key, raw, expires=Timestamp((due + 1) * 1000))
    put_layouts(place, layouts, transaction)


def _write_expiring(store: Any, place: ViewKeys, rows: Mapping[bytes, _Row], ttl: int) -> None:
    """Write rows that expire `ttl` microseconds behind their event. A store refuses a row whose
    time has come when it commits, and a commit of many rows takes a while. So rows that are close
    to their end come behind, one by one, and one whose end has come meanwhile leaves nothing."""
    ends = {key: row.event + ttl for key, row in rows.items()}
    for margin in MARGINS:
        now = microseconds(datetime.now(timezone.utc))
        close = {key for key, end in ends.items() if now < end < now + margin}
        dues = {key: end if end > now else _EXPIRED for key, end in ends.items() if end < DUE_END}
        try:
            most = {key: row for key, row in rows.items() if key not in close}
            store.transact(partial(_write, place, most, dues))
            break
        except UsageError:
            if margin == MARGINS[-1]:
                raise
    for key in sorted(close):
        _write_close(store, place, {key: rows[key]}, dues)


def _write_close(
    store: Any, place: ViewKeys, row: Mapping[bytes, _Row], dues: Mapping[bytes, int]
) -> None:
    try:
        store.transact(partial(_write, place, row, dues))
    except UsageError:  # its end has come
        store.transact(partial(_write, place, row, dict.fromkeys(row, _EXPIRED)))


def _event_of(moment: datetime, place: ViewKeys) -> int:
    if moment != moment:  # NaT
        raise UsageError(f"a row of {place.view} has no event time", "leave the row out")
    return microseconds(moment)


def microseconds(moment: datetime) -> int:
    """A time since 1970; one without a zone is UTC, as Feast has it."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - _EPOCH) // _MICROSECOND


def _created(moment: datetime | None) -> int:
    return NOT_CREATED if moment is None or moment != moment else microseconds(moment)  # NaT
