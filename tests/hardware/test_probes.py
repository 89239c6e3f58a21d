"""Probes run in children: whatever a driver does to them is an answer, and the caller goes on."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from bloomery.check import attention_probes
from bloomery.hardware import probe_worker
from bloomery.hardware import probes as probes
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Accelerator, Host, Machine, Probe, Software
from bloomery.hardware.probes import (
    ProbeSpec,
    cache_key,
    each_probe,
    machine_probe_specs,
    probe,
    run_probes,
    with_cached_probes,
)
from bloomery.hardware.profile import build_profile

HERE = Path(__file__).parent
FAULTY = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
HOST = Host(
    system="Linux",
    cpu_name="a CPU",
    cpu_cores=2,
    cpu_flags=("avx2",),
    memory_bytes=2**34,
    memory_free_bytes=2**33,
    disk_free_bytes=2**40,
)
CARD = Accelerator(
    index=0, vendor="amd", name="Radeon RX 6700 XT", arch="gfx1031", memory_bytes=12 * 2**30
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def faulty(*names: str, seconds: float = 20.0, **job) -> tuple[Probe, ...]:
    wanted = [ProbeSpec(name=name, module="faulty_probes", seconds=seconds) for name in names]
    return probe(
        wanted, {"device": "cpu", "dtype": "float32", "arch": ""} | job, environment=FAULTY
    )


def machine(*devices: Accelerator, build: str = "cpu", torch: str | None = "2.13.0+cpu") -> Machine:
    return Machine(
        accelerators=devices,
        host=HOST,
        software=Software(python="3.12.4", torch=torch, build=build),
    )


def test_every_way_to_go_wrong_is_an_outcome_and_the_rest_still_run():
    found = faulty(
        "fine-1", "segfault", "fine-2", "wrong", "nan", "raises", "fine-3", "leaves", "fine-4"
    )
    outcomes = {each.name: each.outcome for each in found}
    assert outcomes == {
        "fine-1": "ok",
        "segfault": "crashed",
        "fine-2": "ok",
        "wrong": "wrong",
        "nan": "wrong",
        "raises": "failed",
        "fine-3": "ok",
        "leaves": "crashed",
        "fine-4": "ok",
    }
    said = {each.name: each.message for each in found}
    assert said["segfault"].startswith("SIGSEGV")
    assert said["raises"] == "RuntimeError: HIP error: invalid device function in ~"
    assert said["leaves"] == "exit code 7: the driver printed this and left"
    assert "0.5" in said["wrong"]


def test_a_child_is_shared_while_all_is_well_and_replaced_when_it_is_not():
    one, two, _, three = faulty("fine-1", "fine-2", "raises", "fine-3")
    assert one.facts["pid"] == two.facts["pid"] != three.facts["pid"]


def test_a_hanging_probe_is_given_up_and_its_whole_group_is_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "START_SECONDS", 1.0)
    begun = time.monotonic()
    hung, after = faulty("hang", "fine", seconds=3.0, pids=str(tmp_path / "pids"))
    assert (hung.outcome, after.outcome) == ("hung", "ok")
    assert "3 s" in hung.message
    assert time.monotonic() - begun < 30
    for pid in (tmp_path / "pids").read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_progress_names_each_probe_and_counts():
    seen: list[tuple[str, int, int]] = []
    wanted = [
        ProbeSpec(name=name, module="faulty_probes") for name in ("fine-1", "segfault", "fine-2")
    ]
    environment = FAULTY
    probe(
        wanted,
        {},
        environment=environment,
        on_progress=lambda name, done, total: seen.append((name, done, total)),
    )
    assert [name for name, _, _ in dict.fromkeys(seen)] == ["fine-1", "segfault", "fine-2"]
    assert {done for _, done, _ in seen} == {0, 1, 2} and {total for _, _, total in seen} == {3}


def test_a_result_is_there_before_the_next_child_starts_and_other_devices_are_left_out(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", FAULTY["PYTHONPATH"])
    begun: list[str] = []
    extra = [
        ProbeSpec(name="fine-1", module="faulty_probes"),
        ProbeSpec(name="fine-2", module="faulty_probes", environment={"ANOTHER": "1"}),
        ProbeSpec(name="fine-3", module="faulty_probes", every_device=True),
    ]
    results = each_probe(
        machine(),
        extra=extra,
        only={"fine"},
        on_progress=lambda name, _done, _total: begun.append(name),
        other_devices=False,
    )
    assert next(results).name == "fine-1" and set(begun) == {"fine-1"}
    assert [result.name for result in results] == ["fine-2"]


def test_the_processor_is_probed_and_remembered_until_torch_changes(tmp_path):
    here = detect()
    extra = attention_probes.attention_probe_specs(here)
    found = run_probes(
        here, extra=extra, only={"device", "matmul-float32", "attention", "backend-sdpa"}
    )
    assert {each.name: each.outcome for each in found} == {
        "device": "ok",
        "matmul-float32": "ok",
        "attention-flash": "ok",
        "attention-math": "ok",
        "backend-sdpa": "ok",
    }
    rate = next(each for each in found if each.name == "matmul-float32")
    assert rate.error is not None and rate.error < 2e-5 and float(rate.facts["tflops"]) > 0
    assert next(each for each in found if each.name == "backend-sdpa").facts["kernel"] == "flash"
    assert with_cached_probes(here).probes == found
    other = here.model_copy(update={"software": here.software.model_copy(update={"torch": "2.0"})})
    assert with_cached_probes(other).probes == ()


def test_only_adds_to_what_is_remembered():
    here = detect()
    run_probes(here, only={"bitsandbytes"})
    run_probes(here, only={"flash-attn"})
    assert {each.name for each in with_cached_probes(here).probes} == {"bitsandbytes", "flash-attn"}


def test_without_torch_there_is_nothing_to_probe():
    assert run_probes(machine(torch=None)) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"%s": 3}', '{"%s": {"probes": [{"name": 1}]}}'])
def test_a_damaged_cache_is_an_empty_one(text, tmp_path):
    here = machine()
    path = tmp_path / "cache/bloomery/probes.json"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("%s", cache_key(here)))
    assert with_cached_probes(here).probes == ()
    probes._store(here, (Probe(name="device", outcome="ok"),))
    assert with_cached_probes(here).probes == (Probe(name="device", outcome="ok"),)


def test_the_cache_is_the_users_alone_keeps_few_machines_and_may_be_unwritable(
    tmp_path, monkeypatch
):
    for number in range(probes.CACHED + 5):
        probes._store(machine(torch=f"2.{number}"), (Probe(name="device", outcome="ok"),))
    path = tmp_path / "cache/bloomery/probes.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(json.loads(path.read_text())) == probes.CACHED
    assert [each.name for each in path.parent.iterdir()] == ["probes.json"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    probes._store(machine(), (Probe(name="device", outcome="ok"),))


def test_what_is_probed_depends_on_the_machine():
    def names(subject: Machine) -> set[str]:
        return {spec.name for spec in machine_probe_specs(subject, build_profile(subject))}

    alone = names(machine())
    assert {"matmul-bfloat16", "attention-flash", "all-reduce"} <= alone
    # no compiler on that host
    assert not {"blas-hipblaslt", "p2p", "attention-efficient", "compile"} & alone
    amd = names(machine(CARD, build="rocm", torch="2.13.0+rocm7.2"))
    assert {"blas-hipblaslt", "blas-rocblas", "attention-efficient", "compile"} <= amd
    assert not {"p2p", "all-reduce", "attention-cudnn", "device-1"} & amd
    two = names(
        machine(CARD, CARD.model_copy(update={"index": 1}), build="rocm", torch="2.13.0+rocm7.2")
    )
    assert {"p2p", "all-reduce", "device-1"} <= two


def test_a_probe_sees_the_device_that_trains_and_a_joint_one_sees_all(monkeypatch):
    small = CARD.model_copy(update={"index": 0, "memory_bytes": CARD.memory_bytes // 2})
    two = machine(small, CARD.model_copy(update={"index": 1}), build="rocm", torch="2.13.0+rocm7.2")
    profile = build_profile(two)
    joint = {spec.name for spec in machine_probe_specs(two, profile) if spec.every_device}
    assert joint == {"device-0", "all-reduce", "p2p"}  # "device" is the second
    wanted = [
        ProbeSpec(name=f"sees-{joint}", module="faulty_probes", every_device=joint)
        for joint in (False, True)
    ]

    def masks(**own: str) -> list[str]:
        environment = FAULTY | own
        found = probe(
            wanted, {"device": "cuda"}, environment=environment, defaults=profile.environment.value
        )
        return [each.facts["mask"] for each in found]

    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    assert masks() == ["1", "none"]
    assert masks(HIP_VISIBLE_DEVICES="0,1") == ["0,1", "0,1"]


def test_no_probe_joins_an_integrated_and_a_discrete_gpu(monkeypatch):
    integrated = CARD.model_copy(update={"arch": "gfx1036", "integrated": True})
    cards = [CARD.model_copy(update={"index": index}) for index in (1, 2)]

    def joint(*devices: Accelerator, **environment: str) -> list[ProbeSpec]:
        here = machine(*devices, build="rocm", torch="2.13.0+rocm7.2")
        software = here.software.model_copy(update={"environment": environment})
        here = here.model_copy(update={"software": software})
        return [
            spec for spec in machine_probe_specs(here, build_profile(here)) if spec.every_device
        ]

    assert joint(integrated, cards[0]) == []
    three = joint(integrated, *cards)
    assert {spec.name for spec in three} == {"device-1", "all-reduce", "p2p"}
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    seen = probe(
        [
            ProbeSpec(name="sees-all", module="faulty_probes", every_device=True),
            ProbeSpec(name="sees-joint", module="faulty_probes", environment=three[0].environment),
        ],
        {"device": "cuda"},
        environment=FAULTY,
        defaults={"HIP_VISIBLE_DEVICES": "1"},
    )
    assert [result.facts["mask"] for result in seen] == ["none", "1,2"]
    # A mask of the user stays: it says which GPUs the user joins.
    masked_by_user = joint(integrated, *cards, HIP_VISIBLE_DEVICES="0,1")
    assert masked_by_user and all(not spec.environment for spec in masked_by_user)


def test_every_backend_of_a_device_is_probed():
    alone = {spec.name for spec in attention_probes.attention_probe_specs(machine())}
    assert "backend-per_document" in alone and "backend-varlen" not in alone
    amd = attention_probes.attention_probe_specs(
        machine(CARD, build="rocm", torch="2.13.0+rocm7.2")
    )
    assert {spec.name for spec in amd} >= {"backend-varlen", "backend-flex", "backend-blockwise"}


def test_a_copy_between_devices_is_timed_until_both_are_done(monkeypatch):
    """The copy is work of its source, whose seconds a wait for the target alone may not have."""
    import torch

    unfinished = {"cuda:0": 0.0, "cuda:1": 0.0}  # seconds of queued work
    clock = [0.0]

    class Target:
        def __init__(self, device):
            self.device = device

        def copy_(self, source):
            unfinished[source.device] += 0.5

        def cpu(self):
            return torch.ones(1)

    def synchronize(device):
        clock[0] += unfinished[device]
        unfinished[device] = 0.0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch, "arange", lambda *_, device, dtype: Target(device))
    monkeypatch.setattr(torch, "zeros", lambda *_, device, dtype: Target(device))
    monkeypatch.setattr(probe_worker.time, "perf_counter", lambda: clock[0])
    result = probe_worker.p2p("p2p", {"device": "cuda"})
    assert result["facts"] == {"0-1": "0.1 GB/s, direct", "1-0": "0.1 GB/s, direct"}
