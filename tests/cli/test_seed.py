"""`kvstore seed`: a new store of old events, from files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kvstore
from tests.cli.installed import Run, told

EVENTS = [(b"a", 10, b"1"), (b"b", 15, b"x"), (b"a", 20, None), (b"a", 30, b"\0\xff")]


def history(path: Path, since: int = 0) -> list[tuple[bytes, int, bytes | None]]:
    with kvstore.open(path, create=False) as store:
        return [(c.key, int(c.timestamp), c.value) for c in store.changes(since, order="time")]


def as_parquet(path: Path, kind: pa.DataType) -> list[object]:
    keys, times, values = zip(*EVENTS, strict=True)
    table = pa.table(
        {
            "id": keys,
            "seen": pa.array(times, pa.int64()).cast(kind),
            "state": pa.array(values, pa.binary()),
            "what": ["put", "put", "delete", "put"],
            "number": [1, 2, 3, 4],
        }
    )
    pq.write_table(table.slice(2), path / "0.parquet")
    pq.write_table(table.slice(0, 2), path / "1.parquet")
    return [path / "0.parquet", path / "1.parquet", "--op", "what"]


def as_csv(path: Path, times: list[str]) -> list[object]:
    lines = ["id,seen,state,what"]
    for (key, _, value), time in zip(EVENTS, times, strict=True):
        what = "put" if value is not None else "delete"
        lines.append(f"{key.hex()},{time},{(value or b'').hex()},{what}")
    (path / "0.csv").write_text("\n".join(lines))
    return [path / "0.csv", "--op", "what", "-e", "hex"]


@pytest.mark.parametrize("form", ["instants", "longs", "iso", "nanoseconds"])
def test_each_row_of_the_files_is_a_version_at_its_time(
    run: Run, tmp_path: Path, form: str
) -> None:
    if form == "instants":
        sources = as_parquet(tmp_path, pa.timestamp("ns", "UTC"))
    elif form == "longs":
        sources = as_parquet(tmp_path, pa.int64())
    elif form == "iso":
        # A zone that is not UTC, and fractions of any length.
        texts = [f"1970-01-01T01:00:00.{at:09}+01:00" for _, at, _ in EVENTS]
        sources = as_csv(tmp_path, [texts[0], "1970-01-01 00:00:00.000000015Z", *texts[2:]])
    else:
        sources = as_csv(tmp_path, [str(at) for _, at, _ in EVENTS])
    columns = ["--key", "id", "--value", "state", "--at", "seen"]
    done = told(run("seed", tmp_path / "s", *sources, *columns, "--json"))
    assert done == {"newest": str(kvstore.Timestamp(30)), "rows": 4}
    assert history(tmp_path / "s") == EVENTS


def test_files_come_in_the_forms_that_an_import_takes(run: Run, tmp_path: Path) -> None:
    def seeded(name: str, rows: str, *options: object) -> list[tuple[bytes, int, bytes | None]]:
        (tmp_path / name).write_text(rows)
        store = tmp_path / f"{name}.db"
        run("seed", store, (tmp_path / name).as_uri(), *options)
        return history(store)

    found = [(b"a", 5, b"1;2"), (b"b", 6, None)]
    rows = "a|1;2|5|put\nb||6|delete\n"
    assert seeded("bare.csv", rows, "--delimiter", "|", "--no-header", "--op", "op") == found
    named = ["--delimiter", "tab", "--names", "seen,op,id,state", "--op", "op", "--at", "seen"]
    named += ["--key", "id", "--value", "state", "--key-encoding", "hex"]
    assert seeded("named.csv", "5\tput\t61\t1;2\n6\tdelete\t62\t\n", *named) == found
    nested = '{"key": "a", "value": {"n": 1}, "ts": 5}\n'
    assert seeded("n.jsonl", nested, "--nested", "text") == [(b"a", 5, b'{"n":1}')]
    (tmp_path / "f.csv").write_text("a;1;5\n;1;x\n")
    call = ["seed", tmp_path / "s", tmp_path / "f.csv", "--delimiter", ";", "--no-header"]
    assert "f.csv: row 2, column 'ts': 'x' is no time" in run(*call, code=2).stderr


def test_a_seed_that_is_refused_leaves_nothing(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "f.csv"
    columns = ["--at", "key"]

    def refused(text: str, *options: object) -> str:
        source.write_text(text)
        refusal = run("seed", tmp_path / "s", source, *options, code=2).stderr
        assert {each.name for each in tmp_path.iterdir()} == {"f.csv"}
        return " ".join(refusal.split())

    assert "one is named twice" in refused("key,value,ts\na,1,5\n", *columns)
    assert "no column 'ts'" in refused("key,value\na,1\n")
    # A time without a zone names a different instant in each place.
    assert "column 'ts': " in refused("key,value,ts\na,1,2026-01-01T00:00:00\n")
    assert "ISO-8601 with a zone" in refused("key,value,ts\na,1,\n")
    assert "column 'ts': " in refused("key,value,ts\na,1,99999999999999999999\n")
    assert "f.csv: row 3, column 'ts': '' is no time" in refused("key,value,ts\nb,2,6\na,1,\n")
    early = refused("key,value,ts\nb,2,6\na,1,5\n", "--since", 6)
    assert "f.csv: column 'ts' has 1970-01-01T00:00:00.000000005Z in row 3, below since" in early
    assert "looks like" in refused("key,value,ts\na,1,1700000000\n")
    assert "below since" in refused("key,value,ts\na,1,5\n", "--since", 6)
    assert "--duplicates last" in refused("key,value,ts\na,1,5\na,2,5\n")
    assert "is not hex" in refused("key,value,ts\nzz,1,5\n", "-e", "hex")
    assert "unknown kind of file" in run("seed", tmp_path / "s", tmp_path / "f.txt", code=2).stderr


def test_a_seed_rewrites_no_history(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("key,value,ts\na,1,5\na,2,5\n")
    call = ["seed", tmp_path / "s", tmp_path / "f.csv", "--duplicates", "last", "--since", 3]
    run(*call)
    with kvstore.open(tmp_path / "s", create=False) as store:
        assert (int(store.since), store.get(b"a", as_of=5)) == (3, b"2")
        written = store.put(b"a", b"3")
    assert "exists" in run(*call, code=2).stderr
    assert history(tmp_path / "s", 3) == [(b"a", 5, b"2"), (b"a", int(written), b"3")]
