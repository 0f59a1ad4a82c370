"""The metrics of a served store, out of the server's answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvstore.metrics import DEFINITIONS, Distribution, Metric

_DEFINED: Final = {definition.name: definition for definition in DEFINITIONS.values()}


def metrics_of(found: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics by full name. A newer server may have others, which are left out."""
    return {
        name: Metric(
            definition, {tuple(labels): _figure(value) for labels, value in found.get(name, ())}
        )
        for name, definition in _DEFINED.items()
    }


def _figure(value: Any) -> float | Distribution:
    if not isinstance(value, dict):
        figure: float = value
        return figure
    buckets = ((float("inf") if bound is None else bound, n) for bound, n in value["buckets"])
    return Distribution(tuple(buckets), value["total"])
