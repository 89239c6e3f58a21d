"""The Python interface, also as attributes of `import bloomery`: plain functions; heavy imports happen when called.

MODEL is a run (a path, a name under runs/, or `last`), a Hugging Face folder, a Hub id, or BASE+ADAPTER. `device`:
auto, cpu, or a GPU number; call the first function before torch is imported, so that the environment can be set.
`step`: the checkpoint of a run: best, last or a number. Every function raises UserError.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from bloomery.core.errors import UserError
from bloomery.export import DTYPES, GGUF_TYPES, K_TYPES

if TYPE_CHECKING:
    from bloomery.evals.episodes import EpisodeScores
    from bloomery.evals.evaluate import TextScores
    from bloomery.evals.picture_scores import PictureScores
    from bloomery.evals.rewards import RewardScores
    from bloomery.evals.tasks import Named, TaskReport
    from bloomery.export.layouts import Exported
    from bloomery.infer.generate import Model
    from bloomery.infer.load import Use
    from bloomery.monitor.events import Event
    from bloomery.plan.types import PlanReport
    from bloomery.recipe.load import LoadedRecipe
    from bloomery.report.charts import Plot
    from bloomery.studio.notebook import StudioFrame
    from bloomery.train.evaluation.scoring import PairMetrics

Layout = Literal["hf", "adapter", "merged", "gguf", "gguf-adapter", "ollama", "vllm"]
Recipe = str | Path | Mapping[str, Any]
# A function score(prompts, completions, completion_ids, **columns), or an entry as in a recipe.
RewardOfRun = Callable[..., Any] | Mapping[str, Any]
OnText = Callable[[str], None]
OnEvent = Callable[["Event"], None]


def load(
    model: str | Path,
    *,
    step: str = "best",
    device: str = "auto",
    quantize: str | None = None,
    on_load: OnText | None = None,
) -> "Model":
    """A model with its tokenizer: `.generate(prompt)`, `.chat(message)`, `.decoder` (a torch module in eval mode,
    which returns the logits as `.head`).

    `quantize`: none, nf4 or int8 frozen weights; None: as in training. `on_load` gets a line about what is loaded.

        model = bloomery.load("last")
        print(model.generate("def read_json(path):", max_new_tokens=50))
    """
    folder, use = _located(model, device, quantize)
    from bloomery.infer.generate import Model

    return Model.load(folder, step=step, use=use, on_load=on_load or _ignore)


def train(
    recipe: Recipe,
    *overrides: str,
    run_dir: str | Path | None = None,
    devices: str | None = None,
    recover: bool = False,
    quiet: bool = False,
    on_event: OnEvent | None = None,
    rewards: Sequence[RewardOfRun] | None = None,
    check: bool = True,
    **sections: Any,
) -> "Run":
    """Train a recipe (a file, a packaged recipe, or a dict of sections) in a child process, and show its progress.

    `overrides` ("train.epochs=2") and `sections` (train={"epochs": 2}) change the recipe. `on_event` gets every event;
    its exception ends the run. Returns when the run ends; Ctrl+C, or the notebook's stop button, saves a checkpoint and
    stops. `quiet`: no progress. `check`: compare one step on a GPU with the CPU first, once per GPU and settings.

    `rewards` of `objective.kind: grpo` or `rloo`, in place of the recipe's: functions, and entries as in a recipe;
    {"function": score, "weight": 0.5} gives a function a weight. A function is called in a copy of this process, made
    by fork when training starts; on other systems than Linux, or where this process uses a GPU, in a thread of it.

        run = bloomery.train("go-coder-tiny", data={"path": "code"}, train={"epochs": 2}, adapter="lora")
        run.metrics(), run.model().generate("func main() {")
    """
    from bloomery.runs.lifecycle import start
    from bloomery.train.rl.reward_functions import served

    folder = None if run_dir is None else Path(run_dir)
    watch = _watch(on_event)
    entries, functions = _reward_entries(rewards or ())
    if rewards is not None:
        sections["rewards"] = entries
    loaded_recipe = _loaded_recipe(recipe, overrides, sections)
    with served(functions, _print_note):
        outcome = start(
            loaded_recipe,
            run_dir=folder,
            devices=devices,
            recover=recover,
            quiet=quiet,
            watch=watch,
            check_step=check,
        )
    return Run(outcome.folder, outcome.code)


@final
@dataclass(frozen=True)
class Run:
    """A run that ended. `code`: 0 done, 75 stopped and resumable, 130 after a second Ctrl+C."""

    folder: Path
    code: int

    def events(self) -> "list[Event]":
        """All events of events.jsonl. Raises UserError."""
        from bloomery.monitor.events import read_events

        return list(read_events(self.folder / "events.jsonl"))

    def metrics(self) -> dict[str, Any]:
        """The summary in metrics.json. Raises UserError."""
        path = self.folder / "metrics.json"
        if not path.is_file():
            fix = f"call .resume(), or run: bloomery resume {self.folder}"
            raise UserError("the run has no metrics.json", where=str(self.folder), fix=fix)
        metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return metrics

    def plot(self) -> "Plot":
        """Training and validation loss: an image in a notebook, text in a terminal. `.save("loss.svg")` writes a file.

        Raises UserError before the first step.
        """
        from bloomery.report.page import loss_plot

        return loss_plot(self.folder)

    def studio(self, height: int = 800) -> "StudioFrame":
        """The page of the run in a frame, in a notebook; `str()` of it is the address. `height`: pixels.

        `bloomery studio` answers as a process of its own, on 127.0.0.1 with a random token, and ends with this one. It
        needs the extra `studio`. Raises UserError.
        """
        from bloomery.studio.notebook import frame_of

        return frame_of(self.folder, height)

    def model(self, step: str = "best") -> "Model":
        """The trained model with its tokenizer. Raises UserError."""
        return load(self.folder, step=step)

    def resume(
        self,
        *overrides: str,
        step: int | None = None,
        quiet: bool = False,
        on_event: OnEvent | None = None,
        rewards: Sequence[RewardOfRun] = (),
        check: bool = True,
        trust_code: bool = False,
        **sections: Any,
    ) -> "Run":
        """Resume, with overrides of the length, eval, sample, checkpoint and logging, as in `train`. Raises UserError.

        `step`: the checkpoint to continue from, by default the newest. `rewards`: the functions that `train` was given,
        which a run folder cannot hold. `check`: as in `train`. `trust_code`: run the Python rewards and hooks that the
        run's recipe names, also where nothing notes that you asked for them. Examples:

            run = run.resume("train.epochs=4")
            run = run.resume(train={"epochs": 5}, eval={"every": "10%"})
        """
        from bloomery.runs.lifecycle import resume
        from bloomery.train.rl.reward_functions import served

        _, functions = _reward_entries(rewards)
        with served(functions, _print_note):
            outcome = resume(
                self.folder,
                step=step,
                overrides=(*overrides, *_key_overrides(sections)),
                quiet=quiet,
                watch=_watch(on_event),
                check_step=check,
                trust_code=trust_code,
            )
        return Run(outcome.folder, outcome.code)


def _ignore(text: str) -> None:
    """Take a line that the caller did not ask for."""


def _print_note(note: str) -> None:
    print(f"rewards    {note}", file=sys.stderr)


def _reward_entries(
    rewards: Sequence[RewardOfRun],
) -> tuple[list[Mapping[str, Any]], dict[str, Callable[..., Any]]]:
    """Entries as in a recipe, and the functions by the names that these have there. Raises UserError."""
    entries: list[Mapping[str, Any]] = []
    functions: dict[str, Callable[..., Any]] = {}
    for reward in rewards:
        entry: dict[str, Any] = (
            dict(reward) if isinstance(reward, Mapping) else {"function": reward}
        )
        function = entry.get("function")
        if callable(function):
            own_name: str = getattr(function, "__name__", type(function).__name__)
            name = str(entry.get("name") or own_name)
            if not name.isidentifier() or functions.get(name, function) is not function:
                problem = (
                    f"two rewards have the name {name}"
                    if name in functions
                    else "a reward has no name"
                )
                fix = 'give it one: rewards=[{"function": score, "name": "score"}]'
                raise UserError(problem, where="rewards", fix=fix, code=2)
            entry["function"] = name
            functions[name] = function
        entries.append(entry)
    return entries, functions


def _watch(on_event: OnEvent | None) -> "Callable[[Event, Any], None] | None":
    return None if on_event is None else lambda event, _requests: on_event(event)


def plan(
    recipe: Recipe,
    *overrides: str,
    gpu: str | None = None,
    gpus: int | None = None,
    nodes: int = 1,
    **sections: Any,
) -> "PlanReport":
    """The plan of a recipe for this machine, or for `gpu`: `.plan` (memory, time, choices), `.claims`, `.suggestions`.

    Nothing is run. `gpus` and `nodes`: how many, also more than `bloomery.train` uses; `gpu="8xMI300X"` is both.

        report = bloomery.plan("go-coder-125m", gpu="RX 6700 XT", train={"max_tokens": "10B"})
    """
    from bloomery.hardware.specs import named_gpus
    from bloomery.plan.advise import advise
    from bloomery.plan.resolve import local_plan

    names, gpus = named_gpus(() if gpu is None else (gpu,), gpus)
    if "rewards" in sections:  # functions by their names, as `train` stores them
        sections["rewards"], _ = _reward_entries(sections["rewards"])
    loaded_recipe = _loaded_recipe(recipe, overrides, sections)
    gpu_name = names[0] if names else None
    return advise(loaded_recipe, *local_plan(loaded_recipe, gpu=gpu_name, gpus=gpus, nodes=nodes))


def evaluate(
    model: str | Path,
    data: str | Path | None = None,
    *,
    step: str = "best",
    bos: bool = True,
    template: str | None = None,
    device: str = "auto",
    quantize: str | None = None,
    rewards: Sequence[RewardOfRun] = (),
    trust_code: bool = False,
    on_load: OnText | None = None,
    on_note: OnText | None = None,
) -> "TextScores | PictureScores | PairMetrics | RewardScores":
    """Loss, perplexity and bits per byte on `data` (a file or folder); accuracy on preference pairs for a reward model;
    for a run with rewards the mean reward of completions of prompts; with pictures right answers and a control.

    `data`: None uses a run's validation set. `rewards`: the functions that `train` was given. `trust_code`: as in
    `Run.resume`. `bos`: add a BOS token to each text, so that its first token is scored. `template`: the chat template
    of conversations, by default the tokenizer's own. `on_note` gets each remark about the result.

        print(bloomery.evaluate("last", "test.jsonl").loss)
    """
    folder, use = _located(model, device, quantize)
    from bloomery.evals.evaluate import evaluate_model
    from bloomery.train.rl.reward_functions import served

    data = None if data is None else Path(data)
    note = on_note or _ignore
    _, functions = _reward_entries(rewards)
    with served(functions, note):
        result, remarks = evaluate_model(
            folder,
            data,
            step=step,
            bos=bos,
            template=template,
            use=use,
            on_load=on_load or _ignore,
            trust_code=trust_code,
        )
    for remark in remarks:
        note(remark)
    return result


def evaluate_task(
    model: str | Path,
    task: str | Path,
    *,
    against: str | Path | None = None,
    step: str = "best",
    bos: bool = True,
    template: str | None = None,
    device: str = "auto",
    quantize: str | None = None,
    on_load: OnText | None = None,
    **settings: Any,
) -> "TaskReport":
    """Scores of a task file with 95% confidence intervals; `.results`, `.outputs`.

    `against`: another model, compared on the same items with a paired test. `settings`: shots, limit, chat, extract,
    max_new_tokens, stop, temperature, seed. A run records the results.

        report = bloomery.evaluate_task("last", "questions.jsonl", against="Qwen/Qwen3-0.6B", limit=200)
    """
    folder, use = _located(model, device, quantize)
    from bloomery.evals import tasks
    from bloomery.evals.items import TaskSettings

    return tasks.evaluate_task(
        tasks.Named(str(model), folder, step),
        Path(task),
        TaskSettings(template=template, bos=bos, **settings),
        against=None if against is None else _named(against),
        use=use,
        on_load=on_load or _ignore,
    )


def evaluate_environment(
    model: str | Path,
    environment: str,
    data: str | Path,
    *,
    step: str = "best",
    max_turns: int = 8,
    device: str = "auto",
    quantize: str | None = None,
    on_load: OnText | None = None,
    on_note: OnText | None = None,
    **settings: Any,
) -> "EpisodeScores":
    """Episodes of a model with an environment: reward, pass@k, turns and tool errors.

    `environment`: FILE:CLASS, which is executed, or the address of an OpenEnv server. `data`: a file of prompts.
    `settings`: generations, limit, max_new_tokens, temperature, seed, template.

        print(bloomery.evaluate_environment("last", "games.py:Guess", "prompts.jsonl").passed_1)
    """
    folder, use = _located(model, device, quantize)
    from bloomery.evals.episodes import EpisodeSettings, evaluate_episodes
    from bloomery.evals.evaluate import load_to_evaluate
    from bloomery.plan.types import EpisodesPlan

    plan = EpisodesPlan.of_environment(environment, max_turns=max_turns)
    decoder, tokenizer = load_to_evaluate(folder, step=step, use=use, on_load=on_load or _ignore)
    scores, notes = evaluate_episodes(
        decoder, tokenizer, plan, Path(data), EpisodeSettings(**settings)
    )
    for text in notes:
        (on_note or _ignore)(text)
    return scores


def evaluate_harness(
    model: str | Path,
    tasks: Sequence[str],
    *,
    against: str | Path | None = None,
    step: str = "best",
    include_path: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    device: str = "auto",
    quantize: str | None = None,
    on_load: OnText | None = None,
) -> "TaskReport":
    """Scores of lm-evaluation-harness (extra `lm-eval`) on `tasks`, with 95% confidence intervals over documents.

    `include_path`: a folder of more task files. `against`: another model, compared with a paired test. A run records
    the results.

        report = bloomery.evaluate_harness("last", ["arc_easy"], limit=100)
    """
    folder, use = _located(model, device, quantize)
    from bloomery.evals.harness import HarnessSettings
    from bloomery.evals.tasks import Named, evaluate_harness

    settings = HarnessSettings(
        tasks=tuple(tasks),
        include_path=None if include_path is None else Path(include_path),
        shots=shots,
        limit=limit,
    )
    return evaluate_harness(
        Named(str(model), folder, step),
        settings,
        against=None if against is None else _named(against),
        use=use,
        on_load=on_load or _ignore,
    )


def compare(
    model: str | Path,
    against: str | Path,
    data: str | Path | None = None,
    *,
    step: str = "best",
    bos: bool = True,
    template: str | None = None,
    device: str = "auto",
    quantize: str | None = None,
    on_load: OnText | None = None,
) -> "TaskReport":
    """Bits per byte of two models on the same texts, with the p-value of a paired permutation test over documents.

    `data`: None uses the validation set of the run `model`. A run records the results.

        print(bloomery.compare("first", "second").results[0])
    """
    folder, use = _located(model, device, quantize)
    from bloomery.evals import tasks

    return tasks.compare_on_texts(
        tasks.Named(str(model), folder, step),
        _named(against),
        None if data is None else Path(data),
        bos=bos,
        template=template,
        use=use,
        on_load=on_load or _ignore,
    )


def generate(
    model: str | Path,
    prompt: str,
    *,
    stop: Sequence[str] = (),
    chat: bool = False,
    step: str = "best",
    device: str = "auto",
    quantize: str | None = None,
    on_load: OnText | None = None,
    **settings: Any,
) -> str:
    """The completion of `prompt`, up to one of the `stop` texts; with `chat`, the reply in the model's chat template.

    `settings`: max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed. To complete several
    prompts, use `load`.

        print(bloomery.generate("last", "What is a bloomery?", chat=True, max_new_tokens=100))
    """
    loaded_model = load(model, step=step, device=device, quantize=quantize, on_load=on_load)
    complete = loaded_model.chat if chat else loaded_model.generate
    return complete(prompt, stop=stop, **settings)


def export(
    model: str | Path,
    out: str | Path,
    *,
    layout: Layout = "hf",
    dtype: str | None = None,
    step: str = "best",
    weights: Sequence[float] | None = None,
    verify: bool = True,
    device: str = "auto",
) -> "Exported":
    """Export a model as `out`: hf (a full model), adapter (for PEFT), merged (adapters and base), gguf (one file for
    llama.cpp), gguf-adapter (a LoRA for llama.cpp), ollama (a folder for `ollama create`) or vllm
    (a full or merged model in bfloat16).

    `dtype`: of hf and merged weights (None keeps the model's) and of GGUF (f32, f16, bf16, q8_0, q4_0, q4_K_M,
    q5_K_M, q6_K; None is f16, for ollama q8_0). `weights`: of the adapters of BASE+ADAPTER+ADAPTER, merged (1 each
    by default). `verify`: read the export back, compare and run it.

        print(bloomery.export("last", "my-model", layout="merged").folder)
    """
    # A GGUF file has names of its own for the types that PyTorch has, too.
    gguf_type = dtype or ("q8_0" if layout == "ollama" else "f16")
    gguf_type = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(gguf_type, gguf_type)

    # A layout that does not convert to the type is refused before anything is loaded.
    allowed: tuple[str, ...] = DTYPES if layout in ("hf", "merged") else ()
    if layout.startswith(("gguf", "ollama")):
        allowed = (*DTYPES, *GGUF_TYPES, *K_TYPES)
    if dtype is not None and dtype not in allowed:
        problem = f"--to {layout} does not convert weights" + (f" to {dtype}" if allowed else "")
        layouts_of_type = "gguf" if dtype in (*GGUF_TYPES, *K_TYPES) else "hf or merged"
        fix = f"remove --type, or use --to {layouts_of_type}"
        raise UserError(problem, where="--type", fix=fix, code=2)
    folder, use = _located(model, device, None)
    from bloomery.export import layouts
    from bloomery.export.merge import export_several, is_several
    from bloomery.infer.held_model import held_model

    # Several adapters are merged into one model; `weights` belong to them alone.
    if layout == "merged" and is_several(folder):
        return export_several(
            folder, Path(out), weights=weights, step=step, dtype=dtype, verify=verify, use=use
        )
    if weights is not None:
        fix = "use --to merged with BASE+ADAPTER+ADAPTER, or `bloomery merge` for full models"
        raise UserError("--weights are of several adapters", where="--weights", fix=fix, code=2)

    with held_model(folder, step) as files:
        if layout == "ollama":
            from bloomery.export.ollama import export_ollama

            return export_ollama(files, Path(out), kind=gguf_type, verify=verify, use=use)
        if layout in ("gguf", "gguf-adapter"):
            from bloomery.export.gguf import export_gguf, export_gguf_adapter

            if layout == "gguf-adapter":
                return export_gguf_adapter(files, Path(out), kind=gguf_type)
            return export_gguf(files, Path(out), kind=gguf_type, verify=verify, use=use)
        if layout == "vllm":
            return layouts.export_vllm(files, Path(out), verify=verify, use=use)
        if layout == "adapter":
            return layouts.export_adapter(files, Path(out), verify=verify, use=use)
        if layout == "merged":
            return layouts.export_merged(files, Path(out), dtype=dtype, verify=verify, use=use)
        # What a run saved with a tower was trained with pictures.
        return layouts.export(
            files.weights,
            Path(out),
            dtype=dtype,
            verify=verify,
            use=use,
            keeps_vision=files.trained is not None,
        )


def convert(
    source: str | Path,
    out: str | Path,
    *,
    layout: Literal["hf", "gguf"] | None = None,
    dtype: str | None = None,
    max_length: int | None = None,
    template: str | None = None,
    add_tokens: Sequence[str] = (),
    checkpointing: bool = False,
    step: str = "best",
    verify: bool = True,
    device: str = "auto",
) -> "Exported":
    """Convert a model or a GGUF file to Hugging Face format or GGUF, and change it.

    `layout`: None follows the name of `out`. `max_length`: the context. `template`: a chat template's file or name.
    `add_tokens`: special tokens, whose embeddings are the mean of the others. `checkpointing`: transformers recomputes
    activations in training. Raises UserError.

        bloomery.convert("llama-2-7b-hf", "llama-2-7b-chat", dtype="bfloat16", template="chatml")
    """
    gguf = layout == "gguf" or (layout is None and Path(out).suffix == ".gguf")
    torch_names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    if gguf:
        gguf_names = {torch_name: gguf_name for gguf_name, torch_name in torch_names.items()}
        dtype = gguf_names.get(dtype or "", dtype)
    else:
        dtype = torch_names.get(dtype or "", dtype)
    if not gguf and dtype not in (None, *DTYPES):
        problem = f"{dtype} is a type of GGUF files"
        fix = f"use one of {', '.join(DTYPES)}, or --to gguf"
        raise UserError(problem, where="--dtype", fix=fix, code=2)
    folder = Path(source).expanduser()
    from bloomery.runs.chosen_model import chosen_use, model_path

    path = folder if folder.is_file() else model_path(str(source))
    use = chosen_use(device, None)
    from bloomery.export import convert as converting

    changes = converting.Changes(max_length, template, tuple(add_tokens), checkpointing)
    return converting.convert(
        path, Path(out), gguf=gguf, dtype=dtype, changes=changes, step=step, verify=verify, use=use
    )


def merge(
    models: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    dtype: str | None = None,
    verify: bool = True,
    device: str = "auto",
) -> "Exported":
    """Merge models of one architecture and tokenizer into the new folder `out`: the mean of their weights.

    `weights`: one per model, 1 each by default.

        bloomery.merge(["model-a", "model-b"], "merged", weights=[0.7, 0.3])
    """
    from bloomery.runs.chosen_model import chosen_use, model_path

    paths = [model_path(str(model)) for model in models]
    use = chosen_use(device, None)
    from bloomery.export.merge import merge as merge_models
    from bloomery.infer.held_model import held_model

    with ExitStack() as stack:
        return merge_models(
            [stack.enter_context(held_model(path)) for path in paths],
            Path(out),
            weights=weights,
            dtype=dtype,
            verify=verify,
            use=use,
        )


def _located(model: str | Path, device: str, quantize: str | None) -> "tuple[Path, Use]":
    """Sets the environment, so torch must not be imported before."""
    from bloomery.runs.chosen_model import chosen_use, model_path

    return model_path(str(model)), chosen_use(device, quantize)


def _named(model: str | Path) -> "Named":
    """The model that another is compared with, under the name that the user gave."""
    from bloomery.evals.tasks import Named
    from bloomery.runs.chosen_model import model_path

    return Named(str(model), model_path(str(model)))


def _key_overrides(sections: Mapping[str, Any]) -> list[str]:
    """{"train": {"epochs": 2}} as ["train.epochs=2"]."""
    overrides = []
    for section, keys in sections.items():
        if isinstance(keys, Mapping):
            overrides += _section_overrides({f"{section}.{key}": keys[key] for key in keys})
        else:
            overrides += _section_overrides({section: keys})
    return overrides


def _section_overrides(values: Mapping[str, Any]) -> list[str]:
    """{"train": {"epochs": 2}} as ['train={"epochs": 2}']: YAML contains JSON."""
    return [f"{name}={json.dumps(value, default=str)}" for name, value in values.items()]


def _loaded_recipe(
    recipe: Recipe, overrides: Sequence[str], sections: Mapping[str, Any]
) -> "LoadedRecipe":
    from bloomery.recipe.load import load_recipe, load_text

    overrides = [*overrides, *_section_overrides(sections)]
    if not isinstance(recipe, Mapping):
        return load_recipe(recipe, overrides)
    text = json.dumps(dict(recipe), default=str)  # YAML contains JSON
    name = str(recipe.get("name", "recipe"))
    return load_text(text, name=name, source="the recipe", overrides=overrides)
