"""The releases of PySpark that this package runs on, and the features that the older ones lack.

    since   feature
    3.5     loads, jobs, look-ups and joins in a classic session
    4.0     format("kvstore"): reads, streams, write.save, and what is made of them
    4.0     Spark Connect
    4.1     keys of several columns, and joins with a table: they are functions over Arrow columns
    4.1     splits: a partition of its own for each span of keys
    4.2     maxRowsPerTrigger and maxBytesPerTrigger

Invariant: a call that needs a feature of a newer release raises `UsageError` before any task
runs.
"""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

import pyspark

from kvstore.errors import UsageError


class Feature(NamedTuple):
    """A feature of PySpark and its first release."""

    what: str
    since: tuple[int, int]


RELEASE: str = pyspark.__version__
"""The release that runs here."""

OLDEST: Final = (3, 5)
SOURCES: Final = Feature('format("kvstore")', (4, 0))
CONNECT: Final = Feature("Spark Connect", (4, 0))
ARROW_FUNCTIONS: Final = Feature("a function over Arrow columns", (4, 1))
NUMBERED_PARTITIONS: Final = Feature("splits", (4, 1))
REBALANCE: Final = Feature("a hint that names a column", (4, 0))
UNIX_SOCKETS: Final = Feature("a Unix socket of a worker", (4, 1))
LIMITS: Final = Feature("a bound of micro-batches", (4, 2))

_PYTHON_OF_3_5: Final = (3, 11)
"""PySpark 3.5 imports `distutils`, which Python 3.12 no longer has."""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def require_release(version: str, python: tuple[int, int] = sys.version_info[:2]) -> None:
    """Raise `UsageError` if this release of PySpark is too old, or too old for this Python."""
    if _numbers(version) < OLDEST:
        raise UsageError(
            f"PySpark {version} is older than 3.5", "install pyspark 4.3, on executors too"
        )
    if _numbers(version) < SOURCES.since and python > _PYTHON_OF_3_5:
        raise UsageError(
            f"PySpark {version} does not run on Python {python[0]}.{python[1]}",
            "install pyspark 4.3, on executors too",
        )


def has(feature: Feature, version: str | None = None) -> bool:
    """Whether a release of PySpark has the feature; by default the release that runs here."""
    return _numbers(version or RELEASE) >= feature.since


def require(feature: Feature, what: str | None = None, version: str | None = None) -> None:
    """Raise `UsageError` if a release lacks the feature that `what` needs."""
    if not has(feature, version):
        first = ".".join(map(str, feature.since))
        raise UsageError(
            f"{what or feature.what} needs PySpark {first}, and this is {version or RELEASE}",
            f"install pyspark {first} or newer, on executors too",
        )


require_release(RELEASE)
