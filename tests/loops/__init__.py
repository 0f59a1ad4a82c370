"""The loops, and oracles for them: loops in plain Python that must give the same answers."""

from __future__ import annotations

from hypothesis import strategies as st

from kvstore.codec.keys import VALUE, encode_suffix, frame

raw = st.lists(st.sampled_from([b"\x00", b"\xff", b"\x01", b"a"]), max_size=6).map(b"".join)
"""Keys in which an escape, its parts and a terminator occur."""


def stored_key(user_key: bytes, time: int = 3) -> bytes:
    """The key of a version of `user_key`."""
    return frame(user_key) + encode_suffix(time) + VALUE
