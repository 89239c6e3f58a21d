"""Entry point of the `bloomery` command and of `python -m bloomery`"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line. Ctrl+C exits without a message before the command starts, and has no effect after it has
    ended. Where the caller ignores it (nohup), it stays ignored.
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
