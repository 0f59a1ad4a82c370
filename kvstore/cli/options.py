"""Arguments and options that several commands share: their parsers, their completion, and how a
command opens a store.
"""

from __future__ import annotations

import base64
import binascii
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import typer

from kvstore.base.arguments import word
from kvstore.base.paths import is_url
from kvstore.base.span import Span
from kvstore.cli.output import note
from kvstore.cli.process import uninterrupted
from kvstore.codec.json import bytes_json
from kvstore.errors import KVStoreError, NotAStoreError, UsageError
from kvstore.opening import ENGINES, engine_at, open_read_only
from kvstore.opening import open as open_store
from kvstore.remote import control
from kvstore.remote.control import StoreOrClient
from kvstore.store import TASKS_DIRECTORY, Store

if TYPE_CHECKING:
    from kvstore.remote.client import Client

# --------------------------------------------------------------------------------------------------
# Words that the shell completes: the names of holds, feeds and imports of the store in question.
#
# A completion that fails has no words. The shell shows no error while a user types.

_WORDS_MAX: Final = 1000


def names_of(read: Callable[[Store], Iterable[str]]) -> Callable[..., list[str]]:
    """A completer of names that `read` finds in the store that the command line names."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        try:
            with open_read_only(ctx.params["store"]) as opened:
                found = sorted({name for name in read(opened) if name.startswith(incomplete)})
        except (KVStoreError, OSError, KeyError):
            return []
        return found[:_WORDS_MAX]

    # The annotations of a completer decide what it is given.
    complete.__annotations__ = {"ctx": Any, "incomplete": str}
    return complete


# --------------------------------------------------------------------------------------------------
# Arguments and options that several commands share, and their parsers.

T = TypeVar("T", bound=str)

_CONTROLS: Final = (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F))
_ESCAPES: Final = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS}
"""Control characters, the ends of lines, and marks that reverse the direction of text."""


class Encoding(str, Enum):
    """The notation of keys and values on the command line."""

    TEXT = "text"
    HEX = "hex"
    BASE64 = "base64"


StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", help="The store's directory.", show_default=False)
]
AddressArgument = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="The store's directory, or the URL of its server. KVSTORE_TOKEN has the token for a "
        "server, KVSTORE_CA a file of certificates to trust.",
        show_default=False,
    ),
]
EncodingOption = Annotated[
    Encoding, typer.Option("--encoding", "-e", help="The notation of keys and values.")
]
KeyEncodingOption = Annotated[
    Encoding | None,
    typer.Option(help="The notation of keys, if values have another.", show_default=False),
]
ValueEncodingOption = Annotated[
    Encoding | None,
    typer.Option(help="The notation of values, if keys have another.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
AsOfOption = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="Read at this time: 2026-11-22, '1 hour ago', yesterday, -1h, ISO-8601 with a zone, "
        "or nanoseconds. Default: the newest.",
        show_default=False,
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=0, help="Print at most this many.", show_default=False)
]
LISTED_MAX: Final = 1000
"""Records that a list has unless --limit asks for more: a year of nightly loads, three a day."""
ListLimitOption = Annotated[int, typer.Option("--limit", min=0, help="List at most this many.")]
PrefixOption = Annotated[
    str | None,
    typer.Option("--prefix", "-p", help="Only keys with this prefix.", show_default=False),
]
StartOption = Annotated[
    str | None, typer.Option("--start", help="The first key to include.", show_default=False)
]
EndOption = Annotated[
    str | None,
    typer.Option("--end", help="The first key to exclude.", show_default=False),
]


class Encodings(NamedTuple):
    """The notations of keys and of values."""

    key: Encoding
    value: Encoding

    @classmethod
    def of(cls, both: Encoding, key: Encoding | None, value: Encoding | None) -> Encodings:
        """The notations that the three options name."""
        return cls(key or both, value or both)


_RULES: Final = {
    Encoding.TEXT: "name another encoding",
    Encoding.HEX: "write two digits (0-9, a-f) for each byte",
    Encoding.BASE64: "write base64 of RFC 4648, with its padding",
}


def to_bytes(text: str, encoding: Encoding) -> bytes:
    """Parse a key or value. Raises `UsageError`."""
    try:
        if encoding is Encoding.HEX:
            return bytes.fromhex(text)
        if encoding is Encoding.BASE64:
            return base64.b64decode(text, validate=True)
        # The bytes of the shell's arguments, also where they are not UTF-8.
        return text.encode("utf-8", "surrogateescape")
    except (ValueError, binascii.Error) as error:
        raise UsageError(f"{text!r:.80} is not {encoding.value}", _RULES[encoding]) from error


def to_text(raw: bytes, encoding: Encoding) -> str:
    """Write a key or value for a person: text, with escapes for bytes that are not text and for
    control characters, which could change the terminal or the columns of a line."""
    if encoding is Encoding.HEX:
        return raw.hex()
    if encoding is Encoding.BASE64:
        return base64.b64encode(raw).decode()
    return raw.decode("utf-8", "backslashreplace").translate(_ESCAPES)


def to_json(raw: bytes | None, encoding: Encoding) -> str | dict[str, str] | None:
    """Write a key or value for a program, without loss. Bytes that are not text become an object
    `{"base64": ...}`, as in the lines of `kvstore changes`."""
    if raw is None:
        return None
    if encoding is not Encoding.TEXT:
        return to_text(raw, encoding)
    return bytes_json(raw)


def to_span(
    encoding: Encoding, *, start: str | None = None, end: str | None = None, prefix: str | None
) -> Span:
    """The span that the options name. Raises `UsageError`."""
    bounds = (None if text is None else to_bytes(text, encoding) for text in (start, end, prefix))
    return Span.of(*bounds)


# --------------------------------------------------------------------------------------------------
# How commands open stores: to write, beside the owner of a store, or as its owner.


def reach(path: Path) -> AbstractContextManager[StoreOrClient]:
    """Open a store to write, by the engine that made it. If another process has the store open and
    listens, the result is a client of that process."""
    return control.reach(path, open_here)


@contextmanager
def open_to_read(address: str) -> Iterator[StoreOrClient]:
    """Open a store to read: its files, which may be in use, or a client of its server by a URL. A
    note tells of keys in the files that have expired, and that no writer has deleted yet."""
    if is_url(address):
        with _served(address) as client:
            yield client
        return
    with open_read_only(address) as store:
        count, has_more = store.browsing.expired()
        if count:
            note(
                f"{'more than ' if has_more else ''}{count:,} keys have expired and are still "
                "there: the next command that writes, or call of a writer, deletes them"
            )
        yield store


@contextmanager
def open_for_rows(address: str) -> Iterator[StoreOrClient]:
    """Open a store to read and write rows: by its path as `reach`, or a client of its server by a
    URL."""
    if is_url(address):
        with _served(address) as client:
            yield client
        return
    with reach(Path(address)) as found:
        yield found


def _served(url: str) -> Client:
    """A client of the server at `url`. The environment has its secret: each user of the machine can
    read the words of a command."""
    from kvstore.remote.client import connect  # brings TLS with it

    return connect(url, os.environ.get("KVSTORE_TOKEN"), ca=os.environ.get("KVSTORE_CA"))


def open_or_create(
    path: Path, engine: str, *, create: bool
) -> AbstractContextManager[StoreOrClient]:
    """Open a store as `reach`. Where nothing is, make one of `engine` if `create`."""
    if create and engine_at(path) is None:
        made_of = word(*ENGINES).check("engine", engine)
        return _created(path, partial(open_store, path, made_of))
    _require_store(path, create=create)
    return reach(path)


def open_or_create_for_rows(
    address: str, engine: str, *, create: bool
) -> AbstractContextManager[StoreOrClient]:
    """Open a store to write rows; where nothing is, make one if `create`."""
    if not is_url(address):
        return open_or_create(Path(address), engine, create=create)
    if create:
        raise UsageError(
            "--create with a URL", "its server makes the store: kvstore serve --create"
        )
    return open_for_rows(address)


def open_to_own(path: Path, engine: str, *, create: bool) -> AbstractContextManager[Store]:
    """Open or create a store in this process, which listens: scripts run beside it."""
    from kvstore.remote.control import open as open_control  # brings the server with it

    _require_store(path, create=create)
    made_by = engine_at(path)
    named = made_by or word(*ENGINES).check("engine", engine)
    listening = partial(open_control, path, named, create=create, control=True)
    return listening() if made_by is not None else _created(path, listening)


def _require_store(path: Path, *, create: bool) -> None:
    if not create and not path.exists():
        raise NotAStoreError(str(path), "no store is there", "check the path, or pass --create")


@contextmanager
def _created(path: Path, make: Callable[[], Store]) -> Iterator[Store]:
    """A new store at `path`. A command that is refused, fails or is interrupted leaves none behind,
    unless something was written.

    An interrupt waits until the store is open, which takes some 30 ms. A process that ended earlier
    would leave files, and nobody could tell whether another process had made them.
    """
    if not path.absolute().parent.exists():
        note(f"{path.parent} is not there, and is made")
    had_directory, is_free = path.exists(), _is_free(path)
    store: Store | None = None
    try:
        with uninterrupted():
            store = make()
        yield store
    except BaseException:
        with uninterrupted():
            if store is not None:
                is_free = is_free and _is_blank(path, store)
                store.close()
                if is_free:
                    _remove(path, keeps_directory=had_directory)
        raise
    else:
        store.close()


def _is_free(path: Path) -> bool:
    """Whether nothing is at `path`, or an empty directory."""
    try:
        return next(path.iterdir(), None) is None
    except FileNotFoundError:
        return True
    except OSError:  # the opening tells why
        return False


def _is_blank(path: Path, store: Store) -> bool:
    """Whether nobody has written to the store at `path`. An import that was begun is no write."""
    try:
        has_imports = any(each.added is not None for each in store.imports.all())
        is_used = has_imports or store.holds.all() or store.tables()
        has_tasks = (path / TASKS_DIRECTORY).exists()
        return not (is_used or has_tasks) and next(store.changes(0), None) is None
    except KVStoreError:  # the store has failed, so its contents are not known
        return False


def _remove(path: Path, *, keeps_directory: bool) -> None:
    if not keeps_directory:
        shutil.rmtree(path, ignore_errors=True)
        return
    for each in path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            with suppress(OSError):  # the error that led here is the one to tell
                each.unlink()


def open_here(path: Path) -> Store:
    """Open a store in this process, by the engine that made it."""
    made_by = engine_at(path)
    return open_store(path, create=False) if made_by is None else open_store(path, made_by)
