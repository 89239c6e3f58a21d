"""A child that dies or is silent instead of measuring, as FAULT says."""

import os
import signal
import time

from bloomery.core.child import accept, reply

job = accept()
reply(job, {"phase": "building the model"})
fault = os.environ["FAULT"]
if fault == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
if fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "raises":
    raise RuntimeError("HIP error: invalid device function")
time.sleep(600)
