"""The arguments that all commands on a collection take, and how they open it."""

from __future__ import annotations

import os
import signal
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from backup.chains import no_backup
from backup.collection import Collection
from backup.source import Stop
from kvstore.cli.output import note
from kvstore.errors import KVStoreError

PASSPHRASE: Final = "KVSTORE_PASSPHRASE"  # a name, not a secret

patience: Final[ContextVar[float]] = ContextVar("patience")
"""How long passing failures of the storage are retried, in seconds."""

_COMPLETION_PATIENCE_S: Final = 1.0
"""A person waits for the completion, so a storage that does not answer is not retried for long."""


def complete_label(ctx: Any, incomplete: str) -> list[str]:
    """The labels of the collection that the command line names; empty if it cannot be read."""
    key_file = ctx.params.get("key_file")
    # The parser gives up at an option without its value, and leaves the arguments before it.
    collection = ctx.params.get("collection") or next(iter(ctx.args), None)
    if collection is None:
        return []
    try:
        passphrase = None if key_file is not None else os.environ.get(PASSPHRASE)
        how: Any = {"key_file": key_file, "patience": _COMPLETION_PATIENCE_S}
        labels = Collection(collection, passphrase, **how).show().labels
    except (KVStoreError, OSError):
        return []
    return sorted(label for label in labels if label.startswith(incomplete))


complete_label.__annotations__ = {"ctx": Any, "incomplete": str}  # Typer passes arguments by them

InstantOption = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="Read at this time, or at the instant of this label. Times are written as 2026-11-22, "
        "'1 hour ago', yesterday, -1h, ISO-8601 with a zone, or nanoseconds. Default: the newest.",
        show_default=False,
        autocompletion=complete_label,
    ),
]
CollectionArgument = Annotated[
    str,
    typer.Argument(
        metavar="COLLECTION", help="A path, s3://, gs:// or az:// URL.", show_default=False
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(help="File with the key: 32 bytes, or 64 hex digits.", show_default=False),
]


def open_collection(collection: str, key_file: Path | None) -> Collection:
    """Open a collection, which may be empty."""
    passphrase = None if key_file is not None else os.environ.get(PASSPHRASE)
    return Collection(
        collection,
        passphrase,
        key_file=key_file,
        patience=patience.get(),
        on_wait=lambda waiting: note(str(waiting)),
    )


def open_existing(collection: str, key_file: Path | None) -> Collection:
    """Open a collection. Raises `UsageError` for an empty one, such as a mistyped path."""
    found = open_collection(collection, key_file)
    if found.source is None:
        raise no_backup(collection)
    return found


def stop_on_signals() -> Stop:
    """A `Stop` that SIGINT and SIGTERM set: the follower then ends in order."""
    stop = Stop()

    def on_signal(*_: object) -> None:
        # In a thread: the handler may have interrupted a holder of the locks that `set` needs.
        threading.Thread(target=stop.set).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop
