"""The versioned undos: of a span, and of an import."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import ManualClock, Store, bulk, transaction
from kvstore.errors import HistoryGoneError, UsageError

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

KEYS = [bytes([letter]) for letter in b"abcdef"]
NUMBERS = itertools.count()


def add_import(store: Store, staging: Path, keys: list[bytes], value: bytes = b"row") -> int:
    staged = bulk.Import.create(staging)
    with staged.writer() as writer:
        for key in sorted(keys):
            writer.put(key, value)
    staged.seal()
    bulk.ingest(store, staging)
    return staged.import_id


def test_revert_range_restores_the_state_and_keeps_what_was_undone(store: Store) -> None:
    for key in KEYS:
        then = store.put(key, b"old")
    store.delete_range(b"a", b"c")
    store.put(b"b", b"new")
    store.put(b"d", b"new")
    store.put(b"z", b"new")
    undone = store.upper - 1
    reverted = store.revert_range(b"a", b"e", to=then)
    assert reverted is not None
    assert dict(store.scan(b"a", b"e")) == dict.fromkeys(KEYS[:4], b"old")
    assert store.get(b"z") == b"new"
    assert store.get(b"d", as_of=undone) == b"new"
    assert [change.key for change in store.changes(undone)] == [b"a", b"b", b"d"]


def test_revert_range_to_a_state_that_still_stands_writes_nothing(store: Store) -> None:
    then = store.put(b"a", b"v")
    store.put(b"a", b"w")
    store.put(b"a", b"v")
    upper = store.upper
    assert store.revert_range(b"a", None, to=then) is None
    assert store.revert_range(b"a", None, to=store.upper - 1) is None
    assert store.upper == upper


def test_revert_range_leaves_equal_values_alone(store: Store, tmp_path: Path) -> None:
    """Values may be equal because they were written again, deleted and written, imported, or
    covered by a range delete and written again. Keys that are absent at both times stay without a
    version."""
    for key in KEYS:
        store.put(key, b"old")
    store.delete(b"f")
    then = store.upper - 1
    store.put(b"a", b"new")
    store.put(b"a", b"old")
    store.delete(b"b")
    store.put(b"b", b"old")
    add_import(store, tmp_path / "same", [b"c"], b"old")
    store.delete_range(b"d", b"g")
    store.put(b"d", b"old")
    store.put(b"e", b"new")
    before = {key: len(store.history(key)) for key in KEYS}
    undone = store.upper - 1
    reverted = store.revert_range(b"a", b"z", to=then)
    assert reverted is not None
    assert dict(store.scan()) == dict.fromkeys(KEYS[:5], b"old")
    grown = {key for key in KEYS if len(store.history(key)) != before[key]}
    assert grown == {b"e"}
    assert [(c.timestamp, c.op, c.key, c.value) for c in store.changes(undone)] == [
        (reverted, "put", b"e", b"old")
    ]
    assert store.revert_range(b"a", b"z", to=then) is None


def test_revert_range_over_an_import_that_set_equal_values_survives_its_revert(
    store: Store, tmp_path: Path
) -> None:
    """Equal values get no new version, so a later revert of the import shows the version below
    it."""
    then = store.put(b"a", b"old")
    import_id = add_import(store, tmp_path / "same", [b"a"], b"old")
    assert store.revert_range(b"a", b"b", to=then) is None
    store.revert_import(import_id)
    assert store.get(b"a") == b"old"
    other = add_import(store, tmp_path / "other", [b"a"], b"new")
    store.revert_range(b"a", b"b", to=then)
    store.revert_import(other)
    assert store.get(b"a") == b"old"
    assert store.history(b"a")[0].value == b"old"


def test_revert_range_to_before_everything_empties_the_span(store: Store) -> None:
    store.put(b"a", b"v")
    store.put(b"b", b"v")
    store.revert_range(b"a", b"b", to=0)
    assert list(store.scan()) == [(b"b", b"v")]


def test_revert_range_below_since_is_refused(store: Store) -> None:
    then = store.put(b"a", b"v")
    store.put(b"a", b"w")
    store.gc(before=store.now())
    with pytest.raises(HistoryGoneError):
        store.revert_range(b"a", b"b", to=then)


def test_revert_range_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "REVERT_ROWS_MAX", 3)
    for key in KEYS:
        store.put(key, b"v")
    with pytest.raises(UsageError, match="smaller spans"):
        store.revert_range(b"a", b"z", to=0)
    assert len(list(store.scan())) == len(KEYS)


def test_revert_range_starts_over_when_others_write_into_its_span(store: Store) -> None:
    then = store.put(b"a", b"old")
    store.put(b"a", b"new")
    original, writer_ran = transaction.restore_keys, threading.Event()

    def restore(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]
        if not writer_ran.is_set():
            writer_ran.set()
            store.put(b"b", b"new")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction, "restore_keys", restore)
        store.revert_range(b"a", b"c", to=then)
    assert list(store.scan()) == [(b"a", b"old")]


CRASH = textwrap.dedent(
    """
    import os, signal, sys
    import kvstore
    from tests.harness.parts import parts_of
    from kvstore import ManualClock

    path, what, when = sys.argv[1:]
    chosen = os.environ["EACH_ENGINE"]
    store = kvstore.open(path, engine=chosen, durability="sync", clock=ManualClock(1))
    engine = parts_of(store).engine
    write, sync = engine.write, engine.sync

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "before":
        engine.write = die
    elif when == "written":
        engine.sync = die
    else:
        engine.sync = lambda: (sync(), die())
    if what == "range":
        store.revert_range(b"a", b"z", to=2)
    else:
        store.revert_import(store.imports.all()[0].import_id)
    """
)


@pytest.mark.parametrize("when", ["before", "written", "synced"])
@pytest.mark.parametrize("what", ["range", "import"])
def test_crash_in_a_revert_leaves_all_of_it_or_nothing(
    tmp_path: Path, what: str, when: str
) -> None:
    path = tmp_path / "db"
    with kvstore.open(path, clock=ManualClock(1)) as store:
        store.put(b"a", b"old")
        store.put(b"b", b"old")
        add_import(store, tmp_path / "in", [b"a", b"c"])
        store.delete_range(b"b", b"c")
        before = dict(store.scan())
        upto = store.upper - 1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", CRASH, str(path), what, when], env=environment, check=False
    )
    assert child.returncode == -9
    after = {b"a": b"old", b"b": b"old"} if what == "range" else {b"a": b"old"}
    with kvstore.open(path, clock=ManualClock(1)) as store:
        possible = {"before": [before], "written": [before, after], "synced": [after]}[when]
        assert dict(store.scan()) in possible
        assert dict(store.scan(as_of=upto)) == before
        assert store.verify().problems == ()


OPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), st.binary(max_size=1)),
    st.tuples(st.just("delete"), st.sampled_from(KEYS)),
    st.tuples(st.just("delete_range"), st.sampled_from(KEYS), st.integers(1, 3)),
    st.tuples(st.just("import"), st.sets(st.sampled_from(KEYS), min_size=1)),
    st.tuples(st.just("revert_import"), st.integers(0, 3)),
)


@given(st.lists(OPS, max_size=12), st.integers(0, 12), st.integers(0, 5), st.integers(1, 5))
def test_reverted_span_is_as_it_was_and_the_rest_as_it_is(
    tmp_path_factory: pytest.TempPathFactory,
    ops: list[tuple],  # type: ignore[type-arg]
    back: int,
    low: int,
    width: int,
) -> None:
    tmp_path = tmp_path_factory.mktemp("revert")
    start, end = bytes([97 + low]), bytes([97 + low + width])
    added: list[int] = []
    with kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(1)) as store:
        for op in ops:
            if op[0] == "put":
                store.put(op[1], op[2])
            elif op[0] == "delete":
                store.delete(op[1])
            elif op[0] == "delete_range":
                store.delete_range(op[1], bytes([op[1][0] + op[2]]))
            elif op[0] == "import":
                added.append(add_import(store, tmp_path / f"in{next(NUMBERS)}", list(op[1])))
            elif added:
                store.revert_import(added[op[1] % len(added)])
        upto = store.upper - 1
        to = max(0, upto - back)
        now, then = dict(store.scan()), dict(store.scan(as_of=to))
        stamp = store.revert_range(start, end, to=to)
        expected = {key: value for key, value in now.items() if not start <= key < end}
        expected.update({key: value for key, value in then.items() if start <= key < end})
        assert dict(store.scan()) == expected
        assert (stamp is None) == (expected == now)
        replayed = dict(now)
        for change in store.changes(upto, order="time"):
            if change.op == "put":
                assert change.value is not None
                replayed[change.key] = change.value
            else:
                replayed.pop(change.key, None)
        assert replayed == expected
        assert store.verify().problems == ()


# -- imports --------------------------------------------------------------------------------


def test_reverted_import_uncovers_what_was_below_and_keeps_what_came_after(
    store: Store, tmp_path: Path
) -> None:
    store.put(b"a", b"below")
    import_id = add_import(store, tmp_path / "in", [b"a", b"b", b"c", b"d"])
    store.put(b"c", b"after")
    store.delete_range(b"d", b"e")
    before = store.upper - 1
    reverted = store.revert_import(import_id)
    assert dict(store.scan()) == {b"a": b"below", b"c": b"after"}
    assert dict(store.scan(as_of=before)) == {b"a": b"row", b"b": b"row", b"c": b"after"}
    assert [(change.key, change.op) for change in store.changes(before)] == [
        (b"a", "put"),
        (b"b", "delete"),
    ]
    assert store.revert_import(import_id) == reverted


def test_revert_of_the_lower_of_two_imports_shows_only_when_the_upper_goes(
    store: Store, tmp_path: Path
) -> None:
    lower = add_import(store, tmp_path / "one", [b"a"], b"lower")
    upper = add_import(store, tmp_path / "two", [b"a"], b"upper")
    before = store.upper - 1
    store.revert_import(lower)
    assert list(store.changes(before)) == []
    assert store.get(b"a") == b"upper"
    store.revert_import(upper)
    assert store.get(b"a") is None


def test_import_at_or_below_since_cannot_be_reverted(store: Store, tmp_path: Path) -> None:
    import_id = add_import(store, tmp_path / "in", [b"a"])
    store.put(b"z", b"z")
    store.gc(before=store.now())
    with pytest.raises(HistoryGoneError, match="delete its keys"):
        store.revert_import(import_id)


@pytest.mark.parametrize("moved", [-1, 0, 1])
def test_a_revert_needs_the_state_just_before_the_import(
    store: Store, tmp_path: Path, moved: int
) -> None:
    """The refusal of an import that was added at `since` once said that history at that time is
    gone, because it is kept from that time on."""
    store.put(b"a", b"below")
    store.put(b"b", b"below")
    import_id = add_import(store, tmp_path / "in", [b"a", b"b"])
    (record,) = store.imports.all()
    assert record.added is not None
    added = record.added
    store.put(b"z", b"z")
    store.gc(before=added + moved)
    assert store.since == added + moved
    if moved < 0:
        store.revert_import(import_id)
        assert dict(store.scan(b"a", b"c")) == {b"a": b"below", b"b": b"below"}
        return
    with pytest.raises(HistoryGoneError) as refused:
        store.revert_import(import_id)
    assert refused.value.as_of == added - 1 < refused.value.since == store.since
    assert f"was added at {added}" in str(refused.value)
    assert dict(store.scan(b"a", b"c")) == {b"a": b"row", b"b": b"row"}
    for key in (b"a", b"b"):  # as the advice says
        store.delete(key)
    assert dict(store.scan()) == {b"z": b"z"}


def test_revert_of_an_import_inside_a_cleared_span_brings_nothing_back(
    store: Store, tmp_path: Path
) -> None:
    store.put(b"a", b"below")
    store.put(b"x", b"below")
    import_id = add_import(store, tmp_path / "in", [b"a", b"x"])
    store.clear_range(b"a", b"c")
    before = store.upper - 1
    store.revert_import(import_id)
    assert list(store.scan()) == [(b"x", b"below")]
    assert [change.key for change in store.changes(before)] == [b"x"]
