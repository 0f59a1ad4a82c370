"""A store stays within the memory that it was given: a whole life of one in 256 MiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.contained import LIMIT_BYTES, STEPS, live_contained

pytestmark = pytest.mark.on_disk


@pytest.mark.parametrize(
    "rows", [200_000, pytest.param(10_000_000, marks=pytest.mark.soak)], ids="{:,}".format
)
def test_a_store_lives_in_256_mib(tmp_path: Path, rows: int) -> None:
    for step in STEPS:
        most, _ = live_contained(tmp_path / "store", rows, step)
        assert most < LIMIT_BYTES, step
