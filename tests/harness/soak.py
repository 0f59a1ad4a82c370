"""Cases of a test that `make soak` alone runs."""

from __future__ import annotations

from typing import Any

import pytest


def soaked(*cases: Any) -> list[Any]:
    """The cases, each marked as long: `[1, 2, *soaked(3, 4)]`."""
    return [pytest.param(case, marks=pytest.mark.soak) for case in cases]
