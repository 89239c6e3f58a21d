"""Plans of pipelines: the cut, the bubble and the passes in flight against hand computation; what is refused."""

import pytest
from plan_help import gpu_machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.plan.pipeline import balanced_groups, bubble, most_in_flight
from bloomery.recipe.load import load_recipe

# The shape of Llama 30B, trained in full with states of a lean optimizer.
THIRTY_B = (
    "model.preset=null",
    "model.family=llama",
    "model.vocab_size=32000",
    "model.hidden_size=6656",
    "model.intermediate_size=17920",
    "model.num_layers=60",
    "model.num_heads=52",
    "model.num_kv_heads=52",
    "model.max_positions=2048",
    "tokenizer.train.vocab_size=32000",
    "data.sequence_length=2048",
    "train.batch_size=16",
    "train.precision=bfloat16-pure",
    "optimizer.kind=adafactor",
    "optimizer.stochastic_rounding=true",
)


def test_a_cut_counts_the_head_as_what_it_costs():
    """Eight layers and a head of two: 5 and 3 + 2. A head of one layer: the slower of 4 and 5, either way."""
    assert balanced_groups([1.0] * 8, stages=2, head_cost=2.0) == (5, 3)
    assert balanced_groups([1.0] * 8, stages=2, head_cost=1.0) in ((4, 4), (5, 3))
    assert balanced_groups([1.0] * 60, stages=4, head_cost=0.4) == (15, 15, 15, 15)
    assert balanced_groups([1.0] * 12, stages=4, head_cost=3.0) == (3, 4, 4, 1)
    assert balanced_groups([3.0, 1.0, 1.0, 1.0], stages=2) == (1, 3)
    assert balanced_groups([1.0, 1.0, 1.0, 1.0], stages=2, embedding_cost=2.0) == (1, 3)


def test_a_stage_that_is_full_hands_layers_to_others():
    groups = balanced_groups([1.0] * 60, stages=4, head_cost=0.4, most_layers=(13, 20, 20, 20))
    assert groups == (13, 16, 16, 15)
    assert balanced_groups([1.0] * 60, stages=4, most_layers=(13, 13, 13, 13)) is None


def test_interleaved_groups_make_even_stages():
    """Groups of 7 and 8 of 60 layers: no stage has two of the larger ones and another two of the smaller ones."""
    groups = balanced_groups([1.0] * 60, stages=4, chunks=2)
    assert groups is not None
    assert sorted(set(groups)) == [7, 8]
    assert [groups[stage] + groups[stage + 4] for stage in range(4)] == [15, 15, 15, 15]


def test_passes_in_flight_are_those_of_the_order():
    """1F1B: one for each stage that follows; interleaved 5 groups for 2 x 2 and 11 for 4 x 2; GPipe all."""
    first = {"stage": 0, "micro_batches": 16}
    assert [
        most_in_flight("1f1b", stages=4, stage=stage, micro_batches=16) for stage in range(4)
    ] == [4, 3, 2, 1]
    assert most_in_flight("interleaved", stages=2, chunks=2, **first) == 5
    assert most_in_flight("interleaved", stages=4, chunks=2, **first) == 11
    assert most_in_flight("gpipe", stages=4, **first) == 16
    assert most_in_flight("1f1b", stages=4, stage=0, micro_batches=2) == 2


def chosen(*words, gpus=2, gpu="RTX 4090"):
    """The layout of a recipe that names its pipeline."""
    plan = planned(load_recipe("go-coder-125m", words), gpu_machine(gpu), gpus=gpus)
    assert plan.parallel is not None
    return plan, plan.parallel.layout


def test_a_step_takes_the_time_of_the_slowest_stage_and_the_bubble():
    plan, layout = chosen("parallel.pipeline=4", gpus=4)
    slowest = max(layout.stage_seconds)
    waiting = (sum(layout.stage_seconds) - slowest) / layout.accumulation
    assert layout.bubble_seconds == pytest.approx(waiting)
    # That of equal stages is the formula of the papers: all micro-batches, and 3 more of them.
    even = slowest * 3 / layout.accumulation
    assert layout.bubble_seconds <= even
    assert bubble(stages=4, micro_batches=layout.accumulation) == pytest.approx(
        even / (slowest + even)
    )
    assert plan.step_seconds is not None
    assert plan.step_seconds.value > slowest + layout.bubble_seconds + layout.exposed_seconds


def test_interleaved_stages_wait_half_as_long():
    _, plain = chosen("parallel.pipeline=2", "parallel.pipeline_microbatches=8")
    _, interleaved = chosen(
        "parallel.pipeline=2",
        "parallel.pipeline_microbatches=8",
        "parallel.pipeline_schedule=interleaved",
    )
    assert (plain.pipeline_chunks, interleaved.pipeline_chunks) == (1, 2)
    assert len(interleaved.pipeline_layers) == 4
    assert interleaved.bubble_seconds == pytest.approx(plain.bubble_seconds / 2, rel=0.2)
    sent = [layout.communication_seconds["pipeline"] for layout in (plain, interleaved)]
    assert sent[1] == pytest.approx(3 * sent[0])  # three edges instead of one


def test_the_recipe_names_the_micro_batches():
    plan, _ = chosen("parallel.pipeline=2", "parallel.pipeline_microbatches=4")
    assert (plan.train.micro_batch_size, plan.train.accumulation) == (4, 4)


@pytest.mark.parametrize(
    ("words", "where", "match"),
    [
        (["pipeline=4", "pipeline_chunks=2"], "parallel.pipeline_chunks", "one group of layers"),
        (
            ["pipeline_schedule=interleaved", "pipeline_chunks=1"],
            "parallel.pipeline_chunks",
            "two groups",
        ),
        (["pipeline=16"], "parallel.pipeline", "16 layers, and the model has 12"),
        (
            ["pipeline=8", "pipeline_schedule=interleaved"],
            "parallel.pipeline",
            "8 stages of 2 groups need 16 layers",
        ),
        (
            ["pipeline=2", "pipeline_microbatches=5"],
            "parallel.pipeline_microbatches",
            "do not divide",
        ),
        (
            ["pipeline=3", "pipeline_microbatches=4", "pipeline_schedule=interleaved"],
            "parallel.pipeline_microbatches",
            "in rounds of 3",
        ),
        (
            ["pipeline=3", "pipeline_schedule=interleaved"],
            "parallel.pipeline_schedule",
            "rounds of 3",
        ),
        (
            ["pipeline=2", "replicate=3"],
            "train.tokens_per_step",
            "do not divide among the 3 copies",
        ),
    ],
)
def test_a_pipeline_that_cannot_train_is_refused(words, where, match):
    """Sixteen sequences a step, twelve layers."""
    loaded = load_recipe("go-coder-125m", [f"parallel.{word}" for word in words])
    with pytest.raises(UserError, match=match) as refused:
        planned(loaded, gpu_machine("RTX 4090"))
    assert refused.value.where == where
    assert refused.value.fix


def test_micro_batches_that_contradict_their_size_are_refused():
    words = ["parallel.pipeline=2", "parallel.pipeline_microbatches=4", "train.micro_batch_size=2"]
    with pytest.raises(UserError, match="4 micro-batches of 2 sequences") as refused:
        planned(load_recipe("go-coder-125m", words), gpu_machine("RTX 4090"))
    assert "train.micro_batch_size=4" in refused.value.fix

    # Of a whole number of rounds first: no size of one micro-batch fills two interleaved stages.
    words = [
        "parallel.pipeline=2",
        "parallel.pipeline_schedule=interleaved",
        "parallel.pipeline_microbatches=1",
        "train.micro_batch_size=2",
    ]
    with pytest.raises(UserError, match="in rounds of 2, not 1"):
        planned(load_recipe("go-coder-125m", words), gpu_machine("RTX 4090"))


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (2, "2 micro-batches per step do not fill 4 stages: each waits 60%"),  # 3 / (2 + 3)
        (1, "1 micro-batch per step does not fill 4 stages: each waits 75%"),
    ],
)
def test_a_step_that_does_not_fill_its_stages_is_planned_with_a_warning(count, expected):
    words = ["parallel.pipeline=4", f"parallel.pipeline_microbatches={count}"]
    report = reported(load_recipe("go-coder-125m", words), gpu_machine("RTX 4090"), gpus=4)
    assert [warning for warning in report.warnings if warning.startswith(expected)]


def test_a_30b_goes_over_four_gaming_cards():
    """65 GB of weights in two bytes, and as many of gradients: a quarter of both is 30 GiB, and no card holds it."""
    plan = planned(
        load_recipe("go-coder-125m", [*THIRTY_B, "parallel.pipeline=4"]),
        gpu_machine("RTX 4090"),
        gpus=4,
    )
    assert plan.parallel is not None
    layout = plan.parallel.layout
    assert sum(layout.pipeline_layers) == 60
    assert max(layout.stage_layers) <= 16
    assert layout.accumulation >= 4
    weights_and_gradients = 4 * 32.5e9 / 4
    assert plan.memory.total > weights_and_gradients
