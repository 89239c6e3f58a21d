"""Questions before a model is exported, uploaded or downloaded. Each starts a command. Does not import torch."""

import asyncio
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import format_bytes
from bloomery.export import K_TYPES
from bloomery.studio.commands import Commands
from bloomery.studio.components import button, choice, sentence, text
from bloomery.studio.frame import notify, question
from bloomery.studio.stored_models import merged_weights, num_parameters

SUBJECT = "exports"  # of their commands
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Format(NamedTuple):
    """Of `bloomery export --to`."""

    title: str
    use: str


FORMATS = {
    "hf": Format("Hugging Face folder", "For transformers, vLLM and further training."),
    "merged": Format("Merged model", "The adapter is added into its base. Opens everywhere."),
    "adapter": Format("LoRA adapter", "Small. PEFT and vLLM load it on top of its base."),
    "gguf": Format("GGUF file", "One file for llama.cpp, LM Studio and programs on them."),
    "gguf-adapter": Format("GGUF adapter", "Small, for llama-cli --lora on top of its base."),
    "ollama": Format("Ollama folder", "A GGUF file with its Modelfile, for ollama create."),
    "vllm": Format("vLLM folder", "In bfloat16, ready for vllm serve."),
}
OF_MODELS = ("hf", "gguf", "ollama", "vllm")
OF_ADAPTERS = ("merged", "adapter", "gguf", "gguf-adapter", "ollama", "vllm")


class GgufType(NamedTuple):
    """`bits`: of a weight, with its scales."""

    bits: float
    use: str


GGUF_USES = {
    "q8_0": GgufType(
        8.5, "Answers as the model does, in half the size of f16. Take it where it fits."
    ),
    "q6_K": GgufType(6.6, "Hardly worse than q8_0."),
    "q5_K_M": GgufType(5.7, "Between q4_K_M and q6_K."),
    "q4_K_M": GgufType(
        4.8, "The usual choice for small machines: a little worse, nearly half of q8_0."
    ),
    "q4_0": GgufType(4.5, "Smallest, and worse than q4_K_M. Written without llama.cpp."),
    "f16": GgufType(16.0, "Not quantized. No weight may be above 65,504."),
    "bf16": GgufType(16.0, "Not quantized, as most models are trained."),
    "f32": GgufType(32.0, "Every weight as it is: to compare, not to use."),
}
LLAMA_QUANTIZE = "llama-quantize"  # of llama.cpp, which writes the K types


def _types() -> tuple[str, ...]:
    """Those that this machine can write, the usual ones first."""
    has_tool = shutil.which(LLAMA_QUANTIZE) is not None
    return tuple(name for name in GGUF_USES if has_tool or name not in K_TYPES)


async def ask_to_export(
    commands: Commands, argument: str, *, is_adapter: bool, folder: str = ""
) -> bool:
    """Asks for the format, and starts `bloomery export`; whether it was started. `folder`: of the weights, to say how
    large a file becomes.
    """
    model, separator, step = argument.rpartition("@")
    if not (separator and step.isdecimal()):
        model, step = argument, ""
    # A run of a sweep with the name of the sweep.
    name = model.removeprefix("runs/") if model.startswith("runs/") else Path(model).name
    stem = re.sub(r"[^\w.-]+", "-", f"{name}{'-' if step else ''}{step}")
    parameters = None
    if folder:
        weights = await asyncio.to_thread(merged_weights, Path(folder))
        parameters = None if weights is None else await asyncio.to_thread(num_parameters, weights)
    chosen = {"to": "merged" if is_adapter else "hf", "type": "q8_0"}
    is_typed = False  # the place that is written to

    def path_for(layout: str) -> str:
        if layout == "gguf":
            return f"exports/{stem}-{chosen['type']}.gguf"
        return f"exports/{stem}-{layout}" + (".gguf" if layout == "gguf-adapter" else "")

    def words() -> list[str]:
        options = [f"--to={chosen['to']}", f"--out={str(path.value).strip()}"]
        if chosen["to"] == "gguf":
            options.append(f"--type={chosen['type']}")
        if step:
            options.append(f"--step={step}")
        return ["export", *options, "--", model]

    def take(key: str, value: str) -> Callable[[], None]:
        def act() -> None:
            chosen[key] = value
            if not is_typed:
                path.value = path_for(chosen["to"])
            show_choices.refresh()
            show_line()

        return act

    def show_line() -> None:
        line.text = harmless(shlex.join(["bloomery", *words()]))

    @ui.refreshable
    def show_choices() -> None:
        with ui.element("div").classes("grid2"):
            for name in OF_ADAPTERS if is_adapter else OF_MODELS:
                form = FORMATS[name]
                choice(form.title, form.use, take("to", name), on=chosen["to"] == name)
        if chosen["to"] != "gguf":
            return
        sentence("Type of the weights")
        with ui.element("div").classes("grid2"):
            for name in _types():
                kind = GGUF_USES[name]
                about = f"{kind.bits:g} bits. {kind.use}"
                if parameters is not None:
                    about = f"About {format_bytes(round(parameters * kind.bits / 8))}. {kind.use}"
                choice(name, about, take("type", name), on=chosen["type"] == name)
        if len(_types()) < len(GGUF_USES):
            sentence(
                f"{', '.join(K_TYPES)} need {LLAMA_QUANTIZE} of llama.cpp on the PATH, which is not there.",
                "muted",
                small=True,
            )

    def typed() -> None:
        nonlocal is_typed
        is_typed = True

    with question(f"Export {harmless(argument)}") as dialog:
        show_choices()
        path = ui.input("To", value=path_for(chosen["to"])).classes("w-full").props("outlined")
        path.on("keydown", typed)
        path.on_value_change(show_line)
        line: TextElement = text("", "p", "studio-text muted")
        show_line()
        _buttons(dialog, "Start the export")
    if not await dialog:
        return False
    return _start(commands, words(), SUBJECT)


async def ask_to_push(commands: Commands, folder: str, subject: str) -> bool:
    """Asks where to, and starts `bloomery push`; whether it was started."""
    public = {"is": False}

    def take(value: bool) -> Callable[[], None]:
        def act() -> None:
            public["is"] = value
            show_choices.refresh()

        return act

    @ui.refreshable
    def show_choices() -> None:
        with ui.element("div").classes("grid2"):
            choice("Private", "You and your organization see it.", take(False), on=not public["is"])
            choice("Public", "Everybody sees it and may download it.", take(True), on=public["is"])

    with question(f"Push {harmless(folder)} to the Hub") as dialog:
        sentence(
            "Its files are uploaded to a repository, which is created if it is missing. Files of the same name are "
            "replaced. It needs a token with write access in HF_TOKEN."
        )
        name = ui.input("Repository", placeholder="your-name/your-model").classes("w-full")
        name.props("outlined")
        show_choices()
        with ui.element("div").classes("toolbar w-full dialog-buttons"):
            ui.space()
            button("Cancel", lambda: dialog.submit(""), kind="quiet")
            look = button("List the files only", lambda: dialog.submit("--dry-run"))
            upload = button("Upload", lambda: dialog.submit("upload"), kind="go")
        for one in (look, upload):
            one.bind_enabled_from(name, "value", _is_hub_id)
    action = await dialog
    if not action:
        return False
    options = ["--dry-run"] if action == "--dry-run" else []
    options += ["--public"] if public["is"] else []
    return _start(commands, ["push", *options, "--", folder, str(name.value).strip()], subject)


async def ask_to_download(commands: Commands, subject: str) -> bool:
    """Asks for a model of the Hub, and starts `bloomery download`; whether it was started."""
    with question("Get a model from the Hub") as dialog:
        sentence(
            "It is downloaded into models/. Weights are safetensors only; nothing of it is run."
        )
        name = ui.input("Model", placeholder="Qwen/Qwen3-0.6B").classes("w-full").props("outlined")
        _buttons(dialog, "Start the download").bind_enabled_from(name, "value", _is_hub_id)
    if not await dialog:
        return False
    model = str(name.value).strip()
    return _start(
        commands, ["download", f"--to=models/{model.rpartition('/')[2]}", "--", model], subject
    )


def _is_hub_id(value: object) -> bool:
    return HUB_ID.fullmatch(str(value or "").strip()) is not None


def _buttons(dialog: ui.dialog, act: str) -> ui.button:
    """Cancel and the one that acts, which is returned."""
    with ui.element("div").classes("toolbar w-full dialog-buttons"):
        ui.space()
        button("Cancel", lambda: dialog.submit(False), kind="quiet")
        return button(act, lambda: dialog.submit(True), kind="go")


def _start(commands: Commands, words: list[str], subject: str) -> bool:
    try:
        commands.start(*words, subject=subject)
    except UserError as error:
        notify(error)
        return False
    return True
