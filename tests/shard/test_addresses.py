"""One text names one place, whichever door it comes through, or every door refuses it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from obstore.store import from_url

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.backup.tasks import place_of as place_of_a_task
from kvstore.bulk.bucket import BucketUrl
from kvstore.bulk.pushes.push_log import root_place
from kvstore.bulk.served import AllowedPlaces
from kvstore.bulk.staging import staging_place
from kvstore.errors import KVStoreError, UsageError
from kvstore.spark.access import absolute
from kvstore.storage.address import open_blob, open_storage, parse_address, public_address

S3 = {"region": "us-east-1", "access_key_id": "x", "secret_access_key": "x"}
ODD = [
    "#",
    "?",
    "\n",
    "\t",
    "\\",
    "%23",
    "%2F",
    "%2e",
    "%",
    " ",
    "ü",
    "e\u0301",
    "..",
    ".",
    "//",
    "/",
]
"""Pieces that some reader of URLs drops, decodes, or takes for a step."""
pieces = st.sampled_from([*ODD, "a", "run-2", "~", "@", ":", "+", "&", "*", "[", "'", '"', "%zz"])
paths = st.lists(pieces | st.text(max_size=3), max_size=6).map("".join)
schemes = st.sampled_from(["s3", "gs", "az", "S3", "s3a", "memory", "file"])
hosts = st.sampled_from(["bucket", "B_c.d-1", "", "u:p@b", "b:90", "b%41", "b b", "b\n", "b\\c"])
urls = st.builds("{}://{}/{}".format, schemes, hosts, paths) | st.builds("s3:{}".format, paths)

Door = Callable[[str], str]
DOORS: dict[str, Door] = {
    "staging": lambda url: _text(staging_place(url)),
    "below": lambda url: _text(BucketUrl(url).below("x")).removesuffix("/x"),
    "pushes": lambda url: root_place(url, None, None).url.url,
    "task": place_of_a_task,
    "spark": absolute,
    "shown": lambda url: public_address(_whole(url)),
    "served": lambda url: _text(AllowedPlaces(url, {}).staging(f"{parse_address(url).url}/x"))[:-2],
}


def _text(place: Any) -> str:
    return place.url if isinstance(place, BucketUrl) else str(place)


def _whole(url: str) -> str:
    parse_address(url)
    return url


def told(door: Door, url: str) -> str | None:
    """The address that a door makes of a URL, None if it refuses it."""
    try:
        found = door(url)
    except UsageError:
        return None
    return found if "://" in found else f"file://{quote(os.fsencode(found), safe='/')}"


@settings(max_examples=400)
@given(urls)
@example("s3://b/staging#old")
@example("s3://b/a%2e%2e/../x")
def test_a_url_is_one_place_for_all_doors_and_for_the_object_store(url: str) -> None:
    check_url(url)


@pytest.mark.soak
@settings(max_examples=20_000)
@given(urls)
def test_a_url_is_one_place_at_length(url: str) -> None:
    check_url(url)


def check_url(url: str) -> None:
    try:
        address = parse_address(url)
    except UsageError:
        assert {name: told(door, url) for name, door in DOORS.items()} == dict.fromkeys(DOORS)
        return
    if address.is_file:
        return  # steps, links and the working directory are the file system's
    assert parse_address(address.url) == address
    assert {told(door, url) for door in DOORS.values()} == {address.url}
    if address.scheme in ("s3", "s3a"):
        store: Any = from_url(address.url, **S3)  # type: ignore[arg-type]
        assert (store.config["bucket"], store.prefix or "") == (address.host, address.path)
    # Each character of the text stands for itself, unless it escapes another one.
    assert quote(address.path, safe="") == quote_again(url.partition("://")[2].partition("/")[2])


def quote_again(path: str) -> str:
    """A path with its escapes in one form."""
    pieces = path.rstrip("/").split("%")
    kept = "".join(f"%{piece[:2].upper()}{quote(piece[2:], safe='')}" for piece in pieces[1:])
    whole = quote(pieces[0], safe="") + kept
    for plain in "-._~" + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789":
        whole = whole.replace(f"%{ord(plain):02X}", plain)
    return whole


CASES = [
    ("s3://b/staging#old", "%23"),
    ("s3://b/staging?old", "%3F"),
    ("s3://b/staging\nold", "control character"),
    ("s3://b/staging\n", "control character"),
    ("s3://b/staging/../other", "step '..'"),
    ("s3://b/staging/%2e%2E/other", "step '..'"),
    ("s3://b/a//b", "step ''"),
    ("s3://b/a\\..\\b", "backslash"),
    ("s3://b/a%2Fb", "escaped slash"),
    ("s3://b/a%0Ab", "control character"),
    ("s3://b/100%", "%25"),
    ("s3://b/a%ff", "UTF-8"),
    ("s3://key:secret@b/x", "user or a password"),
    ("s3://b:9000/x", "no bucket"),
    ("s3:///x", "no bucket"),
    ("s3://b #x/y", "%23"),
    (Path("s3://b/x"), "neither a URL nor a path"),
    ("GS:b", "neither a URL nor a path"),
    ("memory://", "no bucket"),
    ("file:///a?b", "%3F"),
    ("file://~/a", "names a host"),
    ("a\0b", "zero byte"),
    ("", "empty"),
]


@pytest.mark.parametrize(("url", "why"), CASES)
def test_a_url_that_could_name_another_place_is_refused_by_each_verb(url: Any, why: str) -> None:
    """`expire_stagings("s3://b/staging#old")` removed all of `staging`, and `ingest` of `run#2`
    loaded `run#1`: what followed the # was dropped."""
    week = timedelta(days=7)
    with kvstore.open(None, engine="memory") as store:
        for call in (
            lambda: open_storage(url),
            lambda: open_blob(url),
            lambda: Collection(url),
            lambda: bulk.ingest(store, url),
            lambda: bulk.expire_stagings(url, older_than=week),
            lambda: bulk.Import.create(url),
            lambda: bulk.Pushes(url),
        ):
            with pytest.raises(KVStoreError) as refused:
                call()
            assert isinstance(refused.value, UsageError)
            assert "secret" not in str(refused.value)
            if isinstance(url, str) and url:
                assert why in str(refused.value)


def test_one_address_however_it_is_written(tmp_path: Path) -> None:
    for one, other in (
        ("S3://b/x/", "s3://b/x"),
        ("s3://b/a b", "s3://b/a%20b"),
        ("s3://b/ü", "s3://b/%C3%BC"),
        ("memory://m/a%23b", "MEMORY://m/a%23b/"),
        (f"file:{tmp_path}", f"FILE://localhost{tmp_path}"),
    ):
        assert parse_address(one) == parse_address(other)
    odd = tmp_path / "a#?%20\n ü~"
    assert parse_address(odd.as_uri()).path == parse_address(odd).path == str(odd)


def test_stagings_below_an_odd_name_are_told_from_their_neighbours() -> None:
    name = "memory://odd-names"
    for path in ("staging", "staging%23old", "staging%3Fold", "staging old"):
        staged = bulk.Import.create(f"{name}/{path}/run")
        with staged.writer() as writer:
            writer.put(b"k", path.encode())
        staged.seal()
    with kvstore.open(None, engine="memory") as store:
        for path in ("staging%23old", "staging", "staging old", "staging%3Fold"):
            bulk.ingest(store, f"{name}/{path}/run")
            assert store.get(b"k") == path.encode()
    gone = bulk.expire_stagings(f"{name}/staging%23old", older_than=timedelta(0))
    assert [each.path for each in gone] == ["run"]
    left = {info.name.partition("/")[0] for info in open_blob(name).list()}
    assert left == {"staging", "staging=3Fold", "staging=20old"}
