"""`kvstore.connect`: an address becomes a client."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

from kvstore.arguments import require_seconds
from kvstore.client import calls
from kvstore.client.asynchronous import AsyncClient
from kvstore.client.client import Client
from kvstore.client.endpoint import Endpoint, client_tls
from kvstore.client.pool import Pool
from kvstore.limits import CLIENT_PATIENCE_S, CLIENT_TIMEOUT_S, CONTROL_DIAL_S


def connect(
    address: str | os.PathLike[str],
    token: str | None = None,
    *,
    ca: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    patience: float | None = None,
) -> Client:
    """A client of the store that is served at `address`: an `http` or `https` URL, the path of a
    Unix socket, or the directory of a store, whose owner listens (`kvstore.open(path,
    control=True)`).

    `token` goes with every call. `ca` is a file with the certificates of trusted issuers; by
    default these are the issuers that the machine trusts. `timeout` bounds each wait for the
    server, `patience` the time for which a call is sent again. Both are in seconds.

    Raises `DeterminateError` if nobody serves there, `AccessDeniedError` for a token or a
    certificate that is refused. One round trip.
    """
    text = os.fspath(address)
    if isinstance(text, str) and "://" in text:
        tls = client_tls(ca) if text.startswith("https:") else None
        endpoint = Endpoint.parse(text, token=token, tls=tls)
    elif os.path.isdir(text):
        endpoint = Endpoint.of_store(Path(os.fsdecode(text)).absolute())
        endpoint.open(CONTROL_DIAL_S).close()  # where nobody listens, patience is of no use
    else:
        endpoint = Endpoint.at_path(text, token=token)
    wait = CLIENT_TIMEOUT_S if timeout is None else require_seconds(timeout, name="timeout")
    again = CLIENT_PATIENCE_S if patience is None else require_seconds(patience, name="patience")
    pool = Pool(endpoint, timeout=wait, patience=again)
    try:
        pool.known = pool.send(calls.fields_of("times"))["upper"] - 1
    except BaseException:
        pool.close()
        raise
    return Client(pool)


async def connect_async(
    address: str | os.PathLike[str],
    token: str | None = None,
    *,
    ca: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    patience: float | None = None,
) -> AsyncClient:
    """The same as `connect`, for asyncio."""
    how = partial(connect, address, token, ca=ca, timeout=timeout, patience=patience)
    return AsyncClient(await asyncio.to_thread(how))
