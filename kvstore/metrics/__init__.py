"""The metrics of a store: counters, gauges and histograms, for Prometheus and OpenTelemetry.

    store.metrics()["kvstore_commits_total"].value

Floors, from the top:

    prometheus opentelemetry tracing    what a collector takes
    slow                                warnings of operations that take long
    snapshot
    definitions
"""

from kvstore.metrics.definitions import DEFINITIONS, MetricDefinition
from kvstore.metrics.snapshot import Distribution, Metric, metrics_of

__all__ = ["DEFINITIONS", "MetricDefinition", "Distribution", "Metric", "metrics_of"]
