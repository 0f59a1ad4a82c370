"""A browser without a screen, as far as the tests of the page need one: requests, cookies, HTML."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import urlencode, urljoin, urlsplit

from kvstore.remote.server.http import Head
from kvstore.remote.server.page import Page, PageAnswer

HOST = "127.0.0.1:7448"
VOID = {"meta", "link", "input", "wbr"}


@dataclass
class Element:
    """An element of a page: its tag, its attributes, and the text inside it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Html(HTMLParser):
    """The elements of a page, in order. Fails for a tag that is not closed."""

    elements: list[Element] = field(default_factory=list)
    open_ones: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(found)
        if tag not in VOID:
            self.open_ones.append(found)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_ones.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open_ones:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def text_of_class(self, name: str) -> str:
        """The text of the first element of a class."""
        return next(each.text for each in self.elements if each.attributes.get("class") == name)


def parsed(body: bytes) -> Html:
    """The elements of a whole page."""
    found = Html()
    found.feed(body.decode())
    found.close()
    assert found.open_ones == []
    return found


class Asking:
    """A person with a browser, at the page of one store."""

    def __init__(self, page: Page, **headers: str) -> None:
        self.page = page
        self.headers = {"host": HOST, "sec-fetch-site": "same-origin", **headers}
        self.client = "127.0.0.1"

    def get(self, target: str) -> PageAnswer:
        """Ask for a path below `/ui/`."""
        return self._ask("GET", target, b"")

    def post(self, target: str, **fields: str) -> PageAnswer:
        """Send a form."""
        return self._ask("POST", target, urlencode(fields).encode())

    def html(self, target: str) -> Html:
        """The elements of a page that must answer."""
        answer = self.get(target)
        assert answer.status == 200, (target, answer.status, parsed(answer.body).all("main"))
        return parsed(answer.body)

    def text(self, target: str) -> str:
        """The text of the content of a page."""
        return self.html(target).all("main")[0].text

    def sign_in(self, secret: str) -> int:
        """Sign in, and keep the cookie. Returns the status."""
        answer = self.post("sign-in", token=secret)
        for name, value in answer.headers:
            if name == b"set-cookie":
                self.headers["cookie"] = value.decode().partition(";")[0]
        return answer.status

    def _ask(self, method: str, target: str, body: bytes) -> PageAnswer:
        place = urlsplit(urljoin("/ui/", target))
        headers = {
            name.replace("_", "-").encode(): text.encode() for name, text in self.headers.items()
        }
        head = Head(method, place.path.encode(), place.query.encode(), headers, self.client)
        return self.page.answer(head, body)
