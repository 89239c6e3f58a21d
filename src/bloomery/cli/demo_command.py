"""The command `bloomery demo`, with `bloomery demo chat`, `bloomery demo rl` and `bloomery demo vision`."""

from pathlib import Path

import click

from bloomery.cli.common import NewPath, print_json


@click.command()
@click.argument("part", required=False, type=click.Choice(["chat", "rl", "vision"]))
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; the rest goes to stderr."
)
@click.option("--run-dir", type=NewPath(), help="Folder of the run [default: runs/demo].")
def command(part: str | None, as_json: bool, run_dir: Path | None) -> int:
    """Train, kill, resume, evaluate and export a small model: 2 to 5 minutes on 2 cores.

    `bloomery demo chat` then fine-tunes that model with LoRA: a minute more.
    `bloomery demo rl` trains another one with rewards (GRPO): 2 minutes.
    `bloomery demo vision` trains one that sees pictures: 2 minutes.

    Example: bloomery demo --run-dir runs/first
    """
    from bloomery.cli import demo, demo_chat, demo_rl, demo_vision

    demos = {
        None: demo.demonstrate,
        "chat": demo_chat.demonstrate,
        "rl": demo_rl.demonstrate,
        "vision": demo_vision.demonstrate,
    }
    document = demos[part](run_dir=run_dir, as_json=as_json)
    if as_json:
        print_json(document)
    return 0
