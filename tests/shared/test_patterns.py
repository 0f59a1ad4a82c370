"""The ways in which programs come to have several processes: servers that fork their workers, pools
of workers that are replaced, kernels of notebooks, and scripts of cron."""

from __future__ import annotations

import http.client
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import server
from kvstore.errors import UsageError
from tests.shared.programs import count_runs, member_of, until

APPLICATION = """
import os, kvstore
store = kvstore.open(os.environ["STORE"], shared=True, patience=60)

def wsgi(environ, start):
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"%d %d" % (store.increment(b"total"), os.getpid())]

async def asgi(scope, receive, send):
    if scope["type"] == "http":
        body = b"%d %d" % (store.increment(b"total"), os.getpid())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
"""

SERVERS = {
    "gunicorn": ["gunicorn", "--workers", "2", "--bind", "unix:{at}", "served:wsgi"],
    "gunicorn, preloaded": [
        *("gunicorn", "--workers", "2", "--preload", "--bind", "unix:{at}", "served:wsgi"),
    ],
    "uvicorn": ["uvicorn", "--workers", "2", "--lifespan", "off", "--uds", "{at}", "served:asgi"],
}


class _Unix(http.client.HTTPConnection):
    """A connection to a server at a path."""

    def __init__(self, at: Path) -> None:
        super().__init__("localhost")
        self._at = at

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._at))


def asked(at: Path) -> tuple[int, int] | None:
    """The total, and the worker that answered; None while no worker does."""
    connection = _Unix(at)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        if answer.status != 200:
            return None
        total, pid = answer.read().split()
        return int(total), int(pid)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@contextmanager
def served(command: list[str], place: Path) -> Iterator[Path]:
    """A server of two workers of `APPLICATION`; gives its socket."""
    at = place / "socket"
    (place / "served.py").write_text(APPLICATION)
    words = [sys.executable, "-m", *(word.format(at=at) for word in command)]
    paths = os.pathsep.join([str(place), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "STORE": str(place / "store")}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, env=environment, stdout=quiet, stderr=quiet, cwd=place)
    try:
        yield at
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("name", SERVERS)
def test_the_workers_of_a_server_share_a_store(tmp_path: Path, name: str) -> None:
    command = SERVERS[name]
    if find_spec(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    totals, workers = [], set()
    with served(command, tmp_path) as at:
        until(lambda: asked(at) is not None)
        while len(workers) < 2 or len(totals) < 10:
            answer = asked(at)
            assert answer is not None
            totals.append(answer[0])
            workers.add(answer[1])
        os.kill(min(workers), signal.SIGKILL)  # the owner, or another one
        until(lambda: (answer := asked(at)) is not None and answer[1] not in workers)
    assert totals == sorted(set(totals))
    with kvstore.open(tmp_path / "store", shared=True) as store:  # of a server that has ended
        assert int(store.get(b"total")) >= len(totals) + 2


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_pool_that_replaces_its_workers_loses_no_task(tmp_path: Path, method: str) -> None:
    """Workers end after some tasks and new ones come, as in Celery."""
    path = tmp_path / "store"
    context = multiprocessing.get_context(method)
    with kvstore.open(path, shared=True) as store:
        with context.Pool(2, maxtasksperchild=2) as pool:
            answers = pool.map(count_runs, [store] * 5, chunksize=1)
        assert sorted(total for total, _ in answers) == [1, 2, 3, 4, 5]
        assert len({pid for _, pid in answers}) >= 3
        assert os.getpid() not in {pid for _, pid in answers}


KERNEL = """
import code, sys
cells = code.InteractiveConsole()
for line in sys.stdin:
    cells.push(line.rstrip("\\n"))
    print(flush=True)
"""


def test_a_notebook_beside_a_service_is_restarted(tmp_path: Path) -> None:
    """A kernel opens the store twice, is killed in the middle of a cell, and begins anew."""
    path = tmp_path / "store"
    with kvstore.open(path, shared=True) as service:
        for run in (1, 2):
            kernel = subprocess.Popen(
                [sys.executable, "-c", KERNEL],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert kernel.stdin is not None
            assert kernel.stdout is not None
            for cell in (
                "import kvstore",
                f"store = kvstore.open({str(path)!r}, shared=True)",
                f"store = kvstore.open({str(path)!r}, shared=True)",  # the cell is run again
                "_ = store.increment(b'cells')",
            ):
                kernel.stdin.write(cell + "\n")
                kernel.stdin.flush()
                kernel.stdout.readline()
            assert service.get(b"cells") == b"%d" % run
            kernel.stdin.write("import time; [store.get(b'cells') for _ in iter(int, 1)]\n")
            kernel.stdin.flush()
            kernel.kill()
            kernel.wait()
            kernel.stdin.close()
            kernel.stdout.close()
        assert service.stats()["guests"] == 0


@pytest.mark.usefixtures("spawn")
def test_a_server_refuses_the_handle_of_a_guest(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with member_of(path) as owner, kvstore.open(path, shared=True) as guest:
        owner.ask("put", b"k", b"v")
        with pytest.raises(UsageError, match="--readers"):
            _ = server.app(guest).service
        owner.kill()
        guest.put(b"k", b"w")
        application: Any = server.app(guest)
        assert application.service.store is guest  # it owns the store now
        application.close()
