"""The chains of a collection: which shards hold its windows, oldest first.

    consensus key "collection" := {"format": 1, "id", "source", "chains": [shard names],
                                   "dropping": [shard names],
                                   "drills": [drill (see `Drill`), oldest first]}

Most collections have one chain. Where the source lost the history that the next window needs, a
new full backup begins another chain; the old chain stays readable up to where it ended. The
record changes by compare-and-set, so two scripts that begin a collection, or a chain, at once
agree on one.

    shard name := "chain-" | 12 random hex digits [ "-" | 12 hex digits of the token's BLAKE2b ]

A full backup with a token leaves its mark in the name of the chain it begins. However often the
backup is killed, it continues that chain.

A chain that has expired is recorded as `dropping`, then destroyed, then forgotten. After a crash
in between, the next expiry finds the rest of the chain by its name in the record.

Behind them: the instants that can be read, and the record of drills.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from kvstore.backup.shard import (
    EMPTY,
    Blob,
    Cas,
    Shard,
    ShardBatch,
    ShardSnapshot,
    Storage,
    Versioned,
)
from kvstore.backup.shard.state import witness
from kvstore.backup.shard.state.state_log import MissingShardError, StateLog
from kvstore.base.arguments import REFUSED, ArgumentKind, Refused
from kvstore.base.clock import WallClock
from kvstore.base.timestamp import (
    NOW,
    OLDEST,
    TIMESTAMP_MAX,
    TimeLike,
    Timestamp,
    reached,
    to_timestamp,
)
from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import (
    CorruptionError,
    FormatVersionError,
    HistoryGoneError,
    LockedError,
    NotYetWrittenError,
    StatesLostError,
    UsageError,
)
from kvstore.limits import DRILLS_KEPT, LABEL_CHARS_MAX
from kvstore.store import Store

COLLECTION_FORMAT: Final = 1
RETENTION: Final = "retention"
"""The critical hold that keeps a chain's `since` at the time that `expire` set."""

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
    drills: Drills = ()

    @property
    def hold_name(self) -> str:
        """The name of the hold by which the source keeps history for this collection."""
        return f"backup-{self.collection_id}"

    def is_begun_by(self, token: str | None) -> bool:
        """Whether the backup named `token` has begun the newest chain."""
        return token is not None and self.chains[-1].endswith(f"-{_mark(token)}")


_NONE = CollectionRecord(0, "", "", ())


class Chain(NamedTuple):
    """Windows that join, oldest first: all commits of `[since, upper)`. Below `since` the states at
    the `kept` instants can be read, each of which may have labels."""

    name: str
    since: Timestamp
    upper: Timestamp
    batches: Sequence[ShardBatch]
    kept: Mapping[int, tuple[str, ...]] = MappingProxyType({})


class Chains:
    """The record, and the shards it names."""

    def __init__(self, place: Storage, where: str, clock: WallClock) -> None:
        self._place = place
        self.where = where
        self._clock = clock
        self._over = place.blob.patience.over
        self._logs: dict[str, StateLog] = {}

    @property
    def blob(self) -> Blob:
        """The blob that holds the parts."""
        return self._place.blob

    def read(self) -> CollectionRecord | None:
        """The newest record; None where no backup was ever made.

        Raises `CorruptionError` if the record is damaged, or if parts are there without a record.
        """
        head = self._head()
        if head is None and self._has_parts(_CHAIN):
            head = self._head()  # the first backup may have begun meanwhile
            if head is None:
                raise self._lost("the record of the collection")
        if head is None:
            return None
        fields = read_object(head.data, where=f"{self.where}: record of the collection")
        version = fields.integer("format")
        if version != COLLECTION_FORMAT:
            raise FormatVersionError(self.where, found=version, supported=COLLECTION_FORMAT)
        chains = fields.items_of("chains", str)
        dropping = fields.items_of("dropping", str)
        names = [*chains, *dropping]
        if not chains or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
            raise fields.damaged(
                "its list of chains is empty, repeats a chain, or has an unknown name"
            )
        collection_id, source = fields.text("id"), fields.text("source")
        lists = tuple(chains), tuple(dropping), drills_of(fields)
        return CollectionRecord(head.seqno, collection_id, source, *lists)

    def begin(
        self, source: str, token: str | None = None, *, first: Callable[[], None] = lambda: None
    ) -> CollectionRecord:
        """The record. Where there is none, it is made with one chain, begun by the backup `token`.
        `first` is called before that.

        Raises `UsageError` if the collection belongs to another store.
        """
        for _ in range(_ATTEMPTS):
            record = self.read()
            if record is not None:
                if record.source != source:
                    raise UsageError(
                        f"{self.where} holds the backups of store {record.source}",
                        "back this store up into a collection of its own",
                    )
                return record
            first()
            self._write(
                CollectionRecord(0, secrets.token_hex(6), source, (_new_name(token),)),
                expected=None,
            )
        raise LockedError(self.where, "other scripts that keep changing it")

    def extend(self, record: CollectionRecord, token: str | None = None) -> CollectionRecord:
        """Begin another chain behind the chains of `record`.

        The witnesses of the older chains are removed: no backup will be appended to those chains.
        Raises `LockedError` if another script has just changed the record.
        """
        longer = replace(record, chains=(*record.chains, _new_name(token)))
        extended = self._replace(record, longer)
        blob = self._place.blob
        for name in set(witness.shards(blob, _CHAIN)) - {longer.chains[-1]}:
            witness.remove(blob, name)
        return extended

    def require_named(self, record: CollectionRecord | None) -> None:
        """Raise `StatesLostError` if there was a chain that the record does not know.

        Such a record is an older copy. Lists all parts.
        """
        known = set() if record is None else {*record.chains, *record.dropping}
        chains = set(witness.shards(self._place.blob, _CHAIN))
        if unknown := chains - known - set((self.read() or _NONE).chains):
            raise StatesLostError(
                f"{self.where}: record of the collection, which lacks {min(unknown)}",
                found=len(known),
                known=len(known | chains),
            )

    def require_reached(self, record: CollectionRecord, newest: Shard, store: Store) -> None:
        """Raise `StatesLostError` if the source knows of later appends than the collection has.

        A crash may take the newest moves of the hold from the source: then less is checked.
        """
        reached = (hold.reached for hold in store.holds.all() if hold.name == record.hold_name)
        known = Timestamp(next(reached, None) or 0)
        if newest.upper >= known:
            return
        found = Timestamp(max(shard.refresh().upper for shard in (newest, *self.shards(record))))
        if found < known:
            remedy = "put back the newest copy of all its files; "
            remedy += "`kvstore backup run --full`, or full=True, begins anew"
            raise StatesLostError(self.where, found=found, known=known, remedy=remedy)

    def drop(self, record: CollectionRecord, names: set[str]) -> CollectionRecord:
        """Record the chains `names`, whose whole window has expired, as `dropping`."""
        kept = tuple(name for name in record.chains if name not in names)
        dropping = (*record.dropping, *sorted(names))
        return self._replace(record, replace(record, chains=kept, dropping=dropping))

    def forget(self, record: CollectionRecord, names: set[str]) -> CollectionRecord:
        """Remove chains that are destroyed from the list `dropping`."""
        left = tuple(name for name in record.dropping if name not in names)
        return self._replace(record, replace(record, dropping=left))

    def note_drill(self, drill: Drill) -> None:
        """Record the outcome of a drill, unless its chain has expired meanwhile."""
        for _ in range(_ATTEMPTS):
            record = self.read()
            if record is None or drill.chain not in record.chains:
                return
            drills = with_drill(record.drills, drill, record.chains)
            with suppress(LockedError):
                self._replace(record, replace(record, drills=drills))
                return
        raise LockedError(self.where, "other scripts that keep changing it")

    def shard(self, name: str) -> Shard:
        """A handle on a chain, which is made if it does not exist yet. Raises as `find` does."""
        return self.find(name) or self._opened(name, create=True)

    def find(self, name: str) -> Shard | None:
        """A handle on a chain; None if the chain is not made yet.

        Each handle begins with the state that the last handle on this chain has read, and reads
        only newer versions. Raises `CorruptionError` if parts of the chain are there without a log.
        """
        with suppress(MissingShardError):
            return self._opened(name, create=False)
        if not self._has_parts(f"{name}/part/"):
            return None
        try:
            return self._opened(name, create=False)  # its first backup may have begun meanwhile
        except MissingShardError as error:
            raise self._lost(f"the log of {name}") from error

    # -- reading -----------------------------------------------------------------------------

    def shards(self, record: CollectionRecord | None = None) -> Sequence[Shard]:
        """All chains, oldest first. The first backup of the newest chain may not have ended yet."""
        record = record or self.read()
        found = map(self.find, () if record is None else record.chains)
        # Another script may have just begun to destroy one.
        return [shard for shard in found if shard is not None and shard.since != EMPTY]

    def filled(self, record: CollectionRecord | None = None) -> Sequence[Shard]:
        """The chains that have a backup, oldest first."""
        return [shard for shard in self.shards(record) if shard.upper]

    def newest(self) -> Shard | None:
        """The newest chain that has a backup."""
        filled = self.filled()
        return filled[-1] if filled else None

    def chain(self, name: str | None, covering: Sequence[int]) -> Chain | None:
        """See `Collection.chain`."""
        record = self.read()
        if record is None or (name is not None and name not in record.chains):
            return None
        names = record.chains if name is None else (name,)
        found = [_chain(shard) for shard in map(self.find, names) if shard and shard.upper]
        whole = [c for c in found if all(covers(c, time) for time in covering)]
        return next(reversed(whole or found), None)

    @contextmanager
    def snapshot(self, as_of: int | None) -> Iterator[tuple[Shard, ShardSnapshot]]:
        """A snapshot of the newest chain that covers `as_of`. None is the newest instant of all."""
        shards = self.filled()
        if not shards:
            raise no_backup(self.where)
        newest = shards[-1]
        if as_of is None:
            newest.require_newest()
        at = newest.upper - 1 if as_of is None else instant_of(shards, as_of)
        if at >= newest.upper:
            raise NotYetWrittenError(as_of=Timestamp(at), upper=Timestamp(newest.upper))
        covering = [shard for shard in shards if covers(shard, at)]
        if not covering:
            raise gone(shards, at)
        with covering[-1].snapshot(at) as snapshot:
            yield covering[-1], snapshot

    @contextmanager
    def snapshots(self) -> Iterator[Mapping[Shard, ShardSnapshot]]:
        """All chains, oldest first, each with a snapshot at its newest instant."""
        with ExitStack() as held:
            yield {
                shard: held.enter_context(shard.snapshot(shard.upper - 1))
                for shard in self.filled()
            }

    # -- inside ------------------------------------------------------------------------------

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
        where = f"{self.where}: {what}"
        return CorruptionError(where, "it is gone, although parts are there", _PUT_BACK)

    def _replace(self, old: CollectionRecord, new: CollectionRecord) -> CollectionRecord:
        changed = replace(new, seqno=old.seqno + 1)
        if not self._write(changed, expected=old.seqno):
            raise LockedError(self.where, "another script, which has just changed it")
        return changed

    def _write(self, record: CollectionRecord, *, expected: int | None) -> bool:
        fields = {
            "format": COLLECTION_FORMAT,
            "id": record.collection_id,
            "source": record.source,
            "chains": record.chains,
            "dropping": record.dropping,
            "drills": [drill._asdict() for drill in record.drills],
        }
        data = json.dumps(fields, sort_keys=True).encode()
        new = Versioned(record.seqno, data)
        # After an unknown outcome the call is repeated: a version that was committed is then found
        # in the log, with our names in it.
        return self._over(lambda: self._set(new, expected))

    def _set(self, new: Versioned, expected: int | None) -> bool:
        consensus = self._place.consensus
        if consensus.compare_and_set(_KEY, expected=expected, new=new) is Cas.COMMITTED:
            return True
        return new in self._over(partial(consensus.scan, _KEY, start=new.seqno, limit=1))


def no_backup(where: str) -> UsageError:
    """The error of reading a collection without a backup."""
    return UsageError(f"{where} holds no backup", "check the path, or run a backup first")


def _chain(shard: Shard) -> Chain:
    state = shard.refresh()
    since, upper = Timestamp(state.since), Timestamp(state.upper)
    return Chain(shard.name, since, upper, state.batches, state.kept)


def _new_name(token: str | None = None) -> str:
    name = f"{_CHAIN}{secrets.token_hex(6)}"
    return name if token is None else f"{name}-{_mark(token)}"


def _mark(token: str) -> str:
    return hashlib.blake2b(token.encode(), digest_size=6).hexdigest()


# --------------------------------------------------------------------------------------------------
# The instants of a collection that can be read, and the error for all others.

_LABEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*", re.ASCII)
_TIMES: Final = (NOW, OLDEST, "today", "yesterday")
"""Words that are times here or on the command line: a label would hide behind them."""


def _read_label(given: object) -> str | Refused:
    if not isinstance(given, str) or _LABEL.fullmatch(given) is None:
        return REFUSED
    return given if len(given) <= LABEL_CHARS_MAX and given.lower() not in _TIMES else REFUSED


LABEL: Final = ArgumentKind(
    _read_label,
    f"begin a label with a letter; letters, digits, '.', '_' and '-' may follow, "
    f"{LABEL_CHARS_MAX} characters at most; {', '.join(_TIMES)} are times",
)


class CoveringChain(Protocol):
    """A chain, readable in `[since, upper)` and at the instants that it keeps."""

    @property
    def since(self) -> int: ...

    @property
    def upper(self) -> int: ...

    @property
    def kept(self) -> Mapping[int, tuple[str, ...]]: ...


def covers(chain: CoveringChain, time: int) -> bool:
    """Whether a chain can be read at a time."""
    return time < chain.upper and (time >= chain.since or time in chain.kept)


def instant_of(chains: Iterable[CoveringChain], time: int) -> int:
    """`time`, or the instant that it names in microseconds where no chain covers it: the newest
    instant of a chain, or a kept one. See `kvstore.base.timestamp.reached`."""
    known = list(chains)
    if any(covers(chain, time) for chain in known):
        return time
    instants = (instant for chain in known for instant in (int(chain.upper) - 1, *chain.kept))
    return next((instant for instant in instants if reached(time, instant) != time), time)


def gone(chains: Iterable[CoveringChain], as_of: int) -> HistoryGoneError:
    """The error for a time that no chain covers. It names the nearest earlier and later instants
    that can be read."""
    instants: set[int] = set()
    since = 0
    for chain in chains:
        since = int(chain.since)
        instants |= {*chain.kept, since, int(chain.upper) - 1}
    earlier = max((time for time in instants if time < as_of), default=None)
    later = min((time for time in instants if time > as_of), default=None)
    nearest = tuple(Timestamp(time) for time in (earlier, later) if time is not None)
    return HistoryGoneError(as_of=Timestamp(as_of), since=Timestamp(since), nearest=nearest)


def time_or_label(
    given: TimeLike,
    labels: Callable[[], Mapping[str, int]],
    *,
    name: str,
    now: Callable[[], int],
) -> int:
    """The time that a caller gave as a time, or as the label of an instant. Raises `UsageError` for
    a text that is neither."""
    try:
        return int(to_timestamp(given, name=name, now=now))
    except UsageError as error:
        if not isinstance(given, str) or _LABEL.fullmatch(given) is None:
            raise
        known = labels()
        if given in known:
            return known[given]
        raise UsageError(
            f"{name}={given!r} is no time, and no label of the collection",
            f"its labels are {', '.join(sorted(known))}" if known else "it has no labels",
        ) from error


def labels_of(chains: Iterable[CoveringChain]) -> dict[str, Timestamp]:
    """The labels of chains, and their instants."""
    return {
        label: Timestamp(time)
        for chain in chains
        for time, labels in sorted(chain.kept.items())
        for label in labels
    }


# --------------------------------------------------------------------------------------------------
# The drills of a collection: restores that were tried, as its record remembers them.
#
#     drill := {"chain": shard name, "at", "drilled_at": ns, "depth",
#               "problem": text, "" for a proof}
#
# Invariants
# 1. Of each chain the newest `DRILLS_KEPT` drills are kept, and its newest proof.
# 2. A chain that has expired leaves no drill.


class Drill(NamedTuple):
    """A restore of a chain as of `at` that was tried at `drilled_at`, and its problem, if any."""

    chain: str
    at: int
    drilled_at: int
    depth: str
    problem: str = ""


Drills = tuple[Drill, ...]


def drills_of(fields: JsonObject) -> Drills:
    """The drills in the record of a collection."""
    found = fields.items_of("drills", dict)
    return tuple(_drill(JsonObject(each, where=fields.where)) for each in found)


def _drill(fields: JsonObject) -> Drill:
    return Drill(
        fields.text("chain"),
        fields.integer("at"),
        fields.integer("drilled_at"),
        fields.text("depth"),
        fields.text("problem"),
    )


def newest_proof(
    drills: Sequence[Drill], chain: str, *, lower: int = 0, upper: int = TIMESTAMP_MAX
) -> Drill | None:
    """The newest drill that has proved an instant of `chain` in `[lower, upper)`."""
    proofs = (
        drill
        for drill in reversed(drills)
        if drill.chain == chain and not drill.problem and lower <= drill.at < upper
    )
    return next(proofs, None)


def with_drill(drills: Sequence[Drill], drill: Drill, chains: Collection[str]) -> Drills:
    """`drills` and one more, without the drills that need not be kept. `chains` are all chains."""
    others = [each for each in drills if each.chain in chains and each.chain != drill.chain]
    mine = [*(each for each in drills if each.chain == drill.chain), drill]
    kept = mine[-DRILLS_KEPT:]
    proof = newest_proof(mine, drill.chain)
    if proof is not None and proof not in kept:
        kept[0] = proof
    return (*others, *kept)
