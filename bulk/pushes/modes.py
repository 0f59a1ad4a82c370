"""The mode of a push: what it does to keys that it lacks, and to writes that came after its build.

    "mode": "add" | "replace" | "change", "spans": [[start hex, end hex | null], ...],
    "built_at": ns | null

A push that adds writes its rows over older ones. A push that replaces is the new whole of `spans`:
each key there that it lacks is deleted, at the stamp of its rows. With `built_at` it leaves alone
each key that was written after that time, by anything but a push. A push that changes deletes the
keys of `spans` that it lacks, as a change feed with range deletes asks for, and its rows lie
anywhere.

Invariants
1. A push that replaces has spans, and all its rows lie in them. A push that changes has spans. A
   push that adds has none.
2. A span has plain keys only, or keys of tables only: no push deletes the records of a store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from bulk.manifest import Manifest
from kvstore.clock import Clock
from kvstore.codec.json import JsonObject
from kvstore.errors import UsageError, printable
from kvstore.meta import optional_timestamp_of, span_of
from kvstore.mvcc.expiry import EXPIRY
from kvstore.reserve import FIRST_ROW
from kvstore.span import RESERVED, Span, merge_spans
from kvstore.tables import TableCodec
from kvstore.tables.space import table_prefix
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp

ModeName: TypeAlias = Literal["add", "replace"]
ADD: Final = "add"
REPLACE: Final = "replace"
CHANGE: Final = "change"
SPANS_MAX: Final = 1_000
"""Spans of one push: the entry of the log stays small, and each span is a scan on each store."""


class PushMode(NamedTuple):
    """How a push meets older and newer rows. The default writes over all of them."""

    name: str = ADD
    spans: tuple[Span, ...] = ()
    built_at: Timestamp | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the push only writes its rows."""
        return self.name == ADD and self.built_at is None

    def fields(self) -> dict[str, Any]:
        """The fields of the event of a push with this mode."""
        spans = [[each.start.hex(), each.end and each.end.hex()] for each in self.spans]
        return {"mode": self.name, "spans": spans, "built_at": self.built_at}

    def require_rows(self, manifests: Iterable[Manifest]) -> None:
        """Raise `UsageError` unless all rows lie where the push may write."""
        if self.name != REPLACE:
            return
        for part in (part for each in manifests for part in each.parts):
            if part.smallest.startswith(EXPIRY):
                continue  # the keys that expire are rows of another part
            if not any(part.smallest in span and part.largest in span for span in self.spans):
                raise UsageError(
                    f"rows from {printable(part.smallest)} to {printable(part.largest)} lie "
                    "outside of the span that the push replaces",
                    "push them by another push, or replace a longer span",
                )

    def require_tables(self, codecs: Iterable[TableCodec]) -> None:
        """Raise `UsageError` unless the spans of tables belong to the tables of the push."""
        own = []
        for codec in codecs:
            require_keeping(codec, self.built_at)
            own.append(Span.of_prefix(table_prefix(codec.definition.number)))
        if any(span.start >= FIRST_ROW and span not in own for span in self.spans):
            raise UsageError(
                "the push replaces a table of which it has no rows", "push its rows by table="
            )


PLAIN: Final = PushMode()
"""The mode of a push that only writes its rows."""


def mode_of(
    mode: ModeName,
    prefix: bytes | None,
    codec: TableCodec | None = None,
    *,
    keep_newer: bool,
    built_at: TimeLike | None,
) -> PushMode:
    """The mode that the arguments of a caller describe. A push of a table replaces its keys: the
    rows, and the entries of its indexes. Raises `UsageError`."""
    if mode not in (ADD, REPLACE):
        raise UsageError(f"mode={mode!r}", 'pass "add" or "replace"')
    if codec is not None:
        if prefix is not None:
            raise UsageError(f"prefix={prefix!r} with a table", "leave it out")
        prefix = table_prefix(codec.definition.number) if mode == REPLACE else None
        require_keeping(codec, built_at)
    if (mode == REPLACE) != (prefix is not None):
        raise UsageError(
            f"mode={mode!r} with prefix={prefix!r}",
            'pass mode="replace" and the prefix of the keys that the push replaces; prefix=b"" is '
            "every key",
        )
    if keep_newer != (built_at is not None):
        raise UsageError(
            f"keep_newer={keep_newer!r} with built_at={built_at!r}",
            "pass both: built_at is the time at which the job read the data that it pushes",
        )
    spans = () if prefix is None else (Span.of_prefix(prefix).plain(),)
    _require_own(spans)
    return PushMode(mode, spans, None if built_at is None else _instant(built_at))


def mode_of_changes(cleared: Iterable[tuple[bytes, bytes]]) -> PushMode:
    """The mode of a push that clears these ranges before it writes. Raises `UsageError`."""
    try:
        ranges = [(start, end) for start, end in cleared if start < end]
    except (TypeError, ValueError) as error:
        raise UsageError(f"the cleared ranges: {error}", "pass pairs of two keys") from error
    spans = tuple(merge_spans(Span(start, end) for start, end in ranges))
    if len(spans) > SPANS_MAX:
        raise UsageError(
            f"the changes clear {len(spans):,} ranges of keys, and a push at most {SPANS_MAX:,}",
            "push the changes of a shorter window",
        )
    _require_own(spans)
    return PushMode(CHANGE, spans) if spans else PLAIN


def require_keeping(codec: TableCodec, built_at: object) -> None:
    """Raise `UsageError` for a push that keeps newer rows of a table with a unique index. A row
    that is kept may have the values of a row of the push, and nothing compares the two."""
    for index in codec.definition.indexes:
        if built_at is not None and index.is_unique:
            raise UsageError(
                f"keep_newer for {codec.definition.where}, whose index {index.name!r} is unique",
                "leave out keep_newer, or drop the index",
            )


def read_mode(found: JsonObject) -> PushMode:
    """The mode of the event of a push. Raises `CorruptionError`."""
    name, spans = found.text("mode"), found.items_of("spans", list)
    if name not in (ADD, REPLACE, CHANGE) or (name != ADD) != bool(spans):
        raise found.damaged(f"mode {name[:40]!a} has {len(spans)} spans")
    if any(len(bounds) != 2 for bounds in spans):
        raise found.damaged("a span has two bounds")
    read = tuple(span_of(found, start, end) for start, end in spans)
    try:
        _require_own(read)
    except UsageError as error:
        raise found.damaged(error.what) from error
    return PushMode(name, read, optional_timestamp_of(found, "built_at"))


def _require_own(spans: Iterable[Span]) -> None:
    for span in spans:
        is_plain = span.end is not None and span.end <= RESERVED
        if not is_plain and span.start < FIRST_ROW:
            raise UsageError(
                f"a push cannot replace keys from {printable(span.start)} on",
                "a prefix of plain keys does not begin with nine bytes ff",
            )


def _instant(built_at: TimeLike) -> Timestamp:
    now = Clock().wall_ns
    found = to_timestamp(built_at, name="built_at", now=now)
    if found > now():
        raise UsageError(f"built_at={found} lies in the future", "pass the time of the build")
    return found
