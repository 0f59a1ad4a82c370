"""How a script reaches a store: by opening it, or beside the process that has it open.

with opened(path) as store: ...          by its path
with as_store(client) as store: ...      by a client of its owner
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvstore import opening
from kvstore.arguments import require_path
from kvstore.errors import LockedError, NotListeningError, UsageError
from kvstore.limits import CONTROL_TRIES, CONTROL_TRY_S
from kvstore.store import Store

if TYPE_CHECKING:
    from kvstore.client import Client

StoreOrClient: TypeAlias = "Store | Client"
"""A store of this process, or the client of one that another process of this machine owns."""


@contextmanager
def as_store(given: StoreOrClient) -> Iterator[Store]:
    """The store itself, or the store of which `given` is a client by its path.

    In the second case the store shows the moment of this call, for the time of the block. Costs an
    fsync of the owner, and the opening of a reader. Raises `UsageError` for the client of a URL:
    the files of its store are elsewhere.
    """
    if isinstance(given, Store):
        yield given
        return
    owner = client_of(given)
    assert owner is not None, "a client has an owner"
    # Imported late: a client brings TLS with it, and most programs need none.
    from kvstore.control.beside import beside

    with beside(owner) as store:
        yield store


def client_of(given: StoreOrClient) -> Client | None:
    """The client of the owner; None for a store that this process owns, or only reads."""
    if isinstance(given, Store):
        found: Client | None = getattr(given, "owner", None)
        return found
    from kvstore.client import Client  # see `as_store`

    if not isinstance(given, Client):
        raise UsageError(
            f"a Store or a Client is needed, not {type(given).__name__}",
            "open the store, or connect to its owner: kvstore.connect(path)",
        )
    return given


@contextmanager
def opened(
    path: str | os.PathLike[str], open_here: Callable[[Path], Store] | None = None
) -> Iterator[Store]:
    """The store at `path`, opened to write for the time of the block; if another process has it
    open and listens, the store as of now beside that process.

    Raises as `reached`.
    """
    with reached(path, open_here) as found, as_store(found) as store:
        yield store


@contextmanager
def reached(
    path: str | os.PathLike[str], open_here: Callable[[Path], Store] | None = None
) -> Iterator[StoreOrClient]:
    """The store at `path`, opened to write for the time of the block; if another process has it
    open and listens, a client of that process. A client keeps no file of the store open, so it
    suits work without an end.

    Raises as `kvstore.open`, and `LockedError` if the owner does not listen.
    """
    place = require_path(path)
    open_here = open_here or partial(opening.open, create=False)
    for attempt in range(CONTROL_TRIES):
        if attempt:
            time.sleep(CONTROL_TRY_S)  # an owner that opens or closes is between two states
        try:
            store = open_here(place)
        except LockedError as error:
            refusal = error
        else:
            with store:
                yield store
            return
        from kvstore.client import connect  # see above

        try:
            client = connect(place)
        except NotListeningError:
            continue
        with client:
            yield client
        return
    raise LockedError(
        refusal.path,
        refusal.owner,
        "have it listen (kvstore.open(path, control=True)), or close it there",
    )
