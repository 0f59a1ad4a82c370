"""The public names of a server: `app` makes an application, `serve` runs a process.

The server itself lies in `kvstore.remote.server`. It needs the extra `server`; `app` alone needs
none.
"""

from kvstore.remote.server import (
    App,
    ListenAddress,
    Running,
    Service,
    Token,
    app,
    read_tokens,
    serve,
    server_tls,
    serving,
    status_of,
)

__all__ = [
    "App",
    "ListenAddress",
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
