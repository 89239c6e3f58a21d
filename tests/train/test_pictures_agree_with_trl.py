"""The same rows with pictures through TRL's trainers and through ours: the losses agree.

TRL's collator of pictures trains on their tokens, unless it is told which texts to train on; ours never does.
"""

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.configs import read_config
from bloomery.recipe.objectives import Kto, Preference, Sft
from bloomery.recipe.schema import Lora, NoAdapter
from pictures_for_tests import prepared_rows
from tiny_processors import MARKS
from trl_with_pictures import marked, model_of, processor_of, settings, with_loaded

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

ADAPTER = Lora(kind="lora", rank=8, alpha=16.0, target_modules=["q_proj", "down_proj"])
NAMES = (("red.png",), ("blue.png",), ("red.png", "blue.png"), ("blue.png",))


def turns(number, pictures):
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": f"Color {number}?"}]
    answer = [{"type": "text", "text": " and ".join(name[:-4] for name in pictures)}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


ROWS = [
    {"messages": turns(number, pictures), "images": list(pictures)}
    for number, pictures in enumerate(NAMES)
]
PAIRS = [
    {
        "prompt": turns(number, pictures)[:1],
        "chosen": turns(number, pictures)[1:],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "no color"}]}],
        "images": list(pictures),
    }
    for number, pictures in enumerate(NAMES)
]
# Each has the other's answer for the KL term.
MARKED = [
    {
        "prompt": turns(0, [picture])[:1],
        "completion": turns(0, [answer])[1:],
        "label": picture == answer,
        "images": [picture],
    }
    for picture, answer in (("red.png", "red.png"), ("blue.png", "a green.png"))
]


def trained(folder, rows, kind, objective, *, adapter, train_on="assistant", steps=1):
    """A run whose every step has all rows."""
    prepared = prepared_rows(
        folder, rows, kind=kind, weights=True, train_on=train_on, objective=objective.kind
    )
    plan = tiny_plan(
        prepared,
        config=read_config(folder / "base"),
        model={"source": folder / "base"},
        data={"sequence_length": 256, "layout": "padded"},
        train={
            "steps": steps,
            "micro_batch_size": len(rows),
            "accumulation": 1,
            "tokens_per_step": 256 * len(rows),
        },
        optimizer={"warmup_steps": 0},
        checkpoint={"every_steps": 1},
        eval={"every_steps": None},
    )
    return Run(plan.model_copy(update={"adapter": adapter, "objective": objective}), folder / "run")


AROUND = {
    "gemma3": 3,
    "qwen3_vl": 0,
}  # tokens that the processor writes on each side of a picture's


def theirs(folder, kind, *, assistant_only_loss):
    """The loss of TRL's trainer, that without the tokens of pictures and those around them, and how many these are."""
    processor = processor_of(kind, folder / "base")
    if assistant_only_loss:
        processor.chat_template = marked(kind)
    made = trl.SFTTrainer(
        model=model_of(folder / "base"),
        args=settings(
            trl.SFTConfig, folder / "trl", rows=len(ROWS), assistant_only_loss=assistant_only_loss
        ),
        train_dataset=datasets.Dataset.from_list(
            [with_loaded(row, folder / "rows") for row in ROWS]
        ),
        processing_class=processor,
    )
    made.model.eval()
    batch = next(iter(made.get_train_dataloader()))
    token = load_tokenizer(folder / "base").id_of(MARKS[kind.removesuffix("3_vl")][0])
    is_picture = batch["input_ids"] == token
    for _ in range(AROUND[kind]):
        is_picture = is_picture | is_picture.roll(1, 1) | is_picture.roll(-1, 1)
    is_target = is_picture & (batch["labels"] != -100)
    with torch.no_grad():
        whole = made.compute_loss(made.model, dict(batch)).item()
        batch["labels"][is_target] = -100
        without = made.compute_loss(made.model, dict(batch)).item()
    return whole, without, int(is_target.sum())


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
@pytest.mark.parametrize("train_on", ["all", "assistant"])
def test_losses_are_those_of_trl_without_pictures_as_targets(kind, train_on, tmp_path):
    run = trained(tmp_path, ROWS, kind, Sft(kind="sft"), adapter=ADAPTER, train_on=train_on)
    loss = run.losses()[1]
    whole, without, num_targets = theirs(
        tmp_path, kind, assistant_only_loss=train_on == "assistant"
    )
    print(f"{kind}, {train_on}: {loss:.4f}; TRL {whole:.4f}, {num_targets} targets of pictures")
    assert loss == pytest.approx(without, abs=1e-5)
    if train_on == "assistant":
        assert num_targets == 0
    else:
        assert num_targets > 0
        assert abs(whole - loss) > 1e-4


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
@pytest.mark.parametrize("objective", [Preference(kind="dpo", beta=0.3), Kto(kind="kto", beta=0.3)])
def test_runs_in_full_against_a_reference_lose_what_trl_loses(objective, kind, tmp_path):
    """After the first step, before which the model is its reference."""
    is_dpo = objective.kind == "dpo"
    rows = PAIRS if is_dpo else MARKED
    run = trained(tmp_path, rows, kind, objective, adapter=NoAdapter(), steps=2)

    trainer, config = (trl.DPOTrainer, trl.DPOConfig) if is_dpo else (trl.KTOTrainer, trl.KTOConfig)
    made = trainer(
        model=model_of(run.checkpoint(1)),
        ref_model=model_of(tmp_path / "base"),
        args=settings(config, tmp_path / "trl", rows=len(rows), beta=objective.beta),
        train_dataset=datasets.Dataset.from_list(
            [with_loaded(row, tmp_path / "rows") for row in rows]
        ),
        processing_class=processor_of(kind, tmp_path / "base"),
    )
    made.model.eval()
    batch = next(iter(made.get_train_dataloader()))
    # TRL trains on the line's end after the end of the turn, too.
    for name in {"completion_mask", "KL_completion_mask"} & batch.keys():
        last = batch[name].shape[1] - 1 - batch[name].flip(1).argmax(1)
        batch[name][torch.arange(len(last)), last] = 0
    with torch.no_grad():
        expected = made._compute_loss(made.model, dict(batch), False).item()
    assert abs(expected - run.losses()[1]) > 1e-3
    assert run.losses()[2] == pytest.approx(expected, abs=1e-5)
