"""Distillation from a file of a teacher's likeliest tokens: by hand, as from the live teacher, and through runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rollouts_for_tests import RECIPE, metrics, plan_of, write_recipe
from safetensors.torch import load_file
from test_distillation import logits, models
from test_own_teacher import gradients
from test_rollout_meshes import MODEL
from test_step import batch
from torch.testing import assert_close

from bloomery.cli import main
from bloomery.core.errors import UserError
from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.data.top_scores import SUFFIX, common_header, stored_answers
from bloomery.evals.own_losses import losses_as_trained
from bloomery.hardware.detect import detect
from bloomery.infer.top_scores import top_scores
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.parallel.mesh import SINGLE_RANK
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.plan.store import begin, write_plan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.objectives import Distill
from bloomery.train.objectives.distillation import distillation, stored_distillation
from bloomery.train.objectives.stored_scores import TOP_IDS, TOP_LOGPS
from bloomery.train.set_up import fix_start
from bloomery.train.step import compute_loss
from device_for_tests import on_device
from ranks import fields, losses, on_ranks, train

STORED = Distill(kind="distill", teacher_scores="x", kd_ratio=0.7)


def scored(inputs, teacher, top: int):
    """The batch with the teacher's likeliest tokens."""
    logprobs, ids = torch.log_softmax(logits(teacher, inputs), -1).topk(top, -1)
    return inputs.with_extras(**{TOP_IDS: ids.int(), TOP_LOGPS: logprobs})


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("vocab_size", [97, 128])
def test_the_whole_vocabulary_is_the_live_teacher(chunk, vocab_size):
    """Also one whose embeddings are padded further, which has nearly no probability in the padding."""
    student, teacher = models(vocab_size)
    if vocab_size > 97:
        with torch.no_grad():
            teacher.lm_head.weight[97:] = 0
            teacher.config = teacher.config
    inputs = batch(3)
    keys = replace_teacher(kd_ratio=0.7)
    expected = compute_loss(
        student, inputs, distillation(keys, teacher, chunk=chunk), precision="float32"
    )
    expected.total.backward()
    expected_gradients = gradients(student)
    if vocab_size > 97:
        # The live teacher is cut to the entries that both have, and so are the stored scores.
        all_logits = logits(teacher, inputs)[..., :97]
        logprobs, ids = torch.log_softmax(all_logits, -1).topk(97, -1)
        inputs = inputs.with_extras(**{TOP_IDS: ids.int(), TOP_LOGPS: logprobs})
    else:
        inputs = scored(inputs, teacher, 97)
    found = compute_loss(
        student, inputs, stored_distillation(STORED, chunk=chunk), precision="float32"
    )
    found.total.backward()
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-6)
    assert found.count == expected.count
    assert_close(gradients(student), expected_gradients, rtol=1e-5, atol=1e-8)


def replace_teacher(**settings) -> Distill:
    return Distill(kind="distill", teacher="T", **settings)


@pytest.mark.parametrize("top", [1, 5, 96])
def test_the_rest_is_one_outcome(top):
    student, teacher = models()
    inputs = scored(batch(3), teacher, top)
    loss = compute_loss(student, inputs, stored_distillation(STORED, chunk=7), precision="float32")
    loss.total.backward()
    found = gradients(student)

    # By hand, of K + 1 outcomes.
    ours = torch.log_softmax(logits(student, inputs), -1).exp()
    theirs = torch.log_softmax(logits(teacher, inputs), -1).exp()
    top_ids = inputs.extras[TOP_IDS].long()
    first, second = (shares.gather(-1, top_ids) for shares in (theirs, ours))
    outcomes = torch.cat([first, 1 - first.sum(-1, keepdim=True)], -1)
    our_outcomes = torch.cat([second, 1 - second.sum(-1, keepdim=True)], -1)
    divergence = F.kl_div(our_outcomes.log(), outcomes, reduction="none").sum(-1)
    whole = F.kl_div(ours.log(), theirs, reduction="none").sum(-1)
    nats = -ours.log().gather(-1, inputs.labels[..., None]).squeeze(-1)
    expected = ((0.7 * divergence + 0.3 * nats) * inputs.loss_mask).sum()
    expected.backward()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(found, gradients(student), rtol=1e-4, atol=1e-7)
    is_loss = inputs.loss_mask > 0
    assert (divergence[is_loss] <= whole[is_loss] + 1e-9).all()


def test_a_teacher_that_is_sure_has_no_rest():
    """Its rest is 0, or below it by rounding: loss and gradient stay finite."""
    student, teacher = models()
    inputs = scored(batch(2), teacher, 3)
    sure = torch.full_like(inputs.extras[TOP_LOGPS], -math.inf)
    sure[..., 0] = 1e-7
    inputs = inputs.with_extras(**{TOP_LOGPS: torch.where(sure.isinf(), -80.0, sure)})
    loss = compute_loss(student, inputs, stored_distillation(STORED, chunk=7), precision="float32")
    loss.total.backward()
    assert loss.total.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(student))


def test_scores_of_a_model_are_those_of_its_logits():
    _, teacher = models()
    ids = batch(1).tokens[0, :20].tolist()
    top_ids, logps = top_scores(teacher, ids[:12], ids[12:], 97)
    expected = torch.log_softmax(teacher(torch.tensor([ids])).head[0].double(), -1)[11:-1]
    found = np.zeros((8, 97))
    np.put_along_axis(found, top_ids, logps, 1)
    assert np.abs(found - expected.numpy()).max() < 1e-5
    assert (np.diff(logps, axis=1) <= 0).all()


# Files and runs

ROWS = 12
VOCABULARY = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, its answers with the scores of its whole vocabulary, and a recipe that trains on them."""
    folder = write_recipe(tmp_path_factory.mktemp("scores"))
    teacher = folder / "teacher"
    teacher.mkdir()
    load_tokenizer(folder / "prepared").save(teacher)
    (teacher / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    config = replace(plan_of(folder, *MODEL).model.config, initializer_range=0.2, num_layers=3)
    write_model(model_state(fresh_decoder(config, seed=7)), config, teacher)
    lines = [line for line in RECIPE.splitlines() if not line.startswith(("objective", "rewards"))]
    (folder / "distill.yaml").write_text("\n".join(lines))
    rows = [{"prompt": f"def f{number}(x): return"} for number in range(ROWS)]
    (folder / "ask.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answered(folder, folder / "all.jsonl", VOCABULARY)
    answered(folder, folder / "few.jsonl", 8)
    prepare(recipe_of(folder), folder / "answers")
    return folder


def command(folder, out, top: int, *options: str) -> list[str]:
    return [
        *("generate", str(folder / "teacher"), "--data", str(folder / "ask.jsonl")),
        *("--out", str(out), "--max-new-tokens", "8", "-d", "cpu", "--top-scores", str(top)),
        *options,
    ]


def answered(folder, out, top: int, *options: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(command(folder, out, top, *options))
        raise SystemExit(0)
    assert not end.value.code


def recipe_of(folder, *edits, data: str = "all.jsonl", scores: str | None = "all.jsonl.scores"):
    teacher = f"teacher: {folder / 'teacher'}"
    if scores is not None:
        teacher = f"teacher_scores: {folder / scores}"
    return load_recipe(
        str(folder / "distill.yaml"),
        [
            f"data={{path: {folder / data}, sequence_length: 48, validation: 0.2}}",
            f"tokenizer={{from: {folder / 'teacher'}}}",
            f"objective={{kind: distill, {teacher}, kd_ratio: 0.7}}",
            *("train.compile=false", "train.batch_size=4", "train.max_steps=3"),
            *("checkpoint.every=1 steps", "eval.every=3 steps"),
            *edits,
        ],
    )


def distill_plan(folder, *edits, prepared: str = "answers", **names):
    loaded = recipe_of(folder, *edits, **names)
    plan = on_device(resolve(loaded, gather(loaded, detect(), prepared=folder / prepared)))
    return plan.model_copy(update={"train": plan.train.model_copy(update={"threads": 1})})


def test_rows_are_tokens_and_their_scores_follow_each_other(folder):
    rows = [json.loads(line) for line in (folder / "few.jsonl").read_text().splitlines()]
    path = folder / f"few.jsonl{SUFFIX}"
    header = common_header([path])
    assert (header.top, header.token_bytes) == (8, 64)
    with path.open("rb") as file:
        answers = list(stored_answers(file, header, path.stat().st_size))
    assert len(answers) == len(rows) == ROWS
    for row, answer in zip(rows, answers, strict=True):
        labels = row["labels"]
        assert labels[: answer.first] == [-100] * answer.first
        assert labels[answer.first :] == row["input_ids"][answer.first :]
        assert answer.num_tokens == len(labels) - answer.first
    size = 64 + sum(24 + answer.num_tokens * 64 for answer in answers)
    assert path.stat().st_size == size


@pytest.mark.parametrize("cut", ["row", "scores", "header", "nothing"])
def test_a_command_that_was_killed_writes_the_same_bytes(folder, tmp_path, cut):
    whole = folder / "few.jsonl"
    out = tmp_path / "few.jsonl"
    settings = out.with_name("few.jsonl.settings.json")
    settings.write_bytes(whole.with_name("few.jsonl.settings.json").read_bytes())
    rows, scores = whole.read_bytes(), (folder / f"few.jsonl{SUFFIX}").read_bytes()
    lengths = {
        "row": (len(rows) // 2, len(scores) // 2 + 900),
        "scores": (len(rows), len(scores) // 3),
        "header": (0, 20),
        "nothing": (len(rows), len(scores)),
    }[cut]
    out.write_bytes(rows[: lengths[0]])
    out.with_name(f"few.jsonl{SUFFIX}").write_bytes(scores[: lengths[1]])
    answered(folder, out, 8)
    assert out.read_bytes() == rows
    assert out.with_name(f"few.jsonl{SUFFIX}").read_bytes() == scores


def test_a_run_is_that_of_the_live_teacher_and_loads_none(folder, tmp_path, monkeypatch):
    live = train(distill_plan(folder, scores=None), tmp_path / "live")
    from bloomery.train.objectives import build

    monkeypatch.setattr(build, "load_teacher", lambda _plan: pytest.fail("a teacher is loaded"))
    plan = distill_plan(folder)
    stored = train(plan, tmp_path / "stored")
    assert losses(stored) == pytest.approx(losses(live), rel=1e-6)
    for step, numbers in metrics(live).items():
        assert metrics(stored)[step]["kl"] == pytest.approx(numbers["kl"], rel=1e-5)
    assert "teacher" not in plan.memory.parts


def test_fewer_tokens_are_less_of_the_divergence(folder, tmp_path):
    prepare(recipe_of(folder, data="few.jsonl", scores="few.jsonl.scores"), folder / "few")
    few = distill_plan(folder, data="few.jsonl", scores="few.jsonl.scores", prepared="few")
    first = metrics(train(few, tmp_path / "few"))[1]["kl"]
    assert 0 < first < metrics(train(distill_plan(folder), tmp_path / "all"))[1]["kl"]


def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(folder, tmp_path):
    plan = distill_plan(folder)
    whole = train(plan, tmp_path / "whole")
    run = tmp_path / "stopped"
    first = train(plan, run, stop_after=2)
    rest = train(plan, run, resume_from=run / "checkpoints" / "step-00000002")
    assert losses([*first, *rest]) == losses(whole)


LAYOUTS = {
    "two copies": {"replicate": 2},
    "two stages": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    "copies of stages": {"pipeline": 2, "replicate": 2},
    "shards of stages": {"pipeline": 2, "shard": 2},
    "shared sequences": {"replicate": 2, "context": 2},
    "shared sequences of shards": {"shard": 4, "context": 2},
}
QUICK = ("two stages", "shared sequences")


@pytest.mark.parametrize("teacher", ["stored", "live"])
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.soak]) for name in LAYOUTS],
)
def test_ranks_train_as_one(folder, tmp_path, layout, teacher):
    plan = distill_plan(folder, *MODEL, scores="all.jsonl.scores" if teacher == "stored" else None)
    # With the usual eps an update is the sign of a gradient, and of one of 1e-9 that of its rounding.
    optimizer = plan.optimizer.model_copy(update={"eps": 1e-4})
    plan = plan.model_copy(update={"optimizer": optimizer})
    alone = train(plan, tmp_path / "alone")
    several = train(on_ranks(plan, **LAYOUTS[layout]), tmp_path / "several")
    assert losses(several) == pytest.approx(losses(alone), rel=1e-6)
    for step, of_step in metrics(alone).items():
        assert metrics(several)[step] == pytest.approx(of_step, rel=1e-5)
    held_out, expected = (
        [(event["loss"], event["metrics"]["kl"]) for event in fields(run, "EvalDone")]
        for run in (several, alone)
    )
    assert held_out and np.allclose(held_out, expected, rtol=1e-5)
    weights, expected_weights = (
        load_file(tmp_path / run / "checkpoints" / "step-00000003" / "model.safetensors")
        for run in ("several", "alone")
    )
    assert_close(weights, expected_weights, rtol=0, atol=1e-6)


def test_a_sweep_scores_a_run_by_its_own_loss(folder, tmp_path):
    plan = distill_plan(folder)
    (evaluation,) = fields(train(plan, tmp_path), "EvalDone")
    write_plan(plan, tmp_path / "plan.json")
    scores = losses_as_trained(tmp_path, tmp_path / "checkpoints" / "step-00000003")
    assert scores.estimate().value == pytest.approx(evaluation["loss"], rel=1e-5)


def test_a_resumed_run_has_the_scores_of_its_beginning(folder, tmp_path):
    scores = tmp_path / f"all.jsonl{SUFFIX}"
    content = bytearray((folder / scores.name).read_bytes())
    scores.write_bytes(content)
    plan = distill_plan(folder, f"objective.teacher_scores={scores}")
    begin(tmp_path, {})
    fix_start(plan, tmp_path, SINGLE_RANK)
    fix_start(plan, tmp_path, SINGLE_RANK)
    content[-1] ^= 1
    scores.write_bytes(content)
    with pytest.raises(UserError, match="scores are not those that the run began with"):
        fix_start(plan, tmp_path, SINGLE_RANK)


def test_the_plan_says_what_is_stored(folder):
    plan = distill_plan(folder)
    (choice,) = [choice for choice in plan.choices if choice.value == "stored scores"]
    assert choice.key == "objective.teacher_scores"
    stored = plan.dataset.teacher_scores
    assert stored.token_bytes == 8 * stored.top
    assert stored.bytes == (folder / f"all.jsonl{SUFFIX}").stat().st_size


REFUSED = {
    "needs a teacher": ("objective.teacher_scores=null",),
    "a teacher and the scores of one": ("objective.teacher=x",),
    "at temperature 1": ("objective.temperature=2",),
    "no such file": ("objective.teacher_scores=missing.scores",),
    "not a file of a teacher's scores": ("objective.teacher_scores=FOLDER/ask.jsonl",),
    "another teacher, or of another number": ("objective.teacher_scores=FOLDER/*.scores",),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_does_not_fit_is_said(folder, problem):
    with pytest.raises(UserError, match=problem):
        distill_plan(folder, *(edit.replace("FOLDER", str(folder)) for edit in REFUSED[problem]))


def test_other_rows_than_those_of_the_scores_are_refused(folder, tmp_path):
    lines = (folder / "all.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[0])
    row["input_ids"][-1] = row["labels"][-1] = row["input_ids"][-1] ^ 1
    (folder / "changed.jsonl").write_text("".join([json.dumps(row) + "\n", *lines[1:]]))
    prepare(recipe_of(folder, data="changed.jsonl"), folder / "changed")
    plan = distill_plan(folder, data="changed.jsonl", prepared="changed")
    with pytest.raises(UserError, match=r"1 of .* rows of the dataset have no scores"):
        train(plan, tmp_path)


def test_scores_of_another_tokenizer_are_refused(folder, tmp_path):
    other = tmp_path / "other"
    load_tokenizer(folder / "teacher").with_tokens(["<new>"]).save(other)
    with pytest.raises(UserError, match="another tokenizer than the dataset"):
        loaded = recipe_of(folder, f"tokenizer={{from: {other}}}")
        gather(loaded, detect(), prepared=tmp_path / "none")
