"""The training child of a pipeline whose links fail as `link.txt` next to the run states.

silent: the first rank's tensors never arrive. wrong: the last rank gets other numbers than were sent. gpus: the trial
of the GPUs' link fails, once.
"""

import os
import sys
from pathlib import Path

from bloomery.core.child import loading
from bloomery.launch import worker


def break_links(fault: str, runs: Path) -> None:
    from bloomery.parallel import links, preflight
    from bloomery.parallel.environment import LinkFailed

    if fault == "silent":
        links.LINK_SECONDS = 1.0
        if os.environ["RANK"] == "0":
            links.HostTransport.send = lambda self, tensor, *way: None
        return
    if fault == "wrong":
        receive = links.HostTransport.receive
        if os.environ["RANK"] == "1":
            links.HostTransport.receive = lambda self, *way: receive(self, *way).neg_()
        return
    marker = runs / f"tried-{os.environ['RANK']}"
    if not marker.exists():
        marker.touch()

        def try_pipeline_links(mesh, plan, hosts):
            raise LinkFailed("rank 1 received wrong numbers from rank 0", fix="a fix")

        preflight.try_pipeline_links = try_pipeline_links


if __name__ == "__main__":
    if sys.argv[1] == "train":
        with loading():
            import bloomery.parallel.preflight  # noqa: F401

        runs = Path(sys.argv[2]).parent
        break_links((runs / "link.txt").read_text(), runs)
    ended = worker.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
