"""Ctrl-C at a random moment of every long command: no traceback, exit code 130, nothing half done.

Each command works on copies of a store, a collection of backups, files and pushes. After an
interrupt the store is sound, and a store or file that the command makes is either absent or whole.
The same command, given again, does its work.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.bulk.pushes import Pushes
from kvstore.cli.early import INTERRUPTED
from kvstore.cli.main import DONE, USAGE
from tests.harness.seeds import seeded

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
READY = "from kvstore.cli.process import watch; watch(); print('ready', flush=True)"
MAIN = "from kvstore.cli.start import main; main()"
ROWS = 20_000
LAST = b"%05d" % (ROWS - 1)
ENDLESS_S = 1.5
"""Commands that end by a signal alone are interrupted within this time."""


def rows_of(path: Path) -> int:
    with kvstore.open_read_only(path) as store:
        return store.count()


def has_rows(name: str, count: int) -> Callable[[Path], bool]:
    return lambda place: rows_of(place / name) == count


def has_lines(name: str, count: int) -> Callable[[Path], bool]:
    return lambda place: len((place / name).read_text().splitlines()) == count


def is_whole(place: Path) -> bool:
    return backup.Collection(place / "backups").verify("checksums").parts > 0  # or it raises


def is_reverted(place: Path) -> bool:
    with kvstore.open_read_only(place / "s") as store:
        return store.get(LAST) == b"newer" and store.get(b"00001") == b"v" * 20


def has_table(count: int) -> Callable[[Path], bool]:
    def holds(place: Path) -> bool:
        with kvstore.open_read_only(place / "t") as store:
            return sum(batch.num_rows for batch in store.table("rows").scan()) == count

    return holds


def has_index(place: Path) -> bool:
    with kvstore.open_read_only(place / "t") as store:
        return len(list(store.table("rows").find("by_value", "v"))) == 2000


def is_file(name: str) -> Callable[[Path], bool]:
    return lambda place: (place / name).stat().st_size > 0


class Command(NamedTuple):
    """A command that ends by itself, and what holds once it has ended. `makes` is the name of the
    store or directory that it makes, which must not exist before. `rest` is the command that ends
    the work where the command itself refuses a second call."""

    words: str
    holds: Callable[[Path], bool]
    makes: str | None = None
    rest: str | None = None


S = has_rows("s", ROWS)
COMMANDS: Mapping[str, Command] = {
    "scan": Command("scan s", S),
    "history": Command("history s 00001", S),
    "stats": Command("stats s", S),
    "changes": Command("changes s --since {at}", S),
    "diff": Command("diff s {at}", S),
    "doctor": Command("doctor s", S),
    "put": Command("put s k v", has_rows("s", ROWS + 1)),
    "put new": Command("put new k v --create", has_rows("new", 1), "new"),
    "revert": Command("revert s --prefix 0 --to {at}", is_reverted),
    "verify": Command("verify s", S),
    "gc": Command("gc s --keep 0s --compact", S),
    "delete-range": Command("delete-range s --prefix 0", has_rows("s", ROWS - 10_000)),
    "trim": Command("trim s --prefix 0 --keep 1", has_rows("s", ROWS - 9_999)),
    "checkpoint": Command("checkpoint s copy", has_rows("copy", ROWS), "copy"),
    "import": Command("import s rows.csv --on-conflict overwrite", has_rows("s", ROWS + 1)),
    "create": Command("import new rows.csv --create", has_rows("new", ROWS), "new"),
    "sync": Command("import s rows.csv --sync", S),
    "apply": Command("import s ops.csv --op op", has_rows("s", ROWS - 1000)),
    "imports revert": Command("imports revert t {import_id}", has_rows("t", 0)),
    "export": Command("export s out.jsonl", has_lines("out.jsonl", ROWS)),
    "seed": Command("seed seeded events.csv", has_rows("seeded", ROWS), "seeded"),
    "feeds tail": Command("feeds tail t one", has_table(2000)),
    "table import": Command("table import t rows rows.csv", has_table(ROWS + 1)),
    "table scan": Command("table scan t rows --json", has_table(2000)),
    "table alter": Command(
        "table alter t rows --add-index by_value=value",
        has_index,
        rest="table build t rows by_value",
    ),
    "table export": Command("export t rows out.parquet", is_file("out.parquet")),
    "journal inspect": Command("journal inspect m", has_rows("m", 2000)),
    "journal compact": Command("journal compact m", has_rows("m", 2000)),
    "journal salvage": Command("journal salvage m saved", has_rows("saved", 2000), "saved"),
    "backup run": Command("backup run s backups", is_whole),
    "backup verify": Command("backup verify backups", is_whole),
    "backup contents": Command("backup verify backups --depth contents --store s", is_whole),
    "backup compact": Command("backup compact backups", is_whole),
    "backup expire": Command("backup expire backups --keep 0s", is_whole),
    "backup scrub": Command("backup scrub backups --delete 0s", is_whole),
    "backup scan": Command("backup scan backups", is_whole),
    "backup diff": Command("backup diff backups {at}", is_whole),
    "backup find": Command("backup find backups 1999", is_whole),
    "backup drill": Command("backup drill backups", is_whole),
    "backup restore": Command(
        "backup restore backups restored", has_rows("restored", ROWS), "restored"
    ),
    "backup into": Command("backup restore backups s --into", S),
    "backup replicate": Command("backup replicate backups standby", has_rows("standby", ROWS)),
    "push pull": Command("push pull s pushes --name one --once", has_rows("s", ROWS + 1)),
    "push expire": Command("push expire pushes --keep 0", S),
}
"""Commands that end by themselves, each with what holds once it has ended."""

ENDLESS: Mapping[str, str] = {
    "tail": "feeds tail t one --follow",
    "replicate": "backup replicate s standby --follow",
    "follow": "follow s",
    "changes": "changes s --follow",
    "ui": "ui s --listen 127.0.0.1:0",
    "serve": "serve s --listen 127.0.0.1:0",
    "backup follow": "backup run s backups --follow --every 1s",
    "push follow": "push pull s pushes --name one --every 1s",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that commands work on."""
    place = tmp_path_factory.mktemp("made")
    with kvstore.open(place / "s", durability="async") as store:
        for first in range(0, ROWS, 1000):
            store.put_many((b"%05d" % n, b"v" * 20) for n in range(first, first + 1000))
        collection = backup.Collection(place / "backups")
        collection.backup(store)
        store.put(LAST, b"newer")
        collection.backup(store)
        (place / "at").write_text(str(int(store.now())))
        for first in range(0, 10_000, 1000):
            store.put_many((b"%05d" % n, b"v" * 20) for n in range(first, first + 1000))
    make_others(place)
    lines = [f"{number:05d},w" for number in range(1, ROWS + 1)]
    (place / "rows.csv").write_text("\n".join(["key,value", *lines]) + "\n")
    stamped = [f"{line},{1_700_000_000_000_000_000 + at}" for at, line in enumerate(lines)]
    (place / "events.csv").write_text("\n".join(["key,value,ts", *stamped]) + "\n")
    with Pushes(str(place / "pushes")).begin() as building:
        with building.writer() as writer:
            writer.put(b"pushed", b"row")
        building.seal()
    return place


def make_others(place: Path) -> None:
    """A store with a table and an import, and a store in memory with its journal."""
    with kvstore.open(place / "t", durability="async") as store:
        schema = pa.schema([("key", pa.string()), ("value", pa.string())])
        rows = {"key": [f"{number:05d}" for number in range(2000)], "value": ["v"] * 2000}
        store.table("rows", schema, key=["key"]).put_batch(pa.table(rows, schema))
        staged = bulk.Import.create(place / "staged")
        with staged.writer() as writer:
            writer.put(b"imported", b"row")
        staged.seal()
        bulk.ingest(store, place / "staged")
        (place / "import_id").write_text(f"{staged.import_id:016x}")
        with store.feed("one", start=0):
            pass
    with kvstore.open(place / "m", engine="memory") as store:
        for number in range(2000):
            store.put(b"%05d" % number, b"v", durability="async")
    ops = [f"{number:05d},w,{'delete' if number < 1000 else 'put'}" for number in range(ROWS)]
    (place / "ops.csv").write_text("\n".join(["key,value,op", *ops]) + "\n")


def begin(place: Path, words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen[bytes](
        [sys.executable, "-c", f"{READY}; {MAIN}", *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=place,
        env=ENVIRONMENT,
        # Tests that run in the background ignore interrupts. The child would inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )


def ended(
    place: Path, words: str, after_s: float | None, codes: tuple[int, ...] = (DONE,)
) -> tuple[int, float]:
    """The exit code of a command, and its seconds; interrupted after a time, if one is given."""
    with begin(place, words) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        begun = time.monotonic()
        if after_s is not None:
            # The moment of the interrupt is the subject here, not a condition that is waited for.
            time.sleep(after_s)
            child.send_signal(signal.SIGINT)
        told = child.communicate()[1].decode()
        length = time.monotonic() - begun
    assert "Traceback" not in told, (words, told)
    assert "Exception ignored" not in told, (words, told)
    if after_s is None:
        assert child.returncode in codes, (words, told)
    return child.returncode, length


class Subjects:
    """The commands, each with the files that it works on and the time that it takes."""

    def __init__(self, made: Path, place: Path, draw: Random) -> None:
        self._made, self._place, self._draw = made, place, draw
        self._facts = {name: (made / name).read_text() for name in ("at", "import_id")}
        self._lengths: dict[str, float] = {}

    def interrupt(self, name: str) -> None:
        """Interrupt a command once, and have it, or the command that ends its work, do the rest."""
        words, holds, makes, rest = COMMANDS[name]
        words = words.format(**self._facts)
        if name not in self._lengths:
            with self._copy() as copy:
                self._lengths[name] = ended(copy, words, None)[1]
        with self._copy() as copy:
            code, _ = ended(copy, words, self._draw.uniform(0, self._lengths[name]))
            # The interpreter itself ends by the signal where it has put back the system's handler.
            assert code in {DONE, INTERRUPTED, -signal.SIGINT}, (words, code)
            for each in ("s", "t"):
                with kvstore.open(copy / each) as store:
                    assert store.verify().ok
            if code != DONE:
                if makes is not None and (copy / makes).exists():
                    assert holds(copy), (words, code)  # interrupted behind the rename that made it
                    shutil.rmtree(copy / makes)
                again, _ = ended(copy, words, None, (DONE,) if rest is None else (DONE, USAGE))
                if rest is not None and again == USAGE:
                    ended(copy, rest, None)
            assert holds(copy), (words, code)

    def end(self, name: str) -> None:
        """Interrupt a command that ends by a signal alone."""
        with self._copy() as copy:
            code, _ = ended(copy, ENDLESS[name], self._draw.uniform(0, ENDLESS_S))
            # Services end in order by a signal. The others are interrupted.
            assert code in {DONE, INTERRUPTED, -signal.SIGINT}, (name, code)
            with kvstore.open(copy / "s") as store:
                assert store.verify().ok

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        shutil.copytree(self._made, self._place)
        yield self._place
        shutil.rmtree(self._place)


@pytest.mark.parametrize(
    ("drawn", "rounds"),
    [(2, 1), pytest.param(len(COMMANDS), 30, marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_an_interrupted_command_leaves_nothing_half_done(
    made: Path, tmp_path: Path, drawn: int, rounds: int
) -> None:
    """Each round interrupts each command once, so that a soak that is cut short has met all."""
    draw = seeded("INTERRUPTS_SEED")
    subjects = Subjects(made, tmp_path / "copy", draw)
    names = draw.sample(sorted(COMMANDS), drawn)
    for _ in range(rounds):
        for name in names:
            subjects.interrupt(name)


@pytest.mark.parametrize(
    ("drawn", "rounds"),
    [(2, 1), pytest.param(len(ENDLESS), 30, marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_an_endless_command_ends_by_an_interrupt(
    made: Path, tmp_path: Path, drawn: int, rounds: int
) -> None:
    draw = seeded("INTERRUPTS_SEED")
    subjects = Subjects(made, tmp_path / "copy", draw)
    names = draw.sample(sorted(ENDLESS), drawn)
    for _ in range(rounds):
        for name in names:
            subjects.end(name)
