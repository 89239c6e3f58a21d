"""Shared by the native optimizers: pieces of bounded size, stochastic rounding, a gate for non-finite gradients."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bloomery.facts.counting import is_decayed
from bloomery.facts.limits import CPU_PIECE, GPU_PIECE
from bloomery.model.io.parameters import first_row
from bloomery.model.native import Uncompiled
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.train.optim import compiled_adamw

State = dict[str, Tensor]
HALF_OF_LOWER_BITS = 1 << 15
SEED_BYTES = 8
ROOTS_AT_ONCE = 2**13  # values of a CPU, as float64 between


def seed_from(*parts: int | str) -> int:
    """A 63-bit seed from strings and integers."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=SEED_BYTES).digest(), "little") >> 1


def random_bits(count: int, *, seed: int, device: torch.device) -> Tensor:
    """Uniform int16 [count] from a generator of its own, so that no RNG state has to be saved."""
    generator = torch.Generator(device).manual_seed(seed)
    int64s = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    return int64s.random_(-(2**63), None, generator=generator).view(torch.int16)[:count]


def round_stochastically(exact: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding to bfloat16, unbiased: a neighbor of each float32 value, the nearer one more likely.

    Adds a random lower half to the float32 bits and truncates to the upper half. bfloat16 values stay unchanged. NaN
    becomes infinity: its bits could overflow to zero. Overwrites `exact` and returns a view of its upper halves, to be
    copied; little-endian only.
    """
    infinity = float("inf")
    values = torch.nan_to_num_(exact, nan=infinity, posinf=infinity, neginf=-infinity)
    if bits.device.type == "cpu":
        bits = bits.to(torch.int32)  # as the addition would
    # The bits range from -2^15 to 2^15 - 1; half of the lower bits makes the sum unbiased.
    sums = values.view(torch.int32).add_(bits.view(exact.shape)).add_(HALF_OF_LOWER_BITS)
    return sums.view(torch.int16)[..., 1::2].view(torch.bfloat16)


@functools.cache
def compiled_rounding_agrees() -> bool:
    """Whether compiled code rounds at random to the bits that PyTorch gives."""
    exact = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    exact[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    try:
        rounded = compiled_adamw.rounded_at_random(exact, seed=1)
    except Uncompiled:
        return False
    return torch.equal(
        rounded, round_stochastically(exact, random_bits(5000, seed=1, device=exact.device))
    )


def square_root_(x: Tensor) -> Tensor:
    """In place of contiguous float32, rounded to the nearest: PyTorch's on a CPU may be Intel's MKL, off by a bit."""
    if x.device.type != "cpu":
        return x.sqrt_()
    for part in x.view(-1).split(ROOTS_AT_ONCE):
        part.copy_(part.to(torch.float64).sqrt_())
    return x


def piece_size(device_type: str) -> int:
    """Values per piece, whose float32 intermediates exist at once."""
    return CPU_PIECE if device_type == "cpu" else GPU_PIECE


@final
@dataclass(frozen=True)
class Gate:
    """A factor for gradients on the device, without host synchronization. A closed gate leaves every bit unchanged.

    It zeroes the gradient, even NaN, and every rate, so that weights and moments keep their values. `open` (1.0 or 0.0)
    and `factor` are scalars.
    """

    open: Tensor
    factor: Tensor

    def scaled(self, gradient: Tensor) -> Tensor:
        """The gradient times the factor, zero behind a closed gate."""
        zero = torch.zeros((), device=gradient.device)
        passed = torch.where(self.open > 0, gradient, zero.to(gradient.dtype))
        # The factor is selected too: that of a non-finite gradient is non-finite.
        return passed.mul_(torch.where(self.open > 0, self.factor, zero))


def float32_gradient(gradient: Tensor, gate: Gate | None) -> Tensor:
    """float32, scaled by the gate; the gradient itself if float32 without a gate."""
    exact = gradient.to(torch.float32)
    return exact if gate is None else gate.scaled(exact)


def scale_gradients(gradients: list[Tensor], factor: float) -> None:
    """In place; a factor of 1 skips the pass over memory."""
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def factor_in(dtype: torch.dtype, factor: float) -> float:
    """The factor of `scale_gradients` on a CPU, where PyTorch rounds it to the dtype of the gradients."""
    return float(torch.tensor(factor, dtype=dtype))


def gated(rate: float, gate: Gate | None) -> Any:
    """`rate`, zero behind a closed gate."""
    return rate if gate is None else gate.open * rate


@final
@dataclass(frozen=True)
class Shards:
    """The full parameter of each parameter that holds only this rank's rows; all others are whole on every rank."""

    full_parameters: Mapping[nn.Parameter, nn.Parameter]
    mesh: Mesh = SINGLE_RANK

    def mesh_of(self, parameter: nn.Parameter) -> Mesh:
        """The ranks that hold its rows: this one alone for a parameter that every rank has whole."""
        return self.mesh if parameter in self.full_parameters else SINGLE_RANK

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        return self.full_parameters.get(parameter, parameter).shape

    def full_numel(self, parameter: nn.Parameter) -> int:
        return self.full_shape(parameter).numel()

    def rows_by_rank(self, parameter: nn.Parameter) -> list[int]:
        """The number of rows of each rank, as `torch.chunk` divides them."""
        rows = self.full_shape(parameter)[0]
        most = -(-rows // self.mesh.holders)
        return [min(most, max(0, rows - most * rank)) for rank in range(self.mesh.holders)]

    def first_value(self, parameter: nn.Parameter) -> int:
        """The index of this rank's first value in the flat full parameter."""
        full = self.full_parameters.get(parameter)
        return 0 if full is None else first_row(full) * math.prod(full.shape[1:])


@final
@dataclass(frozen=True)
class Rounding:
    """How bfloat16 values are written: to nearest, or stochastically, keyed by seed, parameter, step and offset.

    The random bits of a value do not depend on how many ranks share its parameter.
    """

    names: Mapping[nn.Parameter, str]
    seed: int
    stochastic: bool
    shards: Shards = Shards({})
    # the type of device whose pieces are taken; None: that of the parameters
    device_type: str | None = None

    def piece_size(self, device: torch.device) -> int:
        """Values per piece of a parameter on that device."""
        return piece_size(self.device_type or device.type)

    def seed_of(self, parameter: nn.Parameter, step: int, start: int, *slot: str) -> int:
        """Of the random bits of a piece of a parameter that begins at `start`; `slot`: of one of its states."""
        return seed_from(self.seed, self.names[parameter], step, start, *slot)

    def seeds_of_pieces(
        self, parameter: nn.Parameter, step: int, starts: Iterable[int], *slot: str
    ) -> list[int]:
        """`seed_of` each piece, in half the time: what they share is hashed once."""
        shared = "\0".join(map(str, (self.seed, self.names[parameter], step, ""))).encode()
        end = "\0".join(("", *slot)).encode()
        hash_of_shared = hashlib.blake2b(shared, digest_size=SEED_BYTES)
        seeds = []
        for start in starts:
            of_piece = hash_of_shared.copy()
            of_piece.update(b"%d%b" % (start, end))
            seeds.append(int.from_bytes(of_piece.digest(), "little") >> 1)
        return seeds

    def to_bfloat16(
        self, exact: Tensor, parameter: nn.Parameter, step: int, start: int, *slot: str
    ) -> Tensor:
        """Stochastic rounding, whatever the setting, of values from the flat index `start`. Overwrites `exact`."""
        if parameter not in self.shards.full_parameters:
            seed = self.seed_of(parameter, step, start, *slot)
            if exact.device.type == "cpu" and compiled_rounding_agrees():
                if type(exact) is Tensor:
                    return compiled_adamw.rounded_at_random(exact, seed)
                # A fake tensor has no memory that compiled code could read. That code allocates its result alone.
                if isinstance(exact, FakeTensor):
                    return torch.empty_like(exact, dtype=torch.bfloat16)
            return round_stochastically(
                exact, random_bits(exact.numel(), seed=seed, device=exact.device)
            )
        # A shard takes its part of the bits that a single device would use for each piece of the full parameter.
        length = self.piece_size(exact.device)
        numel = self.shards.full_numel(parameter)
        begin = self.shards.first_value(parameter) + start
        end = begin + exact.numel()
        bits = [torch.empty(0, dtype=torch.int16, device=exact.device)]
        for piece_start in range(begin // length * length, end, length):
            seed = self.seed_of(parameter, step, piece_start, *slot)
            piece_bits = random_bits(
                min(length, numel - piece_start), seed=seed, device=exact.device
            )
            bits.append(piece_bits[max(0, begin - piece_start) : end - piece_start])
        return round_stochastically(exact, torch.cat(bits))

    def write(
        self, target: Tensor, exact: Tensor, parameter: nn.Parameter, step: int, start: int
    ) -> None:
        """Write in the target's dtype; may overwrite `exact`. `step` and offset `start`: unique per write."""
        if self.stochastic and target.dtype == torch.bfloat16:
            target.copy_(self.to_bfloat16(exact.contiguous(), parameter, step, start))
        elif not same_memory(target, exact):
            target.copy_(exact)


@final
@dataclass(frozen=True)
class Span:
    """The values from `start` to `stop` of a flat parameter."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def view_of(self, tensor: Tensor) -> Tensor:
        """The span's values in a tensor of the parameter's shape."""
        return tensor.view(-1)[self.start : self.stop]


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same memory; works for fake tensors, which have no address."""
    one_storage = one.untyped_storage()._cdata
    other_storage = other.untyped_storage()._cdata
    return one_storage == other_storage and one.storage_offset() == other.storage_offset()


def batches_of(
    parameters: Iterable[nn.Parameter],
    key: Callable[[nn.Parameter], object],
    numel: Callable[[nn.Parameter], int],
    rounding: Rounding,
) -> list[list[nn.Parameter]]:
    """Batches of parameters with equal keys, up to one piece in size, in a fixed order."""
    open_batches: dict[object, list[nn.Parameter]] = {}
    batches: list[list[nn.Parameter]] = []
    for parameter in parameters:
        batch = open_batches.get(key(parameter), [])
        most = rounding.piece_size(parameter.device)
        if batch and sum(map(numel, batch)) + numel(parameter) <= most:
            batch.append(parameter)
        else:
            open_batches[key(parameter)] = batch = [parameter]
            batches.append(batch)
    return batches


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """A single tensor is returned as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """A single tensor is returned as a view."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def parameters_with_state(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    initial_state: Callable[[nn.Parameter], State],
) -> list[nn.Parameter]:
    """The parameters of a group that have a gradient; their state is initialized where it is missing."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter].update(initial_state(parameter))
    return parameters


def increment_step(state: State) -> float:
    """The new step count, which is on the host, as in torch."""
    state["step"] += 1
    return float(state["step"])


def zero_step() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def row_slices(rows: int, width: int, piece: int) -> list[slice]:
    """Slices of rows, each of about `piece` values."""
    step = max(1, piece // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def float32_norm(tensor: Tensor, piece: int) -> Tensor:
    """The Euclidean norm in float32; in pieces, because a CPU converts other dtypes by a copy."""
    numel = tensor.numel()
    sizes = [min(piece, numel - start) for start in range(0, numel, piece)]
    pieces = tensor.reshape(-1).split_with_sizes(sizes or [0])
    norms: list[Tensor] = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in pieces]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    return norm


def root_mean_square(tensors: Sequence[Tensor], mesh: Mesh, numel: int, piece: int) -> Tensor:
    """Float32 [N], of tensors of one size: `numel` values, whose rows the ranks of `mesh` hold."""
    if tensors[0].numel() <= piece:
        norms = list(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))
    else:
        norms = [float32_norm(tensor, piece) for tensor in tensors]
    return mesh.norm_over_shards(torch.stack(norms)) / math.sqrt(numel)


def decay_groups(named: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices and embeddings, not for norms and biases, as in nanoGPT's `configure_optimizers`."""
    decayed = [p for name, p in named.items() if is_decayed(name, p.shape)]
    others = [p for name, p in named.items() if not is_decayed(name, p.shape)]
    groups: list[dict[str, object]] = []
    if decayed:
        groups.append({"params": decayed, "weight_decay": weight_decay})
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return groups
