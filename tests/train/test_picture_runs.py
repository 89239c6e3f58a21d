"""Runs on conversations with pictures: what they lose, that they see, and that they resume to the same bits."""

import json

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run, resumed_bitwise
from transformers import AutoModelForImageTextToText

from bloomery.core.errors import UserError
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.model.configs import read_config
from bloomery.plan.types import EpisodesPlan, VisionPlan
from bloomery.plan.vision import refuse_pictures
from bloomery.recipe.objectives import Reward
from bloomery.recipe.schema import Lora, NoAdapter
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row

ADAPTER = Lora(kind="lora", rank=8, alpha=16.0, target_modules=["q_proj", "down_proj"])
ROWS = [row(RED, TEXT, answer="red"), row(BLUE, TEXT, answer="blue")] * 8


def plan_of(folder, prepared, **sections):
    base = folder / "base"
    parts = {"model": {"source": base}, "data": {"sequence_length": 256}, **sections}
    plan = tiny_plan(prepared, config=read_config(base), **parts)
    return plan.model_copy(update={"adapter": ADAPTER})


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl", "gemma3", "lfm2_vl"])
def test_a_run_resumes_to_the_same_bits_and_begins_with_the_loss_of_transformers(kind, tmp_path):
    prepared = prepared_rows(tmp_path, ROWS, kind=kind, weights=True)
    plan = plan_of(
        tmp_path,
        prepared,
        train={"micro_batch_size": 2, "accumulation": 1, "tokens_per_step": 512},
        data={"sequence_length": 256, "layout": "padded"},
    )
    run = resumed_bitwise(plan, tmp_path)

    loader = Loader(prepared, sequence_length=256, layout="padded", seed=plan.train.seed)
    batch = loader.batch(Cursor(plan.train.seed, 0), 2)
    theirs = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    ).eval()
    picture = json.loads((tmp_path / "base" / "config.json").read_text())
    token = picture.get("image_token_id", picture.get("image_token_index"))
    kinds = {"smolvlm": "", "lfm2_vl": "", "gemma3": "token_type_ids"}.get(
        kind, "mm_token_type_ids"
    )
    given = {kinds: (batch.tokens == token).long()} if kinds else {}
    inputs = {name: value for name, value in batch.pictures.inputs.items() if name != "num_crops"}
    logits = theirs(
        input_ids=batch.tokens, attention_mask=(batch.documents >= 0).long(), **inputs, **given
    ).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
    )
    mask = batch.loss_mask.flatten()
    expected = (losses * mask).sum() / mask.sum()
    assert run.losses()[1] == pytest.approx(expected.item(), rel=1e-5)


BLIND_ROWS = [row(BLUE, TEXT, answer=answer) for answer in ("red", "blue")] * 8


@pytest.mark.parametrize("rows", [ROWS, pytest.param(BLIND_ROWS, marks=pytest.mark.soak)])
def test_a_run_learns_what_it_sees_and_nothing_where_all_look_alike(tmp_path, rows):
    prepared = prepared_rows(tmp_path, rows, kind="smolvlm", weights=True)
    plan = plan_of(
        tmp_path,
        prepared,
        train={"steps": 60, "micro_batch_size": 4, "accumulation": 1, "tokens_per_step": 1024},
        checkpoint={"every_steps": 60},
        eval={"every_steps": None},
    ).model_copy(update={"adapter": NoAdapter()})
    losses = Run(plan, tmp_path / "run").losses()
    # What text alone tells of "red" and "blue" leaves ln 2 on the first letter of five or six.
    assert (losses[60] < 0.1) == (rows is ROWS)


@pytest.mark.parametrize(
    ("section", "changes", "named"),
    [
        ("train", {"pipeline": 2}, "parallel.pipeline"),
        ("train", {"context": 2}, "parallel.context"),
        ("", {"objective": Reward(kind="reward")}, "reward without an adapter"),
        ("", {"episodes": EpisodesPlan.of_environment("games.py:Guess", max_turns=3)}, "tools"),
        (
            *("train", {"stream": "layers"}),
            "parallel.stream of trained weights beside a tower that is trained",
        ),
    ],
)
def test_what_pictures_exclude_is_refused(section, changes, named, tmp_path):
    changed = {"adapter": NoAdapter(), "vision": VisionPlan(train="all")}
    plan = tiny_plan().model_copy(update=changed)
    if section:
        part = getattr(plan, section).model_copy(update=changes)
        changes = {section: part}
    with pytest.raises(UserError, match=f"not supported with pictures: .*{named}"):
        refuse_pictures(plan.model_copy(update=changes))
