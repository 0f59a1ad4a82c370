"""Changes as JSON lines."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import ClosedError, UsageError
from kvstore.feeds.lines import changes_json_lines
from tests.feed.replica import add_import

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_lines_say_what_events_say(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        store.put("é".encode(), b"on time")
        with store.batch() as batch:
            batch.delete_range(b"a", b"c\xff")
            batch.delete(b"z")
        import_id, _ = add_import(store, tmp_path / "i", {b"k": b"v"})
        put, erased, deleted, loaded = map(
            json.loads, changes_json_lines(store, 0, images="pre+post", expand="none")
        )
        assert (put["op"], put["key"], put["value"], put["post"]) == (
            "put",
            "é",
            "on time",
            "on time",
        )
        assert "pre" not in put
        assert kvstore.Timestamp.parse(erased["timestamp"]) == batch.timestamp
        assert (erased["op"], erased["key"], erased["seq"]) == ("delete_range", "a", 0)
        assert erased["end_key"] == {"base64": "Y/8="}
        assert (deleted["op"], deleted["seq"], deleted["end_of_batch"]) == ("delete", 1, True)
        assert (loaded["op"], int(loaded["key"], 16)) == ("import", import_id)
        assert all("\n" not in line for line in changes_json_lines(store, 0))


def test_following_lines_come_as_commits_do(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path / "s", durability="async")
    store.put(b"0", b"")
    lines: list[str] = []
    changed = threading.Condition()
    ended: list[BaseException] = []

    def read() -> None:
        try:
            for line in changes_json_lines(store, 0, follow=True):
                with changed:
                    lines.append(line)
                    changed.notify_all()
        except ClosedError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 10):
        store.put(b"%d" % number, b"")
        with changed:
            assert changed.wait_for(lambda number=number: len(lines) == number + 1, 30)  # type: ignore[misc]
    assert [json.loads(line)["key"] for line in lines] == [str(number) for number in range(10)]
    store.close()
    reader.join(120)
    assert ended


def test_history_is_kept_while_lines_are_read_and_let_go_after(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        store.put(b"a", b"1")
        last = store.put(b"a", b"2")
        lines = changes_json_lines(store, 0, follow=True)
        assert json.loads(next(lines))["value"] == "1"
        store.gc(before=last)
        assert store.since == 0
        assert json.loads(next(lines))["value"] == "2"
        lines.close()  # type: ignore[attr-defined]
        store.gc(before=last)
        assert store.since == last


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store, pytest.raises(UsageError):
        next(changes_json_lines(store, "some day"))
