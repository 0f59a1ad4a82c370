"""The store: the face of everything below it.

It checks what callers pass, picks the time of each read, and leaves the work to the parts: commits
and frontiers to `commit`, versions to `mvcc`, changes to `changes`, feeds to `feeds`, bulk loads to
`imports`, claims on history to `holds`, garbage to `gc`. One class in floors, each on the last:

    Opened      the parts, the frontiers, closing
    Reading     get, scan, history, changes, snapshots
    Writing     put, delete, batches, conditions, transactions
    Capturing   changesets, epochs, events, feeds, streams
    Following   standing by for another store
    Keeping     holds, gc, clear, revert, verify, checkpoint
"""

from __future__ import annotations

from kvstore.store.keeping import Keeping


class Store(Keeping):
    """A multi-version key-value store. Open one with `kvstore.open`; use it from any thread.

    Times (`as_of`, `since`, `upto`, `at`) are a `Timestamp`, an aware `datetime` or ISO-8601
    text; None is the newest complete time. Reading below `since` raises `HistoryGoneError`, in
    the future `NotYetWrittenError`. Writes are visible to all readers when they return.
    """
