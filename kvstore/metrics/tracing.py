"""Spans and durations of the operations of one store, by OpenTelemetry's conventions for databases.

    from kvstore.metrics.tracing import trace

    trace(store)

Each call of a store or of its tables then is a span of the kind client, `put flights` (the
operation, and the table, the store's directory or the server), and a value of the histogram
`db.client.operation.duration`, in seconds. Both have these attributes:

    db.system.name       kvstore
    db.operation.name    the method, `put`
    db.namespace         the name of the store's directory, where it has one
    db.collection.name   the table, for its methods
    error.type           the class of the error, where the call raised
    server.address, server.port   of a client of an address

A span has `db.operation.batch.size`, too, where a call has several keys or rows. Keys, values and
the texts of errors, which may have both, are in neither. A scan ends when it returns its iterator.

Invariants
1. A store that is not traced pays nothing: the methods of one object are replaced.
2. A call behaves as before, also where it raises.
3. An operation of a store inside another one, in the same thread, is a part of it, and not told.

Source: OpenTelemetry, "Semantic conventions for database client spans" and "... metrics", whose
names are stable since 1.33.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from kvstore.errors import UsageError
from kvstore.metrics.slow import OPERATIONS, TABLE_OPERATIONS
from kvstore.version import __version__

try:
    from opentelemetry import metrics as otel_metrics
    from opentelemetry import trace as otel_trace
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import SpanKind, StatusCode, Tracer, TracerProvider
except ImportError as error:
    raise UsageError(
        "opentelemetry-api is not installed", "pip install 'kvstore-mvcc[metrics]'"
    ) from error

SCHEMA: Final = "https://opentelemetry.io/schemas/1.33.0"
"""The conventions to which the names belong."""

_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
"""The bounds that the conventions advise, from 1 ms on."""

_BATCHES: Final = {"get_many", "floor_many", "put_many", "put_batch", "delete_many"}
"""The operations whose first argument has a key or a row for each part."""

_Attributes: TypeAlias = "dict[str, str | int]"


class Traceable(Protocol):
    """A store, or a client."""

    @property
    def path(self) -> Path | None:
        """See `Store`."""
        ...

    def table(self, name: str) -> Any:
        """See `Store`."""
        ...


def trace(
    store: Traceable,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    **attributes: str,
) -> None:
    """Trace the operations of a store until it is closed. Each span and value has `attributes`.

    Without providers, the global ones of OpenTelemetry are used. Costs 20 to 40 us
    for each call with a provider that records, and 6 us with the provider that OpenTelemetry
    has by default. Raises `UsageError` for a store that is traced already.
    """
    if hasattr(vars(store).get("put"), "is_traced"):
        raise UsageError(f"{store!r} is traced already", "trace it once")
    meter = otel_metrics.get_meter("kvstore", __version__, meter_provider, SCHEMA)
    tracing = _Tracing(
        otel_trace.get_tracer("kvstore", __version__, tracer_provider, SCHEMA),
        meter.create_histogram(
            "db.client.operation.duration",
            "s",
            "Duration of database client operations.",
            explicit_bucket_boundaries_advisory=_BOUNDS_S,
        ),
        {"db.system.name": "kvstore", **_place(store), **attributes},
    )
    for name in OPERATIONS:
        setattr(store, name, tracing.traced(getattr(store, name), name))
    vars(store)["table"] = partial(_traced_table, tracing, store.table)


def _place(store: Traceable) -> _Attributes:
    """Where the store is."""
    found: _Attributes = {}
    if store.path is not None:
        found["db.namespace"] = store.path.name
    endpoint = getattr(getattr(store, "pool", None), "endpoint", None)  # of a client
    if endpoint is not None and endpoint.host:
        found |= {"server.address": endpoint.host, "server.port": endpoint.port}
    return found


def _traced_table(
    tracing: _Tracing, open_table: Callable[..., Any], name: str, *args: Any, **made: Any
) -> Any:
    table = open_table(name, *args, **made)
    told = replace(tracing, shared={**tracing.shared, "db.collection.name": name})
    for method in TABLE_OPERATIONS:
        setattr(table, method, told.traced(getattr(table, method), method))
    return table


@dataclass(frozen=True, slots=True)
class _Tracing:
    """What tells of the operations of one store."""

    tracer: Tracer
    durations: Histogram
    shared: _Attributes
    inside: threading.local = field(default_factory=threading.local)

    def traced(self, call: Callable[..., Any], operation: str) -> Callable[..., Any]:
        """`call`, which is told of."""
        told: _Attributes = {**self.shared, "db.operation.name": operation}
        span_name = " ".join([operation, *self._target()])
        inside, durations = self.inside, self.durations
        begin = partial(
            self.tracer.start_as_current_span,
            span_name,
            kind=SpanKind.CLIENT,
            record_exception=False,  # its text may have keys and values
            set_status_on_exception=False,
        )

        @wraps(call)
        def traced(*args: Any, **options: Any) -> Any:
            if getattr(inside, "is_told", False):
                return call(*args, **options)
            facts = told
            if operation in _BATCHES and args and isinstance(args[0], Sized) and len(args[0]) > 1:
                facts = {**told, "db.operation.batch.size": len(args[0])}
            with begin(attributes=facts) as span:
                began, inside.is_told, facts = time.perf_counter(), True, told
                try:
                    return call(*args, **options)
                except BaseException as error:
                    kind = type(error).__qualname__
                    span.set_attribute("error.type", kind)
                    span.set_status(StatusCode.ERROR, kind)
                    facts = {**told, "error.type": kind}
                    raise
                finally:
                    inside.is_told = False
                    durations.record(time.perf_counter() - began, facts)

        traced.is_traced = True  # type: ignore[attr-defined]
        return traced

    def _target(self) -> list[str]:
        """What the name of a span tells beside the operation."""
        for name in ("db.collection.name", "db.namespace"):
            if name in self.shared:
                return [str(self.shared[name])]
        if "server.address" in self.shared:
            return [f"{self.shared['server.address']}:{self.shared['server.port']}"]
        return []
