"""An exponential moving average (EMA) of the trainable parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.model.decoder import trained_parameters
from bloomery.model.io.parameters import local, put


def average_of(model: nn.Module, decay: float | None) -> "WeightAverage | None":
    """The average of the model's trainable parameters; None without a decay."""
    if decay is None:
        return None
    return WeightAverage(trained_parameters(model), decay)


@final
class WeightAverage:
    """The average of every trainable parameter, in its dtype on its device; of one that ranks divide, of its rows here.

    After update t it is decay * average + (1 - decay) * parameter, with min(decay, (1 + t) / (10 + t)) so that a short
    run is not an average of its initial weights (`num_updates` of TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters = dict(parameters)
        self._averages = {
            name: parameter.detach().clone() for name, parameter in parameters.items()
        }
        self._decay = decay
        self.updates = 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The live averages by parameter; inside `swapped` the trained weights."""
        return dict(self._averages)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, after a step of the optimizer."""
        self.updates += 1
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        for name, average in self._averages.items():
            local(average).lerp_(local(self._parameters[name].detach()), 1 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the block the model holds the averages, and `tensors` are the trained weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, average in self._averages.items():
            parameter = local(self._parameters[name].detach())
            # In place, so that no view of a parameter changes; one at a time, so that one copy is in memory.
            trained = parameter.clone()
            parameter.copy_(local(average))
            local(average).copy_(trained)

    @torch.no_grad()
    def restore(self, trained: Mapping[str, Tensor] | None, updates: int) -> None:
        """The model holds the averages of a checkpoint; `trained`: its whole trained weights, None before the first
        step.

        Raises UserError for a checkpoint without them.
        """
        self.updates = updates
        for name, average in self._averages.items():
            local(average).copy_(local(self._parameters[name].detach()))
        if trained is None:
            return
        if trained.keys() != self._averages.keys():
            raise UserError(
                "the checkpoint has other averaged weights than this model",
                where="ema.safetensors",
                fix="resume with the recipe of the run, or start a new run",
            )
        for name, tensor in trained.items():
            put(tensor, self._parameters[name])
