"""Tests reach into no private member, draw from seeds, and assert what can fail."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.house import habits
from tests.house.source import Module, read_modules

ROOT = Path(__file__).parent.parent


def found_in(code: str) -> list[str]:
    return habits.findings([Module("tests/test_it.py", "tests.test_it", ast.parse(code), code)])


@cache
def every_module() -> list[Module]:
    """The tests, parsed once."""
    return read_modules(ROOT, ["tests"])


def test_the_tests_keep_their_rules() -> None:
    assert habits.findings(every_module()) == []


@pytest.mark.parametrize(
    "code",
    [
        "self._count += 1",
        "row._replace(key=b'k')",
        "store.engine.__class__",
        "random.Random(7).random()",
        "pick.random()",
        "from tests.harness.seeds import seeded",
        "assert store.get(b'k')",
        "assert store.put(b'k', b'v') > before",
        "monkeypatch.setattr(store, 'put', fail)",
    ],
)
def test_code_that_keeps_the_rules_passes(code: str) -> None:
    assert found_in(code) == []


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("store._engine.get(b'k')", "_engine is private"),
        ("from kvstore.bulk.part import _options", "_options is private"),
        ("monkeypatch.setattr(store, '_engine', other)", "_engine is private"),
        ("monkeypatch.setattr('bulk.sst._options', other)", "_options is private"),
        ("random.Random()", "random.Random() has no seed"),
        ("random.shuffle(keys)", "random.shuffle() has no seed"),
        ("secrets.randbits(32)", "secrets.randbits() has no seed"),
        ("assert store.put_if(b'k', b'v')", "a timestamp is always true"),
        ("assert ready and store.sync()", "a timestamp is always true"),
        ("assert (store.get(b'k') == b'v', 'message')", "this is true"),
    ],
)
def test_code_that_breaks_a_rule_is_named(code: str, finding: str) -> None:
    (line,) = found_in(code)
    assert line.startswith(f"tests/test_it.py:1: {finding}")


def test_each_exception_is_still_needed() -> None:
    reached = {
        (module.path, name)
        for module in every_module()
        for _, name in habits.private_names(module.tree)
    }
    assert set(habits.REVIEWED) <= reached
