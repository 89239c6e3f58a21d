"""The facts about each training objective, so that no module compares names of objectives. No torch.

Their keys are sections of `recipe/objectives.py`, their losses are in `train/objectives/`. Sources of the usual rates:
the papers of each objective, the defaults of TRL, and the packaged recipes.
"""

from dataclasses import dataclass
from typing import Literal

from bloomery.facts.rates import Rates
from bloomery.facts.table import OpenTable

DataKind = Literal["any", "sft", "pairs", "kto", "prompts"]
LossUnit = Literal["token", "label", "pair", "answer", "completion"]
BatchOrigin = Literal["dataset", "rollouts"]


@dataclass(frozen=True)
class Repeats:
    """The most epochs before an objective overfits, and the usual number. `reason` names the source."""

    most_epochs: int
    usual_epochs: int
    reason: str


@dataclass(frozen=True)
class MethodRates:
    """The usual learning rates of an objective: of an adapter, and of all parameters."""

    adapter: Rates
    full: Rates


@dataclass(frozen=True)
class ObjectiveSpec:
    """What others ask of an objective. Compulsory are the first three."""

    # Its name in recipes, and the `kind` of its section.
    kind: str

    # The rows that it trains on; "any" is read as text, also conversations.
    data_kind: DataKind

    # What the loss is divided by: tokens (then it is in nats), labels, pairs, answers of kto, or completions of a
    # rollout.
    loss_unit: LossUnit

    # Whether its loss needs the scores of a frozen reference model, which a dataset stores where a step has none.
    reference: bool = False

    # Forwards of another model in each step, for the plan's time and memory.
    extra_forwards: int = 0

    # Where batches come from: the prepared dataset, or responses that the model generates.
    source: BatchOrigin = "dataset"

    # The model outputs one value per sequence, and no text.
    values: bool = False

    # It trains a value head next to the language model's.
    value_head: bool = False

    # A loss that does not fall means that training fails. Of preferences and rewards it need not.
    falls: bool = False

    # Its usual learning rates with AdamW; None: those of fine-tuning.
    rates: MethodRates | None = None

    # The usual `optimizer.warmup`, a duration as a recipe has it. Adapters have their own where all text is read.
    warmup: str = "3%"

    # How many epochs are usual and too many; None: no number is known to be too many.
    repeats: Repeats | None = None

    # Of an installed package, the "module:function" that builds it from `ObjectiveInputs`; "": the entry of its kind in
    # `BUILDERS` of `train/objectives/build.py`.
    builder: str = ""

    @property
    def reads_text(self) -> bool:
        """Whether it trains on every token, also of conversations."""
        return self.data_kind == "any"

    @property
    def samples(self) -> bool:
        """Whether it trains on completions that the model samples."""
        return self.source == "rollouts"

    @property
    def numbers_texts(self) -> bool:
        """Whether the loss is per response, so that batches number the responses of each sequence."""
        return self.loss_unit in ("pair", "answer", "completion")


_TEXTS = Repeats(
    4, 1, "up to 4 epochs are nearly as good as new text, more repeat it (arXiv:2305.16264)"
)
_CONVERSATIONS = Repeats(
    5, 3, "3 epochs are usual (Alpaca); from then on the validation loss mostly rises"
)
_TEACHER = Repeats(10, 3, "a teacher's probabilities allow more epochs than labels do")
_PAIRS = Repeats(
    3, 1, "preference pairs are trained on for one to three epochs (Zephyr, arXiv:2310.16944)"
)
_REWARDS = Repeats(
    2, 1, "a reward model overfits after its first epoch (InstructGPT, arXiv:2203.02155)"
)
_COMPLETIONS = Repeats(
    20, 1, "the completions are new in every epoch, but the model learns the prompts by heart"
)
_AGAINST_REFERENCE = MethodRates(Rates(5e-6, 5e-5), Rates(5e-7, 5e-6))
# The first rates of all parameters are TRL's defaults.
_GROUPS = MethodRates(Rates(5e-6, 2e-5, 1e-5), Rates(1e-6, 1e-5, 1e-6))
# TRL's default of its DistillationTrainer is 1e-6; adapters as in Thinking Machines' "On-Policy Distillation" (2025).
_ON_POLICY = MethodRates(Rates(1e-5, 2e-4, 1e-4), Rates(1e-6, 2e-5, 5e-6))
_VALUES = MethodRates(Rates(5e-6, 2e-5, 1e-5), Rates(1e-6, 1e-5, 3e-6))

OBJECTIVES = OpenTable(
    {
        spec.kind: spec
        for spec in (
            ObjectiveSpec("pretrain", "any", "token", falls=True, warmup="1%", repeats=_TEXTS),
            ObjectiveSpec("sft", "sft", "token", falls=True, repeats=_CONVERSATIONS),
            ObjectiveSpec(
                "dpo",
                "pairs",
                "pair",
                reference=True,
                rates=_AGAINST_REFERENCE,
                warmup="10%",
                repeats=_PAIRS,
            ),
            ObjectiveSpec(
                "ipo",
                "pairs",
                "pair",
                reference=True,
                rates=_AGAINST_REFERENCE,
                warmup="10%",
                repeats=_PAIRS,
            ),
            ObjectiveSpec(
                "simpo",
                "pairs",
                "pair",
                rates=MethodRates(Rates(5e-6, 2e-5), Rates(3e-7, 1e-6)),
                warmup="10%",
                repeats=_PAIRS,
            ),
            ObjectiveSpec(
                "orpo",
                "pairs",
                "pair",
                rates=MethodRates(Rates(1e-5, 5e-5), Rates(5e-6, 8e-6)),
                warmup="10%",
                repeats=_PAIRS,
            ),
            ObjectiveSpec(
                "kto",
                "kto",
                "answer",
                reference=True,
                rates=_AGAINST_REFERENCE,
                warmup="10%",
                repeats=_PAIRS,
            ),
            ObjectiveSpec(
                "reward",
                "pairs",
                "pair",
                values=True,
                rates=MethodRates(Rates(1e-5, 5e-5), Rates(1e-6, 1e-5)),
                warmup="10%",
                repeats=_REWARDS,
            ),
            ObjectiveSpec(
                "distill", "sft", "label", extra_forwards=1, falls=True, repeats=_TEACHER
            ),
            ObjectiveSpec(
                "on_policy_distill",
                "prompts",
                "label",
                extra_forwards=1,
                source="rollouts",
                falls=True,
                rates=_ON_POLICY,
                repeats=_COMPLETIONS,
            ),
            ObjectiveSpec(
                "grpo",
                "prompts",
                "completion",
                source="rollouts",
                rates=_GROUPS,
                repeats=_COMPLETIONS,
            ),
            ObjectiveSpec(
                "rloo",
                "prompts",
                "completion",
                source="rollouts",
                rates=_GROUPS,
                repeats=_COMPLETIONS,
            ),
            ObjectiveSpec(
                "ppo",
                "prompts",
                "completion",
                source="rollouts",
                value_head=True,
                rates=_VALUES,
                repeats=_COMPLETIONS,
            ),
        )
    }
)
