"""Requests by hand: the OpenAPI document and HTTP say which ones are taken and refused, and the
server and its reader processes do alike."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.remote.server.running import Running

HUGE = "9" * 5000


class Answer:
    """The answer to a request."""

    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = found.status, found.headers, found.read()

    @property
    def error(self) -> str:
        """The class of its error."""
        return str(json.loads(self.body)["error"])


class Caller:
    """Sends requests to one server."""

    def __init__(self, running: Running) -> None:
        self._where = running.address.host, running.address.port

    def __call__(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", **more: str
    ) -> Answer:
        if body is not None and not isinstance(body, bytes):
            body = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(*self._where, timeout=60)
        headers = {"Content-Type": kind} if body is not None else {}
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in {**headers, **more, "Content-Length": str(len(body or b""))}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(body)
        try:
            return Answer(connection.getresponse())
        finally:
            connection.close()


@pytest.fixture(scope="module", params=[0, 1], ids=["server", "reader process"])
def call(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Calls a server whose store has the key `k`, a counter and a table."""
    path = tmp_path_factory.mktemp("requests") / "store"
    with kvstore.open(path, durability="async") as store:
        store.put(b"k", b"v")
        columns = {"id": pa.int64(), "x": pa.float64(), "at": pa.timestamp("ns", "UTC")}
        at = kvstore.Timestamp.parse("2013-01-31T00:00:00Z").to_datetime()
        table = store.table("t", pa.schema(columns.items()), "id")
        table.put({"id": 1, "x": float("nan"), "at": at})
        store.sync()
        address = ListenAddress("127.0.0.1", 0)
        with serving(app(store), address, readers=request.param) as running:
            yield Caller(running)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v1/keys/k", "GET, HEAD, PUT, DELETE"),
        ("PATCH", "/v1/keys/k", "GET, HEAD, PUT, DELETE"),
        ("OPTIONS", "/v1/keys/k", "GET, HEAD, PUT, DELETE"),
        ("GET", "/v1/put", "POST"),
        ("PUT", "/v1/scan", "GET, HEAD, POST"),
        ("DELETE", "/v1/get", "GET, HEAD, POST"),
        ("PUT", "/v1/openapi.json", "GET, HEAD, POST"),
        ("POST", "/metrics", "GET, HEAD"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
def test_another_method_is_answered_with_the_methods_that_there_are(
    call: Any, method: str, path: str, allow: str
) -> None:
    answer = call(method, path)
    assert (answer.status, answer.headers["Allow"]) == (405, allow)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/get/",
        "/v1/Get",
        "/v1/g%65t",
        "/v1/%00",
        "/v1/%ff",
        "/v2/get",
    ],
)
def test_a_path_that_is_not_there_is_not_found(call: Any, path: str) -> None:
    assert call("GET", path).status == 404


@pytest.mark.parametrize(
    ("verb", "arguments", "status"),
    [
        ("get", {"key": "k"}, 200),
        ("get", {}, 400),
        ("get", {"key": None}, 400),
        ("get", {"key": 5}, 400),
        ("get", {"key": "k", "as_of": None}, 400),
        ("get", {"key": "k", "as_of": ""}, 400),
        ("get", {"key": "k", "as_of": True}, 400),
        ("get", {"key": "k", "as_of": -1}, 400),
        ("get", {"key": "k", "as_of": 1 << 63}, 400),
        ("get", {"key": "k", "as_of": 1.5}, 400),
        ("get", {"key": "k", "as_of": 1.7e18}, 400),
        ("get", {"key": "k", "as_of": 5.0}, 200),
        ("get", {"key": "k", "as_of": "now"}, 200),
        ("get", {"key": "k", "as_of": "9999-01-01T00:00:00Z"}, 400),
        ("get", {"key": "k", "as_of": (1 << 63) - 1}, 425),
        ("get", {"key": {"base64": "aw=="}}, 200),
        ("get", {"key": {"base64": "aw"}}, 400),
        ("get", {"key": {"base64": "aw==", "more": 1}}, 400),
        ("get", {"key": "k", "keyy": "k"}, 400),
        ("get", {"key": "k" * 65_537}, 400),
        ("get", {"key": ""}, 200),
        ("get", '{"key": "k", "key": "k"}', 400),
        ("get", '{"key": "k", "as_of": NaN}', 400),
        ("get", f'{{"key": "k", "as_of": {HUGE}}}', 400),
        ("get", "[]", 400),
        ("get", "null", 400),
        ("get", b"\xff", 400),
        ("scan", {"limit": -1}, 400),
        ("scan", {"limit": 0}, 200),
        ("scan", {"limit": None}, 400),
        ("scan", {"limit": 1 << 64}, 400),
        ("scan", {"batch_rows": 0}, 400),
        ("scan", {"reverse": 1}, 400),
        ("scan", {"prefix": "a", "start": "a"}, 400),
        ("changes", {}, 400),
        ("changes", {"since": ""}, 400),
        ("changes", {"since": "oldest"}, 200),
        ("changes", {"since": 0, "images": "all"}, 400),
        ("epochs", {"since": ""}, 400),
        ("splits", {"count": 0}, 400),
        ("splits", {"count": 65_537}, 400),
        ("lease", {"name": "n", "seconds": 0}, 400),
        ("lease", {"name": "", "seconds": 1}, 400),
        ("lease", {"name": "n", "seconds": 1, "at": 1_700_000_000}, 400),
        ("lease", {"name": "n", "seconds": 86_401}, 400),
        ("increment", {"key": "k"}, 409),
        ("increment", {"key": "n", "by": 1 << 63}, 400),
        ("put_if", {"key": "k", "value": "w"}, 400),
        ("put_if", {"key": "k", "value": "w", "expected": None}, 412),
        ("put", {"key": "k", "value": None}, 400),
        ("put", {"key": "k", "value": "w", "durability": ""}, 400),
        ("batch", {"ops": [{"op": "put", "key": "a"}]}, 400),
        ("batch", {"ops": [{"op": "delete", "key": "a", "value": None}]}, 400),
        ("batch", {"ops": None}, 400),
        ("batch", {}, 400),
        ("open_changeset", {"outer": "unknown"}, 404),
        ("end_changeset", {"name": "unknown"}, 404),
        ("table_scan", {"table": "none"}, 404),
        ("table_find", {"table": "t", "index": "none"}, 404),
        ("drop_hold", {"name": "none"}, 404),
        ("drop_feed", {"name": "none"}, 404),
        ("revert_import", {"import_id": f"{1:016x}"}, 404),
        ("revert_import", {"import_id": "1"}, 400),
        ("revert_import", {"import_id": "0" * 16}, 400),
        ("reshard", {"streams": 0}, 400),
        ("checkpoint", {"path": "relative"}, 400),
        ("gc", {"before": 1_700_000_000}, 400),
        ("submit_task", {"queue": "", "value": "v"}, 400),
    ],
)
def test_arguments_are_taken_and_refused(call: Any, verb: str, arguments: Any, status: int) -> None:
    assert call("POST", f"/v1/{verb}", arguments).status == status


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("get?key=k", 200),
        ("get?key=k&key=k", 400),
        ("get?key=%FF%00", 200),
        ("get", 400),
        ("get?key", 200),
        ("get?key=k&as_of=", 400),
        ("get?key=k&as_of=%D9%A3", 400),
        ("get?key=k&as_of=%FF", 400),
        (f"get?key=k&as_of={HUGE}", 400),
        ("changes?since=", 400),
        ("changes?since=0&upto=", 400),
        ("scan?reverse=", 400),
        ("scan?reverse=1", 400),
        ("scan?reverse=true", 200),
        ("scan?limit=+1", 400),
        ("scan?unknown=", 400),
        ("keys?limit=1e2", 400),
        ("table_scan?table=t&columns=id", 400),
        ("ttl?key=k", 200),
    ],
)
def test_queries_are_taken_and_refused(call: Any, query: str, status: int) -> None:
    assert call("GET", f"/v1/{query}").status == status
    bare = call("HEAD", f"/v1/{query}")
    assert (bare.status, bare.body) == (status, b"")


def test_an_argument_has_one_place(call: Any) -> None:
    assert call("POST", "/v1/get?key=k", {"as_of": "now"}).status == 200
    assert call("POST", "/v1/get?key=k", {"key": "k"}).status == 400


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_a_body_of_another_type_is_refused_by_its_type(call: Any, kind: str) -> None:
    assert call("POST", "/v1/get", b'{"key": "k"}', kind).status == 415
    assert call("POST", "/v1/get", b"", "application/vnd.apache.arrow.stream").status == 415
    assert call("POST", "/v1/get", {"key": "k"}, "application/json; charset=utf-8").status == 200


def test_a_write_of_a_changeset_that_is_not_open_is_not_found(call: Any) -> None:
    answer = call("PUT", "/v1/keys/new", b"v", Kvstore_Changeset="0" * 32)
    assert (answer.status, answer.error) == (404, "ClosedError")
    assert call("GET", "/v1/keys/new").status == 404


def test_rows_as_json_have_a_form_for_each_cell(call: Any) -> None:
    """JSON has no NaN, and no times."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    answer = call("GET", "/v1/table_scan?table=t", Accept="application/json")
    assert answer.status == 200
    (row,) = json.loads(answer.body, parse_constant=refuse)["rows"]
    assert row == {"id": 1, "x": "NaN", "at": "2013-01-31T00:00:00.000000000Z"}
