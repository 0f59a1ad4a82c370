"""dogpile.cache's suites for backends, serializers and locks."""

from __future__ import annotations

import json
import tempfile
from typing import ClassVar

from dogpile.testing.fixtures import (
    _GenericBackendTestSuite,
    _GenericMutexTestSuite,
    _GenericSerializerTestSuite,
)

import kvstore.adapters.dogpile  # registers the backend

PLACE = tempfile.mkdtemp()
assert kvstore.adapters.dogpile.KVStoreBackend


class Configured:
    """A backend by the path of its store."""

    backend = "kvstore"
    config_args: ClassVar = {"arguments": {"where": f"{PLACE}/cache.db"}}


class TestBackend(Configured, _GenericBackendTestSuite):
    pass


class TestSerializer(Configured, _GenericSerializerTestSuite, _GenericBackendTestSuite):
    region_args: ClassVar = {
        "serializer": lambda value: json.dumps(value).encode("ascii"),
        "deserializer": json.loads,
    }


class TestMutex(Configured, _GenericMutexTestSuite):
    pass
