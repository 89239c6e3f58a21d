"""What people type into the search of the documentation is in a heading of the page that answers it."""

import json
import re
from pathlib import Path

import pytest
from words_of_docs import ROOT

from browser import PROGRAM, Browser

ANSWERS = {
    "chat template": "how-to/chat-templates.md",
    "compare models": "how-to/evaluate.md",
    "dataset formats": "reference/dataset-formats.md",
    "DPO": "tutorials/dpo.md",
    "error messages": "reference/error-messages.md",
    "flash attention": "how-to/attention.md",
    "FSDP": "how-to/several-gpus.md",
    "GGUF": "how-to/export.md",
    "GPU memory": "explanation/memory.md",
    "gradient checkpointing": "explanation/training.md",
    "how much VRAM": "how-to/choose-a-method.md",
    "hyperparameters": "how-to/hyperparameters.md",
    "KTO": "reference/objectives.md",
    "Llama": "reference/models.md",
    "lm-evaluation-harness": "how-to/evaluate.md",
    "loss mask": "how-to/chat-templates.md",
    "merge LoRA": "how-to/merge.md",
    "Mistral": "reference/models.md",
    "mixed precision": "explanation/training.md",
    "ORPO": "how-to/hyperparameters.md",
    "out of memory": "how-to/out-of-memory.md",
    "overfitting": "how-to/evaluate.md",
    "PEFT": "reference/adapters.md",
    "preference datasets": "how-to/prepare-data.md",
    "QLoRA": "how-to/qlora.md",
    "quantization": "how-to/qlora.md",
    "resume": "how-to/resume.md",
    "sample packing": "explanation/packing-and-masking.md",
    "SDPA": "how-to/attention.md",
    "sequence length": "how-to/choose-a-method.md",
    "serve": "how-to/serve.md",
    "ShareGPT": "reference/dataset-formats.md",
    "tool calls": "how-to/tool-calls-and-reasoning.md",
    "does not stop generating": "how-to/chat-templates.md",
    "no chat template": "how-to/chat-templates.md",
    "write reward function": "how-to/train-with-rewards.md",
    "invalid device function": "reference/error-messages.md",
    "multiple GPUs": "how-to/several-gpus.md",
    "own data": "how-to/load-a-dataset.md",
    "validation loss goes up": "how-to/evaluate.md",
    "validation set": "how-to/prepare-data.md",
    "VRAM": "explanation/memory.md",
}


def headings(page: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(re.findall(r"^#+ .+$", text, re.MULTILINE)).lower()


@pytest.mark.parametrize(("typed", "page"), ANSWERS.items())
def test_a_heading_has_the_words(typed: str, page: str) -> None:
    assert any(
        all(word in line for word in typed.lower().split()) for line in headings(page).splitlines()
    ), page


def test_the_pages_are_in_the_navigation_and_in_llms_txt() -> None:
    for place in ("mkdocs.yml", "docs/llms.txt"):
        text = (ROOT / place).read_text(encoding="utf-8")
        assert [page for page in ANSWERS.values() if page not in text] == []


PAGE = """<input data-md-component="search-query"><script>{script}</script>"""
TYPED = {
    "convert to gguf": "convert gguf",
    "how do I train on my own data": "train own data",
    "which model fits 12 GB": "model fits 12 GB",
    "to": "to",  # may become "tokenizer"
    "how to": "to",
    'exactly "out of memory"': 'exactly "out of memory"',
    "per_device_train_batch_size": "per_device_train_batch_size",
}


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_the_search_reads_no_words_that_begin_half_of_all_words(tmp_path: Path) -> None:
    """The theme takes `to` for the beginning of torchtune and tool, and ranks them first."""
    script = (ROOT / "docs/javascripts/search_words.js").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(PAGE.replace("{script}", script), encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "page.html").as_uri())
        for typed, read in TYPED.items():
            field = "document.querySelector('input')"
            browser.value(f"{field}.value = {json.dumps(typed)}")
            assert browser.value(f"{field}.value") == read
            # What the reader sees is what was typed.
            browser.value(f"{field}.select()")
            assert browser.value("getSelection().toString()") == typed
