"""Shell completion: the script of each shell, and what it answers."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time

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


# Lines that are typed, and what Tab makes of them, with an X typed behind it.
TYPED = (
    ("pla", "plan X"),
    ("plan demo --gpu RTX-409", "plan demo --gpu RTX-4090X"),
    ("plan demo --gpu=rtx-309", "plan demo --gpu=RTX-3090X"),
    ("train demo objective.ki", "train demo objective.kind=X"),
    ("train demo model.from=Smo", "train demo model.from=SmolLM2/X"),
    ("train demo --data=cha", "train demo --data=chats.jsonl X"),
    ("resume mi", "resume mine-1 X"),
)
STARTS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
}
SETUPS = {
    "bash": """bind 'set enable-bracketed-paste off'; PS1='$ '""",
    "zsh": "autoload -U compinit; compinit -u -D; setopt nobeep autolist noautomenu; "
    "unset zle_bracketed_paste; PS1='$ '",
}


@pytest.fixture
def environment(folder):
    """A folder with files and a run, and a `bloomery` in PATH."""
    (folder / "runs/mine-1").mkdir(parents=True)
    programs = folder / ".programs"
    programs.mkdir()
    (programs / "bloomery").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bloomery "$@"\n')
    (programs / "bloomery").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "TERM": "dumb", "HOME": str(folder), "LC_ALL": "C.UTF-8"}


class Terminal:
    """An interactive shell on a terminal of 300 columns."""

    def __init__(self, words, environment):
        self.screen = ""
        self.process, self.file = pty.fork()
        if self.process == 0:
            os.execvpe(words[0], list(words), environment)
        termios.tcsetwinsize(self.file, (50, 300))

    def type(self, text):
        os.write(self.file, text.encode())

    def read_until(self, pattern, seconds=60):
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.screen)):
            left = end - time.monotonic()
            assert left > 0, self.screen
            if select.select([self.file], [], [], left)[0]:
                self.screen += os.read(self.file, 65536).decode(errors="replace")
        self.screen = self.screen[match.end() :]
        return match

    def close(self):
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.file)


@pytest.mark.parametrize("shell", sorted(STARTS))
def test_tab_completes_in_a_shell(shell, environment):
    """Typed on a terminal; the line that results is printed by the shell itself."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    terminal = Terminal(STARTS[shell], environment)
    try:
        terminal.type(f'{SETUPS[shell]}; eval "$(bloomery completion {shell})"; echo rea""dy\n')
        terminal.read_until(r"ready\r?\n")
        for line, completed_line in TYPED:
            # Behind Tab the shell waits for its answer, then reads on: X, and quotes around the line, which is printed.
            terminal.type(f"bloomery {line}\t")
            terminal.type("X\x01printf '%s\\n' \"[\x05]\"\n")
            printed = terminal.read_until(r"\n\[bloomery ([^\]\n]*)\]\r?\n")[1]
            assert printed == completed_line, line
    finally:
        terminal.close()


def test_fish_offers_the_same(environment):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    lines = [f"complete -C 'bloomery {line}'; echo --" for line, _ in TYPED]
    program = "\n".join(["bloomery completion fish | source", *lines])
    done = subprocess.run(
        ["fish", "--no-config", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=120,
    )
    offers = [part.split("\n") for part in done.stdout.split("--\n")]
    for (line, completed_line), offered in zip(TYPED, offers, strict=False):
        # fish wants the whole word; it adds no space behind `=` and `/` itself.
        word = completed_line.removesuffix("X").rstrip().rpartition(" ")[2]
        assert word in [each.partition("\t")[0] for each in offered], line
    assert "Estimate GPU memory, time and disk" in offers[0][0]
    assert done.stderr == ""


def test_bash_completes_a_path_with_the_printed_script(folder):
    """The function of the script, as bash calls it: words split at the equals sign, no space after a folder."""
    script = CliRunner().invoke(cli, ["completion", "bash"]).output
    wrapper = folder / "bloomery.sh"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bloomery "$@"\n')
    wrapper.chmod(0o755)
    for words, replies in (
        ("train demo model.from = Smo", ["option", "nospace", "reply", "SmolLM2/"]),
        ("plan demo --gpu = RTX-3090", ["reply", "RTX-3090", "RTX-3090-Ti"]),
        ("plan demo --gpu = RTX-3090 objective.kind = dp", ["reply", "dpo"]),
        ("train demo --data = cha", ["option", "default", "reply"]),
    ):
        program = f"""
compopt() {{ echo "option ${{@: -1}}"; }}
complete() {{ :; }}
{script}
COMP_WORDS=(bloomery {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_bloomery_completion {wrapper}
echo "reply ${{COMPREPLY[*]}}"
"""
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.split() == replies, words


def test_steps_templates_sites_and_lists_of_values_are_completed(folder):
    for step in (10, 200):
        (folder / f"runs/mine-1/checkpoints/step-{step:08d}").mkdir(parents=True)
    (folder / "runs/mine-1/recipe.yaml").touch()
    assert completed(["chat", "mine-1", "--step"], "") == ["best", "last", "200", "10"]
    assert completed(["eval", "--step"], "2") == ["200"]  # of the newest run
    assert completed(["serve"], "mine-1@") == [
        f"mine-1@{step}" for step in ("best", "last", 200, 10)
    ]
    assert completed(["chat", "mine-1", "--template"], "q") == ["qwen"]
    assert kinds(["chat", "mine-1", "--template"], "chats") == {"file"}
    assert completed(["train", "demo"], "data.chat.template=cha") == [
        "data.chat.template=chatml",
        "data.chat.template=chats.jsonl",
    ]
    assert completed(["slurm", "demo", "--site"], "lu") == ["lumi"]
    assert "cpu" in completed(["train", "demo", "-d"], "c")
    assert completed(["sweep", "demo"], "adapter.kind=lora,d") == ["adapter.kind=lora,dora"]
