"""Updates in backward are those after it, whatever an objective does with the head and an adapter with the rest."""

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run
from safetensors.torch import load_file
from structured_runs import write_answers

from bloomery.recipe.objectives import Kto, OrPo, Preference, Reward, Sft
from bloomery.recipe.schema import Lora, NoAdapter

PLAIN = CONFIG.__class__(**vars(CONFIG) | {"residual_dropout": 0.0})
UNTIED = CONFIG.__class__(**vars(PLAIN) | {"tie_embeddings": False})
VALUES = CONFIG.__class__(**vars(PLAIN) | {"head": "values"})
LORA = Lora(kind="lora", rank=4, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
DPO = Preference(kind="dpo", beta=0.5)


@pytest.mark.parametrize(
    ("kind", "asked", "config", "adapter"),
    [
        ("chat", Sft(kind="sft"), UNTIED, NoAdapter()),
        ("chat", Sft(kind="sft"), PLAIN, LORA),
        ("pairs", DPO, UNTIED, NoAdapter()),
        ("pairs", DPO, PLAIN, LORA),
        ("pairs", OrPo(kind="orpo", beta=0.5), PLAIN, NoAdapter()),
        ("kto", Kto(kind="kto", beta=0.5), UNTIED, NoAdapter()),
        ("pairs", Reward(kind="reward"), VALUES, NoAdapter()),
    ],
)
def test_runs_in_backward_learn_what_runs_after_it_do(
    prepared, tmp_path, kind, asked, config, adapter
):
    data = write_answers(tmp_path / "prepared", prepared, kind)
    ends = {}
    for inside, mode in ((False, "none"), (True, "full")):
        train = {
            "steps": 3,
            "accumulation": 1,
            "max_grad_norm": None,
            "activation_checkpointing": mode,
        }
        plan = tiny_plan(
            data, config=config, optimizer={"offload": True, "fused_backward": inside}, train=train
        )
        run = Run(
            plan.model_copy(update={"objective": asked, "adapter": adapter}),
            tmp_path / f"run-{inside}",
        )
        files = [
            *run.checkpoint(3).glob("*model.safetensors"),
            run.checkpoint(3) / "optimizer.safetensors",
        ]
        ends[inside] = (
            run.losses(),
            {name: value for file in files for name, value in load_file(file).items()},
        )
    (losses, tensors), (losses_inside, tensors_inside) = ends[False], ends[True]
    assert losses_inside == pytest.approx(losses, abs=1e-4)
    assert tensors.keys() == tensors_inside.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(tensors_inside[name], value, atol=1e-4, rtol=1e-3)
