"""The commands that serve a store: to other processes and machines, and to a browser."""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvstore.cli.options import StoreArgument, open_here, open_to_own
from kvstore.cli.output import note, noted, print_line
from kvstore.errors import UsageError
from kvstore.store import Store
from kvstore.version import __version__

if TYPE_CHECKING:
    import ssl

ImportPlaces: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PLACE",
        help="Clients may have imports below this URL or directory added. May be repeated.",
    ),
]
PullOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Take the pushes below this URL or path, as `kvstore push pull` does.",
    ),
]
SlowOption: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0.0, help="Log operations that take longer."),
]


class LogForms(str, Enum):
    """The forms of the log."""

    json = "json"
    text = "text"
    off = "off"


LogOption: TypeAlias = Annotated[
    LogForms, typer.Option("--log", help="The form of the log's lines on stderr.")
]
CertificateFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="The certificate chain of the server (PEM).")
]


def serve(
    store: StoreArgument,
    listen: Annotated[
        str, typer.Option(help="host:port, or the path of a Unix socket.")
    ] = "127.0.0.1:7447",
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file of tokens: rights, an optional key prefix, secret; one a line."),
    ] = None,
    tls_cert: CertificateFile = None,
    tls_key: Annotated[Path | None, typer.Option(help="The key of the certificate (PEM).")] = None,
    imports_from: ImportPlaces = None,
    pull: PullOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="The name of this store in the statuses of pushes. Default: its directory's.",
            show_default=False,
        ),
    ] = None,
    shard: Annotated[int, typer.Option(help="The shard of pushes that this store takes.")] = 0,
    readers: Annotated[
        int, typer.Option(help="Processes that follow the store and answer reads.", min=0)
    ] = 0,
    create: Annotated[
        bool, typer.Option("--create", help="Create the store if it does not exist.")
    ] = False,
    slow: SlowOption = None,
    log_form: LogOption = LogForms.json,
    log_requests: Annotated[
        bool,
        typer.Option("--log-requests/--no-log-requests", help="Log a line for each request."),
    ] = True,
) -> None:
    """Serve a store until a signal ends the process (SIGINT or SIGTERM).

    Other machines are served with TLS and tokens only. Commands of the same user on this machine,
    such as `kvstore backup run`, work beside it. With `--readers` that many processes answer reads
    at the same address, and this process takes the writes. With `--pull` it takes pushes as long as
    it serves, and logs what becomes of each. A browser finds a page at `/ui/`, which changes
    nothing without an admin token. Needs the extra `server`.

    Its start, recovery and end and each request are logged on stderr, as lines of JSON by default.
    Keys and values are never logged.

    \b
    Examples:
      kvstore serve flights.db
      kvstore serve flights.db --listen 0.0.0.0:7447 --token-file tokens \\
        --tls-cert server.pem --tls-key server.key
      kvstore serve flights.db --readers 4
      kvstore serve flights.db --imports-from s3://bucket/staging
      kvstore serve flights.db --pull s3://bucket/pushes --name eu-1
    """
    # Imported here: other commands start without the packages of a server.
    from kvstore.base.notices import notice
    from kvstore.remote.server import ListenAddress, log_lines, read_tokens
    from kvstore.remote.server import serve as serve_app
    from kvstore.remote.server.added import ADDED_VERBS, added
    from kvstore.remote.server.app import app

    tls = _tls(tls_cert, tls_key)
    tokens = None if token_file is None else read_tokens(token_file)
    address = ListenAddress.parse(listen)
    verbs = added(ADDED_VERBS, "imports")(imports_from or [])
    if pull is None and (name is not None or shard):
        raise UsageError("--name and --shard are for pushes", "pass --pull URL, or leave them out")
    told = log_lines.Log(log_form.value, log_requests, slow)
    with log_lines.told(told):
        notice(log_lines.SERVER, "starting", store=str(store), version=__version__)
        with ExitStack() as stack:
            ending = stack.enter_context(_ended_by_signals())
            opened = stack.enter_context(open_to_own(store, "rocksdb", create=create))
            if told.slow is not None:
                from kvstore.metrics.slow import warn_of_slow

                warn_of_slow(opened, told.slow)
            if pull is not None:
                stack.enter_context(_pulling(opened, pull, name or store.resolve().stem, shard))
            served = app(opened, tokens, verbs=verbs)
            serve_app(served, address, tls=tls, ready=_say_where, readers=readers)
            ending()
        notice(log_lines.SERVER, "stopped", store=str(store))


def ui(
    store: StoreArgument,
    listen: Annotated[
        str, typer.Option(help="host:port on this machine; port 0 takes a free one.")
    ] = "127.0.0.1:7448",
    admin: Annotated[
        bool, typer.Option("--admin", help="Let the page change the store: revert imports.")
    ] = False,
    collection: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A collection of backups to show; may be repeated."),
    ] = None,
) -> None:
    """Show a store as a page for a browser, until a signal ends the process (SIGINT or SIGTERM).

    Prints the address, with a token for this run. The store may be open in another process: the
    page follows it, takes no lock and holds nobody up. The page only reads, unless `--admin` is
    given. Needs the extra `server`.

    \b
    Examples:
      kvstore ui flights.db
      kvstore ui flights.db --admin --collection /backups/flights
    """
    # Imported here: other commands start without the packages of a server.
    from kvstore.remote.control import reach
    from kvstore.remote.server import ListenAddress, Token
    from kvstore.remote.server import serve as serve_app
    from kvstore.remote.server.app import App
    from kvstore.remote.server.page import Page
    from kvstore.remote.server.page.shown_store import opened_to_look
    from kvstore.remote.server.page.views import added_section
    from kvstore.remote.verbs import ADMIN, READ

    address = ListenAddress.parse(listen)
    if not address.is_local or address.path:
        raise UsageError(
            f"the page is local: {listen} is not", "use 127.0.0.1, or run kvstore serve with TLS"
        )
    sections = [added_section("collections", collection)] if collection else []
    secret = secrets.token_urlsafe(32)
    token = Token(secret, (ADMIN if admin else READ,))
    make_page = partial(Page, sections=sections, owned=lambda: reach(store, open_here))

    def say_where(url: str) -> None:
        print_line(f"open {url}/ui/?token={secret}")

    with _ended_by_signals() as ending, opened_to_look(store) as looked_at:
        serve_app(App(looked_at, tokens=[token], make_page=make_page), address, ready=say_where)
        ending()


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    from kvstore.remote.server import server_tls

    if certificate is not None and key is not None:
        return server_tls(certificate, key)
    if certificate or key:
        raise UsageError("--tls-cert and --tls-key come together", "pass both, or none")
    return None


@contextmanager
def _pulling(store: Store, url: str, name: str, shard: int) -> Iterator[None]:
    """Take pushes for the time of the block, and tell what becomes of each, and each failure."""
    from kvstore.base.notices import notice
    from kvstore.remote.server import log_lines
    from kvstore.remote.server.added import ADDED_WORK, added

    pull = partial(added(ADDED_WORK, "pull"), store, url, name=name, shard=shard)
    if log_lines.begun().form != "off":
        with pull():
            notice("kvstore.pull", "following", store=str(store.path), pushes=url, name=name)
            yield
        return
    with noted("kvstore.pull", logging.INFO), pull():  # it begins at once, and may fail at once
        note(f"{store.path} follows {url} as {name}")
        yield


def _say_where(url: str) -> None:
    print_line(f"serving {url}")


@contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """End the block at SIGINT and SIGTERM, without an error, also before the server runs. Once the
    block has called the function that it gets, signals have no effect: the store is being closed.
    """
    is_over = False

    def end(*_: object) -> None:
        if not is_over:
            ending()
            raise _SignalCame

    def ending() -> None:
        nonlocal is_over
        is_over = True

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with suppress(_SignalCame):
            yield ending
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _SignalCame(BaseException):
    """A signal asked this process to end."""
