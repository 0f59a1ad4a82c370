"""The views of the page: what they show, at which time, and how hostile bytes look in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import backup, bulk
from kvstore.backup.page import collections
from kvstore.remote.server import Token
from kvstore.remote.server.page import Page
from kvstore.remote.server.page.html import (
    SHOWN_CHARS,
    count_axis,
    from_notation,
    seconds_axis,
    shortened,
    to_notation,
)
from kvstore.remote.server.tokens import Tokens
from tests.page.asking import Asking, parsed

ADMIN = "a" * 32
HOSTILE = [
    b"<script>alert(1)</script>",
    b'"><img src=x onerror=alert(1)>',
    b"{{ 7 * 7 }}{% raw %}",
    b"javascript:alert(1)",
    b"&lt;b&gt; &amp; '",
    b"\x00\x01\x1b[31m\r\n",
    b"\xff\xfe not text",
    b"\\x41 \\",
    "\u202egnp.exe".encode(),
    "zero\u200bwidth".encode(),
    "\u2028line".encode(),
    b"../../etc/passwd",
    b"a?b=c&d#e;f%00",
    b" ",
    bytes(range(256)),
]
SECTIONS = (
    *("keys", "tables", "activity", "changed", "imports", "feeds", "holds", "trends", "connected"),
    *("metrics", "collections"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[kvstore.Store, Asking]]:
    """A store with something of each kind, and an admin at its page."""
    place = tmp_path_factory.mktemp("page")
    with kvstore.open(place / "store", durability="async") as store:
        for number in range(300):
            store.put(b"flights/%03d" % number, b'{"delay": %d}' % number)
        for key in HOSTILE:
            store.put(key, key)
            store.put(b"value/" + key, key)
        store.put(b"one", b'{"delay": 1, "to": "JFK"}')
        store.put(b"one", b'{"delay": 7, "to": "JFK"}')
        store.delete(b"one")
        store.delete_range(b"flights/100", b"flights/200")
        staged = bulk.Import.create(place / "staging")
        with staged.writer() as writer:
            writer.put(b"imported", b"row")
        staged.seal()
        bulk.ingest(store, place / "staging")
        cities = pa.schema([("name", pa.string()), ("people", pa.int64())])
        table = store.table("cities", cities, key=["name"])
        for name in ("Wien", "<b>Graz</b>", "\x07\u202e"):
            table.put({"name": name, "people": 1000})
        store.hold("nightly")
        store.feed("mails", start=0).close()
        backup.Collection(str(place / "backups")).backup(store)
        section = collections([str(place / "backups"), str(place / "none")])
        page = Page(store, Tokens([Token(ADMIN, ("admin",))]), [section])
        person = Asking(page)
        assert person.sign_in(ADMIN) == 303
        yield store, person


def test_each_section_answers_and_loads_nothing_from_elsewhere(
    made: tuple[kvstore.Store, Asking],
) -> None:
    _, person = made
    for name in (*SECTIONS, "key?key=one", "table?name=cities", "activity?per=second"):
        answer = person.get(name)
        assert answer.status == 200, name
        headers = dict(answer.headers)
        policy = headers[b"content-security-policy"]
        assert policy.startswith(b"default-src 'none'; style-src 'self'; script-src 'self';")
        assert b"unsafe" not in policy
        assert headers[b"x-content-type-options"] == b"nosniff"
        page = person.html(name)
        for element in page.elements:
            for attribute in ("href", "src", "action"):
                target = urlsplit(element.attributes.get(attribute, ""))
                assert not target.scheme
                assert not target.netloc
                assert not target.path.startswith("/")
            assert not any(each.startswith("on") for each in element.attributes), element
            assert "style" not in element.attributes
        assert [script.attributes["src"] for script in page.all("script")] == ["page.js"]
        assert page.all("style") == []


def test_a_screen_reader_and_a_keyboard_find_everything(
    made: tuple[kvstore.Store, Asking],
) -> None:
    _, person = made
    for name in SECTIONS:
        page = person.html(name)
        assert page.all("html")[0].attributes["lang"] == "en"
        assert len(page.all("h1")) == len(page.all("main")) == 1
        assert page.all("a")[0].attributes["href"] == "#content"
        labels = {label.attributes["for"] for label in page.all("label")}
        for control in page.all("input") + page.all("select"):
            if control.attributes.get("type") != "hidden":
                assert control.attributes["id"] in labels, control
        assert all(th.attributes["scope"] == "col" for th in page.all("th"))
        here = [link for link in page.all("a") if "aria-current" in link.attributes]
        assert [link.attributes["href"] for link in here] == [name]
        for element in page.elements:
            if element.attributes.get("tabindex") not in (None, "0"):
                hidden = element.tag == "a"  # of a bar: the list below has the same link
                assert hidden or element.attributes["id"] == "content"


@pytest.mark.parametrize("key", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_keys_and_values_are_shown_as_text(
    made: tuple[kvstore.Store, Asking], key: bytes
) -> None:
    _, person = made
    listed = person.html("keys?fold=none&prefix=" + quoted(key))
    name = shortened(to_notation(key), SHOWN_CHARS)
    links = [link for link in listed.all("a") if link.text == name]
    assert links, "the key leads to its page"
    shown = person.html(links[0].attributes["href"])
    assert to_notation(key)[:200] in shown.all("h1")[0].text
    value = shown.all("pre")[0].text
    assert all(char.isprintable() or char in "\n\t" for char in value)
    for page in (listed, shown):
        assert len(page.all("script")) == 1
        assert page.all("img") == []
        for char in page.all("html")[0].text:
            assert char.isprintable() or char in "\n\t", hex(ord(char))


@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda t: t.encode("utf-8", "replace")))
def test_the_notation_is_printable_and_comes_back(raw: bytes) -> None:
    shown = to_notation(raw)
    assert from_notation(shown) == raw
    assert all(char.isprintable() for char in shown)


@pytest.mark.parametrize("text", ["\\", "\\x", "\\x1", "\\n", "a\\", "\\\\\\", "\\xgg"])
def test_a_backslash_alone_is_refused(text: str) -> None:
    with pytest.raises(kvstore.errors.UsageError):
        from_notation(text)


def test_pages_of_keys_lead_through_all_of_them(made: tuple[kvstore.Store, Asking]) -> None:
    store, person = made
    found: list[str] = []
    target = "keys?fold=none"
    while target:
        page = person.html(target)
        found += [link.text for link in page.all("a") if link.attributes["href"].startswith("key?")]
        more = [link for link in page.all("a") if link.attributes.get("rel") == "next"]
        target = more[0].attributes["href"] if more else ""
    assert found == [shortened(to_notation(key), SHOWN_CHARS) for key, _ in store.scan()]


def test_folders_open_as_those_of_a_file_system(made: tuple[kvstore.Store, Asking]) -> None:
    _, person = made
    page = person.html("keys")
    folder = next(link for link in page.all("a") if link.text == "flights/")
    inside = person.html(folder.attributes["href"])
    assert inside.all("h1")[0].text == "Keys below flights/"
    assert "flights/000" in inside.all("main")[0].text


def test_the_whole_page_moves_through_time(made: tuple[kvstore.Store, Asking]) -> None:
    store, person = made
    deleted, second, first = (version.timestamp for version in store.history(b"one"))
    assert '"delay": 1' in person.text(f"key?key=one&at={int(first)}")
    assert '"delay": 7' in person.text(f"key?key=one&at={int(second)}")
    assert "Deleted at" in person.text(f"key?key=one&at={int(deleted)}")
    page = person.html(f"keys?prefix=flights%2F15&at={int(deleted)}")
    assert "flights/150" in page.all("main")[0].text
    links = [link.attributes["href"] for link in page.all("a")]
    inside = [link for link in links if not link.startswith(("#", "keys?prefix"))]
    assert all(f"at={int(deleted)}" in link for link in inside)
    assert "flights/150" not in person.text("keys?prefix=flights%2F15")
    assert "not yet added" in person.text(f"imports?at={int(deleted)}")


def test_the_slider_leads_to_its_time(made: tuple[kvstore.Store, Asking]) -> None:
    store, person = made
    slider = next(
        each for each in person.html("keys").all("input") if each.attributes.get("id") == "slide"
    )
    assert slider.attributes["value"] == slider.attributes["max"] == "1000"
    moved = person.get("keys?prefix=f&slide=500&was=1000&at=")
    assert moved.status == 303
    target = dict(moved.headers)[b"location"].decode()
    at = int(re.fullmatch(r"keys\?prefix=f&at=(\d+)", target)[1])  # type: ignore[index]
    middle = (int(store.browsing.oldest()) + int(store.upper)) // 2
    assert abs(at - middle) <= 1
    slid = person.html(target)
    value = next(each for each in slid.all("input") if each.attributes.get("id") == "slide")
    assert abs(int(value.attributes["value"]) - 500) <= 1
    unmoved = person.get("keys?slide=1000&was=1000&at=-1h")
    assert dict(unmoved.headers)[b"location"] == b"keys?at=-1h"


def test_a_key_shows_its_versions_with_their_differences(
    made: tuple[kvstore.Store, Asking],
) -> None:
    _, person = made
    page = person.html("key?key=one")
    assert any('"delay": 7' in each.text for each in page.all("ins"))
    assert any('"delay": 1' in each.text for each in page.all("del"))
    main = page.all("main")[0].text
    assert main.index("delete") < main.index("put")


def test_changes_are_marked(made: tuple[kvstore.Store, Asking]) -> None:
    _, person = made
    main = person.text("activity?per=second")
    assert "range delete" in main
    assert "1 rows of import" in main
    assert "flights/100 to flights/200" in main


def test_tables_are_typed(made: tuple[kvstore.Store, Asking]) -> None:
    _, person = made
    main = person.text("tables")
    assert "people int64" in main
    rows = person.text("table?name=cities")
    assert "<b>Graz</b>" in rows
    assert "\\x07\\xe2\\x80\\xae" in rows


def test_claims_have_owners_and_lag(made: tuple[kvstore.Store, Asking]) -> None:
    store, person = made
    feeds = person.text("feeds")
    assert "mails" in feeds
    holds = person.text("holds")
    owner = next(hold.owner for hold in store.holds.all() if hold.name == "nightly")
    assert "nightly" in holds
    assert owner in holds


def test_collections_show_coverage_and_one_failure_hides_no_other(
    made: tuple[kvstore.Store, Asking],
) -> None:
    _, person = made
    main = person.text("collections")
    assert "covered from" in main
    assert "can be restored" in main
    assert "No drill has proved" in main
    assert "none: " in main


def test_backups_of_another_store_are_told_and_say_nothing_of_this_one(tmp_path: Path) -> None:
    place = str(tmp_path / "backups")
    with kvstore.open(None, engine="memory") as other, kvstore.open(None, engine="memory") as store:
        other.put(b"k", b"v")
        store.put(b"k", b"v")
        backup.Collection(place).backup(other)
        person = Asking(Page(store, None, [collections([place])]))
        said = person.text("collections")
        assert f"backups of store {other.store_id}, and not of this one" in said
        assert "A disaster now" not in said
        assert "covered from" not in said


def test_a_value_of_64_mib_is_shown_in_part(made: tuple[kvstore.Store, Asking]) -> None:
    store, person = made
    store.put(b"zz-large", b"<b>" + bytes(64 << 20))
    assert len(person.get("key?key=zz-large").body) < 100_000
    assert "of 64.0 MiB" in person.text("key?key=zz-large")
    assert len(person.get("keys?prefix=zz").body) < 20_000


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("nowhere", 400, "choose one of the navigation"),
        ("keys?at=2200-01-01T00:00Z", 425, ""),
        ("keys?at=yesteryear", 400, "ISO-8601"),
        ("keys?prefix=%5C", 400, "backslash"),
        ("keys?fold=%3Cb%3E", 400, "choose one"),
        ("table?name=none", 404, ""),
        ("revert?import_id=zz", 400, "hex"),
        ("activity?per=year", 400, "choose one"),
        ("keys?" + "&".join(f"a{n}=1" for n in range(100)), 400, "too many"),
    ],
)
def test_a_wrong_request_gets_a_page_that_says_what_to_do(
    made: tuple[kvstore.Store, Asking], target: str, status: int, words: str
) -> None:
    _, person = made
    answer = person.get(target)
    assert answer.status == status
    assert words in answer.body.decode()
    assert answer.kind.startswith("text/html")


@pytest.mark.parametrize(
    "target",
    [
        *("keys?at=yesteryear", "keys?at=2200-01-01T00:00Z", "keys?prefix=%5C", "nowhere"),
        *("table?name=none", "revert?import_id=zz", "changed?since=never"),
    ],
)
def test_an_error_keeps_the_navigation_and_its_links_work(
    made: tuple[kvstore.Store, Asking], target: str
) -> None:
    _, person = made
    answer = person.get(target)
    assert answer.status >= 400
    page = parsed(answer.body)
    links = [link.attributes["href"] for link in page.all("nav")[0:1] and page.all("a")]
    assert [link for link in links if not link.startswith("#")][: len(SECTIONS)] == list(SECTIONS)
    if target.startswith("keys?at"):
        field = next(each for each in page.all("input") if each.attributes.get("id") == "at")
        assert field.attributes["value"] in target  # to be corrected


@pytest.mark.parametrize(
    ("words", "age_s"),
    [("1 hour ago", 3600), ("-5m", 300), ("2 days ago", 172_800), ("yesterday", None)],
)
def test_the_field_of_the_time_takes_words(tmp_path: Path, words: str, age_s: int | None) -> None:
    day_ns = 86_400 * 10**9
    clock = kvstore.ManualClock(20_000 * day_ns)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        for number in range(10):  # the state changes each quarter of a day, and at each minute
            store.put(b"k", b"day %d" % number)
            clock.advance(day_ns // 4)
        now = clock.wall_ns()
        at = now - (now % day_ns) - day_ns if age_s is None else now - age_s * 10**9
        wanted = store.get(b"k", as_of=at)
        assert wanted is not None
        page = Asking(Page(store, None)).html("key?" + urlencode({"key": "k", "at": words}))
        assert wanted.decode() in page.all("pre")[0].text
        field = next(each for each in page.all("input") if each.attributes.get("id") == "at")
        assert field.attributes["value"] == words


def test_charts_have_axes_and_loads_have_bars(made: tuple[kvstore.Store, Asking]) -> None:
    _, person = made
    page = person.html("activity?per=day")
    axes = [each for each in page.elements if each.attributes.get("class") in ("values", "times")]
    assert len(axes) == 4  # of commits, and of loads
    assert axes[0].text.endswith("0")
    assert axes[2].text == "210"
    bars = [each for each in page.all("rect") if each.attributes["class"].startswith("load")]
    assert sum(float(each.attributes["height"]) > 0 for each in bars) == 1
    assert any(each.text.endswith("1 rows") for each in page.all("a"))
    top, texts = seconds_axis(7000)
    assert (top, texts) == (7200, ["2 h", "1 h", "0 s"])
    for most in (0, 0.003, 1, 59, 61, 3000, 80_000, 10**7):
        for scale in (seconds_axis, count_axis):
            assert scale(most)[0] >= most


def test_a_page_of_now_loads_again_by_itself_if_it_is_asked_to(
    made: tuple[kvstore.Store, Asking],
) -> None:
    store, person = made
    assert b"refresh" not in dict(person.get("metrics").headers)
    assert dict(person.get("metrics?refresh=5").headers)[b"refresh"] == b"5"
    assert dict(person.get("activity?refresh=60").headers)[b"refresh"] == b"60"
    for target in (
        "keys?refresh=0",
        f"keys?refresh=5&at={int(store.upper) - 1}",
        "nowhere?refresh=5",
    ):
        assert b"refresh" not in dict(person.get(target).headers)


def test_names_of_metrics_break_behind_an_underscore_alone(
    made: tuple[kvstore.Store, Asking],
) -> None:
    _, person = made
    body = person.get("metrics").body.decode()
    assert ">kvstore_<wbr>commits_<wbr>total</code>" in body
    assert "kvstore_commits_total" in person.text("metrics")


def test_history_that_is_gone_is_told(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        old = store.put(b"k", b"v")
        store.put(b"k", b"w")
        store.gc(before=store.now())
        person = Asking(Page(store, None))
        assert person.get(f"keys?at={int(old)}").status == 410
        changes = person.text("activity?per=second")
        assert "history begins" in changes
        assert "Garbage collection removed 1 version." in changes


def test_a_store_without_anything_has_a_page(store: kvstore.Store) -> None:
    person = Asking(Page(store, None))
    for name in SECTIONS[:-1]:
        assert person.html(name).all("h1")


def quoted(key: bytes) -> str:
    """A key in an address, in its notation."""
    return quote(to_notation(key), safe="")
