"""A child that replies what FIGURES says of its environment instead of measuring, and writes that it ran."""

import json
import os
import sys
from pathlib import Path

from bloomery.core.child import accept, reply

job = accept()
name = Path(sys.prefix).name
figures = json.loads(os.environ["FIGURES"])
own = figures.get(name, figures["installed"])
with Path(os.environ["RAN"]).open("a") as file:
    file.write(json.dumps([name, os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")]) + "\n")
learning = {
    "steps": 5,
    "loss_before": own.get("loss_before", 8.0),
    "loss_after": own.get("loss_after", 6.0),
    "grad_norm": own.get("grad_norm", 1.0),
}
reply(
    job,
    {
        "outcome": "ok",
        "step_seconds": [own["seconds"]],
        "peak_gib": 0.25,
        "reserved_gib": None,
        "core_wait": 0.0,
        "learning": learning if job["learns"] else None,
    },
)
