"""A `.pyi` declares what the compiled module beside it has, and an installation without compiled
loops says so."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvstore
from kvstore.loops.compiled import LOOPS

PACKAGE = Path(kvstore.__file__).parent


def declared(name: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    tree = ast.parse((PACKAGE / "loops" / f"{name}.pyi").read_text())
    return {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def defined(module: ModuleType) -> dict[str, Any]:
    """The public functions and classes of a module. `take_bounds` is for tests alone."""
    return {
        name: found
        for name, found in vars(module).items()
        if callable(found)
        and getattr(found, "__module__", None) == module.__name__
        and not name.startswith("_")
        and name != "take_bounds"
    }


def functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """The methods of a class, without constructors: C has its own."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            yield each


def parameters(node: ast.FunctionDef) -> list[str]:
    given = node.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def test_each_loop_is_named() -> None:
    assert sorted(LOOPS) == sorted(path.stem for path in (PACKAGE / "loops").glob("*.pyx"))


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_declared_is_what_is_compiled(name: str) -> None:
    types, made = declared(name), defined(import_module(f"kvstore.loops.{name}"))
    assert types.keys() == made.keys()
    for each, node in types.items():
        if isinstance(node, ast.FunctionDef):
            assert parameters(node) == list(inspect.signature(made[each]).parameters), each
            continue
        methods = {method.name: method for method in functions(node)}
        own = {other for other in vars(made[each]) if not other.startswith("_")}
        fields = {
            ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)
        }
        assert own == {*methods, *(field for field in fields if not field.startswith("_"))}, each
        for method, found in methods.items():
            if not found.decorator_list:
                signature = inspect.signature(vars(made[each])[method])
                assert parameters(found) == list(signature.parameters), (each, method)


def test_sources_without_compiled_loops_say_what_is_missing(tmp_path: Path) -> None:
    """A zip of the sources has none: Python imports no compiled module out of a zip."""
    with zipfile.ZipFile(tmp_path / "sources.zip", "w") as archive:
        for path in PACKAGE.rglob("*.py"):
            archive.write(path, path.relative_to(PACKAGE.parent))
    done = subprocess.run(
        [sys.executable, "-c", "import kvstore; kvstore.open(None, engine='memory')"],
        env={"PYTHONPATH": str(tmp_path / "sources.zip")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith(
        "kvstore.errors.NotCompiledError: the loops of kvstore are not compiled for "
    )
    assert "No module named 'kvstore.loops.blocks'; install a wheel of kvstore-mvcc" in told
    assert done.stderr.count("Traceback") == 1
