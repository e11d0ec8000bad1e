"""A headless Chromium, driven over its DevTools protocol: what a person does at the page, and sees."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
_START_S = 30.0
_ANSWER_S = 20.0
_KEYS = {
    "Enter": 13,
    "Escape": 27,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "Tab": 9,
}


def installed() -> str | None:
    """The browser's path, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One browser process with a profile of its own; close it."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="kvorum-browser-")
        flags = [
            "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={self._profile}",
            "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-component-update",
            "--disable-background-networking", "--hide-scrollbars", "--force-color-profile=srgb",
        ]  # fmt: skip
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # which root cannot have
        self._process = subprocess.Popen(
            [program, *flags, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._address = self._wait_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, url: str, *, width: int = 1440, height: int = 900) -> Page:
        """A new tab at `url`."""
        asked = urllib.request.Request(f"{self._address}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(asked, timeout=_ANSWER_S) as answer:
            target = json.load(answer)
        page = Page(target["webSocketDebuggerUrl"], width, height)
        page.go(url)
        return page

    def close(self) -> None:
        """End it and remove its profile."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _wait_ready(self) -> str:
        found, deadline = Path(self._profile, "DevToolsActivePort"), time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the browser ended with {self._process.returncode}")
            if found.exists() and (lines := found.read_text().split()):
                return f"http://127.0.0.1:{lines[0]}"
            time.sleep(0.05)
        raise TimeoutError(f"the browser was not ready within {_START_S:.0f} s")


class Page:
    """One tab. `events` holds what the browser reported: exceptions, refusals by policy, requests."""

    def __init__(self, address: str, width: int, height: int) -> None:
        self._socket: ClientConnection = connect(address, max_size=None, open_timeout=_ANSWER_S)
        self._next = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.size(width, height)

    def close(self) -> None:
        """Close the tab."""
        self.send("Page.close")
        self._socket.close()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; raises what the browser says against it."""
        self._next += 1
        self._socket.send(json.dumps({"id": self._next, "method": method, "params": params}))
        while True:
            heard: dict[str, Any] = json.loads(self._socket.recv(timeout=_ANSWER_S))
            if heard.get("id") == self._next:
                assert "error" not in heard, f"{method}: {heard['error']}"
                result: dict[str, Any] = heard["result"]
                return result
            self.events.append(heard)

    def go(self, url: str) -> None:
        """Load `url` and wait until its scripts have run."""
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def size(self, width: int, height: int) -> None:
        """Of the window's inside."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def dark(self, wanted: bool) -> None:
        """What the system prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def offline(self, wanted: bool) -> None:
        """Cut the network, or mend it."""
        self.send(
            "Network.emulateNetworkConditions",
            offline=wanted,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"].get(
            "exception", found["exceptionDetails"]
        )
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = 15.0) -> Any:
        """Until the expression is true; its value."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.evaluate(script)):
            assert time.monotonic() < deadline, (
                f"not within {timeout_s:.0f} s: {script}\n{self.text('main')[:2000]}"
            )
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        """The same of all that match."""
        return list(
            self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)")
        )

    def click(self, selector: str) -> None:
        """The left mouse button in the middle of the first match."""
        found = f"document.querySelector({json.dumps(selector)})"
        box = self.evaluate(
            f"(() => {{ const e = {found}; e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)

    def press(self, *keys: str) -> None:
        """Keys one after the other: a character, or a name such as ArrowDown."""
        for key in keys:
            code = _KEYS.get(key, ord(key[0].upper()))
            text = {} if key in _KEYS and key != "Enter" else {"text": "\r" if key == "Enter" else key}
            about = {"key": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", type="keyDown", **about, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, selector: str, text: str) -> None:
        """Replace a field's text, as by typing."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"(() => {{ const e = {found}; e.focus(); e.select(); }})()")
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Of all of the page, as PNG."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def reported(
        self, method: str, pick: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> list[dict[str, Any]]:
        """Parameters of the events of one kind so far."""
        self.evaluate("1")  # take in what is waiting
        return [
            event["params"]
            for event in self.events
            if event.get("method") == method and pick(event["params"])
        ]
