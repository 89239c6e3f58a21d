"""`bloomery runs note RUN`: tags and a note of a run. No torch."""

from dataclasses import asdict

import click

from bloomery.cli.common import echo, json_option, print_json, run_argument
from bloomery.core.run_folder import find_run, resume_argument
from bloomery.core.run_notes import change_notes


@click.command("note")
@run_argument
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="Add a tag; may be repeated.")
@click.option("--untag", metavar="TAG", multiple=True, help="Remove a tag; may be repeated.")
@click.option("--text", metavar="TEXT", help='Replace the note; "" removes it.')
@json_option
def note_command(
    run: str, tags: tuple[str, ...], untag: tuple[str, ...], text: str | None, as_json: bool
) -> None:
    """Tag a run, or write a note about it.

    Without an option, prints what the run has. Both are in notes.json of the run folder, and on its page in studio.
    `bloomery runs --tag TAG` lists the runs with a tag.

    Example: bloomery runs note demo --tag baseline --text "half of the learning rate next"
    """
    folder = find_run(run)
    notes = change_notes(folder, add=tags, remove=untag, note=text)
    name = resume_argument(folder.absolute())
    if as_json:
        document = asdict(notes)
        del document["problem"]
        print_json({"run": name, **document})
        return
    echo(f"{name}  {' '.join(notes.tags) or 'no tags'}")
    if notes.note:
        echo(notes.note)
