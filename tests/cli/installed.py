"""Runs commands as an installed project has them: declared by entry points."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

from kvstore.cli.app import COMMANDS_GROUP

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]

Run = Callable[..., Result]


def declared() -> dict[str, str]:
    """The entry points that pyproject declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kvstore": "kvstore.cli:main"}
    points: dict[str, str] = project["entry-points"][COMMANDS_GROUP]
    return points


def told(result: Result) -> Any:
    return json.loads(result.stdout)
