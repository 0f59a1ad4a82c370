"""The journal of Optuna's studies in a store.

    storage = JournalStorage(KVStoreJournal("studies.db"))

Each entry of the journal is a key: the prefix, and a number of eight bytes. Workers in any number
of processes and machines share it, and `as_of` shows a study as it was.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final

from optuna.storages.journal import BaseJournalBackend

from kvstore.base.timestamp import TimeLike
from kvstore.errors import UsageError
from kvstore.remote.handle import Handle, Where
from kvstore.transaction import Transaction

_NUMBER: Final = struct.Struct(">Q")
_ATTEMPTS: Final = 10_000
"""Runs of an append. Each conflict means that another worker has appended."""


class KVStoreJournal(BaseJournalBackend):
    """`where` is the path of a store, the URL of a server, or an open store. With `as_of` the
    journal is read as of that time. A handle by address pickles.

    Optuna's snapshots of a journal are pickles, so they are not kept here: a worker reads the whole
    journal when it begins.
    """

    def __init__(
        self,
        where: Where | Handle,
        *,
        prefix: str = "optuna/",
        as_of: TimeLike | None = None,
        token: str | None = None,
    ) -> None:
        self.handle = Handle.of(where, token=token, read_only=as_of is not None)
        self.as_of = as_of
        self._logs = prefix.encode() + b"log/"
        self._next = prefix.encode() + b"next"

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The entries from a number on."""
        start, end = self._logs + _NUMBER.pack(log_number_from), self._logs + b"\xff" * 9
        for _, raw in self.handle.store.scan(start, end, as_of=self.as_of):
            yield json.loads(raw)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append entries by one commit, with the next numbers."""
        if self.as_of is not None:
            raise UsageError("the past cannot be written", "make a journal without as_of")
        rows = [json.dumps(log, separators=(",", ":")).encode() for log in logs]

        def append(transaction: Transaction) -> None:
            first = int(transaction.get(self._next) or 0)
            for number, raw in enumerate(rows, first):
                transaction.put(self._logs + _NUMBER.pack(number), raw)
            transaction.put(self._next, b"%d" % (first + len(rows)))

        self.handle.store.transact(append, attempts=_ATTEMPTS)
