"""`bloomery eval MODEL`: loss on a text, accuracy of a reward model on preference pairs, tasks, comparisons."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import (
    NewPath,
    data_path,
    devices_option,
    echo,
    json_option,
    loading,
    print_json,
    quantize_option,
    step_option,
    text_flags,
)
from bloomery.core.errors import UserError
from bloomery.core.units import counted

if TYPE_CHECKING:
    from bloomery.runs.tasks.evaluate import TaskReport
    from bloomery.runs.tasks.statistics import Estimate


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
@click.option("--task", metavar="FILE", help="Score a task file, or stdlib-functions.")
@click.option(
    "--lm-eval", metavar="TASKS", help="Run tasks of lm-evaluation-harness, such as arc_easy,piqa."
)
@click.option(
    "--include-path",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Add task files for --lm-eval.",
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
    "--samples", type=click.IntRange(1, 1000), help="Sample N programs per function. [default: 1]"
)
@click.option(
    "--run-code", is_flag=True, default=None, help="Run programs of the model, in a sandbox."
)
@click.option(
    "--outputs", metavar="FILE", type=NewPath(), help="Write the result of each item as JSON lines."
)
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
    against: str | None,
    outputs: Path | None,
    devices: str,
    quantize: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Compute loss, perplexity and bits per byte of MODEL.

    Without --data, a run is evaluated on its validation set. In conversations, only assistant tokens are scored. A
    reward model is evaluated on preference pairs: accuracy, margin and loss.

    With --task, score the answers to a task file; with --lm-eval, tasks of lm-evaluation-harness. With --against, test
    the difference of two models. Results have 95% confidence intervals, and are recorded in a run.

    Example: bloomery eval last --data ~/my-texts

    Example: bloomery eval last --task capitals.jsonl --shots 5 --against Qwen/Qwen2.5-0.5B
    """
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    if task is not None or against is not None or lm_eval is not None:
        _evaluate_task(
            model,
            task,
            lm_eval,
            data,
            against,
            outputs,
            given,
            as_json,
            step=step,
            bos=not no_bos,
            template=template,
            device=devices,
            quantize=quantize,
        )
        return
    if given or outputs is not None:
        flag = f"--{next(iter(given), 'outputs').replace('_', '-')}"
        raise UserError(
            f"{flag} needs --task", where=flag, fix=f"add --task FILE, or remove {flag}", code=2
        )
    from bloomery.api import evaluate

    with text_flags():
        result = evaluate(
            model,
            None if data is None else data_path(data),
            step=step,
            bos=not no_bos,
            template=template,
            device=devices,
            quantize=quantize,
            on_load=loading,
            on_note=lambda text: echo(f"note: {text}", err=True),
        )
    if as_json:
        print_json(asdict(result))
        return
    from bloomery.runs.evaluate import TextScores

    if isinstance(result, TextScores):
        bits = result.bits_per_byte
        lines = {
            "loss": f"{result.loss:.4f} nats per token",
            "perplexity": f"{result.perplexity:.4g}",
            "bits/byte": "unknown: no scored token has text" if bits is None else f"{bits:.4f}",
            "tokens": f"{result.tokens:,}",
            "bytes": f"{result.bytes:,}",
        }
    else:
        means = f"chosen {result.chosen_reward:.4f}, rejected {result.rejected_reward:.4f}"
        lines = {
            "accuracy": f"{result.accuracy:.1%} of {counted(result.pairs, 'pairs')}",
            "margin": f"{result.margin:.4f} on average: {means}",
            "loss": f"{result.loss:.4f} per pair",
        }
    for name, value in lines.items():
        echo(f"{name:<11}{value}")


def _evaluate_task(
    model: str,
    task: str | None,
    lm_eval: str | None,
    data: Path | None,
    against: str | None,
    outputs: Path | None,
    given: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Print the results of a task or a comparison. Raises UserError."""
    named = [
        f
        for f, value in (("--task", task), ("--lm-eval", lm_eval), ("--data", data))
        if value is not None
    ]
    if len(named) > 1:
        raise UserError(
            f"{' and '.join(named)} exclude each other",
            where=named[0],
            fix="use one of them",
            code=2,
        )
    allowed = (
        {"shots", "limit", "include_path"}
        if lm_eval
        else set()
        if task is None
        else given.keys() - {"include_path"}
    )
    if wrong := sorted(given.keys() - allowed):
        flag = f"--{wrong[0].replace('_', '-')}"
        if lm_eval is not None:
            raise UserError(
                f"{flag} does not apply to --lm-eval", where=flag, fix=f"remove {flag}", code=2
            )
        raise UserError(
            f"{flag} needs --task", where=flag, fix=f"add --task FILE, or remove {flag}", code=2
        )
    if outputs is not None and not outputs.absolute().parent.is_dir():
        raise UserError(
            "folder not found",
            where=str(outputs.absolute().parent),
            fix="set another --outputs",
            code=2,
        )
    from bloomery.api import compare, evaluate_harness, evaluate_task

    with text_flags():
        if lm_eval is not None:
            del options["bos"], options["template"]
            names = [name.strip() for name in lm_eval.split(",") if name.strip()]
            report = evaluate_harness(
                model, names, against=against, **options, **given, on_load=loading
            )
        elif task is not None:
            report = evaluate_task(
                model, task, against=against, **options, **given, on_load=loading
            )
        else:
            assert against is not None
            place = None if data is None else data_path(data)
            report = compare(model, against, place, **options, on_load=loading)
    for note in report.notes:
        echo(f"note: {note}", err=True)
    if outputs is not None:
        from bloomery.core.files import write_durably

        try:
            write_durably(outputs, "".join(json.dumps(one) + "\n" for one in report.outputs))
        except OSError as error:
            problem = f"cannot write the outputs: {error.strerror}"
            fix = "free disk space or fix the permissions"
            raise UserError(problem, where=str(outputs), fix=fix) from error
    if as_json:
        shown = asdict(report)
        del shown["outputs"]
        print_json(shown)
        return
    for line in _table(report):
        echo(line)


def _table(report: "TaskReport") -> list[str]:
    """Each metric with its interval, and the difference of two models with its p-value."""

    def figure(estimate: "Estimate", form: str) -> str:
        if estimate.low is None or estimate.high is None:
            return f"{estimate.value:{form}}"
        return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"

    lines = [
        f"{report.task}: {report.kind}, {counted(report.items, 'items')}; 95% confidence intervals"
    ]
    names = (
        [report.model] if report.against is None else [report.model, report.against, "difference"]
    )
    width = max(map(len, names)) + 2
    for result in report.results:
        form = ".4f" if result.metric.endswith("bits_per_byte") else ".1%"
        lines.append(
            result.metric
            if result.items == report.items
            else f"{result.metric}, {result.items:,} items"
        )
        lines.append(f"  {report.model:<{width}}{figure(result.model, form)}")
        if result.against is None or result.difference is None:
            continue
        lines.append(f"  {report.against:<{width}}{figure(result.against, form)}")
        diff = result.difference
        form = f"+{form}"
        spread = (
            ""
            if diff.low is None or diff.high is None
            else f" ({diff.low:{form}} to {diff.high:{form}})"
        )
        lines.append(f"  {'difference':<{width}}{diff.value:{form}}{spread}")
        tested = (
            "no test: one item" if diff.p_value is None else f"p = {diff.p_value:.2g} ({diff.test})"
        )
        lines.append(f"  {'':<{width}}{tested}; higher on {diff.better:,}, lower on {diff.worse:,}")
    return lines
