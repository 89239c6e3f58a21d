"""The child that measures one setting: `python -m bloomery.bench.child`. The parent can stop it before torch loads."""

import contextlib
import os
import sys
from pathlib import Path

from bloomery.core.child import accept, loading, reply
from bloomery.core.errors import UserError


def main() -> int:
    """The child sends its phases, then the measurement or the reason of its failure."""
    job = accept()
    # When the system runs out of memory it takes this process, not the user's shell.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with loading():
        from bloomery.bench.rig import measure
        from bloomery.train.process import out_of_memory

    try:
        reply(job, measure(job, on_phase=lambda name: reply(job, {"phase": name})))
    except UserError as error:
        reply(job, {"outcome": "failed", "message": error.problem})
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        reply(job, {"outcome": "memory", "message": first_line[:300]})
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # taking a driver down costs seconds, and some crash in it
