"""Output of commands: results on stdout, for people or as JSON; progress on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import typer

from kvstore.base.meters import WorkCount

if TYPE_CHECKING:
    from rich.status import Status

_status: Status | None = None
"""The progress that is on the terminal."""


def print_json(fields: Mapping[str, Any]) -> None:
    """One object, one line, always UTF-8. Other bytes (of a path, say) are escaped."""
    text = json.dumps(fields, ensure_ascii=False)
    _write(text.encode("utf-8", "backslashreplace") + b"\n")


def print_line(text: str) -> None:
    """Print one line of a result."""
    _write(text.encode("utf-8", "surrogateescape") + b"\n")


def print_lines(lines: Iterable[str], limit: int | None = None) -> None:
    """Print lines of a result, at most `limit`."""
    for line in islice(lines, limit):
        print_line(line)


def print_raw(raw: bytes, *, newline: bool) -> None:
    """Print bytes unchanged."""
    _write(raw + b"\n" if newline else raw)


def _write(raw: bytes) -> None:
    if _status is None:
        sys.stdout.buffer.write(raw)
        return
    _status.stop()  # otherwise the result would stand in the line of the progress
    sys.stdout.buffer.write(raw)
    sys.stdout.flush()
    _status.start()


def in_one_line(text: str) -> str:
    """`text` in one line, without characters that change a terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def print_figures(fields: Mapping[str, Any], *, as_json: bool) -> None:
    """Print named figures: as JSON, or one line each."""
    if as_json:
        print_json(fields)
        return
    width = max(map(len, fields), default=0)
    lines = []
    for name, figure in fields.items():
        is_number = isinstance(figure, int) and not isinstance(figure, bool)
        fact = f"{figure:,}" if is_number else shown(figure)
        lines.append(f"{name:<{width}}  {in_one_line(fact)}")
    if lines:
        print_line("\n".join(lines))


def size_text(size: int) -> str:
    """A number of bytes for people: three digits, and a unit of powers of 1,000."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def age_text(seconds: float) -> str:
    """A duration for people, in its largest unit."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table as wide as the terminal; without a terminal, as wide as its contents."""
    shown_rows = [[in_one_line(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        _print_columns([columns, *shown_rows])
        return
    from rich.console import Console  # takes 60 ms, and a pipe needs no colours
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row in shown_rows:
        table.add_row(*map(Text, row))  # plain text: an error in brackets is no markup
    Console(file=sys.stdout, highlight=False).print(table)


def _print_columns(rows: list[list[str]]) -> None:
    widths = [max(map(_cells, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (
            cell + " " * (width - _cells(cell)) for cell, width in zip(row, widths, strict=True)
        )
        print_line("  ".join(padded).rstrip())


def _cells(text: str) -> int:
    """The columns of a terminal that `text` takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(each) else 2 if east_asian_width(each) in ("W", "F") else 1 for each in text
    )


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show the work under way on a terminal, until it ends. Yields a function that shows more."""
    global _status
    if quiet or not _is_shown():
        yield lambda progress: None
        return
    from rich.console import Console  # see `print_table`
    from rich.text import Text

    console = Console(stderr=True)

    def line(text: str) -> Text:
        shown = Text(text)
        shown.truncate(console.width - 2, overflow="ellipsis")  # beside the spinner, in one line
        return shown

    with console.status(line(what)) as status:
        _status = status
        try:
            yield lambda progress: status.update(line(f"{what}: {progress}"))
        finally:
            _status = None


def _is_shown() -> bool:
    """Whether progress is shown. `FORCE_COLOR` stands for a terminal, as rich takes it."""
    return sys.stderr.isatty() or bool(os.environ.get("FORCE_COLOR"))


def counting(
    progress: Callable[[str], None],
    what: str,
    total: int | None = None,
    *,
    is_about: bool = False,
    seconds: Callable[[], float] = time.monotonic,
) -> Callable[[int], None]:
    """Show a count of `what` and its rate; where the `total` is known, here or by a `WorkCount`,
    also the time that is left. With `is_about` the `total` is an estimate. A `total` that the count
    passes is not shown."""
    first: list[tuple[int, float]] = []

    def show(count: int) -> None:
        whole, is_estimate = total or 0, is_about
        if isinstance(count, WorkCount) and count.total:
            whole, is_estimate = count.total, count.is_about
        about = "about " if is_estimate else ""
        now = seconds()
        if not first:  # done before, in an attempt that was killed
            first.append((count, now))
        is_known = whole >= count and whole > 0
        parts = [f"{count:,} of {about}{whole:,} {what}" if is_known else f"{count:,} {what}"]
        done, took = count - first[0][0], now - first[0][1]
        if done > 0 and took > 0:
            parts.append(f"{done / took:,.0f}/s")
            if is_known:
                parts.append(f"{timedelta(seconds=round(took / done * (whole - count)))} left")
        progress(", ".join(parts))

    return show


def note(text: str) -> None:
    """Print a line that is no result, on stderr."""
    typer.echo(f"kvstore: {text}", err=True)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(in_one_line(record.getMessage()))


@contextmanager
def noted(name: str, level: int) -> Iterator[None]:
    """Print what the logger `name` tells from `level` on, for the time of the block: each record in
    a line, without the traceback of a failure."""
    logger, handler = logging.getLogger(name), _Notes(level)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def print_list(
    found: Sequence[Mapping[str, Any]], columns: list[str], limit: int, *, as_json: bool
) -> None:
    """Print records, at most `limit`: one JSON object a line, or a table of some fields."""
    listed = found[:limit]
    if as_json:
        for fields in listed:
            print_json(fields)
    else:
        print_table(columns, [[shown(fields[name]) for name in columns] for fields in listed])
    if len(found) > limit:
        note(f"these are {limit:,} of {len(found):,}; pass --limit for more")


def shown(fact: object) -> str:
    """A field of a record for a person."""
    return "-" if fact in (None, "") else str(fact)
