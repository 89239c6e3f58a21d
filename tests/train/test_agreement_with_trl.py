"""The same batch through TRL's trainers and through ours: the losses agree within 1e-4.

Both read a tiny random Llama. TRL pads its rows; ours are packed, a pair in a row.
"""

import os
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_plan
from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.io.weights import load_decoder
from bloomery.recipe.objectives import Kto, OrPo, Preference, SimPo
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.losses import LossParts, means
from bloomery.train.step import compute_loss

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when one of these is imported
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

PAIRS = [
    {"prompt": "w1 w2", "chosen": " w3 w4 w5", "rejected": " w6"},
    {"prompt": "w7 w8 w9", "chosen": " w10", "rejected": " w11 w12 w13"},
    {"prompt": "w20", "chosen": " w21 w22 w3", "rejected": " w8 w9"},
]
MARKED = [
    {"prompt": "w1 w2", "completion": " w3 w4 w5", "label": True},
    {"prompt": "w7 w8 w9", "completion": " w10", "label": False},
    {"prompt": "w20", "completion": " w21 w22 w3", "label": True},
]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.6,
    "max_position_embeddings": 64,
    "pad_token_id": 60,
    "eos_token_id": 61,
    "bos_token_id": None,
}


def tokenizer():
    vocab = {f"w{i}": i for i in range(60)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def llama(seed: int):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def ours(theirs, folder: Path):
    theirs.save_pretrained(folder)
    return load_decoder(folder, attention="mask")


def trainer(kind, config, folder: Path, rows: list[dict], *, seeds=(0, 1), **more):
    names = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "bf16": False}
    settings = config(
        **names, per_device_train_batch_size=len(rows), gradient_checkpointing=False, **more
    )
    models = {"model": llama(seeds[0])} | (
        {"ref_model": llama(seeds[1])} if kind in (trl.DPOTrainer, trl.KTOTrainer) else {}
    )
    data = datasets.Dataset.from_list(rows)
    made = kind(**models, args=settings, train_dataset=data, processing_class=tokenizer())
    made.model.eval()
    return made, next(iter(made.get_train_dataloader()))


def batch_of(texts: list[tuple[list[int], list[bool]]], per_row: int = 2) -> Batch:
    """Texts (ids, which of them are learned), so many in a row of 32."""
    rows, length = len(texts) // per_row, 32
    numbers = {
        name: torch.zeros(rows, length, dtype=torch.int64)
        for name in ("tokens", "labels", "positions")
    }
    documents, sequences = (torch.full((rows, length), -1) for _ in range(2))
    loss_mask = torch.zeros(rows, length)
    for row in range(rows):
        at = 0
        for number in range(row * per_row, (row + 1) * per_row):
            ids, learned = texts[number]
            here, inner = slice(at, at + len(ids)), slice(at, at + len(ids) - 1)
            numbers["tokens"][row, here] = torch.tensor(ids)
            numbers["labels"][row, inner] = torch.tensor(ids[1:])
            numbers["positions"][row, here] = torch.arange(len(ids))
            documents[row, here], sequences[row, here] = number % per_row, number
            loss_mask[row, inner] = torch.tensor(learned[1:], dtype=torch.float32)
            at += len(ids)
    return Batch(**numbers, documents=documents, loss_mask=loss_mask, sequences=sequences)


def texts_of(ids: Tensor, mask: Tensor, learned: Tensor) -> list[tuple[list[int], list[bool]]]:
    """Without padding."""
    rows = zip(ids, mask.bool(), learned.bool(), strict=True)
    return [(row[there].tolist(), said[there].tolist()) for row, there, said in rows]


def interleaved(first: list, second: list) -> list:
    return [text for pair in zip(first, second, strict=True) for text in pair]


@torch.no_grad()
def loss_of(asked, batch: Batch, policy, start=None) -> LossParts:
    if start is not None:
        head = LabelScores(batch.labels, batch.loss_mask, ScoreSettings(64))
        output = start(
            batch.tokens, positions_BT=batch.positions, documents_BT=batch.documents, head=head
        )
        batch = batch.with_extras(reference=output.head)
    objective = build_objective(tiny_plan().model_copy(update={"objective": asked}))
    return compute_loss(policy, batch, objective, precision="float32")


@pytest.mark.parametrize(("kind", "loss_type"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_dpo_and_ipo(kind, loss_type, tmp_path):
    made, inputs = trainer(
        trl.DPOTrainer, trl.DPOConfig, tmp_path, PAIRS, loss_type=loss_type, beta=0.3
    )
    with torch.no_grad():
        expected = made._compute_loss(made.model, dict(inputs), False).item()
    texts = texts_of(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])
    batch = batch_of(interleaved(texts[:3], texts[3:]))
    parts = loss_of(
        Preference(kind=kind, beta=0.3), batch, *(ours(llama(n), tmp_path / str(n)) for n in (0, 1))
    )
    assert parts.count == 3
    assert parts.total.item() / 3 == pytest.approx(expected, abs=1e-4)
    told = {name: made._metrics["eval"][f"rewards/{theirs}"][0] for name, theirs in NAMES.items()}
    if kind == "dpo":  # TRL tells IPO's rewards of sums
        assert means(parts.metrics) == pytest.approx(told, abs=1e-4)
    assert (
        means(parts.metrics)["accuracy"] == pytest.approx(told["accuracy"], abs=1e-4)
        or kind == "ipo"
    )


NAMES = {
    "accuracy": "accuracies",
    "margin": "margins",
    "chosen_reward": "chosen",
    "rejected_reward": "rejected",
}


@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
def test_kto(seeds, tmp_path):
    more = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    made, inputs = trainer(trl.KTOTrainer, trl.KTOConfig, tmp_path, MARKED, seeds=seeds, **more)
    with torch.no_grad():
        expected = made._compute_loss(made.model, dict(inputs), False).item()
    own = texts_of(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])
    twins = texts_of(
        inputs["KL_input_ids"], inputs["KL_attention_mask"], inputs["KL_completion_mask"]
    )
    batch = batch_of(interleaved(own, twins))
    marks = inputs["label"].repeat_interleave(2)[batch.sequences.clamp(min=0)].long()
    batch = batch.with_extras(kto_labels=marks)
    parts = loss_of(
        Kto(kind="kto", **more), batch, *(ours(llama(n), tmp_path / str(n)) for n in seeds)
    )
    assert parts.total.item() / 3 == pytest.approx(expected, abs=1e-4)
    told = means(parts.metrics)
    assert told["kl"] == pytest.approx(made._metrics["eval"]["kl"][0], abs=1e-4)
    # of one the clamp is tested, of the other the estimate
    assert (told["kl"] > 0) == (seeds == (1, 0))
    for ours_, theirs in (("chosen_reward", "chosen"), ("rejected_reward", "rejected")):
        assert told[ours_] == pytest.approx(made._metrics["eval"][f"rewards/{theirs}"][0], abs=1e-4)


def test_simpo(tmp_path):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    more = {
        "loss_type": "simpo",
        "cpo_alpha": 0.0,
        "beta": 2.0,
        "simpo_gamma": 0.7,
        "max_length": 32,
    }
    made, inputs = trainer(CPOTrainer, CPOConfig, tmp_path, PAIRS, **more)
    with torch.no_grad():
        expected, _ = made.get_batch_loss_metrics(made.model, inputs)
    texts = [
        texts_of(
            inputs[f"{side}_input_ids"],
            inputs[f"{side}_attention_mask"],
            inputs[f"{side}_labels"] != -100,
        )
        for side in ("chosen", "rejected")
    ]
    parts = loss_of(
        SimPo(kind="simpo", beta=2.0, gamma=0.7),
        batch_of(interleaved(*texts)),
        ours(llama(0), tmp_path),
    )
    assert parts.total.item() / 3 == pytest.approx(expected.item(), abs=1e-4)


def test_orpo(tmp_path):
    """TRL's likelihood covers the prompt and is a mean over all tokens: of prompts of one token, with chosen answers of
    one length, that is the paper's.
    """
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    pairs = [{**row, "prompt": row["prompt"].split()[0], "chosen": " w3 w4"} for row in PAIRS]
    made, inputs = trainer(ORPOTrainer, ORPOConfig, tmp_path, pairs, beta=0.4, max_length=32)
    with torch.no_grad():
        expected, _ = made.get_batch_loss_metrics(made.model, inputs)
    texts = [
        texts_of(
            inputs[f"{side}_input_ids"],
            inputs[f"{side}_attention_mask"],
            inputs[f"{side}_labels"] != -100,
        )
        for side in ("chosen", "rejected")
    ]
    parts = loss_of(
        OrPo(kind="orpo", beta=0.4), batch_of(interleaved(*texts)), ours(llama(0), tmp_path)
    )
    assert parts.total.item() / 3 == pytest.approx(expected.item(), abs=1e-4)
