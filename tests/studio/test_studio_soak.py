"""Studio in Chromium with runs that train and models that answer: start, watch, kill the studio, stop, resume, chat."""

import os
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from studio_for_tests import (
    LOOKS,
    PATIENCE,
    TOKEN,
    click,
    make_run,
    shows,
    start_studio,
    studio_process,
)

from bloomery.data.pictures.thumbnails import write_thumbnail
from bloomery.monitor.events import EventLog, RunEnded, Sampled, read_events
from bloomery.report import write_report
from bloomery.view.summary import summary_of
from browser import Browser
from models_for_tests import make_chat_model
from pictures_for_tests import png, receipt, save_base

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from runs_of_bloomery import write_workshop

pytestmark = pytest.mark.soak


def test_a_run_from_the_page_survives_the_studio_and_is_stopped_and_resumed(
    tmp_path: Path, browser: Browser
) -> None:
    recipe = write_workshop(tmp_path)
    text = recipe.read_text().replace("max_steps: 16", "max_steps: 100000")
    recipe.write_text(text)
    process, url = start_studio(tmp_path)
    try:
        browser.open(f"{url}?token={TOKEN}")
        browser.open(f"{url}new")
        shows(browser, "Choose a model and your data.")
        click(browser, "All settings", kinds=".q-expansion-item .q-item")
        click(browser, "YAML")
        browser.until("!!document.querySelector('.cm-content')")
        browser.value("document.querySelector('.cm-content').focus()")
        browser.write("extends: tiny.yaml\n")
        click(browser, "Start")
        browser.until("location.pathname.startsWith('/run/')", PATIENCE)
        browser.until("document.querySelectorAll('canvas').length >= 5", PATIENCE)
        name = browser.value("location.pathname").removeprefix("/run/")
    finally:
        process.kill()
        process.wait()

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


def test_two_models_answer_one_prompt_and_one_is_exported(tmp_path: Path, browser: Browser) -> None:
    """On the page of `bloomery serve`, inside the one of studio."""
    for name in ("one", "two"):
        make_chat_model(tmp_path / "models" / name)
    inside = "document.querySelector('iframe').contentDocument"
    with studio_process(tmp_path) as url:
        browser.open(f"{url}?token={TOKEN}")
        browser.open(f"{url}models")
        browser.until("document.querySelectorAll('tbody .q-checkbox').length === 2")
        for row in range(2):
            browser.click(f"document.querySelectorAll('tbody .q-checkbox')[{row}]")
        click(browser, "Chat", kinds="main button")
        browser.until("location.pathname === '/chat'", PATIENCE)
        browser.until("!!document.querySelector('iframe')", PATIENCE)
        browser.until(f"{inside}?.querySelectorAll('.column').length === 2", PATIENCE)
        browser.value(f"{inside}.getElementById('max_tokens').value = 20")
        browser.click(f"{inside}.getElementById('prompt')")
        browser.write("Hello")
        browser.press("Enter")
        browser.until(
            f"[...{inside}.querySelectorAll('.facts')].filter(one => one.innerText.includes('tokens/s')).length === 2",
            PATIENCE,
        )
        hover = "dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
        browser.value(f"{inside}.getElementById('color').click()")
        browser.value(f"{inside}.querySelector('.tokens span').{hover}")
        browser.until(f"{inside}.querySelector('.detail').innerText.includes('%')")
        assert browser.value(f"{inside}.querySelector('header').hidden")  # studio has a title
        for width, dark in LOOKS:
            browser.look(width=width, dark=dark)
            assert browser.overflow() == []
            assert browser.faults() == []
        browser.open(f"{url}serve/")  # axe looks into no frame
        browser.until("document.querySelectorAll('.column').length === 2", PATIENCE)
        for width, dark in LOOKS:
            browser.look(width=width, dark=dark)
            assert browser.overflow() == []
            assert browser.faults() == []

        # As when the model ends while the page asks for its name.
        browser.value("fetch = async () => new Response('no model', {status: 502}); load()")
        shows(browser, "no model")

        browser.look(width=1400)
        browser.open(f"{url}models")
        browser.until("document.querySelectorAll('tbody .q-checkbox').length === 2")
        for row in range(2):
            browser.click(f"document.querySelectorAll('tbody .q-checkbox')[{row}]")
        click(browser, "Chat", kinds="main button")
        click(browser, "End the model")
        shows(browser, "the model's process has ended")
        browser.open(f"{url}models")
        browser.until("document.querySelectorAll('tbody .q-checkbox').length === 2")
        browser.click("document.querySelector('tbody .q-checkbox')")
        click(browser, "Export")
        click(browser, "Start")
        browser.until(
            "[...document.querySelectorAll('tbody td')].some(one => one.innerText.includes('./exports/'))",
            PATIENCE,
        )
        assert browser.problems == []
    (exported,) = (tmp_path / "exports").iterdir()
    assert (exported / "model.safetensors").is_file()


def test_samples_and_the_report_show_their_image(tmp_path: Path, browser: Browser) -> None:
    """`BLOOMERY_PICTURES=FOLDER` keeps a picture of each view."""
    prompts = (
        ("receipt", receipt(), "What is the total?"),
        ("wide", png(900, 240, "orange"), "Color?"),
    )
    with chdir(tmp_path):
        run = make_run("pictures", end=RunEnded(step=40, status="finished"))
        with EventLog(run / "events.jsonl") as log:
            for step in (20, 40):
                for name, content, text in prompts:
                    image = write_thumbnail(content, f"{name}.png", run)
                    answer = "The total is 23.50. " * 8 if name == "receipt" else "orange"
                    log(Sampled(step=step, prompt=text, completion=answer, chat=True, image=image))
    report = write_report(tmp_path / run)
    kept = Path(os.environ.get("BLOOMERY_PICTURES", tmp_path))
    samples = (
        "[...document.querySelectorAll('.card')].find(one => one.innerText.startsWith('Samples'))"
    )
    with studio_process(tmp_path) as url:
        browser.open(f"{url}?token={TOKEN}")
        browser.open(f"{url}run/pictures")
        browser.until(f"!!{samples}", PATIENCE)
        browser.until(
            "[...document.querySelectorAll('.studio-image')].filter((one) => one.naturalWidth).length === 2"
        )
        for width, dark in LOOKS:
            browser.look(width=width, dark=dark)
            assert browser.overflow() == []
            assert browser.faults() == []
            browser.value(f"{samples}.scrollIntoView()")
            browser.picture(kept / f"studio-samples-{width}-{'dark' if dark else 'light'}.png")
        assert browser.problems == []
    for width, dark in LOOKS:
        browser.look(width=width, dark=dark)
        browser.open(report.absolute().as_uri())
        browser.value("document.querySelector('.pictured').scrollIntoView({block: 'center'})")
        assert browser.overflow() == []
        assert browser.faults() == []
        browser.picture(kept / f"report-samples-{width}-{'dark' if dark else 'light'}.png")
    assert browser.problems == []


def test_a_picture_is_dropped_on_the_chat(tmp_path: Path, browser: Browser) -> None:
    """`BLOOMERY_PICTURES=FOLDER` keeps a picture of each view."""
    save_base("qwen3_vl", tmp_path / "seeing", weights=True, seed=1)
    inside = "document.querySelector('iframe').contentDocument"
    with studio_process(tmp_path) as url:
        browser.open(f"{url}?token={TOKEN}")
        browser.open(f"{url}chat?model=seeing&device=cpu")
        if not browser.value("!!document.querySelector('iframe')"):
            browser.until("document.body.innerText.includes('seeing')", PATIENCE)
        browser.until("!!document.querySelector('iframe')", PATIENCE)
        browser.until(f"{inside}?.querySelectorAll('.column').length === 1", PATIENCE)
        browser.value(f"{inside}.getElementById('max_tokens').value = 20")
        prompt = f"{inside}.getElementById('prompt')"
        browser.give(prompt, "drop", receipt=receipt(), wide=png(300, 90, "orange"))
        browser.until(f"{inside}.querySelectorAll('#pictures img').length === 2")
        browser.click(prompt)
        browser.write("What is the total?")
        browser.press("Enter")
        browser.until(f"{inside}.querySelector('.facts')?.innerText.includes('tokens/s')", PATIENCE)
        assert browser.value(f"{inside}.querySelectorAll('.user img').length") == 2
        browser.give(prompt, "drop", receipt=receipt())
        kept = Path(os.environ.get("BLOOMERY_PICTURES", tmp_path))
        for width, dark in LOOKS:
            browser.look(width=width, dark=dark)
            assert browser.overflow() == []
            assert browser.faults() == []
            shown = f"{inside}.querySelector('#pictures img').naturalWidth > 0"
            browser.until(shown)
            browser.picture(kept / f"studio-chat-{width}-{'dark' if dark else 'light'}.png")
        assert browser.problems == []
