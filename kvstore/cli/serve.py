"""The command that serves a store to other processes and machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.options import StoreArgument, open_to_own
from kvstore.cli.output import print_line
from kvstore.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    store: StoreArgument,
    listen: Annotated[
        str, typer.Option(help="host:port, or the path of a Unix socket.")
    ] = "127.0.0.1:7447",
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file of tokens: rights, an optional key prefix, secret; one a line."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="The certificate chain of the server (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The key of the certificate (PEM).")] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the store if it does not exist.")
    ] = False,
) -> None:
    """Serve a store until a signal ends the process (SIGINT or SIGTERM).

    Other machines are served with TLS and tokens only. Commands of the same user on this machine,
    such as `kvstore backup run`, work beside it. Needs the extra `server`.

    \b
    Examples:
      kvstore serve flights.db
      kvstore serve flights.db --listen 0.0.0.0:7447 --token-file tokens \\
        --tls-cert server.pem --tls-key server.key
    """
    # Imported here: other commands start without the packages of a server.
    from kvstore.server import ListenAddress, app, read_tokens, server_tls
    from kvstore.server import serve as serve_app

    if (tls_cert is None) is not (tls_key is None):
        raise UsageError("--tls-cert and --tls-key come together", "pass both, or none")
    tls = None if tls_cert is None or tls_key is None else server_tls(tls_cert, tls_key)
    tokens = None if token_file is None else read_tokens(token_file)
    address = ListenAddress.parse(listen)
    with open_to_own(store, "rocksdb", create=create) as opened:
        served = app(opened, tokens)
        serve_app(served, address, tls=tls, ready=lambda url: print_line(f"serving {url}"))
