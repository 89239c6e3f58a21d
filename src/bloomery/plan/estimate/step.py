"""The properties of a training step that determine its memory and time."""

from dataclasses import dataclass
from typing import Literal

from bloomery.facts.config import ModelConfig
from bloomery.facts.towers import Tower
from bloomery.plan.estimate.mode import TrainingMode, setting_of
from bloomery.plan.estimate.states import TrainedModel, element_bytes_of, weight_bytes_of
from bloomery.plan.types import HostPlacement, PictureLoad
from bloomery.recipe.schema import VisionParts

Stream = Literal["off", "layers", "experts"]
TeacherPlace = Literal["device", "output", "away"]
ReferencePlace = Literal["none", "device", "host", "nf4"]  # nf4: on the device

NO_PICTURES = PictureLoad()


@dataclass(frozen=True, kw_only=True)
class StepPictures:
    """The pictures of a step, and what reads them.

    `weights`: numbers of all that reads them. `tower`: its sizes; None: not known, and only its weights count. `mean`,
    `fullest`: of a sequence, for time and for memory. `train`: parts trained in full; `adapted`: with LoRA of `rank`.
    `waiting_sequences`: of which a host has the pictures, those of the step and those read ahead. `both_ways`: tokens
    of a picture attend to those after them. `teacher_weights`: numbers of what reads them for a teacher.
    `sequence_length`: of the sequences of `mean` and `fullest`; longer ones have more pictures.
    """

    weights: int
    tower: Tower | None = None
    mean: PictureLoad = NO_PICTURES
    fullest: PictureLoad = NO_PICTURES
    train: VisionParts = "none"
    adapted: VisionParts = "none"
    rank: int = 0
    waiting_sequences: int = 0
    both_ways: bool = False
    teacher_weights: int = 0
    sequence_length: int = 1


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The properties of a step that determine its memory and time."""

    model: TrainedModel
    sequence_length: int
    micro_batch_size: int
    precision: str
    optimizer: str
    attention: str
    checkpointing: str
    compiled: bool
    score_chunk: int
    context_bytes: float  # the runtime's own; 0: not a GPU
    on_gpu: bool
    context: int = 1  # devices that share each sequence: each has as many of its tokens, and of its heads in attention
    expert: int = 1  # devices that divide the experts of each layer, each with tokens of its own
    expandable: bool = False  # the allocator's segments
    fills_freed: bool = False  # on a CPU: tensors take the memory of freed ones of their size
    # gradient accumulation: gradients exist from the second micro-batch on
    accumulating: bool = False
    gathered: bool = False  # layers read weights that were gathered in the dtype of matmuls
    offload_activations: bool = False
    teacher: ModelConfig | None = None  # of distillation
    teacher_quantize: str = "none"  # the form of its matrices
    is_own_teacher: bool = False  # the model
    teacher_stream: bool = False  # its layers are on the host
    # Where a teacher is: output, away: its layers, or all of it, are on a device that only scores.
    teacher_place: TeacherPlace = "device"
    ranks_per_scorer: float = 1.0  # devices that train for each that scores
    scored_ahead: bool = False  # the next step is scored while this one trains
    # Loss tokens of a step, whose hidden states are kept from the teacher's pass where that is before the step's own.
    teacher_tokens: int = 0
    extra_forwards: int = 0  # of the reference model, and of the model as its own teacher
    # A step of several micro-batches begins with a forward of the layers that counts the load of experts.
    counts_first: bool = False
    reference: ReferencePlace = "none"  # where a frozen copy of the start is
    # Weights that live in the host's memory, and the micro-batches that a layer computes when it has been loaded.
    stream: Stream = "off"
    stream_micro_batches: int = 1
    stream_host: HostPlacement = "pinned"
    loss_share: float = 1.0  # loss tokens over all tokens: for time; memory assumes all
    pictures: StepPictures | None = None

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def mode(self) -> TrainingMode:
        return self.model.mode

    @property
    def tokens_per_micro_batch(self) -> int:
        """Of one device."""
        return self.micro_batch_size * self.sequence_length // self.context

    @property
    def setting(self) -> str:
        return setting_of(
            self.mode,
            extra_forwards=self.extra_forwards,
            teacher=self.teacher,
            teacher_quantize=self.teacher_quantize,
            is_own_teacher=self.is_own_teacher,
            teacher_streams=self.teacher_stream,
            teacher_place=self.teacher_place,
            offload_activations=self.offload_activations,
        )

    @property
    def teacher_width(self) -> int | None:
        """Numbers of the teacher's hidden states; None where nobody teaches."""
        if self.is_own_teacher:
            return self.config.hidden_size
        return None if self.teacher is None else self.teacher.hidden_size

    @property
    def head_outputs(self) -> int:
        """Outputs of the head per token: one of a reward model."""
        return 1 if self.config.head == "values" else self.config.vocab_size

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return element_bytes_of(self.precision)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a trainable weight of the model, and of its gradient."""
        return weight_bytes_of(self.precision)

    @property
    def layer_gradient_bytes(self) -> int:
        """Bytes of a weight's gradient in a layer before it is accumulated."""
        return self.element_bytes if self.gathered else self.weight_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes of a value of the residual stream, which has the dtype of the embeddings."""
        if self.model.trains_embedding or self.precision == "float16":
            return self.weight_bytes
        return self.element_bytes

    @property
    def mixed(self) -> bool:
        """Half-precision matmuls with float32 weights."""
        return self.element_bytes < self.weight_bytes
