"""`bloomery download ID`: a model or a data set of the Hugging Face Hub, into its cache or into a folder"""

from pathlib import Path

import click

from bloomery.cli.common import NewPath


@click.command()
@click.argument("name", metavar="ID")
@click.option("--dataset", is_flag=True, help="ID is a data set.")
@click.option("--to", type=NewPath(file_okay=False), help="A folder [default: the Hub's cache].")
def command(name: str, dataset: bool, to: Path | None) -> None:
    """Fetch ID (ORG/NAME or ORG/NAME@REVISION) from the Hugging Face Hub; run again, it goes on with what is missing.

    Prints the folder. Weights come as safetensors only. A private or gated one needs a token in HF_TOKEN.

    Example: bloomery download Qwen/Qwen2.5-0.5B
    """
    from bloomery.hub import download

    if to is None and name and Path(name).is_dir():  # a folder that exists is never taken for an id, here as in recipes
        click.echo(f"{name} is a folder here: recipes take it as it is, and nothing is fetched", err=True)
        click.echo(name)
        return
    try:
        folder = download(name, part="dataset" if dataset else "model", to=to)
    except KeyboardInterrupt:
        click.echo("stopped: the same command goes on with the files that are missing", err=True)
        raise
    click.echo(folder)
