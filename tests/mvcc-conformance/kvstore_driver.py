"""kvstore behind run.py, by either engine: `python kvstore_driver.py [memory | rocksdb]`."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

import kvstore
from kvstore import bulk
from kvstore.errors import KVStoreError

BEGIN = 1_700_000_000 * 10**9
EVENTS = 1_600_000_000 * 10**9
"""The event time 0 of the cases. It must be no number that could count seconds."""


class Driver:
    """One store after the other, each in a directory of its own."""

    def __init__(self, engine: str) -> None:
        self.engine, self.places = engine, ExitStack()

    def open(self, _: dict[str, Any]) -> dict[str, Any]:
        self.places.close()
        self.place = Path(self.places.enter_context(tempfile.TemporaryDirectory()))
        self.clock = kvstore.ManualClock(BEGIN)
        self.store = self.places.enter_context(
            kvstore.open(self.place / "s", self.engine, durability="async", clock=self.clock)
        )
        self.imports: dict[str, int] = {}
        self.feeds: dict[str, Any] = {}
        return {}

    def advance(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.clock.advance(asked["ns"])
        return {}

    def now(self, _: dict[str, Any]) -> dict[str, Any]:
        with self.store.snapshot() as snapshot:
            return {"time": int(snapshot.as_of)}

    def batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self.store.batch() as batch:
            for op, key, *rest in asked["writes"]:
                if op == "put":
                    expires = timedelta(microseconds=rest[1] // 1000) if len(rest) == 2 else None
                    batch.put(key.encode(), rest[0].encode(), expires=expires)
                elif op == "delete":
                    batch.delete(key.encode())
                else:
                    batch.delete_range(key.encode(), rest[0].encode())
        assert batch.timestamp is not None
        return {"time": int(batch.timestamp)}

    def get(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"value": text(self.store.get(asked["key"].encode(), as_of=asked.get("as_of")))}

    def scan(self, asked: dict[str, Any]) -> dict[str, Any]:
        span = {n: asked[n].encode() for n in ("start", "end", "prefix") if n in asked}
        how = {n: asked[n] for n in ("as_of", "reverse", "limit") if n in asked}
        return {"rows": [[text(key), text(value)] for key, value in self.store.scan(**span, **how)]}

    def history(self, asked: dict[str, Any]) -> dict[str, Any]:
        versions = self.store.history(asked["key"].encode())
        return {"versions": [[int(each.timestamp), text(each.value)] for each in versions]}

    def changes(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = self.store.changes(asked["since"], asked.get("upto"), order="time")
        return {"changes": [[int(c.timestamp), c.op, text(c.key), last(c)] for c in found]}

    def import_(self, asked: dict[str, Any]) -> dict[str, Any]:
        staging = self.place / asked["id"]
        load = bulk.Import.create(staging)
        with load.writer() as writer:
            for key, value in sorted(asked["rows"]):
                writer.put(key.encode(), value.encode())
        load.seal()
        self.imports[asked["id"]] = load.import_id
        return {"time": int(bulk.ingest(self.store, staging))}

    def revert_import(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"time": int(self.store.revert_import(self.imports[asked["id"]]))}

    def gc(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.store.gc(before=asked["before"])
        return {}

    def feed(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.store.sync()  # a feed delivers durable changes
        name = asked["name"]
        feed = self.store.feed(name, start=asked.get("start"), expand="imports")
        batches = list(feed.batches())
        self.feeds[name] = feed, [batch.position for batch in batches]
        return {
            "changes": [
                [int(e.timestamp), operation(e), text(e.key), last(e)]
                for batch in batches
                for e in batch.events
            ]
        }

    def ack(self, asked: dict[str, Any]) -> dict[str, Any]:
        feed, positions = self.feeds[asked["name"]]
        feed.ack(positions[-1])
        return {}

    def record(self, asked: dict[str, Any]) -> dict[str, Any]:
        schema = pa.schema(
            [("key", pa.string()), ("event", pa.timestamp("ns", "UTC")), ("value", pa.string())]
        )
        self.store.table("rows", schema, "key", event_time="event")
        with self.store.batch() as batch:
            table = batch.table("rows")
            for key, event, value in asked["rows"]:
                at = pa.scalar(EVENTS + event, pa.timestamp("ns", "UTC")).as_py()
                if value is None:
                    table.delete(key, at)
                else:
                    table.put({"key": key, "event": at, "value": value})
        assert batch.timestamp is not None
        return {"time": int(batch.timestamp)}

    def recorded(self, asked: dict[str, Any]) -> dict[str, Any]:
        keys, events, known = zip(*asked["labels"], strict=True)
        utc = pa.timestamp("ns", "UTC")
        labels = pa.table(
            {
                "key": keys,
                "ts": pa.array([EVENTS + at for at in events], utc),
                "known": pa.array(known, utc),
            }
        )
        found = self.store.table("rows").join(labels, "key", known_at="known").read_all()
        return {"found": found["value"].to_pylist()}

    def join(self, asked: dict[str, Any]) -> dict[str, Any]:
        ids, times = zip(*asked["labels"], strict=True)
        age = asked.get("max_age")
        max_age = None if age is None else timedelta(microseconds=age // 1000)
        table = pa.table({"id": ids, "ts": times})
        found = self.store.join(table, max_age=max_age).read_all()
        at = found["value_timestamp"].cast(pa.int64()).to_pylist()
        rows = zip(found["value"].to_pylist(), at, strict=True)
        return {"found": [None if value is None else [text(value), t] for value, t in rows]}


def operation(event: Any) -> str:
    if event.end_key is not None:
        return "delete_range"
    return "delete" if event.value is None else "put"


def text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode()


def last(change: Any) -> str | None:
    return text(change.value if change.end_key is None else change.end_key)


def main() -> None:
    driver = Driver(*(sys.argv[1:] or ["memory"]))
    for line in sys.stdin:
        asked = json.loads(line)
        work = getattr(driver, {"import": "import_"}.get(asked["op"], asked["op"]))
        try:
            answer = work(asked)
        except KVStoreError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    driver.places.close()


if __name__ == "__main__":
    main()
