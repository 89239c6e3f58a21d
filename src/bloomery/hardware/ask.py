"""Another program's answer within a time limit, even when a driver holds that program so that no signal ends it."""

import subprocess
import threading
from collections.abc import Sequence


def ask(command: Sequence[str], *, seconds: float) -> str | None:
    """Standard output of `command`; "" when it cannot be started or fails, None when it took longer than `seconds`."""
    answer: list[str] = []
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, errors="replace",
        )  # fmt: skip
    except OSError:
        return ""
    # A child in uninterruptible sleep outlives SIGKILL: whoever waits for it hangs too, so a daemon thread does.
    reader = threading.Thread(target=lambda: answer.append(child.communicate()[0]), daemon=True)
    reader.start()
    reader.join(seconds)
    if reader.is_alive():
        child.kill()
        return None
    return answer[0] if answer and child.returncode == 0 else ""
