"""A plan, a checkpoint and a model belong to one run: what was changed or is another run's is refused in a sentence."""

import json
import shutil
from pathlib import Path

import pytest
from flips import RUN, World, files_of, here, outcome, put_back

from bloomery.core.errors import UserError
from bloomery.core.files import digest_of, unstamped
from bloomery.infer.model_folder import damage, find_model, newest_valid, seal, step_folder
from bloomery.monitor.events import Warned, read_events
from bloomery.plan.store import RUN_FILE, begin, read_identity, read_plan, read_sealed, write_sealed
from bloomery.recipe.load import load_recipe
from bloomery.runs import lifecycle as local


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("identity") / "world", "pretrain")


@pytest.fixture
def middle(world: World):
    """The working folder of a run that was stopped after two of its four steps."""
    put_back(world.folder, world.moments["middle"])
    with here(world.folder):
        yield world.folder / RUN


def change(path: Path, **sections) -> None:
    said = json.loads(path.read_text())
    for section, facts in sections.items():
        said[section].update(facts)
    path.write_text(json.dumps(said, indent=1) + "\n")


def refused(match: str, where: Path | None = None, **words) -> UserError:
    with pytest.raises(UserError, match=match) as told:
        local.resume(RUN, quiet=True, **words)
    assert told.value.fix
    assert where is None or told.value.where == str(where)
    return told.value


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"learning_rate": 0.02}},
        {"train": {"micro_batch_size": 1, "accumulation": 4}},
        {"dataset": {"bos_id": 3}},
        {"train": {"seed": 1}},
    ],
    ids=["rate", "batch", "token", "seed"],
)
def test_a_plan_that_was_edited_is_refused(middle, sections):
    change(middle / "plan.json", **sections)
    refused(r"plan\.json has changed", middle / "plan.json")


@pytest.mark.parametrize("name", ["recipe.yaml", "machine.json"])
def test_so_is_a_recipe_or_a_machine(middle, name):
    (middle / name).write_text((middle / name).read_text() + "\n")
    refused("has changed", middle / name)


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_run_without_its_seal_is_refused(middle, how):
    (middle / RUN_FILE).unlink() if how == "missing" else (middle / RUN_FILE).write_text("{}")
    refused(how, middle / RUN_FILE)


@pytest.fixture(scope="module")
def others(world: World, tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of step 3 that this run did not save, each of the same recipe."""
    kept, folder = {}, tmp_path_factory.mktemp("others")

    def keep(name: str, **changes: str) -> None:
        with here(world.folder):
            put_back(world.folder, {})
            shutil.copytree(folder / "rows", "rows")
            loaded = load_recipe(
                folder / "recipe.yaml", [f"{key}={value}" for key, value in changes.items()]
            )
            local.start(loaded, run_dir=RUN, quiet=True)
            kept[name] = shutil.copytree(
                step_folder(RUN.absolute() / "checkpoints", 3), folder / name
            )

    put_back(world.folder, world.moments["middle"])
    shutil.copytree(world.folder / "rows", folder / "rows")
    shutil.copy(world.folder / "recipe.yaml", folder)
    keep("same seed")
    keep("other seed", **{"train.seed": "7"})
    return kept


@pytest.mark.parametrize("which", ["same seed", "other seed"])
def test_a_checkpoint_of_another_run_is_refused_by_resume_and_by_evaluation(middle, others, which):
    there = shutil.copytree(others[which], step_folder(middle / "checkpoints", 3))
    refused("is from another run", there)
    for step in ("last", "3"):
        with pytest.raises(UserError, match="is from another run"):
            find_model(RUN, step)
    shutil.rmtree(there)
    local.resume(RUN, quiet=True)


def test_a_checkpoint_of_another_seed_is_refused_where_no_run_has_a_name(middle, others):
    """`run` called directly, without a folder that `bloomery train` made."""
    from bloomery.train.loop import run

    with pytest.raises(UserError, match=r"with train\.seed=7, not 0"):
        run(
            read_plan(middle / "plan.json"),
            run_dir=middle.parent / "bare",
            emit=lambda event: None,
            stop=lambda: False,
            resume_from=others["other seed"],
        )


def test_a_checkpoint_of_another_past_of_the_same_run_is_refused(middle):
    """A copy of the folder went on by itself; its checkpoints are not this one's future."""
    files = files_of(middle)
    local.resume(RUN, quiet=True)
    later = files_of(middle / "checkpoints/step-00000003")
    put_back(middle, files)
    second = step_folder(middle / "checkpoints", 2)
    (second / "MANIFEST.json").unlink()
    state = json.loads((second / "state.json").read_text())
    (second / "state.json").write_text(json.dumps(state))  # the same, written otherwise
    seal_again(second)
    for path, content in later.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    refused("does not follow the one of step 2", step_folder(middle / "checkpoints", 3))


def seal_again(folder: Path) -> None:
    from bloomery.infer.model_folder import Lineage

    head = read_identity(folder.parent.parent)
    assert head is not None
    seal(folder, Lineage(head.run, head.plans[-1], None))


def test_checkpoints_name_their_run_its_plan_and_the_one_before(middle):
    local.resume(RUN, quiet=True)
    head = read_identity(middle)
    third, fourth = (
        unstamped(step_folder(middle / "checkpoints", n) / "MANIFEST.json") for n in (3, 4)
    )
    assert third["run"] == fourth["run"] == head.run
    assert third["plan"] == fourth["plan"] == head.plans[-1]
    assert fourth["before"] == [3, third["sha256"]]
    assert third["before"][0] == 2
    assert len(head.plans) == 1


def test_overrides_write_a_new_plan_and_the_chain_holds_both(middle):
    local.resume(RUN, quiet=True, overrides=["train.max_steps=5", "eval.every=1 steps"])
    head = read_identity(middle)
    assert len(head.plans) == 2
    assert digest_of((middle / "plan.json").read_bytes()) == head.plans[-1]
    assert (
        unstamped(step_folder(middle / "checkpoints", 5) / "MANIFEST.json")["plan"]
        == head.plans[-1]
    )
    local.resume(RUN, quiet=True, overrides=["train.max_steps=6"])


def test_a_resumed_run_keeps_its_prepared_dataset_whatever_its_files_are_now(middle):
    """A longer run read the names of the source files again, and refused a folder that another version had chosen."""
    prepared = files_of(read_plan(middle / "plan.json").data.prepared)
    (middle.parent.parent / "rows" / "validation.jsonl").write_text('{"text": "held out"}\n')
    local.resume(RUN, quiet=True, overrides=["train.max_steps=5"])
    assert files_of(read_plan(middle / "plan.json").data.prepared) == prepared
    assert step_folder(middle / "checkpoints", 5).is_dir()


def test_going_back_starts_another_chain(middle):
    local.resume(RUN, quiet=True)
    local.resume(RUN, quiet=True, step=3)
    third, fourth = (
        unstamped(step_folder(middle / "checkpoints", n) / "MANIFEST.json") for n in (3, 4)
    )
    assert fourth["before"] == [3, third["sha256"]]


def test_a_plan_that_is_gone_is_made_again_from_the_sealed_recipe_and_the_chain_says_so(
    middle, world
):
    (middle / "plan.json").unlink()
    found = outcome(resumed=True)
    assert found == world.expected["middle"]
    warned = [
        event.reason for event in read_events(middle / "events.jsonl") if isinstance(event, Warned)
    ]
    assert any("plan.json" in reason for reason in warned)


def test_a_kill_between_the_head_and_the_files_leaves_a_run_that_goes_on(middle, monkeypatch):
    from bloomery.plan import store as head

    class Killed(BaseException):
        """As by SIGKILL."""

    text, write, calls = (middle / "plan.json").read_text(), head.write_durably, []

    def dies(number):
        def written(path, content):
            calls.append(path.name)
            if len(calls) == number:
                raise Killed
            write(path, content)

        return written

    for number in range(1, 5):
        calls.clear()
        monkeypatch.setattr(head, "write_durably", dies(number))
        new = {
            "plan.json": text + " " * number,
            "machine.json": (middle / "machine.json").read_text() + " ",
        }
        with pytest.raises(Killed):
            write_sealed(middle, new)
        for name in new:
            read_sealed(middle / name)
        monkeypatch.setattr(head, "write_durably", write)
        write_sealed(middle, {"plan.json": text})
    (middle / "plan.json").write_text(text + " ")
    with pytest.raises(UserError, match="has changed"):
        read_sealed(middle / "plan.json")


def test_each_run_has_a_name_of_its_own(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        begin(tmp_path / name, {"recipe.yaml": "x"})
    assert len({read_identity(tmp_path / name).run for name in ("a", "b")}) == 2


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "chat_template.jinja", "adapter_config.json"]
)
def test_a_file_added_to_a_checkpoint_is_never_read(middle, world, name):
    folder = step_folder(middle / "checkpoints", 2)
    (folder / name).write_text("{}")
    assert damage(folder) == f"{name} was added"
    told = []
    assert newest_valid(middle / "checkpoints", on_damage=told.append) == step_folder(
        middle / "checkpoints", 1
    )
    assert name in told[0]
    for place in (folder, RUN):
        with pytest.raises(UserError, match="was added"):
            find_model(place, "last" if place == folder else "2")
    assert outcome(resumed=True) == world.expected["middle"]


def test_another_base_is_refused_before_the_first_checkpoint_too(world, tmp_path_factory):
    base = tmp_path_factory.mktemp("base")
    put_back(world.folder, world.moments["done"])
    shutil.copytree(world.folder / RUN / "checkpoints/step-00000004", base / "model")
    (base / "model/MANIFEST.json").unlink()
    dpo = World(base / "dpo", "dpo", base / "model")
    put_back(dpo.folder, dpo.moments["start"])
    path = dpo.folder / "base/model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + bytes(4))
    with here(dpo.folder):
        refused("not the one that the run began with")
