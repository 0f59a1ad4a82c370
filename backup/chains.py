"""The chains of a collection: which shards hold its windows, oldest first.

    consensus key "collection" := {"format": 1, "id", "source", "chains": [shard names],
                                   "dropping": [shard names]}

Most collections have one chain. Where the source lost the history that the next window needs, a new
full backup begins another; the old one stays readable up to where it ended. The record changes
by compare-and-set, so two scripts that begin a collection, or a chain, at once agree on one.

    shard name := "chain-" | 12 random hex digits [ "-" | 12 hex digits of the token's BLAKE2b ]

A full backup with a token leaves its mark in the name of the chain it begins: however often it is
killed, even between the window it had begun and the rest, it goes on with that one.

A chain that has expired is written down as `dropping`, then destroyed, then forgotten: a crash in
between leaves a name by which the next expiry finds what is left.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from backup.shard import Cas, Shard, Storage, Versioned
from backup.shard.state import witness
from backup.shard.state.log import MissingShardError, StateLog
from kvstore.clock import WallClock
from kvstore.codec.json import read_object
from kvstore.errors import (
    CorruptionError,
    FormatVersionError,
    LockedError,
    StatesLostError,
    UsageError,
)

COLLECTION_FORMAT: Final = 1
RETENTION: Final = "retention"
"""The critical hold that keeps a chain's since where `expire` put it."""

_KEY = "collection"
_ATTEMPTS = 8
_CHAIN = "chain-"
_NAME = re.compile(rf"{_CHAIN}[A-Za-z0-9-]{{1,100}}")
_PUT_BACK = "put the folder consensus back from a copy, or back up to another place"


@dataclass(frozen=True, slots=True)
class CollectionRecord:
    """The collection's record of itself."""

    seqno: int
    collection_id: str
    source: str
    chains: tuple[str, ...]
    dropping: tuple[str, ...] = ()

    def is_begun_by(self, token: str | None) -> bool:
        """Whether the backup `token` has begun the newest chain."""
        return token is not None and self.chains[-1].endswith(f"-{_mark(token)}")


_NONE = CollectionRecord(0, "", "", ())


class Chains:
    """The record, and the shards it names."""

    def __init__(self, place: Storage, where: str, clock: WallClock) -> None:
        self._place = place
        self._where = where
        self._clock = clock
        self._over = place.blob.patience.over
        self._logs: dict[str, StateLog] = {}

    def read(self) -> CollectionRecord | None:
        """The newest record; None where no backup was ever made.

        Raises `CorruptionError` if it is damaged, or gone, which parts tell.
        """
        head = self._head()
        if head is None and self._has_parts(_CHAIN):
            head = self._head()  # the first backup may have begun in between
            if head is None:
                raise self._lost("the record of the collection")
        if head is None:
            return None
        fields = read_object(head.data, where=f"{self._where}: record of the collection")
        version = fields.integer("format")
        if version != COLLECTION_FORMAT:
            raise FormatVersionError(self._where, found=version, supported=COLLECTION_FORMAT)
        chains = fields.items_of("chains", str)
        dropping = fields.items_of("dropping", str) if "dropping" in fields else []
        names = [*chains, *dropping]
        if not chains or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
            raise fields.damaged("its chains are none, come twice, or have names that none has")
        collection_id, source = fields.text("id"), fields.text("source")
        return CollectionRecord(head.seqno, collection_id, source, tuple(chains), tuple(dropping))

    def begin(
        self, source: str, token: str | None = None, *, first: Callable[[], None] = lambda: None
    ) -> CollectionRecord:
        """The record, made with one chain if there is none yet: the backup `token` begins it.
        `first` is called before it is made.

        Raises `UsageError` if the collection belongs to another store.
        """
        for _ in range(_ATTEMPTS):
            record = self.read()
            if record is not None:
                if record.source != source:
                    raise UsageError(
                        f"{self._where} holds the backups of store {record.source}",
                        "back this store up into a collection of its own",
                    )
                return record
            first()
            self._write(
                CollectionRecord(0, secrets.token_hex(6), source, (_new_name(token),)),
                expected=None,
            )
        raise LockedError(self._where, "scripts that keep changing it")

    def extend(self, record: CollectionRecord, token: str | None = None) -> CollectionRecord:
        """Begin another chain after those of `record`. Raises `LockedError` if one just was.

        From here on nobody asks whether the states before were the newest there have been."""
        longer = replace(record, chains=(*record.chains, _new_name(token)))
        extended = self._replace(record, longer)
        blob = self._place.blob
        for name in set(witness.shards(blob, _CHAIN)) - {longer.chains[-1]}:
            witness.remove(blob, name)
        return extended

    def require_named(self, record: CollectionRecord | None) -> None:
        """Raise `StatesLostError` if there was a chain that the record does not know: then it is
        older than it has been. Lists all parts."""
        known = set() if record is None else {*record.chains, *record.dropping}
        chains = set(witness.shards(self._place.blob, _CHAIN))
        if unknown := chains - known - set((self.read() or _NONE).chains):
            raise StatesLostError(
                f"{self._where}: record of the collection, which lacks {min(unknown)}",
                found=len(known),
                known=len(known | chains),
            )

    def drop(self, record: CollectionRecord, names: set[str]) -> CollectionRecord:
        """Take chains whose whole window has expired out of use; they are to be destroyed."""
        kept = tuple(name for name in record.chains if name not in names)
        dropping = (*record.dropping, *sorted(names))
        return self._replace(record, replace(record, chains=kept, dropping=dropping))

    def forget(self, record: CollectionRecord, names: set[str]) -> CollectionRecord:
        """Of the chains that were `dropping`, these are destroyed."""
        left = tuple(name for name in record.dropping if name not in names)
        return self._replace(record, replace(record, dropping=left))

    def shard(self, name: str) -> Shard:
        """A handle on a chain, made if its first backup has not been yet. Raises as `find`."""
        return self.find(name) or self._opened(name, create=True)

    def find(self, name: str) -> Shard | None:
        """A handle on a chain; None if it is yet to be made.

        Reads what others have written since the last handle looked: all of it is decoded once.
        Raises `CorruptionError` if its log is gone, which its parts tell.
        """
        with suppress(MissingShardError):
            return self._opened(name, create=False)
        if not self._has_parts(f"{name}/part/"):
            return None
        try:
            return self._opened(name, create=False)  # its first backup may have begun in between
        except MissingShardError as error:
            raise self._lost(f"the log of {name}") from error

    def _opened(self, name: str, *, create: bool) -> Shard:
        blob, consensus = self._place.blob, self._place.consensus
        log = self._logs.get(name)
        known = None if log is None else log.state
        shard = Shard.open(blob, consensus, name, create=create, clock=self._clock, known=known)
        self._logs[name] = shard.log
        return shard

    def _head(self) -> Versioned | None:
        return self._over(partial(self._place.consensus.head, _KEY))

    def _has_parts(self, prefix: str) -> bool:
        return self._over(lambda: next(iter(self._place.blob.list(prefix)), None)) is not None

    def _lost(self, what: str) -> CorruptionError:
        where = f"{self._where}: {what}"
        return CorruptionError(where, "it is gone, and the parts are there", _PUT_BACK)

    def _replace(self, old: CollectionRecord, new: CollectionRecord) -> CollectionRecord:
        changed = replace(new, seqno=old.seqno + 1)
        if not self._write(changed, expected=old.seqno):
            raise LockedError(self._where, "another script, which has just changed it")
        return changed

    def _write(self, record: CollectionRecord, *, expected: int | None) -> bool:
        fields = {
            "format": COLLECTION_FORMAT,
            "id": record.collection_id,
            "source": record.source,
            "chains": record.chains,
            "dropping": record.dropping,
        }
        data = json.dumps(fields, sort_keys=True).encode()
        new = Versioned(record.seqno, data)
        # Unknown is asked again: if it was done, the version is there, with our names in it.
        return self._over(lambda: self._set(new, expected))

    def _set(self, new: Versioned, expected: int | None) -> bool:
        consensus = self._place.consensus
        if consensus.compare_and_set(_KEY, expected=expected, new=new) is Cas.COMMITTED:
            return True
        return new in self._over(partial(consensus.scan, _KEY, start=new.seqno, limit=1))


def no_backup(where: str) -> UsageError:
    """The error of a read where nothing was backed up yet."""
    return UsageError(f"{where} holds no backup", "check the path, or run a backup first")


def _new_name(token: str | None = None) -> str:
    name = f"{_CHAIN}{secrets.token_hex(6)}"
    return name if token is None else f"{name}-{_mark(token)}"


def _mark(token: str) -> str:
    return hashlib.blake2b(token.encode(), digest_size=6).hexdigest()
