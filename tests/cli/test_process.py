"""The command as a process of its own: pipes, following, interrupts, and commands of packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

import kvstore
from kvstore.cli.options import open_or_create

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "kvstore.cli"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        for number in range(30_000):
            store.put(b"%05d" % number, b"v" * 20)
    return tmp_path / "s"


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_pipe_that_is_closed_early_is_no_failure(path: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*COMMAND, "scan", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"00000\t" + b"v" * 20 + b"\n"
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0


def test_streams_that_are_closed_are_no_failure_and_no_file_of_the_store(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    def shell(words: str) -> int:
        line = f"exec {sys.executable} -m kvstore.cli {words}"
        return subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment).returncode

    assert shell("put s a 1 --create >&-") == 0
    assert shell("get s a >&-") == 0
    assert shell("get s missing 2>&- >&-") == 1
    assert shell("put s b <&-") == 2
    assert shell("verify s") == 0
    with kvstore.open(tmp_path / "s") as store:
        assert list(store.scan()) == [(b"a", b"1")]


def test_bytes_go_in_and_out_through_pipes(tmp_path: Path, environment: dict[str, str]) -> None:
    raw = bytes(range(256))
    store = str(tmp_path / "s")
    subprocess.run(
        [*COMMAND, "put", store, "k", "--create"], input=raw, env=environment, check=True
    )
    read = subprocess.run(
        [*COMMAND, "get", store, "k", "-n"], stdout=subprocess.PIPE, env=environment, check=True
    )
    assert read.stdout == raw


def test_keys_that_are_no_utf8_pass_the_shell(tmp_path: Path, environment: dict[str, str]) -> None:
    store = os.fsencode(tmp_path / "s")
    words = [os.fsencode(word) for word in COMMAND]
    subprocess.run(
        [*words, b"put", store, b"\xff\xfe", b"v", b"--create"], env=environment, check=True
    )
    with kvstore.open(tmp_path / "s") as opened:
        assert opened.get(b"\xff\xfe") == b"v"


@pytest.fixture
def following(path: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with kvstore.open(path) as store:
        since = store.upper - 1
    with subprocess.Popen(
        [*COMMAND, "changes", str(path), "--since", f"{since:d}", "--follow", "--poll", "0.01"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        # Tests that run in the background ignore interrupts. The child would inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as child:
        yield child
        child.kill()


def test_changes_are_followed_as_another_process_commits_them(
    path: Path, following: subprocess.Popen[bytes]
) -> None:
    assert following.stdout is not None
    assert following.stderr is not None
    seen = []
    with kvstore.open(path) as store:
        for number in range(5):
            store.put(b"k%d" % number, b"v")
            seen.append(json.loads(following.stdout.readline())["key"])
        with store.batch() as batch:
            batch.put(b"x", b"v")
            batch.put(b"y", b"v")
        seen += [json.loads(following.stdout.readline())["key"] for _ in range(2)]
    assert seen == ["k0", "k1", "k2", "k3", "k4", "x", "y"]
    following.send_signal(signal.SIGINT)
    assert following.wait() == 130
    assert b"Traceback" not in following.stderr.read()


def test_a_failure_has_its_code_and_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    failed = subprocess.run(
        [*COMMAND, "get", str(tmp_path / "nothing"), "k"],
        capture_output=True,
        env=environment,
        check=False,
    )
    assert (failed.returncode, failed.stdout) == (2, b"")
    assert failed.stderr.startswith(b"kvstore: ")
    assert failed.stderr.count(b"\n") == 1


@pytest.mark.parametrize("is_written", [False, True])
def test_an_interrupted_create_leaves_a_store_only_if_something_was_written(
    tmp_path: Path, is_written: bool
) -> None:
    def command() -> None:
        with open_or_create(tmp_path / "s", "rocksdb", create=True) as store:
            if is_written:
                store.put(b"k", b"v")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command()
    assert (tmp_path / "s").exists() == is_written


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Interrupts raise, also where whoever runs the tests ignores them, as shells do behind `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("moment", ["call", "return"])
def test_an_interrupt_while_rocksdb_opens_a_new_store_leaves_none(
    tmp_path: Path, moment: str
) -> None:
    """The interrupt comes right before RocksDB makes its files, and right after."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == moment and frame.f_code.co_name == "open_whole":
            signal.raise_signal(signal.SIGINT)

    def command() -> None:
        sys.setprofile(interrupt)
        try:
            with open_or_create(tmp_path / "s", "rocksdb", create=True):
                raise AssertionError("the interrupt was lost")
        finally:
            sys.setprofile(None)

    with pytest.raises(KeyboardInterrupt):
        command()
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_does_not_stop_the_removal_of_a_new_store(tmp_path: Path) -> None:
    """The second interrupt comes when the store is closed, before its directory goes."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is kvstore.Store.close.__code__:
            signal.raise_signal(signal.SIGINT)

    def command() -> None:
        try:
            with open_or_create(tmp_path / "s", "rocksdb", create=True):
                sys.setprofile(interrupt)
                raise KeyboardInterrupt
        finally:
            sys.setprofile(None)

    with pytest.raises(KeyboardInterrupt):
        command()
    assert not (tmp_path / "s").exists()


def test_a_directory_that_was_there_stays_without_a_store(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with pytest.raises(InterruptedError), open_or_create(tmp_path / "s", "rocksdb", create=True):
        raise InterruptedError
    assert list((tmp_path / "s").iterdir()) == []
