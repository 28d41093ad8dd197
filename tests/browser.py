"""A Chromium that shows a page: keys and clicks as people make them, and what it logs and asks the network for.

It is spoken to in the DevTools protocol over two pipes. Tests that need it are skipped where there is none.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-quic",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
]  # fmt: skip
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on the PATH to show the page in")
PATIENCE = 30  # seconds
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}


class Tab:
    """One page."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._received = read, write, b""
        self._ids = itertools.count(1)
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser went away"
            self._received += more
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def open(self, page: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a page; what was logged before is forgotten."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.emulate(scheme=scheme)
        self.events.clear()
        self._ask("Page.navigate", url=page.as_uri())
        end = time.monotonic() + PATIENCE
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < end
            self._next()

    def emulate(self, *, scheme: str = "light", media: str = "") -> None:
        """`media`: whatever the page is for, a screen or a printer."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", media=media, features=features)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # until it is shown

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"Enter": {"text": "\r"}, " ": {"text": " "}}.get(key, {})
        self._ask("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text: str) -> None:
        self._ask("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        x, y = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); "
            "found.scrollIntoView({block: 'center', behavior: 'instant'}); const b = found.getBoundingClientRect(); "
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, x: float, y: float) -> None:
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def download_to(self, folder: Path) -> None:
        self._ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def picture(self, **clip: float) -> bytes:
        """Of what is in sight, or of a part of the whole page: x, y, width and height."""
        part = {"captureBeyondViewport": True, "clip": {"scale": 1, **clip}} if clip else {}
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png", **part)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self._ask("Page.printToPDF", printBackground=True)["data"])

    def complaints(self) -> list[str]:
        """What the console, the policy and scripts that failed have said."""
        wanted = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in wanted]

    def requests(self) -> list[str]:
        """Every address that the page asked for, but for its own and for what is inside it."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        asked = [each["request"]["url"] for each in sent if each["request"]["url"] != each["documentURL"]]
        return [address for address in asked if not address.startswith("data:")]


@contextmanager
def opened(profile: Path) -> Iterator[Tab]:
    """A browser with a fresh profile, which ends with the block."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe(), os.pipe()
    pipes = f"3<&{to_read[0]} 4>&{to_write[1]}"  # the two numbers that Chromium listens to
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" {pipes}', "chromium", CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_read[0], to_write[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read[0])
    os.close(to_write[1])
    with closing(Tab(to_write[0], to_read[1])) as tab:
        try:
            yield tab
        finally:
            process.kill()
            process.wait()
