"""A server that ends leaves no caller waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Iterator

import pytest

import kvstore
from kvstore.remote.server.app import app
from kvstore.remote.server.guarded import GuardedServer
from kvstore.remote.server.running import server_config


@pytest.fixture
def kept_garbage() -> Iterator[None]:
    """Without a collection, which would close a socket that was left open."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("kept_garbage")
@pytest.mark.parametrize("turns", range(8))
def test_a_connection_that_comes_while_the_server_ends_is_closed(turns: int) -> None:
    """The server ends so many turns of its loop behind the moment at which a caller connected."""
    with (
        kvstore.open(None, engine="memory") as store,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket() as caller,
    ):
        config = server_config(app(store), None, loop="asyncio", lifespan="off", grace_s=1)
        server = GuardedServer(config)

        async def end() -> None:
            serving = asyncio.create_task(server.serve([listener]))
            while not server.is_up.is_set():
                await asyncio.sleep(0)
            caller.connect(listener.getsockname())
            for _ in range(turns):
                await asyncio.sleep(0)
            server.should_exit = True
            await serving

        asyncio.run(end())
        caller.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""
        assert not server.server_state.connections
