"""Random histories of typed pushes on RocksDB, also with pullers that are killed: rows and index
entries equal the rows of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore.base.span import prefix_end
from kvstore.codec import encode_tuple
from kvstore.tables.definition import rows_prefix, table_prefix
from tests.pushes.model import Effect, Made
from tests.pushes.test_histories import History, Host, KilledHistory, histories, kills

SCHEMA = pa.schema([("id", pa.int64()), ("value", pa.binary())])
IDS = range(12)
KEYS = {number: rows_prefix(1) + encode_tuple((number,)) for number in IDS}
"""The model knows a row by its stored key, as the shards do."""
NUMBERS = {key: number for number, key in KEYS.items()}


class TypedHost(Host):
    """A store with a table, and an index of it."""

    keys = tuple(KEYS.values())

    def open(self) -> None:
        super().open()
        self.table = self.store.table("trips", SCHEMA, "id", indexes={"by_value": "value"})

    def state(self, as_of: kvstore.Timestamp | None = None) -> dict[bytes, bytes]:
        """The rows at a time. Each look-up by the index finds them too."""
        found = {KEYS[row["id"]]: row["value"] for row in self.table.rows(as_of=as_of)}
        by_value: dict[bytes, set[int]] = defaultdict(set)
        for key, value in found.items():
            by_value[value].add(NUMBERS[key])
        for value, numbers in by_value.items():
            rows = self.table.find("by_value", value, as_of=as_of)
            assert {row["id"] for row in rows} == numbers
        return found

    def live(self, effect: Effect) -> None:
        with self.store.batch() as batch:
            table = batch.table("trips")
            for key, value in effect.items():
                if value is None:
                    table.delete(NUMBERS[key])
                else:
                    table.put({"id": NUMBERS[key], "value": value})
        self.model.write(int(self.store.upper) - 1, effect)

    def expire(self, key: bytes) -> None:
        row = {"id": NUMBERS[key], "value": b"short"}
        put = self.table.put(row, expires=timedelta(milliseconds=2))
        assert put is not None
        self.model.write(int(put), {key: b"short"})
        while self.table.get(NUMBERS[key]) is not None:
            pass
        gone = self.table.history(NUMBERS[key])[0]
        assert gone.row is None
        self.model.write(int(gone.timestamp), {key: None})

    def delete_range(self, prefix: bytes) -> None:
        self.live({KEYS[number]: None for number in IDS if (number < 6) == (prefix == b"a")})

    def changed(
        self, before: dict[bytes, bytes], since: int, upto: int
    ) -> Iterator[dict[bytes, bytes]]:
        state = dict(before)
        for row in self.table.changes(since, upto, images="post").read_all().to_pylist():
            if row["_change_type"] == "delete":
                del state[KEYS[row["id"]]]
            else:
                state[KEYS[row["id"]]] = row["value"]
        yield state

    def require_history(self) -> None:
        """As `Host.require_history`. Once no backup keeps history, each row has one entry."""
        super().require_history()
        for hold in self.store.holds.all():
            self.store.holds.drop(hold.name)
        report = self.store.gc(before=self.store.upper - 1)
        assert not report.held_back
        self.table.tidy()
        prefix = table_prefix(1)
        stored = self.store.keys(prefix, prefix_end(prefix))
        assert sum(1 for _ in stored) == 2 * len(self.state())


class TypedHistory(History):
    """A history of typed pushes."""

    spans = (None, b"")
    changes = False
    host = TypedHost

    def send(self, made: Made, **how: Any) -> None:
        [host, *_] = self.hosts
        assert isinstance(host, TypedHost)
        with self.pushes.begin(self.shards, table=host.table, **how) as building:
            numbers = [NUMBERS[key] for key in made.rows]
            self.pick.shuffle(numbers)
            values = [made.rows[KEYS[number]] for number in numbers]
            building.add(pa.table({"id": numbers, "value": values}, SCHEMA))
            building.seal()


class KilledTypedHistory(TypedHistory, KilledHistory):
    """A history of typed pushes that are taken by processes that are killed."""


def test_a_random_history_of_typed_pushes_shows_what_the_model_shows(tmp_path: Path) -> None:
    histories(tmp_path, 1, 50, TypedHistory)


@pytest.mark.soak
def test_random_histories_of_typed_pushes_show_what_the_model_shows(tmp_path: Path) -> None:
    histories(tmp_path, 100, 80, TypedHistory)


def test_a_history_of_typed_pushes_whose_pullers_are_killed_shows_what_the_model_shows(
    tmp_path: Path, spawn: Any
) -> None:
    kills(tmp_path, spawn, 2, KilledTypedHistory)


@pytest.mark.soak
def test_histories_of_typed_pushes_whose_pullers_are_killed_show_what_the_model_shows(
    tmp_path: Path, spawn: Any
) -> None:
    kills(tmp_path, spawn, 60, KilledTypedHistory)
