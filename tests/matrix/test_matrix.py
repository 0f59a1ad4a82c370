"""The short form of `make spark-matrix`, in `make soak`: older releases, played on the release that
is installed.

The library takes this release for an older one. Its calls must then work without the features that
the older release lacks, or refuse in one line. `make spark-matrix` runs the releases themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.spark import releases
from tests.harness.soak import soaked
from tests.matrix.scenario import keys, loads, reads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize("release", soaked("3.5.9", "4.0.5"))
def test_calls_work_or_are_refused_as_their_release_has_the_feature(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(releases, "RELEASE", release)
    loads(spark, is_remote=False)
    keys(spark)
    reads(spark)
