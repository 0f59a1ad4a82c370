"""A staging directory that was changed at random is refused, or its rows are right."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.manifest import MANIFEST_NAME
from tests.bulk.refusal import REFUSED
from tests.bulk.staged import ROWS, described, everything_in, manifest_of, reseal, stage
from tests.harness.seeds import seed_of

pytestmark = pytest.mark.usefixtures("each_engine")


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
    parts = fields.get("parts")
    if dice.random() < 0.2 and isinstance(parts, list) and parts:
        fields["parts"] = dice.choices(parts, k=dice.randrange(4))
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
"""Mutations in the order of their application: each one needs parts that the earlier ones leave
intact."""


def attack(place: Path, seed: int, rounds: int) -> None:
    """Add staging directories that were changed at random to one store."""
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
            before, known = everything_in(staging), store.imports.all()
            try:
                bulk.ingest(store, staging, thorough=True)
            except REFUSED:
                assert everything_in(staging) == before, f"round {number}"
                assert store.imports.all() == known, f"round {number}"
            else:  # the mutation changed nothing, or left parts out
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
    attack(tmp_path, seed_of(), rounds=60)


@pytest.mark.soak
def test_soak_a_mutated_staging_directory_is_refused_or_right(tmp_path: Path) -> None:
    attack(tmp_path, seed_of(), rounds=10_000)
