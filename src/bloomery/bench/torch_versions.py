"""One recipe with several versions of PyTorch: `bloomery bench RECIPE --torch 2.9.1,2.13.0`. Does not import torch.

The versions are measured in turns, so that a machine that gets warm or busy slows all of them. The ratio of two is that
of the pairs of a round.
"""

import itertools
import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from bloomery.bench.environments import (
    Download,
    Installer,
    cache_variables,
    disk_needed,
    make_environment,
    refuse_full_disk,
    share_packages,
    torch_of,
)
from bloomery.bench.measuring import Bench, BenchResult, OnPhase, wrapped
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.hardware.machine import Accelerator, Machine
from bloomery.hardware.probes import with_cached_probes
from bloomery.hardware.profile import choose_device, fitting_builds
from bloomery.hardware.wheels import OLDEST_TORCH, index_answers, series
from bloomery.plan.types import RunPlan

ROUNDS = 4
MOST_VERSIONS = 6
# Two-sided 95% of Student's t, by degrees of freedom: the rounds less one.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
# Relative difference of the first losses; the same weights and tokens, in bfloat16 by another kernel, differ by less.
SAME_LOSS = 0.02
WHERE = "--torch"


@dataclass(frozen=True, kw_only=True)
class Release:
    """A version to measure. `arguments`: of `pip install`, empty: the PyTorch of this environment is it.

    `variables`: those that the build requires; `note`: what is special about the build.
    """

    version: str  # as the user wrote it
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    note: str = ""

    @property
    def is_installed(self) -> bool:
        return not self.arguments


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast one version is as another, with the 95% interval of its rounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRelease:
    """A version with its results, one per round. `version`: the full one, 2.13.0+rocm7.2."""

    release: Release
    version: str
    results: tuple[BenchResult, ...]

    @property
    def problem(self) -> str:
        """Why this version cannot win; empty where it can."""
        failed = next((result for result in self.results if result.outcome != "ok"), None)
        return "" if failed is None else failed.message or failed.outcome

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round; empty after a failure, also of a single round."""
        if self.problem:
            return []
        return [rate for result in self.results if (rate := result.tokens_per_second) is not None]

    @property
    def tokens_per_second(self) -> float | None:
        return statistics.median(self.rates) if self.rates else None

    @property
    def peak_gib(self) -> float | None:
        return max((result.peak_gib for result in self.results if result.peak_gib), default=None)


def releases_to_compare(text: str, machine: Machine) -> list[Release]:
    """The versions of `--torch 2.9.1,2.13.0`, with the build of each that fits this machine. Raises UserError.

    A single version is compared with the PyTorch of this environment, which comes first.
    """
    if machine.host.system != "Linux":
        fix = "measure each version by itself: bloomery bench RECIPE in its environment"
        raise UserError(
            "versions of PyTorch are compared on Linux only", where=WHERE, fix=fix, code=2
        )
    versions = [word.strip() for word in text.split(",") if word.strip()]
    installed = (machine.software.torch or "").partition("+")[0]
    if len(versions) == 1 and re.fullmatch(r"\d+\.\d+\.\d+", installed):
        if _release(versions[0]) == installed:
            raise UserError(
                f"PyTorch {installed} is installed here: it would be compared with itself",
                where=WHERE,
                fix=f"name another version: --torch 2.12.1,{installed}",
                code=2,
            )
        versions.insert(0, installed)
    if not 2 <= len(versions) <= MOST_VERSIONS:
        problem = f"2 to {MOST_VERSIONS} versions can be compared, not {len(versions)}: {text!r}"
        raise UserError(problem, where=WHERE, fix="write --torch 2.12.1,2.13.0", code=2)

    releases = [_release(version) for version in versions]
    if twice := next((release for release in releases if releases.count(release) > 1), None):
        fix = "name each version once"
        raise UserError(f"PyTorch {twice} is named twice", where=WHERE, fix=fix, code=2)

    # The device is that of a PyTorch which fits the machine, also where the installed one does not.
    software = machine.software.model_copy(update={"build": None})
    device, _ = choose_device(machine.model_copy(update={"software": software}))
    return [_build_for(release, machine, device) for release in releases]


def _release(version: str) -> str:
    """2.13 is 2.13.0. Raises UserError for text that is no release, and for those that are too old."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise UserError(
            f"not a release of PyTorch: {version!r}",
            where=WHERE,
            fix="write --torch 2.12.1,2.13.0: the build for this machine is chosen",
            code=2,
        )
    if series(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        problem = f"PyTorch {version} is too old: Bloomery needs {oldest} or newer"
        raise UserError(problem, where=WHERE, fix=f"use {oldest}.0 or newer", code=2)
    return version if version.count(".") == 2 else f"{version}.0"


def _build_for(release: str, machine: Machine, device: Accelerator | None) -> Release:
    software = machine.software
    build_name = {"amd": "rocm", "nvidia": "cuda"}.get(device.vendor) if device else software.build
    if (software.torch or "").partition("+")[0] == release and software.build == build_name:
        return Release(version=release, arguments=())
    build = fitting_builds(machine, device, torch=release)[0]
    if build.cpu and device is not None:
        fix = "choose another version: `bloomery doctor` names the one for this GPU"
        problem = f"PyTorch {release} has no wheel for this GPU: {build.reason}"
        raise UserError(problem, where=WHERE, fix=fix, code=2)
    if build.cpu and build.index and not index_answers(build.index):
        note = "PyTorch's CPU index does not answer; your own may bring CUDA's libraries"
        return Release(version=release, arguments=(build.requirement,), note=note)
    return Release(
        version=release,
        arguments=tuple(build.arguments),
        variables=build.environment,
        note="" if device is None else build.reason,
    )


@dataclass(frozen=True, kw_only=True)
class PreparedRelease:
    """A version whose environment exists; `downloads` are what its installation fetches. `python`: its interpreter."""

    release: Release
    python: str
    downloads: tuple[Download, ...]
    caches: Path


@final
class Comparison:
    """The versions of one recipe, from their environments to their measurements. All raise UserError."""

    def __init__(
        self, bench: Bench, releases: Sequence[Release], folder: Path, installer: Installer
    ) -> None:
        """`folder` is removed by the caller."""
        self._bench = bench
        self._releases = releases
        self._folder = folder
        self._installer = installer
        self.left_out: list[str] = []  # packages that were compiled with the PyTorch of here

    def prepare(self, on_phase: OnPhase) -> list[PreparedRelease]:
        """Empty environments, and what each will download: nothing is downloaded yet but the index's answers."""
        packages = self._folder / "packages"
        self.left_out = share_packages(packages)
        prepared = []
        for release in self._releases:
            python = self._bench.python
            downloads = list[Download]()
            if not release.is_installed:
                on_phase(f"asking the package index for torch {release.version}")
                environment_python = make_environment(self._folder / release.version, packages)
                downloads = self._installer.downloads(environment_python, release.arguments)
                python = str(environment_python)
            prepared.append(
                PreparedRelease(
                    release=release,
                    python=python,
                    downloads=tuple(downloads),
                    caches=self._folder / "caches" / release.version,
                )
            )
        downloads = [download for version in prepared for download in version.downloads]
        if downloads:
            refuse_full_disk(self._folder, disk_needed(downloads))
        return prepared

    def install(self, prepared: PreparedRelease, on_phase: OnPhase) -> Bench:
        """The recipe with this version, whose packages are installed now: the same work as with the others."""
        release = prepared.release
        if not release.is_installed:
            name = f"installing torch {release.version}"
            on_phase(name)
            self._installer.install(
                Path(prepared.python),
                release.arguments,
                lambda line: on_phase(f"{name}: {line[:80]}"),
            )
        facts = torch_of(prepared.python)
        if facts.version.partition("+")[0] != release.version:
            raise UserError(
                f"torch {release.version} is installed, but {facts.version} is imported",
                where=facts.file,
                fix="remove that folder from the import path: PYTHONPATH, or a .pth file",
            )
        software = self._bench.machine.software.model_copy(
            update={
                "torch": facts.version,
                "build": "rocm" if facts.hip else "cuda" if facts.cuda else "cpu",
                "hip": facts.hip,
                "cuda": facts.cuda,
                "triton": facts.triton,
                "torch_folder": str(Path(facts.file).parent),
            }
        )
        machine = with_cached_probes(self._bench.machine.model_copy(update={"software": software}))
        return replace(
            self._bench,
            machine=machine,
            python=prepared.python,
            variables=cache_variables(prepared.caches) | dict(release.variables),
        )


def same_work(benches: Sequence[tuple[Release, Bench]]) -> list[tuple[Release, Bench]]:
    """The benches with the micro-batch of the first one's plan: `auto` may choose another for another version."""
    size = benches[0][1].plan().train.micro_batch_size
    override = f"train.micro_batch_size={size}"
    return [
        (release, replace(bench, overrides=(*bench.overrides, override)))
        for release, bench in benches
    ]


def measure(
    benches: Sequence[tuple[Release, Bench]],
    *,
    on_phase: OnPhase,
    on_result: Callable[[int, str, BenchResult], None],
    time_left: Callable[[], bool],
    rounds: int = ROUNDS,
) -> list[MeasuredRelease]:
    """Each version once per round, in turns. One that fails is not measured again; at least one round."""
    results: list[list[BenchResult]] = [[] for _ in benches]
    for number in range(rounds):
        if number and not time_left():
            break
        for (_, bench), own_results in zip(benches, results, strict=True):
            if own_results and own_results[-1].outcome != "ok":
                continue
            version = bench.machine.software.torch or ""
            prefix = f"torch {version}, round {number + 1} of {rounds}"

            def tell(phase: str, prefix: str = prefix) -> None:
                on_phase(f"{prefix}: {phase}")

            result = bench.point(on_phase=tell)
            own_results.append(result)
            on_result(number + 1, version, result)
    return [
        MeasuredRelease(
            release=release,
            version=bench.machine.software.torch or release.version,
            results=tuple(own_results),
        )
        for (release, bench), own_results in zip(benches, results, strict=True)
    ]


def not_installed(release: Release, error: UserError) -> MeasuredRelease:
    """A version that could not be installed or imported: the others are measured all the same."""
    result = BenchResult(overrides=(), plan=None, outcome="failed", message=error.problem)
    return MeasuredRelease(release=release, version=release.version, results=(result,))


def ratio(rates: Sequence[float], base_rates: Sequence[float]) -> Ratio | None:
    """The geometric mean of the rounds' ratios, and its 95% interval by Student's t; None of fewer than two rounds."""
    logs = [math.log(rate / base_rate) for rate, base_rate in zip(rates, base_rates, strict=False)]
    if len(logs) < 2:
        return None
    mean = statistics.fmean(logs)
    half = STUDENT[min(len(logs) - 1, max(STUDENT))] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The version that is faster than all others beyond the noise, and by how much; None: there is none."""

    faster: MeasuredRelease | None
    runner_up: MeasuredRelease | None
    ratio: Ratio | None


def verdict(measurements: Sequence[MeasuredRelease]) -> Verdict:
    """Of the versions without a problem: the fastest, if the interval of its ratio to every other one is above 1."""
    ranked = sorted(
        (measured for measured in measurements if measured.rates),
        key=lambda measured: -(measured.tokens_per_second or 0.0),
    )
    if len(ranked) < 2:
        return Verdict(faster=None, runner_up=None, ratio=None)
    first, runner_up = ranked[:2]
    ratios = [ratio(first.rates, other.rates) for other in ranked[1:]]
    is_faster = all(other is not None and other.low > 1 for other in ratios)
    return Verdict(faster=first if is_faster else None, runner_up=runner_up, ratio=ratios[0])


def loss_spread(measurements: Sequence[MeasuredRelease]) -> float:
    """How far the first losses of the versions are apart, relative to the smallest: they did the same work."""
    losses = [
        result.learning.loss_before
        for measured in measurements
        for result in measured.results
        if result.learning is not None and math.isfinite(result.learning.loss_before)
    ]
    return max(losses) / min(losses) - 1 if losses and min(losses) > 0 else 0.0


# What is printed

VERSION = 19


def opening(
    prepared: Sequence[PreparedRelease], folder: Path, left_out: Sequence[str], rounds: int = ROUNDS
) -> Iterator[str]:
    """What will be done: the environments, their downloads and their disk."""
    versions = f"{len(prepared)} versions in turns, {rounds} rounds"
    yield f"{'torch':<10}{versions}; environments are removed at the end"
    for version in prepared:
        name = f"{'':<10}{version.release.version:<9}"
        if version.release.is_installed:
            yield f"{name}the PyTorch of this environment: no download"
            continue
        yield f"{name}pip install {shlex.join(version.release.arguments)}"
        unknown = sum(download.bytes is None for download in version.downloads)
        size = sum(download.bytes or 0 for download in version.downloads)
        text = f"{len(version.downloads)} packages, {format_bytes(size)} to download"
        text += f", and {unknown} of unknown size" if unknown else ""
        disk = format_bytes(disk_needed(version.downloads))
        yield f"{'':<19}{text}; about {disk} of disk in {folder.parent}"
        if version.release.note:
            yield wrapped(" " * 19, version.release.note)
    if left_out:
        yield wrapped(" " * 10, f"left out, compiled with this PyTorch: {', '.join(left_out)}")


def round_line(number: int, version: str, result: BenchResult) -> str:
    """One measurement, with the loss and the gradient norm of its steps."""
    name = f"{f'round {number}':<10}{version:<{VERSION}}"
    if result.outcome != "ok":
        return wrapped(name, f"{result.outcome}: {result.message}")
    assert result.tokens_per_second is not None
    text = f"{name}{result.tokens_per_second:>9,.0f} tokens/s"
    if result.learning is not None:
        learning = result.learning
        text += f" · loss {learning.loss_before:.4f} -> {learning.loss_after:.4f}"
        text += f" · gradient norm {learning.grad_norm:.3g}"
    return text


def table(measurements: Sequence[MeasuredRelease]) -> Iterator[str]:
    """A row per version; ratios are to the first version that could be measured."""
    base = next((measured for measured in measurements if measured.rates), None)
    against = f"to {base.version}" if base else "ratio"
    yield f"{'torch':<{VERSION}}{'tokens/s':>10}{against:>22}{'peak GiB':>10}  settings"
    for measured in measurements:
        name = f"{measured.version:<{VERSION}}"
        if measured.problem or base is None:
            yield wrapped(name, measured.problem)
            continue
        own_ratio = None if measured is base else ratio(measured.rates, base.rates)
        text = "1" if measured is base else "one round: unknown"
        if own_ratio is not None:
            text = f"{own_ratio.value:.2f} ({own_ratio.low:.2f} to {own_ratio.high:.2f})"
        plan = measured.results[0].plan
        assert plan is not None
        yield (
            f"{name}{measured.tokens_per_second:>10,.0f}{text:>22}{measured.peak_gib or 0.0:>10.2f}"
            f"  {_settings(plan)}"
        )


def _settings(plan: RunPlan) -> str:
    """What may differ between versions of PyTorch, although the recipe is the same."""
    compiled = "compiled" if plan.train.compile else "uncompiled"
    attention = plan.model.attention.replace("_", " ")
    return f"{plan.train.precision}, {compiled}, {attention}"


def verdict_lines(measurements: Sequence[MeasuredRelease], source: str) -> Iterator[str]:
    """The faster version, or why none is named, and the command that installs it."""
    result = verdict(measurements)
    for measured in measurements:
        if measured.problem:
            text = f"torch {measured.version} cannot win: {measured.problem}"
            yield wrapped(f"{'failed':<10}", text)
    if (spread := loss_spread(measurements)) > SAME_LOSS:
        text = f"the first losses differ by {spread:.1%}: a version computes something else"
        yield f"{'warning':<10}{text}"
    if result.runner_up is None:
        yield f"{'faster':<10}unknown: fewer than two versions could be measured"
        return
    if result.ratio is None:
        yield f"{'faster':<10}unknown: one round has no interval; give --limit more time"
        return
    interval = f"{result.ratio.value:.2f} times ({result.ratio.low:.2f} to {result.ratio.high:.2f})"
    if result.faster is None:
        yield f"{'faster':<10}no difference beyond the noise: {interval} between the two fastest"
        return
    yield f"{'faster':<10}torch {result.faster.version}: {interval} as fast as {result.runner_up.version}"
    if result.faster.release.is_installed:
        yield f"{'next':<10}bloomery train {source}"
    else:
        yield f"{'next':<10}pip install {shlex.join(result.faster.release.arguments)}"


def document(measurements: Sequence[MeasuredRelease]) -> dict[str, Any]:
    """The JSON of `bench --torch --json`. `faster` is null where no version is faster beyond the noise."""
    result = verdict(measurements)
    base = next((measured for measured in measurements if measured.rates), None)
    return {
        "versions": [
            {
                "version": measured.version,
                "installed": measured.release.is_installed,
                "pip_arguments": measured.release.arguments,
                "problem": measured.problem,
                "tokens_per_second": measured.tokens_per_second,
                "ratio": ratio(measured.rates, base.rates) if base else None,
                "peak_gib": measured.peak_gib,
                "rounds": [
                    {
                        "outcome": result_of_round.outcome,
                        "message": result_of_round.message,
                        "tokens_per_second": result_of_round.tokens_per_second,
                        "step_seconds": result_of_round.step_seconds,
                        "core_wait": result_of_round.core_wait,
                        "learning": result_of_round.learning,
                    }
                    for result_of_round in measured.results
                ],
            }
            for measured in measurements
        ],
        "faster": result.faster.version if result.faster else None,
        "ratio": result.ratio,
    }


def all_results(measurements: Sequence[MeasuredRelease]) -> list[BenchResult]:
    return list(itertools.chain.from_iterable(measured.results for measured in measurements))
