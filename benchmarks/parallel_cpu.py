"""What Bloomery's step costs over a bare torch loop with the same collectives, on ranks of one CPU; memory per rank.

    python benchmarks/parallel_cpu.py [--ranks 2] [--rounds 12] [--out FILE]     # --rounds 0: memory alone
    python benchmarks/parallel_cpu.py --stages [--rounds 12] [--out FILE]        # pipelines: parallel_stages.py

Both sides train copies of one model on the same micro-batches with fused AdamW and clipping, in the same processes,
one step each in turn, A B and B A. Bare: `all_reduce` of the counts, of gradients in 25 MiB buckets and of the loss
for copies; FSDP2 per block, `clip_grad_norm_` and AdamW over DTensors for shards. Bloomery: `train_step` and what the
loop exchanges around it; it sums gradients where they lie, all at once, and its shards reuse one buffer. One device
takes the same path without a process group. Each rank has one thread, and malloc as in a run. Memory is the peak of
resident memory of fresh processes that train one sequence at a time: activations are not divided (those of
four sequences add 0.2 GiB to copies and shards alike).
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "parallel_cpu.json"
BAR, MEMORY_BAR = 0.03, 0.75
WARM = 2  # rounds that are not counted


def plan_of(folder: Path, *, gpus: int, micro_batch_size: int, words: Sequence[str]) -> Any:
    """The plan of a 33 M model on so many ranks; `words`: further settings of the recipe."""
    from bloomery.data.prepare.prepare import prepare
    from bloomery.hardware.detect import detect
    from bloomery.plan.gather import gather
    from bloomery.plan.resolve import resolve
    from bloomery.recipe.load import load_recipe

    settings = [
        "train.max_steps=4",
        "train.tokens_per_step=1024",
        f"train.micro_batch_size={micro_batch_size}",
        "train.precision=float32",
        "train.compile=false",
        "optimizer.kind=adamw",
        "data.sequence_length=128",
        f"data.prepared={folder / 'prepared'}",
    ]
    size = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_layers": 9,
        "num_heads": 8,
        "num_kv_heads": 8,
    }
    settings += [f"model.{key}={value}" for key, value in size.items()]
    loaded = load_recipe("demo", [*settings, *words])
    prepare(loaded, folder / "prepared")
    return resolve(loaded, gather(loaded, detect(), prepared=folder / "prepared"), gpus=gpus)


def copies_or_shards(folder: Path, kind: str, ranks: int, micro_batch_size: int) -> Any:
    """The plan of so many copies ("replicate") or shards ("shard")."""
    sizes = {"replicate": 1, "shard": 1} | {kind: ranks}
    words = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
    return plan_of(folder, gpus=ranks, micro_batch_size=micro_batch_size, words=words)


def rank_main(job: dict[str, Any], rank: int, answers: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "BLOOMERY_RENDEZVOUS": job["meeting"],
        "GLOO_SOCKET_IFNAME": "lo",
    }
    import torch

    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan
    from bloomery.train.process import peak_memory_gib

    torch.set_num_threads(1)
    plan = RunPlan.model_validate_json(job["plan"])
    mesh = join(plan.train)
    start = peak_memory_gib("cpu")  # torch alone
    result = timed(plan, mesh, job["rounds"]) if job["rounds"] else one_run(plan, mesh)
    answers.put(
        {"rank": rank, "seconds": result, "start_gib": start, "peak_gib": peak_memory_gib("cpu")}
    )
    mesh.barrier()


def one_run(plan: Any, mesh: Any) -> list[float]:
    """Four steps of Bloomery alone."""
    ours = bloomery_side(plan, mesh)
    return [ours(step) for step in range(4)]


def bloomery_side(plan: Any, mesh: Any) -> Any:
    from bloomery.data.order import Cursor
    from bloomery.train.batch_source import open_loader
    from bloomery.train.objectives.build import build_objective
    from bloomery.train.state import build_state
    from bloomery.train.step import train_step

    state, objective = build_state(plan, mesh=mesh), build_objective(plan)
    loader = open_loader(plan.data, "train", mesh=mesh, seed=plan.train.seed)
    size = plan.train.micro_batch_size * plan.train.ranks

    def step(number: int) -> float:
        first, count = number * plan.train.sequences_per_step, plan.train.accumulation
        batches = [
            loader.batch(Cursor(plan.train.seed, first + i * size), size) for i in range(count)
        ]
        mesh.barrier()
        begun = time.perf_counter()
        train_step(
            state.model_and_optimizer,
            batches,
            objective,
            plan=plan.train,
            lr_scale=1.0,
            position=first,
        )
        # what the loop asks after each step: stop, pause, save; memory and time of each rank
        mesh.all_reduce_max(False, False)
        mesh.any_rank(False)
        mesh.all_gather_floats(0.0, 0.0)
        mesh.barrier()
        return time.perf_counter() - begun

    return step


def bare_side(plan: Any, mesh: Any) -> Any:
    """Plain torch around the same decoder and the same loss."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from bloomery.data.order import Cursor
    from bloomery.model.io.weights import fresh_decoder
    from bloomery.train.batch_source import open_loader
    from bloomery.train.objectives.build import build_objective
    from bloomery.train.step import compute_loss

    model, objective = (
        fresh_decoder(plan.model.config, seed=0, attention=plan.model.attention),
        build_objective(plan),
    )
    if mesh.device_mesh is not None:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh.device_mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    loader, size = (
        open_loader(plan.data, "train", mesh=mesh, seed=plan.train.seed),
        plan.train.micro_batch_size * plan.train.ranks,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    together = mesh.world > 1

    def step(number: int) -> float:
        first, count = number * plan.train.sequences_per_step, plan.train.accumulation
        batches = [
            loader.batch(Cursor(plan.train.seed, first + i * size), size) for i in range(count)
        ]
        mesh.barrier()
        begun = time.perf_counter()
        divisor = torch.tensor(sum(float(batch.loss_mask.sum()) for batch in batches))
        if together:
            dist.all_reduce(divisor)
        total = torch.zeros(())
        for batch in batches:
            parts = compute_loss(model, batch, objective, precision="float32")
            (parts.total / divisor).backward()
            total += parts.total.detach()
        if together and mesh.device_mesh is None:
            reduce_buckets([p.grad for p in model.parameters() if p.grad is not None])
        if together:
            dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total.item()
        optimizer.step()
        optimizer.zero_grad()
        mesh.barrier()
        return time.perf_counter() - begun

    return step


def reduce_buckets(gradients: list[Any]) -> None:
    import torch
    import torch.distributed as dist

    bucket, size = [], 0
    for place, gradient in enumerate(gradients):
        bucket.append(gradient)
        size += gradient.numel()
        if size >= 25 * 2**20 // 4 or place == len(gradients) - 1:
            flat = torch.cat([each.reshape(-1) for each in bucket])
            dist.all_reduce(flat)
            for each, part in zip(
                bucket, flat.split([each.numel() for each in bucket]), strict=True
            ):
                each.copy_(part.view_as(each))
            bucket, size = [], 0


def timed(plan: Any, mesh: Any, rounds: int) -> list[tuple[float, float]]:
    """Seconds of a bare step and of Bloomery's, round by round."""
    sides = {"bare": bare_side(plan, mesh), "bloomery": bloomery_side(plan, mesh)}
    found = []
    for number in range(rounds + WARM):
        order = ("bare", "bloomery") if number % 2 else ("bloomery", "bare")
        seconds = {side: sides[side](number) for side in order}
        found.append((seconds["bare"], seconds["bloomery"]))
    return found[WARM:]


def run_ranks(plan: Any, rounds: int) -> list[dict[str, Any]]:
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        job = {"plan": plan.model_dump_json(), "rounds": rounds, "meeting": f"{place}/ranks"}
        answers = context.Queue()
        members = [
            context.Process(target=rank_main, args=(job, rank, answers))
            for rank in range(plan.train.ranks)
        ]
        for member in members:
            member.start()
        found = [answers.get(timeout=1800) for _ in members]
        for member in members:
            member.join()
    return sorted(found, key=lambda answer: answer["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--stages", action="store_true", help="pipelines, and nothing else")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.stages:
        import parallel_stages

        parallel_stages.compare_schedules(asked.rounds, asked.out or parallel_stages.RESULTS)
        return
    report: dict[str, Any] = {
        "ranks": asked.ranks,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    peaks, start = dict[str, float](), 0.0
    with tempfile.TemporaryDirectory() as place:
        for kind in ("one device", "replicate", "shard") if asked.rounds else ():
            if kind == "one device":
                plan = copies_or_shards(Path(place), "replicate", 1, micro_batch_size=4)
            else:
                plan = copies_or_shards(Path(place), kind, asked.ranks, micro_batch_size=4)
            pairs = run_ranks(plan, asked.rounds)[0]["seconds"]
            ratios = [ours / bare - 1 for bare, ours in pairs]
            overhead = statistics.median(ratios)
            report[kind] = {
                "bare_s": [bare for bare, _ in pairs],
                "bloomery_s": [ours for _, ours in pairs],
                "overhead": overhead,
                "met": overhead <= BAR,
            }
            print(
                f"{kind}: {statistics.median(b for b, _ in pairs):.3f} s a bare step, Bloomery {overhead:+.1%} "
                f"(median of {len(pairs)} rounds, {min(ratios):+.1%} to {max(ratios):+.1%}; "
                f"at most {BAR:.0%}: {'met' if overhead <= BAR else 'NOT MET'})",
                flush=True,
            )
        for kind in ("replicate", "shard"):
            plan = copies_or_shards(Path(place), kind, asked.ranks, micro_batch_size=1)
            answers = run_ranks(plan, 0)
            peaks[kind], start = (
                max(each["peak_gib"] for each in answers),
                max(each["start_gib"] for each in answers),
            )
    share = peaks["shard"] / peaks["replicate"]
    model_share = (peaks["shard"] - start) / (peaks["replicate"] - start)
    report |= {
        "peak_gib": peaks,
        "start_gib": start,
        "memory_share": share,
        "memory_met": share <= MEMORY_BAR,
    }
    print(
        f"memory of a rank: copies {peaks['replicate']:.2f} GiB, shards {peaks['shard']:.2f} GiB: {share:.2f} "
        f"(at most {MEMORY_BAR}: {'met' if share <= MEMORY_BAR else 'NOT MET'}); "
        f"without the {start:.2f} GiB of torch itself {model_share:.2f}"
    )
    out = asked.out or RESULTS
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
