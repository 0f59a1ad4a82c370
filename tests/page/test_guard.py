"""The page shows a store to bearers of tokens, and changes it for admins alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.remote.server import Token
from kvstore.remote.server.page import Page
from kvstore.remote.server.tokens import Tokens
from tests.page.asking import HOST, Asking, parsed

ADMIN, READER, TENANT = "a" * 32, "r" * 32, "t" * 32
TOKENS = [
    Token(ADMIN, ("admin",)),
    Token(READER, ("read",)),
    Token(TENANT, ("read",), b"tenant/"),
]


@pytest.fixture
def page(store: kvstore.Store, tmp_path: Path) -> Page:
    """The page of a store with one import, for bearers of tokens."""
    store.put_many({b"tenant/1": b"mine", b"other/1": b"theirs"})
    staged = bulk.Import.create(tmp_path / "staging")
    with staged.writer() as writer:
        writer.put(b"imported", b"row")
    staged.seal()
    bulk.ingest(store, tmp_path / "staging")
    return Page(store, Tokens(TOKENS))


@pytest.fixture
def admin(page: Page) -> Asking:
    found = Asking(page)
    assert found.sign_in(ADMIN) == 303
    return found


def import_id(store: kvstore.Store) -> str:
    return f"{store.imports.every()[0].import_id:016x}"


def test_a_stranger_sees_a_form_for_a_token_and_no_word_of_the_store(page: Page) -> None:
    stranger = Asking(page)
    for target in ("keys", "imports", "metrics", "revert"):
        answer = stranger.get(target)
        assert answer.status == 401
        found = parsed(answer.body)
        assert [form.attributes["action"] for form in found.all("form")] == ["sign-in"]
        assert b"tenant" not in answer.body
        assert b"/store" not in answer.body
    assert stranger.sign_in("x" * 32) == 401
    assert "cookie" not in stranger.headers
    for cookie in ("kvstore-page-7448=" + "x" * 32, "kvstore-page-7448", '"', "a=b; c"):
        stranger.headers["cookie"] = cookie
        assert stranger.get("keys").status == 401


def test_a_token_comes_back_in_a_cookie_that_no_script_reads(page: Page) -> None:
    person = Asking(page)
    answer = person.post("sign-in", token=ADMIN)
    cookie = dict(answer.headers)[b"set-cookie"].decode()
    assert cookie == f"kvstore-page-7448={ADMIN}; HttpOnly; SameSite=Strict"
    person.headers["host"] = "store.example"
    cookie = dict(person.post("sign-in", token=ADMIN).headers)[b"set-cookie"].decode()
    assert cookie.startswith("kvstore-page-default=")


def test_a_token_in_the_address_is_taken_out_of_it(page: Page) -> None:
    person = Asking(page)
    answer = person.get(f"?token={READER}")
    headers = dict(answer.headers)
    assert (answer.status, headers[b"location"]) == (303, b"keys")
    assert READER.encode() in headers[b"set-cookie"]
    assert person.get("?token=wrong").status == 401


def test_signing_out_ends_the_cookie(admin: Asking) -> None:
    answer = admin.post("sign-out")
    assert dict(answer.headers)[b"set-cookie"].endswith(b"Max-Age=0")


def test_an_admin_reverts_an_import_by_two_clicks(store: kvstore.Store, admin: Asking) -> None:
    links = [link.attributes["href"] for link in admin.html("imports").all("a")]
    target = next(link for link in links if link.startswith("revert?"))
    question = admin.html(target)
    button = next(form for form in question.all("form") if form.attributes["action"] == "revert")
    assert button.attributes["method"] == "post"
    assert store.get(b"imported") == b"row"  # a look changes nothing
    assert (
        "is reverted as of"
        in parsed(admin.post("revert", import_id=import_id(store)).body).all("main")[0].text
    )
    assert store.get(b"imported") is None
    assert "reverted" in admin.text("imports")


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "", "origin": "http://evil.example"},
        {"sec-fetch-site": "", "origin": "null"},
        {"sec-fetch-site": "", "origin": f"http://{HOST}.evil.example"},
        {"sec-fetch-site": ""},
    ],
    ids=str,
)
def test_another_site_changes_nothing_with_an_admins_cookie(
    store: kvstore.Store, admin: Asking, headers: dict[str, str]
) -> None:
    admin.headers |= headers
    admin.headers = {name: text for name, text in admin.headers.items() if text}
    assert admin.post("revert", import_id=import_id(store)).status == 403
    assert store.get(b"imported") == b"row"


def test_a_form_of_an_old_browser_is_known_by_its_origin(
    store: kvstore.Store, admin: Asking
) -> None:
    del admin.headers["sec-fetch-site"]
    admin.headers["origin"] = f"http://{HOST}"
    assert admin.post("revert", import_id=import_id(store)).status == 200


def test_a_reader_is_shown_no_button_and_refused_without_one(
    store: kvstore.Store, page: Page
) -> None:
    reader = Asking(page)
    reader.sign_in(READER)
    links = [link.attributes["href"] for link in reader.html("imports").all("a")]
    assert not any(link.startswith("revert") for link in links)
    assert reader.get("revert?import_id=" + import_id(store)).status == 403
    assert reader.post("revert", import_id=import_id(store)).status == 403
    assert reader.post("keys").status == 400
    assert store.get(b"imported") == b"row"


def test_a_token_with_a_prefix_sees_its_keys_alone(page: Page) -> None:
    tenant = Asking(page)
    tenant.sign_in(TENANT)
    main = tenant.html("keys?fold=none").all("main")[0].text
    assert "tenant/1" in main
    assert "other" not in main
    assert [link.text for link in tenant.html("keys").all("a") if link.text == "Keys"] == ["Keys"]
    assert "mine" in tenant.text("key?key=tenant%2F1")
    for target in ("keys?prefix=other", "keys?after=a&prefix=", "key?key=other%2F1"):
        answer = tenant.get(target)
        assert answer.status == 403 or b"other/1" not in answer.body
    for target in ("activity", "tables", "table?name=x", "imports", "feeds", "holds", "metrics"):
        assert tenant.get(target).status == 403


def test_without_tokens_the_page_of_this_machine_shows_and_changes_nothing(
    store: kvstore.Store,
) -> None:
    store.put(b"k", b"v")
    person = Asking(Page(store, None))
    assert "k" in person.text("keys")
    person.headers["sec-fetch-site"] = "none"
    assert person.get("keys").status == 200
    assert person.post("revert", import_id="1").status == 403
    assert person.get("revert?import_id=1").status == 403


@pytest.mark.parametrize(
    "strange",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:7448"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"x-forwarded-for": "1.2.3.4"},
        {"sec-fetch-site": "", "origin": "http://evil.example"},
    ],
    ids=str,
)
def test_without_tokens_no_other_site_and_no_proxy_reads(
    store: kvstore.Store, strange: dict[str, str]
) -> None:
    person = Asking(Page(store, None))
    person.headers = {k: v for k, v in {**person.headers, **strange}.items() if v}
    assert person.get("keys").status == 403


def test_without_tokens_no_other_machine_reads(store: kvstore.Store) -> None:
    person = Asking(Page(store, None))
    person.client = "192.0.2.7"
    assert person.get("keys").status == 403
