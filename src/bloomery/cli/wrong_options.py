"""Answers to a wrong command line: the option of another program, one of another command, a misspelled one.

Only what is spelled almost the same is proposed as a misspelling: `--lora-rank` is not `--dry-run`.
"""

import importlib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import click

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean, misspelled

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
_MANY_COMMANDS = 3  # more of them are not named


def usage_error(error: click.ClickException, arguments: Sequence[str]) -> UserError:
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

    if isinstance(error, click.NoSuchOption):
        parameters = [] if context is None else context.command.params
        return _wrong_options(error, arguments, command, parameters, fix)
    return UserError(problem, where=f"`{command}`", fix=fix, code=error.exit_code)


def _wrong_options(
    error: click.NoSuchOption,
    arguments: Sequence[str],
    command: str,
    parameters: Sequence[click.Parameter],
    fix: str,
) -> UserError:
    """All options of the command line that the command does not have, each with its answer."""
    if (command, error.option_name) in _REMOVED_OPTIONS:
        problem = f"{error.option_name} was removed"
        replacement = _REMOVED_OPTIONS[command, error.option_name]
        return UserError(problem, where=f"`{command}`", fix=replacement, code=error.exit_code)

    # click stops at the first, and of `-ngl` names `-n` alone.
    own_options = {
        name: parameter
        for parameter in parameters
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    unknown = _unknown_options(arguments, own_options) or {error.option_name: "true"}
    takes_settings = any(parameter.name == "overrides" for parameter in parameters)

    def similar_options(names: Sequence[str]) -> dict[str, str]:
        return {name: answer for name in names if (answer := _similar_option(name, own_options))}

    # What is certain comes before what is guessed: a source is asked about what those before it do not answer.
    sources: list[Callable[[Sequence[str]], dict[str, str]]] = [
        similar_options,
        _answers_of_commands,
    ]
    if takes_settings:
        certain, guessed = (
            partial(_answers_of_settings, siblings=unknown, may_guess=may_guess)
            for may_guess in (False, True)
        )
        sources = [certain, similar_options, guessed, _answers_of_commands]
    answers = _answers_of_programs(unknown, command.partition(" ")[2])
    for answers_of in sources:
        answers |= answers_of([name for name in unknown if name not in answers])

    # In the order of the command line; those without an answer share the last line.
    unanswered = [name for name in unknown if name not in answers]
    lines = [answers[name] for name in unknown if name in answers]
    if unanswered:
        lines.append(f"{', '.join(unanswered)}: {fix}" if lines else fix)
    listed = ", ".join(f"'{name}'" for name in unknown)
    problem = f"no such option{'s' if len(unknown) > 1 else ''} {listed}"
    fixes = "\n       ".join(lines)
    return UserError(problem, where=f"`{command}`", fix=fixes, code=error.exit_code)


def _unknown_options(
    arguments: Sequence[str], own_options: Mapping[str, click.Parameter]
) -> dict[str, str | list[str]]:
    """Options that a command does not have, each with the words behind it; "true" for none."""
    options: dict[str, str | list[str]] = {}
    words: list[str] | None = None
    before_launcher = arguments[: arguments.index("--")] if "--" in arguments else arguments
    is_value = False
    for word in before_launcher:
        name, equals, value = word.partition("=")
        is_option = re.match(r"-{1,3}[A-Za-z]", name) is not None
        parameter = own_options.get(name)
        if parameter is None and re.match(r"-[A-Za-z]", name):
            parameter = own_options.get(name[:2])  # -d0,1
        if is_value:
            is_value = False
        elif is_option and parameter is None:
            words = [value] if equals else []
            options[name] = words
        elif is_option or re.match(r"[a-z_.]+\.[a-z_.]+=", word):
            words = None
            takes_value = isinstance(parameter, click.Option) and not parameter.is_flag
            is_value = takes_value and not equals and word == name
        elif words is not None:
            words.append(word)
    return {
        name: values[0] if len(values) == 1 else list(values) or "true"
        for name, values in options.items()
    }


@cache
def _rows(command: str) -> Mapping[str, tuple[str, str]]:
    """Name of an option -> (program, what to type), for a command such as "serve"."""
    path = Path(__file__).with_name("other_options.toml")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    rows: dict[str, tuple[str, str]] = {}
    for commands, programs in tables.items():
        if command not in commands.split(", "):
            continue
        for program, table in programs.items():
            for names, text in table.items():
                for name in names.split(", "):
                    rows.setdefault(name, (program, text))
    return rows


def _answers_of_programs(options: Mapping[str, str | list[str]], command: str) -> dict[str, str]:
    """The answer of other_options.toml for each option that it has for this command."""
    answers = {}
    for option, value in options.items():
        name = option.lstrip("-")
        if len(name) > 1:
            name = name.replace("_", "-")
        if name not in _rows(command):
            continue
        program, text = _rows(command)[name]
        typed, _, reason = text.partition("#")
        value_text = value if isinstance(value, str) else " ".join(value)
        if value in ("true", []):  # nothing stood behind the option
            value_text = "VALUE"
        filled = typed.strip().replace("{name}", name).replace("{}", value_text)
        reason = reason.strip().replace("{}", value_text)
        origin = "" if program == "Bloomery" else f" ({program})"
        answer = f"use `{filled}`" if filled else reason
        answer += f" ({reason})" if filled and reason else ""
        answers[option] = f"`{option}`{origin}: {answer}"
    return answers


def _answers_of_settings(
    options: Sequence[str], siblings: Mapping[str, str | list[str]], *, may_guess: bool
) -> dict[str, str]:
    """The answer of recipe/aliases.toml for each option that it knows: the override to write.

    `siblings`: all unknown options; `may_guess`: also for names that are misspelled there.
    """
    from bloomery.recipe.aliases import look_up
    from bloomery.recipe.yaml import read_yaml

    def typed(text: str | list[str]) -> object:
        if isinstance(text, list):
            return [typed(item) for item in text]
        document = read_yaml(text, source="", folder=Path())
        is_as_written = document.mistakes or isinstance(document.data, float)
        return text if is_as_written else document.data

    def key_of(name: str) -> str:
        return name.lstrip("-").replace("-", "_")

    settings = {key_of(name): typed(text) for name, text in siblings.items()}
    answers = {}
    for name in options:
        key = key_of(name)
        answer = look_up(tuple(key.split(".")), settings[key], settings)
        if answer is not None and (may_guess or not answer.guess):
            answers[name] = str(answer)
    return answers


def _similar_option(name: str, own_options: Mapping[str, click.Parameter]) -> str | None:
    """The option of this command that was misspelled, with the words that it takes; None where none is so similar."""
    spelled = "--" + name.lstrip("-").replace("_", "-")
    if not name.startswith("--"):
        return None
    similar = misspelled(spelled[2:], [each[2:] for each in own_options if each[:2] == "--"])
    if similar is None:
        return None
    parameter = own_options[f"--{similar}"]
    if isinstance(parameter.type, click.Choice):
        return f"write --{similar}, which takes {', '.join(map(str, parameter.type.choices))}"
    return f"write --{similar}"


def _answers_of_commands(options: Sequence[str]) -> dict[str, str]:
    """The commands of Bloomery that have exactly this option."""
    from bloomery.cli import COMMANDS

    takers: dict[str, list[str]] = {name: [] for name in options}
    for command_name, (location, _) in COMMANDS.items():
        module, _, attribute = location.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        names = {name for parameter in command.params for name in parameter.opts}
        for option in names & takers.keys():
            takers[option].append(f"`bloomery {command_name}`")
    return {
        option: f"{option} is an option of {_listed(commands)}"
        for option, commands in takers.items()
        if 0 < len(commands) <= _MANY_COMMANDS
    }


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _command_path(arguments: Sequence[str]) -> str:
    """The commands of a command line: "bloomery tokenizer inspect"."""
    from bloomery.cli import cli

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
