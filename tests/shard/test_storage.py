"""Storage by address, and that the layers of this package stay apart."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import ObjectStore

import kvstore.backup.shard
from kvstore.errors import UsageError
from kvstore.storage.address import open_storage
from kvstore.storage.contract import Storage
from kvstore.storage.local_files import FileBlob
from tests.shard.conftest import s3_options
from tests.shard.world import open_shard, read, write


def lives(first: Storage, second: Storage) -> None:
    write(open_shard(*first), 5)
    assert read(open_shard(*second, create=False), 4) == {b"k": b"v5"}


def test_a_path_and_its_file_url_are_the_same_storage(tmp_path: Path) -> None:
    lives(open_storage(tmp_path / "a b"), open_storage(f"file://{tmp_path}/a%20b"))
    assert isinstance(open_storage(str(tmp_path)).blob, FileBlob)


def test_memory_is_shared_by_name() -> None:
    lives(open_storage("memory://one"), open_storage("memory://one/"))
    assert open_storage("memory://two").consensus.list_keys() == []


def test_an_s3_url_is_an_object_store(s3_server: str, s3_bucket: Callable[[], ObjectStore]) -> None:
    bucket = s3_bucket().config["bucket"]  # type: ignore[attr-defined]
    options = {**s3_options(s3_server), "client_options": {"allow_http": True}}
    url = f"s3://{bucket}/some/path"
    lives(open_storage(url, **options), open_storage(url, **options))
    del options["client_options"]  # an endpoint with the scheme http is asked by http
    assert open_storage(url, **options).consensus.list_keys() != []
    odd = [f"{url}%23old", f"{url}%3Fold", f"{url} ü"]
    for each in odd:
        assert open_storage(each, **options).consensus.list_keys() == []
        lives(open_storage(each, **options), open_storage(each, **options))


def test_a_clients_option_among_the_stores_is_refused_with_its_place() -> None:
    with pytest.raises(UsageError, match="client_options"):
        open_storage("s3://bucket/path", region="us-east-1", allow_http="true")


@pytest.mark.parametrize("url", ["", "ftp://x/y", "file://host/path", "nonsense://"])
def test_an_address_that_is_not_understood_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_storage(url)


@pytest.mark.parametrize("url", ["s3:bucket/place", "s3:/bucket", "file:x/y", "gs:b", "az:b"])
def test_a_url_with_too_few_slashes_is_no_directory_of_that_name(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="://"):
        open_storage(url)
    open_storage(f"./{url}").blob.put("a", b"x")
    open_storage("s3").blob.put("a", b"x")
    assert {path.name for path in tmp_path.iterdir()} == {url.partition("/")[0], "s3"}


@pytest.mark.parametrize("end", ["#2", "?2", "#", "a#b/c"])
def test_what_a_file_url_would_leave_out_of_the_path_is_refused(tmp_path: Path, end: str) -> None:
    with pytest.raises(UsageError, match="%23"):
        open_storage(f"file://{tmp_path}/a{end}")
    odd = tmp_path / f"ü ñ%20{end}"
    open_storage(odd).blob.put("a", b"x")
    assert open_storage(odd.as_uri()).blob.get("a") == b"x"


def test_local_files_take_no_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="region"):
        open_storage(tmp_path, region="x")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module or "")
    return found


PACKAGE = Path(kvstore.backup.shard.__file__).parent
MODULES = {path.stem: imports(path) for path in PACKAGE.rglob("*.py")}


def test_the_machine_knows_no_storage_no_clock_and_no_arrow() -> None:
    pure = {"state", "trace"}
    allowed = {f"backup.shard.state.{name}" for name in pure} | {"kvstore.backup.shard.state"}
    for name in pure:
        ours = {i for i in MODULES[name] if i.startswith(("backup", "kvstore.storage"))}
        assert ours <= allowed, name
        assert not {i for i in MODULES[name] if i.startswith(("pyarrow", "numpy", "time", "os"))}


def test_nothing_here_reaches_up_or_sideways() -> None:
    for name, found in MODULES.items():
        ours = {i for i in found if i.split(".")[0] in ("backup", "bulk", "spark_connector")}
        assert all(i.startswith("kvstore.backup.shard") for i in ours), name
