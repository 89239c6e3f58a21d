"""Distillation: a larger model's probabilities are learned beside the labels."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from bloomery.data.loading.loader import Batch
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.hub import local_model
from bloomery.model.attention.support import supports
from bloomery.model.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.families.presets import read_config
from bloomery.model.heads import Divergence, Teacher
from bloomery.model.io.weights import load_decoder
from bloomery.plan.rules.unsupported import refuse_few_positions, refuse_other_words
from bloomery.plan.types import Plan
from bloomery.recipe.schema import Distil
from bloomery.train.forward import product_dtype
from bloomery.train.objectives.losses import LossParts, mean_of


def load_teacher(plan: Plan) -> Decoder:
    """The teacher on the run's device, its weights kept as matrix products read them.

    Raises UserError when it cannot be read, and when its vocabulary is another than that of the data.
    """
    assert isinstance(plan.objective, Distil)
    folder = local_model(plan.objective.teacher)
    refuse_other_words(load_tokenizer(folder), load_tokenizer(plan.data.prepared), where=str(folder))
    attention = teachers_attention(read_config(folder), plan, where=str(folder))
    return _loaded(folder, product_dtype(plan.train.precision), plan.train.device, attention)


def teachers_attention(config: ModelConfig, plan: Plan, *, where: str) -> str:
    """The run's own backend where it computes what the teacher needs, else the one that can do everything.

    Raises UserError when the rows are longer than the positions that the teacher has learned.
    """
    length = plan.data.sequence_length
    refuse_few_positions(config, length, where=where)
    windows = [window for window in map(config.window, range(config.num_layers)) if window is not None]
    unfit = supports(
        plan.model.attention, device_type=plan.train.device, packed=plan.data.layout == "packed",
        window=any(window < length for window in windows), softcap=config.attention_softcap is not None, dropout=False,
    )  # fmt: skip
    return plan.model.attention if unfit is None else "blockwise"


@lru_cache(maxsize=1)  # a run that plans anew keeps the one that it has: two might not fit
def _loaded(folder: Path, dtype: torch.dtype, device: str, attention: str) -> Decoder:
    return load_decoder(folder, dtype=dtype, device=device, attention=attention).requires_grad_(False)


def divergence_of(batch: Batch, teacher: Decoder, asked: Distil, *, chunk: int) -> Divergence:
    """The head of one micro-batch; the teacher runs when the head does."""

    def hidden() -> Tensor:
        documents = None if teacher.model.backend == "sdpa" else batch.documents
        states: Tensor = teacher.model(batch.tokens, batch.positions, documents, None)
        return states

    taught = Teacher(hidden, teacher.lm_head, teacher.config.final_softcap)
    return Divergence(batch.labels, batch.weights, chunk, asked.temperature, taught)


def distil_loss(found_2BT: Tensor, weights_BT: Tensor, asked: Distil) -> LossParts:
    """share * temperature^2 * KL(teacher || model) + (1 - share) * the label's nats, a learned label.

    Hinton et al., arXiv:1503.02531, section 2: the square keeps the gradient's size whatever the temperature.
    """
    scores_BT, divergence_BT = found_2BT
    learned_BT = weights_BT != 0
    each_BT = asked.share * asked.temperature**2 * divergence_BT - (1 - asked.share) * scores_BT
    metrics = {"kl": mean_of(divergence_BT, learned_BT), "nats": mean_of(-scores_BT, learned_BT)}
    return LossParts((each_BT * weights_BT).sum(), weights_BT.sum(), metrics)
