"""The page of a store: HTML for a browser, made beside the store, with nothing from elsewhere.

    kvstore ui STORE        the page alone, of a store that any process may have open
    kvstore serve STORE     the same page at `/ui/`, beside the verbs

Packages above bring sections, which describe content by blocks and make no HTML.
"""

from kvstore.remote.server.page.html import (
    Bars,
    Button,
    Cell,
    Field,
    Grid,
    Lane,
    Lanes,
    Lines,
    PageBlock,
    PageView,
    SearchForm,
    Stretch,
    Text,
    require_templates,
)
from kvstore.remote.server.page.request import PageRequest, Section
from kvstore.remote.server.page.shown_store import PAGE_PATH, Page, PageAnswer, is_of_page

__all__ = [
    "PAGE_PATH",
    "Page",
    "PageAnswer",
    "is_of_page",
    "require_templates",
    "Section",
    "PageRequest",
    "PageView",
    "PageBlock",
    "Text",
    "Grid",
    "Cell",
    "Lines",
    "Lanes",
    "Lane",
    "Stretch",
    "Bars",
    "SearchForm",
    "Field",
    "Button",
]
