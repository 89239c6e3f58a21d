"""A headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol), without a library."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# The middle of an element in the window, also of one inside frames, or null where something else covers it.
MIDDLE = """(element => {
  element.scrollIntoView({block: "center", behavior: "instant"});
  const box = element.getBoundingClientRect();
  let [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
  const top = element.ownerDocument.elementFromPoint(x, y);
  if (!top || !(element.contains(top) || top.contains(element) || top.closest("label")?.contains(element))) return null;
  for (let frame = element.ownerDocument.defaultView.frameElement; frame;
       frame = frame.ownerDocument.defaultView.frameElement) {
    const outer = frame.getBoundingClientRect();
    x += outer.left;
    y += outer.top;
  }
  return [x, y];
})"""
# The elements that reach beyond the right edge of the page and are in no box that scrolls by itself.
OVERFLOWING = """(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = one => one && one !== document.body && one !== document.documentElement &&
    (getComputedStyle(one).overflowX !== "visible" || scrolls(one.parentElement));
  if (document.documentElement.scrollWidth <= Math.min(width, innerWidth)) return [];
  return [document.documentElement.scrollWidth + " of " + width,
    ...[...document.querySelectorAll("body *")]
      .filter(one => one.getBoundingClientRect().right > width + 0.5 && !scrolls(one.parentElement))
      .map(one => one.outerHTML.slice(0, 160))];
})()"""
# What a finger misses on a phone: targets below 44 px and outside the window, and fields into which a phone zooms.
# Links within a sentence are as high as it; a field is its frame, and a box to tick is its label.
SMALL_TARGETS = """(() => {
  const kinds = "button, a[href], input:not([type=file]), select, textarea, summary, [role=button], [role=tab], " +
    "[role=checkbox], [role=radio], [role=switch], [tabindex='0']";
  const found = [];
  for (const one of document.querySelectorAll(kinds)) {
    const style = getComputedStyle(one);
    const inText = one.tagName === "A" && style.display === "inline";
    const scrolls = ["region", "log"].includes(one.getAttribute("role")) || one.querySelector("canvas, pre, table");
    const isHidden = !one.checkVisibility({visibilityProperty: true}) || one.closest("[aria-hidden=true]");
    if (isHidden || inText || scrolls) continue;
    const target = one.closest(".q-field__control, label:has(> input[type=checkbox])") ?? one;
    const {left, right, width, height} = target.getBoundingClientRect();
    if (width === 0 || height === 0) continue;
    const isField = one.matches("input:not([type=checkbox]), select, textarea");
    const name = `${one.getAttribute("aria-label") || one.innerText} ${one.outerHTML.slice(0, 120)}`;
    if (Math.min(width, height) < 43.5) found.push(`${Math.round(width)}x${Math.round(height)}: ${name}`);
    if ((left + right) / 2 < 0 || (left + right) / 2 > innerWidth) found.push(`outside: ${name}`);
    if (isField && parseFloat(style.fontSize) < 16) found.push(`${style.fontSize}: ${name}`);
  }
  return found;
})()"""
# Hands over files, whose bytes are in base64, as a mouse that drops them does, or a keyboard that pastes them.
GIVE = """((element, kind, files) => {
  const given = new DataTransfer();
  for (const [name, bytes] of files) {
    const content = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
    given.items.add(new File([content], name, {type: "image/png"}));
  }
  const event = kind === "paste"
    ? new ClipboardEvent("paste", {clipboardData: given, bubbles: true, cancelable: true})
    : new DragEvent(kind, {dataTransfer: given, bubbles: true, cancelable: true});
  element.dispatchEvent(event);
})"""
AXE = """axe.run({resultTypes: ["violations"]}).then(result => result.violations
  .filter(fault => ["serious", "critical"].includes(fault.impact))
  .flatMap(fault => fault.nodes.map(node => [fault.id, node.html.slice(0, 200), node.failureSummary].join(": "))))"""
SETTLED = """(() => {
  const {classList} = document.body;
  const isDark = classList.contains("body--dark");
  const follows = (isDark || classList.contains("body--light")) && !document.cookie.includes("bloomery_colors=");
  return !follows || isDark === matchMedia("(prefers-color-scheme: dark)").matches;
})()"""
CODES = {
    "Enter": 13,
    "Tab": 9,
    "Escape": 27,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "ArrowDown": 40,
    " ": 32,
}


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

    def look(
        self, *, width: int, height: int = 800, dark: bool = False, touch: bool = False
    ) -> None:
        """At a window of this size; `touch`: of a phone, whose pointer is a finger."""
        self._call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def swipe(self, x: float, y: float, *, up: float) -> None:
        """A finger that moves so many pixels up from here."""
        self._call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        for part in range(1, 11):
            point = {"x": x, "y": y - up * part / 10}
            self._call("Input.dispatchTouchEvent", type="touchMove", touchPoints=[point])
            time.sleep(0.02)
        self._call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def small_targets(self) -> list[str]:
        return self.value(SMALL_TARGETS)

    def forget(self, cookie: str) -> None:
        """Of pages of this machine."""
        self._call("Network.deleteCookies", name=cookie, domain="127.0.0.1")

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

    def point(self, element: str, seconds: float = 60) -> tuple[float, float]:
        """Moves the mouse to the middle of an element, once it stands still and nothing covers it: to this place."""
        middle = f"(element => element && {MIDDLE}(element))({element})"
        end = time.monotonic() + seconds
        before = point = None
        while point is None or point != before:
            assert time.monotonic() < end, element
            before = point
            time.sleep(0.1)
            with suppress(Navigated):  # the next look is at the new page
                point = self.value(middle)
        x, y = point
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def press_mouse(self, x: float, y: float, *, count: int = 1) -> None:
        """`count`: 2 for the second press of a double click."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count
            )

    def drag(self, x: float, y: float, to_x: float, to_y: float, *, steps: int = 10) -> None:
        """From one place to another, with the left button."""
        for number in range(steps + 2):
            share = min(number, steps) / steps
            kind = ("mousePressed", *["mouseMoved"] * steps, "mouseReleased")[number]
            place = {"x": x + share * (to_x - x), "y": y + share * (to_y - y)}
            self._call(
                "Input.dispatchMouseEvent",
                type=kind,
                button="left",
                buttons=1,
                clickCount=1,
                **place,
            )

    def click(self, element: str, seconds: float = 60) -> None:
        self.press_mouse(*self.point(element, seconds))

    def tap(self, element: str, seconds: float = 60) -> None:
        """A finger on the middle of an element, where it is in sight."""
        x, y = self.point(element, seconds)
        self._call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self._call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def pinch(self, scale: float) -> None:
        """Zooms a phone's page, as two fingers do: 1 is the whole width."""
        self._call("Emulation.setPageScaleFactor", pageScaleFactor=scale)

    def keep_downloads(self, folder: Path) -> None:
        """What pages download from now on."""
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def give(self, element: str, kind: str, **pictures: bytes) -> None:
        """An event of this kind (drop, dragover, paste) with PNG files, on an element."""
        self.give_files(
            element, kind, {f"{name}.png": content for name, content in pictures.items()}
        )

    def give_files(self, element: str, kind: str, contents: dict[str, bytes]) -> None:
        """An event of this kind with files, by name, on an element."""
        files = [[name, base64.b64encode(content).decode()] for name, content in contents.items()]
        self.value(f"{GIVE}({element}, {json.dumps(kind)}, {json.dumps(files)})")

    def overflow(self) -> list[str]:
        """Why the page scrolls sideways: its width, and the elements that are too wide; empty where it does not."""
        return self.value(OVERFLOWING)

    def faults(self) -> list[str]:
        """What axe finds on the page that is serious or critical for people who use a screen reader or see badly."""
        spec = find_spec("axe_core_python")
        assert spec is not None and spec.origin is not None, "axe-core-python is not installed"
        # A page of studio follows the system's colors a moment later, where its own switch has chosen none.
        self.until(SETTLED)
        # In the middle of an animation colors are others.
        self.until(
            "document.getAnimations().every(one => one.playState !== 'running'"
            " || one.effect.getComputedTiming().endTime === Infinity)"
        )
        self.value(Path(spec.origin).with_name("axe.min.js").read_text("utf-8") + "; 0")
        return self.value(AXE)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))
