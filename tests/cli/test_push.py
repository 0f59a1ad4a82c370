"""`kvstore push`: files become pushes, and stores take them."""

from __future__ import annotations

import json
from pathlib import Path

import kvstore
from tests.cli.installed import Run
from tests.pushes.made import build_time


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
