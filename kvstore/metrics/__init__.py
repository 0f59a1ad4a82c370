"""The metrics of a store: counters, gauges and histograms, for Prometheus and OpenTelemetry.

store.metrics()["kvstore_commits_total"].value
REGISTRY.register(kvstore.metrics.PrometheusCollector(store))
"""

from typing import TYPE_CHECKING

from kvstore.base.notices import JsonLines
from kvstore.metrics.figures import DEFINITIONS, Distribution, Metric, MetricDefinition, metrics_of
from kvstore.metrics.late_collector import __getattr__ as __getattr__

if TYPE_CHECKING:
    from kvstore.metrics.prometheus import PrometheusCollector

__all__ = [
    "DEFINITIONS",
    "MetricDefinition",
    "Distribution",
    "JsonLines",
    "Metric",
    "PrometheusCollector",
    "metrics_of",
]
