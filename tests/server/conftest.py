"""A certificate for the tests of servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import made_certificate


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of a certificate for this machine, and of its key."""
    return made_certificate(tmp_path_factory.mktemp("tls"))
