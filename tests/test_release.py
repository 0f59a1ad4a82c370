"""What a release promises beside its code: pages about the engine and about evidence, policies,
workflows, the image."""

from __future__ import annotations

import ast
import inspect
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
import yaml
from typer.testing import CliRunner
from typing_extensions import deprecated

import kvstore
from kvstore import backup, bulk
from kvstore.cli.main import app
from kvstore.engine.rocks import release
from kvstore.errors import CorruptionError, UsageError
from tests.backup.histories import flip_a_bit, parts_of
from tests.harness.wheels import ROOT

DOCS = ROOT / "docs" / "reference"


# -- the engine ---------------------------------------------------------------------------------


def fact(page: str, name: str) -> str:
    """A line of the page's first table."""
    found = re.search(rf"^\| {name} \| (.+) \|$", page, re.MULTILINE)
    assert found is not None, name
    return found[1]


def test_the_page_of_the_engine_tells_what_is_installed() -> None:
    page = (DOCS / "engine.md").read_text()
    assert fact(page, "binding").startswith(f"rocksdict {version('rocksdict')},")
    assert fact(page, "RocksDB inside it") == release()
    newest = int(fact(page, "newest RocksDB known").partition(".")[0])
    majors = newest - int(release().partition(".")[0])
    told = fact(page, "behind")
    if majors >= 2:  # it is time to ask why
        words = {2: "two", 3: "three", 4: "four"}
        assert re.match(rf"{words[majors]} majors: .{{40,}}", told), told
    else:
        assert "majors" not in told


def test_the_page_of_the_engine_names_each_call_of_rocksdict() -> None:
    calls: set[str] = set()
    for path in (ROOT / "kvstore" / "engine").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts: list[str] = []
            at: ast.AST = node
            while isinstance(at, ast.Attribute):
                parts, at = [at.attr, *parts], at.value
            if parts and isinstance(at, ast.Name) and at.id == "rocks":
                calls.add(".".join(parts))
    whole = {call for call in calls if not any(each.startswith(f"{call}.") for each in calls)}
    page = (DOCS / "engine.md").read_text()
    listed = page.partition("## The calls of rocksdict")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([A-Za-z0-9_.]+)`", listed)) - {"kvstore"} == whole


# -- evidence -----------------------------------------------------------------------------------


def judge(kind: str, text: str) -> dict[str, Any]:
    """The file, which its schema allows."""
    schema = json.loads((DOCS / "evidence" / f"{kind}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found: dict[str, Any] = json.loads(text)
    jsonschema.validate(found, schema)
    return found


@pytest.mark.parametrize("kind", ["drill", "doctor"])
def test_the_examples_of_the_documents_fit_their_schemas(kind: str) -> None:
    page = (DOCS / "evidence.md").read_text()
    shown = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (example,) = (text for text in shown if f'"kind": "{kind}"' in text)
    judge(kind, example)


def test_a_drill_leaves_evidence_of_both_outcomes(tmp_path: Path) -> None:
    place = tmp_path / "evidence"
    place.mkdir()
    with kvstore.open(tmp_path / "s") as store:
        for number in range(20):
            store.put(b"%d" % number, b"v")
        collection = backup.Collection(tmp_path / "c")
        collection.backup(store)
        report = collection.drill(depth="contents", store=store, evidence=place)
        (file,) = place.iterdir()
        proof = judge("drill", file.read_text())
        assert proof["outcome"] == "proved"
        assert (proof["rows"], proof["compared"]) == (report.rows, report.compared)
        assert proof["digest"] == report.digest != ""
        assert proof["at"] == str(report.at)
        assert proof["store"] == store.store_id
        with pytest.raises(UsageError, match="is there already"):
            collection.drill(evidence=file)
        flip_a_bit(parts_of(tmp_path / "c")[0])
        with pytest.raises(CorruptionError):
            collection.drill(depth="contents", store=store, evidence=place / "second.json")
    disproof = judge("drill", (place / "second.json").read_text())
    assert disproof["outcome"] == "disproved"
    assert disproof["problem"]
    assert sorted(path.name for path in place.iterdir()) == sorted([file.name, "second.json"])


def test_the_doctor_writes_a_report(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"k", b"v")
        store.table("t", pa.schema([("id", pa.int64())]), key="id")
        store.hold("mine", store.upper - 1)
    run = CliRunner().invoke
    done = run(app, ["doctor", str(tmp_path / "s"), "--report", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    found = judge("doctor", (tmp_path / "report.json").read_text())
    assert found["store"]["holds"][0]["name"] == "mine"
    assert found["store"]["tables"] == {"t": 1}
    assert {each["subject"] for each in found["findings"]} >= {"kvstore", "engine", "disk"}
    again = run(app, ["doctor", "--report", str(tmp_path / "report.json")])
    assert (again.exit_code, "is there already" in again.output) == (2, True)
    none = run(app, ["doctor", str(tmp_path / "none"), "--report", str(tmp_path)])
    assert none.exit_code == 1
    (other,) = tmp_path.glob("doctor-*.json")
    assert judge("doctor", other.read_text())["store"] is None


# -- what is deprecated -------------------------------------------------------------------------

FORM = re.compile(r"since (\d+\.\d+), gone in (\d+\.\d+): .+")


def deprecations() -> dict[str, str]:
    """The public calls that `typing_extensions.deprecated` marks, with their messages."""
    found: dict[str, str] = {}
    for module in (kvstore, bulk, backup):
        for name in module.__all__:
            thing = getattr(module, name)
            named = {f"{module.__name__}.{name}": thing}
            if inspect.isclass(thing):
                named |= {
                    f"{module.__name__}.{name}.{each}": at for each, at in vars(thing).items()
                }
            for where, at in named.items():
                message = getattr(at, "__deprecated__", None)
                if isinstance(message, str):
                    found[where] = message
    return found


def _minor(release: str) -> int:
    return int(release.partition(".")[2])


def faults(marked: dict[str, str], page: str) -> list[str]:
    """The calls whose message has another form, that the page does not name, or that go too
    soon."""
    bad = []
    for where, message in marked.items():
        told = FORM.fullmatch(message)
        if told is None or f"`{where}`" not in page or _minor(told[2]) < _minor(told[1]) + 2:
            bad.append(where)
    return bad


def test_each_deprecation_has_its_form_and_stands_on_the_page() -> None:
    assert faults(deprecations(), (DOCS / "compatibility.md").read_text()) == []


def test_the_judge_of_deprecations_sees_what_is_wrong() -> None:
    @deprecated("since 0.2, gone in 0.4: call get")
    def fetch() -> None: ...

    good = {"kvstore.fetch": fetch.__deprecated__}
    assert faults(good, "| `kvstore.fetch` |") == []
    assert faults(good, "") == ["kvstore.fetch"]
    assert faults({"kvstore.fetch": "since 0.2, gone in 0.3: get"}, "`kvstore.fetch`")
    assert faults({"kvstore.fetch": "use get"}, "`kvstore.fetch`")


# -- workflows and images -----------------------------------------------------------------------


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.stem)
def test_a_workflow_pins_its_actions_and_bounds_its_jobs(path: Path) -> None:
    text = path.read_text()
    whole = yaml.safe_load(text)
    assert whole["permissions"] == {"contents": "read"}
    for name, job in whole["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 350, name
    for used in re.findall(r"uses: (\S+)", text):
        assert used.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), used
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"run: make ([a-z-]+)", text):
        assert target in targets
    for job in whole["jobs"].values():
        chosen = job.get("strategy", {}).get("matrix", {}).get("target", [])
        assert set(chosen) <= targets


def test_the_image_runs_without_rights_and_its_words_are_options() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "1000"
    words = [*json.loads(text.partition("ENTRYPOINT ")[2].splitlines()[0])]
    words += json.loads(text.partition("\nCMD ")[2].splitlines()[0])
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    assert words[:2] == ["kvstore", "serve"]
    for word in words:
        assert not word.startswith("--") or word in shown
