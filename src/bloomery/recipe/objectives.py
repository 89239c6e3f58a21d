"""Facts about each objective, so that no other module compares objective names. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

DataKind = Literal["any", "sft", "pairs", "kto"]
LossUnit = Literal["token", "label", "pair", "answer"]


@dataclass(frozen=True)
class ObjectiveSpec:
    """`data_kind`: its rows; "any" is read as text. `loss_unit`: the loss is per token (in nats), label,
    pair or answer. `reference`: it needs a reference model. `extra_forwards`: forwards of another model per step.
    `rollouts`: it trains on generated responses. `values`: the model outputs one value per sequence, no text.
    `falls`: a loss that does not fall means that training fails.
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
        """Whether it trains on every token, also of conversations."""
        return self.data_kind == "any"

    @property
    def numbers_texts(self) -> bool:
        """Whether the loss is per response, so that batches number the responses of each sequence."""
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
