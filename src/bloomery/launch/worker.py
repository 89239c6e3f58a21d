"""The child process of a run: `python -m bloomery.launch.worker prepare|train RUN_DIR --parent PID --report FD [...]`.

Torch is imported after the signal handlers are installed, so that a stop request works from the start.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.core.child import die_with_parent, loading
from bloomery.core.errors import UserError, of_the_system
from bloomery.core.run_folder import RunFolder
from bloomery.launch.exit_codes import (
    DIVERGED,
    DONE,
    FAILED,
    KERNEL_FAILED,
    LINK_FAILED,
    OUT_OF_MEMORY,
    UNSOUND,
)
from bloomery.launch.stop_flag import StopFlag
from bloomery.monitor.events import Emit, EventLog, Phase, Warned
from bloomery.parallel.environment import (
    LinkFailed,
)
from bloomery.train.failures import Diverged, KernelUnusable, OutOfMemory, Unsound

if TYPE_CHECKING:
    from bloomery.recipe.schema import Recipe

# Characters of each text of an error, of up to 6 bytes in JSON. The four of a report must fit into a pipe (64 KiB),
# which nobody reads until this process has ended.
MOST_REPORTED = 2500
MANY_STEPS = 2**31
ERROR_CODES = (
    (Unsound, UNSOUND),
    (OutOfMemory, OUT_OF_MEMORY),
    (Diverged, DIVERGED),
    (LinkFailed, LINK_FAILED),
    (KernelUnusable, KERNEL_FAILED),
)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 done, 75 stopped and saved; with a report to the parent 1, or 3 (wrong kernel), 4 (out of
    memory), 5 (not finite), 6 (GPUs cannot send to each other), 7 (attention kernel fails).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=("prepare", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--report", type=int, required=True)
    parser.add_argument("--notes", type=int)  # where the parent reads the last collectives
    parser.add_argument("--data", type=Path)
    parser.add_argument("--resumed", action="store_true")
    parser.add_argument("--no-check", dest="check_step", action="store_false")
    parser.add_argument("--stop-at", type=int)
    options = parser.parse_args(arguments)
    flag = StopFlag(stop_at=options.stop_at)
    if options.stage == "train":
        flag.install()
    die_with_parent(options.parent)
    folder = RunFolder(options.folder)
    try:
        with EventLog(folder.events) as emit:
            if options.stage == "prepare":
                return _prepare(folder, options.data, emit)
            return _train(
                folder,
                emit,
                flag,
                resumed=options.resumed,
                check_step=options.check_step,
                notes=options.notes,
            )
    except (UserError, OSError) as failed:
        error = failed if isinstance(failed, UserError) else of_the_system(failed)
        if error is None:
            raise
        os.write(options.report, report_of(error))
        return next((code for kind, code in ERROR_CODES if isinstance(error, kind)), FAILED)


def report_of(error: UserError) -> bytes:
    """The error as JSON for the parent."""
    texts = {
        "problem": error.problem,
        "where": error.where,
        "fix": error.fix,
        "host": error.host,
    }
    report = {name: text[:MOST_REPORTED] for name, text in texts.items()}
    entry = json.dumps({**report, "code": error.code}, ensure_ascii=False)
    return entry.encode(errors="replace")


def _prepare(folder: RunFolder, data: Path, emit: Emit) -> int:
    with loading():
        from bloomery.data.prepare.prepare import prepare
        from bloomery.data.prepare.workers import fewer_workers
        from bloomery.recipe.load import load_recipe

    loaded_recipe = load_recipe(folder.recipe)
    _check_peft_settings(loaded_recipe.recipe)
    if (warning := fewer_workers(loaded_recipe.recipe.data.num_proc)) is not None:
        emit(Warned(reason=warning))
    prepare(loaded_recipe, data, report=throttle(emit))
    return DONE


def _check_peft_settings(recipe: "Recipe") -> None:
    """Raises UserError where PEFT refuses the adapter's settings, before hours may go into the dataset.

    PEFT imports torch, so that plans do not ask it.
    """
    if recipe.adapter.kind != "peft":
        return
    from bloomery.model.adapters.peft_methods import method_config
    from bloomery.model.configs import build_config
    from bloomery.plan.gather import planned_vocabulary

    config = build_config(recipe.model, vocab_size=planned_vocabulary(recipe))
    # Epochs are no number of steps before the dataset is counted: AdaLoRA's schedule is then taken to be long.
    steps = recipe.train.max_steps or MANY_STEPS
    method_config(recipe.adapter, config, steps=steps)


def throttle(emit: Emit, seconds: float = 0.25) -> Callable[[str, float, float], None]:
    """Phases as events: the start and the end of each, and between them one per `seconds`."""
    last_times: dict[str, float] = {}

    def report(name: str, units_done: float, total: float) -> None:
        current_time = time.monotonic()
        if (
            name not in last_times
            or units_done >= total > 0
            or current_time - last_times[name] >= seconds
        ):
            last_times[name] = current_time
            emit(Phase(name=name, done=units_done, total=total))

    return report


def _train(
    folder: RunFolder,
    emit: Emit,
    flag: StopFlag,
    *,
    resumed: bool,
    check_step: bool,
    notes: int | None,
) -> int:
    began = time.perf_counter()  # train.max_time includes the import of torch
    if int(os.environ.get("RANK", "0")) == 0:
        emit(Phase(step=flag.step, name="libraries"))
    with loading():
        from bloomery.launch.train_stage import train_ranks

    return train_ranks(
        folder, emit, flag, resumed=resumed, check_step=check_step, notes=notes, began=began
    )


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is saved; a normal exit of torch and a driver takes seconds, and may crash.
    os._exit(exit_code)
