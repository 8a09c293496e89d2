"""A headless Chromium that a test asks about a page: the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def program() -> str | None:
    """The Chromium of this machine; None if it has none."""
    return next((actual for name in PROGRAMS if (actual := shutil.which(name))), None)


class Browser:
    """One page of a browser that is at work.

    Args:
        to, come: File descriptors that its messages go to and come from.
    """

    def __init__(self, to: int, come: int) -> None:
        self._to, self._come, self._rest, self._count = to, come, b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """A command's result; errors that the page reports meanwhile are stored."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Show a file at a width in pixels, with a colour scheme, light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=path.resolve().as_uri())
        ready = (
            "new Promise(done => document.readyState === 'complete' ? done(0) "
            ": addEventListener('load', () => done(0)))"
        )
        self.call("Runtime.evaluate", expression=ready, awaitPromise=True)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        actual = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in actual, actual
        return actual["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        actual = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(actual["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._come, 2**16)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        method, arguments = answer.get("method"), answer.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(arguments["exceptionDetails"]))
        if method == "Runtime.consoleAPICalled" and arguments["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(str(arguments["args"]))
        if method == "Log.entryAdded" and arguments["entry"]["level"] in ("error", "warning"):
            self.errors.append(arguments["entry"]["text"])
        if method == "Network.loadingFailed":
            self.errors.append(arguments["errorText"])
        return answer


@contextmanager
def browser(name: str) -> Iterator[Browser]:
    """A page of the Chromium of that name; it ends with the context."""
    there, mine = os.pipe(), os.pipe()

    def descriptors() -> None:  # it reads 3 and writes 4
        read, write = (fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (there[0], mine[1]))
        os.dup2(read, 3)
        os.dup2(write, 4)

    # Processes that it began end a moment after it, and may still write there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        options += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [name, *options, "--remote-debugging-pipe", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=descriptors,
            close_fds=False,
        )
        try:
            yield Browser(there[1], mine[0])
        finally:
            process.kill()
            process.wait()
            for one in (*there, *mine):
                os.close(one)
