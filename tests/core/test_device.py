"""The door to devices on a machine with a CPU alone, and the rule that nobody goes around it."""

import ast
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.cuda._utils import _get_device_index

from bloomery.core import device as door
from bloomery.core.errors import UserError
from bloomery.core.units import GIB

SOURCE = Path(__file__).parents[2] / "src/bloomery"
VENDOR_WORDS = {*("cuda", "hip", "rocm", "nvidia", "amd", "xpu", "mps", "nccl", "rccl", "xccl")}
# What may name a vendor, and why.
ALLOWED = {
    "core/device.py": "the door",
    "data/sources/files.py": "endings of files with source text: .hip",
}


def vendor_names(source: str) -> list[str]:
    """Names, attributes and strings of code that name a vendor or a type of device.

    Prose, which has spaces, may, and so may PyTorch's names of its operators.
    """
    # Parsing all of the source takes seconds, and few files have one of the words at all.
    if not re.search(rf"(?<![a-z])({'|'.join(VENDOR_WORDS)})(?![a-z])", source.lower()):
        return []
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if (
                node not in docstrings and " " not in text.strip() and not text.startswith("aten::")
            ):
                found.append(text)
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                found.append(name)
            case ast.FunctionDef(name=name) | ast.keyword(arg=str(name)):
                found.append(name)
    return [name for name in found if VENDOR_WORDS & set(re.split(r"[^a-z]+", name.lower()))]


def test_a_vendor_in_code_is_seen_and_prose_is_not():
    code = '"""Of cuda."""\nif device == "cuda":\n    torch.cuda.synchronize()\nfix = "on AMD check iommu=pt"\n'
    assert vendor_names(code) == ["cuda", "cuda"]
    assert vendor_names('kernels = ("aten::_math_for_mps", "mps")') == ["mps"]
    assert vendor_names("def may_use_nccl(is_hip, **_): f(rocm=1)") == [
        "may_use_nccl",
        "is_hip",
        "rocm",
    ]


def test_only_the_door_and_hardware_name_a_vendor():
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    outside = {
        name: path
        for name, path in files.items()
        if not name.startswith("hardware/") and name not in ALLOWED
    }
    named = {name: vendor_names(path.read_text()) for name, path in outside.items()}
    assert {name: names for name, names in named.items() if names} == {}


def test_a_cpu_answers_every_call():
    assert (door.num_devices("cpu"), door.current_index("cpu")) == (1, 0)
    assert door.properties_of(torch.device("cpu")) == door.DeviceProperties("CPU")
    assert door.memory_stats("cpu") == {}
    assert door.free_and_total_bytes("cpu") is None
    assert door.memory_blocks("cpu") is None
    assert not door.multiplies_bfloat16("cpu")
    assert door.computes_float64("cpu")
    assert door.copies_directly("cpu", 0, 0) is None
    assert door.collective_backends("cpu") == "gloo"
    assert door.profiled_activities("cpu") == [torch.profiler.ProfilerActivity.CPU]
    door.select_device("cpu", 0)
    door.synchronize("cpu")
    door.synchronize_stream("cpu")
    door.reset_peak_memory("cpu")
    door.release_cached_memory()
    door.cap_memory("cpu", 2**30)
    door.record_memory_history("cpu", is_on=True)


def test_the_share_of_a_cap_is_that_of_the_device_itself(monkeypatch):
    """A machine may have cards of several sizes, and a rank one that is not the first."""
    total_bytes = {"cuda:0": 8 * GIB, "cuda:1": 32 * GIB, "cuda": 32 * GIB}
    shares = {}

    def set_share(share, device):
        # As torch.cuda does: a name without a number is refused.
        shares[_get_device_index(device)] = share

    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(
            name=device, total_memory=total_bytes[device]
        ),
        set_per_process_memory_fraction=set_share,
        current_device=lambda: 1,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    door.cap_memory("cuda:1", 8 * GIB)
    door.cap_memory("cuda:0", 8 * GIB)
    assert shares == {1: 0.25, 0: 1.0}
    # As plans name it: the device that this thread uses.
    door.cap_memory("cuda", 4 * GIB)
    assert shares[1] == 0.125

    # torch.mps has one device, and takes its share alone.
    module = SimpleNamespace(
        recommended_max_memory=lambda: 16 * GIB,
        set_per_process_memory_fraction=lambda share: shares.update(one=share),
    )
    door.cap_memory("sim", 4 * GIB)
    assert shares["one"] == 0.25


def test_seeded_generators_repeat_and_a_block_restores_them():
    door.seed_generators("cpu", 7)
    with door.generators_restored("cpu"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)


def test_the_restored_generator_is_that_of_the_device_itself(monkeypatch):
    """With the first device in use: the second one's."""
    kept = []

    @contextmanager
    def fork_rng(*, devices, device_type):
        kept.append((device_type, devices))
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in ("cuda", "cuda:1", torch.device("cuda", 1), "cpu"):
        with door.generators_restored(device):
            pass
    assert kept == [("cuda", [0]), ("cuda", [1]), ("cuda", [1]), ("cpu", [])]


@pytest.mark.parametrize("kind", door.KINDS, ids=lambda kind: kind.type)
def test_a_kind_is_one_that_torch_knows(kind):
    device = torch.device(f"{kind.type}:0")
    assert door.device_kind(device) is kind
    # Kinds from outside of PyTorch bring their module along.
    if door.is_accelerator(device) and hasattr(torch, kind.type):
        assert door.num_devices(device) >= 0


def test_a_kind_from_outside_of_torch_has_what_the_accelerator_api_asks_of_any():
    assert door.can("privateuseone:0", "streams")
    assert not door.can("privateuseone", "triton")


def test_float64_is_asked_of_the_kind_then_of_the_device(monkeypatch):
    has_float64 = {"xpu:0": True, "xpu:1": False}  # a B580 beside an A770
    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(has_fp64=has_float64[device])
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert (door.computes_float64("xpu:0"), door.computes_float64("xpu:1")) == (True, False)
    assert not door.computes_float64("mps")


def test_backends_of_collectives_are_those_of_torch():
    assert door.collective_backends("cuda") == "cpu:gloo,cuda:nccl"
    assert door.collective_backends("xpu") == "cpu:gloo,xpu:xccl"
    with pytest.raises(UserError, match="no backend"):
        door.collective_backends("privateuseone")


def test_a_kind_without_functions_of_its_own_is_served_by_the_accelerator_api(monkeypatch):
    answers = {
        "device_count": lambda: 2,
        "current_device_index": lambda: 1,
        "memory_stats": lambda device: {"allocated_bytes.all.current": 7, "of": device},
        "get_memory_info": lambda device: (3, 4),
        "synchronize": lambda device: None,
    }
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, answer, raising=False)
    assert (door.num_devices("sim"), door.current_index("sim")) == (2, 1)
    assert door.memory_stats("sim:1") == {"allocated_bytes.all.current": 7, "of": "sim:1"}
    assert door.free_and_total_bytes("sim") == (3, 4)
    assert door.properties_of("sim").name == "sim"
    assert not door.multiplies_bfloat16("sim")
    assert door.memory_blocks("sim") is None
    door.synchronize("sim")
    door.cap_memory("sim", 1)
    door.record_memory_history("sim", is_on=False)
