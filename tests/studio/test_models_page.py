"""Models on disk, their export, and the server that answers for them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from studio_for_tests import RecordedCommands, make_run, texts_of, until, with_user

from bloomery.core.errors import UserError
from bloomery.core.held_files import claimed
from bloomery.infer.model_folder import MANIFEST
from bloomery.studio.commands import TOKEN as STUDIO_TOKEN
from bloomery.studio.commands import Commands
from models_for_tests import make_model
from models_for_tests import make_run as make_whole_run

sys.path.append(str(Path(__file__).parents[1] / "plan"))
from plan_help import loaded, machine, planned

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

pytestmark = pytest.mark.usefixtures("empty_folder")


def make_folder(folder: Path, *, weights: int = 1000, **config: str) -> Path:
    """A folder that looks like a model, or with base_model_name_or_path like an adapter."""
    folder.mkdir(parents=True)
    is_adapter = "base_model_name_or_path" in config
    name = "adapter_config.json" if is_adapter else "config.json"
    (folder / name).write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return folder


def test_checkpoints_adapters_and_exports_are_listed_and_damage_is_told() -> None:
    from bloomery.infer.model_folder import note_best
    from bloomery.studio.models_page import model_cells
    from bloomery.studio.stored_models import stored_models

    checkpoints = make_run("<b>full") / "checkpoints"
    make_folder(checkpoints / "step-00000020", model_type="llama")
    make_folder(checkpoints / "best-00000010", model_type="llama", weights=500)
    note_best(checkpoints, 10)
    adapter = make_run("lora") / "checkpoints" / "step-00000007"
    make_folder(adapter, base_model_name_or_path="/models/<i>Qwen2.5")
    make_folder(Path("exports") / "poet", model_type="gemma")
    (make_folder(Path("broken")) / "config.json").write_text("[" * 5000, encoding="utf-8")
    make_run("empty")
    for name in (b"bytes\xff", b"escape\x1b"):
        make_folder(Path(os.fsdecode(name)), model_type="llama")

    models = {model.argument: model for model in stored_models()}
    assert {name: (model.kind, model.size, model.is_best) for name, model in models.items()} == {
        "runs/<b>full@10": ("full, llama", 500, True),
        "runs/<b>full@20": ("full, llama", 1000, False),
        "runs/lora@7": ("adapter of <i>Qwen2.5", 1000, False),
        "./exports/poet": ("full, gemma", 1000, False),
        "./broken": ("damaged", 1000, False),
        "./bytes\\xff": ("rename it: no page shows its name", 1000, False),
        "./escape\\x1b": ("rename it: no page shows its name", 1000, False),
    }
    json.dumps([model_cells(model) for model in models.values()], ensure_ascii=False).encode()


def test_a_model_elsewhere_is_listed_where_a_run_began_with_it(tmp_path: Path, monkeypatch) -> None:
    """A base that was imported to another disk, and an export in the folder of a sweep's run; no checkpoint twice."""
    from bloomery.studio.model_choices import models_here
    from bloomery.studio.stored_models import stored_models

    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    elsewhere = make_model(tmp_path / "other disk" / "base")
    cached = make_model(hub / "models--a--b" / "snapshots" / "0")
    local = make_model(Path("models/base").absolute())
    make_run("first")
    checkpoint = make_model(Path("runs/first/checkpoints/step-00000001").absolute())
    plan = planned(loaded(), machine())
    Path("runs/sweep").mkdir()
    Path("runs/sweep/sweep.json").write_text("{}")
    for number, source in enumerate((elsewhere, elsewhere, cached, local, checkpoint, None)):
        run = make_run(f"sweep/{number}")
        began = plan.model_copy(update={"model": plan.model.model_copy(update={"source": source})})
        (run / "plan.json").write_text(began.model_dump_json())
    make_model(Path("runs/sweep/0/export"))
    Path("models/base.gguf").write_bytes(b"GGUF")

    listed = sorted(model.argument for model in stored_models())
    expected = ["./models/base", "./models/base.gguf", "./runs/sweep/0/export"]
    assert listed == sorted([*expected, "./other disk/base", "runs/first@1"])
    offered = [choice.value for choice in models_here()]
    assert offered.count("models/base.gguf") == 1 and "other disk/base" in offered


def choose(user, title: str) -> None:
    """A click on a large choice, which the simulation does not pass on from the text in it."""
    from nicegui.testing.user_interaction import UserInteraction

    (label,) = (one for one in user.find(content=title).elements if one.text == title)
    UserInteraction(user, {label.parent_slot.parent}, None).trigger("click")


def test_an_export_is_a_command_of_the_chosen_format() -> None:
    commands = RecordedCommands()
    checkpoint = make_run("lora") / "checkpoints" / "step-00000007"
    make_folder(checkpoint, base_model_name_or_path="base")

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/models")
        table = next(iter(user.find(ui.table).elements))
        await until(lambda: table.rows)
        rows = list(table.rows)
        user.find(ui.table).trigger(
            "selection", {"keys": ["runs/lora@7"], "rows": rows, "added": True}
        )
        export = next(iter(user.find(kind=ui.button, content="Export").elements))
        await until(lambda: export.enabled)
        user.find(kind=ui.button, content="Export").click()
        await user.should_see("Export runs/lora@7", retries=50)
        # An adapter opens in few programs: it is merged where nothing else is chosen.
        await user.should_see("bloomery export --to=merged --out=exports/lora-7-merged --step=7")
        choose(user, "GGUF file")
        await user.should_see("Answers as the model does", retries=50)
        await user.should_see("need llama-quantize")
        path = "exports/lora-7-q8_0.gguf"
        await user.should_see(f"bloomery export --to=gguf --out={path} --type=q8_0", retries=50)
        user.find("Start the export").click()
        await until(lambda: commands.started)
        assert commands.started == [
            ("export", "--to=gguf", f"--out={path}", "--type=q8_0", "--step=7", "--", "runs/lora")
        ]

    with_user(visit, commands)


def test_an_export_that_fails_says_why_above_what_it_printed() -> None:
    """The run deletes the checkpoint between the choice of its folder and the lock on it."""
    run = make_whole_run(Path("runs/one"), 10, 20)
    checkpoint = run / "checkpoints" / "step-00000010"
    commands = Commands()

    def is_waiting() -> bool:
        manifest = (checkpoint / MANIFEST).absolute()
        for descriptor in Path(f"/proc/{commands.started[0].process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has closed that one meanwhile
                if descriptor.readlink() == manifest:
                    return True
        return False

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/models")
        table = next(iter(user.find(ui.table).elements))
        await until(lambda: table.rows)
        rows = [row for row in table.rows if row["model"] == "runs/one@10"]
        user.find(ui.table).trigger(
            "selection", {"keys": ["runs/one@10"], "rows": rows, "added": True}
        )
        export = next(iter(user.find(kind=ui.button, content="Export").elements))
        await until(lambda: export.enabled)
        user.find(kind=ui.button, content="Export").click()
        await user.should_see("Export runs/one@10", retries=50)
        with claimed([checkpoint / MANIFEST]):
            user.find("Start the export").click()
            await until(lambda: commands.started and is_waiting(), 120)
            checkpoint.rename(checkpoint.with_name("gone"))
        problem = "the checkpoint of step 10 was deleted meanwhile; left: 20"
        await until(lambda: f"export failed: {problem}" in texts_of(user), 120)
        assert any(f"error: {problem}\nwhere: " in text for text in texts_of(user))

    with_user(visit, commands)
    assert not Path("exports/one-10-hf").exists()


def test_the_page_of_a_run_exports_its_best_checkpoint() -> None:
    commands = RecordedCommands()
    make_run("one")

    async def visit(user) -> None:
        await user.open("/run/one")
        await user.should_see("Chat")
        user.find("Export").click()
        await user.should_see("Export runs/one", retries=50)
        user.find("Start the export").click()
        await until(lambda: commands.started)
        assert commands.started == [("export", "--to=hf", "--out=exports/one-hf", "--", "runs/one")]

    with_user(visit, commands)


def test_an_export_is_pushed_and_a_run_is_not() -> None:
    commands = RecordedCommands()
    make_folder(make_run("lora") / "checkpoints" / "step-00000007", base_model_name_or_path="base")
    make_folder(Path("exports") / "poet", model_type="gemma")
    (Path("exports") / "poet.gguf").write_bytes(bytes(2000))

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/models")
        table = next(iter(user.find(ui.table).elements))
        await until(lambda: table.rows)
        rows = {row["model"]: row for row in table.rows}
        assert rows["./exports/poet.gguf"]["shown"]["size"] == "2.0 KiB"
        assert not rows["./exports/poet.gguf"]["opens"]
        buttons = {
            words: next(iter(user.find(kind=ui.button, content=words).elements))
            for words in ("Chat", "Export", "Push to the Hub")
        }

        async def enables(expected: list[str]) -> None:
            await until(lambda: [w for w, one in buttons.items() if one.enabled] == expected)

        for model, enabled in (
            ("runs/lora@7", ["Chat", "Export"]),
            ("./exports/poet.gguf", []),
            ("./exports/poet", ["Chat", "Export", "Push to the Hub"]),
        ):
            table.selected = [rows[model]]
            await enables(enabled)
        user.find("Push to the Hub").click()
        await user.should_see("Push exports/poet to the Hub", retries=50)
        (upload,) = user.find(kind=ui.button, content="Upload").elements
        assert not upload.enabled
        (name,) = (one for one in user.find(ui.input).elements if one.props.get("label"))
        name.value = "not an id"
        assert not upload.enabled
        name.value = "me/poet"
        choose(user, "Public")
        user.find(kind=ui.button, content="Upload").click()
        await until(lambda: commands.started)
        assert commands.started == [("push", "--public", "--", "exports/poet", "me/poet")]

        user.find(kind=ui.button, content="Get one from the Hub").click()
        await user.should_see("Get a model from the Hub", retries=50)
        name = next(
            one for one in user.find(ui.input).elements if one.props.get("label") == "Model"
        )
        name.value = "Qwen/Qwen3-0.6B"
        user.find("Start the download").click()
        await until(lambda: len(commands.started) == 2)
        assert commands.started[1] == (
            "download", "--to=models/Qwen3-0.6B", "--", "Qwen/Qwen3-0.6B",
        )  # fmt: skip

    with_user(visit, commands)


def test_what_a_model_was_trained_from_and_how_many_weights_it_has(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    from bloomery.studio.stored_models import num_parameters, origin_of_export

    folder = make_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    assert num_parameters(folder) == sum(tensor.size for tensor in tensors.values())
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert num_parameters(folder) is None
    assert origin_of_export(folder) == ""
    for text in ("base_model: org/base", "base_model:\n- org/base", "base_model: 'org/base'"):
        (folder / "README.md").write_text(f"---\nlicense: mit\n{text}\n---\n")
        assert origin_of_export(folder) == "from org/base"


@pytest.mark.parametrize(
    "text, progress",
    [
        ("", ("", None)),
        ("loading  a model\nprogress   export: starting", ("export: starting", None)),
        (
            "progress   export: writing tensor 3 of 290\nprogress   export: writing tensor 1,450 of 2,900",
            ("export: writing tensor 1,450 of 2,900", 0.5),
        ),
        ("progress   download: model.safetensors, 25%", ("download: model.safetensors, 25%", 0.25)),
        ("progress   export: tensor 0 of 0\nwrote 1 of 2", ("export: tensor 0 of 0", None)),
    ],
)
def test_the_progress_of_a_command_is_its_newest_line(text: str, progress: tuple) -> None:
    from bloomery.studio.command_progress import progress_of

    assert progress_of(text) == progress


def test_every_format_and_type_has_a_sentence() -> None:
    from bloomery.cli.models import command
    from bloomery.export import GGUF_TYPES, K_TYPES
    from bloomery.studio.export_dialogs import FORMATS, GGUF_USES

    (to,) = (option for option in command.params if option.name == "layout")
    assert set(FORMATS) == set(to.type.choices)
    assert set(GGUF_USES) == {*GGUF_TYPES, *K_TYPES}


def test_a_name_of_a_model_is_no_option_and_their_number_is_checked(monkeypatch) -> None:
    from bloomery.studio import model_server

    started = list[tuple[str, ...]]()

    class Recorded:
        state = "ended"

        def __init__(self, *arguments: str, **options: object) -> None:
            started.append(arguments)

    monkeypatch.setattr(model_server, "ListeningProcess", Recorded)
    servers = model_server.ModelServers()
    servers.open(["--host=0.0.0.0"], "cpu")
    (arguments,) = started
    assert arguments[0] == "serve" and arguments[-2:] == ("--", "--host=0.0.0.0")
    for models in ([], ["a", "b", "c"], ["a", "a"]):
        with pytest.raises(UserError, match="cannot chat with"):
            servers.open(models, "cpu")
    assert len(started) == 1


@pytest.mark.soak
def test_a_model_that_cannot_be_loaded_is_told() -> None:
    async def visit(user) -> None:
        await user.open("/chat?model=--host=0.0.0.0")  # a name, not an option
        await user.should_see("no run '--host=0.0.0.0'", retries=300)
        await user.should_see("Load again", retries=100)

    with_user(visit)


def test_the_chat_offers_the_best_checkpoint_of_each_run() -> None:
    from bloomery.studio.chat_page import offers_of
    from bloomery.studio.stored_models import ListedModel

    def listed(name: str, step: int | None, changed: float, *, best: bool = False) -> ListedModel:
        return ListedModel(name, step, "full", 1, changed, Path(name), is_best=best)

    stored = [
        listed("runs/a", 30, 9.0),
        listed("./poet", None, 8.0),
        listed("runs/a", 20, 7.0, best=True),
        listed("runs/b", 2, 6.0),  # of an old run, without a note of the best
        listed("runs/b", 1, 5.0),
    ]
    assert [model.argument for model in offers_of(stored)] == ["./poet", "runs/a@20", "runs/b@2"]


def test_the_chat_without_a_model_offers_those_that_are_here_or_says_how_to_get_one() -> None:
    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/chat")
        await user.should_see("No model here yet")
        make_folder(
            make_run("lora") / "checkpoints" / "step-00000007", base_model_name_or_path="base"
        )
        make_folder(Path("exports") / "poet", model_type="gemma")
        (make_folder(Path("broken")) / "config.json").write_text("{}", encoding="utf-8")
        await user.open("/chat")
        await user.should_see("lora, step 7")
        await user.should_see("full, gemma")
        await user.should_not_see("damaged")  # nothing opens it
        (field,) = (one for one in user.find(ui.select).elements if one.props["label"] == "Model")
        assert set(field.options) == {"runs/lora@7", "./exports/poet"}

    with_user(visit)


def test_the_chat_offers_what_a_run_that_trains_has_saved_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.studio.chat_page import ModelChoices

    opened = list[list[str]]()
    monkeypatch.setattr(ModelChoices, "open", lambda self, models: opened.append(list(models)))
    checkpoints = make_run("lora") / "checkpoints"
    first = make_folder(checkpoints / "step-00000007", base_model_name_or_path="base")

    async def visit(user) -> None:
        from nicegui import ui
        from nicegui.testing.user_interaction import UserInteraction

        await user.open("/chat")
        await user.should_see("lora, step 7")
        make_folder(checkpoints / "step-00000009", base_model_name_or_path="base")
        shutil.rmtree(first)
        (field,) = (one for one in user.find(ui.select).elements if one.props["label"] == "Model")
        UserInteraction(user, {field}, None).trigger("popupShow")
        await until(lambda: set(field.options) == {"runs/lora@9"})
        choose(user, "lora, step 7")
        await until(lambda: opened)
        assert opened == [["runs/lora@9"]]

    with_user(visit)


@pytest.mark.soak
def test_a_server_ends_when_no_page_looks_and_when_studio_is_killed(tmp_path, monkeypatch) -> None:
    from bloomery.studio import model_server

    make_folder(tmp_path / "model", model_type="llama")
    monkeypatch.setattr(model_server, "IDLE_SECONDS", 0.0)
    server = model_server.ModelServers().open(["./model"])
    assert server.process._process.wait(30) == -signal.SIGKILL

    program = (
        "import os, signal\n"
        "from bloomery.studio.model_server import ModelServer\n"
        "print(ModelServer(['./model'], 'cpu').process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    studio = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert studio.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while Path(f"/proc/{int(studio.stdout)}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.soak
def test_two_models_answer_through_studio_and_others_replace_them(tmp_path, monkeypatch) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Route
    from starlette.testclient import TestClient

    from bloomery.studio.model_server import ModelServers

    monkeypatch.setenv(STUDIO_TOKEN, "a-secret-of-studio")
    for name in ("one", "two"):
        make_model(tmp_path / name)
    servers = ModelServers()
    route = Route("/serve/{path:path}", servers.forward, methods=["GET", "POST"])
    client = TestClient(Starlette(routes=[route]))
    assert client.get("/serve/v1/models").status_code == 503
    server = servers.open(["./one", "./two"], "cpu")
    try:
        environment = Path(f"/proc/{server.process.pid}/environ").read_bytes()
        assert server.token.encode() in environment and b"a-secret-of-studio" not in environment
        assert servers.open(["./one", "./two"], "cpu") is server
        end = time.monotonic() + 120
        while server.process.state == "starting":
            assert time.monotonic() < end
            time.sleep(0.05)
        assert server.process.state == "ready", server.process.text()
        assert server.token not in server.process.text()

        assert "<title>Chat · Bloomery</title>" in client.get("/serve/").text
        assert client.get("/serve/metrics").status_code == 404
        names = [model["id"] for model in client.get("/serve/v1/models").json()["data"]]
        assert names == ["one", "two"]
        asked = {"prompt": "def f", "max_tokens": 3, "logprobs": 2, "stream": True, "model": "two"}
        with client.stream("POST", "/serve/v1/completions", json=asked) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert lines[-1] == "data: [DONE]"
        chances = json.loads(lines[0].removeprefix("data: "))["choices"][0]["logprobs"]
        assert len(chances["top_logprobs"][0]) >= 2
        refusal = client.post("/serve/v1/completions", json={"model": "three", "prompt": "x"})
        assert refusal.status_code == 404 and "served: one, two" in refusal.text

        other = servers.open(["./one"], "cpu")
        assert server.process.state == "ended" and other.process.state == "starting"
        os.kill(other.process.pid, signal.SIGKILL)
        other.process._process.wait()
        assert client.get("/serve/").status_code == 503
    finally:
        servers.close()


def test_a_model_that_is_stuck_in_a_driver_does_not_hold_studio_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.core.child import kill_group
    from bloomery.studio import listening

    # It waits for its input, and no signal ends it.
    process = listening.ListeningProcess(
        *("doctor", "--explain", "-"), address="never", environment=os.environ, folder=tmp_path
    )
    with monkeypatch.context() as patch:
        patch.setattr(listening, "kill_group", lambda _: None)
        patch.setattr(listening, "DYING_SECONDS", 0.1)
        process.close()
        assert process.state == "starting"
    kill_group(process.pid)
    process.close()
    assert process.state == "ended"


def test_a_model_is_named_so_that_two_of_them_differ() -> None:
    from bloomery.studio.model_choices import Choice, told_apart
    from bloomery.studio.stored_models import stored_models
    from bloomery.studio.watching import short_source

    for source, name in (
        ("/data/runs/demo/export/hf", "demo/export/hf"),
        ("/data/runs/demo/checkpoints/step-00000360", "demo, step 360"),
        ("/data/runs/s/rate-1/checkpoints/best-00000020", "s/rate-1, step 20"),
        ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/data/runs/model", "model"),
    ):
        assert short_source(source) == name

    chips = [
        Choice("a/poet", "poet"),
        Choice("b/poet", "poet"),
        Choice("a/poet", "the same again"),
        Choice("c", "c"),
    ]
    assert [chip.title for chip in told_apart(chips)] == ["poet · a/poet", "poet · b/poet", "c"]

    # A folder below the working folder has one name, also where a run began with its whole path.
    inner = make_folder(Path("kept/deep/poet").absolute(), model_type="gemma")
    plan = planned(loaded(), machine())
    began = plan.model_copy(update={"model": plan.model.model_copy(update={"source": inner})})
    run = make_run("second")
    (run / "plan.json").write_text(began.model_dump_json(), encoding="utf-8")
    assert [model.model for model in stored_models()] == ["./kept/deep/poet"]
