"""`python -m bloomery` is the `bloomery` command, and this the door of its process"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line. Ctrl+C ends the process without a word while nothing is begun, and no longer counts once
    all is done and said; where somebody ignores it (nohup) it stays ignored.
    """
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bloomery.cli import main as run

    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        if listens:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
