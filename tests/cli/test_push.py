"""`kvstore push`: files become pushes, and stores take them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.pushes import Pushes
from kvstore.errors import UsageError
from tests.backup.test_reader_requests import url
from tests.cli.installed import ROOT, Run
from tests.harness.proxy import Answer, Proxy
from tests.pushes.made import build_time, push
from tests.shard.conftest import s3_bucket, s3_options, s3_server

__all__ = ["s3_bucket", "s3_server", "url"]

WAIT_S = 120
"""Far more than any wait of a test takes: a bound for a machine that hangs."""

WITHOUT_PATIENCE = """
from kvstore.cli.start import main
from tests.harness.bounds import bounds

with bounds(RETRY_S=0.0, PULL_PAUSE_S_MAX=0.1):
    main()
"""
"""The command, whose calls are tried once."""


def test_files_become_pushes_of_each_mode(run: Run, tmp_path: Path) -> None:
    url, file = tmp_path / "pushes", tmp_path / "f.csv"
    places = [tmp_path / f"s{shard}" for shard in range(2)]
    for place in places:
        kvstore.open(place).close()

    def make(rows: str, *options: object) -> None:
        file.write_text(f"k,v\n{rows}\n")
        run("push", "make", url, file, "--key", "k", "--value", "v", "--shards", 2, *options)

    def pulled() -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for shard, place in enumerate(places):
            run("push", "pull", place, url, "--name", f"s{shard}", "--shard", shard, "--once")
            with kvstore.open(place) as store:
                found |= dict(store.scan())
        return found

    make("b/2,2\na/1,1\nb/1,1\na/2,2")
    assert pulled() == {b"a/1": b"1", b"a/2": b"2", b"b/1": b"1", b"b/2": b"2"}
    with kvstore.open(places[0]) as store:
        built_at = build_time(store)
        store.put(b"b/live", b"newer")
    newer = ["--keep-newer", "--built-at", built_at]
    make("b/1,3\nb/1,4", "--mode", "replace", "--prefix", "b/", "--duplicates", "last", *newer)
    assert pulled() == {b"a/1": b"1", b"a/2": b"2", b"b/1": b"4", b"b/live": b"newer"}
    listed = run("push", "list", url, "--json").stdout.splitlines()
    found = [(each["push"], each["mode"], each["rows"]) for each in map(json.loads, listed)]
    assert found == [(2, "replace", 1), (1, "add", 4)]
    refused = run("push", "make", url, file, "--key", "k", "--value", "v", code=2)
    assert "came twice" in refused.stderr
    file.write_text("k,v\na/9,9\n")
    options = ["--key", "k", "--value", "v", "--mode", "replace", "--prefix", "b/"]
    assert "outside of the span" in run("push", "make", url, file, *options, code=2).stderr
    assert run("push", "list", url, "--json").stdout.splitlines() == listed
    file.write_text("k,v\na/9,9\n")
    run("push", "make", url, file, "--key", "k", "--value", "v")
    once = ["push", "pull", places[0], url, "--name", "s0", "--once", "--on-refusal"]
    assert "push 3 has 1 shards" in run(*once, "wait", code=2).stderr
    assert "pass one of pass, wait" in run(*once, "stop", code=2).stderr
    with kvstore.open(places[0]) as store:
        assert b"a/9" not in dict(store.scan())
    told = [
        json.loads(line) for line in run("push", "status", url, 3, "--json").stdout.splitlines()
    ]
    assert [(each["name"], each["state"]) for each in told] == [
        ("s0", "waiting"),
        ("s1", "waiting"),
    ]
    assert all(each["free"] > 0 for each in told)


def test_files_come_in_the_forms_that_an_import_takes(run: Run, tmp_path: Path) -> None:
    url, place = tmp_path / "pushes", tmp_path / "s"
    kvstore.open(place).close()
    bare, named, nested = (tmp_path / name for name in ("bare.csv", "named.csv", "n.jsonl"))
    bare.write_text("a|1;2\n")
    named.write_text("x\t62\t7a\n")
    nested.write_text('{"key": "c", "value": {"n": 1}}\n')
    run("push", "make", url, bare.as_uri(), "--delimiter", "|", "--no-header")
    columns = ["--names", "other,key,value", "--key-encoding", "hex", "--value-encoding", "hex"]
    run("push", "make", url, named, "--delimiter", "tab", *columns)
    run("push", "make", url, nested, "--nested", "text")
    run("push", "pull", place, url, "--name", "s", "--once")
    with kvstore.open(place) as store:
        assert dict(store.scan()) == {b"a": b"1;2", b"b": b"z", b"c": b'{"n":1}'}
    refused = run("push", "make", url, nested, "--delimiter", "|", code=2)
    assert "delimiter" in refused.stderr


ASKED = (("list",), ("expire", "--keep", 1), ("status", 1), ("revert", 1))
"""Commands on pushes that were made."""


def test_a_place_without_a_push_is_told(run: Run, tmp_path: Path) -> None:
    store, empty, missing = tmp_path / "s", tmp_path / "p", tmp_path / "no" / "p"
    kvstore.open(store).close()
    for place in (empty, missing):
        for command, *words in ASKED:
            refused = run("push", command, place, *words, code=2)
            assert f"{place} holds no push; check the URL" in refused.stderr
    refused = run("push", "pull", store, missing, "--name", "s", "--once", code=2)
    assert f"there is no directory {missing.parent}" in refused.stderr
    assert not empty.exists()
    assert not missing.parent.exists()
    with kvstore.open(store) as opened, pytest.raises(UsageError, match="there is no directory"):
        bulk.pull(opened, missing, name="s")
    assert not missing.parent.exists()
    pulled = run("push", "pull", store, empty, "--name", "s", "--once")  # it waits for the first
    assert f"{empty} holds no push yet" in pulled.stderr
    assert "holds no push" in run("push", "list", empty, code=2).stderr
    push(Pushes(empty), {b"a": b"1"})
    assert run("push", "pull", store, empty, "--name", "s", "--once").stderr == ""
    assert "sealed" in run("push", "list", empty).stdout


def test_a_bucket_that_is_not_there_is_told(
    run: Run, tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", s3_server)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    url = "s3://there-is-no-such-bucket/pushes"
    for command, *words in ASKED:
        assert "check the bucket's name" in run("push", command, url, *words, code=2).stderr
    for more in (["--once"], []):
        words = ["push", "pull", tmp_path / "new", url, "--name", "s", "--create", *more]
        assert "check the bucket's name" in run(*words, code=2).stderr
    assert not (tmp_path / "new").exists()


def test_a_store_that_pulls_once_prints_what_it_refuses(run: Run, tmp_path: Path) -> None:
    url, file = tmp_path / "pushes", tmp_path / "f.csv"
    file.write_text("key,value\na,1\n")
    for shards in (1, 2):
        run("push", "make", url, file, "--shards", shards)
    kvstore.open(tmp_path / "s").close()
    found = run("push", "pull", tmp_path / "s", url, "--name", "s", "--once")
    assert "push refused" in found.stderr
    assert "push 2 has 2 shards" in found.stderr


def test_a_store_that_follows_prints_what_it_refuses(tmp_path: Path) -> None:
    pushes, store = Pushes(tmp_path / "pushes"), tmp_path / "s"
    push(pushes, {b"a": b"1"}, shards=2)
    words = ["push", "pull", str(store), pushes.where, "--name", "s", "--shard", "7", "--create"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # Tests that run in the background ignore interrupts. The child would inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stderr is not None
        assert b"follows" in child.stderr.readline()
        told = child.stderr.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait() == 0
    assert b"push refused" in told
    assert b"push 1 has 2 shards, and this store takes shard 7" in told


def test_a_store_follows_a_bucket_that_fails_at_first(
    tmp_path: Path, s3_server: str, url: str
) -> None:
    with Proxy(s3_server) as proxy:
        proxy.weather = lambda _: Answer.FAILED
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        words = ["push", "pull", str(tmp_path / "s"), url, "--name", "s", "--create"]
        with subprocess.Popen(
            [sys.executable, "-c", WITHOUT_PATIENCE, *words, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                **dict.fromkeys(names, "test"),
                "AWS_ENDPOINT": proxy.url,
                "PYTHONPATH": str(ROOT),
            },
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as child:
            assert child.stderr is not None
            assert child.stdout is not None
            try:
                told, follows, failed = (child.stderr.readline() for _ in range(3))
                assert b"500 Internal Server Error" in told
                assert f"s follows {url} as s".encode() in follows
                assert f"pulling {url} failed".encode() in failed
                proxy.weather = lambda _: Answer.WHOLE
                pushes = Pushes(url, options=s3_options(s3_server))
                push(pushes, {b"a": b"1"})
                pushes.wait(1, ["s"], until="added", timeout=WAIT_S)
                child.send_signal(signal.SIGINT)
                assert child.wait() == 0
                assert json.loads(child.stdout.read())["added"] == 1
            finally:
                child.kill()
    with kvstore.open(tmp_path / "s") as store:
        assert dict(store.scan()) == {b"a": b"1"}
