"""The collector of Prometheus as a name of `kvstore.metrics`, imported at its first use.

`prometheus_client` is an extra: metrics work without it, and a process that has it pays for it only
where it is asked for.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`PrometheusCollector`. Raises `UsageError` if `prometheus_client` is not installed, and
    `AttributeError` for any other name."""
    if name != "PrometheusCollector":
        raise AttributeError(f"module 'kvstore.metrics' has no attribute {name!r}")
    from kvstore.metrics.prometheus import PrometheusCollector

    return PrometheusCollector
