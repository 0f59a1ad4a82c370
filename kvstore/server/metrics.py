"""The metrics of a store as Prometheus reads them: `GET /metrics`."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvstore.metrics.prometheus import HasMetrics, PrometheusCollector

METRICS_PATH: Final = b"/metrics"
METRICS_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


def exposition(store: HasMetrics) -> bytes:
    """The metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(store))
    return generate_latest(registry)
