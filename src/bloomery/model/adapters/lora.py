"""LoRA, rsLoRA, DoRA and PiSSA: low-rank matrices added to a frozen linear layer, as its own parameters.

R rank of the pair, O outputs, I inputs, E experts. LoRA: arXiv:2106.09685, DoRA: arXiv:2402.09353, PiSSA:
arXiv:2404.02948.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.facts.counting import Shape, is_expert_stack
from bloomery.model.adapters.settings import (
    Adaptation,
    Pair,
    adaptation,
    adapter_shapes,
)
from bloomery.model.decoder import VALUE_HEAD, Decoder, trained_parameters
from bloomery.model.experts import ExpertMLPs, Pairs, grouped_linear
from bloomery.model.io.parameters import is_linear_map, local, put, stream
from bloomery.model.io.quantized import QuantizedWeight
from bloomery.model.norms import widened
from bloomery.model.vision import WHOLE, VisionTower, is_of
from bloomery.recipe.schema import Lora

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ADAPTER_NAMES = ("lora_A", "lora_B", "lora_magnitude")
EXACT_SVD = 512  # larger matrices use a randomized SVD: seconds instead of minutes
# of it; PEFT's pissa_niter_16
ITERATIONS = 16
OVERSAMPLED = 16


class LoraLinear(nn.Linear):
    """y = W x + b + scale B A dropout(x); DoRA scales each row of W + scale B A to the norm `lora_magnitude`.

    W and b are those of the linear map that it replaces, and frozen. PiSSA keeps W and subtracts
    the initial LoRA matrices (`first_A`, `first_B`): the same function as PiSSA's residual, but exact in any dtype.
    """

    base_squares: Tensor  # DoRA: of the norms of W's rows, float32
    first_A: Tensor
    first_B: Tensor

    def __init__(self, base: nn.Linear, pair: Pair, settings: Adaptation) -> None:
        nn.Module.__init__(self)
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.weight = base.weight
        self.bias = base.bias
        self.stored: QuantizedWeight | None = None  # W in 4 or 8 bits; then `weight` is None
        self.rank = pair.rank
        self.scale = pair.scale
        self.dropout = settings.dropout
        self.dora = settings.dora
        self.residual = settings.residual
        self.pissa = settings.pissa or bool(settings.residual)
        self.enabled = True
        like = torch.empty(0, dtype=DTYPES[settings.dtype], device=base.weight.device)
        self.lora_A = nn.Parameter(like.new_empty(pair.rank, base.in_features))
        self.lora_B = nn.Parameter(like.new_empty(base.out_features, pair.rank))
        if self.dora:
            self.lora_magnitude = nn.Parameter(like.new_empty(base.out_features))
            squares = like.new_empty(base.out_features, dtype=torch.float32)
            self.register_buffer("base_squares", squares, persistent=False)
        if self.pissa:
            self.register_buffer("first_A", torch.empty_like(self.lora_A), persistent=False)
            self.register_buffer("first_B", torch.empty_like(self.lora_B), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Matmuls use x's dtype or autocast's, whatever the adapter's dtype."""
        if not self.enabled:
            return self.base_product(x, self.bias)
        A, B = self.pair(x.dtype)
        inner = F.dropout(x, self.dropout) if self.dropout and self.training else x
        update = F.linear(F.linear(inner, A) * self.scale, B)
        if not self.dora:
            return self.base_product(x, self.bias) + update
        y = self.base_product(x, None) + update
        y = y * (self.lora_magnitude / self.row_norms(A, B)).to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def base_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: the only place where the frozen matrix is multiplied."""
        if self.stored is not None:
            product: Tensor = self.stored(x, bias)
            return product
        return F.linear(x, self.weight, bias)

    def base_weight(self) -> Tensor:
        """W as a matrix of floating-point numbers, however it is stored."""
        return self.weight if self.stored is None else self.stored.dequantized(torch.float32)

    def pair(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [R, inputs] and B [outputs, R] of what is added to W, in that dtype."""
        A = self.lora_A.to(dtype)
        B = self.lora_B.to(dtype)
        if not self.pissa:
            return A, B
        return torch.cat((A, self.first_A.to(dtype))), torch.cat((B, -self.first_B.to(dtype)), 1)

    def row_norms(self, A: Tensor, B: Tensor) -> Tensor:
        """||W + scale B A|| of each row, float32, a constant to autograd (DoRA, section 4.3).

        |w|^2 + 2 s w.(BA) + s^2 |BA|^2: the matrix W + scale B A never exists.
        """
        A = A.detach()
        B = B.detach()
        cross_RO = self.base_product(A, None)
        with torch.autocast(A.device.type, enabled=False):
            A = widened(A)
            B = widened(B)
            squares = self.base_squares + 2 * self.scale * (B * widened(cross_RO).T).sum(1)
            squares = squares + self.scale**2 * ((B @ (A @ A.T)) * B).sum(1)
        norms: Tensor = squares.clamp(min=0).sqrt()
        return norms

    @torch.no_grad()
    def note_base(self) -> None:
        """Must run whenever W was read: what DoRA and a residual base need of it."""
        self.note_residual()
        if self.dora:
            self.base_squares.copy_(_norms(self.base_weight()).square())

    @torch.no_grad()
    def note_residual(self) -> None:
        """The pair that PEFT subtracts from W when it loads an adapter with this initialization."""
        if not self.residual:
            return
        if self.stored is not None:
            raise UserError(
                f"init_lora_weights {self.residual} changes the base, which is quantized here",
                where="--quantize",
                fix="leave out --quantize, or merge the adapter first: bloomery export --to merged",
            )
        W = self.base_weight().float()
        if self.residual == "olora":
            Q, R = torch.linalg.qr(W)
            self.first_A.copy_(R[: self.rank])
            self.first_B.copy_(Q[:, : self.rank])
            return
        # All singular values, as PEFT: an approximation would be another base.
        U, S, Vh = torch.linalg.svd(W, full_matrices=False)
        root = (S[: self.rank] / self.scale).sqrt()
        self.first_A.copy_(root[:, None] * Vh[: self.rank])
        self.first_B.copy_(U[:, : self.rank] * root)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The matrix that does the same alone, computed in float32."""
        A, B = self.pair(torch.float32)
        whole: Tensor = self.base_weight().float() + self.scale * (B @ A)
        if not self.dora:
            return whole
        gain = self.lora_magnitude.float() / _norms(whole)
        return whole * gain[:, None]


class ExpertLora(nn.Module):
    """Adds scale B_e A_e x to the products of a stack, for the expert e of each row; A [E, R, I] and B [E, O, R].

    No matrix of the size of the stack is made: the rows go through A, then through B, as through the stack itself.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(
        self, shape: Shape, pair: Pair, settings: Adaptation, device: torch.device
    ) -> None:
        super().__init__()
        self.rank = pair.rank
        self.scale = pair.scale
        self.enabled = True
        for name, matrix_shape in adapter_shapes("", pair.rank, shape).items():
            matrix = torch.empty(matrix_shape, dtype=DTYPES[settings.dtype], device=device)
            setattr(self, name.rpartition(".")[2], nn.Parameter(matrix))

    def forward(self, y_SO: Tensor, x: Tensor, pairs: Pairs, *, is_sorted: bool) -> Tensor:
        """y plus the update of `x`, whose rows are as `grouped_linear` takes them."""
        if not self.enabled:
            return y_SO
        inner_SR = grouped_linear(x, local(self.lora_A), pairs, is_sorted=is_sorted) * self.scale
        return y_SO + grouped_linear(inner_SR, local(self.lora_B), pairs)

    @torch.no_grad()
    def add_to(self, stack_EOI: Tensor) -> None:
        """In place: the float32 stack becomes that which does the same alone."""
        for matrix, A, B in zip(stack_EOI, self.lora_A, self.lora_B, strict=True):
            matrix += self.scale * (B.float() @ A.float())


def adapt(model: Decoder, adapter: Lora) -> None:
    """In place, on any device: add LoRA matrices to the target modules and freeze all but them and `modules_to_save`.

    Raises UserError when a name matches nothing.
    """
    adapt_as(model, adaptation(model.config, adapter))


def adapt_as(model: Decoder, settings: Adaptation) -> None:
    model.requires_grad_(False)
    for name, pair in settings.pairs.items():
        parent, _, leaf = name.rpartition(".")
        if is_expert_stack(name):
            experts = model.get_submodule(parent)
            assert isinstance(experts, ExpertMLPs)
            stack = model.get_parameter(name)
            experts.lora[leaf] = ExpertLora(stack.shape, pair, settings, stack.device)
            continue
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear) and not isinstance(base, LoraLinear)
        adapted = LoraLinear(base, pair, settings)
        setattr(model.get_submodule(parent), leaf, adapted)
    for name in settings.modules_to_save:
        model.get_submodule(name).requires_grad_()
    model.train(model.training)


def adapt_tower(tower: VisionTower, pairs: Mapping[str, Pair], settings: Adaptation) -> None:
    """In place: adds LoRA matrices to linear maps of what reads pictures, by names of transformers' whole model."""
    for name, pair in pairs.items():
        parent, _, leaf = name.removeprefix(WHOLE).rpartition(".")
        owner = tower.tower.get_submodule(parent)
        setattr(owner, leaf, LoraLinear(owner.get_submodule(leaf), pair, settings))
    tower.train(tower.training)


def tower_pairs(tower: VisionTower, adapter: Lora) -> dict[str, Pair]:
    """Those of `adapter.vision`: all linear maps of these parts. Raises UserError where there is none."""
    scale = adapter.alpha / (math.sqrt(adapter.rank) if adapter.use_rslora else adapter.rank)
    pairs = {
        WHOLE + name: Pair(adapter.rank, scale)
        for name, module in tower.tower.named_modules()
        if is_linear_map(module) and is_of(adapter.vision, name, tower.vision)
    }
    if not pairs and adapter.vision != "none":
        raise UserError(
            f"the {adapter.vision} of this model has no linear maps, on which LoRA could be",
            where=f"adapter.vision={adapter.vision}",
            fix=f"set adapter.vision=none vision.train={adapter.vision}, which trains it in full",
            code=2,
        )
    return pairs


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The adapted linear maps, by full name; of a decoder with those of what reads pictures."""
    modules = [*model.named_modules()]
    vision = model.vision if isinstance(model, Decoder) else None
    if vision is not None:
        modules += vision.tower.named_modules(prefix=WHOLE.rstrip("."))
    return ((name, module) for name, module in modules if isinstance(module, LoraLinear))


def adapted_stacks(model: nn.Module) -> Iterator[tuple[str, ExpertLora]]:
    """The LoRA of stacks of experts, by the full name of the module."""
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, ExpertLora)
    )


def stack_adapter(model: nn.Module, stack: str) -> ExpertLora | None:
    """The LoRA of a parameter that is a stack of experts; None: it has none, or is another parameter."""
    if not is_expert_stack(stack):
        return None
    experts_name, _, leaf = stack.rpartition(".")
    experts = model.get_submodule(experts_name)
    if not isinstance(experts, ExpertMLPs) or leaf not in experts.lora:
        return None
    module = experts.lora[leaf]
    assert isinstance(module, ExpertLora)
    return module


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the block; `modules_to_save` keep their trained weights."""
    modules: list[LoraLinear | ExpertLora] = [module for _, module in adapted(model)]
    modules += [module for _, module in adapted_stacks(model)]
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module in modules:
            module.enabled = True


def _norms(W: Tensor) -> Tensor:
    """Of the rows, in float32 at least."""
    norms: Tensor = torch.linalg.vector_norm(
        W, dim=1, dtype=torch.promote_types(W.dtype, torch.float32)
    )
    return norms


def note_base(model: Decoder) -> None:
    """Must run whenever frozen weights were read and `init_adapters` was not."""
    for _, module in adapted(model):
        module.note_base()


@torch.no_grad()
def init_adapters(model: Decoder, seed: int) -> None:
    """A uniform below 1 / sqrt(inputs) and B zero (LoRA's reference code), or PiSSA; after the base was read."""
    for name, module in adapted(model):
        generator = stream(seed, f"{name}.lora_A")
        if module.pissa:
            # B = U sqrt(S / scale), A = sqrt(S / scale) V^T of the largest singular values (equations 2 and 3).
            U, S, V = _largest(module.base_weight().float(), module.rank, generator)
            root = (S / module.scale).sqrt()
            module.lora_A.copy_(root[:, None] * V.T)
            module.lora_B.copy_(U * root)
            module.first_A.copy_(module.lora_A)
            module.first_B.copy_(module.lora_B)
        else:
            bound = 1 / math.sqrt(module.in_features)
            put(
                torch.empty(module.lora_A.shape).uniform_(-bound, bound, generator=generator),
                module.lora_A,
            )
            module.lora_B.zero_()
        module.note_base()
        if module.dora:
            module.lora_magnitude.copy_(module.base_squares.sqrt())
    for name, stack in adapted_stacks(model):
        bound = 1 / math.sqrt(stack.lora_A.shape[2])
        generator = stream(seed, f"{name}.lora_A")
        uniform = torch.empty(stack.lora_A.shape).uniform_(-bound, bound, generator=generator)
        put(uniform, stack.lora_A)
        stack.lora_B.zero_()


def _largest(W: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """U [outputs, rank], S [rank], V [inputs, rank]; of long matrices by subspace iteration (arXiv:0909.4061, 4.4)."""
    if min(W.shape) <= max(EXACT_SVD, rank + OVERSAMPLED):
        U, S, Vh = torch.linalg.svd(W, full_matrices=False)
        return U[:, :rank], S[:rank], Vh[:rank].T
    Q = torch.empty(W.shape[1], rank + OVERSAMPLED).normal_(generator=generator).to(W.device)
    for _ in range(ITERATIONS):
        Q = torch.linalg.qr(W.T @ torch.linalg.qr(W @ Q)[0])[0]
    U, S, Vh = torch.linalg.svd(W @ Q, full_matrices=False)
    return U[:, :rank], S[:rank], Q @ Vh[:rank].T


def trained_state(model: Decoder) -> dict[str, Tensor]:
    """The live tensors of an adapter file by native names: trained parameters and PiSSA's initial matrices."""
    kept = {name: p.detach() for name, p in trained_parameters(model).items() if name != VALUE_HEAD}
    for name, module in adapted(model):
        if module.pissa:
            kept |= {f"{name}.first_A": module.first_A, f"{name}.first_B": module.first_B}
    return kept


def is_added(name: str) -> bool:
    """Whether a parameter of that name belongs to what training adds to a model: an adapter or a value head."""
    return name.rpartition(".")[2] in ADAPTER_NAMES or name == VALUE_HEAD
