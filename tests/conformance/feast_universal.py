"""The stores that Feast's own universal suites run against: `FULL_REPO_CONFIGS_MODULE` names it.

Feast's tests import the module from their checkout. A data frame becomes a table: one whose key is
the entity and whose event time is the frame's where that tells rows apart, so that the look-ups of
the offline store run; else one with both times in its key, for the passes.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from typing import Any

import pyarrow as pa

from kvstore import feast as ours
from kvstore.feast.handles import close_all, opened
from tests.universal.feature_repos.universal.data_source_creator import DataSourceCreator
from tests.universal.feature_repos.universal.online_store_creator import OnlineStoreCreator

ENTITIES = ("driver_id", "customer_id", "location_id", "entity_id", "id_join_key", "entity", "id")
MICROSECONDS = pa.timestamp("us", "UTC")


class TablesCreator(DataSourceCreator):
    """Frames as tables of one store."""

    def __init__(self, project_name: str, *_: Any, **__: Any) -> None:
        super().__init__(project_name)
        self.directory = tempfile.mkdtemp()

    def create_data_source(
        self,
        df: Any,
        destination_name: str,
        created_timestamp_column: str = "created_ts",
        field_mapping: dict[str, str] | None = None,
        timestamp_field: str | None = "ts",
    ) -> Any:
        mapping = field_mapping or {"ts_1": "ts"}
        back = {feature: column for column, feature in mapping.items()}
        time = timestamp_field if timestamp_field in df.columns else back[timestamp_field]
        rows = pa.Table.from_pandas(self.serialize_complex_columns(df), preserve_index=False)
        for at, field in enumerate(rows.schema):
            if pa.types.is_timestamp(field.type):
                naive = rows[field.name].cast(pa.timestamp("us", field.type.tz))
                rows = rows.set_column(at, field.name, naive.cast(MICROSECONDS))
        key = [name for name in ENTITIES if name in df.columns]
        name = f"{self.project_name}_{destination_name}".replace(".", "_")
        store = opened(f"{self.directory}/store", None)
        created = [name for name in (created_timestamp_column,) if name in df.columns]
        tells_apart = [*key, time]
        if not key or not _are_keys(rows, tells_apart):
            key = tells_apart = [*tells_apart, *created]
            time = None
        frame = df.reset_index(drop=True).dropna(subset=tells_apart)
        rows = rows.take(frame.drop_duplicates(subset=tells_apart, keep="last").index.to_numpy())
        store.table(name, rows.schema, key, event_time=time).put_batch(rows)
        return ours.TableSource(
            table=name,
            timestamp_field=timestamp_field,
            created_timestamp_column=created_timestamp_column,
            field_mapping=mapping,
        )

    def get_prefixed_table_name(self, suffix: str) -> str:
        return f"{self.project_name}_{suffix}"

    def create_offline_store_config(self) -> Any:
        return ours.OfflineStoreConfig(path=f"{self.directory}/store")

    def create_saved_dataset_destination(self) -> Any:
        return ours.SavedTable(f"saved_{uuid.uuid4().hex}")

    def create_logged_features_destination(self) -> Any:
        return ours.LoggedTable(table=f"logs_{uuid.uuid4().hex}")

    def teardown(self) -> None:
        close_all()
        shutil.rmtree(self.directory)


def _are_keys(rows: pa.Table, columns: list[str]) -> bool:
    is_whole = not any(rows[name].null_count for name in columns)
    return is_whole and rows.group_by(columns).aggregate([]).num_rows == rows.num_rows


class Online(OnlineStoreCreator):
    """An online store, which keeps rows of any age: the suite serves rows of the year 2022."""

    def create_online_store(self) -> dict[str, Any]:
        self.directory = tempfile.mkdtemp()
        place = f"{self.directory}/online"
        return {"type": "kvstore.feast.OnlineStore", "path": place, "expire": False}

    def teardown(self) -> None:
        close_all()
        shutil.rmtree(self.directory)


LEFT_OUT = {
    "entities_from_query": "the entity rows are a query of SQL, and no SQL is read here",
    "test_reorder_columns": "it writes structs to a column in which its own rows have texts",
    "test_writing_consecutively": "it writes structs to a column in which its own rows have texts",
    "test_non_entity_mode_preserves": "it writes doubles to floats, which do not hold them",
    "dynamo": "asks for DynamoDB",
}
"""Tests that do not run, by a part of their ids, each with the reason."""


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave them out."""
    gone = [item for item in items if any(part in item.nodeid for part in LEFT_OUT)]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in gone]


AVAILABLE_OFFLINE_STORES = [("local", TablesCreator)]
AVAILABLE_ONLINE_STORES = {"kvstore": ("kvstore", Online)}
