"""`kvstore backup`: collections, restores and standbys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvstore
import kvstore.backup.cli
from kvstore.cli.main import app
from kvstore.cli.output import size_text
from tests.cli.installed import ROOT, Run, told


def test_backups_are_run_listed_verified_and_restored(run: Run, tmp_path: Path) -> None:
    store, place = tmp_path / "s", tmp_path / "b"
    first = run("put", store, "a", "1", "--create").stdout.strip()
    info = told(run("backup", "run", store, place, "--json"))
    assert (info["rows"], info["lower"]) == (1, "1970-01-01T00:00:00.000000000Z")
    run("put", store, "a", "2")
    assert told(run("backup", "run", store, place, "--json", "--token", "t"))["rows"] == 1
    again = told(run("backup", "run", store, place, "--json", "--token", "t"))
    listed = [
        json.loads(line)
        for line in run("backup", "list", place, "--json").stdout.split("\n")
        if line
    ]
    assert len(listed) == 2
    newest = run("backup", "list", place, "--json", "--limit", "1")
    assert told(newest) == listed[1]
    assert "the newest 1 of 2; pass --limit" in newest.stderr
    assert listed[1]["upper"] == again["upper"]
    shown = told(run("backup", "show", place, "--json"))
    assert (shown["batches"], shown["spans"]) == (2, [{"start": "a", "end": "a\0"}])
    assert "spans" in run("backup", "show", place).stdout
    assert "[61, 6100)" in run("backup", "show", place, "-e", "hex").stdout
    assert "rows" in run("backup", "list", place).stdout
    assert told(run("backup", "verify", place, "--json"))["ok"] is True
    run("backup", "verify", place, "--depth", "contents", "--store", store)
    run("backup", "restore", place, tmp_path / "then", "--as-of", first)
    assert run("get", tmp_path / "then", "a").stdout == "1\n"
    merged = told(run("backup", "compact", place, "--json"))
    assert (merged["rows"], merged["upper"]) == (2, again["upper"])
    run("backup", "restore", place, tmp_path / "now", "--state-only")
    assert run("history", tmp_path / "now", "a").stdout.count("\n") == 1
    run("backup", "restore", place, tmp_path / "now", code=2)
    run("delete", store, "a")
    run("backup", "restore", place, store, "--into", "--prefix", "a")
    assert run("get", store, "a").stdout == "2\n"
    run("backup", "expire", place, "--keep", "4w")
    run("backup", "expire", place, code=2)
    run("backup", "restore", place, tmp_path / "x", "--as-of", "2100-01-01T00:00Z", code=4)


def completed(line: str) -> list[str]:
    """The words that a shell proposes for the last word of a command."""
    words = f"kvstore {line}"
    told = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    asked = {"_KVSTORE_COMPLETE": "complete_bash", **told}
    return CliRunner().invoke(app, [], env=asked, prog_name="kvstore").stdout.split()


def test_labels_and_fleets_on_the_command_line(run: Run, tmp_path: Path) -> None:
    store, place = tmp_path / "s.db", tmp_path / "b"
    run("put", store, "a", "1", "--create")
    assert told(run("backup", "run", store, place, "--json", "--label", "first"))["labels"]
    run("put", store, "a", "2")
    run("backup", "run", store, place)
    assert run("backup", "get", place, "a", "--as-of", "first").stdout == "1\n"
    run("backup", "restore", place, tmp_path / "then", "--as-of", "first")
    assert run("get", tmp_path / "then", "a").stdout == "1\n"
    assert "need --keep-within" in run("backup", "expire", place, "--daily", "2", code=2).stderr
    run("backup", "expire", place, "--keep-within", "0s", "--daily", "2")
    shown = told(run("backup", "show", place, "--json"))
    assert list(shown["labels"]) == ["first"]
    assert completed(f"backup scan {place} --as-of fi") == ["first"]
    assert completed(f"backup restore {place} {tmp_path / 'x'} --as-of fi") == ["first"]
    assert completed(f"backup scan {place} --as-of x") == []
    assert completed(f"backup scan {place}-not --as-of fi") == []
    assert completed("backup scan --as-of fi") == []
    assert shown["labels"]["first"] in shown["kept"]
    assert "first" in run("backup", "list", place).stdout
    instant = told(run("backup", "label", place, "first", "--drop", "--json"))["timestamp"]
    assert instant == shown["labels"]["first"]
    run("backup", "get", place, "a", "--as-of", "first", code=2)
    (tmp_path / "fleet").mkdir()
    config = tmp_path / "backups.toml"
    tables = [
        f"[stores.{name}]\npath = '{name}.db'\ncollection = 'fleet/{name}'" for name in ("s", "no")
    ]
    config.write_text("\n".join(tables))
    if sys.version_info >= (3, 11):
        found = run("backup", "run", "--config", config, "--json", code=1)
        rows = {line["store"]: line for line in map(json.loads, found.stdout.split("\n")[:-1])}
        assert (rows["s"]["ok"], rows["no"]["ok"]) == (True, False)
        assert "no" in found.stderr
    run("backup", "run", "--config", config, store, code=2)
    run("backup", "run", code=2)


def test_a_drill_exits_with_0_on_a_proof_only(run: Run, tmp_path: Path) -> None:
    store, place = tmp_path / "s", tmp_path / "b"
    with kvstore.open(store) as opened:
        first = str(opened.put(b"a", b"1"))
        opened.put(b"a", bytes(1_000_000))
    run("backup", "drill", place, code=2)
    run("backup", "run", store, place)
    assert "never" in run("backup", "show", place).stdout
    assert told(run("backup", "show", place, "--json"))["proof_age_seconds"] is None
    report = told(run("backup", "drill", place, "--at", first, "--json"))
    assert (report["ok"], report["at"], report["rows"]) == (True, first, 1)
    contents = ("--depth", "contents", "--store", store, "--scratch", tmp_path / "scratch")
    assert "ok" in run("backup", "drill", place, *contents).stdout
    run("backup", "drill", place, "--depth", "contents", code=2)
    run("backup", "drill", place, "--at", "2100-01-01T00:00Z", code=4)
    (proof,) = told(run("backup", "show", place, "--json"))["proofs"]
    assert told(run("backup", "list", place, "--json"))["proven_at"] == proof["proven_at"]
    (part,) = place.rglob("*.parquet")
    part.unlink()
    failed = run("backup", "drill", place, "--json", code=1)
    assert told(failed)["ok"] is False
    shown = run("backup", "show", place).stdout
    assert "the newest drill failed" in shown
    as_json = run("backup", "show", place, "--json").stdout
    for text in (failed.stdout, failed.stderr, shown, as_json):
        assert "`kvstore backup run --full`" in text
    assert told(run("backup", "show", place, "--json"))["proofs"][0]["proven"] == proof["proven"]


def test_sizes_are_for_people_and_exact_as_json(run: Run, tmp_path: Path) -> None:
    store, place = tmp_path / "s", tmp_path / "b"
    with kvstore.open(store) as opened:
        opened.put(b"a", os.urandom(1_230_000))
    assert "1.2 MB" in run("backup", "run", store, place).stdout
    exact = told(run("backup", "show", place, "--json"))["bytes"]
    assert 1_230_000 < exact < 1_240_000
    for command in ("show", "list", "verify"):
        assert "1.2 MB" in run("backup", command, place).stdout
        assert told(run("backup", command, place, "--json"))["bytes"] == exact
    assert [size_text(size) for size in (0, 999, 1_000, 2_340_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.3 GB",
    ]


def test_a_collection_is_read_without_a_restore(run: Run, tmp_path: Path) -> None:
    store, place = tmp_path / "s", tmp_path / "b"
    first = run("put", store, "a", "1", "--create").stdout.strip()
    run("put", store, "b", "2")
    run("put", store, "a", "3")
    run("delete", store, "b")
    run("backup", "run", store, place)
    cache = ("--cache", tmp_path / "cache")
    assert run("backup", "get", place, "a", *cache).stdout == "3\n"
    assert run("backup", "get", place, "a", "--as-of", first, *cache).stdout == "1\n"
    assert told(run("backup", "get", place, "a", "--json")) == {"key": "a", "value": "3"}
    run("backup", "get", place, "b", code=1)
    assert run("backup", "scan", place).stdout == "a\t3\n"
    assert run("backup", "scan", place, "--as-of", first, "--reverse").stdout == "a\t1\n"
    assert run("backup", "history", place, "a").stdout == run("history", store, "a").stdout
    run("backup", "history", place, "c", code=1)
    changed = [
        line.split("\t")[1:] for line in run("backup", "diff", place, first).stdout.splitlines()
    ]
    assert changed == [["put", "a", "3"], ["delete", "b"]]
    found = run("backup", "find", place, "b", "--json").stdout.splitlines()
    assert [json.loads(line)["op"] for line in found] == ["put", "delete"]
    run("backup", "get", tmp_path / "nothing", "a", code=2)
    run("backup", "scan", place, "--as-of", "2100-01-01T00:00Z", code=4)


def test_find_tells_the_changes_of_every_chain_once(run: Run, tmp_path: Path) -> None:
    store, place = tmp_path / "s", tmp_path / "b"
    for number in range(2):
        run("put", store, "a", str(number), "--create")
    run("backup", "run", store, place)
    with kvstore.open(store) as opened:
        (hold,) = opened.holds.all()
        opened.drop_hold(hold.name)
        opened.gc(before=opened.upper - 1)
    for chain in ([], ["b"], ["b", "c"]):
        if chain:
            run("put", store, chain[-1], "1")
        run("backup", "run", store, place, "--full")
        found = run("backup", "find", place, "").stdout.splitlines()
        assert [line.split("\t")[2] for line in found] == ["a", "a", *chain]


def test_find_tells_the_commit_at_which_a_newer_chain_begins(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "b"
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"a", b"1")
        at = store.put(b"a", b"2")
        collection = kvstore.backup.Collection(place)
        collection.backup(store)
        (hold,) = store.holds.all()
        store.drop_hold(hold.name)
        store.gc(before=at)
        store.put(b"a", b"3")
        collection.backup(store, full=True)
        assert store.since == at
    found = run("backup", "find", place, "").stdout.splitlines()
    assert len(found) == 3


def test_changes_of_a_restored_store_are_those_of_its_source(run: Run, tmp_path: Path) -> None:
    store, place, restored = tmp_path / "s", tmp_path / "b", tmp_path / "r"
    with kvstore.open(store) as opened:
        opened.put(b"a", b"1")
        with opened.batch() as batch:
            batch.put(b"b", b"\xff")
            batch.put(b"c", b"3")
        opened.delete_range(b"b", b"c")
        opened.delete(b"a")
    run("backup", "run", store, place)
    run("backup", "restore", place, restored)
    run("put", restored, "d", "4")

    def told_of(path: Path, *options: object) -> list[dict[str, Any]]:
        lines = run("changes", path, *options).stdout.splitlines()
        places = ("changeset", "stream", "end_of_batch")
        return [{k: v for k, v in json.loads(x).items() if k not in places} for x in lines]

    source = told_of(store)
    assert told_of(restored)[:-1] == source
    assert told_of(restored)[-1]["key"] == "d"
    assert told_of(restored, "--since", source[0]["timestamp"])[:-1] == source[1:]
    assert [change["key"] for change in told_of(restored, "--prefix", "c")] == ["c"]
    assert "value" not in told_of(restored, "--images", "none")[0]
    run("changes", restored, "--images", "pre", code=4)  # needs the index


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show"],
        ["verify"],
        ["verify", "--depth", "files"],
        ["compact"],
        ["expire", "--keep", "1d"],
    ],
)
def test_a_collection_that_is_not_there_is_no_success(
    run: Run, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *options = words
    monkeypatch.setenv("KVSTORE_PASSPHRASE", "secret")
    failed = run("backup", command, tmp_path / "mistyped", *options, code=2)
    assert "holds no backup; check the path" in failed.stderr
    assert list(tmp_path.glob("mistyped*")) == []


def test_a_wait_for_the_storage_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "import kvstore.cli.main, logging\n"
        "logging.getLogger('kvstore.backup').warning('by logging')"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    assert "by logging" not in capfd.readouterr().err


def test_what_an_interrupted_backup_left_is_listed_and_deleted(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    (part,) = tmp_path.glob("b/blob/*/part/*.parquet")
    orphan = part.with_name("00000000000000000001-00000000000000ff.parquet")
    orphan.write_bytes(b"half")
    temporary = part.with_name(".tmp-1")
    temporary.write_bytes(b"less")
    os.utime(temporary, (1, 1))
    found = told(run("backup", "scrub", tmp_path / "b", "--json"))
    assert found == {
        "missing": [],
        "altered": [],
        "orphans": [str(orphan.relative_to(tmp_path / "b" / "blob"))],
        "deleted": [],
    }
    assert orphan.name in run("backup", "scrub", tmp_path / "b", "--delete", "7d").stdout
    assert [path.name for path in part.parent.iterdir()] == [part.name]
    os.truncate(part, 3)
    assert part.name in run("backup", "scrub", tmp_path / "b", code=1).stdout
    part.unlink()
    assert part.name in run("backup", "scrub", tmp_path / "b", code=1).stdout


def test_a_token_that_is_empty_is_refused(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    run("backup", "run", tmp_path / "s", tmp_path / "b", "--token", "", code=2)


def test_a_damaged_collection_is_told_by_exit_code_1(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    (part,) = (tmp_path / "b").rglob("*.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    run("backup", "verify", tmp_path / "b", "--depth", "files")
    assert "checksum" in run("backup", "verify", tmp_path / "b", code=1).stderr
    for_programs = told(run("backup", "verify", tmp_path / "b", "--json", code=1))
    assert not for_programs["ok"]
    assert "checksum" in for_programs["problem"]
    nothing = run("backup", "verify", tmp_path / "misspelt", code=2)
    assert "misspelt holds no backup" in nothing.stderr


def test_encrypted_collections_take_the_passphrase_from_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    monkeypatch.setenv(kvstore.backup.cli.PASSPHRASE, "open sesame")
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    run("backup", "verify", tmp_path / "b")
    monkeypatch.setenv(kvstore.backup.cli.PASSPHRASE, "open barley")
    refused = run("backup", "list", tmp_path / "b", code=2)
    assert "Traceback" not in refused.output
    monkeypatch.delenv(kvstore.backup.cli.PASSPHRASE)
    run("backup", "list", tmp_path / "b", code=2)


def test_a_standby_is_brought_up_from_a_store_or_a_collection_and_promoted(
    run: Run, tmp_path: Path
) -> None:
    store, standby = tmp_path / "s", tmp_path / "standby"
    run("put", store, "a", "1", "--create")
    run("backup", "replicate", store, standby)
    run("put", store, "a", "2")
    run("backup", "run", store, tmp_path / "b")
    told(run("backup", "replicate", tmp_path / "b", standby, "--json"))
    assert run("get", standby, "a").stdout == "2\n"
    assert run("history", standby, "a").stdout == run("history", store, "a").stdout
    run("put", standby, "a", "3", code=2)
    promoted = told(run("backup", "promote", standby, "--json"))
    assert promoted["upper"] <= run("put", standby, "a", "3").stdout
    run("backup", "replicate", store, standby, code=2)


def test_a_store_of_a_service_is_backed_up_continuously_until_a_signal(tmp_path: Path) -> None:
    place = tmp_path / "b"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "kvstore.cli",
        "backup",
        "run",
        str(tmp_path / "s"),
        str(place),
        "--follow",
        "--every=0s",
        "--json",
    ]
    with (
        kvstore.open(tmp_path / "s", control=True) as owner,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
        ) as child,
    ):
        assert child.stdout is not None
        never = threading.Timer(120, child.kill)
        never.start()
        for number in range(2):
            at = owner.put(b"k%d" % number, b"v")
            while kvstore.backup.Collection(place).upper <= at:
                assert json.loads(child.stdout.readline())["upper"]
        child.terminate()
        child.wait()
        never.cancel()
        kvstore.backup.Collection(place).verify("contents", owner)
    assert child.returncode == 0


def deleted_files(pid: int, place: Path) -> list[str]:
    """The files below `place` that a process still has open although they were deleted."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(each))
    return [name for name in found if name.startswith(str(place)) and name.endswith("(deleted)")]


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
@pytest.mark.parametrize("work", ["run", "replicate"])
def test_a_follower_beside_a_service_keeps_no_deleted_file_open(tmp_path: Path, work: str) -> None:
    """It runs for a year, and the service replaces all of its files meanwhile."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kvstore.cli", "backup", work]
    with kvstore.open(tmp_path / "s") as owner:
        owner.put(b"a", b"1")
    with (
        kvstore.open(tmp_path / "s", control=True) as owner,
        subprocess.Popen(
            [*command, tmp_path / "s", tmp_path / "target", "--follow", "--json"],
            env=environment,
            stdout=subprocess.PIPE,
        ) as child,
    ):
        assert child.stdout is not None
        never = threading.Timer(120, child.kill)
        never.start()
        assert json.loads(child.stdout.readline())["upper"]
        before = set((tmp_path / "s").glob("*.sst"))
        assert before
        owner.put(b"a", b"2")
        assert json.loads(child.stdout.readline())["upper"]
        owner.gc(keep=timedelta(0), compact=True)
        assert before - set((tmp_path / "s").glob("*.sst"))
        while deleted_files(child.pid, tmp_path / "s"):
            assert child.poll() is None
        child.terminate()
        child.wait()
        never.cancel()
    assert child.returncode == 0


def test_a_follower_copies_as_backups_come_and_ends_in_order_when_told(
    run: Run, tmp_path: Path
) -> None:
    store, standby, place = (str(tmp_path / name) for name in ("s", "standby", "b"))
    run("put", store, "a", "1", "--create")
    run("backup", "run", store, place)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kvstore.cli", "backup", "replicate"]
    with subprocess.Popen(
        [*command, place, standby, "--follow", "--json"], env=environment, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        never = threading.Timer(60, child.kill)
        never.start()
        first = json.loads(child.stdout.readline())["upper"]
        run("put", store, "a", "2")
        upper = told(run("backup", "run", store, place, "--json"))["upper"]
        moved = json.loads(child.stdout.readline())["upper"]
        child.terminate()
        never.cancel()
        assert child.stdout.read() == b""
    assert first < upper == moved
    assert child.returncode == 0
    with kvstore.open_read_only(standby) as copy:
        assert copy.get(b"a") == b"2"


def test_a_backup_counts_on_a_terminal_and_is_quiet_with_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    monkeypatch.setenv("COLUMNS", "300")
    assert "1 rows" in run("backup", "run", tmp_path / "s", tmp_path / "b").stderr
    (tmp_path / "[").mkdir()
    run("backup", "run", tmp_path / "s", odd := tmp_path / "[" / "x]")  # no markup for the console
    assert "[/x]: 1 of 1 rows" in run("backup", "verify", odd).stderr
    assert run("backup", "run", tmp_path / "s", tmp_path / "c", "--json").stderr == ""
    monkeypatch.delenv("FORCE_COLOR")
    assert run("backup", "run", tmp_path / "s", tmp_path / "d").stderr == ""
