"""Hostile bytes of a shard's state: each ends in the documented error, or in a sound state."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.backup.shard.shard_snapshot import Split
from kvstore.backup.shard.state import codec
from kvstore.backup.shard.state.trace import ShardBatch
from kvstore.base.span import Span
from kvstore.errors import CorruptionError, FormatVersionError
from tests.harness.seeds import seed_of
from tests.shard.test_codec import FIRST, FULL, PART

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 5, 2**63 - 1, 2**63, 2**70, 1.5, 1e300, "", "x", "00", "zz", "٣",
    "../../CURRENT", "/etc/passwd", "encryption.json", "x" * 300, "\ud800",
    [], [1], [[]], {}, {"a": 1},
]  # fmt: skip


def sealed(magic: bytes, body: bytes) -> bytes:
    return codec.ENVELOPE.pack(magic, codec.FORMAT_VERSION, zlib.crc32(body)) + body


def body_of(data: bytes) -> Any:
    return json.loads(data[codec.ENVELOPE.size :])


def lied(body: Any, rng: random.Random) -> bytes:
    """The JSON with some values, names or items changed."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        holder = body
        while True:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            if not keys:
                break
            key = rng.choice(list(keys))
            inner = holder[key]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
                holder = inner
                continue
            match rng.randrange(4):
                case 0 if isinstance(holder, dict):
                    del holder[key]
                case 1 if isinstance(holder, dict):
                    holder[rng.choice(["x", "-1", "01", "٣", key + "0"])] = holder.pop(key)
                case 2 if isinstance(holder, list):
                    holder.append(copy.deepcopy(inner))
                case _:
                    holder[key] = copy.deepcopy(rng.choice(VALUES))
            break
    return json.dumps(body).encode()


def states(data: bytes) -> None:
    state = codec.decode_state(data, where="x")
    assert state.problem() is None
    set(state.blobs())
    codec.encode_state(state)


def steps(data: bytes) -> None:
    diff = codec.decode_diff(data, where="x")
    codec.blobs_named(FIRST, [diff])
    codec.apply_diffs(FIRST, [diff], where="x")


SPLIT = Split(7, Span(b"a", b"b"), (ShardBatch(0, 9, parts=(PART,)),))
FORMATS: dict[str, tuple[Any, Callable[[bytes], object]]] = {
    "rollup": (
        body_of(codec.encode_state(FULL)),
        lambda body: states(sealed(codec.ROLLUP, body)),
    ),
    "diff": (
        body_of(codec.encode_diff(FIRST, FULL)),
        lambda body: steps(sealed(codec.DIFF, body)),
    ),
    "first diff": (
        body_of(codec.encode_diff(None, FIRST)),
        lambda body: codec.decode_diff(sealed(codec.DIFF, body), where="x"),
    ),
    "split": (json.loads(SPLIT.to_json()), lambda body: Split.from_json(body.decode())),
}


def attack(name: str, seed: int, count: int) -> int:
    body, read = FORMATS[name]
    read(json.dumps(body).encode())
    rng = random.Random(seed)
    refused = 0
    for number in range(count):
        altered = lied(body, rng)
        try:
            read(altered)
        except (CorruptionError, FormatVersionError):
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{name}, seed {seed}, {number}: {altered!r}") from error
    return refused


@pytest.mark.parametrize("name", FORMATS)
def test_lies_in_a_state_are_told(name: str) -> None:
    assert attack(name, 1, 1_500) > 500


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMATS)
def test_many_lies_in_a_state_are_told(name: str) -> None:
    attack(name, seed_of(), 200_000)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"{" * 50_000,
        b"[" * 50_000,
        b'{"a":' * 20_000,
        b'{"a":1,"a":2}',
        b'{"seqno": NaN}',
        b"\xff",
        b'"xxxxx',
    ],
    ids=lambda body: str(body[:9]),
)
def test_what_is_no_object_is_told(name: str, body: bytes) -> None:
    if name == "split" and body == b"\xff":
        return  # splits travel as text
    with pytest.raises((CorruptionError, FormatVersionError)):
        FORMATS[name][1](body)


def test_names_of_others_blobs_are_refused() -> None:
    """Otherwise a removal of rollups would delete blobs of others."""
    for lie in ("encryption.json", "other/part/x.parquet", "../x", "orders"):
        body = body_of(codec.encode_state(FULL))
        body["rollups"][next(iter(body["rollups"]))] = lie
        with pytest.raises(CorruptionError):
            states(sealed(codec.ROLLUP, json.dumps(body).encode()))
