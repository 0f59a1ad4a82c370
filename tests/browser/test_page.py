"""The page in a real browser (`make browser`): keyboard alone, light and dark, from 390 to 1920
pixels, hostile keys, and the rules of axe, which npm brings."""

from __future__ import annotations

import json
import subprocess
from urllib.parse import urlsplit

import pytest

import kvstore
from tests.browser.conftest import HOSTILE
from tests.browser.driver import ENTER, LEFT, TAB, Browser

pytestmark = pytest.mark.browser
SECTIONS = (
    *("keys", "keys?fold=none", "key?key=one", "activity?per=second", "tables"),
    *("table?name=cities", "table?name=cities&column=people&operator=%3E&value=5"),
    *("definition?name=cities", "changed?since=oldest", "changed?table=cities&since=oldest"),
    *("imports", "feeds", "holds", "trends", "connected", "metrics"),
)
PAGES = (*SECTIONS, "keys?at=nonsense")
WIDTHS = (390, 768, 1280, 1920)
AXE = "axe-core@4.14.1"
TABS_MAX = 200


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
    links = browser.run(LINKS_OF_KEYS)[: len(HOSTILE)]
    browser.open(f"http://{host}/ui/table?name=cities")
    for link in [*links, *browser.run(LINKS_OF_ROWS)]:
        browser.open(link)
        assert browser.title != "owned"
    asked = {urlsplit(url).netloc for url in browser.requests() if url.startswith("http")}
    assert asked == {host}
    assert browser.complaints() == []


LINKS_OF_ROWS = """
return [...document.querySelectorAll('a[href^="row?"]')].map((each) => each.href);
"""

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
    go(browser, "Slide through time")
    before = browser.url
    browser.press(*[LEFT] * 20)
    assert browser.run("return document.getElementById('shown').textContent") != "now"
    assert browser.run("return document.getElementById('at').value").endswith("Z")
    browser.wait_for("return location.search.includes('at=')")
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


def test_the_keyboard_alone_finds_rows_by_a_condition(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.open(f"http://{urlsplit(address).netloc}/ui/table?name=cities")
    go(browser, "Column")
    browser.press(*"people")
    go(browser, "Value")
    browser.press(*"2", ENTER)
    browser.wait_for("return location.search.includes('value=2')")
    assert "1 of 1 rows meet the conditions" in browser.run("return document.body.innerText")
    go(browser, "Wien")
    browser.press(ENTER)
    browser.wait_for("return location.pathname.endsWith('/row')")
    assert "people" in browser.run("return document.body.innerText")


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_falls_off_the_screen(address: str, width: int, is_dark: bool) -> None:
    with Browser() as window:
        window.resize(width, is_dark=is_dark)
        window.open(address)
        for section in PAGES:
            window.open(f"http://{urlsplit(address).netloc}/ui/{section}")
            assert window.run(IS_DARK) == is_dark
            wide = "return document.documentElement.scrollWidth - window.innerWidth"
            assert window.run(wide) <= 0, section
            if width == WIDTHS[0]:  # where no table scrolls sideways in itself either
                assert window.run(OUTSIDE) == [], section


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe, in the release that is pinned above."""
    place = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "install", "--silent", "--prefix", str(place), AXE], check=True)
    return (place / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.mark.parametrize("width", [WIDTHS[0], WIDTHS[2]])
def test_a_screen_reader_finds_its_way_by_the_rules_of_axe(
    address: str, axe: str, width: int
) -> None:
    with Browser() as window:
        window.open(address)
        for is_dark in (False, True):
            window.resize(width, is_dark=is_dark)
            for section in PAGES:
                window.open(f"http://{urlsplit(address).netloc}/ui/{section}")
                found = json.loads(window.run_later(axe + BROKEN_RULES))
                assert found == [], (section, is_dark)


BROKEN_RULES = """;
const done = arguments[arguments.length - 1];
axe.run(document).then((found) => done(JSON.stringify(found.violations.map((each) =>
  [each.id, each.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))]))));
"""

OUTSIDE = """
return [...document.querySelectorAll("main *")].filter((each) => {
  if (each.closest(".spoken, thead, svg, pre")) return false;
  const box = each.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1);
}).map((each) => each.outerHTML.slice(0, 200)).slice(0, 5);
"""


def wait_until(browser: Browser, text: str) -> None:
    """Wait until the page that a key has asked for is there."""
    titles = {"Imports": "Imports", "Revert": "Revert import", "Revert it now": "Import reverted"}
    browser.wait_for(f"return document.title.startsWith('{titles[text]}')")


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
