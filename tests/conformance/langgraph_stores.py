"""A contract for stores of LangGraph, for which its project has no suite.

Inherit `StoreContract`, and give it a fixture `memory` that makes an empty store. Nothing here is
of kvstore.
"""

from __future__ import annotations

import pytest
from langgraph.store.base import BaseStore, GetOp, PutOp, SearchOp


class StoreContract:
    """What callers of any store of LangGraph rely on."""

    def test_an_item_comes_back_and_is_replaced(self, memory: BaseStore) -> None:
        value = {"text": "caf\u00e9", "list": [1, 2.5, None, True], "deep": {"a": {}}}
        memory.put(("users", "ada"), "k", value)
        item = memory.get(("users", "ada"), "k")
        assert item is not None
        assert (item.value, item.key, item.namespace) == (value, "k", ("users", "ada"))
        assert item.created_at.tzinfo is not None
        memory.put(("users", "ada"), "k", {"new": 1})
        again = memory.get(("users", "ada"), "k")
        assert again is not None
        assert again.value == {"new": 1}
        assert again.updated_at >= item.updated_at
        memory.delete(("users", "ada"), "k")
        memory.delete(("users", "ada"), "k")
        assert memory.get(("users", "ada"), "k") is None

    def test_namespaces_are_apart(self, memory: BaseStore) -> None:
        places = [("a",), ("a", "b"), ("a", "b", "c"), ("ab",), ("b",), ("a", "c")]
        for place in places:
            memory.put(place, "k", {"at": list(place)})
        for place in places:
            item = memory.get(place, "k")
            assert item is not None
            assert item.value == {"at": list(place)}
        found = {item.namespace for item in memory.search(("a",))}
        assert found == {("a",), ("a", "b"), ("a", "b", "c"), ("a", "c")}
        assert {item.namespace for item in memory.search(())} == set(places)

    @pytest.mark.parametrize(
        ("wanted", "keys"),
        [
            ({"color": "red"}, {"0", "2", "4"}),
            ({"size": {"$gt": 2}}, {"3", "4"}),
            ({"size": {"$gte": 1, "$lt": 3}}, {"1", "2"}),
            ({"size": {"$lte": 1}, "color": {"$ne": "red"}}, {"1"}),
            ({"size": {"$eq": 3}}, {"3"}),
            ({"deep": {"odd": True}}, {"1", "3"}),
            ({"absent": 1}, set()),
        ],
    )
    def test_a_search_filters(
        self, memory: BaseStore, wanted: dict[str, object], keys: set[str]
    ) -> None:
        for n in range(5):
            color = "red" if n % 2 == 0 else "blue"
            memory.put(("x",), str(n), {"size": n, "color": color, "deep": {"odd": n % 2 == 1}})
        assert {item.key for item in memory.search(("x",), filter=wanted)} == keys

    def test_pages_of_a_search_are_the_whole(self, memory: BaseStore) -> None:
        for n in range(25):
            memory.put(("x",), f"{n:02}", {"n": n})
        pages = [memory.search(("x",), limit=10, offset=at) for at in (0, 10, 20, 30)]
        assert [len(page) for page in pages] == [10, 10, 5, 0]
        assert {item.key for page in pages for item in page} == {f"{n:02}" for n in range(25)}
        assert len(memory.search(("x",))) == 10

    def test_namespaces_are_listed(self, memory: BaseStore) -> None:
        for place in (("a", "b", "v1"), ("a", "c", "v1"), ("a", "c", "v2"), ("d",)):
            memory.put(place, "1", {})
            memory.put(place, "2", {})
        assert memory.list_namespaces() == sorted(
            [("a", "b", "v1"), ("a", "c", "v1"), ("a", "c", "v2"), ("d",)]
        )
        assert memory.list_namespaces(prefix=("a", "c")) == [("a", "c", "v1"), ("a", "c", "v2")]
        assert memory.list_namespaces(suffix=("v1",)) == [("a", "b", "v1"), ("a", "c", "v1")]
        assert memory.list_namespaces(prefix=("a", "*", "v2")) == [("a", "c", "v2")]
        assert memory.list_namespaces(max_depth=1) == [("a",), ("d",)]
        assert memory.list_namespaces(max_depth=2, limit=1, offset=1) == [("a", "c")]

    def test_a_batch_reads_what_was_there_before_it(self, memory: BaseStore) -> None:
        memory.put(("x",), "k", {"n": 1})
        got, _, _, searched = memory.batch(
            [
                GetOp(("x",), "k"),
                PutOp(("x",), "k", {"n": 2}),
                PutOp(("x",), "k", {"n": 3}),
                SearchOp(("x",)),
            ]
        )
        assert got.value == {"n": 1}  # type: ignore[union-attr]  # an item
        assert [item.value for item in searched] == [{"n": 1}]  # type: ignore[union-attr]
        last = memory.get(("x",), "k")
        assert last is not None
        assert last.value == {"n": 3}

    async def test_coroutines_do_the_same(self, memory: BaseStore) -> None:
        await memory.aput(("x",), "k", {"n": 1})
        item = await memory.aget(("x",), "k")
        assert item is not None
        assert item.value == {"n": 1}
        assert [each.key for each in await memory.asearch(("x",))] == ["k"]
        assert await memory.alist_namespaces() == [("x",)]
        await memory.adelete(("x",), "k")
        assert await memory.aget(("x",), "k") is None

    @pytest.mark.parametrize("place", [(), ("a.b",), ("",), ("langgraph", "x")])
    def test_a_namespace_that_is_none_is_refused(
        self, memory: BaseStore, place: tuple[str, ...]
    ) -> None:
        with pytest.raises(ValueError, match=r"[Nn]amespace"):
            memory.put(place, "k", {})
