"""The times at which versions expire, found by their records (`kvstore.mvcc.expiry`).

Invariant: a record tells of a version only if it has the timestamp of the version. So neither a
later write to a key nor the revert of an import lends the record of one version to another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvstore.codec.keys import span_bounds
from kvstore.engine.api import DATA
from kvstore.limits import EXPIRY_READ_BYTES
from kvstore.mvcc.expiry import Due, carried_key, carried_of, decode_due, waiting_key
from kvstore.mvcc.lookup import SearchBounds
from kvstore.mvcc.versions import Versions
from kvstore.span import Span


def dues_of(versions: Versions, keys: Sequence[bytes], written: Sequence[int]) -> list[Due | None]:
    """The due time of the version that each of `keys` has with the timestamp in `written`; None if
    it does not expire. A look-up a key, and a second one for a key that expires."""
    carried, recorded = versions_of(versions, map(carried_key, keys), written)
    places = [place for place, time in enumerate(written) if time == recorded[place]]
    return _waiting(versions, keys, carried, recorded, places)


def dues_at(versions: Versions, keys: Sequence[bytes], at: int) -> list[Due | None]:
    """The time at which each of `keys` expires, as of `at`; None if it does not, or is absent. A
    look-up a key, and two more for a key that expires."""
    carried, recorded = versions_of(versions, map(carried_key, keys), [at] * len(keys))
    places = [place for place, value in enumerate(carried) if value is not None]
    _, written = versions_of(versions, (keys[place] for place in places), [at] * len(places))
    pairs = zip(places, written, strict=True)
    places = [place for place, time in pairs if time == recorded[place]]
    return _waiting(versions, keys, carried, recorded, places)


def _waiting(
    versions: Versions,
    keys: Sequence[bytes],
    carried: Sequence[bytes | None],
    recorded: Sequence[int],
    places: Sequence[int],
) -> list[Due | None]:
    """The due times in the `carried` records at `places`, if their `waiting` records were written
    at the same times; None at all other places."""
    found: list[Due | None] = [None] * len(keys)
    dues = {
        place: decode_due(value, keys[place])
        for place in places
        if (value := carried[place]) is not None
    }
    waiting = (waiting_key(due, keys[place]) for place, due in dues.items())
    _, times = versions_of(versions, waiting, [recorded[place] for place in dues])
    for (place, due), time in zip(dues.items(), times, strict=True):
        if time == recorded[place]:
            found[place] = due
    return found


def versions_of(
    versions: Versions, keys: Iterable[bytes], at: Sequence[int]
) -> tuple[list[bytes | None], list[int]]:
    """The value of each key as of its own time in `at`, with the time of its version: None and -1
    where the key is absent. Reads a bounded number of bytes at once."""
    asked = list(keys)
    if not asked:
        return [], []
    bounds = SearchBounds(bytes_max=EXPIRY_READ_BYTES)
    found = versions.get_timed(asked, array("q", at), bounds)
    if found is not None:
        return found.values, found.times.tolist()
    half = len(asked) // 2  # a single key has no bound
    first = versions_of(versions, asked[:half], at[:half])
    second = versions_of(versions, asked[half:], at[half:])
    return first[0] + second[0], first[1] + second[1]


def may_expire(versions: Versions, span: Span) -> bool:
    """Whether a version of a key in `span` may expire, or have expired. A seek."""
    records = carried_of(span)
    cursor = versions.engine.cursor(DATA, *span_bounds(records.start, records.end))
    keys, _ = cursor.take(1)
    cursor.close()
    return bool(keys)
