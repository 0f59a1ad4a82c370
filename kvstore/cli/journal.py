"""Commands for journals: `kvstore journal inspect | compact | salvage`.

A memory store and a task queue each keep a journal in their directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore import tasks
from kvstore.base.arguments import word
from kvstore.cli.main import NOT_FOUND
from kvstore.cli.options import JsonOption
from kvstore.cli.output import print_figures, print_json, print_line, print_table, working
from kvstore.engine import memory_engine
from kvstore.errors import UsageError
from kvstore.storage import journal
from kvstore.storage.journal import Inspection, StateMachine
from kvstore.storage.journal.repair import Keep, compact_by_content

app = typer.Typer(
    help="Look at, compact or rescue a journal.", no_args_is_help=True, add_completion=False
)

JournalArgument = Annotated[
    Path,
    typer.Argument(metavar="DIRECTORY", help="The directory of the journal.", show_default=False),
]

_FOLDS: Final[Mapping[str, Callable[[], StateMachine]]] = {
    memory_engine.CONTENT: memory_engine.MemoryState,
    tasks.CONTENT: tasks.TaskState,
}
_CONTENTS: Final = ", ".join(_FOLDS)
_KEEPS: Final[tuple[Keep, ...]] = ("prefix", "all")


@app.command()
def inspect(directory: JournalArgument, as_json: JsonOption = False) -> None:
    """List a journal's files and their problems. Exits with 1 if there is a problem.

    \b
    Examples:
      kvstore journal inspect sessions.db
      kvstore journal inspect sessions.db --json
    """
    _require_directory(directory)
    found = journal.inspect(directory)
    if not found.files:
        raise UsageError(f"{directory} holds no journal", "check the path")
    if as_json:
        print_json(_fields(found))
    else:
        print_table(
            ["file", "bytes", "records", "ordinals", "content"],
            [
                [
                    str(file.name),
                    f"{file.size:,}",
                    f"{file.records:,}",
                    "" if file.first is None else f"{file.first}..{file.last}",
                    file.content or "",
                ]
                for file in found.files
            ],
        )
        for problem in _problems(found):
            print_line(problem)
    if not found.sound:
        raise typer.Exit(NOT_FOUND)


@app.command()
def compact(directory: JournalArgument, as_json: JsonOption = False) -> None:
    """Turn the closed files of a journal into one snapshot. Its writer may run meanwhile.

    \b
    Examples:
      kvstore journal compact sessions.db
    """
    _require_directory(directory)
    with working(f"compacting {directory}", quiet=as_json):
        done = compact_by_content(directory, _FOLDS)
    print_figures(
        {
            "snapshot": None if done.snapshot is None else done.snapshot.path,
            "replayed": done.replayed,
            "removed": list(done.removed),
        },
        as_json=as_json,
    )


@app.command()
def salvage(
    source: JournalArgument,
    destination: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="A new directory for the copy.", show_default=False),
    ],
    keep: Annotated[
        str,
        typer.Option(help="prefix: all records before the first loss. all: every readable record."),
    ] = "prefix",
    content: Annotated[
        str | None,
        typer.Option(help=f"The content, if no file names it any more: {_CONTENTS}."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy the readable records of a damaged journal, and name the lost ones.

    Exits with 1 if records are lost.

    \b
    Examples:
      kvstore journal salvage sessions.db rescued.db
      kvstore journal salvage queue rescued --keep all
    """
    kept = word(*_KEEPS).check("keep", keep)
    _require_directory(source)
    with working(f"copying {source}", quiet=as_json):
        report = journal.salvage(source, destination, keep=kept, content=content)
    losses = [str(loss.error()) for loss in report.losses]
    print_figures(
        {
            "snapshot_records": report.snapshot_records,
            "records": report.records,
            "last": report.last,
            "dropped": report.dropped,
            "losses": losses,
        },
        as_json=as_json,
    )
    if losses:
        raise typer.Exit(NOT_FOUND)


def _require_directory(path: Path) -> None:
    if not path.is_dir():
        raise UsageError(f"{path} is no directory", "check the path")


def _problems(found: Inspection) -> list[str]:
    damages = [damage for file in found.files for damage in file.damages]
    return [str(damage.error()) for damage in (*damages, *found.missing)]


def _fields(found: Inspection) -> dict[str, object]:
    return {
        "path": found.path,
        "content": found.content,
        "sound": found.sound,
        "problems": _problems(found),
        "files": [
            {
                "name": str(file.name),
                "bytes": file.size,
                "records": file.records,
                "first": file.first,
                "last": file.last,
                "sealed": file.sealed,
                "torn": file.torn is not None,
            }
            for file in found.files
        ],
        "ignored": list(found.ignored),
    }
