"""The metrics of stores for `prometheus_client`.

    from prometheus_client import REGISTRY, start_http_server
    from kvstore.metrics import PrometheusCollector

    collector = PrometheusCollector(store, store="flights")
    REGISTRY.register(collector)
    start_http_server(9100)

`collector.add` takes further stores: a registry has each name once. A scrape costs tens of
microseconds, in the thread that serves it. A store pays nothing between scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvstore.errors import ClosedError, UsageError
from kvstore.metrics.figures import DEFINITIONS, Distribution, Metric, MetricDefinition

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise UsageError(
        "prometheus_client is not installed", "pip install 'kvstore-mvcc[metrics]'"
    ) from error


class HasMetrics(Protocol):
    """A store, or a handle like one."""

    def metrics(self) -> Mapping[str, Metric]:
        """See `Store.metrics`."""
        ...


class PrometheusCollector(Collector):
    """Collects the metrics of stores at each scrape. A store that was closed has no values."""

    def __init__(self, store: HasMetrics, /, **labels: str) -> None:
        """`labels` are added to every value, and tell stores apart."""
        self._names = tuple(labels)
        self._stores: list[tuple[HasMetrics, tuple[str, ...]]] = []
        self.add(store, **labels)

    def add(self, store: HasMetrics, /, **labels: str) -> None:
        """Collect the metrics of one more store. Raises `UsageError` unless its labels have the
        names of the first store's."""
        if set(labels) != set(self._names):
            names = ", ".join(self._names) or "no label"
            raise UsageError(
                f"labels {', '.join(labels) or 'none'}", f"the first store has {names}"
            )
        self._stores.append((store, tuple(labels[name] for name in self._names)))

    def collect(self) -> Iterator[Any]:
        """The families of one scrape."""
        found: list[tuple[tuple[str, ...], Mapping[str, Metric]]] = []
        for store, labels in self._stores:
            with suppress(ClosedError):
                found.append((labels, store.metrics()))
        if found:
            for definition in DEFINITIONS.values():
                yield self._family(definition, found)

    def describe(self) -> Iterator[Any]:
        """The families without values: registering a collector reads no store."""
        for definition in DEFINITIONS.values():
            yield self._family(definition, [])

    def _family(
        self,
        definition: MetricDefinition,
        found: Sequence[tuple[tuple[str, ...], Mapping[str, Metric]]],
    ) -> Any:
        labels = [*self._names, *definition.labels]
        family = _FAMILIES[definition.kind](definition.name, definition.help, labels=labels)
        for texts, metrics in found:
            for own, value in metrics[definition.name].values.items():
                if isinstance(value, Distribution):
                    buckets = [(_bound(bound), count) for bound, count in value.buckets]
                    family.add_metric([*texts, *own], buckets, value.total)
                else:
                    family.add_metric([*texts, *own], value)
        return family


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


_FAMILIES: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
