"""`eval`, `report` and `runs` as people and programs call them."""

import json
import math
import os
import re
import subprocess
import sys
import time
from fcntl import LOCK_EX, flock

import pytest
import torch
from click.testing import CliRunner

from bloomery.cli import common
from bloomery.cli.common import text_flags
from bloomery.cli.eval import command as eval_command
from bloomery.cli.report import _run_of
from bloomery.cli.report import command as report_command
from bloomery.cli.runs import command as runs_command
from bloomery.cli.runs import describe
from bloomery.cli.watch import command as watch_command
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.evals import evaluate
from bloomery.facts.config import ModelConfig
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import EvalDone, EventLog, RunEnded, RunStarted, StepDone
from bloomery.recipe.schema import TrainTokenizer

TEXT = "def add(a, b):\n    return a + b  # naïve\n" * 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(iter([TEXT] * 3), TrainTokenizer(vocab_size=290), folder)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=64,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )
    decoder = fresh_decoder(config, seed=0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1
            )
    write_model(model_state(decoder), config, folder)
    tokenizer.save(folder)
    return folder


def by_transformers(folder, text, *, bos):
    """Sum of nats, tokens: the sliding window of transformers' guide to perplexity, half of the context a stride."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids = torch.tensor([[tokenizer.bos_token_id] * bos + ids])
    context, length = theirs.config.max_position_embeddings, ids.size(1)
    nats, count, previous = 0.0, 0, 0
    for begin in range(0, length, context // 2):
        end = min(begin + context, length)
        labels = ids[:, begin:end].clone()
        labels[:, : previous - begin] = -100
        with torch.no_grad():
            logits = theirs(ids[:, begin:end]).logits[0, :-1]
        nats += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        count += int((labels[0, 1:] != -100).sum())
        previous = end
        if end == length:
            return nats, count
    return nats, count


@pytest.mark.parametrize("text", [TEXT, "x = 1\n"], ids=["longer than the context", "short"])
@pytest.mark.parametrize("bos", [True, False], ids=["bos", "no bos"])
def test_eval_equals_transformers(model, tmp_path, text, bos):
    path = tmp_path / "text.py"
    path.write_text(text, encoding="utf-8")
    words = [str(model), "--data", str(path), "--json", *([] if bos else ["--no-bos"])]
    result = CliRunner().invoke(eval_command, words, catch_exceptions=False)
    told = json.loads(result.stdout)
    nats, count = by_transformers(model, text, bos=bos)
    assert list(told) == ["loss", "perplexity", "bits_per_byte", "tokens", "bytes"]
    assert told["tokens"] == count
    assert math.isclose(told["loss"], nats / count, rel_tol=1e-4)
    assert math.isclose(told["perplexity"], math.exp(nats / count), rel_tol=1e-3)
    assert told["bytes"] == len(text.encode()) if bos else told["bytes"] < len(text.encode())
    assert math.isclose(
        told["bits_per_byte"], told["loss"] * count / math.log(2) / told["bytes"], rel_tol=1e-9
    )
    assert ("half-overlapping windows" in result.stderr) == (len(text) > 100)


def test_eval_for_people(model, tmp_path):
    (tmp_path / "t.txt").write_text("hello there")
    result = CliRunner().invoke(
        eval_command, [str(model), "--data", str(tmp_path / "t.txt")], catch_exceptions=False
    )
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "loss",
        "perplexity",
        "bits/byte",
        "tokens",
        "bytes",
    ]


def test_a_log_of_eval_has_lines_of_its_progress(model, tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("hello there")
    monkeypatch.setattr(common, "SILENT_SECONDS", 0.02)
    score = evaluate.score_documents

    def slowly(*arguments, **settings):
        yield from score(*arguments, **settings)
        time.sleep(0.3)

    monkeypatch.setattr(evaluate, "score_documents", slowly)
    words = [str(model), "--data", str(tmp_path / "t.txt")]
    result = CliRunner().invoke(eval_command, words, catch_exceptions=False)
    found = re.search(r"^progress   eval: ([0-9]+) of ([0-9]+) tokens$", result.stderr, re.M)
    assert found is not None and found[1] == found[2]


def test_a_model_that_is_no_run_needs_a_text(model):
    with pytest.raises(UserError, match="no validation set: this model is not a run") as caught:
        CliRunner().invoke(eval_command, [str(model)], catch_exceptions=False)
    assert caught.value.code == 2 and "--data" in caught.value.fix


def make_run(root, name, *events):
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("model: {preset: go-coder-tiny}\ndata: {path: x}\n")
    with EventLog(folder / "events.jsonl") as emit:
        for event in events:
            emit(event)
    return folder


STARTED = RunStarted(
    schema=2, version="0.1.0", parameters=5, steps=9, attention="sdpa", device="cpu"
)
STEP = StepDone(
    step=4,
    loss=2.5,
    learning_rate=1e-3,
    grad_norm=1.0,
    tokens=64,
    tokens_per_second=1.0,
    sequences_per_second=1.0,
    step_seconds=1.0,
    data_wait_seconds=0.0,
    memory_gib=0.1,
)
EXAM = EvalDone(step=4, loss=2.0, perplexity=7.4, bits_per_byte=1.9, tokens=5, seconds=1.0)


def test_runs_says_how_far_each_came_and_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "a-done", STARTED, STEP, EXAM, RunEnded(status="done"))
    make_run(tmp_path, "b-killed", STARTED, STEP)
    make_run(tmp_path, "c-stopped", STARTED, STEP, RunEnded(status="stopped"))
    make_run(tmp_path, "d failed", RunEnded(status="failed", error="the disk is full"))
    lock = make_run(tmp_path, "e-running", STARTED) / "lock"
    holder = os.open(lock, os.O_RDWR | os.O_CREAT)
    flock(holder, LOCK_EX)
    try:
        told = json.loads(
            CliRunner().invoke(runs_command, ["--json"], catch_exceptions=False).stdout
        )["runs"]
        text = CliRunner().invoke(runs_command, [], catch_exceptions=False).stdout
    finally:
        os.close(holder)
    assert {run["name"]: run["state"] for run in told} == {
        "a-done": "done",
        "b-killed": "killed",
        "c-stopped": "stopped",
        "d failed": "failed",
        "e-running": "running",
    }
    done, killed = told[0], told[1]
    assert (done["step"], done["steps"], done["loss"], done["bits_per_byte"], done["command"]) == (
        4,
        9,
        2.5,
        1.9,
        None,
    )
    assert killed["command"] == "bloomery resume b-killed" and done["bytes"] > 100
    assert told[3]["command"] == "bloomery resume 'd failed'"
    assert "4/9" in text and "bloomery resume c-stopped" in text and "resume a-done" not in text


@pytest.mark.parametrize(
    ("events", "resumes"),
    [
        # A mistake in the recipe, the dataset or a reward, before the first step.
        (
            (RunEnded(status="failed", error="x", where="rewards", fix="its functions are: a"),),
            False,
        ),
        (
            (
                STARTED,
                RunEnded(status="failed", error="x", where="data", fix="set data.path"),
            ),
            False,
        ),
        # What a resume can get past.
        (
            (
                RunEnded(
                    status="failed", error="the disk is full", fix="free some space; it resumes"
                ),
            ),
            True,
        ),
        ((RunEnded(status="failed", error="process killed"),), True),
        (
            (
                STARTED,
                STEP,
                RunEnded(status="failed", error="x", fix="set train.seed=1"),
            ),
            True,
        ),
        ((RunEnded(status="stopped"),), True),
    ],
)
def test_a_mistake_before_the_first_step_is_not_resumed(tmp_path, monkeypatch, events, resumes):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "mine", *events)
    line = describe(tmp_path / "runs/mine")
    assert (line.command == "bloomery resume mine") == resumes
    text = CliRunner().invoke(runs_command, [], catch_exceptions=False).stdout
    assert ("bloomery resume mine" in text) == resumes
    shown = CliRunner().invoke(watch_command, ["mine", "--once"], catch_exceptions=False).stdout
    assert ("bloomery resume mine" in shown) == resumes


def test_runs_of_weeks_ago_are_listed_and_not_proposed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = RunEnded(status="failed", error="the disk is full")
    folders = [make_run(tmp_path, name, STARTED, STEP, failed) for name in ("a-old", "b-new")]
    month_ago = time.time() - 30 * 86400
    os.utime(folders[0] / "events.jsonl", (month_ago, month_ago))
    listed = CliRunner().invoke(runs_command, [], catch_exceptions=False).stdout
    assert "a-old" in listed
    assert "bloomery resume b-new" in listed and "bloomery resume a-old" not in listed
    document = CliRunner().invoke(runs_command, ["--json"], catch_exceptions=False).stdout
    commands = [run["command"] for run in json.loads(document)["runs"]]
    assert commands == ["bloomery resume a-old", "bloomery resume b-new"]


def test_runs_have_tags_and_a_note_and_are_listed_by_tag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        make_run(tmp_path, name, STARTED, STEP, RunEnded(status="done"))

    def answer(*words: str) -> str:
        return CliRunner().invoke(runs_command, words, catch_exceptions=False).stdout

    assert answer("note", "one") == "one  no tags\n"
    assert answer("note", "one", "--tag", "b", "--tag", "a", "--text", "try <1>") == (
        "one  a b\ntry <1>\n"
    )
    told = json.loads(answer("note", "one", "--untag", "b", "--json"))
    assert told == {"run": "one", "tags": ["a"], "note": "try <1>"}
    assert [run["tags"] for run in json.loads(answer("--json"))["runs"]] == [["a"], []]
    listed = json.loads(answer("--tag", "a", "--json"))["runs"]
    assert [run["name"] for run in listed] == ["one"]
    assert "no run has the tag 'c'" in answer("--tag", "c")


def test_runs_where_there_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(CliRunner().invoke(runs_command, ["--json"]).stdout) == {
        "runs": [],
        "sweeps": [],
    }
    assert "no runs in runs/" in CliRunner().invoke(runs_command, []).stdout


def test_report_prints_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "x", STARTED, STEP)
    result = CliRunner().invoke(report_command, ["last"], catch_exceptions=False)
    assert (
        result.stdout.strip().endswith("runs/x/report.html")
        and (tmp_path / "runs/x/report.html").is_file()
    )


def test_a_checkpoint_stands_for_its_run_and_a_model_for_none(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (run / "recipe.yaml").write_text("")
    # As in a folder where a person keeps a recipe and models.
    with pytest.raises(UserError, match="not a run"):
        _run_of(str(checkpoint))
    (run / "events.jsonl").write_text("")
    assert _run_of(str(checkpoint)) == run.resolve()
    assert _run_of("last") == _run_of("one").resolve().relative_to(tmp_path)
    with pytest.raises(UserError, match="not a run") as refused:
        _run_of(str(model))
    assert refused.value.fix == f"to evaluate a model: bloomery eval {model} --data FILE"
    with pytest.raises(UserError, match="no run 'no-such'"):
        _run_of("no-such")


def test_a_report_replaces_a_report_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "x", STARTED, STEP)
    report = ["last", "--out", "mine.html"]
    for _ in range(2):
        result = CliRunner().invoke(report_command, report, catch_exceptions=False)
        assert result.stdout.strip() == str(tmp_path / "mine.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "runs"]
    (tmp_path / "runs/x/report.html").write_text("mine")
    with pytest.raises(UserError, match="no Bloomery report"):
        CliRunner().invoke(report_command, ["last"], catch_exceptions=False)
    assert (tmp_path / "runs/x/report.html").read_text() == "mine"


def test_a_place_that_cannot_hold_a_report_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "x", STARTED, STEP)
    os.mkfifo(tmp_path / "pipe")
    for out, problem in (
        ("pipe", "a device, a pipe"),
        ("no/where.html", "folder not found"),
        ("runs", "--out is a folder"),
    ):
        with pytest.raises(UserError, match=problem) as refused:
            CliRunner().invoke(report_command, ["last", "--out", out], catch_exceptions=False)
        assert refused.value.code == 2 and refused.value.fix
    assert (tmp_path / "pipe").is_fifo()


def test_a_missing_text_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text("{}\n")
    for model in ("absent-model", "texts.jsonl"):  # neither is looked at
        result = CliRunner().invoke(eval_command, [model, "--data", "text.jsonl"])
        assert isinstance(result.exception, UserError)
        assert (result.exception.problem, result.exception.fix) == (
            "no such file or folder",
            "did you mean --data texts.jsonl?",
        )


def test_a_near_name_of_a_text_is_said_as_a_flag():
    with pytest.raises(UserError) as refused, text_flags():
        raise UserError("no", where="data.path: txet.py", fix="did you mean data.path=text.py?")
    assert (refused.value.where, refused.value.fix) == ("txet.py", "did you mean --data text.py?")


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (
            "leave it out, set data.on_error to skip, or set data.chat.template to another",
            "leave it out, or use another --template",
        ),
        ("mend it, or set data.on_error to skip", "mend it"),
        ("name it: data.columns={messages: NAME}", "rename its column to messages"),
        ("add files, or set data.path", "add files, or use another --data"),
    ],
)
def test_rows_and_templates_are_mended_without_a_recipe(recipe, flags):
    with pytest.raises(UserError) as refused, text_flags():
        raise UserError("no", where="a.jsonl:1", fix=recipe)
    assert (refused.value.where, refused.value.fix, refused.value.code) == ("a.jsonl:1", flags, 1)


def test_runs_and_the_monitor_need_no_torch():
    code = (
        "import sys; import bloomery.cli.runs, bloomery.cli.watch, bloomery.cli.eval, bloomery.cli.report,"
        " bloomery.view.terminal, bloomery.monitor.sinks, bloomery.view.planned_figures;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
