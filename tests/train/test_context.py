"""Ranks that share each sequence train as one rank does. Oracle: one rank, with packed documents."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import assert_same_tensors
from structured_runs import write_answers
from test_ranks import HALF, STEPS, checkpoint_of, plan_of, tensors

from bloomery.data.batch import Batch
from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.decoder import Decoder
from bloomery.parallel.context import HeadExchange
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import Sft
from bloomery.recipe.schema import Lora
from ranks import fields, losses, on_ranks, ranks, train

# Four query heads for two key/value heads, of which each of two ranks takes one.
CONFIG = tiny_config(vocab_size=300, num_heads=4, num_kv_heads=2)
FOUR_HEADS = tiny_config(vocab_size=300, num_heads=4, num_kv_heads=4)
LORA = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["q_proj", "o_proj", "down_proj"])


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_errors(plan_json: str, backend: str, window: int | None) -> list[float]:
    """On every rank: the largest errors of attention's output and gradients of its tokens, against all tokens."""
    mesh = join(RunPlan.model_validate_json(plan_json).train)
    dtype = torch.float64 if backend in ("math", "mask", "blockwise") else torch.float32
    inputs = [numbers(2, 24, heads, 16, seed=heads).to(dtype) for heads in (8, 4, 4)]
    gradient = numbers(2, 24, 8, 16, seed=1).to(dtype)
    documents = torch.tensor([[0] * 9 + [1] * 11 + [-1] * 4, [0] * 3 + [1] * 2 + [2] * 19])
    layout = layout_of(documents, backend=backend)
    length = 24 // mesh.context
    own = slice(mesh.context_rank * length, (mesh.context_rank + 1) * length)

    def output_and_gradients(exchange: HeadExchange | None, tokens: slice) -> list[torch.Tensor]:
        parts = [x[:, tokens].clone().requires_grad_() for x in inputs]
        q, k, v = (x.transpose(1, 2) for x in parts)
        if exchange is not None:
            q, k, v = exchange.to_heads(q, k, v)
        y = attend(
            q, k, v, layout, backend=backend, window=window, softcap=None, scale=0.25, dropout=0.0
        )
        if exchange is not None:
            y = exchange.to_tokens(y)
        y = y.transpose(1, 2)
        return [y.detach(), *torch.autograd.grad(y, parts, gradient[:, tokens])]

    whole = output_and_gradients(None, slice(None))
    shared = output_and_gradients(HeadExchange(mesh), own)
    return [
        float((part - of_all[:, own]).abs().max())
        for part, of_all in zip(shared, whole, strict=True)
    ]


@pytest.mark.parametrize(
    ("backend", "window", "bound"),
    [
        ("math", None, 1e-14),
        ("mask", 5, 1e-14),
        ("blockwise", None, 1e-14),
        ("per_document", None, 1e-6),
        pytest.param("compiled", None, 1e-6, marks=pytest.mark.soak),  # it is compiled first
    ],
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_attention_to_packed_documents_is_that_of_whole_sequences(backend, window, bound, size):
    plan = on_ranks(tiny_plan(), replicate=size, context=size).model_dump_json()
    for errors in ranks(size).call(attention_errors, plan, backend, window):
        assert max(errors) < bound


def test_a_cut_batch_keeps_every_label_next_to_its_token():
    rows = torch.arange(24).view(2, 12)
    batch = Batch(rows, rows + 1, rows.float(), rows, rows // 5, rows, {"reference": rows.float()})
    parts = [batch.part(index, 3) for index in range(3)]
    for name in ("tokens", "labels", "loss_mask", "positions", "documents", "sequences"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert torch.equal(joined, getattr(batch, name))
    assert all(torch.equal(part.attended_documents, batch.documents) for part in parts)
    assert torch.equal(parts[1].extras["reference"], rows[:, 4:8].float())
    assert len(parts[0].tensors()) == 8


MESHES = {
    "2 copies share": {"replicate": 2, "context": 2},
    "2 shards share": {"shard": 2, "context": 2},
    "4 copies, 2 share": {"replicate": 4, "context": 2},
    "2 x 2, all share": {"replicate": 2, "shard": 2, "context": 4},
    "4 shards, 2 share": {"shard": 4, "context": 2},
}


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """The events and the folder of a whole run over a mesh, by the mesh's name; "": one rank."""

    @cache
    def run(name: str, key_heads: int) -> tuple[list[Any], Path]:
        folder = tmp_path_factory.mktemp("trained")
        plan = plan_of(prepared, config=FOUR_HEADS if key_heads == 4 else CONFIG)
        return train(on_ranks(plan, **MESHES.get(name, {})), folder), folder

    return run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name.startswith("2 ") and "x" not in name else [pytest.mark.soak]
        )
        for name in MESHES
    ],
)
def test_losses_gradients_and_weights_are_those_of_one_rank(trained, name) -> None:
    key_heads = 4 if MESHES[name]["context"] == 4 else 2
    (alone, one_folder), (several, folder) = trained("", key_heads), trained(name, key_heads)
    assert losses(several).keys() == set(range(1, STEPS + 1))
    assert losses(several) == pytest.approx(losses(alone), rel=0, abs=1e-5)
    for kind, value, bound in (("StepDone", "grad_norm", 1e-4), ("EvalDone", "loss", 1e-5)):
        one, other = ([event[value] for event in fields(run, kind)] for run in (alone, several))
        assert one and other == pytest.approx(one, rel=bound)
    counted = [
        [event["loss_tokens"] for event in fields(run, "StepDone")] for run in (alone, several)
    ]
    assert counted[0] == counted[1]
    one, other = tensors(one_folder, STEPS), tensors(folder, STEPS)
    assert one.keys() == other.keys()
    for tensor_name, tensor in one.items():
        torch.testing.assert_close(
            other[tensor_name],
            tensor,
            rtol=0,
            atol=1e-3 * float(tensor.abs().max()),
            msg=tensor_name,
        )


def test_the_first_rank_tells_how_long_it_exchanged(trained) -> None:
    events, _ = trained("2 copies share", 2)
    (started,) = fields(events, "RunStarted")
    assert (started["world_size"], started["mesh"]) == (2, {"replicate": 2, "context": 2})
    for step in fields(events, "StepDone"):
        assert 0 < step["communication_seconds"]["context"] < step["step_seconds"]


def test_a_run_with_dropout_resumes_to_the_same_bits(prepared, tmp_path) -> None:
    config = tiny_config(
        vocab_size=300, num_heads=4, num_kv_heads=2, residual_dropout=0.1, attention_dropout=0.1
    )
    plan = on_ranks(plan_of(prepared, config=config), replicate=2, context=2)
    whole = train(plan, tmp_path / "whole")
    first = train(plan, tmp_path / "halves", stop_after=HALF)
    second = train(plan, tmp_path / "halves", resume_from=checkpoint_of(tmp_path / "halves"))
    assert losses(first) | losses(second) == losses(whole)
    assert_same_tensors(tensors(tmp_path / "halves", STEPS), tensors(tmp_path / "whole", STEPS))


@pytest.mark.parametrize(
    ("before", "after"),
    [("2 copies share", ""), pytest.param("", "2 shards share", marks=pytest.mark.soak)],
)
def test_a_checkpoint_resumes_with_other_numbers_of_sharing_ranks(
    prepared, trained, tmp_path, before, after
) -> None:
    plan = plan_of(prepared, config=CONFIG)
    checkpoint = checkpoint_of(trained(before, 2)[1])
    rest = train(on_ranks(plan, **MESHES.get(after, {})), tmp_path / "rest", resume_from=checkpoint)
    expected = {step: loss for step, loss in losses(trained("", 2)[0]).items() if step > HALF}
    assert losses(rest) == pytest.approx(expected, rel=0, abs=1e-5)


def test_conversations_that_end_on_one_rank_train_as_on_one(prepared, tmp_path) -> None:
    """Padded rows, one conversation each, with plain SDPA: the last ranks see padding alone."""
    chat = write_answers(tmp_path / "chat", prepared, "chat")
    plan = plan_of(
        chat,
        config=CONFIG,
        model={"attention": "sdpa"},
        data={"layout": "padded"},
        train={"activation_checkpointing": "selective", "steps": HALF},
    ).model_copy(update={"objective": Sft(kind="sft")})
    alone = train(plan, tmp_path / "one")
    shared = train(on_ranks(plan, replicate=2, context=2), tmp_path / "two")
    assert losses(shared) == pytest.approx(losses(alone), rel=0, abs=1e-5)


def embedded_noise(plan_json: str) -> float:
    """The largest noise of NEFTune on the embeddings of this rank's tokens."""
    mesh = join(RunPlan.model_validate_json(plan_json).train)
    model = Decoder(CONFIG)
    if mesh.context > 1:
        model.share_sequences(HeadExchange(mesh))
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    model.model.embedding_noise = 5.0
    tokens = torch.zeros(4, 64 // mesh.context, dtype=torch.int64)
    largest = float(model.model.embed(tokens, tokens).abs().max())
    mesh.any_rank(
        False
    )  # a rank that left while the other still connects would end that connection
    return largest


def test_noise_on_embeddings_is_bounded_by_the_whole_sequence() -> None:
    bound = 5.0 / (64 * CONFIG.hidden_size) ** 0.5
    plan = on_ranks(tiny_plan(), replicate=2, context=2)
    for largest in ranks(2).call(embedded_noise, plan.model_dump_json()):
        assert 0.99 * bound < largest <= bound
