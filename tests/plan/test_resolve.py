"""Plans hold no auto, explain themselves, refuse what is not built, and survive the disk."""

import json
import subprocess
import sys

import pytest
from plan_help import gpu_machine, loaded, machine, planned, reported

import bloomery
from bloomery.core.errors import UserError
from bloomery.plan.store import read_plan, write_plan
from bloomery.plan.types import DatasetFacts, RunPlan


@pytest.mark.parametrize(
    "where", [machine(), machine(flags=("avx2",)), gpu_machine("MI300X"), gpu_machine("RX 6700 XT")]
)
def test_nothing_is_left_to_decide(where):
    plan = planned(
        loaded(train={"epochs": 1}),
        where,
        dataset=DatasetFacts(sequences_per_epoch=99, tokens=12_672, vocab_size=256),
    )
    decided = plan.model_dump_json()
    # Known at the start: each GPU's own limit, and which link between stages works.
    for key in ("max_gpu_temperature", "pipeline_link"):
        decided = decided.replace(f'"{key}":"auto"', "")
    assert '"auto"' not in decided
    assert all(decision.reason for decision in plan.choices)


def test_a_plan_survives_the_disk(tmp_path):
    plan = planned(loaded(optimizer={"schedule": "wsd"}), machine())
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_missing_or_damaged_plan_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no plan yet"):
        read_plan(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text('{"name": "x"')
    with pytest.raises(UserError, match="cannot be read"):
        read_plan(tmp_path / "plan.json")


def test_rows_longer_than_learned_positions_are_refused():
    gpt2 = {"family": "gpt2", "max_positions": 64}
    with pytest.raises(UserError, match="64 learned positions") as error:
        planned(loaded(model=gpt2), machine())
    assert error.value.where == "data.sequence_length"


def test_a_vocabulary_without_embeddings_is_refused():
    with pytest.raises(UserError, match="300"):
        planned(
            loaded(),
            machine(),
            dataset=DatasetFacts(sequences_per_epoch=9, tokens=999, vocab_size=300),
        )


def test_an_attention_that_cannot_honour_the_recipe_is_refused():
    with pytest.raises(UserError, match="cannot mask documents") as error:
        planned(loaded(train={"attention": "sdpa"}), machine())
    assert error.value.where == "train.attention"


def test_compiling_must_pay_for_itself_on_a_processor():
    short = planned(loaded(), machine())
    long = planned(loaded(train={"max_steps": "1M"}), machine())
    timed = planned(loaded(train={"max_time": "1h"}), machine())
    assert (short.train.compile, long.train.compile, timed.train.compile) == (False, True, True)


def test_the_processor_repeats_to_the_last_bit():
    assert planned(loaded(), machine()).train.deterministic
    assert not planned(loaded(), gpu_machine("H200")).train.deterministic
    assert planned(loaded(train={"deterministic": True}), gpu_machine("H200")).train.deterministic


@pytest.mark.parametrize(
    ("sections", "doubt"),
    [
        ({"optimizer": {"warmup": "500 steps"}}, "never reaches its peak"),
        (
            {"train": {"max_steps": 1}, "optimizer": {"warmup": "1 steps"}},
            "warmup lasts 1 step and the run 1:",
        ),
        (
            {"optimizer": {"warmup": "50%", "schedule": {"kind": "wsd", "decay": "80%"}}},
            "more than the run's 100",
        ),
        ({"train": {"precision": "float16"}}, "five to nine times slower"),
        ({"data": {"pin_memory": True}}, "has no effect on a CPU"),
    ],
)
def test_settings_that_contradict_the_run_are_said(sections, doubt):
    assert any(doubt in text for text in reported(loaded(**sections), machine()).warnings)


def test_python_asks_for_a_plan_by_calling_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = bloomery.plan("go-coder-125m", gpu="RX 6700 XT", train={"max_steps": 7})
    assert isinstance(report.plan, RunPlan)
    assert report.plan.train.precision == "float16" and report.plan.train.steps == 7


def test_planning_needs_no_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from bloomery.cli import main\n"
        "main(['plan', 'go-coder-125m', '--gpu', 'RX 6700 XT', '--json'])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["fits"] is True


@pytest.mark.parametrize(
    ("flags", "precision", "taken"),
    [
        (("avx2", "avx512f", "avx512_bf16"), "bfloat16", "compiled"),
        (("avx2", "avx512f"), "float32", "compiled"),
        (("avx2", "avx512f"), "bfloat16", "mask"),
        (("avx2",), "float32", "compiled"),
        (("avx2",), "bfloat16", "mask"),
        ((), "float32", "mask"),
    ],
)
def test_compiled_attention_is_taken_where_it_is_quicker(
    flags: tuple[str, ...], precision: str, taken: str
) -> None:
    plan = planned(loaded(train={"precision": precision}), machine(flags=flags))
    assert plan.model.attention == taken
    without = machine(flags=flags)
    without = without.model_copy(
        update={"host": without.host.model_copy(update={"compiler": None})}
    )
    assert planned(loaded(train={"precision": precision}), without).model.attention == "mask"
