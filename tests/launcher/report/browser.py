"""A headless Chromium by its DevTools protocol: requests, complaints and looks of a page."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

from tests.screenshots import CHROMIUM

TIMEOUT_S = 120


class Page:
    """One page: the requests that it made, and errors in its console."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=TIMEOUT_S)
        self._sent = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while (reply := json.loads(self._socket.recv())).get("id") != self._sent:
            self._note(reply)
        assert "error" not in reply, reply
        return reply["result"]

    def close(self) -> None:
        """Leaves the browser."""
        self._socket.close()

    def open(self, url: str, width: int = 1180, is_dark: bool = False) -> None:
        """Shows a page, and returns when it has loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._load("Page.navigate", url=url)

    def lead(self, expression: str) -> None:
        """Evaluates what leads to another page, and returns when that has loaded."""
        self._load("Runtime.evaluate", expression=expression)

    def _load(self, method: str, **parameters: Any) -> None:
        frame = self._loaded
        self.call(method, **parameters)
        while self._loaded == frame:
            self._note(json.loads(self._socket.recv()))

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is, awaited."""
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        return self.value(
            f"new Promise((done, fail) => {{ const look = (left) => {{ const found = {expression};"
            " found ? done(found) : left ? setTimeout(look, 50, left - 1) : fail('it never was'); "
            "}; look(1000); })"
        )

    def picture(self, width: int = 1180, most: int = 6000) -> bytes:
        """The whole page as PNG."""
        height = min(most, int(self.value("document.documentElement.scrollHeight")))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode(
            self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        )

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(json.dumps(about["args"]))


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A page of a browser that ends with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
            "--remote-allow-origins=*",
            "about:blank",
        )
        browser = subprocess.Popen(
            [*CHROMIUM, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        errors = Path(profile) / "DevToolsActivePort"
        try:
            while browser.poll() is None and not (errors.exists() and "\n" in errors.read_text()):
                time.sleep(0.05)
            port = errors.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                first = next(entry for entry in json.load(answer) if entry["type"] == "page")
            opened = Page(first["webSocketDebuggerUrl"])
            yield opened
            opened.close()
        finally:
            browser.terminate()
            browser.wait()


def is_here() -> bool:
    """Whether there is a Chromium."""
    return shutil.which(CHROMIUM[0]) is not None
