"""Studio in a headless Chromium, with runs that train: start, watch, kill the studio, stop, resume, compare.

`BLOOMERY_PICTURES=FOLDER pytest -m soak tests/studio/test_studio_soak.py` keeps a picture of each page, wide and
narrow, light and dark.
"""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from studio_for_tests import TOKEN, make_run, studio_process

from bloomery.monitor.events import read_events
from bloomery.monitor.summary import summary_of
from browser import PROGRAM, Browser
from models_for_tests import make_chat_model

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from runs_of_bloomery import write_workshop

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed"),
    pytest.mark.skipif(find_spec("nicegui") is None, reason="the extra `studio` is not installed"),
]
PATIENCE = 240


def click(browser: Browser, text: str) -> None:
    """Clicks the visible button with this text, once it is there and enabled."""
    button = (
        "[...document.querySelectorAll('button')].find(one => one.offsetParent && !one.disabled"
        f" && one.innerText.toLowerCase().includes({json.dumps(text.lower())}))"
    )
    browser.until(f"!!{button}", PATIENCE)
    browser.value(f"{button}.click()")


def shows(browser: Browser, text: str) -> None:
    browser.until(f"document.body.innerText.includes({json.dumps(text)})", PATIENCE)


def test_a_run_from_the_page_survives_the_studio_and_is_stopped_and_resumed(tmp_path: Path) -> None:
    recipe = write_workshop(tmp_path)
    text = recipe.read_text().replace("max_steps: 16", "max_steps: 100000")
    recipe.write_text(text)
    with Browser(tmp_path / "profile") as browser:
        browser.look(width=1400)
        with studio_process(tmp_path) as url:
            browser.open(f"{url}?token={TOKEN}")
            browser.open(f"{url}new")
            shows(browser, "Fits.")
            tab = "[...document.querySelectorAll('.q-tab')].find(one => one.innerText.includes('YAML'))"
            browser.value(f"{tab}.click()")
            browser.until("!!document.querySelector('.cm-content')")
            browser.value("document.querySelector('.cm-content').focus()")
            browser.write("extends: tiny.yaml\n# ")  # what was there becomes a comment
            shows(browser, "Llama architecture")
            click(browser, "Start")
            browser.until("location.pathname.startsWith('/run/')", PATIENCE)
            browser.until("document.querySelectorAll('canvas').length >= 5", PATIENCE)
            name = browser.value("location.pathname").removeprefix("/run/")
            process = subprocess.run(
                ["fuser", "-n", "tcp", url.rpartition(":")[2].strip("/")],
                capture_output=True,
                text=True,
            )
            if process.returncode == 0:  # killed, not ended
                os.kill(int(process.stdout.split()[0]), signal.SIGKILL)

        # The run trains on, and another studio shows it.
        events = tmp_path / "runs" / name / "events.jsonl"
        with studio_process(tmp_path) as url:
            step = summary_of(read_events(events)).step
            browser.open(f"{url}?token={TOKEN}")
            browser.open(f"{url}run/{name}")
            browser.until("document.querySelectorAll('canvas').length >= 5", PATIENCE)
            shows(browser, "running")
            click(browser, "Save and stop")
            click(browser, "Resume")
            stopped = summary_of(read_events(events))
            assert stopped.step > step
            shows(browser, "resumed from")
            click(browser, "Save and stop")
            shows(browser, "stopped")
            summary = summary_of(read_events(events))
            assert (summary.resumes, summary.recoveries) == (1, 0)
            assert browser.problems == []


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_fits_its_window_and_has_no_serious_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, dark: bool
) -> None:
    """With axe, where the package axe-core-python is installed."""
    monkeypatch.chdir(tmp_path)
    make_run("first")
    make_run("second")
    all_faults: list[str] = []
    pictures = os.environ.get("BLOOMERY_PICTURES")
    spec = find_spec("axe_core_python")
    axe = Path(spec.origin).with_name("axe.min.js").read_text() if spec and spec.origin else ""
    pages = {
        "runs": "",
        "run": "run/first",
        "new": "new",
        "compare": "compare?runs=first%2Fsecond",
        "models": "models",
        "machine": "machine",
    }
    checkpoint = Path("runs") / "first" / "checkpoints" / "step-00000020"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with studio_process(tmp_path) as url, Browser(tmp_path / "profile") as browser:
        browser.look(width=width, dark=dark)
        browser.open(f"{url}?token={TOKEN}")
        for page, path in pages.items():
            browser.open(url + path)
            browser.until("!!document.querySelector('main')")
            browser.until("!document.querySelector('.q-table__linear-progress')")
            if page in ("run", "compare"):
                browser.until("document.querySelectorAll('canvas').length >= 3")
            assert browser.value("document.documentElement.scrollWidth") <= width, page
            if pictures:
                browser.picture(
                    Path(pictures) / f"{page}-{width}-{'dark' if dark else 'light'}.png"
                )
            if axe:
                browser.value(axe + "; 0")
                faults = browser.value(
                    "axe.run().then(r => r.violations.filter(v => ['serious', 'critical'].includes(v.impact))"
                    ".map(v => v.id + ': ' + v.nodes[0].html.slice(0, 200)))"
                )
                all_faults += [f"{page}: {fault}" for fault in faults]
        assert browser.problems == []
    assert not all_faults, "\n".join(all_faults)


def test_two_models_answer_one_prompt_and_one_is_exported(tmp_path: Path) -> None:
    """On the page of `bloomery serve`, inside the one of studio."""
    for name in ("one", "two"):
        make_chat_model(tmp_path / "models" / name)
    with (
        studio_process(tmp_path) as url,
        Browser(tmp_path / "profile") as browser,
    ):
        browser.look(width=1400)
        browser.open(f"{url}?token={TOKEN}")
        browser.open(f"{url}models")
        browser.until("document.querySelectorAll('tbody .q-checkbox').length === 2")
        browser.value("document.querySelectorAll('tbody .q-checkbox').forEach(one => one.click())")
        click(browser, "Chat")
        browser.until("location.pathname === '/chat'", PATIENCE)
        browser.until("!!document.querySelector('iframe')", PATIENCE)
        inside = "document.querySelector('iframe').contentDocument"
        browser.until(f"{inside}?.querySelectorAll('.column').length === 2", PATIENCE)
        browser.value(f"{inside}.getElementById('max_tokens').value = 20")
        browser.value(f"{inside}.getElementById('prompt').value = 'Hello'")
        browser.value(f"{inside}.getElementById('form').requestSubmit()")
        browser.until(
            f"[...{inside}.querySelectorAll('.facts')].filter(one => one.innerText.includes('tokens/s')).length === 2",
            PATIENCE,
        )
        hover = "dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
        browser.value(f"{inside}.querySelector('.answer span').{hover}")
        browser.until(f"{inside}.querySelector('.detail').innerText.includes('%')")
        assert browser.value(f"{inside}.querySelector('h1').hidden")

        click(browser, "End the model")
        shows(browser, "the model's process has ended")
        browser.open(f"{url}models")
        browser.until("document.querySelectorAll('tbody .q-checkbox').length === 2")
        browser.value("document.querySelector('tbody .q-checkbox').click()")
        click(browser, "Export")
        click(browser, "Start")
        browser.until(
            "[...document.querySelectorAll('tbody td')].some(one => one.innerText.includes('./exports/'))",
            PATIENCE,
        )
        assert browser.problems == []
    (exported,) = (tmp_path / "exports").iterdir()
    assert (exported / "model.safetensors").is_file()
