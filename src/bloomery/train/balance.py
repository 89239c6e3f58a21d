"""The balance of experts: losses of their routers, biases that even their load, and what a step reports of it.

The loss that evens the load is a product of two sums over a step: how many tokens chose an expert, and how probable
the experts were. So it is no sum over micro-batches. Its gradient goes through the probabilities alone: where the
counts of the whole step are known before the first backward, micro-batches and ranks add up to the gradient of one
large batch (`RouterPlan.counts`).

L layers with experts, of the whole model, E experts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from bloomery.facts.config import Experts, ModelConfig
from bloomery.facts.counting import experts_of
from bloomery.model.decoder import Decoder
from bloomery.model.experts import MixtureOfExperts, RouterLoad
from bloomery.parallel.mesh import Mesh
from bloomery.plan.types import RouterPlan

Loads = Mapping[int, RouterLoad]  # by layer


@final
@dataclass(frozen=True)
class StepLoad:
    """Sums over the real tokens of a step, or of a part of it: float32 [L, 2 E + 3], zeros for layers elsewhere."""

    sums_LX: Tensor
    facts: Experts

    @property
    def counts_LE(self) -> Tensor:
        """How many tokens chose each expert."""
        return self.sums_LX[:, : self.facts.count]

    @property
    def scores_LE(self) -> Tensor:
        """The sum of each expert's probability."""
        return self.sums_LX[:, self.facts.count : 2 * self.facts.count]

    @property
    def tokens_L(self) -> Tensor:
        return self.sums_LX[:, -3]

    @property
    def ratios_LE(self) -> Tensor:
        """The load of each expert relative to an even one: 1 is fair, 0 an expert that no token chose."""
        even_L = self.tokens_L * (self.facts.per_token / self.facts.count)
        return self.counts_LE / even_L[:, None]

    def metrics(self, *, has_z_loss: bool, pooled: bool) -> dict[str, Tensor]:
        """By the names of events: means over the layers, the extremes of all, and losses without their coefficients."""
        ratios_LE = self.ratios_LE
        num_tokens = self.tokens_L.sum()
        shares_LE = self.counts_LE / self.counts_LE.sum(1, keepdim=True)
        entropy_L = -torch.special.xlogy(shares_LE, shares_LE).sum(1)
        balance = balance_loss(
            self.counts_LE / self.tokens_L[:, None],
            self.scores_LE / self.tokens_L[:, None],
            pooled=pooled,
        )
        z_loss = {"router/z_loss": self.sums_LX[:, -2].sum() / num_tokens} if has_z_loss else {}
        return {
            "router/balance_loss": balance,
            **z_loss,
            "router/highest_load": ratios_LE.max(),
            "router/load_variation": ratios_LE.std(1, correction=0).mean(),
            "router/dead_experts": (self.counts_LE == 0).sum().to(balance),
            "router/load_entropy": entropy_L.mean() / math.log(self.facts.count),
            "router/entropy": self.sums_LX[:, -1].sum() / num_tokens,
        }


def balance_loss(fractions_LE: Tensor, probabilities_LE: Tensor, *, pooled: bool) -> Tensor:
    """E times the sum of fractions and probabilities multiplied (arXiv:2101.03961, eq. 4, whose fractions sum to 1): K
    where both are even, K the experts of a token.

    `fractions_LE`: tokens that chose each expert, per token; those of a layer sum to K. `probabilities_LE`: the mean
    probability of each expert. `pooled`: of all layers together, as `load_balancing_loss_func` of transformers; it is
    even, too, where layers that are uneven complement each other. Else the mean of the layers' losses.
    """
    if pooled:
        fractions_LE = fractions_LE.mean(0, keepdim=True)
        probabilities_LE = probabilities_LE.mean(0, keepdim=True)
    return fractions_LE.shape[1] * (fractions_LE * probabilities_LE).sum(1).mean()


@dataclass(kw_only=True)
class StepBalance:
    """Mutable: the balance of one step. Every micro-batch's loads go into `note`, then its `auxiliary` into backward.

    `num_tokens`: real tokens of the step, on all ranks. `num_micro_batches`: of the step, on all ranks.
    """

    plan: RouterPlan
    config: ModelConfig
    mesh: Mesh
    device: torch.device  # of the model
    num_tokens: float
    num_micro_batches: int
    # [L, E]: tokens of the whole step that chose each expert; None: not counted yet.
    counts_LE: Tensor | None = None
    _sums: Tensor | None = field(default=None, init=False)

    @property
    def layers(self) -> list[int]:
        """Those with experts, of the whole model."""
        return [
            layer
            for layer in range(self.config.num_layers)
            if experts_of(self.config, layer) is not None
        ]

    @property
    def _facts(self) -> Experts:
        assert self.config.experts is not None, "only mixtures have a plan of their routers"
        return self.config.experts

    def counts_first(self, own_micro_batches: int) -> bool:
        """Whether a pass without gradients counts before the first backward. A single micro-batch is counted by its own
        forward.
        """
        return self.plan.loss > 0 and self.plan.counts == "step" and own_micro_batches > 1

    def count(self, forwards: Sequence[Callable[[], Sequence[Loads]]]) -> None:
        """The counts of the whole step, by forwards without gradients of this rank's micro-batches, of one or several
        each.
        """
        counts_LE = torch.zeros(len(self.layers), self._facts.count, device=self.device)
        with torch.no_grad():
            for forward in forwards:
                for loads in forward():
                    for layer, load in loads.items():
                        counts_LE[self.layers.index(layer)] += load.counts_E
        self.counts_LE = self.mesh.all_reduce(counts_LE)

    def note(self, loads: Loads) -> None:
        """Adds the loads of a micro-batch to those that the step reports."""
        width = 2 * self._facts.count + 3
        empty = torch.zeros(width, device=self.device)
        rows = []
        for layer in self.layers:
            load = loads.get(layer)
            row = empty
            if load is not None:
                rest = torch.stack([load.tokens, load.squares, load.entropy])
                row = torch.cat([load.counts_E, load.scores_E, rest]).detach().float()
            rows.append(row)
        sums_LX = torch.stack(rows)
        self._sums = sums_LX if self._sums is None else self._sums + sums_LX

    @property
    def sums(self) -> Tensor:
        """Of `StepLoad`, of this rank's micro-batches."""
        assert self._sums is not None, "a step has a micro-batch"
        return self._sums

    def load_of(self, sums_LX: Tensor) -> StepLoad:
        return StepLoad(sums_LX, self._facts)

    def by_layer(self, values: Sequence[float]) -> dict[int, list[float]]:
        """The flat values of all experts; none of none."""
        count = self._facts.count
        rows = [list(values[start : start + count]) for start in range(0, len(values), count)]
        return dict(zip(self.layers, rows, strict=False))

    def auxiliary(self, loads: Loads) -> Tensor | None:
        """What a micro-batch adds to the mean loss of the step, weighted: the sum over micro-batches and ranks is the
        loss of the step. None where it adds nothing.

        All ranks of a step that has one micro-batch meet here for its counts.
        """
        asks_counts = self.plan.loss > 0 and self.plan.counts == "step"
        if asks_counts and self.counts_LE is None:
            counts_LE = self.load_of(self.sums).counts_LE
            self.counts_LE = self.mesh.all_reduce(counts_LE.clone())
        parts = []
        if loads and self.plan.z_loss:
            squares = torch.stack([load.squares for load in loads.values()]).sum()
            num_rows = max(1.0, self.num_tokens) * len(self.layers)
            parts.append(self.plan.z_loss * squares / num_rows)
        if loads and self.plan.loss:
            parts.append(self.plan.loss * self._balance_loss(loads))
        return torch.stack(parts).sum() if parts else None

    def _balance_loss(self, loads: Loads) -> Tensor:
        """The part of the step's loss that the layers of a micro-batch have."""
        scores_LE = torch.stack([load.scores_E for load in loads.values()])
        share = len(loads) / len(self.layers)
        if self.counts_LE is None:
            # Its own counts, and an equal share of the step, as in trainers that add the losses of micro-batches.
            tokens = next(iter(loads.values())).tokens.clamp(min=1)
            counts_LE = torch.stack([load.counts_E for load in loads.values()])
            loss = balance_loss(counts_LE / tokens, scores_LE / tokens, pooled=self.plan.pooled)
            return loss * (share / self.num_micro_batches)
        tokens_of_step = max(1.0, self.num_tokens)
        fractions_LE = self.counts_LE.to(scores_LE) / tokens_of_step
        if self.plan.pooled:
            # The fractions are those of all layers, whichever of them are here.
            fractions_LE = fractions_LE.mean(0).expand_as(scores_LE)
        else:
            own_rows = [fractions_LE[self.layers.index(layer)] for layer in loads]
            fractions_LE = torch.stack(own_rows)
        return share * balance_loss(fractions_LE, scores_LE / tokens_of_step, pooled=False)

    def update_biases(self, model: Decoder, load: StepLoad) -> None:
        """Moves the bias of each expert's choice by `bias_update` towards an even load, in float32
        (arXiv:2408.15664, algorithm 1; the mean of a layer stays, as in torchtitan).

        `load`: of the whole step, on all ranks, which so keep the same biases.
        """
        for layer, block in zip(model.stage.layers, model.model.layers, strict=True):
            if layer not in self.layers:
                continue
            counts_E = load.counts_LE[self.layers.index(layer)]
            moves_E = self.plan.bias_update * torch.sign(counts_E.mean() - counts_E)
            mixture = block.mlp
            assert isinstance(mixture, MixtureOfExperts)
            bias_E = mixture.gate.e_score_correction_bias
            assert bias_E is not None, "the plan refuses a model without"
            # A bias that streams lives on the host.
            bias_E.data.add_((moves_E - moves_E.mean()).to(bias_E.device))


def step_balance(
    plan: RouterPlan | None,
    model: Decoder,
    mesh: Mesh,
    *,
    num_tokens: float,
    num_micro_batches: int,
) -> StepBalance | None:
    """None for a model without experts."""
    if plan is None or model.config.experts is None:
        return None
    return StepBalance(
        plan=plan,
        config=model.config,
        mesh=mesh,
        device=model.device,
        num_tokens=num_tokens,
        num_micro_batches=num_micro_batches,
    )
