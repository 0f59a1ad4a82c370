"""Porcupine's recorded histories, judged by our checker of linearizability.

They lie in its repository alone: `PORCUPINE_CHECKOUT` names a checkout of it. Its own test tells
which of them are linearizable. Each of the 102 histories of etcd is of one register, which Jepsen
wrote, read and swapped; those of stores of texts have a few keys, which are judged one by one.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.shared.linearizability import UNKNOWN, Call, Step, is_linearizable, register

CHECKOUT = Path(os.environ.get("PORCUPINE_CHECKOUT", ""))
WITHOUT = "PORCUPINE_CHECKOUT names no checkout of anishathalye/porcupine"


def verdicts(pattern: str) -> dict[str, bool]:
    """The verdict on each history that Porcupine's own test has."""
    told = CHECKOUT / "porcupine_test.go"
    if "PORCUPINE_CHECKOUT" not in os.environ:
        return {}
    found = re.findall(pattern, told.read_text(encoding="utf-8"))
    return {name: verdict == "true" for name, verdict in found}


ETCD = verdicts(r"func TestEtcd\w+\(.*\n\tcheckJepsen\(t, (\d+), (true|false)\)")
TEXTS = verdicts(r'func TestKv\d+\w+\(.*\n\tcheckKv\(t, "([\w-]+)", (true|false), true\)')


def test_all_histories_are_there() -> None:
    if "PORCUPINE_CHECKOUT" not in os.environ:
        pytest.skip(WITHOUT)
    assert (len(ETCD), len(TEXTS)) == (102, 6)
    assert {True, False} == {*ETCD.values()} == {*TEXTS.values()}


@pytest.mark.parametrize("name", ETCD)
def test_of_a_register(name: str) -> None:
    """A line has a process, `invoke`, `ok`, `fail` or `info`, the operation and its value. A call
    that ends with `info` has an outcome that nobody knows."""
    lines = (CHECKOUT / "test_data" / "jepsen" / f"etcd_{int(name):03}.log").read_text()
    pattern = r"^INFO\s+jepsen\.util\s+-\s+(\d+)\s+:(\w+)\s+:(\w+)\s+(.*)$"
    verbs = {"read": "get", "write": "put", "cas": "swap"}
    begun: dict[str, tuple[int, str, Any]] = {}
    calls = []
    found = re.findall(pattern, lines, re.MULTILINE)
    assert len(found) == len(lines.splitlines())
    for time, (process, kind, verb, told) in enumerate(found):
        value = tuple(re.findall(r"\d+", told)) if verb == "cas" else _value(told)
        if kind == "invoke":
            begun[process] = time, verbs[verb], value
        elif kind in {"ok", "fail"} and told != ":timed-out":
            answer = {"read": value, "write": None, "cas": kind == "ok"}[verb]
            calls.append(_call(begun.pop(process), time, answer))
        elif verb == "read":
            del begun[process]  # a read that was given up tells nothing
    calls += [_call(first, None, UNKNOWN) for first in begun.values()]
    assert is_linearizable(calls, register) == ETCD[name]


def _value(told: str) -> str | None:
    return None if told == "nil" else told


@pytest.mark.parametrize("name", TEXTS)
def test_of_texts(name: str) -> None:
    lines = (CHECKOUT / "test_data" / "kv" / f"{name}.txt").read_text()
    pattern = r'^\{:process (\d+), :type :(\w+), :f :(\w+), :key "(.*)", :value (?:nil|"(.*)")\}$'
    begun: dict[str, tuple[int, str, Any]] = {}
    calls: dict[str, list[Call]] = defaultdict(list)
    found = re.findall(pattern, lines, re.MULTILINE)
    assert len(found) == len(lines.splitlines())
    for time, (process, kind, verb, key, text) in enumerate(found):
        if kind == "invoke":
            begun[process] = time, verb, text
        else:
            assert kind == "ok"
            calls[key].append(_call(begun.pop(process), time, text))
    assert not begun
    step: Step = _text
    assert all(is_linearizable(of_key, step, "") for of_key in calls.values()) == TEXTS[name]


def _text(state: str, name: str, argument: str, answer: str) -> tuple[bool, str]:
    """A text with `put`, `append` and `get`, which answers it."""
    if name == "get":
        return answer == state, state
    return True, argument if name == "put" else state + argument


def _call(first: tuple[int, str, Any], end: int | None, answer: Any) -> Call:
    begin, verb, argument = first
    return Call(begin, end, verb, argument, answer)
