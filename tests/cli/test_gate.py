"""The gate of a load by the shell: `--check`, `--force`, `--reason`, and `kvstore imports show`."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import Result

import kvstore
from tests.cli.installed import Run


def said(result: Result) -> str:
    """The words of an error, which lines do not break."""
    return " ".join(result.stderr.split())


SCHEMA = pa.schema([("key", pa.string()), ("value", pa.string())])


@pytest.mark.parametrize("command", ["import", "table"])
def test_a_load_is_refused_forced_and_shown(run: Run, tmp_path: Path, command: str) -> None:
    store, file = tmp_path / "store", tmp_path / "rows.parquet"
    rows = {"key": [f"{number:03d}" for number in range(100)], "value": ["x"] * 100}
    pq.write_table(pa.table(rows, schema=SCHEMA), file)
    with kvstore.open(store) as opened:
        opened.table("rows", SCHEMA, key="key")
    gate = tmp_path / "gate.json"
    gate.write_text(json.dumps({"rows": {"least": 200}, "no_nulls": ["value"]}))
    target = [store] if command == "import" else ["rows"]
    words = ["import", store, file] if command == "import" else ["table", "import", store, *target]
    load = [*words, *([file] if command == "table" else []), "--check", gate]
    refused = run(*load, code=2)
    assert "rows is 100, and must be at least 200" in said(refused)
    assert "--force without a reason" in said(run(*load, "--force", code=2))
    assert "go with a gate" in said(run(*load[:-2], "--reason", "why", code=2))
    with kvstore.open(store) as opened:
        assert opened.count() == opened.table("rows").count() == 0
    made = json.loads(run(*load, "--force", "--reason", "holiday", "--json").stdout)
    shown = json.loads(run("imports", "show", store, made["import_id"], "--json").stdout)
    assert shown["report"]["forced"]["reason"] == "holiday"
    assert [each["passed"] for each in shown["report"]["checks"]] == [False, True]
    text = run("imports", "show", store, made["import_id"]).stdout
    assert "at least 200" in text
    assert "holiday" in text
    assert "no import" in said(run("imports", "show", store, "0xabc", code=2))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"row": 1}', '{"functions": {"f": 1}}'])
def test_a_file_that_is_no_gate_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    gate = tmp_path / "gate.json"
    gate.write_text(text)
    with kvstore.open(tmp_path / "store"):
        pass
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"key": ["a"], "value": ["b"]}), file)
    assert "gate" in said(run("import", tmp_path / "store", file, "--check", gate, code=2))
