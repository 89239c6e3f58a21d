"""The environment of a process that trains or measures a plan. One function makes it, so that both find the same."""

from collections.abc import Mapping

from bloomery.hardware.private import private_caches
from bloomery.plan.types import Plan

DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "ROCBLAS_DEFAULT_ATOMICS_MODE": "0"}


def wanted(plan: Plan) -> dict[str, str]:
    """What must be set before torch is imported, whatever the user has set."""
    fixed = DETERMINISM if plan.train.deterministic and plan.train.device == "cuda" else {}
    return {**plan.environment, "OMP_NUM_THREADS": str(plan.train.threads), **fixed}


def child_environment(plan: Plan, own: Mapping[str, str]) -> dict[str, str]:
    """`own` with what is wanted, where `own` has nothing."""
    return private_caches(wanted(plan)) | dict(own)
