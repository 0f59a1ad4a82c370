"""Random histories whose process is killed in the middle of a write (`tests.harness.kills`)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import bulk
from kvstore.store import Store
from tests.harness.kills import SEED, Rounds, run_until_killed
from tests.harness.seeds import seeded
from tests.harness.workload import Session, State, Step, Workload, with_rows

pytestmark = pytest.mark.on_disk


class WithImports(Workload):
    """The steps of a store, and imports that are added and reverted."""

    odds: Mapping[str, int] = {**Workload.odds, "ingest": 5}

    def make_ingest(self, s: Session) -> tuple[Any, ...]:
        rows = {s.key(): s.value() for _ in range(s.pick.randint(1, 12))}
        return f"staged-{s.pick.getrandbits(60):x}", s.pick.getrandbits(62) + 1, rows

    def do_ingest(self, s: Session, name: str, import_id: int, rows: dict[bytes, bytes]) -> int:
        made = bulk.Import.create(s.place / name, import_id=import_id)
        with made.writer() as writer:
            for key in sorted(rows):
                writer.put(key, rows[key])
        made.seal()
        return bulk.ingest(s.store, made.staging, move=s.pick.random() < 0.5)

    def after_ingest(
        self, state: State, _: Any, name: str, import_id: int, rows: dict[bytes, bytes]
    ) -> State:
        return with_rows(state, {**state.rows, **rows})

    def choose(self, session: Session) -> Step:
        """Now and then revert an import directly after it was added. The rows before the import
        then show again, and the model knows them if an earlier step of this run has recorded
        them."""
        times, newest = session.times, session.store.upper - 1
        found = [r.import_id for r in session.store.imports.all() if r.added == newest]
        if found and newest in times[1:] and newest != times[0] and session.pick.random() < 0.5:
            return Step("revert_import", (found[0], times.index(newest)))
        return super().choose(session)

    def do_revert_import(self, s: Session, import_id: int, _: int) -> int:
        return s.store.revert_import(import_id)

    def after_revert_import(
        self, state: State, states: list[State], _: int, imported: int
    ) -> State:
        return with_rows(state, states[imported].rows)

    def check(self, store: Store, place: Path, state: State) -> None:
        assert all(
            record.state in ("adding", "added", "reverted") for record in store.imports.all()
        )


class WithClears(WithImports):
    """Leaves out the steps that keep history, because a clear is refused while history is held."""

    odds: Mapping[str, int] = {
        op: count for op, count in WithImports.odds.items() if op not in {"ack", "hold", "release"}
    } | {"clear": 4}


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("workload", [WithImports(), WithClears()], ids=["holds", "clears"])
@pytest.mark.parametrize(
    ("stores", "hits"),
    [(1, 8), pytest.param(20, 25, marks=pytest.mark.soak)],
    ids=["few", "many"],
)
def test_what_was_acknowledged_is_there_and_the_step_under_way_whole_or_not(
    spawn: Any, tmp_path: Path, workload: Workload, stores: int, hits: int
) -> None:
    pick = seeded(SEED)
    for number in range(stores):
        place = tmp_path / f"{number}"
        place.mkdir()
        kvstore.open(place / "store").close()
        Rounds(spawn, workload, place, pick=pick).run(hits)


class Losing(Workload):
    """A model that knows of a row which the store never had."""

    def after_put(self, state: State, _: Any, key: bytes, value: bytes, *__: Any) -> State:
        return with_rows(state, {**state.rows, key: value, b"never put": b""})


def test_the_harness_finds_what_is_missing(spawn: Any, tmp_path: Path) -> None:
    kvstore.open(tmp_path / "store").close()
    with pytest.raises(AssertionError, match="the state after no step"):
        Rounds(spawn, Losing(), tmp_path, pick=random.Random(1)).run(hits=5)


def idle(said: Any) -> None:
    said.send("the only word")


def test_a_child_that_ends_by_itself_has_said_all(spawn: Any) -> None:
    assert run_until_killed(spawn, idle, (), lambda said: False, 0.0) == ["the only word"]


def test_a_seed_is_printed_and_repeats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = seeded("SOME_SEED").random()
    name, _, value = capsys.readouterr().err.strip().partition("=")
    monkeypatch.setenv(name, value)
    assert seeded("SOME_SEED").random() == first
