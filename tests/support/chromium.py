"""A headless Chromium, driven over pipes by its DevTools protocol, for tests of the page."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BINARY = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(
    not BINARY, reason="no chromium on the PATH: apt-get install chromium"
)
FLAGS = "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"


class Browser:
    """One tab. `errors` collects exceptions and error messages of its pages."""

    def __init__(self, profile: str):
        from_us, to_browser = os.pipe()
        from_browser, to_us = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to descriptor 4.
        command = f'exec "$0" {FLAGS} --user-data-dir="$1" 3<&{from_us} 4>&{to_us}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, BINARY, profile], pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(from_us)
        os.close(to_us)
        self._out, self._in = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb")
        self._number, self._rest, self._session = 0, b"", None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._in.read1(2**20)
            assert read, "chromium has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of an expression or, with `await`, of what it promises."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url="about:blank")  # a new #place alone would not load it
        self.call("Page.navigate", url=address)
        self.wait('document.readyState === "complete" && location.protocol !== "about:"')

    def go(self, place: str) -> None:
        self.run(f"location.hash = {json.dumps(place)}; new Promise(r => setTimeout(r, 50))")

    def wait(
        self, script: str, is_wanted: Callable[[Any], bool] = bool, seconds: float = 60
    ) -> Any:
        end = time.monotonic() + seconds
        while not is_wanted(found := self.run(script)):
            assert time.monotonic() < end, f"{script} stayed {found!r}; errors: {self.errors}"
            time.sleep(0.05)
        return found

    def texts(self, selector: str) -> list[str]:
        chosen = f"document.querySelectorAll({json.dumps(selector)})"
        return self.run(f"[...{chosen}].map((node) => node.textContent)")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key)

    @property
    def process_ids(self) -> list[int]:
        """Of all processes of the browser."""
        own = str(self._process.pid)
        listed = subprocess.run(["ps", "-eo", "pid,sid"], capture_output=True, text=True).stdout
        return [int(pid) for pid, session in map(str.split, listed.splitlines()) if session == own]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._out.close()
        self._in.close()


def renderer_megabytes(browser: Browser) -> float:
    """Resident memory of the largest process that shows a page."""
    sizes = []
    for pid in browser.process_ids:
        folder = Path("/proc", str(pid))
        if b"--type=renderer" in (folder / "cmdline").read_bytes():
            kilobytes = re.search(r"VmRSS:\s+(\d+)", (folder / "status").read_text())
            sizes.append(int(kilobytes[1]) / 1024)
    return max(sizes)
