"""The content of a page, as values: a template writes them, and escapes each text.

A section describes its content by blocks and makes no HTML, so no section can forget to escape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a grid: its text, and where a click on it leads. `is_code` sets it in the letters
    of code, `note` is shown behind it in a lesser tone."""

    text: str
    href: str = ""
    note: str = ""
    is_code: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    is_warning: bool = False
    kind: ClassVar = "text"


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
    """A table. `empty` stands in the place of a table without rows. `more` is a link to the rows
    behind. `numbers` are the columns that are set to the right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | Button]]
    empty: str = "Nothing here."
    more: str = ""
    more_text: str = "Next page"
    numbers: frozenset[int] = frozenset()
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
class Bar:
    """One bar: its height in thousandths of the highest one, its text, and where it leads."""

    height: int
    text: str
    href: str
    is_exact: bool = True
    marks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars over intervals of one length, from the text `first` to the text `last`."""

    caption: str
    bars: Sequence[Bar]
    first: str
    last: str
    highest: str
    kind: ClassVar = "bars"


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


PageBlock: TypeAlias = "Text | Grid | Lines | Lanes | Bars | SearchForm | Button"


@dataclass(frozen=True, slots=True)
class PageView:
    """A page: its title and its blocks, from the top. `is_timed` says that the time of the page
    changes it."""

    title: str
    blocks: Sequence[PageBlock]
    is_timed: bool = True
