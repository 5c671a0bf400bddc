"""A headless Chromium, asked over its debugging pipe: no driver and no further package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, final

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The first lets it run as root, the second in containers with little shared memory.
OPTIONS = ("--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--remote-debugging-pipe")


def find_browser() -> str | None:
    """The browser's program; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


DRAWING_TIMEOUT_S = 60.0


@final
class Browser:
    """One tab. Its messages, errors and requests are collected in `messages` and `requested`."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4; high numbers first, so that none is in the way.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._number, self._session = b"", 0, None
        self.messages: list[str] = []
        self.requested: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its result; what arrives meanwhile is collected."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._collect(answer)

    def open(self, file: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        """Shows a file in a window of this width, in a colour scheme, and waits until its charts are drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.set_scheme(scheme)
        self.ask("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + DRAWING_TIMEOUT_S
        while self._value("document.documentElement?.dataset.drawn") is None:
            assert time.monotonic() < deadline, f"the charts were not drawn: {self.messages}"
            time.sleep(0.05)

    def set_scheme(self, scheme: str) -> None:
        """Light or dark."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        code = {"Tab": 9}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _value(self, expression: str) -> Any:
        """As `evaluate`; None where the page is just being replaced."""
        try:
            return self.evaluate(expression)
        except AssertionError:
            return None

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 2**20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _collect(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(value.get("value")) for value in values["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(values["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.messages.append(f"{values['entry']['level']}: {values['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(values["request"]["url"])
