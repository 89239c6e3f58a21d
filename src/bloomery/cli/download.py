"""`bloomery download ID`: a model or dataset of the Hugging Face Hub"""

from pathlib import Path

import click

from bloomery.cli.common import NewPath


@click.command()
@click.argument("name", metavar="ID")
@click.option("--dataset", is_flag=True, help="Download a dataset instead of a model.")
@click.option("--to", metavar="DIR", type=NewPath(file_okay=False), help="Download to DIR [default: the Hub's cache].")
def command(name: str, dataset: bool, to: Path | None) -> None:
    """Download a model or dataset from the Hugging Face Hub.

    ID is ORG/NAME or ORG/NAME@REVISION. Prints the folder. Weights are safetensors only. Run again to resume a
    download. A private or gated repository needs a token in HF_TOKEN.

    Example: bloomery download Qwen/Qwen2.5-0.5B
    """
    from bloomery.hub import download

    if to is None and name and Path(name).is_dir():  # a local folder is never taken for an id, as in recipes
        click.echo(f"{name} is a local folder: recipes can use this path; nothing was downloaded", err=True)
        click.echo(name)
        return
    try:
        folder = download(name, part="dataset" if dataset else "model", to=to)
    except KeyboardInterrupt:
        click.echo("interrupted: run the same command again to resume the download", err=True)
        raise
    click.echo(folder)
