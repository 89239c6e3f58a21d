"""The process that reads sensors for a run. It may hang; nobody waits for it.

Each request asks for one look; it answers with `{"trying": NAME}` before each source, and then with
`{"readings": [...]}`.
"""

import time
from dataclasses import asdict
from pathlib import Path

from bloomery.core.child import accept, requests, tell
from bloomery.hardware.telemetry.sysfs import Device, Processor, sample
from bloomery.hardware.telemetry.vendors import sources_for


def main() -> None:
    """Answers until whoever asks is gone."""
    job = accept()
    devices = [Device(**facts) for facts in job["devices"]]
    root = Path(job["root"])
    sources = sources_for(devices, root, without=job["without"])
    processor = None if Processor.name in job["without"] else Processor(root, job["processor"])
    for _ in requests(job):
        readings = sample(devices, sources, trying=lambda name: tell(job, {"trying": name}))
        if processor is not None:
            tell(job, {"trying": processor.name})
            readings.append(processor.read(time.monotonic()))
        tell(job, {"readings": [asdict(reading) for reading in readings]})


if __name__ == "__main__":
    main()
