"""Backups, collections and damage as commands print them: for people, or as JSON with exact
numbers."""

from __future__ import annotations

import math
from typing import Any

import typer

from backup.overview import ChainProof, CollectionInfo
from backup.window import BackupInfo
from kvstore.cli.exits import NOT_FOUND
from kvstore.cli.options import Encoding, iso, to_json, to_text
from kvstore.cli.output import age_text, note, print_json, size_text
from kvstore.cli.wording import in_shell_words
from kvstore.errors import CorruptionError
from kvstore.timestamp import Timestamp


def backup_figures(info: BackupInfo, *, as_json: bool) -> dict[str, Any]:
    """The figures of a backup."""
    fields = {**info._asdict(), "lower": iso(info.lower), "upper": iso(info.upper)}
    fields["proven_at"] = _time(info.proven_at)
    fields["labels"] = list(info.labels)
    if not as_json:
        fields["bytes"] = size_text(info.bytes)
        fields["proven_at"] = fields["proven_at"] or "never"
        fields["labels"] = ", ".join(info.labels) or "none"
    return fields


def collection_figures(
    found: CollectionInfo, encoding: Encoding, *, as_json: bool
) -> dict[str, Any]:
    """The figures of a collection, with a line for the proof of each chain."""
    render = to_json if as_json else to_text
    spans = [(render(s.start, encoding), s.end and render(s.end, encoding)) for s in found.spans]
    fields = {**found._asdict(), "since": iso(found.since), "upper": iso(found.upper)}
    fields["labels"] = {label: iso(at) for label, at in found.labels.items()}
    fields["kept"] = [iso(at) for at in found.kept]
    age = found.proof_age_seconds
    del fields["proofs"]
    if as_json:
        fields["spans"] = [{"start": start, "end": end} for start, end in spans]
        fields["proof_age_seconds"] = None if math.isinf(age) else age
        fields["proofs"] = [_proof_fields(proof) for proof in found.proofs]
        return fields
    fields["bytes"] = size_text(found.bytes)
    del fields["recovery_point_age_seconds"]
    fields["recovery_point"] = f"{age_text(found.recovery_point_age_seconds)} old"
    fields["spans"] = ", ".join(f"[{start}, {end or 'end'})" for start, end in spans)
    labels = [f"{label} ({iso(at)})" for label, at in found.labels.items()]
    fields["labels"] = ", ".join(labels) or "none"
    fields["kept"] = ", ".join(map(iso, found.kept)) or "none"
    for number, proof in enumerate(found.proofs, 1):
        name = "proof" if len(found.proofs) == 1 else f"proof of chain {number}"
        fields[name] = _proof_text(proof)
    return fields


def disproved(error: CorruptionError, *, as_json: bool) -> typer.Exit:
    """Print the damage that a command was asked to look for, and return its exit."""
    problem = in_shell_words(str(error))
    note(problem)
    if as_json:
        print_json({"ok": False, "problem": problem})
    return typer.Exit(NOT_FOUND)


def _proof_fields(proof: ChainProof) -> dict[str, Any]:
    return {
        **proof._asdict(),
        "since": iso(proof.since),
        "upper": iso(proof.upper),
        "proven": _time(proof.proven),
        "proven_at": _time(proof.proven_at),
        "problem": in_shell_words(proof.problem),
        "age_seconds": None if math.isinf(proof.age_seconds) else proof.age_seconds,
    }


def _proof_text(proof: ChainProof) -> str:
    text = "never: `kvstore backup drill` restores it"
    if proof.proven is not None:
        text = f"{age_text(proof.age_seconds)} ago, as of {iso(proof.proven)}"
    problem = in_shell_words(proof.problem)
    return f"{text}; the newest drill failed: {problem}" if problem else text


def _time(at: Timestamp | None) -> str | None:
    return None if at is None else iso(at)
