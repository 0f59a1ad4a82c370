"""The rules of a module of tests: about private members, random numbers and assertions.

1. A test reaches into no private member of ours. It uses the public surface, or a probe of
   `tests.harness.parts`. `REVIEWED` lists the exceptions, each with its reason.
2. Random numbers come from a seed: `tests.harness.seeds` prints and takes it, or the code has it.
3. An assertion can fail: the result of a call that returns a timestamp is true whatever happened.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source import Module

PUBLIC_ELSEWHERE = {
    *("_replace", "_asdict", "_fields", "_make"),  # of every NamedTuple
    "_exit",  # os
    *("_GenericBackendTestSuite", "_GenericMutexTestSuite"),  # dogpile
    "_GenericSerializerTestSuite",  # dogpile
    "_jdf",  # pyspark
    "_jvm",  # pyspark
    *("_change_type", "_commit_version", "_commit_timestamp"),  # columns of change feeds
}
"""Names that begin with an underscore and are public all the same."""

_STEPS = "stops a call between two of its steps"
_DAMAGE = "puts in a state that no call makes"
_FAKE = "stands for what happens once in a long while"

REVIEWED = {
    ("tests/backup/test_damage.py", "_chains"): _DAMAGE,
    ("tests/backup/test_promotion.py", "_end_window"): _STEPS,
    ("tests/cli/test_store.py", "_journal"): _FAKE,
    ("tests/cli/test_store.py", "_rotate"): _FAKE,
    ("tests/crash/test_interrupted_commits.py", "_stage"): _STEPS,
    ("tests/crash/test_interrupts.py", "_show"): _STEPS,
    ("tests/crash/test_interrupts.py", "_take"): _STEPS,
    ("tests/engine/test_memory_crash.py", "_stage"): _STEPS,
    ("tests/engine/test_memory_crash.py", "_state"): "looks at what was staged",
    ("tests/engine/test_memory_store.py", "_journal"): _FAKE,
    ("tests/engine/test_memory_store.py", "_rotate"): _FAKE,
    ("tests/engine/test_memory_store.py", "_stage"): _STEPS,
    ("tests/engine/test_memory_store.py", "_writing"): _STEPS,
    ("tests/engine/test_memory_store.py", "_append"): _STEPS,
    ("tests/engine/test_memory_store.py", "_take"): _STEPS,
    ("tests/engine/test_memory_store.py", "_state"): "tells whether a chunk was copied",
    ("tests/engine/test_rocks.py", "_open"): "closes the database inside a call",
    ("tests/live/test_live.py", "_new_instance"): _FAKE,
    ("tests/test_group_commit.py", "_synced"): "threading.Condition counts no waiters in public",
    ("tests/test_group_commit.py", "_waiters"): "threading.Condition counts no waiters in public",
    ("tests/verify/test_verify.py", "_records"): _DAMAGE,
}
"""Private members that a module of tests reaches into, each with the reason."""

TIMESTAMPS = {"put", "delete", "put_if", "delete_if", "clear_range", "sync", "ingest", "now"}
"""Calls that return a timestamp."""

PROBE = "tests/harness/parts.py"
"""The one module that reaches into stores, for all tests."""

SEEDS = "tests/harness/seeds.py"
"""The one module that draws a seed."""

TRIVIAL = (ast.Constant, ast.JoinedStr, ast.Tuple, ast.List, ast.Lambda, ast.GeneratorExp)


def findings(modules: list[Module]) -> list[str]:
    """Everything in modules of tests that breaks a rule, one line each."""
    return [
        f"{module.path}:{line}: {text}"
        for module in modules
        for rule in (_private_rule, _random_rule, _assert_rule)
        for line, text in rule(module)
    ]


def _private_rule(module: Module) -> Iterator[tuple[int, str]]:
    if module.path == PROBE:
        return
    for line, name in private_names(module.tree):
        if name not in PUBLIC_ELSEWHERE and (module.path, name) not in REVIEWED:
            yield line, f"{name} is private: use what is public, or the probe tests.harness.parts"


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names that are read or imported from elsewhere, or patched by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = ast.unparse(node.value) in ("self", "cls", "super()")
            names = [] if own else [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            words = [each.value for each in node.args if isinstance(each, ast.Constant)]
            names = [word.rpartition(".")[2] for word in words if isinstance(word, str)]
        else:
            continue
        for name in names:
            # A name with a line at its end too, such as `_repr_html_`, is what notebooks call.
            if name.startswith("_") and not name.startswith("__") and not name.endswith("_"):
                yield node.lineno, name


def _random_rule(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            source, called = ast.unparse(node.func.value), node.func.attr
            is_seeded = called == "Random" and len(node.args) == 1
            if source in ("random", "secrets") and not is_seeded and module.path != SEEDS:
                yield node.lineno, f"{source}.{called}() has no seed: see tests.harness.seeds"


def _assert_rule(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert):
            tested = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
            for each in tested:
                called = each.func if isinstance(each, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr in TIMESTAMPS:
                    yield node.lineno, f"a timestamp is always true: assert what {called.attr} did"
                elif isinstance(each, TRIVIAL):
                    yield node.lineno, "this is true, or false, whatever happened"
