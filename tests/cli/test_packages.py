"""Commands of packages above kvstore are found by their entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kvstore.backup.cli
import kvstore.bulk.cli
from tests.cli.installed import ROOT, declared


def test_declared_commands_are_what_the_packages_have() -> None:
    assert declared() == {
        "import": "kvstore.bulk.cli:app",
        "seed": "kvstore.bulk.cli:seed_app",
        "table": "kvstore.bulk.tables_cli:app",
        "export": "kvstore.bulk.tables_cli:export_app",
        "expire-stagings": "kvstore.bulk.cli:stagings_app",
        "push": "kvstore.bulk.pushes.cli:app",
        "backup": "kvstore.backup.cli:app",
    }
    assert kvstore.bulk.cli.app is not kvstore.backup.cli.app


def test_a_command_of_a_package_that_another_one_hides_says_so(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "bulk").mkdir()
    (tmp_path / "bulk" / "__init__.py").touch()
    path = os.pathsep.join(map(str, [tmp_path, installed, ROOT]))
    refused = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "import", str(tmp_path / "s"), "rows.csv"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
        text=True,
    )
    assert refused.returncode == 2
    assert "is not the one that comes with kvstore-mvcc; rename" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_installed_commands_are_listed_and_run(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}

    def call(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *words],
            env=environment,
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
