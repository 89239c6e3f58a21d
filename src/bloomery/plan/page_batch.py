"""Lines of a plan's page about the model, and what a step trains on: sequences, pictures or sampled completions."""

from bloomery.core.units import counted, format_count, two_digits
from bloomery.facts.counting import active_parameter_count, layers, parameter_count
from bloomery.facts.families import family_label
from bloomery.plan.lengths import in_epochs
from bloomery.plan.page_text import about, joined
from bloomery.plan.pictures import tokens_of_sizes, tower_in
from bloomery.plan.types import RolloutPlan, RunPlan
from bloomery.recipe.objectives import Rollouts
from bloomery.recipe.schema import Lora

USUAL_SIZES = ((640, 480), (1280, 720), (1920, 1080))  # pictures
WIDE_SPREAD = 0.1  # from which on a number of steps is printed with its range


def model_line(plan: RunPlan) -> str:
    config = plan.model.config
    family = family_label(config)

    def shown(count: int) -> str:
        return (
            f"{count / 1e9:,.2f} B"
            if count >= 1e9
            else f"{count / 1e6:,.1f} M"
            if count >= 1e5
            else f"{count:,}"
        )

    size = shown(parameter_count(config))
    origin = f", from {plan.model.source}" if plan.model.source else ""
    met = [layer.experts_met for layer in layers(config) if layer.stack_shapes]
    if met:
        count, per_token = met[0]
        active = f"{shown(active_parameter_count(config))} active per token"
        experts = f"{per_token} of {count} experts"
        size = f"{size} parameters, {active} ({experts})"
        return f"{family} architecture, {size}, context {config.max_positions:,}{origin}"
    return f"{family} architecture, {size} parameters, context {config.max_positions:,}{origin}"


def batch_lines(plan: RunPlan) -> list[str]:
    train = plan.train
    length = plan.data.sequence_length
    if plan.rollout is not None:
        return rollout_lines(plan, plan.rollout)
    cut = f"micro-batch {train.micro_batch_size}, "
    cut += (
        f"gradient accumulation {train.accumulation}"
        if train.accumulation > 1
        else "no gradient accumulation"
    )
    sequences = train.tokens_per_step // length
    plural = "s" if sequences > 1 else ""
    step = f"{train.tokens_per_step:,} tokens = {sequences:,} sequence{plural} x {length:,} ({cut})"
    return joined([step, *filter(None, (_steps(plan), in_epochs(plan)))])


def picture_lines(plan: RunPlan) -> list[str]:
    """What pictures cost: those of the dataset, or of a dataset without them what usual sizes would be."""
    facts = None if plan.dataset is None else plan.dataset.pictures
    if facts is None:
        usual = tokens_of_sizes(plan.model.source, USUAL_SIZES)
        if not usual:
            return []
        in_words = ", ".join(f"{size.width}x{size.height} {size.tokens:,}" for size in usual)
        return joined([f"none in the dataset; as tokens, one would be: {in_words}"])

    # The dataset's own sizes.
    first, *others = facts.sizes
    one_size = f"a {first.width}x{first.height} picture is {counted(first.tokens, 'tokens')}"
    shares = [one_size if not others else f"{one_size} ({first.share:.0%} are of this size)"]
    shares += [f"{size.width}x{size.height} {size.tokens:,}" for size in others]
    is_whole = facts.looked_at >= facts.pictures_per_epoch
    number = counted(facts.pictures_per_epoch, "pictures")
    number += "" if is_whole else f" by the sizes of {facts.looked_at:,}"
    per_sequence = (
        f"{facts.mean.pictures:.2g} a sequence, {facts.fullest.pictures:,.0f} in the fullest"
    )

    # What the tower does with them.
    tower = tower_in(facts.raw_config)
    assert tower is not None, "facts are made with a tower"
    parts = plan.vision.train
    adapted = plan.adapter.vision if isinstance(plan.adapter, Lora) else "none"
    how = "frozen"
    if parts != "none" or adapted != "none":
        how = "; ".join(
            f"{'tower and projector' if part == 'all' else part} {way}"
            for part, way in ((parts, "trained in full"), (adapted, "with LoRA"))
            if part != "none"
        )
    tower_text = f"tower of {format_count(tower.parameters)} parameters, {how}"
    gflops = facts.of_picture.flops / 1e9
    work = f"{facts.of_picture.patches:,.0f} patches and {gflops:,.3g} GFLOP forward for a picture"
    return joined([number, *shares, per_sequence, tower_text, work])


def rollout_lines(plan: RunPlan, rollout: RolloutPlan) -> list[str]:
    """The completions of a step, how they are packed, and the rollout that they come from."""
    train = plan.train
    objective = plan.objective
    assert isinstance(objective, Rollouts)
    completions = train.tokens_per_step // plan.data.sequence_length
    step = f"{completions:,} completions of at most {objective.max_completion_length:,} tokens"
    packed = f"packed into about {counted(rollout.micro_batches, 'micro-batches')}"
    packed += f" of {train.micro_batch_size} x {plan.data.sequence_length:,}"
    rollout_text = (
        f"{counted(rollout.num_prompts, 'prompts')} x {objective.num_generations} per rollout"
    )
    rollout_text += f", {rollout.slots} at once"
    if len(set(rollout.sampled_prompts)) > 1:
        fewest, usual, most = rollout.sampled_prompts
        rollout_text += f", {fewest:,} to {most:,} prompts sampled for them"
        rollout_text += f" ({usual:,} if half of them have completions of one reward)"
    if rollout.num_steps > 1:
        rollout_text += f", trained on for {rollout.num_steps} steps"
    facts = joined([step, packed])
    facts += joined([rollout_text, *filter(None, (_steps(plan), in_epochs(plan)))])
    return facts


def _steps(plan: RunPlan) -> str:
    if plan.train.seconds is not None:
        minimum = (
            "" if plan.train.min_steps is None else f", at least {plan.train.min_steps:,} steps"
        )
        return f"as many steps as fit into {about(plan.train.seconds)}{minimum}"
    if plan.train.steps is None:
        return "steps unknown until a dataset is here"
    in_epochs = plan.lengths is not None and plan.lengths.train.unit == "epochs"
    if in_epochs and plan.dataset is not None and plan.dataset.spread > 0:
        steps = f"about {two_digits(plan.train.steps)} step{'s' if plan.train.steps > 1 else ''}"
        spread = plan.dataset.spread
        if spread < WIDE_SPREAD:
            return steps
        low, high = (plan.train.steps * factor for factor in (1 - spread, 1 + spread))
        return f"{steps} ({two_digits(low)} to {two_digits(high)})"
    length = next((choice for choice in plan.choices if choice.key == "train.epochs"), None)
    return f"{plan.train.steps:,} steps" if length is None else f"{length.value}: {length.reason}"
