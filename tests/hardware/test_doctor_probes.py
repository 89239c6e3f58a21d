"""The doctor's findings from probes: how bad each is, what mends it, and that plans follow them."""

import pytest

from bloomery.hardware import probes as probes
from bloomery.hardware.detect import detect
from bloomery.hardware.doctor.diagnose import diagnose
from bloomery.hardware.machine import Probe
from bloomery.hardware.profile import build_profile, with_gpu
from bloomery.runs.devices import narrowed
from changed_machines import AMD_WHEEL, ids, machine, only

TRAIN = "bloomery train RECIPE"


@pytest.mark.parametrize(
    ("name", "outcome", "said", "level", "fix"),
    [
        ("device", "crashed", "SIGSEGV", "blocks", "PIP_CONSTRAINT=/dev/null " + AMD_WHEEL),
        (
            "device",
            "hung",
            "no answer within 40 s",
            "blocks",
            "PIP_CONSTRAINT=/dev/null " + AMD_WHEEL,
        ),
        ("matmul-float16", "wrong", "", "slows", f"{TRAIN} train.precision=float32"),
        ("matmul-bfloat16", "failed", "", "note", f"{TRAIN} train.precision=float16"),
        ("matmul-float32", "crashed", "SIGSEGV", "blocks", "bloomery doctor --bundle"),
        ("attention-flash", "wrong", "", "note", f"{TRAIN} train.attention=blockwise"),
        (
            "compile",
            "failed",
            "error: unsupported target: 'gfx1031'",
            "note",
            f"{TRAIN} train.compile=false",
        ),
        ("all-reduce", "hung", "no answer within 90 s", "slows", "bloomery doctor --bundle"),
    ],
)
def test_a_probe_that_went_wrong_is_a_finding(name, outcome, said, level, fix):
    probe = Probe(
        name=name, outcome=outcome, message=said, error=0.4 if outcome == "wrong" else None
    )
    found = only(machine(probes=(probe, Probe(name="bandwidth", outcome="ok"))), f"probe-{name}")
    assert found.level == level
    assert found.fix[0].startswith(fix)
    assert found.evidence.startswith(f"{name}: {said or outcome}")
    assert found.evidence.endswith("(relative error 0.4)") == (outcome == "wrong")


def test_a_step_that_is_wrong_names_the_part_and_the_way_out():
    said = "this GPU computes wrong gradients in q_proj with float16: use float32"
    facts = {"fix": "train.precision=float32", "detail": "gradient of weight: error 1.5"}
    probe = Probe(name="step-float16", outcome="wrong", message=said, error=1.5, facts=facts)
    here = machine(probes=(probe,))
    found = only(here, "probe-step-float16")
    assert found.what == said
    assert found.evidence == "step-float16: gradient of weight: error 1.5"
    assert found.level == "slows"
    assert found.fix[0].startswith(f"{TRAIN} train.precision=float32")

    # Plans follow it, as the fix says.
    assert build_profile(machine()).dtype.value == "float16"
    assert build_profile(here).dtype.value == "float32"
    assert "q_proj" in build_profile(here).dtype.reason

    # A dtype that no plan would take is a note; and where nothing helps, it blocks.
    unused = probe.model_copy(update={"name": "step-bfloat16"})
    assert only(machine(probes=(unused,)), "probe-step-bfloat16").level == "note"
    hopeless = probe.model_copy(update={"facts": {"fix": "", "detail": ""}})
    assert only(machine(probes=(hopeless,)), "probe-step-float16").level == "blocks"


def test_what_a_probe_said_is_looked_up_among_the_symptoms():
    said = "rocBLAS error: Cannot read /x/TensileLibrary.dat: No such file or directory for GPU arch : gfx1031"
    probe = Probe(name="matmul-float16", outcome="crashed", message=said)
    found = only(machine(probes=(probe,)), "probe-matmul-float16")
    assert "rocBLAS ships without kernels for this GPU" in found.what


def test_probes_of_one_cause_are_told_once():
    said = "HIP error: invalid device function"
    names = ("flash", "efficient", "math")
    probes = [Probe(name=f"attention-{name}", outcome="failed", message=said) for name in names]
    assert len(diagnose(machine(probes=tuple(probes)))) == 1


def test_the_build_line_of_flash_attn_is_given_where_it_is_of_use():
    line = "GPU_ARCHS=gfx1200 pip install --no-build-isolation --no-deps flash-attn"
    probe = Probe(name="flash-attn", outcome="absent", facts={"build": line})
    one = machine("rx-9060-xt-math-attention", probes=(probe,))
    assert only(one, "flash-attn-absent").fix[0].startswith(line)
    # torch has its own there
    assert "flash-attn-absent" not in ids(machine("mi300x-node", probes=(probe,)))


def test_a_plan_follows_what_was_probed_on_these_very_devices(tmp_path, monkeypatch):
    """`doctor --probe` finds that compiling fails; from then on the machine says so, and plans go without it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = detect()
    assert before.probes == ()
    probes._store(before, [Probe(name="compile", outcome="crashed", message="SIGSEGV")])
    for now in (detect(), narrowed(detect(), "cpu")):
        assert [probe.name for probe in now.probes] == ["compile"]
        assert "probe compile crashed" in build_profile(now).compile.reason
    # another device was not probed
    assert with_gpu(detect(), machine("rx-6700-xt").accelerators[0]).probes == ()


def test_a_command_that_the_probe_and_the_symptom_name_is_said_once():
    said = "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    found = only(
        machine("h200", probes=(Probe(name="compile", outcome="failed", message=said),)),
        "probe-compile",
    )
    commands = [step.partition("  # ")[0] for step in found.fix]
    assert len(commands) == len(set(commands)) > 2
    assert (
        found.fix[0]
        == "bloomery train RECIPE train.compile=false  # `auto` selects it on this machine"
    )
