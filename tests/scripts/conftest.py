"""`pytest --rewrite` writes the answers of the behaviour scripts anew."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write down what the behaviour scripts print now"
    )
