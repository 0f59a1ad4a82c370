"""The project runs as its README says: owner, four workers, a load by Spark, backups, restarts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import kvstore

PROJECT = Path(__file__).parents[1]
WAIT_S = 120


class Service:
    """The processes of the project, with one store."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.store = place / "flights.db"
        self.environment = {
            **os.environ,
            "FLIGHTS_STORE": str(self.store),
            "PYTHONPATH": os.pathsep.join([str(PROJECT.parents[1]), str(PROJECT)]),
        }
        with socket.create_server(("127.0.0.1", 0)) as spare:
            self.port = spare.getsockname()[1]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=PROJECT, env=self.environment
        )
        self.processes.append(process)
        return process

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=PROJECT,
            env=self.environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout

    def own(self) -> subprocess.Popen[bytes]:
        listen = self.place / "owner.sock"
        return self.start("kvstore", "serve", str(self.store), "--create", "--listen", str(listen))

    def serve(self) -> subprocess.Popen[bytes]:
        words = ["api:service", "--workers", "4", "--port", str(self.port)]
        return self.start("uvicorn", *words, "--log-level", "error")

    def call(self, path: str, method: str = "GET") -> Any:
        """An answer. Waits for workers that are being started."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        until = time.monotonic() + WAIT_S
        while not self._answers() and time.monotonic() < until:
            time.sleep(0.05)
        return json.load(urllib.request.urlopen(request, timeout=WAIT_S))

    def _answers(self) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(WAIT_S)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    try:
        service.own()
        service.run("tables.py")
        service.serve()
        yield service
    finally:
        service.end()


def test_rows_by_key_by_time_and_by_index(service: Service) -> None:
    before = service.call("/flights/UA/1545?status=boarding&gate=7", "PUT")["since"]
    service.call("/flights/UA/1545?status=late&delay=90", "PUT")
    late = {"carrier": "UA", "flight": 1545, "status": "late", "gate": None, "delay_s": 90}
    assert service.call("/flights/UA/1545?at=" + before)["gate"] == "7"
    # The four workers see each other's writes after a moment.
    until = time.monotonic() + WAIT_S
    while service.call("/flights/UA/1545") != late and time.monotonic() < until:
        pass
    assert [service.call("/flights/UA/1545") for _ in range(20)] == [late] * 20
    history = service.call("/flights/UA/1545/history")
    assert [each["row"]["status"] for each in history] == ["late", "boarding"]
    assert service.call("/status/late") == [late]
    with pytest.raises(urllib.error.HTTPError) as refused:
        service.call("/flights/UA/1545?at=someday")
    assert refused.value.code == 400
    assert "remedy" in json.load(refused.value)


def test_a_night_loads_once_beside_the_service(service: Service) -> None:
    rows = pa.table(
        {
            "carrier": ["DL"] * 2_000,
            "flight": pa.array(range(2_000), pa.int32()),
            "status": ["scheduled"] * 2_000,
            "gate": pa.nulls(2_000, pa.string()),
            "delay_s": pa.array(range(2_000), pa.int32()),
        }
    )
    source = service.place / "night.parquet"
    pq.write_table(rows, source)
    said = service.run("nightly.py", "20261129", str(source))
    assert "2001 rows" in said
    assert service.run("nightly.py", "20261129", str(source)) == said
    assert len(service.call("/status/scheduled")) == 100


def test_a_backup_is_drilled_beside_the_service(service: Service) -> None:
    service.run("backups.py", str(service.place / "backups"))
    service.call("/flights/AA/1?status=late", "PUT")
    service.run("backups.py", str(service.place / "backups"))


def test_a_write_waits_for_an_owner_that_is_started_anew(service: Service) -> None:
    owner = service.processes[0]
    owner.send_signal(signal.SIGKILL)
    owner.wait(WAIT_S)
    assert service.call("/flights/UA/1545")["status"] == "late"
    again = service.own()
    service.processes.remove(again)
    service.processes[0] = again
    assert service.call("/flights/UA/1545?status=landed", "PUT")["since"]
    with kvstore.connect(service.store, patience=15) as client:
        assert client.table("flights").get("UA", 1545)["status"] == "landed"


def test_the_containers_name_files_and_commands_that_exist() -> None:
    compose = yaml.safe_load((PROJECT / "compose.yaml").read_text())
    assert set(compose["services"]) == {"owner", "api", "prometheus", "bucket", "backups"}
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", ())) < set(compose["services"]), name
        volumes = {each.partition(":")[0] for each in service["volumes"]}
        assert all(each in compose["volumes"] or (PROJECT / each).exists() for each in volumes)
    for name in ("tables.py", "api.py", "backups.py"):
        assert name in (PROJECT / "Dockerfile").read_text()
        assert (PROJECT / name).exists()
    prometheus = yaml.safe_load((PROJECT / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"]
