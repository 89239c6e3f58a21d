"""The recipe that answers three questions: which model, which data, and what it shall learn. Does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bloomery import hub
from bloomery.core.errors import UserError, system_errors_worded
from bloomery.core.text import expanded, harmless
from bloomery.core.units import counted
from bloomery.data.sources.documents import peek
from bloomery.hub import is_hub_id
from bloomery.plan.made import made_recipe
from bloomery.recipe.load import load_recipe, load_text, packaged
from bloomery.recipe.schema import Source
from bloomery.studio.data_choices import PURPOSE, PURPOSES, DataFacts, Purpose, facts_of, place_of
from bloomery.studio.model_choices import about_model, near
from bloomery.studio.recipe_form import SOURCE, Planned, value_text, with_edits, with_key

BUILTIN = "built in: "  # before what stands for a dataset that has no path
_NONE = Purpose("", "", "", "", "any")
# Of a recipe's data section: what belongs to the dataset that it names.
_OF_DATASET = ("builtin", "sources", "glob", "pictures")


@dataclass(frozen=True)
class Answers:
    """`model`: a folder, an id of the Hub or a packaged recipe. `data`: a path, or an id of the Hub. `purpose`: a name
    of PURPOSES; "": what the data are for. `columns`: roles and columns that were chosen. `reward`: an entry of
    `rewards` as YAML.
    """

    model: str = ""
    data: str = ""
    purpose: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    reward: str = ""

    @property
    def is_packaged(self) -> bool:
        return self.model in packaged()


@dataclass(frozen=True)
class Answered:
    """What answers mean. `text`: the recipe, "" while there is none. `mistakes`: by question (model, data, purpose),
    why an answer is none. `missing`: what is still to be answered, as a sentence.
    """

    name: str = "recipe"
    text: str = ""
    about_model: str = ""
    about_data: str = ""  # of a dataset that is not here yet
    facts: DataFacts | None = None
    mistakes: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""


def answered(
    answers: Answers, edits: Mapping[str, str], own_text: str | None = None, changed: str = ""
) -> Answered:
    """Reads the model and the data that are named, and makes the recipe with `edits` on top, values by key.

    `own_text`: a recipe that is not made of answers, in which the answer `changed` is set: model, data, purpose,
    columns or reward. Of such a recipe the plan judges: it has models without a folder and data without a path. Only
    what `changed` names can be a mistake here.
    """
    mistakes = dict[str, str]()
    about = about_data = ""
    is_made = own_text is None
    if answers.model:
        try:
            with system_errors_worded():
                about = about_model(answers.model)
        except UserError as error:
            if is_made or changed == "model":
                mistakes["model"] = sentence_of(error)
    facts: DataFacts | None = None
    if answers.data and not answers.data.startswith(BUILTIN):
        try:
            with system_errors_worded():
                facts = facts_of(answers.data)
        except UserError as error:
            if is_to_be_downloaded(answers.data):
                about_data = "to be downloaded from the Hub"
            elif is_made or changed == "data":
                mistakes["data"] = sentence_of(error)
    missing = _missing(answers, facts) if is_made else ""
    is_unread = facts is not None and facts.problem and not facts.questions and not answers.columns
    if facts is not None and is_unread and (is_made or changed == "data"):
        mistakes["data"] = f"{facts.problem}: {facts.fix}"
    result = Answered(
        about_model=about, about_data=about_data, facts=facts, mistakes=mistakes, missing=missing
    )
    # Without data the plan assumes conversations, so that a model alone has an answer.
    if mistakes or not (answers.model or own_text) or (missing and answers.data):
        return result
    try:
        with system_errors_worded():
            if own_text is None:
                name, text = recipe_of(answers, facts)
                text = with_edits(text, edits)
                result = replace(result, **_of_packaged(answers, name, about))
            else:
                name, text = "", _changed_text(own_text, answers, changed)
    except UserError as error:
        return replace(result, mistakes={question_of(error.where, answers): sentence_of(error)})
    return replace(result, name=name, text=text)


def _of_packaged(answers: Answers, name: str, about: str) -> dict[str, Any]:
    """What a packaged recipe brings: its own dataset, or for data of another kind its model alone."""
    if not answers.is_packaged:
        return {}
    if name != answers.model:
        return {
            "about_model": f"{about}, whose settings are for other data: only its model is taken"
        }
    if answers.data:
        return {}
    path = load_recipe(answers.model).recipe.data.path
    return {"about_data": f"The recipe's own: {near(path)}"} if path else {}


def _changed_text(text: str, answers: Answers, changed: str) -> str:
    """A recipe's text with one answer set in it. Raises UserError."""
    if changed == "model":
        return with_key(text, ("model", "from"), value_text(answers.model))
    if changed == "purpose":
        return with_key(text, ("objective",), PURPOSE[answers.purpose].objective)
    if changed == "reward":
        return with_key(text, ("rewards",), f"[[{answers.reward}]]")
    return with_data(text, answers) if changed else text


def answers_of(values: Mapping[str, Any] | None, answers: Answers) -> Answers:
    """What a recipe answers, by its complete values; of one that cannot be read, what was answered before."""
    if values is None:
        return answers
    model = values.get("model") or {}
    data = values.get("data") or {}
    kind = (values.get("objective") or {}).get("kind")
    name = str(model.get("from") or model.get("preset") or model.get("family") or "")
    place = str(data.get("path") or "")
    if data.get("builtin"):
        place = f"{BUILTIN}{data['builtin']}"
    if data.get("sources"):
        place = f"{BUILTIN}{counted(len(data['sources']), 'sources')}"
    kind = "dpo" if kind == "kto" else kind  # one question asks for both
    is_same = answers.data == place and PURPOSE.get(answers.purpose, _NONE).objective == kind
    fitting = (purpose.name for purpose in PURPOSES if purpose.objective == kind)
    purpose = answers.purpose if is_same else next(fitting, "")
    return Answers(near(name), near(place), purpose, dict(data.get("columns") or {}))


def _missing(answers: Answers, facts: DataFacts | None) -> str:
    if not answers.model:
        return "Choose a model." if answers.data else "Choose a model and your data."
    if not answers.data:
        return (
            ""
            if answers.is_packaged
            else "Choose your data. Until then, conversations are assumed."
        )
    if facts is not None and facts.roles_of(answers.purpose) and not answers.columns:
        return "Say which column is which."
    if answers.purpose == "rewards" and not answers.reward:
        return "Say how completions are scored."
    return ""


def is_to_be_downloaded(data: str) -> bool:
    """Whether it is a dataset of the Hub that is not on this disk."""
    place = place_of(data)
    return place.startswith(hub.PREFIX) and is_hub_id(place.removeprefix(hub.PREFIX))


def sentence_of_plan(planned: Planned) -> str:
    """The one problem of a plan, without its place, but with the line of a file."""
    problem = planned.problem.removesuffix(planned.where).strip()
    line = re.search(r":(\d+)(?=,|$)", planned.where)
    if line is not None:
        problem = f"line {int(line[1]):,}: {problem}"
    return f"{problem}: {planned.fix}" if planned.fix else problem


def question_of(where: str, answers: Answers) -> str:
    """The question that an error is about, by its place: model, data, purpose, or "" for a setting."""
    key = where.partition(":")[0].strip()
    if key.startswith(("rewards", "objective")):
        return "purpose"
    if key == "data.path" or (answers.data and key.startswith(answers.data)):
        return "data"
    is_model = key in ("model", "model.from", answers.model) or where == answers.model
    return "model" if is_model or where.endswith(f"/{answers.model}") else ""


def sentence_of(error: UserError) -> str:
    """An error as a field shows it: what, and the way out, unless that is to set the field itself."""
    if error.fix == "set data.path":
        return harmless(error.problem)
    return harmless(f"{error.problem}: {error.fix}" if error.fix else error.problem)


def format_of(columns: Mapping[str, str]) -> str:
    """The format of rows whose columns are chosen for these roles."""
    if "instruction" in columns:
        return "alpaca"
    if "chosen" in columns:
        return "preference"
    return "prompts" if "prompt" in columns else "auto"


def overrides_of(answers: Answers, facts: DataFacts | None) -> list[str]:
    """The words after `--model` and `--data` that say the same."""
    words = list[str]()
    purpose = PURPOSE.get(answers.purpose)
    is_proposed = facts is not None and (purpose is None or purpose.name == facts.proposed)
    # From these columns the objective follows.
    is_by_columns = bool({"instruction", "text"} & answers.columns.keys()) and not (
        facts is not None and facts.proposed
    )
    if purpose is not None and not is_proposed and not is_by_columns:
        words.append(f"objective={purpose.objective}")
    if answers.columns:
        if (format := format_of(answers.columns)) != "auto":
            words.append(f"data.format={format}")
        words.append(f"data.columns={{{value_text(dict(answers.columns)).strip('{}')}}}")
    if answers.reward and answers.purpose == "rewards":
        words.append(f"rewards=[{answers.reward}]")
    return words


def recipe_of(answers: Answers, facts: DataFacts | None) -> tuple[str, str]:
    """Name and text of the recipe. Without a dataset, conversations are assumed. Raises UserError.

    A packaged recipe keeps its settings for data of its own kind; for others only its model counts.
    """
    model = answers.model
    if answers.is_packaged:
        text = f"extends: {answers.model}\n"
        recipe = load_text(text, name=answers.model, source=SOURCE).recipe
        purpose = PURPOSE.get(answers.purpose or (facts.proposed if facts is not None else ""))
        is_alike = purpose is None or recipe.objective.spec.data_kind in _kinds_of(purpose)
        if not answers.data or recipe.model.from_ is None or is_alike:
            return answers.model, with_data(text, answers)
        model = recipe.model.from_
    made = made_recipe(model, answers.data or None, overrides_of(answers, facts), planning=True)
    return made.name, made.complete_text


def _kinds_of(purpose: Purpose) -> tuple[str, ...]:
    return ("pairs", "kto") if purpose.name == "preferences" else (purpose.data_kind,)


def with_data(text: str, answers: Answers) -> str:
    """A recipe's text with the dataset of the answers, read as its objective needs it. Raises UserError."""
    if not answers.data:
        return text
    recipe = load_text(text, name="recipe", source=SOURCE).recipe
    path = place_of(answers.data)
    if expanded(path).absolute() == expanded(recipe.data.path or "").absolute():
        return text
    columns = dict(answers.columns)
    format = format_of(columns)
    is_downloaded = not path.startswith(hub.PREFIX) or hub.data_place(path).exists()
    if not columns and is_downloaded:
        found = peek(Source(path=path), recipe.objective.spec.data_kind)
        if found is not None and found[1]:
            format, columns = found
    section = {"path": path, "format": format, "columns": columns}
    fields = type(recipe.data).model_fields
    for key in (*section, *_OF_DATASET):
        unset = fields[key].get_default(call_default_factory=True)
        value = section.get(key, unset)
        if value != getattr(recipe.data, key):
            text = with_key(text, ("data", key), "null" if value is None else value_text(value))
    return text
