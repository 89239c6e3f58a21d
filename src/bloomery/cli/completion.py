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


def recipes(_context: click.Context, _parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Packaged recipes and YAML files."""
    from bloomery.recipe.load import packaged

    files = [str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern)]
    return _starting([*packaged(), *files], start) or [CompletionItem(start, type="file")]


def runs(_context: click.Context, _parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """`last` and the folders below runs/."""
    folders = [path.name for path in Path("runs").glob("*") if path.is_dir()]
    return _starting(["last", *sorted(folders)], start) or [CompletionItem(start, type="file")]


def keys(_context: click.Context, _parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Recipe keys, as `train.epochs=`."""
    from bloomery.recipe.aliases import all_keys

    return _starting([".".join(path) + "=" for path in all_keys()], start)


def _starting(names: list[str], start: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(start)]
