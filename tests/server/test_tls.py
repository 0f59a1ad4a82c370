"""TLS with a certificate that the test makes, and addresses that are served without TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import (
    AccessDeniedError,
    KVStoreError,
    LockedError,
    RetryableError,
    UsageError,
)
from kvstore.remote.client import connect
from kvstore.remote.client.transport import Endpoint, Pool, client_tls
from kvstore.remote.server import ListenAddress, Token, read_tokens, server_tls, serving
from kvstore.remote.server.app import app
from kvstore.remote.verbs import PUT
from tests.harness.bounds import bounds
from tests.server.process import ServerProcess

SECRET = "s" * 32


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "tokens"
    file.write_text(f"# tokens\n\nread,write UA%2F {SECRET}\nadmin {'a' * 40}\n")
    file.chmod(0o600)
    return file


def test_a_server_off_the_machine_is_reached_by_tls_and_a_token(
    tmp_path: Path, certificate: tuple[Path, Path], tokens: Path
) -> None:
    cert, key = map(str, certificate)
    options = ["--token-file", str(tokens), "--tls-cert", cert, "--tls-key", key]
    server = ServerProcess(tmp_path / "store", "0.0.0.0:0", *options)
    port = server.start().rpartition(":")[2]
    url = f"https://127.0.0.1:{port}"
    with connect(url, SECRET, ca=cert) as client:
        client.put(b"UA/1", b"v" * 100_000)
        assert client.get(b"UA/1") == b"v" * 100_000
        assert [key for key, _ in client.scan()] == [b"UA/1"]
        with pytest.raises(AccessDeniedError):
            client.put(b"DL/1", b"v")
    with pytest.raises(AccessDeniedError, match="its certificate"):
        connect(url, SECRET)
    with pytest.raises(AccessDeniedError, match="does not know the token"):
        connect(url, "b" * 40, ca=cert)
    with pytest.raises(KVStoreError):
        connect(f"http://127.0.0.1:{port}", SECRET, patience=0)
    assert server.stop() == 0


def test_a_server_ends_while_clients_over_tls_are_idle(
    store: kvstore.Store, certificate: tuple[Path, Path]
) -> None:
    """Closing waits for no shutdown and no handshake of TLS, because an idle client does not
    read."""
    tls = server_tls(*certificate)
    with (
        serving(app(store), ListenAddress.parse("127.0.0.1:0"), tls=tls) as running,
        connect(running.url, ca=str(certificate[0])) as client,
        socket.create_connection(("127.0.0.1", running.address.port)) as silent,
    ):
        silent.sendall(b"\x16")
        client.put(b"k", b"v")
        stopping = threading.Thread(target=running.stop, daemon=True)
        stopping.start()
        stopping.join(25)  # the server would wait 30 s for the shutdown of TLS
        assert not stopping.is_alive()


def test_a_full_server_says_so_over_tls(
    store: kvstore.Store, certificate: tuple[Path, Path]
) -> None:
    cert, tls = str(certificate[0]), server_tls(*certificate)
    with (
        serving(app(store), ListenAddress.parse("127.0.0.1:0"), tls=tls) as running,
        connect(running.url, ca=cert) as client,
        bounds(SERVER_CONNECTIONS_MAX=1),
    ):
        for _ in range(3):
            with pytest.raises(RetryableError, match="has 1 connections; try again"):
                connect(running.url, ca=cert, patience=0)
        client.put(b"k", b"v")


def test_a_server_that_ends_sends_the_rest_of_an_answer_over_tls(
    store: kvstore.Store, certificate: tuple[Path, Path]
) -> None:
    store.put(b"k", b"v" * (16 << 20))
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with serving(
        app(store), ListenAddress.parse("127.0.0.1:0"), tls=server_tls(*certificate)
    ) as running:
        place = ("127.0.0.1", running.address.port)
        with context.wrap_socket(socket.create_connection(place), server_hostname=place[0]) as slow:
            slow.sendall(b"GET /v1/keys/k HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            head = slow.recv(1 << 10)
            assert b" 200 " in head
            stopping = threading.Thread(target=running.stop)
            stopping.start()
            # Refused, or reset where the socket closes while the connection comes.
            with suppress(ConnectionRefusedError, ConnectionResetError):
                while True:  # until it no longer listens
                    socket.create_connection(place).close()
            length = len(head.partition(b"\r\n\r\n")[2])
            while part := slow.recv(1 << 20):
                length += len(part)
        assert length == 16 << 20
        stopping.join()


@pytest.mark.parametrize(
    ("address", "has_tls", "has_tokens", "match"),
    [
        ("0.0.0.0:0", False, True, "--tls-cert"),
        ("[::]:0", False, False, "--tls-cert"),
        ("192.0.2.1:0", True, False, "--token-file"),
    ],
)
def test_an_address_off_the_machine_is_refused_without_tls_or_tokens(
    store: kvstore.Store,
    certificate: tuple[Path, Path],
    address: str,
    has_tls: bool,
    has_tokens: bool,
    match: str,
) -> None:
    served = app(store, [Token(SECRET)] if has_tokens else None)
    tls = server_tls(*certificate) if has_tls else None
    listening = ListenAddress.parse(address)
    with pytest.raises(UsageError, match=match), serving(served, listening, tls=tls):
        pass


def test_a_token_is_not_sent_in_the_clear() -> None:
    with pytest.raises(UsageError, match="in the clear"):
        connect("http://flights.example:7447", SECRET)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("admin", "line 1"),
        ("admin short", "16 to 512"),
        (f"root {SECRET}", "right 'root'"),
        (f"read a b {SECRET}", "write: rights"),
    ],
)
def test_a_token_file_with_a_wrong_line_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UsageError, match=match) as caught:
        read_tokens(file)
    assert SECRET not in str(caught.value)


def test_a_token_file_that_others_may_read_is_refused(tokens: Path) -> None:
    assert [token.prefix for token in read_tokens(tokens)] == [b"UA/", b""]
    tokens.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_tokens(tokens)


def test_a_socket_is_taken_from_the_dead_and_not_from_the_living(
    store: kvstore.Store, tmp_path: Path
) -> None:
    address = ListenAddress(path=str(tmp_path / "socket"))
    dead = ServerProcess(tmp_path / "other", address.path)
    dead.start()
    dead.kill()
    assert (tmp_path / "socket").is_socket()
    with serving(app(store), address):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
        with pytest.raises(LockedError), serving(app(store), address):
            pass
        with connect(tmp_path / "socket") as client:
            assert client.get(b"k") is None
    assert not (tmp_path / "socket").exists()
    (tmp_path / "socket").write_text("mine")
    with pytest.raises(UsageError, match="no socket"), serving(app(store), address):
        pass


def test_a_full_server_says_so_over_tls_to_a_client_that_is_still_sending(
    store: kvstore.Store, certificate: tuple[Path, Path]
) -> None:
    ca, before = client_tls(certificate[0]), store.upper
    with (
        serving(
            app(store), ListenAddress.parse("127.0.0.1:0"), tls=server_tls(*certificate)
        ) as running,
        bounds(SERVER_CONNECTIONS_MAX=0, SERVER_TURNED_AWAY_S=0.0),
    ):
        pool = Pool(Endpoint.parse(running.url, tls=ca), timeout=60, patience=0)
        with pytest.raises(RetryableError, match="has 0 connections; try again"):
            pool.call(PUT, key=b"k", value=bytes(64 << 20))
    assert store.upper == before
