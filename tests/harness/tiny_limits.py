"""Tiny limits, as a random history draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.harness.bounds import TINY

_names = st.sets(st.sampled_from(sorted(TINY)))
tiny_limits = st.one_of(
    st.just(set()), st.just(set()), _names, _names.map(lambda names: TINY.keys() - names)
).map(lambda names: {name: TINY[name] for name in sorted(names)})
"""Limits of `kvstore.limits` that a history runs with: the usual ones in half of the runs, in the
others few or most of them tiny."""
