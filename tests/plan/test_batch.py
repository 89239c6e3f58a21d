"""Steps and their cut: what a step holds never depends on the machine."""

import pytest
from plan_help import SMALL, gpu_machine, loaded, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.facts.presets import preset
from bloomery.model.configs import build_config
from bloomery.plan.batch import CPU_TOKENS, choose_tokens_per_step
from bloomery.plan.page_batch import batch_lines
from bloomery.plan.types import DatasetFacts
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Model


def test_the_step_grows_with_the_model_by_the_published_law():
    # 0.292 (120 N^2)^0.3271 at N = 124,242,432: C = 1.852e18, 276,000 tokens, 2^8.07 rows of 1,024.
    assert choose_tokens_per_step("auto", preset("go-coder-small"), 1024).value == 262_144
    # N = 139,584: C = 2.338e12, 3,245 tokens, 2^4.66 rows of 128.
    assert (
        choose_tokens_per_step("auto", build_config(Model(**SMALL), vocab_size=None), 128).value
        == 4096
    )


@pytest.mark.parametrize(
    "where", [machine(), machine(cores=64), gpu_machine("RX 6700 XT"), gpu_machine("H200")]
)
def test_one_recipe_is_one_run_everywhere(where):
    plan = planned(loaded(train={"tokens_per_step": "auto"}), where)
    assert plan.train.tokens_per_step == 4096
    assert plan.train.micro_batch_size * plan.train.accumulation == 4096 // 128


def test_a_step_of_partial_rows_is_refused_with_its_neighbours():
    with pytest.raises(UserError) as error:
        choose_tokens_per_step(1000, preset("go-coder-tiny"), 128)
    assert error.value.where == "train.tokens_per_step"
    assert "896 or 1024" in error.value.fix


def test_a_step_shorter_than_a_row_names_one_row():
    with pytest.raises(UserError) as error:
        choose_tokens_per_step(100, preset("go-coder-tiny"), 128)
    assert error.value.fix == "set train.tokens_per_step=128"


def test_a_micro_batch_must_divide_the_step():
    with pytest.raises(UserError) as error:
        planned(loaded(train={"micro_batch_size": 3}), machine())
    assert error.value.fix == "set train.micro_batch_size to one of 1, 2, 4, 8"


@pytest.mark.parametrize("gpu", ["RX 6600", "RX 6700 XT", "RX 7900 XTX", "RTX 4090", "H200"])
@pytest.mark.parametrize("name", ["go-coder-125m", "qwen2.5-1.5b-lora"])
def test_a_gpu_takes_the_fastest_micro_batch_that_fits(name, gpu):
    """By the plan's own estimate, which does not tell sizes apart within a hundredth of the time: of these the largest
    whose memory surely fits.
    """

    def plan_of(*edits: str):
        recipe = load_recipe(name, ["train.batch_size=64", *edits])
        return planned(recipe, gpu_machine(gpu))

    chosen = plan_of("train.micro_batch_size=auto")
    if not chosen.fits:
        return
    checkpointing = f"train.activation_checkpointing={chosen.train.activation_checkpointing}"
    for size in (1, 2, 4, 8, 16, 32, 64):
        other = plan_of(f"train.micro_batch_size={size}", checkpointing)
        if other.fits:
            seconds = (chosen.step_seconds.value, other.step_seconds.value)
            assert seconds[0] <= 1.01 * seconds[1], size
            is_as_fast = seconds[1] <= seconds[0]
            surely_fits = other.memory.high <= other.memory.limit
            assert not (is_as_fast and surely_fits and size > chosen.train.micro_batch_size), size


def test_of_equally_fast_micro_batches_one_is_taken_whose_memory_surely_fits():
    def plan_of(*edits: str):
        return planned(load_recipe("qwen2.5-1.5b-lora", [*edits]), gpu_machine("RX 6700 XT"))

    chosen = plan_of()
    twice = plan_of(f"train.micro_batch_size={2 * chosen.train.micro_batch_size}")
    assert twice.step_seconds.value == pytest.approx(chosen.step_seconds.value, rel=0.01)
    assert twice.fits and twice.memory.high > twice.memory.limit
    assert chosen.memory.high <= chosen.memory.limit


def test_logits_that_are_computed_again_cost_more_than_micro_batches():
    recipe = load_recipe("go-coder-125m")
    sizes = {}
    for gpu in ("RX 6700 XT", "RTX 4090"):
        plan = planned(recipe, gpu_machine(gpu))
        reasons = {choice.key: choice.reason for choice in plan.choices}
        sizes[gpu] = (plan.train.micro_batch_size, reasons["train.micro_batch_size"])
    assert sizes["RX 6700 XT"] == (4, "the fastest that fits: a step with 16 takes 9.1% longer")
    assert sizes["RTX 4090"][0] == 16


def test_several_devices_take_the_fastest_micro_batch_that_fits():
    edits = ["parallel.replicate=4", "train.micro_batch_size=auto"]
    chosen = planned(
        load_recipe("go-coder-125m", ["train.batch_size=64", *edits]),
        gpu_machine("RX 6700 XT"),
        gpus=4,
    )
    assert chosen.train.micro_batch_size < 16
    largest = planned(
        load_recipe(
            "go-coder-125m",
            ["train.batch_size=64", "parallel.replicate=4", "train.micro_batch_size=16"],
        ),
        gpu_machine("RX 6700 XT"),
        gpus=4,
    )
    assert largest.fits and chosen.step_seconds.value < largest.step_seconds.value


def test_a_processor_keeps_to_its_caches():
    plan = planned(loaded(train={"tokens_per_step": 128 * 256}), machine())
    assert plan.train.micro_batch_size * 128 == CPU_TOKENS


def test_an_odd_number_of_rows_is_cut_into_single_rows():
    plan = planned(loaded(train={"tokens_per_step": 128 * 9}), machine())
    assert (plan.train.micro_batch_size, plan.train.accumulation) == (1, 9)


def test_checkpointing_comes_when_nothing_else_fits():
    recipe = loaded(
        model={"hidden_size": 2048, "num_layers": 16, "num_heads": 16, "max_positions": 16384},
        data={"sequence_length": 16384},
        train={"tokens_per_step": 16384},
    )
    plan = planned(recipe, gpu_machine("RX 7900 XTX"))
    assert plan.train.activation_checkpointing == "full"
    assert plan.fits


def test_a_run_that_does_not_fit_says_what_would_help():
    large = {"micro_batch_size": 8, "activation_checkpointing": "none"}
    report = reported(loaded(train=large), machine(free_gib=0.411))
    assert not report.plan.fits
    assert "train.micro_batch_size=1" in report.plan.suggestions
    assert all("in total" in fix.saves for fix in report.suggestions)


def test_a_small_dataset_has_steps_to_learn_in():
    """The batch that suits the model alone would be more than an epoch of it."""
    config = preset("go-coder-small")
    for rows, expected in [
        (3, 1),
        (40, 1),
        (64, 2),
        (1000, 16),
        (8191, 128),
        (8192, 256),
        (10**6, 256),
    ]:
        assert (
            choose_tokens_per_step("auto", config, 1024, sequences_per_epoch=rows).value
            == expected * 1024
        )
    said = choose_tokens_per_step("auto", config, 1024, sequences_per_epoch=1000).reason
    assert "62 steps" in said and "262,144" in said


def test_fine_tuning_takes_smaller_steps_than_pretraining():
    config = preset("go-coder-small")
    assert choose_tokens_per_step("auto", config, 2048, tuning=True).value == 65_536
    assert choose_tokens_per_step("auto", config, 1000, tuning=True).value == 65_000
    small = build_config(Model(**SMALL), vocab_size=None)
    assert choose_tokens_per_step("auto", small, 128, tuning=True).value == 4096


def test_two_hundred_conversations_plan_something_sensible():
    """They pack into three sequences; nothing but the data is named."""
    dataset = DatasetFacts(sequences_per_epoch=3, tokens=11_000, vocab_size=256)
    recipe = loaded(objective={"kind": "sft"}, train={"epochs": 3, "tokens_per_step": "auto"})
    report = reported(recipe, machine(), dataset=dataset)
    plan = report.plan
    assert (plan.train.steps, plan.epochs) == (9, 3.0)
    assert "3 epochs" in " ".join(batch_lines(plan))
    assert not [doubt for doubt in report.warnings if "epochs" in doubt]


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5-7b-qlora",
        "qwen2.5-1.5b-lora",
        "qwen2.5-1.5b-dpo-lora",
        "qwen2.5-1.5b-reward-lora",
        "llama3.1-8b-lora",
    ],
)
def test_packaged_fine_tuning_follows_a_small_dataset(name):
    recipe = load_recipe(name).recipe
    assert recipe.train.length.unit == "epochs"
    assert recipe.train.tokens_per_step == "auto"


@pytest.mark.parametrize(
    ("objective", "epochs", "edit"),
    [("pretrain", 4, 1), ("sft", 5, 3), ("dpo", 3, 1), ("reward", 2, 1)],
)
def test_more_than_a_few_epochs_are_warned_of_with_the_edit(objective, epochs, edit):
    """In `plan`, `--dry-run` and `train`, which all tell a plan's contradictions."""
    dataset = DatasetFacts(sequences_per_epoch=80, tokens=10_000, vocab_size=256)

    def doubts(steps: int) -> list[str]:
        recipe = loaded(
            objective={"kind": objective}, train={"max_steps": steps, "tokens_per_step": 1024}
        )
        return [
            said
            for said in reported(recipe, machine(), dataset=dataset).warnings
            if "epochs" in said
        ]

    assert doubts(10 * epochs) == []
    (said,) = doubts(10 * epochs + 10)
    assert f"{epochs + 1} epochs on its 80 sequences" in said
    assert said.endswith(f"set train.epochs={edit}")


@pytest.mark.parametrize(
    ("vocabulary", "where", "keeps"),
    [(4096, machine(), True), (4097, machine(), False), (4097, gpu_machine("H200"), True)],
)
def test_the_plan_says_which_logits_backward_keeps(vocabulary, where, keeps):
    """A CPU computes those of 4,096 entries at a time, and again in backward."""
    plan = planned(loaded(model={"vocab_size": vocabulary}), where)
    (reason,) = (each.reason for each in plan.choices if each.key == "model.score_chunk")
    assert ("kept for backward" in reason) == keeps
