"""A client of a store that another process serves, with the names of `Store`."""

from kvstore.remote.client.asynchronous import AsyncClient
from kvstore.remote.client.client import Client
from kvstore.remote.client.connecting import connect, connect_async

__all__ = ["AsyncClient", "Client", "connect", "connect_async"]
