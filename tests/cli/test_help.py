"""The command line before any verb runs: quick, and in sentences."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import bloomery.cli
from bloomery.cli import COMMANDS, GROUPS, cli, main
from bloomery.cli.common import print_json
from bloomery.core.errors import UserError
from bloomery.core.run_folder import find_run

HEAVY = ("torch", "numpy", "pydantic", "rich", "ruamel", "tokenizers", "transformers")


def bloomery_command(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "bloomery", *words], capture_output=True, text=True, **options
    )


def exit_code(*words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


def test_help_imports_nothing_heavy():
    """What makes `bloomery --help` answer in a quarter of a second."""
    script = (
        "import json, sys\nfrom bloomery.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in HEAVY if name in loaded] == []
    assert "Train:" in done.stdout


def test_help_has_every_command_in_one_section():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    page = CliRunner().invoke(cli, ["--help"]).output
    for group, names in GROUPS.items():
        section = page.partition(f"\n{group}:\n")[2].partition("\n\n")[0].splitlines()
        assert [line.split()[0] for line in section] == list(names)
        assert [line.split(maxsplit=1)[1] for line in section] == [
            COMMANDS[name][1] for name in names
        ]
    assert max(map(len, page.splitlines())) < 80


@pytest.mark.parametrize("verb", [verb for verb in COMMANDS if verb in cli.list_commands(None)])
def test_every_listed_verb_has_a_help_page(verb):
    done = CliRunner().invoke(cli, [verb, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage" in done.output
    assert "Example: bloomery " + verb in done.output or "Example: ssh " in done.output
    assert max(map(len, done.output.splitlines())) <= 80  # of a terminal: 78


def test_wrong_words(capsys):
    assert exit_code("recpes") == 2
    assert "did you mean `bloomery recipes`?" in capsys.readouterr().err
    assert exit_code("recipes", "lst") == 2
    error = capsys.readouterr().err
    assert "error: no such command: 'lst'\n" in error
    assert "fix:   did you mean `bloomery recipes list`?" in error
    assert exit_code("convert", "a", "b", "--dtype", "bf17") == 2
    assert "fix:   did you mean bf16?" in capsys.readouterr().err
    for option, value, kind in (
        ("--temperature", "hot", "number"),
        ("--seed", "x", "whole number"),
    ):
        assert exit_code("generate", "a", "--prompt", "b", option, value) == 2
        assert f"'{value}' is not a {kind}\n" in capsys.readouterr().err
    assert exit_code("runs", "zzz") == 2
    assert "fix:   bloomery runs --help" in capsys.readouterr().err
    assert exit_code("recipes", "show") == 2
    assert "error: missing argument" in capsys.readouterr().err
    assert exit_code("export", "last") == 2
    choices = "hf, adapter, merged, gguf, gguf-adapter, ollama, vllm"
    assert capsys.readouterr().err.startswith(
        f"error: missing option '--to'. Choose from: {choices}\nwhere: "
    )
    assert exit_code("recipes", "--nonsense") == 2
    assert exit_code("recipes", "show", "go-coder-tinny") == 2
    assert "did you mean go-coder-tiny?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("plan", "go-coder-tiny", "--gpu"), "`bloomery plan`"),
        (("tokenizer", "inspect", "folder", "--text"), "`bloomery tokenizer inspect`"),
        (("--nonsense",), "`bloomery`"),
    ],
)
def test_a_flag_without_its_value_names_the_verb(words, where, capsys):
    assert exit_code(*words) == 2
    told = capsys.readouterr().err
    assert f"where: {where}\n" in told and f"fix:   {where[1:-1]} --help\n" in told


@pytest.mark.parametrize(
    "words", [("--nodes", "2"), ("--gpus", "8"), ("--gpus", "8", "--nodes", "2")]
)
def test_several_devices_without_a_gpu_name_the_flag_that_was_typed(words, capsys):
    assert exit_code("plan", "go-coder-tiny", *words) == 2
    typed = " ".join(words)
    assert f'where: {typed}\nfix:   name a GPU: --gpu "MI300X" {typed}\n' in capsys.readouterr().err


def test_no_words_at_all_shows_the_help():
    done = bloomery_command()
    assert done.returncode == 2
    assert "Train:" in done.stdout + done.stderr


def test_recipes_are_listed_shown_and_copied(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code("recipes", "list") == 0
    assert "go-coder-125m" in capsys.readouterr().out
    assert exit_code("recipes", "copy", "go-coder-tiny", "mine.yaml") == 0
    assert (tmp_path / "mine.yaml").read_text().startswith("# Pretraining: GPT-2")
    assert exit_code("recipes", "copy", "go-coder-tiny", "mine.yaml") == 1
    assert "nothing was overwritten" in capsys.readouterr().err
    assert exit_code("recipes", "schema") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Bloomery recipe"


def test_a_plan_says_where_no_text_lies(tmp_path):
    told = bloomery_command("plan", "demo", "data.path=textz", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "data.path does not exist" in told.stderr and "textz" in told.stderr
    assert (
        "note"
        not in bloomery_command(
            "plan", "demo", "data.path=textz", "--gpu", "RX 6600", cwd=tmp_path
        ).stderr
    )


def crash(monkeypatch, error):
    def command(*words, **options):
        raise error

    monkeypatch.setattr(bloomery.cli.cli, "main", command)


def test_a_user_error_is_three_lines(monkeypatch, capsys):
    crash(monkeypatch, UserError("the corpus is empty", where="corpus/", fix="put text into it"))
    assert exit_code("train") == 1
    assert (
        capsys.readouterr().err
        == "error: the corpus is empty\nwhere: corpus/\nfix:   put text into it\n"
    )


def test_debug_shows_the_traceback(monkeypatch):
    crash(monkeypatch, UserError("the corpus is empty"))
    with pytest.raises(UserError):
        main(["train", "--debug"])


CRASH = """
import sys, bloomery.cli as c
from bloomery.cli.common import traceback_file
from pathlib import Path
def command(*words, **options):
    {before}
    raise {error}
c.cli.main = command
c.main(sys.argv[1:])
"""


def crashed(tmp_path, error, before="pass", words=()):
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    script = CRASH.format(error=error, before=before)
    return subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment
    )


def test_a_crash_is_one_sentence_and_its_traceback_is_kept(tmp_path):
    done = crashed(tmp_path, "ZeroDivisionError('by zero')")
    assert done.returncode == 1
    assert "ZeroDivisionError: by zero" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "bloomery" / "errors.txt").read_text()


def test_a_crash_in_a_run_is_kept_in_its_log(tmp_path):
    log = tmp_path / "log.txt"
    done = crashed(tmp_path, "ValueError('x')", before=f"traceback_file.set(Path({str(log)!r}))")
    assert str(log) in done.stderr
    assert "Traceback" in log.read_text()


def test_a_crash_under_debug_is_shown(tmp_path):
    assert "Traceback" in crashed(tmp_path, "ValueError('x')", words=["--debug"]).stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "OSError(28, 'No space left on device', '/full/disk')",
            "the disk is full\nwhere: /full/disk",
        ),
        (
            "PermissionError(13, 'Permission denied', '/root/x')",
            "permission denied\nwhere: /root/x",
        ),
        ("MemoryError()", "out of host memory"),
    ],
)
def test_what_the_system_refuses_is_said_plainly(tmp_path, error, said):
    done = crashed(tmp_path, error)
    assert (done.returncode, said in done.stderr) == (1, True)


def test_interrupted(monkeypatch):
    def command(*words, **options):
        import click

        raise click.Abort

    monkeypatch.setattr(bloomery.cli.cli, "main", command)
    assert exit_code("train") == 130


def test_a_closed_pipe_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "bloomery", "recipes", "show", "everything"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_runs_are_found_by_path_name_and_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run 'last'"):
        find_run("last")
    for age, name in ((100, "old-run"), (200, "new-run")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text("")
        os.utime(folder / "recipe.yaml", (age, age))
    assert find_run("last").name == "new-run"
    assert find_run("old-run").name == "old-run"
    assert find_run(str(tmp_path / "runs" / "old-run")).name == "old-run"
    with pytest.raises(UserError) as caught:
        find_run("old-rnu")
    assert "old-run" in caught.value.fix


def test_json_is_one_document_without_nan(capsys):
    print_json({"loss": float("nan"), "steps": (1, 2), "place": "é"})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "steps": [1, 2], "place": "é"}


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("eval", "one", "other"), "to compare two models: bloomery eval MODEL --against OTHER"),
        (("runs", "list"), "bloomery runs"),
    ],
)
def test_a_word_too_many_is_answered_with_the_command_that_was_meant(words, fix, capsys):
    assert exit_code(*words) == 2
    assert f"fix:   {fix}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["export", "x", "--quantise", "q4"], "write --quantize, which takes float32, "),
        (["generate", "x", "--quantise", "q4"], "write --quantize, which takes none, nf4, int8"),
        (["serve", "x", "--prot", "80"], "write --port"),
    ],
)
def test_a_misspelled_option_is_answered_with_what_it_takes(words, fix, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"fix:   {fix}" in capsys.readouterr().err
