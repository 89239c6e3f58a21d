"""NEFTune and the DFT loss. Oracles: the hook of transformers, and the formula that TRL computes."""

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, resumed_bitwise

from bloomery.core.errors import UserError
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import EvalDone
from bloomery.plan.unsupported import refuse_settings
from bloomery.recipe.load import load_text
from bloomery.recipe.schema import Sft
from bloomery.train.losses import dft_loss, next_token_loss


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
    embedding = torch.nn.Embedding(*model.model.embed_tokens.weight.shape, _weight=model.model.embed_tokens.weight)
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune.neftune_post_forward_hook)
    torch.manual_seed(7)
    torch.testing.assert_close(noisy, embedding(tokens_BT))  # its bound is rounded to float32
    assert not torch.equal(noisy, plain)
    assert torch.equal(model.eval().model.embed(tokens_BT, positions), plain), "no noise outside training"


def test_a_noisy_run_resumes_bitwise_and_evaluates_without_noise(prepared, tmp_path):
    """The noise is a function of seed and step: nothing of it is in a checkpoint."""
    plain = tiny_plan(prepared, config=CONFIG, train={"steps": 5}, eval={"every_steps": 1})
    noisy = plain.model_copy(update={"train": plain.train.model_copy(update={"neftune_alpha": 15.0})})
    whole = resumed_bitwise(noisy, tmp_path)
    without = Run(plain, tmp_path / "plain")
    assert whole.losses()[1] != without.losses()[1]
    frozen = {"optimizer": plain.optimizer.model_copy(update={"learning_rate": 1e-30, "weight_decay": 0.0})}
    still, noised = (Run(plan.model_copy(update=frozen), tmp_path / name)
                     for plan, name in ((plain, "still"), (noisy, "noised")))  # fmt: skip
    assert [event.loss for event in still.of(EvalDone)] == [event.loss for event in noised.of(EvalDone)]


def test_noise_on_embeddings_of_another_implementation_is_refused():
    loaded = load_text("{model: {from: x}, data: {path: y}, train: {neftune_alpha: 5}}", name="r", source="r")
    from dataclasses import replace

    with pytest.raises(UserError, match="NEFTune is not supported for the transformers implementation"):
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
    runs = [Run(plan.model_copy(update={"objective": Sft(kind="sft", loss=loss)}), tmp_path / loss)
            for loss in ("cross_entropy", "dft")]  # fmt: skip
    usual, dft = (run.losses() for run in runs)
    assert usual[1] == pytest.approx(dft[1], rel=1e-6), "before the first update both report the cross-entropy"
    assert usual[5] != dft[5]
