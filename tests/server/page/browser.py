"""A headless Chromium for tests, driven over its own protocol through a pair of pipes.

No library and no driver is needed: commands and events are JSON, each ended by a zero byte
(`--remote-debugging-pipe`; https://chromedevtools.github.io/devtools-protocol/).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
ANSWER = 30.0
"""Seconds that the browser gets to answer a command."""


def find() -> str | None:
    """A browser that runs without a screen, if one is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process. Its events are kept by session and read while a command waits for its answer."""

    def __init__(self, executable: str, folder: Path):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Away from 3 and 4, where the browser expects its ends.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        os.close(theirs_in), os.close(theirs_out)
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *map(str, ends), executable, *options],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "stderr").open("wb"),
            env={**os.environ, "HOME": str(folder)},
        )
        for fd in ends:
            os.close(fd)
        self._in, self._out = ours_in, ours_out
        self._rest = b""
        self._number = 0
        self.events: dict[str, list[dict[str, Any]]] = {}

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Run one command; its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + ANSWER
        while True:
            told = self._next(until)
            assert told is not None, f"{method} had no answer within {ANSWER:g} s"
            if told.get("id") == number:
                assert "error" not in told, f"{method}: {told['error']}"
                return dict(told["result"])

    def _next(self, until: float) -> dict[str, Any] | None:
        """The next message; events are put aside as well."""
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                return None
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        raw, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(raw)
        if "method" in told:
            self.events.setdefault(told.get("sessionId", ""), []).append(told)
        return told

    @contextlib.contextmanager
    def page(
        self, *, language: str = "en-US", dark: bool = False, width: int = 1200, height: int = 900
    ) -> Iterator[Page]:
        """A page with storage of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        agent = page.eval("navigator.userAgent")
        page.call("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=language)
        page.resize(width, height)
        page.prefer(dark)
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in), os.close(self._out)


class Page:
    """One page of the browser."""

    def __init__(self, browser: Browser, session: str):
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command for this page."""
        return self._browser.call(method, self._session, **params)

    def goto(self, url: str) -> None:
        """Load an address and wait until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        """Load the same address again and wait until its scripts have run."""
        self.eval("window.old = true")
        self.call("Page.reload")
        self.wait("document.readyState === 'complete' && window.old === undefined")

    def eval(self, code: str) -> Any:
        """The value of an expression, as JSON values; promises are waited for."""
        told = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, (code, told["exceptionDetails"])
        return told["result"].get("value")

    def wait(self, code: str, seconds: float = 20.0) -> Any:
        """Evaluate an expression until it is true; its value (True for an element)."""
        until = time.monotonic() + seconds
        while True:
            value = self.eval(f"(found => found instanceof Node || found)({code})")
            if value:
                return value
            assert time.monotonic() < until, f"not within {seconds:g} s: {code}\n{self.text()[:2000]}"
            time.sleep(0.05)

    def text(self) -> str:
        """What a reader sees."""
        return str(self.eval("document.body.innerText"))

    def choose(self, selector: str, value: str) -> None:
        """Set a field's or a list's value as a user would, once it is there."""
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.eval(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input', {{bubbles: true}}));"
            f" e.dispatchEvent(new Event('change', {{bubbles: true}})); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def click(self, selector: str) -> None:
        """Press a button or a link."""
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def write(self, selector: str, text: str) -> None:
        """Type a text into a field."""
        self.eval(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self, **more: Any) -> None:
        """The Enter key, where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r",
                      windowsVirtualKeyCode=13, **more)  # fmt: skip

    def resize(self, width: int, height: int, *, mobile: bool = False, scale: float = 1) -> None:
        """The size of the window in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )

    def prefer(self, dark: bool) -> None:
        """The scheme that the system prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """A picture of the window, or of all that it can scroll to."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def events(self, method: str) -> list[dict[str, Any]]:
        """What the browser has told of this page so far."""
        self.eval("0")
        told = self._browser.events.get(self._session, [])
        return [event["params"] for event in told if event["method"] == method]

    def complaints(self) -> list[str]:
        """Everything that the console shows as an error or a warning."""
        found = [str(event["exceptionDetails"]) for event in self.events("Runtime.exceptionThrown")]
        for event in self.events("Runtime.consoleAPICalled"):
            if event["type"] in ("error", "warning", "assert"):
                found.append(str(event["args"]))
        for event in self.events("Log.entryAdded"):
            if event["entry"]["level"] in ("error", "warning"):
                found.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
        return found

    def requests(self) -> list[str]:
        """Addresses that the page has asked."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]


@contextlib.contextmanager
def started() -> Iterator[Browser | None]:
    """A browser, or None where there is none."""
    executable = find()
    if executable is None:
        yield None
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(executable, Path(folder))
        try:
            yield browser
        finally:
            browser.close()
