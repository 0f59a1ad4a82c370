"""Huey's tests of a storage."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from pathlib import Path

os.environ["HUEY_SLOW_TESTS"] = "1"  # read when the tests are imported

from huey.tests.base import BaseTestCase
from huey.tests.test_storage import StorageTests

import kvstore
from kvstore.adapters.huey import KVStoreHuey, KVStoreStorage


class TestKVStoreStorage(StorageTests, BaseTestCase):
    """In a store of its own for each test."""

    def setUp(self) -> None:
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.store = kvstore.open(Path(place.name) / "s", durability="async")
        self.addCleanup(self.store.close)
        super().setUp()

    def get_huey(self) -> KVStoreHuey:
        return KVStoreHuey("tests", where=self.store, utc=False)

    def test_each_task_is_taken_once_by_many_workers(self) -> None:
        storage: KVStoreStorage = self.huey.storage
        for n in range(1000):
            storage.enqueue(b"%d" % n, priority=n % 3)
        taken: list[bytes] = []

        def work() -> None:
            while (data := storage.dequeue()) is not None:
                taken.append(data)

        workers = [threading.Thread(target=work) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert Counter(taken) == Counter(b"%d" % n for n in range(1000))
        assert storage.queue_size() == 0
