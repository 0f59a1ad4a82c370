"""Messages in the words of the shell: an error names arguments of Python, and a person has options.

Invariants
1. A message without such words is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PHRASES: Final[Mapping[str, str]] = {
    'ingest with on_conflict="overwrite"': "pass --on-conflict overwrite",
    "bulk.seed(duplicates='last') keeps the later row": "--duplicates last keeps the later row",
    "see store.imports.all()": "`kvstore imports list` names all imports",
    "`kvstore holds list` or store.holds.all() names": "`kvstore holds list` names",
    "delete the span by delete_range": "delete the span by `kvstore delete-range`",
    "needs full=True": "needs --full",
    "backup(store, full=True)": "`kvstore backup run --full`",
    "(collection.unlabel)": "(`kvstore backup label COLLECTION NAME --drop`)",
    "weekly need keep_within": "weekly need --keep-within",
    "expire takes before=, keep= or keep_within=": "give --before, --keep or --keep-within",
    "and has none; pass store=": "and has none; pass --store",
    "`kvstore push list` or Pushes.list() names": "`kvstore push list` names",
    'depth="files"': "--depth files",
    'depth="checksums"': "--depth checksums",
    'depth="open"': "--depth open",
    "pass its passphrase or key file": "pass the passphrase in KVSTORE_PASSPHRASE, or --key-file",
    "open it without passphrase and key file": "unset KVSTORE_PASSPHRASE, and pass no --key-file",
    "backup.replicate makes": "`kvstore backup replicate` makes",
    'depth="contents"': "--depth contents",
    "depth='contents'": "--depth contents",
    'pass mode="replace" and': "pass --mode replace and",
    "mode='replace'": "--mode replace",
    "mode='add'": "--mode add",
    'prefix=b"" is every key': "--prefix '' is every key",
    "prefix=None": "no --prefix",
    "keep_newer=True": "--keep-newer",
    "keep_newer=False": "no --keep-newer",
    "built_at=None": "no --built-at",
    "pass both: built_at is": "pass both: --built-at is",
    "pass add, drop, widen, add_index or drop_index": "pass --add, --drop, --widen, --add-index, "
    "--unique-index or --drop-index",
    "or pass overwrite=True": "or pass --overwrite",
    "as_of=": "--as-of ",
    "since=": "--since ",
    "upto=": "--upto ",
    "before=": "--before ",
    "built_at=": "--built-at ",
    "expires=": "--expires ",
    "max_staleness=": "--poll ",
    "write ISO-8601 with a zone: 2013-01-31T23:59:59Z": "write '1 hour ago', -1h, yesterday, "
    "2026-11-22, or ISO-8601 with a zone: 2013-01-31T23:59:59Z",
    "engine=": "--engine ",
    "memory, or an Engine": "memory",
    "pass an aware datetime, ISO-8601 with a zone, or a Timestamp where 1970 is meant": "write a "
    "date, 2026-11-22, or ISO-8601 with a zone",
    "make it: table(name, schema=...)": "`kvstore table list` names all tables",
}
"""Words of Python, each with the words of the shell."""


def in_shell_words(message: str) -> str:
    """`message` with the names of options where it has the names of arguments."""
    for words, shell in PHRASES.items():
        message = message.replace(words, shell)
    return message
