"""A client of a store that another process serves, with the names of `Store`."""

from kvstore.remote.client.asynchronous import AsyncClient, connect_async
from kvstore.remote.client.client import Client, connect

__all__ = ["AsyncClient", "Client", "connect", "connect_async"]
