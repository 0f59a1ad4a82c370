"""The command in a pseudo-terminal: progress, colours, width, escapes, Ctrl-C of the keyboard.

In a pipe the same commands print results alone.
"""

from __future__ import annotations

import errno
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvstore

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "kvstore.cli"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    "TERM": "xterm",
}
INTERRUPT = b"\x03"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with kvstore.open(tmp_path / "s") as store:
        store.put_many((b"%05d" % number, b"v" * 20) for number in range(2000))
        store.put(b"hostile", b"\x1b[31mred\x07")
        store.hold("a hold with a long name " * 4, at="now")
    return tmp_path / "s"


@contextmanager
def in_terminal(*words: str, columns: int = 50) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command with a terminal of its own, and the end of the terminal that a person has."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**ENVIRONMENT, "COLUMNS": str(columns)},
            start_new_session=True,
            preexec_fn=_own_terminal,
        ) as child:
            os.close(theirs)
            try:
                yield child, ours
            finally:
                child.kill()
    finally:
        os.close(ours)


def _own_terminal() -> None:
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def shown(ours: int) -> bytes:
    """Everything that a command shows until it ends."""
    found = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return found  # the last process has closed the terminal
        if not piece:
            return found
        found += piece


def test_a_terminal_shows_progress_and_a_pipe_does_not(path: Path) -> None:
    with in_terminal("verify", str(path)) as (child, ours):
        screen = shown(ours)
        assert child.wait() == 0
    assert b"reading" in screen
    assert b"\x1b[" in screen  # the spinner turns in its line
    piped = subprocess.run(
        [*COMMAND, "verify", str(path)], env=ENVIRONMENT, capture_output=True, check=True
    )
    assert piped.stderr == b""
    assert b"\x1b" not in piped.stdout


def test_a_terminal_shows_the_rate_of_a_long_command_in_one_line(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        for first in range(0, 40_000, 1000):
            store.put_many((b"%05d" % n, b"v") for n in range(first, first + 1000))
    with in_terminal("verify", str(tmp_path / "s")) as (child, ours):
        screen = shown(ours)
        assert child.wait() == 0
    assert screen.count(b"\x1b[1A") == 1  # the end leaves the one line of the progress
    drawn = re.split(rb"\r|\x1b\[2K|\x1b\[1A", screen)  # each time the line is drawn
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", each.decode()) for each in drawn]
    assert all(len(line.strip("\n")) <= 50 for line in lines), lines


def test_a_long_command_tells_about_how_much_there_is_to_do(tmp_path: Path) -> None:
    place, file = str(tmp_path / "s"), str(tmp_path / "rows.csv")
    lines = "\n".join(f"{number:06d},{number}" for number in range(40_000))
    Path(file).write_text(f"key,value\n{lines}\n")
    with kvstore.open(tmp_path / "old", durability="async") as store:
        for value in range(20):
            store.put_many((b"%03d" % number, b"%d" % value) for number in range(1000))
    for words, told in (
        (("import", place, file, "--create"), rb"40,000 of about 40,000 rows read"),
        (("backup", "run", place, str(tmp_path / "backups")), rb"40,000 of about 4\d,\d+ rows"),
        (("export", place, str(tmp_path / "out.csv")), rb"40,000 of about 4\d,\d+ rows"),
        (("gc", str(tmp_path / "old"), "--keep", "0s"), rb"\d of about [\d,]+ versions removed"),
    ):
        with in_terminal(*words, columns=150) as (child, ours):
            screen = shown(ours)
            assert child.wait() == 0, screen
        assert re.search(told, screen), (words, screen)


def test_a_result_stands_in_lines_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("key,value\n" + "".join(f"{number:06d},\n" for number in range(20_000)))
    with in_terminal("import", str(tmp_path / "s"), str(file), "--create") as (child, ours):
        screen = shown(ours)
        assert child.wait() == 0
    result = rb"\x1b\[1A\x1b\[2Ktimestamp  [^\r]+\r\nimport_id  \w+\r\nrows       20,000\r\n"
    assert re.search(result, screen), screen


def test_a_table_is_as_wide_as_the_terminal_and_values_cannot_change_it(path: Path) -> None:
    with in_terminal("holds", "list", str(path)) as (child, ours):
        screen = shown(ours)
        assert child.wait() == 0
    assert b"\x1b[1m" in screen  # the names of columns
    plain = re.sub(r"\x1b\[\d*m", "", screen.decode())
    assert max(map(len, plain.splitlines())) <= 50
    with in_terminal("get", str(path), "hostile") as (child, ours):
        screen = shown(ours)
        assert child.wait() == 0
    assert screen == b"\\x1b[31mred\\x07\r\n"


def test_ctrl_c_from_the_keyboard_ends_a_command_that_follows(path: Path) -> None:
    with in_terminal("changes", str(path), "--follow") as (child, ours):
        screen = b""
        while b'"hostile"' not in screen:
            screen += os.read(ours, 65536)
        os.write(ours, INTERRUPT)
        screen = shown(ours)
        assert child.wait() == 130
    assert b"Traceback" not in screen
