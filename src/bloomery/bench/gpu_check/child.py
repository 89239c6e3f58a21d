"""The child of one part of the check: `python -m bloomery.bench.gpu_check.child`. It sends each row when it has it."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from bloomery.bench.gpu_check.parts import PARTS
from bloomery.bench.gpu_check.results import Row
from bloomery.core.child import accept, loading, reply
from bloomery.core.errors import UserError
from bloomery.hardware.probe_worker import error_line, exit_at_once


@final
@dataclass(frozen=True, kw_only=True)
class PartJob:
    """What a part gets. `begin`: tells which case starts, so that one that never ends has a name."""

    tiny: bool
    folder: Path  # empty, and deleted at the end of the part
    device: str
    seconds: float  # the limit of the part
    begin: Callable[[str], None]


def rows_of(job: PartJob, cases: Iterable[tuple[str, Callable[[], Row]]]) -> Iterator[Row]:
    """The row of each case. An error is one, too, and the next case goes on, unless the device is lost with it."""
    import torch

    for name, compute in cases:
        job.begin(name)
        try:
            row = compute()
        except UserError as error:
            where = f" ({error.where})" if error.where else ""
            row = Row(case=name, outcome="failed", message=f"{error.problem}{where}")
        except (
            Exception
        ) as error:  # whatever a driver, a compiler or a library raises is the result
            row = Row(case=name, outcome="failed", message=error_line(error))
            if isinstance(error, torch.AcceleratorError):
                yield row
                return
        yield row


def card() -> dict[str, Any]:
    """The device that PyTorch has here, as fields of `Card`."""
    import torch

    from bloomery.core.device import accelerator_type, properties_of, runtime_version
    from bloomery.core.units import GIB

    device = accelerator_type() or "cpu"
    properties = properties_of(device)
    return {
        "name": properties.name,
        "device": device,
        "arch": properties.arch,
        "memory_gib": round(properties.total_bytes / GIB, 2) if properties.total_bytes else None,
        "torch": torch.__version__,
        "runtime": runtime_version(),
    }


def main() -> int:
    """Raises what the part itself raises: its parent reads the last line of the traceback."""
    job = accept()
    with loading():
        import torch  # noqa: F401  # before the clock of the first case

        from bloomery.core.device import accelerator_type
    if job["part"] == "card":
        reply(job, {"card": card()})
        return 0
    part = next(part for part in PARTS if part.name == job["part"])
    module_name, _, function_name = part.function.partition(":")
    module = importlib.import_module(f"{__package__}.{module_name}")
    part_job = PartJob(
        tiny=job["tiny"],
        folder=Path(job["folder"]),
        device=accelerator_type() or "cpu",
        seconds=job["seconds"],
        begin=lambda case: reply(job, {"begins": case}),
    )
    for row in getattr(module, function_name)(part_job):
        reply(job, {"row": row.model_dump(mode="json")})
    reply(job, {"ended": True})
    return 0


if __name__ == "__main__":
    exit_at_once(main())
