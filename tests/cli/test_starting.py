"""Commands start quickly and end at any moment: the modules that they import, and interrupts.

Imports are counted rather than timed. An interrupt comes at a random moment of a command.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import kvstore
from kvstore.cli.exits import DONE
from kvstore.cli.interrupts import INTERRUPTED
from kvstore.testing.seeds import seeded

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
INTERRUPTS = 2
READY = "from kvstore.cli.interrupts import watch; watch(); print('ready', flush=True)"
MAIN = "from kvstore.cli.start import main; main()"


def modules_after(statement: str, *arguments: str) -> set[str]:
    """The modules that a process has imported after a statement, also where it ends by `exit`."""
    script = (
        f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write(' '.join(sys.modules))"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_importing_kvstore_imports_nothing_else() -> None:
    modules = modules_after("import kvstore")
    assert {name for name in modules if name.startswith("kvstore")} == {
        "kvstore",
        "kvstore.late",
        "kvstore.version",
    }
    assert not modules & {"numpy", "pyarrow", "rocksdict", "asyncio", "typer", "logging"}


def test_a_command_imports_itself_alone(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"k", b"v")
    modules = modules_after(MAIN, "get", str(tmp_path / "s"), "k")
    assert "kvstore.cli.read" in modules
    others = {"changes", "write", "upkeep", "serve", "doctor", "journal"}
    assert not modules & {f"kvstore.cli.{name}" for name in others}
    unused = {"rich", "pydantic", "ssl", "asyncio", "obstore", "cryptography", "uvicorn"}
    assert not modules & unused
    assert not {name for name in modules if name.startswith(("bulk", "backup", "kvstore.server"))}


def test_each_name_of_kvstore_is_found_at_its_first_use() -> None:
    """The names for type checkers and the names at run time are the same objects."""
    tree = ast.parse(Path(kvstore.__file__).read_text())
    declared = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(declared) | {"__version__"} == set(kvstore.__all__)
    for name, module in declared.items():
        assert module is not None
        found = __import__(module, fromlist=[name])
        assert getattr(kvstore, name) is getattr(found, name), name
    assert set(kvstore.__all__) <= set(dir(kvstore))
    assert kvstore.opening.engine_at is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvstore.nothing  # noqa: B018


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("interrupts") / "s"
    with kvstore.open(place, durability="async") as store:
        for first in range(0, 30_000, 1000):
            store.put_many((b"%05d" % n, b"v" * 50) for n in range(first, first + 1000))
    return place


@pytest.mark.parametrize(
    "words",
    [
        ("scan", "{}"),
        ("verify", "{}"),
        ("gc", "{}", "--keep", "0s"),
        ("put", "{}", "k", "v"),
    ],
    ids=lambda words: words[0],
)
def test_an_interrupt_at_any_moment_ends_a_command_without_a_traceback(
    path: Path, words: tuple[str, ...]
) -> None:
    draw = seeded("INTERRUPTS_SEED")
    command = [sys.executable, "-c", f"{READY}; {MAIN}", *(word.format(path) for word in words)]
    begin = partial(
        subprocess.Popen[bytes],
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        # Tests that run in the background ignore interrupts. The child would inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    with begin() as whole:
        assert whole.stdout is not None
        assert whole.stdout.readline() == b"ready\n"
        begun = time.monotonic()
        assert whole.communicate()[1] == b""
        length = time.monotonic() - begun
    assert whole.returncode == DONE
    ends = []
    for _ in range(INTERRUPTS):
        with begin() as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            # The moment of the interrupt is the subject here, not a condition that is waited for.
            time.sleep(draw.uniform(0, length))
            child.send_signal(signal.SIGINT)
            told = child.communicate()[1].decode()
        assert "Traceback" not in told, told
        ends.append(child.returncode)
    # The interpreter itself ends by the signal where it has put back the system's handler.
    assert set(ends) <= {DONE, INTERRUPTED, -signal.SIGINT}, ends
    with kvstore.open(path) as store:
        assert store.get(b"29999") == b"v" * 50
        assert store.verify().ok
