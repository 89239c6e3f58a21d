"""Prints how many processes `make test` runs: one more than this process may use cores, at most eight.

The one more works while others wait for a child. Each takes up to two GiB, and some tests are timed: where a machine
has many cores, more processes would disturb these more than they save.
"""

import os
from pathlib import Path

from bloomery.hardware.detect import usable_cores

MOST = 8
GIB_OF_ONE = 2


def main() -> None:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    jobs = min(usable_cores(Path("/")) + 1, MOST, int(memory_gib / GIB_OF_ONE))
    print(max(1, jobs))


if __name__ == "__main__":
    main()
