"""The page in a real browser (`make browser`): keyboard alone, light and dark, hostile keys."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

import kvstore
from tests.browser.conftest import HOSTILE
from tests.browser.driver import ENTER, LEFT, TAB, Browser

pytestmark = pytest.mark.browser
SECTIONS = ("keys", "keys?fold=none", "key?key=one", "activity?per=second", "tables", "imports")
TABS_MAX = 200
WAITS_MAX = 600
"""A wait lasts 0.1 s in the browser."""


def go(browser: Browser, text: str) -> None:
    """Move the focus by the Tab key to the element with this text or label, as a person would."""
    for _ in range(TABS_MAX):
        browser.press(TAB)
        if browser.run(FOCUSED) == text:
            return
    raise AssertionError(f"no Tab leads to {text!r}")


FOCUSED = """
const at = document.activeElement;
const label = at.labels && at.labels.length ? at.labels[0].firstChild : at;
return label.textContent.trim();
"""


def test_nothing_is_fetched_from_elsewhere_and_no_script_of_a_key_runs(
    browser: Browser, address: str
) -> None:
    browser.open(address)
    browser.requests()
    host = urlsplit(address).netloc
    for section in SECTIONS:
        browser.open(f"http://{host}/ui/{section}")
        assert browser.title != "owned"
        assert browser.run("return document.scripts.length") == 1
    browser.open(f"http://{host}/ui/keys?fold=none")
    for link in browser.run(LINKS_OF_KEYS)[: len(HOSTILE)]:
        browser.open(link)
        assert browser.title != "owned"
    asked = {urlsplit(url).netloc for url in browser.requests() if url.startswith("http")}
    assert asked == {host}
    assert browser.complaints() == []


LINKS_OF_KEYS = """
return [...document.querySelectorAll('a[href^="key?"]')].map((each) => each.href);
"""


def test_the_keyboard_alone_reverts_an_import(
    browser: Browser, address: str, store: kvstore.Store
) -> None:
    browser.open(address)
    assert store.get(b"imported") == b"row"
    for text in ("Imports", "Revert", "Revert it now"):
        go(browser, text)
        browser.press(ENTER)
        wait_until(browser, text)
    assert "is reverted as of" in browser.run("return document.body.innerText")
    assert store.get(b"imported") is None


def test_the_keyboard_alone_moves_the_page_through_time(browser: Browser, address: str) -> None:
    browser.open(address)
    go(browser, "As of")
    before = browser.url
    browser.press(*[LEFT] * 20)
    assert browser.run("return document.getElementById('shown').textContent") != "now"
    wait_for(browser, "return location.search.includes('at=')")
    assert browser.url != before


def test_the_first_tab_skips_to_the_content(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.press(TAB)
    assert browser.run(FOCUSED) == "Skip to the content"
    browser.press(ENTER)
    assert browser.run("return document.activeElement.id") == "content"


def test_each_colour_of_text_can_be_read_on_its_ground(address: str) -> None:
    for is_dark in (False, True):
        with Browser(is_dark=is_dark) as window:
            window.open(address)
            assert window.run(IS_DARK) == is_dark
            worst = window.run(CONTRAST)
            assert worst >= 4.5, (is_dark, worst)  # the WCAG's least for text


def test_a_narrow_window_scrolls_down_and_not_sideways(address: str) -> None:
    with Browser(width=500) as window:
        window.open(address)
        for section in SECTIONS:
            window.open(f"http://{urlsplit(address).netloc}/ui/{section}")
            wide = "return document.documentElement.scrollWidth - window.innerWidth"
            assert window.run(wide) <= 0, section


def wait_for(browser: Browser, condition: str) -> None:
    """Wait until a condition of the page holds."""
    for _ in range(WAITS_MAX):
        if browser.later(condition):
            return
    raise AssertionError(condition)


def wait_until(browser: Browser, text: str) -> None:
    """Wait until the page that a key has asked for is there."""
    titles = {"Imports": "Imports", "Revert": "Revert import", "Revert it now": "Import reverted"}
    wait_for(browser, f"return document.title.startsWith('{titles[text]}')")


IS_DARK = "return matchMedia('(prefers-color-scheme: dark)').matches"

CONTRAST = """
const light = (text) => {
  const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => {
    const share = part / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = getComputedStyle(at).backgroundColor;
    if (!found.endsWith(", 0)")) return found;
  }
  return "rgb(255, 255, 255)";
};
let worst = 21;
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || element.closest("svg") || !element.getClientRects().length) continue;
  const [low, high] = [light(getComputedStyle(element).color), light(ground(element))].sort(
    (one, other) => one - other);
  worst = Math.min(worst, (high + 0.05) / (low + 0.05));
}
return worst;
"""
