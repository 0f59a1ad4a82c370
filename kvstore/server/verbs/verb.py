"""A verb: a name, the right that it needs, its parameters, the work, and what comes out.

The declaration is the only one. `Verb.read` checks the arguments of a call by it, and
`kvstore.server.openapi` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from kvstore.errors import KVStoreError, UsageError
from kvstore.protocol.parameters import Parameter, Schema
from kvstore.server.invocation import Invocation

Answer: TypeAlias = "Mapping[str, Any] | pa.RecordBatchReader"
"""JSON, or rows."""

_Run: TypeAlias = "Callable[[Invocation], Answer]"


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. `parameters` gives each argument its kind. `text` is for people.

    A verb with `rows` takes an Arrow stream instead of the argument that `is_rows`, and takes
    nothing else where no argument is. A verb `is_read` may also be called by GET. A `once` verb
    does a request with a token once, however often it comes. A verb `is_short` is done on the event
    loop if its request is small, and a verb that `waits` is done by a thread of its own.

    `result` is the schema of its answer as JSON; a verb without one answers with rows. Besides the
    errors of every request it may raise `errors`. Of the names in `one_of` a call has at least one,
    of each pair in `apart` one at most, and with the first of a pair in `needs` the second.
    """

    name: str
    right: str
    run: _Run
    text: str
    parameters: Mapping[str, Parameter]
    rows: pa.Schema | None = None
    is_read: bool = False
    once: bool = False
    is_short: bool = False
    waits: bool = False
    result: Schema | None = None
    errors: tuple[type[KVStoreError], ...] = ()
    one_of: tuple[str, ...] = ()
    apart: tuple[tuple[str, str], ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    _required: tuple[str, ...] = field(init=False, repr=False)
    _in_query: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        required = [name for name, kind in self.parameters.items() if kind.is_required]
        beside_rows = [name for name in required if not self.parameters[name].is_rows]
        object.__setattr__(self, "_required", tuple(required))
        object.__setattr__(self, "_in_query", tuple(beside_rows))

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of HTTP by which it is called."""
        return ("GET", "HEAD", "POST") if self.is_read else ("POST",)

    def read(self, given: Mapping[str, Any], *, has_rows: bool = False) -> dict[str, Any]:
        """The values of the arguments of a call. Raises `UsageError` for a call that breaks the
        declaration: a misspelt condition must not be ignored."""
        parameters, found = self.parameters, {}
        for name, each in given.items():
            kind = parameters.get(name)
            if kind is None or (has_rows and kind.is_rows):
                known = ", ".join(parameters) or "none: the verb has no arguments"
                raise UsageError(f"argument {name!r}", f"pass some of {known}")
            found[name] = kind.read(each, name)
        for name in self._in_query if has_rows else self._required:
            if name not in found:
                raise UsageError(f"argument {name!r} is missing", parameters[name].hint)
        if self.one_of and found.keys().isdisjoint(self.one_of):
            named = " or ".join(map(repr, self.one_of))
            raise UsageError(f"{self.name} without {named}", "pass one of them")
        for one, other in self.apart:
            if one in found and other in found:
                raise UsageError(f"{one!r} goes without {other!r}", "pass one or the other")
        for one, other in self.needs:
            if one in found and other not in found:
                raise UsageError(f"{one!r} without {other!r}", "pass both")
        return found


ANY_COLUMNS: Final = pa.schema([])
"""The `rows` of a verb that takes an Arrow stream of any columns."""
SPAN_APART: Final = (("prefix", "start"), ("prefix", "end"))
"""`apart` of the verbs with a span."""


def described(run: Callable[..., Answer]) -> str:
    """The text of a verb: the docstring of its function, on one line."""
    return " ".join((run.__doc__ or "").split())
