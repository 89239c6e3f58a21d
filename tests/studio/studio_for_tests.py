"""Run folders without training, and studio as users start it or without a network."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import bloomery.studio
from bloomery.monitor.events import EventLog, RunEnded
from browser import Browser
from runs_for_tests import made_up_run

TOKEN = "a-token-of-tests"
BOLD = "<b>bold"  # the name of a run
PATIENCE = 240  # seconds, on a machine with other work
STYLESHEET = Path(bloomery.studio.__file__).with_name("style.css")
LOOKS = [(1400, False), (1400, True), (390, False), (390, True)]  # width, dark


def make_run(name: str, *, end: RunEnded | None = None, events=None) -> Path:
    """A run folder under runs/ in the working folder, with the events of a made-up run and no plan."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("model: {preset: go-coder-tiny}\n", encoding="utf-8")
    with EventLog(folder / "events.jsonl") as log:
        for event in made_up_run() if events is None else events:
            log(event)
        if end is not None:
            log(end)
    return folder


def write_rollout(folder: Path, step: int, *rows: dict[str, object]) -> None:
    """The file of completions of one rollout in the folder of a run."""
    completions = folder / "completions"
    completions.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (completions / f"step-{step:08d}.jsonl").write_text(lines, encoding="utf-8")
    # Two files may be written within one tick of the clock of the file system.
    os.utime(completions, ns=(step, step))


def call(name: str, arguments: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def episode(reward: float) -> dict[str, object]:
    """A row of completions/: two calls of a tool, of which one fails, and two rewards."""
    return {
        "prompt": [{"role": "user", "content": "find it"}],
        "completion": "THE WHOLE TEXT",
        "reward": reward,
        "rewards": {"environment": 0.0, "format": 0.5},
        "advantage": 0.5,
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [call("find", '{"word": "<b>"}')]},
            {"role": "tool", "name": "find", "content": "here " * 40},
            {"role": "assistant", "content": "again", "tool_calls": [call("find", "[")]},
            {"role": "tool", "name": "find", "content": '{"error": "not an object"}'},
            {"role": "assistant", "content": "it is here"},
        ],
    }


class RecordedCommands:
    """In place of Commands: what would have been started."""

    def __init__(self) -> None:
        self.started: list[tuple[str, ...]] = []

    def start(self, *arguments: str, subject: str) -> None:
        self.started.append(arguments)

    def of(self, subject: str) -> None:
        return None


def with_user(visit: Callable[..., Awaitable[None]], commands: object = None) -> None:
    """Runs `visit(user)` with NiceGUI's simulated browser and studio's pages."""
    from nicegui.testing import user_simulation

    from bloomery.studio.application import add_pages
    from bloomery.studio.commands import Commands
    from bloomery.studio.watching import Watching

    async def run() -> None:
        async with user_simulation() as user:
            add_pages(Watching(), commands or Commands())
            await visit(user)

    # NiceGUI's simulation forgets the modules whose pages it showed, with the packages above them.
    modules = {name: sys.modules[name] for name in sys.modules if name.startswith("bloomery")}
    try:
        asyncio.run(run())
    finally:
        sys.modules.update(modules)


def texts_of(user) -> list[str]:
    """Of every element with a text of its own."""
    from nicegui.elements.mixins.text_element import TextElement

    return [element.text for element in user.find(TextElement).elements]


def titles_of_charts(user) -> list[str]:
    """Of a page, in its order, with their units."""
    from nicegui import ui

    def inside(element) -> Iterator[object]:
        yield element
        for slot in element.slots.values():
            for child in slot.children:
                yield from inside(child)

    layout = next(iter(user.find(ui.echart).elements)).client.layout
    charts = [element for element in inside(layout) if isinstance(element, ui.echart)]
    heads = [next(iter(chart.parent_slot.children)) for chart in charts]
    titles = [next(iter(head.default_slot)) for head in heads]
    units = [next(iter(title.default_slot)).text for title in titles]
    return [
        f"{title.text}, {unit}" if unit else title.text
        for title, unit in zip(titles, units, strict=True)
    ]


async def until(is_true: Callable[[], object], seconds: float = 30) -> None:
    """Lets the pages work until it is true."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def opened_list(user):
    """The table of the list of runs, once its rows are there."""
    from nicegui import ui

    await user.open("/")
    table = next(iter(user.find(ui.table).elements))
    while "loading" in table.props:
        await asyncio.sleep(0.01)
    return table


def start_studio(
    folder: Path, *options: str, output: Path | None = None
) -> tuple["subprocess.Popen[bytes]", str]:
    """`bloomery studio` in `folder`, on a port of its own, and its URL without the token. `output`: a file for what it
    prints."""
    path = folder / "studio.log" if output is None else output
    with path.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "bloomery", "studio", "--port=0", "--no-open", *options],
            stderr=file,
            cwd=folder,
            env={**os.environ, "BLOOMERY_STUDIO_TOKEN": TOKEN},
        )
    while (match := re.search(r"(http://\S+/)\?token=", path.read_text())) is None:
        assert process.poll() is None, path.read_text()
        time.sleep(0.02)
    return process, match[1]


@contextmanager
def studio_process(folder: Path, *options: str, output: Path | None = None) -> Iterator[str]:
    """The URL of a studio that ends with the block."""
    process, url = start_studio(folder, *options, output=output)
    try:
        yield url
    finally:
        process.terminate()
        process.wait(30)


def click(browser: Browser, text: str, *, kinds: str = "button, .q-tab, a, .q-item") -> None:
    """A click of the mouse on the first visible button, tab, link or choice with this text, once it is enabled."""
    browser.click(
        f"[...document.querySelectorAll({json.dumps(kinds)})].find(one => one.offsetParent && !one.disabled"
        f" && one.getAttribute('aria-disabled') !== 'true'"
        f" && one.innerText.toLowerCase().includes({json.dumps(text.lower())}))",
        PATIENCE,
    )


def fill(browser: Browser, label: str, text: str) -> None:
    """Types over what the field with this label holds, and leaves it."""
    field = f"document.querySelector('[aria-label=' + {json.dumps(json.dumps(label))} + ']')"
    browser.until(f"!!{field}", PATIENCE)
    browser.click(field, PATIENCE)
    browser.value(f"{field}.select()")
    browser.write(text)
    browser.press("Tab")


def shows(browser: Browser, text: str, seconds: float = PATIENCE) -> None:
    browser.until(f"document.body?.innerText.includes({json.dumps(text)})", seconds)


def picture(browser: Browser, page: str, width: int, dark: bool) -> None:
    """A picture in the folder $BLOOMERY_PICTURES, where that is set."""
    if folder := os.environ.get("BLOOMERY_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.picture(Path(folder) / f"{page}-{width}-{'dark' if dark else 'light'}.png")


def classes_of(stylesheet: Path) -> set[str]:
    """The classes that have a rule in it."""
    rules = re.sub(r"/\*.*?\*/", "", stylesheet.read_text("utf-8"), flags=re.DOTALL)
    names = re.compile(r"\.(-?[A-Za-z_](?:[\w-]|\\.)*)")
    return {
        re.sub(r"\\(.)", r"\1", name)
        for selector in re.findall(r"([^{};]*)\{", rules)
        for name in names.findall(selector)
    }


@cache
def classes_of_quasar() -> frozenset[str]:
    spec = find_spec("nicegui")
    assert spec is not None and spec.origin is not None
    stylesheets = [*(Path(spec.origin).parent / "static").glob("quasar.*important.css")]
    assert len(stylesheets) == 2
    return frozenset().union(*map(classes_of, stylesheets))
