"""The client of a guest of a shared store: it finds whoever owns the store at each request, and
tells its handle of each answer. See `kvstore.remote.shared`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.changes.epochs import ambient
from kvstore.errors import DeterminateError, HistoryGoneError, IndeterminateError, KVStoreError
from kvstore.limits import CONTROL_PROGRESS_S
from kvstore.readable import Readable
from kvstore.remote import verbs
from kvstore.remote.client.calls import ClientRequest, ReplyHead
from kvstore.remote.client.client import (
    Client,
    ClientSnapshot,
    RemoteTransactions,
    RemoteVersions,
)
from kvstore.remote.client.tables import ClientRows, ClientTable
from kvstore.remote.client.transport import Connection, Endpoint, Pool, TellProgress, TokenSource
from kvstore.remote.protocol import SHARING
from kvstore.remote.verbs import Verb
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.table import Row, Table
from kvstore.timeline.durability import Durability
from kvstore.transaction import Transaction
from kvstore.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

    from kvstore.feeds import Feeds
    from kvstore.tables.joins import Side

T = TypeVar("T")

Dial: TypeAlias = "Callable[[float], socket.socket]"
FindOwner: TypeAlias = "Callable[[Dial, float], socket.socket]"
"""Makes a connection by a function of its first argument, to whoever owns the store then. The
second argument bounds an attempt."""

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class OwnerEndpoint(Endpoint):
    """The owner of a store, whoever that is when a connection is made."""

    find: FindOwner | None = None

    def open(self, timeout: float) -> socket.socket:
        assert self.find is not None
        return self.find(partial(Endpoint.open, self), timeout)


class GuestPool(Pool):
    """The connections of a guest. `told` is called behind each answer, and `silent` makes the error
    for an owner that gave none."""

    def __init__(
        self,
        endpoint: OwnerEndpoint,
        patience: float,
        silent: Callable[[KVStoreError], KVStoreError],
    ) -> None:
        super().__init__(endpoint, timeout=patience, patience=patience)
        self.told: Callable[[], None] = lambda: None
        self.now_known: Callable[[], int] = lambda: 0
        """A time before the present one at which the store is complete."""
        self._silent = silent

    def hurried(self, call: Callable[[], T]) -> T:
        """The answer of `call`, whose request is sent once. No other thread has the pool yet."""
        patience, self._patience = self._patience, 0.0
        try:
            return call()
        finally:
            self._patience = patience

    def send(self, request: ClientRequest[T]) -> T:
        try:
            return super().send(request)
        except (IndeterminateError, DeterminateError) as error:
            raise self._named(error) from error
        finally:
            self.told()

    def open(self, request: ClientRequest[object]) -> tuple[Connection, ReplyHead]:
        try:
            connection, head = super().open(request)
        except (IndeterminateError, DeterminateError) as error:
            raise self._named(error) from error
        self.told()
        connection.wait_up_to(max(self._timeout, 3 * CONTROL_PROGRESS_S))
        return connection, head

    def work(self, verb: Verb[T], progress: TellProgress | None, **arguments: Any) -> T:
        try:
            return super().work(verb, progress, **arguments)
        finally:
            self.told()

    def give(self, connection: Connection, head: ReplyHead) -> None:
        connection.wait_up_to(self._timeout)
        super().give(connection, head)

    def _token(self, writer: TokenSource | None) -> bytes:
        # The store forgets the writers that wrote long ago. A request that begins now is newer than
        # all that it has forgotten.
        self.known = max(self.known, self.now_known())
        return super()._token(writer)

    def _named(self, error: IndeterminateError | DeterminateError) -> KVStoreError:
        if error.where in (f"a request to {self.where}", f"connecting to {self.where}"):
            return self._silent(error)
        return error  # the owner has told so


class GuestClient(Client):
    """A client of whoever owns a shared store."""

    pool: GuestPool

    def __init__(
        self,
        path: Path,
        patience: float,
        find: FindOwner,
        silent: Callable[[KVStoreError], KVStoreError],
    ) -> None:
        """Raises `NotListeningError` if nobody listens, and `OtherReleaseError` if the owner is of
        a release with which this one cannot share a store."""
        endpoint = OwnerEndpoint(store=path, find=find, sharing=f"{SHARING} {__version__}")
        pool = GuestPool(endpoint, patience, silent)
        try:
            # The caller does not wait for an owner: it may become the owner.
            pool.known = pool.hurried(partial(pool.call, verbs.TIMES))["upper"] - 1
        except BaseException:
            pool.close()
            raise
        super().__init__(pool)

    def work(
        self, verb: str, progress: TellProgress | None, /, **arguments: Any
    ) -> Mapping[str, Any]:
        """See `Client.work`."""
        try:
            return super().work(verb, progress, **arguments)
        finally:
            self.pool.told()

    def read_here(self, shared: ReadsOfAGuest) -> None:
        """Have transactions and tables read what `shared` reads."""
        self._shared = shared
        self._transactions = GuestTransactions(self.pool, self._catalogue, shared)

    def table(self, name: str, *new: Any, **made: Any) -> GuestTable[Any]:
        """See `Client.table`."""
        return GuestTable(self._shared, super().table(name, *new, **made))

    def reach_owner(self) -> None:
        """Have the owner do what is due, such as the deletes of keys that have expired."""
        self.pool.call(verbs.RESOLVE)

    def has_changeset(self) -> bool:
        """Whether the calling context is inside a changeset of this client."""
        return ambient(self.pool) is not None


class GuestFeeds:
    """The feeds of a shared store, for a guest: the owner drops one."""

    def __init__(self, feeds: Feeds, client: Client) -> None:
        self._feeds, self._client = feeds, client

    def drop(self, name: str) -> None:
        """See `Feeds.drop`."""
        self._client.drop_feed(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feeds, name)


class ReadsOfAGuest(Protocol):
    """What snapshots, transactions and tables of a guest read: the handle, a `Readable` whose state
    moves."""

    @property
    def upper(self) -> Timestamp: ...

    def refresh(self) -> Timestamp:
        """Have the reads that follow show every commit that had returned before."""
        ...

    def get(self, key: bytes, as_of: TimeLike | None = None) -> bytes | None: ...

    def get_many(self, keys: list[bytes], as_of: int) -> list[bytes | None]: ...

    def scan_batches(
        self, start: bytes, end: bytes | None, *, as_of: int, reverse: bool
    ) -> pa.RecordBatchReader: ...

    def answer(self, ask: Callable[[Any], T]) -> T:
        """What `ask` gets from the store that this handle reads now."""
        ...

    def side_at(self, as_of: Timestamp) -> Side:
        """The side of the store at one time, in a join of several sources."""
        ...


class GuestVersions(RemoteVersions):
    """The versions that a transaction of a guest reads: from the files."""

    def __init__(self, pool: Pool, shared: ReadsOfAGuest) -> None:
        super().__init__(pool)
        self._shared = shared

    def get(self, key: bytes, as_of: int) -> bytes | None:
        return self._shared.get(key, as_of=Timestamp(as_of))

    def get_many(self, keys: list[bytes], as_of: int) -> list[bytes | None]:
        return self._shared.get_many(keys, as_of=Timestamp(as_of))

    def scan(
        self, span: Span, as_of: int, *, reverse: bool
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        how: dict[str, Any] = {"as_of": Timestamp(as_of), "reverse": reverse}
        for batch in self._shared.scan_batches(span.start, span.end, **how):
            yield batch.column(0).to_pylist(), batch.column(1).to_pylist()


class GuestTransactions(RemoteTransactions):
    """The transactions of a guest: they read the files, and whoever owns the store commits them."""

    versions: GuestVersions

    def __init__(self, pool: Pool, catalogue: Catalogue, shared: ReadsOfAGuest) -> None:
        super().__init__(pool, catalogue)
        self.versions, self._shared = GuestVersions(pool, shared), shared

    def begin(self, durability: Durability | None) -> Transaction:
        """A transaction at the newest time of the files. No round trip."""
        transaction = Transaction(self, 0, durability=durability)
        transaction.read_at = Timestamp(self._shared.refresh() - 1)
        return transaction


class GuestTable(ClientTable[Row]):
    """A table of a shared store, for a guest. It is read from the files, whoever owns the store.
    The owner takes rows, and answers joins."""

    def __init__(self, shared: ReadsOfAGuest, made: ClientTable[Row]) -> None:
        assert isinstance(made._rows, ClientRows)
        super().__init__(made.name, made._rows, made._model, made._fields)
        self._shared = shared

    def here(self, read: Callable[[Table[Row]], T]) -> T:
        """What `read` gets from the table in the store that the handle reads now."""

        def ask(store: Any) -> T:
            found = store.table(self.name)
            return read(type(found)(self.name, found._rows, self._model, self._fields))

        return self._shared.answer(ask)


def _from_the_files(name: str) -> Callable[..., Any]:
    @wraps(getattr(Table, name))
    def read(self: GuestTable[Any], *args: Any, **given: Any) -> Any:
        return self.here(lambda table: getattr(table, name)(*args, **given))

    return read


for _name in ("codec", "get", "get_many", "scan", "count", "find", "history", "latest", "changes"):
    setattr(GuestTable, _name, _from_the_files(_name))


class GuestSnapshot(ClientSnapshot):
    """A snapshot of a shared store that a guest took. Its reads are made from the files, and its
    lease is with the store, whoever owns it."""

    def __init__(self, shared: ReadsOfAGuest, client: GuestClient, as_of: TimeLike | None) -> None:
        self._shared = shared
        for attempt in range(_ATTEMPTS):
            at = shared.upper - 1 if as_of is None else as_of
            try:
                super().__init__(client, client.pool, at)
                return
            except HistoryGoneError:  # GC has passed the newest time meanwhile
                if as_of is not None or attempt == _ATTEMPTS - 1:
                    raise

    def join_side(self) -> Side:
        """See `ClientSnapshot.join_side`. The labels are joined here."""
        self._open()
        return self._shared.side_at(self.as_of)

    def _open(self) -> Readable:
        super()._open()
        return cast("Readable", self._shared)

    def __repr__(self) -> str:
        return f"<kvstore.GuestSnapshot as of {self.as_of}>"
