"""Each rank of a machine with GPUs of two sizes is capped by the memory of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simulated
import torch  # noqa: F401 (with it comes the simulated device, which the fixture of every test asks)

GIB = 2**30
CAPPED = """
import json, torch
from plan_help import loaded, planned
from bloomery.core.device import select_device
from bloomery.hardware.detect import detect
from bloomery.train.process import set_up_process

recipe = loaded(parallel={"pipeline": 2}, train={"micro_batch_size": 1, "tokens_per_step": 1024})
machine = detect().model_copy(update={"together": True})
plan = planned(recipe, machine, gpus=2)
told = []
for rank in range(2):
    select_device("cuda", rank)
    limit = plan.memory_limit_of(rank)
    set_up_process(plan.train, memory_limit=limit)
    torch.empty(int(0.95 * limit), dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    try:
        torch.empty(int(1.05 * limit), dtype=torch.uint8, device="cuda")
        refused = ""
    except torch.OutOfMemoryError as error:
        refused = str(error)
    told.append([limit, refused])
print(json.dumps(told))
"""


@pytest.mark.soak
def test_each_rank_has_the_cap_of_its_own_device() -> None:
    """The smaller is the second: a share of the first would let it take twice as much as there is."""
    plan_tests = Path(__file__).parents[1] / "plan"
    environment = os.environ | simulated.environment("amd,1+0.5")
    environment["PYTHONPATH"] += os.pathsep + str(plan_tests)
    child = subprocess.run(
        [sys.executable, "-c", CAPPED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    (first_limit, first_refused), (second_limit, second_refused) = json.loads(child.stdout)
    assert first_limit == pytest.approx(2 * second_limit)
    assert second_limit < 0.5 * GIB
    # The limit and not the memory itself refuses.
    for refused in (first_refused, second_refused):
        assert "allowed" in refused
