"""A verb: a name, the right it needs, its parameters, and the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa

from kvstore.server.invocation import Invocation

Answer: TypeAlias = "Mapping[str, Any] | pa.RecordBatchReader"
"""JSON, or rows."""

_Run: TypeAlias = "Callable[[Invocation], Answer]"


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. `parameters` gives each argument its JSON type. `text` is for people.

    A verb with `rows` takes an Arrow stream instead of the JSON list of that name. A verb `is_read`
    may also be called by GET. A `once` verb does a request with a token once, however often it
    comes. A verb `is_short` is done on the event loop if its request is small, and a verb that
    `waits` is done by a thread of its own.
    """

    name: str
    right: str
    run: _Run
    text: str
    parameters: Mapping[str, str]
    rows: pa.Schema | None = None
    is_read: bool = False
    once: bool = False
    is_short: bool = False
    waits: bool = False


ANY_COLUMNS: Final = pa.schema([])
"""The `rows` of a verb that takes an Arrow stream of any columns."""
KEY, VALUE, TIME = "bytes", "bytes", "time"
SPAN: Mapping[str, str] = {"start": "bytes", "end": "bytes", "prefix": "bytes"}


def described(run: Callable[..., Answer]) -> str:
    """The text of a verb: the docstring of its function, on one line."""
    return " ".join((run.__doc__ or "").split())
