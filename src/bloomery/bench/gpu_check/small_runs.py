"""Runs of a tiny model in this process: the production loop on the device and on the CPU, on data that is made here.

The activations of a micro-batch are as large as it takes to offload them, and the model is small: a run takes a second.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import safe_open

from bloomery.core.child import python_module
from bloomery.core.device import (
    can,
    free_and_total_bytes,
    is_accelerator,
    memory_stats,
    properties_of,
    release_cached_memory,
    reset_peak_memory,
)
from bloomery.core.run_folder import RunFolder
from bloomery.data.prepare.prepare import prepare
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.monitor.events import Recovered, StepDone
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.train.kernels import build_kernels
from bloomery.train.loop import run
from bloomery.train.process import set_up_process

BASE = """
model: {family: qwen3, hidden_size: 64, intermediate_size: 128, num_layers: 2, num_heads: 4, num_kv_heads: 2,
        head_dim: 16, max_positions: 256, tie_embeddings: true}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
train: {max_steps: 3, precision: float32, compile: false, attention: mask, deterministic: true}
optimizer: {kind: adamw, learning_rate: 1e-3, warmup: 1 steps}
checkpoint: {every: 100 steps, keep: 1, async_save: false}
eval: {every: 100 steps, tokens: 512}
sample: {prompts: []}
logging: {trackers: []}
"""
# 32 sequences of 128 tokens, 64 wide, in float32: 1 MiB.
SIZES = "train.tokens_per_step=4096", "train.micro_batch_size=32"
# By recipe: what it adds to BASE, and its overrides. What a text, a pair and a prompt are is in `write_data`.
RECIPES = {
    "texts": ('data: {path: text, glob: "*.py", sequence_length: 128, validation: 5%}', SIZES),
    "pairs": (
        "data: {path: pairs.jsonl, sequence_length: 192, validation: 10%, chat: {template: chatml}}\n"
        "objective: {kind: dpo}",
        ("train.tokens_per_step=1536", "train.micro_batch_size=4"),
    ),
    "prompts": (
        "data: {path: prompts.jsonl, sequence_length: 64, validation: 10%}\n"
        "objective: {kind: grpo, num_generations: 4, max_completion_length: 8}\n"
        'rewards: [{verifier: regex, pattern: "[a-e].*[a-e]"}]',
        ("train.batch_size=16", "train.micro_batch_size=4"),
    ),
}
WRITING_SECONDS = 20.0  # of a checkpoint of 1 MiB


def machine_of(device: str) -> Machine:
    """This machine. Where only PyTorch sees its GPU, as in some containers, with that, by its name.

    Raises UserError for a name that is not in gpus.toml.
    """
    machine = detect()
    if not is_accelerator(device) or machine.accelerators:
        return machine
    properties = properties_of(device)
    gpu = find_gpu(properties.name)
    return with_gpu(machine, gpu.model_copy(update={"memory_bytes": properties.total_bytes}))


@final
@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """What a run told. The peaks are those of the allocator, 0 where it does not count."""

    folder: Path
    losses: dict[int, float]
    grad_norms: dict[int, float]
    recoveries: tuple[str, ...]
    peak_bytes: int  # of tensors
    reserved_bytes: int

    @property
    def completions(self) -> list[dict[str, Any]]:
        """Of all rollouts, in their order."""
        files = sorted((self.folder / "completions").glob("*"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    @property
    def tensors(self) -> dict[str, bytes]:
        """The bytes of all tensors of the last checkpoint, by file and name."""
        checkpoints = RunFolder(self.folder).checkpoints
        last_checkpoint = max(checkpoints.glob("step-*"))
        contents = {}
        for file in sorted(last_checkpoint.rglob("*.safetensors")):
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # it is no dict
                    contents[f"{file.stem}/{name}"] = tensors.get_tensor(name).tobytes()
        return contents


@final
class SmallRuns:
    """Prepared data and plans in a folder, and runs of them."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self._folder = folder
        self._num_runs = 0
        self._prepared: dict[str, Path] = {}
        write_data(folder)
        # Recipes name their data relative to the working folder.
        os.chdir(folder)

    def plan(self, recipe: str, *overrides: str, machine: Machine | None = None) -> RunPlan:
        """A recipe of `RECIPES` on the CPU, or as `machine` would run it."""
        text, own_overrides = RECIPES[recipe]
        file = self._folder / f"{recipe}.yaml"
        file.write_text(BASE + text + "\n")
        loaded = load_recipe(str(file), (*own_overrides, *overrides))
        if recipe not in self._prepared:
            self._prepared[recipe] = self._folder / "prepared" / recipe
            prepare(loaded, self._prepared[recipe])
        planned_machine = machine or detect().model_copy(update={"accelerators": ()})
        facts = gather(loaded, planned_machine, prepared=self._prepared[recipe])
        plan = resolve(loaded, facts)
        # Several threads wait for each other in work as small as this.
        return plan.model_copy(update={"train": plan.train.model_copy(update={"threads": 1})})

    def on_device(self, plan: RunPlan, *, attention: str | None = None) -> RunPlan:
        """The same plan for the device, with all of its memory."""
        if not is_accelerator(self.device):
            return plan
        memory = free_and_total_bytes(self.device)
        limit = float(memory[1]) if memory else plan.memory.limit
        return plan.model_copy(
            update={
                "train": plan.train.model_copy(update={"device": self.device}),
                "data": plan.data.model_copy(update={"pin_memory": can(self.device, "streams")}),
                "memory": plan.memory.model_copy(update={"limit": limit}),
                "model": plan.model.model_copy(
                    update={"attention": attention or plan.model.attention, "scores": "torch"}
                ),
            }
        )

    def run(
        self,
        plan: RunPlan,
        *,
        folder: Path | None = None,
        stop_after: int | None = None,
        resume_from: Path | None = None,
        on_event: Callable[[Any], None] = lambda _: None,
    ) -> RunNumbers:
        """The loop in this process. Raises what it raises."""
        self._num_runs += 1
        run_dir = folder or self._folder / f"run-{self._num_runs}"
        run_dir.mkdir(exist_ok=True)
        events: list[Any] = []

        def emit(event: Any) -> None:
            events.append(event)
            on_event(event)

        def stop() -> bool:
            steps = (event.step for event in events if isinstance(event, StepDone))
            return stop_after is not None and max(steps, default=0) >= stop_after

        set_up_process(plan.train, memory_limit=plan.memory.limit)
        build_kernels(plan.model)
        reset_peak_memory(plan.train.device)
        run(plan, run_dir=run_dir, emit=emit, stop=stop, resume_from=resume_from)
        stats: Mapping[str, int] = memory_stats(plan.train.device)
        # The next run is measured alone.
        gc.collect()
        release_cached_memory()
        steps_done = [event for event in events if isinstance(event, StepDone)]
        return RunNumbers(
            folder=run_dir,
            losses={
                event.step: event.loss if event.loss is not None else float("nan")
                for event in steps_done
            },
            grad_norms={
                event.step: event.grad_norm if event.grad_norm is not None else float("nan")
                for event in steps_done
            },
            recoveries=tuple(
                f"{event.reason}: {event.action}"
                for event in events
                if isinstance(event, Recovered)
            ),
            peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        )

    def killed(self, plan: RunPlan, folder: Path, *, at_step: int) -> int:
        """The run in a process of its own, which gets SIGKILL at that step, after a checkpoint. Its exit code."""
        folder.mkdir(exist_ok=True)
        plan_file = folder / "given-plan.json"
        plan_file.write_text(plan.model_dump_json())
        command = python_module(__name__, str(plan_file), str(folder), str(at_step))
        return subprocess.run(command, check=False).returncode


def run_until_killed(plan_file: Path, folder: Path, at_step: int) -> None:
    """The child of `SmallRuns.killed`."""
    plan = RunPlan.model_validate_json(plan_file.read_text())

    def emit(event: Any) -> None:
        if not isinstance(event, StepDone) or event.step != at_step:
            return
        # A fast card is here before a thread has written the checkpoint that the run resumes from.
        deadline = time.monotonic() + WRITING_SECONDS
        checkpoints = RunFolder(folder).checkpoints
        while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    set_up_process(plan.train, memory_limit=plan.memory.limit)
    build_kernels(plan.model)
    run(plan, run_dir=folder, emit=emit, stop=lambda: False)


def write_data(folder: Path) -> None:
    """Texts, pairs and prompts, the same on every machine."""
    (folder / "text").mkdir()
    for number in range(60):
        lines = [
            f"def function_{number}_{i}(value):\n    return value * {i} + {number}\n"
            for i in range(12)
        ]
        (folder / "text" / f"{number}.py").write_text("\n".join(lines))
    pairs = [
        {
            "prompt": f"Write a function that adds {number}.",
            "chosen": f"def add(value):\n    return value + {number}",
            "rejected": f"I cannot add {number}.",
        }
        for number in range(80)
    ]
    prompts = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(60)]
    for name, rows in (("pairs", pairs), ("prompts", prompts)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    run_until_killed(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
