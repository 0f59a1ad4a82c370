"""The store of `kvstore ui`: read as it moves, and never in the way of the process that owns it.

A live reader takes no lock, so a service can start while the page is open. A store in memory is
read from its journal, as of the opening. Only a revert opens the store to write, or asks its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from kvstore.errors import (
    AccessDeniedError,
    HistoryGoneError,
    KVStoreError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.limits import PAGE_FORM_BYTES_MAX
from kvstore.opening import engine_at, open_read_only
from kvstore.remote.live import LiveReader, follow
from kvstore.remote.server.http import Head, status_of
from kvstore.remote.server.page.changed import CHANGED
from kvstore.remote.server.page.html import (
    ASSETS,
    DATA_TYPES,
    HTML_TYPE,
    SECURITY_HEADERS,
    PageBlock,
    PageView,
    Text,
    asset,
    data_file,
    html,
    moment,
)
from kvstore.remote.server.page.one_key import KEY, ROW
from kvstore.remote.server.page.request import SAFE, Guard, Owned, PageRequest, Section
from kvstore.remote.server.page.tables import DEFINITION, TABLE, TABLES
from kvstore.remote.server.page.trends import CALLERS, TRENDS
from kvstore.remote.server.page.views import (
    ACTIVITY,
    FEEDS,
    HOLDS,
    IMPORTS,
    KEYS,
    METRICS,
    REVERT,
)
from kvstore.remote.server.tokens import Grant, Tokens
from kvstore.remote.server.watch import Watch
from kvstore.remote.verbs import ADMIN
from kvstore.store import Store

PAGE_STALENESS_S = 0.5


def opened_to_look(path: Path) -> AbstractContextManager[Store]:
    """The store at `path`, to read. Raises as `kvstore.follow`."""
    if engine_at(path) == "memory":
        return open_read_only(path)
    return follow(path, PAGE_STALENESS_S)


# --------------------------------------------------------------------------------------------------
# The page of one store: a request in, a whole HTML page out.
#
#     /ui/                       the keys
#     /ui/<section>?at=...       a view; `at` is the time that it shows
#     /ui/page.css, page.js      the two files that pages load
#     /ui/sign-in, sign-out      the cookie of a caller
#
# Invariants
# 1. Every link and every address in a page is relative, so it works wherever the page is mounted.
# 2. A view is bounded in entries, bytes and rows, whatever the store holds and the caller asks for.
# 3. Nothing is changed by GET, and nothing without the right of the section's action.

PAGE_PATH: Final = b"/ui"
_STEPS: Final = 1000
"""The steps of the slider."""

_FIELDS_MAX: Final = 40
_REFRESHES: Final = (("", "only when asked"), ("5", "every 5 s"), ("60", "every minute"))
_WORDS: Final = ("now", "today", "yesterday", "1 hour ago", "1 day ago", "1 week ago")

SECTIONS: Final = (
    *(KEYS, KEY, TABLES, TABLE, ROW, DEFINITION, ACTIVITY, CHANGED, IMPORTS, REVERT),
    *(FEEDS, HOLDS, TRENDS, CALLERS, METRICS),
)
"""The sections that every store has."""


def is_of_page(path: bytes) -> bool:
    """Whether a request for this path is one of the page."""
    return path == PAGE_PATH or path.startswith(PAGE_PATH + b"/")


class PageAnswer(NamedTuple):
    """A whole answer."""

    status: int
    kind: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Page:
    """The page of one store. Any thread may ask it."""

    def __init__(
        self,
        store: Store,
        tokens: Tokens | None,
        sections: Sequence[Section] = (),
        owned: Owned | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`sections` are added to the sections of every store. `owned` gives the store to write to,
        if it is another one. `watch` has what the server of the page has measured."""
        self._watch = watch
        self._store, self._guard = store, Guard(tokens)
        self._sections = {each.name: each for each in (*SECTIONS, *sections)}
        self._owned: Owned = owned or (lambda: nullcontext(store))
        self._name = str(store.path) if store.path is not None else "a store in memory"

    def answer(self, head: Head, body: bytes) -> PageAnswer:
        """The answer to a request. A failure of a view is a page; a bug of ours is raised."""
        try:
            found = self._answer(head, body)
        except KVStoreError as error:
            found = self._failed(error)
        return found._replace(headers=(*SECURITY_HEADERS, *found.headers))

    def _answer(self, head: Head, body: bytes) -> PageAnswer:
        name = head.path[len(PAGE_PATH) :].decode("utf-8", "replace")
        if name in ("", "/"):
            return self._arrive(head, name)
        name = name[1:]
        if name in ASSETS:
            return PageAnswer(200, ASSETS[name], asset(name))
        if head.method == "POST":
            fields = _fields(body)
        elif head.method in SAFE:
            fields = _fields(head.query)
        else:
            raise UsageError(f"method {head.method} of a page", "use GET or POST")
        access = self._guard.access(head)
        if name == "sign-in" and self._guard.asks_for_tokens:
            return self._sign_in(head, fields)
        if name == "sign-out" and head.method == "POST":
            return _redirect("sign-in", self._guard.forget(head))
        if access is None:
            return self._ask_for_token("")
        return self._view(head, name, access, fields)

    # -- who calls --------------------------------------------------------------------------

    def _arrive(self, head: Head, name: str) -> PageAnswer:
        """The first request: it leads to the keys. A token in the address becomes a cookie."""
        base = "" if name else "ui/"
        secret = _fields(head.query).get("token", "")
        if not secret or not self._guard.asks_for_tokens:
            return _redirect(f"{base}keys")
        cookie = self._guard.cookie_of(head, secret)
        return self._ask_for_token("") if cookie is None else _redirect(f"{base}keys", cookie)

    def _sign_in(self, head: Head, fields: Mapping[str, str]) -> PageAnswer:
        if head.method != "POST":
            return self._ask_for_token("")
        cookie = self._guard.cookie_of(head, fields.get("token", "").strip())
        if cookie is None:
            return self._ask_for_token("The server does not know this token.")
        return _redirect("keys", cookie)

    def _ask_for_token(self, problem: str) -> PageAnswer:
        told = "This store is shown to the bearer of a token. The owner of the server has one."
        blocks = [Text(told), *([Text(problem, is_warning=True)] if problem else [])]
        return self._shown(401, PageView("Sign in", blocks, is_timed=False), None, sign_in=True)

    # -- views ------------------------------------------------------------------------------

    def _view(self, head: Head, name: str, access: Grant, fields: Mapping[str, str]) -> PageAnswer:
        section = self._sections.get(name)
        call = PageRequest(self._store, access, fields, self._owned, self._watch)
        try:
            return self._answered(head, section, call, fields)
        except KVStoreError as error:
            return self._failed(error, call, section, fields)

    def _answered(
        self, head: Head, section: Section | None, call: PageRequest, fields: Mapping[str, str]
    ) -> PageAnswer:
        if section is None:
            raise UsageError("the page has no such section", "choose one of the navigation")
        call.access.require(section.right)
        if section.is_whole:
            call.access.require_whole(f"the section {section.title!r}")
        if isinstance(self._store, LiveReader):
            self._store.refresh()
        moved = self._moved(call, section.name, fields)
        if moved is not None:
            return _redirect(moved)
        look = section.view
        if head.method == "POST":
            if section.act is None:
                raise UsageError(f"the section {section.title!r} changes nothing", "use GET")
            call.access.require(section.act_right)
            look = section.act
        format_ = call.file_format
        view = look(call)
        if format_:
            if view.data is None:
                raise UsageError(f"{section.title} as a file", "take the page itself")
            body, name = data_file(view.data, format_)
            return PageAnswer(200, DATA_TYPES[format_], body, ((b"content-disposition", name),))
        return self._shown(view.status, view, call, here=section, fields=fields)

    def _moved(self, call: PageRequest, name: str, fields: Mapping[str, str]) -> str | None:
        """The address of the page at the time to which a person moved the slider. None if the
        slider has not moved."""
        slide = call.number("slide")
        if slide is None:
            return None
        kept = {key: text for key, text in fields.items() if key not in ("slide", "was", "at")}
        if slide == call.number("was"):
            time = call.at_text
        elif slide >= _STEPS:
            time = ""
        else:
            oldest, newest = self._ends()
            time = str(oldest + (newest - oldest) * slide // _STEPS)
        if time:
            kept["at"] = time
        query = urlencode({key: text for key, text in kept.items() if text}, quote_via=quote)
        return f"{name}?{query}" if query else name

    def _ends(self) -> tuple[int, int]:
        """The times at the ends of the slider."""
        newest = int(self._store.upper) - 1
        return min(int(self._store.browsing.oldest()), newest), newest

    def _clock(
        self, call: PageRequest, path: str, fields: Mapping[str, str], *, is_timed: bool
    ) -> dict[str, Any]:
        """The form of the time of the page, and of its loading again. A time that cannot be read
        stays in its field."""
        oldest, newest = self._ends()
        try:
            is_now, as_of = call.chosen is None, min(max(int(call.as_of), oldest), newest)
            shown = "now" if is_now else moment(call.as_of)
        except KVStoreError:
            is_now, as_of, shown = False, newest, "another time"
        slide = _STEPS if is_now else (as_of - oldest) * _STEPS // max(newest - oldest, 1)
        kept = {key: text for key, text in fields.items() if key not in _CLOCK_FIELDS}
        query = urlencode(kept, quote_via=quote)
        return {
            "path": path,
            "is_timed": is_timed,
            "hidden": list(kept.items()),
            "slide": slide,
            "shown": shown,
            "at": call.at_text,
            "words": _WORDS,
            "oldest": moment(oldest),
            "oldest_ms": oldest // 1_000_000,
            "newest_ms": newest // 1_000_000,
            "newest": f"{path}?{query}" if query else path,
            "refreshes": _REFRESHES if is_now or not is_timed else (),
            "refresh": call.text("refresh"),
        }

    def _shown(
        self,
        status: int,
        view: PageView,
        call: PageRequest | None,
        *,
        here: Section | None = None,
        fields: Mapping[str, str] | None = None,
        sign_in: bool = False,
        leads: PageRequest | None = None,
    ) -> PageAnswer:
        """A view as a page. `leads` makes the links of the navigation, by default `call`."""
        clock, links = None, []
        headers: list[tuple[bytes, bytes]] = []
        if call is not None and here is not None and (view.is_timed or view.refreshes):
            clock = self._clock(call, here.name, fields or {}, is_timed=view.is_timed)
            seconds = call.text("refresh")
            if status == 200 and any(seconds == each for each, _ in clock["refreshes"] if each):
                headers.append((b"refresh", seconds.encode()))
        if here is not None and view.data is not None:
            links = [
                (format_.upper(), f"{here.name}?{urlencode({**(fields or {}), 'as': format_})}")
                for format_ in DATA_TYPES
            ]
        body = html(
            view,
            store_name=self._name if call is not None else "kvstore",
            sections=[] if call is None else self._navigation(leads or call, here),
            rights="" if call is None or ADMIN not in call.access.rights else "admin",
            may_sign_out=call is not None and self._guard.asks_for_tokens,
            clock=clock,
            data_links=links,
            sign_in=sign_in,
        )
        return PageAnswer(status, HTML_TYPE, body, tuple(headers))

    def _navigation(self, call: PageRequest, here: Section | None) -> list[dict[str, Any]]:
        return [
            {"title": each.title, "href": call.link(each.name), "is_here": each is here}
            for each in self._sections.values()
            if each.in_navigation
            and each.right in call.access.rights
            and not (each.is_whole and call.access.prefix)
        ]

    def _failed(
        self,
        error: KVStoreError,
        call: PageRequest | None = None,
        here: Section | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> PageAnswer:
        """The page of an error. It keeps the navigation, and the field of the time if the section
        has one: the time may be what is to be mended."""
        blocks: list[PageBlock] = [Text(error.what, is_warning=True)]
        if error.remedy:
            blocks.append(Text(f"What to do: {error.remedy}."))
        title = "Not allowed" if isinstance(error, AccessDeniedError) else "This did not work"
        shown = here if here is not None and here.act is None else None
        view = PageView(title, blocks, is_timed=shown is not None, refreshes=False)
        leads = call
        if call is not None and (isinstance(error, _TIME_ERRORS) or not _has_time(call)):
            leads = PageRequest(self._store, call.access, {}, self._owned)
        return self._shown(status_of(error), view, call, here=shown, fields=fields, leads=leads)


_TIME_ERRORS: Final = (HistoryGoneError, NotYetWrittenError)


def _has_time(call: PageRequest) -> bool:
    """Whether the time of the page can be read."""
    try:
        _ = call.as_of
    except KVStoreError:
        return False
    return True


_CLOCK_FIELDS: Final = frozenset({"at", "slide", "was", "refresh", "as"})


def _fields(query: bytes) -> dict[str, str]:
    """The fields of a form. Raises `UsageError` for too many bytes or fields."""
    if len(query) > PAGE_FORM_BYTES_MAX:
        raise UsageError(f"a form of {len(query)} bytes", "send less")
    try:
        pairs = parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=_FIELDS_MAX
        )
    except ValueError as error:
        raise UsageError("a form of too many fields", "send less") from error
    return dict(pairs)


def _redirect(target: str, cookie: bytes = b"") -> PageAnswer:
    headers = ((b"location", target.encode("latin-1", "replace")),)
    added = ((b"set-cookie", cookie),) if cookie else ()
    return PageAnswer(303, "text/plain", b"", (*headers, *added))
