"""Labels in the order of versions: any keys, and times of any distance."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tables.joins import in_order
from tests.loops import raw

times = st.integers(0, 9) | st.integers(0, (1 << 63) - 1)
"""Close to each other, and so far that a word of 64 bits has no room for a key beside them."""


@given(st.lists(st.tuples(raw, times), max_size=30))
def test_labels_are_sorted_by_key_and_newest_first(labels: list[tuple[bytes, int]]) -> None:
    keys = pa.array([key for key, _ in labels], pa.binary())
    found = in_order(keys, np.array([time for _, time in labels], np.int64))
    groups = [slice(*bounds) for bounds in pairwise(found.starts.tolist())]
    sorted_labels = [
        (key, time)
        for key, group in zip(found.keys.to_pylist(), groups, strict=True)
        for time in found.times[group].tolist()
    ]
    assert sorted_labels == sorted(labels, key=lambda label: (label[0], -label[1]))
    assert [labels[place] for place in found.places.tolist()] == sorted_labels
