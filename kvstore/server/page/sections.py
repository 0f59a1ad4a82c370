"""The sections that every store has, and the sections of other packages.

Packages above add sections by the entry point group `kvstore.pages`: its object is a function that
takes what a person named on the command line, and returns a `Section`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.server.added import PAGES, added
from kvstore.server.page.activity import ACTIVITY
from kvstore.server.page.claims import FEEDS, HOLDS
from kvstore.server.page.figures import METRICS
from kvstore.server.page.imports import IMPORTS, REVERT
from kvstore.server.page.keys import KEYS
from kvstore.server.page.section import Section
from kvstore.server.page.tables import TABLE, TABLES
from kvstore.server.page.versions import KEY

SECTIONS: Final = (KEYS, KEY, ACTIVITY, TABLES, TABLE, IMPORTS, REVERT, FEEDS, HOLDS, METRICS)


def added_section(name: str, places: Sequence[str]) -> Section:
    """The section `name` of another package, about `places`. Raises `UsageError` where no installed
    package has it."""
    section: Section = added(PAGES, name)(places)
    return section
