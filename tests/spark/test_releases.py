"""A call whose feature a release of PySpark lacks is refused in one line, before a task runs.

`make spark-matrix` runs the releases themselves.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import UsageError
from spark_connector import releases
from spark_connector.releases import has, require, require_release
from tests.matrix.__main__ import PAIRS


def test_releases_before_3_5_are_refused() -> None:
    for version in ("3.5.9", "4.0.5", "4.1.4", "4.2.1", "4.3.0", "5.0.0.dev1"):
        require_release(version, (3, 11))
    for version in ("2.4.8", "3.4.4"):
        with pytest.raises(UsageError, match=f"PySpark {version} is older than 3.5"):
            require_release(version, (3, 11))


def test_release_3_5_is_refused_on_a_python_that_it_does_not_run_on() -> None:
    with pytest.raises(UsageError, match="does not run on Python"):
        require_release("3.5.9", (3, 12))
    require_release("4.0.5", (3, 13))


def test_a_feature_of_a_newer_release_is_refused_by_its_release() -> None:
    for version, lacking in {
        "3.5.9": {"SOURCES", "CONNECT", "ARROW_FUNCTIONS", "NUMBERED_PARTITIONS", "LIMITS"},
        "4.0.5": {"ARROW_FUNCTIONS", "NUMBERED_PARTITIONS", "LIMITS"},
        "4.1.4": {"LIMITS"},
        "4.2.1": set(),
    }.items():
        names = ("SOURCES", "CONNECT", "ARROW_FUNCTIONS", "NUMBERED_PARTITIONS", "LIMITS")
        features = {name: getattr(releases, name) for name in names}
        assert {name for name, each in features.items() if not has(each, version)} == lacking
        for name in lacking:
            with pytest.raises(UsageError) as refusal:
                require(features[name], "this call", version)
            first = ".".join(map(str, features[name].since))
            told = (
                f"this call needs PySpark {first}, and this is {version}; install pyspark {first}"
            )
            assert str(refusal.value).startswith(told)


def test_the_matrix_tries_the_oldest_and_the_newest_release_and_python() -> None:
    assert PAIRS[0] == ("3.10", "3.5.9")
    assert PAIRS[-1] == ("3.13", "4.3.0")
    assert {release[:3] for _, release in PAIRS} == {"3.5", "4.0", "4.1", "4.2", "4.3"}


def test_the_import_of_the_package_looks_at_the_release_first(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text('__version__ = "3.4.4"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import spark_connector"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "kvstore.errors.UsageError: PySpark 3.4.4 is older"
    )
