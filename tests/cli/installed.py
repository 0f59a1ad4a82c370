"""Runs commands, and reads what they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

ROOT = Path(__file__).parents[2]

Run = Callable[..., Result]


def told(result: Result) -> Any:
    return json.loads(result.stdout)
