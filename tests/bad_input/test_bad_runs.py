"""Runs that are spoilt, disturbed or oddly placed: refused in a sentence or continued, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import PATIENCE_SECONDS, assert_clear, here, process, python

import preloaded
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.plan.store import write_sealed
from bloomery.train.checkpoint.saver import copy_tokenizer

TRAIN = ("train", "tiny.yaml", "--run-dir", "runs/one")
DEEP = "[" * 100_000


def snapshot(folder):
    """Everything in a folder but what a refused attempt may add to."""
    free = ("log.txt", "events.jsonl", "lock", "metrics.json")
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in free
    }


@pytest.mark.parametrize("text", ["", "{", "{}", DEEP, "\xff\0"], ids=range(5))
@pytest.mark.parametrize("name", ["plan.json", "machine.json", "recipe.yaml"])
def test_a_file_of_the_run_is_damaged(stopped, name, text):
    (stopped.run / name).write_text(text, encoding="latin-1")
    before = snapshot(stopped.folder)
    assert_clear(here("resume", "one"), mentions=[name])
    assert snapshot(stopped.folder) == before


def test_prepared_text_that_is_cut_or_another_one_is_noticed_before_the_first_step(
    stopped, trained
):
    shards = next((stopped.folder / "prepared").iterdir())
    whole = (shards / "train-00000.bin").read_bytes()
    (shards / "train-00000.bin").write_bytes(whole[:-2])
    assert_clear(here("resume", "one"), mentions=["train-00000.bin", "bytes"])
    shutil.rmtree(shards)
    other = ("tokenizer.train.vocab_size=280", f"data.prepared={shards}")
    assert here("prepare", "tiny.yaml", *other).code == 0
    before = snapshot(stopped.run)
    assert_clear(here("resume", "one"), mentions=[str(shards)])
    shutil.rmtree(shards)
    assert snapshot(stopped.run) == before
    recipe = stopped.run / "recipe.yaml"
    write_sealed(stopped.run, {"recipe.yaml": recipe.read_text().replace(str(trained), "/nowhere")})
    assert_clear(here("resume", "one"), mentions=["/nowhere"])


def test_a_refused_resume_leaves_the_recipe_as_it_was(stopped):
    before = snapshot(stopped.run)
    assert_clear(here("resume", "one", "train.max_steps=3"), mentions=["train.max_steps"])
    assert snapshot(stopped.run) == before


def test_checkpoints_keep_a_sentencepiece_model(tmp_path):
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    (tmp_path / "from/tokenizer.model").write_bytes(b"x")
    copy_tokenizer(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to/tokenizer.model").read_bytes() == b"x"


FIGURES = (
    "learning_rate",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "sequences_per_second",
    "step_seconds",
    "data_wait_seconds",
    "memory_gib",
)
STEP = {"event": "StepDone", "step": "x", "loss": [], **dict.fromkeys(FIGURES, 0)}
EVENTS = (
    b"\xff\xfe",
    b"[1]",
    b'{"event": 5}',
    b'{"event": "Warned", "because": 7, "step": "x"}',
    DEEP.encode(),
    json.dumps(STEP).encode(),
    b'{"event": "Warned", "bec',
)


def test_lines_that_are_no_events_and_locks_that_are_none_are_passed_over(stopped):
    with (stopped.run / "events.jsonl").open("ab") as file:
        file.write(b"\n".join(EVENTS))
    assert here("runs", "--json").code == 0
    assert here("report", "one").code == 0
    (stopped.run / "lock").write_text(
        json.dumps({"pid": "x", "started": 1, "host": os.uname().nodename})
    )
    done = process("resume", "one", folder=stopped.folder)
    assert done.code == 0, done.err
    for text in (DEEP, "["):
        (stopped.run / "lock").write_text(text)
        assert here("resume", "one").code == 0


def test_a_folder_where_a_file_should_be(stopped):
    (stopped.run / "events.jsonl").unlink()
    (stopped.run / "events.jsonl").mkdir()
    listed = process("runs", folder=stopped.folder)
    assert listed.code == 0 and "unreadable" in listed.out, "the other runs are listed all the same"


def test_two_at_once_and_a_moved_folder_with_an_odd_name(stopped):
    odd = stopped.folder / "; rm -rf $HOME é\n<b>"
    stopped.run.rename(odd)
    words = [*python(), "resume", str(odd), "eval.every=1 steps", "train.max_steps=300"]
    with preloaded.Popen(
        words, cwd=stopped.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as first:
        try:
            wait_for(lambda: (odd / "lock").stat().st_size > 0 or first.poll() is not None)
            assert_clear(here("resume", str(odd)), mentions=["in use", str(first.pid)], lines=5)
            assert_clear(
                here("train", "tiny.yaml", "--run-dir", str(odd)),
                mentions=["already has a run"],
                lines=6,
            )
            wait_for(
                lambda: (
                    b'"Resumed"' in (odd / "events.jsonl").read_bytes() or first.poll() is not None
                )
            )
            first.send_signal(signal.SIGTERM)
            _, err = first.communicate(timeout=PATIENCE_SECONDS)
        finally:
            first.kill()
    assert first.returncode == 75, err
    assert b"'" + str(odd).encode() + b"'" in err  # what it says can be pasted into a shell


def wait_for(moment):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.01)


MOMENTS = {
    "set-up": lambda run: (run / "recipe.yaml").exists(),
    "start of the trainer": lambda run: (run / "plan.json").exists(),
    "evaluation": lambda run: '"EvalDone"' in (run / "events.jsonl").read_text(),
}


SAMPLE = "start of the trainer"


@pytest.mark.parametrize(
    "moment",
    [
        moment if moment == SAMPLE else pytest.param(moment, marks=pytest.mark.soak)
        for moment in MOMENTS
    ],
)
def test_ctrl_c(workshop, moment):
    run = workshop / "runs/one"
    words = [
        *python(),
        *TRAIN,
        "train.max_steps=3000" if moment == "evaluation" else "train.max_steps=3",
    ]
    with subprocess.Popen(
        words, cwd=workshop, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            wait_for(
                lambda: (
                    ((run / "events.jsonl").exists() and MOMENTS[moment](run))
                    or child.poll() is not None
                )
            )
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=PATIENCE_SECONDS)
        finally:
            child.kill()
    assert child.returncode in (75, 0), err
    assert child.returncode == 0 or "bloomery resume one" in err
    assert "Traceback" not in err
    if moment != "evaluation":
        resumed = process("resume", "one", folder=workshop)
        assert resumed.code == 0, resumed.err
    assert list(run.glob("checkpoints/step-*/MANIFEST.json"))


def test_ctrl_c_while_preparing_keeps_what_is_there(workshop):
    with (workshop / "text/much.txt").open("w") as file:
        file.writelines(f"line {number} of a text that takes a while\n" for number in range(15_000))
    words = [*python(), "prepare", "tiny.yaml", "data.prepared=shards"]
    with subprocess.Popen(
        words, cwd=workshop, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        wait_for(lambda: (workshop / "shards/tokenizer.json").exists() or child.poll() is not None)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE_SECONDS)
    assert child.returncode in (130, 0), err
    assert "Traceback" not in err
    before = (workshop / "shards/tokenizer.json").read_bytes()
    assert here("prepare", "tiny.yaml", "data.prepared=shards").code == 0
    assert (workshop / "shards/tokenizer.json").read_bytes() == before


def test_a_disk_that_fills_up_while_preparing(workshop):
    small = workshop / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k", "none", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        words = ("prepare", "tiny.yaml", "data.prepared=small/shards")
        assert_clear(here(*words), mentions=["disk is full", "small"])
        subprocess.run(["mount", "-o", "remount,size=4m", str(small)], check=True)
        assert here(*words).code == 0
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        assert here(*words).code == 0  # it is prepared: nothing needs to be written
        assert_clear(
            here("prepare", "tiny.yaml", "data.prepared=small/other"),
            mentions=["Read-only", "small/other"],
        )
        assert_clear(
            here("train", "tiny.yaml", "--run-dir", "small/run"),
            mentions=["Read-only", "small/run"],
        )
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_file_size_limit_while_preparing(workshop):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    assert_clear(process("prepare", "tiny.yaml", folder=workshop, code=code), mentions=["limit"])
    assert here("prepare", "tiny.yaml").code == 0


def test_weights_that_overflow_are_never_saved(workshop):
    words = (
        *TRAIN,
        "optimizer.learning_rate=1e308",
        "train.max_steps=2",
        "optimizer.warmup=0 steps",
    )
    assert_clear(here(*words), mentions=["finite", "optimizer.learning_rate"])
    assert not list((workshop / "runs/one").glob("checkpoints/step-*"))


CANARY = "hf_" + "Canary9" * 6


def test_secrets_reach_no_file_and_no_screen(workshop, monkeypatch):
    secret = {
        "HF_TOKEN": CANARY,
        "WANDB_API_KEY": "c" * 20 + "anary" + "d" * 15,
        "MY_PASSWORD": "canary-password-1",
    }
    code = (
        "import os, bloomery.runs.flow as local\n"
        "def broken(*a, **k): raise RuntimeError('a bug, and in its message ' + os.environ['HF_TOKEN'])\n"
        "local.write_sealed = broken"
    )
    crashed = process(*TRAIN, folder=workshop, environment=secret, code=code)
    assert crashed.code == 1
    assert "Traceback" not in crashed.err
    assert "log.txt" in crashed.err
    log = (workshop / "runs/one/log.txt").read_text()
    assert "Traceback" in log and "a bug, and in its message" in log
    assert '"error": "RuntimeError"' in (workshop / "runs/one/events.jsonl").read_text()
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    done = here("resume", "one", "train.max_steps=1")
    assert done.code == 0, done.err
    shown = here("report", "one")
    refused = [here("plan", word) for word in (CANARY, f"tiny.yaml {CANARY}=1")]
    refused += [
        here("plan", "tiny.yaml", word)
        for word in (CANARY, f"{CANARY}=1", f"sample.prompts=[{CANARY}]")
    ]
    screens = "".join(each.out + each.err for each in (crashed, done, shown, *refused))
    files = b"".join(path.read_bytes() for path in workshop.rglob("*") if path.is_file())
    for value in secret.values():
        assert value not in screens
        assert value.encode() not in files


def test_a_password_in_a_url_is_refused_before_it_is_copied(workshop):
    refused = here(*TRAIN, "data.path=https://me:canary-password@example.org/text")
    assert_clear(refused, code=2, mentions=["data.path"])
    assert "canary-password" not in refused.err
    assert not (workshop / "runs").exists()


PLAIN = {
    "LANG": "C",
    "LC_ALL": "C",
    "TERM": "dumb",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
}


@pytest.mark.parametrize(
    ("plain", "verbs"),
    [
        ({"TERM": "dumb"}, [["runs", "--json"]]),  # which can be forked
        pytest.param(
            PLAIN,
            [["eval", "one", "--json"], ["plan", "tiny.yaml", "--json"]],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["no home", "no locale"],
)
def test_no_home_no_locale_no_reader_and_spaces_in_the_path(workshop, plain, verbs):
    odd = workshop / "a b"
    shutil.copytree(workshop, odd)
    assert_clear(process("plan", "é/tiny.yaml", folder=odd, environment=PLAIN), code=2)
    shutil.copytree(odd, odd / "é")
    unwritable = process("plan", "tiny.yaml", folder=odd / "é", environment=PLAIN)
    assert_clear(unwritable, code=2, mentions=["locale", "LANG=C.UTF-8"])
    homeless = {name: value for name, value in os.environ.items() if name != "HOME"} | plain
    words = [*python(), "train", "tiny.yaml", "--run-dir", "runs/one"]
    reading, writing = os.pipe()
    os.close(reading)  # whoever read has gone, as `| head -1` does
    with preloaded.Popen(
        words, cwd=odd, env=homeless, stdout=writing, stderr=subprocess.PIPE
    ) as child:
        os.close(writing)
        _, err = child.communicate(timeout=PATIENCE_SECONDS)
    assert child.returncode == 0, err
    for verb in verbs:
        told = process(*verb, folder=odd, environment=plain)
        assert told.code == 0, told.err
        json.loads(told.out)
    prompt = process("generate", "one", "--prompt", "日本", folder=odd, environment=PLAIN)
    assert_clear(prompt, code=2, mentions=["--prompt"])


@pytest.mark.parametrize(
    "words",
    ["runs", pytest.param("generate one --prompt x --max-new-tokens 2", marks=pytest.mark.soak)],
)
def test_closed_output_is_no_crash(trained, words):
    words = f"{sys.executable} -m bloomery {words} >&- 2>&-"
    assert subprocess.run(["sh", "-c", words], cwd=trained).returncode == 0


@pytest.mark.parametrize(
    "streams", ["2> /dev/full > /dev/null", pytest.param("2>&1 | true", marks=pytest.mark.soak)]
)
def test_notes_that_nobody_can_read_do_not_end_training(workshop, streams):
    words = f"{sys.executable} -m bloomery train tiny.yaml --run-dir runs/one train.max_steps=2"
    code = "exit ${PIPESTATUS[0]}"
    assert (
        subprocess.run(["bash", "-c", f"{words} {streams}; {code}"], cwd=workshop).returncode == 0
    )
    assert '"status": "done"' in (workshop / "runs/one/events.jsonl").read_text()


FAILING = (
    ["eval", "one", "--data", "no"],
    ["eval", "no"],
    ["plan", "no"],
    ["generate", "one", "--prompts", "no"],
)


@pytest.mark.parametrize("words", FAILING)
def test_json_that_fails_prints_nothing_on_stdout(trained, monkeypatch, words):
    monkeypatch.chdir(trained)
    refused = here(*words, "--json")
    assert_clear(refused, code=refused.code or 1)
    assert refused.out == ""


def test_a_working_folder_that_was_deleted(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", f"rmdir '{gone}'; exec {sys.executable} -m bloomery runs"],
        cwd=gone,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert done.returncode == 1
    assert "the working folder was deleted" in done.stderr and "fix:" in done.stderr


def test_the_fixture_is_a_run_with_its_tokenizer(trained):
    assert load_tokenizer(trained / "runs/one/checkpoints/step-00000006").vocab_size == 300
