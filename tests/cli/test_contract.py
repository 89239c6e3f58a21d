"""What programs are written against: verbs, flags, places, names of events, keys of JSON, exit codes."""

import inspect
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import preloaded
from bloomery.cli import COMMANDS, cli, main
from bloomery.cli.demo import _evaluate
from bloomery.monitor.events import KINDS, Event, StepDone, read_events
from bloomery.plan.store import read_plan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Recipe

FLAGS = {
    "completion": set(),
    "demo": {"--json", "--run-dir"},
    "doctor": {
        *("--probe", "--json", "--machine", "--explain", "--fix", "--bundle", "--docker"),
        *("--gpu-check", "--tiny", "--only", "--limit", "--output", "--by", "--yes", "-y"),
    },
    "recipes list": set(),
    "recipes show": {"--model", "--data"},
    "recipes copy": set(),
    "recipes schema": set(),
    "recipes import": {"--out"},
    "tokenizer train": set(),
    "tokenizer inspect": {"--text"},
    "prepare": {"--preview", "--html", "--check", "--model", "--data"},
    "plan": {
        *("--model", "--data", "--gpu", "--gpus", "--nodes", "--host-memory"),
        *("-d", "--devices", "--price-per-hour", "--simulate", "-v", "--verbose", "--json"),
    },
    "bench": {"--sweep", "--export", "--json", "--author", "--limit"},
    "train": {
        "--model",
        "--data",
        "--run-dir",
        "-d",
        "--devices",
        "--dry-run",
        "--smoke-test",
        "--recover",
        "--no-check",
        "--for",
        "--json",
    },
    "sweep": {
        *(
            "--metric",
            "--task",
            "--search",
            "--runs",
            "--seed",
            "--budget",
            "--per-device",
            "--together",
            "--run-dir",
            "-d",
            "--devices",
        ),
        *("--dry-run", "--json"),
    },
    "resume": {"--from", "--recover", "--no-check", "--trust-code", "-d", "--devices"},
    "stop": set(),
    "save": {"--profile"},
    "eval": {
        "--trust-code",
        "--data",
        "--step",
        "--no-bos",
        "--template",
        "--json",
        "-d",
        "--devices",
        "--quantize",
        "--task",
        "--against",
        "--shots",
        "--limit",
        "--chat",
        "--extract",
        "--max-new-tokens",
        "--stop",
        "--temperature",
        "--seed",
        "--outputs",
        "--lm-eval",
        "--include-path",
        "--environment",
        "--max-turns",
        "--generations",
    },
    "generate": {
        "--prompt",
        "--prompts",
        "--top-scores",
        "--data",
        "--image",
        "--chat",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--repetition-penalty",
        "--stop",
        "--seed",
        "--step",
        "--json",
        "-d",
        "--devices",
        "--quantize",
        "--prompt-lookup",
        "--draft",
        "--json-schema",
        "--jsonl",
        "--out",
        "--shard",
    },
    "export": {
        "--to",
        "--out",
        "--type",
        "--quantize",
        "--quant",
        "--weights",
        "--step",
        "--verify",
        "--no-verify",
        "-d",
        "--devices",
    },
    "chat": {
        "--system",
        "--template",
        "--step",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--repetition-penalty",
        "--seed",
        "-d",
        "--devices",
        "--quantize",
        "--prompt-lookup",
        "--draft",
        "--tools",
        "--environment",
        "--max-turns",
    },
    "import": {"--out", "--type"},
    "convert": {
        "--to",
        "--dtype",
        "--max-length",
        "-t",
        "--template",
        "--enable-checkpoint",
        "--add-tokens",
        "--step",
        "--verify",
        "--no-verify",
        "-d",
        "--devices",
    },
    "merge": {
        "--weights",
        "--out",
        "--type",
        "--verify",
        "--no-verify",
        "-d",
        "--devices",
    },
    "push": {"--public", "--dry-run"},
    "serve": {
        "--adapter",
        "--host",
        "--port",
        "--open",
        "--template",
        "--max-requests",
        "--max-queue",
        "--max-context",
        "--max-new-tokens",
        "--max-seconds",
        "--max-body",
        "--max-images",
        "--allowed-local-media-path",
        "--tools",
        "--environment",
        "--max-turns",
        "--step",
        "-d",
        "--devices",
        "--quantize",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--repetition-penalty",
        "--seed",
    },
    "download": {"--dataset", "--to"},
    "watch": {"--once", "--json", "--web"},
    "studio": {"--host", "--port", "--token", "--no-open"},
    "report": {"--out"},
    "slurm": {
        "--model",
        "--data",
        "--site",
        "--nodes",
        "--account",
        "--time",
        "--queue",
        "--gpu",
        "--exclude",
        "--image",
        "--volume",
        "--dry-run",
        "--json",
    },
    "runs rm": {"-y", "--yes", "--dry-run", "--json"},
    "runs clean": {"-y", "--yes", "--dry-run", "--json"},
    "runs note": {"--tag", "--untag", "--text", "--json"},
}
DEFAULTS = {
    "optimizer": {
        "kind": "adamw",
        "learning_rate": "auto",
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": "auto",
        "warmup": "auto",
        "state_dtype": "float32",
        "paged": False,
        "offload": False,
        "fused_backward": False,
        "stochastic_rounding": False,
        "schedule": "cosine",
    },
    "train": {
        "tokens_per_step": "auto",
        "micro_batch_size": "auto",
        "precision": "auto",
        "compile": "auto",
        "attention": "auto",
        "activation_checkpointing": "auto",
        "offload_activations": False,
        "max_grad_norm": 1.0,
        "seed": 0,
        "deterministic": "auto",
    },
    "parallel": {
        "replicate": "auto",
        "shard": "auto",
        # 1 before pipelines trained; a plan may choose one now
        "pipeline": "auto",
        "pipeline_schedule": "1f1b",
        "pipeline_microbatches": "auto",
    },
    "data": {
        "sequence_length": 1024,
        "validation": "auto",
        "packing": True,
        "num_proc": "auto",
        "pin_memory": "auto",
        "prefetch": "auto",
        "on_error": "stop",
    },
    "eval": {"early_stopping_patience": "none"},
    "sample": {"prompts": [], "max_new_tokens": 200, "temperature": 0.8, "top_p": 0.95},
    "checkpoint": {"keep": 3, "async_save": "auto"},
    "quantize": {"kind": "none"},
    "adapter": {"kind": "none"},
    "objective": {"kind": "pretrain"},
}
LENGTHS = {
    "checkpoint.every": "15 min",
    "eval.every": "12.5%",
    "logging.every": "10 steps",
}
EVENTS = {
    "RunStarted",
    "Phase",
    "StepDone",
    "EvalDone",
    "Sampled",
    "Saved",
    "DeviceStats",
    "Warned",
    "Recovered",
    "Resumed",
    "RunEnded",
    "TaskDone",  # of `bloomery eval`
    "ExpertLoad",  # of mixtures of experts
    "StepHealth",  # came later: what a diagnosis of a run reads
    "StepChecked",  # came later: one step on the GPU compared with the CPU
}
STEP = {
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "sequences_per_second",
    "step_seconds",
    "data_wait_seconds",
    "memory_gib",
}
TINY = """
model: {family: llama, hidden_size: 32, intermediate_size: 64, num_layers: 1, num_heads: 2, max_positions: 64}
tokenizer: {train: {vocab_size: 300}}
data: {path: text, glob: "*.txt", sequence_length: 64, validation: 20%}
train: {max_steps: 3, tokens_per_step: 128, compile: false}
checkpoint: {every: 2 steps}
eval: {every: 2 steps}
sample: {prompts: ["the"], max_new_tokens: 4}
"""


def leaves(group: click.Group, words: str = "") -> dict[str, click.Command]:
    context, found = click.Context(group), {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        path = f"{words} {name}".strip()
        found |= leaves(command, path) if isinstance(command, click.Group) else {path: command}
    return found


def test_verbs_and_flags():
    commands = leaves(cli)
    assert set(commands) == set(FLAGS)
    for words, flags in FLAGS.items():
        options = [
            parameter
            for parameter in commands[words].params
            if isinstance(parameter, click.Option) and not parameter.hidden  # that studio passes
        ]
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        assert flags == known, words


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_help_is_a_short_sentence_for_each_command_and_option(name):
    command = leaves(cli)[name]
    lines = [
        option.help
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    lines += [COMMANDS[name][1]] if name in COMMANDS else [command.help.splitlines()[0]]
    for line in lines:
        text = line.partition(" [")[0]  # the default
        assert (text[:1].isupper() and text.endswith(".")) or text != line, line
        assert len(text) <= 60, line


def test_defaults_of_a_recipe():
    recipe = Recipe.model_validate(
        {"model": {"preset": "go-coder-tiny"}, "data": {"path": "corpus"}}
    )
    for section, defaults in DEFAULTS.items():
        said = getattr(recipe, section)
        assert {key: getattr(said, key) for key in defaults} == defaults, section
    for key, length in LENGTHS.items():
        section, name = key.split(".")
        assert str(getattr(getattr(recipe, section), name)) == length


def test_events_and_the_fields_of_a_step():
    assert set(KINDS) == EVENTS
    common = {field.name for field in fields(Event)}
    assert common == {"step", "time"}
    assert {field.name for field in fields(StepDone)} - common >= STEP  # more may come, none may go


def test_keys_of_the_demo():
    """It takes two minutes, so its source has to do."""
    source = inspect.getsource(_evaluate)
    for key in (
        "bits_per_byte",
        "gzip_bits_per_byte",
        "xz_bits_per_byte",
        "seconds",
        "report",
        "folder",
    ):
        assert f'"{key}":' in source


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "go-coder-tiny", "--gpu", "RX 6700 XT"], 0),
        (
            [
                "plan",
                "go-coder-125m",
                "model.hidden_size=16384",
                "model.num_layers=64",
                "--gpu",
                "RX 6600",
            ],
            1,
        ),
        (["plan", "go-coder-tiny", "--gpu", "a toaster"], 2),
        (["plan", "no-such-recipe"], 2),
        (["plan", "go-coder-tiny", "objective.kind=ppo"], 2),
        (["plan", "go-coder-tiny", "model.preset=go-coder-huge"], 2),
        (["plan", "go-coder-tiny", "train.tokens_per_step=1000"], 2),
        (["plan", "go-coder-tiny", "train.max_steps=5%"], 2),
        (["plan", "go-coder-tiny", "train.lenght=1 steps"], 2),
        (["train", "go-coder-tiny", "--dry-run", "-d", "93"], 2),
        (["train", "go-coder-tiny", "--dry-run", "-d", "0,1"], 2),
        (["resume", "no-such-run"], 2),
        (["eval"], 2),
        (["doctor", "--machine", "no-such-file"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_exit_codes(words, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == code, capsys.readouterr().err


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    """A folder in which a tiny recipe was trained as people do it."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "text").mkdir()
    for number in range(12):
        (folder / f"text/{number}.txt").write_text(
            " ".join(f"the cat {number} sat on mat {n}" for n in range(30))
        )
    (folder / "tiny.yaml").write_text(TINY)
    command = [
        sys.executable,
        "-m",
        "bloomery",
        "train",
        "tiny.yaml",
        "logging.trackers=[tensorboard]",
    ]
    done = preloaded.run(command, cwd=folder, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def the_run(workshop: Path) -> Path:
    (run,) = (workshop / "runs").iterdir()
    return run


def test_places(workshop):
    run = the_run(workshop)
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", run.name)
    files = {path.name for path in run.iterdir()}
    assert {
        "recipe.yaml",
        "plan.json",
        "machine.json",
        "events.jsonl",
        "log.txt",
        "metrics.json",
        "tensorboard",
        "checkpoints",
        "lock",
    } <= files
    assert {"step-00000002", "step-00000003"} <= {
        path.name for path in (run / "checkpoints").iterdir()
    }
    (prepared,) = (workshop / "prepared").iterdir()
    assert re.fullmatch(r"tiny-[0-9a-f]{8}", prepared.name)
    assert {"tokenizer.json", "manifest.json", "train-00000.bin"} <= {
        path.name for path in prepared.iterdir()
    }


def test_every_step_has_its_event_before_its_checkpoint(workshop):
    lines = [
        json.loads(line) for line in (the_run(workshop) / "events.jsonl").read_text().splitlines()
    ]
    assert all({"event", "step", "time"} <= set(line) and line["event"] in EVENTS for line in lines)
    steps = [line for line in lines if line["event"] == "StepDone"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(set(line) >= STEP | {"event", "step", "time"} for line in steps)
    for saved in (at for at, line in enumerate(lines) if line["event"] == "Saved"):
        assert any(
            line["event"] == "StepDone" and line["step"] == lines[saved]["step"]
            for line in lines[:saved]
        )
    assert lines[-1]["event"] == "RunEnded" and lines[-1]["status"] == "done"


def test_paths_are_absolute_in_the_plan_and_the_run_keeps_its_recipe(workshop):
    run = the_run(workshop)
    assert read_plan(run / "plan.json").data.prepared.is_absolute()
    recipe = load_recipe(run / "recipe.yaml").recipe
    assert recipe.data.path == str(workshop / "text")
    assert (
        len([event for event in read_events(run / "events.jsonl") if isinstance(event, StepDone)])
        == 3
    )


def asked(workshop, monkeypatch, *words):
    monkeypatch.chdir(workshop)
    result = CliRunner().invoke(cli, list(words), catch_exceptions=False, standalone_mode=False)
    return json.loads(result.stdout)  # one document and nothing else


def test_json_of_a_run(workshop, monkeypatch):
    run = the_run(workshop).name
    told = asked(workshop, monkeypatch, "eval", "last", "--json")
    assert list(told) == ["loss", "perplexity", "bits_per_byte", "tokens", "bytes"]
    text = asked(
        workshop, monkeypatch, "generate", run, "--prompt", "the", "--max-new-tokens", "3", "--json"
    )
    assert set(text["results"][0]) == {"prompt", "text"}
    (line,) = asked(workshop, monkeypatch, "runs", "--json")["runs"]
    fields = {
        "name",
        "state",
        "step",
        "steps",
        "loss",
        "bits_per_byte",
        "tags",
        "reward",
        "bytes",
        "command",
    }
    assert set(line) == fields and line["reward"] is None  # trained without rewards


def test_json_of_the_doctor(workshop, monkeypatch):
    told = asked(workshop, monkeypatch, "doctor", "--json")
    assert list(told) == ["ready", "findings", "machine", "then", "plugins"]
    machine = json.loads((the_run(workshop) / "machine.json").read_text())
    assert set(told["machine"]) == set(machine) and set(told["machine"]["host"]) == set(
        machine["host"]
    )
    assert list(told["then"]) == [
        "recipe",
        "waits",
        "problem",
        "fits",
        "memory",
        "seconds",
        "choices",
    ]


def test_a_folder_that_holds_a_run_is_refused_naming_resume(workshop, monkeypatch, capsys):
    monkeypatch.chdir(workshop)
    with pytest.raises(SystemExit) as caught:
        main(["train", "tiny.yaml", "--run-dir", str(the_run(workshop))])
    assert caught.value.code == 1
    assert f"bloomery resume {the_run(workshop).name}" in capsys.readouterr().err


def test_only_four_kinds_of_keys_may_change_in_a_run(workshop, monkeypatch, capsys):
    monkeypatch.chdir(workshop)
    with pytest.raises(SystemExit) as caught:
        main(["resume", "last", "train.seed=3"])
    assert caught.value.code == 2 and "train.seed" in capsys.readouterr().err
