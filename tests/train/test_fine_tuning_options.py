"""NEFTune, the DFT loss and averaged weights. Oracles: the hook of transformers, TRL's formula, sums by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, resumed_bitwise
from safetensors.torch import load_file

from bloomery.core.errors import UserError
from bloomery.evals.evaluate import evaluate_as_trained, load_to_evaluate
from bloomery.facts.counting import parameter_count
from bloomery.infer.load import Use
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import EvalDone
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.store import write_plan
from bloomery.plan.unsupported import refuse_settings
from bloomery.recipe.load import load_text
from bloomery.recipe.objectives import Sft
from bloomery.train.objectives.losses import dft_loss, next_token_loss


def test_the_noise_is_that_of_transformers():
    neftune = pytest.importorskip("transformers.integrations.neftune")
    model = Decoder(CONFIG, attention="mask")
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    tokens_BT = torch.randint(0, CONFIG.vocab_size, (3, 17))
    positions = torch.arange(17)
    plain = model.model.embed(tokens_BT, positions)
    model.model.embedding_noise = 5.0
    torch.manual_seed(7)
    noisy = model.model.embed(tokens_BT, positions)
    embedding = torch.nn.Embedding(
        *model.model.embed_tokens.weight.shape, _weight=model.model.embed_tokens.weight
    )
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune.neftune_post_forward_hook)
    torch.manual_seed(7)
    torch.testing.assert_close(noisy, embedding(tokens_BT))  # its bound is rounded to float32
    assert not torch.equal(noisy, plain)
    assert torch.equal(model.eval().model.embed(tokens_BT, positions), plain), (
        "no noise outside training"
    )


def test_a_noisy_run_resumes_bitwise_and_evaluates_without_noise(prepared, tmp_path):
    """The noise is a function of seed and step: nothing of it is in a checkpoint."""
    plain = tiny_plan(prepared, config=CONFIG, train={"steps": 5}, eval={"every_steps": 1})
    noisy = plain.model_copy(
        update={"train": plain.train.model_copy(update={"neftune_alpha": 15.0})}
    )
    whole = resumed_bitwise(noisy, tmp_path)
    without = Run(plain, tmp_path / "plain")
    assert whole.losses()[1] != without.losses()[1]
    frozen = {
        "optimizer": plain.optimizer.model_copy(
            update={"learning_rate": 1e-30, "weight_decay": 0.0}
        )
    }
    still, noised = (
        Run(plan.model_copy(update=frozen), tmp_path / name)
        for plan, name in ((plain, "still"), (noisy, "noised"))
    )
    assert [event.loss for event in still.of(EvalDone)] == [
        event.loss for event in noised.of(EvalDone)
    ]


def test_noise_on_embeddings_of_another_implementation_is_refused():
    loaded = load_text(
        "{model: {from: x}, data: {path: y}, train: {neftune_alpha: 5}}", name="r", source="r"
    )
    with pytest.raises(
        UserError, match="NEFTune is not supported for the transformers implementation"
    ):
        refuse_settings(loaded.recipe, replace(CONFIG, transformers_backend="any"), steps=3)


def test_the_gradient_of_dft_is_that_of_trl():
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 13, dtype=torch.float64, requires_grad=True)
    labels, mask = torch.randint(0, 13, (2, 9)), (torch.rand(2, 9) > 0.4).double()

    def scores():
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    ours = dft_loss(scores(), mask)
    (gradient,) = torch.autograd.grad(ours.total, logits)
    log_probs = scores()
    # trl/trainer/sft_trainer.py: per_token_loss * outputs.log_probs.exp().detach()
    (expected,) = torch.autograd.grad((-log_probs * log_probs.exp().detach() * mask).sum(), logits)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(ours.total, next_token_loss(scores(), mask).total)
    assert ours.count == mask.sum()


def test_a_dft_run_trains_otherwise_and_reports_cross_entropy(prepared, tmp_path):
    plan = tiny_plan(prepared, config=CONFIG, train={"steps": 5}, eval={"every_steps": 5})
    runs = [
        Run(plan.model_copy(update={"objective": Sft(kind="sft", loss=loss)}), tmp_path / loss)
        for loss in ("cross_entropy", "dft")
    ]
    usual, dft = (run.losses() for run in runs)
    assert usual[1] == pytest.approx(dft[1], rel=1e-6), (
        "before the first update both report the cross-entropy"
    )
    assert usual[5] != dft[5]


def averaged_plan(prepared: Path, **train):
    return tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 5, "ema_decay": 0.3, **train},
        eval={"every_steps": 1},
        checkpoint={"every_steps": 1, "keep": 9},
    )


def test_averaged_weights_are_the_sum_of_the_trained_ones(prepared, tmp_path):
    """Decays of 2/11, 3/12, 4/13, then 0.3. The first one is of the initial weights: those of a run of no update."""
    run = Run(averaged_plan(prepared), tmp_path / "run")
    still = averaged_plan(prepared).model_copy(
        update={
            "optimizer": averaged_plan(prepared).optimizer.model_copy(update={"learning_rate": 0.0})
        }
    )
    average = {
        name: tensor.double()
        for name, tensor in load_file(
            Run(still, tmp_path / "still").checkpoint(1) / "model.safetensors"
        ).items()
    }
    for step in range(1, 6):
        saved = load_file(run.checkpoint(step) / "model.safetensors")
        trained = load_file(run.checkpoint(step) / "trained.safetensors")
        decay = min(0.3, (1 + step) / (10 + step))
        for name, tensor in saved.items():
            average[name] = decay * average[name] + (1 - decay) * trained[name].double()
            torch.testing.assert_close(tensor.double(), average[name], atol=1e-6, rtol=1e-5)
    assert not torch.equal(saved[name], trained[name])


def test_a_run_with_averaged_weights_resumes_bitwise_and_evaluates_them(prepared, tmp_path):
    plan = averaged_plan(prepared)
    whole = resumed_bitwise(plan, tmp_path)
    plain = Run(averaged_plan(prepared, ema_decay=None), tmp_path / "plain")
    assert whole.losses() == plain.losses(), "the training itself does not change"
    last = whole.of(EvalDone)[-1]
    assert last.loss != plain.of(EvalDone)[-1].loss
    write_plan(plan, whole.folder / "plan.json")
    loaded = load_to_evaluate(whole.folder, step="5", use=Use("cpu"))
    scores, _ = evaluate_as_trained(*loaded, plan, whole.checkpoint(5))
    assert scores.loss == pytest.approx(last.loss, rel=1e-6), (
        "the model of a checkpoint is the average"
    )


@pytest.mark.parametrize(
    "edit",
    [
        "train: {precision: bfloat16-pure, ema_decay: 0.9}",
        "train: {ema_decay: 0.9}, optimizer: {offload: true}",
        "train: {ema_decay: 0.9}, adapter: {kind: lora, dtype: bfloat16}",
    ],
)
def test_averages_that_would_be_wrong_are_refused(edit):
    loaded = load_text(f"{{model: {{from: x}}, data: {{path: y}}, {edit}}}", name="r", source="r")
    with pytest.raises(UserError, match="no average of the weights with"):
        refuse_settings(loaded.recipe, CONFIG, steps=3)


def test_the_plan_counts_the_average():
    recipes = [
        load_text(
            f"{{model: {{from: x}}, data: {{path: y}}, train: {{ema_decay: {decay}}}}}",
            name="r",
            source="r",
        ).recipe
        for decay in ("null", "0.9")
    ]
    without, averaged = (TrainedModel.of(recipe, CONFIG) for recipe in recipes)
    added = averaged.optimizer_bytes("adamw", "float32") - without.optimizer_bytes(
        "adamw", "float32"
    )
    assert added == 4 * parameter_count(CONFIG)
