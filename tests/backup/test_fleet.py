"""Fleets: many stores from one file, within bounds; a store that fails stops no other one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kvstore
from kvstore import backup
from kvstore.backup.fleet import Fleet, FleetStore, back_up_fleet, back_up_one, read_fleet
from kvstore.errors import UsageError
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.storage.wrapped import Bandwidth, LimitedBlob

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with 3.11")


def config(place: Path, *names: str, top: str = "concurrency = 2") -> Path:
    tables = [f"[stores.{n}]\npath = '{n}.db'\ncollection = 'backups/{n}'" for n in names]
    (place / "backups").mkdir(exist_ok=True)
    file = place / "backups.toml"
    file.write_text("\n".join([top, *tables]))
    return file


def stores(place: Path, *names: str) -> None:
    for name in names:
        with kvstore.open(place / f"{name}.db", durability="async") as store:
            store.put(b"name", name.encode())


@needs_toml
def test_a_bad_store_does_not_stop_the_others(tmp_path: Path) -> None:
    stores(tmp_path, "one", "two", "three")
    (tmp_path / "two.db" / "CURRENT").write_bytes(b"damaged")
    fleet = read_fleet(config(tmp_path, "one", "two", "missing", "three"))
    found = {outcome.name: outcome for outcome in back_up_fleet(fleet)}
    assert {name for name, outcome in found.items() if outcome.info is not None} == {"one", "three"}
    assert all(found[name].error for name in ("two", "missing"))
    assert not (tmp_path / "missing.db").exists()
    for name in ("one", "three"):
        with backup.Collection(tmp_path / "backups" / name).open() as reader:
            assert reader.get(b"name") == name.encode()


@needs_toml
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no stores"),
        ("[stores", "is no TOML"),
        ("fast = 1\n[stores.a]\npath = 'a'\ncollection = 'b'", "unknown fields: fast"),
        ("bandwidth = '5 lightyears'\n[stores.a]\npath = 'a'\ncollection = 'b'", "bandwidth="),
        ("concurrency = 0\n[stores.a]\npath = 'a'\ncollection = 'b'", "concurrency=0"),
        ("[stores.a]\npath = 'a'", "store a lacks"),
        ("[stores.a]\npath = 'a'\ncollection = 'b'\nkey = 'c'", "unknown fields key"),
        (
            "[stores.a]\npath = 'a'\ncollection = 'b'\nmax_age = 'long'",
            "max_age='long'",
        ),
        ("[stores.a]\npath = 'a'\ncollection = 'b'\nmax_age = '999999999w'", "older than time"),
        ("a = " + "[" * 100_000, "is no TOML"),
        ("#" * (5 << 20), "more than 4,194,304 bytes"),
        ("[stores.a]\npath = 3\ncollection = 'b'", "no text"),
        (
            "[stores.a]\npath = 'a'\ncollection = 'c'\n[stores.b]\npath = 'b'\ncollection = 'c'",
            "several stores",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "backups.toml").write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_fleet(tmp_path / "backups.toml")


@needs_toml
def test_a_file_of_other_bytes_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "backups.toml").write_bytes(b"\xff\xfe" + bytes(100))
    with pytest.raises(UsageError, match="is no TOML"):
        read_fleet(tmp_path / "backups.toml")
    with pytest.raises(UsageError, match=r"no file is at .*nothing\.toml; check the path"):
        read_fleet(tmp_path / "nothing.toml")


@needs_toml
def test_paths_count_from_the_directory_of_a_link(tmp_path: Path) -> None:
    """Kubernetes mounts a file as a link to another directory."""
    (tmp_path / "hidden").mkdir()
    config(tmp_path / "hidden", "one").rename(tmp_path / "hidden" / "file")
    (tmp_path / "backups.toml").symlink_to(tmp_path / "hidden" / "file")
    (found,) = read_fleet(tmp_path / "backups.toml").stores
    assert found.path == str(tmp_path / "one.db")


def test_an_interrupted_caller_waits_for_no_backup(tmp_path: Path) -> None:
    """At one byte a second each backup would take for ever."""
    stores(tmp_path, "one", "two", "three")
    names = ("missing", "one", "two", "three")
    fleet = Fleet(
        tuple(FleetStore(n, str(tmp_path / f"{n}.db"), str(tmp_path / n)) for n in names),
        concurrency=2,
        bandwidth=1,
    )
    outcomes = back_up_fleet(fleet)
    assert next(outcomes).name == "missing"
    with pytest.raises(KeyboardInterrupt):
        outcomes.throw(KeyboardInterrupt)  # type: ignore[attr-defined]  # it is a generator
    assert back_up_one(fleet.stores[1]).info is not None


def test_a_missing_passphrase_fails_its_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores(tmp_path, "one", "two")
    monkeypatch.delenv("FLEET_SECRET", raising=False)
    fleet = Fleet(
        tuple(
            FleetStore(n, str(tmp_path / f"{n}.db"), str(tmp_path / n), passphrase_env=secret)
            for n, secret in (("one", "FLEET_SECRET"), ("two", None))
        ),
        bandwidth=10**9,
    )
    found = {outcome.name: outcome for outcome in back_up_fleet(fleet)}
    assert "FLEET_SECRET" in found["one"].error
    assert found["two"].info is not None


def test_bytes_pass_at_the_shared_rate() -> None:
    now, pauses = [0.0], []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    bandwidth = Bandwidth(100, pause=pause, monotonic=lambda: now[0])
    one, other = (LimitedBlob(MemoryBlob(), bandwidth) for _ in range(2))
    one.put("a", bytes(300))
    other.put("b", bytes(200))
    assert one.get("a") == bytes(300)
    assert other.get_range("b", start=0, length=50) == bytes(50)
    assert pauses == [3.0, 2.0, 3.0]
    now[0] = 100.0
    one.put("c", b"later")
    assert len(pauses) == 3
