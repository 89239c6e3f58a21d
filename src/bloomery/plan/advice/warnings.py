"""Warnings of a plan: contradictions of the recipe, settings without effect. None of them stops a run."""

from collections.abc import Iterator, Sequence

from bloomery.core.units import counted, format_count, format_seconds
from bloomery.hardware.doctor.env_vars import idle_settings
from bloomery.hardware.profile import Profile
from bloomery.plan.advice.claims import roughly, span
from bloomery.plan.gather import Facts
from bloomery.plan.lengths import too_many_epochs
from bloomery.plan.rules.choices import ineffective_settings
from bloomery.plan.types import RunPlan, Verdict
from bloomery.recipe.schema import Lora, Recipe


def warnings(recipe: Recipe, plan: RunPlan, facts: Facts, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """One sentence each."""
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
