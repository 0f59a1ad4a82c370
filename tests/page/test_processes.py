"""The page of `kvstore ui`, beside the owner of a store, and of a server with reader processes."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import kvstore
from kvstore import bulk
from tests.server.process import ServerProcess

ADMIN = "a" * 32


class Visitor:
    """A browser's connection, with its cookie."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url).netloc
        self._cookie = ""

    def ask(self, target: str, **form: str) -> tuple[int, str]:
        """The status and text of a page below `/ui/`; with fields, of a form that was sent."""
        connection = http.client.HTTPConnection(self._place, timeout=120)
        headers = {"Cookie": self._cookie, "Sec-Fetch-Site": "same-origin"}
        body = urlencode(form) if form else None
        connection.request("POST" if form else "GET", f"/ui/{target}", body, headers)
        answer = connection.getresponse()
        cookie = answer.headers.get("Set-Cookie")
        self._cookie = cookie.partition(";")[0] if cookie else self._cookie
        if target != "page.css":
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        text = answer.read().decode()
        connection.close()
        return answer.status, text


@contextmanager
def shown(store: Path, *options: str) -> Iterator[Visitor]:
    """The page of `kvstore ui`, with its visitor signed in. The command ends by a signal."""
    command = [sys.executable, "-m", "kvstore.cli", "ui", str(store), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("open http://127.0.0.1:"), line
        url = urlsplit(line.split()[1])
        visitor = Visitor(url.geturl())
        assert visitor.ask(f"?{url.query}")[0] == 303
        yield visitor
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_page_follows_a_store_that_its_owner_writes_and_keeps_nobody_out(
    tmp_path: Path,
) -> None:
    place = tmp_path / "store"
    with kvstore.open(place) as store:
        store.put(b"first", b"1")
        staged = bulk.Import.create(tmp_path / "staging")
        with staged.writer() as writer:
            writer.put(b"imported", b"row")
        staged.seal()
        bulk.ingest(store, tmp_path / "staging")
        number = f"{store.imports.every()[0].import_id:016x}"
        with shown(place, "--admin") as visitor:
            assert "first" in visitor.ask("keys")[1]
            stamp = store.put(b"second", b"2")
            assert "second" in visitor.ask(f"keys?at={int(stamp)}")[1]
            assert visitor.ask("metrics")[0] == 200
            status, text = visitor.ask("revert", import_id=number)
            assert (status, "control=True" in text) == (503, True), text
    with shown(place, "--admin") as visitor, kvstore.open(place, control=True) as store:
        status, text = visitor.ask("revert", import_id=number)
        assert (status, "is reverted as of" in text) == (200, True), text
        assert store.get(b"imported") is None


def test_the_page_shows_the_figures_of_an_owner_that_listens(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with kvstore.open(place, control=True) as store:
        for number in range(7):
            store.put(b"%d" % number, b"v")
        with shown(place) as visitor:
            text = visitor.ask("metrics")[1]
            assert "the process that owns the store" in text
            row = text.partition("kvstore_<wbr>commits_<wbr>total")[2].partition("</tr>")[0]
            assert ">7<" in row, row
            store.close()
            text = visitor.ask("metrics")[1]
            assert "its owner does not listen" in text
            row = text.partition("kvstore_<wbr>commits_<wbr>total")[2].partition("</tr>")[0]
            assert ">0<" in row, row


def test_a_server_with_readers_has_the_page_of_its_owner(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {ADMIN}\n")
    tokens.chmod(0o600)
    server = ServerProcess(
        tmp_path / "store", "127.0.0.1:0", "--readers", "1", "--token-file", str(tokens)
    )
    url = server.start()
    try:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        bearer = {"Authorization": f"Bearer {ADMIN}"}
        connection.request("PUT", "/v1/keys/k", b"v", bearer)
        assert json.loads(connection.getresponse().read())["timestamp"]
        connection.close()
        visitor = Visitor(url)
        assert visitor.ask("keys")[0] == 401
        assert visitor.ask("sign-in", token=ADMIN)[0] == 303
        status, text = visitor.ask("keys")
        assert (status, "key?key=k" in text) == (200, True)
        assert visitor.ask("page.css")[0] == 200
        assert visitor.ask("revert", import_id="1")[0] == 400
    finally:
        assert server.stop() == 0
