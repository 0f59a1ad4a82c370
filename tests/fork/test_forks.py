"""Forks under load: a handle belongs to the process that opened it, and other processes do no
harm."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore.base.forks import own
from kvstore.errors import ForkedError
from tests.harness.forks import STATUS, reap
from tests.harness.seeds import seed_of

pytestmark = pytest.mark.on_disk

ROOT = Path(__file__).parents[2]
FEW, MANY = 5, 100


def started(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A program of this package, in a process that has imported nothing else."""
    # From Python 3.12 on a fork beside threads warns, which is the subject here.
    fork_is_meant = ["-W", "ignore:This process:DeprecationWarning"]
    return subprocess.Popen(
        [sys.executable, *fork_is_meant, "-m", f"tests.fork.{program}", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(program: str, *arguments: object) -> str:
    """The output of a program, which must succeed and report no error."""
    process = started(program, *arguments)
    out, complaints = process.communicate()
    assert process.returncode == 0, complaints
    assert not complaints
    return out


@pytest.mark.parametrize(
    "count", [FEW, pytest.param(MANY, marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.parametrize(
    ("engine", "durability"), [("rocksdb", "sync"), ("rocksdb", "group"), ("memory", "group")]
)
def test_acknowledged_rows_survive_children_that_misbehave(
    tmp_path: Path, engine: str, durability: str, count: int
) -> None:
    seed = seed_of()
    process = started("host", tmp_path, engine, durability, count, seed)
    assert process.stdout is not None
    said = process.stdout.readline()
    process.kill()
    _, complaints = process.communicate()
    assert said == "done\n", complaints
    for unwanted in ("Exception ignored", "ForkedError", "Warning"):
        assert unwanted not in complaints
    noted = (tmp_path / "acknowledged").read_bytes()
    with kvstore.open(tmp_path / "store", engine=engine) as store:
        for (number,) in struct.iter_unpack(">Q", noted[: len(noted) // 8 * 8]):
            assert store.get(b"row %012d" % number) == number.to_bytes(8, "big") * 64
        assert store.get(b"k") is None, "a child wrote"
        assert store.get(b"never") is None, "a child committed"
        assert store.verify().ok
    with kvstore.open(tmp_path / "local") as store:
        assert store.get(b"k") == b"v"


@pytest.mark.parametrize(
    "program",
    [
        "opens_anew",
        "opens_after_close",
        "locks_end",
        "scans",
        "handler",
        "subprocesses",
        "at_once",
        "pools",
        "object_stores",
        "from_c",
        "exit_handlers",
        "live_readers",
        "pullers",
    ],
)
def test_forks_of(tmp_path: Path, program: str) -> None:
    assert output("programs", program, tmp_path) == ""


class Closed:
    """A handle that has nothing to give up any more, like a closed file."""

    def fork_parts(self) -> list[object]:
        raise AttributeError

    def fork_let_go(self) -> None:
        raise ValueError


def test_a_handle_that_fails_at_a_fork_leaves_no_other_unprotected(tmp_path: Path) -> None:
    closed = Closed()
    own(closed, "a closed handle")
    with kvstore.open(tmp_path) as store:
        child = os.fork()
        if not child:
            status = 1
            try:
                with pytest.raises(ForkedError):
                    store.put(b"k", b"of the child")
                status = STATUS
            finally:
                os._exit(status)
        assert reap(child) == STATUS
        assert store.get(b"k") is None
    assert closed


def test_daemon_goes_on_without_its_parent(tmp_path: Path) -> None:
    assert output("programs", "daemon", tmp_path) == "the daemon goes on\n"


def test_server_that_forks_its_workers(tmp_path: Path) -> None:
    server = started("server", tmp_path)
    assert server.stdout is not None
    port = int(server.stdout.readline())

    def ask(request: str) -> str:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request.encode() + b"\n")
            with connection.makefile() as lines:
                return lines.readline().rstrip("\n")

    for number in range(12):
        assert ask("inherited k") == "ForkedError"
        assert ask("read k") == "v"
        assert int(ask(f"keep {number}")) > 0
        assert ask("write") == "ForkedError"
    server.terminate()
    out, complaints = server.communicate()
    assert (server.returncode, out, complaints) == (0, "[0, 0, 0]\n", "")
    kept = 0
    for number in range(3):
        with kvstore.open(tmp_path / f"own-{number}", engine="memory") as own:
            kept += len(list(own.scan()))
    assert kept >= 12
    with kvstore.open(tmp_path / "store") as store:
        assert store.get(b"row 0") == bytes(1000)
        assert store.verify().ok
