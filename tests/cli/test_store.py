"""The commands on real stores, through typer's runner: their output and their exit codes."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import kvstore
from kvstore.cli import changes
from kvstore.cli.main import EXIT_CODES, app, exit_code
from kvstore.errors import KVStoreError
from kvstore.storage.journal import Journal
from tests.harness.parts import parts_of

pytestmark = pytest.mark.usefixtures("each_engine")

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def run(*words: object, code: int = 0, stdin: bytes | None = None) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a past."""
    with kvstore.open(tmp_path / "s", clock=kvstore.ManualClock(10)) as store:
        store.put(b"a", b"1")
        store.put(b"a", b"2")
        store.put(b"b", b"\x00\xff")
        store.put(b"c", b"gone")
        store.delete(b"c")
        store.put("schlüssel".encode(), b"wert")
    return tmp_path / "s"


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


# -- reading ----------------------------------------------------------------------------------


def test_get_prints_the_value_as_it_is(run: Run, path: Path) -> None:
    assert run("get", path, "a").stdout == "2\n"
    assert run("get", path, "a", "-n").stdout == "2"
    assert run("get", path, "b", "-n").stdout_bytes == b"\x00\xff"
    assert run("get", path, "b", "--json").stdout == '{"key": "b", "value": {"base64": "AP8="}}\n'
    assert run("get", path, "62", "-e", "hex").stdout == "00ff\n"
    assert run("get", path, "Yg==", "-e", "base64", "--json").stdout == (
        '{"key": "Yg==", "value": "AP8="}\n'
    )


def test_keys_that_are_no_text_are_told_in_json_without_loss(run: Run, path: Path) -> None:
    key = b"k\xff"
    with kvstore.open(path) as store:
        store.put(key, b"1")
    typed = key.decode("utf-8", "surrogateescape")
    (found,) = lines(run("get", path, typed, "--json"))
    assert found == {"key": {"base64": "a/8="}, "value": "1"}
    (found,) = lines(run("get", path, "6B FF", "-e", "hex", "--json"))
    assert found == {"key": "6bff", "value": "31"}


def test_a_wrong_call_names_the_option_or_the_command_that_helps(run: Run, path: Path) -> None:
    assert "pass --create" in run("put", path / "new", "k", "v", code=2).stderr
    assert "either --keep or --before" in run("gc", path, code=2).stderr
    assert "`kvstore holds list`" in run("holds", "drop", path, "nobody", code=2).stderr


def test_a_refusal_names_options_and_no_arguments_of_python(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("key,value\na,1\n")
    (tmp_path / "events.csv").write_text("key,value,ts\na,1,5\na,2,5\n")
    store, pushes, backups = tmp_path / "s", tmp_path / "p", tmp_path / "b"
    run("put", store, "a", "1", "--create")
    run("backup", "run", store, backups)
    for words, remedy in (
        (
            ("import", store, tmp_path / "f.csv", "--on-conflict", "error"),
            "--on-conflict overwrite",
        ),
        (("seed", tmp_path / "n", tmp_path / "events.csv"), "--duplicates last keeps the later"),
        (
            ("push", "make", pushes, tmp_path / "f.csv", "--mode", "replace"),
            "pass --mode replace and",
        ),
        (("push", "make", pushes, tmp_path / "f.csv", "--keep-newer"), "--built-at is the time"),
        (
            ("imports", "revert", store, "0xab"),
            "no import 00000000000000ab was added here; `kvstore",
        ),
        (
            ("holds", "drop", store, "h"),
            "no hold 'h'; `kvstore holds list` names all holds",
        ),
        (("checkpoint", store, tmp_path / "no" / "copy"), "there is no directory"),
        (("get", store, "a", "--as-of", "1700000000"), "--as-of 1700000000 is 1970-01-01"),
        (("follow", store, "--poll", "nan"), "--poll nan; pass seconds"),
        (("table", "show", store, "t"), "there are no tables yet"),
        (("backup", "verify", backups, "--depth", "contents"), "and has none; pass --store"),
        (("backup", "drill", backups, "--depth", "contents"), "and has none; pass --store"),
        (("backup", "drill", backups, "--store", store), "--depth open compares with no store"),
        (("backup", "verify", backups, "--store", store), "pass --depth contents"),
        (("backup", "run", "--config", tmp_path / "no.toml"), "no.toml; check the path"),
        (("backup", "promote", store), "`kvstore backup replicate` makes one"),
        (("backup", "show", store), "a directory of other files; check the path"),
        (("backup", "label", backups, "x", "--drop"), "has no label 'x'; it has no labels"),
        (
            ("put", store, "a", "1", "--expires", "soon"),
            '--expires soon is no time; write "+1h"',
        ),
        (("import", store, backups), "no import was staged there, or it was not sealed"),
        (("expire-stagings", backups), "is no URL; pass the URL above the stagings"),
        (("journal", "salvage", store, tmp_path / "n", "--content", "x"), "holds no journal"),
    ):
        told = run(*words, code=2).stderr
        assert remedy in told
        assert "=" not in told
        assert "store." not in told


def test_an_age_beyond_all_time_is_refused(run: Run, path: Path) -> None:
    run("gc", path, "--keep", "99999999999d", code=2)
    run("gc", path, "--keep", "999999d")


def test_get_as_of_a_time_and_of_what_is_not_there(run: Run, path: Path) -> None:
    assert run("get", path, "a", "--as-of", 10).stdout == "1\n"
    assert run("get", path, "a", "--as-of", "1970-01-01T00:00:00.000000010Z").stdout == "1\n"
    missing = run("get", path, "nothing", code=1)
    assert missing.stdout == ""
    assert "nothing" in missing.stderr
    run("get", path, "c", code=1)
    assert run("get", path, "c", "--as-of", 13).stdout == "gone\n"
    ahead = run("get", path, "a", "--as-of", "2100-01-01T00:00Z", code=4)
    assert "not complete" in ahead.stderr


def test_scan_prints_rows_in_order_and_within_bounds(run: Run, path: Path) -> None:
    assert run("scan", path).stdout == "a\t2\nb\t\\x00\\xff\nschlüssel\twert\n"
    assert run("scan", path, "--keys-only", "--reverse", "--limit", 1).stdout == "schlüssel\n"
    assert run("scan", path, "--start", "b", "--end", "c", "-e", "text").stdout == "b\t\\x00\\xff\n"
    assert run("scan", path, "--prefix", "sch", "--keys-only").stdout == "schlüssel\n"
    assert run("scan", path, "-p", "63", "--as-of", 13, "-e", "hex").stdout == "63\t676f6e65\n"
    assert lines(run("scan", path, "--json"))[:2] == [
        {"key": "a", "value": "2"},
        {"key": "b", "value": {"base64": "AP8="}},
    ]


def test_history_shows_deletions_too(run: Run, path: Path) -> None:
    stamp = "1970-01-01T00:00:00.0000000{}Z"
    assert run("history", path, "c").stdout == (
        f"{stamp.format(14)}\t(deleted)\n{stamp.format(13)}\tgone\n"
    )
    assert lines(run("history", path, "a", "--limit", 1, "--json")) == [
        {"timestamp": stamp.format(11), "deleted": False, "value": "2"}
    ]
    run("history", path, "nothing", code=1)


def test_changes_of_a_cleared_store_begin_at_the_clear(run: Run, path: Path) -> None:
    with kvstore.open(path) as store:
        store.put(b"a", b"1")
        store.clear_range(b"a", b"b")
        store.put(b"c", b"2")
    assert [json.loads(line)["key"] for line in run("changes", path).stdout.splitlines()] == ["c"]


def test_changes_are_json_lines_of_a_window(run: Run, path: Path) -> None:
    every = lines(run("changes", path))
    assert lines(run("changes", path, "--json")) == every
    assert [(row["op"], row["key"]) for row in every] == [
        *[("put", "a")] * 2,
        ("put", "b"),
        ("put", "c"),
        ("delete", "c"),
        ("put", "schlüssel"),
    ]
    assert lines(run("changes", path, "--since", 13)) == every[4:]
    assert lines(run("changes", path, "--since", "1970-01-01T00:00:00.000000013Z")) == every[4:]
    (image,) = lines(run("changes", path, "--since", 10, "-p", "a", "--images", "pre+post"))
    assert (image["pre"], image["post"]) == ("1", "2")
    run("changes", path, "--images", "all", code=2)


def test_stats_are_figures(run: Run, path: Path) -> None:
    (figures,) = lines(run("stats", path, "--json"))
    assert figures["upper"].startswith("1970-01-01T00:00:00.0000000")
    assert figures["holds"] == 0
    assert "data_entries" in run("stats", path).stdout


def test_reading_beside_the_service_that_has_it_open(run: Run, path: Path) -> None:
    with kvstore.open(path) as store:
        store.put(b"live", b"yes")
        assert run("get", path, "live").stdout == "yes\n"
        assert "live" in run("scan", path, "--keys-only").stdout
        refused = run("put", path, "k", "v", code=3)
        assert "held by" in refused.stderr


# -- writing ----------------------------------------------------------------------------------


def test_put_and_delete_print_their_time(run: Run, path: Path) -> None:
    stamp = run("put", path, "k", "v").stdout.strip()
    assert run("get", path, "k", "--as-of", stamp).stdout == "v\n"
    (deleted,) = lines(run("delete", path, "k", "--json"))
    assert deleted["timestamp"] > stamp
    run("get", path, "k", code=1)


def test_a_key_is_put_with_the_time_at_which_it_expires(run: Run, path: Path) -> None:
    run("put", path, "soon", "v", "--expires", "+1h")
    run("put", path, "day", "v", "--expires", "2200-01-01")
    for past in ("-1h", "1 hour ago", "yesterday", "0s"):
        refused = run("put", path, "past", "v", "--expires", past, code=2)
        assert "does not lie ahead" in refused.stderr
        assert "datetime" not in refused.stderr
    with kvstore.open(path) as store:
        assert store.get(b"past") is None
        soon, day = store.ttl(b"soon"), store.ttl(b"day")
        assert soon is not None
        assert timedelta(0) < soon <= timedelta(hours=1)
        assert day is not None
        assert day > timedelta(days=36_500)


def test_values_come_from_stdin_byte_for_byte(run: Run, path: Path) -> None:
    run("put", path, "raw", stdin=b"\x00\xfe\n")
    assert run("get", path, "raw", "-n").stdout_bytes == b"\x00\xfe\n"
    run("put", path, "6b", "00ff", "-e", "hex")
    assert run("get", path, "k", "-n").stdout_bytes == b"\x00\xff"


def test_a_store_is_made_only_when_asked_for(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "typo", "k", "v", code=2)
    assert not (tmp_path / "typo").exists()
    run("put", tmp_path / "new", "k", "v", "--create")
    run("put", tmp_path / "small", "k", "v", "--create", "--engine", "memory")
    run("put", tmp_path / "small", "k", "w")
    assert run("get", tmp_path / "small", "k").stdout == "w\n"
    run("put", tmp_path / "odd", "k", "v", "--create", "--engine", "paper", code=2)


# -- upkeep -----------------------------------------------------------------------------------


def test_gc_tells_what_it_gave_up(run: Run, path: Path) -> None:
    (report,) = lines(run("gc", path, "--before", 12, "--json"))
    assert (report["versions"], report["held_back"]) == (1, False)
    gone = run("get", path, "a", "--as-of", 10, code=4)
    assert "history" in gone.stderr
    assert run("get", path, "a").stdout == "2\n"
    assert len(lines(run("changes", path))) == 3
    assert "since" in run("gc", path, "--keep", "30d").stdout
    run("gc", path, "--keep", "soon", code=2)
    run("gc", path, code=2)


def test_gc_names_who_keeps_history_and_what_lets_it_go(run: Run, path: Path) -> None:
    with kvstore.open(path) as store:
        store.hold("old one", at=12, kind="backup", address="/backups/s")
    told = run("gc", path, "--before", 14)
    assert f"kvstore holds drop {path} 'old one'" in told.stderr
    assert "backup hold 'old one' (at 1970-01-01T00:00:00.000000012Z, of /backups/s" in told.stderr
    assert "needs --full (full=True)); `kvstore holds drop" in told.stderr
    (report,) = lines(run("gc", path, "--before", 14, "--json"))
    assert report["held_back"] is True
    assert "/backups/s" in report["held_by"][0]
    assert "held by  backup hold 'old one'" in run("stats", path).stdout
    (figures,) = lines(run("stats", path, "--json"))
    assert len(figures["held_by"]) == figures["holds"] == 1


def test_a_hold_whose_backups_are_gone_is_told_with_the_command_that_drops_it(
    run: Run, path: Path, tmp_path: Path
) -> None:
    place = tmp_path / "backups"
    run("backup", "run", path, place)
    (there,) = lines(run("holds", "list", path, "--json"))
    assert there["gone"] is False
    shutil.rmtree(place)
    told = run("holds", "list", path, "--json")
    (gone,) = lines(told)
    assert gone["gone"] is True
    command = f"kvstore holds drop {path} {gone['name']}"
    assert command in " ".join(told.stderr.split())
    run(*command.split()[1:])
    assert lines(run("holds", "list", path, "--json")) == []


def test_holds_are_listed_and_dropped(run: Run, path: Path) -> None:
    with kvstore.open(path) as store:
        store.hold("mine", at=12)
        store.feed("bills", start=0, max_age=timedelta(hours=1))
    assert "feed/bills" in run("holds", "list", path).stdout
    (feed, mine) = lines(run("holds", "list", path, "--json"))
    assert (feed["name"], feed["kind"], feed["max_age_seconds"]) == ("feed/bills", "feed", 3600.0)
    assert (mine["name"], mine["max_age_seconds"], mine["lost"]) == ("mine", None, False)
    dropped = run("holds", "drop", path, "feed/bills")
    assert "fenced" in dropped.stderr
    assert "bills" in dropped.stdout
    (gone,) = lines(run("holds", "drop", path, "mine", "--json"))
    assert gone["timestamp"].endswith("012Z")
    assert lines(run("holds", "list", path, "--json")) == []
    assert "no hold" in run("holds", "drop", path, "mine", code=2).stderr
    assert run("gc", path, "--before", 14).stderr == ""


@pytest.mark.damages_store
def test_verify_is_0_for_a_sound_store_and_1_for_a_damaged_one(run: Run, path: Path) -> None:
    (report,) = lines(run("verify", path, "--json"))
    assert (report["ok"], report["keys"], report["problems"]) == (True, 4, [])
    with kvstore.open(path) as store:
        batch = parts_of(store).engine.batch()
        batch.put(b"no key of ours", b"", parts_of(store).engine.families["data"])
        parts_of(store).engine.write(batch)
    damaged = run("verify", path, code=1)
    assert "data key 6e6f" in damaged.stdout


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("gc", "--before", "12"), "1 versions removed"),
        (("verify",), "12 versions and changes"),
    ],
)
def test_long_commands_count_on_a_terminal_and_are_quiet_with_json(
    run: Run,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    count: str,
) -> None:
    command, *rest = words
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    monkeypatch.setenv("COLUMNS", "300")
    assert count in run(command, path, *rest).stderr
    assert run(command, path, *rest, "--json").stderr == ""
    monkeypatch.delenv("FORCE_COLOR")
    assert run(command, path, *rest).stderr == ""


# -- journals ---------------------------------------------------------------------------------


@pytest.fixture
def journaled(tmp_path: Path) -> Path:
    with kvstore.open(tmp_path / "m", engine="memory") as store:
        for number in range(5):
            store.put(b"%d" % number, b"v" * 50)
        journal = parts_of(store).engine._journal  # type: ignore[attr-defined]
        journal._rotate()  # as a full journal file would
        store.put(b"last", b"v")
    return tmp_path / "m"


def test_journals_are_inspected_and_compacted(run: Run, journaled: Path) -> None:
    (before,) = lines(run("journal", "inspect", journaled, "--json"))
    assert (before["sound"], before["content"], len(before["files"])) == (
        True,
        "kvstore-memory-1",
        2,
    )
    (done,) = lines(run("journal", "compact", journaled, "--json"))
    assert done["snapshot"] is not None
    assert "snapshot-final" in run("journal", "inspect", journaled).stdout
    assert run("get", journaled, "3").stdout == "v" * 50 + "\n"
    for words in (["inspect"], ["compact"], ["salvage", journaled.parent / "x"]):
        run("journal", words[0], journaled.parent / "nothing", *words[1:], code=2)
    (journaled.parent / "empty").mkdir()
    run("journal", "inspect", journaled.parent / "empty", code=2)
    refused = run("journal", "compact", journaled.parent / "empty", code=2)
    assert "it has no journal, or none that tells" in refused.stderr
    Journal.open(journaled.parent / "foreign", content="theirs").close()
    run("journal", "compact", journaled.parent / "foreign", code=2)


def test_a_damaged_journal_is_named_and_rescued(run: Run, journaled: Path) -> None:
    (sealed,) = journaled.glob("*-journal-final")
    content = bytearray(sealed.read_bytes())
    content[len(content) // 2] ^= 1
    sealed.write_bytes(content)
    refused = run("get", journaled, "3", code=5)
    assert sealed.name in refused.stderr
    assert "salvage" in refused.stderr
    assert sealed.name in run("journal", "inspect", journaled, code=1).stdout
    rescued = journaled.parent / "rescued"
    (report,) = lines(run("journal", "salvage", journaled, rescued, "--json", code=1))
    assert report["records"] > 0
    assert len(report["losses"]) == 1
    assert run("get", rescued, "0").stdout == "v" * 50 + "\n"
    run("journal", "salvage", journaled, rescued, code=2)
    run("journal", "salvage", journaled, journaled.parent / "x", "--keep", "some", code=2)


# -- failures ---------------------------------------------------------------------------------


def test_every_error_of_the_tree_has_a_code_that_says_what_to_do() -> None:
    def below(kind: type[KVStoreError]) -> list[type[KVStoreError]]:
        found = kind.__subclasses__()
        return [*found, *(deeper for child in found for deeper in below(child))]

    codes = {kind.__name__: exit_code(kind.__new__(kind)) for kind in below(KVStoreError)}
    assert {kind for kind, _ in EXIT_CODES} == set(KVStoreError.__subclasses__())
    assert codes["LockedError"] == codes["ConflictError"] == 3
    assert codes["NotAStoreError"] == codes["KeyConflictError"] == 2
    assert codes["HistoryGoneError"] == codes["NotYetWrittenError"] == 4
    assert codes["OutOfSpaceError"] == codes["JournalDamagedError"] == 5
    assert codes["HoldLostError"] == 6


def test_a_failure_is_one_line_with_the_remedy(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for words in (["get", tmp_path, "k"], ["get", tmp_path / "nothing", "k"], ["gc", tmp_path]):
        failed = run(*words, code=2)
        assert failed.stdout == ""
    assert len(run("get", tmp_path, "k", code=2).stderr.splitlines()) == 1
    run("get", tmp_path / "notes.txt", "k", code=2)
    run("get", tmp_path, "zz", "-e", "hex", code=2)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("command", ["get", "put", "delete", "scan", "history", "changes", "stats"])
def test_help_teaches_by_example(run: Run, command: str) -> None:
    shown = run(command, "--help").stdout
    assert f"kvstore {command} " in shown
    assert "<bool>" not in shown


def test_the_root_help_lists_the_exit_codes(run: Run) -> None:
    told = run("--version").stdout
    mine = re.escape(kvstore.__version__)
    assert re.fullmatch(rf"kvstore {mine}, RocksDB \d+\.\d+\.\d+, rocksdict .+\n", told)
    shown = run("--help").stdout
    assert "Exit codes" in shown
    assert "journal" in shown


def test_following_opens_the_store_again_only_when_its_files_have_changed(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands read the journal of a store in memory. A store on RocksDB has live readers. The
    module `time` itself stays as it is: other threads of the tests sleep as well."""
    path = path.with_name("memory")
    opened, looks = [], iter(range(100))

    def open_read_only(store: Path) -> kvstore.Store:
        opened.append(store)
        return kvstore.open_read_only(store)

    with kvstore.open(path, engine="memory") as store:

        def sleep(_seconds: float) -> None:
            look = next(looks)
            if look == 3:
                store.put(b"new", b"1")
            elif look == 6:
                raise KeyboardInterrupt

        monkeypatch.setattr(changes, "open_read_only", open_read_only)
        monkeypatch.setattr(changes, "time", SimpleNamespace(sleep=sleep))
        since = store.upper - 1
        found = run("changes", path, "--since", f"{since:d}", "--follow", code=130)
    assert [line["key"] for line in lines(found)] == ["new"]
    assert len(opened) == 2


def test_a_refused_create_leaves_no_store_behind(run: Run, tmp_path: Path) -> None:
    refused = [("put", "--", "a" * 70_000, "1"), ("put", "zz", "00", "-e", "hex")]
    for command, *words in refused:
        run(command, tmp_path / "s", "--create", *words, code=2)
        assert not (tmp_path / "s").exists()
    (tmp_path / "none.csv").write_text("other\n1\n")
    for source in ("none.csv", "missing.csv"):
        run("import", tmp_path / "s", tmp_path / source, "--create", code=2)
        assert not (tmp_path / "s").exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        run("serve", tmp_path / "s", "--listen", listen, "--create", code=3)
    assert not (tmp_path / "s").exists()
    run("put", tmp_path / "s", "a", "1", "--create")
    run("put", tmp_path / "s", "a" * 70_000, "1", "--create", code=2)
    assert run("get", tmp_path / "s", "a").stdout == "1\n"  # it existed before


def test_times_in_words_are_times_of_commands(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    assert run("get", tmp_path / "s", "a", "--as-of", "now").stdout == "1\n"
    run("get", tmp_path / "s", "a", "--as-of", "-1h", code=1)
    assert (
        "looks like seconds"
        in run("get", tmp_path / "s", "a", "--as-of", "1700000000", code=2).stderr
    )


@pytest.mark.parametrize(
    ("words", "proposed"),
    [(["gett"], "'get'"), (["table", "lst"], "'list'"), (["help", "chnages"], "'changes'")],
    ids=" ".join,
)
def test_a_misspelt_command_is_told_the_nearest_ones(
    run: Run, words: list[str], proposed: str
) -> None:
    assert f"Did you mean {proposed}" in run(*words, code=2).stderr
