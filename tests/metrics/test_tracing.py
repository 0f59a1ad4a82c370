"""Traced operations are spans and durations with the names that OpenTelemetry gives databases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv.attributes import db_attributes, error_attributes, server_attributes
from opentelemetry.semconv.metrics import db_metrics
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import SpanKind, StatusCode

import kvstore
from kvstore.errors import PreconditionError, UsageError
from kvstore.metrics.slow import TABLE_OPERATIONS
from kvstore.metrics.tracing import OPERATIONS, trace
from kvstore.remote.client import Client
from kvstore.remote.client.tables import ClientTable
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.tables.table import Table


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def store(
    tmp_path: Path, spans: InMemorySpanExporter, reader: InMemoryMetricReader
) -> Iterator[kvstore.Store]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with kvstore.open(tmp_path / "flights") as opened:
        trace(opened, provider, MeterProvider([reader]), region="eu")
        yield opened


def durations(reader: InMemoryMetricReader) -> dict[tuple[str, str], Any]:
    data = reader.get_metrics_data()
    assert data is not None
    (metric,) = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
    assert (metric.name, metric.unit) == (db_metrics.DB_CLIENT_OPERATION_DURATION, "s")
    return {
        (str(p.attributes["db.operation.name"]), str(p.attributes.get("error.type", ""))): p
        for p in metric.data.data_points
    }


def test_operations_are_spans_and_durations(
    store: kvstore.Store, spans: InMemorySpanExporter, reader: InMemoryMetricReader
) -> None:
    stamp = store.put(b"secret", b"hidden")
    assert store.get(b"secret") == b"hidden"
    assert store.get(b"secret", as_of=stamp) == b"hidden"
    assert list(store.scan()) == [(b"secret", b"hidden")]
    assert store.transact(lambda txn: txn.get(b"secret")) == b"hidden"
    with pytest.raises(UsageError):
        store.put("text", b"v")  # type: ignore[arg-type]
    found = spans.get_finished_spans()
    operations = ["put", "get", "get", "scan", "transact", "put"]
    assert [span.name for span in found] == [f"{name} flights" for name in operations]
    for span, operation in zip(found, operations, strict=True):
        assert span.kind is SpanKind.CLIENT
        assert dict(span.attributes or {}) == {
            db_attributes.DB_SYSTEM_NAME: "kvstore",
            db_attributes.DB_NAMESPACE: "flights",
            db_attributes.DB_OPERATION_NAME: operation,
            "region": "eu",
            **({error_attributes.ERROR_TYPE: "UsageError"} if span is found[-1] else {}),
        }
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.schema_url == Schemas.V1_33_0.value
        assert span.instrumentation_scope.version == kvstore.__version__
        assert "secret" not in span.to_json()
    assert found[-1].status.status_code is StatusCode.ERROR
    counted = {name: point.count for name, point in durations(reader).items()}
    assert counted["get", ""] == 2
    assert counted["put", ""] == counted["put", "UsageError"] == 1
    point = durations(reader)["get", ""]
    assert point.attributes["region"] == "eu"
    # The bounds that the conventions advise.
    assert point.explicit_bounds == (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)


def test_an_error_is_told_by_its_class_without_its_text(
    store: kvstore.Store, spans: InMemorySpanExporter, reader: InMemoryMetricReader
) -> None:
    """The text has the key and both values."""
    store.put(b"secret", b"hidden")
    with pytest.raises(PreconditionError, match=r"secret.*hidden"):
        store.put_if(b"secret", b"new", expected=b"private")
    span = spans.get_finished_spans()[-1]
    assert (span.status.status_code, span.status.description) == (
        StatusCode.ERROR,
        "PreconditionError",
    )
    assert span.attributes is not None
    assert span.attributes[error_attributes.ERROR_TYPE] == "PreconditionError"
    assert not re.search("secret|hidden|private", span.to_json())
    assert durations(reader)["put_if", "PreconditionError"].count == 1


def test_the_operations_of_a_table_are_told_once_with_its_name(
    store: kvstore.Store, spans: InMemorySpanExporter, reader: InMemoryMetricReader
) -> None:
    table = store.table("trips", pa.schema([("id", pa.int64()), ("to", pa.string())]), "id")
    spans.clear()
    table.put({"id": 1, "to": "MUC"})
    table.put_batch(pa.table({"id": [2, 3], "to": ["OSL", "LHR"]}))
    assert table.get(2) == {"id": 2, "to": "OSL"}
    assert store.get_many([b"a", b"b", b"c"]) == [None] * 3
    assert store.get_many([b"a"]) == [None]  # one key is no batch
    collection, size = db_attributes.DB_COLLECTION_NAME, db_attributes.DB_OPERATION_BATCH_SIZE
    assert [
        (span.name, (span.attributes or {}).get(collection), (span.attributes or {}).get(size))
        for span in spans.get_finished_spans()
    ] == [
        ("put trips", "trips", None),
        ("put_batch trips", "trips", 2),
        ("get trips", "trips", None),
        ("get_many flights", None, 3),
        ("get_many flights", None, None),
    ]
    point = durations(reader)["put_batch", ""]
    assert point.attributes[collection] == "trips"
    assert size not in point.attributes


def test_a_client_tells_its_server(
    tmp_path: Path, spans: InMemorySpanExporter, reader: InMemoryMetricReader
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    address = ListenAddress("127.0.0.1", 0)
    with (
        kvstore.open(None, engine="memory") as store,
        serving(app(store), address) as running,
        kvstore.connect(running.url) as client,
    ):
        trace(client, provider, MeterProvider([reader]))
        assert client.get(b"k") is None
        _, _, port = running.url.rpartition(":")
    (span,) = spans.get_finished_spans()
    assert span.name == f"get 127.0.0.1:{port}"
    told = {
        db_attributes.DB_SYSTEM_NAME: "kvstore",
        db_attributes.DB_OPERATION_NAME: "get",
        server_attributes.SERVER_ADDRESS: "127.0.0.1",
        server_attributes.SERVER_PORT: int(port),
    }
    assert span.attributes == told
    assert durations(reader)["get", ""].attributes == told


def test_a_store_is_traced_once_and_others_are_not(
    store: kvstore.Store, spans: InMemorySpanExporter
) -> None:
    with pytest.raises(UsageError, match="traced already"):
        trace(store)
    with kvstore.open(None, engine="memory") as other:
        other.put(b"k", b"v")
        assert other.get(b"k") == b"v"
    assert spans.get_finished_spans() == ()


def test_each_traced_operation_is_a_method_of_a_store() -> None:
    for operations, kinds in (
        (OPERATIONS, (kvstore.Store, Client)),
        (TABLE_OPERATIONS, (Table, ClientTable)),
    ):
        for kind in kinds:
            assert [name for name in operations if not callable(getattr(kind, name))] == []
