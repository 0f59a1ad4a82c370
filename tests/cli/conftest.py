"""A fixture that runs the commands of the shell in this process."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from kvstore.cli.main import app
from tests.cli.installed import Run


@pytest.fixture
def run() -> Run:
    def run(*words: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run
