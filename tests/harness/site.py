"""The site, built as `make docs` builds it."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@functools.cache
def built() -> Path:
    """The directory of the built site. After `make check` the build finds little to do."""
    place = ROOT / "build" / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "docs", str(place)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return place
