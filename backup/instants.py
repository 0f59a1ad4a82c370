"""The instants of a collection that can be read, and the error for all others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from kvstore.errors import HistoryGoneError, UsageError
from kvstore.limits import LABEL_CHARS_MAX
from kvstore.timestamp import NOW, OLDEST, TimeLike, Timestamp, reached, to_timestamp

_LABEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*", re.ASCII)
_TIMES: Final = (NOW, OLDEST, "today", "yesterday")
"""Words that are times here or on the command line: a label would hide behind them."""


class CoveringChain(Protocol):
    """A chain, readable in `[since, upper)` and at the instants that it keeps."""

    @property
    def since(self) -> int: ...

    @property
    def upper(self) -> int: ...

    @property
    def kept(self) -> Mapping[int, tuple[str, ...]]: ...


def covers(chain: CoveringChain, time: int) -> bool:
    """Whether a chain can be read at a time."""
    return time < chain.upper and (time >= chain.since or time in chain.kept)


def instant_of(chains: Iterable[CoveringChain], time: int) -> int:
    """`time`, or the instant that it names in microseconds where no chain covers it: the newest
    instant of a chain, or a kept one. See `kvstore.timestamp.reached`."""
    known = list(chains)
    if any(covers(chain, time) for chain in known):
        return time
    instants = (instant for chain in known for instant in (int(chain.upper) - 1, *chain.kept))
    return next((instant for instant in instants if reached(time, instant) != time), time)


def gone(chains: Iterable[CoveringChain], as_of: int) -> HistoryGoneError:
    """The error for a time that no chain covers. It names the nearest earlier and later instants
    that can be read."""
    instants: set[int] = set()
    since = 0
    for chain in chains:
        since = int(chain.since)
        instants |= {*chain.kept, since, int(chain.upper) - 1}
    earlier = max((time for time in instants if time < as_of), default=None)
    later = min((time for time in instants if time > as_of), default=None)
    nearest = tuple(Timestamp(time) for time in (earlier, later) if time is not None)
    return HistoryGoneError(as_of=Timestamp(as_of), since=Timestamp(since), nearest=nearest)


def require_label(label: str) -> str:
    """Return `label` if it can name an instant. Raises `UsageError` for any other text."""
    is_text = isinstance(label, str) and _LABEL.fullmatch(label) is not None
    if not is_text or label.lower() in _TIMES or len(label) > LABEL_CHARS_MAX:
        raise UsageError(
            f"label {label!r}",
            "begin with a letter; letters, digits, '.', '_' and '-' may follow, "
            f"{LABEL_CHARS_MAX} characters at most; {', '.join(_TIMES)} are times",
        )
    return label


def time_or_label(
    given: TimeLike,
    labels: Callable[[], Mapping[str, int]],
    *,
    name: str,
    now: Callable[[], int],
) -> int:
    """The time that a caller gave as a time, or as the label of an instant. Raises `UsageError` for
    a text that is neither."""
    try:
        return int(to_timestamp(given, name=name, now=now))
    except UsageError as error:
        if not isinstance(given, str) or _LABEL.fullmatch(given) is None:
            raise
        known = labels()
        if given in known:
            return known[given]
        raise UsageError(
            f"{name}={given!r} is no time, and no label of the collection",
            f"its labels are {', '.join(sorted(known))}" if known else "it has no labels",
        ) from error


def labels_of(chains: Iterable[CoveringChain]) -> dict[str, Timestamp]:
    """The labels of chains, and their instants."""
    return {
        label: Timestamp(time)
        for chain in chains
        for time, labels in sorted(chain.kept.items())
        for label in labels
    }
