"""What a page shows, as values, as text for people, and as HTML in which each text is escaped."""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from kvstore.base.timestamp import NS_PER_SECOND, TIMESTAMP_MAX, Timestamp
from kvstore.browsing import Excerpt
from kvstore.errors import UsageError
from kvstore.limits import PAGE_DIFFERENCE_LINES_MAX

# --------------------------------------------------------------------------------------------------
# The content of a page, as values: a template writes them, and escapes each text.
#
# A section describes its content by blocks and makes no HTML, so no section can forget to escape.


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a grid: its text, and where a click on it leads. `is_code` sets it in the letters
    of code, `note` is shown behind it in a lesser tone. A name breaks behind `_` alone. `old` is
    shown before the text, as what it replaces. `share` is a bar behind it: a part of a whole."""

    text: str
    href: str = ""
    note: str = ""
    is_code: bool = False
    is_name: bool = False
    old: str = ""
    share: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Heading:
    """The head of a column, and the link that sorts by it. `order` is `ascending` or `descending`
    if the rows are in the order of this column."""

    text: str
    href: str = ""
    order: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    is_warning: bool = False
    kind: ClassVar = "text"


@dataclass(frozen=True, slots=True)
class Links:
    """Links on one line, behind a word about them."""

    text: str
    links: Sequence[Cell]
    kind: ClassVar = "links"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with their values."""

    caption: str
    facts: Sequence[tuple[str, Cell]]
    kind: ClassVar = "facts"


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """The most frequent values of one column, with their counts and links to the rows."""

    name: str
    values: Sequence[tuple[Cell, int]]
    others: int
    """The distinct values that are not shown."""


@dataclass(frozen=True, slots=True)
class Facets:
    """The values of some columns, behind a summary that names the columns and the bound."""

    summary: str
    columns: Sequence[ValueCounts]
    kind: ClassVar = "facets"


@dataclass(frozen=True, slots=True)
class Button:
    """A button that sends a form by POST to `path`, with hidden fields. `text` names its effect."""

    path: str
    text: str
    fields: Mapping[str, str]
    is_danger: bool = False
    kind: ClassVar = "button"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. A column has a `Heading`, or its text alone. `empty` stands in the place of a table
    without rows. `more` is a link to the rows behind. `numbers` are the columns that are set to the
    right."""

    caption: str
    columns: Sequence[str | Heading]
    rows: Sequence[Sequence[Cell | Button]]
    empty: str = "Nothing here."
    more: str = ""
    more_text: str = "Next page"
    numbers: frozenset[int] = frozenset()
    is_data: bool = False
    """Whether the rows have so many columns that values are rather scrolled than broken."""
    kind: ClassVar = "grid"


@dataclass(frozen=True, slots=True)
class Lines:
    """Text whose lines are kept. A line may begin with `+` or `-`: `is_difference` colours it."""

    caption: str
    lines: Sequence[str]
    is_difference: bool = False
    kind: ClassVar = "lines"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a lane, from `start` to `end` in thousandths of the lane."""

    start: int
    end: int
    text: str
    tone: str = "good"
    """`good`, `gap`, `mark` or `bad`."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline."""

    name: str
    stretches: Sequence[Stretch]


@dataclass(frozen=True, slots=True)
class Lanes:
    """A timeline of several rows, from the text `first` to the text `last`."""

    caption: str
    lanes: Sequence[Lane]
    first: str
    last: str
    kind: ClassVar = "lanes"


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a chart: what stands at the top, the middle and the foot, and at times from the
    left to the right."""

    values: Sequence[str]
    times: Sequence[str]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its height in thousandths of the axis, its text, and where it leads."""

    height: int
    text: str
    href: str
    is_exact: bool = True
    marks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars over intervals of one length. `tone` is `bar` or `load`."""

    caption: str
    bars: Sequence[Bar]
    axes: Axes
    tone: str = "bar"
    kind: ClassVar = "bars"


@dataclass(frozen=True, slots=True)
class Curve:
    """A value over time, in thousandths of the axes. `newest` is its newest value for people; where
    there are no points, the reason. `told` are some values with their times."""

    caption: str
    points: Sequence[tuple[int, int]]
    newest: str
    axes: Axes
    told: Sequence[str]
    kind: ClassVar = "curve"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a search: its name in the query, its label and its present text."""

    name: str
    label: str
    text: str
    choices: Sequence[tuple[str, str]] = ()
    """The values and texts of a field with fixed choices."""


@dataclass(frozen=True, slots=True)
class SearchForm:
    """A form that asks for a page by GET."""

    path: str
    fields: Sequence[Field]
    button: str
    hidden: Mapping[str, str] = field(default_factory=dict)
    kind: ClassVar = "search"


PageBlock: TypeAlias = (
    "Text | Links | Facts | Facets | Grid | Lines | Lanes | Bars | Curve | SearchForm | Button"
)


class DataRow(NamedTuple):
    """A row of a page as data: its cells as text, and as an object of JSON."""

    texts: Sequence[str]
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PageData:
    """What a page shows, as data: rows with whole values. `name` is the beginning of a file name.
    `rows` is called for the format that a person asks for, and not at all for the page itself."""

    name: str
    columns: Sequence[str]
    rows: Callable[[], Iterable[DataRow]]
    told: str = ""
    """What the file has beside the rows of the page."""


@dataclass(frozen=True, slots=True)
class PageView:
    """A page: its title and its blocks, from the top. `is_timed` says that the time of the page
    changes it, `refreshes` that it may be loaded again by itself."""

    title: str
    blocks: Sequence[PageBlock]
    is_timed: bool = True
    refreshes: bool = True
    data: PageData | None = None
    status: int = 200


# --------------------------------------------------------------------------------------------------
# Bytes, times and sizes as a person reads them. Keys and values are hostile.
#
#     text, printable      as it is               flights/UA
#     backslash            twice                  \\
#     all other bytes      by their numbers       \x00\xff
#
# Invariants
# 1. The notation is printable text on one line: no control character, no mark that turns the
#    direction of text, no invisible character. So a key cannot look like another one by these
#    means.
# 2. `from_notation(to_notation(raw)) == raw` for all bytes.

_ESCAPE: Final = re.compile(rb"\\(?:\\|x([0-9A-Fa-f]{2}))")
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_HEX_COLUMNS: Final = 16
SHOWN_CHARS: Final = 160
"""The characters of a key or value in a table."""


def to_notation(raw: bytes, *, keeps: str = "") -> str:
    """The notation of bytes. Characters in `keeps` stay as they are."""
    return "".join(
        char if char in keeps else _shown(char) for char in raw.decode("utf-8", "surrogateescape")
    )


def _shown(char: str) -> str:
    if char == "\\":
        return "\\\\"
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def from_notation(text: str) -> bytes:
    """The bytes of a notation. Raises `UsageError` for a backslash that begins no escape."""
    raw = text.encode("utf-8", "surrogatepass")
    rest = _ESCAPE.sub(b"", raw)
    if b"\\" in rest:
        raise UsageError(
            f"a backslash alone in {text[:100]!r}", r"write \\ for a backslash, \x00 for a byte"
        )
    return _ESCAPE.sub(lambda found: bytes.fromhex((found[1] or b"5c").decode()), raw)


def shortened(text: str, most: int) -> str:
    """The first characters of a text, with a mark where some are missing."""
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def is_text(raw: bytes) -> bool:
    """Whether a person can read the bytes: UTF-8 with few escapes. The last character may be
    cut off."""
    shown = to_notation(raw, keeps="\n\t\\")
    return len(shown) <= len(raw.decode("utf-8", "replace")) * 1.2 + 8


def hex_lines(raw: bytes) -> list[str]:
    """Bytes in hexadecimal, with their offsets and printable characters."""
    lines = []
    for at in range(0, len(raw), _HEX_COLUMNS):
        row = raw[at : at + _HEX_COLUMNS]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<{_HEX_COLUMNS * 3}} {shown}")
    return lines


def preview(value: Excerpt) -> Cell:
    """The beginning of a value, on one line."""
    head = value.head[: SHOWN_CHARS * 4]
    if is_text(head):
        return Cell(shortened(to_notation(head), SHOWN_CHARS), is_code=True)
    return Cell(hex_lines(head[:16])[0][10:57].strip(), note="not text", is_code=True)


def moment(at: int | None) -> str:
    """A time to the millisecond, which the field of the time takes back; a dash for no time.

    It is rounded up, as `kvstore.base.timestamp` says: the page as of it has the commit.
    """
    if at is None:
        return "-"
    whole = str(Timestamp(min(at_millisecond(at), TIMESTAMP_MAX)))
    return f"{whole[:10]} {whole[11:23]}Z"


def at_millisecond(at: int) -> int:
    """A time rounded up to milliseconds, in nanoseconds."""
    return -(-at // 10**6) * 10**6


def duration(ns: float) -> str:
    """A duration in its two largest units."""
    seconds = max(ns, 0) / NS_PER_SECOND
    if seconds < 10:
        return f"{seconds:.3g} s"
    words = []
    for length, unit in _UNITS:
        count, seconds = divmod(seconds, length)
        if count:
            words.append(f"{count:.0f} {unit}")
    return " ".join(words[:2])


def size(count: float) -> str:
    """Bytes in a unit that keeps the number short."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# --------------------------------------------------------------------------------------------------
# Axes of charts: round numbers, and times as short as their distance allows.

_ROUND: Final = (1, 2, 4, 10)
"""The tops of axes, times a power of ten: their halves are round too."""
_TICKS: Final = 4


def axis(most: float, show: Callable[[float], str], base: int = 10) -> tuple[float, list[str]]:
    """The top of an axis for values up to `most`, and its texts from the top. Bytes have the base
    1024."""
    unit = 1.0
    while most > unit * base:
        unit *= base
    while base == 10 and 0 < most <= unit / base:  # parts of a second
        unit /= base
    steps = _ROUND if base == 10 else (*_ROUND, 20, 40, 100, 200, 400, 1024)
    top = next((unit * step for step in steps if most <= unit * step), unit * base)
    return top, [show(top), show(top / 2), show(0)]


def count_axis(most: float) -> tuple[float, list[str]]:
    """As `axis`, for whole numbers."""
    return axis(max(most, 2), lambda value: f"{value:,.0f}")


def seconds_axis(most: float) -> tuple[float, list[str]]:
    """As `axis`, for seconds, in minutes, hours or days where there are some."""
    if most <= _MINUTE:
        return axis(most, _length)
    steps = [_MINUTE * step for step in (2, 4, 10, 20, 40, 60)]
    steps += [_HOUR * step for step in (2, 4, 10, 20, 40)]
    top = next((step for step in steps if most <= step), 0.0)
    top = top or _DAY * axis(most / _DAY, str)[0]
    return top, [_length(top), _length(top / 2), _length(0)]


_MINUTE: Final = 60.0
_HOUR: Final = 3600.0
_DAY: Final = 86_400.0


def _length(seconds: float) -> str:
    return duration(seconds * NS_PER_SECOND)


def time_ticks(since: int, upto: int) -> list[str]:
    """Times from `since` to `upto`, in UTC."""
    length = max(upto - since, 0)
    day_ns = 86_400 * NS_PER_SECOND
    if length <= 5 * 60 * NS_PER_SECOND:
        shown = slice(11, 19)
    elif length <= day_ns:
        shown = slice(11, 16)
    else:
        shown = slice(5, 16) if length <= 10 * day_ns else slice(0, 10)
    times = [since + length * step // _TICKS for step in range(_TICKS + 1)]
    return [moment(min(max(at, 0), TIMESTAMP_MAX))[shown] for at in times]


# --------------------------------------------------------------------------------------------------
# What a page shows as a file, with whole values.

DATA_TYPES: Final = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json; charset=utf-8",
}


def data_file(data: PageData, format_: str) -> tuple[bytes, bytes]:
    """The rows as a file, and the header that names the file: CSV with a head, or a JSON array with
    an object on each line."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", data.name).strip(".-")[:80] or "rows"
    sink = io.StringIO()
    if format_ == "csv":
        writer = csv.writer(sink)
        writer.writerow(data.columns)
        writer.writerows(row.texts for row in data.rows())
    else:
        lines = (json.dumps(row.fields, ensure_ascii=False) for row in data.rows())
        sink.write("[\n" + ",\n".join(lines) + "\n]\n")
    body = sink.getvalue().encode("utf-8", "backslashreplace")
    return body, f'attachment; filename="{stem}.{format_}"'.encode()


# --------------------------------------------------------------------------------------------------
# Views as HTML, by one template that escapes each text. Needs the extra `server` (jinja2).
#
# Invariants
# 1. A page loads its style and its script from beside it, and nothing else from anywhere: the
#    policy that each answer carries forbids the rest, scripts inside the page included.
# 2. The page works without its script, which only sends the time when the slider moves.

FILES: Final = Path(__file__).parent / "files"
ASSETS: Final = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
HTML_TYPE: Final = "text/html; charset=utf-8"
SECURITY_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; script-src 'self'; form-action 'self'; "
        b"base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def require_templates() -> None:
    """Raise `UsageError` where the package that writes pages is not installed."""
    if find_spec("jinja2") is None:
        raise UsageError(
            "the page needs the package 'jinja2'", "run: pip install 'kvstore-mvcc[server]'"
        )


@cache
def _template() -> Any:
    require_templates()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["moment"] = moment
    return environment.get_template("page.html")


@cache
def asset(name: str) -> bytes:
    """The style or the script of the page."""
    return (FILES / name).read_bytes()


def html(view: PageView, **facts: Any) -> bytes:
    """A whole page. `facts` are what stands around the view: see `files/page.html`."""
    text: str = _template().render(view=view, **facts)
    return text.encode("utf-8", "backslashreplace")


# --------------------------------------------------------------------------------------------------
# The differences of two versions of a value, as lines.

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
