"""The table of GPUs and CPUs, gpus.toml. A GPU that is not listed is unknown: its figures are never guessed."""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, Field

from bloomery.core.errors import UserError
from bloomery.core.text import closest
from bloomery.core.units import GIB, MIB
from bloomery.hardware.machine import Accelerator, Host
from bloomery.hardware.vendors import VENDORS, Vendor
from bloomery.hardware.wheels import series, torch_with_triton

LARGEST_NODE = 1024  # GPUs
PRODUCT_LINES = (
    "(NVIDIA|AMD|Intel|Apple|GeForce|Instinct|Tesla|Radeon)"  # that names of GPUs begin with
)


class TableEntry(BaseModel, frozen=True, extra="forbid"):
    """An entry of gpus.toml; unknown keys are errors."""


class ArchSpec(TableEntry):
    """Properties of all devices of an instruction set.

    `efficiency`: low, typical and high share of the peak that the matmuls of a training step reach.
    """

    names: tuple[str, ...]
    vendor: Vendor
    family: str
    wave_size: int
    lds_kib: int
    bf16: Literal["full", "half", "none"]
    float64: bool = True  # whether it computes in it at all
    fp8: Literal["fnuz", "ocp", "none"] = "none"
    matrix_units: str  # empty: none
    fused_attention: Literal["yes", "experimental", "none"]
    fused_attention_from: str = "2.9"
    fused_attention_stable_from: str = "2.9"
    fused_attention_wrong_in: tuple[str, ...] = ()
    varlen_attention: bool = True
    hipblaslt: Literal["default", "supported", "none", "unknown"] = "none"
    float16_rate: str = ""  # relative to float32, if float16 is too slow for training
    cautious: bool = False  # no published training: float32 and no pinned memory until probes pass
    compile: bool
    compile_reason: str
    # Of the vector units: FLOPs that the float32 peak counts for a lane and clock (4: of matrix units, or of two
    # instructions at once), and registers of a lane, which all waves share (LLVM's AMDGPU usage, CUDA's limits).
    lane_flops: int = 2
    lane_registers: int = 512
    triton_from: str = "3.5"
    triton_before: str = ""  # empty: every newer one compiles for it
    efficiency: tuple[float, float, float] | None = None
    efficiency_source: str = "no published figure"
    context_mib: int

    def attention_in(self, torch: str | None) -> Literal["yes", "experimental", "none", "wrong"]:
        """The support of fused attention in a PyTorch release ("2.13.0+rocm7.2"; None: the newest)."""
        release = None if torch is None else series(torch)
        if release is None or self.fused_attention == "none":
            return self.fused_attention
        if release in map(series, self.fused_attention_wrong_in):
            return "wrong"
        if release < series(self.fused_attention_from):
            return "none"
        return (
            "experimental"
            if release < series(self.fused_attention_stable_from)
            else self.fused_attention
        )

    def absent_attention(self) -> dict[str, str]:
        """Backends of `train.attention` from PyTorch that have no kernel for this GPU, with the reason."""
        absent = {}
        if not self.varlen_attention:
            absent["varlen"] = f"varlen_attn has no kernel for {self.names[0]}"
        if not self.compile:
            absent["flex"] = f"FlexAttention needs Triton: {self.compile_reason}"
        return absent

    def triton_refusal(self, triton: str) -> str:
        """Why this version of Triton cannot compile for the GPU, and which can; empty where it can."""
        if self.triton_from == "never":
            return self.compile_reason
        is_older = series(triton) < series(self.triton_from)
        is_newer = bool(self.triton_before) and series(triton) >= series(self.triton_before)
        if not is_older and not is_newer:
            return ""
        torch = torch_with_triton(since=self.triton_from, before=self.triton_before)
        others = f"{self.triton_from} can" if is_older else f"those before {self.triton_before} can"
        return f"Triton {triton} cannot compile for {self.names[0]}, {others} (torch {torch})"


class GpuSpec(TableEntry):
    """A product. `visible_mib`: the part of the nominal memory that the driver shows, if known."""

    name: str
    aliases: tuple[str, ...] = ()
    arch: str
    memory_gib: tuple[int, ...] = Field(alias="gib")  # its variants; empty: shared with the CPU
    visible_mib: int | None = None
    bandwidth_gbs: float = Field(alias="gbs")
    peak_tflops: dict[str, float]
    peaks_estimated: bool  # units x clock x rate per clock; otherwise published by the vendor
    achievable_tflops: dict[str, float] = {}
    board_watts: float | None = Field(None, alias="watts")
    dies_per_board: int = 1  # the operating system exposes each die as a device
    # Device IDs of the PCI bus, where the driver does not name the product.
    pci_ids: tuple[int, ...] = Field((), alias="pci")
    link: str
    # GB/s of copies between it and pinned memory of the host, where published: to_device, from_device, both (together,
    # while both directions copy), pageable (from memory that is not pinned).
    host_gbs: dict[str, float] = {}
    sources: dict[str, str]  # figure -> keys of the table's sources

    @property
    def short_name(self) -> str:
        """The name without vendor and family; `find_gpu` accepts it."""
        text = re.sub(
            r"^(?:GeForce|Radeon(?= RX| PRO| Pro| AI)|Instinct|Tesla|Data Center GPU) ",
            "",
            self.name,
        )
        text = re.sub(r" \(Ryzen [^)]*\)", "", text)
        return (
            text.replace("with Max-Q Design", "Max-Q")
            .replace("Laptop GPU", "laptop")
            .replace(" Generation", "")
        )

    def memory_bytes(self) -> int:
        """Memory of the smallest variant, as the driver shows it; 0 if it is shared with the CPU."""
        return (self.visible_mib or 0) * MIB or (self.memory_gib[0] * GIB if self.memory_gib else 0)

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s in `dtype` (float32, float16, bfloat16, float8); None if not supported."""
        tera = self.peak_tflops.get(dtype)
        return None if tera is None else tera * 1e12

    def achievable_flops(self, dtype: str) -> float | None:
        """The best published matmul rate of this device in FLOP/s; None without one."""
        tera = self.achievable_tflops.get(dtype)
        return None if tera is None else tera * 1e12

    def source(self, figure: str) -> str:
        """The source of memory, bandwidth, peaks, achievable, link or power; empty without one."""
        return "; ".join(gpu_table().sources[key] for key in self.sources.get(figure, "").split())


class Line(TableEntry):
    """Products of one architecture: their common figures, and each of them with the short keys of gpus.toml."""

    arch: str
    flops_per_clock: dict[str, float] = {}  # of a compute unit or multiprocessor
    link: str
    sources: dict[str, str]
    gpus: tuple[dict[str, Any], ...]

    def specs(self) -> Iterator[GpuSpec]:
        for gpu in self.gpus:
            facts = {
                "arch": self.arch,
                "link": self.link,
                **gpu,
                "peaks_estimated": "peak_tflops" not in gpu,
            }
            rate = facts.pop("units", 0) * facts.pop("mhz", 0) / 1e6
            peaks = {name: flops * rate for name, flops in self.flops_per_clock.items()}
            facts.setdefault(
                "peak_tflops",
                {name: round(tera, 1 if tera > 100 else 2) for name, tera in peaks.items()},
            )
            sources = self.sources | gpu.get("sources", {})
            shared = dict.fromkeys(("memory", "bandwidth", "power"), sources.pop("gpus", ""))
            if "achievable_tflops" not in gpu:
                sources.pop("achievable", None)
            yield GpuSpec.model_validate(facts | {"sources": shared | sources})


class CpuSpec(TableEntry):
    """Matmul rates per core that PyTorch reaches with an instruction set, in GFLOP/s by precision."""

    flag: str
    name: str
    bf16: bool
    gflops: dict[str, float]
    source: str


class CpuEfficiency(TableEntry):
    """The share of the matmul rate that a training step reaches, for models up to a hidden size."""

    up_to_width: int
    bfloat16: tuple[float, float, float]
    float32: tuple[float, float, float]


class GpuTable(TableEntry):
    sources: dict[str, str]
    arch: tuple[ArchSpec, ...]
    cpu: tuple[CpuSpec, ...]
    cpu_efficiency: tuple[CpuEfficiency, ...]
    line: tuple[Line, ...]

    @cached_property
    def gpu(self) -> tuple[GpuSpec, ...]:
        return tuple(spec for line in self.line for spec in line.specs())


@cache
def gpu_table() -> GpuTable:
    """The validated gpus.toml."""
    text = (resources.files("bloomery.hardware") / "gpus.toml").read_text(encoding="utf-8")
    return GpuTable.model_validate(tomllib.loads(text))


def arch_spec(arch: str) -> ArchSpec | None:
    """An instruction set such as gfx90a or sm_90; None if it is not listed."""
    return next((spec for spec in gpu_table().arch if arch in spec.names), None)


def cpu_spec(host: Host) -> CpuSpec | None:
    """The fastest listed instruction set of this CPU."""
    return next((spec for spec in gpu_table().cpu if spec.flag in host.cpu_flags), None)


def cpu_efficiency(width: int, dtype: str) -> tuple[float, float, float]:
    """(low, typical, high) for a model of that hidden size; `dtype` is float32 or bfloat16."""
    row = next(row for row in gpu_table().cpu_efficiency if width <= row.up_to_width)
    return row.bfloat16 if dtype == "bfloat16" else row.float32


def gpu_spec(device: Accelerator) -> GpuSpec | None:
    """The product of a detected device, by arch, name and, if needed, memory; None if it is not unique."""
    candidates = [
        spec for spec in gpu_table().gpu if spec.arch == device.arch and _names(spec, device.name)
    ]
    if len(candidates) > 1:
        size = round(device.memory_bytes / GIB)
        candidates = [spec for spec in candidates if size in spec.memory_gib]
    return candidates[0] if len(candidates) == 1 else None


def is_integrated(arch: str) -> bool:
    """Whether every listed product of an instruction set is in one package with a CPU and shares its memory."""
    products = [spec for spec in gpu_table().gpu if spec.arch == arch]
    return bool(products) and all(spec.link == "APU" for spec in products)


def find_gpu(text: str) -> Accelerator:
    """The device of a name such as "RX 6700 XT", "4090", "gtx1080ti" or "MI50 32GB", as if it were installed.

    Raises UserError for a name that is not listed or that matches several devices.
    """
    match = re.fullmatch(r"\s*(.*?)[\s,_-]+(\d+)\s*(?:gib|gb|g)\s*", text, re.IGNORECASE)
    product, size = (match[1], int(match[2])) if match else (text, None)
    specs = _matching(text)  # a memory size can be part of a product's name, A100 80GB
    if specs and size not in specs[0].memory_gib:
        size = None
    specs = (
        specs
        or _matching(product)
        or [row for row in gpu_table().gpu if row.arch == product.strip().lower()]
    )
    if not specs:
        keys = {_key(spec.name): spec.name for spec in gpu_table().gpu}
        near = closest(_key(text), keys, count=3, cutoff=0.5)
        fix = "`bloomery plan RECIPE --gpu all` lists every name; you can add a GPU to gpus.toml"
        fix = "did you mean " + " or ".join(keys[key] for key in near) + "?" if near else fix
        raise UserError(f"unknown GPU: {text!r}", where="--gpu", fix=fix, code=2)
    if len(specs) > 1:
        names = ", ".join(spec.name for spec in specs)
        fix = f'pass one of them: --gpu "{specs[0].name}"'
        raise UserError(f"{text!r} matches several GPUs: {names}", where="--gpu", fix=fix, code=2)
    return _installed(specs[0], size, text)


def find_gpus(text: str) -> tuple[Accelerator, ...]:
    """The GPUs of "RTX 3090 + 2 x RTX 3060 12GB", in order. Raises UserError as `find_gpu`, also for two vendors."""
    devices: list[Accelerator] = []
    for part in text.split(TOGETHER):
        name, count = counted_gpu(part.strip())
        devices += [find_gpu(name)] * (count or 1)
    if len({device.vendor for device in devices}) > 1:
        raise two_vendors(text, where="--gpu")
    return tuple(device.model_copy(update={"index": index}) for index, device in enumerate(devices))


def two_vendors(names: str, *, where: str) -> UserError:
    return UserError(
        f"GPUs of two vendors do not train together: {names}",
        where=where,
        fix="name GPUs of one vendor: PyTorch is built for one",
        code=2,
    )


def named_gpus(texts: Sequence[str], gpus: int | None) -> tuple[tuple[str, ...], int]:
    """The names in texts such as 8xMI300X, and the number of GPUs per node that they and `gpus` (--gpus) give.

    A text with TOGETHER stays as it is: `find_gpus` reads it.

    Raises UserError (code 2) where two of them differ.
    """
    parsed = [
        (text, text, len(find_gpus(text))) if TOGETHER in text else (text, *counted_gpu(text))
        for text in texts
    ]
    names = tuple(name for _, name, _ in parsed)
    counts = {f"--gpu {shlex.quote(text)}": count for text, _, count in parsed if count is not None}
    if gpus is not None:
        counts[f"--gpus {gpus}"] = gpus
    if len(set(counts.values())) > 1:
        fix = f'give the number once: --gpu "{names[0]}" --gpus {next(iter(counts.values()))}'
        raise UserError(
            "different numbers of GPUs per node", where=" and ".join(counts), fix=fix, code=2
        )
    return names, next(iter(counts.values()), 1)


TOGETHER = "+"  # between the names of unequal GPUs that train together
_BEFORE = re.compile(r"\s*(\d+)\s*[x×*]\s*(\S.*)", re.IGNORECASE)  # 8xMI300X
_BEHIND = re.compile(r"\s*(\S.*\S)\s*[x×*]\s*(\d+)\s*", re.IGNORECASE)  # MI300X x 8
_SIZE = re.compile(r"[\s,]+\d+\s*(?:gib|gb|g)\s*", re.IGNORECASE)


def counted_gpu(text: str) -> tuple[str, int | None]:
    """A GPU's name and the number in front of it or behind it: "8xMI300X", "MI300X x 8", "2 x RTX 3090".

    None where no number is written. Raises UserError for a number that is 0 or above 1,024; `find_gpu` judges the name.
    """
    count_first = _BEFORE.fullmatch(text)
    count_last = _BEHIND.fullmatch(text)
    # A name of the table may end like a number of GPUs: RX 6700 is no product R, 6,700 times.
    if _matching(text):
        return text, None
    if count_last is not None and _matching(_SIZE.sub("", count_last[1])):
        name = count_last[1].strip()
        count = int(count_last[2])
    elif count_first is not None:
        name = count_first[2].strip()
        count = int(count_first[1])
    else:
        return text, None
    if not 1 <= count <= LARGEST_NODE:
        fix = f"give a number from 1 to {LARGEST_NODE:,}: --gpu {shlex.quote(f'8x{name}')}"
        raise UserError(
            f"not a number of GPUs per node: {count:,}", where=f"--gpu {text!r}", fix=fix, code=2
        )
    return name, count


def _matching(text: str) -> list[GpuSpec]:
    """The GPUs whose name is `text`; otherwise whose name ends with it after RTX, RX or similar; otherwise whose name
    contains it.
    """
    query = _words(text)
    if not query:
        return []
    names = [
        (spec, _words(name)) for spec in gpu_table().gpu for name in (spec.name, *spec.aliases)
    ]
    num_words = len(query)
    tests: tuple[Callable[[list[str]], bool], ...] = (
        lambda words: words == query,
        lambda words: words[-num_words:] == query and set(words[:-num_words]) <= _LINES,
        lambda words: any(
            words[at : at + num_words] == query for at in range(len(words) - num_words + 1)
        ),
    )
    for is_match in tests:
        if specs := list({spec.name: spec for spec, words in names if is_match(words)}.values()):
            return specs
    return []


_LINES = {"rtx", "gtx", "rx", "pro", "arc"}
_VENDORS = re.compile(
    r"\((?:tm|r)\)|\b(?:amd|nvidia|intel|apple|radeon|instinct|geforce|tesla|graphics|gpu|generation|design|with)\b"
)
_SUPER = re.compile(r"\b((?:rtx\s*)?[24]0[678]0\s*(?:ti)?)\s*s\b")


def _words(name: str) -> list[str]:
    """A name as runs of letters and of digits: "GTX1080Ti" and "gtx 1080 ti" are [gtx, 1080, ti]."""
    text = re.sub(r"\b(?:mobile|notebook)\b", "laptop", _VENDORS.sub(" ", name.lower()))
    return re.findall(r"[a-z]+|\d+", _SUPER.sub(r"\1 super", text))


def _installed(spec: GpuSpec, size: int | None, text: str) -> Accelerator:
    sizes = spec.memory_gib
    facts = arch_spec(spec.arch)
    assert facts is not None, f"gpus.toml has no [[arch]] for {spec.arch}"
    if not sizes:
        if size is None:
            problem = f"{spec.name} shares system memory: its size is required"
            raise UserError(problem, where="--gpu", fix=f'--gpu "{text} 32GB"', code=2)
        shared = int(size * GIB * VENDORS[facts.vendor].shared_part)
        return Accelerator(
            index=0,
            vendor=facts.vendor,
            name=spec.name,
            arch=spec.arch,
            memory_bytes=0,
            integrated=True,
            gtt_bytes=shared,
        )
    if size not in sizes and (size is not None or len(sizes) > 1):
        fix = " or ".join(f'--gpu "{spec.name} {gib}GB"' for gib in sizes)
        raise UserError(
            f"{text!r} exists with several memory sizes", where="--gpu", fix=fix, code=2
        )
    memory = size * GIB if size is not None and len(sizes) > 1 else spec.memory_bytes()
    return Accelerator(
        index=0, vendor=facts.vendor, name=spec.name, arch=spec.arch, memory_bytes=memory
    )


@cache
def _key(name: str) -> str:
    """A product's name without vendor, family and punctuation: "AMD Radeon RX 6700 XT" -> rx6700xt."""
    text = re.sub(
        r"\((?:tm|r)\)|\b(?:amd|nvidia|intel|apple|radeon|instinct|geforce|tesla|graphics)\b",
        " ",
        name.lower(),
    )
    return re.sub("[^a-z0-9]", "", text)


def _names(spec: GpuSpec, name: str) -> bool:
    """Whether a driver's name, which can list several products ("MI60 / MI50"), includes this one."""
    keys = {_key(listed_name) for listed_name in (spec.name, *spec.aliases)}
    return any(_key(part) in keys for part in (name, *name.split("/")) if _key(part))
