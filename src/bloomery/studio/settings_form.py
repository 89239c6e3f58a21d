"""Every key of a recipe as a form with a search, and the recipe as YAML. Does not import torch."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, final

from nicegui import ui

from bloomery.studio.components import caption_fold
from bloomery.studio.recipe_form import (
    SOURCE,
    FormField,
    FormSection,
    KeyPath,
    Planned,
    sections_of,
    value_at,
    value_text,
)

UNSET = "not set"
_THEME = "Quasar.Dark.isActive ? 'githubDark' : 'githubLight'"  # of the editor, an expression
OPENED = ("data", "train")  # sections
# Names of keys in words where the underscores do not say it, and words that are written in another way.
LABELS = {
    "from": "start from",
    "glob": "file pattern",
    "eps": "epsilon",
    "kd_ratio": "weight of the teacher",
    "micro_batch_size": "micro-batch size",
    "stream_micro_batches": "streamed micro-batches",
    "pipeline_microbatches": "pipeline micro-batches",
    "min_lr_ratio": "lowest learning rate, share",
    "num_proc": "processes",
    "on_error": "rows that cannot be read",
    "early_stopping_patience": "early stopping, patience",
    "keep": "checkpoints to keep",
    "max_gpu_temperature": "highest GPU temperature",
    "z_loss": "z-loss",
}
WORDS = {
    "num": "number of", "kv": "key-value", "qk": "query-key", "lr": "learning rate", "dtype": "data type",
    "eps": "epsilon", "ema": "EMA", "neftune": "NEFTune", "rope": "RoPE", "gpu": "GPU", "rslora": "rsLoRA",
    "openenv": "OpenEnv", "vocab": "vocabulary", "dim": "width", "init": "initialization", "muon": "Muon",
    "quant": "quantization", "kwargs": "variables", "python": "Python", "lora": "LoRA",
}  # fmt: skip
FIRST_FIELDS = 8  # of a section, before "more"


@final
class SettingsForm:
    """Mutable: the fields of a recipe, which are made when they are first looked at, and its text.

    `on_field(field, value)` and `on_text(text)` are called for what is typed.
    """

    def __init__(
        self,
        on_field: Callable[[FormField, str], Awaitable[None]],
        on_text: Callable[[str], Awaitable[None]],
    ) -> None:
        self._on_field = on_field
        self._on_text = on_text
        self._planned = Planned()
        self._text = ""
        self._refused: dict[str, str] = {}
        self._inherited: Collection[str] = ()
        self._inputs: dict[str, tuple[FormField, Any]] = {}
        self._filled: dict[str, str] = {}  # the last value of each input
        self._folds: dict[str, tuple[ui.expansion, ...]] = {}  # that hide an input
        self._mistakes: dict[str, str] = {}  # by key
        self._keys: tuple[str, ...] = ()
        self._editor: ui.codemirror | None = None
        self._is_built = False
        with ui.expansion("All settings").classes("w-full") as self._fold:
            self._content = ui.column().classes("w-full gap-2")
        self._fold.on_value_change(self._open)

    def open(self) -> None:
        self._fold.open()

    def _open(self) -> None:
        if self._fold.value and not self._is_built:
            self._is_built = True
            self._build()
            self.show(self._planned, self._text, self._refused, self._inherited)

    def _build(self) -> None:
        with self._content:
            with ui.tabs().props("dense no-caps align=left") as tabs:
                form_tab = ui.tab("Form")
                yaml_tab = ui.tab("YAML")
            with ui.tab_panels(tabs, value=form_tab).classes("w-full"):
                with ui.tab_panel(form_tab).classes("p-0"):
                    self._search = ui.input(
                        placeholder="Search: rank, checkpoint, precision ...",
                        on_change=self._filter,
                    )
                    self._search.props(
                        'outlined dense clearable aria-label="Search the settings"'
                    ).classes("w-full")
                    self._form = ui.column().classes("w-full gap-1")
                with ui.tab_panel(yaml_tab).classes("p-0"):

                    async def typed() -> None:
                        editor = self._editor
                        if editor is not None and editor.value != self._text:
                            await self._on_text(editor.value or "")

                    self._editor = ui.codemirror(
                        "", language="YAML", line_wrapping=True, on_change=typed
                    ).classes("w-full h-[32rem]")
                    self._editor.props(remove="theme").props(f':theme="{_THEME}"')
            # The editor exists in the page once its tab has been opened.
            tabs.on_value_change(self._name_editor)

    def _name_editor(self) -> None:
        """For screen readers: the field that is typed into is inside the element."""
        if self._editor is not None:
            ui.run_javascript(
                f"getElement({self._editor.id})?.editorPromise"
                f".then(view => view.contentDOM.setAttribute('aria-label', 'Recipe as YAML'))"
            )

    def show(
        self,
        planned: Planned,
        text: str,
        refused: dict[str, str],
        inherited: Collection[str],
    ) -> None:
        """`refused`: by key, why the value of its input is not in the text. `inherited`: keys that another recipe
        set."""
        self._planned, self._text = planned, text
        self._refused, self._inherited = refused, inherited
        if not self._is_built or self._editor is None:
            return
        if self._editor.value != text:
            self._editor.value = text
        if planned.values is not None:
            sections = sections_of(planned.values)
            keys = tuple(field.key for section in sections for field in section.fields)
            if keys != self._keys:
                self._keys = keys
                self._make_fields(sections)
        for key, (field, element) in self._inputs.items():
            self._fill(key, field, element)

    def _make_fields(self, sections: list[FormSection]) -> None:
        self._form.clear()
        self._inputs = {}
        self._mistakes = {}
        self._sections: list[tuple[ui.expansion, ui.expansion | None, list[str]]] = []
        with self._form:
            for section in sections:
                with (
                    ui.expansion(label_of_key(("", section.name)))
                    .classes("w-full")
                    .props("dense header-class=text-weight-medium") as expansion
                ):
                    caption_fold(expansion, section.description)
                    expansion.value = section.name in OPENED
                    self._add_fields(section.fields[:FIRST_FIELDS], expansion)
                    more = None
                    if section.fields[FIRST_FIELDS:]:
                        with ui.expansion("more").classes("w-full").props("dense") as more:
                            self._add_fields(section.fields[FIRST_FIELDS:], expansion, more)
                keys = [field.key for field in section.fields]
                self._sections.append((expansion, more, keys))
        self._filter()

    def _add_fields(self, fields: Sequence[FormField], *folds: ui.expansion) -> None:
        with ui.element("div").classes("w-full grid gap-3 grid-cols-1 sm:grid-cols-2"):
            for field in fields:
                self._inputs[field.key] = field, self._input(field)
                self._folds[field.key] = folds

    def _filter(self) -> None:
        """Shows the fields whose label, key or description holds every word that is searched."""
        words = (self._search.value or "").lower().split()
        for expansion, more, keys in getattr(self, "_sections", []):
            num_shown = 0
            for key in keys:
                field, element = self._inputs[key]
                label = label_of_key(field.path)
                text = f"{label} {key.replace('_', ' ')} {key} {field.description}".lower()
                element.visible = all(word in text for word in words)
                num_shown += element.visible
            expansion.visible = num_shown > 0
            if words:
                expansion.value = True
                if more is not None:
                    more.value = True

    def _input(self, field: FormField) -> Any:
        label = label_of_key(field.path)

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
        element.props(f'outlined dense hint="{attribute(field.description)}"').classes("w-full")
        key = ".".join(field.path[1:])
        element.add_slot("label", f'{label} <span class="key" title="{field.key}">{key}</span>')
        return element.mark(field.key)

    def _shown(self, field: FormField) -> str:
        """The value of a key as its input shows it."""
        value = value_at(self._planned.values, field.path)
        if not field.options:
            return "" if value is None else value_text(value)
        text = value_text(value)
        return text if text in field.options else field.options[0]

    def _fill(self, key: str, field: FormField, element: Any) -> None:
        refusal = self._refused.get(key, "")
        if self._planned.values is not None and not refusal:
            text = self._shown(field)
            # What is being typed stays until the field is left.
            if self._filled.get(key) != text:
                element.value = self._filled[key] = text
        mistake = refusal or self._planned.problem_at(key)
        if mistake != self._mistakes.get(key, ""):
            self._mistakes[key] = mistake
            show_mistake(element, mistake)
            if mistake:
                for fold in (self._fold, *self._folds[key]):
                    fold.open()
        is_set = self._is_set(field)
        element.classes(add="set-here" if is_set else None, remove=None if is_set else "set-here")

    def _is_set(self, field: FormField) -> bool:
        """Whether this recipe sets the key itself, not another one that it extends or was made from."""
        is_in_text = self._planned.origins.get(field.key, "").startswith(SOURCE)
        return is_in_text and field.key not in self._inherited

    async def _set(self, field: FormField, value: str) -> None:
        if value == self._filled.get(field.key):
            return
        self._filled[field.key] = value
        if value == "null" and self._is_set(field):
            value = ""
        await self._on_field(field, value)


def label_of_key(path: KeyPath) -> str:
    """What a key is called in a form: ("train", "micro_batch_size") is "Micro-batch size"."""
    names = [LABELS.get(name) or name for name in path[1:]]
    words = [WORDS.get(word, word) for word in " ".join(names).replace("_", " ").split(" ")]
    label = " ".join(words)
    return label[:1].upper() + label[1:]


def show_mistake(element: Any, mistake: str) -> None:
    """Below the field, in red; "" removes it."""
    element.props(remove="error error-message")
    if mistake:
        element.props(f'error error-message="{attribute(mistake)}"')


def attribute(text: str) -> str:
    """For an attribute in quotes, which NiceGUI reads with backslashes as escapes."""
    return text.replace("\\", "/").replace('"', "'").replace("\n", " ")
