"""Weights are updated inside backward, each as soon as its gradient stands, and the gradient is freed at once."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from bloomery.train.optim.adafactor import Adafactor
from bloomery.train.optim.adamw import LeanAdamW
from bloomery.train.optim.common import Gate, exact_norm

Rule = Adafactor | LeanAdamW


@final
class InBackward:
    """One optimizer a parameter, called by autograd's hook: two gradients stand at most, or a compiled block's.

    The norm over all gradients is known only afterwards, so none is clipped by it. A gradient is looked at alone: from
    the first one of a step that is not finite on, nothing moves any more (the device decides, the host does not wait);
    what moved before it had finite gradients. `heads`: weights whose gradient a head may add to `.grad` itself, which
    no hook sees; each is updated when the next hook comes.
    """

    def __init__(self, rules: Mapping[nn.Parameter, Rule], heads: Sequence[nn.Parameter]) -> None:
        self._rules, self._heads = dict(rules), tuple(heads)
        self._armed, self._factor, self._clip = False, 1.0, float("inf")
        self._open: Tensor | None = None
        self._seen: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # norm, and whether its gate was open
        for parameter in self._rules:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def begin(self, *, factor: float, clip: float | None) -> None:
        """Before a backward whose gradients are `factor` times too large; each is cut to a norm of `clip`."""
        self._armed, self._factor, self._clip = True, factor, float("inf") if clip is None else clip
        self._open, self._seen = None, {}

    def finish(self) -> float:
        """The norm over all gradients, unscaled and unclipped; not finite if one of them was not."""
        for parameter in self._rules:
            if parameter.grad is not None:
                self._update(parameter)
        self._armed = False
        if not self._seen:
            return 0.0
        told = torch.stack([torch.stack(pair) for pair in self._seen.values()]).tolist()
        for parameter, (_, opened) in zip(self._seen, told, strict=True):
            if not opened:
                self._rules[parameter].state[parameter]["step"] -= 1
        norms = {parameter: norm for parameter, (norm, _) in zip(self._seen, told, strict=True)}
        self._open, self._seen = None, {}
        return math.sqrt(sum(norms.get(parameter, 0.0) ** 2 for parameter in self._rules))

    def drop(self) -> None:
        """After a backward that was cut short."""
        self._armed, self._open, self._seen = False, None, {}

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        assert isinstance(parameter, nn.Parameter)
        for head in self._heads:
            if head is not parameter and head.grad is not None:
                self._update(head)
        self._update(parameter)

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        norm = exact_norm(parameter.grad) / self._factor
        finite = norm.isfinite().to(torch.float32)
        self._open = finite if self._open is None else self._open * finite
        scale = (self._clip / (norm + 1e-6)).clamp(max=1.0) / self._factor  # as in torch's clip_grad_norm_
        self._rules[parameter].step(gate=Gate(self._open, scale))
        parameter.grad = None
        self._seen[parameter] = norm, self._open


def head_weights(model: nn.Module) -> list[nn.Parameter]:
    """Of output layers outside the blocks, unless an embedding shares them: then its own gradient comes last."""
    embedded = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    found = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." not in name and module.weight.requires_grad
    ]
    return [weight for weight in found if isinstance(weight, nn.Parameter) and weight not in embedded]
