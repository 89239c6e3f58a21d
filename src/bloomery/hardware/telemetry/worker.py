"""The process that reads sensors for a run. It may hang; nobody waits for it.

It is told the devices as one line of JSON on its standard input. Each further line asks for one look; it answers with
`{"trying": NAME}` before each source, and then with `{"readings": [...]}`. It ends with whoever asks.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.hardware.telemetry.sysfs import Device, Processor, sample
from bloomery.hardware.telemetry.vendors import sources_for


def main() -> None:
    """Answers until its standard input is closed."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    devices = [Device(**facts) for facts in job["devices"]]
    root = Path(job["root"])
    sources = sources_for(devices, root, without=job["without"])
    processor = None if Processor.name in job["without"] else Processor(root, job["processor"])
    for _ in sys.stdin:
        readings = sample(devices, sources, trying=lambda name: tell({"trying": name}))
        if processor is not None:
            tell({"trying": processor.name})
            readings.append(processor.read(time.monotonic()))
        tell({"readings": [asdict(reading) for reading in readings]})


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
