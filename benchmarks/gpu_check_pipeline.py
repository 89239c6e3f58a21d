"""The part `pipeline` of gpu_check.py: two ranks share one GPU, reach each other through the host, and train what one
rank trains."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bloomery.launch.supervisor import local_rank_variables
from bloomery.monitor.events import StepDone, read_events
from bloomery.plan.pipeline import even_groups
from bloomery.plan.resolve import child_environment
from bloomery.plan.store import read_plan, write_plan

HERE = Path(__file__).parent
STAGES = 2
RECIPE = """
model: {family: llama, hidden_size: 128, intermediate_size: 256, num_layers: 4, num_heads: 2, max_positions: 256,
        tie_embeddings: true}
tokenizer: {train: {kind: bpe, vocab_size: 512}}
data: {path: FOLDER, glob: "*.py", sequence_length: 128, validation: 10%}
train: {max_steps: 4, tokens_per_step: 1024, micro_batch_size: 1, precision: float32, compile: false}
eval: {every: 2 steps, tokens: 1024}
"""


def pipelined(*, tiny: bool) -> dict[str, Any]:
    """A run through the command line, then the same plan as a pipeline; losses must agree."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "one.yaml").write_text(RECIPE.replace("FOLDER", str(HERE)))
        command = ["-m", "bloomery", "train", "one.yaml", "--run-dir", "one"]
        device = "cpu" if tiny else "0"
        subprocess.run([sys.executable, *command, "-d", device], cwd=folder, check=True)
        expected = [
            event.loss
            for event in read_events(folder / "one" / "events.jsonl")
            if isinstance(event, StepDone)
        ]

        plan = read_plan(folder / "one" / "plan.json")
        stages = {
            "pipeline": STAGES,
            "pipeline_layers": even_groups(plan.model.config.num_layers, STAGES),
            "pipeline_link": "host",
        }
        plan = plan.model_copy(update={"train": plan.train.model_copy(update=stages)})
        (folder / "two").mkdir()
        write_plan(plan, folder / "two" / "plan.json")
        environment = child_environment(plan, os.environ)
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(folder / "two")],
                env=environment | local_rank_variables(rank, STAGES, str(folder / "meeting")),
            )
            for rank in range(STAGES)
        ]
        codes = [process.wait() for process in ranks]
        if any(codes):
            return {"outcome": "failed", "message": f"the ranks ended with {codes}"}
        found: dict[str, Any] = json.loads((folder / "two" / "found.json").read_text())

    differences = [
        abs(loss - one) / one for loss, one in zip(found["losses"], expected, strict=True)
    ]
    agrees = max(differences) <= 1e-5 and found["waited"] > 0
    message = f"losses differ by {max(differences):.1e} from one rank; {found['link']}"
    return {"outcome": "ok" if agrees else "failed", "message": message} | found


def rank(folder: Path) -> None:
    """One rank of the pipeline; the first writes what it found."""
    from bloomery.parallel.links import try_pipeline_links
    from bloomery.parallel.process_group import join
    from bloomery.train.loop import run

    plan = read_plan(folder / "plan.json")
    mesh = join(plan.train)
    assert mesh.reduces_on_host and not mesh.sends_from_device
    rank_names = [f"rank {rank}" for rank in range(STAGES)]
    trial = try_pipeline_links(mesh, plan.train, rank_names)
    events: list[Any] = []
    run(
        plan,
        run_dir=folder,
        emit=events.append,
        stop=lambda: False,
        resume_from=None,
        mesh=mesh,
    )
    steps = [event for event in events if isinstance(event, StepDone)]
    if mesh.first_rank:
        found = {
            "losses": [event.loss for event in steps],
            "waited": sum(event.communication_seconds["pipeline"] for event in steps),
            "link": str(trial),
        }
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
