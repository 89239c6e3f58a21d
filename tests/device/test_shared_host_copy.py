"""Replicas on one host share one copy of frozen weights: bitwise as replicas that each have all on the device."""

import gc
import re
from pathlib import Path
from typing import Any

import pytest
from plans_for_tests import tiny_plan
from runs_of_the_loop import assert_same_tensors, prepared_corpus, saved_base
from safetensors.torch import load_file
from test_device_ranks import rank_of_a_device
from test_expert_ranks import mixture

from bloomery.model.configs import read_config
from bloomery.monitor.events import EvalDone, StepDone
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Quantize
from ranks import on_ranks, ranks, seconds_of

LAYERS = 4
MIXTURE = mixture(hidden_size=64, num_layers=LAYERS)
ADAPTER = Lora(kind="lora", rank=4, alpha=8.0, dropout=0.1, target_modules=["q_proj", "v_proj"])
CASES: dict[str, dict[str, Any]] = {
    "layers": {"adapter": ADAPTER},
    "layers, nf4": {"adapter": ADAPTER, "quantize": Quantize(kind="nf4")},
    "experts, nf4": {"adapter": ADAPTER, "quantize": Quantize(kind="nf4")},
    "layers, in full": {},
}
QUICK = "experts, nf4"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return saved_base(MIXTURE, corpus, tmp_path_factory.mktemp("base"))


def plan_of(corpus: Path, base: Path, case: str, *, stream: str) -> RunPlan:
    plan = tiny_plan(
        corpus,
        config=read_config(base),
        model={"source": base},
        train={
            "device": "cuda",
            "steps": 3,
            "stream": stream,
            "activation_checkpointing": "full",
            "micro_batch_size": 1,
            "accumulation": 2,
        },
        data={"pin_memory": True},
    )
    memory = plan.memory.model_copy(update={"limit": 4 * 2**30})
    plan = plan.model_copy(update=CASES[case] | {"memory": memory})
    return on_ranks(plan, replicate=2)


def trained(plan: RunPlan, folder: Path) -> tuple[list[float], dict[str, Any]]:
    folder.mkdir()
    words = (plan.model_dump_json(), str(folder), None, None)
    by_rank = ranks(2).call(rank_of_a_device, *words, seconds=seconds_of(plan))
    assert [problems for _, problems, _ in by_rank] == [[], []]
    events = by_rank[0][0]
    losses = [e.loss for e in events if isinstance(e, StepDone | EvalDone) and e.loss is not None]
    newest = max((folder / "checkpoints").glob("step-*"))
    files = {file.stem: load_file(file) for file in newest.rglob("*.safetensors")}
    return losses, {
        f"{file}/{name}": tensor for file, held in files.items() for name, tensor in held.items()
    }


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[pytest.mark.sampled(8)] if name == QUICK else [pytest.mark.soak])
        for name in CASES
    ],
)
def test_replicas_that_stream_are_replicas(
    corpus: Path, base: Path, tmp_path: Path, case: str
) -> None:
    streamed = plan_of(corpus, base, case, stream=case.partition(",")[0])
    streamed_losses, streamed_tensors = trained(streamed, tmp_path / "streamed")
    losses, tensors = trained(plan_of(corpus, base, case, stream="off"), tmp_path / "resident")
    assert len(losses) >= 4
    assert streamed_losses == losses
    assert_same_tensors(streamed_tensors, tensors)


def memory_of_a_rank(plan_json: str, folder: str) -> tuple[int, int, set[str]]:
    """Of the weights on the host: bytes mapped, this rank's share of their pages, inodes."""
    from bloomery.parallel.process_group import join
    from bloomery.parallel.shared_memory import NAME
    from bloomery.train.state import build_state

    gc.collect()  # models of earlier cases
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    state = build_state(plan, run_dir=Path(folder), mesh=mesh)
    mesh.barrier()
    mapped = used = 0
    inodes = set()
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = NAME in line
            if is_ours:
                inodes.add(line.split()[4])
        elif is_ours and line.startswith("Size:"):
            mapped += int(line.split()[1]) * 1024
        elif is_ours and line.startswith("Pss:"):
            used += int(line.split()[1]) * 1024
    mesh.barrier()
    del state
    return mapped, used, inodes


def test_a_host_has_its_weights_once_and_under_no_name(
    corpus: Path, base: Path, tmp_path: Path
) -> None:
    plan = plan_of(corpus, base, "layers, nf4", stream="layers")
    before = set(Path("/dev/shm").iterdir())
    first, second = ranks(2).call(memory_of_a_rank, plan.model_dump_json(), str(tmp_path))
    assert first[0] == second[0] > 40_000
    assert first[2] == second[2]
    assert len(first[2]) == 1
    # The share of a page that both have touched is a half.
    assert first[1] + second[1] == first[0]
    assert set(Path("/dev/shm").iterdir()) - before == set()
