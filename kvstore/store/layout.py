"""Where the keys of a store lie: its files, and spans of about equal size for work in parallel."""

from __future__ import annotations

from kvstore.arguments import require_count, require_span
from kvstore.engine import Engine, FileSpan
from kvstore.limits import SCAN_PIECES_MAX
from kvstore.reserve import Reserve
from kvstore.span import Span
from kvstore.splits import split_span, user_spans


class Layout:
    """The layout of the keys of one store. Reads the bounds of the files, never a row."""

    def __init__(self, engine: Engine, reserve: Reserve) -> None:
        self._engine, self._reserve = engine, reserve

    def require_importable(self, span: Span, *, is_encoded: bool, has_expiries: bool) -> None:
        """Raise `UsageError` unless an import may bring keys of `span`: plain keys, or rows and
        entries of tables that the store has. `is_encoded` tells that the import names the
        definitions that encoded its rows, `has_expiries` that it has records of expiries."""
        self._reserve.require_importable(span, is_encoded=is_encoded, has_expiries=has_expiries)

    def files(self) -> list[FileSpan]:
        """The files that hold versions, by the user keys they lie between."""
        return list(user_spans(self._engine.files()))

    def splits(
        self, count: int, span: Span | None = None, *, with_tables: bool = False
    ) -> list[Span]:
        """Cut `span` (default: all keys) into at most `count` pieces of about equal size.

        As a scan does, the pieces leave out the keys of tables unless the span begins among them,
        or `with_tables` is set. Rows that are not on file yet do not count.
        """
        require_count(count, name="count", most=SCAN_PIECES_MAX)
        span = require_span(span)
        return split_span(span if with_tables else self._reserve.narrow(span), self.files(), count)
