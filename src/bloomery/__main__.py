"""`python -m bloomery` is the `bloomery` command."""

from bloomery.cli import main

main()
