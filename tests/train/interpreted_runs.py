"""Runs whose attention is Triton's, in Triton's interpreter: test_attention_tiles_of_a_run.py runs it.

    TRITON_INTERPRET=1 python interpreted_runs.py PREPARED FOLDER

Prints one JSON object: whether a resumed run equals an undisturbed one although the cache folder's answer changed.
"""

import json
import sys
from pathlib import Path

import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import Run

from bloomery.model.attention import tiles
from bloomery.model.attention.tile_times import FILE
from bloomery.plan.store import begin
from bloomery.train import kernels

WIDE = [32, 32, 4]
NARROW = [16, 16, 4]


def run(plan, folder: Path, answer: list[int], **options) -> Run:
    """`answer`: the tile that this GPU would be found to be fastest with."""
    tiles._in_use.clear()  # a new process
    kernels.fastest_tiles_of = lambda *_: dict.fromkeys(tiles.KERNELS, answer)
    if not folder.exists():
        folder.mkdir()
        begin(folder, {})
    return Run(plan, folder, **options)


def main(prepared: Path, folder: Path) -> None:
    plan = tiny_plan(
        prepared,
        config=tiny_config(vocab_size=300, num_layers=1),
        train={"steps": 2, "accumulation": 1, "tokens_per_step": 64},
        checkpoint={"every_steps": 1},
        eval={"every_steps": None},
        model={"attention": "triton"},
    )
    undisturbed = run(plan, folder / "undisturbed", WIDE)
    narrow = run(plan, folder / "narrow", NARROW)

    # The same first step; then the cache folder has another answer, as after an update of PyTorch.
    run(plan, folder / "resumed", WIDE, stop_after=1)
    checkpoint = folder / "resumed" / "checkpoints" / "step-00000001"
    resumed = run(plan, folder / "resumed", NARROW, resume_from=checkpoint)

    # A run that an older version began has no file: its tiles were the table's first.
    run(plan, folder / "older", WIDE, stop_after=1)
    (folder / "older" / FILE).unlink()
    older = run(
        plan,
        folder / "older",
        NARROW,
        resume_from=folder / "older" / "checkpoints" / "step-00000001",
    )

    def same(one: Run, other: Run) -> bool:
        tensors = one.tensors(2), other.tensors(2)
        names = set(tensors[0]) | set(tensors[1])
        return all(torch.equal(tensors[0][name], tensors[1][name]) for name in names)

    kept = json.loads((folder / "resumed" / FILE).read_text())
    result = {
        "kept": kept,
        "resumed_is_undisturbed": same(resumed, undisturbed),
        "older_is_undisturbed": same(older, undisturbed),
        "tiles_change_bits": not same(narrow, undisturbed),
        "steps": sorted(resumed.losses()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
