"""`bloomery eval MODEL`: loss on a text, accuracy of a reward model on preference pairs, tasks, comparisons."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import (
    NewPath,
    data_path,
    devices_option,
    echo,
    flag_of,
    json_option,
    loading,
    print_json,
    progress_line,
    quantize_option,
    step_option,
    text_flags,
    trust_code_option,
)
from bloomery.core.errors import UserError
from bloomery.core.units import counted

if TYPE_CHECKING:
    from bloomery.evals.episodes import EpisodeScores
    from bloomery.evals.evaluate import TextScores
    from bloomery.evals.picture_scores import PictureScores
    from bloomery.evals.rewards import RewardScores
    from bloomery.evals.tasks import TaskReport
    from bloomery.train.evaluation.scoring import PairMetrics


@click.command()
@click.argument("model")
@click.option(
    "--data",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Evaluate on this dataset: file, folder or hub id.",
)
@step_option
@click.option("--no-bos", is_flag=True, help="Add no BOS token; the first token is not scored.")
@click.option("--template", help="Format conversations with this chat template.")
@click.option("--task", metavar="FILE", help="Score a task file.")
@click.option(
    "--lm-eval", metavar="TASKS", help="Run tasks of lm-evaluation-harness, such as arc_easy,piqa."
)
@click.option(
    "--include-path",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Add task files for --lm-eval.",
)
@click.option(
    "--environment", metavar="FILE:CLASS", help="Play episodes with tools on the prompts of --data."
)
@click.option(
    "--max-turns", type=click.IntRange(1), help="Answers of an episode at most. [default: 8]"
)
@click.option(
    "--generations", type=click.IntRange(1), help="Play N episodes per prompt. [default: 1]"
)
@click.option("--against", metavar="MODEL", help="Compare with this model on the same items.")
@click.option(
    "--shots",
    type=click.IntRange(0),
    help="Show the first N items with their answers. [default: 0]",
)
@click.option("--limit", type=click.IntRange(1), help="Score at most N items.")
@click.option("--chat", is_flag=True, default=None, help="Ask in the chat template.")
@click.option(
    "--extract", metavar="REGEX", help="Take the last match in a completion as the answer."
)
@click.option(
    "--max-new-tokens", type=click.IntRange(1), help="Sample at most N tokens. [default: 256]"
)
@click.option("--stop", multiple=True, help="End a completion at this text; may be repeated.")
@click.option("--temperature", type=click.FloatRange(0), help="Sampling temperature; 0 is greedy.")
@click.option("--seed", type=int, help="Seed of sampling. [default: 0]")
@click.option(
    "--outputs",
    metavar="FILE",
    type=NewPath(),
    help="Write the result of each item or episode as JSON lines.",
)
@trust_code_option
@devices_option
@quantize_option
@json_option
def command(
    model: str,
    data: Path | None,
    step: str,
    no_bos: bool,
    template: str | None,
    task: str | None,
    lm_eval: str | None,
    environment: str | None,
    against: str | None,
    outputs: Path | None,
    devices: str,
    quantize: str | None,
    as_json: bool,
    trust_code: bool,
    **settings: Any,
) -> None:
    """Compute loss, perplexity and bits per byte of MODEL.

    Without --data, a run is evaluated on its validation set. In conversations, only assistant tokens are scored. A
    reward model is evaluated on preference pairs: accuracy, margin and loss. A run that trains with rewards completes
    its held-out prompts, or those of --data, and prints their mean reward with its 95% confidence interval.
    Conversations with pictures are scored with them, and as a control with those of others.

    With --task, score the answers to a task file; with --lm-eval, tasks of lm-evaluation-harness. With --against, test
    the difference of two models. Results have 95% confidence intervals, and are recorded in a run.

    With --environment, play episodes: reward, pass@k, turns and tool errors.

    Example: bloomery eval last --data ~/my-texts

    Example: bloomery eval last --task capitals.jsonl --shots 5 --against Qwen/Qwen3.5-0.8B-Base
    """
    # Options of tasks have no default here, so that one without a task can be refused.
    task_settings = {name: value for name, value in settings.items() if value not in (None, ())}
    if environment is not None:
        _evaluate_environment(
            model,
            environment,
            data,
            {"--task": task, "--lm-eval": lm_eval, "--against": against},
            outputs,
            task_settings | ({} if template is None else {"template": template}),
            as_json,
            step=step,
            device=devices,
            quantize=quantize,
        )
        return
    _refuse_episode_settings(task_settings)
    if task is not None or against is not None or lm_eval is not None:
        _evaluate_task(
            model,
            task,
            lm_eval,
            data,
            against,
            outputs,
            task_settings,
            as_json,
            step=step,
            bos=not no_bos,
            template=template,
            device=devices,
            quantize=quantize,
        )
        return
    if task_settings or outputs is not None:
        raise _needs_task(next(iter(task_settings), "outputs"))

    # Loss on text, or a reward model on pairs.
    from bloomery.api import evaluate

    with text_flags(), progress_line("eval"):
        result = evaluate(
            model,
            None if data is None else data_path(data),
            step=step,
            bos=not no_bos,
            template=template,
            device=devices,
            quantize=quantize,
            trust_code=trust_code,
            on_load=loading,
            on_note=lambda text: echo(f"note: {text}", err=True),
        )
    if as_json:
        print_json(asdict(result))
        return
    _print_lines(_score_lines(result))


def _score_lines(
    result: "TextScores | PictureScores | PairMetrics | RewardScores",
) -> dict[str, str]:
    """What is printed of a result: of rewards, of texts with or without pictures, or of preference pairs."""
    from bloomery.evals.evaluate import TextScores
    from bloomery.evals.picture_scores import PictureScores
    from bloomery.evals.rewards import RewardScores

    if isinstance(result, RewardScores):
        interval = _interval(result.reward_low, result.reward_high, result.prompts)
        ended = f"{result.clipped_ratio:.0%} reach objective.max_completion_length"
        return {
            "reward": f"{result.reward:.4f} ({interval})",
            **{f"  {name}": f"{mean:.4f} on average" for name, mean in result.rewards.items()},
            "length": f"{result.mean_length:,.1f} tokens on average; {ended}",
        }
    if not isinstance(result, TextScores | PictureScores):
        means = f"chosen {result.chosen_reward:.4f}, rejected {result.rejected_reward:.4f}"
        return {
            "accuracy": f"{result.accuracy:.1%} of {counted(result.pairs, 'pairs')}",
            "margin": f"{result.margin:.4f} on average: {means}",
            "loss": f"{result.loss:.4f} per pair",
        }
    bits = result.bits_per_byte
    lines = {
        "loss": f"{result.loss:.4f} nats per token",
        "perplexity": f"{result.perplexity:.4g}",
        "bits/byte": "unknown: no scored token has text" if bits is None else f"{bits:.4f}",
        "tokens": f"{result.tokens:,}",
        "bytes": f"{result.bytes:,}",
    }
    if isinstance(result, PictureScores):
        answers = counted(result.conversations, "conversations")
        lines["right"] = f"{result.right:.1%} of {answers}: the likeliest tokens are the answer"
    if isinstance(result, PictureScores) and result.control_right is not None:
        lines["control"] = (
            f"{result.control_right:.1%} right, loss {result.control_loss:.4f},"
            " with the pictures of other conversations"
        )
    return lines


def _interval(low: float | None, high: float | None, prompts: int) -> str:
    """The 95% confidence interval of a mean reward, in words."""
    if low is None or high is None:
        return "no interval of a single prompt"
    return f"{low:.4f} to {high:.4f}, 95% over {prompts:,} prompts"


def _print_lines(lines: dict[str, str]) -> None:
    for name, value in lines.items():
        echo(f"{name:<10} {value}")


def _evaluate_environment(
    model: str,
    environment: str,
    data: Path | None,
    others: dict[str, object],
    outputs: Path | None,
    settings: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Print the scores of episodes. `others`: options that mean something else. Raises UserError."""
    allowed = ("max_turns", "generations", "limit", "max_new_tokens", "temperature", "seed")
    refused = [flag for flag, value in others.items() if value is not None]
    refused += [flag_of(name) for name in settings if name not in (*allowed, "template")]
    if refused:
        problem = f"{refused[0]} does not apply to --environment"
        raise UserError(problem, where=refused[0], fix=f"remove {refused[0]}", code=2)
    if data is None:
        fix = "add --data FILE with a prompt per row, and the columns that its reset takes"
        raise UserError("--environment needs --data", where="--environment", fix=fix, code=2)
    _check_outputs(outputs)

    from bloomery.api import evaluate_environment

    with text_flags(), progress_line("eval"):
        scores = evaluate_environment(
            model,
            environment,
            data_path(data),
            on_load=loading,
            on_note=lambda text: echo(f"note: {text}", err=True),
            **options,
            **settings,
        )
    _write_outputs(outputs, scores.outputs)
    if as_json:
        print_json(_without_outputs(scores))
        return
    interval = _interval(scores.reward_low, scores.reward_high, scores.prompts)
    lines = {"reward": f"{scores.reward:.4f} ({interval})", "pass@1": f"{scores.passed_1:.1%}"}
    if scores.generations > 1:
        lines[f"pass@{scores.generations}"] = f"{scores.passed_all:.1%}"
    lines |= {
        "turns": f"{scores.turns:.2f} per episode",
        "tools": f"{scores.calls:.2f} calls per episode, {scores.failed:.1%} failed",
        "length": f"{scores.mean_length:,.1f} tokens on average; {scores.clipped_ratio:.0%} without room",
    }
    _print_lines(lines)


def _refuse_episode_settings(settings: dict[str, Any]) -> None:
    """Raises UserError for a setting of episodes, where no environment is named."""
    for name in ("max_turns", "generations"):
        if name in settings:
            problem = f"{flag_of(name)} needs --environment"
            fix = "add --environment FILE:CLASS"
            raise UserError(problem, where=flag_of(name), fix=fix, code=2)


def _needs_task(name: str) -> UserError:
    """The error for a setting of tasks without a task."""
    flag = flag_of(name)
    fix = f"add --task FILE, or remove {flag}"
    return UserError(f"{flag} needs --task", where=flag, fix=fix, code=2)


def _evaluate_task(
    model: str,
    task: str | None,
    lm_eval: str | None,
    data: Path | None,
    against: str | None,
    outputs: Path | None,
    settings: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Print the results of a task or a comparison. Raises UserError."""
    _refuse_task_options(task, lm_eval, data, settings)
    _check_outputs(outputs)

    from bloomery.api import compare, evaluate_harness, evaluate_task

    with text_flags(), progress_line("eval"):
        if lm_eval is not None:
            del options["bos"], options["template"]
            tasks = [name.strip() for name in lm_eval.split(",") if name.strip()]
            report = evaluate_harness(
                model, tasks, against=against, **options, **settings, on_load=loading
            )
        elif task is not None:
            report = evaluate_task(
                model, task, against=against, **options, **settings, on_load=loading
            )
        else:
            assert against is not None
            dataset = None if data is None else data_path(data)
            report = compare(model, against, dataset, **options, on_load=loading)

    for note in report.notes:
        echo(f"note: {note}", err=True)
    _write_outputs(outputs, report.outputs)
    if as_json:
        print_json(_without_outputs(report))
        return
    for line in _table(report):
        echo(line)


def _refuse_task_options(
    task: str | None, lm_eval: str | None, data: Path | None, settings: dict[str, Any]
) -> None:
    """Raises UserError (code 2) for options of a task or a comparison that exclude each other, or do not apply."""
    # What is evaluated on has to be one thing.
    inputs = (("--task", task), ("--lm-eval", lm_eval), ("--data", data))
    input_flags = [flag for flag, value in inputs if value is not None]
    if len(input_flags) > 1:
        problem = f"{' and '.join(input_flags)} exclude each other"
        raise UserError(problem, where=input_flags[0], fix="use one of them", code=2)

    # The harness has settings of its own; a comparison on text has none.
    if lm_eval:
        allowed_settings = {"shots", "limit", "include_path"}
    elif task is not None:
        allowed_settings = settings.keys() - {"include_path"}
    else:
        allowed_settings = set()
    refused_settings = sorted(settings.keys() - allowed_settings)
    if refused_settings and lm_eval is not None:
        flag = flag_of(refused_settings[0])
        problem = f"{flag} does not apply to --lm-eval"
        raise UserError(problem, where=flag, fix=f"remove {flag}", code=2)
    if refused_settings:
        raise _needs_task(refused_settings[0])


def _check_outputs(path: Path | None) -> None:
    """Raises UserError: outputs are written last, and a mistyped folder must not cost the evaluation."""
    if path is not None and not path.absolute().parent.is_dir():
        folder = str(path.absolute().parent)
        raise UserError("folder not found", where=folder, fix="set another --outputs", code=2)


def _write_outputs(path: Path | None, outputs: Sequence[dict[str, Any]]) -> None:
    """Writes one line of JSON per output. Raises UserError."""
    if path is None:
        return
    from bloomery.core.files import write_durably

    lines = [json.dumps(output) + "\n" for output in outputs]
    try:
        write_durably(path, "".join(lines))
    except OSError as error:
        problem = f"cannot write the outputs: {error.strerror}"
        fix = "free disk space or fix the permissions"
        raise UserError(problem, where=str(path), fix=fix) from error


def _without_outputs(scores: "TaskReport | EpisodeScores") -> dict[str, Any]:
    document = asdict(scores)
    del document["outputs"]
    return document


def _table(report: "TaskReport") -> list[str]:
    """Each metric with its interval, and the difference of two models with its p-value."""
    from bloomery.monitor.words import number_format_of, with_interval

    names = [report.model]
    if report.against is not None:
        names += [report.against, "difference"]
    width = max(map(len, names)) + 2
    items = counted(report.items, "items")
    lines = [f"{report.task}: {report.kind}, {items}; 95% confidence intervals"]
    for result in report.results:
        # A metric of the harness may be computed on fewer items than the task has.
        fewer_items = result.items != report.items
        lines.append(result.metric + (f", {result.items:,} items" if fewer_items else ""))
        number_format = number_format_of(result.metric)
        model = result.model
        model_figure = with_interval(model.value, model.low, model.high, number_format)
        lines.append(f"  {report.model:<{width}}{model_figure}")

        # A comparison adds the other model, the signed difference and its test.
        if result.against is None or result.difference is None:
            continue
        against = result.against
        against_figure = with_interval(against.value, against.low, against.high, number_format)
        lines.append(f"  {report.against:<{width}}{against_figure}")
        difference = result.difference
        signed_figure = with_interval(
            difference.value, difference.low, difference.high, f"+{number_format}"
        )
        lines.append(f"  {'difference':<{width}}{signed_figure}")
        if difference.better is None or difference.worse is None:
            lines.append(f"  {'':<{width}}no test: a metric of all items together")
            continue
        test = "no test: one item"
        if difference.p_value is not None:
            test = f"p = {difference.p_value:.2g} ({difference.test})"
        counts = f"higher on {difference.better:,}, lower on {difference.worse:,}"
        lines.append(f"  {'':<{width}}{test}; {counts}")
    return lines
