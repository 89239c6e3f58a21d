"""What `bloomery doctor` says to words and files that are wrong, and what it never does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_help import _a_folder_of_its_own, doctor  # noqa: F401

from bloomery.cli.doctor import MAX_LOG_BYTES
from bloomery.core.errors import UserError

HOST = {
    "accelerators": [],
    "host": {
        "system": "Linux",
        "cpu_name": "x",
        "cpu_cores": 2,
        "memory_bytes": 1,
        "memory_free_bytes": 1,
        "disk_free_bytes": 1,
    },
}


def refusal(*words: str) -> UserError:
    error = doctor(*words).exception
    assert isinstance(error, UserError), error
    assert error.code == 2
    assert error.fix
    return error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"accelerators": 3, "host": {}, "software": {}},
            "accelerators: input should be a valid tuple",
        ),
        (
            {"accelerators": [], "host": {"system": 1}, "software": {}},
            "host.system: input should be a valid string",
        ),
        (
            {"machine": {"accelerators": [{"index": "x"}]}},
            "accelerators.0.index: input should be a valid integer",
        ),
        ([1, 2], "document: input should be"),
        (
            HOST | {"software": {"python": "3.12.4", "torch": "mine"}},
            "software.torch: string should match pattern",
        ),
        (HOST | {"software": {"python": ""}}, "software.python: string should match pattern"),
        (
            HOST | {"software": {"python": "3.12.4"}, "host": {**HOST["host"], "cpu_cores": 0}},
            "host.cpu_cores: input",
        ),
    ],
)
def test_a_record_with_a_wrong_type_names_the_key(tmp_path, content, said):
    (tmp_path / "m.json").write_text(json.dumps(content))
    assert said in refusal("--machine", "m.json").problem


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[" * 100_000, b"", b"{", b'{"a": NaN}'])
def test_a_record_that_is_no_json(tmp_path, content):
    (tmp_path / "m.json").write_bytes(content)
    refusal("--machine", "m.json")


@pytest.mark.parametrize(
    "text", ["train.log", "runs/one/log.txt", "~nobody/x.txt", "/no/such/file.err"]
)
def test_a_file_that_is_not_there_is_not_taken_for_a_message(text):
    assert "no such file" in refusal("--explain", text).problem


def test_a_message_that_looks_odd_is_still_a_message():
    for text in ("CUDA out of memory", "x\0y", "a" * 100_000, "~nobody said: x", "\ud800"):
        assert doctor("--explain", text).exception is None


@pytest.mark.parametrize("text", ["", " \n"])
def test_nothing_to_explain(text):
    assert "is empty" in refusal("--explain", text).problem
    assert json.loads(doctor("--explain", text, "--json").output) == {"findings": []}


def test_the_folder_of_a_run_means_its_log(tmp_path):
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/log.txt").write_text("OSError: [Errno 28] No space left on device\n")
    assert (
        json.loads(doctor("--explain", "runs/one", "--json").output)["findings"][0]["id"]
        == "disk-full"
    )


def test_a_log_of_gigabytes_takes_little_memory(tmp_path):
    with (tmp_path / "huge.log").open("wb") as file:
        file.truncate(20_000_000_000)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\nOSError: [Errno 28] No space left on device\n")
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))\n"
        "from bloomery.cli import main; main(['doctor', '--explain', 'huge.log', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["findings"][0]["id"] == "disk-full"


def test_the_end_of_a_long_pipe_counts():
    log = b"\xff\xfe noise\n" * (MAX_LOG_BYTES // 5) + b"CUDA out of memory\n"
    assert (
        json.loads(doctor("--explain", "-", "--json", given=log).output)["findings"][0]["id"]
        == "cuda-out-of-memory"
    )


def test_a_named_pipe_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.log")
    command = [sys.executable, "-m", "bloomery", "doctor", "--explain", "pipe.log", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    (tmp_path / "pipe.log").write_text("CUDA out of memory\n")
    told, _ = process.communicate(timeout=60)
    assert json.loads(told)["findings"][0]["id"] == "cuda-out-of-memory"


@pytest.mark.parametrize(
    "words",
    [
        ["--docker", "--json"],
        ["--bundle", "r.json", "--json"],
        ["--fix", "1", "--json"],
        ["--docker", "--fix", "1"],
        ["--explain", "x", "--bundle", "r.json"],
    ],
    ids=" ".join,
)
def test_flags_that_do_not_go_together_are_refused(words, tmp_path):
    refusal(*words)
    assert not (tmp_path / "r.json").exists()


def test_only_a_bundle_is_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("my notes\n")
    assert "not overwritten" in refusal("--bundle", "notes.txt").problem
    assert (tmp_path / "notes.txt").read_text() == "my notes\n"
    for _ in range(2):
        assert doctor("--bundle", "report.json").exception is None
    assert json.loads((tmp_path / "report.json").read_text())["machine"]


def test_a_bundle_in_a_folder_that_forbids_it(tmp_path):
    for target in (tmp_path, Path("/proc/report.json"), tmp_path / "no/such.json"):
        error = doctor("--bundle", str(target)).exception
        assert isinstance(error, UserError)
        assert error.fix
