"""Spans and durations of the operations of one store, by OpenTelemetry's conventions for databases.

    from kvstore.metrics.tracing import trace

    trace(store)

Each call of an operation then is a span `kvstore.get` of the kind client, and a value of the
histogram `db.client.operation.duration`, in seconds. Both have the attributes `db.system.name`,
`db.operation.name` and `db.namespace`, and `error.type` where the call raised. Keys and values are
in neither. A scan ends when it returns its iterator.

Invariants
1. A store that is not traced pays nothing: the methods of one object are replaced.
2. A call behaves as before, also where it raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, Protocol

from kvstore.errors import UsageError
from kvstore.metrics.slow import OPERATIONS

try:
    from opentelemetry import metrics as otel_metrics
    from opentelemetry import trace as otel_trace
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import SpanKind, Tracer, TracerProvider
except ImportError as error:
    raise UsageError(
        "opentelemetry-api is not installed", "pip install kvstore-mvcc[metrics]"
    ) from error


class Traceable(Protocol):
    """A store."""

    @property
    def path(self) -> Path | None:
        """See `Store`."""
        ...


_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
"""The bounds that the conventions advise, from 1 ms on."""


def trace(
    store: Traceable,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    **attributes: str,
) -> None:
    """Trace the operations of a store until it is closed. Each span and value has `attributes`.

    Without providers, the global ones of OpenTelemetry are used. Costs some 20 us for each call
    with a provider that records, and 6 us with the provider that OpenTelemetry has by default.
    Raises `UsageError` for a store that is traced already.
    """
    if hasattr(vars(store).get("put"), "is_traced"):
        raise UsageError(f"{store!r} is traced already", "trace it once")
    tracer = otel_trace.get_tracer("kvstore", tracer_provider=tracer_provider)
    meter = otel_metrics.get_meter("kvstore", meter_provider=meter_provider)
    durations = meter.create_histogram(
        "db.client.operation.duration",
        "s",
        "Duration of operations of the store.",
        explicit_bucket_boundaries_advisory=_BOUNDS_S,
    )
    shared = {"db.system.name": "kvstore", **attributes}
    if store.path is not None:
        shared.setdefault("db.namespace", store.path.name)
    for name in OPERATIONS:
        told = {**shared, "db.operation.name": name}
        setattr(store, name, _traced(getattr(store, name), tracer, durations, told))


def _traced(
    call: Callable[..., Any], tracer: Tracer, durations: Histogram, told: dict[str, str]
) -> Callable[..., Any]:
    span_name = f"kvstore.{told['db.operation.name']}"

    @wraps(call)
    def traced(*args: Any, **options: Any) -> Any:
        facts = told
        began = time.perf_counter()
        try:
            with tracer.start_as_current_span(span_name, kind=SpanKind.CLIENT, attributes=told):
                return call(*args, **options)
        except BaseException as error:
            facts = {**told, "error.type": type(error).__qualname__}
            raise
        finally:
            durations.record(time.perf_counter() - began, facts)

    traced.is_traced = True  # type: ignore[attr-defined]
    return traced
