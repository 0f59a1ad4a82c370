"""Azurite, Microsoft's emulator of Azure's blobs: started, and given containers.

It comes from npm, so the tests that need it are marked `azure`, and `make azure` runs them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Final

ACCOUNT: Final = "devstoreaccount1"
KEY: Final = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The emulator's only account; its documentation gives both."""

_COMMAND = (
    "npx --yes --package azurite@3.35.0 azurite-blob "
    "--inMemoryPersistence --disableTelemetry --silent --blobPort 0"
)
_API = "2021-08-06"


@contextmanager
def running(place: Path) -> Iterator[str]:
    """Azurite in a process of its own, which writes its log in `place`; its address."""
    server = subprocess.Popen(
        _COMMAND.split(), cwd=place, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert server.stdout is not None
        found = (re.search(r"listens on (http://\S+)", line) for line in server.stdout)
        address = next(match[1] for match in found if match is not None)
        yield f"{address}/{ACCOUNT}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def create_container(address: str, name: str) -> None:
    """Make an empty container; signed as Azure's "Authorize with Shared Key" says."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _API}
    signed = "PUT" + "\n" * 12
    signed += "".join(f"{header}:{value}\n" for header, value in headers.items())
    signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{address}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)):
        pass


def options(address: str) -> dict[str, str]:
    """The options of obstore that open the account."""
    return {"account_name": ACCOUNT, "account_key": KEY, "endpoint": address}
