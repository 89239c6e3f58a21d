"""The report on a plan: checked claims, warnings, suggestions, the longest sequence, disk and energy.

The claims of a recipe are checked against a plan's arithmetic, or against a run's measurements.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bloomery.core.errors import UserError
from bloomery.core.units import (
    GIB,
    Duration,
    counted,
    format_bytes,
    format_count,
    format_seconds,
    two_digits,
)
from bloomery.data.tokenizer.templates import NOT_OWN
from bloomery.facts.config import ModelConfig
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.hardware.doctor.settings import idle_settings
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, build_profile
from bloomery.hardware.vendors import VENDORS
from bloomery.plan import mesh
from bloomery.plan.batch import Measure, small_chunk
from bloomery.plan.checkpoints import (
    checkpoint_bytes,
    interval_text,
    kill_cost,
    planned_save,
    uncounted_interval,
    weights_bytes,
)
from bloomery.plan.choices import ineffective_settings, reference_of, teacher_of
from bloomery.plan.estimate.experts import filling_tokens
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.estimate.pinned import pinned_parts
from bloomery.plan.estimate.speed import Rate
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.gather import Facts
from bloomery.plan.layout import DeviceWorkload
from bloomery.plan.learning_rates import far_rates
from bloomery.plan.lengths import too_many_epochs
from bloomery.plan.pipeline import bubble
from bloomery.plan.resolve import resolve, step_shape
from bloomery.plan.rollouts import RolloutMoments
from bloomery.plan.streaming import small_host
from bloomery.plan.types import (
    DatasetFacts,
    Estimate,
    Fit,
    MaxLength,
    PlanReport,
    RunPlan,
    Suggestion,
    Verdict,
)
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.objectives import RewardedRollouts, Rollouts
from bloomery.recipe.schema import Checkpoint, Claims, Lora, Recipe
from bloomery.recipe.values import ClaimedRange, write_duration

ROUNDING = 0.05  # "10B tokens" is a round figure
Need = Callable[[int], float]  # bytes of a step, by micro-batch size
Claim = (
    Literal["tokens", "epochs", "tokens_per_second", "duration", "step_time", "memory"] | Duration
)  # when a perplexity is reached


@dataclass(frozen=True)
class KnownRange:
    """A figure or the range of an estimate, with the reason of a verdict.

    A claim outside the range is wrong; a claim inside `nearness` times the range is low or high. `otherwise` gives the
    reason of a verdict other than "ok".
    """

    low: float
    high: float
    reason: str
    otherwise: Callable[[str], str] | None = None
    slack: float = ROUNDING
    nearness: float = 1.0


def compare_claims(
    expected: Claims, figure_of: Callable[[Claim, ClaimedRange], KnownRange | str]
) -> tuple[Verdict, ...]:
    """Every claim of a recipe in the order of its keys.

    `figure_of` gives a reason where a claim cannot be checked yet.
    """

    def written(claimed: ClaimedRange, write: Callable[[float], str]) -> str:
        low_text, high_text = (write(end) for end in claimed)
        return low_text if low_text == high_text else f"{low_text} to {high_text}"

    def plain(value: float) -> str:
        return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"

    claims: list[tuple[Claim, ClaimedRange, str]] = []
    if expected.tokens is not None:
        claims.append(
            ("tokens", expected.tokens, f"{written(expected.tokens, format_count)} tokens")
        )
    if expected.epochs is not None:
        claims.append(("epochs", expected.epochs, f"{written(expected.epochs, plain)} epochs"))
    if (speed := expected.tokens_per_second) is not None:
        claims.append(("tokens_per_second", speed, f"{written(speed, plain)} tokens/s"))
    if expected.duration is not None:
        claims.append(("duration", expected.duration, span(expected.duration, trimmed=True)))
    for step_time in expected.step_time:
        claims.append(("step_time", step_time, f"{span(step_time, trimmed=True)} per step"))
    if expected.memory is not None:
        gigabytes = written(expected.memory, lambda value: f"{value / 1e9:.3g}")
        claims.append(("memory", expected.memory, f"{gigabytes} GB"))
    for moment, perplexity in expected.perplexity.items():
        claims.append((moment, perplexity, f"perplexity {written(perplexity, plain)} at {moment}"))

    verdicts = []
    for claim, (low, high), text in claims:
        figure = figure_of(claim, (low, high))
        if isinstance(figure, str):
            verdicts.append(Verdict(claim=text, verdict="unknown", reason=figure))
            continue
        verdict: Literal["ok", "low", "high", "wrong"] = "wrong"
        if high * (1 + figure.slack) >= figure.low and low * (1 - figure.slack) <= figure.high:
            verdict = "ok"
        elif high * figure.nearness >= figure.low and low <= figure.high * figure.nearness:
            verdict = "low" if high < figure.low else "high"
        reason = (
            figure.reason
            if verdict == "ok" or figure.otherwise is None
            else figure.otherwise(verdict)
        )
        verdicts.append(Verdict(claim=text, verdict=verdict, reason=reason))
    return tuple(verdicts)


def check_claims(
    expected: Claims, plan: RunPlan, *, dataset: DatasetFacts | None, need: Need
) -> tuple[Verdict, ...]:
    """The claims against the plan's arithmetic, before the run."""
    timed = "known once the first steps are measured"
    open_length = timed if plan.train.seconds is not None else "known once the dataset is prepared"

    def figure_of(claim: Claim, claimed: ClaimedRange) -> KnownRange | str:
        match claim:
            case "tokens":
                unknown = plan.total_tokens is None or plan.train.steps is None
                return open_length if unknown else _tokens(claimed, plan)
            case "epochs":
                return _epochs(claimed, plan, dataset, open_length)
            case "tokens_per_second":
                return _speed(claimed, plan)
            case "duration":
                if plan.seconds is None:
                    return "the step time of this device is unknown"
                low = plan.seconds.low
                high = plan.seconds.high
                relation = "within" if claimed[0] >= low and claimed[1] <= high else "overlaps"
                planned = span((low, high))
                return KnownRange(
                    low,
                    high,
                    f"{relation} {planned}",
                    lambda _: f"the run takes {planned}",
                    slack=0.0,
                    nearness=1e30,
                )
            case "step_time":
                if plan.step_seconds is None:
                    return "the step time of this device is unknown"
                planned = format_seconds(plan.step_seconds.value)
                low = plan.step_seconds.low
                high = plan.step_seconds.high
                reason = f"planned {planned}, {span((low, high), trimmed=True)}"
                return KnownRange(low, high, reason, slack=0.0, nearness=3.0)
            case "memory":
                total = plan.memory.total
                sequences = plan.train.micro_batch_size
                reason = f"{total / GIB:.1f} GiB at micro-batch {sequences}"

                def otherwise(_: str) -> str:
                    return reason + (
                        f"; micro-batch 1 needs about {need(1) / GIB:.1f}" if sequences > 1 else ""
                    )

                return KnownRange(total, total, reason, otherwise, nearness=1e30)
        vocabulary = plan.model.config.vocab_size
        steps = plan.train.steps
        if claimed[0] > vocabulary:
            return KnownRange(
                0.0,
                vocabulary,
                f"a random guess among {vocabulary:,} tokens has perplexity {vocabulary:,}",
                slack=0.0,
            )
        if claim.unit == "steps" and steps is not None and claim.amount > steps:
            return KnownRange(math.inf, math.inf, f"the run ends at step {steps:,}")
        return "only a run can measure this; its report shows it"

    return compare_claims(expected, figure_of)


def _tokens(claimed: ClaimedRange, plan: RunPlan) -> KnownRange:
    assert plan.total_tokens is not None
    tokens = plan.total_tokens
    length = plan.data.sequence_length
    tokens_per_step = round(plan.trained_tokens_per_step)
    factors = f"{tokens_per_step // length:,} x {length:,}"
    if plan.rollout is not None:
        factors = f"about {tokens_per_step:,}"
    product = f"{plan.train.steps:,} x {factors} = {format_count(tokens)}"
    steps = -(-int(claimed[0]) // tokens_per_step)
    remark = f"{product}; {format_count(claimed[0])} are {steps:,} steps"
    if plan.step_seconds is not None:
        remark += f", {format_seconds(plan.step_seconds.value * steps)}"
    return KnownRange(tokens, tokens, product, lambda _: remark)


def _epochs(
    claimed: ClaimedRange, plan: RunPlan, dataset: DatasetFacts | None, open_length: str
) -> KnownRange | str:
    if plan.total_tokens is None:
        length = plan.lengths.train if plan.lengths is not None else None
        if length is None or length.unit != "epochs":
            return open_length
        return KnownRange(
            length.amount, length.amount, f"train.epochs is {length.amount:g}", slack=0.0
        )
    if dataset is None:
        size = format_count(plan.total_tokens / claimed[0]) if claimed[0] else "no"
        return f"true for a dataset of {size} tokens; none is prepared"
    epochs = plan.total_tokens / (dataset.sequences_per_epoch * plan.data.sequence_length)
    reason = f"{format_count(plan.total_tokens)} tokens are {epochs:.2g} epochs of {format_count(dataset.tokens)}"
    return KnownRange(epochs, epochs, reason, slack=ROUNDING + dataset.spread)


def _speed(claimed: ClaimedRange, plan: RunPlan) -> KnownRange | str:
    if plan.step_seconds is None:
        return "the speed of this device is unknown"
    rate = plan.step_seconds.inverse(plan.trained_tokens_per_step)
    planned = f"{two_digits(rate.low)} to {two_digits(rate.high)} tokens/s"

    def otherwise(verdict: str) -> str:
        """The answer to a claim that the plan does not confirm: to a wrong speed the time of the whole run."""
        if verdict != "wrong":
            return f"outside {planned}"
        if plan.total_tokens is None:
            return f"the plan estimates {planned}"
        time = roughly(plan.total_tokens / max(claimed[1], 1e-9))
        return f"{format_count(plan.total_tokens)} tokens would take {time}"

    return KnownRange(rate.low, rate.high, f"within {planned}", otherwise, slack=0.0, nearness=3.0)


def span(ends: ClaimedRange, *, trimmed: bool = False) -> str:
    """ "4.0 to 8.0 days": the unit once where both ends have the same. `trimmed`: whole numbers without ".0"."""
    low, high = (format_seconds(end) for end in ends)
    if trimmed and all(re.search(r"\.0 |^[\d,]+ ", text) for text in (low, high)):
        low, high = (text.replace(".0 ", " ") for text in (low, high))
    if low == high:
        return low
    low_number, _, low_unit = low.partition(" ")
    high_unit = high.partition(" ")[2]
    return f"{low_number} to {high}" if low_unit == high_unit else f"{low} to {high}"


def roughly(seconds: float) -> str:
    """Ten or more of a unit need no decimals: "20 years"."""
    number, _, unit = format_seconds(seconds).partition(" ")
    return (
        f"{number} {unit}"
        if unit == "years" or float(number) < 10
        else f"{float(number):.0f} {unit}"
    )


STEP = 256  # tokens: the resolution of the maximum sequence length
MOST = 2**22
TOKEN_BYTES = 2  # an id below 65,536 in a shard; 4 above
REFERENCE_BYTES = 4  # of a token, in `data.reference_scores`
PlanOf = Callable[[str], RunPlan | None]
WORTH = 0.9  # of the time: an edit that saves less than a tenth is not suggested
# Share of the memory: shorter sequences that save less and are not enough are not suggested.
LITTLE = 0.05
NO_DROPOUT = "model.dropout=0"
SHORTEST = 256  # tokens of a sequence that a plan suggests
SHORTEST_COMPLETION = 16


def advise(loaded_recipe: LoadedRecipe, plan: RunPlan, facts: Facts) -> PlanReport:
    """The plan, with the edits that make it fit, and its report."""
    recipe = loaded_recipe.recipe
    profile = facts.profile
    step, measure, parts = _planned_step(plan, facts.model, facts.machine, profile, facts.teacher)
    gpus = 1 if plan.parallel is None else plan.parallel.gpus
    nodes = 1 if plan.parallel is None else plan.parallel.nodes

    def plan_of(edit: str) -> RunPlan | None:
        """None where the edit contradicts the rest of the recipe."""
        try:
            changed_recipe = edited(loaded_recipe, edit)
            config = facts.config
            if edit == NO_DROPOUT:
                config = replace(
                    config, embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0
                )
            return resolve(
                changed_recipe, facts.edited(changed_recipe.recipe, config), gpus=gpus, nodes=nodes
            )
        except UserError:
            return None

    suggestions = tuple((_faster if plan.fits else _to_fit)(recipe, plan, plan_of))
    if not plan.fits:
        plan = plan.model_copy(update={"suggestions": tuple(fix.edit for fix in suggestions)})
    verdicts = _verdicts(recipe.claims, plan, step, measure)
    save = planned_save(plan, step.model)
    train = plan.train
    pinned = pinned_parts(
        step, shard=train.shard, pipeline=train.pipeline, accumulation=train.accumulation
    )
    return PlanReport(
        plan=plan,
        claims=verdicts,
        warnings=(
            *warnings(recipe, plan, facts, verdicts),
            *_few_tokens(step, StepEstimator.of(plan, facts.machine, facts.profile).rate(step)),
            *_host_memory(facts.machine, gpus, sum(pinned.values()), save.host_bytes),
        ),
        suggestions=suggestions,
        max_length=_longest(step, measure) if profile.accelerator else None,
        step_parts=(parts or {}) if plan.rollout is None else plan.rollout.seconds,
        disk=_disk_bytes(recipe, plan, step),
        save=save,
        kill=kill_cost(plan),
        pinned=pinned,
        energy_kwh=energy_kwh(plan, profile),
    )


def claims_of(plan: RunPlan, expected: Claims, machine: Machine) -> tuple[Verdict, ...]:
    """The claims of a run's recipe against its plan, as `bloomery plan` checks them."""
    model = TrainedModel.of(plan, plan.model.config)
    step, measure, _ = _planned_step(plan, model, machine, build_profile(machine), teacher_of(plan))
    return _verdicts(expected, plan, step, measure)


def _verdicts(
    expected: Claims, plan: RunPlan, step: StepShape, measure: Measure
) -> tuple[Verdict, ...]:
    def need(sequences: int) -> float:
        return measure(replace(step, micro_batch_size=sequences)).total

    return check_claims(expected, plan, dataset=plan.dataset, need=need)


def energy_kwh(plan: RunPlan, profile: Profile) -> float | None:
    """At the boards' rated power all the time; None where it or the time is unknown."""
    seconds = plan.seconds
    gpus = [peer.gpu for peer in profile.peers] or [profile.gpu] * plan.num_gpus
    watts = [gpu.board_watts for gpu in gpus if gpu is not None and gpu.board_watts]
    if len(watts) < len(gpus) or seconds is None:
        return None
    return sum(watts) * seconds.value / 3.6e6


def _planned_step(
    plan: RunPlan,
    model: TrainedModel,
    machine: Machine,
    profile: Profile,
    teacher: ModelConfig | None,
) -> tuple[StepShape, Measure, dict[str, Estimate] | None]:
    """The step on one device, the peak of a run of any steps like it, and its seconds by operation."""
    train = plan.train
    parallel = plan.parallel
    plain = step_shape(
        plan,
        model,
        profile,
        plan.dataset,
        teacher,
        precision=train.precision,
        attention=plan.model.attention,
    )
    step = replace(
        plain,
        compiled=train.compile,
        micro_batch_size=train.micro_batch_size,
        checkpointing=train.activation_checkpointing,
        score_chunk=plan.model.score_chunk,
        accumulating=train.accumulation > 1 and not plain.mode.fused_backward,
        context=train.context,
        stream=train.stream,
        stream_micro_batches=train.stream_micro_batches,
        stream_host=train.stream_host,
        ranks_per_scorer=(1 if parallel is None else parallel.gpus) / max(1, train.scoring_devices),
    )
    estimator = StepEstimator.of(plan, machine, profile)
    moments = RolloutMoments.of_plan(plan, step)
    sequences_per_step = train.tokens_per_step // plan.data.sequence_length
    if parallel is None:
        on_device = DeviceWorkload(
            estimator=estimator, sequences_per_step=sequences_per_step, rollout_moments=moments
        )
        return step, on_device.peak, estimator.step_parts(step, train.tokens_per_step)
    layout = parallel.layout
    split = MeshSplit.of(layout)
    workload = mesh.MeshWorkload.of(
        machine,
        profile,
        step,
        estimator,
        sequences_per_step=sequences_per_step,
        gpus=parallel.gpus,
        nodes=parallel.nodes,
        assumed_network=parallel.assumed_network,
        rollout_moments=moments,
    )
    sequences = layout.accumulation * layout.micro_batch_size  # of one rank
    return step, workload.memory(split), mesh.layout_parts(workload, split, step, sequences)


def _longest(step: StepShape, measure: Measure) -> MaxLength:
    """At micro-batch 1, logits in chunks; 0 where not even `STEP` tokens fit."""

    def fits(length: int, checkpointing: str) -> bool:
        """In micro-batches of one sequence, whose vocabulary is scored in small chunks."""
        config = step.config
        # they grow with the sequence
        if config.positions == "learned" and length > config.max_positions:
            config = replace(config, max_positions=length)
        model = replace(step.model, config=config)
        row = replace(
            step,
            model=model,
            sequence_length=length,
            micro_batch_size=1,
            checkpointing=checkpointing,
        )
        return measure(replace(row, score_chunk=min(small_chunk(row), length))).fits

    def search(checkpointing: str) -> int:
        return STEP * bisect_left(
            range(1, MOST // STEP), True, key=lambda n: not fits(n * STEP, checkpointing)
        )

    return MaxLength(as_planned=search(step.checkpointing), checkpointed=search("full"))


def _disk_bytes(recipe: Recipe, plan: RunPlan, step: StepShape) -> dict[str, float]:
    """Shards of the dataset, checkpoints of the trainable parameters (those kept, the best, the one being written; the
    best weights as of each where evaluations come between them), and the reference log-probabilities where they are
    precomputed.
    """
    dataset = plan.dataset
    claimed = recipe.claims.epochs
    config = step.config
    tokens = None if dataset is None else dataset.tokens
    if dataset is None and plan.total_tokens and claimed and claimed[0]:  # as the claims imply
        tokens = round(plan.total_tokens / claimed[0])
    one_checkpoint = checkpoint_bytes(plan, step.model)
    weights = weights_bytes(step.model, step.precision, step.pictures)
    bytes_factor = 1 if config.vocab_size <= 65536 else 2
    disk = {} if tokens is None else {"shards": float(tokens * TOKEN_BYTES * bytes_factor)}
    disk |= {
        "checkpoint": one_checkpoint,
        "checkpoints": one_checkpoint * (recipe.checkpoint.keep + 2),
    }
    evaluates = plan.eval.every_steps
    saves = plan.checkpoint.every_steps
    # Some of the best evaluations have no checkpoint.
    if evaluates is not None and not (
        plan.checkpoint.at_best or (saves is not None and evaluates % saves == 0)
    ):
        disk["best_weights"] = weights
        disk["checkpoints"] += weights * recipe.checkpoint.keep
    if (
        dataset is not None
        and reference_of(recipe.objective, recipe.adapter, recipe.vision.train).value
        == "precomputed"
    ):
        disk["reference"] = float(REFERENCE_BYTES * dataset.tokens)
    return disk


def edited(loaded_recipe: LoadedRecipe, edit: str) -> LoadedRecipe:
    """The recipe with overrides ("train.micro_batch_size=8 optimizer.kind=muon"), as on the command line."""
    data = loaded_recipe.recipe.model_dump(by_alias=True)
    for word in edit.split():
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        data[section][name] = int(value) if value.isdigit() else value
    return LoadedRecipe(Recipe.model_validate(data), loaded_recipe.name, loaded_recipe.provenance)


def _to_fit(recipe: Recipe, plan: RunPlan, plan_of: PlanOf) -> Iterator[Suggestion]:
    """Edits that each make the plan fit, shorter sequences last; or every edit, and the fewest that fit together."""
    # By key: the first edit that fits, else the one that saves most.
    best: dict[str, tuple[str, str, RunPlan]] = {}
    for edit, cost in _ladder(recipe, plan):
        changed_plan = plan_of(edit)
        key = edit.partition("=")[0]
        if changed_plan is None:
            continue
        remaining_share = changed_plan.memory.total / plan.memory.total
        saves_little = (
            key == "data.sequence_length" and remaining_share > 1 - LITTLE and not changed_plan.fits
        )
        if remaining_share >= 1 or saves_little:
            continue
        previous = best[key][2] if key in best else None
        if previous is None or (
            not previous.fits and changed_plan.memory.total < previous.memory.total
        ):
            best[key] = edit, cost, changed_plan
    sufficient = {key: suggestion for key, suggestion in best.items() if suggestion[2].fits}
    other_edits = {
        key: suggestion for key, suggestion in sufficient.items() if key != "data.sequence_length"
    }
    # Shorter sequences are another training, so they come last; in fine-tuning the length is your choice too.
    suggested = sufficient if recipe.model.from_ is not None else other_edits
    for edit, cost, changed_plan in (suggested or sufficient or best).values():
        yield _with_less_memory(edit, plan, changed_plan, cost)
    edits = [edit for edit, _, _ in best.values()]
    for count in range(2, 0 if sufficient else len(edits) + 1):
        combined_edit = " ".join(edits[:count])
        combined_plan = plan_of(combined_edit)
        if combined_plan is not None and combined_plan.fits:
            yield _with_less_memory(combined_edit, plan, combined_plan, "all of these together")
            return


def _with_less_memory(edit: str, plan: RunPlan, changed_plan: RunPlan, cost: str) -> Suggestion:
    saved = format_bytes(plan.memory.total - changed_plan.memory.total)
    fit = fit_of(changed_plan)
    words = {"fits, barely": "barely fits", "does not fit": "still does not fit"}.get(fit, fit)
    text = f"{saved}: {format_bytes(changed_plan.memory.total)} in total, {words}; {cost}"
    return Suggestion(edit=edit, saves=text, fit=fit)


def _ladder(recipe: Recipe, plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Edits from cheap to expensive, each with its cost."""
    train = plan.train
    settings = recipe.train
    optimizer = recipe.optimizer
    adapter = recipe.adapter.kind
    sequences = train.micro_batch_size
    gpu = train.device != "cpu"
    while settings.micro_batch_size != "auto" and sequences % 2 == 0:
        sequences //= 2
        yield f"train.micro_batch_size={sequences}", "same training"
    if train.activation_checkpointing not in ("full", "selective"):
        yield "train.activation_checkpointing=selective", "costs a sixth more compute"
    if train.activation_checkpointing != "full":
        yield "train.activation_checkpointing=full", "costs a third more compute"
    # One sequence is the smallest micro-batch, and devices may share it. Where they cannot, nothing is planned.
    context = 2 * train.context
    asks_for_stages = recipe.parallel.pipeline not in (1, "auto")
    while train.micro_batch_size == 1 and not asks_for_stages and context <= train.ranks:
        yield f"parallel.context={context}", "same training; devices wait for each other's heads"
        context *= 2
    # Experts are most of a mixture: devices with copies of them may divide them, and shards need not gather them.
    size = train.shard if train.shard > 1 else train.ranks_per_stage
    if plan.model.config.experts is not None and train.expert == 1 and size > 1:
        yield (
            f"parallel.expert={size}",
            "same training; devices wait for rows on their way to experts",
        )
    if settings.precision == "float32" and gpu:
        yield "train.precision=auto", "matmuls in half precision"
    if (
        isinstance(plan.objective, RewardedRollouts)
        and reference_of(recipe.objective, recipe.adapter, recipe.vision.train).value == "copy"
    ):
        if gpu and plan.parallel is None and plan.objective.reference == "device":
            yield "objective.reference=host", "moves each layer of the reference model to the GPU"
        if plan.objective.reference != "nf4":
            yield "objective.reference=nf4", "the KL divergence is measured from a 4-bit copy"
    teacher = plan.objective.taught_by
    if teacher is not None and teacher.quantize == "none":
        yield "objective.teacher_quantize=nf4", "the teacher's probabilities change a little"
    if teacher is not None and teacher.stream == "off" and gpu:
        yield (
            "objective.teacher_stream=layers",
            "same losses; copies the teacher's layers once per step",
        )
    # Optimizer states, activations or frozen weights in fewer bits, or in CPU memory.
    if gpu and not settings.offload_activations:
        yield "train.offload_activations=true", "moves activations to CPU memory and back"
    if gpu and train.stream == "off":
        yield "parallel.stream=layers", "same training; copies each layer from CPU memory"
    if "state_dtype" in OPTIMIZERS[optimizer.kind].settings and optimizer.state_dtype == "float32":
        yield "optimizer.state_dtype=int8", "8-bit optimizer states; nearly the same training"
    if adapter in ("lora", "dora") and recipe.quantize.kind == "none":
        yield "quantize.kind=nf4", "4-bit frozen weights; costs time and some accuracy"
    if adapter == "dora" and plan.parallel is not None:
        yield "adapter.kind=lora", "changes the training: no magnitudes; shards do not support DoRA"
    if adapter == "none" and recipe.model.from_ is not None:
        yield (
            "adapter.kind=lora",
            "changes the training: only adapters are trainable, the weights are frozen",
        )
    yield from _smaller_rollouts(recipe)
    # With a fused backward a step is one micro-batch: a smaller step, or gradient accumulation.
    if optimizer.fused_backward and not settings.auto_batch:
        tokens = train.tokens_per_step
        while tokens % (2 * plan.data.sequence_length) == 0:
            tokens //= 2
            yield f"train.tokens_per_step={tokens}", "changes the training: fewer tokens per step"
        yield (
            "optimizer.fused_backward=false",
            "keeps gradients, so that gradient accumulation works",
        )
    if adapter == "none":
        for kind in OPTIMIZERS[optimizer.kind].smaller:
            yield (
                f"optimizer.kind={kind}",
                "changes the optimizer: choose its learning rate again",
            )
    if train.precision == "bfloat16":
        yield (
            "train.precision=bfloat16-pure",
            "bfloat16 weights: small updates are lost to rounding",
        )
    length = plan.data.sequence_length
    while length > SHORTEST and train.tokens_per_step % (length // 2) == 0:
        length //= 2
        yield (
            f"data.sequence_length={length}",
            f"changes the training: no sequence is longer than {length:,} tokens",
        )


def _smaller_rollouts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Edits that need fewer or shorter slots while completions are sampled."""
    objective = recipe.objective
    if not isinstance(objective, Rollouts):
        return
    length = objective.max_completion_length
    while length > SHORTEST_COMPLETION:
        length //= 2
        yield (
            f"objective.max_completion_length={length}",
            f"changes the training: completions are cut after {length:,} tokens",
        )
    group = objective.num_generations
    completions = recipe.train.batch_size or 0
    while completions % (2 * group) == 0 and completions > group:
        completions //= 2
        yield f"train.batch_size={completions}", "changes the training: fewer prompts per step"
    while completions == group and group % 2 == 0 and group > 2:
        group //= 2
        completions //= 2
        yield (
            f"objective.num_generations={group} train.batch_size={completions}",
            "changes the training: fewer completions to compare with",
        )


def fit_of(plan: RunPlan) -> Fit:
    """Whether the upper end of the memory's range fits too, and what `train` can still do where it does not: an
    out-of-memory error halves the micro-batch, down to one sequence.
    """
    if not plan.fits:
        return "does not fit"
    if plan.memory.high <= plan.memory.limit:
        return "fits"
    return "fits, barely" if plan.train.micro_batch_size > 1 else "may not fit"


def _faster(recipe: Recipe, plan: RunPlan, plan_of: PlanOf) -> Iterator[Suggestion]:
    """Settings of the recipe that cost time, where the plan's own choice is faster and fits."""
    step_seconds = plan.step_seconds
    if step_seconds is None:
        return
    settings = recipe.train
    keys = [
        k
        for k in (
            "activation_checkpointing",
            "precision",
            "attention",
            "compile",
            "micro_batch_size",
        )
        if getattr(settings, k) != "auto"
    ]
    edits = [f"train.{key}=auto" for key in keys]
    # Fused attention has no dropout on packed sequences.
    if plan.model.config.attention_dropout and settings.attention == "auto":
        edits = [NO_DROPOUT, *edits]
    # What streams may fit in 4 bits, where nothing waits for copies and less is computed again.
    in_4_bits = "quantize.kind=nf4"
    if plan.stream is not None and recipe.adapter.kind in ("lora", "dora"):
        edits += [in_4_bits] if recipe.quantize.kind == "none" else []
    for edit in edits:
        changed_plan = plan_of(edit)
        if changed_plan is None or not changed_plan.fits or changed_plan.step_seconds is None:
            continue
        kernel = edit != NO_DROPOUT or changed_plan.model.attention != plan.model.attention
        if kernel and changed_plan.step_seconds.value < WORTH * step_seconds.value:
            saves = f"{1 - changed_plan.step_seconds.value / step_seconds.value:.0%} of the time"
            if plan.seconds is not None and changed_plan.seconds is not None:
                saves += f": {format_seconds(plan.seconds.value - changed_plan.seconds.value)}"
            if edit == NO_DROPOUT:
                saves += "; changes the training: overfits sooner on repeated data"
            if edit == in_4_bits:
                saves += "; 4-bit frozen weights cost some accuracy"
            fit = fit_of(changed_plan)
            if fit != "fits":
                memory = changed_plan.memory
                high = f"up to {memory.high / GIB:.1f} of {memory.limit / GIB:.1f} GiB"
                saves += f"; {fit}: {high}"
            yield Suggestion(edit=edit, saves=saves, fit=fit)


def warnings(
    recipe: Recipe, plan: RunPlan, facts: Facts, verdicts: Sequence[Verdict]
) -> Iterator[str]:
    """One sentence each: contradictions of the recipe, settings without effect. None of them stops a run."""
    profile = facts.profile
    yield from facts.unrun
    yield from _shared_memory(profile)
    yield from _claims(recipe, plan, verdicts)
    if recipe.train.min_steps is not None and plan.train.seconds is None:
        yield f"train.min_steps has no effect: train.{recipe.train.length_key} sets the length, not train.max_time"
    if (repeated := too_many_epochs(plan)) is not None:
        yield repeated
    yield from far_rates(recipe, facts.config)
    yield from _lengths(plan)
    padding = plan.train.empty_sequences
    sequences = plan.train.sequences_per_step
    if padding > mesh.PADDED_SHARE * sequences:
        full_batch = -(-sequences // plan.train.data_parallel) * plan.train.data_parallel
        uneven = mesh.undivided(sequences, plan.train.readers)
        idle = f"{padding / (padding + sequences):.0%} of what they compute is padding"
        yield f"{uneven}: {idle}; train.batch_size={full_batch} would use all of them, and is another training run"
    if plan.train.accumulation < plan.train.pipeline:
        waiting = bubble(
            stages=plan.train.pipeline,
            micro_batches=plan.train.accumulation,
            chunks=plan.train.pipeline_chunks,
        )
        micro_batches = counted(plan.train.accumulation, "micro-batches")
        verb = "does" if plan.train.accumulation == 1 else "do"
        unfilled = f"{micro_batches} per step {verb} not fill {plan.train.pipeline} stages"
        yield f"{unfilled}: each waits {waiting:.0%} of the time; use smaller micro-batches or a larger batch"
    yield from small_host(recipe, plan)
    dataset = plan.dataset
    length = plan.data.sequence_length
    if dataset is not None and dataset.template.endswith(NOT_OWN):
        yield f"the chat template is {dataset.template}: the model may not know its markup"
    if dataset is not None and dataset.unreadable:
        yield dataset.unreadable
    if dataset is not None and dataset.left_out:
        dropped = counted(dataset.left_out, "examples")
        yield f"{dropped} dropped: all labels within {length:,} tokens are masked"
    if dataset is not None and dataset.cut_short:
        yield f"{counted(dataset.cut_short, 'examples')} truncated: longer than data.sequence_length={length}"
    # The product of an adapter's two matrices has at most the rank of the weight.
    if isinstance(recipe.adapter, Lora):
        model = facts.model
        shapes = model.shapes
        too_high = {
            name: (rank, most)
            for name, rank in model.mode.target_modules
            if rank > (most := min((shapes.get(f"{name}.weight") or shapes[name])[-2:]))
        }
        if too_high:
            name = min(too_high, key=lambda matrix: too_high[matrix][1])
            rank, most = too_high[name]
            bound = f"{name} has at most rank {most:,}"
            yield f"adapter.rank is {rank:,}, but {bound}: a higher rank only costs memory and time"
    yield from _settings(recipe, profile)
    # Environment variables without effect on this device, or that slow it down or harm.
    yield from (
        str(effect) for effect in idle_settings(facts.machine, profile) if effect.kind != "works"
    )
    device = profile.accelerator is not None
    yield from ineffective_settings(recipe, accelerator=device, precision=plan.train.precision)


def _few_tokens(step: StepShape, rate: Rate | None) -> Iterator[str]:
    """Where a device reads experts for longer than it computes with them."""
    experts = step.config.experts
    if experts is None or rate is None or rate.bandwidth is None or not step.on_gpu:
        return
    _, share, _ = rate.share
    tokens = step.tokens_per_micro_batch
    filling = filling_tokens(
        step, experts, flops=rate.peak * share, bandwidth=rate.bandwidth * rate.bandwidth_share[1]
    )
    if tokens < filling:
        expert_tokens = tokens * experts.per_token / experts.count
        yield (
            f"each of {experts.count} experts gets about {expert_tokens:,.0f} of a micro-batch's {tokens:,} tokens:"
            " reading its weights takes longer than computing with them;"
            f" {filling:,} tokens in a micro-batch fill the GPU"
        )


def _shared_memory(profile: Profile) -> Iterator[str]:
    """Of a GPU that is planned for and not trained on: what is missing, and what its memory is."""
    device = profile.accelerator
    facts = None if device is None else VENDORS[device.vendor]
    if device is None or facts is None or not facts.missing:
        return
    yield f"planned, not trained: {facts.missing}; `bloomery train` uses the CPU on such a machine"
    if device.integrated:
        share = f"about {facts.shared_part:.0%} of it, {device.usable_bytes / GIB:.0f} GiB"
        yield f"unified memory: CPU and GPU have one, and the system lets the GPU use {share}"


def _host_memory(
    machine: Machine, gpus: int, pinned_bytes: float, save_bytes: float
) -> Iterator[str]:
    """Of a node: what its ranks pin cannot be swapped out. Where they pin nothing, nothing is said of a save."""
    needed = gpus * (pinned_bytes + save_bytes)
    if pinned_bytes and needed > machine.host.memory_bytes:
        parts = f"{format_bytes(gpus * pinned_bytes)} pinned and {format_bytes(gpus * save_bytes)} of a save"
        yield f"host memory: a node of {format_bytes(machine.host.memory_bytes)} needs {parts}; offload less"


def _claims(recipe: Recipe, plan: RunPlan, verdicts: Sequence[Verdict]) -> Iterator[str]:
    claims = recipe.claims
    wrong_claims = [verdict for verdict in verdicts if verdict.verdict == "wrong"]
    if (
        claims.tokens
        and plan.total_tokens
        and any(verdict.claim.endswith(" tokens") for verdict in wrong_claims)
    ):
        planned = format_count(plan.total_tokens)
        claimed = format_count(claims.tokens[0])
        yield f"train.{recipe.train.length_key} trains on {planned} tokens, claims.tokens is {claimed}"
    if claims.tokens and claims.tokens_per_second and claims.duration:
        fastest = claims.tokens[0] / max(claims.tokens_per_second[1], 1e-9)
        slowest = claims.tokens[1] / max(claims.tokens_per_second[0], 1e-9)
        if fastest > 2 * claims.duration[1] or 2 * slowest < claims.duration[0]:
            tokens = format_count(claims.tokens[0])
            rate = format_count(claims.tokens_per_second[1])
            duration = roughly(fastest)
            result = (
                f"{tokens} tokens at {rate} tokens/s take {duration}, not {span(claims.duration)}"
            )
            yield f"the claims contradict each other: {result}"


def _lengths(plan: RunPlan) -> Iterator[str]:
    step = plan.step_seconds
    yield from _costly_kill(plan)
    max_seconds = plan.train.seconds
    if step is not None and max_seconds is not None and max_seconds < step.value:
        step_text = format_seconds(step.value)
        minimum = counted(plan.train.min_steps or 1, "steps")
        limit = format_seconds(max_seconds)
        yield f"train.max_time is {limit}, but one step takes about {step_text}: the run takes {minimum}"
    steps = plan.train.steps
    warmup = plan.optimizer.warmup_steps
    decay = plan.optimizer.decay_steps
    if steps is None:
        return
    if warmup >= steps:
        lasts = f"{counted(warmup, 'steps')} and the run {steps:,}: the learning rate never reaches its peak"
        yield f"optimizer.warmup lasts {lasts}; shorten it, or train longer"
    elif warmup + decay > steps:
        yield f"warmup and decay last {warmup + decay:,} steps together, more than the run's {steps:,}"
    if plan.eval.every_steps is not None and plan.eval.every_steps > steps:
        yield f"eval.every is {plan.eval.every_steps:,} steps, the run ends after {steps:,}: evaluated only at the end"


def _costly_kill(plan: RunPlan) -> Iterator[str]:
    """Where a kill may lose a run of more than the default interval: the recipe sets another one."""
    default = Checkpoint().every
    kill = kill_cost(plan)
    is_short = kill.seconds is not None and kill.seconds <= default.amount
    if kill.whole_run and not is_short and not plan.checkpoint.at_best:
        loss = "" if kill.seconds is None else f", {roughly(kill.seconds)}"
        end = "" if kill.steps is None else f", the run ends after {kill.steps:,}"
        every = interval_text(plan.checkpoint, uncounted_interval(plan))
        yield (
            f"checkpoint.every is {every}{end}: a kill loses the whole run{loss};"
            f" set checkpoint.every={write_duration(default)}"
        )


def _settings(recipe: Recipe, profile: Profile) -> Iterator[str]:
    precision = recipe.train.precision
    arch = profile.arch
    if profile.accelerator is None:
        if precision == "float16":
            yield "train.precision is float16: a CPU multiplies float16 five to nine times slower than float32"
        if precision.startswith("bfloat16") and not (profile.cpu and profile.cpu.bf16):
            yield f"train.precision is {precision}: this CPU has no bf16 instructions, float32 is faster"
        if recipe.data.pin_memory is True:
            yield "data.pin_memory has no effect on a CPU"
    elif precision.startswith("bfloat16") and arch is not None and arch.bf16 == "none":
        yield f"train.precision is {precision}: {profile.accelerator.arch} only emulates bf16, as slow as float32"
    if recipe.train.compile is True and not profile.compile.value:
        yield f"train.compile is true, but {profile.compile.reason}"
