"""Probes that go wrong in every way there is: a child for the tests of `hardware.probes`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bloomery.hardware.probe_worker import exit_at_once, main, result_of_error


def fine(name, job):
    return {"outcome": "ok", "facts": {"pid": str(os.getpid())}}


def segfault(name, job):
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(name, job):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(job["pids"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def wrong(name, job):
    return result_of_error(0.5, "float32")


def nan(name, job):
    return result_of_error(float("nan"), "bfloat16")


def raises(name, job):
    raise RuntimeError(
        f"HIP error: invalid device function in {Path.home()}\nCompile with TORCH_USE_HIP_DSA"
    )


def sees(name, job):
    return {"outcome": "ok", "facts": {"mask": os.environ.get("HIP_VISIBLE_DEVICES", "none")}}


def leaves(name, job):
    print("the driver printed this and left")
    os._exit(7)


if __name__ == "__main__":
    known = {
        each.__name__: each for each in (fine, segfault, hang, wrong, nan, raises, sees, leaves)
    }
    exit_at_once(main(known))
