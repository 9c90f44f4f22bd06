"""A real headless browser for tests, driven over the DevTools protocol by a pair of pipes.

Owner: one test. No port is opened and nothing is left: the browser ends when its pipe closes,
also when the test is killed, and its files lie in the given folder. Everything that a page
logs, throws or asks the network for is kept.

    test --fd 3--> chromium    JSON messages, each ended by a zero byte
         <-fd 4---
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_BINARIES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root has no user namespaces to give; the page is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_REPLY_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 15.0
_POLL_S = 0.05


def find_browser() -> str:
    """The browser's path. Raises RuntimeError with what to install."""
    for name in _BINARIES:
        if path := shutil.which(name):
            return path
    raise RuntimeError(
        f"none of {', '.join(_BINARIES)} is on PATH; on Debian: apt-get install chromium"
    )


class Page:
    """One loaded page and all that it said."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        """Exceptions, console errors and warnings, and what the browser itself complained of."""
        self.requests: list[str] = []
        """URLs that were asked for, the page's own first."""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A DevTools command of this page. Raises RuntimeError when it is refused."""
        return self._browser.call(method, parameters, self._session)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression. Raises RuntimeError when it throws."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression[:100]}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Moves the pointer to a place in the viewport, in CSS pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def heard(self, method: str, parameters: dict[str, Any]) -> None:
        """Takes in an event."""
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", "")
            self.errors.append(f"{details['text']} {thrown}".strip())
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in (
            "error",
            "warning",
            "assert",
        ):
            said = [str(a.get("value", a.get("description", ""))) for a in parameters["args"]]
            self.errors.append(f"console.{parameters['type']}: {' '.join(said)}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


class Browser:
    """A browser process. `close` it, or use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Starts the browser with its profile, home and log below `folder`."""
        self._profile = folder / "profile"
        self._profile.mkdir(parents=True)
        # A socket lies in it, and a socket's path may not be long.
        self._sockets = tempfile.mkdtemp(prefix="browser")
        command_read, self._command_write = os.pipe()
        self._event_read, event_write = os.pipe()
        redirect = f'exec "$@" 3<&{command_read} 4>&{event_write}'
        with (folder / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", redirect, "browser", find_browser(), *_FLAGS,
                 f"--user-data-dir={self._profile}"],
                pass_fds=(command_read, event_write),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "HOME": str(folder), "TMPDIR": self._sockets},
            )  # fmt: skip
        os.close(command_read)
        os.close(event_write)
        self._log = folder / "browser.log"
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._pages: dict[str, Page] = {}
        self._next_id = 0
        threading.Thread(target=self._read, name="browser", daemon=True).start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self, path: Path, *, dark: bool = False, width: int = 1280, height: int = 900) -> Page:
        """Loads a file in a new page and waits until it has loaded.

        Raises TimeoutError when it does not load, RuntimeError when the browser is gone.
        """
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        session = self.call("Target.attachToTarget", attach)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=path.absolute().as_uri())
        give_up_s = time.monotonic() + _REPLY_TIMEOUT_S
        while page.evaluate("location.protocol + document.readyState") != "file:complete":
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{path} did not load within {_REPLY_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        # A round trip after the load: what the page said until then has arrived.
        page.evaluate("new Promise(done => requestAnimationFrame(done)) && 0")
        return page

    def call(
        self, method: str, parameters: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        """Sends a command and returns its result; events that come first are taken in."""
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._command_write, json.dumps(message).encode() + b"\0")
        give_up_s = time.monotonic() + _REPLY_TIMEOUT_S
        while True:
            try:
                reply = self._messages.get(timeout=max(0.0, give_up_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"{method}: no reply within {_REPLY_TIMEOUT_S:.0f} s") from None
            if reply is None:
                raise RuntimeError(
                    f"{method}: the browser is gone:\n{self._log.read_text()[-2000:]}"
                )
            if reply.get("id") == message["id"]:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return dict(reply["result"])
            page = self._pages.get(reply.get("sessionId", ""))
            if page is not None and "method" in reply:
                page.heard(reply["method"], reply["params"])

    def close(self) -> None:
        """Ends the browser and every process of its."""
        os.close(self._command_write)  # it exits when its pipe closes
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def processes(self) -> list[str]:
        """Command lines of processes that name this browser's profile."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue  # it has just ended
            if str(self._profile).encode() in line:
                found.append(line.replace(b"\0", b" ").decode(errors="replace"))
        return found

    def _read(self) -> None:
        rest = b""
        with open(self._event_read, "rb", buffering=0) as stream:
            while data := stream.read(1 << 16):
                *whole, rest = (rest + data).split(b"\0")
                for message in whole:
                    self._messages.put(json.loads(message))
        self._messages.put(None)
