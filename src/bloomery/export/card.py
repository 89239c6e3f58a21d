"""The README of an exported model: what it is, what made it, how good it is, how to open it (card.md.jinja)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from ruamel.yaml import YAML

from bloomery.core.text import redact_secrets
from bloomery.core.units import format_count, format_seconds
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.hub import PREFIX, is_hub_id
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.families import architecture_of
from bloomery.monitor.events import DeviceStats, EvalDone, RunStarted, StepDone, read_events
from bloomery.monitor.summary import Devices
from bloomery.monitor.words import format_joules
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Recipe
from bloomery.report.page import loss_plot

PLOT = "loss.svg"


@dataclass(frozen=True)
class Training:
    """The training of an exported checkpoint, read from its run folder."""

    run: Path
    recipe: Recipe
    plan: RunPlan | None
    step: int
    tokens: int
    seconds: float
    loss: float | None  # of the last step
    per: str  # the loss unit: RunStarted.loss_unit
    device: str
    evaluation: EvalDone | None
    joules: float | None  # of all devices whose power is known
    measured_seconds: float  # in which it is known


@dataclass(frozen=True)
class Merge:
    """A merge of whole models: the name and weight of each, and the settings of the method."""

    method: str
    models: tuple[tuple[str, float], ...]
    base: str | None = None
    density: float | None = None


def training_of(checkpoint: Path) -> Training | None:
    """None when the folder is no checkpoint of a run."""
    run = checkpoint.parent.parent
    step = checkpoint.name.removeprefix("step-")
    if (
        checkpoint.parent.name != "checkpoints"
        or not step.isdecimal()
        or not (run / "recipe.yaml").is_file()
    ):
        return None
    steps: dict[int, StepDone] = {}
    evaluation = None
    device = ""
    per = "token"
    devices = Devices()
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, RunStarted):
            device = event.device
            per = event.loss_unit
        elif isinstance(event, StepDone) and event.step <= int(step):
            steps[event.step] = event  # after a resume the last event of a step counts
        elif isinstance(event, EvalDone) and event.step <= int(step):
            evaluation = event
        elif isinstance(event, DeviceStats) and event.step <= int(step):
            devices.add(event)
    last = steps[max(steps)] if steps else None
    plan = read_plan(run / "plan.json") if (run / "plan.json").is_file() else None
    return Training(
        run=run,
        recipe=load_recipe(run / "recipe.yaml").recipe,
        plan=plan,
        step=int(step),
        tokens=last.tokens if last else 0,
        seconds=sum(event.step_seconds for event in steps.values()),
        loss=last.loss if last else None,
        per=per,
        device=device,
        evaluation=evaluation,
        joules=devices.joules,
        measured_seconds=devices.covered_seconds,
    )


def write_card(
    folder: Path,
    name: str,
    config: ModelConfig,
    sources: Sequence[Path],
    *,
    base: str | None = None,
    merge: Merge | None = None,
) -> None:
    """README.md, and next to it the loss curve of the run. `sources`: the folder of the weights, then others whose card
    may state the license. `base`: the model that an adapter is for.
    """
    training = None if merge is not None else training_of(sources[0])
    known = [
        *sources,
        *(
            [training.plan.model.source]
            if training and training.plan and training.plan.model.source
            else []
        ),
    ]
    card = model_card(
        name,
        config,
        training,
        base=base,
        merge=merge,
        license_=license_of(*map(Path, known)),
        chat=bool(own_templates(load_tokenizer(folder).config)),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    if training is not None and training.loss is not None:
        loss_plot(training.run).save(folder / PLOT)


def license_of(*folders: Path | None) -> str | None:
    """From the metadata block of the first model card that states one."""
    for folder in folders:
        card = None if folder is None else folder / "README.md"
        if card is None or not card.is_file():
            continue
        head = card.open(encoding="utf-8", errors="replace").read(2**16)
        block = re.match(r"---\n(.*?)\n---", head, flags=re.DOTALL)
        stated = (
            re.search(r"^license: *['\"]?([\w.+-]+)", block[1], flags=re.MULTILINE)
            if block
            else None
        )
        if stated:
            return stated[1]
    return None


def model_card(
    name: str,
    config: ModelConfig,
    training: Training | None,
    *,
    base: str | None = None,
    merge: Merge | None = None,
    license_: str | None = None,
    chat: bool = False,
) -> str:
    """Markdown with the metadata block that model hubs read. `base`: the model that an adapter is for. `chat`: the
    tokenizer has a chat template.
    """
    task = "text-classification" if config.head == "values" else "text-generation"
    origin = base if training is None else base or training.recipe.model.from_
    relation = "adapter" if base is not None else "merge" if merge else "finetune"
    done = None if training is None else training.plan or training.recipe
    objective = None if done is None else done.objective.kind
    method = (
        None
        if done is None or done.adapter.kind == "none"
        else getattr(done.adapter, "method", done.adapter.kind)
    )
    origins = [model for model, _ in merge.models] if merge else [origin] if origin else []
    data = None if training is None else training.recipe.data
    paths = (
        []
        if data is None
        else [data.path]
        if data.path is not None
        else [each.path for each in data.sources]
    )
    stated: dict[str, Any] = {
        "license": license_,
        "base_model": [model for model in origins if is_hub_id(model)],
        "datasets": [
            path.removeprefix(PREFIX)
            for path in paths
            if path.startswith(PREFIX) or is_hub_id(path)
        ],
    }
    stated |= {"base_model_relation": relation} if stated["base_model"] else {}
    stated |= {"library_name": "transformers" if base is None else "peft", "pipeline_tag": task}
    how = "merge" if merge else objective
    tags = [
        "bloomery",
        how,
        method,
        "conversational" if chat and task == "text-generation" else None,
    ]
    stated |= {"tags": [str(tag).lower() for tag in dict.fromkeys(tags) if tag]}
    metadata = ModelCardData(**{key: value for key, value in stated.items() if value})
    fields: dict[str, Any] = {
        "name": name,
        "config": config,
        "training": training,
        "merge": merge,
        "license": license_,
        "base": None if base is None else public(base),
        "size": format_count(parameter_count(config)),
        "architecture": architecture_of(config),
        "what": _what(
            config, objective, method, adapts=base is not None, merge=merge is not None, chat=chat
        ),
        "origin": None if merge is not None or base is not None or not origin else public(origin),
        "chat": chat,
    }
    if training is not None:
        recipe = training.recipe
        plan = training.plan
        names = ", ".join(Path(path).name for path in paths) or "prepared shards"
        fields |= {
            "plan": plan,
            "objective": objective,
            "data_names": names
            if recipe.data.builtin is None
            else f"builtin {recipe.data.builtin}",
            "tokens": format_count(training.tokens),
            "seconds": format_seconds(training.seconds),
            "unit": "nats per token" if training.per == "token" else f"per {training.per}",
            "started_from": None if recipe.model.from_ is None else public(recipe.model.from_),
            "evaluation": training.evaluation
            if training.evaluation and training.evaluation.loss is not None
            else None,
            "plot": PLOT,
            "recipe_text": _recipe_text(recipe),
            "energy": None
            if training.joules is None
            else (
                f"{format_joules(training.joules)}, measured over {format_seconds(training.measured_seconds)}"
            ),
        }
    template = str(Path(__file__).with_name("card.md.jinja"))
    return str(ModelCard.from_template(metadata, template_path=template, **fields))


_TRAINED = {
    "pretrain": "pretrained",
    "sft": "fine-tuned",
    "distill": "distilled",
    "reward": "trained on preferences",
}


def _what(
    config: ModelConfig,
    objective: str | None,
    method: str | None,
    *,
    adapts: bool,
    merge: bool,
    chat: bool,
) -> str:
    """What the model is, as the first words of its card."""
    if config.head == "values":
        kind = "reward model"
    elif chat:
        kind = "chat model"
    else:
        kind = "language model"
    if adapts:
        return f"{ADAPTERS.get(method or '', f'{method} adapter' if method else 'Adapter')} that makes a {kind}"
    trained = (
        "" if objective is None else _TRAINED.get(objective, f"trained with {objective.upper()}")
    )
    whole = f"{'merged ' if merge else ''}{kind}{f', {trained}' if trained else ''}"
    return whole[0].upper() + whole[1:]


ADAPTERS = {"lora": "LoRA adapter", "dora": "DoRA adapter"}


def public(model: str) -> str:
    """The id on the Hub, or the last part of a path: a whole path could identify the author."""
    return Path(model).name if model.startswith(("/", ".", "~")) else model


def _recipe_text(recipe: Recipe) -> str:
    """The keys that the recipe sets, as YAML, with paths reduced to their last part and without secrets."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return public(value) if isinstance(value, str) else value

    stream = StringIO()
    YAML().dump(plain(recipe.model_dump(mode="json", exclude_unset=True, by_alias=True)), stream)
    return redact_secrets(stream.getvalue()).rstrip()
