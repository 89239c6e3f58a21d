"""The table of symptoms: each recognises its own log, none recognises what is harmless."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

from bloomery.hardware.doctor.symptoms import Symptom, agree, match, symptoms
from bloomery.hardware.machine import Machine, read_machine
from bloomery.hardware.profile import install

FOLDER = Path(__file__).parent
MACHINES = FOLDER.parent / "machines"
HARMLESS = (FOLDER / "harmless.txt").read_text().splitlines()


def machine(name: str) -> Machine:
    return read_machine(MACHINES / f"{name}.json")


@cache
def machines() -> list[Machine]:
    return [read_machine(path) for path in sorted(MACHINES.glob("*.json"))]


def fitting(symptom: Symptom) -> list[Machine]:
    """The recorded machines on which it could be this."""
    return [one for one in machines() if agree(symptom.requires, one)]


def test_a_log_matches_its_own_symptom_and_no_other_scores_higher():
    for symptom in symptoms():
        first, *rest = match(symptom.log)
        assert first.id == symptom.id
        assert all(other.score < first.score for other in rest), symptom.id
        assert first.line == symptom.log.strip(), symptom.id


def test_it_stays_the_best_on_the_machines_that_can_have_it():
    for symptom in symptoms():
        assert fitting(symptom), symptom.id
        for one in fitting(symptom):
            assert match(symptom.log, machine=one)[0].id == symptom.id


def test_it_stays_the_best_in_the_middle_of_a_long_log():
    for symptom in symptoms():
        log = "\n".join([*HARMLESS[:60], symptom.log, *HARMLESS[60:120]])
        assert match(log)[0].id == symptom.id


def test_the_stream_it_appears_in_does_not_hide_it():
    for symptom in symptoms():
        assert match(symptom.log, stream=symptom.stream)[0].id == symptom.id


def test_two_hundred_harmless_lines_match_nothing():
    assert len(set(HARMLESS)) >= 200
    assert {line: [one.id for one in match(line)] for line in HARMLESS if match(line)} == {}
    assert match("\n".join(HARMLESS)) == ()


def test_ids_are_unique_and_the_forty_of_rocm_are_among_more():
    ids = [symptom.id for symptom in symptoms()]
    assert len(ids) == len(set(ids)) >= 80


def test_a_remedy_can_be_pasted_into_a_shell():
    for symptom in symptoms():
        steps = [step for step in (*symptom.fix, symptom.verify) if step != "{install}"]
        assert not any("{install}" in step for step in steps), symptom.id
        assert all(re.match("# |[a-zA-Z]", step) for step in steps), symptom.id
        checked = subprocess.run(
            ["bash", "-n"], input="\n".join(steps), text=True, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, ""), symptom.id


def test_an_unknown_key_is_an_error():
    good = symptoms()[0].model_dump()
    assert Symptom.model_validate(good)
    for wrong in (
        {**good, "patern": "x"},
        {**good, "requires": {"vender": "amd"}},
        {**good, "patterns": ["("]},
    ):
        with pytest.raises(ValidationError):
            Symptom.model_validate(wrong)


def test_a_machine_that_contradicts_excludes():
    log = "CUDA error: no kernel image is available for execution on the device"
    assert match(log)[0].id == "cuda-no-kernel-image"
    assert match(log, machine=machine("rx-6700-xt")) == ()
    assert match(log, machine=machine("h200"))[0].id == "cuda-no-kernel-image"
    assert match(log, machine=machine("laptop-without-a-gpu"))[0].id == "cuda-no-kernel-image"


def test_facts_make_a_symptom_likelier():
    log = "RuntimeError: HIP error: shared object initialization failed"
    plain, behind = (
        match(log, machine=machine("rx-6700-xt"))[0],
        match(log, machine=machine("rx-7900-xtx-behind-an-igpu"))[0],
    )
    assert behind.score == plain.score + 0.5


def test_the_kernels_log_and_a_programs_output_are_told_apart():
    log = "amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=2662395"
    assert match(log, stream="dmesg")
    assert match(log, stream="stderr") == ()
    assert match("CUDA out of memory", stream="stderr")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (
            "rx-6700-xt-wrong-wheel",
            "pip install --force-reinstall --index-url https://stable.repo.amd.com/rocm/whl-next/ "
            "'torch[device-gfx1031]==2.13.0+rocm10.0.0'",
        ),
        (
            "mi50-wheel-without-its-kernels",
            "pip install --force-reinstall --index-url https://download.pytorch.org/whl/rocm6.3 torch==2.9.1+rocm6.3",
        ),
        ("h200", "pip install --force-reinstall torch==2.13.0"),
    ],
)
def test_the_command_that_installs_fits_the_machine(name, command):
    assert install(machine(name)) == command
    found = match("Torch not compiled with CUDA enabled", machine=machine(name))[0]
    assert found.fix[0].startswith(command)


def test_the_command_passes_our_own_pin_and_knows_the_site():
    here = machine("rx-6700-xt-wrong-wheel")
    pinned = here.model_copy(
        update={"software": here.software.model_copy(update={"pinned": "torch==2.13.0+rocm7.2"})}
    )
    for subject, part in (
        (pinned, "PIP_CONSTRAINT=/dev/null pip"),
        (machine("mi250x-frontier-slurm"), "2.10.0+rocm7.1"),
    ):
        assert part in match("Torch not compiled with CUDA enabled", machine=subject)[0].fix[0]


def test_without_a_machine_the_doctor_is_asked_for_the_build():
    assert match("Torch not compiled with CUDA enabled")[0].fix[0].startswith("bloomery doctor  #")


def test_a_huge_log_is_searched_at_its_end():
    log = "x" * 3_000_000 + "\n" + "CUDA out of memory"
    assert match(log)[0].id == "cuda-out-of-memory"
    # no message is that far into a line
    assert json.dumps(match("y" * 100_000 + "HIP out of memory")) == "[]"


NO_RESOURCES = (
    ":0:rocdevice.cpp :2724: Callback: Queue 0x150b4de00000 Aborting with error : HSA_STATUS_ERROR_OUT_OF_RESOURCES: "
    "The runtime failed to allocate the necessary resources. This error may also occur when the core runtime library "
    "needs to spawn threads or create internal OS-specific events. Code: 0x1008"
)


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("Loss is nan, stopping training", "loss-is-nan"),
        (
            "torchvision 0.19.1 requires torch==2.4.1, but you have torch 2.5.1 which is incompatible.",
            "companions-mismatch",
        ),
        (
            "socketProgressOpt: Call to recv from 10.0.0.3<41234> failed : Connection reset by peer",
            "peer-left",
        ),
        (
            "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:41234",
            "peer-left",
        ),
        (f"{NO_RESOURCES} Available Free mem : 0 MB", "hip-out-of-memory"),
        (f"{NO_RESOURCES} Available Free mem : 13386 MB", "hsa-out-of-resources"),
        ("zsh: segmentation fault (core dumped)  comfy launch", "segmentation-fault"),
        (
            "NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error",
            "nvidia-memory-error",
        ),
        (
            "NVRM: Xid (PCI:0000:ca:00): 31, pid=1587983, name=exe, Ch 0000000a, intr 00000000.",
            "nvidia-xid",
        ),
        (
            "amdgpu 0000:de:ad.0: amdgpu: socket: 0 2 uncorrectable hardware errors detected in gfx block",
            "amdgpu-memory-error",
        ),
        (
            "*** WARNING (proc 1): Unexpected error -28 (No space left on device) from fi_mr_regattr()",
            "slingshot-cannot-map",
        ),
        ("[1652783] UCX ERROR ibv_reg_mr failed: Cannot allocate memory", "locked-memory-limit"),
    ],
)
def test_other_words_for_the_same(line, known):
    assert match(line)[0].id == known


@pytest.mark.parametrize("general", ["segmentation-fault", "bus-error", "elastic-child-failed"])
def test_how_a_process_ended_says_less_than_why(general):
    ended = next(symptom.log for symptom in symptoms() if symptom.id == general)
    for symptom in symptoms():
        if symptom.id not in ("segmentation-fault", "bus-error", "elastic-child-failed"):
            assert match(f"{symptom.log}\n{ended}")[0].id == symptom.id


@pytest.mark.parametrize(
    "line",
    [
        "amdgpu 0000:01:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
        "pcieport 0000:00:01.1: PCIe Bus Error: severity=Corrected, type=Data Link Layer",
    ],
)
def test_counts_of_nothing_and_what_was_corrected_are_no_symptom(line):
    assert match(line) == ()
