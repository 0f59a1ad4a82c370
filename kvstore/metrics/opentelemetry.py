"""The metrics of stores as instruments of OpenTelemetry.

    from kvstore.metrics.opentelemetry import observe

    observe(store, meter_provider.get_meter("kvstore"), store="flights")

Each counter and gauge is an observable instrument, `kvstore.commits` for `kvstore_commits_total`.
Units are those of UCUM, as its conventions ask: `s`, `By`, and `{commit}` for a number of commits.
OpenTelemetry has no observable histogram, so a histogram is two counters: `...count`, `...sum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.errors import ClosedError, UsageError
from kvstore.metrics.figures import DEFINITIONS, Distribution, LabelTexts, Metric, MetricDefinition

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
except ImportError as error:
    raise UsageError(
        "opentelemetry-api is not installed", "pip install 'kvstore-mvcc[metrics]'"
    ) from error

if TYPE_CHECKING:
    from kvstore.metrics.prometheus import HasMetrics


def observe(store: HasMetrics, meter: Meter, /, **attributes: str) -> None:
    """Have `meter` observe a store, with `attributes` on every value, whenever its reader collects.
    A store that was closed has no values."""
    shared = _Shared(store)
    for definition in DEFINITIONS.values():
        stem = definition.name.replace("kvstore_", "kvstore.").removesuffix("_total")
        unit = _unit(definition.unit)
        read = partial(_observations, shared, definition, attributes)
        if definition.kind == "gauge":
            meter.create_observable_gauge(stem, [partial(read, float)], unit, definition.help)
        elif definition.kind == "counter":
            meter.create_observable_counter(stem, [partial(read, float)], unit, definition.help)
        else:
            counted = _unit(definition.name.removeprefix("kvstore_").removesuffix("_seconds"))
            for part, take, of in (("count", _count, counted), ("sum", _total, unit)):
                name = f"{stem}.{part}"
                meter.create_observable_counter(name, [partial(read, take)], of, definition.help)


def _unit(told: str) -> str:
    """A unit in the notation of UCUM."""
    return {"seconds": "s", "bytes": "By", "": "1"}.get(told) or f"{{{told}}}"


class _Shared:
    """One snapshot for all instruments of a collection: an instrument that asks again begins the
    next collection."""

    def __init__(self, store: HasMetrics) -> None:
        self._store = store
        self._taken: Mapping[str, Metric] = {}
        self._asked: set[str] = set()

    def metric(self, name: str, part: str) -> Metric:
        """The metric `name`, for the instrument of a part of it."""
        asker = f"{name}/{part}"
        if not self._taken or asker in self._asked:
            self._taken = self._store.metrics()
            self._asked.clear()
        self._asked.add(asker)
        return self._taken[name]


def _observations(
    shared: _Shared,
    definition: MetricDefinition,
    attributes: dict[str, str],
    take: Callable[[Any], float],
    _: CallbackOptions,
) -> Iterable[Observation]:
    try:
        metric = shared.metric(definition.name, take.__name__)
    except ClosedError:
        return

    def named(labels: LabelTexts) -> dict[str, str]:
        return {**attributes, **dict(zip(definition.labels, labels, strict=True))}

    for labels, value in metric.values.items():
        yield Observation(take(value), named(labels))


def _count(found: Distribution) -> float:
    return found.count


def _total(found: Distribution) -> float:
    return found.total
