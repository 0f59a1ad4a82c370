"""The line that a long command shows: a count, its rate, and the time that is left."""

from __future__ import annotations

from kvstore.cli.output import counting


def shown(counts: list[int], total: int | None = None) -> list[str]:
    """The lines for counts that come a second apart."""
    lines: list[str] = []
    seconds = iter(map(float, range(100)))
    show = counting(lines.append, "rows", total, seconds=lambda: next(seconds))
    for count in counts:
        show(count)
    return lines


def test_a_count_is_shown_with_its_rate() -> None:
    assert shown([10, 1010, 2010]) == ["10 rows", "1,010 rows, 1,000/s", "2,010 rows, 1,000/s"]


def test_a_known_total_gives_the_time_that_is_left() -> None:
    assert shown([0, 100], 7300) == ["0 of 7,300 rows", "100 of 7,300 rows, 100/s, 0:01:12 left"]


def test_a_total_that_is_passed_was_an_estimate() -> None:
    assert shown([5, 15], 10) == ["5 of 10 rows", "15 rows, 10/s"]


def test_a_clock_that_stands_still_gives_no_rate() -> None:
    lines: list[str] = []
    show = counting(lines.append, "rows", seconds=lambda: 0.0)
    show(0)
    show(10)
    assert lines == ["0 rows", "10 rows"]
