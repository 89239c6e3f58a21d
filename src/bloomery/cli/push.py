"""`bloomery push FOLDER REPO`: an export to the Hugging Face Hub"""

from pathlib import Path

import click

from bloomery.cli.common import echo
from bloomery.core.units import format_bytes


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("repo", metavar="ORG/NAME")
@click.option("--public", is_flag=True, help="Create a public repository [default: private].")
@click.option("--dry-run", is_flag=True, help="List the files, then exit.")
def command(folder: Path, repo: str, public: bool, dry_run: bool) -> None:
    """Upload an exported model to the Hugging Face Hub.

    FOLDER is an export, not a run. The repository is created if it is missing; files of the same name are replaced,
    others stay. Needs a token with write access in HF_TOKEN. Run again to resume an upload.

    Example: bloomery push my-model my-name/my-model --dry-run
    """
    from bloomery.hub import push

    done = push(folder, repo, public=public, dry_run=dry_run)
    for name, size in done.files.items():
        echo(f"{'would upload' if dry_run else 'upload':<12} {name} ({format_bytes(size)})", err=not dry_run)
    for warning in done.warnings:
        echo(f"warning: {warning}", err=True)
    echo(f"{'repository' if dry_run else 'pushed':<12} {done.page}")
