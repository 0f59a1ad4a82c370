"""Epochs of a store: counts, contiguity, quiescence, and epochs behind a crash or a close."""

from __future__ import annotations

import base64
import contextvars
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from itertools import groupby, pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import ManualClock, Store
from kvstore.changes import epochs as capture
from kvstore.changes.epochs import Epoch, pack_run, unpack_run
from kvstore.codec.json import JsonObject
from kvstore.errors import BusyError, CorruptionError, UsageError
from kvstore.mvcc.meta import Meta
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

U63 = (1 << 63) - 1


def check(store: Store) -> list[Epoch]:
    """Assert that the epochs are contiguous, and that each has the count of events of the index."""
    epochs = list(store.epochs())
    headers = list(parts_of(store).index.headers(since=0, upto=store.upper - 1))
    counted = 0
    for domain, of_domain in groupby(epochs, key=lambda epoch: epoch.domain):
        found = list(of_domain)
        assert found[0].begin == 0
        assert all(a.end == b.begin for a, b in pairwise(found))
        for epoch in found:
            ours = [header for header in headers if header[2][0] == domain]
            inside = [header for header in ours if epoch.begin <= header[2][1] < epoch.end]
            assert sum(events for _, events, _ in inside) == epoch.events
            assert all(timestamp < epoch.closed_at for timestamp, _, _ in inside)
            counted += epoch.events
    running = parts_of(store).committer.capture
    open_events = sum(changeset.events for changeset in running.open)
    state = running.state
    if state.older is not None and state.newer is not None:
        open_events += state.older.events + state.newer.events
    assert counted + open_events == sum(events for _, events, _ in headers)
    return epochs


def test_a_bare_commit_is_an_epoch_and_a_proof_of_quiescence(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        stamp = store.put(b"a", b"1")
        first, empty = check(store)
    assert (first.events, first.quiescent) == (1, False)
    assert (empty.events, empty.quiescent) == (0, True)
    assert first.closed_at == empty.closed_at == stamp + 1


def test_overlapping_changesets_and_bare_commits_are_counted_once(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        with store.changeset():
            store.put(b"a", b"1")
            with store.changeset():
                store.put(b"b", b"1")
                store.delete_range(b"x", b"y")
            store.put(b"c", b"1")
            check(store)
        store.put(b"d", b"1")
        epochs = check(store)
    # The outer changeset alone; the changeset nested in it; the bare commit; no event.
    assert [epoch.events for epoch in epochs] == [2, 2, 1, 0]
    assert [epoch.quiescent for epoch in epochs] == [False, True, False, True]


def test_nothing_is_quiescent_while_a_changeset_is_open(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        with store.changeset():
            for number in range(20):
                store.put(b"k%d" % number, b"1")
            assert not any(epoch.quiescent for epoch in store.epochs())
        assert check(store)[-1].quiescent


def test_fast_path_of_a_bare_commit_is_acquire_and_release(tmp_path: Path) -> None:
    def epochs_of(name: str, *, slow: bool) -> list[tuple[int, ...]]:
        with kvstore.open(tmp_path / name, durability="async", clock=ManualClock()) as store:
            for number in range(5):
                if slow:
                    with store.changeset():
                        store.put(b"k%d" % number, b"1")
                else:
                    store.put(b"k%d" % number, b"1")
            return [epoch[1:] for epoch in store.epochs()]

    assert epochs_of("fast", slow=False) == epochs_of("slow", slow=True)


@given(
    st.integers(1, U63),
    st.lists(
        st.tuples(
            st.integers(0, 1 << 40), st.integers(0, U63), st.integers(0, 1 << 32), st.integers(0, 3)
        ),
        max_size=20,
    ),
)
def test_a_run_of_epochs_survives_packing(
    domain: int, rows: list[tuple[int, int, int, int]]
) -> None:
    numbers, end = [], 7
    for step, closed_at, events, flags in rows:
        end += step
        numbers += [end, closed_at, events, flags]
    found = unpack_run(JsonObject(pack_run(domain, 7, numbers, quiet=0), where="run"))
    assert [(e.end, e.closed_at, e.events) for e in found] == [
        tuple(numbers[at : at + 3]) for at in range(0, len(numbers), 4)
    ]
    assert [e.quiescent + 2 * e.ended for e in found] == numbers[3::4]
    assert all(a.end == b.begin for a, b in pairwise(found))


def test_golden_run_of_epochs() -> None:
    record = pack_run(0x0123456789ABCDEF, 5, [9, 100, 2, 0, 12, 100, 0, 1], quiet=100)
    columns = record.pop("columns")
    assert record == {"domain": "0123456789abcdef", "begin": 5, "count": 2, "quiet": 100}
    raw = base64.b64decode(columns)
    assert raw[:4] == (2 * 4 * 8).to_bytes(4, "little")
    shuffled = pa.decompress(raw[4:], decompressed_size=64, codec="lz4_raw").to_pybytes()
    # First bytes of: ends 9, +3; closing times 100, +0; events 2, -2; flags 0, +1.
    assert shuffled.hex() == "0903640002fe0001" + "0000000000ff0000" * 7
    packed = raw[:4] + pa.compress(shuffled, codec="lz4_raw", asbytes=True)
    assert packed != raw
    few, other = (
        unpack_run(JsonObject({**record, "columns": base64.b64encode(each).decode()}, where="run"))
        for each in (raw, packed)
    )
    assert few == other


def test_a_damaged_run_is_corruption() -> None:
    record = pack_run(1, 0, [1, 2, 3, 0], quiet=0)
    for broken in ("", "AAAA", record["columns"][:-4], "!"):
        with pytest.raises(CorruptionError):
            unpack_run(JsonObject({**record, "columns": broken}, where="run"))


def test_waiting_epochs_are_taken_along_by_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "EPOCHS_PENDING_MAX", 3)
    with kvstore.open(tmp_path / "s", durability="async") as store:
        for number in range(10):
            store.put(b"k%d" % number, b"1")
        runs = list(Meta(parts_of(store).engine).records("epochs/"))
        assert len(runs) >= 3
        assert len(check(store)) == 20
    with kvstore.open(tmp_path / "s", durability="async") as store:
        assert len(check(store)) == 20


def test_a_close_ends_the_domain_and_cuts_what_is_open(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path / "s", durability="async")
    left_open = store.changeset()
    with left_open:
        store.put(b"a", b"1")
        store.close()
    with kvstore.open(tmp_path / "s", durability="async") as store:
        (cut,) = check(store)
        assert (cut.events, cut.quiescent, cut.ended) == (1, True, True)
        store.put(b"b", b"1")
        check(store)


CHILD = """
import os, sys, kvstore
from kvstore.changes import epochs
from tests.harness.parts import parts_of
epochs.EPOCHS_PENDING_MAX = int(sys.argv[2])
store = kvstore.open(sys.argv[1], engine=os.environ["EACH_ENGINE"], durability="async")
for number in range(25):
    store.put(b"k%d" % number, b"1")
with store.changeset():
    store.put(b"torn", b"1")
    with store.changeset():
        store.put(b"inner", b"1")
        parts_of(store).committer.make_durable()
        print("ready", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("pending_max", [1, 7, 4096])
def test_epochs_lost_in_a_crash_are_counted_again(tmp_path: Path, pending_max: int) -> None:
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "s"), str(pending_max)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    with kvstore.open(tmp_path / "s", durability="async") as store:
        epochs = check(store)
        assert sum(epoch.events for epoch in epochs) == 2 * 27
        assert len({epoch.domain for epoch in epochs}) == 2
        assert sum(epoch.ended for epoch in epochs) == 2
        assert epochs[-1].quiescent


@pytest.mark.damages_store
def test_trimming_drops_the_runs_below_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "EPOCHS_PENDING_MAX", 2)
    with kvstore.open(tmp_path / "s", durability="async") as store:
        stamps = [store.put(b"k%d" % number, b"1") for number in range(10)]
        store.sync()
        index = parts_of(store).index
        parts_of(store).committer.write_meta(lambda batch: index.stage_trim(batch, stamps[5]))
        left = list(store.epochs())
        assert len(left) > 0
        assert all(epoch.closed_at > stamps[4] for epoch in left)
        assert store.put(b"z", b"1") > stamps[-1]


def test_forcing_quiescence_waits_for_open_changesets_and_holds_new_ones_back(
    tmp_path: Path,
) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        entered, leave = threading.Event(), threading.Event()
        reached: list[int] = []

        def work() -> None:
            with store.changeset():
                store.put(b"a", b"1")
                entered.set()
                leave.wait()
                with store.changeset():  # nested in an open changeset, so it does not wait
                    store.put(b"b", b"1")

        def late() -> None:
            with store.changeset():
                store.put(b"late", b"1")

        worker = threading.Thread(target=work)
        worker.start()
        entered.wait()
        forcing = threading.Thread(target=lambda: reached.append(store.force_quiescence()))
        forcing.start()
        changesets = parts_of(store).changesets
        while not changesets.forcing:
            pass
        follower = threading.Thread(target=late)
        follower.start()
        bare = store.put(b"bare", b"1")  # a bare commit never waits
        leave.set()
        for thread in (worker, forcing, follower):
            thread.join(120)
        (quiet,) = reached
        assert bare <= quiet
        assert store.get(b"b", as_of=quiet) == b"1"
        assert store.get(b"late", as_of=quiet) is None
        assert quiet + 1 in {epoch.closed_at for epoch in check(store) if epoch.quiescent}


def test_forced_quiescence_comes_when_a_changeset_ends_without_a_write(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        reached: list[int] = []
        changeset = store.changeset()
        with changeset:
            outside = contextvars.Context()
            forcing = threading.Thread(
                target=lambda: reached.append(outside.run(store.force_quiescence, timeout=60))
            )
            forcing.start()
            while not parts_of(store).changesets.forcing:
                pass
        forcing.join(120)
        assert reached == [store.upper - 1]
        assert changeset.events == 0


def test_forcing_quiescence_is_content_with_a_recent_one(tmp_path: Path) -> None:
    clock = ManualClock()
    with kvstore.open(tmp_path / "s", durability="async", clock=clock) as store:
        quiet = store.put(b"a", b"1")
        assert store.force_quiescence() == quiet
        entered, leave = threading.Event(), threading.Event()

        def work() -> None:
            with store.changeset():
                entered.set()
                leave.wait()

        worker = threading.Thread(target=work)
        worker.start()
        entered.wait()
        assert store.force_quiescence(after=timedelta(minutes=10)) == quiet
        clock.advance(11 * 60 * 10**9)
        with pytest.raises(BusyError):
            store.force_quiescence(after=timedelta(minutes=10), timeout=0.0)
        leave.set()
        worker.join()
        store.force_quiescence()


def test_forcing_quiescence_inside_a_changeset_is_refused(tmp_path: Path) -> None:
    with (
        kvstore.open(tmp_path / "s", durability="async") as store,
        store.changeset(),
        pytest.raises(UsageError, match="outside"),
    ):
        store.force_quiescence()
