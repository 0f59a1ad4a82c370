"""Every code block of the documents runs, page by page, in the order of the page.

A `python` block runs in the names of the page's blocks before it. A `python` block with a caption
is written to the file of that name. A `console` block is a shell
session: each line that begins with `$ ` must succeed, and print the lines that follow it, in which
`...` stands for any text. A command that ends with ` &` runs until the page ends. Blocks of another
kind (`text`) are not run.
"""

from __future__ import annotations

import doctest
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import kvstore
from tests.conformance.suites import SUITES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not path.name.startswith("_"))
"""The build makes pages whose names begin with an underscore."""

_BLOCK = re.compile(
    r"^```(python|console|\{code-block\} python\n:caption: \S+)\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"`((?:kvstore|bulk|backup|spark_connector|tests|benchmarks)/[\w/.*-]+)`")
_MODULE = re.compile(r"(?<![\w./-])kvstore(?:\.[A-Za-z_]\w*)+")
_NO_MODULES = {
    *("kvstore.pull", "kvstore.slow"),  # loggers
    *("kvstore.commits", "kvstore.as_of", "kvstore.error", "kvstore.position"),  # fields
    "kvstore.pages",  # an entry point group
}
"""Names of other things that look like modules."""

_INCLUDE = re.compile(r"^```\{include\} (\S+)\n(.*?)```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """The kind and text of the code blocks of `page`. An included page is tested by itself."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


IN_CONFORMANCE = {DOCS / suite.page for suite in SUITES if suite.page}
"""Pages that need packages which `make test` does not install: `make conformance` runs them."""
RUN = [
    page
    for page in PAGES
    if blocks(page) and (page not in IN_CONFORMANCE or "KVSTORE_CONFORMANCE" in os.environ)
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to run a page in, with our commands on the path."""
    monkeypatch.chdir(tmp_path)
    scripts = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def by_spark(page: Path) -> bool:
    return "from kvstore.spark" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.spark if by_spark(page) else ()) for page in RUN],
    ids=lambda page: page.relative_to(DOCS).as_posix(),
)
def test_every_block_of_a_page_runs_in_order(
    page: Path, place: Path, request: pytest.FixtureRequest
) -> None:
    if by_spark(page):
        request.getfixturevalue("spark")  # pages use the session of all tests
    names: dict[str, Any] = {}
    with ExitStack() as services:
        for number, (kind, text) in enumerate(blocks(page)):
            if "caption" in kind:
                (place / kind.split()[-1]).write_text(text)
            elif kind == "python":
                exec(compile(text, f"{page.name} block {number}", "exec"), names)
            else:
                run_session(text, services)


@contextmanager
def running(command: str) -> Iterator[None]:
    """A service, and all its processes, until the block ends. It must then end in order."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield
        assert process.poll() is None, f"$ {command} &\nit ended: {process.communicate()[1]}"
        process.terminate()
        _, complaints = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGTERM), f"$ {command} &\n{complaints}"
    finally:
        with suppress(ProcessLookupError):  # none of its processes is left
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_session(text: str, services: ExitStack | None = None) -> None:
    """Run the commands of a console block, and compare their output."""
    for command, expected in session(text):
        if command.endswith(" &"):
            assert services is not None
            services.enter_context(running(command[:-2]))
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,  # a loop that waits for a command would hide the command's failure
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        matches = doctest.OutputChecker().check_output
        assert matches(expected, done.stdout, doctest.ELLIPSIS), f"$ {command}\n{done.stdout}"


def session(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the lines it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def test_the_pages_of_other_environments_have_blocks_for_these() -> None:
    assert all(blocks(page) for page in IN_CONFORMANCE)


def test_pages_have_blocks_to_run() -> None:
    assert {"tutorial.md", "back-up.md", "read-a-backup.md"} <= {page.name for page in RUN}


def test_a_session_that_prints_something_else_fails(place: Path) -> None:
    run_session("$ echo one two\none ...\n$ true\n")
    with pytest.raises(AssertionError, match="echo one"):
        run_session("$ echo one\ntwo\n")
    with pytest.raises(AssertionError, match="false"):
        run_session("$ false\n")


def test_every_page_is_named_by_a_list_of_pages() -> None:
    listed = {DOCS / "index.md"}
    for page in PAGES:
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert set(PAGES) == listed


def test_every_link_between_documents_leads_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("*.md"), ROOT / "spark_connector" / "README.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_each_page_of_design_says_what_holds_how_and_what_was_rejected() -> None:
    pages = sorted((DOCS / "explanation" / "design").glob("*.md"))
    assert len(pages) == 8
    for page in pages:
        headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
        assert headings == [
            "What holds",
            "How it works",
            "Chosen and rejected",
            "Sources of the figures",
        ], page.name
        assert "*Rejected:*" in page.read_text()


def test_each_module_that_a_document_names_exists() -> None:
    named = {
        (page.relative_to(ROOT).as_posix(), name)
        for page in [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]
        for name in _MODULE.findall(page.read_text())
    }
    assert len(named) > 100
    assert [each for each in sorted(named) if not is_there(each[1])] == []


def test_a_name_that_leads_nowhere_is_found() -> None:
    assert _MODULE.findall("see `kvstore.errors.UsageError` and x/kvstore.py, kvstore.replay") == [
        "kvstore.errors.UsageError",
        "kvstore.replay",
    ]
    assert is_there("kvstore.errors.UsageError")
    assert is_there("kvstore.Store.get")
    assert not is_there("kvstore.replay")
    assert is_there("kvstore.adapters.zarr.ZarrStore")
    assert not is_there("kvstore.adapters.zarr.Absent")
    assert not is_there("kvstore.adapters.absent")
    assert is_there("kvstore.feast.OnlineStore")
    assert not is_there("kvstore.feast.Absent")


def is_there(dotted: str) -> bool:
    """Whether a dotted name leads from the package to a module, a class or a method."""
    if dotted in _NO_MODULES:
        return True
    first, *rest = dotted.split(".")
    found: Any = importlib.import_module(first)
    path = first
    for name in rest:
        path = f"{path}.{name}"
        try:
            found = getattr(found, name)
        except (AttributeError, ModuleNotFoundError):
            try:
                found = importlib.import_module(path)
            except ImportError:
                return is_written(dotted)
    return True


def is_written(dotted: str) -> bool:
    """Whether a name is that of an adapter, or stands in it. Its foreign package may be missing."""
    _, package, *rest = dotted.split(".")
    place = ROOT / "kvstore" / package
    if package == "adapters":
        sources, name = [place / f"{rest[0]}.py"], ".".join(rest[1:])
    else:
        sources, name = [*place.glob("*.py")], ".".join(rest)
    text = "\n".join(source.read_text() for source in sources if source.exists())
    return bool(text) and (not name or re.search(rf"^(class|def) {name}\b", text, re.M) is not None)


def test_each_file_that_a_document_names_exists() -> None:
    missing = [
        (page.relative_to(ROOT).as_posix(), path)
        for page in [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]
        for path in _FILE.findall(page.read_text())
        if not list(ROOT.glob(path))
    ]
    assert missing == []


def test_an_included_page_exists() -> None:
    for page in PAGES:
        for target, _ in _INCLUDE.findall(page.read_text()):
            if not Path(target).name.startswith("_"):
                assert (page.parent / target).exists()


def test_each_figure_of_stats_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "metrics.md").read_text()
    with kvstore.open(None, engine="memory") as store:
        for name in store.stats():
            family = re.sub(r"^[a-z]+_(memtable_bytes|files|entries)$", r"..._\1", name)
            assert f"`{family}`" in text, name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/reference/guarantees.md"])
def test_each_path_that_a_map_names_exists(page: str) -> None:
    named = re.findall(r"`((?:tests|kvstore|docs)/[^`]+)`", (ROOT / page).read_text())
    assert len(named) > 10
    assert [path for path in named if not list(ROOT.glob(path))] == []


def test_each_call_of_a_store_that_documents_name_exists() -> None:
    with kvstore.open(None, engine="memory") as store:
        for page in [*PAGES, *ROOT.glob("*.md"), ROOT / "spark_connector" / "README.md"]:
            for name, part in re.findall(r"`store\.(?!py)(\w+)(?:\.(\w+))?", page.read_text()):
                assert hasattr(store, name), f"{page.name}: store.{name}"
                found = getattr(store, name)
                assert not part or hasattr(found, part), f"{page.name}: store.{name}.{part}"
