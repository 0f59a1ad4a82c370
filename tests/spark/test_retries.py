"""Workers that die are started again, and imports and backups hold each row once all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.spark
@pytest.mark.parametrize("words", [[], pytest.param(["all"], marks=pytest.mark.soak)])
def test_killed_workers_and_finished_but_lost_attempts_never_change_the_result(
    tmp_path: Path, words: list[str]
) -> None:
    """The session runs in a process of its own, because its master allows several attempts, and a
    JVM has one master."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.spark.retrying", str(tmp_path), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    outcome = json.loads(ended.stdout.splitlines()[-1])
    jobs = outcome.pop("jobs")
    assert min(jobs.pop("lost")) >= 3  # parts of lost attempts, which no state names
    assert jobs == {"rows": 6002, "same": True, "left": [], "batches": 1}
    orphans = outcome.pop("orphans")
    assert orphans >= 3  # complete parts of attempts that were not reported, and half a part
    if words:
        assert outcome.pop("served")  # a live store, read by tasks that died in the middle
        assert outcome.pop("seeds") == [6000, 6000]  # each label found its version
    assert outcome == {"rows": True, "changes": 6000, "stamps": True, "manifest_rows": 6000}
