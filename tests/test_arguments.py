"""Kinds of arguments: what each takes, and how doors write the argument that a message names."""

from __future__ import annotations

import math
import pickle
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import typer

import kvstore
from kvstore.backup import Collection
from kvstore.base.arguments import (
    AGE,
    COLUMNS,
    COUNT,
    FLAG,
    INTEGER,
    LIMIT,
    SECONDS,
    SPAN,
    WAIT,
    ArgumentKind,
    integer,
    word,
)
from kvstore.base.span import Span
from kvstore.cli.main import in_options
from kvstore.errors import Argument, KeyConflictError, KVStoreError, UsageError
from kvstore.remote.client import connect
from kvstore.remote.protocol import failure_fields, failure_of
from kvstore.retention.gc import GcPolicy

COLOURS: ArgumentKind[str] = word("red", "blue")
AGED = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("kind", "given", "found"),
    [
        (COUNT, 1, 1),
        (COUNT, np.int64(7), 7),
        (integer(0, 3), 3, 3),
        (INTEGER, -(1 << 80), -(1 << 80)),
        (LIMIT, None, None),
        (LIMIT, 0, 0),
        (FLAG, False, False),
        (SECONDS, 0, 0),
        (WAIT, -1, 0.0),
        (WAIT, math.inf, threading.TIMEOUT_MAX),
        (WAIT, None, None),
        (AGE, AGED, AGED),
        (AGE.or_none, None, None),
        (SPAN, None, Span()),
        (COLUMNS, ["a", "b"], ("a", "b")),
        (COLOURS, "red", "red"),
    ],
)
def test_a_kind_takes_its_values(kind: ArgumentKind[Any], given: object, found: object) -> None:
    value = kind.check("one", given)
    assert value == found
    assert type(value) is type(found)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (COUNT, 0),
        (COUNT, True),
        (COUNT, 1.0),
        (COUNT, "1"),
        (integer(0, 3), 4),
        (INTEGER, None),
        (LIMIT, -1),
        (LIMIT, 1 << 64),
        (FLAG, "no"),
        (FLAG, 1),
        (SECONDS, -1),
        (SECONDS, math.nan),
        (SECONDS, True),
        (WAIT, math.nan),
        (AGE, None),
        (AGE.or_none, timedelta(seconds=-1)),
        (SPAN, b"a"),
        (COLUMNS, "ab"),
        (COLOURS, "green"),
        (COLOURS, ["red"]),
    ],
)
def test_a_kind_refuses_other_values_by_name(kind: ArgumentKind[Any], given: object) -> None:
    with pytest.raises(UsageError) as refused:
        kind.check("one", given)
    assert refused.value.argument == "one"
    assert refused.value.what == f"one={given!r}"
    assert refused.value.remedy == kind.hint


def test_a_message_shows_a_part_of_a_large_value() -> None:
    for large in (10**9999, "x" * 9999):
        with pytest.raises(UsageError) as refused:
            integer(0, 1).check("one", large)
        assert len(str(refused.value)) < 300


def _command() -> Any:
    app = typer.Typer()

    @app.command()
    def run(
        on_conflict: str = "error",
        poll: bool = False,
        most: int = typer.Option(1, "-m", "--at-most"),
        path: str = typer.Argument("."),
    ) -> None:
        raise AssertionError(on_conflict, poll, most, path)

    return typer.main.get_command(app)


def test_a_shell_writes_the_options_of_its_command() -> None:
    spell = in_options(_command())
    error = UsageError(
        (Argument.of("most", 5), " with ", Argument.of("poll", False), " at ", Argument("path")),
        ("pass ", Argument.of("poll", True), " or ", Argument.of("on_conflict", "x y")),
    )
    assert (
        error.told(spell)
        == "--at-most 5 with no --poll at path; pass --poll or --on-conflict 'x y'"
    )
    assert str(error) == "most=5 with poll=False at path; pass poll=True or on_conflict='x y'"
    assert error.argument == "most"
    assert KeyConflictError([b"k"]).told(spell).endswith("pass --on-conflict overwrite")
    assert UsageError("limit=5", "x").told(spell) == "limit=5; x"


def test_the_arguments_of_a_message_cross_processes() -> None:
    error = UsageError((Argument.of("poll", True), " is"), "stop").at("before: ", ", in row 1")
    sent = failure_of(failure_fields(error), status=400, where="s")
    assert isinstance(sent, UsageError)
    for other in (sent, pickle.loads(pickle.dumps(error))):
        assert str(other) == str(error) == "before: poll=True is, in row 1; stop"
        assert other.told(in_options(_command())) == "before: --poll is, in row 1; stop"
        assert other.argument == "poll"


@pytest.mark.parametrize("words", [5, "ab", {"items": [5]}, {"items": [{"items": [[1]]}, "b"]}])
def test_a_server_may_send_any_words(words: object) -> None:
    fields = {"error": "UsageError", "what": "a", "remedy": "b"}
    facts = {"words": words, "told": 1}
    error = failure_of({**fields, "fields": facts}, status=400, where="s")
    assert isinstance(error, KVStoreError)
    assert isinstance(error.told(in_options(_command())), str)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3600, r"max_age=3600 has no unit; write '3600s', or pass timedelta\(seconds=3600\)"),
        ("3600", r"has no unit; write '3600s'"),
        (0.5, r"timedelta\(seconds=0.5\)"),
        (
            "soon",
            "max_age='soon'; write a number from 0 on and us, ms, s, m, h, d or w",
        ),
        ("-5m", "='-5m'; write a number"),
        ("5M", "='5M'; write a number"),
        (b"5m", "=b'5m'; write a number"),
        ("9999999999 weeks", "is older than time; write a shorter age"),
        (timedelta(-1), r"write a number .*timedelta\(days=30\)"),
    ],
)
def test_an_age_of_another_form_is_told_how_to_write_it(given: object, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        AGE.or_none.check("max_age", given)


@pytest.mark.parametrize(
    ("given", "age"),
    [
        ("1 hour", timedelta(hours=1)),
        ("5m", timedelta(minutes=5)),
        (" 2  Days ", timedelta(days=2)),
        ("0s", timedelta(0)),
        ("1500us", timedelta(microseconds=1500)),
    ],
)
def test_an_age_may_be_words(given: str, age: timedelta) -> None:
    assert AGE.check("max_age", given) == age


def test_an_age_is_words_at_each_door(tmp_path: Path) -> None:
    given, age = "2 hours", timedelta(hours=2)
    with kvstore.open(tmp_path / "s", control=True) as store, connect(store.path) as client:
        store.put(b"k", b"v")
        for number, owner in enumerate((store, client)):
            owner.hold(f"h{number}", max_age=given)
            owner.feed(f"f{number}", "now", max_age=given)
            assert owner.force_quiescence(given) > 0
        budgets = {each.max_age_ns for each in store.holds.all()}
        assert budgets == {age // timedelta(microseconds=1) * 1000}
        rows = store.table("t", pa.schema([("id", pa.int64())]), "id")
        rows.put({"id": 1})
        at = pa.array([store.upper - 1], pa.int64())
        labels = pa.table({"id": [1], "key": [b"k"], "ts": at})
        for side in (store, client):
            for words, nulls in ((given, 0), ("0s", 1)):
                found = side.join(labels, "key", max_age=words).read_all()
                assert found["value"].null_count == nulls
                assert side.table("t").join(labels, "id", max_age=words).read_all().num_rows == 1
        collection = Collection(tmp_path / "c")
        collection.backup(store, max_age=given)
        with collection.follow(store, every=given, max_age=given):
            pass
        collection.scrub(delete_orphans_older_than=given)
        collection.expire(keep=given)
        assert store.gc(keep=given).since < store.now() - age // timedelta(microseconds=1) * 1000
    assert GcPolicy(keep=given, every="1m").keep == age  # type: ignore[arg-type]
