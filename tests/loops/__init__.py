"""What holds for the compiled loops holds for the plain ones."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import strategies as st

from kvstore.codec.keys import VALUE, encode_suffix
from kvstore.codec.ordered import frame
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


both = pytest.mark.parametrize("loops", BOTH, ids=names)

raw = st.lists(st.sampled_from([b"\x00", b"\xff", b"\x01", b"a"]), max_size=6).map(b"".join)
"""Keys in which an escape, its parts and a terminator occur."""


def stored_key(user_key: bytes) -> bytes:
    """The key of a version of `user_key`."""
    return frame(user_key) + encode_suffix(3) + VALUE
