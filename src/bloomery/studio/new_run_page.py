"""The page that makes a run: choose a recipe, change it as a form or as YAML, read its plan, start it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from nicegui import ui

from bloomery.core.errors import UserError, system_errors_worded
from bloomery.core.files import read_whole
from bloomery.core.run_folder import propose_folder
from bloomery.core.text import harmless
from bloomery.plan.made import made_recipe
from bloomery.recipe.load import packaged
from bloomery.studio.commands import Commands
from bloomery.studio.frame import CommandView, notify, page, update_every
from bloomery.studio.recipe_form import (
    SOURCE,
    FormField,
    FormSection,
    Planned,
    planned,
    sections_of,
    value_at,
    value_text,
    with_edit,
    with_key,
    without_defaults,
    write_recipe,
)
from bloomery.studio.watching import Watching, address_of

TYPING_SECONDS = 0.4  # without a key before a plan is made
OPENED = ("data", "train")  # sections
FIRST_FIELDS = 8  # of a section, before "more"
UNSET = "not set"
FIRST_RECIPE = "go-coder-tiny"
_THEME = "Quasar.Dark.isActive ? 'githubDark' : 'githubLight'"  # of the editor, an expression
MOST_CHARACTERS = 100_000  # of a recipe that is planned while it is typed
TOO_LONG = f"the recipe has more than {MOST_CHARACTERS:,} characters"


async def new_run_page(watching: Watching, commands: Commands, run: str = "") -> None:
    """`run`: the name of a run whose recipe it begins with."""
    with page("New run", "/new"):
        ui.label("New run").classes("text-xl font-semibold").props("role=heading aria-level=1")
        text = ""
        if run:
            try:
                content = read_whole(watching.run(run).reader.folder / "recipe.yaml")
                text = without_defaults(content.decode("utf-8", errors="replace"), run)
                ui.label(f"with the recipe of {harmless(run)}")
            except (UserError, OSError) as error:
                problem = error.problem if isinstance(error, UserError) else error.strerror
                ui.label(harmless(f"error: {problem}")).classes("text-negative")
        view = NewRun(commands, None if text else FIRST_RECIPE)
        if text:
            await view.use(text, run)
        else:
            await view.use(f"extends: {FIRST_RECIPE}\n", FIRST_RECIPE)


@final
class NewRun:
    """Mutable: one open page with a recipe that is not a run yet."""

    def __init__(self, commands: Commands, packaged_recipe: str | None) -> None:
        self.commands = commands
        self.text = ""
        self.name = "recipe"
        self.planned = Planned()
        self._version = 0  # of the text
        self._inputs: dict[str, tuple[FormField, Any]] = {}
        self._filled: dict[str, str] = {}  # the last value of each input
        self._folds: dict[str, tuple[ui.expansion, ...]] = {}  # that hide an input
        self._mistakes: dict[str, str] = {}  # by key
        self._refused: dict[str, str] = {}  # by key: why the value of its input is not in the text
        self._num_changes = 0  # that are being made or planned
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._kinds: tuple[str, ...] = ()
        self._chooser(packaged_recipe)
        with ui.element("div").classes("w-full grid gap-6 grid-cols-1 lg:grid-cols-[5fr_7fr]"):
            with ui.column().classes("w-full min-w-0 gap-2"):
                with ui.tabs().props("dense no-caps align=left") as tabs:
                    form_tab = ui.tab("Form")
                    yaml_tab = ui.tab("YAML")
                with ui.tab_panels(tabs, value=form_tab).classes("w-full"):
                    with ui.tab_panel(form_tab).classes("p-0"):
                        self._form = ui.column().classes("w-full gap-1")
                    with ui.tab_panel(yaml_tab).classes("p-0"):
                        self._editor = ui.codemirror(
                            "", language="YAML", line_wrapping=True, on_change=self._on_yaml
                        ).classes("w-full h-[32rem]")
                        self._editor.props(remove="theme").props(f':theme="{_THEME}"')
                # The editor exists in the page once its tab has been opened.
                tabs.on_value_change(self._name_editor)
            # The form is long: the plan stays in view, and in a narrow window it comes first.
            with ui.column().classes(
                "w-full min-w-0 gap-2 flex-nowrap max-lg:order-first lg:sticky lg:top-14 lg:self-start"
                " lg:max-h-[calc(100vh-4rem)] lg:overflow-y-auto"
            ):
                self._problem = ui.label().classes("studio-text text-negative").props("role=alert")
                with ui.row().classes("items-center"):
                    self._start_button = ui.button(
                        "Start", icon="play_arrow", on_click=self._start
                    ).props("no-caps")
                    ui.button(
                        "Show three examples with their loss mask", on_click=self._preview
                    ).props("outline no-caps")
                self._notes = ui.label().classes("studio-text")
                self._command = CommandView(commands, "", opened=True)
                ui.label("Plan").classes("text-lg font-semibold").props("role=heading aria-level=2")
                self._plan = ui.label().classes("studio-text studio-plan w-full overflow-x-auto")
                # The arrow keys scroll it.
                self._plan.props("tabindex=0 role=region aria-label=Plan")
                self._suggestions = ui.column().classes("w-full gap-1")
        update_every(1.0, self._command.update)

    def _chooser(self, packaged_recipe: str | None) -> None:
        with ui.row().classes("w-full items-end gap-3"):
            recipes = ui.select(
                sorted(packaged()), value=packaged_recipe, label="Packaged recipe", with_input=True
            ).classes("w-full sm:w-64")

            async def use_recipe() -> None:
                if recipes.value is not None:
                    await self.use(f"extends: {recipes.value}\n", str(recipes.value))

            recipes.on_value_change(use_recipe)
            ui.label("or").classes("sm:pb-3")
            model = ui.input("Model", placeholder="folder or Hub id")
            data = ui.input("Dataset", placeholder="file, folder or hub:ORG/NAME")
            for field in (model, data):
                field.classes("w-full sm:w-64")

            async def use_model() -> None:
                try:
                    with system_errors_worded():
                        made = await asyncio.to_thread(
                            made_recipe, model.value or "", data.value or None, planning=True
                        )
                except UserError as error:
                    notify(error)
                    return
                recipes.value = None
                await self.use(made.complete_text, made.name)

            ui.button("Make a recipe", on_click=use_model).props("outline no-caps").classes("mb-2")

    def _name_editor(self) -> None:
        """For screen readers: the field that is typed into is inside the element."""
        ui.run_javascript(
            f"getElement({self._editor.id})?.editorPromise"
            f".then(view => view.contentDOM.setAttribute('aria-label', 'Recipe as YAML'))"
        )

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

    async def use(self, text: str, name: str) -> None:
        """Begins with this recipe."""
        self.name = name
        self._refused = {}
        await self._change(text)

    async def _on_yaml(self) -> None:
        if self._editor.value == self.text:
            return
        self._refused = {}
        await self._change(self._editor.value or "", is_typed=True)

    async def _change(self, text: str, *, is_typed: bool = False) -> None:
        """Plans a new text; of several within TYPING_SECONDS the last one alone."""
        with self._changing():
            await self._plan_text(text, is_typed=is_typed)

    async def _plan_text(self, text: str, *, is_typed: bool) -> None:
        self.text = text
        self._version += 1
        version = self._version
        if is_typed:
            await asyncio.sleep(TYPING_SECONDS)
            if version != self._version:
                return
        if len(text) > MOST_CHARACTERS:
            result = Planned(problem=TOO_LONG)
        else:
            result = await asyncio.to_thread(planned, text, self.name)
        if version == self._version:
            self.planned = result
            self._show()

    def _show(self) -> None:
        """The form, the editor and the plan of the present text."""
        result = self.planned
        if self._editor.value != self.text:
            self._editor.value = self.text
        if result.values is not None:
            sections = sections_of(result.values)
            keys = tuple(field.key for section in sections for field in section.fields)
            if keys != self._kinds:
                self._kinds = keys
                self._build(sections)
        for key, (field, element) in self._inputs.items():
            self._fill(key, field, element)

        self._problem.text = "\n".join(
            filter(None, (result.problem, result.fix and f"fix: {result.fix}"))
        )
        self._problem.visible = bool(result.problem)
        self._start_button.enabled = not result.problem and not self._refused
        self._start_button.text = (
            "Start" if result.fits or result.problem else "Start although it does not fit"
        )
        if result.lines:
            self._plan.text = "\n".join(result.lines)
        self._notes.text = "\n".join(f"note: {note}" for note in result.notes)
        self._notes.visible = bool(result.notes)
        # The plan of the last recipe without mistakes stays, as such.
        self._plan.style(f"opacity: {1 if result.lines else 0.65}")
        self._suggestions.clear()
        with self._suggestions:
            for edit, saves in result.suggestions:
                with ui.row().classes("items-center no-wrap"):
                    ui.button(edit, on_click=partial(self._apply, edit)).props(
                        "outline dense no-caps"
                    )
                    ui.label(saves)

    def _build(self, sections: list[FormSection]) -> None:
        self._form.clear()
        self._inputs = {}
        self._mistakes = {}
        with self._form:
            for section in sections:
                with (
                    ui.expansion(section.name, caption=section.description)
                    .classes("w-full")
                    .props("dense header-class=text-weight-medium") as expansion
                ):
                    expansion.value = section.name in OPENED
                    self._add_fields(section.fields[:FIRST_FIELDS], expansion)
                    if section.fields[FIRST_FIELDS:]:
                        with ui.expansion("more").classes("w-full").props("dense") as more:
                            self._add_fields(section.fields[FIRST_FIELDS:], expansion, more)

    def _add_fields(self, fields: Sequence[FormField], *folds: ui.expansion) -> None:
        with ui.element("div").classes(
            "studio-form w-full grid gap-x-4 gap-y-1 grid-cols-1 sm:grid-cols-2"
        ):
            for field in fields:
                self._inputs[field.key] = field, self._input(field)
                self._folds[field.key] = folds

    def _input(self, field: FormField) -> Any:
        label = ".".join(field.path[1:])

        # NiceGUI also calls this, later, for a value that the page has set: `_set` knows those.
        async def change() -> None:
            await self._set(field, str(element.value or ""))

        element: Any
        if field.options:
            options = {option: UNSET if option == "null" else option for option in field.options}
            element = ui.select(options, label=label, on_change=change)
        else:
            element = ui.input(label)
            element.on("change", change)  # when the field is left, or at Enter
        element.without_auto_validation()  # it would hide a mistake at the first key
        element.props(f'dense hint="{_attribute(field.description)}"').classes("w-full").mark(
            field.key
        )
        return element

    def _shown(self, field: FormField) -> str:
        """The value of a key as its input shows it."""
        value = value_at(self.planned.values, field.path)
        if not field.options:
            return "" if value is None else value_text(value)
        text = value_text(value)
        return text if text in field.options else field.options[0]

    def _fill(self, key: str, field: FormField, element: Any) -> None:
        refusal = self._refused.get(key, "")
        if self.planned.values is not None and not refusal:
            text = self._filled[key] = self._shown(field)
            if element.value != text:
                element.value = text
        mistake = refusal or self.planned.problem_at(key)
        if mistake != self._mistakes.get(key, ""):
            self._mistakes[key] = mistake
            element.props(remove="error error-message")
            if mistake:
                element.props(f'error error-message="{_attribute(mistake)}"')
                for fold in self._folds[key]:
                    fold.open()
        is_set = self._is_set(field)
        element.classes(add="font-bold" if is_set else None, remove=None if is_set else "font-bold")

    def _is_set(self, field: FormField) -> bool:
        """Whether the text has the key, not only what it extends."""
        return self.planned.origins.get(field.key, "").startswith(SOURCE)

    async def _set(self, field: FormField, value: str) -> None:
        if value == self._filled.get(field.key):
            return
        self._filled[field.key] = value
        if value == "null" and self._is_set(field):
            value = ""
        was_refused = self._refused.pop(field.key, None) is not None
        try:
            await self._edit(lambda text: with_key(text, field.path, value))
        except UserError as error:
            # The recipe keeps its value: the field says so, and nothing starts with another one than it shows.
            self._refused[field.key] = error.problem
            self._show()
        else:
            if was_refused:
                self._show()

    async def _apply(self, suggestion: str) -> None:
        try:
            await self._edit(lambda text: with_edit(text, suggestion))
        except UserError as error:
            notify(error)

    async def _edit(self, edit: Callable[[str], str]) -> None:
        """In a thread: a long recipe takes seconds, in which other pages are answered. Raises UserError."""
        with self._changing():
            while True:
                text = self.text
                if len(text) > MOST_CHARACTERS:
                    raise UserError(TOO_LONG, where=self.name, fix="make it shorter")
                new_text = await asyncio.to_thread(edit, text)
                if text == self.text:  # else another change came before
                    break
            await self._change(new_text)

    async def _preview(self) -> None:
        await self._settle()
        self._run(lambda path: ("prepare", path, "--preview", "3"))

    async def _start(self) -> None:
        """Starts what the page shows: a field that is left by a click of the button is still being planned."""
        button = self._start_button
        if not button.enabled:  # the second click of two
            return
        pressed = button.text
        button.enabled = False
        button.props("loading")
        await self._settle()
        button.props(remove="loading")
        button.enabled = not self.planned.problem and not self._refused
        # It may say by now that the recipe does not fit, to which nobody has agreed.
        if not button.enabled or button.text != pressed:
            return
        folder = propose_folder(self.planned.name or self.name)
        if self._run(lambda path: ("train", path, "--run-dir", str(folder)), subject=folder.name):
            button.enabled = False
            ui.navigate.to(address_of(folder.name))

    def _run(self, arguments: Any, *, subject: str = "") -> bool:
        """Writes the recipe into the working folder and starts a command with it."""
        try:
            path = write_recipe(self.text, self.planned.name or self.name)
            subject = subject or str(path)
            self.commands.start(*arguments(str(path)), subject=subject)
        except UserError as error:
            notify(error)
            return False
        ui.notify(f"wrote {harmless(str(path))}")
        self._command.subject = subject
        self._command.update()
        return True


def _attribute(text: str) -> str:
    """For an attribute in quotes, which NiceGUI reads with backslashes as escapes."""
    return text.replace("\\", "/").replace('"', "'").replace("\n", " ")
