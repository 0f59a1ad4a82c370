"""Point-in-time joins: many keys, each read at a time of its own, in one walk over the versions.

Labels are put into the order of versions, by key and the newest time first. A source (a store, a
snapshot, a collection) answers them; the answers return to the order of the labels.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.arguments import AGE, COLUMN, FLAG, ArgumentKind, instance, is_many, word
from kvstore.base.span import Span, prefix_end, require_key
from kvstore.base.timestamp import (
    OTHER_UNITS_MAX,
    TIMESTAMP_MAX,
    AgeLike,
    TimeLike,
    Timestamp,
    microseconds_of,
)
from kvstore.codec.columns import key_column, require_bytes_type, require_time_type, time_column
from kvstore.errors import Argument, HistoryGoneError, NotYetWrittenError, UsageError, printable
from kvstore.limits import (
    ARROW_ROWS_MAX,
    JOIN_LABEL_BYTES_MAX,
    JOIN_PASS_LABELS_MIN,
    JOIN_ROWS_FIRST,
    JOIN_ROWS_MAX,
    JOIN_SPAN_FACTOR,
    JOIN_VALUE_BYTES_MAX,
)
from kvstore.loops.matches import Neighbours, runs_of
from kvstore.mvcc.arrow import batch_bytes, buffers_of, key_words, shown_bytes
from kvstore.mvcc.lookup import EVERYTHING, LabelColumns, SearchBounds
from kvstore.tables.catalogue import two_named
from kvstore.tables.exact import plain
from kvstore.tables.row_codec import TableCodec, key_values
from kvstore.timeline.parts import Parts

# --------------------------------------------------------------------------------------------------
# Labels in the order of versions: by key, and the newest time of each key first.
#
# Keys are sorted as numbers where that is possible. Equal keys are found by a hash, so that only
# the distinct keys are compared, and then a label is two numbers: the rank of its key and its time.

_Words: TypeAlias = npt.NDArray[np.uint64]


class OrderedLabels(NamedTuple):
    """Labels in order. The distinct `keys` ascend; key i has the labels `starts[i]` up to
    `starts[i + 1]`. `places` tells where each label stood before."""

    keys: pa.Array
    starts: Numbers
    times: Numbers
    places: Numbers


def in_order(keys: pa.Array, times: Numbers) -> OrderedLabels:
    """The labels of a binary array of keys, in order. Costs a hash and a sort of numbers for each
    label, and a comparison sort of distinct keys whose first bytes are equal; keys that ascend cost
    a comparison each."""
    runs = runs_of(buffers_of(keys))
    if runs is not None:
        starts = np.frombuffer(runs, np.int64)
        label_ranks = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        places = _newest_first(label_ranks, times, len(starts) - 1)
        return OrderedLabels(keys.take(pa.array(starts[:-1])), starts, times[places], places)
    encoded = keys.dictionary_encode()
    distinct, which = encoded.dictionary, encoded.indices.to_numpy()
    by_key = key_order(distinct)
    ranks = np.empty(len(distinct), np.int64)
    ranks[by_key] = np.arange(len(distinct))
    label_ranks = ranks[which]
    places = _newest_first(label_ranks, times, len(distinct))
    starts = np.zeros(len(distinct) + 1, np.int64)
    np.cumsum(np.bincount(label_ranks, minlength=len(distinct)), out=starts[1:])
    return OrderedLabels(distinct.take(pa.array(by_key)), starts, times[places], places)


def key_order(keys: pa.Array) -> Numbers:
    """The places of distinct `keys` in their order."""
    if not len(keys):
        return np.empty(0, np.int64)
    bounds = pc.min_max(keys)
    words = key_words(keys, skip=_shared(bounds["min"].as_py(), bounds["max"].as_py()))
    order: Numbers = np.argsort(words)
    same = words[order[1:]] == words[order[:-1]]
    if same.any():
        tied = np.zeros(len(order), np.bool_)
        tied[1:] |= same
        tied[:-1] |= same
        places = np.flatnonzero(tied)
        rows = order[places]
        order[places] = rows[pc.sort_indices(keys.take(pa.array(rows))).to_numpy()]
    return order


def _shared(low: bytes, high: bytes) -> int:
    """The length of the common prefix of the least and the greatest key."""
    pairs = enumerate(zip(low, high, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(low), len(high)))


def _newest_first(ranks: Numbers, times: Numbers, count: int) -> Numbers:
    """The places of labels by rank, and then by descending time."""
    if not len(times):
        return np.empty(0, np.int64)
    newest = int(times.max())
    width = (newest - int(times.min())).bit_length()
    # Words without a sign: event times may lie further apart than a number of 63 bits.
    ages = times.max().view(np.uint64) - times.view(np.uint64)
    # A word has the rank and as many bits of the time as fit. A sort of words takes a fifth of the
    # time of a sort by two columns.
    cut = max(count.bit_length() + width - 64, 0)
    words: _Words = ranks.astype(np.uint64) << np.uint64(width - cut)
    words |= ages >> np.uint64(cut)
    is_ordered = bool((words[1:] >= words[:-1]).all())
    order = np.arange(len(words)) if is_ordered else np.argsort(words)
    if cut:
        words = words[order]
        tied = np.zeros(len(order), np.bool_)
        np.equal(words[1:], words[:-1], out=tied[1:])
        tied[:-1] |= tied[1:]
        if tied.any():
            found = order[tied]
            order[tied] = found[np.lexsort((ages[found], ranks[found]))]
    return order


# --------------------------------------------------------------------------------------------------
# Labels: keys, each with the time as of which it is read.
#
# Invariants
# 1. No label is answered at or above `upper`: commits at its time may still come.
# 2. No label is answered where history is gone, be it below `since` or under a clear.
# 3. An error names the first label that cannot be answered, by row and key.

Numbers: TypeAlias = npt.NDArray[np.int64]


class Labels(NamedTuple):
    """Keys and times, in the order of the caller. `first` is the row of the first one."""

    keys: Sequence[bytes]
    times: Numbers
    first: int = 0

    def named(self, at: int) -> str:
        """A label in the words of an error."""
        return f"row {self.first + at}, key {printable(self.keys[at])}"


def times_given(as_of: Sequence[TimeLike], count: int) -> list[TimeLike]:
    """The times that a caller gave for `count` keys, not yet parsed. Raises `UsageError` for
    another number of them, and for an array of numpy's datetimes."""
    kind = getattr(getattr(as_of, "dtype", None), "kind", "O")
    if kind == "M":
        raise UsageError("as_of has numpy's datetimes, which have no time zone", "pass Timestamps")
    given = list(as_of)
    if len(given) != count:
        raise UsageError(f"{count} keys and {len(given)} times", "pass a time for each key")
    return given


def times_of(parts: Parts, as_of: Sequence[TimeLike], count: int) -> Numbers:
    """The times that a caller gave for `count` keys, in the forms that a single time may have.
    Raises `UsageError` as `times_given`, and for a value that is no time."""
    given = times_given(as_of, count)
    if {int, Timestamp}.issuperset(map(type, given)):
        with suppress(OverflowError):
            times = np.frombuffer(array("q", cast("list[int]", given)), np.int64)
            if not count or times.min() > OTHER_UNITS_MAX:
                return times
    checked = [parts.committer.to_time(time, name="as_of") for time in given]
    return np.frombuffer(array("q", checked), np.int64)


def reached_times(times: Numbers, newest: int) -> Numbers:
    """As `kvstore.base.timestamp.reached`, for a column of times."""
    is_newest = times == microseconds_of(newest) * 1000
    return np.where(is_newest, newest, times) if is_newest.any() else times


def require_complete(parts: Parts, labels: Labels) -> Labels:
    """The labels, if all of them can be answered. Raises `NotYetWrittenError` for the first label
    at or above `upper`. An idle store closes the time until now, as `Committer.readable` does."""
    committer = parts.committer
    committer.health.require()
    if not len(labels.times) or int(labels.times.max()) < committer.upper:
        return labels
    with suppress(NotYetWrittenError):  # the error below names the label
        committer.readable(int(labels.times.max()))
    upper = committer.upper
    labels = labels._replace(times=reached_times(labels.times, upper - 1))
    late = np.flatnonzero(labels.times >= upper)
    if len(late):
        first = int(late[0])
        raise NotYetWrittenError(
            as_of=Timestamp(labels.times[first]),
            upper=upper,
            remedy=f"{labels.named(first)}, asks for it: give a time below {upper}, or wait",
        )
    return labels


def gone(parts: Parts, labels: Labels) -> npt.NDArray[np.bool_] | None:
    """Which labels ask for history that is not kept, None if none does. O(labels below the newest
    clear * clears)."""
    times, clears = labels.times, parts.clears
    if not len(times) or int(times.min()) >= max(parts.committer.since, clears.newest):
        return None
    lost = times < parts.committer.since
    for at in np.flatnonzero((times < clears.newest) & ~lost).tolist():
        lost[at] = clears.hit(Span.of_key(labels.keys[at]), int(times[at])) is not None
    return lost if lost.any() else None


def require_kept(parts: Parts, labels: Labels) -> None:
    """Raise `HistoryGoneError` for the first label whose history is gone."""
    lost = gone(parts, labels)
    if lost is not None:
        first = int(np.argmax(lost))
        require_span_kept(parts, labels, first, Span.of_key(labels.keys[first]))


def require_span_kept(parts: Parts, labels: Labels, first: int, span: Span) -> None:
    """Raise `HistoryGoneError`, naming the label `first`, unless all of `span` can be read at its
    time."""
    try:
        parts.reads.require_kept(span, int(labels.times[first]))
    except HistoryGoneError as error:
        raise HistoryGoneError(
            as_of=error.as_of,
            since=error.since,
            span=error.span,
            remedy=f"{labels.named(first)}, asks for it: {error.remedy}",
        ) from None


# --------------------------------------------------------------------------------------------------
# Values and floors of many keys, each at a time of its own.
#
# GC and clears may take history away during a read. They announce each removal first, so the look
# after the read tells whether the read was whole (`kvstore.timeline.read_times`).

LiveRow = tuple[bytes, bytes]


def values(
    parts: Parts,
    keys: list[bytes],
    as_of: Sequence[TimeLike],
    bounds: SearchBounds = EVERYTHING,
    first: int = 0,
) -> list[bytes | None] | None:
    """The value of each key at its own time; None where the values are beyond `bounds`. Errors
    number the keys from `first` on. At most a seek for each version."""
    labels = Labels(keys, times_of(parts, as_of, len(keys)), first)
    labels = require_complete(parts, labels)
    require_kept(parts, labels)
    found = parts.versions.get_timed(keys, labels.times.data, bounds)
    if _was_below_floor(parts, labels):
        require_kept(parts, labels)
    return None if found is None else found.values


def floors(
    parts: Parts,
    keys: Sequence[bytes],
    as_of: TimeLike | Sequence[TimeLike] | None,
    prefix: bytes | None,
    bytes_max: int = sys.maxsize,
    first: int = 0,
) -> list[LiveRow | None] | None:
    """For each key, at one time or at its own: the greatest live key with `prefix` that is not
    above it, with its value. Keys of tables are left out, as scans leave them out. None where the
    rows of several keys have more than `bytes_max` bytes. Errors number the keys from `first`
    on."""
    keys = [require_key(key) for key in keys]
    span = parts.reserve.narrow(Span() if prefix is None else Span.of_prefix(prefix))
    if as_of is None:
        hull = Span(span.start, max([span.start, *keys]) + b"\0")
        read = partial(_floors_at_once, parts, keys, span, bytes_max)
        return parts.reads.read(None, hull, read)
    if is_many(as_of):
        labels = Labels(keys, times_of(parts, as_of, len(keys)), first)
        labels = require_complete(parts, labels)
        if len(keys) and int(labels.times.min()) < parts.committer.since:
            require_kept(parts, labels)
    else:
        at = parts.reads.at(as_of)
        labels = Labels(keys, np.full(len(keys), at, np.int64))
    found = parts.versions.floors(keys, labels.times.tolist(), span, bytes_max)
    if found is not None and _was_below_floor(parts, labels):
        for at, (key, row) in enumerate(zip(keys, found, strict=True)):
            # The search went from the key down to the floor, or to the first key of all.
            searched = span.intersect(b"" if row is None else row[0], key + b"\0")
            if searched is not None:
                require_span_kept(parts, labels, at, searched)
    return found


def _floors_at_once(
    parts: Parts, keys: list[bytes], span: Span, bytes_max: int, at: int
) -> list[LiveRow | None] | None:
    return parts.versions.floors(keys, [at] * len(keys), span, bytes_max)


def _was_below_floor(parts: Parts, labels: Labels) -> bool:
    """Whether GC or a clear may have taken away history that was read."""
    times = labels.times
    return bool(len(times)) and int(times.min()) < parts.committer.frontiers.floor


# --------------------------------------------------------------------------------------------------
# The seam between labels and the sources that answer them: stores, snapshots, collections.
#
# A join reads its labels once. Each side of the join gets the same labels, piece by piece, and
# gives back columns of as many rows, in the order of the labels.
#
# Invariants
# 1. While a side is open, the history that it answers from stays: GC, clears, compaction and expiry
#    take none of it away.
# 2. A side that gives up a piece, because its values have too many bytes, has changed nothing: the
#    piece comes again in halves.


class Asked(NamedTuple):
    """Labels: the column of keys, as one binary array, and their times. `first` is the row of the
    first label."""

    keys: pa.Array
    times: Numbers
    first: int


class AskedSpans(NamedTuple):
    """Labels that ask for the first live key at or above each of `keys`, at its time; for the last
    one at or below it if `is_reverse`. Only a key that begins with the label's stem is an answer.
    Each of `stems` is the beginning of its key. `ordered` has the labels by key. `first` is the row
    of the first label."""

    keys: pa.Array
    stems: pa.Array
    times: Numbers
    ordered: Numbers
    first: int
    is_reverse: bool = False

    def spans(self) -> tuple[list[bytes], list[bytes | None]]:
        """Where the answers may lie: from the first keys on, and below the second ones."""
        stems: list[bytes] = self.stems.to_pylist()
        keys: list[bytes] = self.keys.to_pylist()
        if self.is_reverse:
            return stems, [key + b"\0" for key in keys]
        return keys, [prefix_end(stem) for stem in stems]

    def part(self, first: int, count: int) -> AskedSpans:
        """Some of the labels, for which `ordered` is left out."""
        part = slice(first, first + count)
        keys, stems = (column.slice(first, count) for column in (self.keys, self.stems))
        nothing = np.empty(0, np.int64)
        return AskedSpans(
            keys, stems, self.times[part], nothing, self.first + first, self.is_reverse
        )


class RowsFound(NamedTuple):
    """Key, value and time of the row of each label. The value is null where a label has none."""

    keys: pa.Array
    values: pa.Array
    times: Numbers


Direction: TypeAlias = Literal["backward", "forward", "nearest"]
DIRECTION: Final[ArgumentKind[Direction]] = word("backward", "forward", "nearest")


class Search(NamedTuple):
    """Which version answers a label. A version further than `age_max` ns from the label's time is
    no answer. A label whose history is gone is an error, or null. All values together have
    `bytes_max` bytes at most."""

    age_max: int
    is_gone_null: bool
    bytes_max: int
    direction: Direction = "backward"
    allows_exact: bool = True
    newest: int | None = None
    """No version above this time counts; None for the newest time of the side."""
    is_future_newest: bool = False
    """Whether a label above `newest` is answered as of `newest`, and is no error."""

    @property
    def is_plain(self) -> bool:
        """Whether one look-up at the label's time answers it."""
        return self.direction == "backward" and self.allows_exact and not self.is_future_newest


class Answers(Protocol):
    """A side of a join that is open: its history is held."""

    @property
    def newest(self) -> int:
        """The time of labels that have none."""
        ...

    @property
    def rows_first(self) -> int:
        """How many labels to ask at first, when the size of values is unknown."""
        ...

    @property
    def rows_max(self) -> int:
        """How many labels to ask at once, at most."""
        ...

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The columns of the answer, a row for each label, in the order of the labels. None where
        several labels have values of too many bytes together."""
        ...


class StoredVersions(Answers, Protocol):
    """Answers of a source that has the versions itself."""

    def following(self, labels: Asked, search: Search) -> Numbers:
        """The time of the oldest version at or above the time of each label, or above it if the
        search allows no exact match; -1 where there is none, and where history is gone and the
        search allows that. A deletion is a version."""
        ...


class RowAnswers(Answers, Protocol):
    """Answers of a source that finds the first and the last live rows of spans, too."""

    @property
    def spans_max(self) -> int:
        """How many spans to ask at once, at most."""
        ...

    def first_alive(self, labels: AskedSpans, search: Search) -> RowsFound | None:
        """The first live row of each span, or the last one, at the time of its label. None where
        several rows have too many bytes together."""
        ...


TIME_TYPE = pa.timestamp("ns", "UTC")
VALUE_FIELDS = (pa.field("value", pa.binary()), pa.field("value_timestamp", TIME_TYPE))


@dataclass(frozen=True, slots=True)
class Side:
    """A side of a join, before it is read: the values of a store, a snapshot or a collection.
    `opened` holds the history of the moment at which its block begins."""

    opened: Callable[[], AbstractContextManager[Answers]]
    fields: tuple[pa.Field, ...] = VALUE_FIELDS
    """The columns that an answer has. The last one is the timestamp of the version."""


class Joinable(Protocol):
    """An object that labels can be joined to."""

    def join_side(self) -> Side | TableSide:
        """Its side of a join."""
        ...


@dataclass(frozen=True, slots=True)
class Join:
    """One of several sources that the same labels are joined to, for `kvstore.join`.

    `source` is a store, a snapshot, a collection, or a table without an event time. Column `key` of
    the labels has its keys; the default is the `key` of the whole join. `max_age`, which may be
    called `tolerance`, `direction` and `allow_exact` are as in `Store.join`. `columns` names the
    columns that the source adds, in the place of `value` and `value_timestamp`; `prefix` stands
    before each name.

    For a table, `key` names a column of the labels for each column of its key; the default is their
    own names. `columns` chooses columns of the table, by default all beside the key. The time of
    the row's commit is `row_timestamp` behind the prefix, or behind the name of the table.
    """

    source: Joinable
    key: str | Sequence[str] | None = None
    max_age: AgeLike | None = None
    columns: Sequence[str] | None = None
    prefix: str = ""
    direction: Direction = "backward"
    tolerance: AgeLike | None = None
    allow_exact: bool = True


def value_columns(values: pa.Array, times: Numbers) -> list[pa.Array]:
    """The columns `VALUE_FIELDS`. A time of -1 is null."""
    return [values, pa.array(times, mask=times < 0).cast(TIME_TYPE)]


def placed(values: pa.Array, places: Numbers, count: int) -> pa.Array:
    """`values` at their `places` among `count` rows, null elsewhere."""
    sources = np.full(count, -1, np.int64)
    sources[places] = np.arange(len(places))
    return values.take(pa.array(sources, mask=sources < 0))


def everywhere(time: int, rows: int) -> Numbers:
    """The times of labels that have none of their own."""
    return np.full(rows, time, np.int64)


# --------------------------------------------------------------------------------------------------
# Directions: the version before a label, the one behind it, or the nearer of the two.
#
#     backward    the newest version at or below the label's time
#     forward     the oldest version at or above the label's time
#     nearest     the nearer of both answers, and the one before where both are as near
#
# Without exact matches `below` and `above` take the place of `at or below` and `at or above`.
#
# A deletion is a version, so a label whose version it is has null. The nearest answer is the nearer
# of those that are not null.
#
# Invariants
# 1. A version is found by its time, and its value by a plain look-up at that time. So all
#    directions see the history that backward look-ups see.
# 2. Two versions of a key never have the same time, and one commit makes at most one of them. So
#    the same labels get the same answer in each run.


def directed(side: StoredVersions, labels: Asked, search: Search) -> list[pa.Array] | None:
    """The columns `VALUE_FIELDS` of a search that is not plain. Costs a plain look-up for each
    direction, and a seek for each label that looks forward."""
    before = behind = None
    if search.direction != "forward":
        before = _before(side, labels, search)
        if before is None:
            return None
    if search.direction != "backward":
        behind = _behind(side, labels, search)
        if behind is None:
            return None
    if before is None or behind is None:
        return before or behind
    return _nearer(labels.times, before, behind)


def _before(side: StoredVersions, labels: Asked, search: Search) -> list[pa.Array] | None:
    newest = side.newest if search.newest is None else search.newest
    times = labels.times
    if not search.allows_exact:
        # A time that means the newest one is above it: its version is no exact match.
        times = np.where(reached_times(times, newest) == times, np.maximum(times - 1, 0), newest)
    if search.is_future_newest:
        times = np.minimum(times, newest)
    plain = _plain(search, search.age_max if times is labels.times else TIMESTAMP_MAX)
    found = side.answer(labels._replace(times=times), plain)
    if found is None:
        return None
    distances = labels.times - _nanoseconds(found)
    fits = (distances >= (0 if search.allows_exact else 1)) & (distances <= search.age_max)
    return found if fits.all() else nulled(found, fits)


def _behind(side: StoredVersions, labels: Asked, search: Search) -> list[pa.Array] | None:
    times = side.following(labels, search)
    there = np.flatnonzero((times >= 0) & (times - labels.times <= search.age_max))
    asked = Asked(labels.keys.take(pa.array(there)), times[there], labels.first)
    found = side.answer(asked, _plain(search, TIMESTAMP_MAX))
    if found is None:
        return None
    known = np.full(len(times), -1, np.int64)
    known[there] = _nanoseconds(found)
    return value_columns(placed(found[0], there, len(times)), known)


def _nearer(times: Numbers, before: list[pa.Array], behind: list[pa.Array]) -> list[pa.Array]:
    older, newer = _nanoseconds(before), _nanoseconds(behind)
    is_behind = (newer >= 0) & ((older < 0) | (newer - times < times - older))
    places = np.arange(len(times)) + np.where(is_behind, len(times), 0)
    values = pa.concat_arrays([before[0], behind[0]]).take(pa.array(places))
    return value_columns(values, np.where(is_behind, newer, older))


def _plain(search: Search, age_max: int) -> Search:
    return Search(age_max, search.is_gone_null, search.bytes_max)


def _nanoseconds(found: list[pa.Array]) -> Numbers:
    """The times of versions; -1 where there is none."""
    times: Numbers = found[-1].cast(pa.int64()).fill_null(-1).to_numpy()
    return times


def nulled(columns: list[pa.Array], is_kept: npt.NDArray[np.bool_]) -> list[pa.Array]:
    """The columns, null in the rows that are not kept."""
    places = pa.array(np.arange(len(is_kept)), mask=~is_kept)
    return [column.take(places) for column in columns]


def age_in_ns(age: timedelta | None) -> int:
    """The bound of a search for versions."""
    if age is None:
        return TIMESTAMP_MAX
    return min(age // timedelta(microseconds=1) * 1000, TIMESTAMP_MAX)


def age_of(max_age: object, tolerance: object) -> timedelta | None:
    """The bound that a caller gave by one of its two names. Raises `UsageError` for both."""
    if max_age is not None and tolerance is not None:
        raise UsageError(
            "max_age and tolerance are two names of one bound", "pass one of them: max_age"
        )
    name = "max_age" if tolerance is None else "tolerance"
    return AGE.or_none.check(name, max_age if tolerance is None else tolerance)


# --------------------------------------------------------------------------------------------------
# The side of a join that a store or a snapshot answers.
#
# A piece of labels is looked up in one walk through the store, which seeks or merges
# (`kvstore.loops.lookup`). A pin keeps history from the call of the join until its end.


@contextmanager
def stored_answers(parts: Parts, upto: int | None = None) -> Iterator[StoredAnswers]:
    """Pin the history that a store keeps. With `upto`, which a snapshot has, no label may ask for a
    later time."""
    parts.committer.health.require()
    pins = parts.pins  # in a forked child, which ends the pass, handles have no fields
    pin = pins.new()
    try:
        with parts.committer.lock:
            pins.keep(pin, parts.committer.since, kind="join")
        yield StoredAnswers(parts, upto)
    finally:
        pins.let_go(pin, None)


class StoredAnswers:
    """See `RowAnswers`."""

    def __init__(self, parts: Parts, upto: int | None) -> None:
        self._parts = parts
        self._upto = upto
        self.rows_first = JOIN_ROWS_FIRST
        self.rows_max = self.spans_max = JOIN_ROWS_MAX

    @cached_property
    def newest(self) -> int:
        """The time of the snapshot, or the newest complete time."""
        return self._parts.reads.at(None) if self._upto is None else self._upto

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The values of the labels and the timestamps of their versions."""
        if not search.is_plain:
            return directed(self, labels, search)
        parts, labels = self._parts, within(labels, self._upto)
        asked = Labels(_Keys(labels.keys), labels.times, labels.first)
        floor = parts.committer.frontiers.floor
        asked = require_complete(parts, asked)
        lost = gone(parts, asked)
        if lost is not None and not search.is_gone_null:
            require_kept(parts, asked)
        places = np.arange(len(asked.times)) if lost is None else np.flatnonzero(~lost)
        keys = labels.keys if lost is None else labels.keys.take(pa.array(places))
        ordered = in_order(keys, asked.times[places])
        bounds = SearchBounds(search.age_max, search.bytes_max)
        columns = LabelColumns(buffers_of(ordered.keys), ordered.starts.data, ordered.times.data)
        found = parts.versions.get_columns(columns, bounds)
        if parts.committer.frontiers.floor != floor:
            # GC of another process (`kvstore.remote.live`) may have taken some of `found`
            # meanwhile.
            return self.answer(labels, search)
        if found is None:
            return None
        places = places[ordered.places]
        times = np.full(len(asked.times), -1, np.int64)
        times[places] = found.times
        return value_columns(placed(found.values, places, len(times)), times)

    def following(self, labels: Asked, search: Search) -> Numbers:
        """See `StoredVersions`. One seek for each label."""
        parts, asked, is_future = self._parts, *present(labels, search, self.newest)
        asked = within(asked, self._upto)
        checked = Labels(_Keys(asked.keys), asked.times, asked.first)
        floor = parts.committer.frontiers.floor
        checked = require_complete(parts, checked)
        lost = gone(parts, checked)
        if lost is not None and not search.is_gone_null:
            require_kept(parts, checked)
        starts = checked.times + (0 if search.allows_exact else 1)
        upto = self.newest if search.newest is None else min(search.newest, self.newest)
        found = parts.versions.following(asked.keys.to_pylist(), starts.data, upto)
        if parts.committer.frontiers.floor != floor:
            return self.following(labels, search)
        is_none = is_future if lost is None else is_future | lost
        return np.where(is_none, -1, found) if is_none.any() else found

    def first_alive(self, labels: AskedSpans, search: Search) -> RowsFound | None:
        """One seek for each span, and a step for each dead key before its row. A pass over the keys
        where the labels lie closely and ask for one time."""
        labels = within(labels, self._upto)
        floor = self._parts.committer.frontiers.floor
        starts = labels.stems if labels.is_reverse else labels.keys
        asked = require_complete(self._parts, Labels(_Keys(starts), labels.times, labels.first))
        require_kept(self._parts, asked)
        labels = labels._replace(times=asked.times)
        found = self._first_rows(labels, search)
        if self._parts.committer.frontiers.floor != floor:  # another process may collect meanwhile
            require_kept(self._parts, asked)
        return found

    def _first_rows(self, labels: AskedSpans, search: Search) -> RowsFound | None:
        hull = self._hull(labels)
        if hull is not None:
            keys = self._keys_beside(labels, hull)
            return _ordered_rows(self, keys, labels, search)
        found: list[bytes | None] = []
        for first in range(0, len(labels.times), JOIN_ROWS_FIRST):
            found += self._first_keys(labels.part(first, JOIN_ROWS_FIRST))
        return rows_of_keys(self, found, labels.times, labels.first, search)

    def _hull(self, labels: AskedSpans) -> Span | None:
        """Where the answers may lie, if a pass is faster than a seek for each label."""
        times = labels.times
        if len(times) < JOIN_PASS_LABELS_MIN or (times != times[0]).any():
            return None
        ends = (int(labels.ordered[0]), int(labels.ordered[-1]))
        low, high = (labels.part(at, 1).spans() for at in ends)
        span = Span(low[0][0], high[1][0])
        versions = self._parts.versions
        return span if versions.is_dense(span, JOIN_SPAN_FACTOR * len(times)) else None

    def _keys_beside(self, labels: AskedSpans, hull: Span) -> pa.Array:
        """The key that each label has found, or null, in the order of `labels.ordered`."""
        is_behind = labels.is_reverse
        sizes = pc.binary_length(labels.stems).to_numpy()[labels.ordered]
        # In order, for a gather waits less for memory than the loop would.
        asked = labels.keys.take(pa.array(labels.ordered))
        places = Neighbours(buffers_of(asked), sizes.data, is_behind)
        found: list[pa.Array] = []
        last = pa.array([], pa.binary())

        def look(keys: pa.Array, *, is_last: bool = False) -> None:
            rows = np.frombuffer(places.among(buffers_of(keys), is_last), np.int64)
            found.append(keys.take(pa.array(rows, mask=rows < 0)))

        as_of = int(labels.times[0])
        scan = self._parts.versions.scan_columns(hull, as_of, chunk=ARROW_ROWS_MAX, keys_only=True)
        for keys, _ in scan:
            if is_behind:  # the row before those of this chunk may be the answer
                keys = pa.concat_arrays([last, keys])
                last = keys.slice(len(keys) - 1)
            look(keys)
            if places.is_over:
                break
        look(last, is_last=True)
        return pa.concat_arrays(found)

    def _first_keys(self, labels: AskedSpans) -> list[bytes | None]:
        firsts: dict[tuple[bytes, bytes | None, int], bytes | None] = {}
        keys: list[bytes | None] = []
        for asked in zip(*labels.spans(), labels.times.tolist(), strict=True):
            if asked not in firsts:
                start, end, time = asked
                span = Span(start, end)
                firsts[asked] = self._first_key(span, time, reverse=labels.is_reverse)
            keys.append(firsts[asked])
        return keys

    def _first_key(self, span: Span, as_of: int, *, reverse: bool) -> bytes | None:
        found = self._parts.versions.scan(span, as_of, limit=1, reverse=reverse)
        chunk = next(found, None)
        return None if chunk is None else chunk[0][0]


def _ordered_rows(
    answers: Answers, keys: pa.Array, labels: AskedSpans, search: Search
) -> RowsFound | None:
    """As `rows_of_keys`, of keys in the order of `labels.ordered`."""
    there = np.flatnonzero(keys.is_valid().to_numpy(zero_copy_only=False))
    places = labels.ordered[there]
    asked = Asked(keys.drop_null(), labels.times[places], labels.first)
    found = rows_at(answers, asked, search)
    if found is None:
        return None
    written = np.full(len(keys), -1, np.int64)
    written[places] = found.times
    rows, values = (placed(column, places, len(keys)) for column in (found.keys, found.values))
    return RowsFound(rows, values, written)


class _Keys(Sequence[bytes]):
    """An Arrow array of keys, of which an error names one."""

    def __init__(self, keys: pa.Array) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: Any) -> Any:
        return self._keys[at].as_py()


_Labels = TypeVar("_Labels", Asked, AskedSpans)


def present(labels: _Labels, search: Search, newest: int) -> tuple[_Labels, npt.NDArray[np.bool_]]:
    """The labels, those above the newest time at that time if the search takes them so, and which
    ones these are."""
    newest = newest if search.newest is None else search.newest
    is_future: npt.NDArray[np.bool_] = labels.times > newest
    if not search.is_future_newest or not is_future.any():
        return labels, np.zeros(len(labels.times), np.bool_)
    return labels._replace(times=np.where(is_future, newest, labels.times)), is_future


def within(labels: _Labels, upto: int | None) -> _Labels:
    """The labels, if none asks for a time above `upto`. Raises `NotYetWrittenError`."""
    if upto is None:
        return labels
    labels = labels._replace(times=reached_times(labels.times, upto))
    late = np.flatnonzero(labels.times > upto)
    if len(late):
        at = int(late[0])
        key = labels.keys[at].as_py()
        raise NotYetWrittenError(
            as_of=Timestamp(labels.times[at]),
            upper=Timestamp(upto + 1),
            remedy=f"row {labels.first + at}, key {printable(key)}, asks for it: "
            f"the snapshot ends at {Timestamp(upto)}",
        )
    return labels


def rows_of_keys(
    answers: Answers, keys: Sequence[bytes | None], times: Numbers, first: int, search: Search
) -> RowsFound | None:
    """The rows of keys that are alive at their times, where a label has found one. None where
    several rows have too many bytes together."""
    there = np.array([at for at, key in enumerate(keys) if key is not None], np.int64)
    wanted = pa.array([key for key in keys if key is not None], pa.binary())
    found = rows_at(answers, Asked(wanted, times[there], first), search)
    if found is None:
        return None
    written = np.full(len(keys), -1, np.int64)
    written[there] = found.times
    values = placed(found.values, there, len(keys))
    return RowsFound(pa.array(keys, pa.binary()), values, written)


def rows_at(answers: Answers, labels: Asked, search: Search) -> RowsFound | None:
    """The rows of keys. None where several rows have too many bytes together."""
    found = answers.answer(labels, search)
    if found is None:
        return None
    values, times = found
    return RowsFound(labels.keys, values, times.cast(pa.int64()).fill_null(-1).to_numpy())


# --------------------------------------------------------------------------------------------------
# Labels as they arrive: Arrow batches with a column of keys and a column of times.
#
# Labels are anything that speaks the Arrow C stream: tables, batches and readers of pyarrow, frames
# of Polars and pandas, relations of DuckDB.
#
# Invariants
# 1. A column that is missing, doubled or of a wrong type is refused before a row is read.
# 2. A null, a key that is too long and a time out of range are refused by column and row.


class Piece(NamedTuple):
    """Some neighbouring batches of labels. `first` is the row of the first label."""

    batches: list[pa.RecordBatch]
    first: int

    @property
    def rows(self) -> int:
        """The number of labels."""
        return sum(batch.num_rows for batch in self.batches)

    def before(self, rows: int) -> Piece:
        """The first labels of the piece."""
        found, left = [], rows
        for batch in self.batches:
            found.append(batch.slice(0, left))
            left -= found[-1].num_rows
        return Piece(found, self.first)

    def behind(self, rows: int) -> Piece:
        """The piece without its first labels."""
        rest, left = [], rows
        for batch in self.batches:
            rest.append(batch.slice(min(left, batch.num_rows)))
            left -= batch.num_rows - rest[-1].num_rows
        return Piece(rest, self.first + rows)

    def halves(self) -> tuple[Piece, Piece]:
        """The piece in two, of one label at least."""
        middle, at = self.rows // 2, 0
        left: list[pa.RecordBatch] = []
        right: list[pa.RecordBatch] = []
        for batch in self.batches:
            cut = min(max(middle - at, 0), batch.num_rows)
            left.append(batch.slice(0, cut))
            right.append(batch.slice(cut))
            at += batch.num_rows
        return Piece(left, self.first), Piece(right, self.first + middle)


def label_reader(labels: object) -> pa.RecordBatchReader:
    """The batches of `labels`. Raises `UsageError` for what does not speak Arrow."""
    try:
        if isinstance(labels, pa.RecordBatchReader):
            return labels
        if hasattr(labels, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(labels)
        if hasattr(labels, "__arrow_c_array__"):
            batch = pa.record_batch(labels)
            return pa.RecordBatchReader.from_batches(batch.schema, [batch])
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"labels are no table: {error}", "pass a table with columns") from error
    raise UsageError(
        f"labels must be Arrow data, not {type(labels).__name__}",
        "pass a table, a reader, or a frame of Polars, DuckDB or pandas",
    )


def require_columns(
    schema: pa.Schema,
    labels: pa.Schema,
    key: Sequence[str],
    at: str | None,
    added: tuple[str, ...],
) -> None:
    """Raise `UsageError` unless `labels` has the columns of keys and of times, and the columns
    `added` are new to `schema`, which has the columns of the labels and of other sources."""
    for name in (*key, at):
        count = 1 if name is None else labels.names.count(name)
        if count != 1:
            problem = f"{count} columns" if count else "no column"
            raise UsageError(
                f"labels have {problem} {name!r}", f"they have {', '.join(labels.names)}"
            )
    for name in added:
        if name in schema.names:
            whose = "labels have" if name in labels.names else "two sources add"
            raise UsageError(
                f"{whose} a column {name!r} already",
                "name the columns of the result: columns=(value, timestamp), or a prefix=",
            )
    if at is not None:
        require_time_type(labels.field(at))


def column_names(name: str, given: object) -> tuple[str, ...]:
    """The names of columns that the argument `name` has: one, or several."""
    if not isinstance(given, tuple | list):
        return (COLUMN.check(name, given),)
    return tuple(COLUMN.check(name, each) for each in given)


class Pieces:
    """The labels of a reader in pieces of bounded rows and bytes."""

    def __init__(
        self,
        reader: pa.RecordBatchReader,
        rows_first: int,
        rows_most: int,
        first: int = 0,
        bytes_max: int | None = None,
    ) -> None:
        """The first piece has `rows_first` labels at most, a later one `rows_most`. The first label
        is row `first` for its caller. The values of a piece may have `bytes_max` bytes, by default
        `JOIN_VALUE_BYTES_MAX`."""
        self._bytes_max = JOIN_VALUE_BYTES_MAX if bytes_max is None else bytes_max
        self._reader, self._first = reader, first
        self._rows_most = rows_most
        self._rows_max = min(rows_first, rows_most)

    def learn(self, rows: int, size: int) -> None:
        """Note that the values of `rows` labels have `size` bytes. The next pieces have so few
        labels that their values take about half of the allowed bytes, and at most sixteen times
        as many: halving a piece whose values are larger answers its labels again. Each piece passes
        over the versions once."""
        fitting = rows * self._bytes_max // (2 * max(size, 1))
        self._rows_max = max(min(fitting, 16 * rows, self._rows_most), 1)

    def __iter__(self) -> Iterator[Piece]:
        batches: list[pa.RecordBatch] = []
        first, rows, size = self._first, 0, 0
        for arrived in self._reader:
            at = 0
            while at < arrived.num_rows:
                batch = arrived.slice(at, self._rows_max - rows)
                nbytes = batch_bytes(batch)
                while nbytes > JOIN_LABEL_BYTES_MAX and batch.num_rows > 1:
                    batch = batch.slice(0, batch.num_rows // 2)
                    nbytes = batch_bytes(batch)
                at += batch.num_rows
                rows += batch.num_rows
                size += nbytes
                batches.append(batch)
                if rows >= self._rows_max or size >= JOIN_LABEL_BYTES_MAX:
                    yield Piece(batches, first)
                    first, batches, rows, size = first + rows, [], 0, 0
        if rows:
            yield Piece(batches, first)


class WholeLabels(NamedTuple):
    """Labels of a piece, and the columns by which they ask, where each null has the values of the
    label before it: no label asks for more than its neighbour. `is_whole` tells the labels without
    a null, None if all are; `asked` is None if none is."""

    piece: Piece
    asked: Piece | None
    is_whole: npt.NDArray[np.bool_] | None

    def halves(self) -> Iterator[WholeLabels]:
        """The labels in two, of one label at least."""
        assert self.asked is not None, "there is a label that asks"
        middle = self.piece.rows // 2
        cut = [None, None] if self.is_whole is None else np.split(self.is_whole, [middle])
        halves = zip(self.piece.halves(), self.asked.halves(), cut, strict=True)
        return (WholeLabels(*half) for half in halves)

    def beside(self, added: list[pa.Array] | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The labels with the columns that answer them, which are null where a label has a
        null."""
        if added is None:
            width = len(self.piece.batches[0].schema)
            added = [pa.nulls(self.piece.rows, field.type) for field in list(schema)[width:]]
        elif self.is_whole is not None:
            added = nulled(added, self.is_whole)
        first = 0
        for batch in self.piece.batches:
            columns = [column.slice(first, batch.num_rows) for column in added]
            first += batch.num_rows
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema)


def whole_labels(piece: Piece, names: Sequence[str] | None) -> Iterator[WholeLabels]:
    """The labels of a piece, in parts: those before the first label without a null in the columns
    `names`, which ask for nothing, and the others. Without `names` all labels ask."""
    if names is None:
        yield WholeLabels(piece, piece, None)
        return
    validity = [[_is_there(batch.column(name)) for batch in piece.batches] for name in names]
    is_whole = np.logical_and.reduce([np.concatenate(each) for each in validity])
    if is_whole.all():
        yield WholeLabels(piece, piece, None)
        return
    first = int(np.argmax(is_whole)) if is_whole.any() else len(is_whole)
    if first:
        yield WholeLabels(piece.before(first), None, None)
        piece, is_whole = piece.behind(first), is_whole[first:]
    if not len(is_whole):
        return
    columns = [[batch.column(name) for batch in piece.batches] for name in names]
    shown = sum(_shown(column) for each in columns for column in each)
    if shown > JOIN_LABEL_BYTES_MAX and piece.rows > 1:
        # A dictionary or a view may show the same bytes in many rows.
        for half in piece.halves():
            yield from whole_labels(half, names)
        return
    sources = np.maximum.accumulate(np.where(is_whole, np.arange(len(is_whole)), 0))
    filled = [
        pa.concat_arrays([plain(column, name) for column in each]).take(pa.array(sources))
        for each, name in zip(columns, names, strict=True)
    ]
    asked = pa.RecordBatch.from_arrays(filled, names=list(names))
    yield WholeLabels(piece, Piece([asked], piece.first), is_whole)


def _shown(column: pa.Array) -> int:
    """The bytes of a column whose rows may share them, 0 for another column."""
    values = column.dictionary if pa.types.is_dictionary(column.type) else column
    is_view = pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type)
    is_shared = is_view or (values is not column and values.type in _TEXTS)
    return shown_bytes(column) if is_shared else 0


_TEXTS: Final = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _is_there(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Which values of a column are not null. A dictionary may have a null as well."""
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    valid = column.is_valid()
    if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
        valid = column.dictionary.is_valid().take(column.indices).fill_null(False)
    found: npt.NDArray[np.bool_] = valid.to_numpy(zero_copy_only=False)
    return found


def keys_of(piece: Piece, name: str) -> pa.Array | None:
    """The column `name` of a piece as one binary array without nulls. None where several keys have
    too many bytes together: a dictionary or a view may show the same bytes in many rows."""
    columns = [batch.column(name) for batch in piece.batches]
    if piece.rows > 1 and sum(map(shown_bytes, columns)) > JOIN_LABEL_BYTES_MAX:
        return None
    arrays, first = [], piece.first
    for batch in piece.batches:
        arrays.append(key_column(batch.column(name), name, first))
        first += batch.num_rows
    return pa.concat_arrays(arrays)


def times_of_labels(piece: Piece, name: str, now: Callable[[], int]) -> Numbers:
    """The column `name` of a piece as nanoseconds. `now` is the newest time of the sources."""
    times, first = [], piece.first
    for batch in piece.batches:
        times.append(time_column(batch.column(name), name, first, now))
        first += batch.num_rows
    return np.concatenate(times)


# --------------------------------------------------------------------------------------------------
# The side of a join that a table answers: typed columns of the rows that labels ask for.
#
#     kvstore.join(labels, [kvstore.Join(users, key="user_id", prefix="user_"), sessions])
#
# The store looks labels up by the encoded keys of their rows, in this process or behind a server
# (`kvstore.remote.client.tables`). Then the rows are decoded together.
#
# Invariants
# 1. The key of a label is encoded as the key of a row is. A value that the table's key cannot hold
#    is refused by column and row.
# 2. A row is read by the definition of the moment at which the join was called.

ROW_TIMESTAMP: Final = "row_timestamp"


class TableSide:
    """The side of a table: the keys of its rows are made of columns of the labels, and it has
    columns to choose from. Raises `UsageError` for a table with an event time."""

    def __init__(
        self, stored: Side, codec: TableCodec, columns: Sequence[str] | None = None
    ) -> None:
        """`stored` answers with the values of keys."""
        definition = codec.definition
        if definition.has_event_time:
            raise UsageError(
                f"{definition.where} has an event time, which a join at one time does not look at",
                "join it by Table.join",
            )
        key = {column.name for column in definition.key_columns}
        names = [column.name for column in definition.columns if column.name not in key]
        self._stored, self._codec = stored, codec
        self._columns = names if columns is None else list(columns)
        self.fields = (*codec.schema_of(self._columns), pa.field(ROW_TIMESTAMP, TIME_TYPE))

    def choose(self, columns: Sequence[str]) -> TableSide:
        """The side with these columns of the table."""
        self._require_once(columns)
        return TableSide(self._stored, self._codec, columns)

    @property
    def name(self) -> str:
        """The name of the table."""
        return self._codec.definition.name

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the table's key."""
        return tuple(column.name for column in self._codec.definition.key_columns)

    def keys(self, piece: Piece, names: tuple[str, ...]) -> pa.Array:
        """The keys of the rows that labels ask for. `names` are columns of the labels."""
        key_columns = self._codec.definition.key_columns
        columns = {
            column.name: key_values(piece.batches, piece.first, name, column.type)
            for name, column in zip(names, key_columns, strict=True)
        }
        return self._codec.key.keys(pa.RecordBatch.from_pydict(columns))

    @contextmanager
    def opened(self) -> Iterator[TableAnswers]:
        """Hold the history that is kept."""
        self._require_once(self._columns)
        with self._stored.opened() as answers:
            yield TableAnswers(answers, self._codec, self._columns)

    def _require_once(self, columns: Sequence[str]) -> None:
        if ROW_TIMESTAMP in columns:  # of a forged definition
            raise two_named(self._codec.definition, ROW_TIMESTAMP)


class TableAnswers:
    """See `Answers`."""

    def __init__(self, stored: Answers, codec: TableCodec, columns: list[str]) -> None:
        self._stored, self._codec, self._columns = stored, codec, columns
        self.rows_first, self.rows_max = stored.rows_first, stored.rows_max

    @property
    def newest(self) -> int:
        """The newest complete time."""
        return self._stored.newest

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The columns of the rows, and the timestamps of their versions."""
        found = self._stored.answer(labels, search)
        if found is None:
            return None
        values, times = found
        alive = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        rows = pa.array(alive)
        decoded = self._codec.decode(labels.keys.take(rows), values.take(rows), self._columns)
        sources = np.full(len(values), -1, np.int64)
        sources[alive] = np.arange(len(alive))
        taken = pa.array(sources, mask=sources < 0)
        return [*(column.take(taken) for column in decoded.columns), times]


# --------------------------------------------------------------------------------------------------
# Point-in-time joins: Arrow batches of labels, with the values that keys had at their times.
#
# The labels stream through in pieces. Each `Side` of the join answers a piece, and its columns are
# put beside the columns of the labels.
#
# Invariants
# 1. Each label comes out once, in its place, with all its columns.
# 2. A label gets the value of the newest version at or below its time: see
#    `kvstore.mvcc.key_history`.
# 3. Each side keeps its history from the call until the end of the result.
# 4. Memory is bounded by the limits of a piece. A piece whose values are too large is halved.

OnGone: TypeAlias = Literal["error", "null"]
ON_GONE: Final[ArgumentKind[OnGone]] = word("error", "null", hint="pass 'error' or 'null'")
OnNull: TypeAlias = Literal["error", "null"]
ON_NULL: Final[ArgumentKind[OnNull]] = word("error", "null", hint="pass 'error' or 'null'")
OnFuture: TypeAlias = Literal["error", "newest"]
ON_FUTURE: Final[ArgumentKind[OnFuture]] = word("error", "newest", hint="pass 'error' or 'newest'")
AS_OF: Final = "as_of"
"""The column that tells as of which time a label was answered, where labels may lie above the
newest time."""
PREFIX: Final = instance(str, hint="pass text to stand before the names")


class _Part(NamedTuple):
    """One side of a join, with the columns of its keys and the names of the columns that it
    adds."""

    side: Side | TableSide
    key: tuple[str, ...]
    names: tuple[str, ...]
    search: Search


class _Plan(NamedTuple):
    """A join whose arguments and columns are checked. `newest` is the time above which nothing
    counts, None for the newest time of each side at the call."""

    parts: list[_Part]
    at: str | None
    schema: pa.Schema
    newest: int | None
    is_future_newest: bool
    is_null_null: bool

    @property
    def asked(self) -> list[str]:
        """The columns of the labels with their keys and times."""
        keys = (name for part in self.parts for name in part.key)
        return list(dict.fromkeys([*keys, *([] if self.at is None else [self.at])]))


class _Opened(NamedTuple):
    part: _Part
    answers: Answers


def join(
    labels: object,
    joins: Sequence[Join],
    *,
    key: str = "id",
    at: str | None = "ts",
    on_gone: OnGone = "error",
    on_future: OnFuture = "error",
    on_null: OnNull = "error",
) -> pa.RecordBatchReader:
    """The labels, each with the values that its keys had at its time in each of several sources.

    The labels are read once, and the columns of the sources stand side by side, in the order of
    `joins`. Each of `joins` is a `Join`, or a source alone: a store, a snapshot, a collection or a
    table. Arguments, columns, errors and memory
    are as in `Store.join`; a name that two sources add is refused. With `on_future="newest"` the
    newest time is the one that all sources have reached.
    """
    on: dict[str, Any] = {"on_gone": on_gone, "on_future": on_future, "on_null": on_null}
    return join_up_to(None, labels, joins, key=key, at=at, **on)


def join_up_to(
    newest: int | None,
    labels: object,
    joins: Sequence[Join],
    *,
    key: str,
    at: str | None,
    on_gone: OnGone,
    on_future: OnFuture,
    on_null: OnNull,
) -> pa.RecordBatchReader:
    """As `join`, of sources whose versions above `newest` do not count."""
    ON_GONE.check("on_gone", on_gone)
    ON_FUTURE.check("on_future", on_future)
    ON_NULL.check("on_null", on_null)
    if not isinstance(joins, Sequence) or not joins:
        raise UsageError("there is no source to join", "pass a list of stores or of kvstore.Join")
    parts = [_part(each, key, on_gone == "null") for each in joins]
    if at is not None:
        COLUMN.check("at", at)
    reader = label_reader(labels)
    schema = reader.schema
    for part in parts:
        require_columns(schema, reader.schema, part.key, at, part.names)
        if not isinstance(part.side, TableSide):
            require_bytes_type(reader.schema.field(part.key[0]))
        for field, name in zip(part.side.fields, part.names, strict=True):
            schema = schema.append(field.with_name(name))
    if on_future == "newest":
        schema = with_as_of(schema, reader.schema, "")
    how = newest, on_future == "newest", on_null == "null"
    batches = _joined(reader, _Plan(parts, at, schema, *how))
    next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


def with_as_of(schema: pa.Schema, labels: pa.Schema, prefix: str) -> pa.Schema:
    """The schema of a result with the column `AS_OF`. Raises `UsageError` if it is there."""
    if prefix + AS_OF in schema.names:
        whose = "labels have" if prefix + AS_OF in labels.names else "a source adds"
        raise UsageError(
            f"{whose} a column {prefix + AS_OF!r} already, which on_future='newest' adds",
            "rename the column",
        )
    return schema.append(pa.field(prefix + AS_OF, TIME_TYPE))


def _part(given: Join, key: str, is_gone_null: bool) -> _Part:
    each = given if isinstance(given, Join) else Join(given)
    if not hasattr(each.source, "join_side"):
        raise UsageError(
            f"a source of a join must be a store, not {type(each.source).__name__}",
            "pass stores, snapshots, collections or tables, or kvstore.Join of them",
        )
    age = age_of(each.max_age, each.tolerance)
    search = Search(
        age_in_ns(age),
        is_gone_null,
        JOIN_VALUE_BYTES_MAX,
        DIRECTION.check("direction", each.direction),
        FLAG.check("allow_exact", each.allow_exact),
    )
    side = each.source.join_side()
    if isinstance(side, TableSide):
        side = side if each.columns is None else side.choose(column_names("columns", each.columns))
        own = [field.name for field in side.fields]
        if not each.prefix:
            own[-1] = f"{side.name}_{own[-1]}"
        asked = column_names("key", side.key if each.key is None else each.key)
        if len(asked) != len(side.key):
            raise UsageError(
                f"key={asked!r} for a key of {len(side.key)} columns",
                f"name the labels' columns of {', '.join(side.key)}",
            )
        return _Part(side, asked, _names(each, own, own), search)
    asked = column_names("key", [key if each.key is None else each.key])
    names = _names(each, each.columns, [field.name for field in side.fields])
    return _Part(side, asked, names, search)


def _names(join: Join, chosen: Sequence[str] | None, fields: list[str]) -> tuple[str, ...]:
    """The names that the columns `fields` of a source have in the result."""
    names = fields if chosen is None else chosen
    PREFIX.check("prefix", join.prefix)
    if (
        not isinstance(names, tuple | list)
        or len(names) != len(fields)
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < len(names)
    ):
        raise UsageError(
            Argument.of("columns", names), "pass two names: of the value and of its timestamp"
        )
    return tuple(join.prefix + name for name in names)


def _joined(reader: pa.RecordBatchReader, plan: _Plan) -> Iterator[pa.RecordBatch]:
    with ExitStack() as held:
        opened = [_Opened(part, held.enter_context(part.side.opened())) for part in plan.parts]
        every = [each.answers for each in opened]
        if plan.newest is None and plan.is_future_newest:
            plan = plan._replace(newest=min(each.newest for each in every))
        elif plan.at is None or any(not part.search.is_plain for part in plan.parts):
            for each in every:
                _ = each.newest  # the time of the call is the time of labels, or their bound
        # A batch without columns first: taking it holds the history, within the call.
        yield pa.record_batch([], names=[])
        pieces = Pieces(reader, min(a.rows_first for a in every), min(a.rows_max for a in every))
        for piece in pieces:
            size = 0
            for whole in whole_labels(piece, plan.asked if plan.is_null_null else None):
                for batch in _answered(opened, whole, plan):
                    size += sum(
                        batch.column(name).nbytes for part in plan.parts for name in part.names[:-1]
                    )
                    yield batch
            pieces.learn(piece.rows, size)


def _answered(opened: list[_Opened], labels: WholeLabels, plan: _Plan) -> Iterator[pa.RecordBatch]:
    """The batches of a piece with the columns of all sides."""
    columns = None if labels.asked is None else _columns(opened, labels.asked, plan)
    if columns is None and labels.asked is not None:
        for half in labels.halves():
            yield from _answered(opened, half, plan)
        return
    yield from labels.beside(columns, plan.schema)


def _newest(opened: list[_Opened]) -> int:
    return max(each.answers.newest for each in opened)


def _columns(opened: list[_Opened], piece: Piece, plan: _Plan) -> list[pa.Array] | None:
    times = None
    if plan.at is not None:
        times = times_of_labels(piece, plan.at, partial(_newest, opened))
    elif plan.newest is not None:
        times = everywhere(plan.newest, piece.rows)
    keys: dict[str, pa.Array] = {}  # of stores: tables encode theirs
    columns: list[pa.Array] = []
    for part, answers in opened:
        if isinstance(part.side, TableSide):
            asked = part.side.keys(piece, part.key)
        elif (asked := keys.get(part.key[0])) is None:
            asked = keys_of(piece, part.key[0])
            if asked is None:
                return None
            keys[part.key[0]] = asked
        asked_at = everywhere(answers.newest, piece.rows) if times is None else times
        search = part.search
        if plan.newest is not None:
            search = search._replace(newest=plan.newest, is_future_newest=plan.is_future_newest)
        found = answers.answer(Asked(asked, asked_at, piece.first), search)
        if found is None:
            return None
        columns += found
    if plan.is_future_newest:
        assert times is not None, "the labels have times"
        assert plan.newest is not None, "the join has a newest time"
        columns.append(pa.array(np.minimum(times, plan.newest)).cast(TIME_TYPE))
    return columns
