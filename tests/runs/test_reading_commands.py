"""Every command that reads the model of a run holds its checkpoint: no file of it is opened while a run may delete it.

The tests see every file that Python opens, and ask at that moment whether the checkpoint could be deleted. Weights are
read by Python itself (`model.io.safetensors`), as are configs and tokenizers.
"""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import peft
import pytest
import transformers
from click.testing import CliRunner
from runs_of_bloomery import write_workshop

import bloomery.serve.listen
from bloomery.cli import COMMANDS, cli
from bloomery.infer.generate import Model
from bloomery.infer.load import Use
from bloomery.infer.model_folder import MANIFEST, seal, step_folder
from bloomery.serve.limits import Limits
from bloomery.serve.served import load_served
from models_for_tests import make_run
from pictures_for_tests import png, save_base

# Arguments by command. CHECKPOINT: of a run; RUN: that run; ADAPTED: a run with an adapter on CHECKPOINT; SEEING: a run
# whose model reads pictures.
OUT = ("--out", "out")
SHORT = ("--max-new-tokens", "2")
GGUF = ("--out", "out.gguf")
ON_CPU = ("-d", "cpu")
READERS: dict[str, list[tuple[str, ...]]] = {
    "export": [
        *(("RUN", "--to", layout, *OUT) for layout in ("hf", "vllm", "ollama")),
        ("RUN", "--to", "gguf", *GGUF),
        ("RUN", "--to", "hf", *OUT, "--type", "float16", "--step", "last"),
        ("CHECKPOINT", "--to", "hf", *OUT),
        *(("ADAPTED", "--to", layout, *OUT) for layout in ("merged", "adapter")),
        ("ADAPTED", "--to", "gguf-adapter", *GGUF),
        ("SEEING", "--to", "hf", *OUT),
        ("SEEING", "--to", "gguf", *GGUF),
        ("RUN+ADAPTED+ADAPTED", "--to", "merged", "--weights", "0.5,0.25", *OUT),
    ],
    "merge": [("RUN", "CHECKPOINT", "other", *OUT)],
    "convert": [
        ("RUN", "out"),
        ("RUN", "out.gguf", "--step", "10"),
        ("RUN", "out", "--max-length", "64"),
        ("ADAPTED", "out"),
    ],
    "generate": [
        ("RUN", "--prompt", "a", *SHORT),
        ("SEEING", "--prompt", "Color?", "--image", "red.png", *SHORT),
        ("RUN", "--prompt", "a", *SHORT, "--draft", "CHECKPOINT", "--temperature", "0"),
    ],
    "chat": [("RUN", *SHORT), ("ADAPTED", *SHORT), ("SEEING", *SHORT)],
    "eval": [
        ("RUN", "--data", "text.txt"),
        ("RUN", "--data", "text.txt", "--against", "CHECKPOINT"),
        ("RUN", "--task", "items.jsonl"),
    ],
    "serve": [("RUN", "--port", "0"), ("RUN@10", "--port", "0", "--adapter", "a=ADAPTED")],
    "tokenizer": [("inspect", "RUN", "--text", "a")],
}
# These train a recipe from CHECKPOINT, in children: it is held when each of them starts, and until it has ended.
TRAINERS: dict[str, tuple[str, ...]] = {
    "prepare": ("from-checkpoint.yaml",),
    "train": ("from-checkpoint.yaml", *ON_CPU, "--run-dir", "new"),
    "sweep": ("from-checkpoint.yaml", *ON_CPU, "--run-dir", "sweep", "train.seed=1,2"),
    "bench": ("from-checkpoint.yaml", "--limit", "1s"),
}
RECIPE = """
model: {from: CHECKPOINT}
tokenizer: {from: same}
adapter: {kind: lora, rank: 4}
data: {path: text, glob: "*.txt", sequence_length: 64, validation: 20%}
train: {max_steps: 1, tokens_per_step: 128, micro_batch_size: 2, precision: float32, compile: false}
"""
# These read no weights of a model that is named: a run's own files under its lock, facts of a plan, files of others.
OTHERS = {
    *("completion", "demo", "doctor", "download", "import", "plan", "push", "recipes", "report"),
    *("resume", "runs", "save", "slurm", "stop", "studio", "watch"),
}


def test_each_command_is_a_reader_or_none():
    assert set(COMMANDS) == READERS.keys() | TRAINERS.keys() | OTHERS
    assert len(COMMANDS) == len(READERS) + len(TRAINERS) + len(OTHERS)


@dataclass
class Watched:
    """What was opened below the watched folders. Mutable."""

    folders: tuple[Path, ...] = ()
    held: set[str] = field(default_factory=set)
    unheld: set[str] = field(default_factory=set)
    children: list[bool] = field(
        default_factory=list
    )  # whether the first folder was held when each was started
    is_asking: bool = False


WATCHED = Watched()


def could_be_deleted(folder: Path) -> bool:
    descriptor = os.open(folder / MANIFEST, os.O_RDWR)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("open", "subprocess.Popen") or not WATCHED.folders or WATCHED.is_asking:
        return
    if event == "subprocess.Popen":
        WATCHED.is_asking = True
        WATCHED.children.append(not could_be_deleted(WATCHED.folders[0]))
        WATCHED.is_asking = False
        return
    if not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path = Path(os.fsdecode(arguments[0])).absolute()
    if path.parent not in WATCHED.folders or path.name == MANIFEST:
        return
    WATCHED.is_asking = True
    try:
        seen = WATCHED.unheld if could_be_deleted(path.parent) else WATCHED.held
        seen.add(f"{path.parent.name}/{path.name}")
    finally:
        WATCHED.is_asking = False


@pytest.fixture(scope="module", autouse=True)
def audit() -> None:
    sys.addaudithook(
        on_event
    )  # Python has no way to remove one: it does nothing without watched folders


@contextmanager
def watched(*folders: Path) -> Iterator[Watched]:
    WATCHED.held.clear()
    WATCHED.unheld.clear()
    WATCHED.children.clear()
    WATCHED.folders = folders
    try:
        yield WATCHED
    finally:
        WATCHED.folders = ()


@dataclass(frozen=True)
class Place:
    folder: Path
    run: Path
    checkpoint: Path
    adapted: Path
    adapter: Path
    seeing: Path
    seeing_checkpoint: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    """A workshop with a run, one whose checkpoint is an adapter on the other's, and one whose model sees."""
    folder = tmp_path_factory.mktemp("workshop")
    write_workshop(folder)
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n" * 10)
    (folder / "items.jsonl").write_text(
        '{"question": "a", "choices": ["b", "c"], "answer": 0}\n' * 4
    )
    run = make_run(folder / "run", 10, best=10)
    checkpoint = step_folder(run / "checkpoints", 10)
    recipe = RECIPE.replace("CHECKPOINT", str(checkpoint))
    (folder / "from-checkpoint.yaml").write_text(recipe)
    shutil.copytree(checkpoint, folder / "other")
    (folder / "other" / MANIFEST).unlink()

    adapted = folder / "adapted"
    adapter = step_folder(adapted / "checkpoints", 10)
    adapter.mkdir(parents=True)
    (adapted / "recipe.yaml").write_text(
        "model: {from: base}\ndata: {path: text}\nadapter: {kind: lora}\n"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(adapter)
    (adapter / "README.md").unlink(missing_ok=True)
    seal_as_checkpoint(adapter)

    seeing = folder / "seeing"
    seeing_checkpoint = step_folder(seeing / "checkpoints", 10)
    seeing_checkpoint.parent.mkdir(parents=True)
    save_base("qwen3_vl", seeing_checkpoint, weights=True, seed=1)
    (seeing / "recipe.yaml").write_text("model: {from: base}\ndata: {path: text}\n")
    (folder / "red.png").write_bytes(png(40, 60, "red"))
    seal_as_checkpoint(seeing_checkpoint)
    return Place(folder, run, checkpoint, adapted, adapter, seeing, seeing_checkpoint)


def seal_as_checkpoint(folder: Path) -> None:
    (folder / "state.json").write_text('{"step": 10}')
    seal(folder)


def serve_nothing(*_: object, **__: object) -> None:
    """In place of a server, which would end with Ctrl+C: the models are loaded."""


def run_beside(place: Place, folder: Path, name: str, arguments: tuple[str, ...]) -> None:
    """Runs the command in a folder that has the files of the place. Asserts that it succeeds."""
    for path in place.folder.iterdir():
        (folder / path.name).symlink_to(path)
    named = {"RUN": place.run, "CHECKPOINT": place.checkpoint, "ADAPTED": place.adapted}
    named["SEEING"] = place.seeing
    lines = "/image red.png\nhello\n" if "SEEING" in arguments else "hello\n"
    words = list(arguments)
    for placeholder, path in named.items():
        words = [word.replace(placeholder, str(path)) for word in words]
    with chdir(folder):
        result = CliRunner().invoke(cli, [name, *words], input=lines)
    print(result.output)
    assert result.exit_code == 0, (result.output, result.exception)


CALLS = [
    pytest.param(name, arguments, id=" ".join((name, *arguments))[:60])
    for name, all_arguments in READERS.items()
    for arguments in all_arguments
]


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_no_file_is_read_that_a_run_could_delete(place, tmp_path, monkeypatch, name, arguments):
    monkeypatch.setattr(bloomery.serve.listen, "serve", serve_nothing)
    with watched(place.checkpoint, place.adapter, place.seeing_checkpoint) as files:
        run_beside(place, tmp_path, name, arguments)
    assert files.held
    assert not files.unheld


@pytest.mark.parametrize(
    "name", [*sorted(TRAINERS.keys() - {"bench"}), pytest.param("bench", marks=pytest.mark.soak)]
)
def test_a_checkpoint_to_train_from_is_held_by_the_parent(place, tmp_path, name):
    with watched(place.checkpoint) as files:
        run_beside(place, tmp_path, name, TRAINERS[name])
        assert could_be_deleted(place.checkpoint)
    assert files.held
    assert not files.unheld
    assert all(files.children)
    if name in ("train", "sweep"):
        assert files.children


def test_a_served_model_is_let_go_unless_it_sees(place):
    """The image processor is opened again for each form of a chat, a tower with its first picture."""
    with ExitStack() as stack:
        for folder in (place.run, place.seeing):
            load_served(folder, "a", Limits(context=64), stack, use=Use("cpu"), on_load=str)
        assert could_be_deleted(place.checkpoint)
        assert not could_be_deleted(place.seeing_checkpoint)
    assert could_be_deleted(place.seeing_checkpoint)


def test_a_loaded_model_is_let_go_unless_it_sees(place):
    models = [Model.load(folder, use=Use("cpu")) for folder in (place.run, place.seeing)]
    assert could_be_deleted(place.checkpoint)
    assert not could_be_deleted(place.seeing_checkpoint)
    del models
    gc.collect()  # decoders have cycles
    assert could_be_deleted(place.seeing_checkpoint)
