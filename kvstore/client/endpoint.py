"""The address of a server: a host and a port, with TLS or without it, or the path of a Unix
socket."""

from __future__ import annotations

import os
import re
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from kvstore import control_socket
from kvstore.errors import AccessDeniedError, DeterminateError, UsageError

_PORT = 7447
_ABSENT = "no store and no socket is there (a URL begins with http:// or https://)"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address, and what every request to it carries."""

    host: str = ""
    port: int = 0
    path: str = ""
    root: str = ""
    """The path at which an application has mounted the server."""
    tls: ssl.SSLContext | None = None
    token: str | None = field(default=None, repr=False)
    store: Path | None = None
    """The directory of a store, whose owner listens there."""

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Endpoint:
        """The endpoint of an `http` or `https` URL. Raises `UsageError`.

        A token goes over TLS, or to this machine: any computer on the way could read it otherwise.
        """
        try:
            parts = urlsplit(url)
            port = _PORT if parts.port is None else parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            raise UsageError(f"{url}: {error}", "write https://host:7447") from error
        # `urlsplit` drops line ends and tabs, and what follows a # would be dropped too.
        is_whole = url.isprintable() and not re.search(r"[\s?#]", url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_whole:
            raise UsageError(f"{url} is no address of a server", "write https://host:7447")
        if parts.username is not None or parts.password is not None:
            raise UsageError("the URL has a password in it", "pass token= instead")
        if parts.scheme == "https":
            tls = tls or ssl.create_default_context()
        elif token and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise UsageError(f"a token would go to {parts.hostname} in the clear", "use https")
        elif tls is not None:
            raise UsageError(f"certificates for {url}, which has no TLS", "write https://")
        return cls(parts.hostname, port, "", parts.path.rstrip("/"), tls, _bearer(token))

    @classmethod
    def at_path(cls, path: str, *, token: str | None = None) -> Endpoint:
        """The endpoint of a Unix socket."""
        return cls(path=path, token=_bearer(token))

    @classmethod
    def of_store(cls, directory: Path) -> Endpoint:
        """The endpoint of the process that has the store in `directory` open."""
        return cls(store=directory)

    def __str__(self) -> str:
        if self.store is not None:
            return f"the owner of {self.store}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.root}"

    @property
    def head(self) -> bytes:
        """The headers that every request carries."""
        host = f"[{self.host}]" if ":" in self.host else self.host or "kvstore"
        lines = [f"Host: {host}:{self.port}" if self.port else f"Host: {host}"]
        if self.token:
            lines.append(f"Authorization: Bearer {self.token}")
        return "".join(f"{line}\r\n" for line in lines).encode()

    @property
    def prefix(self) -> str:
        """The path of the mount, as requests have it."""
        return quote(self.root, safe="/%")

    def open(self, timeout: float) -> socket.socket:
        """A connected socket. Raises `DeterminateError` if nobody answers, `AccessDeniedError` for
        a socket of another user and for a certificate that is not trusted."""
        try:
            return self._open(timeout)
        except ssl.SSLCertVerificationError as error:
            raise AccessDeniedError(
                str(self), f"its certificate: {error.verify_message}", "pass ca= of its issuer"
            ) from error
        except PermissionError as error:
            raise AccessDeniedError(str(self), str(error)) from error
        except OSError as error:
            cause = _ABSENT if self.path and isinstance(error, FileNotFoundError) else str(error)
            raise DeterminateError(f"connecting to {self}", cause) from error

    def _open(self, timeout: float) -> socket.socket:
        if self.store is not None:
            return control_socket.dial(self.store, timeout)
        if self.path:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            place = Path(self.path)
            try:
                opened.settimeout(timeout)
                with control_socket.short(place.parent, place.name) as address:
                    opened.connect(address)
            except BaseException:
                opened.close()
                raise
            return opened
        opened = socket.create_connection((self.host, self.port), timeout)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is None:
            return opened
        try:
            return self.tls.wrap_socket(opened, server_hostname=self.host)
        except BaseException:
            opened.close()
            raise


def client_tls(ca: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """The TLS of a client that trusts the issuers of the machine, or the issuers in the file
    `ca`."""
    try:
        return ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
    except OSError as error:
        raise UsageError(f"certificates {ca}: {error}", "pass a PEM file") from error


def _bearer(token: str | None) -> str | None:
    if token is None:
        return None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("a token is one word of ASCII", "pass the token of a token file")
    return token
