"""Collections on the page of a store: which time they cover, and which gaps they have.

The command `kvstore ui` finds this by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Final

from kvstore.backup.collection import Collection
from kvstore.backup.overview import CollectionInfo
from kvstore.backup.shard import ShardBatch
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.errors import KVStoreError
from kvstore.remote.server.page import (
    Cell,
    Grid,
    Lane,
    Lanes,
    PageBlock,
    PageRequest,
    PageView,
    Section,
    Stretch,
    Text,
)
from kvstore.remote.server.page.html import duration, moment, size

_WINDOWS_SHOWN: Final = 50
_STEPS: Final = 1000
_CHAINS_SHOWN: Final = 20


def collections(places: Sequence[str]) -> Section:
    """The section about the collections at `places`, which are opened anew for each view."""
    return Section("collections", "Collections", partial(_view, places))


def _view(places: Sequence[str], call: PageRequest) -> PageView:
    found = chain.from_iterable(_shown(place, call) for place in places)
    return PageView("Collections", list(found))


def _shown(place: str, call: PageRequest) -> list[PageBlock]:
    """The blocks about a collection. One that cannot be read hides none of the others."""
    try:
        return list(_blocks(place, Collection(place), call))
    except KVStoreError as error:
        return [Text(f"{place}: {error}", is_warning=True)]


def _blocks(place: str, collection: Collection, call: PageRequest) -> Iterator[PageBlock]:
    info = collection.show()
    if info.source is not None and info.source != call.store.store_id:
        yield Text(
            f"{info.url}: backups of store {info.source}, and not of this one, which is "
            f"{call.store.store_id}. They restore nothing of it.",
            is_warning=True,
        )
        return
    chains = collection.chains()
    newest = max(int(call.store.upper) - 1, int(info.upper))
    oldest = min((int(batch.lower) for windows in chains for batch in windows), default=0)
    oldest = max(oldest, min(int(call.store.browsing.oldest()), newest))
    age = duration(info.recovery_point_age_seconds * NS_PER_SECOND)
    yield Text(
        f"{info.url}: {info.rows:,} rows in {size(info.bytes)}. Any time from {moment(info.since)} "
        f"to {moment(info.upper)} can be restored. A disaster now would lose the last {age}."
    )
    yield from _proofs(info)
    first = max(len(chains) - _CHAINS_SHOWN, 0)
    lanes = [
        Lane(f"Chain {number}", list(_stretches(windows, oldest, newest)))
        for number, windows in enumerate(chains[first:], first)
    ]
    at = _place(int(call.as_of), oldest, newest)
    lanes.append(Lane("This page", [Stretch(at, at + 2, f"page at {moment(call.as_of)}", "mark")]))
    yield Lanes(f"Coverage of {place}", lanes, moment(oldest), moment(newest))
    found = collection.list()
    rows = [
        [
            Cell(moment(window.lower)),
            Cell(moment(window.upper), call.link("keys", at=str(int(window.upper) - 1))),
            Cell(f"{window.rows:,}"),
            Cell(size(window.bytes)),
            Cell(moment(window.proven_at)),
        ]
        for window in reversed(found[-_WINDOWS_SHOWN:])
    ]
    count = f" ({_WINDOWS_SHOWN} of {len(found):,})" if len(found) > _WINDOWS_SHOWN else ""
    columns = ("From (UTC)", "Up to (UTC)", "Rows", "Bytes", "Last proven (UTC)")
    caption = f"Windows, newest first{count}"
    yield Grid(caption, columns, rows, numbers=frozenset({2, 3}))


def _proofs(info: CollectionInfo) -> Iterator[PageBlock]:
    """The last proof of the newest chain: a drill that restored it."""
    proof = info.proofs[-1] if info.proofs else None
    if proof is None or proof.proven is None:
        yield Text("No drill has proved that this collection restores.", is_warning=True)
    else:
        age = duration(info.proof_age_seconds * NS_PER_SECOND)
        yield Text(f"A drill restored it as of {moment(proof.proven)}, {age} ago.")
    if proof is not None and proof.problem:
        yield Text(f"The newest drill failed: {proof.problem}", is_warning=True)


def _stretches(windows: Sequence[ShardBatch], oldest: int, newest: int) -> Iterator[Stretch]:
    """The time that a chain covers, joined where windows abut, and the gap behind it."""
    joined: list[tuple[int, int]] = []
    for batch in windows:
        if joined and batch.lower <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(int(batch.upper), joined[-1][1])
        else:
            joined.append((int(batch.lower), int(batch.upper)))
    before = oldest
    for lower, upper in joined[-_STEPS:]:
        if lower > before:
            yield _stretch(before, lower, oldest, newest, "gap")
        yield _stretch(lower, upper, oldest, newest, "good")
        before = upper
    if before < newest:
        yield _stretch(before, newest, oldest, newest, "gap")


def _stretch(lower: int, upper: int, oldest: int, newest: int, tone: str) -> Stretch:
    words = "covered" if tone == "good" else "not covered"
    text = f"{words} from {moment(max(lower, 0))} to {moment(upper)}"
    return Stretch(_place(lower, oldest, newest), _place(upper, oldest, newest), text, tone)


def _place(at: int, oldest: int, newest: int) -> int:
    return min(max(at - oldest, 0) * _STEPS // max(newest - oldest, 1), _STEPS)
