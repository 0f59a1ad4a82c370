"""The OpenAPI document is the server: schemathesis makes calls out of it, valid ones and invalid
ones, and holds each answer against it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

import kvstore
from kvstore.remote.parameters import DEFINITION_FORMAT, DUE_FORMAT, TIME_FORMAT
from kvstore.remote.protocol import ARROW_TYPE, LABELS_SCHEMA, READ_SCHEMA, WRITES_SCHEMA
from kvstore.remote.server import Token
from kvstore.remote.server.app import App, app
from kvstore.remote.server.http import TOKEN_PATTERN
from tests.harness.seeds import seed_of

SECRET = "s" * 32
HEADERS = {"Authorization": f"Bearer {SECRET}"}
SEED = 20260131
TABLE_SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])

EXCEPTIONS = {
    "goes without": "OpenAPI cannot say that two parameters of a query exclude each other",
    "start must be below end": "JSON Schema cannot say that one text is below another",
    "is above upto": "JSON Schema cannot say that one number is below another",
    "workers count from 0, below workers": "JSON Schema cannot compare two numbers",
    "pass a time for each key": "JSON Schema cannot say that two lists are of one length",
    "does not lie ahead of now": "JSON Schema does not know the time",
    "is before 1970": "JSON Schema does not know the time",
    "lies beyond": "JSON Schema does not know the time",
    "pass a printable name": "patterns cannot name the characters that Unicode calls printable",
    "pass before or keep": "JSON Schema cannot say that one of two arguments is no more than that",
    "is no table's column": "the columns are the table's",
    "not JSON: ": "JSON Schema does not look into a text that has JSON",
    "store.reshard(streams=": "the number of streams is the state of the store",
    "belongs to tables": "patterns cannot tell the bytes at the beginning of a base64 text",
    "needs an end": "the prefix is one of tables, which patterns cannot tell",
}
"""Messages of refusals of calls that the document allows, each with the reason."""


_numbers = itertools.count()


@schemathesis.hook
def before_call(_: Any, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Make each write a request of its own, and give rows to calls that take rows."""
    del kwargs
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    headers, name = case.headers or {}, case.path.rpartition("/")[2]
    for parameter, value in (case.query or {}).items():
        if is_valid and type(value) is float and value.is_integer():
            case.query[parameter] = int(value)  # JSON has 2.0 for 2; a query is text
    if "Kvstore-Changeset" in headers:
        headers.pop("Idempotency-Key", None)  # a request that was done needs no changeset
    if re.fullmatch(TOKEN_PATTERN, str(headers.get("Idempotency-Key"))):
        headers["Idempotency-Key"] = f"writer-{next(_numbers)}"
    if is_valid and case.media_type == ARROW_TYPE:
        case.body = ROWS[name]
    if name == "force_quiescence" and isinstance(case.body, dict):
        given = case.body.get("timeout", 0.0)
        if (type(given) in (int, float) and given > 0) or "timeout" not in case.body:
            case.body["timeout"] = 0  # a changeset of another call is open


# -- the calls -----------------------------------------------------------------------------------


def _stream(schema: pa.Schema, *columns: list[Any]) -> bytes:
    table = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


ROWS = {
    "get_many": _stream(READ_SCHEMA, [b"a", b"k"], [None, None], [7, None]),
    "floor": _stream(READ_SCHEMA, [b"a", b"k"], [None, None], [7, None]),
    "join": _stream(LABELS_SCHEMA, [b"a", b"k"], [0, 1]),
    "batch": _stream(WRITES_SCHEMA, [1, 3], [b"a", b"k"], [None] * 2, [b"v", None], [None] * 2),
    "table_join": _stream(pa.schema([("id", pa.int64()), ("ts", pa.int64())]), [1], [1]),
}
_times = st.integers(10**9, 17 * 10**8).map(lambda at: datetime.fromtimestamp(at, timezone.utc))
schemathesis.openapi.format(
    TIME_FORMAT,
    st.one_of(
        _times.map(lambda at: at.isoformat(timespec="microseconds")),
        st.just("now"),
        st.integers(0, 10**8).map(lambda ago: f"-{ago}s"),
    ),
)
schemathesis.openapi.format(DUE_FORMAT, st.integers(60, 10**8).map(lambda ahead: f"+{ahead}s"))
schemathesis.openapi.media_type(ARROW_TYPE, st.just(b""))


@pytest.fixture
def served(store: kvstore.Store) -> Iterator[App]:
    store.put(b"k", b"v")
    table = store.table("t", TABLE_SCHEMA, "id", indexes={"by_name": ["name"]})
    table.put({"id": 1, "name": "a"})
    definition = table.codec().stored.decode()
    schemathesis.openapi.format(DEFINITION_FORMAT, st.just(definition))
    schemathesis.openapi.format("kvstore-digests", st.just("{}"))
    question = {"on": ["id"], "at": "ts", "known_at": None, "columns": None}
    schemathesis.openapi.format("kvstore-question", st.just(json.dumps(question)))
    application = app(store, tokens=[Token(SECRET, "admin")])
    yield application
    application.close()


def _disagreements(
    served: App, *, examples: int, phases: list[str], least: int, seed: int = SEED
) -> str:
    """How answers to the calls of these phases, `least` or more, differ from the document, but for
    exceptions."""
    config = SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "generation": {"max-examples": examples, "database": "none", "allow-x00": True},
            "headers": HEADERS,
            "request-timeout": 120.0,
            "phases": {
                phase: {"enabled": phase in phases}
                for phase in ("examples", "coverage", "fuzzing", "stateful")
            },
            "checks": {
                "positive_data_acceptance": {
                    # Of the store's state: not there, gone, not yet there, in the way, too many.
                    "expected-statuses": ["2xx", "404", "409", "410", "412", "425", "503"]
                }
            },
        }
    )
    schema = schemathesis.openapi.from_asgi(
        "/v1/openapi.json", served, config=config, headers=HEADERS
    )
    found: list[str] = []
    calls = 0
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            found.append(repr(event))
        if not isinstance(event, events.ScenarioFinished):
            continue
        calls += len(event.recorder.interactions)
        for name, checks in event.recorder.checks.items():
            answer = event.recorder.interactions[name].response
            case = event.recorder.cases[name].value
            for check in checks:
                if check.failure_info is None:
                    continue
                told = b"" if answer is None else answer.content[:500]
                if check.name == "positive_data_acceptance" and any(
                    each.encode() in told for each in EXCEPTIONS
                ):
                    continue
                if check.name == "negative_data_rejection" and case.media_type == ARROW_TYPE:
                    continue  # the document has the columns of rows in words
                message = check.failure_info.failure.message
                found.append(f"{check.name}: {case.as_curl_command()}\n{message}\n{told!r}")
    done = f"{calls} calls of {', '.join(phases)} with seed {seed}"
    print(done)
    assert found or calls >= least, done
    return "\n\n".join([done, *found]) if found else ""


def test_the_server_answers_as_its_document_says(served: App) -> None:
    found = _disagreements(served, examples=2, phases=["fuzzing"], least=150)
    assert not found, found


@pytest.mark.soak
@pytest.mark.parametrize(
    ("phases", "examples", "least"),
    [
        (["examples", "coverage"], 1, 2_000),
        (["fuzzing"], 250, 10_000),
        (["stateful"], 100, 100),
    ],
    ids=["coverage", "fuzzing", "stateful"],
)
def test_the_server_answers_as_its_document_says_for_long(
    served: App, phases: list[str], examples: int, least: int
) -> None:
    """The seed is another one each time: a failure prints it."""
    seed = seed_of()
    found = _disagreements(served, examples=examples, phases=phases, least=least, seed=seed)
    assert not found, found
