"""Shared by the native optimizers: chunks of bounded size, stochastic rounding, a gate for non-finite gradients."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from bloomery.model.acting import kind_of
from bloomery.model.io.parameters import first_row
from bloomery.model.limits import CPU_PIECE, GPU_PIECE
from bloomery.parallel.mesh import SINGLE_RANK, Mesh

_HALF = 1 << 15


def key_of(*parts: int | str) -> int:
    """A 63-bit seed from words and numbers."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def random_bits(count: int, *, key: int, device: torch.device) -> Tensor:
    """Uniform int16 [count] from a generator seeded with `key`, so that there is no RNG state to save."""
    generator = torch.Generator(device).manual_seed(key)
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    return words.random_(-(2**63), None, generator=generator).view(torch.int16)[:count]


def rounded(exact: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding to bfloat16, unbiased: a neighbor of each float32 number, the nearer one more likely.

    Adds a random lower half to the float32 bits and truncates to the upper half. bfloat16 values stay unchanged. NaN
    becomes infinity: its bits could overflow to zero. Overwrites `exact` and returns a view of its upper halves, to be
    copied; little-endian only.
    """
    infinity = float("inf")
    numbers = torch.nan_to_num_(exact, nan=infinity, posinf=infinity, neginf=-infinity)
    if bits.device.type == "cpu":
        bits = bits.to(torch.int32)  # as the addition would
    # bits: -2^15 to 2^15 - 1
    words = numbers.view(torch.int32).add_(bits.view(exact.shape)).add_(_HALF)
    return words.view(torch.int16)[..., 1::2].view(torch.bfloat16)


State = dict[str, Tensor]


def piece_size(device: torch.device) -> int:
    """Numbers per chunk, whose float32 intermediates exist at once."""
    return CPU_PIECE if kind_of(device) == "cpu" else GPU_PIECE


@final
@dataclass(frozen=True)
class Gate:
    """A factor for gradients on the device, without host synchronization. A closed gate leaves every bit unchanged.

    It zeroes the gradient, even NaN, and every rate, so that weights and moments keep their values. `open` (1.0 or 0.0)
    and `factor` are scalars.
    """

    open: Tensor
    factor: Tensor

    def through(self, gradient: Tensor) -> Tensor:
        zero = torch.zeros((), device=gradient.device)
        passed = torch.where(self.open > 0, gradient, zero.to(gradient.dtype))
        return passed.mul_(
            torch.where(self.open > 0, self.factor, zero)
        )  # a non-finite gradient has a non-finite factor


def exact_gradient(gradient: Tensor, gate: Gate | None) -> Tensor:
    """float32, through the gate; the gradient itself if float32 without a gate."""
    exact = gradient.to(torch.float32)
    return exact if gate is None else gate.through(exact)


def times(rate: float, gate: Gate | None) -> Any:
    """`rate`, zero behind a closed gate."""
    return rate if gate is None else gate.open * rate


@final
@dataclass(frozen=True)
class Shards:
    """The whole parameters of which optimizers update this rank's rows; others are whole on every rank."""

    whole: Mapping[nn.Parameter, nn.Parameter]
    mesh: Mesh = SINGLE_RANK

    def across(self, part: nn.Parameter) -> Mesh:
        """The ranks that hold its rows: this one alone for a parameter that every rank has whole."""
        return self.mesh if part in self.whole else SINGLE_RANK

    def shape(self, part: nn.Parameter) -> torch.Size:
        """Of the whole parameter."""
        return self.whole.get(part, part).shape

    def numel(self, part: nn.Parameter) -> int:
        return self.shape(part).numel()

    def rows(self, part: nn.Parameter) -> list[int]:
        """The rows of each rank, as `torch.chunk` divides them."""
        rows = self.shape(part)[0]
        most = -(-rows // self.mesh.shard)
        return [min(most, max(0, rows - most * rank)) for rank in range(self.mesh.shard)]

    def start(self, part: nn.Parameter) -> int:
        """The place of this rank's first number among those of the whole, flat."""
        whole = self.whole.get(part)
        return 0 if whole is None else first_row(whole) * math.prod(whole.shape[1:])


@final
@dataclass(frozen=True)
class Rounding:
    """How bfloat16 numbers are written: to nearest, or stochastically, keyed by seed, parameter, step and offset.

    The random bits of a number do not depend on how many ranks share its parameter out.
    """

    names: Mapping[nn.Parameter, str]
    seed: int
    stochastic: bool
    shards: Shards = Shards({})

    def to_bfloat16(
        self, exact: Tensor, parameter: nn.Parameter, step: int, start: int, *slot: str
    ) -> Tensor:
        """Stochastic rounding, whatever the setting, from the flat `start`. Overwrites `exact`."""
        if parameter not in self.shards.whole:
            key = key_of(self.seed, self.names[parameter], step, start, *slot)
            return rounded(exact, random_bits(exact.numel(), key=key, device=exact.device))
        length = piece_size(exact.device)
        numel = self.shards.numel(parameter)
        begin = self.shards.start(parameter) + start
        end = begin + exact.numel()
        bits = [torch.empty(0, dtype=torch.int16, device=exact.device)]
        # the pieces that one device would draw
        for first in range(begin // length * length, end, length):
            key = key_of(self.seed, self.names[parameter], step, first, *slot)
            drawn = random_bits(min(length, numel - first), key=key, device=exact.device)
            bits.append(drawn[max(0, begin - first) : end - first])
        return rounded(exact, torch.cat(bits))

    def write(
        self, target: Tensor, exact: Tensor, parameter: nn.Parameter, step: int, start: int
    ) -> None:
        """Write in the target's dtype; may overwrite `exact`. `step` and offset `start`: unique per write."""
        if self.stochastic and target.dtype == torch.bfloat16:
            target.copy_(self.to_bfloat16(exact.contiguous(), parameter, step, start))
        elif not same_place(target, exact):
            target.copy_(exact)


@final
@dataclass(frozen=True)
class Span:
    """The numbers from `start` to `stop` of a flat parameter."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """A view of them in a tensor of the parameter's shape."""
        return tensor.view(-1)[self.start : self.stop]


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same memory; works for fake tensors, which have no address."""
    here = one.untyped_storage()._cdata
    there = other.untyped_storage()._cdata
    return here == there and one.storage_offset() == other.storage_offset()


def alike(
    parameters: Iterable[nn.Parameter],
    key: Callable[[nn.Parameter], object],
    numel: Callable[[nn.Parameter], int],
) -> list[list[nn.Parameter]]:
    """Groups of parameters with equal keys, up to one chunk of `numel` in size, in a fixed order."""
    waiting: dict[object, list[nn.Parameter]] = {}
    runs: list[list[nn.Parameter]] = []
    for parameter in parameters:
        run = waiting.get(key(parameter), [])
        if run and sum(map(numel, run)) + numel(parameter) <= piece_size(parameter.device):
            run.append(parameter)
        else:
            waiting[key(parameter)] = run = [parameter]
            runs.append(run)
    return runs


def gathered(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenated; a single tensor is returned as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stacked; a view of a single tensor."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def with_states(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    fresh: Callable[[nn.Parameter], State],
) -> list[nn.Parameter]:
    """The parameters of a group with a gradient, their state initialized by `fresh` where missing."""
    ready = [parameter for parameter in group["params"] if parameter.grad is not None]
    for parameter in ready:
        if not optimizer.state[parameter]:
            optimizer.state[parameter].update(fresh(parameter))
    return ready


def counted(state: State) -> float:
    """Increment the step count, which is on the host, as in torch."""
    state["step"] += 1
    return float(state["step"])


def no_steps() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def row_slices(rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices of rows of about one chunk."""
    step = max(1, piece_size(device) // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def exact_norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm in float32; in chunks, as a CPU converts other dtypes by a copy."""
    pieces = tensor.reshape(-1).split_with_sizes(
        _sizes(tensor.numel(), piece_size(tensor.device)) or [0]
    )
    norms: list[Tensor] = [torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    return whole


def root_mean_square(tensors: Sequence[Tensor], mesh: Mesh, numel: int) -> Tensor:
    """Float32 [N], of tensors of one size: `numel` numbers, whose rows the ranks of `mesh` hold."""
    if tensors[0].numel() <= piece_size(tensors[0].device):
        norms = list(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))
    else:
        norms = [exact_norm(tensor) for tensor in tensors]
    return mesh.norm_over_shards(torch.stack(norms)) / math.sqrt(numel)


def _sizes(size: int, piece: int) -> list[int]:
    return [min(piece, size - start) for start in range(0, size, piece)]
