"""The device on which tests train and compute: the CPU, or the simulated GPU where the process has one.

`python tests/device/run.py tests/train` has it. Tests take DEVICE from here instead of naming one; a test that is about
the CPU names it, or is marked `cpu_only("reason")`.
"""

import os

_vendor = os.environ.get("BLOOMERY_SIMULATED", "").partition(",")[0].partition(":")[0]
SIMULATED = bool(_vendor)
DEVICE = {"": "cpu", "intel": "xpu"}.get(_vendor, "cuda")
# What plans of tests may use of it, in bytes: a part of what the simulated device has; a CPU has no limit of its own.
MEMORY_LIMIT = 3 * 2**30 if SIMULATED else 1


# Of plans of tests with `run.py --stream 2`: weights stream, and so many micro-batches share each load of a layer.
STREAM = {}
if _together := os.environ.get("BLOOMERY_TESTS_STREAM"):
    STREAM = {
        "stream": "layers",
        "stream_micro_batches": int(_together),
        "activation_checkpointing": "full",
    }


def on_device(plan):
    """A plan that was resolved for a CPU, for the device of the tests: without the kernels that only a CPU has."""
    if not SIMULATED:
        return plan
    attention = "blockwise" if plan.model.attention == "compiled" else plan.model.attention
    changes = {
        "model": {"attention": attention, "scores": "torch"},
        "data": {"pin_memory": True},
        "train": {"device": DEVICE, **STREAM},
        "memory": {"limit": MEMORY_LIMIT},
    }
    return plan.model_copy(
        update={
            section: getattr(plan, section).model_copy(update=fields)
            for section, fields in changes.items()
        }
    )
