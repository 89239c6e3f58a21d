"""A teacher and reward models in processes of their own: the numbers of those that training ranks hold."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollouts_for_tests import (
    assert_resumes_to_the_same_bits,
    assert_same_training,
    metrics,
    plan_of,
    write_recipe,
    write_teacher,
)

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch, LateExtras
from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.hardware.detect import detect
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.parallel.mesh import SINGLE_RANK
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.train import loop
from bloomery.train.batch_source import StepBatches
from bloomery.train.objectives import teacher
from bloomery.train.objectives.objective import TEACHER_HIDDEN
from bloomery.train.objectives.teacher import (
    TeacherPass,
    TeacherPlan,
    load_teacher,
    load_teacher_output,
)
from bloomery.train.rl.rollout import RolloutSample, pack
from bloomery.train.scorers.client import ScoredBefore, Scorer
from bloomery.train.scorers.models import ScoringModels
from bloomery.train.scorers.process import LocalRanks, scoring_processes
from bloomery.train.step import train_step
from ranks import fields, losses, on_ranks, train

SCORED = "parallel.scoring_devices=1"
ALONE = ("objective.kind=on_policy_distill", "rewards=[]")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """With a teacher, a reward model, and texts for distillation without samples."""
    folder = write_recipe(tmp_path_factory.mktemp("scored"))
    write_teacher(folder)
    (folder / "judge").mkdir()
    load_tokenizer(folder / "prepared").save(folder / "judge")
    config = replace(plan_of(folder).model.config, head="values", num_layers=3)
    write_model(model_state(fresh_decoder(config, seed=5)), config, folder / "judge")
    return folder


def plan_with(recipe: Path, *edits: str) -> RunPlan:
    return plan_of(recipe, f"objective.teacher={recipe / 'teacher'}", "train.max_steps=3", *edits)


CASES = {
    "alone": ALONE,
    "nf4": (*ALONE, "objective.teacher_quantize=nf4"),
    "sampled, bfloat16": (*ALONE, "objective.estimator=sampled", "train.precision=bfloat16"),
    "beside rewards": ("objective.teacher_kl_coef=0.5",),
    "several steps on a rollout": (
        *("objective.teacher_kl_coef=0.5", "objective.ce_coef=0.1", "objective.beta=0.1"),
        *("objective.num_iterations=2", "objective.steps_per_generation=2", "train.max_steps=5"),
    ),
    "told more": (*ALONE, "objective.teacher_prompt_template='{answer}! {prompt}'"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_teacher_of_the_rank(recipe, tmp_path, case):
    resident = train(plan_with(recipe, *CASES[case]), tmp_path / "resident")
    scored = train(plan_with(recipe, *CASES[case], SCORED), tmp_path / "scored")
    assert metrics(scored) == metrics(resident)
    held_out = [
        [event["metrics"] for event in fields(run, "EvalDone")] for run in (scored, resident)
    ]
    assert held_out[0] == held_out[1] and held_out[0]
    assert_same_training(tmp_path / "scored", scored, tmp_path / "resident", resident)


def test_rewards_are_those_of_a_model_of_the_rank(recipe, tmp_path):
    rewards = f"rewards=[{{model: {recipe / 'judge'}}}]"
    edits = (rewards, "train.max_steps=3")
    resident = train(plan_of(recipe, *edits), tmp_path / "resident")
    scored = train(plan_of(recipe, *edits, SCORED), tmp_path / "scored")
    assert metrics(scored) == metrics(resident)
    assert_same_training(tmp_path / "scored", scored, tmp_path / "resident", resident)


def test_texts_of_a_dataset_are_distilled_to_the_same_bits(recipe, tmp_path):
    rows = [json.dumps({"text": f"def f{number}(x): return x * {number}"}) for number in range(200)]
    (recipe / "texts.jsonl").write_text("\n".join(rows))
    lines = (recipe / "rl.yaml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("objective", "rewards", "data"))]
    kept.append("data: {path: texts.jsonl, sequence_length: 48, validation: 0.1}")
    kept.append(f"objective: {{kind: distill, teacher: {recipe / 'teacher'}}}")
    kept.append(f"tokenizer: {{from: {recipe / 'teacher'}}}")
    path = recipe / "distill.yaml"
    path.write_text("\n".join(line for line in kept if not line.startswith("tokenizer: {train")))
    edits = ("train.max_steps=3", "train.compile=false")
    prepare(load_recipe(str(path), edits), recipe / "texts")

    def plan(*more: str) -> RunPlan:
        loaded = load_recipe(str(path), [*edits, *more])
        resolved = resolve(loaded, gather(loaded, detect(), prepared=recipe / "texts"))
        one_thread = resolved.train.model_copy(update={"threads": 1})
        return resolved.model_copy(update={"train": one_thread})

    resident = train(plan(), tmp_path / "resident")
    scored = train(plan(SCORED), tmp_path / "scored")
    assert losses(scored) == losses(resident)
    held_out = [[event["loss"] for event in fields(run, "EvalDone")] for run in (scored, resident)]
    assert held_out[0] == held_out[1] and held_out[0]
    name = "checkpoints/step-00000003/model.safetensors"
    written = [(tmp_path / run / name).read_bytes() for run in ("scored", "resident")]
    assert written[0] == written[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("axis", "devices"), [("replicate", 1), ("replicate", 3), ("shard", 2)])
def test_two_ranks_have_the_losses_of_those_with_a_teacher_each(recipe, tmp_path, axis, devices):
    def plan(*edits: str) -> RunPlan:
        return on_ranks(plan_with(recipe, *ALONE, *edits), **{axis: 2})

    resident = train(plan(), tmp_path / "resident")
    scored = train(plan(f"parallel.scoring_devices={devices}"), tmp_path / "scored")
    assert losses(scored) == losses(resident)
    assert metrics(scored) == metrics(resident)


def test_two_ranks_ask_one_process_for_rewards(recipe, tmp_path):
    edits = (f"rewards=[{{model: {recipe / 'judge'}}}]", "train.max_steps=2")
    resident = train(on_ranks(plan_of(recipe, *edits), replicate=2), tmp_path / "resident")
    scored = train(on_ranks(plan_of(recipe, *edits, SCORED), replicate=2), tmp_path / "scored")
    assert metrics(scored) == metrics(resident)
    assert_same_training(tmp_path / "scored", scored, tmp_path / "resident", resident)


def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(recipe, tmp_path):
    assert_resumes_to_the_same_bits(
        plan_with(recipe, *ALONE, SCORED, "train.max_steps=4"), tmp_path, stop_after=2
    )


def micro_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 80, (count,), generator=generator).tolist())

    samples = [[RolloutSample(ids(4), ids(n), (0.0,) * n) for n in of] for of in ((5, 3), (9, 2))]
    return [pack(of_batch, length=40, rows=1)[0][0] for of_batch in samples]


def test_each_micro_batch_is_awaited_where_it_is_read(recipe, tmp_path):
    """In any order, with the bits of the pass in this process; answers that nobody reads are dropped."""
    plan = plan_with(recipe, *ALONE, SCORED)
    torch.set_num_threads(1)
    resident = load_teacher(TeacherPlan.of(plan))
    expected = TeacherPass("float32", resident)(resident, micro_batches())
    with scoring_processes(plan, SINGLE_RANK, tmp_path) as scorers:
        assert scorers is not None
        scorers.with_teacher(micro_batches(), name=TEACHER_HIDDEN)
        completed = scorers.with_teacher(micro_batches(), name=TEACHER_HIDDEN)
        for batch, of_rank in list(zip(completed, expected, strict=True))[::-1]:
            assert torch.equal(batch.extras[TEACHER_HIDDEN], of_rank.extras[TEACHER_HIDDEN])
            assert set(batch.extras) == set(of_rank.extras)


def test_the_rank_has_the_output_layer_alone(recipe):
    plan = TeacherPlan.of(plan_with(recipe, *ALONE, SCORED))
    output = load_teacher_output(plan)
    assert torch.equal(output.lm_head.weight, load_teacher(plan).lm_head.weight)
    assert not output.lm_head.weight.requires_grad


class Counted:
    """In place of `Scorers`: how many micro-batches were sent, and no answers."""

    def __init__(self) -> None:
        self.sent = 0

    def with_teacher(self, batches, *, name):
        self.sent += len(batches)
        late = [LateExtras(batch.extras, name, lambda: pytest.fail("waited")) for batch in batches]
        return [
            replace(batch, extras=extras) for batch, extras in zip(batches, late, strict=True)
        ]


def test_the_next_step_on_a_rollout_is_sent_while_this_one_trains():
    """And what other passes add to its micro-batches waits for nothing."""
    scorers = Counted()
    before = ScoredBefore(scorers, TEACHER_HIDDEN)
    step = StepBatches(micro_batches(), 1).asked(before)
    assert scorers.sent == 2
    assert step.asked(before).batches == step.batches and scorers.sent == 2
    completed = [batch.with_extras(scale=torch.ones(())) for batch in step.batches]
    assert before(None, completed) == completed and scorers.sent == 2
    assert all({"scale", TEACHER_HIDDEN} <= set(batch.extras) for batch in completed)


def test_after_out_of_memory_the_same_processes_score_smaller_micro_batches(
    recipe, tmp_path, monkeypatch
):
    plan = plan_with(recipe, *ALONE, SCORED)
    whole = train(plan, tmp_path / "whole")
    steps = []

    def failing(*arguments, **keys):
        steps.append(children())
        if len(steps) == 2:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 8.00 MiB")
        return train_step(*arguments, **keys)

    monkeypatch.setattr(loop, "train_step", failing)
    teacher._load.cache_clear()
    monkeypatch.setattr(teacher, "load_decoder", only_outputs(teacher.load_decoder))
    events = train(plan, tmp_path / "recovered")
    assert fields(events, "Recovered")
    assert losses(events) == pytest.approx(losses(whole), rel=1e-5)
    assert len(steps) == 4 and len(set().union(*steps)) == 1


class Answers:
    """In place of a channel: what a scoring process says, one message after the other."""

    def __init__(self, *messages) -> None:
        self.messages = list(messages)

    def send(self, message, content, *, seconds) -> bool:
        return True

    def next(self, seconds):
        return self.messages.pop(0)


def test_too_little_memory_of_a_scoring_process_is_that_of_the_step():
    """The step is tried again with smaller micro-batches; what was asked for it before is dropped."""
    full = {"number": 1, "out_of_memory": "CUDA out of memory. Tried to allocate 2.50 GiB."}
    channel = Answers({"reward_models": {}}, full, {"number": 2}, {"number": 3, "values": [1.5]})
    scorer = Scorer(channel, "scoring process 0", resume_command="bloomery resume x")
    first = scorer.ask({})
    dropped = scorer.ask({})
    with pytest.raises(torch.OutOfMemoryError, match=r"scoring process 0 .*2\.50 GiB"):
        scorer.wait(first)
    del dropped
    assert scorer.wait(scorer.ask({}))["values"] == [1.5]


def test_a_scoring_process_answers_after_an_allocation_that_failed(monkeypatch):
    def no_memory(_request):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    models = ScoringModels(None, None, {})
    monkeypatch.setattr(ScoringModels, "answer", lambda _, request: no_memory(request))
    message, content = models.attempt({})
    assert message["out_of_memory"].endswith("2.50 GiB.") and not content


def only_outputs(load_decoder):
    """In place of `load_decoder` in this process, where no layers of a teacher may be."""

    def loaded(*arguments, **keys):
        decoder = load_decoder(*arguments, **keys)
        assert not len(decoder.model.layers)
        return decoder

    return loaded


def children() -> set[int]:
    """The processes that score, of this process."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            status = (entry / "stat").read_text()
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        parent = int(status.rpartition(")")[2].split()[1])
        if parent == os.getpid() and "bloomery.train.scorers.worker" in command:
            found.add(int(entry.name))
    return found


def test_one_that_is_killed_is_named_with_the_cure(recipe, tmp_path):
    plan = plan_with(recipe, *ALONE, SCORED)
    with (
        pytest.raises(UserError, match=r"scoring process 0 .* has ended") as error,
        scoring_processes(plan, SINGLE_RANK, tmp_path) as scorers,
    ):
        assert scorers is not None
        (process,) = children()
        scorers.wait_until_loaded()
        os.kill(process, signal.SIGKILL)
        first, *_ = scorers.with_teacher(micro_batches(), name=TEACHER_HIDDEN)
        first.extras[TEACHER_HIDDEN]
    assert f"bloomery resume {tmp_path.name}" in error.value.fix
    assert not children()


def test_a_teacher_that_cannot_be_read_ends_the_run_before_its_first_step(recipe, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (recipe / "teacher").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    plan = plan_with(recipe, *ALONE, SCORED, f"objective.teacher={broken}")
    with pytest.raises(UserError, match=r"model\.safetensors") as error:
        train(plan, tmp_path / "run")
    assert "scoring process 0" in error.value.where
    assert not children()


def test_none_outlives_a_rank_that_is_killed(recipe, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(plan_with(recipe, *ALONE, SCORED).model_dump_json())
    program = (
        "import sys, time; from pathlib import Path; from bloomery.plan.types import RunPlan\n"
        "from bloomery.parallel.mesh import SINGLE_RANK\n"
        "from bloomery.train.scorers.process import scoring_processes\n"
        "plan = RunPlan.model_validate_json(Path(sys.argv[1]).read_text())\n"
        "with scoring_processes(plan, SINGLE_RANK, Path('x')) as scorers:\n"
        "    scorers.wait_until_loaded(); print('ready', flush=True); time.sleep(600)\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", program, str(plan)], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    for line in rank.stdout:
        if line.strip() == "ready":
            break
    tasks = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    scorers = [
        int(pid) for pid in tasks if "scorers.worker" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert len(scorers) == 1
    rank.kill()
    rank.wait()
    rank.stdout.close()
    until = time.monotonic() + 60
    while Path(f"/proc/{scorers[0]}/cmdline").exists() and time.monotonic() < until:
        if Path(f"/proc/{scorers[0]}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    assert time.monotonic() < until


def processes_with(mark: str) -> dict[int, str]:
    """The commands of living processes whose environment has this text."""
    commands = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_text(errors="replace"):
                commands[int(entry.name)] = (entry / "cmdline").read_text()
        except OSError:
            continue
    return commands


def test_a_run_whose_scoring_process_is_killed_resumes_to_the_same_bits(recipe, tmp_path):
    """Two ranks of the command line, and a process that scores for both."""
    mark = f"SCORERS_OF_TEST={tmp_path.name}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, name: value}
    bloomery = [sys.executable, "-P", "-m", "bloomery"]
    edits = [
        *(*ALONE, SCORED, f"objective.teacher={recipe / 'teacher'}"),
        *("train.max_steps=20", "train.compile=false", "checkpoint.every=2 steps"),
    ]

    def begin(run: str) -> subprocess.Popen:
        words = [*bloomery, "train", str(recipe / "rl.yaml"), *edits, "-d", "cpu,cpu"]
        with (tmp_path / f"{run}.txt").open("w") as output:
            return subprocess.Popen(
                [*words, "--run-dir", str(tmp_path / run)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=tmp_path,
            )

    assert begin("undisturbed").wait(300) == 0, (tmp_path / "undisturbed.txt").read_text()
    run = begin("killed")
    until = time.monotonic() + 300
    while not list((tmp_path / "killed/checkpoints").glob("step-0000000[4-9]")):
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    (process,) = [pid for pid, words in processes_with(mark).items() if "scorers.worker" in words]
    os.kill(process, signal.SIGKILL)
    assert run.wait(120) == 1
    said = (tmp_path / "killed.txt").read_text()
    assert "scoring process 0" in said and "bloomery resume killed" in said

    until = time.monotonic() + 60
    while processes_with(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not processes_with(mark)
    words = [*bloomery, "resume", str(tmp_path / "killed")]
    resumed = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    last = "checkpoints/step-00000020/model.safetensors"
    assert (tmp_path / "killed" / last).read_bytes() == (
        tmp_path / "undisturbed" / last
    ).read_bytes()


@pytest.mark.parametrize(("ranks", "scorers"), [(1, 1), (1, 3), (4, 1), (4, 2), (5, 2), (3, 5)])
def test_every_rank_is_served_and_every_process_is_started_once(ranks, scorers):
    places = [LocalRanks(index, ranks, scorers) for index in range(ranks)]
    assert all(place.own for place in places)
    started = [scorer for place in places for scorer in place.started]
    assert sorted(started) == list(range(scorers))
    for scorer in range(scorers):
        clients = sum(scorer in place.own for place in places)
        assert clients == places[0].clients(scorer) >= 1
    # They are shared out evenly.
    counts = [places[0].clients(scorer) for scorer in range(scorers)]
    assert max(counts) - min(counts) <= 1
