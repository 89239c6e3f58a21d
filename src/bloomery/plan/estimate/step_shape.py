"""What decides how much memory a training step takes."""

from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from bloomery.model.config import ModelConfig
from bloomery.plan.estimate.states import FULL, Way, element_of, learns, weight_of


@cache
def setting_of(way: Way, *, looks: int = 0, teacher: ModelConfig | None = None, offloading: bool = False) -> str:
    """A few letters that are equal for equal ways to train."""
    if (way, looks, teacher, offloading) == (FULL, 0, None, False):
        return ""
    return sha256(repr((way, looks, teacher, offloading)).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """What decides how much memory a step takes."""

    config: ModelConfig
    sequence_length: int
    micro_batch: int  # rows
    precision: str
    optimizer: str
    attention: str
    checkpointing: str
    compiled: bool
    score_chunk: int
    context_bytes: float  # the runtime's own; 0: not a GPU
    on_gpu: bool
    expandable: bool = False  # the allocator's segments
    accumulating: bool = False  # several micro-batches a step: gradients are there from the second one on
    way: Way = FULL
    offloading: bool = False  # what layers keep for backward waits in the processor's memory
    teacher: ModelConfig | None = None  # of distillation
    looks: int = 0  # forwards beside the step's own: the model of the start, by the base without its adapters
    learned: float = 1.0  # the share of positions that are scored: counted for time, memory is of the fullest batch

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def setting(self) -> str:
        """What a measurement must share to tell of this one's memory; empty: every weight is trained, plainly."""
        return setting_of(self.way, looks=self.looks, teacher=self.teacher, offloading=self.offloading)

    @property
    def outputs(self) -> int:
        """Of the output layer: one of a reward model."""
        return 1 if self.config.head == "values" else self.config.vocab_size

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return element_of(self.precision)

    @property
    def weight(self) -> int:
        """Bytes of a weight of the model that learns, and of its gradient."""
        return weight_of(self.precision)

    @property
    def stream(self) -> int:
        """Bytes of a number of the residual stream, which has the type of the embeddings."""
        embeds = learns(self.config, self.way, "model.embed_tokens.weight")
        return self.weight if embeds or self.precision == "float16" else self.element

    @property
    def mixed(self) -> bool:
        """Half-precision products over float32 weights."""
        return self.element < self.weight
