"""Optuna's suite for storages, over our journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage
from optuna.testing.pytest_storages import StorageTestCase

import kvstore
from kvstore.adapters.optuna import KVStoreJournal
from kvstore.errors import UsageError


class TestStorage(StorageTestCase):
    """By path, so that a handle pickles."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[BaseStorage]:
        journal = KVStoreJournal(tmp_path / "s")
        yield JournalStorage(journal)
        journal.handle.close()


def test_workers_append_at_once_and_a_study_is_read_as_it_was(tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with kvstore.open(tmp_path / "s", durability="async") as store:
        study = optuna.create_study(storage=JournalStorage(KVStoreJournal(store)), study_name="s")
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=5)
        then = store.now()
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=40, n_jobs=4)
        assert sorted(trial.number for trial in study.trials) == list(range(45))
        journal = KVStoreJournal(store, as_of=then)
        past = optuna.load_study(study_name="s", storage=JournalStorage(journal))
        assert len(past.trials) == 5
        with pytest.raises(UsageError, match="the past"):
            journal.append_logs([{}])
