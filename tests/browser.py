"""A headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol), without a library."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
CODES = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, " ": 32}


class Navigated(Exception):
    """The page was left while it was asked something."""


class Browser:
    """One page. Use it in a `with` block. `problems`: exceptions of the page, and what its policy refused."""

    def __init__(self, profile: Path) -> None:
        self.profile, self.problems, self._number, self._held = profile, list[str](), 0, b""

    def __enter__(self) -> "Browser":
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        words = [
            PROGRAM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={self.profile}",
            "about:blank",
        ]
        command = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in), os.close(theirs_out)
        targets = self._call("Target.getTargets", session=None)["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._call(
            "Target.attachToTarget", session=None, targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._in), os.close(self._out)

    def _call(
        self, method: str, session: str | None = "", seconds: float = 60, **parameters
    ) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + seconds
        while True:
            while b"\0" not in self._held:
                assert select.select([self._in], [], [], max(0, until - time.monotonic()))[0], (
                    method
                )
                self._held += os.read(self._in, 2**20)
            line, _, self._held = self._held.partition(b"\0")
            said = json.loads(line)
            if said.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(said["params"]["exceptionDetails"]))
            elif (
                said.get("method") == "Log.entryAdded"
                and said["params"]["entry"]["source"] == "security"
            ):
                self.problems.append(said["params"]["entry"]["text"])
            if said.get("id") == self._number:
                if "target navigated" in said.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in said, (method, said["error"])
                return said["result"]

    def look(self, *, width: int, height: int = 800, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str):
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while True:
            with suppress(Navigated):  # the next look is at the new page
                if self.value(expression):
                    return
            assert time.monotonic() < end, expression
            time.sleep(0.05)

    def press(self, *keys: str, shift: bool = False) -> None:
        for key in keys:
            text = "\r" if key == "Enter" else key if len(key) == 1 else ""
            shared = {
                "key": key,
                "code": key,
                "windowsVirtualKeyCode": CODES.get(key, 0),
                "modifiers": 8 * shift,
            }
            self._call(
                "Input.dispatchKeyEvent",
                type="keyDown" if text else "rawKeyDown",
                text=text,
                **shared,
            )
            self._call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def write(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))
