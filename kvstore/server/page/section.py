"""A section of the page: a name in its navigation, and the functions that make its views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvstore.server.access import READ

if TYPE_CHECKING:
    from kvstore.server.page.blocks import PageView
    from kvstore.server.page.call import PageRequest

Look: TypeAlias = "Callable[[PageRequest], PageView]"


@dataclass(frozen=True, slots=True)
class Section:
    """A section at `/ui/<name>`.

    `view` answers GET. A section with `act` answers POST with it, for callers with `act_right`; its
    view is shown afterwards. A section without `in_navigation` is reached by links. A section that
    `is_whole` concerns all keys: a token with a prefix cannot see it.
    """

    name: str
    title: str
    view: Look
    act: Look | None = None
    right: str = READ
    act_right: str = READ
    in_navigation: bool = True
    is_whole: bool = True
