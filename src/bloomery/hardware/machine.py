"""What was found on a machine, as values that go to JSON and back."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from bloomery.errors import UserError


class Frozen(BaseModel, frozen=True, extra="ignore"):
    """Recorded machines of newer versions still load."""


class Accelerator(Frozen):
    """One device as the operating system exposes it (a GCD of an MI250X is one)."""

    index: int
    vendor: Literal["amd", "nvidia"]
    name: str
    arch: str  # gfx90a, sm_90
    memory_bytes: int
    memory_used_bytes: int = 0
    integrated: bool = False
    node: str = ""  # /dev/dri/renderD128


class Host(Frozen):
    system: str  # Linux
    cpu_name: str
    cpu_cores: int  # that this process may use: affinity and cgroup
    cpu_flags: tuple[str, ...] = ()  # those that matter: avx2, avx512f, avx512_bf16, amx_bf16
    memory_bytes: int  # the cgroup's limit where there is one
    memory_free_bytes: int
    disk_free_bytes: int
    compiler: str | None = None  # a C++ compiler that torch.compile can use


class Software(Frozen):
    python: str
    torch: str | None = None  # the installed version, read without importing it
    build: Literal["cpu", "cuda", "rocm"] | None = None
    triton: str | None = None
    environment: dict[str, str] = {}  # the variables that matter, such as HSA_OVERRIDE_GFX_VERSION


class Machine(Frozen):
    accelerators: tuple[Accelerator, ...]
    host: Host
    software: Software


def read_machine(path: Path) -> Machine:
    """A recorded machine. Raises UserError when the file is damaged."""
    try:
        return Machine.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        remedy = "delete it: resuming then plans again for the machine at hand"
        raise UserError("the record of the run's machine cannot be read", where=str(path), remedy=remedy) from error
