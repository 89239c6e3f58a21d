"""An optimizer fused into backward: each parameter is updated as soon as its gradient exists, which is then freed."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, final

import torch
from torch import Tensor, nn

from bloomery.facts.counting import is_in_layer
from bloomery.model.decoder import VALUE_HEAD
from bloomery.train.optim.common import Gate, Rounding, State, float32_norm


class GatedOptimizer(Protocol):
    """An optimizer whose step a gate can scale or close."""

    @property
    def state(self) -> Mapping[nn.Parameter, State]: ...

    def step(self, closure: None = None, *, gate: Gate | None = None) -> None: ...


@final
class FusedBackward:
    """One optimizer per parameter, called by autograd's hook: at most two gradients exist, or a compiled block's.

    The global norm is known only after backward, so gradients are clipped one by one. From the first non-finite
    gradient of a step on nothing is updated; the device decides, the host does not wait. `head_weights`: weights whose
    gradient a head adds to `.grad` itself, without a hook; they are updated at the next hook.
    """

    def __init__(
        self,
        optimizers: Mapping[nn.Parameter, GatedOptimizer],
        head_weights: Sequence[nn.Parameter],
        rounding: Rounding,
    ) -> None:
        self._optimizers = dict(optimizers)
        self._head_weights = tuple(head_weights)
        self._rounding = rounding
        self._active = False
        self._factor = 1.0
        self._max_norm = float("inf")
        # 1 on the device until the first non-finite gradient of a step, 0 from then on.
        self._all_finite: Tensor | None = None
        # The norm of each parameter's gradient, and 1 where the parameter was updated.
        self._norm_and_updated: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        for parameter in self._optimizers:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_complete)

    def begin(self, *, factor: float, clip: float | None) -> None:
        """Call before backward. Gradients are scaled by `factor`; each is clipped to a norm of `clip`."""
        self.reset()
        self._active = True
        self._factor = factor
        self._max_norm = float("inf") if clip is None else clip

    def finish(self) -> float:
        """Call after backward: the unscaled norm over all gradients, non-finite if one is."""
        for parameter in self._optimizers:
            if parameter.grad is not None:
                self._update(parameter)
        if not self._norm_and_updated:
            self.reset()
            return 0.0

        # One transfer from the device. A closed gate changed no value, but its step was counted.
        rows = torch.stack([torch.stack(pair) for pair in self._norm_and_updated.values()]).tolist()
        norms = {}
        for parameter, (norm, updated) in zip(self._norm_and_updated, rows, strict=True):
            norms[parameter] = norm
            if not updated:
                self._optimizers[parameter].state[parameter]["step"] -= 1
        self.reset()
        # The squares are summed in the order of the parameters: backward's order may change from step to step.
        return math.sqrt(sum(norms.get(parameter, 0.0) ** 2 for parameter in self._optimizers))

    def reset(self) -> None:
        """Forget the current backward: call it after an interrupted one."""
        self._active = False
        self._all_finite = None
        self._norm_and_updated = {}

    def _gradient_is_complete(self, parameter: Tensor) -> None:
        """The hook of autograd."""
        if not self._active:
            return
        assert isinstance(parameter, nn.Parameter)
        for head_weight in self._head_weights:
            if head_weight is not parameter and head_weight.grad is not None:
                self._update(head_weight)
        self._update(parameter)

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        piece = self._rounding.piece_size(parameter.device)
        norm = float32_norm(parameter.grad, piece) / self._factor
        is_finite = norm.isfinite().to(torch.float32)
        self._all_finite = is_finite if self._all_finite is None else self._all_finite * is_finite
        # as in torch's clip_grad_norm_
        scale = (self._max_norm / (norm + 1e-6)).clamp(max=1.0) / self._factor
        self._optimizers[parameter].step(gate=Gate(self._all_finite, scale))
        parameter.grad = None
        self._norm_and_updated[parameter] = norm, self._all_finite


def head_weights_of(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights of output layers outside the blocks that are not tied to an embedding.

    Without a value head's, whose gradient autograd sees.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not is_in_layer(name)
        and f"{name}.weight" != VALUE_HEAD
        and module.weight.requires_grad
    ]
    return [
        weight
        for weight in weights
        if isinstance(weight, nn.Parameter) and weight not in embeddings
    ]
