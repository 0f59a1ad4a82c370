"""The releases of PySpark that this package runs on: 4.2 and newer.

Older releases lack the bounds of micro-batches that streams of `format("kvstore")` need.
"""

from __future__ import annotations

from typing import Final

import pyspark

from kvstore.errors import UsageError

OLDEST: Final = (4, 2)


def require_release(version: str) -> None:
    """Raise `UsageError` if this release of PySpark is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise UsageError(
            f"PySpark {version} is older than 4.2", "install pyspark 4.2 or 4.3, on executors too"
        )


require_release(pyspark.__version__)
