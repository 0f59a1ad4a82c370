"""A forged staging directory ends in the documented error or in the right rows, and in a refusal
nothing changes, neither in the store nor in the staging directory.

Checksums and digests have no key: each forgery carries the ones that fit it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bulk
import kvstore
from bulk.cli import app
from bulk.staging import MANIFEST_NAME
from bulk.tasks import submit_import
from kvstore.codec.keys import TOMBSTONE, VALUE, encode_reference, encode_suffix
from kvstore.codec.ordered import frame
from kvstore.errors import CorruptionError, FormatVersionError, ImportRefusedError, UsageError
from kvstore.limits import JSON_BYTES_MAX, KEY_BYTES_MAX
from tests.bulk.staged import (
    ROWS,
    Fields,
    described,
    entry,
    everything_in,
    first_part,
    forge,
    manifest_of,
    part_of,
    reseal,
    stage,
)

pytestmark = pytest.mark.usefixtures("each_engine")

REFUSED = (ImportRefusedError, FormatVersionError)


@pytest.fixture(scope="module")
def attacked(each_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvstore.Store]:
    """A store that every refused staging directory of this module was to be added to."""
    place = tmp_path_factory.mktemp("attacked")
    with kvstore.open(place / "store") as store:
        store.put(b"live", b"kept")
        yield store
        assert list(store.scan()) == [(b"live", b"kept")]


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    """A sealed import, as it was sealed."""
    stage(tmp_path / "staged")
    return tmp_path / "staged"


def refused(store: kvstore.Store, staging: Path, match: str = ".", **how: bool) -> None:
    """The import is refused, and no name or byte of the store and of `staging` changes."""
    assert store.path is not None
    places = store.path, staging.parent
    before = [everything_in(place) for place in places]
    with pytest.raises(REFUSED, match=match) as raised:
        bulk.ingest(store, staging, move=True, **how)
    assert len(str(raised.value)) < 1000
    assert [everything_in(place) for place in places] == before
    assert store.imports() == []


# -- the manifest -----------------------------------------------------------------------------


def setting(name: str, value: object) -> Callable[[Fields], None]:
    return lambda fields: fields.update({name: value})


def part_setting(name: str, value: object) -> Callable[[Fields], None]:
    return first_part(setting(name, value))


def dropping(name: str) -> Callable[[Fields], None]:
    return lambda fields: fields.pop(name)


NAMES = {
    "up": "../../CURRENT",
    "up in disguise": "part-" + "0" * 32 + ".sst/../../store/CURRENT",
    "the parent": "..",
    "here": ".",
    "nothing": "",
    "the manifest": MANIFEST_NAME,
    "a NUL": "part-" + "0" * 32 + ".sst\0",
    "a line break": "part-" + "0" * 32 + ".sst\n",
    "capitals": "part-" + "A" * 32 + ".sst",
    "digits of another script": "part-" + "\u0661" * 32 + ".sst",
    "a lone surrogate": "part-" + "\ud800" * 32 + ".sst",
    "unfinished": "part-" + "0" * 32 + ".sst.tmp",
    "a directory": "sub/part-" + "0" * 32 + ".sst",
    "a long one": "part-" + "0" * 100_000 + ".sst",
    "a number": 7,
    "a list": ["part-" + "0" * 32 + ".sst"],
    "null": None,
}

FIELDS: dict[str, Callable[[Fields], object]] = {
    **{f"name: {name}": part_setting("name", value) for name, value in NAMES.items()},
    "bounds: narrowed below": part_setting("smallest", b"001".hex()),
    "bounds: narrowed above": part_setting("largest", b"198".hex()),
    "bounds: narrowed to one key": first_part(
        lambda part: part.update(smallest=b"100".hex(), largest=b"101".hex())
    ),
    "bounds: widened": part_setting("largest", b"999".hex()),
    "bounds: swapped": first_part(
        lambda part: part.update(smallest=part["largest"], largest=part["smallest"])
    ),
    "bounds: no hex": part_setting("smallest", "zz"),
    "bounds: capital hex": part_setting("smallest", "0A"),
    "bounds: a number": part_setting("largest", 7),
    "bounds: null": part_setting("largest", None),
    "bounds: missing": first_part(dropping("smallest")),
    "bounds: a key too long": part_setting("largest", "ff" * (KEY_BYTES_MAX + 1)),
    "rows: one more": part_setting("rows", len(ROWS) + 1),
    "rows: one fewer": part_setting("rows", len(ROWS) - 1),
    "rows: none": part_setting("rows", 0),
    "rows: one": part_setting("rows", 1),
    "rows: negative": part_setting("rows", -len(ROWS)),
    "rows: beyond 64 bits": part_setting("rows", 1 << 70),
    "rows: true": part_setting("rows", True),
    "rows: real": part_setting("rows", float(len(ROWS))),
    "rows: text": part_setting("rows", str(len(ROWS))),
    "bytes: one more": first_part(lambda part: part.update(bytes=part["bytes"] + 1)),
    "bytes: negative": part_setting("bytes", -1),
    "bytes: an object": part_setting("bytes", {}),
    "digest: null": part_setting("digest", None),
    "digest: text": part_setting("digest", "blake3:"),
    "digest: a list": part_setting("digest", ["blake3:" + "0" * 32]),
    "digest: of other bytes, and not as sealed": first_part(
        lambda part: part.update(digest="blake3:" + "0" * 32, inode=0)
    ),
    "time: text": part_setting("mtime_ns", "0"),
    "time: beyond 64 bits": part_setting("mtime_ns", 1 << 70),
    "inode: negative": part_setting("inode", -1),
    "inode: null": part_setting("inode", None),
    "import id: none": setting("import_id", "0" * 16),
    "import id: beyond 63 bits": setting("import_id", "f" * 16),
    "import id: of another import": setting("import_id", "0" * 15 + "7"),
    "import id: short": setting("import_id", "7"),
    "import id: signed": setting("import_id", "+" + "0" * 14 + "7"),
    "import id: a number": setting("import_id", 7),
    "parts: null": setting("parts", None),
    "parts: an object": setting("parts", {"name": "part"}),
    "parts: a list of lists": setting("parts", [[]]),
    "parts: of a list of nothing": setting("parts", [None]),
    "parts: missing": dropping("parts"),
    "parts: one listed twice": lambda fields: fields["parts"].append(fields["parts"][0]),
    "parts: one listed a hundred times": lambda fields: fields["parts"].extend(
        fields["parts"] * 99
    ),
    "an unknown field": setting("remark", "hello"),
    "an unknown field of a part": part_setting("remark", "hello"),
    "format: none": setting("format", None),
    "format: true": setting("format", True),
    "format: real": setting("format", 2.0),
    "format: text": setting("format", "2"),
    "format: a list": setting("format", [2]),
    "format: zero": setting("format", 0),
    "format: newer": setting("format", 3),
    "format: older, with the fields of this": setting("format", 1),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_manifest_of_wrong_fields_is_refused(
    attacked: kvstore.Store, staging: Path, name: str
) -> None:
    fields = manifest_of(staging)
    FIELDS[name](fields)
    reseal(staging, fields)
    refused(attacked, staging)


@pytest.mark.parametrize("total", ["rows", "bytes"])
def test_wrong_totals_are_refused(attacked: kvstore.Store, staging: Path, total: str) -> None:
    fields = manifest_of(staging)
    fields[total] += 1
    reseal(staging, fields, totals=False)
    refused(attacked, staging, match="checksum")


def test_a_part_named_by_its_path_is_not_followed(
    attacked: kvstore.Store, staging: Path, tmp_path: Path
) -> None:
    fields = manifest_of(staging)
    fields["parts"][0].update(name=str(tmp_path / "precious"))
    (tmp_path / "precious").write_bytes(part_of(staging).read_bytes())
    fields["parts"][0].update(
        {**described(tmp_path / "precious"), "name": str(tmp_path / "precious")}
    )
    reseal(staging, fields)
    refused(attacked, staging, match="no name of a part")


TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "an empty object": b"{}",
    "deep lists": b'{"format": 2, "parts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"parts":' * 100_000,
    "an integer of many digits": b'{"format": ' + b"2" * 100_000 + b"}",
    "NaN": b'{"format": NaN}',
    "a name twice": b'{"format": 2, "format": 2}',
    "UTF-16": '{"format": 2}'.encode("utf-16"),
    "broken UTF-8": b'{"format": "\xff"}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_manifest_that_is_no_strict_json_is_refused(
    attacked: kvstore.Store, staging: Path, name: str
) -> None:
    (staging / MANIFEST_NAME).write_bytes(TEXTS[name])
    refused(attacked, staging)


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"{}"])
def test_bytes_before_a_good_manifest_are_refused(
    attacked: kvstore.Store, staging: Path, before: bytes
) -> None:
    path = staging / MANIFEST_NAME
    path.write_bytes(before + path.read_bytes())
    refused(attacked, staging)


def test_a_manifest_of_any_size_is_refused_in_bounded_memory(staging: Path) -> None:
    with (staging / MANIFEST_NAME).open("ab") as file:
        file.truncate(20 * JSON_BYTES_MAX)
    tracemalloc.start()
    try:
        with pytest.raises(ImportRefusedError, match="bytes of JSON"):
            bulk.read_manifest(staging)
        assert tracemalloc.get_traced_memory()[1] < 3 * JSON_BYTES_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["name: up", "parts: null", "bounds: narrowed below"])
def test_every_door_refuses_a_forged_manifest(tmp_path: Path, staging: Path, name: str) -> None:
    fields = manifest_of(staging)
    FIELDS[name](fields)
    reseal(staging, fields)
    with kvstore.open(tmp_path / "store") as store:
        if name != "bounds: narrowed below":  # which only the file tells
            with pytest.raises(ImportRefusedError):
                submit_import(store, staging)
            with pytest.raises(ImportRefusedError):
                bulk.read_manifest(staging)
        with pytest.raises(ImportRefusedError):
            bulk.ingest(store, staging)
    failed = CliRunner().invoke(app, [str(tmp_path / "store"), str(staging), "--move"])
    assert isinstance(failed.exception, ImportRefusedError)
    with kvstore.open(tmp_path / "store") as store:
        assert list(store.scan()) == []
        store.verify().require_ok()


def test_parts_in_another_order_are_refused(attacked: kvstore.Store, tmp_path: Path) -> None:
    stage(tmp_path / "staged", parts=3)
    fields = manifest_of(tmp_path / "staged")
    fields["parts"].reverse()
    reseal(tmp_path / "staged", fields)
    refused(attacked, tmp_path / "staged", match="by key")


@pytest.mark.parametrize("how", [os.link, shutil.copy])
@pytest.mark.parametrize("bounds", ["told", "moved"])
def test_a_part_listed_twice_under_two_names_is_refused(
    attacked: kvstore.Store, staging: Path, how: Callable[[Path, Path], object], bounds: str
) -> None:
    fields = manifest_of(staging)
    twin = staging / f"part-{'0' * 32}.sst"
    how(part_of(staging), twin)
    fields["parts"].append({**fields["parts"][0], **described(twin)})
    if bounds == "moved":
        fields["parts"][1].update(smallest=b"300".hex(), largest=b"400".hex())
    reseal(staging, fields)
    refused(attacked, staging)


# -- the rows of a part -----------------------------------------------------------------------


def foreign(key: bytes) -> bytes:
    return frame(key) + encode_reference(7) + VALUE


def versions(key: bytes) -> bytes:
    return frame(key) + encode_suffix(1) + VALUE


AT_THE_ENDS: dict[str, Callable[[Path], list[tuple[bytes, bytes | None]]]] = {
    "a foreign import id first": lambda at: [(foreign(b"a"), b""), (entry(at, b"b"), b"")],
    "a foreign import id last": lambda at: [(entry(at, b"a"), b""), (foreign(b"b"), b"")],
    "a timestamp first": lambda at: [(versions(b"a"), b""), (entry(at, b"b"), b"")],
    "a timestamp last": lambda at: [(entry(at, b"a"), b""), (versions(b"b"), b"")],
    "a removal": lambda at: [
        (entry(at, b"a"), b""),
        (versions(b"live"), None),
        (entry(at, b"z"), b""),
    ],
    "an unknown kind": lambda at: [(entry(at, b"a"), b""), (entry(at, b"b", b"\x02"), b"")],
    "a short key": lambda at: [(b"\x00", b""), (entry(at, b"b"), b"")],
    "no framing": lambda at: [(entry(at, b"a"), b""), (b"b" * 30, b"")],
}

IN_THE_MIDDLE: dict[str, Callable[[Path], tuple[bytes, bytes]]] = {
    "a foreign import id": lambda at: (foreign(b"m"), b"v"),
    "a timestamp": lambda at: (versions(b"m"), b"v"),
    "a key twice": lambda at: (entry(at, b"n", TOMBSTONE), b""),
    "a tombstone with a value": lambda at: (entry(at, b"m", TOMBSTONE), b"v"),
    "an unknown kind": lambda at: (entry(at, b"m", b"\x02"), b"v"),
    "a short key": lambda at: (b"m", b"v"),
    "no framing": lambda at: (b"m" * 30, b"v"),
    "a key too long": lambda at: (entry(at, b"m" * (KEY_BYTES_MAX + 1)), b"v"),
}


@pytest.mark.parametrize("name", AT_THE_ENDS)
def test_rows_that_the_ends_of_a_file_tell_are_refused(
    attacked: kvstore.Store, staging: Path, name: str
) -> None:
    forge(staging, AT_THE_ENDS[name](staging))
    fields = manifest_of(staging)
    reseal(staging, fields)
    refused(attacked, staging)


@pytest.mark.parametrize("name", IN_THE_MIDDLE)
def test_rows_inside_a_file_are_refused_thoroughly(
    attacked: kvstore.Store, staging: Path, name: str
) -> None:
    inside = IN_THE_MIDDLE[name](staging)
    forge(staging, [(entry(staging, b"a"), b"1"), inside, (entry(staging, b"n"), b"2")])
    refused(attacked, staging, thorough=True)


@pytest.mark.damages_store
@pytest.mark.parametrize("name", sorted(set(IN_THE_MIDDLE) - {"a key too long"}))
def test_rows_inside_a_file_that_were_added_are_told_by_verify(
    store: kvstore.Store, staging: Path, name: str
) -> None:
    inside = IN_THE_MIDDLE[name](staging)
    forge(staging, [(entry(staging, b"a"), b"1"), inside, (entry(staging, b"n"), b"2")])
    bulk.ingest(store, staging)
    assert not store.verify().ok


def test_a_key_in_two_crossing_parts_is_refused_thoroughly(
    attacked: kvstore.Store, tmp_path: Path
) -> None:
    staging = tmp_path / "staged"
    staged = bulk.Import.create(staging)
    parts = []
    for keys in ((b"a", b"d", b"g"), (b"b", b"d", b"e")):
        with staged.writer() as writer:
            for key in keys:
                writer.put(key, b"v")
            part = writer.finish()
        assert part is not None
        parts.append(
            {**described(staging / part.name), "rows": 3}
            | {"smallest": part.smallest.hex(), "largest": part.largest.hex()}
        )
    reseal(staging, {"format": 2, "import_id": f"{staged.import_id:016x}", "parts": parts})
    refused(attacked, staging, match="came twice", thorough=True)


NO_PARTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda content: b"",
    "text": lambda content: b"no rows",
    "zeros": lambda content: bytes(len(content)),
    "cut": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "an index that is damaged": lambda content: content[:-200] + bytes(100) + content[-100:],
}


@pytest.mark.parametrize("name", NO_PARTS)
def test_a_file_that_is_no_part_is_refused(
    attacked: kvstore.Store, staging: Path, name: str
) -> None:
    path, fields = part_of(staging), manifest_of(staging)
    content = NO_PARTS[name](path.read_bytes())
    path.write_bytes(content)
    fields["parts"][0].update(described(path))
    reseal(staging, fields)
    refused(attacked, staging)


def test_a_file_of_a_store_is_refused(
    attacked: kvstore.Store, staging: Path, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "other", engine="rocksdb") as other:
        other.put(b"a", b"1")
        other._engine.compact("data")
        files = sorted((tmp_path / "other").glob("*.sst"))
    path, fields = part_of(staging), manifest_of(staging)
    shutil.copy(files[0], path)
    fields["parts"][0].update(described(path))
    reseal(staging, fields)
    refused(attacked, staging)


# -- what a name may lead to ------------------------------------------------------------------


def resealed_link(staging: Path, target: Path | str) -> Path:
    """A symbolic link in the place of the part, and the part's file outside the directory."""
    part = part_of(staging)
    moved = part.rename(staging.parent / "elsewhere.sst")
    part.symlink_to(target)
    return moved


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("move", [False, True])
def test_a_symbolic_link_gives_the_file_that_it_leads_to(
    tmp_path: Path, staging: Path, relative: bool, move: bool
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        outside = resealed_link(
            staging, "../elsewhere.sst" if relative else staging.parent / "elsewhere.sst"
        )
        bulk.ingest(store, staging, move=move)
        assert outside.is_file()
        assert (staging / manifest_of(staging)["parts"][0]["name"]).is_symlink() is not move
    outside.unlink()
    with kvstore.open(tmp_path / "store") as store:
        assert dict(store.scan()) == ROWS
        store.verify().require_ok()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(path.parent, os.O_RDONLY)  # the path itself may be too long for a socket
        try:
            listening.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def looping(path: Path) -> None:
    path.symlink_to(path.name)


def to_a_fifo(path: Path) -> None:
    os.mkfifo(path.parent / "fifo")
    path.symlink_to("fifo")


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a directory": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": looping,
    "a link to a FIFO": to_a_fifo,
    "a link to a directory": lambda path: path.symlink_to(".."),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("place", ["part", "manifest"])
@pytest.mark.parametrize("name", IRREGULAR)
def test_only_regular_files_are_read(
    attacked: kvstore.Store, staging: Path, name: str, place: str
) -> None:
    path = part_of(staging) if place == "part" else staging / MANIFEST_NAME
    path.unlink()
    IRREGULAR[name](path)
    refused(attacked, staging)


@pytest.mark.parametrize("name", IRREGULAR)
def test_only_regular_files_are_sealed(tmp_path: Path, name: str) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"a", b"1")
        part = writer.finish()
    assert part is not None
    (tmp_path / "staged" / part.name).unlink()
    IRREGULAR[name](tmp_path / "staged" / part.name)
    with pytest.raises(UsageError, match="cannot be sealed"):
        staged.seal()
    assert not (tmp_path / "staged" / MANIFEST_NAME).exists()


@pytest.mark.parametrize("name", sorted(set(IRREGULAR) - {"a directory", "a link to a directory"}))
def test_a_staging_directory_that_is_none_is_refused(
    attacked: kvstore.Store, tmp_path: Path, name: str
) -> None:
    IRREGULAR[name](tmp_path / "staged")
    refused(attacked, tmp_path / "staged")


def other_file(part: Path) -> None:
    part.unlink()
    part.write_bytes(b"not what was checked")


def other_bytes(part: Path) -> None:
    with part.open("r+b") as file:
        file.write(b"not what was checked")


def link_to_another(part: Path) -> None:
    other_file(part)
    part.symlink_to(shutil.move(part, part.parent / "other"))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("swap", [other_file, other_bytes, link_to_another])
def test_a_part_that_is_replaced_after_it_was_checked_is_refused(
    store: kvstore.Store,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    swap: Callable[[Path], None],
    move: bool,
    copied: bool,
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    def replace(step: str) -> None:
        if step.startswith("bring"):
            swap(part_of(staging))

    if copied:
        monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(ImportRefusedError, match="while it was added"):
        bulk.ingest(store, staging, move=move, progress=replace)
    assert part_of(staging).exists()
    assert list(store.scan()) == []


def test_a_refusal_between_two_parts_leaves_every_staged_file(
    store: kvstore.Store, tmp_path: Path
) -> None:
    staging = tmp_path / "staged"
    stage(staging, parts=3)
    last = staging / manifest_of(staging)["parts"][-1]["name"]
    before = everything_in(staging)

    def replace(step: str) -> None:
        if step.startswith("bring 3"):
            other_file(last)

    with pytest.raises(ImportRefusedError, match="while it was added"):
        bulk.ingest(store, staging, move=True, progress=replace)
    left = everything_in(staging)
    assert left.pop(last.name) != before.pop(last.name)
    assert left == before


def test_a_move_that_was_interrupted_is_finished_by_the_next(
    store: kvstore.Store, staging: Path
) -> None:
    def killed(step: str) -> None:
        if step == "add":
            raise RuntimeError("killed here")

    for progress in (killed, killed, None):
        assert part_of(staging).is_file()
        with suppress(RuntimeError):
            bulk.ingest(store, staging, move=True, progress=progress)
    assert [path.name for path in staging.iterdir()] == [MANIFEST_NAME]
    assert dict(store.scan()) == ROWS


def test_files_that_may_only_be_read_are_checked_and_added(
    store: kvstore.Store, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's are, where the kernel does not let them be linked."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    bulk.ingest(store, staging, on_conflict="error", thorough=True)
    assert dict(store.scan()) == ROWS


@pytest.mark.damages_store
def test_writing_into_a_linked_file_is_told_by_its_block_checksums(
    tmp_path: Path, staging: Path
) -> None:
    with kvstore.open(tmp_path / "store", engine="rocksdb") as store:
        bulk.ingest(store, staging)
    with part_of(staging).open("r+b") as file:
        file.write(b"written afterwards")
    with kvstore.open(tmp_path / "store") as store:
        with pytest.raises(CorruptionError):
            list(store.scan())
        assert not store.verify().ok


# -- at random --------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 1 << 64, 1.5, "", "0", "../x", "ff", [], {}, [[]], {"a": 1}),
)


def mutate_field(staging: Path, dice: random.Random) -> None:
    fields = manifest_of(staging)
    place = dice.choice([fields, *fields["parts"]])
    name = dice.choice(sorted(place))
    other = dice.choice(fields["parts"])
    place[name] = dice.choice([*VALUES, other.get(name), other["smallest"], other["largest"]])
    if dice.random() < 0.2:
        del place[name]
    if dice.random() < 0.2 and isinstance(fields.get("parts"), list):
        fields["parts"] = dice.choices(fields["parts"], k=dice.randrange(4))
    reseal(staging, fields, totals=dice.random() < 0.8)


def mutate_text(staging: Path, dice: random.Random) -> None:
    path = staging / MANIFEST_NAME
    content = bytearray(path.read_bytes())
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(content))
        content[at : at + dice.randrange(3)] = dice.choice([b"", b"[", b"}", b"\x00", b'"', b"9"])
    path.write_bytes(content)


def mutate_part(staging: Path, dice: random.Random) -> None:
    fields = manifest_of(staging)
    part = dice.choice(fields["parts"])
    path = staging / part["name"]
    content = bytearray(path.read_bytes())
    how = dice.randrange(3)
    if how == 0:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    elif how == 1:
        del content[dice.randrange(len(content)) :]
    else:
        at = dice.randrange(len(content))
        content[at:at] = dice.randbytes(dice.randrange(1, 64))
    path.write_bytes(content)
    if dice.random() < 0.8:
        part.update(described(path))
        reseal(staging, fields)


def mutate_names(staging: Path, dice: random.Random) -> None:
    one, other = dice.sample(sorted(staging.iterdir()), 2)
    how = dice.randrange(4)
    if how == 0:
        one.unlink()
    elif how == 1:
        os.replace(one, other)
    elif how == 2:
        one.unlink()
        one.symlink_to(other.name)
    else:
        one.rename(staging / "aside")
        os.rename(other, one)
        os.rename(staging / "aside", other)


MUTATIONS = (mutate_part, mutate_field, mutate_text, mutate_names)
"""In the order of their application: each needs what the earlier ones leave whole."""


def attack(place: Path, seed: int, rounds: int) -> None:
    """Add staging directories that were changed at random to one store."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    stage(place / "good", parts=3)
    right = dict(ROWS)
    with kvstore.open(place / "store", durability="async") as store:
        for number in range(rounds):
            staging = place / f"staged{number}"
            shutil.copytree(place / "good", staging)
            chosen = dice.sample(MUTATIONS, dice.randrange(1, 3))
            for mutate in sorted(chosen, key=MUTATIONS.index):
                mutate(staging, dice)
            before, known = everything_in(staging), store.imports()
            try:
                bulk.ingest(store, staging, thorough=True)
            except REFUSED:
                assert everything_in(staging) == before, f"round {number}"
                assert store.imports() == known, f"round {number}"
            else:  # a change that changes nothing, or that leaves parts out
                found = dict(store.scan())
                manifest = bulk.read_manifest(staging)
                assert found.items() <= right.items(), f"round {number}"
                assert len(found) == manifest.rows, f"round {number}"
                store.verify().require_ok()
                store.revert_import(manifest.import_id)
                stage_again(place)
            shutil.rmtree(staging)
        assert list(store.scan()) == []
        store.verify().require_ok()


def stage_again(place: Path) -> None:
    """Another id: an import is added once."""
    shutil.rmtree(place / "good")
    stage(place / "good", parts=3)


def test_a_mutated_staging_directory_is_refused_or_right(tmp_path: Path) -> None:
    attack(tmp_path, random.randrange(1 << 32), rounds=60)


@pytest.mark.soak
def test_soak_a_mutated_staging_directory_is_refused_or_right(tmp_path: Path) -> None:
    attack(tmp_path, random.randrange(1 << 32), rounds=10_000)


def test_the_manifest_that_is_written_is_the_one_that_is_read(staging: Path) -> None:
    content = (staging / MANIFEST_NAME).read_text()
    assert bulk.read_manifest(staging).to_json() == content
    assert json.loads(content)["format"] == 2
