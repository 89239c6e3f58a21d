"""A conversation of studio's chat, with two models, that is left for another page and found again."""

from pathlib import Path

import pytest
from studio_for_tests import PATIENCE, TOKEN, click, studio_process

from browser import Browser
from models_for_tests import make_model

pytestmark = pytest.mark.soak
INSIDE = "document.querySelector('iframe')?.contentDocument"


def test_a_conversation_of_two_models_is_there_after_other_pages(
    browser: Browser, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        make_model(tmp_path / "exports" / name)
    with studio_process(tmp_path) as url:
        browser.open(f"{url}models?token={TOKEN}")
        address = f"{url}chat?model=exports%2Fone&model=exports%2Ftwo&device=cpu"
        browser.open(address)
        browser.until(f"{INSIDE}?.querySelectorAll('.column').length === 2", PATIENCE)
        browser.click(f"{INSIDE}.getElementById('prompt')")
        browser.write("What is iron?")
        browser.press("Enter")
        answered = f"{INSIDE}?.querySelectorAll('.facts').length === 2"
        browser.until(f"{answered} && {INSIDE}.getElementById('end').hidden", PATIENCE)
        texts = f"[...{INSIDE}.querySelectorAll('.log')].map(one => one.innerText)"
        before = browser.value(texts)
        assert all("What is iron?" in text for text in before)

        click(browser, "Runs", kinds="nav a")
        browser.until("document.title.startsWith('Runs')")
        click(browser, "Chat", kinds="nav a")
        browser.until(answered, PATIENCE)
        assert browser.value(texts) == before

        # Also once the models have been loaded by another process.
        click(browser, "End the model")
        click(browser, "Load again")
        browser.until(answered, PATIENCE)
        assert browser.value(texts) == before
        browser.click(f"{INSIDE}.getElementById('clear')")
        browser.until(f"{INSIDE}?.querySelectorAll('.facts').length === 0")
        browser.open(address)
        browser.until(f"{INSIDE}?.querySelectorAll('.column').length === 2", PATIENCE)
        assert browser.value(f"{INSIDE}.querySelectorAll('.exchange').length") == 0
    assert browser.problems == []
