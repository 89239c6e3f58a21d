"""What has been answered on New run as the address of its page, so that a reload or the back button loses nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from bloomery.core.errors import UserError
from bloomery.studio.data_choices import PURPOSE
from bloomery.studio.recipe_answers import Answers
from bloomery.studio.recipe_form import with_edits

LONGEST_ADDRESS = 30_000  # servers and browsers take that many characters
ROLE, SETTING, SWEEP = (
    "column.",
    "set.",
    "compare.",
)  # before a role, and before a key of the recipe


@dataclass(frozen=True)
class RunDraft:
    """`edits`: values by key, on top of the recipe that the answers make. `text`: a recipe that is not made of answers;
    "" for one that is. `name`: of the run, as typed. `run`: the run whose recipe it began with. `sweep`: values to
    compare, by key.
    """

    answers: Answers = field(default_factory=Answers)
    edits: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    name: str = ""
    run: str = ""
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def address_of_draft(draft: RunDraft) -> str:
    """The page with this draft; the empty page where it is too long for an address."""
    answers = draft.answers
    given = [("run", draft.run), ("name", draft.name)]
    if draft.text:
        given.append(("recipe", draft.text))
    else:
        given += [
            ("model", answers.model),
            ("data", answers.data),
            ("for", answers.purpose),
            ("reward", answers.reward),
        ]
        given += [(ROLE + role, column) for role, column in answers.columns.items()]
    pairs = [(key, value) for key, value in given if value]
    if not draft.text:  # an edit may take a key out
        pairs += [(SETTING + key, value) for key, value in draft.edits.items()]
    pairs += [(SWEEP + key, value) for key, values in draft.sweep.items() for value in values]
    address = urlencode(pairs)
    return f"/new?{address}" if address and len(address) < LONGEST_ADDRESS else "/new"


def address_with_model(model: str) -> str:
    """New run with this model, or packaged recipe."""
    return address_of_draft(RunDraft(Answers(model=model)))


def draft_in(query: QueryParams) -> RunDraft:
    """The draft of an address, as `address_of_draft` writes it; settings that cannot be read are left out."""
    columns = {key.removeprefix(ROLE): query[key] for key in query if key.startswith(ROLE)}
    edits = dict[str, str]()
    for key in query:
        name = key.removeprefix(SETTING)
        if name != key and name and _is_setting(name, query[key]):
            edits[name] = query[key]
    sweep = dict[str, tuple[str, ...]]()
    for key in query:
        name = key.removeprefix(SWEEP)
        values = tuple(dict.fromkeys(query.getlist(key)))
        if name != key and len(values) > 1 and all(_is_setting(name, value) for value in values):
            sweep[name] = values
    purpose = query.get("for", "")
    answers = Answers(
        model=query.get("model", ""),
        data=query.get("data", ""),
        purpose=purpose if purpose in PURPOSE else "",
        columns=columns,
        reward=query.get("reward", ""),
    )
    return RunDraft(
        answers,
        edits,
        text=query.get("recipe", ""),
        name=query.get("name", ""),
        run=query.get("run", ""),
        sweep=sweep,
    )


def _is_setting(key: str, value: str) -> bool:
    try:
        with_edits("", {key: value})
    except UserError:
        return False
    return True
