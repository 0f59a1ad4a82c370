"""The site in a browser, from its files and without a network: its first page, and its search."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="Sphinx 9 needs Python 3.11")

from tests.browser.driver import ENTER, Browser
from tests.harness.site import built

pytestmark = pytest.mark.browser


@pytest.fixture(scope="session")
def site() -> Path:
    return built()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("is_dark", [False, True])
def test_the_first_page_shows_its_picture_and_fits(
    browser: Browser,
    site: Path,
    width: int,
    is_dark: bool,
) -> None:
    browser.resize(width, is_dark=is_dark)
    browser.requests()
    browser.open((site / "index.html").as_uri())
    # The picture of the other scheme is not shown, and is not asked for.
    loaded = "[...document.images].every(each => each.offsetWidth === 0 || each.naturalWidth > 0)"
    browser.wait_for(f"return {loaded}")
    shown = browser.run(
        "return [...document.querySelectorAll('article img')]"
        ".filter(each => each.offsetWidth > 0 && each.naturalWidth > 0)"
        ".map(each => each.src.split('/').pop())"
    )
    assert shown == [f"timeline-{'dark' if is_dark else 'light'}.svg"]
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert (
        browser.run("return document.querySelector('article pre').getBoundingClientRect().bottom")
        < 900
    ), "the line to install is below the first screen"
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []


def test_a_search_finds_pages_without_a_network(browser: Browser, site: Path) -> None:
    browser.resize(1280)
    browser.requests()
    browser.open((site / "index.html").as_uri())
    browser.run("document.querySelector('input[name=q]').focus()")
    browser.press(*"tombstone", ENTER)
    browser.wait_for(  # results come one by one
        "return [...document.querySelectorAll('#search-results li a')]"
        ".some(each => each.href.includes('reference/words.html'))"
    )
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
