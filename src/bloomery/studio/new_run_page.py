"""The page that makes a run: three questions, and beside them whether it fits, how long it takes, and Start."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, final

from nicegui import ui
from starlette.datastructures import QueryParams

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.core.run_folder import propose_folder
from bloomery.core.text import harmless
from bloomery.facts.rates import rate_text
from bloomery.hub import Kind
from bloomery.recipe.axes import split_outside_brackets
from bloomery.studio.column_questions import ColumnQuestions
from bloomery.studio.commands import Commands
from bloomery.studio.compare_page import address_of_sweep
from bloomery.studio.components import button, heading, note, text, toolbar
from bloomery.studio.data_choices import data_here, described
from bloomery.studio.data_given import GivenData
from bloomery.studio.fitting_models import ask_what_fits
from bloomery.studio.frame import notify, page
from bloomery.studio.hub_search import is_searched, search
from bloomery.studio.model_choices import (
    Choice,
    first_choices,
    known_choices,
    models_here,
    recent_answers,
    recipe_choices,
)
from bloomery.studio.picker import Group, Picker
from bloomery.studio.plan_panel import PlanPanel, command_line
from bloomery.studio.purpose_question import PurposeQuestion
from bloomery.studio.recipe_answers import (
    Answered,
    Answers,
    answered,
    answers_of,
    question_of,
    sentence_of,
    sentence_of_plan,
)
from bloomery.studio.recipe_form import (
    FormField,
    Planned,
    inherited_keys,
    mistake_among,
    planned,
    proposed_path,
    value_at,
    value_text,
    with_edits,
    without_defaults,
    write_recipe,
)
from bloomery.studio.rows_shown import show_rows, shown_rows
from bloomery.studio.run_draft import RunDraft, address_of_draft, draft_in
from bloomery.studio.settings_form import SettingsForm, show_mistake
from bloomery.studio.watching import Watching, address_of

TYPING_SECONDS = 0.4  # without a key before a plan is made
SKIPS = "data.on_error"  # of a row that cannot be read
MOST_CHARACTERS = 100_000  # of a recipe that is planned while it is typed
TOO_LONG = f"the recipe has more than {MOST_CHARACTERS:,} characters"
# The settings that matter most: their key, and what they are called.
FIRST_KEYS = (
    ("optimizer.learning_rate", "Learning rate"),
    ("train.epochs", "Epochs"),
    ("adapter.rank", "LoRA rank"),
    ("data.sequence_length", "Length"),
    ("train.batch_size", "Batch"),
)


def running_names(watching: Watching) -> list[str]:
    return [row.name for row in watching.known_rows() if row.status == "running"]


def without_time(run: str) -> str:
    """The name of a run without the times that its folder, and that of the run before it, were given."""
    return re.sub(r"(-\d{8}-\d{6}(-\d+)?)+$", "", run.rpartition("/")[2]) or "recipe"


async def new_run_page(watching: Watching, commands: Commands, query: QueryParams) -> None:
    """`query`: of its address: a draft, or `run`, the name of a run whose recipe it begins with."""
    draft = draft_in(query)
    run = draft.run
    with page("New run", "/new"):
        with heading(
            "New run", "Three questions. Everything else has a default that you can change."
        ):
            pass
        text_of_run, complete_text = "", ""
        if run:
            try:
                content = read_whole(watching.run(run).reader.folder / "recipe.yaml")
                complete_text = content.decode("utf-8", errors="replace")
                text_of_run = without_defaults(complete_text, without_time(run))
                note(f"It begins with the recipe of {harmless(run)}.")
            except (UserError, OSError) as error:
                problem = error.problem if isinstance(error, UserError) else error.strerror
                note(harmless(problem or ""), "bad")
        view = NewRun(commands, running_names(watching))
        view.show()
        await view.begin(draft, text_of_run, inherited_keys(complete_text))
        await view.offer()


@final
class NewRun:
    """Mutable: one open page with a recipe that is not a run yet.

    The recipe is made of the answers, and then of `_edits`; or it is a text of its own, from a run or typed as YAML,
    which answers change.
    """

    def __init__(self, commands: Commands, running: Sequence[str]) -> None:
        """`running`: the runs that train now."""
        self.commands = commands
        self.running = running
        self.answers = Answers()
        self.answered = Answered()
        self.text = ""
        self.name = "recipe"
        self.planned = Planned()
        self._own_text = False
        self._edits: dict[str, str] = {}  # values by key, on top of what the answers make
        self._inherited: frozenset[str] = frozenset()
        self._refused: dict[str, str] = {}  # by key: why the value of its input is not in the text
        self._folder = Path()  # of the run that Start would make
        self._rows_text = ""  # of the recipe whose rows are shown
        self._named = ""  # the recipe's name that is in it
        self._run_name = ""  # as typed
        self._run = ""  # whose recipe it began with
        self._sweep = dict[str, tuple[str, ...]]()  # values to compare, by key
        self._address = "/new"  # of the page, with this draft
        self._shown_values = dict[str, str]()  # by key: of the first settings
        self._version = 0  # of the text
        self._num_changes = 0  # that are being made or planned
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        with ui.element("div").classes("two"):
            with ui.element("div").classes("asks"):
                self._ask_model()
                self._ask_data()
                self._ask_purpose()
                self._ask_settings()
            self.panel = PlanPanel(
                on_start=self._start,
                on_save=self._save,
                on_edit=self._apply,
                on_name=self._name_run,
                on_price=self._plan_again,
            )

    # The questions

    def _ask_model(self) -> None:
        with _question("1", "Which model?", "a folder, a recipe, or a model of the Hub"):
            self._model = Picker(
                "Model",
                "Choose, or type a folder or ORG/NAME",
                on_answer=self._answer_model,
                on_open=self._open_models,
                on_type=partial(self._search, "model"),
            )
            with toolbar():
                button(
                    "What fits this machine?",
                    lambda: ask_what_fits(self._answer_model),
                    kind="quiet",
                    icon="memory",
                )

    def _ask_data(self) -> None:
        with _question(
            "2", "Your data", "a file or folder here, or drop one onto this page"
        ) as card:
            self._data = Picker(
                "Dataset",
                "Choose, or type a path or hub:ORG/NAME",
                on_answer=self._answer_data,
                on_open=self._open_data,
                on_type=partial(self._search, "dataset"),
            )
            self._skip = button("Leave out rows that cannot be read", self._skip_rows)
            self._columns = ColumnQuestions(self._answer_columns)
            with toolbar():
                GivenData(
                    card,
                    on_data=self._take_data,
                    on_mistake=lambda words: self._data.tell("", words),
                )
                self._preview_button = button(
                    "Show rows as the model reads them", self._preview, icon="visibility"
                )
            self._rows = ui.element("div").classes("rows-shown")

    def _ask_purpose(self) -> None:
        with _question("3", "What should it learn?", "the columns of your data propose it"):
            self._purpose = PurposeQuestion(
                on_purpose=self._answer_purpose, on_reward=self._answer_reward
            )

    def _ask_settings(self) -> None:
        with ui.element("section").classes("card"):
            with ui.element("h2").classes("card-title"):
                text("Settings")
                text("what is usual is below each", "small")
            self._fields = dict[str, Any]()
            with ui.element("div").classes("fields"):
                for key, label in FIRST_KEYS:
                    field = ui.input(label).props("outlined dense stack-label").classes("w-full")
                    field.without_auto_validation().mark(f"first-{key}")
                    field.on("change", partial(self._set_first, key))
                    self._fields[key] = field
            self._settings = SettingsForm(self._set_field, self._type_text)

    async def offer(self) -> None:
        """What may be chosen before a list is opened."""
        self._model.offer((), await asyncio.to_thread(first_choices))
        files = await asyncio.to_thread(data_here)
        self._data.offer((), [Choice(name, name) for name in files[:5]])

    async def _open_models(self) -> None:
        here = await asyncio.to_thread(models_here)
        recent, _ = await asyncio.to_thread(recent_answers)
        recipes = await asyncio.to_thread(recipe_choices)
        self._model.offer(
            [
                Group("In this folder", here, "" if here else "No model folder is here."),
                Group("Recent", [Choice(name, name) for name in recent]),
                Group("Packaged recipes, each with its model", recipes),
                Group("Other known models, to be downloaded", known_choices()),
            ]
        )

    async def _open_data(self) -> None:
        names = await asyncio.to_thread(data_here)
        _, recent = await asyncio.to_thread(recent_answers)
        others = [Choice(name, name) for name in recent if name not in names]
        here = [Choice(name, name) for name in names]
        remark = "" if here else "No dataset is here: JSON Lines, CSV, Parquet or text files."
        groups = [Group("In this folder", here, remark), Group("Recent", others)]
        self._data.offer(groups)
        # What a file holds takes a look into it.
        for index, name in enumerate(names):
            here[index] = Choice(name, name, await asyncio.to_thread(described, name))
        self._data.offer(groups)

    async def _search(self, kind: Kind, words: str) -> None:
        """Adds what the Hub has by these words, once nothing has been typed for a while."""
        picker = self._model if kind == "model" else self._data
        await asyncio.sleep(TYPING_SECONDS)
        if picker.value != words or not is_searched(words):
            return
        picker.offer_found(Group("On the Hub", (), "Searching the Hub ..."))
        found = await asyncio.to_thread(search, kind, words)
        if picker.value == words:
            picker.offer_found(Group("On the Hub", found.choices, found.remark))

    async def _take_data(self, path: str) -> None:
        await self.offer()
        await self._answer_data(path)

    async def _skip_rows(self) -> None:
        """Rows that cannot be read are left out, and counted as the dataset is prepared."""
        self._edits[SKIPS] = "skip"
        if self.text:
            await self._set(SKIPS, "skip")
        else:
            await self._answer(self.answers, changed="")

    async def _answer_model(self, value: str) -> None:
        await self._answer(replace(self.answers, model=value), changed="model")

    async def _answer_data(self, value: str) -> None:
        answers = replace(self.answers, data=value, purpose="", columns={}, reward="")
        await self._answer(answers, changed="data")

    async def _answer_purpose(self, name: str) -> None:
        facts = self.answered.facts
        is_asked = facts is not None and bool(facts.questions)
        columns = {} if is_asked else self.answers.columns
        await self._answer(replace(self.answers, purpose=name, columns=columns), changed="purpose")

    async def _answer_columns(self, columns: Mapping[str, str]) -> None:
        answers = replace(self.answers, columns=dict(columns), purpose=self._purpose_now())
        await self._answer(answers, changed="columns")

    def _purpose_now(self) -> str:
        """The purpose that counts: the chosen one, else what the rows are for."""
        facts = self.answered.facts
        if self.answers.purpose or facts is None or self._own_text:  # a recipe says what it is for
            return self.answers.purpose
        return facts.proposed or facts.likeliest

    async def _answer_reward(self, reward: str) -> None:
        answers = replace(self.answers, purpose="rewards", reward=reward)
        await self._answer(answers, changed="reward")

    async def _answer(self, answers: Answers, *, changed: str) -> None:
        """Makes the recipe of the answers, or changes the text that a run or a hand has made, and plans it."""
        self.answers = answers
        if answers.is_packaged and changed == "model":
            self._own_text, self._edits = False, {}
        own_text = self.text if self._own_text else None
        with self._changing():
            self._version += 1
            version = self._version
            result = await asyncio.to_thread(
                answered, answers, dict(self._edits), own_text, changed
            )
            if version != self._version:
                return
            self.answered = result
            self._refused = {}
            if result.text:
                self.name = result.name if own_text is None else self.name
                await self._plan_text(result.text, is_typed=False)
            else:
                self.text = own_text or ""
                self.planned = Planned()
                self.show()

    async def begin(self, draft: RunDraft, text_of_run: str, inherited: frozenset[str]) -> None:
        """With the answers of an address, or with the recipe of a run."""
        self._run = draft.run
        self._run_name = draft.name
        self._sweep = dict(draft.sweep)
        self._inherited = inherited
        if draft.text or text_of_run:
            self.name = without_time(draft.run) if draft.run else "recipe"
            self._own_text = True
            await self._change(draft.text or text_of_run)
        elif draft.answers != Answers():
            self._edits = dict(draft.edits)
            await self._answer(draft.answers, changed="")

    def _draft(self) -> RunDraft:
        text = self.text if self._own_text else ""
        return RunDraft(
            self.answers, dict(self._edits), text, self._run_name, self._run, dict(self._sweep)
        )

    def _keep_address(self) -> None:
        """The address of the page follows its answers, so that a reload or the back button loses nothing."""
        address = address_of_draft(self._draft())
        if address != self._address:
            self._address = address
            ui.run_javascript(f"studioAddress({json.dumps(address)})")

    # The recipe

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Inside the block the text, its plan or both are not yet what has been typed."""
        self._num_changes += 1
        self._is_settled.clear()
        try:
            yield
        finally:
            self._num_changes -= 1
            if not self._num_changes:
                self._is_settled.set()

    async def _settle(self) -> None:
        while self._num_changes:
            await self._is_settled.wait()

    async def _type_text(self, text: str) -> None:
        self._refused = {}
        self._own_text, self._edits = True, {}
        await self._change(text, is_typed=True)

    async def _change(self, text: str, *, is_typed: bool = False) -> None:
        """Plans a new text; of several within TYPING_SECONDS the last one alone."""
        with self._changing():
            self._version += 1
            await self._plan_text(text, is_typed=is_typed)

    async def _plan_text(self, text: str, *, is_typed: bool) -> None:
        self.text = text
        version = self._version
        if is_typed:
            await asyncio.sleep(TYPING_SECONDS)
            if version != self._version:
                return
        if len(text) > MOST_CHARACTERS:
            result = Planned(problem=TOO_LONG)
        else:
            result = await asyncio.to_thread(planned, text, self.name)
            if self._own_text:
                # The questions show what the text says.
                answers = answers_of(result.values, self.answers)
                told = await asyncio.to_thread(answered, answers, {}, text, "")
                if version == self._version:
                    self.answers, self.answered = answers, told
        if version == self._version:
            self.planned = result
            self.show()

    async def _set_first(self, key: str) -> None:
        """One value, or several with commas between them: these are compared."""
        typed = str(self._fields[key].value or "")
        self._shown_values.pop(key, None)
        values = tuple(dict.fromkeys(filter(None, map(str.strip, split_outside_brackets(typed)))))
        if len(values) < 2:
            self._sweep.pop(key, None)
            await self._set(key, typed)
            self.show()
            return
        self._refused.pop(key, None)
        mistake = await asyncio.to_thread(mistake_among, self.text, key, values)
        if mistake:
            self._refused[key] = mistake
            self.show()
            return
        self._sweep[key] = values
        await self._set(key, values[0])
        self.show()

    async def _plan_again(self) -> None:
        with self._changing():
            await self._plan_text(self.text, is_typed=False)

    def _name_run(self, name: str) -> None:
        self._run_name = re.sub(r"[^\w.-]+", "-", name)[:80].strip("-.")
        self.show()

    async def _set_field(self, field: FormField, value: str) -> None:
        await self._set(field.key, value)

    async def _set(self, key: str, value: str) -> None:
        if value == self._value_at(key) and key not in self._refused:
            return
        if value not in self._sweep.get(key, (value,)):  # set elsewhere: one value
            del self._sweep[key]
        was_refused = self._refused.pop(key, None) is not None
        try:
            await self._edit({key: value})
        except UserError as error:
            # The recipe keeps its value: the field says so, and nothing starts with another one than it shows.
            self._refused[key] = error.problem
            self.show()
        else:
            if was_refused:
                self.show()

    async def _apply(self, suggestion: str) -> None:
        edits = dict(word.split("=", 1) for word in suggestion.split())
        try:
            await self._edit(edits)
        except UserError as error:
            notify(error)

    async def _edit(self, edits: Mapping[str, str]) -> None:
        """In a thread: a long recipe takes seconds, in which other pages are answered. Raises UserError."""
        with self._changing():
            while True:
                text = self.text
                if len(text) > MOST_CHARACTERS:
                    raise UserError(TOO_LONG, where=self.name, fix="make it shorter")
                new_text = await asyncio.to_thread(with_edits, text, edits)
                if text == self.text:  # else another change came before
                    break
            self._edits |= edits
            self._inherited -= edits.keys()
            await self._change(new_text)

    def _value_at(self, key: str) -> str:
        value = value_at(self.planned.values, tuple(key.split(".")))
        if value in (None, "auto"):
            return ""
        if isinstance(value, float):
            return rate_text(value) if key == "optimizer.learning_rate" else f"{value:g}"
        return value_text(value)

    # What is shown

    def show(self) -> None:
        """The questions, the fields and the plan of the present answers."""
        result, told = self.planned, self.answered
        mistakes = dict(told.mistakes)
        for key, words in result.blockers:
            if key != "data":  # not chosen yet is no mistake
                mistakes.setdefault(question_of(key, self.answers), words)
        shows_problem = bool(result.problem)
        if result.problem and (asked := question_of(result.where, self.answers)):
            mistakes.setdefault(asked, sentence_of_plan(result))
            shows_problem = False

        # The button says it.
        about_rows = mistakes.get("data", "")
        self._skip.visible = SKIPS in about_rows
        if self._skip.visible:
            mistakes["data"] = re.sub(rf",? or set {re.escape(SKIPS)}=skip", "", about_rows)

        self._model.fill(self.answers.model)
        self._model.tell(told.about_model, mistakes.get("model", ""))
        self._data.fill(self.answers.data)
        about = told.facts.about if told.facts is not None else told.about_data
        self._data.tell(about, mistakes.get("data", ""))
        purpose = self._purpose_now()
        self._columns.show(told.facts, purpose, self.answers.columns)
        reward = None if self._own_text else self.answers.reward
        self._purpose.show(told.facts, purpose, mistakes.get("purpose", ""), reward=reward)
        self._show_fields()
        self._settings.show(result, self.text, self._refused, self._inherited)

        missing = self._missing(mistakes)
        command = ""
        if not missing:
            with suppress(UserError):
                path = proposed_path(self.text, self._run_name or result.name)
                command = command_line(*self._arguments(str(path)))
        self._preview_button.visible = not missing
        if self._rows_text != self.text:  # these rows are of other answers
            self._rows.clear()
            self._rows_text = self.text
        shown = result if shows_problem else replace(result, problem="", fix="")
        self.panel.show(
            shown,
            missing=missing,
            command=command,
            is_startable=not missing,
            num_runs=prod(map(len, self._sweep.values())),
            name=self._run_name,
            proposed=self._folder.name if command else "",
            name_mistake=self._name_mistake(),
            running=self.running,
        )
        self._keep_address()

    def _missing(self, mistakes: Mapping[str, str]) -> str:
        """Why nothing can be started, as a sentence; "" where it can."""
        result = self.planned
        for name, words in (
            ("model", "Correct the model first."),
            ("data", "Correct the data first."),
            ("purpose", "Answer the third question first."),
        ):
            if mistakes.get(name):
                return words
        if self.answered.missing:
            return self.answered.missing
        if result.problem or self._refused or mistakes:
            return "Correct the settings first."
        if self._name_mistake():
            return "Choose another name first."
        return "" if result.is_startable else "Choose a model and your data."

    def _show_fields(self) -> None:
        """The first settings: their values, or what the plan chooses for them."""
        result = self.planned
        for key, field in self._fields.items():
            refusal = self._refused.get(key, "")
            value = ", ".join(self._sweep.get(key, ())) or self._value_at(key)
            # What cannot be read stays as it was typed, to be corrected.
            is_read = result.values is not None or not self.text
            # What is being typed into another field stays, too.
            if not refusal and is_read and self._shown_values.get(key) != value:
                field.value = self._shown_values[key] = value
            is_full = value_at(result.values, ("adapter", "kind")) == "none"
            field.enabled = bool(self.text) and not (key == "adapter.rank" and is_full)
            field.props(
                f'placeholder="{result.chosen.get(key, "")}" hint="{result.usual.get(key, "")}"'
            )
            show_mistake(field, refusal or result.problem_at(key))

    # Commands

    def _name_mistake(self) -> str:
        """Why the run cannot have this name."""
        is_taken = bool(self._run_name) and (Path("runs") / self._run_name).exists()
        return f"runs/{self._run_name} exists" if is_taken else ""

    def _arguments(self, path: str) -> tuple[str, ...]:
        """Of the command that trains the recipe at `path`, or that compares the values which are typed."""
        name = self.planned.name or self.name
        if self._sweep:
            name = f"{name}-sweep"
        if self._run_name:
            self._folder = Path("runs").absolute() / self._run_name
        elif self._named != name or self._folder.exists():
            self._folder = propose_folder(name)
        self._named = "" if self._run_name else name
        folder = str(self._folder.relative_to(Path.cwd()))
        if self._sweep:
            axes = [f"{key}={','.join(values)}" for key, values in self._sweep.items()]
            return ("sweep", path, *axes, "--run-dir", folder)
        return ("train", path, "--run-dir", folder)

    async def _preview(self) -> None:
        await self._settle()
        self._preview_button.props("loading")
        try:
            documents = await asyncio.to_thread(shown_rows, self.text, self.name)
        except UserError as error:
            self._rows.clear()
            with self._rows:
                note(sentence_of(error), "bad")
        else:
            show_rows(self._rows, documents)
            self._rows_text = self.text
        finally:
            self._preview_button.props(remove="loading")

    async def _save(self) -> None:
        await self._settle()
        path = self._write()
        if path is not None:
            ui.notify(f"wrote {harmless(str(path))}")

    async def _start(self) -> None:
        """Starts what the page shows: a field that is left by a click of the button is still being planned."""
        start = self.panel.start
        if not start.enabled:  # the second click of two
            return
        pressed = start.text
        start.enabled = False
        start.props("loading")
        await self._settle()
        start.props(remove="loading")
        self.show()
        # It may say by now that the recipe does not fit, to which nobody has agreed.
        if not start.enabled or start.text != pressed:
            return
        path = self._write()
        if path is None:
            return
        arguments = self._arguments(str(path))
        if self._begin(arguments, self._folder.name):
            start.enabled = False
            name = self._folder.name
            ui.navigate.to(address_of_sweep(name) if self._sweep else address_of(name))

    def _write(self) -> Path | None:
        """Writes the recipe into the working folder; None where that fails, which is told."""
        try:
            return write_recipe(self.text, self._run_name or self.planned.name or self.name)
        except UserError as error:
            notify(error)
            return None

    def _begin(self, arguments: tuple[str, ...], subject: str) -> bool:
        try:
            self.commands.start(*arguments, subject=subject)
        except UserError as error:
            notify(error)
            return False
        return True


@contextmanager
def _question(number: str, title: str, remark: str) -> Iterator[ui.element]:
    with ui.element("section").classes("card") as card:
        with ui.element("h2").classes("card-title"):
            text(number).classes("step").props("aria-hidden=true")
            text(title)
            text(remark, "small")
        yield card
