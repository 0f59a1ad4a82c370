"""Arrow streams of requests with compressed buffers: taken as all others, and refused where they
unpack to more than a server takes."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore.remote.protocol import ARROW_TYPE, KEYS_SCHEMA, WRITES_SCHEMA, WriteOp
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.http import unpacked_bytes
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

CODECS = ("lz4", "zstd")


def stream(table: pa.Table, codec: str | None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def writes(count: int, value: bytes) -> pa.Table:
    rows = [
        {"op": int(WriteOp.PUT), "key": b"%d" % number, "value": value} for number in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=WRITES_SCHEMA)


def asked(url: str, body: bytes) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": ARROW_TYPE})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("codec", CODECS)
def test_a_packed_batch_is_written_and_one_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, codec: str
) -> None:
    value = b"v" * 1000
    with (
        bounds(SERVER_MEMORY_BYTES_MAX=1 << 20),
        kvstore.open(tmp_path / "store") as store,
        serving(app(store), ListenAddress("127.0.0.1", 0)) as server,
    ):
        batch, keys = f"{server.url}/v1/batch", f"{server.url}/v1/get_many"
        status, told = asked(batch, stream(writes(500, value), codec))
        assert status == 200, told
        assert store.get_many([b"0", b"499"]) == [value, value]
        upper = store.upper
        bomb = stream(writes(40_000, value), codec)
        assert len(bomb) < 1 << 20
        status, told = asked(batch, bomb)
        assert status == 413
        assert b"an Arrow stream that unpacks to" in told
        small = stream(pa.table({"key": [b"\0" * (4 << 20)]}, schema=KEYS_SCHEMA), codec)
        assert len(small) < 64 << 10  # it would be done on the event loop
        assert asked(keys, small)[0] == 413
        packed = pa.array([b"\0" * (4 << 20)]).dictionary_encode()
        assert asked(keys, stream(pa.table({"key": packed}), codec))[0] == 413
        assert store.upper == upper


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_stream_unpacks_to_is_known_before_it_is_unpacked(codec: str) -> None:
    words = pa.array([b"w" * 500] * 3000)
    table = pa.table({"a": words, "b": pa.array(range(3000)), "c": words.dictionary_encode()})
    assert unpacked_bytes(stream(table, None)) == 0
    assert table.nbytes <= unpacked_bytes(stream(table, codec)) < 1.1 * table.nbytes
    assert unpacked_bytes(b"") == unpacked_bytes(b"no stream") == 0
    pick, whole = seeded("KVSTORE_PACKED_SEED"), bytearray(stream(table, codec))
    for _ in range(300):  # of damaged bytes no answer is wrong, as long as there is one
        damaged = bytearray(whole)
        for _ in range(pick.randrange(1, 4)):
            damaged[pick.randrange(len(damaged))] = pick.randrange(256)
        assert unpacked_bytes(bytes(damaged[: pick.randrange(len(damaged)) + 1])) >= 0
