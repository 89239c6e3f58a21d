"""The training child without torch: steps are told as fast as they can be written, and nothing is computed or saved.

It dies as `deaths.json` next to the run states (see `dying_worker`), with the exit codes and reports of the real one.
"""

import json
import os
import sys
from pathlib import Path

from bloomery.core.run_folder import RunFolder
from bloomery.launch import worker
from bloomery.monitor.events import EventLog, Resumed, RunStarted, StepDone
from bloomery.plan.store import read_plan

REPORTED = {"memory": worker.OUT_OF_MEMORY, "NaN": worker.DIVERGED}


def facts_of(plan):
    train = plan.train
    return {
        "compile": train.compile,
        "attention": plan.model.attention,
        "precision": train.precision,
        "rows": train.micro_batch_size,
        "checkpointing": train.activation_checkpointing,
        "state_dtype": plan.optimizer.state_dtype,
        "rate": plan.optimizer.learning_rate,
    }


def train(folder, report, *, resumed):
    plan, facts = read_plan(folder.plan), facts_of(read_plan(folder.plan))
    deaths = json.loads((folder.path.parent / "deaths.json").read_text())
    with EventLog(folder.events) as emit:
        emit(
            Resumed(path="")
            if resumed
            else RunStarted(
                schema=2,
                version="",
                parameters=1,
                steps=plan.train.steps,
                attention=plan.model.attention,
                device="cpu",
            )
        )
        for step in range(1, plan.train.steps + 1):
            for condition, number, how in deaths:
                if step < number or any(facts[name] != value for name, value in condition.items()):
                    continue
                if isinstance(how, int):
                    os.kill(os.getpid(), how)
                if how not in REPORTED:
                    raise RuntimeError(how)
                told = {"problem": f"{how} in step {step}", "where": "train", "fix": "x", "code": 1}
                os.write(report, json.dumps(told).encode())
                return REPORTED[how]
            emit(
                StepDone(
                    step=step,
                    loss=1.0,
                    learning_rate=facts["rate"],
                    grad_norm=1.0,
                    tokens=256 * step,
                    tokens_per_second=1.0,
                    sequences_per_second=1.0,
                    step_seconds=1.0,
                    data_wait_seconds=0.0,
                    memory_gib=0.0,
                )
            )
    return worker.DONE


if __name__ == "__main__":
    stage, folder = sys.argv[1], RunFolder(Path(sys.argv[2]))
    report = int(sys.argv[sys.argv.index("--report") + 1])
    if stage == "train":
        sys.exit(train(folder, report, resumed="--resumed" in sys.argv))
    sys.exit(worker.main(sys.argv[1:]))
