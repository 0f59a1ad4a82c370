"""The blocks of Spark's README run in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

NAMES = (
    "flights.db",
    "flights-copy",
    "flights-backup",
    "flights-restored",
    "seeded.db",
    "stream-state",
    "staging",
)
README = Path(__file__).parents[2] / "spark_connector" / "README.md"


@pytest.mark.usefixtures("spark")
def test_every_block_of_the_readme_runs_in_order(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 15
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        text = block
        for name in NAMES:
            text = text.replace(f'"{name}"', repr(str(tmp_path / name)))  # Spark has its own folder
        exec(compile(text, f"README.md block {number}", "exec"), names)
