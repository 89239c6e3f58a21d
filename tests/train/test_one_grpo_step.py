"""The code of docs/contributing/one-grpo-step.md runs as it stands, and its step prefers what the reward prefers."""

import re
from pathlib import Path

import torch

from bloomery.infer.forward import forward
from models_for_tests import make_run

PAGE = Path(__file__).parents[2] / "docs/contributing/one-grpo-step.md"


def test_the_step_of_the_page_makes_better_completions_likelier(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    make_run(tmp_path / "model", 4)
    (step,) = (tmp_path / "model" / "checkpoints").glob("step-*")
    monkeypatch.chdir(tmp_path)
    code = code.replace('Path("model")', f'Path("{step}")')
    names = {}
    exec(compile(code, PAGE.name, "exec"), names)

    advantages = names["advantages"]
    assert len(names["completions"]) == 12 and advantages.abs().max() > 0.5
    groups = advantages.view(3, 4)
    torch.testing.assert_close(groups.sum(1), torch.zeros(3), atol=1e-5, rtol=0)

    # The advantage-weighted log-probability of the sampled tokens has risen.
    change = 0.0
    with torch.no_grad():
        for batch in names["batches"]:
            output = forward(names["policy"], batch, names["scoring"](batch), precision="float32")
            gain_BT = output.head[0] - batch.extras["sampled_logps"]
            change += float((gain_BT * batch.loss_mask * batch.extras["advantages"]).sum())
    assert change > 0.01
