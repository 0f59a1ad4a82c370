"""Views as HTML, by one template that escapes each text. Needs the extra `server` (jinja2).

Invariants
1. A page loads its style and its script from beside it, and nothing else from anywhere: the policy
   that each answer carries forbids the rest, scripts inside the page included.
2. The page works without its script, which only sends the time when the slider moves.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from kvstore.errors import UsageError
from kvstore.server.page.blocks import PageView
from kvstore.server.page.notation import moment

FILES: Final = Path(__file__).parent / "files"
ASSETS: Final = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
HTML_TYPE: Final = "text/html; charset=utf-8"
SECURITY_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; script-src 'self'; form-action 'self'; "
        b"base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def require_templates() -> None:
    """Raise `UsageError` where the package that writes pages is not installed."""
    if find_spec("jinja2") is None:
        raise UsageError(
            "the page needs the package 'jinja2'", "run: pip install kvstore-mvcc[server]"
        )


@cache
def _template() -> Any:
    require_templates()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["moment"] = moment
    return environment.get_template("page.html")


@cache
def asset(name: str) -> bytes:
    """The style or the script of the page."""
    return (FILES / name).read_bytes()


def html(view: PageView, **facts: Any) -> bytes:
    """A whole page. `facts` are what stands around the view: see `files/page.html`."""
    text: str = _template().render(view=view, **facts)
    return text.encode("utf-8", "backslashreplace")
