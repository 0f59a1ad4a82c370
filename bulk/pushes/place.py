"""The place of a store in the log of pushes: how far it has come, and what became of the last
pushes.

    {"log": events passed, "shards": k | null, "pushes": {"<push>":
        {"state", "error", "at": ns, "added": ns, "import", "retry": event, "by_rows": bool,
         "event": event}}}

`at` is the time of the state, and `added` the stamp of a reverted push. `retry` is the event of a
refused push that may still be added. `by_rows` tells how a push was reverted. `event` is the event
that made the state.

The place tells the newest pushes, and the pushes whose states are the newest: an old push that is
reverted is among them.

Invariants
1. The place moves in the step that adds or reverts a push (`kvstore.positions`).
2. A puller that begins refuses a log that lacks the newest push of the place: pushes of a log that
   was put back from an older copy take the numbers of others, and the store would pass them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from bulk.pushes.log import PushLog
from bulk.pushes.newer import PushStamps
from bulk.pushes.statuses import ERROR_CHARS_MAX
from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import PUSHES_TOLD
from kvstore.mvcc import WriteSet
from kvstore.store import Store
from kvstore.timestamp import Timestamp

_TAKEN: Final = ("added", "reverted")


class PushState(NamedTuple):
    """The state of one push in a store, as the place of the store has it."""

    state: str
    error: str = ""
    at: Timestamp | None = None
    added: Timestamp | None = None
    import_id: int | None = None
    retry: int | None = None
    by_rows: bool = False

    def fields(self) -> dict[str, Any]:
        """The fields of the state, as they are stored."""
        fields = self._asdict()
        fields["import"] = fields.pop("import_id")
        return {**fields, "error": self.error[:ERROR_CHARS_MAX]}


class PushPlace:
    """The place of `store` in a log, for one shard."""

    def __init__(self, store: Store, log: PushLog, shard: int) -> None:
        self._store, self._log, self._shard = store, log, shard
        self._root: str | None = None

    @property
    def name(self) -> str:
        """The name of the position. The first call costs a get."""
        if self._root is None:
            self._root = self._log.root_id()
        return f"pushes/{self._root}/{self._shard}"

    def fields(self) -> dict[str, Any]:
        """The place as it is stored."""
        found = self._store.positions.get(self.name)
        if found is None:
            return {"log": 0, "shards": None, "pushes": {}}
        return {
            "log": found.integer("log"),
            "shards": found.optional("shards", int),
            "pushes": found.field("pushes", dict),
        }

    def state_of(self, number: int) -> str | None:
        """The state of a push; None if the place does not tell it."""
        told = self.fields()["pushes"].get(str(number))
        return None if told is None else str(told["state"])

    def require_log(self) -> None:
        """Raise `CorruptionError` if the log lacks the newest push that this store has added: it
        was put back from an older copy. Costs a get where the store has added a push."""
        told = self.fields()["pushes"]
        newest = max((int(n) for n in told if told[n]["state"] == "added"), default=0)
        if not newest or not (position := told[str(newest)].get("event")):
            return
        event = self._log.event(position)
        if event is None or (
            event.push is not None
            and (event.number == newest or str(event.number) not in told)
            and not event.push.has_import(self._shard, told[str(newest)]["import"])
        ):
            raise CorruptionError(
                self._log.where,
                f"push {newest}, which this store has added, is not in the log: the log was put "
                "back from an older copy",
                "put back the newest copy of all its files, or push to another URL and pull from "
                "there",
            )

    def stamps(self) -> PushStamps:
        """The stamps of the pushes that the store has taken."""
        return PushStamps.of(self.fields()["pushes"].values())

    def moving(self, fields: dict[str, Any]) -> WriteSet:
        """The writes that move the place, to be committed with the rows of a push."""
        return self._store.positions.moving(self.name, fields)

    def move(
        self, fields: dict[str, Any], number: int, state: PushState | None = None
    ) -> Timestamp:
        """Pass the next event, which is about push `number`. There are no rows."""
        moved = {**fields, "log": fields["log"] + 1}
        return self.write(moved if state is None else with_state(moved, number, state))

    def write(self, fields: dict[str, Any]) -> Timestamp:
        """Move the place in a commit of its own."""
        return self._store.positions.move(self.name, fields)


def with_state(fields: dict[str, Any], number: int, state: PushState) -> dict[str, Any]:
    """The place with another state of a push. The oldest pushes and states are forgotten."""
    told = {**state.fields(), "event": fields["log"]}
    pushes = {**fields["pushes"], str(number): told}
    states = sorted(pushes, key=lambda each: int(pushes[each].get("event") or 0))
    kept = {*newest_told(pushes), *states[-PUSHES_TOLD:]}
    return {**fields, "pushes": {each: pushes[each] for each in pushes if each in kept}}


def newest_told(pushes: Iterable[str]) -> list[str]:
    """The newest of the pushes that a place tells: it has forgotten none between them."""
    return sorted(pushes, key=int)[-PUSHES_TOLD:]


def require_known_since(pushes: Mapping[str, Mapping[str, Any]], event: int) -> None:
    """Raise `UsageError` if a place may have forgotten a push whose state came after `event`."""
    events = sorted(int(told.get("event") or 0) for told in pushes.values())
    if len(events) >= PUSHES_TOLD and event < events[-PUSHES_TOLD]:
        raise UsageError(
            f"{PUSHES_TOLD} pushes were added or reverted since, and older states are forgotten",
            "push the right values",
        )


def first_refused(pushes: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first of the pushes that were refused and may still be added: no later push was."""
    last = max((int(n) for n, told in pushes.items() if told["state"] in _TAKEN), default=0)
    waiting = [n for n, told in pushes.items() if told["retry"] and int(n) > last]
    return min(waiting, key=int, default=None)
