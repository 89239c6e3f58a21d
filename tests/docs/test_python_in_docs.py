"""The Python of docs/reference/models.md runs as it stands, on a tiny model under the name that it gives."""

import re

import torch
from transformers import AutoModelForCausalLM
from words_of_docs import ROOT

from models_for_tests import make_run


def test_the_lines_about_a_model_from_python_run(tmp_path, monkeypatch):
    page = (ROOT / "docs/reference/models.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    folder = make_run(tmp_path / "runs" / "mine", 4)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "models.md", "exec"), names)
    logits = names["logits"]
    tokens = names["tokens"]
    assert isinstance(logits, torch.Tensor) and isinstance(tokens, torch.Tensor)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step-00000004")
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert logits.shape == (*tokens.shape, expected.shape[-1])
    torch.testing.assert_close(logits.detach().float().cpu(), expected, atol=1e-4, rtol=0)
