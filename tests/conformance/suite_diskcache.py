"""What diskcache asks of its caches, retold. Its own cache is the judge.

Each claim holds for both. The last section has the claims in which the two differ, with the answer
of each. Both read a clock that the tests move, so nothing waits for a time.
"""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import diskcache
import pytest

import kvstore
from kvstore.cache import Cache, CacheCodec
from kvstore.errors import CorruptionError, UsageError

SECOND: Final = 10**9
START: Final = 1_700_000_000
ABSENT: Final = "absent"
OPTIONS: Final = {"size_limit": "size_limit", "eviction": "eviction_policy"}
"""Options of ours, and their names there."""


class Ours:
    """Caches of ours in one store, whose clock the test moves."""

    name = "ours"

    def __init__(self, place: Path) -> None:
        self.place = place
        self.clock = kvstore.ManualClock(START * SECOND)
        self.store = kvstore.open(place / "store", durability="async", clock=self.clock)

    def cache(self, **options: Any) -> Any:
        return Cache(self.store, **options)

    def at(self, path: Path) -> Any:
        """A cache by its path, which processes share. It reads the system's clock."""
        return Cache(path)

    def copy(self, cache: Any, path: Path) -> None:
        """A copy of a cache. That of a whole directory would find the sockets of its processes."""
        cache.store.checkpoint(path)

    def advance(self, seconds: float) -> None:
        self.clock.advance(int(seconds * SECOND))

    def told(self, cache: Any, key: Any) -> tuple[Any, float | None, str | None]:
        """The value of a key, the seconds it has left, and its tag."""
        left = cache.ttl(key)
        return (
            cache.get(key),
            None if left is None else round(left),
            next(iter(cache.tags(key)), None),
        )

    def lock(self, cache: Any, key: Any) -> Any:
        return cache.lock(key)

    def guarded(self, cache: Any, function: Callable[..., Any]) -> Any:
        """A function whose result many callers at once make once."""
        return cache.memoize()(function)

    def damage(self, key: Any) -> None:
        """Leave a value there that nobody can read."""
        Cache(self.store, codec=CacheCodec(lambda _: b"[1, ", bytes)).set(key, None)

    def close(self) -> None:
        self.store.close()


class Theirs:
    """Caches of theirs in one directory. Their module gets a clock that the test moves."""

    name = "theirs"

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.now, self.monkeypatch = place, float(START), monkeypatch
        self.opened: list[Any] = []

    def cache(self, **options: Any) -> Any:
        clock = SimpleNamespace(**{**vars(time), "time": lambda: self.now})
        self.monkeypatch.setattr("diskcache.core.time", clock)
        options = {OPTIONS[each]: options[each] for each in options if each in OPTIONS}
        return self._open(self.place / "theirs", **options)

    def at(self, path: Path) -> Any:
        return self._open(path)

    def copy(self, cache: Any, path: Path) -> None:
        cache.close()
        shutil.copytree(cache.directory, path)

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def told(self, cache: Any, key: Any) -> tuple[Any, float | None, str | None]:
        value, due, tag = cache.get(key, expire_time=True, tag=True)
        return value, None if due is None else round(due - self.now), tag

    def lock(self, cache: Any, key: Any) -> Any:
        return diskcache.Lock(cache, key)

    def guarded(self, cache: Any, function: Callable[..., Any]) -> Any:
        return diskcache.barrier(cache, diskcache.Lock)(cache.memoize()(function))

    def damage(self, key: Any) -> None:
        cache = self.cache()
        cache.set(key, [None] * 2**16)  # so long that it has a file of its own
        (file,) = (self.place / "theirs").rglob("*.val")
        file.write_bytes(file.read_bytes()[:100])

    def close(self) -> None:
        for each in self.opened:
            each.close()

    def _open(self, path: Path, **options: Any) -> Any:
        self.opened.append(diskcache.Cache(str(path), **options))
        return self.opened[-1]


@pytest.fixture(params=["ours", "theirs"])
def side(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    made: Any = Ours(tmp_path) if request.param == "ours" else Theirs(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def cache(side: Any) -> Any:
    return side.cache()


# -- values and keys --------------------------------------------------------------------------

VALUES: Final[list[Any]] = [
    *(None, True, 0, 1234, -(2**40), 2**512, 56.78, "", "hello", "caf\u00e9", "hello" * 2**18),
    *([], {}, [None] * 2**16, {"a": [1, {"b": None}]}),
]
BYTES: Final = [b"", b"world", bytes(range(256)), b"world" * 2**18]


@pytest.mark.parametrize(("codec", "values"), [("json", VALUES), ("bytes", BYTES)])
def test_each_value_comes_back_by_get_and_by_brackets(
    side: Any, codec: str, values: list[Any]
) -> None:
    cache = side.cache(codec=codec)
    for key, value in enumerate(values):
        assert cache.set(key, value) is True
    assert len(cache) == len(values)
    for key, value in enumerate(values):
        assert cache[key] == cache.get(key, ABSENT) == value
        assert type(cache[key]) is type(value)
        del cache[key]
        assert key not in cache
    assert len(cache) == 0
    for key, value in enumerate(values):
        cache[key] = value
    assert [cache[key] for key in range(len(values))] == values


def test_keys_of_all_kinds_are_apart_and_come_back(cache: Any) -> None:
    keys = [
        *(0, -1, 2**40, 56.78, "hello", "", "caf\u00e9", b"hello", b"", b"\xff" * 300, None),
        *(("a", 1), ("a", None), (), ("a", b"1"), "long" * 1000),
    ]
    for number, key in enumerate(keys):
        cache[key] = number
    assert [cache[key] for key in keys] == [*range(len(keys))]
    assert len(cache) == len(keys)
    assert set(cache) == set(keys)
    for key in cache:
        assert keys[cache[key]] == key


def test_an_absent_key_has_the_default_or_is_told(cache: Any) -> None:
    other: dict[str, int] = {}
    assert (cache.get("k"), cache.get("k", 7), cache.pop("k"), cache.pop("k", 7)) == (None, 7) * 2
    assert cache.get("k", other) is other
    assert (cache.delete("k"), cache.touch("k"), "k" in cache) == (False, False, False)
    with pytest.raises(KeyError):
        cache["k"]
    with pytest.raises(KeyError):
        del cache["k"]
    cache["k"] = None
    assert (cache.get("k", 7), cache["k"], "k" in cache, cache.pop("k", 7)) == (
        *(None, None, True, None),
    )


def test_a_value_is_replaced_by_a_longer_and_a_shorter_one(cache: Any) -> None:
    for value in (0, 1, "abcd" * 2**18, 2, "abcd" * 2**19, None):
        cache["k"] = value
        assert cache["k"] == value
        assert len(cache) == 1


def test_a_thousand_entries_are_set_read_and_cleared(cache: Any) -> None:
    for number in range(1000):
        cache.set(number, number)
    assert [cache.get(number) for number in range(1000)] == [*range(1000)]
    assert all(number in cache for number in range(1000))
    assert (cache.delete(7), cache.delete(7), cache.delete(1000)) == (True, False, False)
    assert (len(cache), cache.clear(), len(cache), cache.clear()) == (999, 999, 0, 0)
    assert list(cache) == []
    cache[7] = "again"
    assert list(cache) == [7]


# -- expiry and tags --------------------------------------------------------------------------


def test_an_entry_tells_its_expiry_and_its_tag_and_a_set_replaces_both(
    side: Any, cache: Any
) -> None:
    assert side.told(cache, "k") == (None, None, None)
    cache.set("k", 1, expire=60, tag="t")
    assert side.told(cache, "k") == (1, 60, "t")
    side.advance(20)
    assert side.told(cache, "k") == (1, 40, "t")
    assert cache.incr("k") == 2
    assert side.told(cache, "k") == (2, 40, "t")
    cache.set("k", 3, tag="u")
    assert side.told(cache, "k") == (3, None, "u")
    cache["k"] = 4
    assert side.told(cache, "k") == (4, None, None)


def test_an_entry_is_there_until_exactly_its_time(side: Any, cache: Any) -> None:
    for key in ("get", "brackets", "contains", "pop", "del", "delete", "touch"):
        cache.set(key, 1, expire=10)
    cache.set("stays", 1)
    side.advance(9.5)
    assert all(cache.get(key) == 1 for key in cache)
    assert len(list(cache)) == 8
    side.advance(0.5)
    assert (cache.get("get"), cache.pop("pop", 7), "contains" in cache) == (None, 7, False)
    assert (cache.delete("delete"), cache.touch("touch", expire=9)) == (False, False)
    with pytest.raises(KeyError):
        cache["brackets"]
    with pytest.raises(KeyError):
        del cache["del"]
    side.advance(0.001)  # theirs is deleted behind its time
    cache.expire()
    assert (list(cache), cache["stays"]) == (["stays"], 1)


@pytest.mark.parametrize("expire", [0, -1])
def test_a_time_that_is_not_ahead_leaves_nothing(side: Any, cache: Any, expire: int) -> None:
    cache.set("k", 1)
    assert cache.set("k", 2, expire=expire) is True
    side.advance(0.001)
    assert cache.get("k") is None
    cache.set("k", 3)
    assert cache.touch("k", expire=expire) is True
    side.advance(0.001)
    assert (cache.get("k"), cache.touch("k")) == (None, False)


def test_a_touch_moves_the_expiry_and_leaves_the_rest(side: Any, cache: Any) -> None:
    cache.set("k", "value", expire=60, tag="t")
    assert cache.touch("k", expire=100) is True
    assert side.told(cache, "k") == ("value", 100, "t")
    side.advance(99)
    assert cache.touch("k", expire=5)
    side.advance(4)
    assert cache.touch("k", expire=None)
    side.advance(10**6)
    assert side.told(cache, "k") == ("value", None, "t")


def test_an_entry_is_added_once_until_it_is_gone(side: Any, cache: Any) -> None:
    assert (cache.add("k", 1), cache.add("k", 2), cache.get("k")) == (True, False, 1)
    assert cache.delete("k") is True
    assert cache.add("k", 3, expire=10, tag="t")
    assert not cache.add("k", 4, expire=99, tag="u")
    assert side.told(cache, "k") == (3, 10, "t")
    side.advance(10.1)
    assert cache.add("k", 5)
    assert side.told(cache, "k") == (5, None, None)
    long = "abcd" * 2**18
    assert (cache.add("long", long), cache.add("long", "short")) == (True, False)
    assert cache["long"] == long


def test_a_pop_takes_an_entry_with_its_tag(side: Any, cache: Any) -> None:
    cache.set("k", "0" * 2**20, expire=60, tag="t")
    assert cache.pop("k") == "0" * 2**20
    assert side.told(cache, "k") == (None, None, None)
    assert cache.evict("t") == 0
    cache.incr("n")
    assert (cache.pop("n"), cache.incr("n")) == (1, 1)


def test_a_tag_evicts_its_entries_alone(cache: Any) -> None:
    colours = ("red", "blue", "yellow")
    for number in range(90):
        cache.set(number, number, tag=colours[number % 3])
    cache.set("none", 0)
    cache.set(0, 0, tag="blue")
    cache.set(3, 3)
    assert (cache.evict("red"), len(cache)) == (28, 63)
    assert (cache.evict("red"), cache.evict("never"), len(cache)) == (0, 0, 63)
    assert (cache.evict("blue"), cache.evict("yellow"), sorted(cache, key=str)) == (
        *(31, 30),
        [3, "none"],
    )


# -- numbers ----------------------------------------------------------------------------------


def test_an_absent_number_begins_at_its_default(side: Any, cache: Any) -> None:
    assert [cache.incr("a"), cache.incr("a", 2), cache.incr("a", delta=-7)] == [1, 3, -4]
    assert [cache.incr("b", default=5), cache.incr("b", 2), cache.incr("b", default=99)] == [
        *(6, 8, 9)
    ]
    assert [cache.decr("c"), cache.decr("c", 2), cache.decr("d", default=5)] == [-1, -3, 4]
    assert side.told(cache, "a") == (-4, None, None)
    for call in (cache.incr, cache.decr):
        with pytest.raises(KeyError):
            call("absent", default=None)
    assert "absent" not in cache


def test_a_number_that_has_expired_is_absent(side: Any, cache: Any) -> None:
    for key in ("a", "b", "c"):
        cache.set(key, 100, expire=10, tag="t")
    side.advance(10.1)
    assert (cache.incr("a"), cache.decr("b")) == (1, -1)
    with pytest.raises(KeyError):
        cache.incr("c", default=None)
    assert side.told(cache, "a") == (1, None, None)


def test_a_fraction_is_kept_and_a_text_is_no_number(cache: Any) -> None:
    cache.set("n", 2.5)
    assert (cache.incr("n"), cache.decr("n", 0.25), cache["n"]) == (3.5, 3.25, 3.25)
    cache.set("word", "seven")
    with pytest.raises((TypeError, UsageError)):
        cache.incr("word")
    assert cache["word"] == "seven"


# -- iteration --------------------------------------------------------------------------------


def test_iteration_runs_both_ways_and_shows_nothing_that_came_later(cache: Any) -> None:
    assert (list(cache), list(reversed(cache))) == ([], [])
    for number, key in enumerate("abcdef"):
        cache[key] = number
    assert list(cache) == list("abcdef")
    assert list(reversed(cache)) == list("fedcba")
    running = iter(cache)
    seen = [next(running), next(running)]
    cache["g"] = 6
    assert [*seen, *running] == list("abcdef")
    assert list(cache) == list("abcdefg")


def test_entries_can_be_deleted_while_they_are_iterated(cache: Any) -> None:
    for number in range(300):
        cache[number] = number
    for key in cache:
        assert cache.delete(key) is True
    assert len(cache) == 0


# -- the bound --------------------------------------------------------------------------------

LIMIT: Final = 1_550_000
VALUE: Final = b"v" * 100_000


def filled(side: Any, eviction: str, read: tuple[int, ...] = ()) -> tuple[Any, list[int]]:
    """A cache in which twenty entries were set and some are read again and again, after a cull; and
    what it keeps."""
    cache = side.cache(codec="bytes", size_limit=LIMIT, eviction=eviction)
    for number in range(20):
        side.advance(1)
        cache.set(number, VALUE)
        for key in read:
            side.advance(1)
            cache.get(key)
    cache.cull()
    return cache, sorted(cache)


def test_the_oldest_entries_go_where_a_read_does_not_count(side: Any) -> None:
    cache, kept = filled(side, "least-recently-stored", read=(0, 1))
    assert cache.volume() <= LIMIT
    assert 1 <= len(kept) <= 15
    assert kept == list(range(20))[-len(kept) :]


def test_what_is_read_stays_where_a_read_counts(side: Any) -> None:
    cache, kept = filled(side, "least-recently-used", read=(0, 1))
    assert cache.volume() <= LIMIT
    assert kept[:2] == [0, 1]
    assert kept[2:] == list(range(20))[2 - len(kept) :]


def test_nothing_goes_without_eviction(side: Any) -> None:
    cache, kept = filled(side, "none")
    assert cache.volume() > LIMIT
    assert kept == [*range(20)]


def test_a_bound_of_nothing_keeps_nothing(side: Any) -> None:
    cache = side.cache(size_limit=0)
    for number in range(20):
        cache.set(number, number)
    cache.cull()
    assert len(cache) == 0


def test_the_volume_follows_what_is_stored(side: Any) -> None:
    cache = side.cache(codec="bytes")
    empty = cache.volume()
    cache.set("k", VALUE)
    assert empty + len(VALUE) <= cache.volume() < empty + 2 * len(VALUE)
    cache.delete("k")
    assert cache.volume() < empty + len(VALUE)


# -- results of functions ---------------------------------------------------------------------


def counted(calls: Counter[Any]) -> Callable[..., Any]:
    """A function that counts its calls by their arguments."""

    def function(*args: Any, **named: Any) -> Any:
        calls[args, tuple(sorted(named.items()))] += 1
        return [*args, *sorted(named.values(), key=str)]

    return function


def test_a_result_is_made_once_for_its_arguments(cache: Any) -> None:
    calls: Counter[Any] = Counter()
    function = cache.memoize(name="f")(counted(calls))
    for _ in range(3):
        assert function(1, "a", x=2, y=None) == [1, "a", 2, None]
        assert function(1, "a", y=None, x=2) == [1, "a", 2, None]
        assert function(1, "b") == [1, "b"]
        assert function() == []
    assert sum(calls.values()) == len(calls) == len(cache) == 3
    assert sorted(len(cache[key]) for key in cache) == [0, 2, 4]
    cache.clear()
    function()
    assert calls[(), ()] == 2


def test_a_function_that_calls_itself_is_made_once_for_each_number(cache: Any) -> None:
    made = []

    @cache.memoize()
    def fibonacci(n: int) -> int:
        made.append(n)
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)  # type: ignore[no-any-return]

    assert [fibonacci(n) for n in range(100)][-1] == 218922995834555169026
    assert fibonacci(99) == 218922995834555169026
    assert sorted(made) == [*range(100)]
    assert fibonacci.__name__ == "fibonacci"


def test_types_count_where_they_are_asked_for(cache: Any) -> None:
    function = cache.memoize(typed=True)(repr)
    assert [function(each) for each in (1, 1.0, True, "1", 1)] == ["1", "1.0", "True", "'1'", "1"]


def test_ignored_arguments_do_not_count(cache: Any) -> None:
    calls: Counter[Any] = Counter()
    function = cache.memoize(ignore={1, "log"})(counted(calls))
    first = function("a", "b", "c", log="d", deep=1)
    assert function("a", "x", "c", log="y", deep=1) == first
    assert function("a", "b", "x", log="d", deep=1) != first
    assert function("a", "b", "c", log="d", deep=2) != first
    assert len(calls) == 3


def test_results_expire_and_are_evicted_by_their_tag(side: Any, cache: Any) -> None:
    calls: Counter[Any] = Counter()
    function = cache.memoize(expire=10, tag="t")(counted(calls))
    function(1)
    side.advance(9.9)
    function(1)
    assert calls[(1,), ()] == 1
    side.advance(0.2)
    function(1)
    assert calls[(1,), ()] == 2
    assert cache.evict("t") == 1
    function(1)
    assert calls[(1,), ()] == 3


def test_none_is_a_result_and_an_error_is_not(cache: Any) -> None:
    made: list[int] = []

    @cache.memoize()
    def function(number: int) -> None:
        made.append(number)
        if number < 0:
            raise ValueError(number)

    for _ in range(3):
        assert function(1) is None
        with pytest.raises(ValueError, match="-1"):
            function(-1)
    assert made == [1, -1, -1, -1]


def test_names_keep_functions_apart(cache: Any) -> None:
    def lower(text: str) -> str:
        return text.lower()

    def upper(text: str) -> str:
        return text.upper()

    first, second = cache.memoize()(lower), cache.memoize()(upper)
    assert (first("Aa"), second("Aa")) == ("aa", "AA")
    same, other = cache.memoize(name="one")(lower), cache.memoize(name="one")(upper)
    assert (same("Aa"), other("Aa")) == ("aa", "aa")


def test_many_callers_at_once_make_a_result_once(side: Any, cache: Any) -> None:
    made, inside, ready = [], threading.Event(), threading.Barrier(8)

    def slow(number: int) -> int:
        made.append(number)
        inside.wait(60)
        return number * 2

    guarded = side.guarded(cache, slow)

    def call() -> Any:
        ready.wait(60)
        inside.set()
        return guarded(21)

    with ThreadPoolExecutor(8) as pool:
        assert [each.result() for each in [pool.submit(call) for _ in range(8)]] == [42] * 8
    assert made == [21]


def test_a_lock_that_threads_share_lets_one_in(side: Any, cache: Any) -> None:
    lock, begun = side.lock(cache, "k"), threading.Event()
    order: list[str] = []

    def work() -> None:
        begun.set()
        with lock:
            assert lock.locked()
            order.append("second")

    with lock:
        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert not lock.locked()


# -- threads and processes --------------------------------------------------------------------


def count(cache: Any) -> None:
    for _ in range(25):
        cache.incr("n")


def add(cache: Any) -> int:
    return sum(cache.add(number, number) for number in range(100))


def test_threads_lose_no_increment_and_add_each_key_once(cache: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(count, cache) for _ in range(8)]:
            each.result()
        assert sum(pool.map(add, [cache] * 8)) == 100
    assert cache["n"] == 8 * 25


def work(cache: Any, said: Any) -> None:
    """What a process does with a cache that it unpickled."""
    count(cache)
    said.put(add(cache))


def test_processes_share_a_cache_by_its_path(side: Any, tmp_path: Path) -> None:
    cache = side.at(tmp_path / "shared")
    cache.set("before", "parent", expire=3600, tag="t")
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    children = [context.Process(target=work, args=(cache, said)) for _ in range(3)]
    for child in children:
        child.start()
    count(cache)
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert (cache["n"], sum(said.get() for _ in children)) == (4 * 25, 100)
    assert (cache["before"], cache.evict("t"), len(cache)) == ("parent", 1, 101)
    cache.close()


# -- closing, copies, damage ------------------------------------------------------------------


def test_a_cache_is_closed_opened_again_and_used_after_a_close(side: Any, tmp_path: Path) -> None:
    with side.at(tmp_path / "c") as cache:
        cache.set("k", "value" * 2**18, tag="t")
        cache["n"] = 1
    cache.close()
    cache.close()
    with side.at(tmp_path / "c") as again:
        assert (again["k"], len(again), again.evict("t")) == ("value" * 2**18, 2, 1)
    assert (cache.get("k"), cache.incr("n")) == (None, 2)  # a use opens it
    cache.close()


def test_two_caches_of_a_path_see_each_other(side: Any, tmp_path: Path) -> None:
    first, second = side.at(tmp_path / "c"), side.at(tmp_path / "c")
    first["k"] = 1
    assert second.incr("k") == 2
    assert first["k"] == 2
    copied = pickle.loads(pickle.dumps(first))
    assert copied["k"] == 2
    for each in (first, second, copied):
        each.close()


def test_a_copy_is_a_cache_of_its_own(side: Any, tmp_path: Path) -> None:
    with side.at(tmp_path / "c") as cache:
        for number in range(20):
            cache[number] = str(number) * (1 if number < 10 else 10**5)
        side.copy(cache, tmp_path / "copy")
    with side.at(tmp_path / "copy") as copied:
        copied[0] = "changed"
        assert [copied[number] for number in range(10, 20)] == [
            str(number) * 10**5 for number in range(10, 20)
        ]
    with side.at(tmp_path / "c") as cache:
        assert cache[0] == "0"


def test_a_damaged_value_is_told_and_can_be_replaced(side: Any, cache: Any) -> None:
    cache["whole"] = 1
    side.damage("k")
    with pytest.raises((CorruptionError, EOFError, pickle.UnpicklingError)):
        cache["k"]
    assert (cache["whole"], "k" in cache, len(cache)) == (1, True, 2)
    cache["k"] = 2
    assert cache["k"] == 2
    side.damage("k")
    assert (cache.delete("k"), "k" in cache) == (True, False)


# -- where the two differ ---------------------------------------------------------------------


def test_differs_what_has_expired_counts_there_until_somebody_deletes_it(
    side: Any, cache: Any
) -> None:
    for number in range(10):
        cache.set(number, number, expire=1)
    side.advance(2)
    found = len(cache), len(list(cache)), cache.expire(), len(cache)
    assert found == {"ours": (0, 0, 0, 0), "theirs": (10, 10, 10, 0)}[side.name]


def test_differs_keys_are_sorted_here_and_in_the_order_of_their_first_set_there(
    side: Any, cache: Any
) -> None:
    for key in "cab":
        cache[key] = 0
    assert list(cache) == {"ours": ["a", "b", "c"], "theirs": ["c", "a", "b"]}[side.name]


def test_differs_a_whole_float_is_a_key_of_its_own_here(side: Any, cache: Any) -> None:
    cache[1], cache[1.0] = "int", "float"
    assert [cache[1], len(cache)] == {"ours": ["int", 2], "theirs": ["float", 1]}[side.name]


def test_differs_one_and_one_point_zero_are_one_argument_here(side: Any, cache: Any) -> None:
    calls: Counter[Any] = Counter()
    function = cache.memoize()(counted(calls))
    function(1), function(1.0)
    assert sum(calls.values()) == {"ours": 1, "theirs": 2}[side.name]


def test_differs_a_value_that_is_no_json_is_refused_here_and_pickled_there(
    side: Any, cache: Any
) -> None:
    if side.name == "ours":
        with pytest.raises(UsageError, match="is no JSON"):
            cache["k"] = {1, 2}
        assert "k" not in cache
        cache = side.cache(codec=CacheCodec(pickle.dumps, pickle.loads))  # who asks for it gets it
    cache["k"] = {1, 2}
    assert cache["k"] == {1, 2}


def test_differs_a_tuple_comes_back_as_a_list_here(side: Any, cache: Any) -> None:
    cache["k"] = (1, 2)
    assert cache["k"] == {"ours": [1, 2], "theirs": (1, 2)}[side.name]


@pytest.mark.parametrize("key", [["a"], ("a", ("b",)), 2**512])
def test_differs_lists_tuples_in_tuples_and_long_numbers_are_no_keys_here(
    side: Any, cache: Any, key: Any
) -> None:
    if side.name == "ours":
        with pytest.raises(UsageError, match=r"order-preserving|64 bits"):
            cache[key] = 1
        return
    cache[key] = 1
    assert list(cache) == [key]


def test_differs_tags_are_texts_and_several_here(side: Any, cache: Any) -> None:
    if side.name == "theirs":
        for tag in (1234, 5.67, b"three"):
            cache.set("k", 1, tag=tag)
            assert side.told(cache, "k") == (1, None, tag)
        return
    with pytest.raises(UsageError, match="tag"):
        cache.set("k", 1, tag=1234)
    cache.set("k", 1, tag=["a", "b"])
    assert (cache.tags("k"), cache.evict("b"), cache.evict("a")) == (("a", "b"), 1, 0)


def test_differs_a_number_of_any_length_is_counted_here(side: Any, cache: Any) -> None:
    cache["n"] = 2**63 - 1
    if side.name == "ours":
        assert cache.incr("n") == cache["n"] == 2**63
        return
    with pytest.raises(OverflowError):
        cache.incr("n")


def test_differs_many_callers_of_memoize_make_a_result_once_here(side: Any, cache: Any) -> None:
    """There each caller that misses makes it, unless `barrier` stands before it."""
    made: list[int] = []
    both = threading.Barrier(2)

    def make(number: int) -> int:
        made.append(number)
        if side.name == "theirs":
            both.wait(60)  # ends, since both callers are in here
        return number

    call = partial(cache.memoize()(make), 1)
    with ThreadPoolExecutor(2) as pool:
        assert [each.result() for each in [pool.submit(call) for _ in range(2)]] == [1, 1]
    assert len(made) == {"ours": 1, "theirs": 2}[side.name]
