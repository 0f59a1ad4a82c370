"""The tools of the Model Context Protocol, asked through their project's client, and the scenarios
of its suite for servers, which npm brings."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

import kvstore
from tests.conformance.suites import MCP_SCENARIOS

SUITE: Final = ("@modelcontextprotocol/conformance@0.1.16", "node@22")
"""The suite, and the release of Node that it needs."""
READS = {"get", "scan", "history", "changes", "times"}


@asynccontextmanager
async def asked(*words: str) -> AsyncIterator[ClientSession]:
    """A session with a server in a process of its own."""
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "kvstore.adapters.mcp", *words],
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    async with stdio_client(command) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        yield session


async def call(session: ClientSession, tool: str, **arguments: Any) -> Any:
    result = await session.call_tool(tool, arguments)
    text = result.content[0].text
    is_error = getattr(result, "is_error", None) or getattr(result, "isError", False)
    return text if is_error else json.loads(text)


async def test_a_model_reads_a_store_that_is_in_use(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        first = store.put(b"UA/1", b"on time")
        store.put(b"UA/1", b"late")
        store.put(b"UA/2", b"\xff\x00")
        store.put(b"UA/3", b"x" * 50_000)
        store.delete(b"UA/2")
        store.put_many({b"AA/%03d" % n: b"%d" % n for n in range(250)})
        async with asked(str(tmp_path / "s"), "--prefix", "") as session:
            tools = (await session.list_tools()).tools
            assert {tool.name for tool in tools} == READS
            assert await call(session, "get", key="UA/1") == {"found": True, "value": "late"}
            past = await call(session, "get", key="UA/1", as_of=str(first))
            assert past == {"found": True, "value": "on time"}
            assert await call(session, "get", key="none") == {"found": False}
            versions = (await call(session, "history", key="UA/2"))["versions"]
            assert [each["deleted"] for each in versions] == [True, False]
            assert versions[1]["value"] == {"base64": "/wA="}
            large = await call(session, "get", key="UA/3")
            assert (len(large["value"]), large["bytes"], large["is_cut"]) == (16_384, 50_000, True)
            keys, after = [], {}
            while True:
                page = await call(session, "scan", prefix="AA/", **after)
                keys += [row["key"] for row in page["rows"]]
                if "next_after" not in page:
                    break
                after = {"after": page["next_after"]}
            assert keys == [f"AA/{n:03}" for n in range(250)]
            last = await call(session, "scan", prefix="AA/", reverse=True, limit=2)
            assert [row["key"] for row in last["rows"]] == ["AA/249", "AA/248"]
            page = await call(session, "changes", since=str(first), limit=2)
            assert [change["key"] for change in page["changes"]] == ["UA/1", "UA/2"]
            assert page["next_since"]
            assert "no time" in await call(session, "get", key="UA/1", as_of="soon")
            assert "put" in await call(session, "put", key="a", value="b")
        assert store.get(b"a") is None


async def test_writes_and_prefixes_are_bounded(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", control=True) as store:
        store.put_many({b"UA/1": b"1", b"DL/1": b"1"})
        async with asked(str(tmp_path / "s"), "--prefix", "UA/", "--writable") as session:
            assert {tool.name for tool in (await session.list_tools()).tools} == READS | {
                *("put", "delete"),
            }
            assert "timestamp" in await call(session, "put", key="UA/2", value="2")
            assert "timestamp" in await call(session, "delete", key="UA/1")
            rows = (await call(session, "scan"))["rows"]
            assert rows == [{"key": "UA/2", "value": "2"}]
            changes = (await call(session, "changes", since="0"))["changes"]
            assert {change["key"] for change in changes} == {"UA/1", "UA/2"}
            for tool, arguments in {
                "get": {"key": "DL/1"},
                "history": {"key": "DL/1"},
                "scan": {"prefix": "DL/"},
                "changes": {"since": "0", "prefix": "DL/"},
                "put": {"key": "DL/1", "value": "2"},
                "delete": {"key": "DL/1"},
            }.items():
                assert "is not offered" in await call(session, tool, **arguments)
        assert dict(store.scan()) == {b"UA/2": b"2", b"DL/1": b"1"}


@pytest.mark.parametrize("word", ["--writable", ""])
async def test_a_read_only_server_makes_no_store(tmp_path: Path, word: str) -> None:
    async with asked(str(tmp_path / "none"), *([word] if word else [])) as session:
        found = await call(session, "get", key="k")
    assert (tmp_path / "none").exists() is (word == "--writable")
    assert (found == {"found": False}) is (word == "--writable")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the project's suite."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    place = tmp_path_factory.mktemp("suite")
    subprocess.run(["npm", "install", "--silent", "--prefix", str(place), *SUITE], check=True)
    modules = place / "node_modules"
    program = modules / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    return [str(modules / ".bin" / "node"), str(program)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server by HTTP, which serves until the tests end."""
    path = tmp_path_factory.mktemp("served") / "s"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        "import sys; from kvstore.adapters.mcp import server; "
        "server(sys.argv[1], writable=True).run('streamable-http', port=int(sys.argv[2]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path), str(port)],
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stderr is not None
    with process:
        for line in process.stderr:
            if "Uvicorn running" in line:
                break
        yield f"http://127.0.0.1:{port}/mcp"
        process.terminate()
        process.stderr.read()


def test_the_scenarios_are_those_of_the_suite(suite: list[str]) -> None:
    listed = subprocess.run([*suite, "list"], capture_output=True, text=True, check=True).stdout
    servers = listed.partition("Client scenarios")[0]
    assert set(re.findall(r"^  - (\S+)", servers, re.MULTILINE)) == set(MCP_SCENARIOS)


@pytest.mark.parametrize("scenario", MCP_SCENARIOS)
def test_scenario(suite: list[str], address: str, scenario: str) -> None:
    done = subprocess.run(
        [*suite, "server", "--url", address, "--scenario", scenario],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Passed: (\d+)/\1, 0 failed, 0 warnings", done.stdout), done.stdout
