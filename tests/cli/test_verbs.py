"""Commands that do to a store the work of the API: spans, imports, feeds, differences, times."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import kvstore
from kvstore import ManualClock, bulk
from kvstore.cli.main import app
from kvstore.cli.options import names_of
from kvstore.cli.times import in_words
from tests.harness.seeds import seeded

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def run(*words: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def path(tmp_path: Path, each_engine: None) -> Path:
    with kvstore.open(tmp_path / "s", clock=kvstore.ManualClock(10)) as store:
        for key in ("a1", "a2", "b1"):
            store.put(key.encode(), b"1")
        store.put(b"a1", b"2")
    return tmp_path / "s"


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def keys(path: Path) -> list[bytes]:
    with kvstore.open_read_only(path) as store:
        return list(store.keys())


# -- spans ------------------------------------------------------------------------------------


def test_a_span_is_deleted_and_reverted(run: Run, path: Path) -> None:
    with kvstore.open_read_only(path) as store:
        before = store.upper - 1
    deleted = run("delete-range", path, "--prefix", "a").stdout.strip()
    assert keys(path) == [b"b1"]
    assert run("delete-range", path, "--start", "a", "--end", "b").stdout == ""
    assert lines(run("delete-range", path, "--prefix", "a", "--json")) == [{"timestamp": None}]
    reverted = run("revert", path, "--prefix", "a", "--to", f"{before:d}").stdout.strip()
    assert reverted > deleted
    assert keys(path) == [b"a1", b"a2", b"b1"]
    assert run("revert", path, "--prefix", "a", "--to", f"{before:d}").stdout == ""


def test_all_but_the_last_keys_of_each_prefix_are_deleted(run: Run, path: Path) -> None:
    assert run("trim", path, "--prefix", "b", "--keep", "1").stdout == ""
    run("trim", path, "--prefix", "a", "--prefix", "b", "--keep", "1")
    assert keys(path) == [b"a2", b"b1"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("delete-range",), "pass --prefix, or --start and --end"),
        (("revert", "--to", "now"), "pass --prefix, or --start and --end"),
        (("revert", "--prefix", "a"), "pass one of the two"),
        (("revert", "12", "--to", "now"), "pass one of the two"),
        (("revert", "12", "--prefix", "a"), "pass no span with it"),
        (("revert", "xyz"), "`kvstore imports list`"),
        (("imports", "revert", "abc"), "or the decimal id of the job"),
        (("imports", "show", "a" * 15), "pass the 16 hex digits"),
        (("diff", "12", "11"), "pass the earlier time first"),
        (("changes", "--follow", "--limit", "1"), "no --limit"),
        (("changes", "--since", "2026-02-31"), "--since 2026-02-31 is no time: day is out of"),
        (("changes", "--since", ""), "--since '' is no time; write ISO-8601"),
        (("revert", "--prefix", "a", "--to", ""), "--to '' is no time; write ISO-8601"),
        (("feeds", "tail", "none"), "`kvstore feeds list`"),
    ],
)
def test_a_call_that_is_incomplete_is_refused_in_words_of_the_shell(
    run: Run, path: Path, words: tuple[str, ...], told: str
) -> None:
    at = 2 if words[0] in ("feeds", "imports", "holds") else 1
    refused = run(*words[:at], path, *words[at:], code=2)
    assert told in refused.stderr
    assert keys(path) == [b"a1", b"a2", b"b1"]


def test_a_span_is_deleted_beside_the_process_that_has_the_store_open(
    run: Run, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "s", control=True) as store:
        store.put_many([(b"a1", b"1"), (b"b1", b"1")])
        run("delete-range", tmp_path / "s", "--prefix", "a")
        assert list(store.keys()) == [b"b1"]
        run("revert", tmp_path / "s", "--prefix", "a", "--to", "-0s")
        assert list(store.keys()) == [b"b1"]
        store.feed("audit", start=0).close()
        assert lines(run("feeds", "list", tmp_path / "s", "--json"))[0]["name"] == "audit"
        run("feeds", "drop", tmp_path / "s", "audit")
        assert store.holds.all() == []


def test_readers_tell_of_keys_that_have_expired_and_are_still_there(
    run: Run, tmp_path: Path
) -> None:
    clock = ManualClock(time.time_ns() - 3600 * 10**9)
    with kvstore.open(tmp_path / "s", clock=clock) as store:
        due = timedelta(minutes=1)
        store.put_many([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")], expires=due)
        store.put(b"c", b"stays")
    for words in (("scan",), ("count",), ("get", "a")):
        shown = run(words[0], tmp_path / "s", *words[1:])
        assert "2 keys have expired and are still there" in " ".join(shown.stderr.split())
    run("put", tmp_path / "s", "d", "1")
    shown = run("scan", tmp_path / "s", "--keys-only")
    assert (shown.stdout.split(), shown.stderr) == (["c", "d"], "")


# -- imports and feeds ------------------------------------------------------------------------


def test_imports_are_listed_and_reverted(run: Run, path: Path, tmp_path: Path) -> None:
    ids = []
    with kvstore.open(path) as store:
        for number in range(3):
            made = bulk.Import.create(tmp_path / f"staged{number}")
            with made.writer() as writer:
                writer.put(b"i%d" % number, b"v")
            made.seal()
            bulk.ingest(store, made.staging)
            ids.append(f"{made.import_id:016x}")
    found = lines(run("imports", "list", path, "--json"))
    assert [(each["import_id"], each["state"], each["rows"]) for each in found] == [
        (each, "added", 1) for each in reversed(ids)
    ]
    few = run("imports", "list", path, "--limit", "1")
    assert ids[2] in few.stdout
    assert ids[0] not in few.stdout
    assert "1 of 3; pass --limit for more" in few.stderr
    first = run("imports", "revert", path, ids[0], "--json").stdout
    assert run("imports", "revert", path, ids[0], "--json").stdout == first
    assert b"i0" not in keys(path)
    assert {"reverted", "added"} == {
        each["state"] for each in lines(run("imports", "list", path, "--json"))
    }


def test_an_id_is_decimal_unless_it_has_16_digits_or_0x(
    run: Run, path: Path, tmp_path: Path
) -> None:
    with kvstore.open(path) as store:
        for number in (10, 16, 20261124, 0x1234567890123456):
            made = bulk.Import.create(tmp_path / f"staged{number}", import_id=number)
            with made.writer() as writer:
                writer.put(b"i%d" % number, b"v")
            made.seal()
            bulk.ingest(store, made.staging)
    found = {
        each["id"]: each["import_id"] for each in lines(run("imports", "list", path, "--json"))
    }
    assert found["20261124"] == "0000000001352904"
    for text, number in (
        ("10", 10),
        ("0x10", 16),
        ("0000000000000010", 16),
        ("020261124", 20261124),
        ("1234567890123456", 0x1234567890123456),
        (str(0x1234567890123456), 0x1234567890123456),
    ):
        shown = lines(run("imports", "show", path, text, "--json"))[0]
        assert (shown["id"], shown["import_id"]) == (str(number), f"{number:016x}")
    run("imports", "revert", path, "10")
    assert {
        each["id"] for each in lines(run("imports", "list", path, "--json")) if each["reverted"]
    } == {"10"}
    assert b"i10" not in keys(path)
    assert b"i16" in keys(path)


def test_feeds_are_listed_shown_and_dropped(run: Run, path: Path) -> None:
    with kvstore.open(path) as store:
        with store.feed("audit", start=0) as feed:
            batch = next(iter(feed))
            feed.ack(batch.position)
        store.put(b"c1", b"new")
        store.feed("idle", start="now").close()
    audit, idle = lines(run("feeds", "list", path, "--json"))
    assert (audit["name"], audit["workers"], audit["lost"]) == ("audit", 1, False)
    assert audit["lag_seconds"] > 0
    assert idle["name"] == "idle"
    assert "audit" in run("feeds", "list", path).stdout
    for _ in range(2):  # the feed does not move
        assert [each["key"] for each in lines(run("feeds", "tail", path, "audit"))] == ["c1"]
    assert lines(run("feeds", "tail", path, "idle")) == []
    (dropped,) = lines(run("feeds", "drop", path, "audit", "--json"))
    assert (dropped["name"], dropped["workers"]) == ("audit", 1)
    assert [each["name"] for each in lines(run("feeds", "list", path, "--json"))] == ["idle"]
    assert "no feed" in run("feeds", "drop", path, "audit", code=2).stderr


def test_names_are_completed(path: Path) -> None:
    class Context:
        params: dict[str, Any] = {"store": path}  # noqa: RUF012

    with kvstore.open(path) as store:
        for name in ("one", "two", "onto"):
            store.hold(name)
    complete = names_of(lambda store: [each.name for each in store.holds.all()])
    assert complete(Context, "on") == ["one", "onto"]
    Context.params = {"store": path / "missing"}
    assert complete(Context, "on") == []


# -- changes ----------------------------------------------------------------------------------


def test_changes_end_at_a_time_and_at_a_limit(run: Run, path: Path) -> None:
    every = lines(run("changes", path))
    assert len(every) == 4
    upto = every[1]["timestamp"]
    assert lines(run("changes", path, "--upto", upto)) == every[:2]
    assert lines(run("changes", path, "--since", every[0]["timestamp"], "--upto", upto)) == [
        every[1]
    ]
    assert lines(run("changes", path, "--limit", "3")) == every[:3]
    run("changes", path, "--since", upto, "--upto", every[0]["timestamp"], code=2)


def test_a_difference_names_old_and_new(run: Run, path: Path) -> None:
    with kvstore.open(path) as store:
        before = store.upper - 1
        store.put(b"c1", b"3")
        store.delete(b"b1")
        store.put(b"a1", b"4")
        store.put(b"a2", b"9")
        store.put(b"a2", b"1")  # as it was
    assert run("diff", path, f"{before:d}").stdout == "~ a1\t2\t4\n- b1\t1\n+ c1\t3\n"
    assert lines(run("diff", path, f"{before:d}", "now", "--prefix", "b", "--json")) == [
        {"key": "b1", "old": "1", "new": None}
    ]
    few = run("diff", path, f"{before:d}", "--keys-only", "--limit", "2", "-e", "hex")
    assert few.stdout == "~ 6131\n- 6231\n"
    assert run("diff", path, f"{before:d}", f"{before:d}").stdout == ""


def test_a_time_that_is_counted_back_is_no_option(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    assert run("diff", tmp_path / "s", "-1h").stdout == "+ a\t1\n"
    assert run("diff", tmp_path / "s", "-1h", "-30m", "--limit", "9").stdout == ""
    assert "No such option: --wrong" in run("diff", tmp_path / "s", "-1h", "--wrong", code=2).stderr
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    assert "a" in run("backup", "diff", tmp_path / "b", "-1h").stdout


def test_differences_are_those_between_two_states(run: Run, tmp_path: Path) -> None:
    """Random puts, deletes and range deletes against two dictionaries."""
    draw = seeded("DIFF_SEED")
    with kvstore.open(tmp_path / "s", engine="memory") as store:

        def act(times: int) -> None:
            for _ in range(times):
                first, second = sorted(draw.sample(range(60), 2))
                kind = draw.choice(["put", "put", "put", "delete", "range"])
                if kind == "put":
                    store.put(b"%02d" % first, b"%d" % draw.randrange(3))
                elif kind == "delete":
                    store.delete(b"%02d" % first)
                else:
                    store.delete_range(b"%02d" % first, b"%02d" % min(second, first + 9))

        act(60)
        before, was = store.upper - 1, dict(store.scan())
        act(60)
        now = dict(store.scan())
    found = lines(run("diff", tmp_path / "s", f"{before:d}", "--json"))
    expected = [
        {"key": key.decode(), "old": text(was.get(key)), "new": text(now.get(key))}
        for key in sorted({*was, *now})
        if was.get(key) != now.get(key)
    ]
    assert found == expected
    assert expected


def text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode()


# -- words and notations ----------------------------------------------------------------------


def test_durations_are_told_in_words() -> None:
    assert [in_words(each * 10**9) for each in (-1, 59, 60, 7200, 200_000)] == [
        "0 s",
        "59 s",
        "1 min",
        "2 h",
        "2 d",
    ]


def test_keys_and_values_have_notations_of_their_own(run: Run, path: Path) -> None:
    run("put", path, "6b", "v\tw", "--key-encoding", "hex")
    assert run("get", path, "k").stdout == "v\tw\n"
    assert run("get", path, "k", "--value-encoding", "hex").stdout == "760977\n"
    (found,) = lines(run("scan", path, "-p", "k", "--value-encoding", "base64", "--json"))
    assert found == {"key": "k", "value": "dgl3"}
    (found,) = lines(run("history", path, "6b", "--key-encoding", "hex", "--json"))
    assert found["value"] == "v\tw"


def test_tables_of_text_have_no_control_characters(run: Run, path: Path) -> None:
    hostile = b"\x1b[2Jv\nx\t\x7f\xc2\x9b\xe2\x80\xae"
    with kvstore.open(path) as store:
        store.put(b"k\x1b[31m", hostile)
    for words in (("scan", path, "-p", "k"), ("history", path, "k\x1b[31m"), ("diff", path, "1")):
        shown = run(*words).stdout
        assert "\x1b" not in shown
        assert "\\x1b[2Jv\\x0ax\\x09\\x7f\\x9b\\u202e" in shown
    assert "s\\x1b[31m is not usable" in run("get", path.with_name("s\x1b[31m"), "k", code=2).stderr


# -- doctor and help --------------------------------------------------------------------------


def test_doctor_looks_at_the_environment_and_at_a_store(run: Run, path: Path) -> None:
    found = {each["subject"]: each for each in lines(run("doctor", path, "--json"))}
    assert {"python", "rocksdict", "bulk", "backup", "clock", "disk", "size"} <= set(found)
    assert {each["verdict"] for each in found.values()} <= {"ok", "note"}
    assert "python" in run("doctor").stdout


def test_doctor_finds_lost_holds_missing_stores_and_packages_that_hide_ours(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvstore.open(path) as store:
        store.hold("mine", at=12, max_age=timedelta(0))
        store.gc(keep=timedelta(0))
    (lost,) = [each for each in lines(run("doctor", path, "--json", code=1)) if "lost" in str(each)]
    assert (lost["verdict"], lost["subject"]) == ("bad", "holds")
    missing = run("doctor", tmp_path / "none", "--json", code=1)
    assert lines(missing)[-1]["fact"].startswith("no store is at")
    (tmp_path / "other" / "backup").mkdir(parents=True)
    (tmp_path / "other" / "backup" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    monkeypatch.delitem(sys.modules, "backup", raising=False)
    hidden = [each for each in lines(run("doctor", "--json", code=1)) if each["verdict"] == "bad"]
    assert "another package" in hidden[0]["fact"]


def test_help_prints_the_help_of_each_command(run: Run) -> None:
    assert "kvstore holds drop flights.db" in run("help", "holds", "drop").stdout
    assert "Exit codes" in run("help").stdout
    assert "`kvstore help` lists all" in run("help", "nothing", code=2).stderr
    assert "`kvstore help` lists all" in run("help", "get", "deeper", code=2).stderr
