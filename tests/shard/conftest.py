"""Fixtures of the tests of shards: handles in memory, moto's S3 server in a thread, and Azurite."""

from __future__ import annotations

import itertools
import logging
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from obstore.store import AzureStore, ObjectStore, S3Store

from tests.shard import azurite
from tests.shard.driver import Driver
from tests.shard.world import World

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def s3_options(server: str) -> dict[str, Any]:
    """The options by which a collection, a staging or a storage reaches `server`."""
    return {
        "endpoint": server,
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
    }


@pytest.fixture
def s3_bucket(s3_server: str) -> Callable[[], ObjectStore]:
    """Make a store on a new, empty bucket; calling it again opens the same bucket."""
    bucket = f"bucket-{next(_numbers)}"
    with urllib.request.urlopen(urllib.request.Request(f"{s3_server}/{bucket}", method="PUT")):
        pass

    def connect() -> ObjectStore:
        return S3Store(
            bucket,
            endpoint=s3_server,
            access_key_id="test",
            secret_access_key="test",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    return connect


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite.running(tmp_path_factory.mktemp("azurite")) as address:
        yield address


@pytest.fixture
def azure_container(azure_server: str) -> str:
    """The name of a new, empty container."""
    name = f"container-{next(_numbers)}"
    azurite.create_container(azure_server, name)
    return name


@pytest.fixture
def azure_store(azure_server: str, azure_container: str) -> ObjectStore:
    options = azurite.options(azure_server)
    return AzureStore(azure_container, client_options={"allow_http": True}, **options)


@pytest.fixture
def shard() -> Driver:
    return Driver()


@pytest.fixture
def world() -> World:
    return World()
