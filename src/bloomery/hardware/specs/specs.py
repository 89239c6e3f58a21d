"""The table of accelerators and processors. Whoever is not in it stays unknown: no default, no neighbour's number."""

import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import resources
from typing import Literal

from pydantic import BaseModel

from bloomery.core.errors import UserError
from bloomery.core.text import closest
from bloomery.core.units import GIB, MIB
from bloomery.hardware.machine import Accelerator, Host
from bloomery.hardware.specs.wheels import series

# Of a machine's memory, what Linux lends to processor graphics unless amdgpu.gttsize or ttm.pages_limit say more.
LENT_SHARE = 0.5


class Spec(BaseModel, frozen=True, extra="forbid"):
    """A row of gpus.toml: an unknown key is a typing error."""


class ArchSpec(Spec):
    """What every device of an instruction set shares.

    `efficiency`: the low, typical and high share of the peak that the matrix products of a training step reach.
    """

    names: tuple[str, ...]
    vendor: Literal["amd", "nvidia"]
    family: str
    wave_size: int
    lds_kib: int
    bf16: Literal["full", "half", "none"]
    fp8: Literal["fnuz", "ocp", "none"] = "none"
    matrix_units: str  # empty: none
    fused_attention: Literal["yes", "experimental", "none"]
    fused_attention_from: str = "2.9"
    fused_attention_stable_from: str = "2.9"
    fused_attention_wrong_in: tuple[str, ...] = ()
    hipblaslt: Literal["default", "supported", "none", "unknown"] = "none"
    float16_rate: str = ""  # of float32's, where it is so slow that nobody trains in it
    cautious: bool = False  # nobody publishes training on it: float32, nothing pinned, until probes say more
    compile: bool
    compile_reason: str
    efficiency: tuple[float, float, float] | None = None
    efficiency_source: str = "nobody published a figure"
    context_mib: int

    @property
    def bf16_matmul(self) -> bool:
        return self.bf16 != "none"

    def attention_in(self, torch: str | None) -> Literal["yes", "experimental", "none", "wrong"]:
        """What the fused kernels of a release of PyTorch ("2.13.0+rocm7.2"; None: the newest) are on this arch."""
        here = None if torch is None else series(torch)
        if here is None or self.fused_attention == "none":
            return self.fused_attention
        if here in map(series, self.fused_attention_wrong_in):
            return "wrong"
        if here < series(self.fused_attention_from):
            return "none"
        return "experimental" if here < series(self.fused_attention_stable_from) else self.fused_attention

    @property
    def context_name(self) -> str:
        return "HIP context" if self.vendor == "amd" else "CUDA context"


class GpuSpec(Spec):
    """One product. `visible_mib` is what the driver shows of the nominal memory, where that is known."""

    name: str
    aliases: tuple[str, ...] = ()
    arch: str
    memory_gib: tuple[int, ...]  # its variants; empty: shared with the processor
    visible_mib: int | None = None
    bandwidth_gbs: float
    peak_tflops: dict[str, float]
    peaks_estimated: bool  # units x clock x rate per clock; else what the vendor publishes
    achievable_tflops: dict[str, float] = {}
    board_watts: float | None = None
    dies_per_card: int = 1  # the operating system exposes each die as a device
    link: str
    sources: dict[str, str]  # figure -> keys of the table's sources

    @property
    def short_name(self) -> str:
        """Without its maker and line, as a column has room for it; `find_gpu` understands it."""
        text = re.sub(r"^(?:GeForce|Radeon(?= RX| PRO| Pro| AI)|Instinct|Tesla) ", "", self.name)
        text = re.sub(r" \(Ryzen [^)]*\)", "", text)
        return text.replace("with Max-Q Design", "Max-Q").replace("Laptop GPU", "laptop").replace(" Generation", "")

    def memory_bytes(self) -> int:
        """Of the smallest variant, as the driver shows it. 0 where it is shared with the processor."""
        return (self.visible_mib or 0) * MIB or (self.memory_gib[0] * GIB if self.memory_gib else 0)

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s in `dtype` (float32, float16, bfloat16, float8); None where the hardware has no such rate."""
        tera = self.peak_tflops.get(dtype)
        return None if tera is None else tera * 1e12

    def achievable_flops(self, dtype: str) -> float | None:
        """The best matrix product that anybody published for this device, in FLOP/s; None where nobody has."""
        tera = self.achievable_tflops.get(dtype)
        return None if tera is None else tera * 1e12

    def source(self, figure: str) -> str:
        """Where one of memory, bandwidth, peaks, achievable, link or power comes from; empty where nobody says."""
        return "; ".join(table().sources[key] for key in self.sources.get(figure, "").split())


class Card(Spec):
    """A row of a line's cards, under the short names of gpus.toml."""

    name: str
    aliases: tuple[str, ...] = ()
    gib: tuple[int, ...]
    gbs: float
    units: int | None = None
    mhz: float | None = None
    watts: float | None = None
    visible_mib: int | None = None
    peak_tflops: dict[str, float] = {}
    achievable_tflops: dict[str, float] = {}
    dies_per_card: int = 1
    link: str = ""
    sources: dict[str, str] = {}


class Line(Spec):
    """Products of one architecture: what they share, and what each of them is."""

    arch: str
    flops_per_clock: dict[str, float] = {}  # of a compute unit or multiprocessor
    link: str
    sources: dict[str, str]
    cards: tuple[Card, ...]

    def specs(self) -> Iterator[GpuSpec]:
        for card in self.cards:
            sources = self.sources | card.sources
            shared = dict.fromkeys(("memory", "bandwidth", "power"), sources.pop("cards", ""))
            if not card.achievable_tflops:
                sources.pop("achievable", None)
            rated = {
                name: flops * (card.units or 0) * (card.mhz or 0) / 1e6 for name, flops in self.flops_per_clock.items()
            }
            yield GpuSpec(
                name=card.name,
                aliases=card.aliases,
                arch=self.arch,
                memory_gib=card.gib,
                visible_mib=card.visible_mib,
                bandwidth_gbs=card.gbs,
                peak_tflops=card.peak_tflops
                or {name: round(rate, 1 if rate > 100 else 2) for name, rate in rated.items()},
                peaks_estimated=not card.peak_tflops,
                achievable_tflops=card.achievable_tflops,
                board_watts=card.watts,
                dies_per_card=card.dies_per_card,
                link=card.link or self.link,
                sources=shared | sources,
            )


class CpuSpec(Spec):
    """Matrix products per core that PyTorch reaches with an instruction set, in GFLOP/s by precision."""

    flag: str
    name: str
    bf16: bool
    gflops: dict[str, float]
    source: str


class CpuEfficiency(Spec):
    """Share of the products' rate that a training step reaches, for models up to a width."""

    up_to_width: int
    bfloat16: tuple[float, float, float]
    float32: tuple[float, float, float]


class Table(Spec):
    sources: dict[str, str]
    arch: tuple[ArchSpec, ...]
    cpu: tuple[CpuSpec, ...]
    cpu_efficiency: tuple[CpuEfficiency, ...]
    line: tuple[Line, ...]

    @cached_property
    def gpu(self) -> tuple[GpuSpec, ...]:
        return tuple(spec for line in self.line for spec in line.specs())


@cache
def table() -> Table:
    """gpus.toml, checked."""
    text = (resources.files("bloomery.hardware.specs") / "gpus.toml").read_text(encoding="utf-8")
    return Table.model_validate(tomllib.loads(text))


def arch_spec(arch: str) -> ArchSpec | None:
    """Facts of an instruction set such as gfx90a or sm_90; None when it is not in the table."""
    return next((spec for spec in table().arch if arch in spec.names), None)


def cpu_spec(host: Host) -> CpuSpec | None:
    """The strongest instruction set of the table that this processor has."""
    return next((spec for spec in table().cpu if spec.flag in host.cpu_flags), None)


def cpu_efficiency(width: int, dtype: str) -> tuple[float, float, float]:
    """(low, typical, high) for a model of that hidden size; `dtype` is float32 or bfloat16."""
    row = next(row for row in table().cpu_efficiency if width <= row.up_to_width)
    return row.bfloat16 if dtype == "bfloat16" else row.float32


def gpu_spec(device: Accelerator) -> GpuSpec | None:
    """The product that a detected device is, by arch, name and, where need be, memory; None when in doubt."""
    named = [spec for spec in table().gpu if spec.arch == device.arch and _names(spec, device.name)]
    if len(named) > 1:
        size = round(device.memory_bytes / GIB)
        named = [spec for spec in named if size in spec.memory_gib]
    return named[0] if len(named) == 1 else None


def find_gpu(text: str) -> Accelerator:
    """The device that a person means by "RX 6700 XT", "4090", "gtx1080ti" or "MI50 32GB", as if it were installed here.

    Raises UserError for a name that the table does not hold or that stands for several devices.
    """
    _refuse_other_makers(text)
    wanted, size = _split_memory(text)
    found = _meant(text)  # a memory size can be part of a product's name, A100 80GB
    if found and size not in found[0].memory_gib:
        size = None
    found = found or _meant(wanted) or _by_arch(wanted)
    if not found:
        raise UserError(f"{text!r} is not in the table of GPUs", where="--gpu", fix=_nearest(text), code=2)
    if len(found) > 1:
        names = ", ".join(spec.name for spec in found)
        raise UserError(f"{text!r} can be {names}", where="--gpu", fix=f'name one: --gpu "{found[0].name}"', code=2)
    return _installed(found[0], size, text)


def _refuse_other_makers(text: str) -> None:
    """Raises UserError for what is no GPU of AMD or NVIDIA."""
    name = text.strip().lower()
    apple = re.fullmatch(
        r"(?:apple\s*)?m[1-9](?:\s*(?:pro|max|ultra))?(?:\s+\d+\s*gb)?|.*\b(?:apple|macbook|mps)\b.*", name
    )
    intel = re.fullmatch(r"(?:intel\s+)?(?:arc\b.*|iris\b.*|data cent.*max.*)|.*\bintel\b.*", name)
    maker = "Apple" if apple else "Intel" if intel else ""
    if maker:
        fix = "name a GPU of AMD or NVIDIA, or leave out --gpu: Bloomery trains on the CPU there"
        raise UserError(f"GPUs of {maker} are not supported: {text!r}", where="--gpu", fix=fix, code=2)


def _meant(text: str) -> list[GpuSpec]:
    """The cards whose name is `text`; else those whose name ends in it behind RTX, RX or the like; else those with it
    somewhere inside."""
    wanted = _words(text)
    if not wanted:
        return []
    names = [(spec, _words(name)) for spec in table().gpu for name in (spec.name, *spec.aliases)]
    ends = len(wanted)
    ways: tuple[Callable[[list[str]], bool], ...] = (
        lambda words: words == wanted,
        lambda words: words[-ends:] == wanted and set(words[:-ends]) <= _LINES,
        lambda words: any(words[at : at + ends] == wanted for at in range(len(words) - ends + 1)),
    )
    for fits in ways:
        found = list({spec.name: spec for spec, words in names if fits(words)}.values())
        if found:
            return found
    return []


_LINES = {"rtx", "gtx", "rx", "pro"}
_MAKERS = re.compile(
    r"\((?:tm|r)\)|\b(?:amd|nvidia|radeon|instinct|geforce|tesla|graphics|gpu|generation|design|with)\b"
)
_SUPER = re.compile(r"\b((?:rtx\s*)?[24]0[678]0\s*(?:ti)?)\s*s\b")


def _words(name: str) -> list[str]:
    """A name as runs of letters and of digits: "GTX1080Ti" and "gtx 1080 ti" are [gtx, 1080, ti]."""
    text = re.sub(r"\b(?:mobile|notebook)\b", "laptop", _MAKERS.sub(" ", name.lower()))
    return re.findall(r"[a-z]+|\d+", _SUPER.sub(r"\1 super", text))


def _installed(spec: GpuSpec, size: int | None, text: str) -> Accelerator:
    sizes, facts = spec.memory_gib, arch_spec(spec.arch)
    assert facts is not None, f"gpus.toml has no [[arch]] for {spec.arch}"
    if not sizes:
        if size is None:
            problem = f"{spec.name} shares the machine's memory, whose size is open"
            raise UserError(problem, where="--gpu", fix=f'write it: --gpu "{text} 32GB"', code=2)
        lent = int(size * GIB * LENT_SHARE)
        return Accelerator(
            index=0, vendor=facts.vendor, name=spec.name, arch=spec.arch, memory_bytes=0, integrated=True,
            gtt_bytes=lent,
        )  # fmt: skip
    if size not in sizes and (size is not None or len(sizes) > 1):
        fix = "write " + " or ".join(f"{spec.name} {gib}GB" for gib in sizes)
        raise UserError(f"{text!r} leaves open how much memory it has", where="--gpu", fix=fix, code=2)
    memory = size * GIB if size is not None and len(sizes) > 1 else spec.memory_bytes()
    return Accelerator(index=0, vendor=facts.vendor, name=spec.name, arch=spec.arch, memory_bytes=memory)


def _split_memory(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"\s*(.*?)[\s,]+(\d+)\s*(?:gib|gb|g)\s*", text, re.IGNORECASE)
    return (match[1], int(match[2])) if match else (text, None)


@cache
def _key(name: str) -> str:
    """A product's name without its maker, its line and punctuation: "AMD Radeon RX 6700 XT" -> rx6700xt."""
    words = re.sub(r"\((?:tm|r)\)|\b(?:amd|nvidia|radeon|instinct|geforce|tesla|graphics)\b", " ", name.lower())
    return re.sub("[^a-z0-9]", "", words)


def _names(spec: GpuSpec, name: str) -> bool:
    """Whether a driver's name, which may list several products ("MI60 / MI50"), names this one."""
    keys = {_key(each) for each in (spec.name, *spec.aliases)}
    return any(_key(part) in keys for part in (name, *name.split("/")) if _key(part))


def _by_arch(text: str) -> list[GpuSpec]:
    return [spec for spec in table().gpu if spec.arch == text.strip().lower()]


def _nearest(text: str) -> str:
    keys = {_key(spec.name): spec.name for spec in table().gpu}
    near = closest(_key(text), keys, count=3, cutoff=0.5)
    every = "`bloomery plan RECIPE --gpu all` shows every name; a GPU can be added to gpus.toml"
    return "did you mean " + " or ".join(keys[key] for key in near) + "?" if near else every
