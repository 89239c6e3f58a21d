"""What people type into the search of the documentation is in a heading of the page that answers it."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
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
    "torch.cuda.is_available()": "torch.cuda.is_available",
    "use the model in Ollama": "model Ollama",
    "--lora-rank": "lora rank",
    "NCCLUtils.hpp:268, unhandled error.": "NCCLUtils.hpp 268 unhandled error",
    "ImportError: 'libamdhip64.so.6'": "ImportError libamdhip64.so.6",
    'No module named "torch"': 'module named "torch"',
    'an odd " quote': "odd quote",
}
# Typed text -> the page that answers it, one of the first three.
RANKED = {
    "RX 6700 XT out of memory Qwen3 4B": "how-to/amd-rx-6700-xt",
    "CSV question answer columns": "how-to/load-a-dataset",
    "csv": "how-to/load-a-dataset",
    "lora_alpha": "how-to/migrate-from-axolotl",
    "continue a run that slurm killed": "how-to/slurm",
    "use the model in ollama": "how-to/export",
    "why is my loss NaN": "reference/error-messages",
    "train on two machines": "how-to/several-gpus",
    "torch.cuda.is_available()": "reference/error-messages",
    "torch.cuda.is_available() False ROCm": "reference/error-messages",
    "reward function for maths answers": "how-to/rewards-without-code",
    "train a model to use my tools": "how-to/tools-and-environments",
    "function calling": "how-to/tool-calls-and-reasoning",
    "CUDA error: no kernel image is available for execution on the device": "reference/error-messages",
    "c10d/NCCLUtils.hpp:268": "reference/error-messages",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB": "how-to/out-of-memory",
    "tokenizer.chat_template is not set": "how-to/chat-templates",
    "RTX 4090": "how-to/which-model",
    "gfx1031": "how-to/amd-rx-6700-xt",
    "per_device_train_batch_size": "how-to/migrate-from-trl",
    "train_on_responses_only": "how-to/migrate-from-unsloth",
    "cutoff_len": "how-to/migrate-from-llamafactory",
    "early stopping": "explanation/training",
    "push to hub": "how-to/export",
    "how long will training take": "how-to/plan-a-gpu",
    "synthetic data": "how-to/generate",
    "wandb": "how-to/logging",
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


# Types into the theme's field, as its worker hears it, and empties what was found before.
SEARCH = """(() => {
  document.querySelector(".md-search-result__meta").textContent = "";
  document.querySelector(".md-search-result__list").replaceChildren();
  const field = document.querySelector("[data-md-component=search-query]");
  field.value = TYPED;
  field.dispatchEvent(new KeyboardEvent("keyup"));
})()"""
READY = """document.querySelector(".md-search-result__meta").textContent.startsWith("Type to")"""
ANSWERED = """document.querySelector(".md-search-result__list").children.length > 0 ||
  document.querySelector(".md-search-result__meta").textContent.startsWith("No ")"""
FOUND = """[...document.querySelectorAll(".md-search-result__item")].slice(0, 3)
  .map((result) => decodeURI(new URL(result.querySelector("a").href).pathname))"""


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
@pytest.mark.skipif(find_spec("material") is None, reason="needs mkdocs: scripts/setup.py docs")
def test_the_search_of_the_site_ranks_the_answer_among_the_first_three(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    first_pages = {}
    with Browser(tmp_path / "profile") as browser:
        browser.look(width=1200)
        browser.open((tmp_path / "index.html").as_uri())
        browser.press("s")
        browser.until(READY)
        for typed in RANKED:
            browser.value(SEARCH.replace("TYPED", json.dumps(typed)))
            browser.until(ANSWERED)
            first_pages[typed] = [
                Path(href).relative_to(tmp_path).with_suffix("").as_posix()
                for href in browser.value(FOUND)
            ]
    assert {
        typed: pages for typed, pages in first_pages.items() if RANKED[typed] not in pages
    } == {}
