"""Plans of runs that train on their own completions. Oracles: the tensors of a real rollout, `pack`, and arithmetic."""

import json
from dataclasses import replace

import pytest
import torch
from plan_help import gpu_machine, loaded, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.facts.hf_config import config_to_hf
from bloomery.facts.limits import ROLLOUT_SLOTS
from bloomery.model.cache import Cache
from bloomery.model.configs import build_config
from bloomery.model.decoder import Decoder
from bloomery.plan.advise import edited
from bloomery.plan.estimate.rollouts import ROLLOUT_FRAGMENTATION
from bloomery.plan.fallback import roomier
from bloomery.plan.page import page
from bloomery.plan.types import DatasetFacts
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Model
from bloomery.train.rl.rollout import RolloutSample, pack

VERIFIER = {"verifier": "exact_match", "column": "answer"}
LARGE = {
    "family": "llama",
    "hidden_size": 1024,
    "num_layers": 16,
    "num_heads": 16,
    "max_positions": 4096,
    "vocab_size": 32_000,
}


def rl(*, objective=None, train=None, data=None, rewards=(VERIFIER,), **sections):
    """A small run with rewards: 8 completions of each of 4 prompts in a step, of 32 tokens at most."""
    kind = {"kind": "grpo", "max_completion_length": 32, **(objective or {})}
    return loaded(
        objective=kind,
        rewards=list(rewards),
        data={"sequence_length": 128, "builtin": None, "path": "prompts.jsonl", **(data or {})},
        train={"batch_size": 32, "tokens_per_step": "auto", "max_steps": 10, **(train or {})},
        **sections,
    )


def prompts(count=100, *, tokens=20, longest=40):
    return DatasetFacts(
        sequences_per_epoch=count * 8,
        tokens=count * tokens,
        vocab_size=None,
        prompts=count,
        longest_prompt=longest,
    )


def test_a_plan_says_what_a_rollout_is():
    plan = planned(rl(), machine(), dataset=prompts())
    rollout = plan.rollout
    assert (rollout.num_prompts, rollout.num_completions, rollout.slots) == (4, 32, 32)
    assert rollout.slot_tokens == 40 + 32
    assert (rollout.num_steps, rollout.prompt_tokens) == (1, 20)
    assert plan.epochs == pytest.approx(10 * 4 / 100)
    several = {"num_iterations": 2, "steps_per_generation": 4}
    later = planned(rl(objective=several), machine(), dataset=prompts()).rollout
    assert (later.num_prompts, later.num_completions, later.num_steps) == (16, 128, 8)
    assert later.slots == ROLLOUT_SLOTS


def test_the_cache_has_the_bytes_of_the_one_that_samples():
    plan = planned(rl(), machine(), dataset=prompts())
    rollout = plan.rollout
    config = plan.model.config
    cache = Cache(config, rollout.slot_tokens, rollout.slots)
    for layer in cache.layers:
        layer.memory(config.num_kv_heads, config.head_dim, torch.zeros(1))
    counted = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert rollout.memory.parts["KV cache"] == counted


@pytest.mark.parametrize("gpu", [None, "MI300X"])
def test_reward_models_are_counted_while_sampling_and_in_the_step(gpu, tmp_path):
    fields = {name: value for name, value in LARGE.items() if name != "vocab_size"}
    config = replace(build_config(Model(**fields), vocab_size=32_000), head="values")
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    on = machine() if gpu is None else gpu_machine(gpu)
    models = [{"model": str(tmp_path), "name": name} for name in ("one", "again")]
    plan = planned(rl(rewards=[VERIFIER, *models]), on, dataset=prompts())
    without = planned(rl(), on, dataset=prompts())
    with torch.device("meta"):
        decoder = Decoder(config)
    weights = 2 * sum(parameter.numel() for parameter in decoder.parameters())  # bfloat16
    for memory in (plan.memory, plan.rollout.memory):
        assert memory.parts["reward models"] == weights
    assert "reward models" not in without.memory.parts
    assert plan.memory.total - without.memory.total >= weights


def test_sampling_between_the_steps_leaves_holes_in_the_memory():
    uncompiled = {"compile": False}
    with_rollouts = planned(rl(train=uncompiled), machine(), dataset=prompts())
    alone = planned(loaded(train=uncompiled), machine())
    for plan, holes in ((with_rollouts, 0.06 + ROLLOUT_FRAGMENTATION), (alone, 0.06)):
        parts = plan.memory.parts
        assert parts["fragmentation"] == pytest.approx(
            holes * (parts["activations"] + parts["logits"])
        )


@pytest.mark.parametrize("prompt_tokens", [10, 31, 70])
def test_micro_batches_are_those_of_completions_packed(prompt_tokens):
    facts = prompts(tokens=prompt_tokens, longest=prompt_tokens)
    plan = planned(rl(train={"micro_batch_size": 2}), machine(), dataset=facts)
    sample = RolloutSample(tuple(range(prompt_tokens)), tuple(range(32)), (0.0,) * 32)
    batches, _ = pack([sample] * 32, length=128, rows=2)
    expected = plan.rollout.completion_tokens.value
    assert expected == pytest.approx(30, abs=1)  # of 256 tokens one ends a completion
    assert plan.rollout.micro_batches == len(batches)


def test_seconds_have_parts_that_add_up():
    plan = planned(rl(), machine(), dataset=prompts())
    seconds = plan.rollout.seconds
    assert seconds.keys() == {"generation", "rewards", "update"}
    assert plan.step_seconds.value == pytest.approx(sum(part.value for part in seconds.values()))
    assert plan.step_seconds.low < plan.step_seconds.value < plan.step_seconds.high
    assert plan.seconds.value == pytest.approx(10 * plan.step_seconds.value)

    # A rollout for two steps is paid once, and needs its log-probabilities before the first.
    twice = planned(rl(objective={"num_iterations": 2}), machine(), dataset=prompts()).rollout
    assert twice.seconds["generation"].value == pytest.approx(seconds["generation"].value / 2)
    assert twice.seconds["update"].value == pytest.approx(seconds["update"].value)
    passes = twice.seconds["log-probabilities"].value
    assert passes == pytest.approx(twice.seconds["update"].value / 3 / 2)

    # RLOO with a penalty: the old model's and the reference model's.
    adapter = {"kind": "lora", "target_modules": ["q_proj", "v_proj"]}
    rloo = rl(objective={"kind": "rloo"}, train={"batch_size": 32}, adapter=adapter)
    both = planned(rloo, machine(), dataset=prompts()).rollout.seconds
    assert both["log-probabilities"].value == pytest.approx(2 * both["update"].value / 2)


def test_a_value_head_needs_a_pass_before_the_first_step_and_numbers_of_each_token():
    one_pass = {"kind": "ppo", "num_iterations": 1}
    alone = rl(objective={**one_pass, "kl_coef": 0})
    rollout = planned(alone, machine(), dataset=prompts()).rollout
    assert (rollout.num_prompts, rollout.num_completions) == (32, 32)
    seconds = rollout.seconds
    assert seconds["log-probabilities"].value == pytest.approx(seconds["update"].value / 3)

    # With a divergence the reference model has a pass, too.
    adapter = {"kind": "lora", "target_modules": ["q_proj", "v_proj"]}
    lora = planned(rl(objective=one_pass, adapter=adapter), machine(), dataset=prompts())
    both = lora.rollout.seconds
    assert both["log-probabilities"].value == pytest.approx(2 * both["update"].value / 2)

    # Three numbers of Python and two packed floats more than a run that keeps old log-probabilities.
    grpo = planned(
        rl(objective={"num_iterations": 2, "num_generations": 2}), machine(), dataset=prompts()
    )
    tokens = 32 * grpo.rollout.completion_tokens.value
    packed = rollout.micro_batches * grpo.train.micro_batch_size * 128
    ppo = planned(alone, machine(), dataset=prompts())
    assert ppo.memory.parts["rollout"] - grpo.memory.parts["rollout"] == pytest.approx(
        3 * 32 * tokens + 8 * packed
    )


def test_longer_completions_take_longer_and_need_more():
    short = planned(rl(), machine(), dataset=prompts()).rollout
    long = planned(rl(objective={"max_completion_length": 64}), machine(), dataset=prompts())
    assert long.rollout.seconds["generation"].value > 1.5 * short.seconds["generation"].value
    assert long.rollout.memory.parts["KV cache"] > short.memory.parts["KV cache"]


@pytest.mark.parametrize("gpu", ["RX 6700 XT", "MI300X"])
def test_a_gpu_reads_every_weight_for_each_forward(gpu):
    plan = planned(rl(model=LARGE), gpu_machine(gpu), dataset=prompts())
    seconds = plan.rollout.seconds["generation"]
    assert 0 < seconds.low < seconds.value < seconds.high
    assert "rollout" not in plan.memory.parts  # which the host keeps
    assert plan.rollout.memory.parts["context"] > 0


def test_ranks_share_out_the_prompts():
    alone = planned(rl(), machine(), dataset=prompts()).rollout
    both = planned(
        rl(parallel={"replicate": 2, "shard": 1}), machine(), dataset=prompts(), gpus=2
    ).rollout
    assert (both.num_completions, both.slots) == (32, alone.slots // 2)
    assert both.memory.parts["KV cache"] == alone.memory.parts["KV cache"] / 2
    # Two ranks of one CPU have half of its cores each.
    assert both.seconds["generation"].value == pytest.approx(
        alone.seconds["generation"].value, rel=0.3
    )


def test_the_time_has_the_rounds_of_dynamic_sampling():
    """By hand: of 4 prompts none, half or all are alike, and three rounds replace what is missing."""
    still, dynamic, more = (
        planned(rl(objective=keys), machine(), dataset=prompts()).rollout
        for keys in (
            {},
            {"dynamic_sampling": True},
            {"dynamic_sampling": True, "oversampling": 2.0, "max_resample_times": 2},
        )
    )
    assert still.sampled_prompts == (4, 4, 4)
    # 4; 4, then the 2 that are missing, then 1 and 1; 4 in each of four rounds.
    assert dynamic.sampled_prompts == (4, 8, 16)
    # 8, of which half are enough; 8, then 4 and 4 that are missing still.
    assert more.sampled_prompts == (8, 8, 16)
    for part in ("generation", "rewards"):
        alone, several = (rollout.seconds[part] for rollout in (still, dynamic))
        assert several.low == alone.low
        assert several.high == pytest.approx(4 * alone.high)
        assert 1.2 * alone.value < several.value < 4 * alone.value
    assert dynamic.seconds["update"] == still.seconds["update"]
    # All prompts of the first round have a slot.
    assert (still.slots, more.slots) == (32, 64)
    assert more.memory.parts["KV cache"] == 2 * still.memory.parts["KV cache"]


def test_every_rank_keeps_all_completions():
    """They are trained on by all ranks together, and each of them chooses its own in every step."""
    sizes = [
        planned(
            rl(parallel={"replicate": ranks, "shard": 1}), machine(), dataset=prompts(), gpus=ranks
        ).rollout.memory.parts["rollout"]
        for ranks in (1, 2, 4)
    ]
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_ranks_that_share_sequences_sample_their_own_prompts():
    """And train on parts of the completions of the group."""
    model = {"num_heads": 2, "num_kv_heads": 2, "hidden_size": 64}
    settings = {"model": model, "train": {"micro_batch_size": 1}}
    alone, copies, shared = (
        planned(rl(**settings, parallel=parallel), machine(), dataset=prompts(), gpus=ranks).rollout
        for ranks, parallel in (
            (1, {}),
            (2, {"replicate": 2, "shard": 1}),
            (2, {"replicate": 2, "shard": 1, "context": 2}),
        )
    )
    assert shared.slots == copies.slots == alone.slots // 2
    assert shared.memory.parts["KV cache"] == copies.memory.parts["KV cache"]
    tokens = prompts().tokens / 100 + alone.completion_tokens.value
    per_sequence = int(128 / tokens)
    for rollout, completions in ((alone, 32), (copies, 16), (shared, 32)):
        assert rollout.micro_batches == -(-completions // per_sequence)


def test_the_time_of_a_rollout_has_the_weights_that_shards_gather():
    recipe = {"model": LARGE, "train": {"micro_batch_size": 1}}
    by_shards = {
        shards: planned(
            rl(**recipe, parallel={"replicate": 2 // shards, "shard": shards}),
            gpu_machine("A100 80GB SXM"),
            dataset=prompts(),
            gpus=2,
        ).rollout
        for shards in (1, 2)
    }
    assert "gathered weights" not in by_shards[1].seconds
    gathered = by_shards[2].seconds["gathered weights"].value
    copy = by_shards[2].memory.parts["whole copy"]
    assert copy / 2 / 600e9 < gathered < copy / 2 / 50e9


@pytest.mark.parametrize(
    ("gpu", "gpus", "fitting"),
    [
        ("T4", 2, set()),
        ("RTX 4090", 4, {"replicate"}),
        ("A100 80GB SXM", 2, {"replicate", "shard", "pipeline"}),
    ],
)
def test_a_layout_fits_where_sampling_does_too(gpu, gpus, fitting):
    """Shards and stages sample with a whole copy of the weights beside their part, and so need more than copies."""

    def plan_of(*edits: str):
        return planned(load_recipe("llama2-7b-rlhf", [*edits]), gpu_machine(gpu), gpus=gpus)

    plan = plan_of()
    layouts = plan.parallel.layouts
    assert {layout.name for layout in layouts if layout.memory.fits} == fitting
    for layout in layouts:
        keys = ("replicate", "shard", "pipeline")
        alone = plan_of(*(f"parallel.{key}={getattr(layout, key)}" for key in keys))
        moments = (alone.rollout.memory.total, alone.rollout.training_memory.total)
        assert layout.memory.total == alone.memory.total == max(moments)
    assert plan.fits == bool(fitting)
    assert plan.parallel.reason.startswith("no layout fits") == (not fitting)


def test_the_memory_of_uneven_stages_is_that_of_the_moment_that_needs_most():
    """The last stage has the head, and so fewer layers."""
    loaded_recipe = load_recipe("qwen2.5-1.5b-grpo", ["parallel.pipeline=2"])
    plan = planned(loaded_recipe, gpu_machine("RTX 4090"), gpus=2)
    layers = plan.train.pipeline_layers
    assert layers[0] > layers[1]
    moments = (plan.rollout.memory.total, plan.rollout.training_memory.total)
    assert plan.memory.total == max(moments)


@pytest.mark.parametrize("gpus", [1, 8])
def test_packed_completions_are_computed_in_the_fastest_micro_batches(gpus):
    """By what is computed once they are packed: the largest micro-batches would be half empty."""

    def plan_of(*edits: str):
        return planned(load_recipe("llama2-7b-rlhf", [*edits]), gpu_machine("MI300X"), gpus=gpus)

    chosen = plan_of()
    largest = plan_of(f"train.micro_batch_size={64 // gpus}")
    assert largest.fits
    assert largest.step_seconds.value > 1.1 * chosen.step_seconds.value
    for size in (1, 2, 4, 8):
        other = plan_of(f"train.micro_batch_size={size}")
        assert chosen.step_seconds.value <= 1.01 * other.step_seconds.value


def test_a_step_out_of_memory_gets_smaller_chunks_of_logits_also_where_sampling_needs_more():
    wide = rl(
        model=LARGE,
        objective={"max_completion_length": 3000},
        data={"sequence_length": 4096},
        train={"batch_size": 64, "micro_batch_size": 1},
    )
    plan = planned(wide, gpu_machine("MI300X"), dataset=prompts(tokens=60, longest=80))
    assert plan.memory == plan.rollout.memory
    safer = roomier(plan, "out of memory")
    assert safer.plan.model.score_chunk < plan.model.score_chunk


def test_edits_of_a_run_that_does_not_fit_make_its_rollouts_smaller():
    """The cache of 64 slots of 3,000 tokens: 25 GiB in float32."""
    wide = rl(
        model=LARGE,
        objective={"max_completion_length": 3000},
        data={"sequence_length": 4096},
        train={"batch_size": 64, "micro_batch_size": 1},
    )
    facts = prompts(tokens=60, longest=80)
    report = reported(wide, machine(free_gib=12), dataset=facts)
    plan = report.plan
    assert not plan.fits
    assert plan.memory == plan.rollout.memory
    keys = {suggestion.edit.partition("=")[0] for suggestion in report.suggestions}
    assert "objective.max_completion_length" in keys
    assert "train.batch_size" in keys
    for suggestion in report.suggestions:
        again = planned(edited(wide, suggestion.edit), machine(free_gib=12), dataset=facts)
        assert again.fits == ("still does not fit" not in suggestion.saves)
        assert again.memory.total < plan.memory.total


def test_a_step_of_one_prompt_has_fewer_generations_to_save():
    wide = rl(
        model=LARGE,
        objective={"max_completion_length": 3000, "num_generations": 32},
        data={"sequence_length": 4096},
        train={"batch_size": 32, "micro_batch_size": 1},
    )
    report = reported(wide, machine(free_gib=10), dataset=prompts(tokens=60, longest=80))
    edits = [suggestion.edit for suggestion in report.suggestions]
    assert any(edit.startswith("objective.num_generations=") for edit in edits)


def test_the_page_has_the_rollout(tmp_path):
    where = machine(free_gib=20)
    report = reported(rl(), where, dataset=prompts())
    lines = page(report, where, source="rl.yaml", commands=["train"])
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    assert "32 completions of at most 32 tokens" in text
    assert "4 prompts x 8 per rollout, 32 at once" in text
    assert "of which generation" in text
    assert "4,096 tokens = 32 sequences" not in text


def test_a_batch_that_the_recipe_leaves_open_holds_whole_groups():
    plan = planned(
        rl(objective={"num_generations": 6}, train={"batch_size": None}), machine(), dataset=None
    )
    assert plan.train.sequences_per_step % 6 == 0
    with pytest.raises(UserError, match="no multiple"):
        planned(
            rl(
                objective={"num_generations": 6},
                train={"batch_size": None, "tokens_per_step": 128 * 8},
            ),
            machine(),
        )


def test_prompts_of_files_are_counted_by_their_rows(tmp_path, monkeypatch):
    """Before `prepare`; their other columns are no part of the prompts."""
    from bloomery.plan.gather import guessed

    monkeypatch.chdir(tmp_path)
    row = '{"prompt": "What is 12 + 13?", "answer": "25", "notes": "%s"}\n' % ("x" * 400)
    (tmp_path / "prompts.jsonl").write_text(row * 200)
    recipe = rl(tokenizer={"train": {"vocab_size": 300}}).recipe
    facts = guessed(recipe)
    assert facts.prompts == pytest.approx(200, rel=0.1)
    assert facts.tokens / facts.prompts == pytest.approx(16 / 3.4, rel=0.2)
    assert facts.sequences_per_epoch == facts.prompts * 8


def test_a_packaged_plan_without_rollouts_has_none():
    plan = planned(load_recipe("go-coder-125m"), machine(free_gib=20))
    assert plan.rollout is None
    assert plan.trained_tokens_per_step == plan.train.tokens_per_step
    assert plan.memory.total < 20 * GIB


def with_kl(*, gpu="RTX 4090", gpus=1, objective=None, model=LARGE, **sections):
    recipe = rl(objective={"beta": 0.1, **(objective or {})}, model=model, **sections)
    return planned(recipe, gpu_machine(gpu), dataset=prompts(), gpus=gpus)


def test_a_copy_of_the_start_is_planned_on_the_device_where_it_fits():
    plan = with_kl()
    assert plan.objective.reference == "device"
    counts = {
        name: parameter.numel()
        for name, parameter in meta_decoder(plan.model.config).named_parameters()
    }
    matrices = sum(
        count
        for name, count in counts.items()
        if ".layers." in name and not name.endswith("norm.weight")
    )
    # bfloat16 matrices of layers, float32 of embeddings, norms and head.
    expected = 2 * matrices + 4 * (sum(counts.values()) - matrices)
    assert plan.memory.parts["reference model"] == expected
    choice = next(choice for choice in plan.choices if choice.key == "objective.reference")
    assert choice.value == "frozen copy"


def meta_decoder(config):
    with torch.device("meta"):
        return Decoder(config)


def large(num_layers: int) -> dict:
    return {**LARGE, "hidden_size": 2048, "num_layers": num_layers}


def test_a_copy_that_does_not_fit_on_the_device_is_kept_on_the_host():
    """The first depth at which the device is too small for both: there only one layer of the copy is on it."""
    resident = {"parallel": {"stream": "off"}}  # weights that stream leave room for the copy
    for num_layers in range(4, 60):
        plan = with_kl(gpu="RX 6700 XT", model=large(num_layers), **resident)
        if plan.objective.reference == "host":
            break
        assert plan.objective.reference == "device" and plan.fits
    assert plan.fits
    on_device = with_kl(
        gpu="RX 6700 XT", model=large(num_layers), objective={"reference": "device"}, **resident
    )
    assert not on_device.fits
    assert plan.memory.parts["reference model"] < on_device.memory.parts["reference model"] / 2
    in_nf4 = with_kl(
        gpu="RX 6700 XT", model=large(num_layers), objective={"reference": "nf4"}, **resident
    )
    assert in_nf4.memory.parts["reference model"] < on_device.memory.parts["reference model"] * 0.6


def test_a_copy_on_the_host_comes_before_weights_that_stream():
    """The policy fits without its copy: nothing of it needs to be loaded in each pass."""
    plan = with_kl(gpu="RX 6700 XT", model=large(8))
    assert plan.fits and plan.objective.reference == "host" and plan.train.stream == "off"


def test_a_plan_that_does_not_fit_says_what_a_smaller_copy_saves():
    report = reported(
        rl(objective={"beta": 0.1, "reference": "device"}, model=large(60)),
        gpu_machine("RX 6700 XT"),
        dataset=prompts(),
    )
    assert not report.plan.fits
    edits = [suggestion.edit for suggestion in report.suggestions]
    assert any(edit.startswith("objective.reference=host") for edit in edits)


def test_shards_divide_the_copy_and_do_not_have_it_on_the_host():
    one = with_kl()
    two = with_kl(gpus=2, parallel={"shard": 2})
    assert two.objective.reference == "device"
    parts = [
        plan.parallel.layout.memory.parts if plan.parallel else plan.memory.parts
        for plan in (one, two)
    ]
    assert parts[1]["reference model"] == pytest.approx(parts[0]["reference model"] / 2)
    with pytest.raises(
        UserError, match="a reference model on the host for several devices"
    ) as told:
        with_kl(gpus=2, objective={"reference": "host"})
    assert told.value.where == "objective.reference=host"


def test_an_adapter_needs_no_copy_and_says_that_the_key_has_no_effect():
    report = reported(
        rl(
            objective={"beta": 0.1, "reference": "nf4"},
            adapter={"kind": "lora"},
            model=LARGE,
        ),
        gpu_machine("RTX 4090"),
        dataset=prompts(),
    )
    assert "reference model" not in report.plan.memory.parts
    assert any("objective.reference=nf4 has no effect" in line for line in report.warnings)
