"""The frozen copy of the start, from which rollouts that train the base measure their KL divergence."""

import json
import shutil

import pytest
import torch
from rollouts_for_tests import assert_resumes_to_the_same_bits, metrics, plan_of, write_recipe

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.infer.forward import eval_mode
from bloomery.model.heads import ScoreSettings
from bloomery.model.io.parameters import local
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.train.objectives.objective import batch_label_scores
from bloomery.train.objectives.reference_model import build_reference_model, stream_blocks
from bloomery.train.state import build_state
from models_for_tests import make_model
from ranks import fields, on_ranks, ranks, train

GRPO = ["objective.beta=0.5", "objective.num_iterations=2"]
RLOO = ["objective.kind=rloo", "objective.num_generations=4", "objective.beta=0.5"]
PPO = ["objective={kind: ppo, num_generations: 1, max_completion_length: 8, kl_coef: 0.5}"]
SAVES_EMBEDDING = "adapter={kind: lora, rank: 4, modules_to_save: [embed_tokens]}"
ADALORA = "adapter={kind: peft, method: adalora, init_r: 4, target_r: 2}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("rl"))


def batch_of(config) -> Batch:
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, 24))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    return Batch(
        tokens=tokens,
        labels=tokens.roll(-1, 1),
        loss_mask=torch.ones(tokens.shape),
        positions=positions,
        documents=torch.zeros_like(tokens),
        sequences=torch.zeros_like(tokens),
    )


def scores(model, plan, batch) -> torch.Tensor:
    with eval_mode(model):
        return batch_label_scores(
            model, batch, ScoreSettings(plan.model.score_chunk), precision=plan.train.precision
        )


@pytest.mark.parametrize(
    "edits",
    [
        ["train.precision=float32"],
        ["train.precision=bfloat16"],
        ["train.precision=bfloat16-pure"],
        ["train.precision=float16"],
        ["train.precision=bfloat16", SAVES_EMBEDDING],
        ["train.precision=bfloat16", SAVES_EMBEDDING, "quantize.kind=nf4"],
        [ADALORA],
    ],
    ids=lambda edits: " ".join(edits),
)
def test_before_the_first_update_policy_and_reference_are_equal(recipe, edits):
    plan = plan_of(recipe, *GRPO, *edits)
    state = build_state(plan)
    reference = build_reference_model(
        plan, state.model, run_dir=None, mesh=state.model_and_optimizer.mesh
    )
    assert reference is not None and not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    batch = batch_of(plan.model.config)
    assert torch.equal(scores(reference, plan, batch), scores(state.model, plan, batch))

    # What the policy does from there on leaves the copy as it is.
    before = scores(reference, plan, batch)
    with torch.no_grad():
        for parameter in state.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    assert torch.equal(scores(reference, plan, batch), before)
    assert not torch.equal(scores(state.model, plan, batch), before)


def test_a_lora_run_and_one_without_divergence_need_no_copy(recipe):
    for edits in ([*GRPO, "adapter={kind: lora, rank: 4}"], ["objective.beta=0"]):
        plan = plan_of(recipe, *edits)
        state = build_state(plan)
        mesh = state.model_and_optimizer.mesh
        assert build_reference_model(plan, state.model, run_dir=None, mesh=mesh) is None


@pytest.mark.parametrize(
    "edits",
    [
        PPO,
        pytest.param(GRPO, marks=pytest.mark.soak),
        pytest.param(RLOO, marks=pytest.mark.soak),
        pytest.param([*PPO, "train.precision=bfloat16"], marks=pytest.mark.soak),
        pytest.param([*GRPO, "train.ema_decay=0.9"], marks=pytest.mark.soak),
        pytest.param([*RLOO, "objective.reference=nf4"], marks=pytest.mark.soak),
    ],
    ids=lambda edits: " ".join(edits),
)
def test_a_resumed_run_has_the_same_reference(recipe, tmp_path, edits):
    """Its checkpoint is of step 3: a reference of those weights would begin again at a divergence of 0."""
    events = assert_resumes_to_the_same_bits(plan_of(recipe, *edits), tmp_path)
    key = "objective/kl" if "ppo" in str(edits) else "kl"
    divergence = {step: figures.get(key) for step, figures in metrics(events).items()}
    assert divergence[1] == pytest.approx(0.0, abs=1e-2 if "nf4" in str(edits) else 1e-6)
    assert abs(divergence[5] or divergence[6]) > 1e-6


def bytes_of_rank(plan_json: str) -> float:
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    state = build_state(plan, mesh=mesh)
    reference = build_reference_model(plan, state.model, run_dir=None, mesh=mesh)
    assert reference is not None
    return float(sum(local(tensor).nbytes for tensor in reference.parameters()))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_shards_divide_the_copy(recipe, precision):
    plan = plan_of(recipe, *GRPO, f"train.precision={precision}")
    whole = bytes_of_copy(plan)
    held = ranks(2).call(bytes_of_rank, on_ranks(plan, shard=2).model_dump_json())
    # Norms are whole on every rank.
    assert sum(held) == pytest.approx(whole, rel=0.02)


def bytes_of_copy(plan) -> float:
    state = build_state(plan)
    mesh = state.model_and_optimizer.mesh
    reference = build_reference_model(plan, state.model, run_dir=None, mesh=mesh)
    assert reference is not None
    tensors = [*reference.parameters(), *reference.buffers()]
    return float(sum(tensor.nbytes for tensor in tensors))


@pytest.mark.parametrize(
    "edits",
    [
        [],
        ["train.precision=bfloat16"],
        ["train.precision=bfloat16-pure"],
        ["objective.reference=nf4"],
    ],
    ids=lambda edits: " ".join(edits) or "float32",
)
def test_the_planned_bytes_are_those_that_the_copy_has(recipe, edits):
    plan = plan_of(recipe, *GRPO, *edits)
    part = plan.memory.parts["reference model"]
    assert part == pytest.approx(bytes_of_copy(plan), rel=0.01)
    without = plan_of(recipe, *edits[:1] if "nf4" not in str(edits) else ())
    assert "reference model" not in without.memory.parts
    assert plan.objective.reference == ("nf4" if "nf4" in str(edits) else "device")


def test_a_block_is_on_the_device_only_while_it_computes(recipe):
    plan = plan_of(recipe, *GRPO)
    state = build_state(plan)
    mesh = state.model_and_optimizer.mesh
    reference = build_reference_model(plan, state.model, run_dir=None, mesh=mesh)
    batch = batch_of(plan.model.config)
    expected = scores(reference, plan, batch)
    homes = {name: tensor.data_ptr() for name, tensor in reference.named_parameters()}
    seen = []
    stream_blocks(reference, torch.device("cpu"))
    reference.model.layers[1].self_attn.register_forward_pre_hook(
        lambda *_: seen.append(
            [
                tensor.data_ptr() != homes[f"model.layers.{number}.{name}"]
                for number in (0, 1)
                for name, tensor in reference.model.layers[number].named_parameters()
            ]
        )
    )
    assert torch.equal(scores(reference, plan, batch), expected)
    half = len(seen[0]) // 2
    assert not any(seen[0][:half]), "the first block has left"
    assert all(seen[0][half:]), "the second one is here"
    assert {name: tensor.data_ptr() for name, tensor in reference.named_parameters()} == homes


def test_a_block_leaves_the_device_after_an_error(recipe):
    """Out of memory is survived: the step is taken again, with a smaller micro-batch."""
    plan = plan_of(recipe, *GRPO)
    state = build_state(plan)
    mesh = state.model_and_optimizer.mesh
    reference = build_reference_model(plan, state.model, run_dir=None, mesh=mesh)
    batch = batch_of(plan.model.config)
    expected = scores(reference, plan, batch)
    homes = {name: tensor.data_ptr() for name, tensor in reference.named_parameters()}
    stream_blocks(reference, torch.device("cpu"))

    def fail(*_):
        raise RuntimeError("out of memory")

    failing = reference.model.layers[1].self_attn.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        scores(reference, plan, batch)
    assert {name: tensor.data_ptr() for name, tensor in reference.named_parameters()} == homes
    failing.remove()
    assert torch.equal(scores(reference, plan, batch), expected)
    assert {name: tensor.data_ptr() for name, tensor in reference.named_parameters()} == homes


@pytest.fixture
def based(tmp_path):
    """A recipe that starts from a folder of this test."""
    make_model(tmp_path / "base")
    edits = (f"model={{from: {tmp_path}/base}}", "tokenizer={from: same}")
    return write_recipe(tmp_path, *edits), edits, tmp_path / "base"


def test_a_resume_refuses_another_start(based, tmp_path):
    recipe, edits, base = based
    plan = plan_of(recipe, *edits, *GRPO, "train.max_steps=4")
    folder = tmp_path / "run"
    folder.mkdir()
    train(plan, folder, stop_after=3)
    checkpoint = folder / "checkpoints" / "step-00000003"
    moved = shutil.move(base, tmp_path / "moved")
    with pytest.raises(UserError, match="reference model, which this run started from, is missing"):
        train(plan, folder, resume_from=checkpoint)
    shutil.move(moved, base)
    events = train(plan, folder, resume_from=checkpoint)
    assert fields(events, "StepDone")[-1]["step"] == 4


def test_the_divergence_is_that_of_transformers(based, tmp_path):
    """Of the first step after an update: log-probabilities under both models, by transformers."""
    from transformers import AutoModelForCausalLM

    recipe, edits, base = based
    plan = plan_of(
        recipe, *edits, *RLOO, "train.max_steps=3", "checkpoint.every=1", "logging.completions=all"
    )
    folder = tmp_path / "run"
    events = train(plan, folder)
    file = sorted((folder / "completions").glob("*.jsonl"))[-1]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    policy = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step-00000002").eval()
    start = AutoModelForCausalLM.from_pretrained(base).eval()
    divergence = 0.0
    count = 0
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        size = len(row["completion_ids"])
        logps = []
        for model in (policy, start):
            with torch.no_grad():
                logits = model(ids).logits[0, -size - 1 : -1] / plan.objective.temperature
            logps.append(logits.log_softmax(-1).gather(1, ids[0, -size:, None]).sum())
        divergence += float(logps[0] - logps[1])
        count += size
    assert metrics(events)[3]["kl"] == pytest.approx(divergence / count, abs=1e-5)
    assert abs(divergence) > 1e-4
