"""The `bloomery` command. A command's module is imported when the command runs."""

import importlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
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
    "recipes": ("bloomery.cli.plan:recipes_command", "List, show, copy and import recipes."),
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
    "stop": ("bloomery.cli.runs:stop_command", "Save a running run, then stop it."),
    "save": ("bloomery.cli.runs:save_command", "Save a checkpoint of a running run."),
    "watch": ("bloomery.cli.runs:watch_command", "Show a run on the terminal, live or finished."),
    "studio": ("bloomery.cli.studio:command", "Show runs in the browser, and act on them."),
    "eval": ("bloomery.cli.eval:command", "Evaluate: loss, perplexity, tasks; compare two models."),
    "generate": ("bloomery.cli.generate:command", "Generate text from prompts."),
    "chat": ("bloomery.cli.chat:command", "Chat with a model on the terminal."),
    "serve": (
        "bloomery.cli.generate:serve_command",
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
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])
        plugins = [
            (plugin.name, f"Of the package {plugin.package}.")
            for plugin in installed_plugins()
            if plugin.kind == "commands" and plugin.name not in COMMANDS
        ]
        if plugins:
            with formatter.section("Commands of plug-ins"):
                formatter.write_dl(plugins)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message="bloomery %(version)s")
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
def cli(debug: bool) -> None:
    """Pretrain, fine-tune, evaluate and export language models on AMD, NVIDIA and CPU.

    RECIPE is a YAML file or a packaged recipe; `section.key=value` overrides a key. RUN is a path, a name under
    runs/, or `last`. MODEL is a RUN, a Hugging Face folder, a Hub id, or BASE+ADAPTER.

    Example: bloomery demo
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
            _print_error(_usage_error(error, arguments))
        return error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _print_error(error: UserError) -> None:
    from bloomery.core.text import harmless, redact_secrets

    # Parts of the message may come from an untrusted template, file or name.
    click.echo(harmless(redact_secrets(str(error))), err=True)


# (command, beginning of click's message) -> fix.
_USAGE_FIXES = {
    (
        "bloomery eval",
        "got unexpected extra argument",
    ): "to compare two models: bloomery eval MODEL --against OTHER",
    ("bloomery runs", "no such command 'list'"): "bloomery runs",
}

_PASS_AT_K = (
    "`bloomery export MODEL --to hf --out DIR`, then lm-evaluation-harness on DIR with the tasks "
    "humaneval or mbpp counts pass@k"
)
_OTHER_MERGES = (
    "leave it out for the weighted mean; mergekit merges by SLERP, TIES and task arithmetic"
)
# Options that a command had once: what does the same today.
_REMOVED_OPTIONS = {
    (
        "bloomery bench",
        "--torch",
    ): "python benchmarks/torch_versions.py RECIPE PYTHON PYTHON compares two environments",
    ("bloomery merge", "--method"): _OTHER_MERGES,
    ("bloomery merge", "--base"): _OTHER_MERGES,
    ("bloomery merge", "--density"): _OTHER_MERGES,
    ("bloomery eval", "--run-code"): _PASS_AT_K,
    ("bloomery eval", "--samples"): _PASS_AT_K,
}


def _usage_error(error: click.ClickException, arguments: Sequence[str]) -> UserError:
    """The error of click in Bloomery's form, with the command that was meant where that can be told."""
    # click lists choices on lines of their own, and begins with a capital.
    message = " ".join(error.format_message().split()).rstrip(".")
    problem = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)  # None where an option lacks its value
    command = context.command_path if context is not None else _command_path(arguments)
    fix = f"{command} --help"
    for (path, beginning), usage_fix in _USAGE_FIXES.items():
        if path == command and problem.startswith(beginning):
            fix = usage_fix

    # A number in the words of the docs, and of a list of words the one that was meant.
    for jargon, words in (("integer range", "whole number"), ("float range", "number")):
        problem = problem.replace(f"a valid {jargon}", f"a {words}")
    problem = problem.replace("a valid integer", "a whole number").replace(
        "a valid float", "a number"
    )
    parameter = getattr(error, "param", None)
    choice = parameter.type if isinstance(parameter, click.Parameter) else None
    if isinstance(choice, click.Choice) and (
        typed := re.search(r"'([^']*)' is not one of", problem)
    ):
        fix = did_you_mean(typed[1], map(str, choice.choices), fix)

    # A command of a command, such as `bloomery recipes lst`: worded as one of `bloomery` is.
    is_misspelled = problem.startswith("no such command") and isinstance(error, click.UsageError)
    if is_misspelled and context is not None and isinstance(context.command, click.Group):
        quoted_name = problem.removeprefix("no such command ").partition(". Did you mean")[0]
        problem = f"no such command: {quoted_name}"
        names = context.command.list_commands(context)
        fix = did_you_mean(quoted_name[1:-1], names, fix, shown=f"`{command} {{}}`")

    if isinstance(error, click.NoSuchOption) and (command, error.option_name) in _REMOVED_OPTIONS:
        problem = f"{error.option_name} was removed"
        replacement = _REMOVED_OPTIONS[command, error.option_name]
        return UserError(problem, where=f"`{command}`", fix=replacement, code=error.exit_code)

    # Options that are names of settings, such as --learning-rate 1e-4: the overrides to write, of all of them at once.
    parameters = [] if context is None else context.command.params
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        fix = _similar_option(error.option_name, error.possibilities, parameters) or fix
    takes_overrides = any(parameter.name == "overrides" for parameter in parameters)
    if isinstance(error, click.NoSuchOption) and takes_overrides:
        known = {name for parameter in parameters for name in parameter.opts}
        known |= {name for parameter in parameters for name in parameter.secondary_opts}
        unknown = _unknown_options(arguments, known)
        answers = _answers_of_settings(unknown, may_guess=not error.possibilities)
        if answers:
            listed = ", ".join(f"'{name}'" for name in unknown)
            problem = f"no such option{'s' if len(unknown) > 1 else ''} {listed}"
            unanswered = [name for name in unknown if name not in answers]
            lines = list(answers.values())
            if unanswered:
                lines.append(f"{', '.join(unanswered)}: {command} --help")
            fix = "\n       ".join(lines)
    return UserError(problem, where=f"`{command}`", fix=fix, code=error.exit_code)


def _similar_option(
    name: str, possibilities: Sequence[str], parameters: Sequence[click.Parameter]
) -> str | None:
    """The option that was meant, with the words that it takes; None where none is similar."""
    from bloomery.core.text import closest

    similar = closest(name, possibilities, cutoff=0.5)
    if not similar:
        return None
    parameter = next((each for each in parameters if similar[0] in each.opts), None)
    if parameter is not None and isinstance(parameter.type, click.Choice):
        return f"write {similar[0]}, which takes {', '.join(map(str, parameter.type.choices))}"
    return f"write {similar[0]}"


def _unknown_options(arguments: Sequence[str], known: set[str]) -> dict[str, str | list[str]]:
    """Options that a command does not have, each with the words behind it; "true" for none."""
    options: dict[str, str | list[str]] = {}
    words: list[str] | None = None
    before_launcher = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for word in before_launcher:
        name, equals, value = word.partition("=")
        is_option = re.match(r"--[A-Za-z]", name) is not None
        if is_option and name not in known:
            words = [value] if equals else []
            options[name] = words
        elif is_option or re.match(r"[a-z_.]+\.[a-z_.]+=", word):
            words = None
        elif words is not None:
            words.append(word)
    return {
        name: values[0] if len(values) == 1 else list(values) or "true"
        for name, values in options.items()
    }


def _answers_of_settings(
    options: Mapping[str, str | list[str]], *, may_guess: bool
) -> dict[str, str]:
    """The answer of the table for each option that it knows, in the order of the command line.

    `may_guess`: also for names that are misspelled there, which may be misspelled options of the command.
    """
    from bloomery.recipe.aliases import look_up
    from bloomery.recipe.yaml import read_yaml

    def typed(text: str | list[str]) -> object:
        if isinstance(text, list):
            return [typed(item) for item in text]
        document = read_yaml(text, source="", folder=Path())
        is_as_written = document.mistakes or isinstance(document.data, float)
        return text if is_as_written else document.data

    settings = {name.lstrip("-").replace("-", "_"): typed(text) for name, text in options.items()}
    answers = {}
    for name, key in zip(options, settings, strict=True):
        answer = look_up(tuple(key.split(".")), settings[key], settings)
        if answer is not None and (may_guess or not answer.guess):
            answers[name] = str(answer)
    return answers


def _command_path(arguments: Sequence[str]) -> str:
    """The commands of a command line: "bloomery tokenizer inspect"."""
    command: click.Command | None = cli
    path = "bloomery"
    for name in arguments:
        if name.startswith("-"):
            continue
        if not isinstance(command, click.Group):
            break
        command = command.get_command(click.Context(command), name)
        path += f" {name}" if command is not None else ""
    return path


def _explain_crash(kind: type[BaseException], error: BaseException, trace: object) -> None:
    del trace
    from bloomery.cli.common import explain

    explain(kind, error)
