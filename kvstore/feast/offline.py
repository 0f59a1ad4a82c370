"""Feast's offline store: point-in-time joins of typed tables.

The source of a feature view is a table of the store. Where its key has the join keys of the view,
and its event time is the view's timestamp, an entity row gets the newest event at or before its
time by a seek, without a sort (`_joined_by_key`). The table's own history is the other axis: with
`filter_by_created_timestamp` an entity row sees what the store had been told at its time, and
nothing that was written, restated or loaded since. Nobody writes these times: they are the times of
commits. Any other table answers by a pass over its rows (`_joined_by_pass`); the other axis is then
its `created_timestamp_column`, as Feast has it.

Invariants
1. An answer has the entity rows in their order, each once, whatever their keys and times are: one
   without a key or a time has nulls.
2. A view whose TTL has passed at the time of an entity row gives nulls; at the very end of the TTL
   it still answers. The online store deletes by the same rule.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from feast import type_map
from feast.data_source import DataSource
from feast.errors import SavedDatasetLocationAlreadyExists
from feast.feature_logging import LoggingDestination
from feast.feature_view import DUMMY_ENTITY_ID
from feast.infra.offline_stores.offline_store import OfflineStore as FeastOfflineStore
from feast.infra.offline_stores.offline_store import RetrievalJob, RetrievalMetadata
from feast.infra.offline_stores.offline_utils import (
    infer_event_timestamp_from_entity_df,
)
from feast.on_demand_feature_view import OnDemandFeatureView
from feast.protos.feast.core.DataSource_pb2 import DataSource as DataSourceProto
from feast.protos.feast.core.FeatureService_pb2 import LoggingConfig as LoggingConfigProto
from feast.protos.feast.core.SavedDataset_pb2 import (
    SavedDatasetStorage as SavedDatasetStorageProto,
)
from feast.repo_config import FeastConfigBaseModel
from feast.saved_dataset import CUSTOM_STORAGE_CLASS_KEY, SavedDatasetStorage
from pydantic import StrictStr

import kvstore
from kvstore import backup, bulk
from kvstore.base.timestamp import to_timestamp
from kvstore.errors import UsageError
from kvstore.feast.handles import address_of, opened

_BATCH: Final = "__kvstore_batch"
_ROW: Final = "__kvstore_row"
"""The key of saved data sets and of logs: a random name, and the number of a row."""
_LABEL: Final = "__kvstore_label"
_KNOWN: Final = "__kvstore_known"
_KEY: Final = "__kvstore_key_"
_FEATURE: Final = "__kvstore_feature_"
_AT: Final = "__kvstore_at"
_ROW_AT: Final = "__kvstore_row_at"
_ONE: Final = "__kvstore_one"
_LAST: Final = "__kvstore_last"
_EVENT_TIME: Final = "event_timestamp"
"""The column of times of entity rows that nobody gave, as Feast names it."""
_MICROSECOND: Final = timedelta(microseconds=1)
_US: Final = pa.timestamp("us", "UTC")
_NS: Final = pa.timestamp("ns", "UTC")
_IMPORT_ROWS_MIN: Final = 20_000
"""Rows from which on they come as one import, whose cost of becoming visible does not grow."""


class OfflineStoreConfig(FeastConfigBaseModel):
    """The section `offline_store` of `feature_store.yaml`."""

    type: Literal["kvstore.feast.OfflineStore"] = "kvstore.feast.OfflineStore"
    path: StrictStr = "data/offline.db"
    """A path, from the repository on, which is opened shared; the URL of a server; or, where
    `collection` is set, the place of a collection of backups."""
    token: StrictStr | None = None
    """The token of a server."""
    collection: bool = False
    """Read a collection of backups in place of a store."""
    as_of: StrictStr | None = None
    """Answer by what was known then, at most: yesterday's training set again."""
    naive: Literal["refuse", "utc"] = "refuse"
    """What a time without a zone is: an error, or a time in UTC."""


class TableSource(DataSource):
    """A table of the store as the source of a feature view. A table whose key has the join keys of
    the view, and whose event time is `timestamp_field`, answers by look-ups."""

    def __init__(
        self,
        *,
        table: str,
        timestamp_field: str | None = None,
        name: str | None = None,
        created_timestamp_column: str | None = None,
        field_mapping: dict[str, str] | None = None,
        description: str = "",
        tags: dict[str, str] | None = None,
        owner: str = "",
    ) -> None:
        super().__init__(
            name=name or table,
            timestamp_field=timestamp_field,
            created_timestamp_column=created_timestamp_column,
            field_mapping=field_mapping,
            description=description,
            tags=tags,
            owner=owner,
        )
        self.table = table

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.table))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TableSource) and super().__eq__(other) and self.table == other.table
        )

    def source_type(self) -> Any:
        """A custom source, as Feast calls those of third parties."""
        return DataSourceProto.CUSTOM_SOURCE

    @staticmethod
    def from_proto(data_source: Any) -> TableSource:
        """The source of its message in the registry."""
        return TableSource(
            table=json.loads(data_source.custom_options.configuration)["table"],
            timestamp_field=data_source.timestamp_field,
            name=data_source.name,
            created_timestamp_column=data_source.created_timestamp_column,
            field_mapping=dict(data_source.field_mapping),
            description=data_source.description,
            tags=dict(data_source.tags),
            owner=data_source.owner,
        )

    def _to_proto_impl(self) -> Any:
        configuration = json.dumps({"table": self.table}).encode()
        return DataSourceProto(
            name=self.name,
            type=DataSourceProto.CUSTOM_SOURCE,
            data_source_class_type="kvstore.feast.TableSource",
            custom_options=DataSourceProto.CustomSourceOptions(configuration=configuration),
            timestamp_field=self.timestamp_field,
            created_timestamp_column=self.created_timestamp_column,
            field_mapping=self.field_mapping,
            description=self.description,
            tags=self.tags,
            owner=self.owner,
        )

    def validate(self, config: Any) -> None:
        """Raise `UsageError` where the store has no such table, or it lacks the columns."""
        with _reading(config) as store:
            schema = store.table(self.table).schema
        for column in _order_of(self):
            if column not in schema.names:
                raise UsageError(
                    f"table {self.table} has no column {column}",
                    f"its columns are {', '.join(schema.names)}",
                )

    def get_table_query_string(self) -> str:
        """The name of the table: there is no SQL."""
        return self.table

    @staticmethod
    def source_datatype_to_feast_value_type() -> Callable[[str], Any]:
        """Feast's own map of Arrow's types."""
        found: Callable[[str], Any] = type_map.pa_to_feast_value_type
        return found

    def get_table_column_names_and_types(self, config: Any) -> Iterable[tuple[str, str]]:
        """The columns of the table, with the names of Arrow's types."""
        with _reading(config) as store:
            schema = store.table(self.table).schema
        return [(field.name, str(field.type)) for field in schema]


class SavedTable(SavedDatasetStorage):
    """Keeps a data set of Feast as the table `table` of the offline store."""

    _proto_attr_name = "custom_storage"

    def __init__(self, table: str) -> None:
        self.table = table

    @staticmethod
    def from_proto(storage_proto: Any) -> SavedTable:
        """The storage of its message in the registry."""
        return SavedTable(json.loads(storage_proto.custom_storage.configuration)["table"])

    def to_proto(self) -> Any:
        """Its message in the registry, which names this class."""
        fields = {"table": self.table, CUSTOM_STORAGE_CLASS_KEY: "kvstore.feast.SavedTable"}
        options = DataSourceProto.CustomSourceOptions(configuration=json.dumps(fields).encode())
        return SavedDatasetStorageProto(custom_storage=options)

    def to_data_source(self) -> DataSource:
        """The table as a source."""
        return TableSource(table=self.table)

    @staticmethod
    def from_data_source(data_source: DataSource) -> SavedTable:
        """The storage of a source."""
        if not isinstance(data_source, TableSource):
            raise UsageError(f"{data_source!r} is no kvstore.feast.TableSource", "pass one")
        return SavedTable(data_source.table)


class LoggedTable(LoggingDestination):
    """Keeps logged features in the table `table` of the offline store, made at the first log."""

    _proto_kind = "kvstore.feast.LoggedTable"

    def __init__(self, *, table: str) -> None:
        self.table = table

    @classmethod
    def from_proto(cls, config_proto: Any) -> LoggedTable:
        """The destination of its message in the registry."""
        return cls(table=config_proto.custom_destination.config["table"])

    def to_proto(self) -> Any:
        """Its message in the registry."""
        return LoggingConfigProto(
            custom_destination=LoggingConfigProto.CustomDestination(
                kind=self._proto_kind, config={"table": self.table}
            )
        )

    def to_data_source(self) -> DataSource:
        """The logs as a source, by the time of the log."""
        return TableSource(table=self.table, timestamp_field="__log_timestamp")


# --------------------------------------------------------------------------------------------------
# The store.


class OfflineStore(FeastOfflineStore):
    """Feast's interface over typed tables."""

    supports_filter_by_created_timestamp = True

    @staticmethod
    def get_historical_features(
        config: Any,
        feature_views: Sequence[Any],
        feature_refs: Sequence[str],
        entity_df: Any,
        registry: Any,
        project: str,
        full_feature_names: bool = False,
        filter_by_created_timestamp: bool = False,
        start_date: datetime | None = None,
        end_date: datetime | None = None,
    ) -> RetrievalJob:
        """The entity rows, each with the features of the newest event at or before its time, no
        older than the TTL of the view. A frame of pandas, an Arrow table, or anything that speaks
        Arrow's C stream. Without entity rows each entity of the views is asked at each of its event
        times from `start_date` to `end_date`.

        With `filter_by_created_timestamp` the answer is what the store had been told at the time of
        the entity row. Raises `UsageError` for SQL and for a time without a zone. Costs a look-up
        an entity row and view, or a pass over the keys of a view where many rows lie closely; and a
        pass over a table that has another key or event time.
        """
        if entity_df is None:
            entity = _every_entity(config, feature_views, start_date, end_date)
        else:
            entity = _frame_of(entity_df)
        time_column = infer_event_timestamp_from_entity_df(_dtypes(entity))
        on_demand = OnDemandFeatureView.get_requested_odfvs(list(feature_refs), project, registry)
        times = _instants(config, entity, time_column)
        views = [
            _ViewAsked.of(view, feature_refs, full_feature_names=full_feature_names)
            for view in feature_views
        ]

        asked = _Known(config.offline_store.as_of, filter_by_created_timestamp)

        def answer() -> pa.Table:
            found = entity
            with _reading(config) as store:
                for view in views:
                    for name, column in view.join(store, entity, times, asked):
                        if name in found.column_names:
                            raise UsageError(
                                f"the answer has two columns {name}",
                                "pass full_feature_names=True, or rename the column of the rows",
                            )
                        found = found.append_column(name, column)
            return found

        metadata = RetrievalMetadata(
            features=list(feature_refs),
            keys=[name for name in entity.column_names if name != time_column],
            min_event_timestamp=pc.min(times).as_py(),
            max_event_timestamp=pc.max(times).as_py(),
        )
        return _Job(config, answer, on_demand, full_feature_names, metadata)

    @staticmethod
    def pull_latest_from_table_or_query(
        config: Any,
        data_source: Any,
        join_key_columns: Sequence[str],
        feature_name_columns: Sequence[str],
        timestamp_field: str,
        created_timestamp_column: str | None,
        start_date: datetime,
        end_date: datetime,
    ) -> RetrievalJob:
        """The newest row of each entity with a time from `start_date` to `end_date`. Costs a pass
        over the table."""
        order = [timestamp_field]
        if created_timestamp_column:
            order.append(created_timestamp_column)
        columns = list(dict.fromkeys([*join_key_columns, *feature_name_columns, *order]))

        def answer() -> pa.Table:
            found = _between(config, data_source, columns, timestamp_field, start_date, end_date)
            return _latest(found, join_key_columns, order)

        return _Job(config, answer)

    @staticmethod
    def pull_all_from_table_or_query(
        config: Any,
        data_source: Any,
        join_key_columns: Sequence[str],
        feature_name_columns: Sequence[str],
        timestamp_field: str,
        created_timestamp_column: str | None = None,
        start_date: datetime | None = None,
        end_date: datetime | None = None,
    ) -> RetrievalJob:
        """All rows with a time from `start_date` to `end_date`. Costs a pass over the table."""
        columns = [*join_key_columns, *feature_name_columns, timestamp_field]
        if created_timestamp_column:
            columns.append(created_timestamp_column)
        columns = list(dict.fromkeys(columns))

        def answer() -> pa.Table:
            return _between(config, data_source, columns, timestamp_field, start_date, end_date)

        return _Job(config, answer)

    @staticmethod
    def offline_write_batch(
        config: Any, feature_view: Any, table: pa.Table, progress: Callable[[int], Any] | None
    ) -> None:
        """Write rows to the table of a view by one commit; many come as one import."""
        source = _source_of(feature_view)
        target = _to_write(config).table(source.table)
        back = {feature: column for column, feature in source.field_mapping.items()}
        table = table.rename_columns([back.get(name, name) for name in table.column_names])
        missing = [name for name in table.column_names if name not in target.schema.names]
        if missing:
            raise UsageError(
                f"table {source.table} has no column {missing[0]}",
                f"its columns are {', '.join(target.schema.names)}",
            )
        _write_rows(target, table)
        if progress is not None:
            progress(table.num_rows)

    @staticmethod
    def write_logged_features(
        config: Any, data: pa.Table | Path, source: Any, logging_config: Any, registry: Any
    ) -> None:
        """Append logs to the table of a `LoggedTable`."""
        destination = logging_config.destination
        if not isinstance(destination, LoggedTable):
            raise UsageError(
                f"logs go to a LoggedTable, not to {type(destination).__name__}",
                "pass LoggingConfig(destination=kvstore.feast.LoggedTable(table=...))",
            )
        logs = ds.dataset(str(data)).to_table() if isinstance(data, Path) else data
        rows, store = _numbered(logs), _to_write(config)
        table = (
            store.table(destination.table)
            if destination.table in store.tables()
            else store.table(destination.table, rows.schema, [_BATCH, _ROW])
        )
        known = set(table.schema.names)
        if added := {field.name: field.type for field in rows.schema if field.name not in known}:
            table.alter(add=added)
        _write_rows(table, rows)


class _Job(RetrievalJob):
    """An answer, read when it is asked for."""

    def __init__(
        self,
        config: Any,
        answer: Callable[[], pa.Table],
        on_demand: Sequence[Any] = (),
        full_feature_names: bool = False,
        metadata: RetrievalMetadata | None = None,
    ) -> None:
        self._config, self._answer, self._metadata = config, answer, metadata
        self._on_demand, self._full_feature_names = list(on_demand), full_feature_names

    def _to_arrow_internal(self, timeout: int | None = None) -> pa.Table:
        return self._answer()

    def _to_df_internal(self, timeout: int | None = None) -> pd.DataFrame:
        return self._answer().to_pandas()

    @property
    def full_feature_names(self) -> bool:
        """Whether names of features begin with the name of their view."""
        return self._full_feature_names

    @property
    def on_demand_feature_views(self) -> list[Any]:
        """The views that Feast computes from the answer."""
        return self._on_demand

    @property
    def metadata(self) -> RetrievalMetadata | None:
        """The features, the keys and the times that were asked for."""
        return self._metadata

    def persist(
        self, storage: Any, allow_overwrite: bool = False, timeout: int | None = None
    ) -> None:
        """Keep the answer as the table of a `SavedTable`. Raises Feast's
        `SavedDatasetLocationAlreadyExists` for a table that exists, unless `allow_overwrite`; its
        rows are replaced then, and stay in its history."""
        saved = storage if isinstance(storage, SavedTable) else None
        if saved is None:
            raise UsageError(
                f"a data set is kept in a SavedTable, not in a {type(storage).__name__}",
                "pass storage=kvstore.feast.SavedTable(table)",
            )
        store, name = _to_write(self._config), saved.table
        exists = name in store.tables()
        if exists and not allow_overwrite:
            raise SavedDatasetLocationAlreadyExists(location=name)
        if exists and store.table(name).schema.names[:2] != [_BATCH, _ROW]:
            raise UsageError(
                f"table {name} is no saved data set, and is not overwritten", "name another table"
            )
        rows = _numbered(self.to_arrow())
        with kvstore.open(None, "memory") as scratch:  # the answer can be kept
            scratch.table(name, rows.schema, [_BATCH, _ROW])
        if exists:
            store.table(name).drop()
        _write_rows(store.table(name, rows.schema, [_BATCH, _ROW]), rows)


# --------------------------------------------------------------------------------------------------
# A view, and what it answers.


class _ViewAsked(NamedTuple):
    """The features that are asked of a view."""

    name: str
    table: str
    order: tuple[str, ...]
    """The columns of the event time, and of the time of creation if the source has one."""
    keys: tuple[tuple[str, str], ...]
    """For each join key the column of the table and the column of the entity rows."""
    features: tuple[tuple[str, str], ...]
    """For each feature the column of the table and its name in the answer."""
    ttl: timedelta | None

    @classmethod
    def of(cls, view: Any, refs: Sequence[str], *, full_feature_names: bool) -> _ViewAsked:
        """What `refs` ask of a view."""
        source = _source_of(view)
        back = {feature: column for column, feature in source.field_mapping.items()}
        asked = view.projection.name_to_use()
        prefix = f"{view.projection.name_alias or view.name}__" if full_feature_names else ""
        names = [name for which, _, name in (ref.partition(":") for ref in refs) if which == asked]
        mapped = view.projection.join_key_map
        keys = tuple(
            (back.get(column.name, column.name), mapped.get(column.name, column.name))
            for column in view.entity_columns
            if column.name != DUMMY_ENTITY_ID
        )
        features = tuple((back.get(name, name), prefix + name) for name in names)
        return cls(view.name, source.table, _order_of(source), keys, features, view.ttl or None)

    def join(
        self, store: Any, entity: pa.Table, times: pa.Array, asked: _Known
    ) -> list[tuple[str, pa.ChunkedArray]]:
        """The columns of the features, a row for each entity row."""
        table = store.table(self.table)
        fields = {field.name: field.type for field in table.schema}
        labels: dict[str, Any] = {}
        for name, column in self.keys:
            if column not in entity.column_names:
                raise UsageError(
                    f"view {self.name} is asked by {column}, which the entity rows lack",
                    "add the column",
                )
            labels[name] = _as_type(entity[column], fields[name], self.name)
        key = self._key_of(table)
        given = pa.table({**labels, _LABEL: times})
        if key is None:
            found = self._joined_by_pass(table, given, asked)
        else:
            found = self._joined_by_key(table, given, key, asked, store)
        return [(name, found[column]) for column, name in self.features]

    def _joined_by_key(
        self, table: Any, labels: pa.Table, key: list[str], asked: _Known, store: Any
    ) -> pa.Table:
        known_at: Any = asked.as_of
        if asked.each:
            times = labels[_LABEL].combine_chunks()
            labels = labels.append_column(_KNOWN, _known_times(store, times, asked.as_of))
            known_at = _KNOWN
        valid = [pc.is_valid(labels[name]).to_numpy() for name in (*key, _LABEL)]
        places = np.flatnonzero(np.logical_and.reduce(valid))
        numbered = {name: f"{_KEY}{at}" for at, name in enumerate(key)}
        labels = labels.rename_columns([numbered.get(name, name) for name in labels.schema.names])
        names = [column for column, _ in self.features]
        found = table.join(
            labels if len(places) == labels.num_rows else labels.take(places),
            on=list(numbered.values()),
            at=_LABEL,
            known_at=known_at,
            max_age=self.ttl,
            columns=names,
            prefix=_FEATURE,
        ).read_all()
        found = found.select([f"{_FEATURE}{name}" for name in names]).rename_columns(names)
        return found if len(places) == labels.num_rows else _placed(found, places, labels.num_rows)

    def _joined_by_pass(self, table: Any, labels: pa.Table, asked: _Known) -> pa.Table:
        """Every pair of an entity row and a row of its entity is looked at."""
        keys = [name for name, _ in self.keys]
        order = self.order
        names = [column for column, _ in self.features]
        when = {} if asked.as_of is None else {"as_of": asked.as_of}
        columns = list(dict.fromkeys([*keys, *order, *names]))
        rows = table.scan(columns=columns, **when).read_all()
        numbered = rows.select([*keys, *order]).append_column(_ROW_AT, _numbers(rows.num_rows))
        asking = labels.append_column(_AT, _numbers(labels.num_rows))
        if keys:
            pairs = asking.join(numbered, keys, join_type="inner")
        else:  # one entity for all
            one = pa.array(np.zeros(rows.num_rows, np.int8))
            all_ = pa.array(np.zeros(labels.num_rows, np.int8))
            pairs = asking.append_column(_ONE, all_).join(
                numbered.append_column(_ONE, one), _ONE, join_type="inner"
            )
        at, moment = microseconds_of(pairs[_LABEL]), microseconds_of(pairs[order[0]])
        passes = pc.less_equal(moment, at)
        if self.ttl is not None:
            age = min(self.ttl // _MICROSECOND, 1 << 62)
            passes = pc.and_(passes, pc.less_equal(pc.subtract(at, moment), age))
        if asked.each and len(order) == 2:
            passes = pc.and_(passes, pc.less_equal(microseconds_of(pairs[order[1]]), at))
        best = _latest(pairs.filter(passes), [_AT], [*order, _ROW_AT])
        found = rows.select(names).take(best[_ROW_AT])
        return _placed(found, best[_AT].to_numpy(), labels.num_rows)

    def _key_of(self, table: Any) -> list[str] | None:
        """The key of the table without its event time, if it is the one of the view."""
        event_time = table.event_time
        key = [part if isinstance(part, str) else part.value for part in table.key]
        key = [name for name in key if name != event_time]
        is_same = bool(key) and {*key} == {name for name, _ in self.keys}
        return key if is_same and event_time == self.order[0] else None


def _order_of(source: TableSource) -> tuple[str, ...]:
    """The columns of a source that order the rows of an entity."""
    back: dict[str, str] = {feature: column for column, feature in source.field_mapping.items()}
    names: list[str] = [source.timestamp_field or "", source.created_timestamp_column or ""]
    return tuple(back.get(name, name) for name in names if name)


class _Known(NamedTuple):
    """What an answer may know: by a time for all, and by the time of each entity row."""

    as_of: str | None
    each: bool


def _numbers(count: int) -> pa.Array:
    return pa.array(np.arange(count), pa.int64())


def _placed(found: pa.Table, places: Any, count: int) -> pa.Table:
    """Rows at their places among `count`, nulls elsewhere."""
    sources = np.full(count, -1, np.int64)
    sources[places] = np.arange(len(places))
    return found.take(pa.array(sources, mask=sources < 0))


def _known_times(store: Any, labels: pa.Array, as_of: str | None) -> pa.Array:
    """The times at which entity rows ask what was known: their own, not above the newest commit,
    nor above `as_of`; to the microsecond, as Feast has them."""
    bound = int(store.upper) - 1
    if as_of is not None:
        bound = min(bound, to_timestamp(as_of, name="as_of", now=lambda: bound))
    within = pc.min_element_wise(microseconds_of(labels), bound // 1000, skip_nulls=False)
    within = pc.max_element_wise(within, 0, skip_nulls=False)
    is_newest = pc.equal(within, bound // 1000)
    ns = pc.if_else(is_newest, pa.scalar(bound, pa.int64()), pc.multiply(within, 1000))
    return ns.cast(_NS)


def microseconds_of(times: Any) -> Any:
    """Times as int64, rounded down to microseconds, of which a commit knows no parts."""
    if times.type.unit == "ns":
        times = pc.floor_temporal(times, unit="microsecond")
    return times.cast(_US, safe=False).cast(pa.int64())


def _latest(table: pa.Table, keys: Sequence[str], order: Sequence[str]) -> pa.Table:
    """Of the rows of each key the one that comes last in `order`; of equal ones the later row."""
    if not table.num_rows:
        return table
    numbered = table.append_column(_LAST, _numbers(table.num_rows))
    by = [(name, "ascending") for name in (*keys, *order, _LAST)]
    ranked = numbered.take(pc.sort_indices(numbered, by, null_placement="at_start"))
    if not keys:
        return ranked.slice(ranked.num_rows - 1).drop_columns([_LAST])
    differs = np.zeros(ranked.num_rows, bool)
    differs[-1] = True
    for name in keys:
        column = ranked[name].combine_chunks()
        codes = column.dictionary_encode(null_encoding="encode").indices.to_numpy()
        differs[:-1] |= codes[1:] != codes[:-1]
    return ranked.take(np.flatnonzero(differs)).drop_columns([_LAST])


def _between(
    config: Any,
    source: Any,
    columns: Sequence[str],
    timestamp_field: str,
    start: datetime | None,
    end: datetime | None,
) -> pa.Table:
    """The rows of a source with a time in an interval, both ends included."""
    name, as_of = _own(source).table, config.offline_store.as_of
    with _reading(config) as store:
        table = store.table(name)
        kind = table.schema.field(timestamp_field).type
        passes: Any = None
        for bound, compare in ((start, pc.greater_equal), (end, pc.less_equal)):
            if bound is not None:
                limit = _scalar(bound, kind, is_start=bound is start)
                each = compare(pc.field(timestamp_field), limit)
                passes = each if passes is None else passes & each
        when = {} if as_of is None else {"as_of": as_of}
        return table.scan(columns=list(columns), filter=passes, **when).read_all()


_UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}


def _scalar(moment: datetime, kind: pa.DataType, *, is_start: bool) -> pa.Scalar:
    """A bound in the unit of a column: rounded into the interval that it bounds."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
    us = (aware - datetime(1970, 1, 1, tzinfo=timezone.utc)) // _MICROSECOND
    if kind.unit == "ns":
        return pa.scalar(max(min(us * 1000, (1 << 63) - 1), -(1 << 63)), pa.int64()).cast(kind)
    per = _UNITS[kind.unit]
    return pa.scalar(-(-us // per) if is_start else us // per, pa.int64()).cast(kind)


def _every_entity(
    config: Any, views: Sequence[Any], start: datetime | None, end: datetime | None
) -> pa.Table:
    """Each entity of the views, at each event time between two times."""
    end = end or datetime.now(timezone.utc)
    found: list[pa.Table] = []
    for view in views:
        source, mapped = _source_of(view), view.projection.join_key_map
        back = {feature: column for column, feature in source.field_mapping.items()}
        names = [c.name for c in view.entity_columns if c.name != DUMMY_ENTITY_ID]
        low = start if start is not None or not view.ttl else end - view.ttl
        time = _order_of(source)[0]
        columns = [*(back.get(name, name) for name in names), time]
        rows = _between(config, source, columns, time, low, end)
        rows = rows.rename_columns([*(mapped.get(name, name) for name in names), _EVENT_TIME])
        times = rows[_EVENT_TIME].cast(_US)
        found.append(rows.set_column(len(names), _EVENT_TIME, times))
    every = pa.concat_tables(found, promote_options="permissive")
    distinct = every.group_by(every.column_names).aggregate([])
    return distinct.sort_by([(name, "ascending") for name in distinct.column_names])


# --------------------------------------------------------------------------------------------------
# Frames, tables and stores.


def _frame_of(entity_df: Any) -> pa.Table:
    if isinstance(entity_df, str):
        raise UsageError(
            "the entity rows are a query of SQL",
            "run it, and pass its rows: a frame of pandas, Polars or DuckDB, or an Arrow table",
        )
    if isinstance(entity_df, pa.Table):
        return entity_df
    if isinstance(entity_df, pd.DataFrame):
        return pa.Table.from_pandas(entity_df, preserve_index=False)
    return pa.table(entity_df)


def _dtypes(entity: pa.Table) -> Mapping[str, Any]:
    """The columns as Feast looks for the time among them."""
    found: dict[str, Any] = entity.schema.empty_table().to_pandas().dtypes.to_dict()
    return found


def _instants(config: Any, entity: pa.Table, name: str) -> pa.Array:
    """The times of entity rows."""
    column = entity[name].combine_chunks()
    if not pa.types.is_timestamp(column.type):
        raise UsageError(f"column {name} has {column.type}, no times", "pass times with a zone")
    if column.type.tz is None:
        if config.offline_store.naive == "refuse":
            raise UsageError(
                f"the times of column {name} have no zone",
                "give them one, or set naive: utc in the offline_store of feature_store.yaml",
            )
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    return column.cast(pa.timestamp(column.type.unit, "UTC"))


def _as_type(column: pa.ChunkedArray, kind: pa.DataType, view: str) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(
            f"the keys of view {view} are {kind}, and the entity rows have {column.type}: {error}",
            "pass keys of that type",
        ) from error


def _own(source: Any) -> TableSource:
    if not isinstance(source, TableSource):
        raise UsageError(
            f"{type(source).__name__} is no table of the store",
            "make the source of the view a kvstore.feast.TableSource",
        )
    return source


def _source_of(view: Any) -> TableSource:
    if view.batch_source is None:
        raise UsageError(f"view {view.name} has no source", "give it a kvstore.feast.TableSource")
    return _own(view.batch_source)


@contextmanager
def _reading(config: Any) -> Iterator[Any]:
    """What answers: a handle of the store, or a reader of the collection."""
    place = config.offline_store
    address = address_of(place.path, config.repo_path)
    if place.collection:
        with backup.Collection(address).open() as reader:
            yield reader
    else:
        yield opened(address, place.token)


def _to_write(config: Any) -> Any:
    place = config.offline_store
    if place.collection or place.as_of is not None:
        raise UsageError(
            "an offline store with collection: or as_of: only reads",
            "leave both out of feature_store.yaml where rows are written",
        )
    return opened(address_of(place.path, config.repo_path), place.token)


def _write_rows(target: Any, rows: pa.Table) -> None:
    if rows.num_rows >= _IMPORT_ROWS_MIN:
        bulk.import_table(target, rows, duplicates="last")
    else:
        target.put_batch(rows)


def _numbered(rows: pa.Table) -> pa.Table:
    """Rows of a data set or a log with a key: the batch, which is a random name, and the number of
    the row in it. So batches that are written at once do not meet."""
    for at, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            rows = rows.set_column(at, field.name, rows[field.name].cast(field.type.value_type))
    batch = pa.array([uuid.uuid4().hex] * rows.num_rows, pa.string())
    return rows.add_column(0, _ROW, _numbers(rows.num_rows)).add_column(0, _BATCH, batch)
