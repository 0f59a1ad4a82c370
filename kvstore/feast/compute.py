"""Feast's materialisation as one bulk import.

    pull       the newest row of each entity in the window, as Arrow, from the offline store
    encode     keys and values of the online store, by columns: see `kvstore.feast.view_columns`
    leave out  what the view has a newer row for, at the time of a snapshot, by a pass over the view
    import     sorted files, added at one time; called off if a key was put since the snapshot

Invariants
1. An import covers no row that `OnlineStore.online_write_batch` would keep. A push that comes
   between the snapshot and the import calls the import off, under the commit lock, and the pass is
   made anew. A view whose entities are pushed all the time is written by commits in the end.
2. All rows become visible at one time, also after a kill, and `Store.revert_import` undoes them.
   Rows within a minute of their TTL come right behind the import, as they do behind a commit.
3. A view that needs more than its newest rows is materialised by Feast's local engine: one that
   transforms, aggregates, validates or filters, or is made of other views; one that is written to
   the offline store too; one without entities; one in another online store or at a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from feast.infra.common.materialization_job import MaterializationJobStatus
from feast.infra.compute_engines.local.compute import LocalComputeEngine
from feast.infra.compute_engines.local.feature_builder import LocalFeatureBuilder
from feast.infra.compute_engines.local.job import LocalMaterializationJob
from feast.repo_config import FeastConfigBaseModel
from feast.utils import _convert_arrow_to_proto

from kvstore import bulk
from kvstore.bulk.ingest import give_up, staging_beside
from kvstore.bulk.loading import stored_schema
from kvstore.bulk.sort import sorted_batches
from kvstore.errors import KeyConflictError, UsageError
from kvstore.feast.offline import microseconds_of
from kvstore.feast.online import (
    DUE_END,
    HEAD,
    MARGINS,
    NOT_CREATED,
    FeatureNames,
    OnlineStore,
    ViewKeys,
    microseconds,
    put_layouts,
)
from kvstore.feast.view_columns import entity_keys, row_heads, row_values, times_of

_MORE_THAN_ROWS: Final = (
    "aggregations",
    "enable_validation",
    "feature_transformation",
    "filter",
    "source_views",
)
"""What a view may have besides its rows."""
_ROWS_MIN: Final = 20_000
"""Rows from which on an import, with its two fsyncs and its files, costs less than a commit."""
_ATTEMPTS: Final = 3
"""Imports that are tried while rows are pushed, before the rows are written by commits."""
_CHUNK: Final = 65_536
"""Rows that are encoded at once: their bytes stay in the processor's cache."""
_CHUNK_BYTES: Final = 256 << 20
"""Bytes of the rows that are encoded at once, roughly: one array of Arrow holds 2 GiB."""
_STORED_ROWS: Final = 1 << 20
"""Stored rows that are compared with the new ones at once. Each time costs a hash of the new
keys."""

_MICROSECOND: Final = timedelta(microseconds=1)
_TTL_MAX: Final = 1 << 61
"""A TTL in microseconds beyond which no row expires."""

_Longs = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class ComputeEngineConfig(FeastConfigBaseModel):
    """The section `batch_engine` of `feature_store.yaml`."""

    type: Literal["kvstore.feast.ComputeEngine"] = "kvstore.feast.ComputeEngine"
    import_rows_min: int = _ROWS_MIN
    """Fewer rows are written by a commit."""


class ComputeEngine(LocalComputeEngine):
    """Materialises views by bulk imports, and does all else as Feast's local engine."""

    def __init__(self, import_rows_min: int = _ROWS_MIN, **settings: Any) -> None:
        super().__init__(**settings)
        self._rows_min = import_rows_min

    def _materialize_one(self, registry: Any, task: Any, **kwargs: Any) -> Any:
        if self._takes(task) and self._is_imported(registry, task):
            name = f"{task.feature_view.name}-{task.start_time}-{task.end_time}"
            return LocalMaterializationJob(name, MaterializationJobStatus.SUCCEEDED)
        return super()._materialize_one(registry, task, **kwargs)

    def _takes(self, task: Any) -> bool:
        config, view = self.repo_config, task.feature_view
        return (
            isinstance(self.online_store, OnlineStore)
            and "://" not in config.online_store.path
            and config.entity_key_serialization_version == 3
            and view.online
            and not view.offline
            and bool(view.entities)
            and view.data_source is not None
            and not any(getattr(view, name, None) for name in _MORE_THAN_ROWS)
            and not any(getattr(field, "vector_index", False) for field in view.features)
        )

    def _is_imported(self, registry: Any, task: Any) -> bool:
        """Whether the rows of a task came as an import. False leaves them to Feast's engine."""
        config, view = self.repo_config, task.feature_view
        store = self.online_store.to_write(config)
        rows = _Rows.of(ViewKeys.of(config, view), view, self._pulled(registry, task))
        if rows is None or len(rows.keys) < self._rows_min:
            return False
        if pc.count_distinct(rows.keys).as_py() < len(rows.keys):
            return False  # two rows of the source are one entity for Feast
        origin = f"Feast: {view.name}, {task.start_time} to {task.end_time}"
        ttl = view.ttl if config.online_store.expire else None
        dues = None if not ttl else rows.events + min(ttl // _MICROSECOND, _TTL_MAX)
        tries = (_imported(store, rows, dues, origin) for _ in range(_ATTEMPTS))
        behind = next((found for found in tries if found is not None), None)
        if behind is None:
            return False
        self._write_behind(view, rows.source.take(np.flatnonzero(behind)))
        return True

    def _pulled(self, registry: Any, task: Any) -> pa.Table:
        """The newest rows, with the names that the view has for their columns."""
        view = task.feature_view
        columns = LocalFeatureBuilder(registry, task, backend=None).get_column_info(view)
        job = self.offline_store.pull_latest_from_table_or_query(
            config=self.repo_config,
            data_source=view.data_source,
            join_key_columns=columns.join_keys,
            feature_name_columns=columns.feature_cols,
            timestamp_field=columns.ts_col,
            created_timestamp_column=columns.created_ts_col,
            start_date=task.start_time,
            end_date=task.end_time,
        )
        found = job.to_arrow()
        mapped = columns.field_mapping or {}
        return found.rename_columns([mapped.get(name, name) for name in found.column_names])

    def _write_behind(self, view: Any, rows: pa.Table) -> None:
        if rows.num_rows:
            kinds = {column.name: column.dtype.to_value_type() for column in view.entity_columns}
            data = _convert_arrow_to_proto(rows.combine_chunks(), view, kinds)
            self.online_store.online_write_batch(self.repo_config, view, data, None)


class _Rows(NamedTuple):
    """The rows of one materialisation: encoded, and as they came. Times are microseconds."""

    place: ViewKeys
    layout: FeatureNames
    keys: pa.Array
    values: pa.ChunkedArray
    events: _Longs
    created: _Longs
    source: pa.Table

    @classmethod
    def of(cls, place: ViewKeys, view: Any, source: pa.Table) -> _Rows | None:
        """Encode rows. None if Feast has to convert or refuse their keys."""
        entities = {field.name: field.dtype.to_value_type() for field in view.entity_columns}
        features = {field.name: field.dtype.to_value_type() for field in view.features}
        if not {*entities, *features} <= {*source.column_names}:
            return None
        layout = FeatureNames.of(features)
        times = source[view.batch_source.timestamp_field]
        if not pa.types.is_timestamp(times.type):
            return None
        if times.null_count:
            raise UsageError(f"a row of {place.view} has no event time", "leave the row out")
        events = microseconds_of(times).to_numpy()
        stamp = view.batch_source.created_timestamp_column
        created = np.full(len(events), NOT_CREATED)
        if stamp:
            created = microseconds_of(source[stamp]).fill_null(NOT_CREATED).to_numpy()
        keys, values, first = [], [], 0
        chunk = max(1, min(_CHUNK, _CHUNK_BYTES * source.num_rows // max(source.nbytes, 1)))
        for batch in source.combine_chunks().to_batches(max_chunksize=chunk):
            part = slice(first, first + batch.num_rows)
            first += batch.num_rows
            found = entity_keys(place.rows, {name: batch[name] for name in entities}, entities)
            if found is None:
                return None
            keys.append(found)
            heads = row_heads(events[part], created[part], layout)
            columns = [batch[name] for name in features]
            values.append(row_values(heads, columns, list(features.values())))
        return cls(
            place,
            layout,
            pa.chunked_array(keys, pa.binary()),
            pa.chunked_array(values, pa.binary()),
            events,
            created,
            source,
        )

    def batches(self, chosen: _Mask, dues: _Longs | None) -> Iterator[pa.RecordBatch]:
        """Rows of an import."""
        columns = [self.keys, self.values]
        if dues is not None:
            stays = dues >= DUE_END
            ends = np.where(stays, 0, np.minimum(dues, DUE_END) + 1) * 1000
            columns += [pa.array(ends, mask=stays), pa.nulls(len(dues), pa.binary())]
        table = pa.table(columns, schema=stored_schema(expires=dues is not None))
        yield from (table if chosen.all() else table.filter(chosen)).to_batches(_CHUNK)


def _imported(store: Any, rows: _Rows, dues: _Longs | None, origin: str) -> _Mask | None:
    """Import the rows that the view has no newer ones for; no two have one key. Returns which have
    to come behind them by a commit; None, and no row is added, if one of their keys was put
    meanwhile."""
    store.transact(partial(put_layouts, rows.place, [rows.layout]))
    with store.snapshot() as seen, staging_beside(store) as scratch:
        stored, newer = _stored(seen, rows)
        chosen, behind = ~newer, np.zeros(len(newer), bool)
        if dues is not None:
            now = microseconds(datetime.now(timezone.utc))
            chosen &= dues >= now + MARGINS[0]
            # What has expired leaves nothing, but takes an older row away.
            behind = ~newer & ~chosen & (stored | (dues > now))
        if not chosen.any():
            return behind
        made = bulk.Import.create(scratch / "staged")
        made.write_sorted(sorted_batches(rows.batches(chosen, dues), scratch / "sorting"))
        made.seal()
        try:
            bulk.ingest(store, made.staging, origin=origin, move=True, none_since=seen.as_of)
        except KeyConflictError:
            give_up(store, made.import_id)
            return None
    store.transact(partial(put_layouts, rows.place, [rows.layout]))  # a revert may have undone it
    return behind


def _stored(seen: Any, rows: _Rows) -> tuple[_Mask, _Mask]:
    """Which rows have a stored one at their key, and which of these stay because they are newer.
    Costs a pass over the view."""
    is_there, is_newer = np.zeros(len(rows.keys), bool), np.zeros(len(rows.keys), bool)
    for batch in _gathered(seen.scan_batches(prefix=rows.place.rows)):
        at = pc.index_in(batch["key"], value_set=rows.keys)
        places = at.drop_null().to_numpy()
        heads = pc.binary_slice(batch["value"], 0, HEAD.size)  # whole rows may not fit one array
        values = heads.filter(at.is_valid()).combine_chunks()
        event, created = times_of(values)
        ours, our_created = rows.events[places], rows.created[places]
        is_there[places] = True
        is_newer[places] = (event > ours) | ((event == ours) & (created > our_created))
    return is_there, is_newer


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(each.num_rows for each in waiting) >= _STORED_ROWS:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)
