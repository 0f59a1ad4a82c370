"""Processes that are killed: writers, compactors and collectors on one shard of local files.

Each child appends, compacts or collects as fast as it can, reports durable batches on its pipe, and
is killed by SIGKILL in the middle. Each reported batch must be there once.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.backup.shard.rows.batch_writer import BatchDesc
from kvstore.backup.shard.shard import Shard
from kvstore.storage.local_files import FileBlob, FileConsensus
from tests.shard.rows import put, state_of, versions

WRITER = """
import sys
from kvstore.backup.shard import *
from tests.shard.rows import put, versions

folder, name = sys.argv[1:]
shard = Shard.open(FileBlob(folder + "/blob"), FileConsensus(folder + "/consensus"), "s")
writer = shard.writer(name)
while True:
    lower = shard.refresh().upper
    key = f"{name}-{lower:06}".encode()
    batch = shard.write_batch(BatchDesc(lower, lower + 1), versions([put(key, lower)]))
    try:
        writer.compare_and_append(batch)
    except Exception as error:
        if type(error).__name__ != "UpperMismatchError":
            raise
        delete_batch(shard.blob, batch)
    else:
        print(key.decode(), flush=True)
"""

CARER = """
import sys
from kvstore.backup.shard import *

folder, name = sys.argv[1:]
shard = Shard.open(FileBlob(folder + "/blob"), FileConsensus(folder + "/consensus"), "s")
while True:
    shard.compact(full=name == "full")
    shard.gc()
    print("round", flush=True)
"""


def start(code: str, folder: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder), name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def kill_after(child: subprocess.Popen[str], lines: int) -> list[str]:
    """Let the child report `lines` lines, kill it, and return all its lines."""
    assert child.stdout is not None
    said = []
    for _ in range(lines):
        line = child.stdout.readline()
        assert line, "the child ended by itself"
        said.append(line.strip())
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read().splitlines()
    assert child.wait() == -signal.SIGKILL
    return said + rest


def opened(folder: Path) -> Shard:
    return Shard.open(FileBlob(folder / "blob"), FileConsensus(folder / "consensus"), "s")


def keys_of(shard: Shard) -> list[str]:
    with shard.snapshot(shard.refresh().upper - 1) as snapshot:
        return [key.decode() for key in state_of(snapshot.read())]


def test_a_killed_writers_acknowledged_batches_are_there_once(tmp_path: Path) -> None:
    rng = random.Random(1)
    acknowledged: list[str] = []
    for generation in range(3):
        child = start(WRITER, tmp_path, f"w{generation}")
        acknowledged += kill_after(child, rng.randrange(1, 15))
    shard = opened(tmp_path)
    assert set(acknowledged) <= set(keys_of(shard))
    # There is one batch for each instant. A killed child may have committed a batch that it could
    # not report.
    assert shard.upper == len(keys_of(shard)) <= len(acknowledged) + 3
    shard.compact(full=True)
    shard.gc()
    assert set(acknowledged) <= set(keys_of(shard))
    assert shard.scrub(checksums=True).is_sound


def test_writers_compactors_and_collectors_are_killed_beside_each_other(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """On a disk, whose fsyncs keep the writers from appending faster than a compaction merges."""
    tmp_path = tmp_path_factory.mktemp("shard")
    opened(tmp_path).writer("first").progress(1)
    acknowledged: list[str] = []
    for generation in range(2):
        writers = [start(WRITER, tmp_path, f"{name}{generation}") for name in ("a", "b")]
        carer = start(CARER, tmp_path, "full" if generation % 2 else "slots")
        kill_after(carer, 1 + generation)
        for writer in writers:
            acknowledged += kill_after(writer, 6)
    shard = opened(tmp_path)
    found = keys_of(shard)
    assert set(acknowledged) <= set(found)
    assert len(acknowledged) == len(set(acknowledged))
    assert shard.upper == len(found) + 1
    shard.compact(full=True)
    shard.gc()
    assert keys_of(shard) == found
    report = shard.scrub(checksums=True, delete_orphans_before_ns=1 << 63)
    assert report.is_sound
    assert [n for n in shard.scrub().orphans if "/part/" in n] == []


def killed_at_call(step: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child that is killed before its `step`-th call to fsync, link or unlink.

    Returns False if it makes fewer calls.
    """
    child = os.fork()
    if child == 0:
        calls = itertools.count()

        def deadly(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("fsync", "link", "unlink"):
            setattr(os, name, deadly(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_put_killed_at_any_call_leaves_all_or_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    for step in itertools.count():
        root = tmp_path / str(step)
        if not killed_at_call(step, lambda root=root: FileBlob(root).put("a/b", data)):
            break
        blob = FileBlob(root)
        assert blob.get("a/b") in (None, data)
        assert [info.name for info in blob.list()] in ([], ["a/b"])
        blob.put("a/b", data)
        blob.sweep(before_ns=1 << 62)
        assert [path.name for path in root.rglob("*") if path.is_file()] == ["b"]
    assert step >= 5


def test_a_collection_of_local_files_killed_at_any_call_is_finished_by_the_next(
    tmp_path: Path,
) -> None:
    def prepared(root: Path) -> Shard:
        shard = opened(root)
        for upper in (3, 5, 7):
            rows = versions([put(b"k", upper - 1, b"%d" % upper)])
            batch = shard.write_batch(BatchDesc(shard.refresh().upper, upper), rows)
            shard.writer().compare_and_append(batch)
        shard.compact(full=True)
        return shard

    for step in itertools.count():
        root = tmp_path / str(step)
        prepared(root)
        killed = killed_at_call(step, lambda root=root: opened(root).gc())
        shard = opened(root)
        shard.gc()
        shard.gc()
        with shard.snapshot(6) as snapshot:
            assert state_of(snapshot.read()) == {b"k": b"7"}
        report = shard.scrub(checksums=True)
        assert report.is_sound
        assert not [name for name in report.orphans if "/part/" in name]
        if not killed:
            break
    assert step >= 10
