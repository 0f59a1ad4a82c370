"""What the tests of shards share: handles in memory, and moto's S3 server, in a thread."""

from __future__ import annotations

import itertools
import logging
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from moto.server import ThreadedMotoServer
from obstore.store import ObjectStore, S3Store

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


@pytest.fixture
def shard() -> Driver:
    return Driver()


@pytest.fixture
def world() -> World:
    return World()
