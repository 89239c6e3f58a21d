"""The `bloomery` command. A command's module is imported when the command runs."""

import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO, cast, final

import click

from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.core.streams import ClosableStream
from bloomery.core.text import did_you_mean

# Exit codes: a run that stopped and can be resumed; Ctrl+C with nothing to resume.
STOPPED = 75
INTERRUPTED = 130

# Command -> (where its click command is, its line in --help).
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "bloomery.cli.demo_command:command",
        "Train a small model, kill and resume it, evaluate it.",
    ),
    "doctor": ("bloomery.cli.doctor:command", "Check this machine and suggest fixes."),
    "recipes": ("bloomery.cli.recipes:recipes_command", "List, show, copy and import recipes."),
    "tokenizer": (
        "bloomery.cli.prepare:tokenizer_command",
        "Train a tokenizer, or print the tokens of a text.",
    ),
    "prepare": ("bloomery.cli.prepare:command", "Tokenize a dataset; show the loss mask."),
    "plan": ("bloomery.cli.plan:command", "Estimate GPU memory, time and disk before a run."),
    "bench": ("bloomery.cli.bench:command", "Measure speed and GPU memory, next to the plan."),
    "train": ("bloomery.cli.train:command", "Pretrain or fine-tune with a recipe."),
    "sweep": ("bloomery.cli.sweep:command", "Train with several settings, and rank the runs."),
    "resume": ("bloomery.cli.train:resume_command", "Resume a run from its last checkpoint."),
    "stop": ("bloomery.cli.stop_and_save:stop_command", "Save a running run, then stop it."),
    "save": ("bloomery.cli.stop_and_save:save_command", "Save a checkpoint of a running run."),
    "watch": ("bloomery.cli.watch:command", "Show a run on the terminal, live or finished."),
    "studio": ("bloomery.cli.studio:command", "Show runs in the browser, and act on them."),
    "eval": ("bloomery.cli.eval:command", "Evaluate: loss, perplexity, tasks; compare two models."),
    "generate": ("bloomery.cli.generate:command", "Generate text from prompts."),
    "chat": ("bloomery.cli.chat:command", "Chat with a model on the terminal."),
    "serve": (
        "bloomery.cli.serve:command",
        "Serve models over HTTP, as OpenAI does, with a page.",
    ),
    "export": ("bloomery.cli.models:command", "Export a model or LoRA adapter; merge; write GGUF."),
    "import": ("bloomery.cli.models:import_command", "Convert GGUF to Hugging Face format."),
    "convert": (
        "bloomery.cli.models:convert_command",
        "Convert a model, its context, template and tokens.",
    ),
    "merge": (
        "bloomery.cli.models:merge_command",
        "Merge models into one: the mean of their weights.",
    ),
    "download": (
        "bloomery.cli.models:download_command",
        "Download a model or dataset from the Hub.",
    ),
    "push": ("bloomery.cli.models:push_command", "Upload an exported model to the Hub."),
    "report": ("bloomery.cli.report:command", "Write the HTML report of a run."),
    "slurm": ("bloomery.cli.slurm:command", "Write and submit a job script for a Slurm cluster."),
    "runs": ("bloomery.cli.runs:command", "List the runs in this folder, or delete some."),
    "completion": (
        "bloomery.cli.common:completion_command",
        "Print shell completion for bash, zsh or fish.",
    ),
}

# The sections of --help. Every command is in one of them.
GROUPS: dict[str, tuple[str, ...]] = {
    "Train": ("plan", "train", "resume", "sweep", "recipes", "demo"),
    "Data": ("prepare", "tokenizer", "download"),
    "Watch": ("watch", "runs", "stop", "save", "report", "studio"),
    "Evaluate and use": ("eval", "generate", "chat", "serve"),
    "Models": ("export", "import", "convert", "merge", "push"),
    "Machine": ("doctor", "bench", "slurm", "completion"),
}


@final
class Commands(click.Group):
    """A click group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Bloomery's commands, then those of installed packages."""
        del ctx
        from bloomery.core.plugins import plugin_names

        return [*COMMANDS, *(name for name in plugin_names("commands") if name not in COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of that command, and of no other."""
        if cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name][0].partition(":")
            command = getattr(importlib.import_module(module), attribute)
            assert isinstance(command, click.Command)
        else:
            from bloomery.cli.plugins import plugin_command

            command = plugin_command(cmd_name)
            if command is None:
                return None
        if ctx.resilient_parsing:
            from bloomery.cli.completion import complete_paths

            complete_paths(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # Plug-ins are looked up for other names alone: reading what is installed takes as long as `--version`.
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        commands = self.list_commands(ctx)
        if name not in commands:
            hint = "`bloomery --help` lists the commands"
            fix = did_you_mean(name, commands, hint, shown="`bloomery {}`")
            raise UserError(f"no such command: {name!r}", where="the command line", fix=fix, code=2)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from bloomery.core.plugins import installed_plugins

        del ctx
        width = max(map(len, COMMANDS)) + 2
        for group, names in GROUPS.items():
            with formatter.section(group):
                # The same column of lines in each section.
                for name in names:
                    formatter.write(f"  {name:<{width}}{COMMANDS[name][1]}\n")
        plugins = [
            (plugin.name, f"Of the package {plugin.package}.")
            for plugin in installed_plugins()
            if plugin.kind == "commands" and plugin.name not in COMMANDS
        ]
        if plugins:
            with formatter.section("Commands of plug-ins"):
                formatter.write_dl(plugins)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}
)
@click.version_option(__version__, message="bloomery %(version)s")
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
def cli(debug: bool) -> None:
    """Pretrain, fine-tune, evaluate and export language models on AMD, NVIDIA and CPU.

    RECIPE is a YAML file or a packaged recipe; `section.key=value` overrides a key. RUN is a path, a name under
    runs/, or `last`. MODEL is a RUN, a Hugging Face folder, a Hub id, or BASE+ADAPTER.

    \b
    Example: bloomery demo
             bloomery plan --model Qwen/Qwen3-4B --data chats.jsonl --gpu 4090
    """
    del debug  # `main` reads it anywhere on the command line


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 success, 1 failed, 2 usage error, 75 stopped and resumable, 130 interrupted."""
    # libgomp reads this once, when torch is imported, here or in a child. By default a waiting thread spins so long
    # that a step takes 40 times as long when another program uses a core; without spinning, training is a third slower.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")

    # Discard output to a closed stream; print `?` for characters that the encoding lacks. Neither ends a run.
    if sys.stdout is None or sys.stderr is None:  # as after `>&-`
        null_stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
        sys.stdout = sys.stdout or null_stream
        sys.stderr = sys.stderr or null_stream
    streams = [
        stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)
    ]
    for stream in streams:
        if stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="replace")
    # Notes and errors that nobody can read (`2> /dev/full`, `2>&1 | true`) are no reason to end. What a command prints
    # on stdout is its result.
    sys.stderr = cast("TextIO", ClosableStream(sys.stderr))

    # An empty entry of PYTHONPATH, as `export PYTHONPATH=$PYTHONPATH:/mine` may make it, is the working folder, which
    # then comes before the library: no child imports from there.
    if entries := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, entries.split(os.pathsep)))

    # Libraries expect a home folder, which a user ID that is not in /etc/passwd lacks, as in Docker.
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"

    # --debug may stand behind the command too, but not among the arguments of a launcher (after --).
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    bloomery_arguments = command_line
    if "--" in command_line:
        bloomery_arguments = command_line[: command_line.index("--")]
    debug = "--debug" in bloomery_arguments
    if debug:
        command_line.remove("--debug")
    else:
        sys.excepthook = _explain_crash
    sys.exit(_run(command_line, debug))


def _run(arguments: list[str], debug: bool) -> int:
    """Run a command and return its exit code. Errors of the user are printed; with `debug` they are raised."""
    try:
        try:
            Path.cwd()
        except FileNotFoundError as error:
            fix = "cd to a folder that exists"
            raise UserError("the working folder was deleted", fix=fix) from error
        result = cli.main(args=arguments, prog_name="bloomery", standalone_mode=False)
    except UserError as error:
        if debug:
            raise
        _print_error(error)
        return error.code
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click >= 8.2; its text is the help page
            error.show()
        else:
            from bloomery.cli.wrong_options import usage_error

            _print_error(usage_error(error, arguments))
        return error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _print_error(error: UserError) -> None:
    from bloomery.core.text import harmless, redact_secrets

    # Parts of the message may come from an untrusted template, file or name.
    click.echo(harmless(redact_secrets(str(error))), err=True)


def _explain_crash(kind: type[BaseException], error: BaseException, trace: object) -> None:
    del trace
    from bloomery.cli.common import explain

    explain(kind, error)
