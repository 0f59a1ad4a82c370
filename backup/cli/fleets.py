"""`kvstore backup run --config`: many stores, one line for the outcome of each."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from backup.cli.figures import backup_figures
from backup.fleet import back_up_fleet, read_fleet
from kvstore.cli.exits import NOT_FOUND
from kvstore.cli.output import note, print_json, print_line, working
from kvstore.cli.wording import in_shell_words


def run_fleet(config: Path, *, as_json: bool) -> None:
    """Back up the stores that a file names. Exits with 1 if one of them fails."""
    fleet = read_fleet(config)
    failed: list[str] = []
    with working(f"backing up {len(fleet.stores)} stores", quiet=as_json):
        for name, info, failure in back_up_fleet(fleet):
            error = in_shell_words(failure)
            if info is None:
                failed.append(name)
                note(f"store {name}: {error}")
            figures = {} if info is None else backup_figures(info, as_json=as_json)
            if as_json:
                print_json({"store": name, "ok": info is not None, "error": error, **figures})
            elif info is not None:
                text = f"up to {figures['upper']}, {info.rows:,} rows, {figures['bytes']}"
                print_line(f"{name}  {text}")
            sys.stdout.flush()  # a reader of a pipe waits for this line
    if failed:
        note(f"{len(failed)} of {len(fleet.stores)} stores failed: {', '.join(failed)}")
        raise typer.Exit(NOT_FOUND)
