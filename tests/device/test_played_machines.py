"""Whatever GPU is played, PyTorch and Bloomery's detection say the same of it."""

import json
import os
import subprocess
import sys

import pytest
import simulated

TOLD = """
import json, torch
from bloomery.core.device import properties_of
from bloomery.hardware.detect import detect
devices = [properties_of(f"cuda:{i}") for i in range(torch.cuda.device_count())]
machine = detect()
print(json.dumps({
    "torch": [[device.name, device.arch, device.total_bytes] for device in devices],
    "detected": [[gpu.name, gpu.arch, gpu.memory_bytes] for gpu in machine.accelerators],
    "build": machine.software.build,
    "has_hip": torch.version.hip is not None,
    "capability": torch.cuda.get_device_capability(0),
    "choice": torch._fused_sdp_choice(*torch.ones(3, 1, 2, 8, 16, device="cuda", dtype=torch.float16)),
}))
"""


@pytest.mark.parametrize(
    "description, gpus, capability, is_fused",
    [
        pytest.param(
            "amd:RX 6700 XT,1,12",
            [["Radeon RX 6700 XT", "gfx1031", 12 * 2**30]],
            [10, 3],
            False,
            marks=pytest.mark.soak,
        ),
        (
            "nvidia,24+12",
            [["NVIDIA H100 80GB HBM3", "sm_90", gib * 2**30] for gib in (24, 12)],
            [9, 0],
            True,
        ),
        (
            "mi300x-node",
            [["AMD Instinct MI300X", "gfx942", 206141652992]] * 8,
            [9, 4],
            True,
        ),
    ],
)
def test_torch_and_detection_agree(
    description: str, gpus: list[list[object]], capability: list[int], is_fused: bool
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", TOLD],
        env=os.environ | simulated.environment(description),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = json.loads(child.stdout)
    is_amd = gpus[0][1].startswith("gfx")
    assert told == {
        "torch": gpus,
        "detected": gpus,
        "build": "rocm" if is_amd else "cuda",
        "has_hip": is_amd,
        "capability": capability,
        "choice": int(is_fused),
    }
