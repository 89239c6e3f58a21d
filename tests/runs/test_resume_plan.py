"""What a resumed run may change, and what another machine changes for it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.core.errors import UserError
from bloomery.hardware.machine import Accelerator, Host, Machine, Software
from bloomery.hardware.profile import build_profile
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.plan.types import DatasetFacts, RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.objectives import Grpo
from bloomery.recipe.schema import Parallel
from bloomery.runs.devices import chosen_devices, device_count, narrowed, same_devices
from bloomery.runs.resume_inputs import find_devices_now
from bloomery.runs.resume_plan import (
    plan_differences,
    refuse_overrides,
    rising_rate,
    with_machine_choices,
    with_overrides,
)

RECIPE = """
model: {family: llama, hidden_size: 64, intermediate_size: 128, num_layers: 2, num_heads: 2, num_kv_heads: 2}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
data: {path: text, sequence_length: 64}
optimizer: {schedule: {kind: wsd, decay: 20%}, warmup: 2 steps}
train: {max_steps: 100, tokens_per_step: 1024}
"""
MI300X = Accelerator(
    index=0, vendor="amd", name="AMD Instinct MI300X", arch="gfx942", memory_bytes=192 * 2**30
)
CPU = Machine(
    accelerators=(),
    host=Host(
        system="Linux",
        cpu_name="AMD EPYC 9654",
        cpu_cores=4,
        memory_bytes=2**34,
        memory_free_bytes=2**34,
        disk_free_bytes=2**40,
        compiler="/usr/bin/g++",
    ),
    software=Software(python="3.12.0", torch="2.13.0", build="cpu"),
)
GPU = CPU.model_copy(
    update={
        "accelerators": (MI300X,),
        "software": CPU.software.model_copy(update={"build": "rocm"}),
    }
)


@pytest.fixture
def plan(tmp_path: Path):
    """The plan of the recipe with overrides on a machine."""
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    facts = DatasetFacts(sequences_per_epoch=5000, tokens=320_000, vocab_size=300)

    def make(machine: Machine, *overrides: str) -> RunPlan:
        recipe = load_recipe(tmp_path / "tiny.yaml", overrides)
        return resolve(recipe, facts_of(recipe, machine, prepared=tmp_path, dataset=facts))

    return make


@pytest.mark.parametrize(
    "word", ["train.max_steps=9", "eval.every=5 steps", "checkpoint.keep=1", "logging.trackers=[]"]
)
def test_what_may_be_changed(word: str) -> None:
    refuse_overrides([word])


@pytest.mark.parametrize(
    "word", ["optimizer.learning_rate=1", "train.seed=2", "train.lengthy=1", "eval=1"]
)
def test_anything_else_is_refused_by_name(word: str) -> None:
    with pytest.raises(UserError, match=word.partition("=")[0]) as caught:
        refuse_overrides([word])
    assert caught.value.code == 2


def test_a_misspelt_key_is_no_key_that_cannot_be_changed() -> None:
    with pytest.raises(UserError, match="no such key") as caught:
        refuse_overrides(["train.max_step=60"])
    assert "train.max_steps" in caught.value.fix


def test_the_same_machine_has_no_differences() -> None:
    full = CPU.model_copy(
        update={"host": CPU.host.model_copy(update={"memory_free_bytes": 5, "disk_free_bytes": 5})}
    )
    assert plan_differences(CPU, full) == []


def test_differences_are_told_in_words() -> None:
    newer = CPU.model_copy(update={"software": CPU.software.model_copy(update={"torch": "2.14.0"})})
    assert plan_differences(CPU, newer) == ["PyTorch changed: 2.13.0 -> 2.14.0"]
    assert (
        plan_differences(CPU, GPU)[0] == "devices changed: no GPU -> AMD Instinct MI300X (gfx942)"
    )


def test_moving_to_a_gpu_changes_machine_dependent_choices_only_and_names_each(plan) -> None:
    stored, fresh = plan(CPU), plan(GPU, "optimizer.learning_rate=1", "train.seed=5")
    now, told = with_machine_choices(stored, fresh)
    assert now.train.device == "cuda"
    assert now.train.precision == fresh.train.precision
    rows, before = (plan.train.micro_batch_size * plan.train.accumulation for plan in (now, stored))
    assert rows == before
    assert now.optimizer.learning_rate == stored.optimizer.learning_rate
    assert now.train.seed == stored.train.seed
    assert any(line.startswith("train.device: cpu -> cuda") for line in told)
    assert "not bitwise identical" in told[-1]
    reason = next(choice.reason for choice in fresh.choices if choice.key == "train.attention")
    kept = f"model.attention: {stored.model.attention} -> {fresh.model.attention}: {reason}"
    assert kept in told


def test_a_frozen_copy_moves_to_where_it_fits(plan) -> None:
    stored, fresh = (
        plan(CPU).model_copy(
            update={
                "objective": Grpo(kind="grpo", beta=beta, reference=place, num_generations=4),
            }
        )
        for place, beta in (("device", 0.1), ("host", 0.2))
    )
    now, told = with_machine_choices(stored, fresh)
    assert (now.objective.reference, now.objective.beta) == ("host", 0.1)
    assert told == ["objective.reference: device -> host"], "the same divergence, to the bit"


def test_moving_to_an_equal_machine_changes_nothing(plan) -> None:
    assert with_machine_choices(plan(CPU), plan(CPU)) == (plan(CPU), [])


@pytest.mark.parametrize("fused", [False, True])
def test_another_machine_trains_the_same_batch(plan, fused: bool) -> None:
    """A fused backward has one micro-batch to a step: left to the machine, a smaller one would be another batch."""
    stored, smaller = plan(CPU), plan(CPU)
    length, sequences = stored.data.sequence_length, stored.train.sequences_per_step
    stored, smaller = (
        each.model_copy(
            update={"optimizer": each.optimizer.model_copy(update={"fused_backward": fused})}
        )
        for each in (stored, smaller)
    )
    one = {"micro_batch_size": 1, "accumulation": 1, "tokens_per_step": length}
    assert sequences > 1
    now, _ = with_machine_choices(
        stored, smaller.model_copy(update={"train": smaller.train.model_copy(update=one)})
    )
    assert (
        now.train.sequences_per_step * length
        == now.train.tokens_per_step
        == stored.train.tokens_per_step
    )
    assert now.train.accumulation == (1 if fused else sequences)


def test_what_only_feeds_the_device_keeps_the_bits(plan) -> None:
    fresh = plan(CPU, "data.prefetch=7")
    now, told = with_machine_choices(plan(CPU), fresh)
    assert now.data.prefetch == 7
    assert len(told) == 1


@pytest.mark.parametrize("dropout", ["model.dropout=0.1", "train.neftune_alpha=5", ""])
def test_other_ranks_draw_other_masks_of_dropout_and_stages_do_not(plan, dropout: str) -> None:
    """Such losses are not equal up to rounding: 0.005 apart after one step."""
    words = [dropout] if dropout else []
    stored, fresh = plan(CPU, *words), plan(CPU, *words)
    drawing = dict.fromkeys(("shard", "context", "micro_batch_size"), True)
    for field, draws in (drawing | {"pipeline": False, "threads": False}).items():
        other = fresh.train.model_copy(update={field: getattr(fresh.train, field) + 1})
        _, told = with_machine_choices(stored, fresh.model_copy(update={"train": other}))
        assert ("up to rounding" in told[-1]) and ("dropout" in told[-1]) == (
            draws and bool(dropout)
        ), (field, told)


def test_another_link_of_a_pipeline_keeps_the_bits(plan) -> None:
    stored = plan(GPU)
    now, told = with_machine_choices(stored, plan(GPU, "parallel.pipeline_link=host"))
    assert now.train.pipeline_link == "host"
    assert told == ["train.pipeline_link: auto -> host"]


def test_weights_that_stream_keep_the_bits_and_may_move_to_the_device(plan) -> None:
    recomputing = "train.activation_checkpointing=full", "train.compile=false"
    stored = plan(GPU, "parallel.stream=layers", "parallel.stream_micro_batches=2", *recomputing)
    fresh = plan(GPU, "parallel.stream=off", *recomputing)
    assert stored.stream is not None
    batch = {name: getattr(stored.train, name) for name in ("micro_batch_size", "accumulation")}
    fresh = fresh.model_copy(update={"train": fresh.train.model_copy(update=batch)})
    now, told = with_machine_choices(stored, fresh)
    assert (now.train.stream, now.stream) == ("off", None)
    assert any(line.startswith("train.stream: layers -> off") for line in told)
    # A matrix that is embedding and head, and trained, sums its gradients in another order where loads are shared.
    for tied, rounds in ((True, True), (False, False)):
        config = replace(stored.model.config, tie_embeddings=tied)
        shared = stored.model_copy(
            update={
                "model": stored.model.model_copy(update={"config": config}),
                "train": now.train.model_copy(update={"stream_micro_batches": 2}),
            }
        )
        _, told = with_machine_choices(shared, fresh)
        assert any(line.startswith("train.stream_micro_batches: 2 -> 1") for line in told)
        assert ("up to rounding" in told[-1]) == rounds, told


def test_cpus_have_one_link(plan) -> None:
    assert plan(CPU).train.pipeline_link == "host"
    assert plan(CPU, "parallel.pipeline_link=device").train.pipeline_link == "host"
    with pytest.raises(UserError, match="on CPUs, which have no device link"):
        plan(CPU, "parallel.pipeline=2", "parallel.pipeline_link=device")


def test_a_longer_run_keeps_everything_but_its_length(plan) -> None:
    words = ["train.max_steps=200"]
    stored = plan(CPU)
    longer = with_overrides(stored, plan(CPU, *words, "train.seed=5"), words)
    assert (longer.train.steps, longer.train.seed) == (200, 0)
    assert (stored.optimizer.decay_steps, longer.optimizer.decay_steps) == (20, 40)
    assert longer.optimizer.warmup_steps == stored.optimizer.warmup_steps


def test_another_evaluation_changes_nothing_else(plan) -> None:
    words = ["eval.every=7 steps", "checkpoint.keep=9"]
    stored = plan(CPU)
    now = with_overrides(stored, plan(CPU, *words, "train.max_steps=3"), words)
    assert (now.eval.every_steps, now.checkpoint.keep, now.train) == (7, 9, stored.train)


def test_devices_are_named_one_at_a_time() -> None:
    second = MI300X.model_copy(update={"index": 1})
    two = GPU.model_copy(update={"accelerators": (MI300X, second)})
    assert narrowed(two, None) == narrowed(two, "auto") == two
    for words in ("1", "cuda:1", "hip:1"):
        assert narrowed(two, words).accelerators == (second.model_copy(update={"number": 1}),)
    assert narrowed(two, "cpu").accelerators == ()
    with pytest.raises(UserError, match="no such device: '7'"):
        narrowed(two, "7")


def test_every_gpu_like_the_best_one_is_used_and_a_list_narrows() -> None:
    second, other = (MI300X.model_copy(update={"index": number}) for number in (1, 2))
    small = other.model_copy(
        update={"name": "AMD Radeon RX 6600", "arch": "gfx1032", "memory_bytes": 8 * 2**30}
    )
    mixed = GPU.model_copy(update={"accelerators": (MI300X, second, small)})
    machine, count = chosen_devices(mixed, None)
    assert ([gpu.index for gpu in machine.accelerators], count) == ([0, 1], 2)
    assert build_profile(machine).environment.value["HIP_VISIBLE_DEVICES"] == "0,1"
    assert chosen_devices(mixed, "1")[1] == 1
    assert chosen_devices(mixed, "cpu,cpu") == (narrowed(mixed, "cpu"), 2)
    with pytest.raises(UserError, match="named twice"):
        chosen_devices(mixed, "0,0")


def test_unequal_gpus_train_together_where_they_are_named() -> None:
    small = MI300X.model_copy(
        update={
            "index": 1,
            "name": "AMD Radeon RX 6600",
            "arch": "gfx1032",
            "memory_bytes": 8 * 2**30,
        }
    )
    mixed = GPU.model_copy(update={"accelerators": (MI300X, small)})
    best_alone, count = chosen_devices(mixed, None)
    assert (build_profile(best_alone).environment.value["HIP_VISIBLE_DEVICES"], count) == ("0", 1)
    machine, count = chosen_devices(mixed, "0,1")
    assert (machine.together, count) == (True, 2)
    assert build_profile(machine).environment.value["HIP_VISIBLE_DEVICES"] == "0,1"
    assert chosen_devices(mixed, "1")[0].together is False
    # One process takes the best of them.
    alone = build_profile(narrowed(mixed, "0,1"))
    assert (alone.peers, alone.environment.value["HIP_VISIBLE_DEVICES"]) == ((), "0")
    # A resumed run has them both again.
    assert same_devices(mixed, machine).together
    nvidia = small.model_copy(update={"vendor": "nvidia", "arch": "sm_86"})
    with pytest.raises(UserError, match="two vendors"):
        chosen_devices(mixed.model_copy(update={"accelerators": (MI300X, nvidia)}), "0,1")


def test_the_recipe_and_the_devices_agree_or_both_numbers_are_said() -> None:
    second = MI300X.model_copy(update={"index": 1})
    two = GPU.model_copy(update={"accelerators": (MI300X, second)})
    plain = load_recipe("demo").recipe
    asks = lambda **sizes: plain.model_copy(update={"parallel": Parallel(**sizes)})  # noqa: E731
    assert device_count(plain, two, 2, user_named=False) == (two, 2)
    assert device_count(asks(replicate=1, shard=1), two, 2, user_named=False)[1] == 1
    in_backward = plain.optimizer.model_copy(update={"kind": "adafactor", "fused_backward": True})
    assert (
        device_count(plain.model_copy(update={"optimizer": in_backward}), two, 2, user_named=False)[
            1
        ]
        == 1
    )
    for sizes, named in (({"shard": 4}, False), ({"replicate": 1, "shard": 1}, True)):
        with pytest.raises(UserError, match=r"parallel asks for (4|1) devices, and there are 2"):
            device_count(asks(**sizes), two, 2, user_named=named)


def test_a_chosen_device_outlives_a_stop() -> None:
    second = MI300X.model_copy(update={"index": 1})
    two = GPU.model_copy(update={"accelerators": (MI300X, second)})
    assert same_devices(two, narrowed(two, "1")) == narrowed(two, "1")
    assert same_devices(two, narrowed(two, "cpu")).accelerators == ()
    assert same_devices(CPU, two) == CPU


@pytest.mark.parametrize(
    ("devices", "size"),
    [("cpu", 1), ("cpu,cpu", 2), ("cpu,cpu,cpu", 1), ("cpu," * 5 + "cpu", 2)],
)
@pytest.mark.parametrize("axis", ["context", "expert"])
def test_as_many_devices_as_possible_go_on_to_share_sequences_or_experts(
    tmp_path, plan, devices, size, axis
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"extends: demo\nparallel: {{{axis}: 4}}\n")
    loaded = load_recipe(recipe)
    before = plan(CPU).model_copy(
        update={"train": plan(CPU).train.model_copy(update={"replicate": 4, axis: 4})}
    )
    flow = SimpleNamespace(folder=SimpleNamespace(recipe=recipe))
    now = find_devices_now(flow, loaded, before, CPU, (), devices)
    assert now.count == len(devices.split(","))
    assert getattr(now.loaded_recipe.recipe.parallel, axis) == size


COSINE = ("optimizer.schedule=cosine", "optimizer.learning_rate=1e-4", "optimizer.warmup=2 steps")


@pytest.mark.parametrize(
    ("schedule", "old", "new", "step", "expected"),
    [
        # 0.5 (1 + cos(pi 10 / 10)) of the last of 12 steps, then the half of 22 steps.
        (
            "cosine",
            "max_steps=12",
            "max_steps=22",
            12,
            "the cosine schedule is stretched to 22 steps",
        ),
        ("linear", "max_steps=12", "max_steps=22", 12, "the linear schedule is stretched"),
        (
            "{kind: wsd, decay: 20%}",
            "max_steps=20",
            "max_steps=40",
            20,
            "the decay moves to the end",
        ),
        ("cosine", "max_steps=12", "max_steps=22", 7, "rises"),
        ("cosine", "max_time=1h", "max_time=2h", 12, "stretched to 2.0 h"),
        ("cosine", "max_steps=12", "max_time=2h", 12, "stretched to 2.0 h"),
        # A constant rate stays, a shorter run falls faster, and a warmup rises by itself.
        ("constant", "max_steps=12", "max_steps=22", 12, None),
        ("cosine", "max_steps=22", "max_steps=14", 12, None),
        ("cosine", "max_steps=12", "max_steps=22", 1, None),
        ("cosine", "max_steps=12", "max_steps=22", 0, None),
        ("{kind: wsd, decay: 20%}", "max_steps=20", "max_steps=40", 10, None),
    ],
)
def test_a_rate_that_rises_again_is_named(plan, schedule, old, new, step, expected):
    old_plan, new_plan = (
        plan(CPU, *COSINE, f"optimizer.schedule={schedule}", f"train.{length}")
        for length in (old, new)
    )
    sentence = rising_rate(old_plan, new_plan, step=step, seconds=3600.0)
    assert (sentence is None) == (expected is None)
    assert expected is None or expected in sentence


def test_the_two_rates_are_those_of_the_steps(plan):
    """Step 12 of 12 after 2 of warmup: (1 + cos(9 pi / 10)) / 2 = 0.0245; step 13 of 22: (1 + cos(pi / 2)) / 2."""
    old_plan, new_plan = (plan(CPU, *COSINE, f"train.max_steps={steps}") for steps in (12, 22))
    sentence = rising_rate(old_plan, new_plan, step=12, seconds=0.0)
    assert "rises from 2.4e-06 at step 12 to 5e-05 at step 13" in sentence
