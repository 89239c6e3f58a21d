"""What a plan says of a quantised base: that it needs an adapter, its bits, and whose kernels read it."""

import pytest
from plan_help import gpu_machine, loaded, machine, planned

from bloomery.core.errors import UserError
from bloomery.hardware.dequantizers import dequantizer
from bloomery.hardware.machine import Machine, Package, Probe

LORA = {"kind": "lora", "target_modules": ["all-linear"]}


def with_bitsandbytes(version: str = "0.50.2", *probes: Probe) -> Machine:
    gpu = gpu_machine("MI300X")
    software = gpu.software.model_copy(
        update={"packages": (Package(name="bitsandbytes", version=version),)}
    )
    return gpu.model_copy(update={"software": software, "probes": probes})


def probe(outcome: str) -> Probe:
    return Probe(name="bitsandbytes", outcome=outcome)


@pytest.mark.parametrize(
    ("where", "base", "expected", "reason"),
    [
        (
            with_bitsandbytes("0.50.2", probe("ok")),
            "nf4",
            "bitsandbytes",
            "its probe came out right",
        ),
        (with_bitsandbytes("0.50.2", probe("wrong")), "nf4", "torch", "came out wrong"),
        (with_bitsandbytes("0.50.2"), "nf4", "torch", "has not tried"),
        (with_bitsandbytes("0.49.2", probe("ok")), "nf4", "torch", "older than 0.50"),
        (with_bitsandbytes("1.0", probe("ok")), "nf4", "bitsandbytes", "right on this GPU"),
        (with_bitsandbytes("0.50.2", probe("ok")), "int8", "torch", "each 64 of 8 bits"),
        (gpu_machine("MI300X"), "nf4", "torch", "not installed"),
    ],
)
def test_whose_kernels_read_the_base(where, base, expected, reason):
    plain = dequantizer(where, base, device="cuda", compiled=False)
    assert plain.value == expected and reason in plain.reason
    compiled = dequantizer(where, base, device="cuda", compiled=True)
    assert compiled.value == ("compiled" if expected == "torch" else expected)
    assert dequantizer(where, base, device="cpu", compiled=True).value == "torch"


def test_the_plan_says_it_and_keeps_it():
    recipe = loaded(adapter=LORA, quantize={"kind": "nf4"})
    plan = planned(recipe, with_bitsandbytes("0.50.2", probe("ok")))
    said = next(decision for decision in plan.choices if decision.key == "quantize.kind")
    assert plan.quantized_by == "bitsandbytes"
    assert said.reason.startswith("4.127 bits per weight of the layers; bitsandbytes reads them")
    here = planned(recipe, machine())
    assert here.quantized_by == "torch" and here.quantize.kind == "nf4"


def test_memory_counts_the_quantised_bytes():
    floats, bits = (
        planned(loaded(adapter=LORA, quantize={"kind": base}), machine()).memory.parts["weights"]
        for base in ("none", "nf4")
    )
    assert bits < floats


def test_a_quantised_base_without_an_adapter_is_refused():
    with pytest.raises(UserError, match="not trainable") as error:
        planned(loaded(quantize={"kind": "int8"}), machine())
    assert error.value.code == 2 and "adapter.kind=lora" in error.value.fix
