"""Devices that compute something else: the CPU's operators with a fault, on the side of a check that stands for a GPU.

The other side, which stands for the CPU, keeps the right ones.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from plans_for_tests import tiny_config, tiny_plan
from torch import Tensor, nn

from bloomery.check import examination, parts
from bloomery.facts.config import DeltaNet
from bloomery.model import heads, norms, rope
from bloomery.model.adapters.lora import LoraLinear
from bloomery.model.attention import attend as attention
from bloomery.model.decoder import Block
from bloomery.model.io import quantized
from bloomery.model.mixers import delta_net
from bloomery.model.mixers.attention import Attention
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Quantize
from bloomery.train.optim import adamw, muon
from bloomery.train.optim.common import decay_groups
from device_for_tests import DEVICE

# What sentences call the device: tests of this folder also run on a simulated GPU.
DEVICE_NAME = "CPU" if DEVICE == "cpu" else "GPU"
# The matrix of queries is the only square one, but for the one after attention.
CONFIG = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "tie_embeddings": False,
}
ALL_LINEAR = Lora(kind="lora", rank=4, alpha=12.0, target_modules=["all-linear"])


def plan_of(**sections) -> RunPlan:
    """A plan of a small model on 1,024 packed tokens; `config`, `adapter` and `quantize` as given."""
    config = tiny_config(**(CONFIG | sections.pop("config", {})))
    chosen = {name: sections.pop(name) for name in ("adapter", "quantize") if name in sections}
    data = {"sequence_length": 1024} | sections.pop("data", {})
    return tiny_plan(Path(), config=config, data=data, **sections).model_copy(update=chosen)


class Sides:
    """Tells a patched operator whether it computes for the device, or for the CPU that it is compared with."""

    def __init__(self, monkeypatch) -> None:
        self.on_device = True
        self.patch = monkeypatch
        self._wrap(parts, "numbers_on_cpu")
        self._wrap(examination, "exact_step")

    def _wrap(self, module, name: str) -> None:
        function = getattr(module, name)

        def on_cpu(*inputs):
            with self.cpu():
                return function(*inputs)

        self.patch.setattr(module, name, on_cpu)

    @contextlib.contextmanager
    def cpu(self):
        self.on_device = False
        try:
            yield
        finally:
            self.on_device = True

    def replace(self, owner, name: str, faulty: Callable) -> None:
        """On the device `owner.name` becomes `faulty`, which gets the right function first."""
        right = owner[name] if isinstance(owner, dict) else getattr(owner, name)

        def either(*inputs, **settings):
            if self.on_device:
                return faulty(right, *inputs, **settings)
            return right(*inputs, **settings)

        if isinstance(owner, dict):
            self.patch.setitem(owner, name, either)
        else:
            self.patch.setattr(owner, name, either)

    def attention(self, faulty: Callable, backend: str = "mask") -> None:
        self.replace(attention._BACKENDS, backend, faulty)


class WrongProduct(torch.autograd.Function):
    """A linear map whose gradient of the input reads the weight transposed: of a square one nobody sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        return gradient @ weight.mT, (flat.mT @ x.flatten(0, -2)).to(weight.dtype)


def transposed_gradient(
    sides: Sides, dtypes=(torch.float32, torch.bfloat16, torch.float16)
) -> None:
    """Of q_proj, in matmuls of these dtypes."""
    queries = set[int]()
    attention_init = Attention.__init__

    def remember(self, *inputs, **settings):
        attention_init(self, *inputs, **settings)
        queries.add(id(self.q_proj))

    sides.patch.setattr(Attention, "__init__", remember)

    def forward(right, self, x):
        dtype = norms.working_dtype(x)
        if id(self) not in queries or dtype not in dtypes:
            return right(self, x)
        with torch.autocast("cpu", enabled=False):
            return WrongProduct.apply(x.to(dtype), self.weight.to(dtype))

    sides.replace(nn.Linear, "forward", forward)


def wrong_tile(sides: Sides) -> None:
    def faulty(right, *inputs):
        out = right(*inputs)
        return torch.cat([out[:, :, :64], out[:, :, 80:96], out[:, :, 80:]], 2)

    sides.attention(faulty)


def swapped_heads(sides: Sides) -> None:
    sides.attention(lambda right, *inputs: right(*inputs).flip(1))


def dropped_scale(sides: Sides) -> None:
    def faulty(right, q, k, v, layout, options):
        return right(q, k, v, layout, options._replace(scale=1.0))

    sides.attention(faulty)


def other_document(sides: Sides) -> None:
    """The first token of a document sees the document before it."""

    def faulty(right, q, k, v, layout, options):
        mask = layout.mask_B1TS.clone()
        mask[..., 61, 60] = True
        return right(q, k, v, dataclasses.replace(layout, mask_B1TS=mask), options)

    sides.attention(faulty)


class Kept(torch.autograd.Function):
    """One tile keeps what the call before left in it."""

    @staticmethod
    def forward(_ctx, out, before):
        result = out.clone()
        if before and before[-1].shape == out.shape:
            result[..., -16:, :] = before[-1][..., :16, :]
        before.append(out.clone())
        return result

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, None


def stale_memory(sides: Sides) -> None:
    before: list[Tensor] = []
    sides.attention(lambda right, *inputs: Kept.apply(right(*inputs), before))


def wrong_epsilon(sides: Sides) -> None:
    def forward(right, self, x, dtype=None):
        epsilon = self.eps
        self.eps = 10 * epsilon
        try:
            return right(self, x, dtype)
        finally:
            self.eps = epsilon

    sides.replace(norms.RMSNorm, "forward", forward)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient / 2


def half_norm_gradient(sides: Sides) -> None:
    """Of the gain: half the rows are added."""
    sides.replace(norms, "rms_norm", lambda right, *inputs: right(*inputs))

    def forward(_right, self, x, dtype=None):
        return norms.rms_norm(
            x, HalfGradient.apply(self.weight), self.eps, dtype or norms.working_dtype(x)
        )

    sides.replace(norms.RMSNorm, "forward", forward)


def wrong_rotation(sides: Sides) -> None:
    sides.replace(rope, "_turned", lambda right, x, cos, sin: right(x, cos, -sin))


def dropped_chunk(sides: Sides) -> None:
    """The gradient of the chunk of logits that is not full."""

    def faulty(right, logits, sums, grad, softcap):
        right(logits, sums, grad, softcap)
        if len(logits) < 150:
            logits.zero_()

    sides.replace(heads, "_to_other_gradient", faulty)


def shifted_block_scale(sides: Sides) -> None:
    def faulty(right, values, scales, into, *, size=quantized.WEIGHTS_BLOCK):
        right(
            values, scales.roll(1) if size == quantized.WEIGHTS_BLOCK else scales, into, size=size
        )

    sides.replace(quantized, "_scaled", faulty)


def dropped_lora_scale(sides: Sides) -> None:
    def forward(right, self, x):
        scale = self.scale
        self.scale = 1.0
        try:
            return right(self, x)
        finally:
            self.scale = scale

    sides.replace(LoraLinear, "forward", forward)


class UncorrectedAdamW(torch.optim.Optimizer):
    """Moments as they are, without the division by 1 - beta^t."""

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["exp_avg"] = (1 - beta1) * p.grad + beta1 * state.get("exp_avg", 0)
                state["exp_avg_sq"] = (1 - beta2) * p.grad**2 + beta2 * state.get("exp_avg_sq", 0)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


def missing_correction(sides: Sides) -> None:
    def built(_right, named_parameters, *, plan, **_settings):
        groups = decay_groups(named_parameters, plan.weight_decay)
        return [
            UncorrectedAdamW(
                groups, {"lr": plan.learning_rate, "betas": plan.betas, "eps": plan.eps}
            )
        ]

    sides.replace(adamw, "build", built)


def dropped_decay(sides: Sides) -> None:
    def built(right, named_parameters, *, plan, **settings):
        return right(
            named_parameters, plan=plan.model_copy(update={"weight_decay": 0.0}), **settings
        )

    sides.replace(adamw, "build", built)


def missing_iteration(sides: Sides) -> None:
    sides.patch.setattr(muon, "NEWTON_SCHULZ_STEPS", 3)


def wrong_compiled_layer(sides: Sides) -> None:
    """As a compiler that leaves the MLP out."""

    def compile_wrongly(self, **_settings):
        self._compiled_call_impl = lambda x, *inputs: (
            x + self.self_attn(self.input_layernorm(x), *inputs, None)
        )

    sides.patch.setattr(Block, "compile", compile_wrongly)


class LastRow(torch.autograd.Function):
    """The gradient of an embedding whose row is written by one token, and not added to by the others."""

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.save_for_backward(tokens)
        ctx.shape = weight.shape
        return weight[tokens]

    @staticmethod
    def backward(ctx, gradient):
        (tokens,) = ctx.saved_tensors
        d_weight = gradient.new_zeros(ctx.shape)
        d_weight[tokens.flatten()] = gradient.flatten(0, 1)
        return d_weight, None


def overwritten_rows(sides: Sides) -> None:
    sides.replace(
        nn.Embedding, "forward", lambda _right, self, tokens: LastRow.apply(self.weight, tokens)
    )


def other_bits(sides: Sides) -> None:
    """The last digits depend on the weather."""
    generator = torch.Generator()
    generator.seed()

    def faulty(right, *inputs):
        out = right(*inputs)
        weather = torch.rand(out.shape, generator=generator).round().to(out.device)
        return out * (1 + 2e-7 * weather)

    sides.attention(faulty)


def crash(sides: Sides) -> None:
    def faulty(_right, *_inputs):
        raise RuntimeError("HIP error: an illegal memory access was encountered\nand more")

    sides.attention(faulty)


# By name: how to inject the fault, the plan that meets it, the name of the part and what is wrong there.
NF4 = {"adapter": ALL_LINEAR, "quantize": Quantize(kind="nf4")}


def leaking_delta_net(sides: Sides) -> None:
    """Documents of a row see each other through its state."""

    def faulty(right, *inputs, first_BT=None):
        del first_BT
        return right(*inputs)

    sides.replace(delta_net, "chunked_delta_rule", faulty)


# A delta net and a layer of attention, whose projections are 64 numbers and 32 wide.
HYBRID = {
    "family": "qwen3_5_text",
    "norm": "rms_unit_offset",
    "attention_gate": True,
    "num_layers": 2,
    "mixers": ("delta_net", "attention"),
    "delta_net": DeltaNet(
        num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16, kernel=4
    ),
}
FAULTS = {
    "leaking delta net": (leaking_delta_net, {"config": HYBRID}, "delta net", "results"),
    "wrong tile in attention": (wrong_tile, {}, "attention", "results"),
    "swapped heads": (swapped_heads, {}, "attention", "results"),
    "dropped softmax scale": (dropped_scale, {}, "attention", "results"),
    "another document seen": (other_document, {}, "attention", "results"),
    "stale memory": (stale_memory, {}, "attention", "results"),
    "transposed gradient": (transposed_gradient, {}, "q_proj", "gradients"),
    "wrong epsilon": (wrong_epsilon, {}, "input_layernorm", "results"),
    "half the gradient of a gain": (half_norm_gradient, {}, "input_layernorm", "gradients"),
    "wrong rotation": (wrong_rotation, {}, "rotary positions", "results"),
    "dropped chunk of logits": (dropped_chunk, {}, "cross-entropy head", "gradients"),
    "rows of an embedding overwritten": (overwritten_rows, {}, "embedding", "gradients"),
    "shifted scale of a block": (shifted_block_scale, NF4, "dequantization", "results"),
    "dropped scale of LoRA": (dropped_lora_scale, NF4, "adapter of q_proj", "results"),
    "missing correction of AdamW": (missing_correction, {}, "the optimizer (adamw)", "updates"),
    "dropped weight decay": (dropped_decay, {}, "the optimizer (adamw)", "updates"),
    "missing iteration of Muon": (
        missing_iteration,
        {"optimizer": {"kind": "muon"}},
        "the optimizer (muon)",
        "updates",
    ),
    "wrong compiled layer": (
        wrong_compiled_layer,
        {"train": {"compile": True}},
        "compiled layer",
        "results",
    ),
}
