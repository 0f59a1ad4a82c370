"""A store as a mapping of Python, keys alone, and counts."""

from __future__ import annotations

from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import CorruptionError, UsageError
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

pytestmark = pytest.mark.usefixtures("each_engine")


def test_keys_and_counts_are_those_of_a_scan(store: kvstore.Store) -> None:
    draw = seeded("KVSTORE_COUNT")
    for _ in range(200):
        key = b"%02d" % draw.randrange(60)
        if draw.random() < 0.3:
            store.delete(key)
        else:
            store.put(key, bytes(draw.randrange(20)))
    at = store.delete_range(b"20", b"30")
    store.put(b"25", b"again")
    with bounds(SCAN_CHUNK=3):
        for span in ({}, {"prefix": b"2"}, {"start": b"1", "end": b"3"}, {"as_of": at}):
            rows = list(store.scan(**span))  # type: ignore[arg-type]
            assert list(store.keys(**span)) == [key for key, _ in rows]  # type: ignore[arg-type]
            assert store.count(**span) == len(rows)  # type: ignore[arg-type]
        every = [key for key, _ in store.scan()]
        assert list(store.keys(reverse=True, limit=4)) == every[::-1][:4]
    with pytest.raises(UsageError):
        store.keys(limit=-1)


@pytest.mark.parametrize("prefix", [b"", b"p/", b"\xff"])
def test_a_mapping_does_what_a_dict_does(store: kvstore.Store, prefix: bytes) -> None:
    draw, model = seeded("KVSTORE_MAPPING"), dict[str, object]()
    view: MutableMapping[str, object] = store.mapping("json", prefix=prefix)
    store.put(b"beside", b"x") if prefix else None
    for step in range(200):
        key = f"k{draw.randrange(9)}ü"
        match draw.randrange(6):
            case 0:
                assert view.pop(key, None) == model.pop(key, None)
            case 1:
                assert view.setdefault(key, step) == model.setdefault(key, step)
            case 2:
                rows = {f"k{draw.randrange(9)}ü": [step, None] for _ in range(3)}
                view.update(rows)
                model.update(rows)
            case 3 if step % 7 == 0:
                view.clear()
                model.clear()
            case _:
                view[key] = model[key] = {"step": step}
        assert (key in view) == (key in model)
    assert dict(view) == dict(view.rows()) == model  # type: ignore[attr-defined]
    assert list(view) == sorted(model)
    assert len(view) == len(model)
    assert (view.get("none"), view.get("none", 1)) == (None, 1)
    with pytest.raises(KeyError):
        del view["none"]
    assert store.count() == len(model) + bool(prefix)


def test_codecs_refuse_what_they_cannot_keep(store: kvstore.Store) -> None:
    view = store.mapping("text")
    view["k"] = "v"
    assert store.mapping()[b"k"] == b"v"
    for key, value in ((b"k", "v"), ("k", b"v"), ("k", None)):
        with pytest.raises(UsageError, match="is no text"):
            view[key] = value
    with pytest.raises(UsageError, match="is no JSON"):
        store.mapping("json")["k"] = float("nan")
    with pytest.raises(UsageError, match="codec='pickle'"):
        store.mapping("pickle")
    store.put(b"\xff", b"\xff")
    with pytest.raises(CorruptionError, match="not of the codec"):
        list(view)
    with pytest.raises(CorruptionError, match="the value of 'k'"):
        _ = store.mapping("json")["k"]
    assert "StoreMapping" in repr(view)
    number = kvstore.MappingCodec(
        key=lambda n: kvstore.codec.encode_tuple((n,)),
        key_of=lambda raw: kvstore.codec.decode_tuple(raw)[0],
        value=bytes,
        value_of=bytes,
    )
    numbers = store.mapping(number, prefix=b"n/")
    numbers.update({10: b"ten", 9: b"nine", -1: b"less"})
    assert list(numbers) == [-1, 9, 10]


def test_what_a_mapping_sets_expires(tmp_path: Path) -> None:
    clock = kvstore.ManualClock(10**18)
    with kvstore.open(tmp_path / "expiring", durability="async", clock=clock) as store:
        store.put(b"s/old", b'"stays"')
        view = store.mapping("json", prefix=b"s/", expires=timedelta(minutes=1))
        view["a"] = 1
        view.update(b=2, c=3)
        clock.advance(30 * 10**9)
        assert view.setdefault("a", 9) == 1
        view["b"] = 20
        clock.advance(30 * 10**9 + 1000)
        assert dict(view) == {"b": 20, "old": "stays"}
        with pytest.raises(UsageError, match="does not lie ahead"):
            store.mapping(expires=timedelta(0))[b"k"] = b"v"
