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
from bloomery.core.units import format_count, format_joules, format_seconds
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import parameter_count
from bloomery.facts.families import architecture_of
from bloomery.hub import PREFIX, is_hub_id
from bloomery.monitor.events import DeviceStats, EvalDone, RunStarted, StepDone, read_events
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.rewards import reward_name
from bloomery.recipe.schema import Recipe
from bloomery.report.page import loss_plot
from bloomery.view.devices import Devices

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
    reward: float | None  # of the last rollout
    loss_unit: str  # RunStarted.loss_unit
    device: str
    evaluation: EvalDone | None
    joules: float | None  # of all devices whose power is known
    measured_seconds: float  # in which their power is known


@dataclass(frozen=True)
class Merge:
    """A merge of whole models: the name and weight of each, and the base whose changes were weighted."""

    method: str
    models: tuple[tuple[str, float], ...]
    base: str | None = None


def training_of(checkpoint: Path) -> Training | None:
    """None when the folder is no checkpoint of a run."""
    run = checkpoint.parent.parent
    step_text = checkpoint.name.removeprefix("step-")
    is_checkpoint = checkpoint.parent.name == "checkpoints" and step_text.isdecimal()
    if not is_checkpoint or not (run / "recipe.yaml").is_file():
        return None

    # Events up to the checkpoint; after a resume the last event of a step counts.
    step = int(step_text)
    steps: dict[int, StepDone] = {}
    evaluation = None
    device = ""
    loss_unit = "token"
    devices = Devices()
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, RunStarted):
            device = event.device
            loss_unit = event.loss_unit
        elif isinstance(event, StepDone) and event.step <= step:
            steps[event.step] = event
        elif isinstance(event, EvalDone) and event.step <= step:
            evaluation = event
        elif isinstance(event, DeviceStats) and event.step <= step:
            devices.add(event)

    last_step = steps[max(steps)] if steps else None
    plan = run / "plan.json"
    return Training(
        run=run,
        recipe=load_recipe(run / "recipe.yaml").recipe,
        plan=read_plan(plan) if plan.is_file() else None,
        step=step,
        tokens=last_step.tokens if last_step else 0,
        seconds=sum(event.step_seconds for event in steps.values()),
        loss=last_step.loss if last_step else None,
        reward=next(
            (
                steps[number].metrics["reward"]
                for number in sorted(steps, reverse=True)
                if "reward" in steps[number].metrics
            ),
            None,
        ),
        loss_unit=loss_unit,
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
    licensed_folders = list(sources)
    if training and training.plan and training.plan.model.source:
        licensed_folders.append(Path(training.plan.model.source))
    card = model_card(
        name,
        config,
        training,
        base=base,
        merge=merge,
        license_=license_of(*licensed_folders),
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
        metadata = re.match(r"---\n(.*?)\n---", head, flags=re.DOTALL)
        if metadata is None:
            continue
        pattern = r"^license: *['\"]?([\w.+-]+)"
        license_line = re.search(pattern, metadata[1], flags=re.MULTILINE)
        if license_line is not None:
            return license_line[1]
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
    origin = base or (training.recipe.model.from_ if training is not None else None)

    # What was done, by the plan where there is one, else by the recipe.
    settings = None if training is None else training.plan or training.recipe
    objective = None if settings is None else settings.objective.kind
    method = None
    if settings is not None and settings.adapter.kind != "none":
        method = getattr(settings.adapter, "method", settings.adapter.kind)

    # The block at the head: origin, license, data and tags.
    origins: list[str] = []
    if merge is not None:
        origins = [model for model, _ in merge.models]
    elif origin is not None:
        origins = [origin]
    paths = [] if training is None else _data_paths(training.recipe)
    metadata: dict[str, Any] = {
        "license": license_,
        "base_model": [model for model in origins if is_hub_id(model)],
        "datasets": [
            path.removeprefix(PREFIX)
            for path in paths
            if path.startswith(PREFIX) or is_hub_id(path)
        ],
    }
    if metadata["base_model"]:
        relation = "adapter" if base is not None else "merge" if merge else "finetune"
        metadata["base_model_relation"] = relation
    metadata["library_name"] = "transformers" if base is None else "peft"
    metadata["pipeline_tag"] = task
    is_conversational = chat and task == "text-generation"
    tags = [
        "bloomery",
        "merge" if merge else objective,
        method,
        "conversational" if is_conversational else None,
    ]
    metadata["tags"] = [str(tag).lower() for tag in dict.fromkeys(tags) if tag]

    # What the template fills in.
    fields: dict[str, Any] = {
        "name": name,
        "config": config,
        "training": training,
        "merge": merge,
        "license": license_,
        "base": None if base is None else public(base),
        "size": format_count(parameter_count(config)),
        "architecture": architecture_of(config),
        "what": _description(
            config, objective, method, adapts=base is not None, merge=merge is not None, chat=chat
        ),
        "origin": None if merge is not None or base is not None or not origin else public(origin),
        "chat": chat,
    }
    if training is not None:
        fields |= _training_fields(training, objective, paths)
    return str(
        ModelCard.from_template(
            ModelCardData(**{key: value for key, value in metadata.items() if value}),
            template_path=str(Path(__file__).with_name("card.md.jinja")),
            **fields,
        )
    )


def _data_paths(recipe: Recipe) -> list[str]:
    if recipe.data.path is not None:
        return [recipe.data.path]
    return [source.path for source in recipe.data.sources]


def _training_fields(
    training: Training, objective: str | None, paths: Sequence[str]
) -> dict[str, Any]:
    """The fields of the template about the training."""
    recipe = training.recipe
    data_names = ", ".join(Path(path).name for path in paths) or "prepared shards"
    if recipe.data.builtin is not None:
        data_names = f"builtin {recipe.data.builtin}"
    energy = None
    if training.joules is not None:
        measured = format_seconds(training.measured_seconds)
        energy = f"{format_joules(training.joules)}, measured over {measured}"
    is_evaluated = training.evaluation is not None and training.evaluation.loss is not None
    is_per_token = training.loss_unit == "token"
    return {
        "plan": training.plan,
        "objective": objective,
        "data_names": data_names,
        "tokens": format_count(training.tokens),
        "seconds": format_seconds(training.seconds),
        "unit": "nats per token" if is_per_token else f"per {training.loss_unit}",
        "started_from": None if recipe.model.from_ is None else public(recipe.model.from_),
        "evaluation": training.evaluation if is_evaluated else None,
        "plot": PLOT,
        "recipe_text": _recipe_text(recipe),
        "energy": energy,
        "rewards": ", ".join(map(reward_name, recipe.rewards)),
    }


_TRAINED = {
    "pretrain": "pretrained",
    "sft": "fine-tuned",
    "distill": "distilled",
    "reward": "trained on preferences",
}


def _description(
    config: ModelConfig,
    objective: str | None,
    method: str | None,
    *,
    adapts: bool,
    merge: bool,
    chat: bool,
) -> str:
    """What the model is, as the first words of its card."""
    kind = "chat model" if chat else "language model"
    if config.head == "values":
        kind = "reward model"
    if adapts:
        adapter = ADAPTERS.get(method or "", f"{method} adapter" if method else "Adapter")
        return f"{adapter} that makes a {kind}"
    if merge:
        kind = f"merged {kind}"
    if objective is not None:
        kind += ", " + _TRAINED.get(objective, f"trained with {objective.upper()}")
    return kind[0].upper() + kind[1:]


ADAPTERS = {"lora": "LoRA adapter", "dora": "DoRA adapter"}


def public(model: str) -> str:
    """The id on the Hub, or the last part of a path: a whole path could identify the author."""
    return Path(model).name if model.startswith(("/", ".", "~")) else model


def _recipe_text(recipe: Recipe) -> str:
    """The keys that the recipe sets, as YAML, with paths reduced to their last part and without secrets."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return public(value) if isinstance(value, str) else value

    stream = StringIO()
    YAML().dump(plain(recipe.model_dump(mode="json", exclude_unset=True, by_alias=True)), stream)
    return redact_secrets(stream.getvalue()).rstrip()
