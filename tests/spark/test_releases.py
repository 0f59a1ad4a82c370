"""A call whose feature a release of PySpark lacks is refused in one line, before a task runs.

`make spark-matrix` runs the releases themselves.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import UsageError
from kvstore.spark import releases
from kvstore.spark.releases import (
    ARROW_FUNCTIONS,
    CONNECT,
    LIMITS,
    NUMBERED_PARTITIONS,
    SOURCES,
    has,
    require,
    require_release,
)
from tests.matrix.__main__ import PAIRS, ROOT


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


def test_the_page_of_versions_says_what_the_code_and_the_matrix_say() -> None:
    page = (ROOT / "docs" / "reference" / "spark-versions.md").read_text()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    [versions] = [cells[1:] for cells in table if len(cells) == 6 and cells[0] == ""]
    rows = {cells[0]: cells[1:] for cells in table if len(cells) == 6}
    for beginning, feature in {
        '`format("kvstore")`: reads': SOURCES,
        "`read_where`": SOURCES,
        "a session of Spark Connect": CONNECT,
        "keys of several columns": ARROW_FUNCTIONS,
        "`splits=`": NUMBERED_PARTITIONS,
        "`maxRowsPerTrigger`": LIMITS,
    }.items():
        [told] = [row for name, row in rows.items() if name.startswith(beginning)]
        assert told == ["yes" if has(feature, version) else "no" for version in versions], beginning
    held = {(cells[1], cells[0], cells[3]) for cells in table if cells[2:3] == ["held"]}
    assert held == {
        (python, release, "held" if has(CONNECT, release) else "not offered")
        for python, release in PAIRS
    }


def test_the_import_of_the_package_looks_at_the_release_first(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text('__version__ = "3.4.4"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kvstore import spark"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "kvstore.errors.UsageError: PySpark 3.4.4 is older"
    )
