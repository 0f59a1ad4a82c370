"""The browser of the tests, and a page for it to open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from tests.browser.driver import Browser, missing

ADMIN = "a" * 32
HOSTILE = [
    b"<script>document.title='owned'</script>",
    b'"><img src=x onerror="document.title=\'owned\'">',
    b"</title><svg onload=\"document.title='owned'\">",
    b"javascript:document.title='owned'",
    b"\x00\x1b[31m\xff",
    "\u202egnp.exe".encode(),
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One window for all tests."""
    lacking = missing()
    if lacking:
        pytest.fail(f"the tests of the page need a browser: apt-get install {lacking}")
    with Browser() as found:
        yield found


@pytest.fixture
def address(store: kvstore.Store, tmp_path: Path) -> Iterator[str]:
    """The page of a store with hostile keys, where an admin is signed in by the address."""
    for key in HOSTILE:
        store.put(key, key)
    store.put(b"one", b'{"delay": 1}')
    store.put(b"one", b'{"delay": 7}')
    store.put_many({b"flights/%03d" % number: b"on time" for number in range(300)})
    columns = pa.schema([("name", pa.string()), ("people", pa.int64()), ("<b>", pa.string())])
    table = store.table("cities", columns, key="name", indexes={"by_people": "people"})
    for key in HOSTILE:
        name = key.decode("utf-8", "replace")
        table.put({"name": name, "people": len(key), "<b>": name * 40})
    table.put({"name": "Wien", "people": 1, "<b>": "x"})
    table.put({"name": "Wien", "people": 2, "<b>": "y"})
    staged = bulk.Import.create(tmp_path / "staging")
    with staged.writer() as writer:
        writer.put(b"imported", b"row")
    staged.seal()
    bulk.ingest(store, tmp_path / "staging")
    tokens = [Token(ADMIN, ("admin",))]
    with serving(app(store, tokens), ListenAddress("127.0.0.1", 0)) as running:
        yield f"{running.url}/ui/?token={ADMIN}"
