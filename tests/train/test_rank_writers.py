"""Checkpoints that several ranks write, each the tensors that it owns. Oracle: the checkpoint of one rank."""

import json
import platform
import random
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import assert_same_tensors
from safetensors.torch import load_file, save_file

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.infer.model_folder import NOT_SAVED, clear_drafts, damage, newest_valid
from bloomery.model.configs import build_config
from bloomery.model.io.safetensors import HF_METADATA, TYPE_ORDER, HashedFile, file_order
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import Saved, StepDone
from bloomery.plan.estimate.saves import estimate_save
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora
from bloomery.recipe.schema import Model as ModelRecipe
from bloomery.train.checkpoint.saver import read_part
from ranks import Ranks, fields, losses, on_ranks, ranks, train, train_here

KIB = 2**10
STEPS, HALF = 4, 2


def plan_of(prepared: Path, **sections: Any) -> Any:
    config = sections.pop("config", {})
    if not isinstance(config, ModelConfig):
        config = tiny_config(**{"vocab_size": 300, "tie_embeddings": False} | config)
    train = {
        "micro_batch_size": 2,
        "accumulation": 2,
        "tokens_per_step": 128,
        "steps": STEPS,
    } | sections.pop("train", {})
    return tiny_plan(
        prepared,
        config=config,
        train=train,
        checkpoint={"every_steps": HALF, "async_save": True},
        eval={"every_steps": HALF},
        **sections,
    )


def train_in_small_files(
    plan_json: str, folder: str, resume_from: str | None, stop_after: int | None
) -> list[Any]:
    """One rank of a run whose checkpoints are divided as those of a large model are; its events."""
    from bloomery.parallel import ownership

    ownership.FILE_BYTES = 8 * KIB
    try:
        return train_here(plan_json, folder, resume_from, stop_after)
    finally:
        ownership.FILE_BYTES = 64 * KIB**2


def train_divided(
    plan: Any, folder: Path, resume_from: Path | None = None, stop_after: int | None = None
) -> list[Any]:
    folder.mkdir(exist_ok=True)
    resume = None if resume_from is None else str(resume_from)
    words = (plan.model_dump_json(), str(folder), resume, stop_after)
    return ranks(plan.train.ranks).call(train_in_small_files, *words)[0]


def step_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def saved_by_one_rank(plan: Any, checkpoint: Path, folder: Path) -> Path:
    """The checkpoint that one rank saves of the state that it has read from another."""
    # A run whose evaluation was interrupted saves its first step again.
    unfinished = shutil.copytree(checkpoint, folder.with_name(f"{folder.name} unfinished"))
    state = json.loads((unfinished / "state.json").read_text())
    state["progress"]["eval_due"] = True
    (unfinished / "state.json").write_text(json.dumps(state))
    train(plan, folder, resume_from=unfinished, stop_after=0)
    return step_of(folder, HALF)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """By part and name, of every file."""
    return {
        f"{file.name.split('.')[0].split('-')[0]}/{name}": tensor
        for file in checkpoint.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def parts_in_files(checkpoint: Path) -> dict[str, int]:
    """How many files each part has."""
    counts: dict[str, int] = {}
    for file in checkpoint.glob("*.safetensors"):
        part = file.name.split(".")[0].split("-")[0]
        counts[part] = counts.get(part, 0) + 1
    return counts


def test_a_hashed_file_has_the_bytes_of_the_library(tmp_path) -> None:
    tensors_by_name = {}
    for number, dtype in enumerate(TYPE_ORDER):
        tensors_by_name[f"b{number % 3}.{dtype}"] = torch.ones(3, 5).to(getattr(torch, dtype))
        tensors_by_name[f"é{number}"] = torch.zeros(7 + number).to(getattr(torch, dtype))
    save_file(tensors_by_name, tmp_path / "library", metadata=HF_METADATA)

    def key(name: str) -> tuple[int, str]:
        return file_order(name, str(tensors_by_name[name].dtype).removeprefix("torch."))

    names = sorted(tensors_by_name, key=key)
    specs = {
        name: (tuple(tensors_by_name[name].shape), tensors_by_name[name].dtype) for name in names
    }
    with HashedFile(tmp_path / "ours", specs, HF_METADATA) as file:
        for name in names:
            file.write(tensors_by_name[name])
        _, size = file.finish()
    content = (tmp_path / "ours").read_bytes()
    assert content == (tmp_path / "library").read_bytes()
    assert size == len(content)


MESHES = {
    "4 shards": {"shard": 4},
    "3 shards": {"shard": 3},
    "2 copies": {"replicate": 2},
    "2 x 2": {"replicate": 2, "shard": 2},
    "2 stages": {"pipeline": 2},
    "2 stages of 2 shards": {"pipeline": 2, "shard": 2},
    "2 stages of 2 copies": {"pipeline": 2, "replicate": 2},
}
QUICK_MESHES = ("2 x 2", "2 stages of 2 shards")


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, id=name, marks=[] if name in QUICK_MESHES else pytest.mark.soak)
        for name, mesh in MESHES.items()
    ],
)
@pytest.mark.parametrize(
    "tied", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["untied", "tied"]
)
def test_owners_write_what_one_rank_saves(prepared, tmp_path, mesh, tied) -> None:
    from transformers import AutoModelForCausalLM

    plan = plan_of(prepared, config={"tie_embeddings": tied})
    several = on_ranks(plan, **mesh)
    events = train_divided(several, tmp_path / "several", stop_after=HALF)
    checkpoint = step_of(tmp_path / "several", HALF)

    # As many files as ranks, with indices, and no other difference from the run that has one file for each part.
    counts = parts_in_files(checkpoint)
    assert counts == {"model": several.train.ranks, "optimizer": several.train.ranks}
    train(several, tmp_path / "small", stop_after=HALF)
    undivided = step_of(tmp_path / "small", HALF)
    assert parts_in_files(undivided) == {"model": 1, "optimizer": 1}
    assert_same_tensors(tensors(checkpoint), tensors(undivided))
    for saved in fields(events, "Saved"):
        assert 0 < saved["stall_seconds"] <= saved["seconds"]

    # One rank reads it all, and saves the same again: the same bits, and the same files as on several ranks.
    copy = saved_by_one_rank(plan, checkpoint, tmp_path / "one")
    assert_same_tensors(tensors(copy), tensors(checkpoint))
    for name in ("model.safetensors", "optimizer.safetensors", "config.json"):
        assert (copy / name).read_bytes() == (undivided / name).read_bytes(), name

    # transformers opens the folder.
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    stored = load_file(undivided / "model.safetensors")
    assert_same_tensors(weights, stored)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", [{"shard": 2}, {"shard": 4}, {"replicate": 2}], ids=str)
def test_a_divided_checkpoint_resumes_on_any_mesh(prepared, tmp_path, after) -> None:
    plan = plan_of(prepared)
    whole = train(plan, tmp_path / "whole")
    train_divided(on_ranks(plan, shard=4), tmp_path / "four", stop_after=HALF)
    checkpoint = step_of(tmp_path / "four", HALF)
    rest = train_divided(on_ranks(plan, **after), tmp_path / "rest", resume_from=checkpoint)
    expected = {step: loss for step, loss in losses(whole).items() if step > HALF}
    assert losses(rest) == pytest.approx(expected, rel=0, abs=1e-5)
    train_divided(on_ranks(plan, **after), tmp_path / "copy", checkpoint, stop_after=0)
    assert_same_tensors(tensors(step_of(tmp_path / "copy", HALF)), tensors(checkpoint))


def measured_run(plan_json: str, folder: str) -> dict[str, Any]:
    """One rank of a run: its events, the bytes that it wrote, its peak, and the time of a copy of its rows."""
    import time

    import torch.distributed as dist

    from bloomery.parallel import owner_exchange
    from bloomery.train.process import peak_memory_gib

    bytes_written = 0
    rows: dict[Any, torch.Size] = {}
    plain_finish, plain_copy = HashedFile.finish, owner_exchange.HostBuffer.copy

    def counted_finish(file: HashedFile) -> tuple[str, int]:
        nonlocal bytes_written
        digest, size = plain_finish(file)
        bytes_written += size
        return digest, size

    def noted_copy(buffer, tensors):
        rows.update({key: tensor.shape for key, tensor in tensors.items()})
        return plain_copy(buffer, tensors)

    HashedFile.finish, owner_exchange.HostBuffer.copy = counted_finish, noted_copy
    try:
        events = train_here(plan_json, folder, None, None)
    finally:
        HashedFile.finish, owner_exchange.HostBuffer.copy = plain_finish, plain_copy
    peak_bytes = peak_memory_gib("cpu") * 2**30

    # The yardstick: all ranks copy as many rows, into memory that they have used before.
    tensors = [torch.zeros(shape) for shape in rows.values()]
    copies = [torch.ones_like(tensor) for tensor in tensors]
    copy_seconds = []
    for _ in range(5):
        dist.barrier()
        began = time.monotonic()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        dist.barrier()
        copy_seconds.append(time.monotonic() - began)
    return {
        "events": events,
        "bytes": bytes_written,
        "peak": peak_bytes,
        "copied_bytes": sum(tensor.nbytes for tensor in tensors),
        "copy_seconds": sorted(copy_seconds)[2],
    }


@pytest.mark.soak
def test_four_shards_share_the_work_of_a_save(prepared, tmp_path) -> None:
    """51 million parameters. In processes of its own: a peak is that of a process."""
    config = {
        "vocab_size": 16384,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_layers": 11,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 64,
    }
    plan = on_ranks(plan_of(prepared, config=config, train={"steps": 3 * HALF}), shard=4)
    with closing(Ranks(4)) as fresh:
        measured = fresh.call(measured_run, plan.model_dump_json(), str(tmp_path), seconds=600.0)

    # Each rank writes its share, and the first one needs no more memory than the others.
    checkpoint = step_of(tmp_path, 3 * HALF)
    num_bytes = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert num_bytes > 12 * 51e6
    for of_rank in measured:
        assert 0.15 < of_rank["bytes"] / 3 / num_bytes < 0.45
    first_peak, *other_peaks = (of_rank["peak"] for of_rank in measured)
    assert first_peak - min(other_peaks) < 0.3 * num_bytes

    # The plan counts the host memory of a rank: its rows, and the largest tensor in full.
    largest_bytes = 4 * config["vocab_size"] * config["hidden_size"]
    planned = estimate_save(num_bytes, largest_bytes, ranks=4, hosts=1, copies=True)
    for of_rank in measured:
        assert of_rank["copied_bytes"] + largest_bytes == pytest.approx(
            planned.host_bytes, rel=0.01
        )

    # Steps end while a save is written; training waits for the copy alone. The first save takes fresh memory.
    events = measured[0]["events"]
    saves = [event for event in events if isinstance(event, Saved)]
    assert [event.step for event in saves] == [HALF, 2 * HALF, 3 * HALF]
    steps_before_saved = [
        max(
            earlier.step
            for earlier in events[: events.index(event)]
            if isinstance(earlier, StepDone)
        )
        for event in saves[:-1]
    ]
    assert all(last > event.step for last, event in zip(steps_before_saved, saves, strict=False))
    stall_seconds = min(event.stall_seconds for event in saves[1:])
    assert stall_seconds < 2 * max(of_rank["copy_seconds"] for of_rank in measured)


def names_in(checkpoints: Path) -> list[str]:
    """Without the note of the best step."""
    return sorted(path.name for path in checkpoints.iterdir() if path.name != "best.json")


def train_with_a_bad_rank(
    plan_json: str, folder: str, fault: str, bad_rank: int, steps: list[int]
) -> list[Any]:
    """One rank of a run in small files, in whose saves of these steps one rank cannot write; its events."""
    import resource

    from bloomery.parallel import ownership
    from bloomery.train.checkpoint import rank_writers

    ownership.FILE_BYTES = 8 * KIB
    plain_write = rank_writers.RankWriters._write_files
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_badly(writers, staged, draft: Path) -> Any:
        is_bad = writers.mesh.rank == bad_rank and int(draft.name.split("-")[1]) in steps
        if is_bad and fault == "full disk":
            # A process has one limit for all of its files: its events are in memory here.
            resource.setrlimit(resource.RLIMIT_FSIZE, (8 * KIB, limits[1]))
        if is_bad and fault == "unseen folder":
            draft = Path("/nowhere", *draft.parts[1:])
        try:
            return plain_write(writers, staged, draft)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    rank_writers.RankWriters._write_files = write_badly
    try:
        return train_here(plan_json, folder, None, None)
    except UserError as failed:
        return [failed.problem]
    finally:
        rank_writers.RankWriters._write_files = plain_write
        ownership.FILE_BYTES = 64 * KIB**2


FAULTS = {
    "full disk": ["File too large (rank {rank} on {host})", "are needed"],
    "unseen folder": ["all hosts must share it (rank {rank} on {host})"],
}


@pytest.mark.parametrize(
    ("fault", "bad_rank", "async_save"),
    [
        pytest.param("full disk", 2, True, id="full disk of rank 2", marks=pytest.mark.soak),
        pytest.param("full disk", 0, False, id="full disk of rank 0, sync"),
        pytest.param("unseen folder", 1, True, id="folder unseen by rank 1"),
        pytest.param("full disk", 2, False, id="rank 2, sync", marks=pytest.mark.soak),
        pytest.param("full disk", 0, True, id="rank 0", marks=pytest.mark.soak),
        pytest.param("unseen folder", 1, False, id="unseen, sync", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_cannot_write_costs_one_checkpoint(
    prepared, tmp_path, fault, bad_rank, async_save
) -> None:
    plan = on_ranks(plan_of(prepared, train={"steps": 3 * HALF}), shard=3)
    checkpoint = plan.checkpoint.model_copy(update={"async_save": async_save})
    plan = plan.model_copy(update={"checkpoint": checkpoint})
    whole = train_divided(plan, tmp_path / "whole")
    (tmp_path / "bad").mkdir()
    words = (plan.model_dump_json(), str(tmp_path / "bad"), fault, bad_rank, [2 * HALF])
    events = ranks(3).call(train_with_a_bad_rank, *words)[0]

    # One warning that names rank and host, and nothing else is different: the draft is gone, training went on.
    reasons = [
        event["reason"] for event in fields(events, "Warned") if NOT_SAVED in event["reason"]
    ]
    assert len(reasons) == 1
    for text in FAULTS[fault]:
        assert text.format(rank=bad_rank, host=platform.node()) in reasons[0]
    assert [event["step"] for event in fields(events, "Saved")] == [HALF, 3 * HALF]
    assert losses(events) == losses(whole)
    assert names_in(tmp_path / "bad" / "checkpoints") == [
        f"step-{step:08d}" for step in (HALF, 3 * HALF)
    ]
    assert damage(step_of(tmp_path / "bad", HALF)) is None
    last = step_of(tmp_path / "bad", 3 * HALF)
    assert damage(last) is None
    assert_same_tensors(tensors(last), tensors(step_of(tmp_path / "whole", 3 * HALF)))


def test_a_last_save_that_fails_is_the_same_error_on_all_ranks(prepared, tmp_path) -> None:
    plan = on_ranks(plan_of(prepared), shard=2)
    words = (plan.model_dump_json(), str(tmp_path), "full disk", 1, [STEPS])
    problems = {result[0] for result in ranks(2).call(train_with_a_bad_rank, *words)}
    assert len(problems) == 1
    (problem,) = problems
    assert f"(rank 1 on {platform.node()})" in problem
    assert f"the newest checkpoint is of step {HALF}" in problem
    assert names_in(tmp_path / "checkpoints") == [f"step-{HALF:08d}"]


def train_until_killed(
    plan_json: str, folder: str, resume_from: str | None, victim: int, place: int
) -> list[Any]:
    """One rank of a run in small files; SIGKILL ends the victim at the n-th place in its saves."""
    import os
    import signal

    from bloomery.train.checkpoint import rank_writers
    from bloomery.train.checkpoint import saver as checkpoint

    rank = int(os.environ["RANK"])
    places = 0

    def killing(work):
        def call(*arguments, **settings):
            nonlocal places
            places += 1
            if rank == victim and places == place:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*arguments, **settings)

        return call

    # The processes of this pool end with this call: nothing is put back.
    HashedFile._write = killing(HashedFile._write)
    for name in ("all_gather_json", "broadcast_json"):
        setattr(rank_writers, name, killing(getattr(rank_writers, name)))
    for name in ("seal", "put_in_place", "remove_folder"):
        setattr(checkpoint, name, killing(getattr(checkpoint, name)))
    return train_in_small_files(plan_json, folder, resume_from, None)


def end_all_with(doomed: Ranks, victim: int) -> None:
    """As a launcher: the end of one rank is the end of all."""
    processes = [process for process, _ in doomed._members]
    while processes[victim].poll() is None:
        time.sleep(0.05)
    for process in processes:
        process.kill()


@pytest.mark.parametrize(
    ("kills", "seed"), [(1, 0), pytest.param(20, 1, marks=pytest.mark.soak)], ids=["1", "20"]
)
def test_ranks_that_are_killed_in_saves_lose_no_checkpoint(prepared, tmp_path, kills, seed) -> None:
    dice = random.Random(seed)
    world = 3
    plan = on_ranks(plan_of(prepared, train={"steps": 10}), shard=world)
    every = plan.checkpoint.model_copy(update={"every_steps": 1})
    plan = plan.model_copy(update={"checkpoint": every})
    whole = train_divided(plan, tmp_path / "whole")
    folder = tmp_path / "killed"
    folder.mkdir()
    checkpoints = folder / "checkpoints"
    resume_from: Path | None = None
    saved_step = 0
    for number in range(kills):
        words = (dice.randrange(world), dice.randint(1, 40))
        with closing(Ranks(world)) as doomed, pytest.raises((AssertionError, EOFError)):
            resume = None if resume_from is None else str(resume_from)
            threading.Thread(target=end_all_with, args=(doomed, words[0])).start()
            doomed.call(train_until_killed, plan.model_dump_json(), str(folder), resume, *words)

        # As `bloomery resume` does: drafts are deleted, and what has a name is a checkpoint.
        clear_drafts(checkpoints)
        problems: list[str] = []
        resume_from = newest_valid(checkpoints, on_damage=problems.append)
        assert problems == [], f"kill {number}: rank {words[0]} at place {words[1]}"
        assert all(name.startswith("step-") for name in names_in(checkpoints))
        step = 0 if resume_from is None else int(resume_from.name.split("-")[1])
        assert step >= saved_step
        saved_step = step
        if saved_step >= 6:
            assert resume_from is not None
            shutil.rmtree(checkpoints)
            resume_from, saved_step = None, 0
    rest = train_divided(plan, folder, resume_from)
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > saved_step}
    assert_same_tensors(tensors(step_of(folder, 10)), tensors(step_of(tmp_path / "whole", 10)))


LORA = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["q_proj", "down_proj"])
ADAPTED_MESHES = {
    "3 shards": {"shard": 3},
    "2 stages of 2 shards": {"pipeline": 2, "shard": 2},
}


@pytest.mark.parametrize("mesh", ADAPTED_MESHES.values(), ids=ADAPTED_MESHES)
def test_an_adapter_is_one_file_of_any_size(prepared, tmp_path, mesh) -> None:
    """PEFT opens no other. The states of its optimizer are divided."""
    config = tiny_config(vocab_size=300)
    base = tmp_path / "base"
    base.mkdir()
    write_model(model_state(fresh_decoder(config, seed=1)), config, base)
    plan = plan_of(prepared, config={"tie_embeddings": True}, adapter=LORA)
    model_plan = plan.model.model_copy(update={"source": base})
    plan = plan.model_copy(update={"adapter": LORA, "model": model_plan})
    several = on_ranks(plan, **mesh)
    train_divided(several, tmp_path / "several", stop_after=HALF)
    checkpoint = step_of(tmp_path / "several", HALF)
    train(several, tmp_path / "small", stop_after=HALF)
    undivided = step_of(tmp_path / "small", HALF)
    adapter = "adapter_model.safetensors"
    assert (checkpoint / adapter).read_bytes() == (undivided / adapter).read_bytes()
    copy = saved_by_one_rank(plan, checkpoint, tmp_path / "one")
    for name in (adapter, "optimizer.safetensors"):
        assert (copy / name).read_bytes() == (undivided / name).read_bytes(), name


@pytest.mark.parametrize(
    "mesh",
    [{"shard": 3}, pytest.param({"pipeline": 2, "replicate": 2}, marks=pytest.mark.soak)],
    ids=["3 shards", "2 stages of 2 copies"],
)
@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_tensors_that_are_stored_fused_are_written_whole(prepared, tmp_path, family, mesh) -> None:
    """Phi-3 stores q, k and v as one tensor, GPT-2 transposed as well. Oracle: the file that one rank writes."""
    model = ModelRecipe(family=family, hidden_size=32, num_layers=2, num_heads=2, max_positions=64)
    plan = plan_of(prepared, config=build_config(model, vocab_size=300))
    train_divided(on_ranks(plan, **mesh), tmp_path / "several", stop_after=HALF)
    checkpoint = step_of(tmp_path / "several", HALF)
    assert parts_in_files(checkpoint)["model"] > 1
    copy = saved_by_one_rank(plan, checkpoint, tmp_path / "one")
    assert_same_tensors(tensors(checkpoint), tensors(copy))


def agreed_on(plan_json: str, folder: str) -> tuple[str, list[str], list[str]]:
    """On every rank: the checkpoint to resume from, what is said of newer ones, and the files that this rank hashed."""
    from bloomery.infer import model_folder
    from bloomery.parallel.process_group import join
    from bloomery.train.recover import agreed_checkpoint

    hashed_files = []
    plain_digest = model_folder._digest

    def noted_digest(path: Path) -> str:
        hashed_files.append(f"{path.parent.name}/{path.name}")
        return plain_digest(path)

    model_folder._digest = noted_digest
    problems: list[str] = []
    try:
        mesh = join(RunPlan.model_validate_json(plan_json).train)
        checkpoint = agreed_checkpoint(mesh, Path(folder) / "checkpoints", problems.append)
    finally:
        model_folder._digest = plain_digest
    return "" if checkpoint is None else checkpoint.name, problems, hashed_files


def test_ranks_share_out_the_hashing_and_agree_on_damage(prepared, tmp_path) -> None:
    plan = on_ranks(plan_of(prepared), shard=3)
    train_divided(plan, tmp_path)
    words = (plan.model_dump_json(), str(tmp_path))
    files = sorted(path.name for path in step_of(tmp_path, STEPS).iterdir())
    files.remove("MANIFEST.json")

    # Undamaged: each file is hashed once, and every rank hashes some.
    results = ranks(3).call(agreed_on, *words)
    assert {result[0] for result in results} == {f"step-{STEPS:08d}"}
    hashed_files = [file.split("/")[1] for _, _, of_rank in results for file in of_rank]
    assert sorted(hashed_files) == files
    assert all(of_rank for _, _, of_rank in results)

    # A flipped bit in any file, whoever hashes it: all ranks take the checkpoint before, for the same reason.
    for name in files:
        path = step_of(tmp_path, STEPS) / name
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        results = ranks(3).call(agreed_on, *words)
        path.write_bytes(content)
        assert {result[0] for result in results} == {f"step-{HALF:08d}"}
        assert len({str(problems) for _, problems, _ in results}) == 1
        assert name in results[0][1][0]


def read_by_rank(plan_json: str, folder: str, resume_from: str) -> int:
    """On every rank: the bytes of tensors that it reads from the files of a checkpoint."""
    from bloomery.model.io.safetensors import TensorReader

    bytes_read = 0
    plain_read = TensorReader._read_into

    def counted_read(reader, target: torch.Tensor, source, first: int) -> None:
        nonlocal bytes_read
        bytes_read += target.nbytes
        plain_read(reader, target, source, first)

    TensorReader._read_into = counted_read
    try:
        train_here(plan_json, folder, resume_from, 0)
    finally:
        TensorReader._read_into = plain_read
    return bytes_read


@pytest.mark.parametrize("mesh", [{"shard": 4}, {"pipeline": 2}], ids=["4 shards", "2 stages"])
def test_a_rank_reads_its_own_rows(prepared, tmp_path, mesh) -> None:
    plan = on_ranks(plan_of(prepared), **mesh)
    train_divided(plan, tmp_path / "first", stop_after=HALF)
    checkpoint = step_of(tmp_path / "first", HALF)
    num_bytes = sum(tensor.nbytes for tensor in tensors(checkpoint).values())
    (tmp_path / "again").mkdir()
    words = (plan.model_dump_json(), str(tmp_path / "again"), str(checkpoint))
    bytes_by_rank = ranks(plan.train.ranks).call(read_by_rank, *words)
    assert num_bytes <= sum(bytes_by_rank) < 1.05 * num_bytes  # norms are on every shard
    assert max(bytes_by_rank) < 1.2 * num_bytes / plan.train.ranks


def saved_without_memory(plan_json: str, folder: str, poor_rank: int | None) -> list[Any]:
    """On every rank: the events of a save; one part has no tensor, and one rank may have no room for a copy."""
    from bloomery.parallel.owner_exchange import HostBuffer
    from bloomery.parallel.process_group import join
    from bloomery.train.checkpoint.rank_writers import RankWriters, RowsOnRanks
    from bloomery.train.checkpoint.saver import Saver

    mesh = join(RunPlan.model_validate_json(plan_json).train)
    rows = RowsOnRanks(lambda _: True, lambda _: True, ("states",))
    events: list[Any] = []
    saver = Saver(Path(folder), 3, True, ranks=RankWriters(mesh, rows), emit=events.append)
    plain_copy = HostBuffer.copy

    def failing_copy(buffer, tensors):
        if mesh.rank == poor_rank:
            raise MemoryError
        return plain_copy(buffer, tensors)

    HostBuffer.copy = failing_copy
    try:
        own_rows = torch.full((2, 3), float(mesh.rank))
        saver.save(1, {"states": {"a": own_rows}, "none": {}}, {})
        own_rows.fill_(9.0)
        saver.wait()
    finally:
        HostBuffer.copy = plain_copy
    return events


@pytest.mark.parametrize("poor_rank", [None, 1])
def test_a_rank_without_memory_for_a_copy_saves_while_training_waits(
    prepared, tmp_path, poor_rank
) -> None:
    plan = on_ranks(plan_of(prepared), shard=2)
    results = ranks(2).call(saved_without_memory, plan.model_dump_json(), str(tmp_path), poor_rank)
    folder = tmp_path / "step-00000001"
    assert damage(folder) is None
    expected = torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2)
    assert torch.equal(read_part(folder, "states")["a"], expected)
    assert read_part(folder, "none") == {}
    for events in results:
        reasons = [event["reason"] for event in fields(events, "Warned")]
        assert len(reasons) == (0 if poor_rank is None else 1)
        assert all("written synchronously" in reason for reason in reasons)
