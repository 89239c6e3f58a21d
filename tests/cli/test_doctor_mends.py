"""`bloomery doctor --fix` and `--bundle`: what is changed, and what is written down."""

import json
import os
import pty
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from doctor_help import MACHINES, NAMES, _a_folder_of_its_own, doctor, record  # noqa: F401

from bloomery.cli.doctor.bundle import nameless, private
from bloomery.cli.doctor.fix import BACKUP, _typed, changes, mend
from bloomery.core.errors import UserError
from bloomery.hardware.doctor.diagnose import diagnose
from bloomery.hardware.doctor.finding import Fix
from bloomery.hardware.machine import read_machine

# --fix


def finding_of(name: str, id: str):
    machine = read_machine(MACHINES / f"{name}.json")
    findings = diagnose(machine)
    return next(number for number, one in enumerate(findings, 1) if one.id == id), findings, machine


def on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": staticmethod(lambda: True)}))


def test_a_line_of_a_shell_file_is_silenced_and_a_copy_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    on_a_terminal(monkeypatch)
    bashrc = tmp_path / ".bashrc"
    before = "alias ll='ls -l'\n" * 117 + "export HSA_OVERRIDE_GFX_VERSION=10.3.0\necho hi\n"
    bashrc.write_text(before)
    asked = []
    mend(*finding_of("rx-6700-xt-override", "override-harms"), ask=lambda question: asked.append(question) or True)
    assert asked
    assert bashrc.read_text() == before.replace("export HSA", "# export HSA")
    assert (tmp_path / f".bashrc{BACKUP}").read_text() == before


NAME = "HSA_OVERRIDE_GFX_VERSION"


@pytest.mark.parametrize(
    "text",
    [
        f"if [ -d /opt/rocm ]; then\n  export {NAME}=10.3.0\nfi\n",
        f"if true; then\nexport {NAME}=10.3.0\nfi\n",
        f"setting() {{\n\n{NAME}='10.3.0'  # once\n}}\nsetting\n",
        f"case x in\n  x)\n    export {NAME}=10.3.0\n    ;;\nesac\n",
        f"export {NAME}=10.3.0;\n",
    ],
)
def test_a_shell_still_reads_what_was_changed(tmp_path, monkeypatch, text):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text(text)
    line = next(number for number, one in enumerate(text.splitlines(), 1) if NAME in one)
    fix = Fix(kind="unset", name=NAME, file="~/.bashrc", line=line)
    (changed,) = changes(fix, read_machine(MACHINES / "wsl.json")).values()
    script = changed + f'echo "${{{NAME}:-unset}}"\n'
    done = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    assert (done.stdout, done.stderr) == ("unset\n", "")


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", f"cd /opt && export {NAME}=10.3.0; export OTHER=1"),
        ("", f"export OTHER=1 {NAME}=10.3.0"),
        ("export OTHER=1 \\", f"  {NAME}=10.3.0"),
        ("", f"export {NAME}=10.3.0 OTHER=1"),
        ("", f"export {NAME}=$(rocminfo | head -1)"),
        ("", f'{{"env_vars": {{"{NAME}": "10.3.0"}}}}'),
    ],
)
def test_a_line_that_does_more_is_left_to_the_user(tmp_path, monkeypatch, before, line):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text(f"{before}\n{line}\n")
    with pytest.raises(UserError, match="does more than set") as caught:
        changes(Fix(kind="unset", name=NAME, file="~/.bashrc", line=2), read_machine(MACHINES / "wsl.json"))
    assert "+2 ~/.bashrc" in caught.value.remedy


def test_condas_own_file_is_condas_to_change(tmp_path):
    file = tmp_path / "conda-meta/state"
    file.parent.mkdir()
    file.write_text(f'{{"env_vars": {{"{NAME}": "10.3.0"}}}}')
    with pytest.raises(UserError) as caught:
        changes(Fix(kind="unset", name=NAME, file=str(file), line=1), read_machine(MACHINES / "wsl.json"))
    assert caught.value.remedy == f"conda env config vars unset {NAME}"


def test_no_leaves_everything_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    on_a_terminal(monkeypatch)
    bashrc = tmp_path / ".bashrc"
    bashrc.write_text("\n" * 117 + "export HSA_OVERRIDE_GFX_VERSION=10.3.0\n")
    before = bashrc.read_text()
    mend(*finding_of("rx-6700-xt-override", "override-harms"), ask=lambda question: False)
    assert bashrc.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [".bashrc"]


def test_without_a_terminal_the_command_is_said_instead(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("\n" * 117 + "export HSA_OVERRIDE_GFX_VERSION=10.3.0\n")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115, PTH123 (as long as the test)
    with pytest.raises(UserError, match="nobody is there to ask") as caught:
        mend(*finding_of("rx-6700-xt-override", "override-harms"), ask=lambda question: True)
    command = caught.value.remedy.partition("or type: ")[2]
    subprocess.run(["bash", "-c", command], check=True, env={**os.environ, "HOME": str(tmp_path)})
    assert "# export HSA_OVERRIDE" in (tmp_path / ".bashrc").read_text()


def test_a_line_that_moved_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("something else\n")
    with pytest.raises(UserError, match="no longer sets"):
        changes(
            Fix(kind="unset", name="HSA_OVERRIDE_GFX_VERSION", file="~/.bashrc", line=1),
            read_machine(MACHINES / "wsl.json"),
        )


@pytest.mark.parametrize(
    "config",
    [None, "", "[global]\ntimeout = 60\n", "[install]\nno-compile = true\n", "[install]\nconstraint = {file}\n"],
)
def test_the_pin_is_what_the_doctor_looks_for(tmp_path, monkeypatch, config):
    """pip itself is asked whether the constraint holds."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    file = tmp_path / "mine.txt"
    file.write_text("numpy<3\ntorch==1.0\n")
    if config is not None:
        (tmp_path / "pip.conf").write_text(config.replace("{file}", str(file)))
    machine = read_machine(MACHINES / "mi300x-node.json")
    for path, text in changes(Fix(kind="pin"), machine).items():
        path.write_text(text)
    pip_there = "import runpy, sys; sys.prefix = sys.argv.pop(1); runpy.run_module('pip', run_name='__main__')"
    told = subprocess.run(
        [sys.executable, "-c", pip_there, str(tmp_path), "config", "get", "install.constraint"],
        capture_output=True, text=True, check=True, env={k: v for k, v in os.environ.items() if k[:4] != "PIP_"},
    ).stdout.strip()  # fmt: skip
    pinned = Path(told.removeprefix("file://")).read_text().splitlines()
    assert f"torch=={machine.software.torch}" in pinned
    assert "torch==1.0" not in pinned
    if config and "constraint" in config:
        assert "numpy<3" in pinned
    if config and "timeout" in config:
        assert "timeout = 60" in (tmp_path / "pip.conf").read_text()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("constraint = x\n", "pip itself cannot read"),
        ("[install\n", "pip itself cannot read"),
        ("[install]\nconstraint = https://example.org/pins.txt\n", "lie on a server"),
    ],
)
def test_pip_settings_that_cannot_be_changed_are_said(tmp_path, monkeypatch, config, said):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "pip.conf").write_text(config)
    with pytest.raises(UserError, match=said):
        changes(Fix(kind="pin"), read_machine(MACHINES / "mi300x-node.json"))


def test_of_several_constraints_the_one_that_names_torch_is_changed(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("numpy<3\n")
    second.write_text("torch==1.0\n")
    (tmp_path / "pip.conf").write_text(f"[install]\nconstraint = https://example.org/x {first} {second.as_uri()}\n")
    machine = read_machine(MACHINES / "mi300x-node.json")
    assert list(changes(Fix(kind="pin"), machine)) == [second]


def test_the_pin_goes_where_pip_looks_first(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    file = tmp_path / "pins.txt"
    file.write_text("numpy<3\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(file))
    changed = changes(Fix(kind="pin"), read_machine(MACHINES / "mi300x-node.json"))
    assert list(changed) == [file] and "torch==" in changed[file] and "numpy<3" in changed[file]


def test_what_a_person_types_instead_survives_blanks_and_quotes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path / "my env"))
    (tmp_path / "my env").mkdir()
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    (tmp_path / "my env/torch-pin.txt").write_text("numpy<3; python_version > '3.8'\n")
    typed = _typed(Fix(kind="pin"), changes(Fix(kind="pin"), read_machine(MACHINES / "mi300x-node.json")))
    subprocess.run(typed.splitlines()[0], shell=True, check=True)
    assert "numpy<3; python_version > '3.8'" in (tmp_path / "my env/torch-pin.txt").read_text().splitlines()
    rc = tmp_path / "my rc"
    rc.write_text("export A=1\nexport HSA_OVERRIDE_GFX_VERSION=1\n")
    subprocess.run(_typed(Fix(kind="unset", file=str(rc), line=2, name="HSA_OVERRIDE_GFX_VERSION"), {}),
                   shell=True, check=True)  # fmt: skip
    assert rc.read_text().splitlines()[1].startswith("#")


def test_a_wrong_build_is_never_pinned():
    with pytest.raises(UserError, match="not the one to pin") as caught:
        mend(*finding_of("rx-6700-xt-wrong-wheel", "torch-not-pinned"), ask=lambda question: True)
    assert "torch[device-gfx1031]" in caught.value.remedy


def test_what_only_the_user_can_do_is_said():
    with pytest.raises(UserError, match="yours to mend") as caught:
        mend(*finding_of("user-outside-render", "not-in-group"), ask=lambda question: True)
    assert caught.value.remedy.startswith("sudo usermod")
    _, findings, machine = finding_of("user-outside-render", "not-in-group")
    with pytest.raises(UserError, match="there is no finding 9") as caught:
        mend(9, findings, machine, ask=lambda question: True)
    assert caught.value.code == 2


@pytest.fixture
def pip_of_a_venv(tmp_path, monkeypatch):
    """An environment whose python writes down what it was asked, and ends with the number in `code`."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PIP_CONSTRAINT:$*" >> {tmp_path}/asked; exit $(cat {tmp_path}/code)\n')
    python.chmod(0o755)
    (tmp_path / "code").write_text("0")
    monkeypatch.setattr("sys.executable", str(python))
    return tmp_path


def test_pip_is_called_after_asking(pip_of_a_venv, monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    wrong = finding_of("rx-6700-xt-wrong-wheel", "wrong-build")
    mend(*wrong, ask=lambda question: False)
    assert not (pip_of_a_venv / "asked").exists()
    mend(*wrong, ask=lambda question: True)
    told = (pip_of_a_venv / "asked").read_text()
    index = "https://stable.repo.amd.com/rocm/whl-next/"
    assert told == f":-m pip install --force-reinstall --index-url {index} torch[device-gfx1031]==2.13.0+rocm10.0.0\n"
    assert wrong[1][0].mend[0] in capsys.readouterr().out


def test_a_pip_that_fails_is_not_called_a_success(pip_of_a_venv, monkeypatch):
    on_a_terminal(monkeypatch)
    (pip_of_a_venv / "code").write_text("3")
    with pytest.raises(UserError, match="pip ended with 3") as caught:
        mend(*finding_of("rx-6700-xt-wrong-wheel", "wrong-build"), ask=lambda question: True)
    assert caught.value.remedy.startswith("pip install")


def test_a_pin_of_the_wrong_build_is_moved_to_the_new_one(pip_of_a_venv, monkeypatch):
    on_a_terminal(monkeypatch)
    (pip_of_a_venv / "pip.conf").write_text(f"[install]\nconstraint = {pip_of_a_venv}/torch-pin.txt\n")
    pin = pip_of_a_venv / "torch-pin.txt"
    pin.write_text("torch==2.13.0+cu130\n")
    machine = read_machine(MACHINES / "rx-6700-xt-wrong-wheel.json")
    pinned = machine.model_copy(
        update={"software": machine.software.model_copy(update={"pinned": "torch==2.13.0+cu130"})}
    )
    mend(1, diagnose(pinned), pinned, ask=lambda question: True)
    assert (pip_of_a_venv / "asked").read_text().startswith("/dev/null:-m pip install ")
    assert pin.read_text().splitlines()[0] == f"torch=={metadata.version('torch')}"


def test_the_systems_python_is_left_alone(monkeypatch):
    on_a_terminal(monkeypatch)
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    with pytest.raises(UserError, match="is the system's") as caught:
        mend(*finding_of("rx-6700-xt-wrong-wheel", "wrong-build"), ask=lambda question: True)
    assert caught.value.remedy.startswith("python3 -m venv")


def test_what_can_be_done_for_the_user_is_said():
    output = doctor("--machine", record("rx-6700-xt-wrong-wheel-override")).output
    assert "fix       1 and 2 can be done for you, after asking: bloomery doctor --fix 1" in output
    assert "can be done for you" not in doctor("--machine", record("user-outside-render")).output


def test_on_a_real_terminal_it_asks(tmp_path):
    """Nothing is answered: Ctrl+D leaves everything as it was."""
    parent, child = pty.openpty()
    script = (
        "import sys; sys.path.insert(0, '.')\n"
        "from bloomery.cli.doctor.command import _confirm\nprint('said', _confirm('Change it?'))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=child, stdout=subprocess.PIPE, text=True)
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
    (run / "log.txt").write_text("/home/alice/data hf_abcdefghijklmnopqrstuvwx\nalice@box: RuntimeError: No HIP GPUs\n")
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
    assert [one.id for one in diagnose(nameless(machine))] == [one.id for one in diagnose(machine)]


SECRETS = {
    "tokens": [
        "hf_abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrstuvwx",
        "AKIAABCDEFGHIJKLMNOP",
        "s3cret-of-mine-99",
    ],
    "users": ["alice", "bob-admin"],
    "hosts": ["secretbox", "secretbox.lab.example.org", "nid01934"],
    "addresses": ["10.12.13.14", "2001:db8:0:1:1:1:1:1", "52:54:00:12:34:56", "fe80::5054:ff:fe12:3456"],
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
    (run / "log.txt").write_text("\n".join([*lines, "torch 2.13.0+rocm7.2 on 127.0.0.1 at 12:34:56"]))
    machine = read_machine(MACHINES / "mi250x-frontier-slurm.json")
    environment = {f"NCCL_{number}": line for number, line in enumerate(lines)}
    software = machine.software.model_copy(update={"environment": environment, "prefix": "/home/alice/env"})
    (tmp_path / "m.json").write_text(machine.model_copy(update={"software": software}).model_dump_json())
    assert doctor("--machine", "m.json", "--bundle", "report.json").exception is None
    text = (tmp_path / "report.json").read_text()
    assert [secret for secret in SECRETS[kind] if secret in text] == []
    assert "torch 2.13.0+rocm7.2 on 127.0.0.1 at 12:34:56" in text  # what is no secret stays


@pytest.mark.parametrize("name", ["amd", "torch", "rocm", "machine", "stops"])
def test_a_host_or_user_named_like_a_word_of_the_record(name, tmp_path, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: name)
    monkeypatch.setenv("LOGNAME", name)
    assert doctor("--machine", record("rx-6700-xt-wrong-wheel"), "--bundle", "report.json").exception is None
    again = json.loads(doctor("--machine", "report.json", "--json").output)
    direct = json.loads(doctor("--machine", record("rx-6700-xt-wrong-wheel"), "--json").output)
    assert [one["id"] for one in again["findings"]] == [one["id"] for one in direct["findings"]]


def test_a_host_name_is_taken_out(monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "secretbox")
    assert private("on secretbox, in secretbox-data") == "on host, in secretbox-data"


def test_a_bundle_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        raise doctor("--machine", record("h200"), "--bundle", str(tmp_path / "no/such/folder.json")).exception
