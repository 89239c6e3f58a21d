"""The sections of the training objectives. No torch.

The facts about each are in `facts/objectives.py`.
"""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from bloomery.facts.objectives import OBJECTIVES, ObjectiveSpec
from bloomery.facts.table import OpenTable
from bloomery.recipe.sections import Section, key
from bloomery.recipe.values import Auto, Share

TeacherQuantize = Literal["none", "nf4", "int8"]
# The model as its own teacher: without its adapter, or with the weights of the moment.
OwnTeacher = Literal["base", "live"]
OWN_TEACHERS: tuple[OwnTeacher, ...] = ("base", "live")


class TeacherSettings(NamedTuple):
    """A teacher: its folder or Hub id, the form of its matrices in memory, and whether its layers stay on the host."""

    model: str
    quantize: TeacherQuantize
    stream: Literal["off", "layers"]


class ObjectiveSection(Section):
    """The loss, by its `kind`."""

    kind: str = Field(description="Training objective.")

    @property
    def spec(self) -> ObjectiveSpec:
        return OBJECTIVES[self.kind]

    @property
    def taught_by(self) -> TeacherSettings | None:
        """The teacher, if there is one that is another model."""
        return None

    @property
    def own_teacher(self) -> OwnTeacher | None:
        """The form in which the model is its own teacher, if it is."""
        return None

    @property
    def stored_scores(self) -> str | None:
        """The files with a teacher's scores, in place of a teacher."""
        return None


class Pretrain(ObjectiveSection):
    """Trains on every token."""

    kind: Literal["pretrain"] = key("pretrain", "Cross-entropy on every token.")


class Sft(ObjectiveSection):
    """Trains on the responses of conversations, as set by `data.chat.train_on`."""

    kind: Literal["sft"] = Field(
        description="Supervised fine-tuning (SFT): cross-entropy on the responses."
    )
    loss: Literal["cross_entropy", "dft"] = key(
        "cross_entropy",
        "dft: dynamic fine-tuning, the gradient of a token weighted by its probability.",
    )


class Preference(ObjectiveSection):
    """Raises the likelihood of the chosen over the rejected response, relative to the reference model."""

    kind: Literal["dpo", "ipo"] = Field(
        description="DPO or IPO: preference pairs against a reference model."
    )
    beta: PositiveFloat = key(0.1, "Strength of the penalty for leaving the reference model.")
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = key(
        0.0, "dpo: assumed share of pairs with swapped labels."
    )


class SimPo(ObjectiveSection):
    """Pairs without a reference model: mean log-probabilities a margin `gamma` apart (arXiv:2405.14734)."""

    kind: Literal["simpo"] = Field(description="SimPO: preference pairs without a reference model.")
    beta: PositiveFloat = key(2.0, "Scale of the rewards.")
    gamma: NonNegativeFloat = key(1.0, "Target margin between the rewards.")


class OrPo(ObjectiveSection):
    """Trains on the chosen response and raises its odds over the rejected one's (arXiv:2403.07691)."""

    kind: Literal["orpo"] = Field(
        description="ORPO: SFT loss plus an odds ratio loss, without a reference model."
    )
    beta: PositiveFloat = key(0.1, "Weight of the odds ratio loss.")


class Kto(ObjectiveSection):
    """Single answers, each marked desirable or not (arXiv:2402.01306)."""

    kind: Literal["kto"] = Field(description="KTO: single responses labeled desirable or not.")
    beta: PositiveFloat = key(0.1, "Strength of the penalty for leaving the reference model.")
    desirable_weight: PositiveFloat = key(1.0, "Loss weight of desirable responses.")
    undesirable_weight: PositiveFloat = key(1.0, "Loss weight of undesirable responses.")


class Reward(ObjectiveSection):
    """One value per text, higher for the chosen response of a pair."""

    kind: Literal["reward"] = Field(description="Reward model: one number per text.")


TEACHER = "Teacher model: a folder in Hugging Face format or a Hub id"
OR_ITSELF = (
    f"{TEACHER}; base: the model without its adapter; live: the model itself, which"
    " teacher_prompt_template tells more"
)
A_TEACHER = "Qwen/Qwen2.5-7B-Instruct"


class Taught(ObjectiveSection):
    """Learns from the probabilities of another model, the teacher."""

    teacher: str | None = key(
        None, f"{OR_ITSELF}. Its divergence is a term of the loss; unset: none.", A_TEACHER
    )
    teacher_quantize: TeacherQuantize = key(
        "none",
        "Form of the teacher's matrices in memory; 4 and 8 bits change its probabilities a little.",
    )
    teacher_stream: Literal["off", "layers"] = key(
        "off",
        "layers: those of the teacher stay in host memory, and each is copied to the device once per step.",
    )

    @property
    def taught_by(self) -> TeacherSettings | None:
        if self.teacher is None or self.own_teacher is not None:
            return None
        return TeacherSettings(self.teacher, self.teacher_quantize, self.teacher_stream)


class TaughtByDivergence(Taught):
    """The loss, or a term of it, is the divergence from the teacher at each token that the model sampled."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = key(
        "reverse_kl",
        "reverse_kl: KL divergence of the model from the teacher; forward_kl: of the teacher from the model; jsd: of"
        " both from their mixture.",
    )
    jsd_beta: Annotated[float, Field(gt=0.0, lt=1.0)] = key(
        0.5, "jsd: the teacher's weight in the mixture that both are compared with (TRL's beta)."
    )
    estimator: Literal["full", "sampled"] = key(
        "full",
        "Sum over the vocabulary, or the log ratio of the sampled token alone as its advantage (reverse_kl); of a"
        " teacher with another tokenizer that of the sampled span of text.",
    )
    teacher_prompt_template: str | None = key(
        None,
        "Prompt of the teacher, which may tell it more: {prompt} and {COLUMN} of the row; unset: the model's.",
        "{prompt}\n\nA correct solution:\n{solution}",
    )
    teacher_template_kwargs: dict[str, bool | int | float | str] = key(
        {},
        "Variables of the teacher's chat template, where it has another tokenizer or another prompt.",
        {"enable_thinking": False},
    )

    @property
    def own_teacher(self) -> OwnTeacher | None:
        return next((own for own in OWN_TEACHERS if own == self.teacher), None)


class Distill(Taught):
    """Distillation: `kd_ratio` of the loss is the divergence from a larger model, the rest is that of the labels."""

    kind: Literal["distill"] = Field(description="Knowledge distillation from a teacher.")
    teacher: str | None = key(None, f"{TEACHER}; unset: teacher_scores.", A_TEACHER)
    teacher_scores: str | None = key(
        None,
        "In place of a teacher: the file with its likeliest tokens that `bloomery generate --top-scores` wrote; * in"
        " the name: several.",
        "answers.jsonl.scores",
    )
    temperature: PositiveFloat = key(1.0, "Temperature of both distributions.")
    kd_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = key(
        0.5,
        "Share of the distillation loss; the rest is cross-entropy with the labels (torchtune's kd_ratio).",
    )

    @property
    def stored_scores(self) -> str | None:
        return self.teacher_scores


class Rollouts(ObjectiveSection):
    """Trains on completions that the model generates."""

    num_generations: Annotated[int, Field(ge=1)] = key(8, "Completions per prompt.")
    max_completion_length: PositiveInt = key(
        512, "Longest completion in tokens; prompts have the rest of data.sequence_length."
    )
    temperature: PositiveFloat = key(1.0, "Sampling temperature of the completions.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = key(
        1.0, "Nucleus sampling: share of the probability to sample from; 1: all of it."
    )
    top_k: PositiveInt | None = key(
        None, "Sample from this many most probable tokens; unset: from all.", 50
    )
    min_p: Share = key(
        0.0, "Sample from tokens with at least this share of the highest probability; 0: from all."
    )
    num_iterations: PositiveInt = key(1, "Passes over the completions of a rollout.")
    steps_per_generation: PositiveInt = key(
        1, "Optimizer steps in one pass over the completions of a rollout."
    )
    max_turns: PositiveInt = key(
        8,
        "With tools: answers of the model in an episode; the tools of the last one are not called.",
    )


class RewardedRollouts(Rollouts):
    """Trains on completions by their `rewards`."""

    kl_key: ClassVar[str] = "beta"  # the key with the weight of the KL divergence
    clip_key: ClassVar[str] = "epsilon_high"  # the key with the clip range of ratios above 1

    entropy_coef: NonNegativeFloat = key(
        0.0,
        "Weight of the mean entropy per token, which is taken off the loss; 0: no entropy bonus.",
    )

    reference: Literal["auto", "device", "host", "nf4"] = key(
        "auto",
        "Frozen copy of the start, the reference model where training changes the base: on the device, on the host"
        " (a layer at a time moves), or in 4 bits, which changes the KL divergence a little; auto: device, else host.",
    )

    @property
    def kl_weight(self) -> float:
        """The weight of the KL divergence from the reference model."""
        weight: float = getattr(self, self.kl_key)
        return weight


class GroupRollouts(TaughtByDivergence, RewardedRollouts):
    """Compares the completions of a prompt with each other; a teacher may judge their tokens as well."""

    num_generations: Annotated[int, Field(ge=2)] = key(8, "Completions per prompt.")
    epsilon: NonNegativeFloat = key(
        0.2, "Clip range of the ratio of new to old probability, below 1."
    )
    epsilon_high: NonNegativeFloat | None = key(
        None, "Clip range above 1; unset: as epsilon.", 0.28
    )
    beta: NonNegativeFloat = key(
        0.0, "Weight of the KL divergence from the reference model; 0: no reference model."
    )
    mask_truncated_completions: bool = key(
        False, "Mask completions that reach max_completion_length without an end token."
    )
    dynamic_sampling: bool = key(
        False,
        "Sample further prompts in place of those whose completions all have one reward (DAPO, arXiv:2503.14476).",
    )
    max_resample_times: PositiveInt = key(
        3, "dynamic_sampling: rounds of further prompts; groups of one reward fill what is missing."
    )
    oversampling: Annotated[float, Field(ge=1.0, le=8.0)] = key(
        1.0,
        "Prompts sampled per prompt trained on; those whose completions differ in reward come first.",
    )
    easy_prompts: Literal["keep", "defer", "drop"] = key(
        "keep",
        "Prompts that are always right: keep them, leave them out for 1, 2, 4 ... epochs (defer), or for good (drop).",
    )
    hard_prompts: Literal["keep", "defer", "drop"] = key(
        "keep", "Prompts that are always wrong: as easy_prompts."
    )
    easy_threshold: float = key(
        1.0, "easy_prompts: reward that every completion of such a prompt reaches."
    )
    hard_threshold: float = key(
        0.0, "hard_prompts: reward that no completion of such a prompt exceeds."
    )
    reward_control: Literal["none", "random", "shuffled"] = key(
        "none",
        "A control: trains on coin flips (random), or on the rewards of other completions (shuffled), and reports the"
        " real ones.",
    )
    teacher_kl_coef: NonNegativeFloat = key(
        1.0, "With a teacher: weight of the divergence from it, a mean over tokens."
    )
    ce_coef: NonNegativeFloat = key(
        0.0,
        "Weight of the cross-entropy of completions that were better than their group, a mean over their tokens.",
    )


class Grpo(GroupRollouts):
    """Compares the completions of a prompt with each other (arXiv:2402.03300)."""

    kind: Literal["grpo"] = Field(
        description="GRPO: reinforcement learning with rewards relative to a group of completions."
    )
    loss_type: Literal["dapo", "grpo", "dr_grpo", "cispo"] = key(
        "dapo",
        "Mean over tokens (dapo) or completions (grpo), by a constant (dr_grpo), clipped weights (cispo).",
    )
    importance_sampling_level: Literal["token", "sequence"] = key(
        "token", "One ratio of probabilities per token, or per sequence (GSPO)."
    )
    importance_sampling_correction: Auto | bool = key(
        "auto", "Correct for probabilities that differ between generation and training."
    )
    importance_sampling_mode: Literal[
        "sequence_mask", "token_mask", "sequence_truncate", "token_truncate"
    ] = key(
        "sequence_mask",
        "Correction: mask or truncate ratios above importance_sampling_clip_max, per sequence or token.",
    )
    importance_sampling_clip_max: PositiveFloat = key(
        3.0, "Highest ratio of training to generation probability."
    )
    scale_rewards: Literal["group", "batch", "none"] = key(
        "group",
        "Divide advantages by the standard deviation of the rewards: of a group or a batch.",
    )


class Rloo(GroupRollouts):
    """Compares each completion with the mean of the others of its prompt (arXiv:2402.14740)."""

    kind: Literal["rloo"] = Field(
        description="RLOO: reinforcement learning with a leave-one-out baseline."
    )
    num_generations: Annotated[int, Field(ge=2)] = key(2, "Completions per prompt.")
    beta: NonNegativeFloat = key(
        0.05, "Weight of the KL divergence from the reference model; 0: no reference model."
    )


class Ppo(RewardedRollouts):
    """Compares each token with what a value head expected of the completion (arXiv:1707.06347, arXiv:1909.08593)."""

    kl_key: ClassVar[str] = "kl_coef"
    clip_key: ClassVar[str] = "cliprange"

    kind: Literal["ppo"] = Field(
        description="PPO: reinforcement learning with a value head, on one completion per prompt."
    )
    num_generations: Literal[1] = key(1, "Completions per prompt: PPO compares none with another.")
    temperature: PositiveFloat = key(0.7, "Sampling temperature of the completions.")
    num_iterations: PositiveInt = key(
        4, "Passes over the completions of a rollout (TRL's num_ppo_epochs)."
    )
    kl_coef: NonNegativeFloat = key(
        0.05,
        "Weight of the KL divergence from the reference model in each token's reward; 0: no reference model.",
    )
    kl_estimator: Literal["k1", "k3"] = key(
        "k1",
        "Estimate of the KL divergence of a token: its log ratio, or one that is never negative.",
    )
    missing_eos_penalty: NonNegativeFloat = key(
        0.0,
        "Taken off the score of completions that reach max_completion_length without an end token.",
    )
    whiten_rewards: bool = key(
        False, "Divide the rewards of tokens by their standard deviation over a rollout."
    )
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = key(1.0, "Discount of later rewards.")
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = key(
        0.95, "Lambda of generalized advantage estimation (arXiv:1506.02438)."
    )
    cliprange: NonNegativeFloat = key(0.2, "Clip range of the ratio of new to old probability.")
    cliprange_value: NonNegativeFloat = key(0.2, "Clip range of the value around its old value.")
    vf_coef: NonNegativeFloat = key(0.1, "Weight of the value head's loss.")


class OnPolicyDistill(Rollouts, TaughtByDivergence):
    """The model samples, and learns what the teacher thinks of each token (arXiv:2306.13649, GKD)."""

    kind: Literal["on_policy_distill"] = Field(
        description="On-policy distillation: a teacher scores the completions of the model that trains."
    )
    teacher: str = Field(description=f"{OR_ITSELF}.", examples=[A_TEACHER])
    num_generations: PositiveInt = key(1, "Completions per prompt.")


# By kind. Installed packages add theirs before the schema is built.
OBJECTIVE_SECTIONS = OpenTable[type[ObjectiveSection]](
    {
        "pretrain": Pretrain,
        "sft": Sft,
        "dpo": Preference,
        "ipo": Preference,
        "simpo": SimPo,
        "orpo": OrPo,
        "kto": Kto,
        "reward": Reward,
        "distill": Distill,
        "on_policy_distill": OnPolicyDistill,
        "grpo": Grpo,
        "rloo": Rloo,
        "ppo": Ppo,
    }
)


def any_objective() -> Any:
    """The type of one of these sections, chosen by its kind; none can be added from then on."""
    OBJECTIVE_SECTIONS.close()
    sections = tuple(dict.fromkeys(OBJECTIVE_SECTIONS.values()))
    return Annotated[Union[sections], Field(discriminator="kind")]  # noqa: UP007 (a tuple)
