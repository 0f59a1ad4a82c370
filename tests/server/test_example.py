"""The example of a service runs by the commands in its first lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import kvstore
import kvstore.remote.server.running

EXAMPLES = Path(kvstore.__file__).parent.parent / "examples"
TOKEN = "t" * 32


def test_a_service_of_fastapi_and_a_notebook_beside_it(tmp_path: Path) -> None:
    listener = kvstore.remote.server.running.bound(
        kvstore.remote.server.ListenAddress("127.0.0.1", 0)
    )
    with listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = ["uvicorn", "flights_service:service", "--fd", str(listener.fileno())]
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--log-level", "error"],
            cwd=EXAMPLES,
            env={**os.environ, "FLIGHTS_STORE": str(tmp_path / "db"), "FLIGHTS_TOKEN": TOKEN},
            pass_fds=[listener.fileno()],
        )
    try:

        def call(path: str, method: str = "GET") -> Any:
            request = urllib.request.Request(url + path, method=method)
            return json.load(urllib.request.urlopen(request, timeout=120))

        then = call("/flights/UA1545?status=boarding", "PUT")["since"]
        with kvstore.connect(f"{url}/store", TOKEN) as notebook:
            notebook.put(b"UA1545", b"late")
        assert call("/flights/UA1545")["status"] == "late"
        assert call(f"/flights/UA1545?at={then}")["status"] == "boarding"
        assert [each["status"] for each in call("/flights/UA1545/history")] == ["late", "boarding"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            call("/flights/UA1545?at=noon")
        assert refused.value.code == 400
        assert "ISO-8601" in json.load(refused.value)["remedy"]
    finally:
        process.terminate()
        process.wait()
