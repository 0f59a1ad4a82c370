"""Both halves of the loops, for tests that run on each."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from kvstore.codec.keys import VALUE, encode_suffix
from kvstore.codec.ordered import frame
from kvstore.loops.chosen import TWINS

NEWEST = "kvstore.loops.plain.newest"


def public_names(module: Any) -> dict[str, Any]:
    """The functions and classes that a module of the loops defines, without the names that it
    imports. `take_bounds` has no plain twin, because plain loops read the limits themselves.
    `newest` has no twin either: its class belongs to `lookup`, whose compiled half includes it."""
    return {
        name: found
        for name, found in vars(module).items()
        if callable(found)
        and getattr(found, "__module__", None) in (module.__name__, NEWEST)
        and not name.startswith("_")
        and name != "take_bounds"
    }


def half(name: str) -> SimpleNamespace:
    """All loops of one half, `plain` or `compiled`, by name."""
    found: dict[str, Any] = {}
    for twin in TWINS:
        found |= public_names(import_module(f"kvstore.loops.{name}.{twin}"))
    return SimpleNamespace(**found, __name__=name)


plain = half("plain")
try:
    compiled: SimpleNamespace | None = half("compiled")
except ImportError:  # no compiler where this was installed
    compiled = None

BOTH = [
    plain,
    pytest.param(compiled, marks=pytest.mark.skipif(compiled is None, reason="not compiled here")),
]


def names(loops: SimpleNamespace | None) -> str:
    """The id of a test's parameter."""
    return "none" if loops is None else loops.__name__


both = pytest.mark.parametrize("loops", BOTH, ids=names)

raw = st.lists(st.sampled_from([b"\x00", b"\xff", b"\x01", b"a"]), max_size=6).map(b"".join)
"""Keys in which an escape, its parts and a terminator occur."""


def stored_key(user_key: bytes, time: int = 3) -> bytes:
    """The key of a version of `user_key`."""
    return frame(user_key) + encode_suffix(time) + VALUE
