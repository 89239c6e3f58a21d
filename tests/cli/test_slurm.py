"""`bloomery slurm`: the script against the sites' published rules, what is refused, and what sbatch gets."""

import json
import os
import re
import shlex
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.cli.slurm import _seconds
from bloomery.cli.stop_and_save import runner_of, slurm_job_of, stop_run
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.hardware.sites import find_site, site_names
from bloomery.hardware.specs import find_gpu
from bloomery.launch.job_script import seconds_to_save

RECIPE = """
model: {family: llama, vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336, num_layers: 32, num_heads: 32,
        num_kv_heads: 8, head_dim: 128, max_positions: 8192, rope_theta: 500000.0}
tokenizer: {from: models/Llama-3.1-8B}
data: {path: corpus, sequence_length: 8192}
train: {max_tokens: 1T, tokens_per_step: 16777216, micro_batch_size: 4, activation_checkpointing: full}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "large.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def slurm(*words: str, dry: bool = True):
    arguments = ["slurm", "large.yaml", *words, *(["--dry-run"] if dry else [])]
    return CliRunner().invoke(cli, arguments)


def directives(script: str) -> dict[str, str]:
    """The options of the #SBATCH lines."""
    words = [
        word
        for line in re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
        for word in line.split()
    ]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def refusal(*words: str, dry: bool = True) -> UserError:
    error = slurm(*words, dry=dry).exception
    assert isinstance(error, UserError), error
    return error


# OLCF's table of 2026-07: nodes of a job -> hours at most; LUMI's: partition -> nodes, hours.
@pytest.mark.parametrize(
    ("nodes", "hours"),
    [(1, 2), (64, 2), (91, 2), (92, 6), (183, 6), (184, 12), (1882, 12), (9472, 12)],
)
def test_frontiers_time_limits_follow_the_number_of_nodes(nodes, hours) -> None:
    queue = find_site("frontier").queue(None)
    assert queue is not None and queue.name == "batch" and queue.hours(nodes) == hours


@pytest.mark.parametrize(
    ("queue_name", "nodes", "hours"),
    [("standard-g", 1024, 48), ("small-g", 4, 72), ("dev-g", 32, 3)],
)
def test_lumis_partitions(queue_name, nodes, hours) -> None:
    queue = find_site("lumi").queue(queue_name)
    assert queue is not None and queue.hours(nodes) == hours
    with pytest.raises(UserError, match=f"at most {nodes:,} nodes"):
        queue.hours(nodes + 1)


def test_every_site_names_a_gpu_of_the_table_and_its_cores() -> None:
    for name in site_names():
        site = find_site(name)
        if site.gpu:
            assert find_gpu(site.gpu).name
            # 64 cores, of which the system keeps one in eight
            assert site.gpus_per_node * site.cpus_per_gpu == 56


def test_two_steps_and_a_save_fit_between_the_signal_and_the_limit(folder) -> None:
    result = slurm("--site", "frontier", "--nodes", "64", "--account", "ABC123")
    assert result.exit_code == 0
    options = directives(result.stdout)
    assert "--requeue" in options
    # each as long as the plan's range has it
    signalled = int(options["--signal"].removeprefix("TERM@"))
    plan = json.loads(
        CliRunner()
        .invoke(cli, ["plan", "large.yaml", "--gpu", "8xMI250X", "--nodes", "64", "--json"])
        .stdout
    )
    step = plan["step_seconds"]["high"]
    # float32 weights and two AdamW states, shared out over the nodes
    assert plan["save"]["seconds"]["value"] == pytest.approx(12 * 8.03e9 / 64 / 1e9, rel=0.01)
    needed = 2 * step + plan["save"]["seconds"]["high"]
    assert needed + 60 <= signalled < needed + 120
    assert "512 on 64 nodes" in result.stderr and "about two minutes" in result.stderr


@pytest.mark.parametrize(
    ("time", "seconds"), [("2h", 7200), ("02:00:00", 7200), ("0-01:30:00", 5400), ("90m", 5400)]
)
def test_a_time_is_written_with_a_unit_or_as_slurm_does(time: str, seconds: int) -> None:
    assert _seconds(time) == seconds


def test_the_script_is_valid_shell(folder) -> None:
    for words in (
        ["--site", "frontier", "--nodes", "64", "--account", "A"],
        ["--site", "lumi", "--nodes", "2", "--account", "A"],
        ["--site", "generic", "--gpu", "8xMI300X", "--nodes", "16"],
    ):
        script = slurm(*words).stdout
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert checked.returncode == 0 and not checked.stderr, checked.stderr


def test_arguments_with_spaces_stay_one_word(folder) -> None:
    script = slurm(
        "data.glob=*.go and more", "--site", "lumi", "--nodes", "64", "--account", "A B"
    ).stdout
    assert "train large.yaml 'data.glob=*.go and more'\n" in script


def test_a_short_run_gets_a_short_job(folder) -> None:
    result = slurm(
        "train.max_tokens=2B", "--site", "lumi", "--nodes", "64", "--account", "A", "--json"
    )
    job = json.loads(result.stdout)
    assert job["run_seconds"]["value"] < job["time_seconds"] < 2 * job["run_seconds"]["value"]
    assert job["ranks"] == 512 and job["job"] is None and job["queue"] == "standard-g"
    # the shortest, too: it has time to start and to save
    words = ["--site", "lumi", "--nodes", "64", "--account", "A", "--json"]
    step = json.loads(slurm("train.max_tokens=16777216", *words).stdout)
    assert step["signal_seconds"] + 180 <= step["time_seconds"] < 1800


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["--site", "frontir", "--nodes", "2"], "unknown site 'frontir'", "frontier"),
        (["--site", "elcap", "--nodes", "2"], "unknown site 'elcap'", "frontier, lumi, generic"),
        (["--site", "frontier", "--nodes", "2"], "needs an account", "--account"),
        (
            ["--site", "frontier", "--nodes", "64", "--account", "A", "--queue", "batc"],
            "no queue batc",
            "batch",
        ),
        (
            ["--site", "frontier", "--nodes", "65", "--account", "A", "--queue", "extended"],
            "at most 64 nodes",
            "--nodes 64",
        ),
        (
            ["--site", "frontier", "--nodes", "64", "--account", "A", "--time", "5h"],
            "at most 2 h",
            "--time 2h",
        ),
        (
            ["--site", "frontier", "--nodes", "64", "--account", "A", "--time", "4m"],
            "too short",
            "--time 8m",
        ),
        (["--site", "lumi", "--nodes", "2", "--account", "A", "--time", "soon"], "soon", "12h"),
        # Minutes and seconds to Slurm, hours and minutes to many readers.
        (
            ["--site", "lumi", "--nodes", "2", "--account", "A", "--time", "2:00"],
            "2:00",
            "12:00:00",
        ),
        (
            ["--site", "lumi", "--nodes", "2", "--account", "A", "--time", "5 steps"],
            "no time",
            "12h",
        ),
        *(
            (
                ["--site", "lumi", "--nodes", "2", "--account", "A", "--exclude", hosts],
                "no list of hosts",
                "node17,node[20-23]",
            )
            for hosts in ("", "a b", "a,,b", "$(id)", "node[1", "-x")
        ),
        (["--site", "generic", "--nodes", "2"], "does not say which GPUs", "--gpu"),
        (
            ["--site", "frontier", "--nodes", "63", "--account", "A", "parallel.shard=512"],
            "512 devices",
            "--nodes",
        ),
        (["--site", "generic", "--gpu", "8xT4", "--nodes", "1"], "does not fit", "bloomery plan"),
        (["--site", "absent.toml", "--nodes", "1"], "cannot read the site file", "existing"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(folder, words, problem, fix) -> None:
    error = refusal(*words)
    assert problem in error.problem and fix in (error.fix or "")


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("gpu = 'MI250X'\ngpus_per_nod = 8\n", "unknown key", "gpus_per_node"),
        ("gpu = 'MI250X'\ngpus_per_node = 'eight'\n", "not a valid value", "correct"),
        ("gpu = 'MI250X\n", "no TOML", "sites.toml"),
    ],
)
def test_a_wrong_site_file_is_refused_at_its_key(folder, text, problem, fix) -> None:
    (folder / "mine.toml").write_text(text)
    error = refusal("--site", "mine.toml", "--nodes", "2")
    assert problem in error.problem and fix in (error.fix or "") and "mine.toml" in error.where


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_sbatch_gets_the_script_and_its_number_is_shown(folder, monkeypatch) -> None:
    program(folder, "sbatch", 'cat > submitted; echo "$@" > options; echo "4711;cluster"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    result = slurm("--site", "frontier", "--nodes", "64", "--account", "A", dry=False)
    assert result.exit_code == 0
    assert (folder / "submitted").read_text() == result.stdout.removesuffix("\n")
    assert (folder / "options").read_text() == "--parsable\n"
    assert "4711 is in the queue" in result.stderr
    assert "bloomery watch runs/large-slurm-4711.1" in result.stderr
    assert "large-4711.log" in result.stderr


def test_slurms_own_words_are_shown_when_it_refuses(folder, monkeypatch) -> None:
    program(
        folder, "sbatch", 'echo "sbatch: error: Invalid account or account/partition" >&2; exit 1'
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    error = refusal("--site", "frontier", "--nodes", "64", "--account", "A", dry=False)
    assert error.problem == "sbatch refused the job: Invalid account or account/partition"


def test_without_slurm_nothing_is_submitted(folder, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    error = refusal("--site", "frontier", "--nodes", "64", "--account", "A", dry=False)
    assert "no `sbatch` here" in error.problem and "--dry-run" in error.fix


def test_a_run_that_does_not_fit_is_not_submitted(folder, monkeypatch) -> None:
    program(folder, "sbatch", "touch submitted; echo 1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    refusal("--site", "generic", "--gpu", "8xT4", "--nodes", "1", "--time", "1h", dry=False)
    assert not (folder / "submitted").exists()


@pytest.mark.parametrize(
    ("step", "save", "expected"), [(1.0, 0.0, 120), (76.0, 192.0, 420), (600.0, 0.0, 1260)]
)
def test_the_time_for_a_save_by_hand(step, save, expected) -> None:
    # 2 steps, the save, a minute; rounded up to minutes
    assert seconds_to_save(step, save) == expected


def test_hosts_that_are_not_wanted_are_excluded(folder) -> None:
    hosts = "frontier00017,frontier[00020-00023,00030]"
    words = ["--site", "frontier", "--nodes", "64", "--account", "A", "--exclude", hosts]
    script = slurm(*words).stdout
    assert directives(script)["--exclude"] == hosts
    # and stay excluded when the run excludes others
    assert f'ExcNodeList="{hosts},$faulty"' in script


def run_of_another_host(folder: Path, job: str, name: str = "one") -> RunFolder:
    run = RunFolder(folder / "runs" / name)
    (run.path / "ranks").mkdir(parents=True)
    entry = {"pid": 1, "started": "x", "host": "node17", "receives_signals": True, "since": 0.0}
    run.lock.write_text(json.dumps(entry))
    if not job:
        return run
    message = {"start": "s", "job": job, "attempt": 0, "resumed": False, "address": "", "port": 1}
    (run.path / "ranks/word.json").write_text(json.dumps(message))
    return run


def test_a_run_on_another_node_is_stopped_through_slurm(folder, monkeypatch) -> None:
    run = run_of_another_host(folder, "slurm-4711.1")
    assert slurm_job_of(run) == "4711"
    program(folder, "scancel", 'echo "$@" > cancelled')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("bloomery.cli.stop_and_save.beats", lambda _: True)
    runner = runner_of(run)
    assert runner.working
    runner.send(15)
    assert (folder / "cancelled").read_text() == "--signal=TERM 4711\n"
    # a stop by the user, unlike one by the time limit, leaves word for the job script
    assert not run.stop_request.exists()
    assert (
        stop_run(replace(runner, entry=runner.entry | {"pid": 2}), on_event=lambda _: None) is None
    )
    assert run.stop_request.exists()
    run.stop_request.unlink()
    program(folder, "scancel", 'echo "scancel: error: Invalid job id 4711" >&2; exit 1')
    with pytest.raises(UserError, match="Invalid job id 4711"):
        stop_run(runner, on_event=lambda _: None)
    assert not run.stop_request.exists()
    program(folder, "scancel", "exec sleep 60")
    monkeypatch.setattr("bloomery.launch.job_script.SLURM_SECONDS", 0.1)
    with pytest.raises(UserError, match="scancel did not answer"):
        stop_run(runner, on_event=lambda _: None)
    assert not run.stop_request.exists()


def test_a_run_whose_job_waits_is_taken_out_of_the_queue_by_slurm(folder, monkeypatch) -> None:
    run = run_of_another_host(folder, "slurm-4711.1")
    program(folder, "scancel", "")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("bloomery.cli.stop_and_save.beats", lambda _: False)
    with pytest.raises(UserError) as idle:
        runner_of(run)
    assert "scancel 4711" in idle.value.fix and "bloomery resume one" in idle.value.fix


def test_a_job_of_one_rank_is_known_by_the_name_of_its_run(folder) -> None:
    assert slurm_job_of(run_of_another_host(folder, "", "tiny-slurm-4711.1")) == "4711"
    assert slurm_job_of(run_of_another_host(folder, "", "tiny-20261128-101500")) == ""


def test_a_run_on_another_machine_without_slurm_is_stopped_there(folder, monkeypatch) -> None:
    run = run_of_another_host(folder, "torchrun-1")
    assert slurm_job_of(run) == ""
    monkeypatch.setattr("bloomery.cli.stop_and_save.beats", lambda _: True)
    with pytest.raises(UserError, match="on another machine"):
        runner_of(run)


KINDS = {  # the site with what it needs, and the GPUs of a node
    "slurm": (("--site", "frontier", "--account", "A"), "8xMI250X"),
    "another cluster": (("--site", "generic", "--gpu", "8xMI300X"), "8xMI300X"),
    "skypilot": (("--site", "skypilot", "--gpu", "8xH200", "--volume", "shared"), "8xH200"),
    "kubernetes": (
        ("--site", "kubernetes", "--gpu", "8xMI300X", "--volume", "v", "--image", "i"),
        "8xMI300X",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_warnings_of_the_plan_are_shown_with_the_job(folder, kind) -> None:
    """Four sequences for sixteen devices: three quarters of what is paid for computes padding."""
    site, gpus = KINDS[kind]
    recipe = ("train.micro_batch_size=1", "train.tokens_per_step=32768", "train.max_tokens=1B")
    job = json.loads(slurm(*recipe, *site, "--nodes", "2", "--json").stdout)
    assert any("do not divide among 16 devices" in warning for warning in job["warnings"])
    words = ["plan", "large.yaml", *recipe, "--gpu", gpus, "--nodes", "2", "--json"]
    assert job["warnings"] == json.loads(CliRunner().invoke(cli, words).stdout)["warnings"]

    result = slurm(*recipe, *site, "--nodes", "2")
    assert "do not divide among 16 devices" in " ".join(result.stderr.split())
    assert "do not divide" not in result.stdout  # the script alone


NO_NAMES = ("A\ntouch PWNED", "A\u2028touch PWNED", "A\x85b", "", " ", "a\tb", "a\rb", "a\x1b[2Jb")


@pytest.mark.parametrize("value", NO_NAMES)
def test_a_text_of_two_lines_gets_into_no_script(folder, value) -> None:
    slurm_words = ("--site", "generic", "--gpu", "8xMI300X", "--nodes", "64", "--time", "1h")
    cloud_words = ("--site", "kubernetes", "--gpu", "8xH100", "--nodes", "64")
    for option in ("--account", "--queue", "--exclude"):
        refused = refusal(*slurm_words, f"{option}={value}")
        assert refused.where == option and refused.code == 2, option
    for option in ("--image", "--volume", "--queue"):
        values = {"--image": "i", "--volume": "v", "--queue": "q", option: value}
        refused = refusal(*cloud_words, *(f"{name}={text}" for name, text in values.items()))
        assert refused.where == option and refused.code == 2, option


@pytest.mark.parametrize("value", ["A B", "A;touch PWNED", "$(touch PWNED)", "`touch PWNED`", "#"])
def test_a_name_stays_one_word_of_its_directive(folder, value) -> None:
    words = ("--site", "generic", "--gpu", "8xMI300X", "--nodes", "64", "--time", "1h")
    script = slurm(*words, "--account", value, "--queue", value).stdout
    lines = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    options = [word for line in lines for word in shlex.split(line)]
    assert f"--account={value}" in options and f"--partition={value}" in options


@pytest.mark.parametrize(
    "line",
    [
        'directives = ["--a\\ntouch PWNED"]',
        'task_options = ["--a\\u2028b"]',
        'step_options = ["--a\\u0085b"]',
        'local_disk = "/tmp\\ntouch PWNED"',
        'environment = {"A\\ntouch PWNED" = "x"}',
        'environment = {"A;touch PWNED" = "x"}',
        'queues = [{name = "a\\ntouch PWNED"}]',
    ],
)
def test_no_line_of_a_site_becomes_two(folder, line) -> None:
    (folder / "site.toml").write_text(f'gpu = "MI300X"\ngpus_per_node = 8\n{line}\n')
    refused = refusal("--site", "site.toml", "--nodes", "64", "--time", "1h")
    assert line.partition(" ")[0] in refused.where


@pytest.mark.parametrize(
    "letter", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\x07", "\n", "\t", "é"]
)
@pytest.mark.parametrize("site", ["skypilot", "kubernetes"])
def test_a_character_that_ends_a_line_of_yaml_spoils_no_job(folder, site, letter) -> None:
    """In the recipe's file name and in an override. Oracle: PyYAML, which SkyPilot reads the file with, and a shell."""
    name = f"a{letter}b.yaml"
    (folder / name).write_text(RECIPE)
    override = f"sample.prompts=[{json.dumps('x' + letter + 'y', ensure_ascii=False)}]"
    words = ["--site", site, "--gpu", "8xH100", "--nodes", "64", "--image", "i", "--volume", "v"]
    told = CliRunner().invoke(cli, ["slurm", name, override, *words])
    if told.exception is not None and not isinstance(told.exception, SystemExit):
        assert isinstance(told.exception, UserError)
        return
    job = yaml.safe_load(told.stdout)
    script = job["run"] if site == "skypilot" else ""
    if site == "kubernetes":
        pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        script = pod["containers"][0]["command"][2]
    (line,) = (line for line in script.split("set -- train ")[1:])
    words = shlex.split(line.partition(" --run-dir")[0])
    assert words[0] == name and words[1:] == [override]


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_plan_stands_before_the_notes_and_not_in_the_script(folder, kind) -> None:
    site, gpus = KINDS[kind]
    edits = ("train.micro_batch_size=1", "train.tokens_per_step=32768", "train.max_tokens=1B")
    result = slurm(*edits, *site, "--nodes", "2")
    words = ["plan", "large.yaml", *edits, "--gpu", gpus, "--nodes", "2"]
    planned = CliRunner().invoke(cli, words).stdout.splitlines()
    count, _, name = gpus.rpartition("x")
    more = f'{shlex.join(words[:5])} --gpu "{name}" --gpus {count} --nodes 2 -v'
    shown = result.stderr.splitlines()
    before_next = next(at for at, line in enumerate(planned) if line.startswith("next"))
    assert shown[:before_next] == planned[:before_next]
    assert f"bloomery {more}" in " ".join(result.stderr.replace("\\\n", " ").split())
    assert not set(planned) & set(result.stdout.splitlines()) - {""}
