"""Draws the picture of the first page: keys over time, a read at a time, and a window of changes.

`python docs/pictures/timeline.py` writes the files beside this one, one for light and one for dark
pages. A test compares them with what this module draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).parent

WIDTH, HEIGHT = 480, 276
LEFT, RIGHT = 82, 472
TOP, ROW, BAR = 40, 42, 30


class Bar(NamedTuple):
    """One version of a key, from its time to the next one's. A deletion has no value."""

    row: int
    start: int
    end: int
    value: str


KEYS: Final = ("UA/1545", "UA/1696", "DL/0001", "DL/0002")
BARS: Final = (
    Bar(0, 96, 250, "on time"),
    Bar(0, 250, 400, "late"),
    Bar(0, 400, RIGHT, "left"),
    Bar(1, 130, 318, "on time"),
    Bar(1, 318, RIGHT, ""),
    Bar(2, 282, 424, "scheduled"),
    Bar(2, 424, RIGHT, "late"),
    Bar(3, 282, RIGHT, "scheduled"),
)
READ, WINDOW = 200, (352, 462)

COLOURS: Final[Mapping[str, Mapping[str, str]]] = {
    "light": {
        "text": "#1b1f24",
        "quiet": "#57606a",
        "bar": "#d8e8f8",
        "edge": "#6d9dcb",
        "read": "#b3261e",
        "seen": "#fbd9d5",
        "window": "#7a5200",
        "shade": "#f6e7c8",
    },
    "dark": {
        "text": "#f0f3f6",
        "quiet": "#a9b4bf",
        "bar": "#1d3b58",
        "edge": "#5d8fc0",
        "read": "#ff9a91",
        "seen": "#5c2522",
        "window": "#f0c674",
        "shade": "#3d3117",
    },
}


def picture(colours: Mapping[str, str]) -> str:
    """The picture as SVG. Its background is that of the page."""
    return "\n".join(_lines(colours)) + "\n"


def _lines(colour: Mapping[str, str]) -> Iterator[str]:
    bottom = TOP + ROW * len(KEYS) - (ROW - BAR)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="15">'
    )
    since, upto = WINDOW
    yield (
        f'<rect x="{since}" y="{TOP - 8}" width="{upto - since}" height="{bottom - TOP + 16}" '
        f'fill="{colour["shade"]}"/>'
    )
    for row, key in enumerate(KEYS):
        yield _text(
            LEFT - 8, _middle(row), key, colour["quiet"], "end", family="monospace", size=14
        )
    for bar in BARS:
        yield from _bar(bar, colour)
    yield (
        f'<path d="M{READ} {TOP - 10}V{bottom + 8}" stroke="{colour["read"]}" stroke-width="2.5"/>'
    )
    yield _text(READ, TOP - 18, "read as of 9:00", colour["read"], "middle", weight=600)
    middle = (since + upto) // 2
    yield _text(middle, TOP - 18, "what changed", colour["window"], "middle", weight=600)
    yield (
        f'<path d="M{LEFT} {bottom + 24}H{RIGHT - 2}m-7 -5l7 5l-7 5" fill="none" '
        f'stroke="{colour["quiet"]}" stroke-width="1.5"/>'
    )
    yield _text(LEFT, bottom + 45, "time", colour["quiet"], "start")
    yield _text(282, bottom + 45, "a bulk load shows at once", colour["quiet"], "middle")
    yield f'<path d="M282 {bottom + 4}V{bottom + 24}" stroke="{colour["quiet"]}"/>'
    yield "</svg>"


def _bar(bar: Bar, colour: Mapping[str, str]) -> Iterator[str]:
    top, width = TOP + ROW * bar.row, bar.end - bar.start - 2
    if not bar.value:
        yield (
            f'<rect x="{bar.start + 1}" y="{top + 1}" width="{width - 2}" height="{BAR - 2}" '
            f'rx="5" fill="none" stroke="{colour["edge"]}" stroke-dasharray="4 4"/>'
        )
        yield _text(bar.start + 10, _middle(bar.row), "deleted", colour["quiet"], "start")
        return
    is_seen = bar.start <= READ < bar.end
    yield (
        f'<rect x="{bar.start}" y="{top}" width="{width}" height="{BAR}" rx="5" '
        f'fill="{colour["seen" if is_seen else "bar"]}" '
        f'stroke="{colour["read" if is_seen else "edge"]}"/>'
    )
    yield _text(bar.start + 8, _middle(bar.row), bar.value, colour["text"], "start", size=14)


def _middle(row: int) -> int:
    """The base line of the text of a row."""
    return TOP + ROW * row + 20


def _text(
    x: int,
    y: int,
    text: str,
    fill: str,
    anchor: str,
    family: str = "",
    *,
    weight: int = 400,
    size: int = 15,
) -> str:
    font = f' font-family="{family}"' if family else ""
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}"{font}>{escape(text)}</text>'
    )


def main() -> None:
    for name, colours in COLOURS.items():
        (HERE / f"timeline-{name}.svg").write_text(picture(colours))


if __name__ == "__main__":
    main()
