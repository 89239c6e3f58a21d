"""A reward model: its loss by hand, its values as transformers and TRL compute them, its files both ways."""

import json
import math
from dataclasses import replace

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from test_preferences import batch_of_pairs, padded, rows_of
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.model.heads import Values
from bloomery.model.io.weights import fresh_decoder, load_decoder, model_state, write_model
from bloomery.recipe.objectives import Reward
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.losses import means, reward_loss
from bloomery.train.state import build_state
from bloomery.train.step import compute_loss, train_step
from models_for_tests import make_tokenizer

CONFIG = tiny_config(head="values", pad_token_id=96)
ASKED = Reward(kind="reward")


def test_the_loss_by_hand_reads_the_last_tokens():
    values = torch.tensor([[9.0, 9, 1.5, 9, 9, -0.5, 9]], dtype=torch.float64)
    sequences = torch.tensor([[1, 1, 1, 0, 0, 0, -1]])
    parts = reward_loss(values, sequences)
    assert parts.total.item() == pytest.approx(math.log1p(math.exp(1.5 + 0.5)), rel=1e-12)
    expected = {"accuracy": 0, "margin": -2, "chosen_reward": -0.5, "rejected_reward": 1.5}
    assert means(parts.metrics) == pytest.approx(expected)


def test_gradients_are_those_of_finite_differences():
    sequences = batch_of_pairs(2).sequences
    values = torch.randn(
        2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    assert torch.autograd.gradcheck(lambda values: reward_loss(values, sequences).total, (values,))


def test_accumulation_takes_the_step_of_one_large_batch_and_packed_rows_train_as_padded_ones_do():
    whole, steps = batch_of_pairs(4), []
    for batches in (
        [whole],
        [rows_of(whole, slice(0, 1)), rows_of(whole, slice(1, 4))],
        [padded(whole)],
    ):
        plan = tiny_plan(config=CONFIG).model_copy(update={"objective": ASKED})
        who = build_state(plan).model_and_optimizer
        result = train_step(who, batches, build_objective(plan), plan=plan.train, lr_scale=1.0)
        steps.append(
            (result.loss, result.grad_norm, [p.detach().clone() for p in who.model.parameters()])
        )
    for loss, norm, parameters in steps[1:]:
        assert loss == pytest.approx(steps[0][0], rel=1e-6)
        assert norm == pytest.approx(steps[0][1], rel=1e-5)
        assert_close(parameters, steps[0][2], atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma3_text", "phi3"])
def test_transformers_opens_the_reward_model_and_gives_the_same_values(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    from bloomery.facts.hf_config import fresh_config

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_positions": 64,
    }
    config = replace(fresh_config(family, sizes), head="values", pad_token_id=0)
    ours = fresh_decoder(config, seed=0, attention="math").eval()
    write_model(model_state(ours), config, tmp_path)
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert (
        type(theirs).__name__
        == json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    text = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.eval()(text).logits.squeeze(-1)
        assert_close(ours(text, head=Values()).head[:, -1], expected, atol=1e-5, rtol=0)
        assert_close(
            load_decoder(tmp_path)(text, head=Values()).head[:, -1], expected, atol=1e-5, rtol=0
        )


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    write_model(model_state(fresh_decoder(CONFIG, seed=0)), CONFIG, tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(stated | {"id2label": {"0": "bad", "1": "good"}})
    )
    with pytest.raises(UserError, match="2 labels"):
        load_decoder(tmp_path)


def test_it_begins_from_a_language_model_with_a_drawn_head(tmp_path):
    language = fresh_decoder(tiny_config(), seed=5)
    write_model(model_state(language), language.config, tmp_path)
    plan = tiny_plan(config=CONFIG, model={"source": tmp_path})
    states = [build_state(plan).model_and_optimizer.model.state_dict() for _ in range(2)]
    assert_close(states[0], states[1], atol=0, rtol=0)
    assert "lm_head.weight" not in states[0]
    assert 0.01 < states[0].pop("score.weight").std() < 0.03
    assert all(
        torch.equal(tensor, language.state_dict()[name]) for name, tensor in states[0].items()
    )
    with pytest.raises(UserError, match=r"score\.weight is missing"):
        (tmp_path / "config.json").write_text(json.dumps(hf_config(CONFIG)))
        load_decoder(tmp_path)


def hf_config(config):
    from bloomery.facts.hf_config import config_to_hf

    return config_to_hf(config)


def test_it_agrees_with_trl(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from test_agreement_with_trl import PAIRS, SIZES, batch_of, interleaved, texts_of, tokenizer
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    theirs = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).eval()
    settings = trl.RewardConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        bf16=False,
        per_device_train_batch_size=3,
        gradient_checkpointing=False,
    )
    data = datasets.Dataset.from_list(PAIRS)
    made = trl.RewardTrainer(
        model=theirs, args=settings, train_dataset=data, processing_class=tokenizer()
    )
    made.model.eval()
    inputs = next(iter(made.get_train_dataloader()))
    with torch.no_grad():
        expected = made.compute_loss(made.model, dict(inputs)).item()
    texts = texts_of(inputs["input_ids"], inputs["attention_mask"], inputs["attention_mask"])
    batch = batch_of(interleaved(texts[:3], texts[3:]))
    theirs.save_pretrained(tmp_path)
    plan = tiny_plan().model_copy(update={"objective": ASKED})
    with torch.no_grad():
        model = load_decoder(tmp_path, attention="mask")
        parts = compute_loss(model, batch, build_objective(plan), precision="float32")
    assert parts.total.item() / 3 == pytest.approx(expected, abs=1e-4)
    for ours, name in (("accuracy", "accuracy"), ("margin", "margin")):
        assert means(parts.metrics)[ours] == pytest.approx(made._metrics["eval"][name][0], abs=1e-4)


def test_where_text_is_wanted_it_is_refused(tmp_path):
    from bloomery.infer.generate import load_model

    write_model(model_state(fresh_decoder(CONFIG, seed=0)), CONFIG, tmp_path)
    make_tokenizer(tmp_path)
    with pytest.raises(UserError, match="gives values and no text"):
        load_model(tmp_path)
