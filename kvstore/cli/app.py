"""The `kvstore` command: its own commands, the commands of other packages, the report of failures.

Packages above this one add commands through the entry point group `kvstore.commands`: the entry's
name is the command, its object a `typer.Typer`. A command is loaded when it is called or
listed, so that `kvstore get` stays quick.

A failure prints one line on stderr (what happened; what to do) and sets an exit code: see
`kvstore.cli.exits`. Only a bug of ours shows a traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from kvstore.cli import (
    changes,
    doctor,
    feeds,
    holds,
    imports,
    journal,
    read,
    serve,
    tasks,
    upkeep,
    write,
)
from kvstore.cli.exits import HELP, exit_code, from_system
from kvstore.cli.output import print_line
from kvstore.errors import KVStoreError, UsageError
from kvstore.loops import COMPILED
from kvstore.version import __version__

COMMANDS_GROUP: Final = "kvstore.commands"

# Commands print waits and failures themselves; without a handler, logging prints each once more.
logging.getLogger("kvstore").addHandler(logging.NullHandler())


class Commands(TyperGroup):
    """The command group: loads the commands of other packages, and maps errors to exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_added())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        added = None if command is not None else _added().get(cmd_name)
        if added is not None:
            command = typer.main.get_command(added.load())
            command.name = cmd_name
        if command is not None:
            _hide_types_of_flags(command, ctx)
        return command

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
            return found
        except BrokenPipeError:
            # The reader of the pipe has ended (`| head`). Nothing can be written any more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            raise _told(from_system(error)) from error
        except KVStoreError as error:
            raise _told(error) from error


app = typer.Typer(
    name="kvstore",
    cls=Commands,
    help=f"A multi-version key-value store, from the shell.\n\n\b\n{HELP}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        loops = "compiled" if COMPILED else "plain"
        print_line(f"kvstore {__version__} ({loops} loops)")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and whether loops are compiled, and exit.",
        ),
    ] = False,
) -> None:
    """The options of `kvstore` itself."""


for _module in (read, changes, write, upkeep, tasks, serve, doctor):
    _module.register(app)
for _name, _group in (
    ("holds", holds.app),
    ("imports", imports.app),
    ("feeds", feeds.app),
    ("journal", journal.app),
):
    app.add_typer(_group, name=_name)


@app.command(name="help")
def _help(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="A command.", show_default=False),
    ] = None,
) -> None:
    """Print the help of a command, or of all commands.

    \b
    Examples:
      kvstore help
      kvstore help holds drop
    """
    assert ctx.parent is not None
    shown, command = ctx.parent, ctx.parent.command
    for word in words or []:
        found = command.get_command(shown, word) if hasattr(command, "get_command") else None
        if found is None:
            raise UsageError(f"no command {' '.join(words or [])!r}", "`kvstore help` lists all")
        command, shown = found, type(ctx)(found, info_name=word, parent=shown)
    print_line(command.get_help(shown))


def main() -> None:
    """The console script."""
    # The caller closed stdout (`>&-`). Otherwise a file of the store would get its number.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    app(prog_name="kvstore")


def _added() -> dict[str, EntryPoint]:
    """Commands of other packages, by name."""
    return {entry.name: entry for entry in entry_points(group=COMMANDS_GROUP)}


def _hide_types_of_flags(command: Any, ctx: Any) -> None:
    """Have the help of a command, and of the commands below it, show no type beside a flag."""
    _without_types(command.get_params(ctx))
    for each in getattr(command, "commands", {}).values():
        _hide_types_of_flags(each, ctx)


def _without_types(params: list[Any]) -> list[Any]:
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""  # an empty text takes the place of `<bool>`
    return params


def _told(error: KVStoreError) -> typer.Exit:
    line = " ".join(str(error).split())
    typer.echo(f"kvstore: {line}", err=True)
    return typer.Exit(exit_code(error))
