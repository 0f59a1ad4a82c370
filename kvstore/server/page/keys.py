"""The keys of a store by prefix, a page at a time, as folders or as a plain list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstore.browsing import Excerpt, KeyPage
from kvstore.limits import BROWSE_KEY_BYTES_MAX, BROWSE_ROWS_MAX
from kvstore.server.page.blocks import Cell, Field, Grid, PageBlock, PageView, SearchForm, Text
from kvstore.server.page.call import SHOWN_CHARS, PageRequest
from kvstore.server.page.notation import hex_lines, is_text, shortened, size, to_notation
from kvstore.server.page.section import Section
from kvstore.span import prefix_end

FOLDS: Final = {"/": b"/", ":": b":", "none": None}
_FOLD_TEXTS: Final = (("/", "folders at /"), ("\N{COLON}", "folders at :"), ("none", "plain list"))


def keys(call: PageRequest) -> PageView:
    """The live keys below a prefix, at the time of the page."""
    prefix, after = call.raw("prefix"), call.raw("after")
    fold = call.choice("fold", FOLDS, "/")
    page = call.store.browsing.keys(
        call.span(prefix, after),
        call.as_of,
        limit=BROWSE_ROWS_MAX,
        below=call.access.prefix if len(call.access.prefix) > len(prefix) else prefix,
        delimiter=FOLDS[fold],
    )
    search = SearchForm(
        "keys",
        (
            Field("prefix", "Keys that begin with", to_notation(prefix)),
            Field("fold", "Shown as", fold, _FOLD_TEXTS),
        ),
        "Browse",
        {"at": call.at_text} if call.at_text else {},
    )
    shown = to_notation(prefix[:200]) if prefix else ""
    title = f"Keys below {shown}" if shown else "Keys"
    return PageView(title, [search, *_grid(call, page, prefix, fold)])


def _grid(call: PageRequest, page: KeyPage, prefix: bytes, fold: str) -> Iterator[PageBlock]:
    rows = []
    for key, value in page.rows:
        if value is None:
            folder = call.key_cell(key, "keys", prefix=key, fold=fold.encode())
            rows.append([folder, Cell("folder"), Cell("")])
        else:
            rows.append([call.key_cell(key), preview(value), Cell(size(value.size))])
    yield Grid(
        "Rows at this time",
        ("Key", "Value", "Size"),
        rows,
        empty="No key at this time. Another prefix, or a later time, may have some.",
        more=_more(call, page.next, prefix, fold),
        numbers=frozenset({2}),
    )
    if page.is_cut:
        yield Text(
            "Many deleted keys, or large values, lie here. The page stopped at its bound and the "
            "next page continues behind it.",
            is_warning=True,
        )


def _more(call: PageRequest, following: bytes | None, prefix: bytes, fold: str) -> str:
    if following is not None and len(following) > BROWSE_KEY_BYTES_MAX:
        # An address cannot carry it: the next page begins behind all keys that share its beginning.
        following = prefix_end(following[:BROWSE_KEY_BYTES_MAX])
    if following is None:
        return ""
    return call.link("keys", prefix=prefix, after=following, fold=fold)


def preview(value: Excerpt) -> Cell:
    """The beginning of a value, on one line."""
    head = value.head[: SHOWN_CHARS * 4]
    if is_text(head):
        return Cell(shortened(to_notation(head), SHOWN_CHARS), is_code=True)
    return Cell(hex_lines(head[:16])[0][10:57].strip(), note="not text", is_code=True)


KEYS: Final = Section("keys", "Keys", keys, is_whole=False)
