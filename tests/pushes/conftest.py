from __future__ import annotations

import itertools
import os

import pytest

from kvstore.bulk.pushes import Pushes

_numbers = itertools.count()


@pytest.fixture
def pushes() -> Pushes:
    return Pushes(f"memory://pushes-{os.getpid()}-{next(_numbers)}/root")
