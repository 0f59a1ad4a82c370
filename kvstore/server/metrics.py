"""The figures of a store as Prometheus reads them: `GET /metrics`.

Each number of `Store.stats` is a sample `kvstore_<name>`. Texts and lists have no form there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

METRICS_PATH: Final = b"/metrics"
METRICS_TYPE: Final = "text/plain; version=0.0.4"


def exposition(stats: Mapping[str, Any]) -> bytes:
    """The numbers of `Store.stats` in Prometheus's text format. True is 1."""
    samples = (
        f"kvstore_{name} {value:d}\n" if isinstance(value, int) else f"kvstore_{name} {value!r}\n"
        for name, value in stats.items()
        if isinstance(value, int | float)
    )
    return "".join(samples).encode()
