"""The order of the actions in a day, at its end, and at the end of a week.

A day's actions come in random order, each a little later than the one before. At its end come the
feeds, the backup, the collection of garbage, the reopening, and a look at a past state.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

import kvstore
from benchmarks.year.plan import Plan
from benchmarks.year.service import Service, WrongStateError
from kvstore.changes.events import Operation
from kvstore.errors import HoldLostError
from tests.harness.bounds import bounds

_DAY_NS: Final = 24 * 3600 * 10**9
_MIRROR: Final = "mirror"


class Past(NamedTuple):
    """A state to which the store is asked to return."""

    at: kvstore.Timestamp
    state: dict[bytes, bytes]
    hold: str
    end_day: int


def play(directory: Path, plan: Plan) -> Iterator[dict[str, float]]:
    """Play the year in `directory`; yields the costs of each week.

    Some days come before the year. They fill the store, and their costs do not count.
    Raises `WrongStateError` when the store and the model differ, at the end of the year too.
    """
    # A busy service comes to the usual bound in some weeks.
    with bounds(PAST_IMPORTS_MAX=plan.imports):
        year = _Year(Service(directory, plan))
        year.service.load()
        year.play(plan.days_before)
        year.service.costs.take()
        for _ in range(plan.weeks):
            year.play(plan.days)
            yield year.service.costs.take()
        year.end()


class _Year:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._order = random.Random(12)
        self._day = 0
        self._past: deque[Past] = deque()
        self._mirror: dict[bytes, bytes] = {}
        self._follow(start=0)
        self._guests: deque[str] = deque()

    def play(self, days: int) -> None:
        """Play `days` of service, then the end of the week."""
        for _ in range(days):
            self._play_day()
        for _ in range(self.service.plan.parallel_scans):
            self.service.scan_parallel()
        self.service.expire()

    def _play_day(self) -> None:
        service, plan = self.service, self.service.plan
        actions = [action for action, count in service.actions.items() for _ in range(count)]
        self._order.shuffle(actions)
        for action in actions:
            service.clock.advance(_DAY_NS // (len(actions) + 1))
            action()
        self._day += 1
        self._follow()
        service.back_up()
        self._pin()
        if self._day % plan.pinned_days == 0:
            self._entertain()
        service.collect()
        service.weigh()
        service.reopen()

    def end(self) -> None:
        """Compare the store, the mirror and a restored backup with the model, and verify."""
        service, state = self.service, self.service.model.state()
        self._follow()
        _compare(dict(service.store.scan()), state, "the store at the end")
        _compare(self._mirror, state, "the feed's mirror at the end")
        while self._past:
            self._look_back()
        report = service.store.verify()
        if report.problems:
            raise WrongStateError(f"verify: {report.problems[0]}")
        service.collection.backup(service.store)
        restored = service.directory / "restored"
        service.collection.restore(restored)
        with kvstore.open_read_only(restored) as store:
            _compare(dict(store.scan()), state, "the restored backup")
        service.store.close()

    # -- feeds ------------------------------------------------------------------------------

    def _follow(self, start: int | None = None) -> None:
        """Bring the mirror up to date by a feed that resumes each day."""
        service = self.service
        with service.costs.time("feed of a day"), service.store.feed(_MIRROR, start=start) as feed:
            for batch in feed:
                for event in batch.events:
                    self._apply(event)
                feed.ack(batch)

    def _apply(self, event: kvstore.Event) -> None:
        mirror = self._mirror
        if event.op == Operation.DELETE_RANGE:
            for row in range(self.service.plan.rows_per_user):
                mirror.pop(event.key + b"%04d" % row, None)
        elif event.value is None:
            mirror.pop(event.key, None)
        else:
            mirror[event.key] = event.value

    def _entertain(self) -> None:
        """Two feeds come. One lags, and goes when the next one comes; one is lost and then goes."""
        store, name = self.service.store, f"guest-{self._day}"
        while self._guests:
            self._see_off(self._guests.popleft())
        store.feed(f"{name}-slow", start="now").close()
        store.feed(f"{name}-lost", start="now", max_age=timedelta(days=1)).close()
        self._guests += [f"{name}-slow", f"{name}-lost"]

    def _see_off(self, guest: str) -> None:
        store = self.service.store
        try:
            with store.feed(guest) as feed:
                feed.ack(next(iter(feed)))
        except HoldLostError:
            if not guest.endswith("-lost"):
                raise
        store.feeds.drop(guest)

    # -- past states ------------------------------------------------------------------------

    def _pin(self) -> None:
        """Hold today's state, and compare the one that was held first, if its time has come."""
        service = self.service
        at = kvstore.Timestamp(service.store.sync() - 1)
        hold = f"past-{self._day}"
        service.store.hold(hold, at)
        end_day = self._day + service.plan.pinned_days
        self._past.append(Past(at, service.model.state(), hold, end_day))
        if self._past[0].end_day <= self._day:
            self._look_back()

    def _look_back(self) -> None:
        past, store = self._past.popleft(), self.service.store
        found = dict(store.scan(as_of=past.at))
        _compare(found, past.state, f"the state of {past.hold}")
        store.drop_hold(past.hold)


def _compare(found: dict[bytes, bytes], expected: dict[bytes, bytes], where: str) -> None:
    if found != expected:
        wrong = [key for key in sorted({*found, *expected}) if found.get(key) != expected.get(key)]
        raise WrongStateError(f"{where}: {len(wrong)} keys differ, the first is {wrong[0]!r}")
