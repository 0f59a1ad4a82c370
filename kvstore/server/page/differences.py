"""The differences of two versions of a value, as lines."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence

from kvstore.browsing import Excerpt
from kvstore.limits import PAGE_DIFFERENCE_LINES_MAX
from kvstore.server.page.notation import hex_lines, is_text, shortened, size, to_notation

_LINE_CHARS = 400


def value_lines(value: Excerpt | None) -> list[str]:
    """A value as lines that a person reads: JSON laid out, other text as it is, other bytes in
    hexadecimal. The lines of a value that is shown in part say so."""
    if value is None:
        return []
    lines = _lines(value)
    if not value.is_whole:
        lines.append(f"(the first {size(len(value.head))} of {size(value.size)})")
    elif len(lines) > PAGE_DIFFERENCE_LINES_MAX:
        rest = len(lines) - PAGE_DIFFERENCE_LINES_MAX
        lines[PAGE_DIFFERENCE_LINES_MAX:] = [f"(and {rest:,} more lines)"]
    return lines


def _lines(value: Excerpt) -> list[str]:
    if not is_text(value.head):
        return hex_lines(value.head[:1024])
    if value.is_whole and value.head[:1] in (b"{", b"["):
        laid_out = _json_lines(value.head)
        if laid_out is not None:
            return laid_out
    text = to_notation(value.head, keeps="\n\t\\")
    return [shortened(line, _LINE_CHARS) for line in text.split("\n")]


def _json_lines(raw: bytes) -> list[str] | None:
    try:
        text = json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    shown = to_notation(text.encode("utf-8", "surrogatepass"), keeps="\n\\")
    return [shortened(line, _LINE_CHARS) for line in shown.split("\n")]


def differences(older: Excerpt | None, newer: Excerpt | None) -> Sequence[str]:
    """The lines that differ, with a sign before each: `-` as it was, `+` as it is. None differ
    where both show the same."""
    before = value_lines(older)[: PAGE_DIFFERENCE_LINES_MAX + 1]
    after = value_lines(newer)[: PAGE_DIFFERENCE_LINES_MAX + 1]
    found = difflib.unified_diff(before, after, lineterm="", n=1)
    return [line for line in found if not line.startswith(("---", "+++"))]
