"""Clusters with Slurm, SkyPilot and Kubernetes as data: sites.toml, or a file of yours. Does not import torch."""

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean, expanded
from bloomery.core.units import counted
from bloomery.hardware.wheels import detect_site, wheel_table

Kind = Literal["slurm", "skypilot", "kubernetes"]
SITE_VARIABLE = "BLOOMERY_SITE"  # a job script names its site to the ranks: a name, or a TOML file
CPU = "cpu"  # as the `gpu` of a site whose nodes are like the login node, without GPUs


# Texts that a job script has in one line, where a newline would begin a command of its own.
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f\x85\u2028\u2029]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

# Keys of a site that only one kind of job reads.
FOR_SLURM = (
    "cpus_per_gpu",
    "needs_account",
    "task_options",
    "step_options",
    "directives",
    "queues",
)
FOR_MACHINES = ("image", "volume")


class SiteEntry(BaseModel, frozen=True, extra="forbid"):
    """A table of a site file; unknown keys are errors."""


class QueueLimit(SiteEntry):
    """The longest job of at most so many nodes."""

    nodes: int = Field(ge=1)
    hours: float = Field(gt=0)


class Queue(SiteEntry):
    """A partition or quality of service. `limits`: by size, the smallest first; empty: unknown.

    `requeue`: whether a job may return to it, which some forbid in queues for debugging.
    """

    name: Line
    option: Literal["partition", "qos"] = "partition"
    requeue: bool = True
    limits: tuple[QueueLimit, ...] = ()

    def hours(self, nodes: int) -> float | None:
        """The time limit of a job of so many nodes; None where no limit is known. Raises UserError for too many."""
        if not self.limits:
            return None
        fitting = [limit.hours for limit in self.limits if nodes <= limit.nodes]
        if not fitting:
            most = self.limits[-1].nodes
            raise UserError(
                f"the queue {self.name} takes jobs of at most {most:,} nodes",
                where=f"--nodes {nodes}",
                fix=f"pass --nodes {most} or fewer, or another --queue",
                code=2,
            )
        return fitting[0]


class GpuCpus(SiteEntry):
    """The CPUs next to a GPU: `bus` is the middle part of its PCI address, d1 of 0000:d1:00.0; `cpus` "0-7,64-71"."""

    bus: str = Field(pattern=r"^[0-9a-f]{2}$")
    cpus: str = Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")


class Site(SiteEntry):
    """What a job script needs to know about a cluster, or about rented machines (`kind`).

    `gpu`: its name in gpus.toml, as one rank sees it (a die of an MI250X), or "cpu"; empty: not said. `cpus_per_gpu`:
    cores of a rank; 0: Slurm's default. `task_options`: of the job, how GPUs are given to ranks. `step_options`: of
    `srun` alone. `directives`: more options of the job. `setup`: shell lines such as modules. `local_disk`: a folder on
    each node's own disk, for caches and the copy of the Python environment; empty: none. `queues`: the default one
    first. `binding`: the CPUs next to each GPU, where they are fewer than those of its NUMA node; ranks compare theirs
    with it. `image`, `volume`: of SkyPilot and Kubernetes, the container image with Bloomery and the volume that all
    machines write to.
    """

    kind: Kind = "slurm"
    title: str = "a cluster with Slurm"
    gpu: str = ""
    gpus_per_node: int = Field(1, ge=1, le=64)
    cpus_per_gpu: int = Field(0, ge=0)
    needs_account: bool = False
    task_options: tuple[Line, ...] = ()
    step_options: tuple[Line, ...] = ()
    directives: tuple[Line, ...] = ()
    setup: tuple[str, ...] = ()
    local_disk: Line = ""
    environment: dict[Variable, str] = {}
    queues: tuple[Queue, ...] = ()
    binding: tuple[GpuCpus, ...] = ()
    image: str = ""
    volume: str = ""
    _scoring: int = PrivateAttr(0)  # GPUs of each node that score: of a recipe, not of a site

    def with_scoring(self, devices: int) -> "Site":
        """The site for a recipe that has so many GPUs of each node score and not train.

        Raises UserError (code 2) where none is left to train.
        """
        if devices == 0 or self.gpu == CPU:
            return self
        if devices >= self.gpus_per_node:
            raise UserError(
                f"{self.title} has {counted(self.gpus_per_node, 'GPUs')} per node: none is left to train",
                where=f"parallel.scoring_devices={devices}",
                fix="set fewer, or name nodes with more GPUs",
                code=2,
            )
        site = self.model_copy()
        site._scoring = devices
        return site

    @property
    def ranks_per_node(self) -> int:
        """Processes, one for each GPU that trains; of nodes without GPUs as many as `gpus_per_node` says."""
        return self.gpus_per_node - self._scoring

    @property
    def rank_options(self) -> tuple[str, ...]:
        """`task_options`, by which each rank sees all GPUs of its node where some of them score."""
        if self._scoring == 0:
            return self.task_options
        of_all = f"--gpus-per-node={self.gpus_per_node}"
        others = [
            option
            for option in self.task_options
            if not option.startswith(("--gpus-per-task", "--gpus-per-node", "--gpu-bind"))
        ]
        return of_all, *others

    def queue(self, name: str | None) -> Queue | None:
        """The queue of that name, or the default one; None for a site that lists none.

        Raises UserError for a name that the site does not list.
        """
        if not self.queues:
            return None if name is None else Queue(name=name)
        if name is None:
            return self.queues[0]
        by_name = {queue.name: queue for queue in self.queues}
        if name not in by_name:
            choices = f"there are {', '.join(by_name)}"
            fix = did_you_mean(name, by_name, choices)
            raise UserError(f"{self.title} has no queue {name}", where="--queue", fix=fix, code=2)
        return by_name[name]


def find_site(name: str) -> Site:
    """The site of that name, or of that TOML file. Raises UserError (code 2)."""
    path = expanded(name)
    if path.suffix == ".toml" or path.is_file():
        return _read(path)
    if name not in site_names():
        choices = f"there are {', '.join(site_names())}; or pass a TOML file of yours"
        fix = did_you_mean(name, site_names(), choices)
        raise UserError(f"unknown site {name!r}", where="--site", fix=fix, code=2)
    # The modules of a site are those of its PyTorch build, which the doctor prints, too.
    modules = wheel_table().sites.get(name, {}).get("before", [])
    return Site.model_validate({"setup": modules} | _packaged()[name])


def local_site() -> Site | None:
    """The site on which this process runs: that of its job script, or the one that its host is known for."""
    name = os.environ.get(SITE_VARIABLE) or detect_site()
    try:
        return find_site(name) if name else None
    except UserError:  # a file that was deleted, or a cluster whose jobs we do not write
        return None


def site_names() -> tuple[str, ...]:
    return tuple(_packaged())


@cache
def _packaged() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _read(path: Path) -> Site:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot read the site file: {error.strerror}"
        raise UserError(problem, where=str(path), fix="pass an existing file", code=2) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        fix = "correct the line; src/bloomery/hardware/sites.toml has examples"
        raise UserError(f"no TOML: {error}", where=str(path), fix=fix, code=2) from error
    try:
        site = Site.model_validate(table)
        # A key that another kind of job reads would have no effect.
        for key in table:
            if key in (FOR_MACHINES if site.kind == "slurm" else FOR_SLURM):
                raise UserError(
                    f"{key} does not apply to kind = {site.kind!r}",
                    where=f"{path}: {key}",
                    fix="delete the line, or correct `kind`",
                    code=2,
                )
        return site
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        where = f"{path}: {key}"
        if detail["type"] == "extra_forbidden":
            last_key = str(detail["loc"][-1])
            keys = ", ".join(Site.model_fields)
            fix = did_you_mean(last_key, Site.model_fields, f"a site has {keys}")
            raise UserError("unknown key", where=where, fix=fix, code=2) from error
        raise UserError(
            f"not a valid value: {detail['msg']}", where=where, fix="correct it", code=2
        ) from error
