"""Traced operations are spans and durations with the names that OpenTelemetry gives databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import kvstore
from kvstore.errors import UsageError
from kvstore.metrics.tracing import OPERATIONS, trace


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
    assert (metric.name, metric.unit) == ("db.client.operation.duration", "s")
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
    assert [span.name for span in found] == [
        *("kvstore.put", "kvstore.get", "kvstore.get", "kvstore.scan"),
        *("kvstore.transact", "kvstore.put"),
    ]
    for span in found:
        assert span.kind is SpanKind.CLIENT
        assert dict(span.attributes or {}) == {
            "db.system.name": "kvstore",
            "db.namespace": "flights",
            "db.operation.name": span.name.removeprefix("kvstore."),
            "region": "eu",
        }
        assert "secret" not in span.to_json()
    assert found[-1].status.status_code is StatusCode.ERROR
    counted = {name: point.count for name, point in durations(reader).items()}
    assert counted["get", ""] == 2
    assert counted["put", ""] == counted["put", "UsageError"] == 1
    assert durations(reader)["get", ""].attributes["region"] == "eu"


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
    assert [name for name in OPERATIONS if not callable(getattr(kvstore.Store, name))] == []
