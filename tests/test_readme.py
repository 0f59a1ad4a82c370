"""README's quickstart runs as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.spark
def test_every_block_of_the_quickstart_runs_in_order(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    without_spark = [block for block in blocks if "kvstore.spark" not in block]
    for run in (blocks, without_spark):  # a second run works too
        names: dict[str, Any] = {}
        for number, block in enumerate(run):
            exec(compile(block, f"README.md block {number}", "exec"), names)
