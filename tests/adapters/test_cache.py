"""`kvstore.cache.Cache`: values, exact expiry, tags, makers, the bound, and several processes."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.cache import Cache, CacheCodec
from kvstore.errors import CorruptionError, UsageError

SECOND = 10**9


@pytest.fixture
def clock() -> kvstore.ManualClock:
    return kvstore.ManualClock(1_700_000_000 * SECOND)


@pytest.fixture(params=["store", "client"])
def cache(
    request: pytest.FixtureRequest, tmp_path: Path, clock: kvstore.ManualClock
) -> Iterator[Cache]:
    """A cache of the owner's process, and one of another."""
    place = tmp_path / "s"
    with kvstore.open(place, durability="async", clock=clock, control=True) as store:
        if request.param == "store":
            yield Cache(store)
        else:
            with kvstore.connect(place) as client:
                yield Cache(client)


def test_a_value_comes_back_until_exactly_its_time(
    cache: Cache, clock: kvstore.ManualClock
) -> None:
    value = {"name": "Ada", "seats": [1, 2.5, None, True], "text": "\U0001f6eb"}
    cache.set("k", value, expire=1)
    cache.set("stays", None)
    clock.set(1_700_000_001 * SECOND - 1)
    assert cache.get("k") == value
    assert (cache.ttl("k"), cache.ttl("stays")) == (0.0, None)
    clock.advance(1)
    assert cache.get("k", "gone") == "gone"
    assert "k" not in cache
    assert list(cache) == ["stays"]
    assert cache.get("stays", "gone") is None
    cache.set("stays", 1, expire=-1)
    assert "stays" not in cache


def test_an_increment_and_a_touch_keep_or_move_the_expiry(
    cache: Cache, clock: kvstore.ManualClock
) -> None:
    cache.set("n", 5, expire=10, tag="numbers")
    clock.advance(4 * SECOND)
    assert [cache.incr("n"), cache.incr("n", 5), cache.decr("n")] == [6, 11, 10]
    assert (cache.ttl("n"), cache.tags("n")) == (pytest.approx(6), ("numbers",))
    assert cache.touch("n", expire=timedelta(seconds=20))
    clock.advance(19 * SECOND)
    assert cache.incr("n", default=None) == 11
    clock.advance(SECOND + 1000)  # commits take some nanoseconds of the timeline
    with pytest.raises(KeyError):
        cache.incr("n", default=None)
    assert (cache.incr("n", default=3), cache.ttl("n")) == (4, None)
    assert not cache.touch("absent")
    cache.set("word", "seven")
    with pytest.raises(UsageError, match="is no number"):
        cache.incr("word")
    assert cache.touch("word", expire=0)
    assert "word" not in cache


def test_a_number_keeps_its_fraction_and_a_sum_that_the_codec_refuses_is_told(
    store: kvstore.Store,
) -> None:
    cache, raw = Cache(store), Cache(store, prefix=b"raw/", codec="bytes")
    cache.set("n", 2.5)
    assert [cache.incr("n"), cache.decr("n", 0.25), cache.get("n")] == [3.5, 3.25, 3.25]
    for key in ("n", "absent"):
        with pytest.raises(UsageError, match="is no JSON"):
            cache.incr(key, float("nan"))
    with pytest.raises(UsageError, match="is no whole number"):
        raw.incr("absent", 0.5)
    assert ("absent" in cache, "absent" in raw, cache.get("n")) == (False, False, 3.25)


def test_keys_in_brackets_are_told_when_absent_and_run_backward(cache: Cache) -> None:
    cache.set("b", None, expire=60, tag="t")
    cache["a"], cache["b"] = 1, None
    assert [cache["a"], cache["b"], cache.ttl("b"), cache.tags("b")] == [1, None, None, ()]
    assert list(reversed(cache)) == ["b", "a"]
    del cache["a"]
    with pytest.raises(KeyError, match="a"):
        cache["a"]
    with pytest.raises(KeyError, match="a"):
        del cache["a"]


def test_add_pop_and_delete_tell_what_was_there(cache: Cache, clock: kvstore.ManualClock) -> None:
    assert cache.add("k", 1, expire=5)
    assert not cache.add("k", 2)
    clock.advance(5 * SECOND + 1000)
    assert cache.add("k", 3)
    assert [cache.pop("k"), cache.pop("k", "none")] == [3, "none"]
    cache.set_many({"a": 1, "b": 2, "c": 3})
    assert cache.get_many(["c", "x", "a"]) == {"c": 3, "a": 1}
    assert (cache.delete("a"), cache.delete("a"), cache.delete_many(["b", "x"])) == (True, False, 1)
    assert (len(cache), cache.clear(), len(cache)) == (1, 1, 0)


def test_a_tag_evicts_what_has_it_now_by_one_commit(cache: Cache) -> None:
    for n in range(30):
        cache.set(n, n, tag=["all", ("even", "odd")[n % 2]])
    cache.set(0, "untagged")
    cache.set(2, "other", tag="odd")
    store = cache.store
    before = store.upper - 1
    assert cache.evict("even") == 13
    assert len({change.timestamp for change in store.changes(since=before)}) == 1
    assert [cache.get(0), cache.get(2), cache.get(4)] == ["untagged", "other", None]
    assert (cache.evict("odd"), cache.evict("odd"), cache.evict("never")) == (16, 0, 0)
    assert list(cache) == [0]
    cache.cull()
    assert list(store.keys(prefix=b"cache/i")) == []  # the index has no leftovers


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "tagged", "add", "pop", "evict", "incr", "delete", "clear"]),
            st.one_of(
                st.integers(-3, 3), st.text(max_size=2), st.binary(max_size=2), st.none(),
                st.tuples(st.integers(0, 1), st.text(max_size=1)), st.just(()), st.just((None,)),
            ),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_any_calls_do_what_a_dictionary_does(calls: list[tuple[str, Any]]) -> None:
    model: dict[Any, tuple[int, bool]] = {}
    with kvstore.open(None, engine="memory") as store:
        cache = Cache(store, codec="json")
        for number, (call, key) in enumerate(calls):
            if call in ("set", "tagged"):
                cache.set(key, number, tag="t" if call == "tagged" else None)
                model[key] = number, call == "tagged"
            elif call == "add":
                assert cache.add(key, number) is (key not in model)
                model.setdefault(key, (number, False))
            elif call == "pop":
                assert cache.pop(key, "none") == model.pop(key, ("none",))[0]
            elif call == "incr":
                value, tagged = model.get(key, (0, False))
                model[key] = value + 2, tagged
                assert cache.incr(key, 2) == value + 2
            elif call == "delete":
                assert cache.delete(key) is (model.pop(key, None) is not None)
            elif call == "evict":
                gone = [each for each, (_, tagged) in model.items() if tagged]
                assert cache.evict("t") == len(gone)
                model = {each: kept for each, kept in model.items() if each not in gone}
            else:
                assert cache.clear() == len(model)
                model.clear()
        assert {key: cache.get(key) for key in cache} == {k: v for k, (v, _) in model.items()}
        assert len(cache) == len(model)


@pytest.mark.parametrize("eviction", ["least-recently-used", "least-recently-stored"])
def test_the_bound_holds_and_the_oldest_go_first(store: kvstore.Store, eviction: str) -> None:
    cache = Cache(store, codec="bytes", size_limit=100_000, eviction=eviction)
    order: OrderedDict[int, None] = OrderedDict()
    for n in range(400):
        cache.set(n, b"v" * 1000)
        order[n] = None
        if n % 3 == 0 and cache.get(0) is not None and eviction == "least-recently-used":
            order.move_to_end(0)
        assert cache.volume() <= 100_000 * 17 / 16 + 2000
    cache.cull()
    assert cache.volume() <= 100_000
    kept = set(cache)
    assert kept == set(list(order)[-len(kept) :])
    assert (0 in kept) is (eviction == "least-recently-used")


def test_a_cache_without_eviction_keeps_all(store: kvstore.Store) -> None:
    cache = Cache(store, codec="bytes", size_limit=1000, eviction="none")
    cache.set_many(dict.fromkeys(range(100), b"v" * 100))
    assert (cache.cull(), len(cache)) == (0, 100)


def test_a_cache_of_its_own_store_stays_small_after_a_hundred_thousand_writes(
    tmp_path: Path,
) -> None:
    """Versions that were written over and evicted are given up with their history."""
    cache = Cache(
        tmp_path / "s", codec="bytes", size_limit=200_000, history=timedelta(0), eviction="none"
    )
    for n in range(100):
        cache.set_many(dict.fromkeys(range(100), b"%1000d" % n))
    cache.cull()
    store = cache.store
    assert len(store.history(b"cache/v" + b"\x10" + (1 << 63).to_bytes(8, "big"))) == 1
    assert store.since > 0
    cache.close()


def test_history_of_a_store_that_has_other_data_stays(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        first = store.put(b"mine", b"1")
        store.put(b"mine", b"2")
    cache = Cache(tmp_path / "s", history=timedelta(0), size_limit=1000)
    cache.set_many({n: n for n in range(100)})
    cache.cull()
    cache.expire()
    assert cache.store.get(b"mine", as_of=first) == b"1"
    cache.close()


def test_one_of_many_callers_makes_a_value(cache: Cache) -> None:
    made = []
    inside = threading.Event()

    def make() -> str:
        made.append(1)
        inside.wait(10)
        return "made"

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(cache.get_or_set, "k", make) for _ in range(8)]
        while not made:
            pass
        inside.set()
        assert {each.result() for each in results} == {"made"}
    assert len(made) == 1


def test_a_maker_that_fails_or_vanishes_is_followed_by_another(
    cache: Cache, clock: kvstore.ManualClock
) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.get_or_set("k", lambda: 1 // 0)
    assert cache.get_or_set("k", lambda: 1) == 1
    gone = Cache(cache.store)
    slow = threading.Event()
    vanished = threading.Thread(
        target=gone.get_or_set, args=("x", lambda: slow.wait(60)), kwargs={"lease": 5}
    )
    vanished.start()
    while not list(cache.store.keys(prefix=b"cache/l")):
        pass
    clock.advance(5 * SECOND + 1000)
    assert cache.get_or_set("x", lambda: "second") == "second"
    slow.set()
    vanished.join()


def test_a_lock_is_held_by_one_until_its_lease_ends(
    cache: Cache, clock: kvstore.ManualClock
) -> None:
    mine, other = cache.lock("k", lease=5), cache.lock("k", lease=5)
    with mine:
        assert not other.acquire(wait=False)
        cache.set("k", 1)  # a lock of the name, not of the entry
    assert not mine.locked()
    assert other.acquire()
    clock.advance(5 * SECOND + 1000)
    with mine:
        other.release()  # its lease has run out: it frees nothing
        assert mine.locked()


def test_threads_that_share_a_lock_hold_it_one_after_the_other(
    cache: Cache, clock: kvstore.ManualClock
) -> None:
    lock, inside, lapsed, freed = cache.lock("k", lease=5), *(threading.Event() for _ in "123")

    def hold() -> None:
        with lock:
            inside.set()
            lapsed.wait(60)
        freed.set()

    first = threading.Thread(target=hold)
    first.start()
    assert inside.wait(60)
    assert not lock.acquire(wait=False)
    clock.advance(5 * SECOND + 1000)
    assert lock.acquire(wait=False)
    lapsed.set()
    assert freed.wait(60)
    first.join()
    assert lock.locked()  # the thread whose lease ran out has not freed what another one holds
    other = threading.Thread(target=lock.release)  # as dogpile does behind a maker in its thread
    other.start()
    other.join()
    assert not lock.locked()


def test_memoize_calls_a_function_once_for_its_arguments(cache: Cache) -> None:
    calls = []

    @cache.memoize(tag="f", ignore=["log"])
    def f(*args: Any, **named: Any) -> list[Any]:
        calls.append((args, named))
        return [*args]

    assert f(1, "a", x=None) == f(1.0, "a", x=None, log=3) == [1, "a"]
    assert f("long" * 1000) == f("long" * 1000)
    assert len(calls) == 2
    assert f.__name__ == "f"
    assert f.cache_key(1, "a", x=None) in cache
    assert cache.evict("f") == 2
    f(1, "a", x=None)
    assert len(calls) == 3
    exact = cache.memoize(name="exact", typed=True)(lambda x: repr(x))
    assert [exact(1), exact(1.0), exact(True)] == ["1", "1.0", "True"]
    with pytest.raises(UsageError, match="an argument of the call is no key"):
        f([1])
    with pytest.raises(UsageError, match="without brackets"):
        cache.memoize(f)  # type: ignore[arg-type]  # refused


def test_no_value_is_read_by_pickle(store: kvstore.Store) -> None:
    cache = Cache(store)
    with pytest.raises(UsageError, match="is no JSON"):
        cache.set("k", {1, 2})
    with pytest.raises(UsageError, match="is no JSON"):
        cache.set("k", float("nan"))
    pickled = Cache(store, codec=CacheCodec(pickle.dumps, pickle.loads))
    pickled.set("k", {1, 2})
    assert pickled.get("k") == {1, 2}
    with pytest.raises(CorruptionError, match="not of the codec"):
        cache.get("k")
    raw = Cache(store, prefix=b"raw/", codec="bytes")
    raw.set("k", bytearray(b"\x80"))
    assert (raw.get("k"), raw.incr("n"), raw.incr("n")) == (b"\x80", 1, 2)
    for wrong in ("pickle", None, pickle):
        with pytest.raises(UsageError, match="codec"):
            Cache(store, codec=wrong)  # type: ignore[arg-type]  # refused
    with pytest.raises(UsageError, match="expire"):
        cache.set("k", 1, expire="soon")  # type: ignore[arg-type]  # refused
    for tag in ([7], 7, 0, b"t"):
        with pytest.raises(UsageError, match="tag"):
            cache.set("k", 1, tag=tag)  # type: ignore[arg-type]  # refused
    with pytest.raises(UsageError, match="order-preserving"):
        cache.get([])
    with pytest.raises(UsageError, match="order-preserving"):
        cache.set([], 1)


def count(cache: Cache) -> None:
    for _ in range(50):
        cache.incr("n")


def test_processes_share_a_cache(tmp_path: Path, spawn: Any) -> None:
    cache = Cache(tmp_path / "s")
    cache.set("n", 0)
    children = [spawn.Process(target=count, args=(cache,)) for _ in range(2)]
    fork = multiprocessing.get_context("fork").Process(target=count, args=(cache,))
    for child in (*children, fork):
        child.start()
    count(cache)
    for child in (*children, fork):
        child.join()
        assert child.exitcode == 0
    assert cache.get("n") == 200
    cache.close()
