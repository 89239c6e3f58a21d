"""`bloomery doctor --fix` and `--bundle`: what is changed, and what is written down."""

import io
import json
import os
import pty
import subprocess
import sys
from importlib import metadata

import pytest
from doctor_help import MACHINES, NAMES, _a_folder_of_its_own, doctor, record  # noqa: F401

from bloomery.cli.doctor import anonymous, apply_fix, without_names
from bloomery.core.errors import UserError
from bloomery.hardware.doctor.diagnose import diagnose
from bloomery.hardware.machine import Machine, read_machine

# --fix


def finding_of(name: str, id: str):
    machine = read_machine(MACHINES / f"{name}.json")
    findings = diagnose(machine)
    return next(number for number, one in enumerate(findings, 1) if one.id == id), findings, machine


def on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": staticmethod(lambda: True)}))


@pytest.fixture
def pip_of_a_venv(tmp_path, monkeypatch):
    """An environment whose python writes down what it was asked, and ends with the number in `code`."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    python = tmp_path / "its python"
    python.write_text(
        f"#!/bin/sh\ncase $5 in get) cat {tmp_path}/constraint; exit;; esac\n"
        f'echo "$PIP_CONSTRAINT:$*" >> {tmp_path}/asked; exit $(cat {tmp_path}/code)\n'
    )
    python.chmod(0o755)
    (tmp_path / "code").write_text("0")
    (tmp_path / "constraint").write_text("")
    monkeypatch.setattr("sys.executable", str(python))
    return tmp_path


def test_the_pin_is_written_as_set_up_writes_it(pip_of_a_venv, monkeypatch, capsys):
    """One file of the environment's own folder, and pip's own command that names it."""
    on_a_terminal(monkeypatch)
    pin = finding_of("container-without-kfd", "torch-not-pinned")
    file = pip_of_a_venv / "torch-pin.txt"
    apply_fix(*pin, ask=lambda question: False)
    assert not file.exists() and not (pip_of_a_venv / "asked").exists()
    apply_fix(*pin, ask=lambda question: True)
    assert f"torch=={pin[2].software.torch}" in file.read_text().splitlines()
    asked = (pip_of_a_venv / "asked").read_text()
    assert asked == f":-P -m pip config --site set install.constraint {file.as_uri()}\n"
    assert asked[1:-1].partition("-m pip")[2] in capsys.readouterr().out


def test_constraints_of_somebody_else_are_theirs_to_change(pip_of_a_venv, monkeypatch):
    on_a_terminal(monkeypatch)
    (pip_of_a_venv / "constraint").write_text("/srv/company.txt\n")
    with pytest.raises(UserError, match="already has a pip constraints file") as caught:
        apply_fix(
            *finding_of("container-without-kfd", "torch-not-pinned"), ask=lambda question: True
        )
    assert caught.value.where == "/srv/company.txt" and "torch==" in caught.value.fix


@pytest.mark.parametrize(
    "name, id",
    [("container-without-kfd", "torch-not-pinned"), ("rx-6700-xt-wrong-wheel", "wrong-build")],
)
def test_without_a_terminal_the_commands_are_said_instead(pip_of_a_venv, name, id):
    with pytest.raises(UserError, match="stdin is not a terminal") as caught:
        apply_fix(*finding_of(name, id), ask=lambda question: True)
    assert "pip" in caught.value.fix and not (pip_of_a_venv / "asked").exists()


def test_a_line_of_a_shell_file_is_the_users_to_change(monkeypatch):
    on_a_terminal(monkeypatch)
    with pytest.raises(UserError, match="no automatic fix") as caught:
        apply_fix(*finding_of("rx-6700-xt-override", "override-harms"), ask=lambda question: True)
    assert caught.value.fix.startswith("unset HSA_OVERRIDE_GFX_VERSION")


def test_a_wrong_build_is_never_pinned():
    with pytest.raises(UserError, match="wrong PyTorch is installed") as caught:
        apply_fix(
            *finding_of("rx-6700-xt-wrong-wheel", "torch-not-pinned"), ask=lambda question: True
        )
    assert "torch[device-gfx1031]" in caught.value.fix


def test_what_only_the_user_can_do_is_said():
    with pytest.raises(UserError, match="no automatic fix") as caught:
        apply_fix(*finding_of("user-outside-render", "not-in-group"), ask=lambda question: True)
    assert caught.value.fix.startswith("sudo usermod")
    _, findings, machine = finding_of("user-outside-render", "not-in-group")
    with pytest.raises(UserError, match="no finding has number 9") as caught:
        apply_fix(9, findings, machine, ask=lambda question: True)
    assert caught.value.code == 2


def test_pip_is_called_after_asking(pip_of_a_venv, monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    wrong = finding_of("rx-6700-xt-wrong-wheel", "wrong-build")
    apply_fix(*wrong, ask=lambda question: False)
    assert not (pip_of_a_venv / "asked").exists()
    apply_fix(*wrong, ask=lambda question: True)
    told = (pip_of_a_venv / "asked").read_text()
    index = "https://stable.repo.amd.com/rocm/whl-next/"
    assert (
        told
        == f":-P -m pip install --force-reinstall --index-url {index} torch[device-gfx1031]==2.13.0+rocm10.0.0\n"
    )
    assert wrong[1][0].fix[0] in capsys.readouterr().out


def test_who_agreed_before_is_not_asked_and_needs_no_terminal(pip_of_a_venv, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    wrong = finding_of("rx-6700-xt-wrong-wheel", "wrong-build")
    with pytest.raises(UserError, match="not a terminal") as caught:
        apply_fix(*wrong, ask=lambda question: True)
    assert "--yes" in caught.value.fix
    assert not (pip_of_a_venv / "asked").exists()
    apply_fix(*wrong, ask=None)
    assert (pip_of_a_venv / "asked").read_text().startswith(":-P -m pip install --force-reinstall")


def test_a_pip_that_fails_is_not_called_a_success(pip_of_a_venv, monkeypatch):
    on_a_terminal(monkeypatch)
    (pip_of_a_venv / "code").write_text("3")
    with pytest.raises(UserError, match="pip failed: exit code 3") as caught:
        apply_fix(*finding_of("rx-6700-xt-wrong-wheel", "wrong-build"), ask=lambda question: True)
    assert caught.value.fix.startswith("pip install")


def test_a_pin_of_the_wrong_build_is_moved_to_the_new_one(pip_of_a_venv, monkeypatch):
    on_a_terminal(monkeypatch)
    pin = pip_of_a_venv / "torch-pin.txt"
    pin.write_text("torch==2.13.0+cu130\n")
    (pip_of_a_venv / "constraint").write_text(f"{pin.as_uri()}\n")
    machine = read_machine(MACHINES / "rx-6700-xt-wrong-wheel.json")
    pinned = machine.model_copy(
        update={"software": machine.software.model_copy(update={"pinned": "torch==2.13.0+cu130"})}
    )
    apply_fix(1, diagnose(pinned), pinned, ask=lambda question: True)
    assert (pip_of_a_venv / "asked").read_text().startswith("/dev/null:-P -m pip install ")
    assert pin.read_text().splitlines()[0] == f"torch=={metadata.version('torch')}"


def test_the_systems_python_is_left_alone(monkeypatch):
    on_a_terminal(monkeypatch)
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    with pytest.raises(UserError, match="system Python") as caught:
        apply_fix(*finding_of("rx-6700-xt-wrong-wheel", "wrong-build"), ask=lambda question: True)
    assert caught.value.fix.startswith("python3 -m venv")


def test_what_can_be_done_for_the_user_is_said():
    output = doctor("--machine", record("rx-6700-xt-wrong-wheel-override")).output
    assert "fix       bloomery doctor --fix 1 applies fix 1 after asking" in output
    assert "after asking" not in doctor("--machine", record("user-outside-render")).output


def test_on_a_real_terminal_it_asks(tmp_path):
    """Nothing is answered: Ctrl+D leaves everything as it was."""
    parent, child = pty.openpty()
    script = (
        "import sys, click; sys.path.insert(0, '.')\n"
        "from bloomery.cli.doctor import _agreed\nprint('said', _agreed(['pip install x'], click.confirm))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=child, stdout=subprocess.PIPE, text=True
    )
    os.write(parent, b"\n")
    said, _ = process.communicate(timeout=60)
    os.close(parent)
    os.close(child)
    assert said.rstrip().endswith("said False")


# --bundle


def test_a_bundle_names_nobody_and_can_be_diagnosed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "alice")
    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: one\n")
    (run / "log.txt").write_text(
        "/home/alice/data hf_abcdefghijklmnopqrstuvwx\nalice@box: RuntimeError: No HIP GPUs\n"
    )
    done = doctor("--machine", record("user-outside-render"), "--bundle", "report.json")
    assert done.return_value == 0
    text = (tmp_path / "report.json").read_text()
    for secret in ("alice", "hf_abc", '"sam"', "0x4d0aa17be9c35f26"):
        assert secret not in text, secret
    told = json.loads(text)
    assert told.keys() == {"bloomery", "made", "machine", "findings", "last_run_log"}
    assert "No HIP GPUs" in told["last_run_log"][-1]
    again = json.loads(doctor("--machine", "report.json", "--json").output)
    direct = json.loads(doctor("--machine", record("user-outside-render"), "--json").output)
    assert [one["id"] for one in again["findings"]] == [one["id"] for one in direct["findings"]]


@pytest.mark.parametrize("name", NAMES)
def test_taking_names_out_changes_no_diagnosis(name):
    machine = read_machine(MACHINES / f"{name}.json")
    unnamed = Machine.model_validate(anonymous(machine))
    assert [one.id for one in diagnose(unnamed)] == [one.id for one in diagnose(machine)]


SECRETS = {
    "tokens": [
        "hf_abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrstuvwx",
        "AKIAABCDEFGHIJKLMNOP",
        "s3cret-of-mine-99",
    ],
    "users": ["alice", "bob-admin"],
    "hosts": ["secretbox", "secretbox.lab.example.org", "nid01934"],
    "addresses": [
        "10.12.13.14",
        "2001:db8:0:1:1:1:1:1",
        "52:54:00:12:34:56",
        "fe80::5054:ff:fe12:3456",
    ],
}


@pytest.mark.parametrize("kind", SECRETS)
def test_nothing_private_gets_into_a_bundle(kind, tmp_path, monkeypatch):
    """In the log, in a variable that steers NCCL, and in a path, each as it stands and inside of other text."""
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("SUDO_USER", "bob-admin")
    monkeypatch.setenv("SLURMD_NODENAME", "nid01934")
    monkeypatch.setenv("MY_API_TOKEN", "s3cret-of-mine-99")
    monkeypatch.setattr("platform.node", lambda: "secretbox.lab.example.org")
    lines = [
        f"{before}{secret}{after}"
        for secret in SECRETS[kind]
        for before, after in (("", ""), ("to=", ":29500"), ("(", ")"))
    ]
    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: one\n")
    (run / "log.txt").write_text(
        "\n".join([*lines, "torch 2.13.0+rocm7.2 on 127.0.0.1 at 12:34:56"])
    )
    machine = read_machine(MACHINES / "mi250x-frontier-slurm.json")
    environment = {f"NCCL_{number}": line for number, line in enumerate(lines)}
    software = machine.software.model_copy(
        update={"environment": environment, "prefix": "/home/alice/env"}
    )
    (tmp_path / "m.json").write_text(
        machine.model_copy(update={"software": software}).model_dump_json()
    )
    assert doctor("--machine", "m.json", "--bundle", "report.json").exception is None
    text = (tmp_path / "report.json").read_text()
    assert [secret for secret in SECRETS[kind] if secret in text] == []
    assert "torch 2.13.0+rocm7.2 on 127.0.0.1 at 12:34:56" in text  # what is no secret stays


@pytest.mark.parametrize("name", ["amd", "torch", "rocm", "machine", "blocks"])
def test_a_host_or_user_named_like_a_word_of_the_record(name, tmp_path, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: name)
    monkeypatch.setenv("LOGNAME", name)
    assert (
        doctor("--machine", record("rx-6700-xt-wrong-wheel"), "--bundle", "report.json").exception
        is None
    )
    again = json.loads(doctor("--machine", "report.json", "--json").output)
    direct = json.loads(doctor("--machine", record("rx-6700-xt-wrong-wheel"), "--json").output)
    assert [one["id"] for one in again["findings"]] == [one["id"] for one in direct["findings"]]


def test_a_host_name_is_taken_out(monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "secretbox")
    assert without_names("on secretbox, in secretbox-data") == "on host, in secretbox-data"


def test_a_bundle_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot write the bundle"):
        raise doctor(
            "--machine", record("h200"), "--bundle", str(tmp_path / "no/such/folder.json")
        ).exception
