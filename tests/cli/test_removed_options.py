"""An option that a command had once is answered with what does the same today."""

import pytest

from bloomery.cli import main


@pytest.mark.parametrize(
    ("command_line", "replacement"),
    [
        ("bench demo --torch 2.12.1,2.13.0", "benchmarks/torch_versions.py"),
        ("eval last --task stdlib-functions --run-code", "lm-evaluation-harness"),
        ("eval last --task tasks.jsonl --samples 20", "lm-evaluation-harness"),
        ("merge a b --method slerp --out c", "mergekit"),
        ("merge a b --base c --out d", "mergekit"),
        ("merge a b --density 0.5 --out d", "mergekit"),
    ],
)
def test_a_removed_option_names_its_replacement(command_line, replacement, capsys):
    with pytest.raises(SystemExit) as exit_of_command:
        main(command_line.split())
    assert exit_of_command.value.code == 2
    errors = capsys.readouterr().err
    assert "was removed" in errors and replacement in errors
