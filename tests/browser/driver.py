"""Chromium by its driver, over the W3C protocol: enough for the tests of the page.

    with Browser() as browser:
        browser.open(url)
        browser.press("\\ue004")          the key Tab
        browser.run("return document.activeElement.id")

`make browser` says which package is missing where the two programs are not installed.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

TAB: Final = "\ue004"
ENTER: Final = "\ue007"
END: Final = "\ue010"
LEFT: Final = "\ue012"
_PROGRAMS: Final = {"chromedriver": "chromium-driver", "chromium": "chromium"}
_WAIT_S: Final = 120
"""For the longest answer: a page that loads on a machine with a load of its own."""
_LOOKS_MAX: Final = 600


def missing() -> str:
    """The Debian packages that the tests need and that are not installed; empty if none is."""
    return " ".join(name for program, name in _PROGRAMS.items() if not shutil.which(program))


class Browser:
    """One window of Chromium without a screen."""

    def __init__(self, *, is_dark: bool = False, width: int = 1200, height: int = 1000) -> None:
        self._directory = tempfile.mkdtemp(prefix="kvstore-browser-")
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self._base = f"http://127.0.0.1:{self._port()}/session"
            arguments = [
                "--headless=new",
                "--no-sandbox",  # tests run as root, in a container
                "--disable-dev-shm-usage",
                "--disable-gpu",
                "--no-first-run",
                "about:blank",
                "--disable-background-networking",
                f"--window-size={width},{height}",
                f"--user-data-dir={self._directory}",
            ]
            if is_dark:
                arguments.append("--blink-settings=preferredColorScheme=0")
            options = {"binary": shutil.which("chromium"), "args": arguments}
            wanted = {
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            found = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
            self._base += f"/{found['sessionId']}"
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._end()

    def open(self, url: str) -> None:
        """Go to an address, and wait until it has loaded."""
        self._ask("POST", "/url", {"url": url})

    @property
    def url(self) -> str:
        """The present address."""
        return str(self._ask("GET", "/url"))

    @property
    def title(self) -> str:
        """The title of the present page."""
        return str(self._ask("GET", "/title"))

    def resize(self, width: int, height: int = 900, *, is_dark: bool = False) -> None:
        """Have the page a size in pixels, also one below the least of a window, and a scheme of
        colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._tell("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._tell("Emulation.setEmulatedMedia", {"features": [scheme]})

    def run(self, script: str, *arguments: object) -> Any:
        """The result of a function body in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_later(self, script: str) -> Any:
        """What a function body in the page gives to its last argument, a function."""
        return self._ask("POST", "/execute/async", {"script": script, "args": []})

    def wait_for(self, condition: str) -> None:
        """Wait until a condition of the page holds, which is looked at ten times a second."""
        script = "const done = arguments[0]; setTimeout(() => done(true), 100);"
        for _ in range(_LOOKS_MAX):
            with suppress(AssertionError):  # the page goes away meanwhile
                if self.run(condition):
                    return
                self.run_later(script)
        raise AssertionError(condition)

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self._ask("POST", "/actions", {"actions": [source]})

    def requests(self) -> list[str]:
        """The addresses that the browser has asked for since the last call."""
        found = []
        for entry in self._ask("POST", "/se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def complaints(self) -> list[str]:
        """The messages of the console since the last call: errors of scripts, refused loads."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        """Save the window as PNG."""
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    # -- inside -----------------------------------------------------------------------------

    def _tell(self, command: str, fields: dict[str, Any]) -> None:
        """A command of Chromium's own protocol."""
        self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": fields})

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            match = re.search(r"on port (\d+)", line)
            if match and "started" in line:
                return int(match[1])
        raise AssertionError("chromedriver ended at once")

    def _ask(self, method: str, path: str, fields: dict[str, Any] | None = None) -> Any:
        body = None if fields is None else json.dumps(fields).encode()
        request = urllib.request.Request(self._base + path, body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:1000]) from error

    def _end(self) -> None:
        self._driver.terminate()
        self._driver.wait()
        if self._driver.stdout is not None:
            self._driver.stdout.close()
        shutil.rmtree(self._directory, ignore_errors=True)
