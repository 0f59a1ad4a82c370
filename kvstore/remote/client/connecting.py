"""`kvstore.connect`: an address becomes a client."""

from __future__ import annotations

import asyncio
import os
from functools import partial

from kvstore.base.arguments import SECONDS, require_absolute
from kvstore.errors import UsageError
from kvstore.limits import (
    CLIENT_PATIENCE_S,
    CLIENT_TIMEOUT_S,
    CLIENT_TIMEOUT_S_MAX,
    CLIENT_TIMEOUT_S_MIN,
    CONTROL_DIAL_S,
)
from kvstore.remote.client.asynchronous import AsyncClient
from kvstore.remote.client.client import Client
from kvstore.remote.client.transport import Endpoint, Pool, client_tls
from kvstore.remote.verbs import TIMES


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
    server, `patience` the time for which a call is sent again. Both are in seconds, by default
    `CLIENT_TIMEOUT_S` and `CLIENT_PATIENCE_S` of `kvstore.limits`.

    Raises `DeterminateError` if nobody serves there, `AccessDeniedError` for a token or a
    certificate that is refused. One round trip.
    """
    wait = CLIENT_TIMEOUT_S if timeout is None else SECONDS.check("timeout", timeout)
    if not wait:
        raise UsageError("timeout=0 leaves the server no time to answer", "pass seconds above 0")
    again = CLIENT_PATIENCE_S if patience is None else SECONDS.check("patience", patience)
    endpoint = _endpoint(address, token, ca)
    wait = min(max(wait, CLIENT_TIMEOUT_S_MIN), CLIENT_TIMEOUT_S_MAX)
    pool = Pool(endpoint, timeout=wait, patience=again)
    try:
        pool.known = pool.call(TIMES)["upper"] - 1
    except BaseException:
        pool.close()
        raise
    return Client(pool)


def _endpoint(
    address: str | os.PathLike[str], token: str | None, ca: str | os.PathLike[str] | None
) -> Endpoint:
    if isinstance(address, str) and "://" in address:
        tls = client_tls(ca) if address.lower().startswith("https:") else None
        return Endpoint.parse(address, token=token, tls=tls)
    path = require_absolute(address, name="address")
    if not os.path.isdir(path):
        return Endpoint.at_path(str(path), token=token)
    endpoint = Endpoint.of_store(path)
    endpoint.open(CONTROL_DIAL_S).close()  # nobody listens, so waiting longer is of no use
    return endpoint


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
