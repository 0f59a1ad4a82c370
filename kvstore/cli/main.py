"""The `kvstore` command: its own commands, the commands of other packages, the report of failures.

The commands of loads and backups lie above this package, and are imported by name: the entry's
name is the command, its object a `typer.Typer`.

A failure prints one line on stderr (what happened; what to do) and sets an exit code. Only a bug
of ours shows a traceback.

Invariants
1. A command is imported when it is called, so `kvstore get` imports no other command, and
   `kvstore --help` imports no command that `summaries` knows.
2. A command is imported before it runs: an interrupt meanwhile ends the process at once.
3. Help and messages are plain text. Rich, which takes 90 ms, is imported for tables and progress.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from kvstore.cli.output import in_one_line, print_line
from kvstore.cli.process import interruptible
from kvstore.cli.times import ago
from kvstore.errors import (
    Argument,
    CorruptionError,
    FencedError,
    HistoryGoneError,
    KVStoreError,
    NotYetWrittenError,
    RetryableError,
    StorageError,
    UsageError,
)
from kvstore.version import __version__

# --------------------------------------------------------------------------------------------------
# Exit codes: one number tells a script what to do about a failure.
#
# 0   done
# 1   the key is not there, or verify, scrub or salvage found something that is not whole
# 2   fix the call, the option or the path; nothing was written
# 3   surely not done (the store is in use, a conflict): run it again
# 4   history at the time is gone, or the time is not complete yet
# 5   storage failed, or bytes are damaged
# 6   a newer owner has taken over: stop
# 130 interrupted

DONE: Final = 0
NOT_FOUND: Final = 1
USAGE: Final = 2
RETRY: Final = 3
TIME: Final = 4
STORAGE: Final = 5
FENCED: Final = 6

EXIT_CODES: Final[tuple[tuple[type[KVStoreError], int], ...]] = (
    (UsageError, USAGE),
    (RetryableError, RETRY),
    (HistoryGoneError, TIME),
    (NotYetWrittenError, TIME),
    (FencedError, FENCED),
    (StorageError, STORAGE),
    (CorruptionError, STORAGE),
)
"""The branches of the error tree, each with its code."""

HELP: Final = """Exit codes:
    0  done
    1  the key is absent; damage was found; a part of the work failed
    2  wrong call: nothing was written
    3  not done: run it again
    4  history is gone, or the time is not complete yet
    5  storage failed, or bytes are damaged
    6  a newer owner has taken over: stop
  130  interrupted"""

_OF_THE_PATH: Final = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


def exit_code(error: KVStoreError) -> int:
    """The code for `error`, by its branch of the tree."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def from_system(error: OSError) -> KVStoreError:
    """An error of ours for a refusal of the operating system (a path, a permission, the disk)."""
    where = error.filename or "the operating system"
    text = f"{where}: {error.strerror or error}"
    if error.errno in _OF_THE_PATH:
        return UsageError(text, "check the path")
    return StorageError(text, "look at the disk, then run it again")


# --------------------------------------------------------------------------------------------------
# The first sentence of the help of each command, by which `kvstore --help` lists them.
#
# The texts are kept here, because listing commands must not import them: that takes half a second.
# A test compares the texts with the commands.

SUMMARIES: Final[Mapping[str, str]] = {
    "get": "Print the value of a key.",
    "scan": "Print keys and values in key order, a tab between them.",
    "count": "Print the number of keys.",
    "history": "Print the kept versions of a key, newest first.",
    "stats": "Print frontiers, counts, sizes, and the claims that keep history.",
    "changes": "Print changes as JSON lines in time order.",
    "follow": "Print each change as a service commits it, as JSON lines, until interrupted.",
    "diff": "Print the keys whose values differ between two times, in key order.",
    "put": "Set a key and print the timestamp.",
    "delete": "Delete a key, which may be absent, and print the timestamp.",
    "delete-range": "Delete all keys of a span by one write, and print the timestamp.",
    "trim": "Delete all but the last N keys of each prefix by one commit, and print the timestamp.",
    "revert": "Undo an import from now on, or the changes of a span since a time.",
    "verify": "Read the whole store and list all damage.",
    "gc": "Give up old history and free its space.",
    "checkpoint": "Copy a store as of now, and print the newest time of the copy.",
    "holds": "List the holds that keep history in a store, or drop an abandoned one.",
    "imports": "List the imports of a store, show one, or revert one.",
    "feeds": "List the feeds of a store, print changes that a feed has not acknowledged, or drop "
    "one.",
    "tasks": "List the tasks of a store with their progress.",
    "serve": "Serve a store until a signal ends the process (SIGINT or SIGTERM).",
    "ui": "Show a store as a page for a browser, until a signal ends the process (SIGINT "
    "or SIGTERM).",
    "doctor": "Look at the environment, and at a store: versions, disk, clock, holds, failures.",
    "journal": "Look at, compact or rescue a journal.",
    "help": "Print the help of a command, or of all commands.",
    "backup": "Back a store up, and restore it as of any instant.",
    "export": "Write keys and values to a file that `kvstore import` reads, or the rows of a "
    "table.",
    "import": "Load many rows at once.",
    "push": "Push loads through a bucket to many stores.",
    "expire-stagings": "Remove the imports below a URL that were begun long ago, sealed or not.",
    "seed": "Make a new store of old events.",
    "table": "Look at tables, read and load their rows, and change their columns.",
}


# --------------------------------------------------------------------------------------------------
# Messages in the words of the shell: an error of the store names arguments of Python, and a person
# has options.
#
# Invariants
# 1. An argument for which the command has an option is told as that option, and a call of `CALLS`
#    as its command. Everything else of a message is told as it is.

_PLAIN: Final = re.compile(r"'([\w.:+-]+)'")
"""A text that needs no quotes in a shell."""

CALLS: Final = {
    "store.holds.all()": "`kvstore holds list`",
    "store.holds.drop()": "`kvstore holds drop`",
    "store.imports.all()": "`kvstore imports list`",
    "pushes.list()": "`kvstore push list`",
}
"""The commands in the place of calls that messages advise."""


def in_options(command: Any) -> Callable[[Argument], str]:
    """How an argument is written in messages of `command`: `--limit 5`, `--full`, `no --full`."""
    words: dict[str, str] = dict(CALLS)
    for each in command.params:
        if each.param_type_name == "option":
            words[each.name] = next(word for word in (*each.opts, "") if word[:2] in ("--", ""))

    def spell(argument: Argument) -> str:
        option, shown = words.get(argument.name, ""), argument.shown
        if not option:
            return str(argument)
        if shown in ("", "True"):
            return option
        if shown in ("False", "None"):
            return f"no {option}"
        plain = _PLAIN.fullmatch(shown)
        return f"{option} {plain[1] if plain is not None else shown}"

    return spell


# --------------------------------------------------------------------------------------------------
# The command.


COMMANDS: Final = {
    "get": "read_commands:get",
    "scan": "read_commands:scan",
    "count": "read_commands:count",
    "history": "read_commands:history",
    "stats": "read_commands:stats",
    "changes": "changes:changes",
    "follow": "changes:follow",
    "diff": "changes:diff",
    "put": "write:put",
    "delete": "write:delete",
    "delete-range": "write:delete_range",
    "trim": "write:trim",
    "revert": "write:revert",
    "verify": "upkeep:verify",
    "gc": "upkeep:gc",
    "checkpoint": "upkeep:checkpoint",
    "holds": "records:holds_app",
    "imports": "records:imports_app",
    "feeds": "changes:feeds_app",
    "tasks": "records:tasks",
    "serve": "serve:serve",
    "ui": "serve:ui",
    "doctor": "doctor:doctor",
    "journal": "journal:app",
    "help": "main:help_app",
    "backup": "kvstore.backup.cli:app",
    "expire-stagings": "kvstore.bulk.cli:stagings_app",
    "export": "kvstore.bulk.tables_cli:export_app",
    "import": "kvstore.bulk.cli:app",
    "push": "kvstore.bulk.pushes.cli:app",
    "seed": "kvstore.bulk.cli:seed_app",
    "table": "kvstore.bulk.tables_cli:app",
}
"""The commands in the order of the help. Each is a module, by its name in `kvstore.cli` or by its
whole name, and in it a function, or a `typer.Typer` of several commands."""

ELSEWHERE: Final[Mapping[str, Mapping[str, str]]] = {
    "table": {"publish": "kvstore.backup.cli:publish_app"}
}
"""Commands of a group whose modules lie above the module of the group."""

_SUMMARY_MAX: Final = 200

# Commands print waits and failures themselves; without a handler, logging prints each once more.
logging.getLogger("kvstore").addHandler(logging.NullHandler())


class Commands(TyperGroup):
    """The command group: loads each command when it is called, and maps errors to exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command: Any = typer.main.get_command(_command(cmd_name, COMMANDS[cmd_name]))
        command.name = cmd_name
        _prepare(command, ctx)
        if cmd_name in ELSEWHERE:
            _add_elsewhere(command, ELSEWHERE[cmd_name])
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        _require_known(args, self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)

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
        # Imported late: every other command that needs RocksDB opens a store.
        from importlib.metadata import version

        from kvstore.engine.rocks import release

        print_line(f"kvstore {__version__}, RocksDB {release()}, rocksdict {version('rocksdict')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of kvstore and of RocksDB, and exit.",
        ),
    ] = False,
) -> None:
    """The options of `kvstore` itself."""


def _require_known(args: list[str], known: list[str], ctx: Any) -> None:
    """End with the nearest words if the first one is no command."""
    if args and args[0][:1] != "-" and args[0] not in known:
        ctx.fail(f"No such command {args[0]!r}.{_near(args[0], known)}")


def _near(word: str, words: Iterable[str]) -> str:
    """A sentence that proposes the words that `word` may be a misspelling of; empty if none is."""
    from difflib import get_close_matches

    found = " or ".join(map(repr, get_close_matches(word, list(words))))
    return f" Did you mean {found}?" if found else ""


def _add_elsewhere(group: Any, places: Mapping[str, str]) -> None:
    """Have a group list and find commands of other modules, which are imported when they are."""
    listed, found = group.list_commands, group.get_command

    def get_command(ctx: Any, name: str) -> Any:
        if name not in places:
            return found(ctx, name)
        command: Any = typer.main.get_command(_command(name, places[name]))
        command.name = name
        _prepare(command, ctx)
        return command

    group.list_commands = lambda ctx: [*listed(ctx), *places]
    group.get_command = get_command


def _command(name: str, place: str) -> typer.Typer:
    """The command `name`, whose module is imported."""
    module, member = place.split(":")
    found = getattr(import_module(module if "." in module else f"kvstore.cli.{module}"), member)
    if isinstance(found, typer.Typer):
        return found
    alone = typer.Typer(add_completion=False)
    alone.command(name)(found)
    return alone


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
        command.callback = _telling(interruptible(command.callback), in_options(command))
        return
    for each in below.values():
        _prepare(each, ctx)
    resolve = command.resolve_command

    def resolve_command(ctx: Any, args: list[str]) -> Any:
        _require_known(args, command.list_commands(ctx), ctx)
        return resolve(ctx, args)

    command.resolve_command = resolve_command


def _without_types(params: list[Any]) -> list[Any]:
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""  # an empty text takes the place of `<bool>`
    return params


def _telling(run: Callable[..., Any], spell: Callable[[Argument], str]) -> Callable[..., Any]:
    """`run`, whose failures are told with the options of its command."""

    @wraps(run)
    def telling(*args: Any, **options: Any) -> Any:
        try:
            return run(*args, **options)
        except KVStoreError as error:
            raise _told(error, spell) from error

    return telling


def _told(error: KVStoreError, spell: Callable[[Argument], str] = str) -> typer.Exit:
    line = in_one_line(" ".join(error.told(spell).split()))
    typer.echo(f"kvstore: {line}", err=True)
    return typer.Exit(exit_code(error))


# --------------------------------------------------------------------------------------------------
# The command `kvstore help`.

help_app = typer.Typer(add_completion=False)


@help_app.command(name="help")
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
            known = command.list_commands(shown) if hasattr(command, "list_commands") else []
            raise UsageError(
                f"no command {' '.join(words or [])!r}",
                f"`kvstore help` lists all.{_near(word, known)}",
            )
        command, shown = found, type(ctx)(found, info_name=word, parent=shown)
    print_line(command.get_help(shown))
