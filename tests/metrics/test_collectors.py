"""The collectors of Prometheus and OpenTelemetry have the values of `Store.metrics`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore import Store
from kvstore.errors import UsageError
from kvstore.metrics import DEFINITIONS
from kvstore.metrics.opentelemetry import observe
from kvstore.metrics.prometheus import PrometheusCollector

MONITORING = Path(__file__).parents[2] / "docs" / "how-to" / "monitoring"


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(None, engine="memory") as opened:
        opened.hold('a "hold" with \\ in it')
        opened.put(b"k", b"v", durability="sync")
        yield opened


def scraped(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, sample.labels.get("store", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_package_has_the_collector_of_prometheus_and_imports_it_at_its_first_use() -> None:
    assert kvstore.metrics.PrometheusCollector is PrometheusCollector
    code = (
        "import sys, kvstore.metrics\n"
        "assert 'prometheus_client' not in sys.modules\n"
        "sys.modules['prometheus_client'] = None\n"
        "kvstore.metrics.PrometheusCollector"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UsageError: prometheus_client is not installed" in done.stderr
    with pytest.raises(AttributeError, match="no attribute 'Collector'"):
        _ = kvstore.metrics.Collector


def test_prometheus_reads_two_stores_in_one_registry(store: Store) -> None:
    registry = CollectorRegistry()
    with kvstore.open(None, engine="memory") as other:
        collector = PrometheusCollector(store, store="one")
        collector.add(other, store="two")
        with pytest.raises(UsageError, match="the first store has store"):
            collector.add(other)
        registry.register(collector)
        values = scraped(registry)
        assert values["kvstore_commits_total", "one"] == 1
        assert values["kvstore_commits_total", "two"] == 0
    found = generate_latest(_registry(store)).decode()
    values = {
        sample.name: sample
        for family in text_string_to_metric_families(found)
        for sample in family.samples
    }
    assert values["kvstore_commits_total"].value == 1
    assert values["kvstore_claim_age_seconds"].labels["name"] == 'a "hold" with \\ in it'
    assert values["kvstore_fsync_seconds_count"].value >= 1


def _registry(store: Store) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(store, store="one"))
    return registry


def test_a_closed_store_has_no_values() -> None:
    store = kvstore.open(None, engine="memory")
    registry = _registry(store)
    assert scraped(registry)
    store.close()
    assert scraped(registry) == {}


def test_opentelemetry_observes_each_metric(store: Store) -> None:
    reader = InMemoryMetricReader()
    observe(store, MeterProvider([reader]).get_meter("kvstore"), store="one")
    for commits in (1, 2):
        data = reader.get_metrics_data()
        assert data is not None
        found = {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
        (point,) = found["kvstore.commits"].data.data_points
        assert (point.value, dict(point.attributes)) == (commits, {"store": "one"})
        (age,) = found["kvstore.claim_age_seconds"].data.data_points
        assert age.attributes["kind"] == "user"
        assert found["kvstore.fsync_seconds.count"].data.data_points[0].value >= 1
        units = {name: metric.unit for name, metric in found.items()}
        assert units["kvstore.commits"] == "{commit}"
        assert units["kvstore.fsync_seconds.count"] == "{fsync}"
        assert units["kvstore.fsync_seconds.sum"] == units["kvstore.history_seconds"] == "s"
        assert units["kvstore.disk_bytes"] == "By"
        assert [name for name, unit in units.items() if unit == "1"] == [
            *("kvstore.healthy", "kvstore.owned", "kvstore.writes_stopped")
        ]
        store.put(b"k", b"v")
    filled = {each.name for each in store.metrics().values() if each.values}
    stems = {each.replace("kvstore_", "kvstore.").removesuffix("_total") for each in filled}
    assert stems == {name.removesuffix(".count").removesuffix(".sum") for name in found}


@pytest.mark.parametrize("name", ["prometheus_client.core", "opentelemetry.metrics"])
def test_a_collector_without_its_library_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"kvstore.metrics.{name.split('.')[0].removesuffix('_client')}"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UsageError, match=r"pip install 'kvstore-mvcc\[metrics\]'"):
        __import__(module)


def test_the_dashboard_and_the_alerts_name_metrics_that_exist() -> None:
    suffixed = {
        f"{each.name}{suffix}"
        for each in DEFINITIONS.values()
        for suffix in ("", *(("_bucket", "_count", "_sum") if each.kind == "histogram" else ()))
    }
    for name in ("dashboard.json", "alerts.yml"):
        named = set(re.findall(r"kvstore_\w+", (MONITORING / name).read_text(encoding="utf-8")))
        assert named - suffixed == set(), name
        assert len(named) >= 8
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    assert len(dashboard["panels"]) >= 8
