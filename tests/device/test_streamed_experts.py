"""Experts that stream from the host: runs on the simulated device are bitwise those of a model that is on it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rollouts_for_tests
import simulated
import test_streamed_schedules
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import assert_same_tensors, prepared_corpus, saved_base
from steps_for_tests import load_of, small_plan
from steps_on_device import batches_of, streamed_plan
from streamed_experts import decoder_of
from test_device_memory import peak_bytes_of
from test_expert_ranks import mixture, oss
from test_streamed_weights import run

from bloomery.facts.config import Experts
from bloomery.facts.limits import aligned_bytes, buffer_bytes
from bloomery.model.configs import read_config
from bloomery.model.io.weights import fresh_decoder, quantize_model
from bloomery.parallel import streamed_experts
from bloomery.parallel.streamed import LayerRing
from bloomery.parallel.streamed_experts import StreamedExperts
from bloomery.plan.estimate.memory import tensor_bytes as tensor_bytes_of
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Quantize
from bloomery.train.objectives.build import build_objective
from bloomery.train.state import build_state
from bloomery.train.step import train_step
from ranks import losses, train

# More layers than buffers: a layer is gone before backward comes to it.
MIXTURE = mixture(hidden_size=64, num_layers=4)
WINDOWS = (8, None, 8, None)
BIASED = replace(
    oss(), num_layers=4, sliding_window=WINDOWS, experts=replace(oss().experts, count=8)
)
ATTENTION = Lora(kind="lora", rank=4, alpha=8.0, dropout=0.1, target_modules=["q_proj", "v_proj"])
EXPERTS = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["all-linear"])
NF4 = Quantize(kind="nf4")
CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"adapter": ATTENTION},
    "nf4": {"adapter": ATTENTION, "quantize": NF4},
    "nf4, adapted experts": {"adapter": EXPERTS, "quantize": NF4},
    "int8": {"adapter": ATTENTION, "quantize": Quantize(kind="int8")},
    "bfloat16": {"adapter": EXPERTS, "train": {"precision": "bfloat16"}},
    "float16": {"adapter": EXPERTS, "train": {"precision": "float16"}},
    "nf4, micro-batches in pairs": {
        "adapter": EXPERTS,
        "quantize": NF4,
        "train": {"micro_batch_size": 1, "accumulation": 5, "stream_micro_batches": 2},
    },
    "one micro-batch": {"adapter": EXPERTS, "train": {"micro_batch_size": 4, "accumulation": 1}},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    configs = {
        "qwen3_moe": MIXTURE,
        "gpt_oss": replace(oss(), num_layers=4, sliding_window=WINDOWS),
    }
    return {
        name: saved_base(config, corpus, tmp_path_factory.mktemp(name))
        for name, config in configs.items()
    }


def assert_streamed_is_resident(plan: RunPlan, folder: Path, checkpointing: str = "full") -> None:
    simulated.clear()
    streamed_losses, streamed = run(plan, folder / "streamed", "experts", checkpointing)
    assert simulated.report()["problem"] == {}
    losses, tensors = run(plan, folder / "resident", "off", checkpointing)
    assert len(losses) >= 4
    assert streamed_losses == losses
    assert_same_tensors(streamed, tensors)


def plan_of(corpus: Path, base: Path, sections: dict[str, Any]) -> RunPlan:
    sections = dict(sections)
    whole = {key: sections.pop(key) for key in ("adapter", "quantize") if key in sections}
    sections["train"] = {"steps": 3, **sections.get("train", {})}
    config = read_config(base)
    plan = tiny_plan(
        corpus, config=config, model={"source": base, "attention": "blockwise"}, **sections
    )
    return plan.model_copy(update=whole)


def those(names: Iterable[str], *, quick: str) -> list[Any]:
    """All but one are for `make soak`."""
    marks = {name: [] if name == quick else [pytest.mark.soak] for name in names}
    return [pytest.param(name, marks=marks[name], id=name) for name in names]


@pytest.mark.parametrize("name", those(CASES, quick="nf4, micro-batches in pairs"))
def test_the_bits_are_those_of_experts_on_the_device(
    corpus: Path, bases: dict[str, Path], tmp_path: Path, name: str
) -> None:
    assert_streamed_is_resident(plan_of(corpus, bases["qwen3_moe"], CASES[name]), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nf4, adapted experts", "bfloat16"])
def test_so_are_those_of_experts_with_biases(
    corpus: Path, bases: dict[str, Path], tmp_path: Path, name: str
) -> None:
    assert_streamed_is_resident(plan_of(corpus, bases["gpt_oss"], CASES[name]), tmp_path)


@pytest.mark.parametrize("checkpointing", those(["none", "selective", "every-2"], quick="none"))
@pytest.mark.parametrize("name", those(["nf4, adapted experts", "bfloat16"], quick="bfloat16"))
def test_backward_loads_the_weights_of_layers_that_are_not_recomputed(
    corpus: Path, bases: dict[str, Path], tmp_path: Path, name: str, checkpointing: str
) -> None:
    plan = plan_of(corpus, bases["gpt_oss"], CASES[name])
    assert_streamed_is_resident(plan, tmp_path, checkpointing)


@pytest.mark.soak
@pytest.mark.parametrize("order", [("experts", "off"), ("off", "experts"), ("experts", "layers")])
def test_a_run_resumes_with_its_weights_elsewhere(
    corpus: Path, bases: dict[str, Path], tmp_path: Path, order: tuple[str, str]
) -> None:
    sections = {"adapter": EXPERTS, "quantize": NF4, "train": {"steps": 4}}
    plan = plan_of(corpus, bases["qwen3_moe"], sections)

    def streaming(stream: str) -> RunPlan:
        settings = {"device": "cuda", "stream": stream, "activation_checkpointing": "full"}
        changes = {"train": settings, "data": {"pin_memory": True}, "memory": {"limit": 3 * 2**30}}
        return plan.model_copy(
            update={
                name: getattr(plan, name).model_copy(update=fields)
                for name, fields in changes.items()
            }
        )

    whole = train(streaming("off"), tmp_path / "whole")
    first = train(streaming(order[0]), tmp_path / "halves", stop_after=2)
    half = tmp_path / "halves/checkpoints/step-00000002"
    rest = train(streaming(order[1]), tmp_path / "halves", resume_from=half)
    assert losses(first) | losses(rest) == losses(whole)
    last = "checkpoints/step-00000004"
    files = sorted((tmp_path / "whole" / last).rglob("*.safetensors"))
    assert files
    for file in files:
        other = tmp_path / "halves" / file.relative_to(tmp_path / "whole")
        assert file.read_bytes() == other.read_bytes()


GENERATED = Lora(kind="lora", rank=4, target_modules=["q_proj", "v_proj"])
GRPO = {  # by name: the experts, and whether those that sixteen tokens choose are copied alone
    "of few": (Experts(count=4, per_token=2, width=32, normalize=True), False),
    "of many": (Experts(count=64, per_token=2, width=32, normalize=True), True),
}


@pytest.mark.parametrize("stream", those(["experts", "layers"], quick="experts"))
@pytest.mark.parametrize("name", those(GRPO, quick="of many"))
def test_completions_are_those_of_weights_on_the_device(
    tmp_path: Path, name: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled and trained on: their texts, rewards, losses and weights."""
    experts, are_chosen = GRPO[name]
    plan = rollouts_for_tests.plan_of(rollouts_for_tests.write_recipe(tmp_path))
    config = replace(plan.model.config, family="qwen3_moe", experts=experts, num_layers=3)
    train_plan = plan.train.model_copy(update={"steps": 2, "activation_checkpointing": "full"})
    parts = []
    load_parts = LayerRing.load_parts

    def noted(ring: LayerRing, index: int, spans: Any) -> Any:
        parts.append(index)
        return load_parts(ring, index, spans)

    monkeypatch.setattr(LayerRing, "load_parts", noted)
    runs = {}
    for streamed_weights in (stream, "off"):
        changes = {
            "model": plan.model.model_copy(update={"config": config}),
            "train": train_plan.model_copy(update={"stream": streamed_weights}),
            "adapter": GENERATED,
            "quantize": NF4,
        }
        folder = tmp_path / streamed_weights
        runs[folder] = train(plan.model_copy(update=changes), folder)
    (streamed_in, streamed), (resident_in, resident) = runs.items()
    assert set(parts) == ({0, 1, 2} if are_chosen and stream == "experts" else set())
    rollouts_for_tests.assert_same_training(streamed_in, streamed, resident_in, resident)


ORDERED = mixture(hidden_size=64, num_layers=6)
ALL_LINEAR = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["all-linear"]}
LAYERS, COUNT, WIDTH, HIDDEN = 5, 64, 64, 64
LARGE = mixture(
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    experts={"count": COUNT, "per_token": 2, "width": WIDTH},
)
MATRIX = 3 * HIDDEN * WIDTH  # values of an expert, in two stacks


def tensor_bytes(quantize: Quantize | None, value_bytes: int) -> list[int]:
    """Of a layer: two stacks as they are kept."""
    counts = (COUNT * MATRIX * 2 // 3, COUNT * MATRIX // 3)
    if quantize is None:
        return [value_bytes * count for count in counts]
    return [size for count in counts for size in buffer_bytes(count, "nf4", True)]


@pytest.mark.parametrize("quantize", [None, NF4], ids=["bfloat16", "nf4"])
@pytest.mark.parametrize("checkpointing", those(["full", "none"], quick="none"))
def test_the_device_holds_all_but_experts_and_two_layers_of_them(
    quantize: Quantize | None, checkpointing: str
) -> None:
    settings = {"precision": "bfloat16", "activation_checkpointing": checkpointing}
    plan = tiny_plan(
        config=LARGE, train={"device": "cuda", "micro_batch_size": 1, "accumulation": 1, **settings}
    ).model_copy(update={"adapter": ATTENTION, "quantize": quantize or Quantize(kind="none")})
    streamed = plan.model_copy(
        update={"train": plan.train.model_copy(update={"stream": "experts"})}
    )
    of_layer = sum(map(aligned_bytes, tensor_bytes(quantize, 2)))
    saved = peak_bytes_of(plan) - peak_bytes_of(streamed)
    assert saved == pytest.approx((LAYERS - 2) * of_layer, rel=0.01)


COUNTED: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "nf4": {"base": "nf4"},
    "nf4, full checkpointing": {"base": "nf4", "activation_checkpointing": "full"},
    "nf4, adapted experts": {"base": "nf4", "adapter": ALL_LINEAR},
}


@pytest.mark.parametrize("name", those(COUNTED, quick="nf4"))
def test_the_device_holds_what_the_plan_counts(name: str) -> None:
    settings = {"precision": "bfloat16", "attention": "blockwise", "rows": 2, "device": "cuda"}
    plan = small_plan(
        **{"adapter": ATTENTION.model_dump() | {"dropout": 0.0}} | settings | COUNTED[name]
    )
    config = mixture(
        hidden_size=256,
        num_layers=4,
        vocab_size=1024,
        max_positions=256,
        head_dim=64,
        num_heads=4,
        experts={"count": 16, "width": 128},
    )
    plan = plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"config": config}),
            "train": plan.train.model_copy(update={"stream": "experts"}),
        }
    )
    counted = sum(tensor_bytes_of(replace(load_of(plan), stream="experts")).values())
    assert 0.97 < peak_bytes_of(plan) / counted < 1.03


@pytest.mark.parametrize("quantize", [None, NF4], ids=["float32", "nf4"])
@torch.no_grad()
def test_a_token_brings_the_experts_that_it_chooses(quantize: Quantize | None) -> None:
    resident = fresh_decoder(LARGE, seed=0)
    if quantize is not None:
        quantize_model(resident.requires_grad_(False), quantize)
    resident.to("cuda")
    decoder = decoder_of(LARGE, quantize=quantize)
    assert isinstance(decoder.weight_stream, StreamedExperts)
    ring = decoder.weight_stream.ring
    sizes = tensor_bytes(quantize, 4)

    # Forty tokens need all experts; the copy of the first layer begins again for the forward that follows.
    tokens = torch.arange(40, device="cuda")[None]
    assert torch.equal(decoder(tokens).head, resident(tokens).head)
    assert ring.num_loads == LAYERS + 1
    assert ring.bytes_loaded == (LAYERS + 1) * sum(map(aligned_bytes, sizes))

    # One needs two of each layer, and the scales of scales, which are of all.
    before = ring.bytes_loaded
    token = tokens[:, :1]
    assert torch.equal(decoder(token).head, resident(token).head)
    of_matrices = sum(size for size in sizes if size % COUNT == 0)
    common = sum(sizes) - of_matrices
    assert ring.bytes_loaded - before == LAYERS * (2 * of_matrices // COUNT + common)
    assert ring.num_loads == LAYERS + 1


DENSE_FIRST = replace(MIXTURE, experts=replace(MIXTURE.experts, layers=(False, True, True, True)))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_loads_what_is_not_there(checkpointing: str, accumulation: int) -> None:
    """Of three layers with experts the two with which a backward begins, or the next forward, are there."""
    settings = {"activation_checkpointing": checkpointing, "stream": "experts"}
    sizes = {"device": "cuda", "micro_batch_size": 1, "accumulation": accumulation}
    plan = tiny_plan(config=DENSE_FIRST, train=sizes | settings)
    plan = plan.model_copy(update={"adapter": ATTENTION})
    state = build_state(plan).model_and_optimizer
    objective = build_objective(plan)
    stream = state.model.weight_stream
    assert isinstance(stream, StreamedExperts)
    loads = [0]
    for step in range(3):
        batches = batches_of(step, plan)
        train_step(state, batches, objective, plan=plan.train, lr_scale=1.0)
        loads.append(stream.ring.num_loads)
    # After an update each is copied again.
    assert loads == [0, *(step * (2 * accumulation + 2) for step in (1, 2, 3))]


# The orders in which a device may run copies and work.


@pytest.mark.parametrize("checkpointing", those(["full", "none"], quick="none"))
def test_no_order_changes_a_bit(checkpointing: str) -> None:
    def plan_in(stream: str) -> RunPlan:
        plan = streamed_plan("nf4", stream=stream)
        settings = {"activation_checkpointing": checkpointing}
        changes = {"model": {"config": ORDERED}, "train": settings}
        sections = {
            name: getattr(plan, name).model_copy(update=fields) for name, fields in changes.items()
        }
        return plan.model_copy(update={**sections, "adapter": GENERATED})

    expected = test_streamed_schedules.trained(plan_in("off"))
    simulated.clear()
    streamed = test_streamed_schedules.trained(plan_in("experts"), is_recorded=True)
    assert simulated.report()["problem"] == {}
    assert test_streamed_schedules.first_wrong_order(streamed, expected, 10) is None


@pytest.mark.parametrize("waits", [True, False])
@torch.no_grad()
def test_a_matrix_is_awaited_before_it_multiplies(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the experts that a token chooses, in ten orders; one without the wait has other bytes."""
    resident = fresh_decoder(BIASED, seed=0).to("cuda")
    decoder = decoder_of(BIASED)
    token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    expected = resident(token).head
    torch.cuda.synchronize()
    simulated.problem_is_error(False)
    try:
        with monkeypatch.context() as patches:
            if not waits:
                patches.setattr(streamed_experts._Arrivals, "wait", lambda *_: None)
            simulated.clear()
            simulated.record()
            is_right = torch.equal(decoder(token).head, expected)
            torch.cuda.synchronize()
            wrong = [seed for seed in range(1, 10) if simulated.replay(seed)]
            problems = simulated.report()["problem"]
    finally:
        torch.cuda.synchronize()
        simulated.problem_is_error(True)
        simulated.clear()
    assert (is_right and not wrong) == waits
    assert (problems == {}) == waits
