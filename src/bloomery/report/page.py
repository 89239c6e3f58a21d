"""The sections of the report, from the headline to the command that repeats the run."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from shlex import quote
from statistics import fmean

from bloomery.core.units import GIB, format_bytes, format_count, format_seconds
from bloomery.monitor.console.words import format_joules
from bloomery.monitor.tally import in_millions
from bloomery.report.answers import Answered, draw_answers
from bloomery.report.charts import SIGNS, Bars, Point, Series, bar_chart, line_chart
from bloomery.report.claims import judge_run
from bloomery.report.devices import devices
from bloomery.report.heldout import HeldOut, draw
from bloomery.report.html import Html, el, join, prose, table
from bloomery.report.record import Record

# No script runs and nothing is fetched, whatever the run's texts hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_HAPPENED = {
    "kill": "killed or failed", "resume": "resumed", "skip": "step skipped", "rewind": "rewound", "save": "saved",
}  # fmt: skip
TITLE = " · Bloomery"  # ends the title of every page
_SHOWN_SAMPLES = 24  # checkpoints whose samples are on the page


def page(
    record: Record, held_out: HeldOut | str, extras: Sequence[Bars], name: str, answers: Sequence[Answered] = ()
) -> str:
    """The whole document. `held_out` may be the reason why there is none."""
    sections = [
        *(bar_chart(bars) for bars in extras),
        section("Loss", loss(record)),
        section("Rewards and other figures of the objective", metrics(record)),
        section("How it ran", speed(record)),
        section("Devices", devices(record)),
        section("Plan and run", plan_and_run(record)),
        section("What slowed it, or kept it from learning", explained(record)),
        section("What happened", incidents(record)),
        section("Evaluations", evaluations(record)),
        section("What it writes", samples(record)),
        section("Held-out questions, before training and after", draw_answers(answers)),
        section("A held-out text, token by token", _held_out(held_out)),
        section("What the recipe expected", claims(record)),
        section("What was chosen, and why", choices(record)),
        section("Recipe", recipe(record)),
        section("Machine", machine(record)),
        section("Again", again(record, name)),
    ]
    version = record.started.version if record.started else "?"
    written = f"Written by Bloomery {version} from this run's events."
    return document(name, written, headline(record, name), *sections)


def document(name: str, written: str, *content: Html | None) -> str:
    """One file that fetches nothing; `written` stands at its foot."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width,initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("title", f"{name}{TITLE}"),
        el("style", Html(resources.files("bloomery.report").joinpath("style.css").read_text(encoding="utf-8"))),
    )
    body = el("body", el("main", *content, el("footer", f"{written} This page needs no network.")))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def section(title: str, *content: Html | None) -> Html | None:
    """None when there is nothing in it."""
    return el("section", el("h2", title), *content) if any(content) else None


def headline(record: Record, name: str) -> Html:
    tally = record.tally
    steps = f"{tally.step:,} of {tally.steps:,} steps" if tally.steps else f"{tally.step:,} steps"
    lead = [el("span", record.state, class_=f"state {record.state}"), f" · {steps}"]
    if record.started is not None:
        trained = record.started.trained
        some = "" if trained is None else f", {format_count(trained)} of them trained,"
        lead.append(f" · {format_count(record.started.parameters)} parameters{some} on {record.started.device}")
    cards = [card(value, title) for value, title in _figures(record) if value]
    return join(el("h1", name), el("p", *lead, class_="lead"), el("div", *cards, class_="cards"))


def _figures(record: Record) -> list[tuple[str, str]]:
    tally, best, speed = record.tally, record.tally.best, record.tokens_per_second
    bits, used = best.bits_per_byte if best else None, record.utilisation
    joules, each = tally.devices.joules, tally.joules_per_token
    right = best.metrics.get("accuracy") if best else None
    return [
        (f"{bits:.3f}" if bits is not None else "", f"bits per byte, held out, step {best.step if best else 0:,}"),
        (f"{best.loss:.3f}" if best and best.loss is not None else "", f"{loss_name(tally.per)}, held out"),
        (f"{right:.1%}" if right is not None else "", "of them right, held out"),
        (f"{best.perplexity:.4g}" if best and best.perplexity is not None else "", "perplexity, held out"),
        (f"{tally.smoothed:.3f}" if tally.smoothed is not None else "", "training loss, smoothed"),
        (in_millions(tally.tokens) if tally.tokens else "", "tokens"),
        (format_seconds(tally.seconds), "that it was worked on"),
        (f"{speed:,.0f}" if speed else "", "tokens a second"),
        (f"{used:.1%}" if used is not None else "", "of the device's peak (MFU)"),
        (f"{tally.peak_gib:.2f} GiB" if tally.peak_gib else "", "memory at the peak"),
        (format_joules(joules) if joules is not None else "", f"energy, {each:.3g} J a token" if each else "energy"),
    ]


def card(value: str, title: str) -> Html:
    return el("div", el("b", value), el("span", title), class_="card")


def loss(record: Record) -> Html:
    raw: list[Point] = [(step.step, step.loss) for step in record.steps if step.loss is not None]
    held: list[Point] = [(event.step, event.loss) for event in record.evals if event.loss is not None]
    trained = Series("each step", raw, "raw"), Series("smoothed", smooth(raw), "line")
    series = [*trained, Series("held out", held, "eval")]
    chart = line_chart("Loss", series, record.marks, unit=record.tally.unit, height=300)
    kinds = {mark.kind for mark in record.marks}
    note = " · ".join(f"{sign} {_HAPPENED[kind]}" for kind, sign in SIGNS.items() if kind in kinds)
    return join(chart, el("p", note, class_="note") if note else None)


_REWARDS = {"chosen_reward": "chosen", "rejected_reward": "rejected"}  # one chart: what matters is their distance


def metrics(record: Record) -> Html | None:
    """A chart for each figure of the objective (accuracy, margin, KL), training smoothed and held out; None without."""
    told = [*(step.metrics for step in record.steps), *(event.metrics for event in record.evals)]
    names = dict.fromkeys(name for figures in told for name in figures)

    def curves(name: str, prefix: str = "", style: str = "line") -> list[Series]:
        ran = [(step.step, step.metrics[name]) for step in record.steps if name in step.metrics]
        held = [(event.step, event.metrics[name]) for event in record.evals if name in event.metrics]
        return [Series(f"{prefix}training, smoothed", smooth(ran), style), Series(f"{prefix}held out", held, "eval")]

    charts = []
    if all(name in names for name in _REWARDS):
        both = [one for at, name in enumerate(_REWARDS) for one in curves(name, f"{_REWARDS[name]}, ", f"d{at}")[:1]]
        charts.append(line_chart("Rewards", both, unit="mean per answer"))
    for name in names:
        if name not in _REWARDS:
            title, unit = name.replace("_", " ").capitalize(), _METRIC_UNITS.get(name, "")
            charts.append(line_chart(title, curves(name), unit=unit))
    return el("div", *charts, class_="two") if charts else None


_METRIC_UNITS = {
    "accuracy": "share of pairs with the chosen answer ahead", "margin": "chosen reward - rejected reward",
    "kl": "nats", "nats": "nats per token", "log_odds": "log odds ratio",
}  # fmt: skip


def smooth(points: Sequence[Point]) -> list[Point]:
    """A bias-corrected moving average over a fortieth of the run: short enough to follow it, long enough to be calm."""
    share = 1 / min(max(len(points) / 40, 3), 200)
    mean, weight, found = 0.0, 0.0, []
    for step, value in points:
        mean += share * (value - mean)
        weight += share * (1 - weight)
        found.append((step, mean / weight))
    return found


def speed(record: Record) -> Html | None:
    steps = record.steps
    if not steps:
        return None
    norms: list[Point] = [(s.step, s.grad_norm) for s in steps if s.grad_norm is not None]
    wait = [(s.step, 100 * s.data_wait_seconds / s.step_seconds) for s in steps if s.step_seconds > 0]
    charts = [
        line_chart("Learning rate", [Series("rate", [(s.step, s.learning_rate) for s in steps])], from_zero=True),
        line_chart("Gradient norm", [Series("norm", norms)]),
        line_chart("Speed", [Series("speed", [(s.step, s.tokens_per_second) for s in steps])], unit="tokens/s"),
        line_chart("Waiting for data", [Series("share", wait)], unit="% of the step", from_zero=True),
    ]
    return el("div", *charts, class_="two")


def plan_and_run(record: Record) -> Html | None:
    plan, tally = record.plan, record.tally
    if plan is None:
        return None
    unit, name = (GIB, "GiB") if plan.memory.total >= GIB else (GIB / 1024, "MiB")
    parts = sorted(((each, size / unit) for each, size in plan.memory.parts.items()), key=lambda part: -part[1])
    rows = [*parts, ("planned in all", plan.memory.total / unit)]
    if tally.peak_gib:
        rows.append(("measured", tally.peak_gib * GIB / unit))
    low, high, limit = (format_bytes(size) for size in (plan.memory.low, plan.memory.high, plan.memory.limit))
    said = f"Range {low} to {high}, limit {limit}."
    memory = bar_chart(Bars("Memory of one device", rows, name, said, own="measured"))
    compared = [_compared(title, planned, ran) for title, planned, ran in _pairs(record) if planned and ran]
    figures = table(["", "plan", "run", "difference"], compared) if compared else None
    return join(memory, figures)


def _pairs(record: Record) -> list[tuple[str, float | None, float | None]]:
    """Title with its unit, what the plan said, what the run did."""
    plan, tally = record.plan, record.tally
    assert plan is not None
    step = plan.step_seconds.value if plan.step_seconds else None
    ran = fmean(done.step_seconds for done in record.steps) if record.steps else None
    whole = plan.seconds.value if plan.seconds and record.state == "done" else None  # as the terminal has it
    return [
        ("seconds a step", step, ran),
        ("tokens/s", plan.train.tokens_per_step / step if step else None, record.tokens_per_second),
        ("seconds in all", whole, tally.seconds),
        ("GiB at the peak", plan.memory.total / GIB, tally.peak_gib),
    ]


def _compared(title: str, planned: float, ran: float) -> list[str | Html]:
    return [title, _figure(planned), _figure(ran), f"{ran / planned - 1:+.0%}"]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def explained(record: Record) -> Html | None:
    """None for a run with which nothing is wrong."""
    rows: list[list[str | Html]] = [
        [prose(found.what), el("small", prose(found.seen)), prose(found.mend)] for found in record.found
    ]
    return table(["cause", "evidence", "what mends it"], rows, class_="causes") if rows else None


def incidents(record: Record) -> Html:
    repeated = record.repeated
    verdict = None
    if repeated is not None:
        again = f"Steps {repeated.first:,} to {repeated.last:,} were computed once more after a resume: "
        same = "every loss and gradient norm the same to the last bit."
        other = f"{repeated.different:,} of {repeated.steps:,} differ."
        if record.plan is not None and not record.plan.train.deterministic:
            other += " Data order, random numbers and states were the same: equal up to kernel rounding."
        verdict = el("p", again + (other if repeated.different else same))
    lost = el("p", f"{record.lost}.") if record.lost else None
    if not record.incidents:
        return join(lost, el("p", "No kill, no skipped step, no warning.", class_="absent"))
    rows: list[list[str | Html]] = [
        [f"{i.step:,}", format_seconds(i.seconds), i.kind, prose(i.text)] for i in record.incidents[-200:]
    ]
    return join(lost, verdict, table(["step", "after", "what", ""], rows, class_="incidents"))


def evaluations(record: Record) -> Html | None:
    if not record.evals:
        return None
    best = record.tally.best
    names = list(dict.fromkeys(name for event in record.evals for name in event.metrics))
    priced = any(event.perplexity is not None for event in record.evals)  # the loss of a pair is no price of a token
    rows: list[list[str | Html]] = [
        [
            f"{event.step:,}" + (" best" if best and event.step == best.step else ""),
            "not finite" if event.loss is None else f"{event.loss:.4f}",
            *(["" if event.perplexity is None else f"{event.perplexity:.4g}"] if priced else []),
            *(["" if event.bits_per_byte is None else f"{event.bits_per_byte:.4f}"] if priced else []),
            *(f"{event.metrics[name]:.4f}" if name in event.metrics else "" for name in names),
            f"{event.tokens:,}",
            format_seconds(event.seconds),
        ]
        for event in record.evals
    ]
    heads = ["step", loss_name(record.tally.per), *(["perplexity", "bits per byte"] if priced else [])]
    heads += [name.replace("_", " ") for name in names]
    return table([*heads, "tokens", "took"], rows, class_="numbers")


def loss_name(per: str) -> str:
    return "nats a token" if per == "token" else f"loss a {per}"


def samples(record: Record) -> Html | None:
    """The last open, the others folded."""
    steps = sorted({sample.step for sample in record.samples})
    if not steps:
        return None
    shown = steps if len(steps) <= _SHOWN_SAMPLES else sorted({steps[0], *steps[1 - _SHOWN_SAMPLES :]})
    folds = [
        el("details", el("summary", f"step {step:,}"), *_texts(record, step), open="" if step == shown[-1] else None)
        for step in reversed(shown)
    ]
    left_out = len(steps) - len(shown)
    note = el("p", f"{left_out:,} earlier ones are in events.jsonl.", class_="note") if left_out else None
    return join(*folds, note)


def _texts(record: Record, step: int) -> list[Html]:
    return [el("pre", el("b", s.prompt), s.whole.removeprefix(s.prompt)) for s in record.samples if s.step == step]


def _held_out(told: HeldOut | str) -> Html:
    return draw(told) if isinstance(told, HeldOut) else el("p", prose(f"Not shown: {told}."), class_="absent")


def claims(record: Record) -> Html | None:
    ran = judge_run(record)
    if not ran:
        return None
    planned = record.plan.claims if record.plan and len(record.plan.claims) == len(ran) else None
    rows: list[list[str | Html]] = [
        [
            planned[i].claim if planned else run.claim,
            *([_verdict(planned[i].verdict, planned[i].because)] if planned else []),
            _verdict(run.verdict, run.because),
        ]
        for i, run in enumerate(ran)
    ]
    return table(["claim", *(["the plan"] if planned else []), "the run"], rows)


def _verdict(verdict: str, because: str) -> Html:
    return join(el("span", verdict, class_=f"verdict {verdict}"), " ", el("small", prose(because)))


def choices(record: Record) -> Html | None:
    if record.plan is None or not record.plan.decisions:
        return None
    rows: list[list[str | Html]] = [
        [el("code", decision.key), decision.value, el("small", prose(decision.because))]
        for decision in record.plan.decisions
    ]
    return table(["key", "value", "because"], rows, class_="why")


def recipe(record: Record) -> Html | None:
    if not record.recipe:
        return None
    return el("details", el("summary", "every key, and where its value came from"), el("pre", record.recipe))


def machine(record: Record) -> Html | None:
    found = record.machine
    if found is None:
        return None
    host, software, gpus = found.host, found.software, enumerate(found.accelerators)
    cores = f"{host.cpu_cores} cores ({', '.join(host.cpu_flags)})" if host.cpu_flags else f"{host.cpu_cores} cores"
    rows: list[list[str | Html]] = [
        ["processor", f"{host.cpu_name}, {cores}"],
        ["memory", f"{format_bytes(host.memory_bytes)}, {format_bytes(host.memory_free_bytes)} free at the start"],
        *([f"GPU {i}", f"{gpu.name} · {gpu.arch} · {format_bytes(gpu.usable_bytes)}"] for i, gpu in gpus),
        ["system", f"{host.system}, Python {software.python}"],
        ["PyTorch", " ".join(filter(None, [software.torch or "none", software.build]))],
        *([name, value] for name, value in software.environment.items()),
    ]
    return table([], rows)


def again(record: Record, name: str) -> Html:
    folder = quote(_shown(record.folder))
    repeat = f"bloomery train {folder}/recipe.yaml --run-dir {folder}-again"
    resume = f"bloomery resume {quote(name)}\n" if record.state != "done" else ""
    return join(el("pre", resume + repeat), el("p", "The recipe file holds every value of this run.", class_="note"))


def _shown(folder: Path) -> str:
    """As typed from the folder that holds runs/."""
    return str(Path(folder.parent.name, folder.name)) if folder.parent.name == "runs" else folder.name
