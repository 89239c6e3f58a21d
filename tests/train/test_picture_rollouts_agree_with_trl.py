"""A step of a run with rewards and pictures, and TRL's GRPOTrainer on the same completions, with its own processor of
the pictures: prompts, log-probabilities, advantages, loss and gradients agree.
"""

import pytest
import torch
from rollouts_for_tests import completions
from test_picture_rollouts import COLORS, prompt, trained, write_recipe

from ranks import fields
from trl_with_pictures import model_of, processor_of, settings, with_loaded

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

NEAR = 1e-5
# Questions of other lengths, so that prompts are padded.
ROWS = [prompt(COLORS[number % 3], number % 3, text="x" * number) for number in range(6)]


def theirs(folder, kind, rows, *, checkpoint, beta):
    """TRL's inputs of a step and its loss, from our completions; its reference is the start."""
    examples = [
        with_loaded(
            {
                "prompt": [{"role": "user", "content": text.removeprefix("<image>")}],
                "images": [f"{COLORS[text.count('x') % 3]}.png"],
            },
            folder / "rows",
        )
        for text in (row["prompt"][0]["content"] for row in rows)
    ]
    processor = processor_of(kind, folder / "base")
    processor.tokenizer.padding_side = (
        "left"  # as TRL pads prompts; else its types of tokens are others'
    )
    made = trl.GRPOTrainer(
        model=model_of(checkpoint),
        reward_funcs=lambda completions, **_: [row["reward"] for row in rows],
        args=settings(
            trl.GRPOConfig,
            folder / "trl",
            rows=16,
            num_generations=4,
            beta=beta,
            temperature=0.9,
            num_iterations=2,  # so that it computes the log-probabilities before the step
        ),
        train_dataset=datasets.Dataset.from_list(examples),
        processing_class=processor,
    )
    made.ref_model.load_state_dict(model_of(folder / "base").state_dict())
    for model in (made.model, made.ref_model):
        # An untrained model also samples the padding token, whose embedding would have no gradient.
        model.get_input_embeddings().padding_idx = None
    given = []

    def sampled(prompt_ids, *_):
        given.extend(prompt_ids)
        return [row["completion_ids"] for row in rows], None

    made._generate_single_turn = sampled
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    inputs = made._generate_and_score_completions(examples)
    loss = made.compute_loss(made.model, inputs)
    loss.backward()
    norms = [
        parameter.grad.norm()
        for name, parameter in made.model.named_parameters()
        if "language_model" in name or "lm_head" in name
    ]
    return given, inputs, loss.item(), torch.stack(norms).norm().item()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_a_step_against_a_reference_is_that_of_trl(kind, tmp_path):
    """The second, before which the model is no more its reference."""
    recipe = write_recipe(tmp_path, kind, rows=ROWS)
    edits = ("objective.beta=0.3", "objective.temperature=0.9", "train.max_steps=2")
    events, run = trained(recipe, tmp_path, *edits)
    rows = completions(run)["step-00000002.jsonl"]
    checkpoint = run / "checkpoints" / "step-00000001"
    prompts, inputs, loss, norm = theirs(tmp_path, kind, rows, checkpoint=checkpoint, beta=0.3)
    assert prompts == [row["prompt_ids"] for row in rows]
    assert inputs["advantages"].tolist() == pytest.approx(
        [row["advantage"] for row in rows], abs=NEAR
    )
    for row, logps in zip(rows, inputs["old_per_token_logps"], strict=True):
        assert row["logps"] == pytest.approx(logps[: len(row["logps"])].tolist(), abs=NEAR)
    step = fields(events, "StepDone")[1]
    assert step["metrics"]["kl"] > 1e-3
    assert step["loss"] == pytest.approx(loss, abs=NEAR)
    assert step["grad_norm"] == pytest.approx(norm, rel=NEAR)
