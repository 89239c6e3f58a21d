"""`bloomery train`: words for a launcher, and how a stopped run ends."""

from dataclasses import replace

import pytest
from click.testing import CliRunner
from test_eval_and_runs import STEP

from bloomery.cli import cli
from bloomery.cli.train import conclude
from bloomery.monitor.events import EventLog
from bloomery.runs.flow import EndedRun


def test_words_for_a_launcher_are_shown_as_a_command():
    told = CliRunner().invoke(
        cli, ["train", "qwen2.5-1.5b-lora-tiny", "--dry-run", "--", "--nproc-per-node", "2"]
    )
    assert told.exception is None or isinstance(told.exception, SystemExit)
    assert "-m torch.distributed.run --nproc-per-node" in told.output


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        (["-d", "cpu,cpu"], ["bloomery train demo-rl-base -d cpu,cpu"]),
        (
            ["-d", "cpu"],
            ["bloomery train demo-rl-base -d cpu", "bloomery bench demo-rl-base -d cpu"],
        ),
        (["parallel.replicate=2"], []),  # of these devices there is one here
    ],
)
def test_a_dry_run_ends_with_the_command_for_the_same_devices(words, commands):
    told = CliRunner().invoke(cli, ["train", "demo-rl-base", "--dry-run", *words])
    ends = [line[10:].partition("   ")[0] for line in told.stdout.splitlines()]
    ends = [line for line in ends if line.startswith("bloomery ") and not line.endswith(" -v")]
    assert ends == commands


@pytest.mark.parametrize(
    ("saved", "steps", "told"),
    [
        ([], 3, "starts over"),
        (["step-00000003"], 3, "checkpoint saved"),
        (["step-00000003"], 5, "continues from step 3"),  # its ranks did not answer, and were ended
    ],
)
def test_a_stopped_run_claims_no_checkpoint_that_it_lacks(saved, steps, told, tmp_path, capsys):
    for name in saved:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with EventLog(tmp_path / "events.jsonl") as emit:
        emit(replace(STEP, step=steps))
    assert conclude(EndedRun(tmp_path, 75)) == 75
    assert told in capsys.readouterr().err
