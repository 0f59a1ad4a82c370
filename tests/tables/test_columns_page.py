"""The reference tells what a column holds, as it is tried."""

from __future__ import annotations

from tests.tables.columns_page import PAGE, page


def test_the_page_tells_what_a_column_holds() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.tables.columns_page"
