"""Fetching from a Hub: through huggingface_hub itself, from a server of this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from bloomery import hub
from bloomery.cli import cli
from bloomery.core.errors import UserError
from fake_hub import FakeHub, fake_hub

WEIGHTS = os.urandom(25_000_000)  # the library writes ten million bytes at a time
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"import os",
    "original/consolidated.safetensors": b"once more",
    "onnx/config.json": b"{}",
}
FILES = {
    "org/model": MODEL,
    "org/large": {"config.json": b"{}", "model.safetensors": WEIGHTS},
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "org/rows": {
        "data/train-0.parquet": b"1",
        "data/test-0.parquet": b"2",
        "README.md": b"# x",
        "x.py": b"import os",
    },
    "org/script": {"rows.py": b"import os"},
    "org/gguf": {"model-Q4.gguf": b"GGUF"},
    "org/evil": {"config.json": b"{}", "model.safetensors": b"", "../../out.json": b"{}"},
}
CODE = """
import sys
from bloomery import hub
from bloomery.core.errors import UserError
try:
    print(getattr(hub, sys.argv[1])(*sys.argv[2:]))
except UserError as error:
    print(error.problem, error.fix, sep="\\n", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture(scope="module")
def server():
    with fake_hub(FILES, gated={"org/gated"}) as hub:
        yield hub


class Client:
    """Calls a function of bloomery.hub in a process of its own: the library reads its variables once."""

    def __init__(self, home, url, **variables):
        self.home, drop = home, ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE")
        kept = {name: value for name, value in os.environ.items() if name not in drop}
        own = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        self.environment = kept | own | variables

    def start(self, *words):
        return subprocess.Popen(
            [sys.executable, "-c", CODE, *words],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, *words):
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        assert process.returncode in (0, 1), err
        return out.strip(), err.strip()


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def asked(server: FakeHub, name: str) -> list[str | None]:
    """The Range of each GET of a file."""
    return [
        part for method, path, part, _ in server.asked if method == "GET" and path.endswith(name)
    ]


def test_a_model_is_fetched_without_pickles_programs_and_copies_and_then_needs_no_network(
    server, tmp_path
):
    client = Client(tmp_path, server.url)
    folder, told = client("fetch_model", "org/model")
    names = sorted(path.name for path in (tmp_path / folder).iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert told == f"org/model: 3 files, into {tmp_path}/hub"
    count = len(server.asked)
    again = Client(tmp_path, server.url, HF_HUB_OFFLINE="1")("fetch_model", "org/model")
    assert again == (folder, "") and len(server.asked) == count


def test_planning_fetches_no_weights_and_training_the_rest(server, tmp_path):
    client = Client(tmp_path, server.url)
    server.asked.clear()
    planning = "print(hub.fetch_model('org/model', weights=False))"
    done = subprocess.run(
        [sys.executable, "-c", f"from bloomery import hub; {planning}"],
        env=client.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked(server, "model.safetensors") == [] and asked(server, "config.json") == [None]
    folder, _ = client("fetch_model", "org/model")
    assert folder == done.stdout.strip()
    assert asked(server, "model.safetensors") == [None] and asked(server, "config.json") == [None]


def test_a_file_whose_connection_breaks_goes_on_in_its_middle(server, tmp_path):
    server.asked.clear()
    server.cut_after["model.safetensors"] = 22_000_000
    folder, _ = Client(tmp_path, server.url)("fetch_model", "org/large")
    first, second = asked(server, "model.safetensors")
    assert first is None and second is not None and int(second[6:-1]) >= 10_000_000
    assert (tmp_path / folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_download_that_was_killed_keeps_its_whole_files(tmp_path):
    files = {"config.json": b"{}", "first.safetensors": b"1", "model.safetensors": WEIGHTS}
    with fake_hub(
        {"org/large": files}, hold=True, cut_after={"model.safetensors": 22_000_000}
    ) as server:
        client = Client(tmp_path, server.url)
        process = client.start("fetch_model", "org/large")
        assert server.stalled.wait(30)
        until(lambda: any(path.stat().st_size for path in tmp_path.rglob("*.incomplete")))
        until(lambda: len(list(tmp_path.rglob("snapshots/*/*"))) == 2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        folder, _ = client("fetch_model", "org/large")
        assert [len(asked(server, name)) for name in files] == [1, 1, 2]
        assert (tmp_path / folder / "model.safetensors").read_bytes() == WEIGHTS


TOLD = """
import sys
from pathlib import Path
from bloomery import hub
from bloomery.core import growth
from bloomery.core.progress import told_to
growth.LOOK_SECONDS = 0.02
with told_to(lambda text: print(text, flush=True)):
    if sys.argv[1] == "push":
        hub.push(Path(sys.argv[2]), "me/mine")
    else:
        hub.download("org/large", to=Path(sys.argv[2]) if sys.argv[2:] else None)
"""


@pytest.mark.parametrize("place", [[], ["here"]], ids=["into the cache", "into a folder"])
def test_a_download_tells_how_much_has_come_and_of_a_second_one_the_rest(tmp_path, place):
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    total = f" of {len(WEIGHTS) / 2**20:,.0f} MiB"
    with fake_hub(
        {"org/large": files}, hold=True, cut_after={"model.safetensors": 22_000_000}
    ) as server:
        words = [sys.executable, "-c", TOLD, "download", *place]
        setting = {"env": Client(tmp_path, server.url).environment, "cwd": tmp_path, "text": True}
        process = subprocess.Popen(words, stdout=subprocess.PIPE, **setting)
        assert server.stalled.wait(30)
        # While the rest is waited for: what the library has written so far.
        for line in process.stdout:
            assert line.rstrip().endswith(total)
            if 10 <= int(line.split()[0].replace(",", "")) <= 21:
                break
        else:
            pytest.fail("nothing was told")
        process.kill()
        process.communicate()
        done = subprocess.run(words, capture_output=True, check=True, **setting)
        assert all(line.endswith(total) for line in done.stdout.splitlines())
        done = subprocess.run(words, capture_output=True, check=True, **setting)
        assert not done.stdout or done.stdout.startswith("0 of 0 MiB")


def test_a_download_into_a_folder_holds_files_and_no_links(server, tmp_path):
    code = "from pathlib import Path; from bloomery import hub; hub.download('org/model', to=Path('here'))"
    environment = Client(tmp_path, server.url).environment
    subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True
    )
    files = [path for path in (tmp_path / "here").iterdir() if path.is_file()]
    assert len(files) == 3 and not any(path.is_symlink() for path in files)


def test_a_data_set_is_a_folder_of_its_data_files(server, tmp_path):
    calls = [
        ("fetch_dataset", "hub:org/rows"),
        ("data_place", "hub:org/rows"),
        ("data_place", "hub:org/other"),
    ]
    (_, folder), *places = each_told(Client(tmp_path, server.url), calls)
    files = [path.relative_to(folder) for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert sorted(map(str, files)) == ["data/test-0.parquet", "data/train-0.parquet"]
    assert [place for _, place in places] == [folder, "hub:org/other"]


def test_the_token_is_that_of_the_environment_and_never_the_one_that_lies_about(server, tmp_path):
    (tmp_path / "token").write_text("from-a-file")
    server.asked.clear()
    Client(tmp_path, server.url)("fetch_model", "org/model")
    assert {token for *_, token in server.asked} == {None}
    server.asked.clear()
    Client(tmp_path / "other", server.url, HF_TOKEN=" hf_said ")("fetch_model", "org/model")
    assert {token for *_, token in server.asked} == {"Bearer hf_said"}


REFUSED = [
    (
        ("fetch_model", "org/pickled"),
        "pickle files, which can run code when opened: pytorch_model.bin",
        "safetensors",
    ),
    (
        ("fetch_model", "org/nobody"),
        "no model on the Hub, or it is private: org/nobody",
        "export HF_TOKEN",
    ),
    (("fetch_model", "org/gguf"), "no config.json", "converted from"),
    (("fetch_model", "org/rows"), "no config.json", "bloomery download org/rows --dataset"),
    (
        ("fetch_model", "org/evil"),
        "leads out of its folder: '../../out.json'",
        "a source that you trust",
    ),
    (("fetch_model", "org/model@nowhere"), "no such revision: nowhere", "tree/main"),
    (("fetch_model", "./nothing/here"), "no such folder", "write ORG/NAME"),
    (("download", "/tmp"), "local path", "use the path"),
    (("fetch_dataset", "org/script"), "loading script: rows.py", "org/script@refs/convert/parquet"),
    (
        ("fetch_dataset", "org/nothing"),
        "no dataset on the Hub, or it is private: org/nothing",
        "correct the name",
    ),
    (("local_model", "org/nobody"), "org/nobody is not downloaded", "bloomery download org/nobody"),
]
EACH = """
import json, sys
from bloomery import hub
from bloomery.core.errors import UserError
for name, word in json.loads(sys.argv[1]):
    try:
        print(json.dumps(["nothing is refused", getattr(hub, name)(word)], default=str))
    except UserError as error:
        print(json.dumps([error.problem, error.fix]))
"""


@pytest.fixture(scope="module")
def told(server, tmp_path_factory):
    """Problem and remedy of each call of REFUSED."""
    home = tmp_path_factory.mktemp("refused")
    found = each_told(Client(home, server.url), [words for words, _, _ in REFUSED])
    assert not list(home.rglob("out.json"))
    return found


def each_told(client, calls):
    """One process for all calls, as the library takes a second to import."""
    words = [sys.executable, "-c", EACH, json.dumps(calls)]
    done = subprocess.run(words, env=client.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[words[1] for words, _, _ in REFUSED])
def test_what_cannot_be_fetched_is_one_sentence_with_its_remedy(told, index):
    _, problem, fix = REFUSED[index]
    assert problem in told[index][0] and fix in told[index][1]


def test_a_gated_model_says_where_to_agree(tmp_path):
    with fake_hub({"org/gated": MODEL}, gated={"org/gated"}) as server:
        _, told = Client(tmp_path, server.url)("fetch_model", "org/gated")
        assert "gated repository" in told and f"accept on {server.url}/org/gated" in told
        folder, _ = Client(tmp_path, server.url, HF_TOKEN="hf_mine")("fetch_model", "org/gated")
        assert folder


def test_offline_and_without_a_network_nothing_is_waited_for(tmp_path):
    offline = Client(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")(
        "fetch_model", "org/model"
    )[1]
    assert (
        "HF_HUB_OFFLINE prevents" in offline and "bloomery download org/model --to DIR" in offline
    )
    unreachable = Client(tmp_path, "http://127.0.0.1:9")("fetch_model", "org/model")[1]
    assert "cannot reach the Hub" in unreachable and "refused" in unreachable.lower()


def test_a_local_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_snapshot", None)
    assert hub.fetch_model(tmp_path) == tmp_path and hub.cached_model(str(tmp_path)) == tmp_path
    assert hub.data_place("some/where.jsonl").name == "where.jsonl"
    assert (
        not hub.is_hub_id(str(tmp_path))
        and hub.is_hub_id("Qwen/Qwen2.5-0.5B")
        and not hub.is_hub_id("a/../b")
    )
    assert hub.is_hub_id("a/b@refs/pr/1") and not hub.is_hub_id("a/b@/etc/x"), (
        "a path would lead out of the cache"
    )
    # huggingface_hub raises
    for name in ("models/meta-llama--Llama-2-7b-hf", "a/b.git", "a-/b", "a/b.", "a/-b"):
        assert not hub.is_hub_id(name), name
    assert (
        hub.is_hub_id("a/b-1.0_x@feature--2")
        and hub.is_hub_id("a/b")
        and hub.is_hub_id("ab/c.d@v1.git")
    )


def test_a_mistyped_folder_gets_its_neighbour(tmp_path, monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise UserError("cannot reach the Hub", where="the Hub", fix="check the network")

    monkeypatch.setattr(hub, "download", unreachable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    for name, meant in (("models/smolm2", "models/smollm2"), ("model", "models")):
        with pytest.raises(UserError) as caught:
            hub.fetch_model(name)
        assert re.match("no (local|such) folder", caught.value.problem)
        assert caught.value.fix.startswith(f"did you mean {meant}? ")
    with pytest.raises(UserError) as caught:
        hub.fetch_model("nosuch/model")
    assert "did you mean" not in caught.value.fix


def test_a_recipe_names_the_hub_and_is_planned_without_weights(server, tmp_path, monkeypatch):
    from bloomery.hub import Repository
    from bloomery.plan import gather as fetched
    from bloomery.recipe.load import load_recipe

    monkeypatch.chdir(tmp_path)
    words = [
        "model.from=org/model",
        "tokenizer.from=org/words",
        "objective.kind=distill",
        "objective.teacher=org/large",
        "data.path=hub:org/rows",
        "data.glob=*.parquet",
        "data.validation=hub:org/held",
    ]
    (tmp_path / "r.yaml").write_text("model: {from: a/b}")
    recipe = load_recipe("r.yaml", words).recipe
    assert recipe.data.path == "hub:org/rows" and recipe.data.validation == "hub:org/held"
    asked = []
    monkeypatch.setattr(hub, "cached_model", lambda name, *, weights=False: None)
    monkeypatch.setattr(hub, "_cached", lambda *_: None)

    def download(name, *, part="model", glob=None):
        asked.append((name, part, glob))
        return tmp_path

    monkeypatch.setattr(hub, "download", download)
    fetched.fetch(recipe, weights=False)
    assert asked == [("org/model", "config", None), ("org/large", "config", None)]
    asked.clear()
    fetched.fetch(recipe, weights=True)
    assert asked[:3] == [
        ("org/model", "model", None),
        ("org/large", "model", None),
        ("org/words", "tokenizer", None),
    ]
    assert asked[-2:] == [
        ("org/rows", "dataset", "*.parquet"),
        ("org/held", "dataset", "*.parquet"),
    ]
    assert (
        Repository("org/rows", None, "dataset").download_command
        == "bloomery download org/rows --dataset"
    )


def test_a_model_of_a_command_may_be_an_id_and_a_base_with_its_adapter(tmp_path, monkeypatch):
    from bloomery.runs.chosen_model import model_path

    monkeypatch.chdir(tmp_path)
    for name in ("base", "adapter", "cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "fetch_model", lambda name: tmp_path / "cache")
    assert model_path("org/name") == tmp_path / "cache"
    assert str(model_path("base+adapter")) == "base+adapter"
    assert str(model_path("org/name+adapter")) == f"{tmp_path}/cache+adapter"
    with pytest.raises(UserError, match="no run"):
        model_path("nothing")


@pytest.fixture
def to_push(tmp_path):
    """An export, with what must not travel next to it."""
    folder = tmp_path / "my-model"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache" / "left").write_bytes(b"x")
    files = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "README.md": b"---\nlicense: mit\n---\n",
        "tokenizer.json": b'{"password": 123456}',
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder, files


PUSH = """
import sys
from pathlib import Path
from bloomery import hub
from bloomery.core.errors import UserError
try:
    for word in sys.argv[2:]:
        print(hub.push(Path(sys.argv[1]), word.removesuffix("=public"), public=word.endswith("=public")))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


def pushed(client, *words):
    done = subprocess.run(
        [sys.executable, "-c", PUSH, *map(str, words)],
        env=client.environment,
        text=True,
        capture_output=True,
    )
    assert "hf_" not in done.stdout + done.stderr.replace("hf_xet", ""), "a token in the output"
    return done


def test_a_push_creates_a_private_repository_and_uploads_every_file(to_push, tmp_path):
    folder, files = to_push
    with fake_hub({}) as server:
        done = pushed(
            Client(tmp_path / "home", server.url, HF_TOKEN="hf_writer"),
            folder,
            "me/mine",
            "me/open=public",
        )
        assert done.returncode == 0, done.stderr
        assert server.pushed == {"me/mine": files, "me/open": files}
        assert server.created == {"me/mine": "private", "me/open": "public"}


def test_a_push_tells_how_much_it_has_sent_and_makes_one_commit(to_push, tmp_path):
    folder, files = to_push
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    with fake_hub({}) as server:
        environment = Client(tmp_path / "home", server.url, HF_TOKEN="hf_writer").environment
        words = [sys.executable, "-c", TOLD, "push", str(folder)]
        done = subprocess.run(words, env=environment, text=True, capture_output=True, check=True)
        assert sorted(server.pushed["me/mine"]) == sorted(files)
        assert sum("/commit/" in path for _, path, *_ in server.asked) == 1
    lines = done.stdout.splitlines()
    assert sorted(line.split(", ")[1] for line in lines) == sorted(files)
    sent = [int(line.split(" of ")[0]) for line in lines]
    assert sent == sorted(sent) and sent[0] == 0 and len(lines) == len(files)
    assert all(" of 3 MiB, " in line for line in lines)


@pytest.mark.parametrize(
    ("token", "problem"), [("", "no token"), ("hf_reader", "write access to me/mine")]
)
def test_a_push_without_the_right_to_write_is_refused(to_push, tmp_path, token, problem):
    with fake_hub({}) as server:
        done = pushed(Client(tmp_path / "home", server.url, HF_TOKEN=token), to_push[0], "me/mine")
        assert done.returncode == 1 and problem in done.stderr
        assert not server.pushed and (token or not server.asked)


def test_a_dry_run_lists_the_files_without_network_or_token(to_push, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folder, files = to_push
    done = CliRunner().invoke(
        cli, ["push", str(folder), "me/mine", "--dry-run"], catch_exceptions=False
    )
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[2] for line in lines[:-1]] == sorted(files) and lines[-1].endswith(
        "/me/mine"
    )
    (folder / "README.md").write_text("# no head")
    assert (
        "states no license"
        in CliRunner().invoke(cli, ["push", str(folder), "me/mine", "--dry-run"]).stderr
    )


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("notes.md", b"token hf_" + b"a" * 30, "secret"),
        ("config.json", b'{"api_key": "0123456789"}', "secret"),
        ("pytorch_model.bin", b"x", "pickle"),
        ("link.json", None, "link"),
    ],
)
def test_what_must_not_be_public_is_not_pushed(to_push, name, content, problem):
    folder, _ = to_push
    if content is None:
        (folder / name).symlink_to("/etc/hostname")
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=problem):
        hub.push(folder, "me/mine", dry_run=True)


def test_a_checkpoint_is_not_pushed(to_push):
    folder, _ = to_push
    for name in ("state.json", "MANIFEST.json", "optimizer.safetensors"):
        (folder / name).write_text("{}")
    with pytest.raises(UserError, match="checkpoint of a run") as caught:
        hub.push(folder, "me/mine", dry_run=True)
    assert "bloomery export" in caught.value.fix


def test_a_run_is_not_pushed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="not an export"):
        hub.push(tmp_path, "me/mine", dry_run=True)
    with pytest.raises(UserError, match="not a valid Hub model id"):
        hub.push(tmp_path, "mine", dry_run=True)
