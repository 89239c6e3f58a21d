"""The teacher of a distillation: how it is loaded, and the head that compares the model with it."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.data.pictures.encoder import VisionSource, saved_vision
from bloomery.data.pictures.processor import PictureProcessor
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.facts.attention import missing_feature
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import smallest_window
from bloomery.facts.limits import refuse_teacher_length, refuse_teacher_tokenizer
from bloomery.facts.pictures import Vision, vision_of
from bloomery.hub import local_model
from bloomery.infer.forward import borders_in, loss_positions_in, matmul_dtype, seen_pictures
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Divergence, Teacher
from bloomery.model.io.weights import load_decoder
from bloomery.model.vision import load_tower
from bloomery.plan.types import DataPlan, ModelPlan, TrainPlan
from bloomery.recipe.objectives import Distill


@final
@dataclass(frozen=True, kw_only=True)
class TeacherPlan:
    """What a run's teacher is, and what it computes with: the device, the precision and the sequences of the run.

    `attention`: the run's backend, which the teacher takes if it supports the teacher.
    """

    folder: Path
    prepared: Path
    sequence_length: int
    is_packed: bool
    attention: str
    precision: str
    device: str

    @classmethod
    def of(
        cls, objective: Distill, model: ModelPlan, data: DataPlan, train: TrainPlan
    ) -> "TeacherPlan":
        return cls(
            folder=local_model(objective.teacher),
            prepared=data.prepared,
            sequence_length=data.sequence_length,
            is_packed=data.layout == "packed",
            attention=model.attention,
            precision=train.precision,
            device=train.device,
        )


def load_teacher(plan: TeacherPlan) -> Decoder:
    """The teacher on the run's device, in the dtype of its matmuls; of a dataset with pictures with its own tower.

    Raises UserError when it cannot be read, its vocabulary differs from the dataset's, or it cannot see its pictures.
    """
    folder = plan.folder
    refuse_teacher_tokenizer(
        load_tokenizer(folder), load_tokenizer(plan.prepared), where=str(folder)
    )
    attention = teacher_attention(read_config(folder), plan)
    source = saved_vision(plan.prepared)
    vision = None if source is None else teacher_vision(folder, source)
    return _load(folder, matmul_dtype(plan.precision), plan.device, attention, vision)


@lru_cache(maxsize=1)  # a replanned run keeps its teacher: two might not fit in memory
def _load(
    folder: Path, dtype: torch.dtype, device: str, attention: str, vision: Vision | None
) -> Decoder:
    teacher = load_decoder(folder, dtype=dtype, device=device, attention=attention)
    if vision is not None:
        # float16 overflows in some towers.
        tower_dtype = torch.float32 if dtype == torch.float16 else dtype
        teacher.see(load_tower(vision, folder, dtype=tower_dtype, device=torch.device(device)))
    return teacher.requires_grad_(False)


def teacher_vision(folder: Path, source: VisionSource) -> Vision:
    """What reads the pictures that a dataset was prepared with by `source`.

    Raises UserError for a teacher that reads text alone, and for one whose own processor makes other numbers of them.
    """
    raw_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vision = vision_of(raw_config, where=str(folder))
    if vision is None:
        raise UserError(
            "the teacher reads text alone, and the dataset has pictures",
            where="objective.teacher",
            fix="choose a vision-language model as the teacher, or remove the pictures",
        )
    is_alike = (
        vision.kind == source.vision.kind
        and vision.image_token_id == source.vision.image_token_id
        and PictureProcessor(folder, vision).scaling
        == PictureProcessor(Path(source.folder), source.vision).scaling
    )
    if not is_alike:
        raise UserError(
            f"the teacher ({vision.kind}) reads pictures in another way than the model ({source.vision.kind})",
            where="objective.teacher",
            fix="choose a teacher of the model's own family",
        )
    return vision


def meta_teacher(plan: TeacherPlan) -> Decoder:
    """The teacher without weight values, in its dtype."""
    config = read_config(plan.folder)
    attention = teacher_attention(config, plan)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(matmul_dtype(plan.precision))
    try:
        return Decoder(config, attention=attention).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default_dtype)


def teacher_attention(config: ModelConfig, plan: TeacherPlan) -> str:
    """The run's attention backend if it supports the teacher, else blockwise, which supports everything.

    Raises UserError when the sequences are longer than the teacher's learned positions.
    """
    length = plan.sequence_length
    refuse_teacher_length(config, length, where=str(plan.folder))
    window = smallest_window(config)
    problem = missing_feature(
        plan.attention,
        device_type=plan.device,
        packed=plan.is_packed,
        window=window is not None and window < length,
        softcap=config.attention_softcap is not None,
        dropout=False,
        sinks=config.attention_sinks,
    )
    return plan.attention if problem is None else "blockwise"


def divergence_head(
    batch: Batch, teacher: Decoder, *, temperature: float, chunk: int
) -> Divergence:
    """The head of one micro-batch; the teacher's forward runs inside it."""

    def hidden_states() -> Tensor:
        documents = None if teacher.model.backend == "sdpa" else batch.documents
        seen = seen_pictures(teacher, batch)
        of_pictures: dict[str, Any] = {} if seen is None else {"pictures": seen}
        if batch.axes is not None:
            of_pictures["axes_3BT"] = batch.axes
        states: Tensor = teacher.model(
            batch.tokens, batch.positions, documents, None, borders_in(batch), **of_pictures
        )
        return states

    teacher_of_batch = Teacher(hidden_states, teacher.lm_head, teacher.config.final_softcap)
    return Divergence(
        batch.labels,
        batch.loss_mask,
        chunk,
        temperature,
        teacher_of_batch,
        loss_positions_in(batch),
    )
