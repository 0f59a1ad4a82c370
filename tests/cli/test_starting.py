"""Commands start quickly: the modules that they import, which are counted rather than timed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import kvstore
from kvstore.cli.main import COMMANDS, SUMMARIES, app

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
RUN = "from kvstore.cli.start import run; run()"
"""A command, without the sudden end of its process."""


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


def test_a_service_that_reads_and_writes_imports_no_functions_of_arrow(tmp_path: Path) -> None:
    """They take a sixth of the time in which a process opens its first store."""
    modules = modules_after(
        "import kvstore; store = kvstore.open(sys.argv[1]); store.put(b'k', b'v'); "
        "store.get(b'k'); list(store.scan()); store.delete_range(b'a', b'b'); store.close()",
        str(tmp_path / "s"),
    )
    assert "kvstore.store" in modules
    assert "pyarrow.compute" not in modules


def test_little_is_imported_before_an_interrupt_is_handled() -> None:
    """Each import takes time in which an interrupt would show a traceback."""
    before = modules_after("pass")
    modules = modules_after("import kvstore.cli") - before
    foreign = {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign == {
        *("kvstore", "kvstore.late", "kvstore.version"),
        *("kvstore.cli", "kvstore.cli.start", "kvstore.cli.early"),
    }
    slow = {"logging", "asyncio", "json", "inspect", "dataclasses", "subprocess", "importlib.util"}
    assert not modules & slow


def test_a_command_imports_itself_alone(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"k", b"v")
    modules = modules_after(RUN, "get", str(tmp_path / "s"), "k")
    assert "kvstore.cli.read_commands" in modules
    assert not modules & {"numpy._core", "pyarrow.lib"}  # the packages are placeholders
    assert not modules & {
        "kvstore.tables",
        "kvstore.tables.joins",
        "kvstore.storage.journal",
        "kvstore.remote.server",
    }
    others = {"changes", "write", "upkeep", "serve", "doctor", "journal"}
    assert not modules & {f"kvstore.cli.{name}" for name in others}
    unused = {"rich", "pydantic", "ssl", "asyncio", "obstore", "cryptography", "uvicorn"}
    assert not modules & unused
    assert not {
        name
        for name in modules
        if name.startswith(("kvstore.bulk", "kvstore.backup", "kvstore.remote.server"))
    }


def test_a_command_that_writes_imports_no_more(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"k", b"v")
    modules = modules_after(RUN, "put", str(tmp_path / "s"), "k", "w")
    assert "kvstore.cli.write" in modules
    assert not modules & {
        "numpy._core",
        "pyarrow.lib",
        "rich",
        "ssl",
        "asyncio",
        "kvstore.remote.server",
    }
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert store.get(b"k") == b"w"


SHORT = (
    *("get s k", "scan s", "history s k", "stats s", "changes s", "diff s -1h", "feeds tail s f"),
    *("put s k w", "delete s k", "delete-range s --prefix x", "revert s --prefix x --to -1s"),
    *("trim s --prefix x --keep 1", "gc s --keep 0s", "gc s --keep 1d --json", "checkpoint s copy"),
    *("holds list s", "holds drop s h", "feeds list s", "feeds drop s f", "imports list s"),
    *("tasks s", "doctor s", "journal inspect m", "get m k", "put m k w"),
)
"""Commands that touch few rows. Their imports take most of their time."""


@pytest.mark.parametrize("words", SHORT)
def test_a_short_command_imports_no_heavy_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with kvstore.open("s") as store:
        store.put(b"k", b"v")
        store.hold("h")
        store.feed("f", start="now")
    with kvstore.open("m", engine="memory") as store:
        store.put(b"k", b"v")
    for _ in range(3):  # each process that writes leaves records that a collection looks through
        with kvstore.open("s") as store:
            store.put(b"k", b"w")
    modules = modules_after(RUN, *words.split())
    assert f"kvstore.cli.{COMMANDS[words.split()[0]].partition(':')[0]}" in modules
    heavy = {"numpy._core", "pyarrow.lib", "rich", "obstore", "ssl", "asyncio", "cryptography"}
    assert not modules & heavy
    assert not modules & {
        "kvstore.tables",
        "kvstore.tables.joins",
        "kvstore.remote.server",
        "kvstore.remote.client",
    }
    assert not {name for name in modules if name.startswith(("kvstore.bulk", "kvstore.backup"))}


def test_the_list_of_commands_imports_none_of_them() -> None:
    modules = modules_after(RUN, "--help")
    assert not modules & {
        "kvstore.opening",
        "rich",
        "kvstore.bulk",
        "kvstore.backup",
        "pyarrow.lib",
    }


def test_the_summaries_of_commands_are_their_own() -> None:
    commands: Any = typer.main.get_command(app)
    context: Any = commands.make_context("kvstore", [], resilient_parsing=True)
    found = {name: commands.get_command(context, name) for name in commands.list_commands(context)}
    assert {
        name: " ".join(command.get_short_help_str(200).split()) for name, command in found.items()
    } == SUMMARIES


def test_an_interrupt_waits_until_a_deferred_package_is_imported() -> None:
    """numpy cannot be imported again after an import that was broken off."""
    script = """
import os, signal, sys
from kvstore.cli.process import defer_imports

defer_imports()
import numpy as np

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.linalg":
            os.kill(os.getpid(), signal.SIGINT)

assert "numpy._core" not in sys.modules
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
try:
    np.zeros(1)
except KeyboardInterrupt:
    print("interrupted", np.zeros(1).sum(), sys.modules["numpy"].zeros is np.zeros)
"""
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True)
    assert (done.stdout, done.stderr) == (b"interrupted 0.0 True\n", b"")


def test_an_error_behind_an_interrupt_is_an_interrupt() -> None:
    """Packages swallow an interrupt of their import, and fail when they are used."""
    script = """
import os, signal
from kvstore.cli.process import interruptible, watch

def run(interrupt):
    try:
        if interrupt:
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    raise AttributeError("half imported")

signal.signal(signal.SIGINT, signal.default_int_handler)
watch()
for interrupt in (False, True):
    try:
        interruptible(run)(interrupt)
    except BaseException as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True)
    assert (done.stdout, done.stderr) == (b"AttributeError\nKeyboardInterrupt\n", b"")


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
    of_clients = {"AsyncClient", "Client", "connect", "connect_async"}  # found, and not listed
    assert set(declared) - of_clients | {"__version__"} == set(kvstore.__all__)
    for name, module in declared.items():
        assert module is not None
        found = __import__(module, fromlist=[name])
        assert getattr(kvstore, name) is getattr(found, name), name
    assert set(kvstore.__all__) <= set(dir(kvstore))
    assert kvstore.opening.engine_at is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvstore.nothing  # noqa: B018
