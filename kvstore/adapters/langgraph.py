"""LangGraph in a store: the checkpoints of threads (`KVStoreSaver`) and long-term memory
(`KVStoreMemory`).

    saver, memory = KVStoreSaver("agents.db"), KVStoreMemory("agents.db")
    agent = builder.compile(checkpointer=saver, store=memory)

Keys, below the prefix of a saver; the fields behind a kind are one encoded tuple:

    c | thread, namespace, id                         parent, run, checkpoint, metadata
    b | thread, namespace, channel, version           the value of a channel
    w | thread, namespace, id, path, task, number     channel, value: what a task has written
    r | run, thread, namespace, id                    an index of runs
    f | thread                                        who alone may write the thread

and below the prefix of a memory: the elements of the namespace, null, the key.

Invariants
1. A checkpoint is one commit with the values that are new in it. So is a deletion of any size, with
   the values that no checkpoint of the thread has any more.
2. Pruning keeps what a delta channel is rebuilt from: the ancestors of a kept checkpoint, up to one
   that has the value of the channel.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
)

from kvstore.base.timestamp import TimeLike
from kvstore.codec.tuples import decode_tuple, encode_tuple
from kvstore.errors import CorruptionError, FencedError, UsageError
from kvstore.remote.control import StoreOrClient
from kvstore.remote.handle import Handle, Where
from kvstore.transaction import Transaction

T = TypeVar("T")

_PAGE: Final = 64
"""Checkpoints that an asynchronous list reads at once."""
_ATTEMPTS: Final = 1000
"""Runs of a change of one thread, which the writers of the thread may make conflict."""
_EMPTY: Final = "empty"
"""The kind of the value of a channel that has none."""
_COUNTERS: Final = "counters_since_delta_snapshot"
"""The metadata that names the delta channels of a checkpoint."""


class _Record(NamedTuple):
    """A checkpoint as it is stored, without the values of its channels."""

    parent: str | None
    run: str | None
    checkpoint: tuple[str, bytes]
    metadata: tuple[str, bytes]

    def pack(self) -> bytes:
        return encode_tuple((self.parent, self.run, *self.checkpoint, *self.metadata))

    @classmethod
    def unpack(cls, raw: bytes) -> _Record:
        found: Any = decode_tuple(raw)
        if len(found) != 6:
            raise CorruptionError("a checkpoint", f"it has {len(found)} fields")
        return cls(found[0], found[1], found[2:4], found[4:])


class _Place(NamedTuple):
    """Where a checkpoint stands."""

    thread: str
    namespace: str
    id: str

    @classmethod
    def of(cls, config: RunnableConfig) -> _Place:
        found = config["configurable"]
        namespace = found.get("checkpoint_ns") or ""
        return cls(str(found["thread_id"]), namespace, get_checkpoint_id(config) or "")

    def config(self) -> RunnableConfig:
        return {
            "configurable": {
                "thread_id": self.thread,
                "checkpoint_ns": self.namespace,
                "checkpoint_id": self.id,
            }
        }


class _AtAddress:
    """What both have: a handle, a prefix, and the time of their reads."""

    def __init__(
        self, where: Where | Handle, prefix: str, as_of: TimeLike | None, token: str | None
    ) -> None:
        self.handle = Handle.of(where, token=token, read_only=as_of is not None)
        self.as_of = as_of
        self._prefix = prefix.encode()

    @property
    def kvstore(self) -> StoreOrClient:
        """The store, or the client of it: for `gc`, history and backups."""
        return self.handle.store

    def close(self) -> None:
        """Let the store go; see `Handle.close`."""
        self.handle.close()

    def _require_present(self) -> None:
        if self.as_of is not None:
            raise UsageError("the past cannot be written", "write without as_of")


class KVStoreSaver(BaseCheckpointSaver[Any], _AtAddress):
    """A checkpointer, for threads and for asyncio. `where` is the path of a store, the URL of a
    server, or an open store. With `as_of` it shows all threads as they were at that time, and is
    read only.

    Asynchronous calls run in threads of the pool of the event loop.
    """

    def __init__(
        self,
        where: Where | Handle,
        *,
        prefix: str = "langgraph/",
        as_of: TimeLike | None = None,
        serde: SerializerProtocol | None = None,
        token: str | None = None,
    ) -> None:
        BaseCheckpointSaver.__init__(self, serde=serde)
        _AtAddress.__init__(self, where, prefix, as_of, token)
        self._fence: tuple[str, bytes] | None = None

    # -- reading ----------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint of the config, or the newest of its thread and namespace."""
        place = _Place.of(config)
        store = self.kvstore
        if place.id:
            raw = store.get(self._key("c", *place), as_of=self.as_of)
            return None if raw is None else self._tuple(place, _Record.unpack(raw))
        below = self._key("c", place.thread, place.namespace)
        for key, raw in store.scan(prefix=below, as_of=self.as_of, reverse=True, limit=1):
            return self._tuple(self._place(key), _Record.unpack(raw))
        return None

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002  # the interface's word
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """The checkpoints of a thread, newest first in each namespace, or of all threads. They are
        read as they are taken; each costs a read of its values."""
        scope: tuple[str, ...] = ()
        chosen = ""
        if config is not None:
            thread, _, chosen = _Place.of(config)
            namespace = config["configurable"].get("checkpoint_ns")
            scope = (thread,) if namespace is None else (thread, namespace)
        bound = "" if before is None else get_checkpoint_id(before) or ""
        rows = self.kvstore.scan(prefix=self._key("c", *scope), as_of=self.as_of, reverse=True)
        found = self._chosen(rows, filter or {}, chosen, bound)
        return found if limit is None else islice(found, max(limit, 0))

    def _chosen(
        self,
        rows: Iterator[tuple[bytes, bytes]],
        wanted: Mapping[str, Any],
        chosen: str,
        before: str,
    ) -> Iterator[CheckpointTuple]:
        for key, raw in rows:
            place = self._place(key)
            if (chosen and place.id != chosen) or (before and place.id >= before):
                continue
            record = _Record.unpack(raw)
            metadata = self.serde.loads_typed(record.metadata)
            if all(metadata.get(name) == value for name, value in wanted.items()):
                yield self._tuple(place, record)

    def _tuple(self, place: _Place, record: _Record) -> CheckpointTuple:
        checkpoint: Checkpoint = self.serde.loads_typed(record.checkpoint)
        versions = checkpoint["channel_versions"]
        keys = [self._blob(place, name, version) for name, version in versions.items()]
        raws = self.kvstore.get_many(keys, as_of=self.as_of)
        values = {}
        for name, raw in zip(versions, raws, strict=True):
            if raw is not None:
                typed = _typed(raw)
                if typed[0] != _EMPTY:
                    values[name] = self.serde.loads_typed(typed)
        writes = []
        for key, raw in self.kvstore.scan(prefix=self._key("w", *place), as_of=self.as_of):
            *_, task, _number = self._fields(key)
            written: Any = decode_tuple(raw)
            channel, kind, value = written
            writes.append((task, channel, self.serde.loads_typed((kind, value))))
        parent = None if record.parent is None else place._replace(id=record.parent).config()
        return CheckpointTuple(
            config=place.config(),
            checkpoint={**checkpoint, "channel_values": values},
            metadata=self.serde.loads_typed(record.metadata),
            parent_config=parent,
            pending_writes=writes,
        )

    # -- writing ----------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint, and the values of the channels that are new in it, by one commit."""
        before = _Place.of(config)
        place = before._replace(id=checkpoint["id"])
        told: Any = get_checkpoint_metadata(config, metadata)
        bare = {name: each for name, each in checkpoint.items() if name != "channel_values"}
        values = checkpoint.get("channel_values") or {}
        run = told.get("run_id")
        record = _Record(
            before.id or None,
            None if run is None else str(run),
            self.serde.dumps_typed(bare),
            self.serde.dumps_typed(told),
        )
        rows = {
            self._blob(place, name, version): _joined(
                *(self.serde.dumps_typed(values[name]) if name in values else (_EMPTY, b""))
            )
            for name, version in new_versions.items()
        }
        rows[self._key("c", *place)] = record.pack()
        if record.run is not None:
            rows[self._key("r", record.run, *place)] = b""
        self._write(place.thread, lambda writes: writes.put_many(rows))
        return place.config()

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task has written, by one commit. What is there already stays, unless it is
        of a special channel, such as an error."""
        place = _Place.of(config)
        rows = []
        for number, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, number)
            key = self._key("w", *place, task_path, task_id, index)
            raw = encode_tuple((channel, *self.serde.dumps_typed(value)))
            rows.append((key, raw, index >= 0))

        def write(transaction: Transaction) -> None:
            self._require_unfenced(transaction, place.thread)
            for key, raw, once in rows:
                if not once or transaction.get(key) is None:
                    transaction.put(key, raw)

        self._require_present()
        self.kvstore.transact(write, attempts=_ATTEMPTS)

    @contextmanager
    def fenced(self, thread_id: str) -> Iterator[KVStoreSaver]:
        """A saver that alone writes the thread. Any other one that was fenced before raises
        `FencedError` at its next write to the thread: a runner that hung and comes back does no
        harm. Writers that are not fenced are not held up."""
        self._require_present()
        fence = secrets.token_bytes(16)
        self.kvstore.put(self._key("f", thread_id), fence)
        saver = KVStoreSaver(self.handle, prefix=self._prefix.decode(), serde=self.serde)
        saver._fence = thread_id, fence
        yield saver

    def delete_thread(self, thread_id: str) -> None:
        """Delete all of a thread, by one commit. Its history stays until `gc`."""
        self._change(partial(self._prune, [thread_id], lambda _: False))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, by one commit."""

        def drop(transaction: Transaction) -> None:
            going: dict[str, set[_Place]] = {}
            for run in run_ids:
                for key, _ in transaction.scan(prefix=self._key("r", str(run))):
                    place = _Place(*self._fields(key)[1:])
                    going.setdefault(place.thread, set()).add(place)
            for thread, places in going.items():
                self._drop(transaction, thread, places)

        self._change(drop)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all of a thread, by one commit."""

        def copy(transaction: Transaction) -> None:
            for kind in ("c", "b", "w"):
                for key, raw in transaction.scan(prefix=self._key(kind, source_thread_id)):
                    _, *rest = self._fields(key)
                    transaction.put(self._key(kind, target_thread_id, *rest), raw)
                    if kind == "c" and (run := _Record.unpack(raw).run) is not None:
                        transaction.put(self._key("r", run, target_thread_id, *rest), b"")

        self._change(copy)

    def prune(
        self,
        thread_ids: Sequence[str] | None,
        *,
        strategy: str = "keep_latest",
        keep: int = 1,
        older_than: timedelta | None = None,
    ) -> None:
        """Delete the older checkpoints of threads (None: of all), by one commit.

        `"keep_latest"` keeps the last `keep` of each namespace and, with `older_than`, all that are
        younger. `"delete"` keeps none. What a kept checkpoint is rebuilt from stays too: its
        values, and the ancestors of its delta channels. Costs a pass over the threads. The space
        comes back when the store gives up history: `saver.kvstore.gc(keep=...)`.
        """
        if strategy not in ("keep_latest", "delete"):
            raise UsageError(f"strategy {strategy!r}", "pass keep_latest or delete")
        if strategy == "delete":
            keep, older_than = 0, None
        oldest = None if older_than is None else datetime.now(timezone.utc) - older_than

        def is_young(checkpoint: Checkpoint) -> bool:
            return oldest is not None and datetime.fromisoformat(checkpoint["ts"]) >= oldest

        self._change(partial(self._prune, thread_ids, is_young, keep))

    # -- coroutines -------------------------------------------------------------------------

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As `get_tuple`."""
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002  # the interface's word
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """As `list`."""
        found = self.list(config, filter=filter, before=before, limit=limit)
        while page := await asyncio.to_thread(lambda: [*islice(found, _PAGE)]):
            for each in page:
                yield each

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """As `put`."""
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """As `put_writes`."""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """As `delete_thread`."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As `delete_for_runs`."""
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As `copy_thread`."""
        await asyncio.to_thread(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(
        self,
        thread_ids: Sequence[str] | None,
        *,
        strategy: str = "keep_latest",
        keep: int = 1,
        older_than: timedelta | None = None,
    ) -> None:
        """As `prune`."""
        how: dict[str, Any] = {"strategy": strategy, "keep": keep, "older_than": older_than}
        await asyncio.to_thread(self.prune, thread_ids, **how)

    def get_next_version(self, current: Any, channel: None) -> str:
        """Versions are texts that sort, and differ in branches that began at the same one."""
        number = 0 if current is None else int(str(current).partition(".")[0])
        return f"{number + 1:032}.{secrets.token_hex(8)}"

    # -- inside -----------------------------------------------------------------------------

    def _key(self, kind: str, *fields: Any) -> bytes:
        return self._prefix + kind.encode() + encode_tuple(fields)

    def _blob(self, place: _Place, channel: str, version: Any) -> bytes:
        return self._key("b", place.thread, place.namespace, channel, version)

    def _fields(self, key: bytes) -> tuple[Any, ...]:
        return decode_tuple(key[len(self._prefix) + 1 :])

    def _place(self, key: bytes) -> _Place:
        return _Place(*self._fields(key))

    def _write(self, thread: str, write: Callable[[Any], object]) -> None:
        self._require_present()
        if self._fence is None or self._fence[0] != thread:
            with self.kvstore.batch() as batch:
                write(batch)
            return

        def run(transaction: Transaction) -> None:
            self._require_unfenced(transaction, thread)
            write(transaction)

        self.kvstore.transact(run, attempts=_ATTEMPTS)

    def _require_unfenced(self, transaction: Transaction, thread: str) -> None:
        if self._fence is None or self._fence[0] != thread:
            return
        if transaction.get(self._key("f", thread)) != self._fence[1]:
            raise FencedError(f"thread {thread!r}", "stop this run; another one carries on")

    def _change(self, change: Callable[[Transaction], T]) -> T:
        self._require_present()
        return self.kvstore.transact(change, attempts=_ATTEMPTS)

    def _prune(
        self,
        threads: Sequence[str] | None,
        is_young: Callable[[Checkpoint], bool],
        *how: Any,
    ) -> None:
        keep, transaction = (0, how[0]) if len(how) == 1 else how
        named = self._threads(transaction) if threads is None else threads
        for thread in named:
            going: set[_Place] = set()
            kept: dict[str, int] = {}
            records: dict[_Place, tuple[_Record, Checkpoint]] = {}
            below = self._key("c", str(thread))
            for key, raw in transaction.scan(prefix=below, reverse=True):
                place, record = self._place(key), _Record.unpack(raw)
                checkpoint: Checkpoint = self.serde.loads_typed(record.checkpoint)
                records[place] = record, checkpoint
                kept[place.namespace] = count = kept.get(place.namespace, 0) + 1
                if count > keep and not is_young(checkpoint):
                    going.add(place)
            for place in records.keys() - going:
                going -= set(self._ancestors(transaction, place, records))
            self._drop(transaction, str(thread), going)
            if len(going) == len(records):
                transaction.delete(self._key("f", str(thread)))

    def _threads(self, transaction: Transaction) -> Iterator[str]:
        start = self._key("c")
        end = self._key("d")
        while (row := next(transaction.scan(start, end, limit=1), None)) is not None:
            thread = self._fields(row[0])[0]
            yield thread
            start = self._key("c", thread) + b"\xff"

    def _ancestors(
        self,
        transaction: Transaction,
        place: _Place,
        records: Mapping[_Place, tuple[_Record, Checkpoint]],
    ) -> Iterator[_Place]:
        """The ancestors from which the delta channels of a checkpoint are rebuilt."""
        record, checkpoint = records[place]
        counters = self.serde.loads_typed(record.metadata).get(_COUNTERS) or {}
        missing = set(counters) - self._present(transaction, place, checkpoint, counters)
        while missing and record.parent is not None:
            place = place._replace(id=record.parent)
            if place not in records:
                return
            yield place
            record, checkpoint = records[place]
            missing -= self._present(transaction, place, checkpoint, missing)

    def _present(
        self,
        transaction: Transaction,
        place: _Place,
        checkpoint: Checkpoint,
        channels: Iterable[str],
    ) -> set[str]:
        """The channels whose value a checkpoint has."""
        found = set()
        for name in channels:
            version = checkpoint["channel_versions"].get(name)
            if version is not None:
                raw = transaction.get(self._blob(place, name, version))
                if raw is not None and _typed(raw)[0] != _EMPTY:
                    found.add(name)
        return found

    def _drop(self, transaction: Transaction, thread: str, going: set[_Place]) -> None:
        """Delete checkpoints of a thread, and the values that no other one of it has."""
        if not going:
            return
        gone: set[bytes] = set()
        kept: set[bytes] = set()
        for key, raw in transaction.scan(prefix=self._key("c", thread)):
            place, record = self._place(key), _Record.unpack(raw)
            versions = self.serde.loads_typed(record.checkpoint)["channel_versions"]
            blobs = {self._blob(place, name, version) for name, version in versions.items()}
            if place not in going:
                kept |= blobs
                continue
            gone |= blobs
            transaction.delete(key)
            if record.run is not None:
                transaction.delete(self._key("r", record.run, *place))
        for key in gone - kept:
            transaction.delete(key)
        # A range delete for each checkpoint would stay in memory: see the map of range tombstones.
        for key, _ in transaction.scan(prefix=self._key("w", thread)):
            if _Place(*self._fields(key)[:3]) in going:
                transaction.delete(key)


def _joined(kind: str, raw: bytes) -> bytes:
    return kind.encode() + b"\0" + raw


def _typed(raw: bytes) -> tuple[str, bytes]:
    kind, _, value = raw.partition(b"\0")
    return kind.decode(), value


# --------------------------------------------------------------------------------------------------
# Long-term memory: items of JSON, in namespaces, with an exact time to live.


class KVStoreMemory(BaseStore, _AtAddress):
    """A store of LangGraph. `where` and `as_of` are as in `KVStoreSaver`. Values are JSON.

    All puts of one `batch` are one commit. `ttl` is in minutes and exact: an item is gone at that
    time, and a read that refreshes moves it. There is no index of vectors: `query` is passed over.
    """

    supports_ttl = True

    def __init__(
        self,
        where: Where | Handle,
        *,
        prefix: str = "memory/",
        as_of: TimeLike | None = None,
        ttl: TTLConfig | None = None,
        token: str | None = None,
    ) -> None:
        _AtAddress.__init__(self, where, prefix, as_of, token)
        self.ttl_config = ttl

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Do operations: all reads first, then all puts by one commit. The last put of a key
        wins."""
        asked = list(ops)
        puts: dict[bytes, PutOp] = {}
        results: list[Result] = []
        for op in asked:
            if isinstance(op, PutOp):
                puts[self._key(op.namespace, op.key)] = op
                results.append(None)
            elif isinstance(op, GetOp):
                results.append(self._get(op))
            elif isinstance(op, SearchOp):
                results.append(self._search(op))
            elif isinstance(op, ListNamespacesOp):
                results.append(self._namespaces(op))
            else:
                raise UsageError(f"operation {type(op).__name__}", "pass one of langgraph's")
        if puts:
            self._require_present()
            self.kvstore.transact(partial(self._put, puts), attempts=_ATTEMPTS)
        return results

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As `batch`."""
        return await asyncio.to_thread(self.batch, list(ops))

    # -- inside -----------------------------------------------------------------------------

    def _key(self, namespace: tuple[str, ...], key: str) -> bytes:
        return self._prefix + encode_tuple((*namespace, None, key))

    def _place(self, key: bytes) -> tuple[tuple[str, ...], str]:
        *namespace, _, name = decode_tuple(key[len(self._prefix) :])
        return tuple(map(str, namespace)), str(name)

    def _put(self, puts: Mapping[bytes, PutOp], transaction: Transaction) -> None:
        now = datetime.now(timezone.utc).isoformat()
        for key, op in puts.items():
            if op.value is None:
                transaction.delete(key)
                continue
            old = transaction.get(key)
            created = now if old is None else json.loads(old)["created_at"]
            ttl = op.ttl if op.ttl is not None else (self.ttl_config or {}).get("default_ttl")
            record = {"value": op.value, "created_at": created, "updated_at": now, "ttl": ttl}
            raw = json.dumps(record, ensure_ascii=False).encode()
            transaction.put(key, raw, expires=None if ttl is None else timedelta(minutes=ttl))

    def _item(self, key: bytes, raw: bytes, *, refresh: bool) -> SearchItem:
        namespace, name = self._place(key)
        found = json.loads(raw)
        if refresh and found.get("ttl") is not None and self.as_of is None:
            self._refresh(key, raw, timedelta(minutes=found["ttl"]))
        return SearchItem(
            namespace,
            name,
            found["value"],
            datetime.fromisoformat(found["created_at"]),
            datetime.fromisoformat(found["updated_at"]),
        )

    def _refresh(self, key: bytes, raw: bytes, ttl: timedelta) -> None:
        def put(transaction: Transaction) -> None:
            if transaction.get(key) == raw:
                transaction.put(key, raw, expires=ttl)

        self.kvstore.transact(put, attempts=_ATTEMPTS)

    def _get(self, op: GetOp) -> Item | None:
        key = self._key(op.namespace, op.key)
        raw = self.kvstore.get(key, as_of=self.as_of)
        if raw is None:
            return None
        found = self._item(key, raw, refresh=op.refresh_ttl)
        return Item(
            value=found.value,
            key=found.key,
            namespace=found.namespace,
            created_at=found.created_at,
            updated_at=found.updated_at,
        )

    def _search(self, op: SearchOp) -> list[SearchItem]:
        below = self._prefix + encode_tuple(op.namespace_prefix)
        rows = self.kvstore.scan(prefix=below, as_of=self.as_of)
        wanted = op.filter or {}
        found = (
            (key, raw)
            for key, raw in rows
            if not wanted or _matches(json.loads(raw)["value"], wanted)
        )
        page = list(islice(found, op.offset, op.offset + op.limit))
        return [self._item(key, raw, refresh=op.refresh_ttl) for key, raw in page]

    def _namespaces(self, op: ListNamespacesOp) -> list[tuple[str, ...]]:
        """Costs a seek for each namespace."""
        found: dict[tuple[str, ...], None] = {}
        start, end = self._prefix, self._prefix + b"\xff"
        while True:
            keys = self.kvstore.keys(start, end, as_of=self.as_of, limit=1)
            key = next(iter(keys), None)
            if key is None:
                break
            namespace, _ = self._place(key)
            if all(_names(condition, namespace) for condition in op.match_conditions or ()):
                found[namespace[: op.max_depth]] = None
            start = self._prefix + encode_tuple(namespace) + b"\x02"  # behind its null
        return sorted(found)[op.offset : op.offset + op.limit]


_COMPARED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "$eq": lambda value, other: bool(value == other),
    "$ne": lambda value, other: bool(value != other),
    "$gt": lambda value, other: bool(float(value) > float(other)),
    "$gte": lambda value, other: bool(float(value) >= float(other)),
    "$lt": lambda value, other: bool(float(value) < float(other)),
    "$lte": lambda value, other: bool(float(value) <= float(other)),
}


def _matches(value: Any, wanted: Any) -> bool:
    """Whether a value has what a filter names: fields, or comparisons of them."""
    if not isinstance(wanted, Mapping):
        return bool(value == wanted)
    if any(str(name).startswith("$") for name in wanted):
        return all(_compare(value, name, other) for name, other in wanted.items())
    return isinstance(value, Mapping) and all(
        _matches(value.get(name), other) for name, other in wanted.items()
    )


def _compare(value: Any, name: str, other: Any) -> bool:
    compare = _COMPARED.get(name)
    if compare is None:
        raise UsageError(f"operator {name!r}", f"pass one of {', '.join(_COMPARED)}")
    if value is None and name not in ("$eq", "$ne"):
        return False
    try:
        return compare(value, other)
    except (TypeError, ValueError):
        return False  # no number


def _names(condition: MatchCondition, namespace: tuple[str, ...]) -> bool:
    """Whether a namespace begins, or ends, as a condition says."""
    kind: Literal["prefix", "suffix"] = condition.match_type
    size = len(condition.path)
    if len(namespace) < size:
        return False
    part = namespace[:size] if kind == "prefix" else namespace[len(namespace) - size :]
    return all(each in ("*", name) for each, name in zip(condition.path, part, strict=True))
