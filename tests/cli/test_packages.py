"""The commands of loads and backups, which lie above the package of the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvstore.cli.main import COMMANDS, app
from tests.cli.installed import ROOT


def test_each_command_is_there_under_its_name() -> None:
    group = typer.main.get_command(app)
    context = typer.Context(group)
    for name in COMMANDS:
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        assert command is not None
        assert command.name == name


@pytest.mark.parametrize("module", ["kvstore", "kvstore.cli"])
def test_commands_are_listed_and_run_beside_strangers_of_their_names(
    module: str, tmp_path: Path
) -> None:
    """Other distributions are called `bulk` and `backup`, and so are scripts of users."""
    for stranger in ("bulk", "backup"):
        (tmp_path / stranger).mkdir()
        (tmp_path / stranger / "__init__.py").write_text("raise RuntimeError('a stranger')")

    def call(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
            capture_output=True,
            check=True,
            text=True,
        )
        assert done.stderr == ""
        return done.stdout

    assert {"import", "backup"} <= set(call("--help").replace("│", " ").split())
    store = str(tmp_path / "s")
    call("put", store, "a", "1", "--create")
    assert json.loads(call("backup", "run", store, str(tmp_path / "b"), "--json"))["rows"] == 1
    assert "kvstore import new.db" in call("import", "--help")
