"""A forged manifest is refused. Checksums have no key, so each forgery carries one that fits it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore import bulk
from kvstore.bulk.cli import app
from kvstore.bulk.manifest import MANIFEST_NAME
from kvstore.bulk.tasks import submit_import
from kvstore.errors import ImportRefusedError
from kvstore.limits import JSON_BYTES_MAX, KEY_BYTES_MAX
from tests.bulk.refusal import refused
from tests.bulk.staged import (
    ROWS,
    Fields,
    described,
    first_part,
    manifest_of,
    part_of,
    reseal,
    stage,
)
from tests.harness.traced import traced

pytestmark = pytest.mark.usefixtures("each_engine")


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
    "expiries: null": setting("expiries", None),
    "expiries: a number": setting("expiries", 1),
    "expiries: missing": dropping("expiries"),
    "tables: missing": dropping("tables"),
    "tables: null": lambda fields: fields.update(tables=None),
    "tables: no digest": lambda fields: fields.update(
        tables=[{"table": "t", "revision": 1, "digest": "../" * 22}]
    ),
    "tables: revision 0": lambda fields: fields.update(
        tables=[{"table": "t", "revision": 0, "digest": "0" * 64}]
    ),
    "tables: absent from the store": lambda fields: fields.update(
        tables=[{"table": "t", "revision": 1, "digest": "0" * 64}]
    ),
    "an unknown field": setting("remark", "hello"),
    "an unknown field of a part": part_setting("remark", "hello"),
    "format: none": setting("format", None),
    "format: true": setting("format", True),
    "format: real": setting("format", 1.0),
    "format: text": setting("format", "1"),
    "format: a list": setting("format", [1]),
    "format: zero": setting("format", 0),
    "format: newer": setting("format", 2),
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
    "deep lists": b'{"format": 1, "parts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"parts":' * 100_000,
    "an integer of many digits": b'{"format": ' + b"2" * 100_000 + b"}",
    "NaN": b'{"format": NaN}',
    "a name twice": b'{"format": 1, "format": 1}',
    "UTF-16": '{"format": 1}'.encode("utf-16"),
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


@pytest.mark.traces_memory
def test_a_manifest_of_any_size_is_refused_in_bounded_memory(staging: Path) -> None:
    with (staging / MANIFEST_NAME).open("ab") as file:
        file.truncate(20 * JSON_BYTES_MAX)
    with traced() as memory, pytest.raises(ImportRefusedError, match="bytes of JSON"):
        bulk.read_manifest(staging)
    assert memory.peak < 3 * JSON_BYTES_MAX


@pytest.mark.parametrize("name", ["name: up", "parts: null", "bounds: narrowed below"])
def test_every_door_refuses_a_forged_manifest(tmp_path: Path, staging: Path, name: str) -> None:
    fields = manifest_of(staging)
    FIELDS[name](fields)
    reseal(staging, fields)
    with kvstore.open(tmp_path / "store") as store:
        if name != "bounds: narrowed below":  # only the file shows this
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


def test_the_manifest_that_is_written_is_the_one_that_is_read(staging: Path) -> None:
    content = (staging / MANIFEST_NAME).read_text()
    assert bulk.read_manifest(staging).to_json() == content
    assert json.loads(content)["format"] == 1
