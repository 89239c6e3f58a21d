"""Shell completion: the script of each shell, and what it answers."""

import os
import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.cli.common import SHELLS
from bloomery.cli.completion import FILES, MODELS, PATH_KEYS, allowed_words, values_of
from bloomery.core.errors import UserError
from bloomery.facts.objectives import OBJECTIVES
from bloomery.hardware.specs import find_gpu, gpu_table
from bloomery.recipe.aliases import all_keys


def completed(words: list[str], start: str) -> list[str]:
    return [
        item.value for item in ShellComplete(cli, {}, "bloomery", "X").get_completions(words, start)
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell):
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0 and "_BLOOMERY_COMPLETE" in done.output
    if shell == "bash":
        assert (
            subprocess.run(["bash", "-n"], input=done.output, text=True, check=False).returncode
            == 0
        )


def test_commands_recipes_runs_and_keys_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine-1").mkdir(parents=True)
    (tmp_path / "own.yaml").touch()
    assert completed([], "pl") == ["plan"]
    assert "go-coder-125m" in completed(["plan"], "go-") and completed(["train"], "ow") == [
        "own.yaml"
    ]
    assert completed(["resume"], "mi") == ["mine-1"] and "last" in completed(["watch"], "")
    assert "train.epochs=" in completed(["train", "demo"], "train.ep")


def kinds(words, start):
    return {
        item.type for item in ShellComplete(cli, {}, "bloomery", "X").get_completions(words, start)
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2").mkdir()
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / ".hidden").touch()
    return tmp_path


def commands(group=cli, path=()):
    """Every command with its words, those of groups too."""
    context = click.Context(group, resilient_parsing=True)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        yield (*path, name), command


def test_every_option_of_a_path_completes_files(folder):
    """As the shell does without any script: a folder or a file."""
    checked = 0
    for words, command in commands():
        for parameter in command.params:
            metavar = parameter.metavar or ""
            if isinstance(parameter, click.Option) and metavar in (*MODELS, *FILES):
                offered = kinds([*words, parameter.opts[-1]], "cha")
                assert offered and offered <= {"file", "dir"}, (words, parameter)
                checked += 1
    assert checked > 25


@pytest.mark.parametrize("command", ["chat", "serve", "export", "convert", "eval", "generate"])
def test_a_model_is_a_folder_or_a_run(folder, command):
    assert kinds([command], "Smo") == {"file"}
    (folder / "runs/SmolLM2-lora").mkdir(parents=True)
    assert completed([command], "Smo") == ["SmolLM2-lora", "SmolLM2/"]


def test_values_of_keys_are_completed(folder):
    assert completed(["train", "demo"], "data.path=cha") == ["data.path=chats.jsonl"]
    assert completed(["train", "demo"], "model.from=Smo") == ["model.from=SmolLM2/"]
    assert completed(["train", "demo"], "objective.kind=") == [
        f"objective.kind={kind}"
        for kind in sorted(OBJECTIVES, key=list(allowed_words(("objective", "kind"))).index)
    ]
    assert completed(["plan", "demo"], "train.compile=") == [
        f"train.compile={word}" for word in ("auto", "true", "false")
    ]
    assert completed(["plan", "demo"], "adapter=l") == ["adapter=lora"]
    assert completed(["plan", "demo"], "objective.k").count("objective.kind=") == 1


@pytest.mark.parametrize("recipe", [("demo",), ("--model", "SmolLM2", "--data", "chats.jsonl")])
def test_bash_splits_a_word_at_its_equals_sign(folder, recipe):
    before = ["train", *recipe, "train.epochs=2"]
    assert completed([*before, "data.path", "="], "cha") == ["chats.jsonl"]
    assert completed([*before, "data.path"], "=") == ["SmolLM2/", "chats.jsonl"]
    assert completed([*before, "objective.kind", "="], "s") == ["sft", "simpo"]
    assert "train.max_steps=" in completed([*before, "train.seed", "=", "2"], "")


def test_every_key_with_words_offers_each_once():
    for path in all_keys():
        words = allowed_words(path)
        assert len(words) == len(set(words)), path
    assert all(values_of(key, "") is not None for key in PATH_KEYS)


def test_every_gpu_that_is_offered_is_known():
    offered = completed(["plan", "demo", "--gpu"], "")
    assert (
        len(offered) >= sum(len(spec.memory_gib) for spec in gpu_table().gpu)
        and offered[-1] == "all"
    )
    ambiguous = []
    for name in offered[:-1]:
        assert " " not in name
        try:
            find_gpu(name)
        except UserError as error:
            ambiguous.append((name, error.problem))
    assert ambiguous == []
    assert "RTX-4090" in completed(["plan", "demo", "--gpu"], "RTX")
    assert "8xMI300X" in completed(["plan", "demo", "--gpu"], "8xmi3")
    assert completed(["slurm", "demo", "--gpu"], "MI50") == ["MI50-16GB", "MI50-32GB"]


def test_bash_completes_a_path_with_the_printed_script(folder):
    """The function of the script, as bash calls it: words split at the equals sign, no space after a folder."""
    script = CliRunner().invoke(cli, ["completion", "bash"]).output
    program = """
compopt() { echo "option $2"; }
complete() { :; }
%s
bloomery() { "%s" -m bloomery "$@"; }
COMP_WORDS=(bloomery train demo model.from = Smo); COMP_CWORD=5
_bloomery_completion bloomery
echo "reply ${COMPREPLY[*]}"
"""
    wrapper = folder / "bloomery.sh"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bloomery "$@"\n')
    wrapper.chmod(0o755)
    text = (program % (script, sys.executable)).replace(
        "_bloomery_completion bloomery\n", f"_bloomery_completion {wrapper}\n"
    )
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.split() == ["option", "nospace", "reply", "SmolLM2/"]
