"""`bloomery completion`: names and keys completed by the shell"""

from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from bloomery.cli.common import echo

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script that completes commands, recipes, runs and recipe keys.

    \b
    Example: bloomery completion bash >> ~/.bashrc
             bloomery completion fish > ~/.config/fish/completions/bloomery.fish
    """
    from bloomery.cli import cli

    made = get_completion_class(shell)
    assert made is not None, "click completes all of SHELLS"
    echo(made(cli, {}, "bloomery", "_BLOOMERY_COMPLETE").source())


def candidates(kind: str, start: str) -> list[CompletionItem]:
    """Of recipes: packaged ones and YAML files; of runs: `last` and the folders below runs/; of keys: `train.epochs=`.

    A path where no recipe or run fits.
    """
    match kind:
        case "recipes":
            from bloomery.recipe.load import packaged

            files = [str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern)]
            names = [*packaged(), *files]
        case "runs":
            names = ["last", *sorted(path.name for path in Path("runs").glob("*") if path.is_dir())]
        case _:
            from bloomery.recipe.aliases import all_keys

            names = [".".join(path) + "=" for path in all_keys()]
    found = [CompletionItem(name) for name in names if name.startswith(start)]
    return found or ([] if kind == "keys" else [CompletionItem(start, type="file")])
