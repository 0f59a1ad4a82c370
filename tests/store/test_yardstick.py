"""`tests/mvcc-conformance`: its reference and our store pass, and a store that errs is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

YARDSTICK = Path(__file__).parent.parent / "mvcc-conformance"


def outcome(*command: str) -> tuple[int, str]:
    """The status and the output of the runner, which asks a driver."""
    words = [sys.executable, str(YARDSTICK / "run.py"), "--", sys.executable, *command]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "driver", [["model.py"], ["kvstore_driver.py", "memory"], ["kvstore_driver.py", "rocksdb"]]
)
def test_each_case_passes(driver: list[str]) -> None:
    name, *words = driver
    count = sum(len(path.read_text().splitlines()) for path in YARDSTICK.glob("cases/*.jsonl"))
    assert outcome(str(YARDSTICK / name), *words) == (0, f"{count} passed, 0 failed\n")


@pytest.mark.parametrize(
    ("right", "wrong", "group"),
    [
        ("if at is not None and time > at:", "if at is not None and time >= at:", "as-of"),
        ("not key <= each < value}", "not key <= each <= value}", "range-deletes"),
        ("if since < time <= upto", "if since <= time <= upto", "changes"),
        ("if versions[0][0] != added:", "if False:", "imports"),
        ("if due <= self.clock:", "if due < self.clock - 10000:", "expiry"),
        ("for t, v in versions if t <= at)", "for t, v in versions if t < at)", "joins"),
        ("sorted(self.state(", "list(self.state(", "scans"),
        ("if at <= event and", "if at < event and", "axes"),
        ("def join(", "def join_(", "joins: left out, 'join'"),
    ],
)
def test_a_store_that_errs_is_found(tmp_path: Path, right: str, wrong: str, group: str) -> None:
    code = (YARDSTICK / "model.py").read_text()
    assert code.count(right) == 1
    driver = tmp_path / "driver.py"
    driver.write_text(code.replace(right, wrong))
    status, told = outcome(str(driver))
    assert group in told
    assert status == (0 if "left out" in group else 1)
