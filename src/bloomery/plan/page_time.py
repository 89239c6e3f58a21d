"""Lines of a plan's page about time and energy of a run, the parts of a step, and the FLOP/s that it reaches."""

from bloomery.core.units import format_seconds, two_digits
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import layers
from bloomery.hardware.profile import Profile
from bloomery.plan.advise import span
from bloomery.plan.estimate.speed import useful_flops
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.page_text import joined
from bloomery.plan.price import cost_text
from bloomery.plan.types import PlanReport, RolloutPlan, RunPlan


def time_lines(report: PlanReport, profile: Profile) -> list[str]:
    plan = report.plan
    step = report.plan.step_seconds
    gpu = profile.gpu
    if step is None:
        return [
            "unknown: the table has no rate of this device, and no similar device's figures are used"
        ]
    rate = step.inverse(plan.trained_tokens_per_step)
    ends = f"{two_digits(rate.low)} to {two_digits(rate.high)}"
    # Only a GPU has a peak to compare with: a CPU's table holds measured rates.
    is_of_one_model = gpu is not None and not profile.peers
    if gpu is not None and is_of_one_model and (peak := gpu.peak_flops(dtype_of(plan))):
        low, high = (reached_flops(plan, seconds) / peak for seconds in (step.high, step.low))
        ends += f" = {low * 100:.0f} to {high:.0%} of peak"
    facts = [f"{two_digits(rate.value)} tokens/s ({ends})"]
    run_seconds = plan.seconds
    max_seconds = plan.train.seconds
    if run_seconds is not None and max_seconds is None:
        unit = format_seconds(run_seconds.value).partition(" ")[2]
        time_range = span((run_seconds.low, run_seconds.high)).removesuffix(f" {unit}")
        facts.append(f"{format_seconds(run_seconds.value)} ({time_range})")
    elif run_seconds is not None and max_seconds is not None:
        steps = max(max_seconds / step.value, plan.train.min_steps or 1)
        overrun = (
            ""
            if run_seconds.value <= max_seconds
            else f", and takes {format_seconds(run_seconds.value)}"
        )
        facts.append(
            f"{format_seconds(max_seconds)} as set: about {two_digits(steps)} steps{overrun}"
        )
    else:  # its length depends on a dataset that is not here
        facts.append(f"{format_seconds(1e6 / rate.value)} per million tokens")
    if report.energy_kwh is not None and gpu is not None:
        watts = f"{gpu.board_watts:.0f} W"
        if plan.parallel is not None:
            watts = f"{plan.num_gpus:,} x {watts}"
        if profile.peers:
            peer_watts = [peer.gpu.board_watts or 0 for peer in profile.peers if peer.gpu]
            watts = f"{' + '.join(f'{watt:.0f}' for watt in peer_watts)} W"
        kwh = report.energy_kwh
        energy = (
            f"{float(f'{kwh:.2g}'):,g} kWh" if kwh >= 1 else f"{float(f'{1000 * kwh:.2g}'):g} Wh"
        )
        facts.append(f"{energy} at {watts}")
    if report.cost is not None:
        facts.append(cost_text(report.cost))
    return joined(facts)


def part_lines(report: PlanReport, profile: Profile) -> list[str]:
    """Where a step's time goes, and MFU against the device's peak and the best matmul published, with its formula."""
    plan = report.plan
    step = report.plan.step_seconds
    gpu = profile.gpu
    if step is not None and plan.rollout is not None:
        return rollout_part_lines(plan.rollout, step.value)
    if step is None or gpu is None or profile.peers:
        return []
    shares = sorted(
        ((part.value / step.value, name) for name, part in report.step_parts.items()), reverse=True
    )
    spent = [f"{name} {share:.0%}" for share, name in shares if share >= 0.005]
    reached = reached_flops(plan)
    peak = gpu.peak_flops(dtype_of(plan))
    best = gpu.achievable_flops(dtype_of(plan))
    mfu = [
        f"MFU {reached / peak:.0%} of {peak / 1e12:,.1f} TFLOP/s"
        if peak
        else "MFU unknown: no peak is known"
    ]
    mfu += (
        [f"{reached / best:.0%} of {best / 1e12:,.0f}, the best matmul published"] if best else []
    )
    weights = (
        "6 per weight"
        if plan.adapter.kind == "none"
        else "4 per frozen weight, 6 per trainable weight"
    )
    mfu.append(f"FLOPs per token: {weights} + {mixer_flops(plan.model.config)}")
    return [*joined([f"of which {spent[0]}", *spent[1:]]), *joined(mfu)]


def mixer_flops(config: ModelConfig) -> str:
    """What layers compute beside their matrices, in words: L layers of width d, on T tokens."""
    if all(layer.mixer == "attention" for layer in layers(config)):
        return "12 L d T"
    has_rules = any(layer.delta_net is not None for layer in layers(config))
    return "12 L d T of the layers with attention" + (" + delta rules" if has_rules else "")


def rollout_part_lines(rollout: RolloutPlan, step_seconds: float) -> list[str]:
    """The parts of a step with its share of a rollout, and what they depend on."""
    spent = [
        f"{name} {part.value / step_seconds:.0%}"
        for name, part in sorted(rollout.seconds.items(), key=lambda item: -item[1].value)
        if part.value >= 0.005 * step_seconds
    ]
    tokens = rollout.completion_tokens
    assumed = f"assumes completions of {tokens.value:,.0f} tokens ({tokens.low:,.0f} to {tokens.high:,.0f})"
    return [
        *joined([f"of which {spent[0]}", *spent[1:]]),
        *joined([assumed, "the run corrects its ETA after its first rollout"]),
    ]


def reached_flops(plan: RunPlan, step_seconds: float | None = None) -> float:
    """FLOP/s of one device by the usual count: matmuls and all T x T scores, without recomputation."""
    assert plan.step_seconds is not None
    config = plan.model.config
    counted = (
        useful_flops(TrainedModel.of(plan, config), plan.data.sequence_length)
        * plan.trained_tokens_per_step
    )
    return (
        counted
        / (step_seconds or plan.step_seconds.value)
        / (plan.parallel.devices if plan.parallel else 1)
    )


def dtype_of(plan: RunPlan) -> str:
    return "bfloat16" if plan.train.precision.startswith("bfloat16") else plan.train.precision
