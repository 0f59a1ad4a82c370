"""A server of the Model Context Protocol over a store: models read it, its past and its changes.

    python -m kvstore.adapters.mcp flights.db --prefix UA/

Keys and values are texts; bytes that are none come as `{"base64": ...}`, and go in so too.

Invariants
1. Without `writable` no tool changes anything: a path is read beside its owner, and never opened.
2. No tool sees or changes a key without the prefix.
3. An answer has at most `ROWS_MAX` rows, and tells where the rest begins.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import os
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Final, TypeAlias

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from kvstore.base.span import prefix_end
from kvstore.errors import KVStoreError, UsageError
from kvstore.remote.handle import Handle, Where

ROWS_MAX: Final = 100
"""Rows of one answer: a model reads each of them."""
VALUE_BYTES_MAX: Final = 16_384
"""Bytes of a value of which an answer has more than the beginning: a model reads them all."""

Shown: TypeAlias = str | dict[str, str]
"""Bytes as a model sees them."""


class Tools:
    """The tools, as plain methods. `server` offers them."""

    def __init__(self, handle: Handle, prefix: bytes = b"") -> None:
        self._handle, self._prefix = handle, prefix

    def get(self, key: Shown, as_of: str | None = None) -> dict[str, Any]:
        """The value of a key, now or as of a time such as "-1h" or "2026-11-22T10:00:00Z"."""
        value = self._handle.store.get(self._key(key), as_of=as_of)
        return {"found": value is not None, **({} if value is None else _value(value))}

    def scan(
        self,
        prefix: Shown = "",
        after: Shown | None = None,
        as_of: str | None = None,
        limit: int = ROWS_MAX,
        reverse: bool = False,
    ) -> dict[str, Any]:
        """Keys that begin with a prefix, sorted, with their values, now or as of a time. If
        `next_after` is in the answer, call again with it as `after` for the following keys."""
        start, end = self._bounds(prefix)
        if after is not None:
            bound = self._key(after)
            start, end = (start, bound) if reverse else (bound + b"\0", end)
        count = min(max(limit, 1), ROWS_MAX)
        rows: Iterator[tuple[bytes, bytes]] = self._handle.store.scan(
            start, end, as_of=as_of, reverse=reverse, limit=count + 1
        )
        found = list(rows) if end is None or start < end else []
        shown = [{"key": _shown(key), **_value(value)} for key, value in found[:count]]
        more = {"next_after": shown[-1]["key"]} if len(found) > count else {}
        return {"rows": shown, **more}

    def history(self, key: Shown, limit: int = ROWS_MAX) -> dict[str, Any]:
        """The kept versions of a key, newest first, each with its time. A version without a value
        is a deletion."""
        versions = self._handle.store.history(self._key(key))
        count = min(max(limit, 1), ROWS_MAX)
        shown = [
            {
                "timestamp": str(version.timestamp),
                "deleted": version.value is None,
                **({} if version.value is None else _value(version.value)),
            }
            for version in versions[:count]
        ]
        return {"versions": shown, "total": len(versions)}

    def changes(
        self, since: str, upto: str | None = None, prefix: Shown = "", limit: int = ROWS_MAX
    ) -> dict[str, Any]:
        """What changed after `since` and until `upto` (default: now), in time order. If
        `next_since` is in the answer, call again with it as `since`; changes of that very time may
        come again."""
        start, end = self._bounds(prefix)
        found = self._handle.store.changes(since, upto, start, end, order="time")
        count = min(max(limit, 1), ROWS_MAX)
        shown: list[dict[str, Any]] = []
        for change in found:
            if len(shown) == count:
                return {"changes": shown, "next_since": str(int(change.timestamp) - 1)}
            shown.append(
                {
                    "timestamp": str(change.timestamp),
                    "op": change.op,
                    "key": _shown(change.key),
                    **({} if change.end_key is None else {"end_key": _shown(change.end_key)}),
                    **({} if change.value is None else _value(change.value)),
                }
            )
        return {"changes": shown}

    def times(self) -> dict[str, str]:
        """The oldest readable time of the store, and its newest."""
        store = self._handle.store
        return {"since": str(store.since), "now": str(store.now())}

    def put(self, key: Shown, value: Shown) -> dict[str, str]:
        """Set a key. Its older values stay readable as of their times."""
        return {"timestamp": str(self._handle.store.put(self._key(key), _bytes(value)))}

    def delete(self, key: Shown) -> dict[str, str]:
        """Delete a key. Its older values stay readable as of their times."""
        return {"timestamp": str(self._handle.store.delete(self._key(key)))}

    # -- inside -----------------------------------------------------------------------------

    def _key(self, key: Shown) -> bytes:
        found = _bytes(key)
        if not found.startswith(self._prefix):
            remedy = f"pass a key that begins with {_shown(self._prefix)!r}"
            raise UsageError(f"key {key!r} is not offered", remedy)
        return found

    def _bounds(self, prefix: Shown) -> tuple[bytes, bytes | None]:
        wanted = _bytes(prefix)
        if self._prefix.startswith(wanted):
            wanted = self._prefix
        elif not wanted.startswith(self._prefix):
            begin = _shown(self._prefix)
            raise UsageError(
                f"prefix {prefix!r} is not offered", f"pass one that begins with {begin!r}"
            )
        return wanted, prefix_end(wanted)


def server(
    where: Where | Handle,
    *,
    prefix: bytes = b"",
    writable: bool = False,
    token: str | None = None,
    name: str = "kvstore",
) -> MCPServer:
    """A server of the tools `get`, `scan`, `history`, `changes` and `times`; with `writable` of
    `put` and `delete` too. `where` is the path of a store, the URL of a server, or an open store;
    `token` goes to the server, whose rights and prefix bound it as well. `run()` serves
    stdio, and `run("streamable-http", port=8000)` HTTP on this machine alone.
    """
    handle = Handle.of(where, token=token, read_only=not writable)
    tools = Tools(handle, prefix)
    made = MCPServer(
        name,
        instructions="A key-value store that keeps the history of each key. Times are UTC.",
    )
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for read in (tools.get, tools.scan, tools.history, tools.changes, tools.times):
        made.tool(annotations=reads)(_told(read))
    if writable:
        writes = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True)
        for write in (tools.put, tools.delete):
            made.tool(annotations=writes)(_told(write))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a store on stdin and stdout. The environment has the secret of a server's token as
    `KVSTORE_TOKEN`: each user of the machine can read the words of a command."""
    program = "python -m kvstore.adapters.mcp"
    parser = argparse.ArgumentParser(prog=program, description=main.__doc__)
    parser.add_argument("store", help="the path of a store, or the URL of a server")
    parser.add_argument("--prefix", default="", help="offer the keys that begin with this alone")
    parser.add_argument("--writable", action="store_true", help="offer put and delete too")
    given = parser.parse_args(arguments)
    server(
        given.store,
        prefix=given.prefix.encode(),
        writable=given.writable,
        token=os.environ.get("KVSTORE_TOKEN"),
    ).run()


def _told(tool: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The tool, whose errors a model reads: they say what to do."""

    @wraps(tool)
    def told(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            return tool(*args, **named)
        except KVStoreError as error:
            raise ToolError(str(error)) from error

    return told


def _bytes(given: Shown) -> bytes:
    if isinstance(given, str):
        return given.encode()
    try:
        return base64.b64decode(given["base64"], validate=True)
    except (KeyError, binascii.Error) as error:
        raise UsageError(f"{given!r} is no text", 'pass a text, or {"base64": ...}') from error


def _shown(raw: bytes) -> Shown:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _value(raw: bytes) -> dict[str, Any]:
    if len(raw) <= VALUE_BYTES_MAX:
        return {"value": _shown(raw)}
    begin = raw[:VALUE_BYTES_MAX].decode(errors="ignore")
    return {"value": begin, "bytes": len(raw), "is_cut": True}


if __name__ == "__main__":
    main()
