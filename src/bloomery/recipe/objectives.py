"""What the objectives are, as facts: who needs one asks here, and compares no name. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

DataKind = Literal["any", "sft", "pairs", "kto"]
LossUnit = Literal["token", "label", "pair", "answer"]


@dataclass(frozen=True)
class ObjectiveSpec:
    """`data_kind`: the rows it learns from; "any" are read as text. `loss_unit`: what a loss is of; of a token it is
    nats. `reference`: it compares with the model of the start. `extra_forwards`: of another model, in each step.
    `rollouts`: it learns from what the model writes. `values`: the model gives a text a number and says nothing.
    `falls`: where the loss does not, nothing is learned.
    """

    kind: str
    data_kind: DataKind
    loss_unit: LossUnit
    reference: bool = False
    extra_forwards: int = 0
    rollouts: bool = False
    values: bool = False
    falls: bool = False

    @property
    def reads_text(self) -> bool:
        """Whether every token is learned, of conversations, too."""
        return self.data_kind == "any"

    @property
    def numbers_texts(self) -> bool:
        """Whether a loss is of whole texts, which rows therefore number."""
        return self.loss_unit in ("pair", "answer")


OBJECTIVES: Mapping[str, ObjectiveSpec] = MappingProxyType(
    {
        spec.kind: spec
        for spec in (
            ObjectiveSpec("pretrain", "any", "token", falls=True),
            ObjectiveSpec("sft", "sft", "token", falls=True),
            ObjectiveSpec("dpo", "pairs", "pair", reference=True),
            ObjectiveSpec("ipo", "pairs", "pair", reference=True),
            ObjectiveSpec("simpo", "pairs", "pair"),
            ObjectiveSpec("orpo", "pairs", "pair"),
            ObjectiveSpec("kto", "kto", "answer", reference=True),
            ObjectiveSpec("reward", "pairs", "pair", values=True),
            ObjectiveSpec("distill", "sft", "label", extra_forwards=1, falls=True),
            ObjectiveSpec("ppo", "sft", "answer", rollouts=True),
            ObjectiveSpec("grpo", "sft", "answer", rollouts=True),
        )
    }
)
