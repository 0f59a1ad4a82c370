"""An older PySpark is refused in one line, before an import fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import UsageError
from spark_connector.releases import require_release


def test_releases_before_4_2_are_refused() -> None:
    for version in ("4.2.1", "4.3.0", "5.0.0.dev1"):
        require_release(version)
    for version in ("3.5.8", "4.0.1", "4.1.1"):
        with pytest.raises(UsageError, match=f"PySpark {version} is older than 4.2"):
            require_release(version)


def test_the_import_of_the_package_looks_at_the_release_first(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text('__version__ = "4.1.1"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import spark_connector"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "kvstore.errors.UsageError: PySpark 4.1.1 is older"
    )
