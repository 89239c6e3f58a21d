"""The teacher of a distillation: how it is loaded, and the head that compares the model with it."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.data.pictures.encoder import VisionSource, saved_vision
from bloomery.data.pictures.processor import PictureProcessor
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.facts.attention import missing_feature
from bloomery.facts.config import ModelConfig, Stage
from bloomery.facts.counting import smallest_window
from bloomery.facts.limits import Dequantizer, refuse_teacher_length, refuse_teacher_tokenizer
from bloomery.facts.pictures import Vision, vision_of
from bloomery.hub import local_model
from bloomery.infer.forward import (
    borders_in,
    eval_mode,
    forward_all,
    loss_positions_in,
    matmul_dtype,
    seen_pictures,
    to_device,
)
from bloomery.model.adapters.lora import adapters_disabled
from bloomery.model.adapters.settings import shares_head
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.divergence import Divergence, DivergenceMeasure, Teacher
from bloomery.model.heads import HiddenRows
from bloomery.model.io.weights import load_decoder, quantize_model
from bloomery.model.transformers_backend import TransformersBackbone
from bloomery.model.vision import load_tower
from bloomery.parallel.context import HeadExchange
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.stage import keep_stage
from bloomery.parallel.streamed import StreamedWeights
from bloomery.plan.types import HostPlacement, RunPlan
from bloomery.recipe.objectives import ObjectiveSection, OwnTeacher, TeacherQuantize
from bloomery.recipe.schema import Quantize
from bloomery.train.objectives.objective import TEACHER_HIDDEN, full_batch_of
from bloomery.train.rl.rollout import teacher_batch
from bloomery.train.scorers.client import ScoredTeacher, Scorers, TeacherOutput


@final
@dataclass(frozen=True, kw_only=True)
class TeacherPlan:
    """What a run's teacher is, and what it computes with: the device, the precision and the sequences of the run.

    `attention`: the run's backend, which the teacher takes if it supports the teacher. `aligns_texts`: it may have
    another tokenizer. `copies`: the ranks that each have it, and load it together: those of a host have its layers
    there once.
    """

    folder: Path
    prepared: Path
    sequence_length: int
    quantize: TeacherQuantize
    quantized_by: Dequantizer
    stream: Literal["off", "layers"]
    stream_host: HostPlacement
    is_packed: bool
    attention: str
    precision: str
    device: str
    aligns_texts: bool = False
    copies: Mesh = SINGLE_RANK

    @classmethod
    def of(cls, plan: RunPlan) -> "TeacherPlan":
        teacher = plan.objective.taught_by
        assert teacher is not None, "the objective has a teacher"
        return cls(
            folder=local_model(teacher.model),
            prepared=plan.data.prepared,
            sequence_length=plan.data.sequence_length,
            quantize=teacher.quantize,
            quantized_by=plan.quantized_by,
            stream=teacher.stream,
            stream_host=plan.train.stream_host,
            # A rollout packs completions as documents.
            is_packed=plan.data.layout == "packed" or plan.objective.spec.samples,
            attention=plan.model.attention,
            precision=plan.train.precision,
            device=plan.train.device,
            aligns_texts=plan.aligns_texts,
        )


def load_teacher(plan: TeacherPlan) -> Decoder:
    """The teacher on the run's device, in the dtype of its matmuls, or quantized; of a dataset with pictures with its
    own tower.

    Raises UserError when it cannot be read, its vocabulary differs from the dataset's, or it cannot see its pictures.
    """
    folder = plan.folder
    if not plan.aligns_texts:
        refuse_teacher_tokenizer(
            load_tokenizer(folder), load_tokenizer(plan.prepared), where=str(folder)
        )
    attention = teacher_attention(read_config(folder), plan)
    source = saved_vision(plan.prepared)
    vision = None if source is None else teacher_vision(folder, source)
    dtype = matmul_dtype(plan.precision)
    form = _Form(
        plan.quantize, plan.quantized_by, plan.stream, plan.stream_host, plan.device, plan.copies
    )
    return _load(folder, dtype, attention, form, vision)


def teacher_of_rank(
    plan: RunPlan, mesh: Mesh, load: Callable[[TeacherPlan], Decoder] = load_teacher
) -> Decoder | None:
    """The teacher where the head is: the other stages of a pipeline have none. Ranks that share sequences share those
    of the teacher as well.
    """
    if not mesh.last_stage:
        return None
    teacher_plan = TeacherPlan.of(plan)
    if mesh.stages == 1 and mesh.world > 1:  # of a pipeline some ranks alone load it
        copies = Mesh(mesh.rank, replicate=mesh.world, device=mesh.device)
        teacher_plan = replace(teacher_plan, copies=copies)
    teacher = load(teacher_plan)
    teacher.share_sequences(HeadExchange(mesh) if mesh.context > 1 else None)
    return teacher


@lru_cache(maxsize=1)
def load_teacher_output(plan: TeacherPlan) -> TeacherOutput:
    """On the run's device, in the dtype of its matmuls. Raises UserError as `load_teacher` does."""
    refuse_teacher_tokenizer(
        load_tokenizer(plan.folder), load_tokenizer(plan.prepared), where=str(plan.folder)
    )
    config = read_config(plan.folder)
    output = load_decoder(
        plan.folder,
        dtype=matmul_dtype(plan.precision),
        device=plan.device,
        arrange=_keep_output,
    )
    return TeacherOutput(output.lm_head.requires_grad_(False), config.final_softcap)


def scored_teacher_of(plan: RunPlan, scorers: Scorers | None) -> ScoredTeacher | None:
    """The teacher of the plan in `scorers`; None without both."""
    if scorers is None or plan.objective.taught_by is None:
        return None
    return ScoredTeacher(scorers, partial(load_teacher_output, TeacherPlan.of(plan)))


def _keep_output(teacher: Decoder) -> None:
    """In place, before the weights are read: no layers, and of the embedding what the output layer shares."""
    shares = shares_head(teacher.config)
    keep_stage(teacher, Stage(groups=(), embeds=False, has_embedding=shares, has_head=True))


@lru_cache(maxsize=1)  # a replanned run keeps its teacher: two might not fit in memory
def _load(
    folder: Path,
    dtype: torch.dtype,
    attention: str,
    form: "_Form",
    vision: Vision | None,
) -> Decoder:
    device = form.device
    teacher = load_decoder(
        folder, dtype=dtype, device=device, attention=attention, arrange=form.arrange
    )
    if vision is not None:
        # float16 overflows in some towers.
        tower_dtype = torch.float32 if dtype == torch.float16 else dtype
        teacher.see(load_tower(vision, folder, dtype=tower_dtype, device=torch.device(device)))
    return teacher.requires_grad_(False)


@final
@dataclass(frozen=True)
class _Form:
    """What a teacher's weights are like, and where they are."""

    quantize: TeacherQuantize
    quantized_by: Dequantizer
    stream: Literal["off", "layers"] = "off"
    stream_host: HostPlacement = "pinned"
    device: str = "cpu"
    copies: Mesh = SINGLE_RANK

    def arrange(self, teacher: Decoder) -> None:
        """In place, before the weights are read."""
        teacher.requires_grad_(False)
        if self.quantize != "none":
            quantize_model(teacher, Quantize(kind=self.quantize), reader=self.quantized_by)
        if self.stream == "layers":
            if isinstance(teacher.model, TransformersBackbone):
                raise UserError(
                    "not supported: layers of transformers do not stream",
                    where="objective.teacher_stream",
                    fix="set objective.teacher_stream=off, or choose another teacher",
                )
            teacher.weight_stream = StreamedWeights(
                teacher, torch.device(self.device), mesh=self.copies, placement=self.stream_host
            )


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
        teacher = Decoder(config, attention=attention).eval()
        _Form(plan.quantize, plan.quantized_by).arrange(teacher)
        return teacher
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


@final
@dataclass(frozen=True)
class TeacherPass:
    """Completes the micro-batches of a step with the hidden states of their teacher, `TEACHER_HIDDEN`.

    The pass is before the step's own, without gradients and dropout. `teacher`: one whose layers stream; None for the
    model itself, as it is (`live`) or without its adapter (`base`). `together`: micro-batches that share each load of
    streamed weights; None: all of the step. Stages of a pipeline without the head complete nothing.
    """

    precision: str
    teacher: Decoder | None = None
    kind: OwnTeacher = "live"
    together: int | None = None
    mesh: Mesh = SINGLE_RANK

    def __call__(self, model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        teacher = model if self.teacher is None else self.teacher
        is_base = self.teacher is None and self.kind == "base"
        together = len(batches) if self.together is None else self.together
        completed = list[Batch]()
        with eval_mode(teacher), adapters_disabled(model) if is_base else nullcontext():
            for start in range(0, len(batches), together):
                group = batches[start : start + together]
                texts = [to_device(teacher_batch(batch), teacher.device) for batch in group]
                heads = [HiddenRows(loss_positions_of(text)) for text in texts]
                outputs = forward_all(teacher, texts, heads, precision=self.precision)
                if not teacher.ends_here:
                    completed += group
                    continue
                for batch, output in zip(group, outputs, strict=True):
                    hidden_NS = own_rows(output.head, batch, self.mesh)
                    completed.append(batch.with_extras(**{TEACHER_HIDDEN: hidden_NS}))
        return completed


def own_rows(hidden_NS: Tensor, batch: Batch, mesh: Mesh) -> Tensor:
    """The teacher's hidden states at the loss tokens of `batch`, from those at the loss tokens of its `teacher_batch`.

    With other prompts a completion is elsewhere in its sequence, so that ranks which share it have other parts of it:
    all rows are gathered. Both batches of all tokens have their loss tokens in one order.
    """
    if mesh.context == 1 or "teacher_tokens" not in batch.extras:
        return hidden_NS
    device = hidden_NS.device
    read = to_device(teacher_batch(batch), device)
    flat_TS = hidden_NS.new_zeros(read.tokens.numel(), hidden_NS.shape[1])
    flat_TS = flat_TS.index_copy(0, loss_positions_of(read), hidden_NS)
    part_SBT = flat_TS.view(*read.tokens.shape, -1).permute(2, 0, 1)
    all_SBT = mesh.all_gather_tokens(part_SBT)

    full_batch = full_batch_of(batch)
    is_read_BT = full_batch.extras["teacher_loss_mask"].to(device) != 0
    is_own_BT = torch.zeros_like(is_read_BT)
    is_own_BT.chunk(mesh.context, 1)[mesh.context_rank].fill_(True)
    is_own_N = is_own_BT[full_batch.loss_mask.to(device) != 0]
    return all_SBT[:, is_read_BT].T[is_own_N]


def teacher_pass(
    objective: ObjectiveSection,
    teacher: Decoder | None,
    *,
    precision: str,
    together: int,
    mesh: Mesh = SINGLE_RANK,
) -> TeacherPass | None:
    """The pass before a step of a model that is its own teacher, and of a teacher whose layers stream; None for one
    that is on the device, and where there is none. `together`: micro-batches that share each load of the model's
    weights.
    """
    if objective.own_teacher is not None:
        return TeacherPass(precision, kind=objective.own_teacher, together=together, mesh=mesh)
    if teacher is not None and teacher.weight_stream is not None:
        return TeacherPass(precision, teacher, mesh=mesh)
    return None


def loss_positions_of(batch: Batch) -> Tensor:
    """Those of its loss mask; a device is asked where the batch does not have its places."""
    positions = loss_positions_in(batch)
    return batch.loss_mask.flatten().nonzero().squeeze(1) if positions is None else positions


def divergence_head(
    batch: Batch,
    teacher: Decoder | TeacherOutput | None,
    measure: DivergenceMeasure,
    *,
    chunk: int,
    at_temperature: bool = False,
    entropy: bool = False,
    entropy_gradient: bool = False,
    mesh: Mesh = SINGLE_RANK,
) -> Divergence:
    """The head of one micro-batch. The teacher's forward runs inside it, unless a `TeacherPass` has completed the
    batch. `teacher`: None for the model itself, and on a stage without the head, which never runs it.
    """

    def hidden_rows(_positions_N: Tensor) -> Tensor:
        if TEACHER_HIDDEN in batch.extras:
            return batch.extras[TEACHER_HIDDEN]
        assert isinstance(teacher, Decoder)
        read = teacher_batch(batch)
        documents = None if teacher.model.backend == "sdpa" else read.attended_documents
        seen = seen_pictures(teacher, read)
        of_pictures: dict[str, Any] = {} if seen is None else {"pictures": seen}
        if read.axes is not None:
            of_pictures["axes_3BT"] = read.axes
        states: Tensor = teacher.model(
            read.tokens, read.positions, documents, None, borders_in(read), **of_pictures
        )
        return own_rows(states.flatten(0, 1)[loss_positions_of(read)], batch, mesh)

    teacher_of_batch = Teacher(hidden_rows)
    if isinstance(teacher, TeacherOutput):
        teacher_of_batch = Teacher(hidden_rows, teacher.lm_head, teacher.final_softcap)
    elif teacher is not None:
        teacher_of_batch = Teacher(hidden_rows, teacher.lm_head, teacher.config.final_softcap)
    return Divergence(
        batch.labels,
        batch.loss_mask,
        chunk,
        measure,
        teacher_of_batch,
        at_temperature,
        loss_positions_in(batch),
        entropy,
        entropy_gradient,
    )
