"""A headless Chromium, driven over its debugging protocol: opens pages, runs expressions, presses keys, takes pictures.

with Browser() as browser:
    tab = browser.open(path.as_uri(), width=1440, height=900)
    tab.wait_for("document.documentElement?.dataset.opened")
    tab.press("j"), tab.value("document.title"), tab.picture(Path("page.png"))
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import ClientConnection, connect

_START_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str:
    """Return the path of a Chromium; "" if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), "")


class Browser:
    """A Chromium with a profile of its own, which ends with the block; nothing of it stays."""

    def __init__(self) -> None:
        self._sockets = contextlib.ExitStack()
        self._folder = tempfile.mkdtemp(prefix="forge_rl-browser-")
        self._process = subprocess.Popen(
            [
                *(find_chromium() or "chromium", "--headless", "--remote-debugging-port=0", "--no-first-run"),
                *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
                *("--hide-scrollbars", f"--user-data-dir={self._folder}", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": self._folder, "TMPDIR": self._folder},
        )

    def open(self, url: str, *, width: int = 1440, height: int = 900, dark: bool = False) -> Tab:
        """Open a page in a tab of its own."""
        until = time.monotonic() + _START_S
        port_file = Path(self._folder, "DevToolsActivePort")
        while not (port_file.is_file() and (lines := port_file.read_text().splitlines())):
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("Chromium did not start")
            time.sleep(0.05)
        request = urllib.request.Request(f"http://127.0.0.1:{lines[0]}/json/new", method="PUT")
        with urllib.request.urlopen(request, timeout=_START_S) as answer:
            target = json.load(answer)
        opening = connect(target["webSocketDebuggerUrl"], max_size=None, open_timeout=_START_S)
        tab = Tab(self._sockets.enter_context(opening))
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 800
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.call("Page.navigate", url=url)
        return tab

    def close(self) -> None:
        """End all its processes and remove its profile."""
        self._sockets.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Tab:
    """A tab of a browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []
        """Uncaught errors, errors written to the console, and what the content security policy refused."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=_START_S))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.problems.append(str(details.get("exception", details).get("description", details)))
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error", "text": text}}}:
                self.problems.append(str(text))
            case {"method": "Runtime.consoleAPICalled", "params": {"type": "error", "args": args}}:
                self.problems.append(str([arg.get("value", arg.get("description")) for arg in args]))
            case _:
                pass

    def value(self, expression: str) -> Any:
        """Return an expression's value, after it is settled if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_for(self, expression: str, *, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            if time.monotonic() > until:
                raise TimeoutError(f"{expression} stays false; {self.problems}")
            time.sleep(0.05)

    def close(self) -> None:
        """Close the tab."""
        self.call("Page.close")

    def press(self, key: str) -> None:
        """Press and release a key, such as "j" or "ArrowRight"."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def move_to(self, expression: str) -> None:
        """Move the mouse to the middle of an element."""
        box = self.value(f"(({expression}).getBoundingClientRect()).toJSON()")
        where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **where)

    def picture(self, path: Path, *, kind: str = "png") -> None:
        """Write a picture of the visible part."""
        options: dict[str, Any] = {"quality": 80} if kind != "png" else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format=kind, **options)["data"]))
