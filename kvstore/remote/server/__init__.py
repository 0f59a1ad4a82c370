"""A store over the network: an ASGI application, and the process that runs it.

Needs the extra `server`: `pip install 'kvstore-mvcc[server]'` (`app` alone needs none).
"""

from kvstore.remote.server.app import App, app
from kvstore.remote.server.http import status_of
from kvstore.remote.server.running import ListenAddress, Running, serve, server_tls, serving
from kvstore.remote.server.service import Service
from kvstore.remote.server.tokens import Token, read_tokens

__all__ = [
    "ListenAddress",
    "App",
    "Running",
    "Service",
    "Token",
    "app",
    "read_tokens",
    "serve",
    "server_tls",
    "serving",
    "status_of",
]
