"""The process that serves a store: the application on a socket of its own, a shared one, or the
control socket in the directory of the store, run by uvicorn.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from uvicorn import Config

from kvstore.base.forks import own, undivided
from kvstore.base.notices import notice
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import AccessDeniedError, LockedError, UsageError
from kvstore.limits import (
    CONTROL_END_S,
    SERVER_ACCEPT_PAUSE_S,
    SERVER_BACKLOG,
    SERVER_IDLE_S_MAX,
    SERVER_REQUEST_S_MAX,
)
from kvstore.remote import control_socket
from kvstore.remote.control_socket import short
from kvstore.remote.presence import Turn, note_owner, sharing
from kvstore.remote.server import log_lines
from kvstore.remote.server.app import App
from kvstore.remote.server.app import app as app_of
from kvstore.remote.server.guarded import GuardedProtocol, GuardedServer
from kvstore.remote.server.http import require_extra
from kvstore.remote.server.readers import Readers
from kvstore.store import Store
from kvstore.version import __version__

# --------------------------------------------------------------------------------------------------
# A server that accepts at a socket which other processes share.
#
# It takes one connection at a time. asyncio's own servers take all waiting connections, so one of
# several idle processes would get them all. This module needs the extra `server`.


class SharingServer(GuardedServer):
    """A server of one of the processes that share `listener`."""

    def __init__(
        self, config: Config, listener: socket.socket, *, ready: Callable[[], None]
    ) -> None:
        super().__init__(config, ready=ready, ending=None)
        listener.setblocking(False)
        self._listener = listener
        self._handshakes: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        await super().startup(sockets)

    async def shutdown(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        await super().shutdown(sockets)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # another process has taken it
            return
        except OSError:  # no descriptor is free
            loop.remove_reader(self._listener)
            loop.call_later(SERVER_ACCEPT_PAUSE_S, self._accept_again)
            return
        connection.setblocking(False)
        task = loop.create_task(self._begin(connection))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _accept_again(self) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def _begin(self, connection: socket.socket) -> None:
        config = self.config
        with suppress(OSError, asyncio.TimeoutError):  # a handshake that fails is the caller's
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: GuardedProtocol(
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                ),
                connection,
                ssl=config.ssl,
            )
            return
        connection.close()


# --------------------------------------------------------------------------------------------------
# The process that serves a store alone: the application on a socket, run by uvicorn.
#
#     address = ListenAddress.parse("127.0.0.1:7447")
#     with serving(app(store), address) as running: ...     in a thread
#     serve(app(path), address)                             until a signal
#     serve(app(path), address, readers=4)                  the same, with reader processes
#
# Invariants
# 1. An address that other machines reach is served with TLS and with tokens, or not at all.
# 2. A Unix socket is reachable for the user of this process only, from its first moment.

DEFAULT_PORT: Final = 7447


class ListenAddress(NamedTuple):
    """Where a server listens: a host and a port, or the path of a Unix socket."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Read `host:port`, `[host]:port`, `:port`, or a path. Raises `UsageError`."""
        if "/" in text:
            return cls("", 0, text.removeprefix("unix:"))
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"address {text!r}", "write host:port, or the path of a socket")
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine reach it."""
        if self.path or self.host == "localhost":
            return True
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def absolute(self) -> ListenAddress:
        """The same address after a change of the directory."""
        return self._replace(path=os.path.abspath(self.path)) if self.path else self

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"


class Running:
    """A server that runs in a thread of this process."""

    def __init__(self, server: Any, thread: threading.Thread, place: _Place) -> None:
        self._server, self._thread = server, thread
        self.address = place.address
        self.url = place.url
        """What `kvstore.connect` takes."""

    def stop(self) -> None:
        """End the server, and wait for it. Repeatable."""
        self._server.should_exit = True
        self._thread.join()


@contextmanager
def serving(
    app: App,
    address: ListenAddress,
    *,
    tls: ssl.SSLContext | None = None,
    backing: socket.socket | None = None,
    readers: int = 0,
) -> Iterator[Running]:
    """Serve in a thread until the block ends. A port 0 becomes a free port.

    Raises as `serve`. The thread ends with the block, and closes the store that `app` has opened.
    """
    address = address.absolute()
    with _prepared(app, address, tls, backing or _bound(app, address, tls), readers) as place:
        server = _server(app, place)
        thread = threading.Thread(
            target=server.run, args=([place.listener],), name="kvstore-server", daemon=True
        )
        thread.start()
        try:
            server.is_up.wait()
            yield Running(server, thread, place)
        finally:
            server.should_exit = True
            thread.join()


def serve(
    app: App,
    address: ListenAddress,
    *,
    tls: ssl.SSLContext | None = None,
    ready: Callable[[str], None] = lambda url: None,
    readers: int = 0,
) -> None:
    """Serve until SIGINT or SIGTERM. Requests under way are answered first. `ready` is called with
    the address for clients once connections are taken.

    With `readers` that many processes follow the store and answer reads at the same address, and
    this process takes the writes. They are started again when they end.

    Raises `UsageError` for an address off the machine without TLS or without tokens, where the
    extra `server` is not installed, and for readers of a store in memory; `LockedError` if the
    address is taken; `StorageError` if a reader process does not start.
    """
    address = address.absolute()
    with _prepared(app, address, tls, _bound(app, address, tls), readers) as place:
        _server(app, place, ready=partial(ready, place.url)).run([place.listener])


class _Place(NamedTuple):
    """Where a server runs: the socket of this process, and what callers see."""

    listener: socket.socket
    tls: ssl.SSLContext | None
    address: ListenAddress
    url: str
    readers: Readers | None


@contextmanager
def _prepared(
    app: App,
    address: ListenAddress,
    tls: ssl.SSLContext | None,
    listener: socket.socket,
    count: int,
) -> Iterator[_Place]:
    """The place of a server at `listener`, with its readers. The block's end closes it."""
    found, url = _addresses(address, listener, tls)
    try:
        require_extra()
        if not count:
            yield _Place(listener, tls, found, url, None)
            return
        files = None
        if tls is not None:
            if not isinstance(tls, ServerTls):
                raise UsageError("readers with a TLS context of your own", "make it by server_tls")
            files = tls.files
        with Readers(app, listener, count=count, tls_files=files) as readers:
            yield _Place(readers.socket, None, found, url, readers)
    finally:
        listener.close()
        if address.path:
            with suppress(OSError):
                os.unlink(address.path)


def _bound(app: App, address: ListenAddress, tls: ssl.SSLContext | None) -> socket.socket:
    require_safe(app, address, tls)
    return bound(address)


def require_safe(app: App, address: ListenAddress, tls: ssl.SSLContext | None) -> None:
    """Raise `UsageError` where strangers would reach the store, or read its answers."""
    if address.is_local:
        return
    if tls is None:
        raise UsageError(
            f"{address} is reached from other machines", "pass --tls-cert and --tls-key"
        )
    if not app.has_tokens:
        raise UsageError(f"{address} is reached from other machines", "pass --token-file")


class ServerTls(ssl.SSLContext):
    """The TLS of a server. It remembers its files, from which each reader process makes its own."""

    files: tuple[str, str]


def server_tls(cert: str | os.PathLike[str], key: str | os.PathLike[str]) -> ssl.SSLContext:
    """The TLS of a server, from the files of its certificate chain and its key. TLS 1.2 and later.
    Raises `UsageError`."""
    context = ServerTls(ssl.PROTOCOL_TLS_SERVER)
    context.files = (os.path.abspath(cert), os.path.abspath(key))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UsageError(f"certificate {cert} with key {key}: {error}", "pass PEM files") from error
    return context


def bound(address: ListenAddress) -> socket.socket:
    """A socket that listens at the address. Raises `LockedError`, `AccessDeniedError`."""
    if address.path:
        return _bound_path(address.path)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(SERVER_BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise _refused(str(address), error) from error
    return listener


def _bound_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            with short(*_parted(path)) as address:
                listener.bind(address)
        finally:
            os.umask(before)
        listener.listen(SERVER_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(path, error) from error
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a process that is gone. Raises `LockedError` if one answers."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"{path} is no socket", "pass another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            with short(*_parted(path)) as address:
                probe.connect(address)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
    raise LockedError(path, "another server")


def _parted(path: str) -> tuple[Path, str]:
    return Path(path).parent, Path(path).name


def _refused(where: str, error: OSError | UnicodeError) -> Exception:
    if isinstance(error, PermissionError):
        return AccessDeniedError(where, str(error.strerror))
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return LockedError(where, "another server")
    return UsageError(f"{where}: {error}", "pass another address")


def _addresses(
    address: ListenAddress, listener: socket.socket, tls: ssl.SSLContext | None
) -> tuple[ListenAddress, str]:
    if address.path:
        return address, address.path
    found = ListenAddress(address.host, listener.getsockname()[1])
    return found, f"{'https' if tls else 'http'}://{found}"


def _server(app: App, place: _Place, ready: Callable[[], None] = lambda: None) -> Any:
    """A server of uvicorn that is not started. `is_up` is set once it serves. It ends its readers
    first: they finish the calls that they have handed to it."""

    def listening() -> None:
        store, count = app.service.store, 0 if place.readers is None else place.readers.count
        where = str(store.path or "in memory")
        facts: dict[str, Any] = {"url": place.url, "store": where, "readers": count}
        notice(log_lines.SERVER, "listening", **facts, version=__version__)
        ready()

    def ending() -> None:
        notice(log_lines.SERVER, "stopping", url=place.url, signal=server.ended_by)
        if place.readers is not None:
            place.readers.stop()

    app.tells_requests = place.readers is None  # else they tell of their own, see `log_lines`
    server = GuardedServer(server_config(app, place.tls), ready=listening, ending=ending)
    return server


def server_config(
    app: App,
    tls: ssl.SSLContext | None,
    *,
    loop: Literal["auto", "asyncio"] = "auto",
    lifespan: Literal["on", "off"] = "on",
    grace_s: float | None = None,
) -> Config:
    """The configuration of uvicorn. A server that ends waits for the calls under way: `grace_s`
    seconds at most, by default as long as a request may take."""
    config = Config(
        app,
        http=GuardedProtocol,
        ws="none",
        loop=loop,
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        proxy_headers=False,  # a client must not choose its own address
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(SERVER_IDLE_S_MAX),
        timeout_graceful_shutdown=int(SERVER_REQUEST_S_MAX if grace_s is None else grace_s),
    )
    config.load()
    config.ssl = tls
    return config


# --------------------------------------------------------------------------------------------------
# The thread that answers on the control socket of one open store.
#
# Invariants
# 1. The socket is there only while the store is open: it is made behind the opening, and removed
#    before the store gives up its lock.
# 2. A forked child closes its copies of the socket and of all connections. So a caller of a process
#    that was killed sees the end, although a child lives on.
# 3. The thread is the only cost: nothing of the store asks whether somebody listens.


class ListeningStore(Store):
    """A store that answers scripts, from `listen` until it is closed."""

    _listener: Listener | None = None
    _turn: Turn | None = None

    def listen(self, *, turn: Turn | None = None, is_takeover: bool = False) -> None:
        """Answer on the control socket from now on. `is_takeover` tells that other processes have
        had a part in the store before. The `turn` of a shared store is given back at the end."""
        self._turn = turn
        self._listener = Listener(self)
        if turn is not None:
            assert self.path is not None, "the socket is there"
            turn.announce()
            note_owner(self.path, is_takeover=is_takeover)

    def stats(self) -> dict[str, Any]:
        """See `Store.stats`. A shared store tells who shares it."""
        assert self.path is not None, "the socket is there"
        told = {} if self._turn is None else sharing(self.path)
        return {**super().stats(), **told}

    def close(self) -> None:
        """End the listening, then the store; see `Store.close`. A shared store empties its memory
        before, while it answers: guests wait less for the next owner."""
        if self._turn is not None and not self._closed:
            assert isinstance(self._engine, RocksEngine)
            self._engine.empty_memory()
        if self._listener is not None:
            self._listener.close()
        try:
            super().close()
        finally:
            if self._turn is not None:
                self._turn.close()


class Listener:
    """Answers on the control socket until it is closed."""

    def __init__(self, store: Store) -> None:
        assert store.path is not None
        self._path = store.path
        self._app: App = app_of(store)
        config = server_config(
            self._app,
            None,
            loop="asyncio",  # uvloop has handlers of its own for forks
            lifespan="off",
            grace_s=CONTROL_END_S,
        )
        self._server = GuardedServer(config)
        with undivided():
            self._socket = control_socket.listen(self._path)
            own(self, f"the control socket of {self._path}")
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._socket]},
            name="kvstore-control",
            daemon=True,
        )
        self._thread.start()

    def fork_let_go(self) -> None:
        """Close the copies of the parent's sockets, in a forked child. See `forks.LetsGo`."""
        connections: set[Any] = self._server.server_state.connections
        for each in [self._socket, *filter(None, map(_socket_of, connections))]:
            with suppress(OSError):
                os.close(each.fileno())

    def close(self) -> None:
        """Take the socket away, end the calls under way, and end the thread. Repeatable."""
        control_socket.remove(self._path)
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self._app.close()


def _socket_of(connection: Any) -> socket.socket | None:
    transport = getattr(connection, "transport", None)
    found: socket.socket | None = transport and transport.get_extra_info("socket")
    return found
