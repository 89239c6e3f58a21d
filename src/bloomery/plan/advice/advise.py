"""The report on a plan: checked claims, warnings, suggestions, the longest sequence, disk and energy."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bloomery.core.errors import UserError
from bloomery.core.units import counted, format_bytes, format_count, format_seconds
from bloomery.hardware.doctor.software import idle_settings
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, build_profile
from bloomery.model.config import ModelConfig
from bloomery.plan import mesh
from bloomery.plan.advice import claims
from bloomery.plan.advice.claims import roughly, span
from bloomery.plan.batch import SMALL_CHUNK, Measure
from bloomery.plan.estimate.calibrated import StepEstimator
from bloomery.plan.estimate.mesh_memory import MeshSplit
from bloomery.plan.estimate.states import OPTIMIZERS, StepShape, TrainedModel
from bloomery.plan.gather import Facts
from bloomery.plan.lengths import too_many_epochs
from bloomery.plan.resolve import resolve, shape_of
from bloomery.plan.rules.choices import ineffective_settings
from bloomery.plan.rules.objective import reference_of, teacher_of
from bloomery.plan.types import Estimate, MaxLength, PlanReport, RunPlan, Suggestion, Verdict
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Claims, Lora, Recipe

STEP = 256  # tokens: the resolution of the maximum sequence length
MOST = 2**22
TOKEN_BYTES = 2  # an id below 65,536 in a shard; 4 above
REFERENCE_BYTES = 4  # of a token: data.reference
PlanOf = Callable[[str], RunPlan | None]
WORTH = 0.9  # of the time: an edit that saves less than a tenth is not suggested
LITTLE = 0.05  # of the memory: shorter sequences that save less and are not enough are not suggested
NO_DROPOUT = "model.dropout=0"
SHORTEST = 256  # tokens of a sequence that a plan suggests


def advise(loaded: LoadedRecipe, plan: RunPlan, facts: Facts) -> PlanReport:
    """The plan, with the edits that make it fit, and its report."""
    recipe, profile = loaded.recipe, facts.profile
    step, measure, parts = _planned_step(plan, facts.model, facts.machine, profile, facts.teacher)
    gpus = 1 if plan.parallel is None else plan.parallel.gpus
    nodes = 1 if plan.parallel is None else plan.parallel.nodes

    def plan_of(edit: str) -> RunPlan | None:
        """None where the edit contradicts the rest of the recipe."""
        try:
            other, config = edited(loaded, edit), facts.config
            if edit == NO_DROPOUT:
                config = replace(config, embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0)
            return resolve(other, facts.edited(other.recipe, config), gpus=gpus, nodes=nodes)
        except UserError:
            return None

    suggestions = tuple((_faster if plan.fits else _to_fit)(recipe, plan, plan_of))
    if not plan.fits:
        plan = plan.model_copy(update={"suggestions": tuple(fix.edit for fix in suggestions)})
    verdicts = _verdicts(recipe.claims, plan, step, measure)
    return PlanReport(
        plan=plan,
        claims=verdicts,
        warnings=tuple(warnings(recipe, plan, facts, verdicts)),
        suggestions=suggestions,
        max_length=_longest(step, measure) if profile.accelerator else None,
        step_parts=parts or {},
        disk=_disk_bytes(recipe, plan, step),
        energy_kwh=energy_kwh(plan, profile),
    )


def claims_of(plan: RunPlan, expected: Claims, machine: Machine) -> tuple[Verdict, ...]:
    """The claims of a run's recipe against its plan, as `bloomery plan` checks them."""
    model = TrainedModel.of(plan, plan.model.config)
    step, measure, _ = _planned_step(plan, model, machine, build_profile(machine), teacher_of(plan))
    return _verdicts(expected, plan, step, measure)


def _verdicts(expected: Claims, plan: RunPlan, step: StepShape, measure: Measure) -> tuple[Verdict, ...]:
    def need(sequences: int) -> float:
        return measure(replace(step, micro_batch_size=sequences)).total

    return claims.check_claims(expected, plan, dataset=plan.dataset, need=need)


def energy_kwh(plan: RunPlan, profile: Profile) -> float | None:
    """At the boards' rated power all the time; None where it or the time is unknown."""
    watts, seconds = profile.gpu.board_watts if profile.gpu else None, plan.seconds
    devices = 1 if plan.parallel is None else plan.parallel.devices
    return None if not watts or seconds is None else watts * devices * seconds.value / 3.6e6


def _planned_step(
    plan: RunPlan, model: TrainedModel, machine: Machine, profile: Profile, teacher: ModelConfig | None
) -> tuple[StepShape, Measure, dict[str, Estimate] | None]:
    """The step on one device, the memory of any step like it, and its seconds by operation."""
    train, parallel = plan.train, plan.parallel
    plain = shape_of(
        plan, model, profile, plan.dataset, teacher, precision=train.precision, attention=plan.model.attention
    )
    step = replace(
        plain,
        compiled=train.compile,
        micro_batch_size=train.micro_batch_size,
        checkpointing=train.activation_checkpointing,
        score_chunk=plan.model.score_chunk,
        accumulating=train.accumulation > 1 and not plain.mode.fused_backward,
    )
    estimator, sequences = StepEstimator.of(plan, machine, profile), train.tokens_per_step // plan.data.sequence_length
    if parallel is None:
        return step, estimator.memory, estimator.step_parts(step, train.tokens_per_step)
    layout = parallel.layout
    split = MeshSplit(replicate=layout.replicate, shard=layout.shard, pipeline=layout.pipeline)
    workload = mesh.MeshWorkload.of(
        profile, step, estimator.rate(step),
        sequences_per_step=sequences, gpus=parallel.gpus, nodes=parallel.nodes, limit=estimator.limit,
    )  # fmt: skip
    return step, workload.memory(split), mesh.layout_parts(workload, split, step, sequences // split.data_parallel)


def _longest(step: StepShape, measure: Measure) -> MaxLength:
    """At micro-batch 1, logits in chunks; 0 where not even `STEP` tokens fit."""

    def fits(length: int, checkpointing: str) -> bool:
        config = step.config
        if config.positions == "learned" and length > config.max_positions:  # they grow with the sequence
            config = replace(config, max_positions=length)
        model = replace(step.model, config=config)
        row = replace(step, model=model, sequence_length=length, micro_batch_size=1, checkpointing=checkpointing)
        return measure(replace(row, score_chunk=min(SMALL_CHUNK, length))).fits

    def search(checkpointing: str) -> int:
        return STEP * bisect_left(range(1, MOST // STEP), True, key=lambda n: not fits(n * STEP, checkpointing))

    return MaxLength(as_planned=search(step.checkpointing), checkpointed=search("full"))


def _disk_bytes(recipe: Recipe, plan: RunPlan, step: StepShape) -> dict[str, float]:
    """Shards of the dataset, checkpoints of the trainable parameters (those kept, the best, the one being written), and
    the reference log-probabilities where they are precomputed.
    """
    dataset, claimed, config = plan.dataset, recipe.claims.epochs, step.config
    tokens = None if dataset is None else dataset.tokens
    if dataset is None and plan.total_tokens and claimed and claimed[0]:  # as the claims imply
        tokens = round(plan.total_tokens / claimed[0])
    each = step.model.learning_bytes(step.precision)
    each += step.model.optimizer_bytes(recipe.optimizer.kind, step.precision)
    wide = 1 if config.vocab_size <= 65536 else 2
    disk = {} if tokens is None else {"shards": float(tokens * TOKEN_BYTES * wide)}
    disk |= {"checkpoint": each, "checkpoints": each * (recipe.checkpoint.keep + 2)}
    if dataset is not None and reference_of(recipe.objective, recipe.adapter).value == "precomputed":
        disk["reference"] = float(REFERENCE_BYTES * dataset.tokens)
    return disk


def edited(loaded: LoadedRecipe, edit: str) -> LoadedRecipe:
    """The recipe with overrides ("train.micro_batch_size=8 optimizer.kind=muon"), as on the command line."""
    data = loaded.recipe.model_dump(by_alias=True)
    for word in edit.split():
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        data[section][name] = int(value) if value.isdigit() else value
    return LoadedRecipe(Recipe.model_validate(data), loaded.name, loaded.provenance)


def _to_fit(recipe: Recipe, plan: RunPlan, plan_of: PlanOf) -> Iterator[Suggestion]:
    """Edits that each make the plan fit, shorter sequences last; or every edit, and the fewest that fit together."""
    best: dict[str, tuple[str, str, RunPlan]] = {}  # by key: the first edit that fits, else the one that saves most
    for edit, cost in _ladder(recipe, plan):
        after, key = plan_of(edit), edit.partition("=")[0]
        if after is None:
            continue
        left = after.memory.total / plan.memory.total
        little = key == "data.sequence_length" and left > 1 - LITTLE and not after.fits
        if left >= 1 or little:
            continue
        held = best[key][2] if key in best else None
        if held is None or (not held.fits and after.memory.total < held.memory.total):
            best[key] = edit, cost, after
    enough = {key: found for key, found in best.items() if found[2].fits}
    others = {key: found for key, found in enough.items() if key != "data.sequence_length"}
    shown = enough if recipe.model.from_ is not None else others  # in fine-tuning the length is your choice too
    for edit, cost, after in (shown or enough or best).values():
        yield Suggestion(edit=edit, saves=_saved(plan, after, cost))
    edits = [edit for edit, _, _ in best.values()]
    for count in range(2, 0 if enough else len(edits) + 1):
        together = " ".join(edits[:count])
        tried = plan_of(together)
        if tried is not None and tried.fits:
            yield Suggestion(edit=together, saves=_saved(plan, tried, "all of these together"))
            return


def _saved(before: RunPlan, after: RunPlan, cost: str) -> str:
    saved = format_bytes(before.memory.total - after.memory.total)
    verdict = "fits" if after.fits else "still does not fit"
    return f"{saved}: {format_bytes(after.memory.total)} in total, {verdict}; {cost}"


def _ladder(recipe: Recipe, plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Edits from cheap to expensive, each with its cost."""
    train, asked, optimizer, adapter = plan.train, recipe.train, recipe.optimizer, recipe.adapter.kind
    sequences, gpu = train.micro_batch_size, train.device != "cpu"
    while asked.micro_batch_size != "auto" and sequences % 2 == 0:
        sequences //= 2
        yield f"train.micro_batch_size={sequences}", "same training"
    if train.activation_checkpointing not in ("full", "selective"):
        yield "train.activation_checkpointing=selective", "costs a sixth more compute"
    if train.activation_checkpointing != "full":
        yield "train.activation_checkpointing=full", "costs a third more compute"
    if asked.precision == "float32" and gpu:
        yield "train.precision=auto", "matmuls in half precision"
    # Optimizer states, activations or frozen weights in fewer bits, or in CPU memory.
    if gpu and not asked.offload_activations:
        yield "train.offload_activations=true", "moves activations to CPU memory and back"
    if "state_dtype" in OPTIMIZERS[optimizer.kind].settings and optimizer.state_dtype == "float32":
        yield "optimizer.state_dtype=int8", "8-bit optimizer states; nearly the same training"
    if adapter in ("lora", "dora") and recipe.quantize.kind == "none":
        yield "quantize.kind=nf4", "4-bit frozen weights; costs time and some accuracy"
    if adapter == "none" and recipe.model.from_ is not None:
        yield "adapter.kind=lora", "changes the training: only adapters are trainable, the weights are frozen"
    # With a fused backward a step is one micro-batch: a smaller step, or gradient accumulation.
    if optimizer.fused_backward and not asked.auto_batch:
        tokens = train.tokens_per_step
        while tokens % (2 * plan.data.sequence_length) == 0:
            tokens //= 2
            yield f"train.tokens_per_step={tokens}", "changes the training: fewer tokens per step"
        yield "optimizer.fused_backward=false", "keeps gradients, so that gradient accumulation works"
    if optimizer.kind == "adamw" and adapter == "none":
        yield "optimizer.kind=muon", "changes the optimizer: choose its learning rate again"
    if optimizer.kind != "adafactor" and adapter == "none":
        yield "optimizer.kind=adafactor", "changes the optimizer: choose its learning rate again"
    if train.precision == "bfloat16":
        yield "train.precision=bfloat16-pure", "bfloat16 weights: small updates are lost to rounding"
    length = plan.data.sequence_length
    while length > SHORTEST and train.tokens_per_step % (length // 2) == 0:
        length //= 2
        yield f"data.sequence_length={length}", f"changes the training: no sequence is longer than {length:,} tokens"


def _faster(recipe: Recipe, plan: RunPlan, plan_of: PlanOf) -> Iterator[Suggestion]:
    """Settings of the recipe that cost time, where the plan's own choice is faster and fits."""
    before = plan.step_seconds
    if before is None:
        return
    asked = recipe.train
    keys = [k for k in ("activation_checkpointing", "precision", "attention", "compile", "micro_batch_size")
            if getattr(asked, k) != "auto"]  # fmt: skip
    edits = [f"train.{key}=auto" for key in keys]
    # Fused attention has no dropout on packed sequences.
    if plan.model.config.attention_dropout and asked.attention == "auto":
        edits = [NO_DROPOUT, *edits]
    for edit in edits:
        tried = plan_of(edit)
        if tried is None or not tried.fits or tried.step_seconds is None:
            continue
        kernel = edit != NO_DROPOUT or tried.model.attention != plan.model.attention
        if kernel and tried.step_seconds.value < WORTH * before.value:
            saves = f"{1 - tried.step_seconds.value / before.value:.0%} of the time"
            if plan.seconds is not None and tried.seconds is not None:
                saves += f": {format_seconds(plan.seconds.value - tried.seconds.value)}"
            if edit == NO_DROPOUT:
                saves += "; changes the training: overfits sooner on repeated data"
            yield Suggestion(edit=edit, saves=saves)


def warnings(recipe: Recipe, plan: RunPlan, facts: Facts, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """One sentence each: contradictions of the recipe, settings without effect. None of them stops a run."""
    profile = facts.profile
    yield from facts.unrun
    yield from _claims(recipe, plan, verdicts)
    if recipe.train.min_steps is not None and plan.train.seconds is None:
        yield f"train.min_steps has no effect: train.{recipe.train.length_key} sets the length, not train.max_time"
    if (repeated := too_many_epochs(plan)) is not None:
        yield repeated
    yield from _lengths(plan)
    dataset, length = plan.dataset, plan.data.sequence_length
    if dataset is not None and dataset.left_out:
        dropped = counted(dataset.left_out, "examples")
        yield f"{dropped} dropped: all labels within {length:,} tokens are masked"
    if dataset is not None and dataset.cut_short:
        yield f"{counted(dataset.cut_short, 'examples')} truncated: longer than data.sequence_length={length}"
    if isinstance(recipe.adapter, Lora):  # the product of its matrices has at most the rank of the weight
        rank, model = recipe.adapter.rank, facts.model
        sides = {name: min(model.shapes[f"{name}.weight"]) for name, _ in model.mode.pairs}
        name = min(sides, key=lambda one: sides[one])
        if rank > sides[name]:
            most = f"{name} has at most rank {sides[name]:,}"
            yield f"adapter.rank is {rank:,}, but {most}: a higher rank only costs memory and time"
    yield from _settings(recipe, profile)
    # Environment variables without effect on this device, or that slow it down or harm.
    yield from (str(effect) for effect in idle_settings(facts.machine, profile) if effect.kind != "works")
    device = profile.accelerator is not None
    yield from ineffective_settings(recipe, accelerator=device, precision=plan.train.precision)


def _claims(recipe: Recipe, plan: RunPlan, verdicts: Sequence[Verdict]) -> Iterator[str]:
    claims = recipe.claims
    wrong = [verdict for verdict in verdicts if verdict.verdict == "wrong"]
    if claims.tokens and plan.total_tokens and any(verdict.claim.endswith(" tokens") for verdict in wrong):
        planned, claimed = format_count(plan.total_tokens), format_count(claims.tokens[0])
        yield f"train.{recipe.train.length_key} trains on {planned} tokens, claims.tokens is {claimed}"
    if claims.tokens and claims.tokens_per_second and claims.duration:
        fastest = claims.tokens[0] / max(claims.tokens_per_second[1], 1e-9)
        slowest = claims.tokens[1] / max(claims.tokens_per_second[0], 1e-9)
        if fastest > 2 * claims.duration[1] or 2 * slowest < claims.duration[0]:
            tokens, rate = format_count(claims.tokens[0]), format_count(claims.tokens_per_second[1])
            took = roughly(fastest)
            result = f"{tokens} tokens at {rate} tokens/s take {took}, not {span(claims.duration)}"
            yield f"the claims contradict each other: {result}"


def _lengths(plan: RunPlan) -> Iterator[str]:
    step, asked = plan.step_seconds, plan.train.seconds
    if step is not None and asked is not None and asked < step.value:
        one, least = format_seconds(step.value), counted(plan.train.min_steps or 1, "steps")
        yield f"train.max_time is {format_seconds(asked)}, but one step takes about {one}: the run takes {least}"
    steps, warmup, decay = plan.train.steps, plan.optimizer.warmup_steps, plan.optimizer.decay_steps
    if steps is None:
        return
    if warmup >= steps:
        lasts = f"{counted(warmup, 'steps')} and the run {steps:,}: the learning rate never reaches its peak"
        yield f"optimizer.warmup lasts {lasts}; shorten it, or train longer"
    elif warmup + decay > steps:
        yield f"warmup and decay last {warmup + decay:,} steps together, more than the run's {steps:,}"
    if plan.eval.every_steps is not None and plan.eval.every_steps > steps:
        yield f"eval.every is {plan.eval.every_steps:,} steps, the run ends after {steps:,}: evaluated only at the end"


def _settings(recipe: Recipe, profile: Profile) -> Iterator[str]:
    asked, arch = recipe.train.precision, profile.arch
    if profile.accelerator is None:
        if asked == "float16":
            yield "train.precision is float16: a CPU multiplies float16 five to nine times slower than float32"
        if asked.startswith("bfloat16") and not (profile.cpu and profile.cpu.bf16):
            yield f"train.precision is {asked}: this CPU has no bf16 instructions, float32 is faster"
        if recipe.data.pin_memory is True:
            yield "data.pin_memory has no effect on a CPU"
    elif asked.startswith("bfloat16") and arch is not None and arch.bf16 == "none":
        yield f"train.precision is {asked}: {profile.accelerator.arch} only emulates bf16, as slow as float32"
    if recipe.train.compile is True and not profile.compile.value:
        yield f"train.compile is true, but {profile.compile.reason}"
