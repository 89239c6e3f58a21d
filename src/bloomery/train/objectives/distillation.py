"""The teacher of a distillation: how it is loaded, and the head that compares the model with it."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.facts.attention import supports
from bloomery.facts.config import ModelConfig
from bloomery.facts.limits import refuse_teacher_length, refuse_teacher_tokenizer
from bloomery.hub import local_model
from bloomery.infer.forward import matmul_dtype
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Divergence, Teacher
from bloomery.model.io.weights import load_decoder
from bloomery.model.presets import read_config
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Distill


def load_teacher(plan: RunPlan) -> Decoder:
    """The teacher on the run's device, in the dtype of its matmuls.

    Raises UserError when it cannot be read or its vocabulary differs from the dataset's.
    """
    folder = _teacher_folder(plan)
    refuse_teacher_tokenizer(
        load_tokenizer(folder), load_tokenizer(plan.data.prepared), where=str(folder)
    )
    attention = teacher_attention(read_config(folder), plan, where=str(folder))
    return _load(folder, matmul_dtype(plan.train.precision), plan.train.device, attention)


@lru_cache(maxsize=1)  # a replanned run keeps its teacher: two might not fit in memory
def _load(folder: Path, dtype: torch.dtype, device: str, attention: str) -> Decoder:
    teacher = load_decoder(folder, dtype=dtype, device=device, attention=attention)
    return teacher.requires_grad_(False)


def meta_teacher(plan: RunPlan) -> Decoder:
    """The teacher without weight values, in its dtype."""
    folder = _teacher_folder(plan)
    config = read_config(folder)
    attention = teacher_attention(config, plan, where=str(folder))
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(matmul_dtype(plan.train.precision))
    try:
        return Decoder(config, attention=attention).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default_dtype)


def _teacher_folder(plan: RunPlan) -> Path:
    assert isinstance(plan.objective, Distill)
    return local_model(plan.objective.teacher)


def teacher_attention(config: ModelConfig, plan: RunPlan, *, where: str) -> str:
    """The run's attention backend if it supports the teacher, else blockwise, which supports everything.

    Raises UserError when the sequences are longer than the teacher's learned positions.
    """
    length = plan.data.sequence_length
    refuse_teacher_length(config, length, where=where)
    windows = [config.window(layer) for layer in range(config.num_layers)]
    problem = supports(
        plan.model.attention,
        device_type=plan.train.device,
        packed=plan.data.layout == "packed",
        window=any(window is not None and window < length for window in windows),
        softcap=config.attention_softcap is not None,
        dropout=False,
    )
    return plan.model.attention if problem is None else "blockwise"


def divergence_head(
    batch: Batch, teacher: Decoder, *, temperature: float, chunk: int
) -> Divergence:
    """The head of one micro-batch; the teacher's forward runs inside it."""

    def hidden_states() -> Tensor:
        documents = None if teacher.model.backend == "sdpa" else batch.documents
        states: Tensor = teacher.model(batch.tokens, batch.positions, documents, None)
        return states

    teacher_of_batch = Teacher(hidden_states, teacher.lm_head, teacher.config.final_softcap)
    return Divergence(batch.labels, batch.loss_mask, chunk, temperature, teacher_of_batch)
