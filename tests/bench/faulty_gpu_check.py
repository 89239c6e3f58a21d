"""A child of the check of a GPU whose part goes as FAULT says, after a first row that was right."""

import os
import signal
import time

from bloomery.core.child import accept, reply

job = accept()
if job["part"] == "card":
    card = {"name": "a GPU", "device": "cuda", "torch": "2.13.0", "runtime": "13.0"}
    reply(job, {"card": card})
    raise SystemExit(0)
reply(job, {"row": {"case": "first", "numbers": {"losses": [1.0, 2.0]}}})
reply(job, {"begins": "second"})
faults = dict(fault.split("=") for fault in os.environ["FAULTS"].split(","))
fault = faults.get(job["part"])
if fault == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
if fault == "hangs":
    time.sleep(600)
if fault == "raises":
    raise RuntimeError("HIP error: invalid device function")
outcome = "wrong" if fault == "wrong" else "ok"
message = f"read {os.environ['FOLDER']}/models/weights.bin of {os.environ['NAME']}"
reply(job, {"row": {"case": "second", "outcome": outcome, "message": message}})
reply(job, {"ended": True})
