"""Reads straight from a bucket beside SlateDB's reader: `python -m benchmarks.bucket [ROWS]`.

Both read the same rows from one S3-speaking server, through a proxy that answers each read 50 ms
late and counts requests and bytes. SlateDB is measured where `slatedb` is installed. Times hold the
time of the machine too; requests and bytes are exact.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from moto.server import ThreadedMotoServer

import kvstore
from kvstore import backup
from tests.harness.proxy import Answer, Proxy, Request

ROWS = 100_000
VALUE_BYTES = 300
BATCH_ROWS = 4_000
GETS = 40
DELAY_S = 0.05
BUCKET = "bench"


class Cost(NamedTuple):
    """The cost of one get."""

    requests: int
    bytes: int
    seconds: float


class Link(Proxy):
    """The proxy. While `delay_s` is set, each read is answered that late."""

    def __init__(self, server: str) -> None:
        super().__init__(server)
        self.delay_s = 0.0
        self.weather = self._late

    def _late(self, request: Request) -> Answer:
        if request.method in ("GET", "HEAD"):
            time.sleep(self.delay_s)
        return Answer.WHOLE


@contextmanager
def linked() -> Iterator[Link]:
    """A link to a new server with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
    with Link(url) as link:
        yield link
    server.stop()


async def costs(
    link: Link, get: Callable[[bytes], Awaitable[bytes | None]], wanted: Mapping[bytes, bytes]
) -> list[Cost]:
    """The cost of each get."""
    found = []
    link.taken()
    for key, value in wanted.items():
        began = time.perf_counter()
        assert await get(key) == value
        found.append(Cost(0, 0, time.perf_counter() - began)._replace(**_named(link.taken())))
    return found


def _named(taken: Sequence[Request]) -> dict[str, Any]:
    return {"requests": len(taken), "bytes": sum(each.size_bytes for each in taken)}


async def measured(
    name: str,
    link: Link,
    get: Callable[[bytes], Awaitable[bytes | None]],
    wanted: dict[bytes, bytes],
) -> None:
    """Print the costs of the first get, of the next ones, and of the same gets again."""
    first, *others = await costs(link, get, wanted)
    rows = (("first", [first]), ("next", others), ("again", await costs(link, get, wanted)))
    for which, found in rows:
        print(
            f"| {name}, {which} | {statistics.mean(c.requests for c in found):.2f} "
            f"| {max(c.requests for c in found)} "
            f"| {statistics.mean(c.bytes for c in found) / 1000:,.0f} kB "
            f"| {statistics.median(c.seconds for c in found) * 1000:.0f} ms |"
        )


async def ours(link: Link, first: Sequence[tuple[bytes, bytes]], then: Sequence[Any]) -> None:
    """A full backup and an increment, read with a cache in a directory."""
    options = {
        "endpoint": link.url,
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
    }
    collection = backup.Collection(f"s3://{BUCKET}/ours", options=options)
    with tempfile.TemporaryDirectory() as place:
        with kvstore.open(Path(place) / "store", durability="async") as store:
            for rows in (first, then):
                store.put_many(list(rows))
                collection.backup(store)
        link.delay_s = DELAY_S
        with collection.open(cache=Path(place) / "cache") as reader:

            async def get(key: bytes) -> bytes | None:
                return reader.get(key)

            await measured("collection.open", link, get, chosen(first, then))
        link.delay_s = 0.0


async def slate(link: Link, first: Sequence[tuple[bytes, bytes]], then: Sequence[Any]) -> None:
    """The same rows in SlateDB, flushed, read by its reader with its usual cache."""
    import slatedb.uniffi as slatedb

    builder = slatedb.ObjectStoreBuilder.from_url(f"s3://{BUCKET}/slate")
    config = {
        "endpoint": link.url,
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
        "allow_http": "true",
        "virtual_hosted_style_request": "false",
    }
    for name, value in config.items():
        builder.with_config(f"aws_{name}", value)
    place = builder.build()
    database = await slatedb.DbBuilder("db", place).build()
    for rows in (first, then):
        for begin in range(0, len(rows), BATCH_ROWS):
            batch = slatedb.WriteBatch()
            for key, value in rows[begin : begin + BATCH_ROWS]:
                batch.put(key, value)
            await database.write(batch)
        flush = slatedb.FlushOptions(flush_type=slatedb.FlushType.MEM_TABLE)
        await database.flush_with_options(flush)
    await database.shutdown()
    link.delay_s = DELAY_S
    reader = await slatedb.DbReaderBuilder("db", place).build()
    await measured("SlateDB's reader", link, reader.get, chosen(first, then))
    await reader.shutdown()
    link.delay_s = 0.0


def chosen(first: Sequence[tuple[bytes, bytes]], then: Sequence[Any]) -> dict[bytes, bytes]:
    """Some keys, with the values that they have at the end."""
    newest = {**dict(first), **dict(then)}
    return {key: newest[key] for key in random.Random(3).sample(sorted(newest), GETS)}


def main() -> None:
    """Measure both, and print a table."""
    pick = random.Random(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    first = [(b"key%08d" % number, pick.randbytes(VALUE_BYTES)) for number in range(count)]
    then = [(key, pick.randbytes(VALUE_BYTES)) for key, _ in pick.sample(first, count // 10)]
    then.sort()
    print("| get | requests | at most | bytes | median time |\n|---|---|---|---|---|")
    with linked() as link:
        asyncio.run(ours(link, first, then))
        try:
            asyncio.run(slate(link, first, then))
        except ImportError:
            print("slatedb is not installed: pip install slatedb", file=sys.stderr)


if __name__ == "__main__":
    main()
