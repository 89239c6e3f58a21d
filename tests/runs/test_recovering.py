"""`--recover`: a run whose kernels crash goes on one rung safer; without it the last line is the command that does."""

import json
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from plans_of_runs import plan_of
from runs_of_bloomery import assert_bitwise_equal, losses

from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.launch.exit_codes import (
    DIVERGED,
    FAILED,
    KERNEL_FAILED,
    LINK_FAILED,
    OUT_OF_MEMORY,
    UNSOUND,
)
from bloomery.launch.stage_ends import StageResult
from bloomery.monitor.events import Recovered, Resumed, RunEnded, read_events
from bloomery.plan.store import read_plan
from bloomery.recipe.load import load_recipe
from bloomery.runs.lifecycle import resume, start
from bloomery.runs.resume_plan import FallbackAfter, next_fallback, store_fallback, take_fallback

SEGV, ABRT, KILL = signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL
HALVED = "micro-batch 4 -> 2, gradient accumulation 1 -> 2; tokens per step unchanged"
INSTEAD = "; changes the training"
HIP = "HIP error: an illegal memory access was encountered"


def run_with(workshop: Path, *deaths: object, recover: bool, overrides: tuple[str, ...] = ()):
    (workshop / "runs/deaths.json").write_text(json.dumps(deaths))
    run_dir = workshop / "runs/one"
    try:
        # saved before it dies
        loaded = load_recipe("tiny.yaml", ("checkpoint.async_save=false", *overrides))
        code = start(loaded, run_dir=run_dir, recover=recover, quiet=True).code
    except UserError as error:
        return error
    return code


def of(workshop: Path, kind: type) -> list:
    return [
        event
        for event in read_events(workshop / "runs/one/events.jsonl")
        if isinstance(event, kind)
    ]


def test_a_segfault_a_hip_error_and_a_kill_are_each_answered_by_a_safer_rung(
    paper_workshop: Path,
) -> None:
    deaths = (
        [{"attention": "mask"}, 5, SEGV],
        [{"precision": "bfloat16"}, 8, HIP],
        [{"precision": "float32", "rows": 2}, 11, KILL],
    )
    code = run_with(paper_workshop, *deaths, recover=True, overrides=("train.precision=bfloat16",))
    assert code == 0
    told = of(paper_workshop, Recovered)
    assert [event.step for event in told] == [4, 7, 10]
    assert [event.action for event in told] == [
        "restarted: attention mask -> blockwise",
        "restarted: precision bfloat16 -> float32; more memory, slower",
        "restarted: micro-batch 2 -> 1, gradient accumulation 2 -> 4; tokens per step unchanged",
    ]
    assert "SIGSEGV" in told[0].reason
    assert HIP in told[1].reason
    assert "SIGKILL" in told[2].reason
    saved = (paper_workshop / "runs/one/checkpoints").exists()  # paper has none to go on from
    assert [event.step for event in of(paper_workshop, Resumed)] == (
        [3, 6, 9] if saved else [0, 0, 0]
    )
    plan = read_plan(paper_workshop / "runs/one/plan.json")
    assert (plan.model.attention, plan.train.precision, plan.train.micro_batch_size) == (
        "blockwise",
        "float32",
        1,
    )
    assert plan.train.tokens_per_step == 256
    reason = {decision.key: decision.reason for decision in plan.choices}
    assert "SIGSEGV" in reason["train.attention"]
    assert len(losses(paper_workshop / "runs/one")) == 16
    assert not (paper_workshop / "runs/one/fallback.json").exists()
    assert of(paper_workshop, RunEnded)[-1].status == "done"


def test_after_three_restarts_it_stops_and_says_how_to_go_on(paper_workshop: Path) -> None:
    error = run_with(
        paper_workshop,
        [{}, 2, ABRT],
        recover=True,
        overrides=("train.precision=bfloat16", "train.micro_batch_size=4"),
    )
    assert isinstance(error, UserError)
    assert len(of(paper_workshop, Recovered)) == 3
    assert "(after 3 restarts)" in error.problem
    assert (
        str(error)
        .splitlines()[-1]
        .strip()
        .startswith("`bloomery resume one --recover` restarts with: ")
    )


def test_without_the_flag_the_last_line_is_the_command_and_the_command_takes_the_rung(
    paper_workshop: Path,
) -> None:
    error = run_with(paper_workshop, [{"attention": "mask"}, 5, SEGV], recover=False)
    last = str(error).splitlines()[-1].strip()
    assert last == "`bloomery resume one --recover` restarts with: attention mask -> blockwise"
    assert of(paper_workshop, Recovered) == []
    assert read_plan(paper_workshop / "runs/one/plan.json").model.attention == "mask"

    assert resume(paper_workshop / "runs/one", recover=True, quiet=True).code == 0
    (told,) = of(paper_workshop, Recovered)
    assert told.action == "restarted: attention mask -> blockwise"
    assert read_plan(paper_workshop / "runs/one/plan.json").model.attention == "blockwise"


def test_a_resume_without_the_flag_changes_nothing(dying_workshop: Path, undisturbed) -> None:
    run_with(dying_workshop, [{"attention": "mask"}, 5, SEGV], recover=False)
    (dying_workshop / "runs/deaths.json").write_text("[]")
    assert resume(dying_workshop / "runs/one", quiet=True).code == 0
    assert of(dying_workshop, Recovered) == []
    assert_bitwise_equal(dying_workshop / "runs/one", undisturbed.run_dir)
    assert not (dying_workshop / "runs/one/fallback.json").exists()


def test_a_mistake_is_not_answered_by_restarts(paper_workshop: Path) -> None:
    error = run_with(
        paper_workshop, [{}, 3, "shape '[2, 3]' is invalid for input of size 7"], recover=True
    )
    assert isinstance(error, UserError)
    assert of(paper_workshop, Recovered) == []
    assert "--recover" not in error.fix


def ending(code: int, *tail: str, problem: str = "") -> StageResult:
    report = {"problem": problem, "where": "", "fix": "", "code": 1} if problem else None
    return StageResult("train", code, report, tail)


@pytest.mark.parametrize(
    ("died", "action"),
    [
        (ending(-SEGV), "train.compile true -> false"),
        (
            ending(-ABRT, "Memory access fault by GPU node-1 on address 0x7f"),
            "train.compile true -> false",
        ),
        (
            ending(FAILED, "RuntimeError: HIP error: invalid device function"),
            "train.compile true -> false",
        ),
        (
            ending(FAILED, "torch._inductor.exc.InductorError: CppCompileError", "", "Set X=1"),
            "train.compile true -> false",
        ),
        (
            ending(UNSOUND, problem="flex attention computes wrong numbers"),
            "attention flex -> blockwise",
        ),
        (ending(-KILL), HALVED),
        (ending(OUT_OF_MEMORY, problem="memory ran out"), HALVED),
        (
            ending(LINK_FAILED, problem="rank 1 received wrong numbers from rank 0"),
            "parallel.pipeline_link auto -> host; same numbers, slower transfers",
        ),
        (
            ending(KERNEL_FAILED, problem="the Triton kernel forward failed: PermissionError"),
            "attention flex -> blockwise",
        ),
        (ending(FAILED, "KeyError: 'x'"), None),
        (ending(FAILED, problem="the recipe is wrong"), None),
        (
            ending(DIVERGED, problem="the loss is not a finite number"),
            f"learning rate 0.01 -> 0.005{INSTEAD}",
        ),
        (ending(-signal.SIGTERM), None),
        (StageResult("prepare", -SEGV, None, ()), None),
    ],
)
def test_the_first_rung_follows_the_death(died: StageResult, action: str | None) -> None:
    plan = plan_of(compile=True, attention="flex", micro_batch_size=4, accumulation=1)
    fallback_after = next_fallback(plan, died)
    assert (fallback_after.fallback.action if fallback_after else None) == action


def test_a_kernel_that_was_not_asked_for_is_replaced_unasked() -> None:
    died = ending(KERNEL_FAILED, problem="the Triton kernel forward failed: PermissionError")
    chosen = plan_of(attention="triton", device="cuda")
    fallback_after = next_fallback(chosen, died)
    assert fallback_after.unasked
    assert fallback_after.fallback.action == "attention triton -> blockwise; slower"
    assert fallback_after.fallback.plan.recovered == ("model.attention",)
    model = chosen.model.model_copy(update={"attention_is_set": True})
    fallback_after = next_fallback(chosen.model_copy(update={"model": model}), died)
    assert not fallback_after.unasked


def without_triton(plan):
    """A plan of another machine: here its kernels cannot even be imported."""
    return plan.model_copy(update={"model": plan.model.model_copy(update={"attention": "triton"})})


@pytest.mark.skipif(find_spec("triton") is not None, reason="its kernels would be launched here")
def test_ranks_change_to_blockwise_together(dying_workshop: Path) -> None:
    """The ranks of a real run, which end in the check before the first step; the launcher starts all of them again."""
    (dying_workshop / "runs/deaths.json").write_text("[]")
    loaded = load_recipe("tiny.yaml", ("train.max_steps=2",))
    run_dir = dying_workshop / "runs/one"
    assert (
        start(loaded, run_dir=run_dir, devices="cpu,cpu", quiet=True, edit=without_triton).code == 0
    )
    (event,) = of(dying_workshop, Recovered)
    assert "ModuleNotFoundError" in event.reason
    assert event.action == "restarted: attention triton -> blockwise; slower"
    assert read_plan(run_dir / "plan.json").model.attention == "blockwise"
    assert len(losses(run_dir)) == 2


def test_the_ladder_has_an_end() -> None:
    plan = plan_of(
        compile=True, attention="flex", micro_batch_size=6, accumulation=2, precision="bfloat16"
    )
    actions = []
    while (fallback_after := next_fallback(plan, ending(-SEGV))) is not None:
        plan = fallback_after.fallback.plan
        actions.append(fallback_after.fallback.action.partition(",")[0])
    assert actions == [
        "train.compile true -> false",
        "attention flex -> blockwise",
        "precision bfloat16 -> float32; more memory",
        "micro-batch 6 -> 3",
        "micro-batch 3 -> 1",
    ]
    assert plan.train.micro_batch_size * plan.train.accumulation == 12
    short = plan_of(micro_batch_size=1, accumulation=1)
    last = next_fallback(short, ending(-KILL))
    assert last is not None
    assert last.fallback.plan.train.activation_checkpointing == "full"
    last = next_fallback(last.fallback.plan, ending(-KILL))
    assert last is not None
    assert last.fallback.plan.optimizer.state_dtype == "int8" and not last.fallback.only_time
    assert next_fallback(last.fallback.plan, ending(-KILL)) is None


def climbed(plan, died: StageResult, **known: bool) -> list[tuple[str, bool]]:
    """Each rung to the end of the ladder: the choices that changed, and whether it is taken unasked."""
    taken = []
    while (fallback_after := next_fallback(plan, died, **known)) is not None:
        new = fallback_after.fallback.plan
        was = {decision.key: decision.value for decision in plan.choices}
        key = next(each.key for each in new.choices if was.get(each.key) != each.value)
        value = next(each.value for each in new.choices if each.key == key)
        taken.append((f"{key}={value}", fallback_after.unasked))
        plan = new
        assert len(taken) < 20
    return taken


def test_a_full_gpu_gives_time_before_it_gives_numbers() -> None:
    plan = plan_of(micro_batch_size=2, accumulation=2, device="cuda")
    assert climbed(plan, ending(OUT_OF_MEMORY, problem="memory ran out")) == [
        ("train.micro_batch_size=1", True),
        ("train.activation_checkpointing=full", True),
        ("train.offload_activations=True", True),
        ("optimizer.offload=true", True),
        ("optimizer.state_dtype=int8", False),
    ]
    # a kill may have been meant
    assert not any(unasked for _, unasked in climbed(plan, ending(-KILL)))


@pytest.mark.parametrize(
    ("precision", "known", "first"),
    [
        ("float16", True, ["train.precision=bfloat16"]),
        ("float16", False, ["train.precision=float32"]),
        ("float32", True, []),
        ("bfloat16", True, []),
    ],
)
def test_losses_that_stay_not_finite_end_after_a_few_rungs(
    precision: str, known: bool, first: list[str]
) -> None:
    taken = climbed(
        plan_of(precision=precision), ending(DIVERGED, problem="the loss is NaN"), bfloat16=known
    )
    halves = [f"optimizer.learning_rate={rate}" for rate in ("0.005", "0.0025", "0.00125")]
    wide = (
        ["train.precision=float32"]
        if precision == "bfloat16" or (precision == "float16" and known)
        else []
    )
    assert taken == [(edit, False) for edit in [*first, *halves, *wide]]


def test_memory_that_is_full_restarts_the_run_by_itself_where_that_only_costs_time(
    dying_workshop: Path,
) -> None:
    code = run_with(dying_workshop, [{"checkpointing": "none"}, 8, "memory"], recover=False)
    assert code == 0
    told = of(dying_workshop, Recovered)
    assert [event.action.startswith("restarted: ") for event in told][-1:] == [True]
    assert {event.action.partition(" ")[0] for event in told[:-1]} == {"micro-batch"}
    # saved where memory ran out: nothing was lost
    assert [event.step for event in of(dying_workshop, Resumed)] == [7]
    assert len(losses(dying_workshop / "runs/one")) == 16
    plan = read_plan(dying_workshop / "runs/one/plan.json")
    assert (plan.train.activation_checkpointing, plan.optimizer.state_dtype) == ("full", "float32")


def test_numbers_change_only_when_asked(paper_workshop: Path) -> None:
    """States in 8 bits are offered without the flag, taken with it, and kept by a resume."""
    error = run_with(paper_workshop, [{"state_dtype": "float32"}, 8, "memory"], recover=False)
    assert "`bloomery resume one --recover` restarts with: optimizer states float32 -> int8" in str(
        error
    )
    assert resume(paper_workshop / "runs/one", recover=True, quiet=True).code == 0
    assert read_plan(paper_workshop / "runs/one/plan.json").optimizer.state_dtype == "int8"
    assert of(paper_workshop, Recovered)[-1].action.startswith(
        "restarted: optimizer states float32 -> int8"
    )
    assert len(losses(paper_workshop / "runs/one")) == 16


def test_losses_that_are_not_finite_lower_the_rate_when_asked(paper_workshop: Path) -> None:
    fast = ("optimizer.kind=adamw", "optimizer.learning_rate=0.02")
    error = run_with(paper_workshop, [{"rate": 0.02}, 5, "NaN"], recover=False, overrides=fast)
    assert "`bloomery resume one --recover` restarts with: learning rate 0.02 -> 0.01" in str(error)
    assert resume(paper_workshop / "runs/one", recover=True, quiet=True).code == 0
    plan = read_plan(paper_workshop / "runs/one/plan.json")
    assert (plan.optimizer.learning_rate, plan.recovered) == (0.01, ("optimizer.learning_rate",))
    assert of(paper_workshop, RunEnded)[-1].status == "done"


def test_a_kept_rung_is_taken_once_and_a_torn_one_not_at_all(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert take_fallback(folder) is None
    fallback_after = next_fallback(plan_of(compile=True), ending(-SEGV))
    assert isinstance(fallback_after, FallbackAfter)
    store_fallback(folder, fallback_after)
    assert take_fallback(folder) == fallback_after
    assert take_fallback(folder) is None
    folder.fallback.write_text('{"because": "x", "pl')
    assert take_fallback(folder) is None
