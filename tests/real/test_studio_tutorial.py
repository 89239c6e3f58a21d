"""The tutorial of studio, followed in Chromium: whoever knows no key of a recipe reaches a fine-tuned SmolLM2 with it.

Nothing is clicked that the tutorial does not name in bold, and nothing typed that it does not show as code.
`BLOOMERY_PICTURES=FOLDER pytest -m soak tests/real/test_studio_tutorial.py` keeps pictures of every step.
"""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from bloomery.monitor.events import read_events
from bloomery.view.summary import RunSummary, summary_of
from browser import PROGRAM, Browser

sys.path.insert(0, str(Path(__file__).parents[1] / "studio"))
import studio_for_tests as studio

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed"),
]
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "studio.md"
ROWS = 12
MODEL = "SmolLM2-135M-Instruct"
TRAINING_SECONDS = 1500.0

QUESTION = "What do you like to do on weekends?"


class Reader:
    """Somebody who has the tutorial and a browser."""

    def __init__(self, browser: Browser) -> None:
        text = TUTORIAL.read_text(encoding="utf-8")
        self.browser = browser
        self.names = set(re.findall(r"\*\*(.+?)\*\*", text))
        self.code = set(re.findall(r"`([^`\n]+)`", text))
        self.used = set[str]()

    def click(self, name: str, kinds: str = "button, .q-tab, a, .q-item") -> None:
        assert name in self.names, f"the tutorial names no {name}"
        self.used.add(name)
        studio.click(self.browser, name, kinds=kinds)

    def fill(self, name: str, text: str, *, field: str | None = None) -> None:
        """`field`: its label, where the tutorial names the question above it."""
        assert name in self.names, f"the tutorial names no {name}"
        assert text in self.code, f"the tutorial shows no {text}"
        self.used.add(name)
        studio.fill(self.browser, name if field is None else field, text)

    def reads(self, name: str) -> None:
        """Sees what the tutorial names and has no need to touch it."""
        assert name in self.names, f"the tutorial names no {name}"
        self.used.add(name)
        self.sees(name)

    def sees(self, text: str, seconds: float = studio.PATIENCE) -> None:
        studio.shows(self.browser, text, seconds)

    def waits_until_done(self) -> None:
        self.browser.until(
            "[...document.querySelectorAll('main .badge')].some(one => one.innerText === 'done')",
            TRAINING_SECONDS,
        )

    def looks(self, step: str) -> None:
        """At the page as it is, in each width and both color schemes: it fits. Keeps pictures."""
        for width, dark in studio.LOOKS:
            self.browser.look(width=width, height=1000 if width > 640 else 844, dark=dark)
            time.sleep(1)  # charts take their new width
            studio.picture(self.browser, step, width, dark)
            assert self.browser.overflow() == []
        self.browser.look(width=1400, height=1000)


def loss_of(model: Path, rows: list[str]) -> float:
    """Of these conversations in transformers, every token counted."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = []
    for row in rows:
        text = tokenizer.apply_chat_template(json.loads(row)["messages"], tokenize=False)
        tokens = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            losses.append(float(decoder(tokens, labels=tokens).loss))
    return sum(losses) / len(losses)


def summary(run: Path) -> RunSummary:
    return summary_of(read_events(run / "events.jsonl"))


def test_the_tutorial_leads_to_a_fine_tuned_model(smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip("nicegui", reason="the extra `studio` is not installed")
    folder = tmp_path / "my-models"
    shutil.copytree(smollm2 / "model", folder / MODEL)
    rows = (smollm2 / "train.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    (folder / "chats.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")

    with studio.studio_process(folder) as url, Browser(tmp_path / "chromium") as browser:
        reader = Reader(browser)
        browser.look(width=1400, height=1000)
        browser.open(f"{url}?token={studio.TOKEN}")

        # 1. Check the machine
        reader.click("Machine")
        reader.sees("Ready")
        reader.sees("Utilization")
        reader.looks("machine")

        # 2. Answer three questions
        reader.click("New run")
        reader.fill("Which model?", MODEL, field="Model")
        reader.fill("Your data:", "chats.jsonl", field="Dataset")
        reader.reads("What should it learn?")
        browser.until("document.querySelector('.choice.on')?.innerText.includes('Chat')", 60)
        reader.sees("that are free")
        reader.looks("new-run")
        reader.click("Show rows as the model reads them")
        browser.until("document.querySelectorAll('.studio-loss').length >= 3")
        reader.looks("loss-mask")

        # 3. Start and watch
        reader.click("Start")
        reader.sees("running")
        browser.until("document.querySelectorAll('canvas').length >= 5", TRAINING_SECONDS)
        (run,) = (folder / "runs").iterdir()

        # 4. Stop and resume
        reader.click("Save and stop")
        reader.click("Resume")
        reader.sees("resumed from")
        reader.looks("running")
        reader.waits_until_done()
        reader.looks("run")
        first = summary(run)
        assert (first.step, first.resumes) == (first.planned_steps, 1)
        losses = [event.loss for step, event in sorted(first.evaluations.items())]
        assert losses[-1] < losses[0]

        # 5. Chat
        reader.click("Chat", kinds="main button")
        inside = "document.querySelector('iframe')?.contentDocument"
        browser.until(f"!!{inside}?.querySelector('.column')", studio.PATIENCE)
        browser.click(f"{inside}.getElementById('prompt')")
        assert QUESTION in reader.code
        browser.write(QUESTION)
        browser.press("Enter")
        browser.until(f"{inside}.querySelector('.facts')?.innerText.includes('tokens/s')", 600)
        assert browser.value(f"{inside}.querySelector('.answer').innerText.trim()")
        reader.looks("chat")
        # A phone's keyboard leaves 440 px: the field to type in is above it.
        browser.look(width=390, height=440, touch=True)
        bottom = "document.querySelector('iframe').getBoundingClientRect().bottom"
        browser.until(f"{bottom} <= 441", 20)
        browser.look(width=1400, height=1000)

        # 6. Export
        reader.click("Models")
        browser.until("document.querySelectorAll('tbody .q-checkbox').length >= 3")
        browser.click(
            "[...document.querySelectorAll('tbody tr')]"
            ".find(row => row.innerText.includes('best')).querySelector('.q-checkbox')"
        )
        reader.click("Export")
        reader.sees("The adapter is added into its base")
        reader.looks("export")
        reader.click("Start the export")
        browser.until(
            "[...document.querySelectorAll('tbody td')].some(cell => cell.innerText.includes('exports/'))",
            600,
        )
        reader.sees("runs/" + run.name + ": done", 600)
        reader.looks("models")
        (exported,) = (folder / "exports").iterdir()
        assert loss_of(exported, rows[:4]) < loss_of(folder / MODEL, rows[:4]) - 0.1

        # 7. Compare
        reader.click("Runs")
        browser.until(
            "document.title.startsWith('Runs')"
        )  # the page before it has links with this name, too
        studio.click(browser, run.name, kinds="tbody a")
        reader.click("New run from this")
        reader.sees("that are free")
        reader.fill("Learning rate", "1e-3")
        reader.click("Start")
        reader.sees("running")
        reader.waits_until_done()
        reader.click("Runs")
        for row in range(2):
            browser.click(f"document.querySelectorAll('tbody .q-checkbox')[{row}]")
        reader.looks("runs")
        reader.click("Compare", kinds="button")
        reader.sees("optimizer.learning_rate")
        reader.looks("compare")

        assert reader.used == reader.names, "the tutorial names what nobody needs"
        assert browser.problems == []
