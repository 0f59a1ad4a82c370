"""`kvstore tasks` lists waiting and running tasks, beside the process that has the store open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.cli.main import app
from kvstore.tasks import Retry, Worker, handler
from kvstore.upkeep import submit_compact, submit_gc


def listed(path: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["tasks", str(path), "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_tasks_are_listed_while_they_are_done(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, engine) as store:
        assert listed(path) == []
        submit_gc(store, before=1, task_id="first")
        submit_compact(store, task_id="second")
        seen: list[list[dict[str, Any]]] = []

        def collect(arguments: Any, progress: Any) -> dict[str, Any]:
            progress.tell(rows=7)
            seen.append(listed(path))
            raise ValueError("it broke [Errno 2] in [/tmp]")

        handlers = {"gc": handler(collect)}
        Worker(store.tasks, handlers, retry=Retry(attempts_max=1), name="w").run_one()
        (waiting, held), (_, dead) = seen[0], listed(path)
    assert (waiting["task"], waiting["state"]) == ("second", "waiting")
    assert (held["task"], held["state"], held["claimant"]) == ("first", "held", "w")
    assert json.loads(held["progress"]) == {"rows": 7}
    assert json.loads(held["value"])["before"] == 1
    assert (dead["queue"], dead["state"], dead["error"]) == (
        "gc/dead",
        "dead",
        "ValueError: it broke [Errno 2] in [/tmp]",
    )
    table = CliRunner().invoke(app, ["tasks", str(path)])
    assert "it broke [Errno 2] in [/tmp]" in table.stdout
    first = CliRunner().invoke(app, ["tasks", str(path), "--limit", "1"])
    assert "these are 1 of 2; pass --limit for more" in first.stderr


def test_a_path_without_a_store_is_refused(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["tasks", str(tmp_path)]).exit_code != 0
