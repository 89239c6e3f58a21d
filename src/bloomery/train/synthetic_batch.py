"""Micro-batches and teachers for steps that nobody learns from: measured, or run on fake tensors."""

from dataclasses import replace

import torch
from torch import Tensor

from bloomery.data.loading.loader import Batch
from bloomery.hub import local_model
from bloomery.model.decoder import Decoder
from bloomery.model.families.presets import read_config
from bloomery.plan.rules.objective import reference_of
from bloomery.plan.types import Plan
from bloomery.recipe.schema import Distil
from bloomery.train.forward import product_dtype
from bloomery.train.objectives.distill import teachers_attention

PAIRED = ("dpo", "ipo", "simpo", "orpo", "kto", "reward")


def completed(batch: Batch, plan: Plan) -> Batch:
    """With what the plan's objective reads beside tokens: a row of plain text becomes two texts, with scores of 0."""
    if plan.objective.kind not in PAIRED:
        return batch
    if batch.sequences is None:
        batch = replace(batch, sequences=_halves(batch.tokens), marks=torch.ones_like(batch.tokens))
    if batch.reference is None and reference_of(plan.objective, plan.adapter).value == "precomputed":
        batch = replace(batch, reference=torch.zeros_like(batch.weights))
    return batch


def _halves(tokens_BT: Tensor) -> Tensor:
    rows, length = tokens_BT.shape
    later_T = (torch.arange(length) >= length // 2).long()
    return 2 * torch.arange(rows)[:, None] + later_T


def hollow_teacher(plan: Plan) -> Decoder:
    """The plan's teacher without its numbers, in the dtype that it is kept in."""
    assert isinstance(plan.objective, Distil)
    folder = local_model(plan.objective.teacher)
    config = read_config(folder)
    attention = teachers_attention(config, plan, where=str(folder))
    usual = torch.get_default_dtype()
    torch.set_default_dtype(product_dtype(plan.train.precision))
    try:
        return Decoder(config, attention=attention).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)
