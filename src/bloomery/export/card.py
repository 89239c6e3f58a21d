"""The README of an exported model: what it is, what made it, how good it is, how to open it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bloomery.core.units import format_count, format_seconds
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.families.registry import architecture_of
from bloomery.monitor.events import EvalDone, RunStarted, StepDone, read_events
from bloomery.plan.store import read_plan
from bloomery.plan.types import Plan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Data, Lora, Peft, Recipe


@dataclass(frozen=True)
class Training:
    """What a run folder tells of the checkpoint that is exported."""

    recipe: Recipe
    plan: Plan | None
    step: int
    tokens: int
    seconds: float
    loss: float | None  # of the last step
    per: str  # what a loss is of: RunStarted
    device: str
    evaluation: EvalDone | None


def training_of(checkpoint: Path) -> Training | None:
    """None when the folder is no checkpoint of a run."""
    run, step = checkpoint.parent.parent, checkpoint.name.removeprefix("step-")
    if checkpoint.parent.name != "checkpoints" or not step.isdecimal() or not (run / "recipe.yaml").is_file():
        return None
    steps: dict[int, StepDone] = {}
    evaluation, device, per = None, "", "token"
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, RunStarted):
            device, per = event.device, event.per
        elif isinstance(event, StepDone) and event.step <= int(step):
            steps[event.step] = event  # after a resume the last event of a step counts
        elif isinstance(event, EvalDone) and event.step <= int(step):
            evaluation = event
    last = steps[max(steps)] if steps else None
    plan = read_plan(run / "plan.json") if (run / "plan.json").is_file() else None
    return Training(
        recipe=load_recipe(run / "recipe.yaml").recipe, plan=plan, step=int(step), tokens=last.tokens if last else 0,
        seconds=sum(event.step_seconds for event in steps.values()), loss=last.loss if last else None,
        per=per, device=device, evaluation=evaluation,
    )  # fmt: skip


def model_card(name: str, config: ModelConfig, training: Training | None, *, base: str | None = None) -> str:
    """Markdown with the metadata block that model hubs read. `base`: the model that an adapter is for."""
    use = _use(name) if base is None else _use_adapter(name, base, config)
    if base is None and config.head == "values":
        use = _use_values(name)
    parts = [_metadata(config, base), f"# {name}\n", "\n".join(_facts(config, base)), "\n".join(use)]
    if training is not None:
        parts[3:3] = ["\n".join(_training(training)), "\n".join(_evaluation(training))]
    parts.append(f"## Limits\n\n{_limits(config, training)}\n")
    return "\n".join(part for part in parts if part)


def _limits(config: ModelConfig, training: Training | None) -> str:
    if config.head == "values":
        return "It prefers what those who chose in its training data preferred, and nobody has audited what that is."
    if training is None:
        return "Nobody has audited what it says here."
    objective = training.recipe.objective if training.plan is None else training.plan.objective
    if objective.kind != "pretrain":
        return (
            "It answers as its training data does, right or wrong. It refuses what that data or the model that it "
            "started from refuses, if anything, and nobody has audited what it says."
        )
    if training.recipe.model.from_ is not None:
        return "It continues text as its training data would, and may have lost some of what it was taught before."
    return (
        "It continues text as its training data would; it was not taught to follow instructions or to refuse "
        "anything, and nobody has audited what it says."
    )


def _metadata(config: ModelConfig, base: str | None) -> str:
    task = "text-classification" if config.head == "values" else "text-generation"
    library = "transformers" if base is None else "peft"
    of = f"base_model: {base}\n" if base is not None and not base.startswith("/") else ""
    return f"---\nlibrary_name: {library}\n{of}pipeline_tag: {task}\ntags:\n- bloomery\n---\n"


def _facts(config: ModelConfig, base: str | None) -> Iterator[str]:
    size = format_count(parameter_count(config))
    if base is not None:
        yield f"An adapter for {_name(base)}. The model with it:"
    yield f"A language model of {size} parameters: {architecture_of(config)}, {config.num_layers} layers"
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
        yield from _adapter(plan)
    if training.recipe.model.from_ is not None:
        yield f"- started from: {_name(training.recipe.model.from_)}"
    if training.loss is not None:
        yield f"- training loss of the last step: {training.loss:.3f} {_unit(training.per)}"
    yield ""


def _adapter(plan: Plan) -> Iterator[str]:
    adapter = plan.adapter
    if isinstance(adapter, Lora):
        targets = ", ".join(adapter.targets)
        yield f"- adapter: {adapter.kind}, rank {adapter.rank}, alpha {adapter.alpha:g}, on {targets}"
        if adapter.train_also:
            yield f"- trained in full beside it: {', '.join(adapter.train_also)}"
    if isinstance(adapter, Peft):
        yield f"- adapter: {adapter.method} of PEFT"


def _name(model: str) -> str:
    """The id on the Hub, or of a path its last part."""
    return Path(model).name if model.startswith(("/", ".", "~")) else model


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
    if training.per != "token":
        heads = [f"loss ({_unit(training.per)})", *(name.replace("_", " ") for name in told.metrics)]
        yield f"| {' | '.join(heads)} |\n|{'--:|' * len(heads)}"
        yield f"| {' | '.join(f'{value:.3f}' for value in (told.loss, *told.metrics.values()))} |\n"
        return
    yield f"| loss ({_unit('token')}) | perplexity | bits per byte |\n|--:|--:|--:|"
    bits = "" if told.bits_per_byte is None else f"{told.bits_per_byte:.3f}"
    yield f"| {told.loss:.3f} | {'' if told.perplexity is None else f'{told.perplexity:.2f}'} | {bits} |\n"


def _use_adapter(name: str, base: str, config: ModelConfig) -> Iterator[str]:
    values = config.head == "values"
    kind = "AutoModelForSequenceClassification" if values else "AutoModelForCausalLM"
    yield "## Use\n"
    yield f"```python\nfrom peft import PeftModel\nfrom transformers import {kind}, AutoTokenizer\n"
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield f'model = {kind}.from_pretrained("{_name(base)}"{", num_labels=1" if values else ""})'
    yield "if len(tokenizer) > model.get_input_embeddings().num_embeddings:"
    yield "    model.resize_token_embeddings(len(tokenizer))"
    yield f'model = PeftModel.from_pretrained(model, "{name}")\n```\n'
    if not values:
        yield f'Or `bloomery generate {name} --prompt "Once"`.\n'


def _unit(per: str) -> str:
    return "nats per token" if per == "token" else f"per {per}"


def _use_values(name: str) -> Iterator[str]:
    yield "## Use\n"
    yield "```python\nfrom transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield f'model = AutoModelForSequenceClassification.from_pretrained("{name}")'
    yield 'value = model(**tokenizer("Once", return_tensors="pt")).logits[0, 0]  # higher is better\n```\n'


def _use(name: str) -> Iterator[str]:
    yield "## Use\n"
    yield "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield f'model = AutoModelForCausalLM.from_pretrained("{name}")'
    yield 'inputs = tokenizer("Once", return_tensors="pt")'
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))\n```\n"
    yield f'Or `bloomery generate {name} --prompt "Once"`.\n'
