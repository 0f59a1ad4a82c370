"""Fixtures that install the project's entry points and run its commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvstore.cli.app import COMMANDS_GROUP, app
from tests.cli.installed import Run, declared
from tests.memory import tmp_path as tmp_path


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory for the path that declares the entry points as an installed project does."""
    info = tmp_path / "site" / "kvstore-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstore\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in declared().items())
    (info / "entry_points.txt").write_text(f"[{COMMANDS_GROUP}]\n{lines}")
    return tmp_path / "site"


@pytest.fixture
def run(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.syspath_prepend(str(installed))

    def run(*words: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run
