"""Imports staged in object stores: built, sealed, fetched, refused, and removed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import ObjectStore

import kvstore
from kvstore import bulk
from kvstore.bulk.bucket import BEGUN_NAME, Bucket, fetch
from kvstore.bulk.manifest import MANIFEST_NAME
from kvstore.errors import (
    FormatVersionError,
    ImportRefusedError,
    KeyOrderError,
    OutOfSpaceError,
    UsageError,
)
from kvstore.storage.address import open_blob
from kvstore.storage.contract import Blob
from tests.bulk.staged import ROWS
from tests.harness.bounds import bounds
from tests.shard.conftest import s3_bucket, s3_options, s3_server

__all__ = ["s3_bucket", "s3_server"]


class Place:
    """A staging URL, and the options by which it is reached."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url, options

    def stage(self, *, parts: int = 1, **how: Any) -> bulk.Manifest:
        """A sealed import of `ROWS`, cut into parts by key."""
        made = bulk.Import.create(self.url, options=self.options, **how)
        keys = sorted(ROWS)
        for part in range(parts):
            with made.writer() as writer:
                for key in keys[len(keys) * part // parts : len(keys) * (part + 1) // parts]:
                    writer.put(key, ROWS[key])
        return made.seal()

    def ingest(self, store: kvstore.Store, **how: Any) -> kvstore.Timestamp:
        return bulk.ingest(store, self.url, options=self.options, **how)

    @property
    def blob(self) -> Blob:
        return open_blob(self.url, **self.options)

    def names(self) -> list[str]:
        return [found.name for found in self.blob.list()]

    def rewrite(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """Replace an object, as a hostile or careless hand does."""
        before = self.blob.get(name)
        assert before is not None
        self.blob.delete(name)
        self.blob.put(name, change(before))


@pytest.fixture
def on_s3(s3_server: str, s3_bucket: Callable[[], ObjectStore]) -> Place:
    bucket = s3_bucket().config["bucket"]  # type: ignore[attr-defined]
    return Place(f"s3://{bucket}/staging/run-42", s3_options(s3_server))


@pytest.fixture
def in_memory(request: pytest.FixtureRequest) -> Place:
    name = re.sub(r"\W", "-", request.node.name)
    return Place(f"memory://{name}-{os.getpid()}/run", {})


@pytest.fixture(params=["s3", "memory"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue("on_s3" if request.param == "s3" else "in_memory")
    return found


@pytest.fixture
def filed(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store") as store:
        yield store


def fetched_below(store: kvstore.Store) -> list[Path]:
    assert store.path is not None
    return sorted((store.path / "ingest").glob("*.fetched/*.sst*"))


def test_an_import_goes_through_a_bucket(place: Place, filed: kvstore.Store) -> None:
    manifest = place.stage(parts=3)
    assert place.names() == sorted([BEGUN_NAME, MANIFEST_NAME, *(p.name for p in manifest.parts)])
    told: list[str] = []
    times = bulk.StageTimes()
    stamp = place.ingest(filed, progress=told.append, times=times)
    assert dict(filed.scan(as_of=stamp)) == ROWS
    assert sorted(times.seconds) == ["add", "check", "fetch"]
    assert told[0].startswith("fetch 0.0 of")
    assert "MB/s" in told[0]
    assert told[-1] == "add"
    assert place.ingest(filed) == stamp
    assert fetched_below(filed) == []
    assert place.names() != []
    assert place.ingest(filed, move=True) == stamp
    assert place.names() == []


def test_a_store_in_memory_takes_an_import_from_a_bucket(in_memory: Place) -> None:
    in_memory.stage()
    with kvstore.open(None, engine="memory") as store:
        in_memory.ingest(store)
        assert dict(store.scan()) == ROWS


def test_parts_that_cross_come_back_to_be_compared(place: Place) -> None:
    made = bulk.Import.create(place.url, options=place.options)
    for first in range(2):
        with made.writer() as writer:
            for number in range(first, 100, 2):
                writer.put(b"%03d" % number, b"v")
    assert made.seal().rows == 100
    other = bulk.Import.create(f"{place.url}-2", options=place.options)
    for first in range(2):
        with other.writer() as writer:
            for number in (first, 50, 98 + first):
                writer.put(b"%03d" % number, b"v")
    with pytest.raises(KeyOrderError):
        other.seal()
    other.discard()
    assert [*open_blob(f"{place.url}-2", **place.options).list()] == []


def test_two_jobs_cannot_take_one_place(place: Place) -> None:
    bulk.Import.create(place.url, options=place.options)
    with pytest.raises(UsageError, match="is not empty"):
        bulk.Import.create(place.url, options=place.options)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_fetch_that_was_stopped_fetches_nothing_twice(
    in_memory: Place, filed: kvstore.Store, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    manifest = in_memory.stage(parts=3)
    got: list[tuple[str, int, int]] = []
    read = Bucket.piece

    def piece(self: Bucket, part: bulk.Part, start: int, length: int) -> bytes:
        got.append((part.name, start, length))
        return read(self, part, start, length)

    monkeypatch.setattr(Bucket, "piece", piece)

    def stop_at(step: str) -> None:
        if len(got) > pieces + 2:
            raise KeyboardInterrupt

    with bounds(OBJECT_PIECE_BYTES=500, OBJECT_PIECES_AT_ONCE=1):
        with pytest.raises(KeyboardInterrupt):
            in_memory.ingest(filed, progress=stop_at)
        kept = sum(path.stat().st_size for path in fetched_below(filed))
        assert kept > 0
        before = len(got)
        stamp = in_memory.ingest(filed)
    assert sum(length for _, _, length in got[before:]) == manifest.size_bytes - kept
    assert dict(filed.scan(as_of=stamp)) == ROWS


def test_a_part_that_was_damaged_on_this_disk_is_fetched_again(
    in_memory: Place, filed: kvstore.Store, tmp_path: Path
) -> None:
    manifest = in_memory.stage()
    (part,) = manifest.parts
    bucket = Bucket(in_memory.blob, in_memory.url)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / f"{part.name}.tmp").write_bytes(b"torn by a power cut" * 10)
    fetch(bucket, manifest, tmp_path / "here", lambda _: None)
    assert (tmp_path / "here" / part.name).read_bytes() == in_memory.blob.get(part.name)


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def first_part(place: Place) -> str:
    return next(name for name in place.names() if name.startswith("part-"))


def delete_part(place: Place) -> None:
    place.blob.delete(first_part(place))


def alter_part(place: Place) -> None:
    place.rewrite(first_part(place), flipped)


def cut_part(place: Place) -> None:
    place.rewrite(first_part(place), lambda data: data[:-1])


def alter_manifest(place: Place) -> None:
    place.rewrite(MANIFEST_NAME, lambda data: data.replace(b'"rows": 200', b'"rows": 201'))


def newer_manifest(place: Place) -> None:
    place.rewrite(MANIFEST_NAME, lambda data: data.replace(b'"format": 1', b'"format": 99'))


def no_manifest(place: Place) -> None:
    place.blob.delete(MANIFEST_NAME)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (delete_part, "is missing"),
        (alter_part, "was altered"),
        (cut_part, "bytes, .* were sealed"),
        (alter_manifest, "import.json"),
        (no_manifest, "it was not sealed"),
    ],
)
def test_an_import_that_is_not_as_it_was_sealed_is_refused_by_name(
    place: Place, filed: kvstore.Store, harm: Callable[[Place], None], problem: str
) -> None:
    place.stage()
    harm(place)
    upper = filed.upper
    with pytest.raises(ImportRefusedError, match=problem):
        place.ingest(filed)
    assert filed.imports.all() == []
    assert fetched_below(filed) == []
    assert filed.count() == 0
    assert filed.upper >= upper


def test_a_newer_format_is_refused(place: Place, filed: kvstore.Store) -> None:
    place.stage()
    newer_manifest(place)
    with pytest.raises(FormatVersionError):
        place.ingest(filed)


def test_a_place_where_nothing_is_is_named(place: Place, filed: kvstore.Store) -> None:
    with pytest.raises(ImportRefusedError, match="nothing is there"):
        place.ingest(filed)


def test_a_disk_without_room_is_found_before_anything_is_fetched(
    in_memory: Place, filed: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory.stage()
    monkeypatch.setattr(Bucket, "piece", lambda *_: pytest.fail("something was fetched"))
    with bounds(FETCH_SPARE_BYTES=1 << 60), pytest.raises(OutOfSpaceError, match="are needed"):
        in_memory.ingest(filed)
    assert filed.imports.all() == []


def test_sizes_are_bounded_on_both_sides(in_memory: Place, filed: kvstore.Store) -> None:
    with pytest.raises(UsageError, match="max_bytes=10"):
        in_memory.stage(max_bytes=10)
    other = Place(in_memory.url + "-2", {})
    other.stage()
    with pytest.raises(UsageError, match="max_bytes=10"):
        other.ingest(filed, max_bytes=10)


def test_the_record_of_the_beginning_is_golden(in_memory: Place) -> None:
    bulk.Import.create(in_memory.url, import_id=7)
    found = json.loads(in_memory.blob.get(BEGUN_NAME) or b"")
    assert sorted(found) == ["begun", "format", "import_id", "job"]
    assert (found["format"], found["import_id"]) == (1, "0000000000000007")
