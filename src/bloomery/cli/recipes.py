"""`bloomery recipes`: the packaged recipes."""

import click


@click.group(no_args_is_help=True)
def command() -> None:
    """List, show and copy the packaged recipes; print their JSON schema."""
