"""`bloomery doctor` as people and programs meet it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_help import MACHINES, NAMES, _a_folder_of_its_own, doctor, record  # noqa: F401

from bloomery.cli import main
from bloomery.cli.doctor_page import step_lines
from bloomery.core.errors import UserError
from bloomery.hardware.doctor.diagnose import run_lines
from bloomery.hardware.machine import read_machine


def test_the_page_of_the_wrong_wheel():
    done = doctor("--machine", record("rx-6700-xt-wrong-wheel-override"))
    lines = done.output.splitlines()
    assert done.return_value == 1
    assert lines[0].startswith(
        "Not ready: PyTorch is built for NVIDIA, the GPU is AMD. Two commands fix it."
    )
    assert lines[0].endswith(" s")
    assert len(lines[0]) == 100
    assert lines[2].startswith(
        "GPU 0     AMD Radeon RX 6700 XT · gfx1031 · 11.98 GiB, 0.61 GiB in use · amdgpu, Linux"
    )
    assert lines[3] == "torch     2.13.0+cu130 · Python 3.12.4 · ~/go-coder/.venv"
    assert lines[4] == "access    /dev/kfd and /dev/dri/renderD128: read-write"
    assert lines[6] == "1  blocks PyTorch finds no GPU: CUDA build installed"
    assert (
        "   fix    pip install --force-reinstall --index-url https://stable.repo.amd.com/rocm/whl-next/ \\"
        in lines
    )
    assert "              'torch[device-gfx1031]==2.13.0+rocm10.0.0'" in lines
    assert "   found  ~/.bashrc line 118" in lines
    assert any(
        line.startswith("then      float16 + loss scaling · triton attention") for line in lines
    )
    assert "go-coder-125m fits (" in done.output
    assert lines[-1].endswith("exit 1")


def test_a_problem_without_a_command_is_not_counted_as_one():
    """The driver of a cluster's nodes: its administrators install it, whatever commands you have."""
    first_line = doctor("--machine", record("mi250x-frontier-old-module")).output.splitlines()[0]
    assert "Two problems block training." in first_line
    assert "command" not in first_line


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_a_hundred_columns_wide_and_says_how_it_ends(name):
    done = doctor("--machine", record(name))
    assert max(map(len, done.output.splitlines())) <= 100, [
        li for li in done.output.splitlines() if len(li) > 100
    ]
    assert done.output.splitlines()[-1].endswith(f"exit {done.return_value}")
    assert done.output.startswith("Not ready: " if done.return_value else "Ready")


@pytest.mark.parametrize("name", NAMES)
def test_the_json_holds_what_the_contract_says(name):
    done = doctor("--machine", record(name), "--json")
    told = json.loads(done.output)
    assert told.keys() == {"ready", "findings", "machine", "then", "plugins"}
    assert told["ready"] == (done.return_value == 0)
    assert told["then"].keys() == {
        "recipe",
        "waits",
        "problem",
        "fits",
        "memory",
        "seconds",
        "choices",
    }
    assert {choice["key"] for choice in told["then"]["choices"]} >= {
        "train.precision",
        "train.attention",
    }
    for finding in told["findings"]:
        assert finding.keys() == {"id", "level", "what", "evidence", "fix", "verify"}
        assert finding["level"] in ("blocks", "slows", "note")
        assert isinstance(finding["fix"], list)


@pytest.mark.parametrize("name", NAMES)
def test_the_machine_of_the_json_is_one_to_diagnose_and_says_the_same(name, tmp_path):
    first = doctor("--machine", record(name), "--json").output
    (tmp_path / "told.json").write_text(first)
    again = json.loads(doctor("--machine", str(tmp_path / "told.json"), "--json").output)
    assert [finding["id"] for finding in again["findings"]] == [
        one["id"] for one in json.loads(first)["findings"]
    ]
    assert (
        again["then"] == json.loads(first)["then"]
        and again["machine"] == json.loads(first)["machine"]
    )


def test_then_says_as_json_what_it_says_to_people():
    said = doctor("--machine", record("rx-6700-xt-wrong-wheel-override")).output
    told = json.loads(
        doctor("--machine", record("rx-6700-xt-wrong-wheel-override"), "--json").output
    )["then"]
    assert told["fits"] and f"{told['recipe']} fits" in said
    total, limit = told["memory"]["total"]["value"], told["memory"]["limit"]
    assert f"({total:.1f} of {limit:.1f} GiB)" in said
    assert next(one["value"] for one in told["choices"] if one["key"] == "train.precision") in said


def test_the_machine_of_the_json_holds_no_names(tmp_path):
    whole = json.loads(Path(record("rx-6700-xt")).read_text())
    whole["host"]["access"]["groups"] = ["secret-project", "render"]
    whole["software"]["environment"] = {"HF_TOKEN": "hf_" + "a" * 34, "MASTER_ADDR": "10.1.2.3"}
    whole["software"]["prefix"] = "/home/somebody/venv"
    (tmp_path / "machine.json").write_text(json.dumps(whole))
    said = doctor("--machine", str(tmp_path / "machine.json"), "--json").output
    for name in ("secret-project", "hf_aaa", "10.1.2.3", "somebody"):
        assert name not in said


def test_a_laptop_without_a_gpu_is_told_what_that_means_and_what_to_do():
    lines = doctor("--machine", record("laptop-without-a-gpu")).output.splitlines()
    assert lines[0].startswith("Ready, without a GPU: ")
    assert lines[5].startswith("1  note   no supported GPU: ")
    assert any(line.startswith("   fix    bloomery demo   ") for line in lines)
    assert not any("once it is accessible" in line for line in lines)


def test_eight_gpus_are_one_line():
    lines = doctor("--machine", record("mi300x-node")).output.splitlines()
    assert sum(line.startswith("GPU ") for line in lines) == 1
    assert lines[2].startswith("GPU 0-7   AMD Instinct MI300X · gfx942")


def test_this_machine_is_examined_in_under_five_seconds_without_torch():
    script = (
        "import sys, json\nfrom bloomery.cli import main\n"
        "try: main(['doctor', '--json'])\nexcept SystemExit as end: code = end.code\n"
        "print(json.dumps(['torch' in sys.modules, code]), file=sys.stderr)"
    )
    began = sum(os.times()[2:4])  # CPU seconds of children: other programs may use the cores
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert sum(os.times()[2:4]) - began < 5
    told = json.loads(done.stdout)
    torch_was_imported, code = json.loads(done.stderr.splitlines()[-1])
    assert not torch_was_imported
    assert code == (0 if told["ready"] else 1)


def test_a_card_that_is_closed_is_planned_as_it_will_be(tmp_path):
    """Once the group is right, the card trains: not the CPU that would be used until then."""
    closed = doctor("--machine", record("user-outside-render")).output
    assert "access    /dev/kfd and /dev/dri/renderD128: permission denied" in closed
    assert "of 14.7 GiB) · about" in closed
    masked = doctor("--machine", record("container-without-kfd")).output
    assert "once it is accessible" in masked


def words_of(command: str) -> list[str]:
    """As a shell reads them."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "command",
    [
        "sudo sed -i.bak 's/^GRUB_LINUX=\"/&amd_iommu=on iommu=pt a_long_word=that_will_not_fit /' /etc/default/grub",
        "pip install --force-reinstall --index-url https://stable.repo.amd.com/rocm/whl-next/ 'torch[device-gfx1031]'",
        'bloomery train RECIPE "' + "a long word " * 9 + '"',
    ],
)
def test_commands_are_broken_where_a_shell_goes_on(command):
    """Never within quotes: the words that a shell reads stay the same."""
    assert words_of("\n".join(step_lines([command]))) == words_of(command)


def test_remarks_stand_in_a_column():
    long = "bloomery plan go-coder-125m --gpu 'RX 6700 XT'"
    first, second = step_lines(["unset X  # keep one", f"{long}  # what it would do"])
    assert first.index("keep one") == second.index("what it would do") == len(long) + 3


# --explain


def test_a_message_is_explained():
    done = doctor(
        "--explain",
        "RuntimeError: HIP error: invalid device function",
        "--machine",
        record("rx-6700-xt"),
    )
    assert done.return_value == 0
    assert done.output.startswith("1  blocks the PyTorch wheel has no kernels for this AMD GPU")
    assert "torch[device-gfx1031]" in done.output
    assert "ROCm/rocALUTION#197" in done.output


def test_a_log_file_and_a_pipe_are_read(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("step 1\nOSError: [Errno 28] No space left on device\n")
    assert (
        json.loads(doctor("--explain", str(log), "--json").output)["findings"][0]["id"]
        == "disk-full"
    )
    assert (
        json.loads(doctor("--explain", "-", "--json", given=log.read_text()).output)["findings"][0][
            "id"
        ]
        == "disk-full"
    )


def test_what_nobody_knows_is_empty_for_programs_and_a_next_step_for_people():
    assert json.loads(doctor("--explain", "the moon is made of cheese", "--json").output) == {
        "findings": []
    }
    said = doctor("--explain", "the moon is made of cheese").output
    assert said.startswith("unknown message: bloomery doctor --bundle report.json")


def test_one_long_line_is_a_message_and_no_name_of_a_file():
    line = (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. "
        + "GPU 0 has 1.15 GiB free. " * 10
    )
    done = doctor("--explain", line, "--json", "--machine", record("rx-6700-xt"))
    assert (
        done.exit_code == 0 and json.loads(done.output)["findings"][0]["id"] == "hip-out-of-memory"
    ), done.output


def test_a_message_of_another_kind_of_machine_is_explained_too():
    done = doctor("--explain", "CUDA out of memory", "--json", "--machine", record("rx-6700-xt"))
    assert json.loads(done.output)["findings"][0]["id"] == "cuda-out-of-memory"


# --machine, wrong words


@pytest.mark.parametrize("content", [None, "not json", "[]", '{"host": 3}'])
def test_a_file_that_is_no_machine(tmp_path, content):
    file = tmp_path / "machine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError) as caught:
        raise doctor("--machine", str(file)).exception
    assert caught.value.code == 2
    assert caught.value.fix


@pytest.mark.parametrize("flag", [["--probe"], ["--fix", "1"]])
def test_what_works_on_this_machine_alone(flag):
    with pytest.raises(UserError, match="works only on this machine"):
        raise doctor("--machine", record("h200"), *flag).exception


# --probe


def test_probes_are_run_shown_and_judged(monkeypatch):
    from bloomery.hardware import probes as probes
    from bloomery.hardware.machine import Probe

    hung = Probe(name="compile", outcome="hung", message="no answer within 120 s")
    found = (Probe(name="device", outcome="ok"), hung)
    monkeypatch.setattr(probes, "run_probes", lambda machine, extra, on_progress: found)
    told = json.loads(doctor("--probe", "--json").output)
    assert "probe-compile" in [finding["id"] for finding in told["findings"]]
    assert "1 of 2 probes passed." in doctor("--probe").output


# --docker


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "rx-6700-xt",
            [
                "docker run",
                "--device=/dev/kfd --device=/dev/dri --group-add=992",
                "--ipc=host",
                ":rocm",
            ],
        ),
        ("container-without-kfd", ["--group-add=$(stat -c %g /dev/kfd)"]),
        ("h200", ["--gpus all", "bloomery:cuda"]),
        ("laptop-without-a-gpu", ["bloomery:cpu"]),
        ("strix-halo", ["podman run", "--group-add=keep-groups", "--security-opt=label=disable"]),
        ("mi250x-frontier-slurm", ["srun", "apptainer exec --rocm"]),
        ("wsl", ["--device=/dev/dxg", "HSA_ENABLE_DXG_DETECTION=1"]),
    ],
)
def test_the_run_line_is_this_machines(name, words):
    lines = run_lines(read_machine(MACHINES / f"{name}.json"))
    for word in words:
        assert word in lines[-1]
    assert doctor("--docker", "--machine", record(name)).output.splitlines() == list(lines)
    checked = subprocess.run(
        ["bash", "-n"], input="\n".join(lines), text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_image_of_the_build_line_exists():
    root = Path(__file__).parents[2]
    for name in NAMES:
        first = run_lines(read_machine(MACHINES / f"{name}.json"))[0]
        if "docker/Dockerfile" in first:
            assert (root / first.split("-f ")[1].split()[0]).is_file()


def test_main_ends_with_the_code(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--machine", record("rx-7900-xt-cuda-wheel")])
    assert caught.value.code == 1
    assert "Not ready" in capsys.readouterr().out
