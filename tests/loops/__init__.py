"""What holds for the compiled loops holds for the plain ones."""

from __future__ import annotations

from types import ModuleType

import pytest

from kvstore.loops import plain

try:
    from kvstore.loops import compiled
except ImportError:  # no compiler where this was installed
    compiled = None  # type: ignore[assignment]

BOTH = [
    plain,
    pytest.param(compiled, marks=pytest.mark.skipif(compiled is None, reason="not compiled here")),
]


def names(loops: ModuleType | None) -> str:
    """The id of a test's parameter."""
    return "none" if loops is None else loops.__name__.rpartition(".")[2]
