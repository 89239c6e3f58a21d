"""The `bloomery` command: a thin skin over the package. No verb is imported before it is asked for."""

import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, final

import click

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.core.version import __version__

STOPPED, INTERRUPTED = 75, 130  # exit codes: stopped and resumable; Ctrl+C before there was anything to resume

# Verb -> (where its click command lives, its line in --help). A verb whose module is not there is not listed.
VERBS: dict[str, tuple[str, str]] = {
    "demo": (
        "bloomery.cli.demo.command:command",
        "Train a small model here, kill it, resume it, examine it.",
    ),
    "doctor": (
        "bloomery.cli.doctor.command:command",
        "Say why this machine does not train, and what mends it.",
    ),
    "recipes": ("bloomery.cli.recipes:command", "List, show and copy the packaged recipes; print their JSON schema."),
    "tokenizer": ("bloomery.cli.tokenizer:command", "Train a tokenizer, or look at what one does to a text."),
    "prepare": ("bloomery.cli.prepare:command", "Turn text into shards of tokens; --preview shows what is learned."),
    "plan": ("bloomery.cli.plan:command", "Say what a run would do, need and take, and whether it fits."),
    "bench": ("bloomery.cli.bench:command", "Measure what this machine reaches, beside what the plan said."),
    "train": ("bloomery.cli.train:command", "Train a recipe."),
    "resume": ("bloomery.cli.resume:command", "Go on where a run stopped, whatever stopped it."),
    "stop": ("bloomery.cli.stop:command", "Let a running run save, and stop it."),
    "save": ("bloomery.cli.save:command", "Let a running run write a checkpoint, and go on."),
    "watch": ("bloomery.cli.watch:command", "Show a run on the terminal, while it goes on or after it has ended."),
    "eval": ("bloomery.cli.eval:command", "Loss, perplexity and bits per byte of a model on a text."),
    "generate": ("bloomery.cli.generate:command", "Let a model continue prompts."),
    "chat": ("bloomery.cli.chat:command", "Talk to a model on the terminal."),
    "export": ("bloomery.cli.export:command", "Write a model in the layout of other programs."),
    "download": ("bloomery.cli.download:command", "Fetch a model or a data set from the Hugging Face Hub."),
    "report": ("bloomery.cli.report:command", "Write the report of a run: one page that works offline."),
    "runs": ("bloomery.cli.runs:command", "List the runs in this folder."),
}


@final
class Verbs(click.Group):
    """A click group that knows its verbs' help lines without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            fix = did_you_mean(args[0], known, "`bloomery --help` lists the verbs", shown="`bloomery {}`")
            raise UserError(f"there is no verb {args[0]!r}", where="the command line", fix=fix, code=2)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, VERBS[verb][1]) for verb in self.list_commands(ctx)])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="bloomery %(version)s")
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
def cli(debug: bool) -> None:
    """Text in, a language model out, on whatever GPUs you have.

    A recipe is a YAML file or the name of a packaged one; `section.key=value` after it overrides a key.
    """
    del debug  # read by `main` wherever it stands on the line


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong words, 75 stopped and resumable, 130 interrupted."""
    # libgomp reads this once, when torch is imported, here or in a child. By default a waiting thread spins for so long
    # that a step takes forty times as long when another program wants a core; one that never spins loses a third.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    given = list(sys.argv[1:] if arguments is None else arguments)
    _steady_streams()
    _some_home()
    own = given[: given.index("--")] if "--" in given else given
    debug = "--debug" in own
    if debug:
        given.remove("--debug")
    else:
        sys.excepthook = _explain_crash
    sys.exit(_run(given, debug))


def _steady_streams() -> None:
    """Output that is closed goes nowhere, what an encoding lacks becomes a question mark: neither ends a run."""
    if sys.stdout is None or sys.stderr is None:  # as after `>&-`
        nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="replace")


def _some_home() -> None:
    """As Docker does for a user's number that /etc/passwd does not have: `/`, so that whoever asks is answered."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"


def _run(arguments: list[str], debug: bool) -> int:
    try:
        try:
            Path.cwd()
        except FileNotFoundError as error:
            problem = "the working folder was deleted"
            raise UserError(problem, where="this shell", fix="cd to one that exists") from error
        result = cli.main(args=arguments, prog_name="bloomery", standalone_mode=False)
    except UserError as error:
        if debug:
            raise
        _tell(error)
        return error.code
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click >= 8.2; its text is the help page
            error.show()
        else:
            _tell(_wrong_words(error, arguments))
        return error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _tell(error: UserError) -> None:
    """A stranger's template, file or name may have said part of it."""
    from bloomery.core.text import harmless, redact_secrets

    click.echo(harmless(redact_secrets(str(error))), err=True)


def _wrong_words(error: click.ClickException, arguments: Sequence[str]) -> UserError:
    context = getattr(error, "ctx", None)  # none where a flag lacks its value
    command = context.command_path if context is not None else _verb(arguments)
    message = " ".join(error.format_message().split()).rstrip(".")  # click lists choices on lines of their own
    fix = _recipe_key(error, arguments) or f"`{command} --help` prints the options"
    return UserError(message[:1].lower() + message[1:], where=f"`{command}`", fix=fix, code=error.exit_code)


def _recipe_key(error: click.ClickException, arguments: Sequence[str]) -> str:
    """For an option that is the name of a setting, such as --learning-rate 1e-4: the override to write."""
    context = getattr(error, "ctx", None)
    takes_overrides = context is not None and any(one.name == "overrides" for one in context.command.params)
    if not isinstance(error, click.NoSuchOption) or error.possibilities or not takes_overrides:
        return ""
    from bloomery.recipe.aliases import look_up

    name = error.option_name.lstrip("-").replace("-", "_")
    _, *after = [*" ".join(arguments).partition(error.option_name)[2].replace("=", " ", 1).split(" "), "true"]
    return str(look_up(tuple(name.split(".")), after[0], {}) or "")


def _verb(arguments: Sequence[str]) -> str:
    """ "bloomery tokenizer inspect": the words of a line before its arguments."""
    command: click.Command | None = cli
    path = "bloomery"
    for word in (word for word in arguments if not word.startswith("-")):
        if not isinstance(command, click.Group):
            break
        command = command.get_command(click.Context(command), word)
        path += f" {word}" if command is not None else ""
    return path


def _explain_crash(kind: type[BaseException], error: BaseException, trace: object) -> None:
    del trace
    from bloomery.cli.crash import explain

    explain(kind, error)
