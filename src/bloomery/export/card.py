"""The README of an exported model: what it is, what made it, how good it is, how to open it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.families import FAMILIES
from bloomery.monitor.events import EvalDone, RunStarted, StepDone, read_events
from bloomery.plan.store import read_plan
from bloomery.plan.types import Plan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Data, Recipe
from bloomery.units import format_count, format_seconds


@dataclass(frozen=True)
class Training:
    """What a run folder tells of the checkpoint that is exported."""

    recipe: Recipe
    plan: Plan | None
    step: int
    tokens: int
    seconds: float
    loss: float | None  # of the last step, nats per token
    device: str
    evaluation: EvalDone | None


def training_of(checkpoint: Path) -> Training | None:
    """None when the folder is no checkpoint of a run."""
    run, step = checkpoint.parent.parent, checkpoint.name.removeprefix("step-")
    if checkpoint.parent.name != "checkpoints" or not step.isdecimal() or not (run / "recipe.yaml").is_file():
        return None
    steps: dict[int, StepDone] = {}
    evaluation, device = None, ""
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, RunStarted):
            device = event.device
        elif isinstance(event, StepDone) and event.step <= int(step):
            steps[event.step] = event  # after a resume the last event of a step counts
        elif isinstance(event, EvalDone) and event.step <= int(step):
            evaluation = event
    last = steps[max(steps)] if steps else None
    plan = read_plan(run / "plan.json") if (run / "plan.json").is_file() else None
    return Training(
        recipe=load_recipe(run / "recipe.yaml").recipe, plan=plan, step=int(step), tokens=last.tokens if last else 0,
        seconds=sum(event.step_seconds for event in steps.values()), loss=last.loss if last else None,
        device=device, evaluation=evaluation,
    )  # fmt: skip


def model_card(name: str, config: ModelConfig, training: Training | None) -> str:
    """Markdown with the metadata block that model hubs read."""
    parts = [_metadata(), f"# {name}\n", "\n".join(_facts(config)), "\n".join(_use(name))]
    if training is not None:
        parts[3:3] = ["\n".join(_training(training)), "\n".join(_evaluation(training))]
    parts.append(
        "## Limits\n\nIt continues text as its training data would; it was not taught to follow instructions or to "
        "refuse anything, and nobody has audited what it says.\n"
    )
    return "\n".join(part for part in parts if part)


def _metadata() -> str:
    return "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- bloomery\n---\n"


def _facts(config: ModelConfig) -> Iterator[str]:
    size = format_count(parameter_count(config))
    yield f"A language model of {size} parameters: {FAMILIES[config.family].architecture}, {config.num_layers} layers"
    yield f"of width {config.hidden_size}, {config.vocab_size:,} tokens, a context of {config.max_positions:,} tokens."
    yield "Made with Bloomery.\n"


def _training(training: Training) -> Iterator[str]:
    data, plan = training.recipe.data, training.plan
    yield "## Training\n"
    yield f"- data: {_data(data)}; rows of {data.sequence_length:,} tokens, {data.layout}"
    took = f"{format_seconds(training.seconds)} on {training.device or 'an unknown device'}"
    yield f"- length: {training.step:,} steps, {format_count(training.tokens)} tokens, {took}"
    if plan is not None:
        yield f"- optimizer: {plan.optimizer.kind}, learning rate {plan.optimizer.learning_rate:g}"
        yield f"- batch: {plan.train.tokens_per_step:,} tokens a step"
        yield f"- precision: {plan.train.precision}; seed {plan.train.seed}; recipe {plan.name}"
    if training.recipe.model.from_ is not None:
        yield f"- started from: {Path(training.recipe.model.from_).name}"
    if training.loss is not None:
        yield f"- training loss of the last step: {training.loss:.3f} nats per token"
    yield ""


def _data(data: Data) -> str:
    """Names, not paths: a path tells more of its owner than the reader needs."""
    if data.builtin is not None:
        return f"built in ({data.builtin})"
    paths = [data.path] if data.path is not None else [source.path for source in data.sources]
    return ", ".join(Path(path).name for path in paths) or "prepared shards"


def _evaluation(training: Training) -> Iterator[str]:
    told = training.evaluation
    if told is None or told.loss is None:
        return
    yield "## Evaluation\n"
    yield f"On the held-out validation split, after step {told.step:,}:\n"
    yield "| loss (nats per token) | perplexity | bits per byte |\n|--:|--:|--:|"
    bits = "" if told.bits_per_byte is None else f"{told.bits_per_byte:.3f}"
    yield f"| {told.loss:.3f} | {'' if told.perplexity is None else f'{told.perplexity:.2f}'} | {bits} |\n"


def _use(name: str) -> Iterator[str]:
    yield "## Use\n"
    yield "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield f'model = AutoModelForCausalLM.from_pretrained("{name}")'
    yield 'inputs = tokenizer("Once", return_tensors="pt")'
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))\n```\n"
    yield f'Or `bloomery generate {name} --prompt "Once"`.\n'
