"""Drive a headless Chromium as a person would: clicks, typing, painting and uploads.

Speaks the Chrome DevTools Protocol.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


class Browser:
    """A page in Chromium. `errors` are the messages in its console, exceptions and failed loads."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self._count, self._phone = 0, False
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        while (answer := json.loads(self._socket.recv())).get("id") != self._count:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def _note(self, event: dict[str, Any]) -> None:
        kind, details = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"]))
        elif kind == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(details["args"]))
        elif kind == "Log.entryAdded":
            self.errors.append(details["entry"]["text"])

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page; below 500 pixels it is a phone."""
        phone = self._phone = width < 500
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, limit: float = 60.0) -> Any:
        """Return the first true value of an expression."""
        deadline = time.monotonic() + limit
        while not (found := self.js(expression)):
            assert time.monotonic() < deadline, f"waited too long for {expression}"
            time.sleep(0.02)
        return found

    def center(self, selector: str) -> tuple[float, float]:
        """Scroll to an element and return its center."""
        script = f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{ block: "center", behavior: "instant" }});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2, box.width * box.height];
        }})()"""
        x, y, area = self.js(script)
        assert area, f"{selector} is not visible"
        return x, y

    def click(self, selector: str) -> None:
        x, y = self.center(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input."""
        self.click(selector)
        self.js(f"document.querySelector({json.dumps(selector)}).select()")
        self.send("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select."""
        self.js(
            f"const s = document.querySelector({json.dumps(selector)}); s.value = "
            f"{json.dumps(value)}; s.dispatchEvent(new Event('change', {{ bubbles: true }}))"
        )

    def drag(self, selector: str, length: float) -> None:
        """Draw a line of so many pixels to both sides of the center; on a phone with a finger."""
        x, y = self.center(selector)
        if self._phone:
            for kind, to in (("touchStart", -length), ("touchMove", 0), ("touchMove", length)):
                points = [{"x": x + to, "y": y}]
                self.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)
            self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            return
        at = [("mousePressed", x - length), ("mouseMoved", x), ("mouseMoved", x + length)]
        for kind, place in [*at, ("mouseReleased", x + length)]:
            self.send(
                "Input.dispatchMouseEvent", type=kind, x=place, y=y, button="left", buttons=1,
                clickCount=1,
            )  # fmt: skip

    def upload(self, selector: str, file: Path) -> None:
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def screenshot(self, file: Path, whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Start a headless Chromium with its profile in a folder, and yield its page."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Browser(_address(folder / "DevToolsActivePort"))
    finally:
        process.terminate()
        process.wait(30)


def _address(file: Path) -> str:
    """Return the address of the page, when Chromium has written its port to a file."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.exists() and (lines := file.read_text().split()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as response:
                pages = [page for page in json.load(response) if page["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("Chromium did not start")
