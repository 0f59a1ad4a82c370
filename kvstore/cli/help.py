"""The command `kvstore help`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.output import print_line
from kvstore.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command(name="help")
def help_(
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
