"""The `kvstore` command: its own commands, the commands of other packages, the report of failures.

Packages above this one add commands through the entry point group `kvstore.commands`: the entry's
name is the command, its object a `typer.Typer`.

A failure prints one line on stderr (what happened; what to do) and sets an exit code: see
`kvstore.cli.exits`. Only a bug of ours shows a traceback.

Invariants
1. A command is imported when it is called, so `kvstore get` imports no other command, and
   `kvstore --help` imports no command that `summaries` knows.
2. A command is imported before it runs: an interrupt meanwhile ends the process at once.
3. Help and messages are plain text. Rich, which takes 90 ms, is imported for tables and progress.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from kvstore.cli.exits import HELP, exit_code, from_system
from kvstore.cli.interrupts import interruptible
from kvstore.cli.output import in_one_line, print_line
from kvstore.cli.summaries import SUMMARIES
from kvstore.cli.times import ago
from kvstore.cli.wording import in_shell_words
from kvstore.errors import KVStoreError
from kvstore.neighbours import require_own
from kvstore.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS_GROUP: Final = "kvstore.commands"

OWN: Final = {
    "get": "read:get",
    "scan": "read:scan",
    "history": "read:history",
    "stats": "read:stats",
    "changes": "changes:changes",
    "follow": "changes:follow",
    "diff": "changes:diff",
    "put": "write:put",
    "delete": "write:delete",
    "delete-range": "write:delete_range",
    "revert": "write:revert",
    "verify": "upkeep:verify",
    "gc": "upkeep:gc",
    "checkpoint": "upkeep:checkpoint",
    "holds": "holds:app",
    "imports": "imports:app",
    "feeds": "feeds:app",
    "tasks": "tasks:tasks",
    "serve": "serve:serve",
    "ui": "serve:ui",
    "doctor": "doctor:doctor",
    "journal": "journal:app",
    "help": "help:app",
}
"""The commands of this package, in the order of the help: a module of `kvstore.cli`, and in it a
function, or a `typer.Typer` of several commands."""

_SUMMARY_MAX: Final = 200

# Commands print waits and failures themselves; without a handler, logging prints each once more.
logging.getLogger("kvstore").addHandler(logging.NullHandler())


class Commands(TyperGroup):
    """The command group: loads each command when it is called, and maps errors to exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*OWN, *sorted(_added())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = _own(cmd_name) if cmd_name in OWN else None
        if found is None and (added := _added().get(cmd_name)) is not None:
            if (package := added.module.partition(".")[0]) in ("backup", "bulk"):
                require_own(package)
            found = added.load()
        if found is None:
            return None
        command: Any = typer.main.get_command(found)
        command.name = cmd_name
        _prepare(command, ctx)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, self._summary(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _summary(self, ctx: Any, name: str) -> str:
        if (known := SUMMARIES.get(name)) is not None:
            return known
        found: str = self.get_command(ctx, name).get_short_help_str(_SUMMARY_MAX)
        return found

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
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_line(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and exit.",
        ),
    ] = False,
) -> None:
    """The options of `kvstore` itself."""


def _own(name: str) -> typer.Typer:
    """A command of this package."""
    module, member = OWN[name].split(":")
    found = getattr(import_module(f"kvstore.cli.{module}"), member)
    if isinstance(found, typer.Typer):
        return found
    alone = typer.Typer(add_completion=False)
    alone.command(name)(found)
    return alone


def _added() -> dict[str, EntryPoint]:
    """Commands of other packages, by name."""
    from importlib.metadata import entry_points  # takes 10 ms, which our own commands do not need

    return {entry.name: entry for entry in entry_points(group=COMMANDS_GROUP)}


def _prepare(command: Any, ctx: Any) -> None:
    """Prepare a command and its subcommands. Help is plain and shows no type beside a flag. An
    interrupt ends the command. A time such as `-1h` is not taken for an option."""
    command.rich_markup_mode = None
    params = _without_types(command.get_params(ctx))
    if any(
        each.param_type_name == "argument" and "TIME" in (each.metavar or "") for each in params
    ):
        parse = command.parse_args
        command.parse_args = lambda ctx, words: parse(ctx, list(map(ago, words)))
    below = getattr(command, "commands", None)
    if below is None:
        command.callback = interruptible(command.callback)
        return
    for each in below.values():
        _prepare(each, ctx)


def _without_types(params: list[Any]) -> list[Any]:
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""  # an empty text takes the place of `<bool>`
    return params


def _told(error: KVStoreError) -> typer.Exit:
    line = in_one_line(in_shell_words(" ".join(str(error).split())))
    typer.echo(f"kvstore: {line}", err=True)
    return typer.Exit(exit_code(error))
