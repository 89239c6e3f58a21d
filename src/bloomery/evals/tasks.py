"""`bloomery eval` on a task, and of two models on the same task or texts: scores, intervals, tests, events."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.data.shards import read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, refuse_unknown_ids
from bloomery.evals.evaluate import load_found, notes_of, read_texts
from bloomery.evals.harness import HarnessSettings, refuse_without_harness, run_harness
from bloomery.evals.items import (
    TaskScores,
    TaskSettings,
    ask,
    compiled,
    read_task,
)
from bloomery.evals.statistics import (
    CorpusScores,
    Difference,
    Estimate,
    Scores,
    compare_corpora,
    compare_scores,
)
from bloomery.infer.held_model import held_model
from bloomery.infer.load import OnText, Use
from bloomery.infer.sampling import NotFinite
from bloomery.model.compiled_step import compile_step
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import EventLog, TaskDone
from bloomery.plan.store import read_plan
from bloomery.train.evaluation.scoring import score_documents

Score = Callable[[Decoder, Tokenizer], TaskScores]


@dataclass(frozen=True)
class Named:
    """A model as the user names it, its folder, and the checkpoint of a run."""

    name: str
    folder: Path
    step: str = "best"


@dataclass(frozen=True)
class Result:
    """One metric over `items`. `against` and `difference`: of a comparison."""

    metric: str
    items: int
    model: Estimate
    against: Estimate | None = None
    difference: Difference | None = None


@dataclass(frozen=True)
class TaskReport:
    """`kind`: multiple-choice, exact-match, lm-eval or text. `items`: scored, by both models. The first
    result is the headline. `outputs`: one object per item.
    """

    task: str
    kind: str
    model: str
    against: str | None
    items: int
    results: tuple[Result, ...]
    outputs: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]


def evaluate_task(
    model: Named,
    task: Path,
    settings: TaskSettings,
    *,
    against: Named | None = None,
    use: Use | None = None,
    on_load: OnText = lambda _: None,
) -> TaskReport:
    """Score a task file with `model`, and with `against` on the same items.

    A run records it. Raises UserError.
    """
    task_read = read_task(task)
    if settings.extract is not None:
        compiled(settings.extract)  # before hours of completions
    score = partial(ask, task=task_read, settings=settings)
    return _report(model, against, score, task_read.name, task_read.kind, use, on_load)


def evaluate_harness(
    model: Named,
    settings: HarnessSettings,
    *,
    against: Named | None = None,
    use: Use | None = None,
    on_load: OnText = lambda _: None,
) -> TaskReport:
    """Score tasks of lm-evaluation-harness with `model`, and with `against`. A run records it. Raises UserError."""
    refuse_without_harness()
    score = partial(run_harness, settings=settings)
    return _report(model, against, score, ",".join(settings.tasks), "lm-eval", use, on_load)


def compare_on_texts(
    model: Named,
    against: Named,
    data: Path | None,
    *,
    bos: bool = True,
    template: str | None = None,
    use: Use | None = None,
    on_load: OnText = lambda _: None,
) -> TaskReport:
    """Bits per byte of two models on the same documents (None: the validation set of the run `model`).

    Tokenizers may differ, except for a validation set, which is tokenized. A run records it. Raises UserError.
    """
    if data is None:
        if not (model.folder / "plan.json").is_file():
            problem = "no validation set: this model is not a run"
            raise UserError(problem, where=model.name, fix="add --data PATH or --task FILE", code=2)
        data = read_plan(model.folder / "plan.json").data.prepared
    if (data / "manifest.json").is_file():
        hashed = read_manifest(data).tokenizer_hash
        for named_model in (model, against):
            with held_model(named_model.folder, named_model.step) as files:
                tokenizer = load_tokenizer(files.tokenizer)
            if tokenizer.hash != hashed:
                problem = (
                    f"the validation set is tokenized, and {named_model.name} has another tokenizer"
                )
                raise UserError(
                    problem, where=str(data), fix="add --data PATH: texts, or conversations", code=2
                )
    score = partial(_score_texts, data=data, bos=bos, template=template)
    return _report(model, against, score, data.name or str(data), "text", use, on_load)


def _score_texts(
    decoder: Decoder, tokenizer: Tokenizer, *, data: Path, bos: bool, template: str | None
) -> TaskScores:
    """Bits and bytes of each document."""
    items = losses_of_texts(decoder, tokenizer, data, bos=bos, template=template)
    bits = items.nats / np.log(2)
    outputs = tuple(
        {"item": number, "bits": item_bits, "bytes": size}
        for number, (item_bits, size) in enumerate(zip(bits, items.bytes, strict=True))
    )
    scores = Scores("bits_per_byte", bits, items.bytes)
    return TaskScores((scores,), outputs, items.notes)


@dataclass(frozen=True)
class TextLosses:
    """Of each document its nats, scored tokens and their bytes, float64 [documents] each; notes that explain them."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    notes: tuple[str, ...]


def losses_of_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    data: Path,
    *,
    bos: bool = True,
    template: str | None = None,
) -> TextLosses:
    """The loss of each document of `data`, texts or a prepared validation set. Raises UserError, and NotFinite."""
    texts = list(read_texts(data, tokenizer, bos=bos, template=template))
    refuse_unknown_ids(
        (token for text in texts for token in text.tokens), decoder.config.vocab_size
    )
    scores = score_documents(decoder, [text.tokens for text in texts])
    masks = [slice(None) if text.loss_mask is None else text.loss_mask[1:] for text in texts]
    nats = np.array(
        [float(n[mask].sum(dtype=np.float64)) for n, mask in zip(scores, masks, strict=True)]
    )
    if not np.isfinite(nats).all():
        raise NotFinite
    tokens = np.array([float(text.scored) for text in texts])
    size = np.array([float(text.bytes) for text in texts])
    notes = notes_of(texts, tokenizer, bos=bos, context=decoder.config.max_positions)
    return TextLosses(nats, tokens, size, tuple(notes))


def _report(
    model: Named,
    against: Named | None,
    score: Score,
    task: str,
    kind: str,
    use: Use | None,
    on_load: OnText,
) -> TaskReport:
    """Loads one model at a time."""

    def scored(scored_model: Named) -> tuple[TaskScores, Path]:
        """The scores, and the folder of the weights, which are read before the first item."""
        with held_model(scored_model.folder, scored_model.step) as files:
            decoder, tokenizer = load_found(
                files, where=scored_model.name, use=use, on_load=on_load
            )
        if kind not in ("text", "multiple-choice"):  # the others write completions
            compile_step(decoder, on_load)
        return score(decoder, tokenizer), files.weights

    second_scores = None
    first_scores, weights = scored(model)
    if against is not None:
        gc.collect()  # the first decoder has cycles
        second_scores, _ = scored(against)
    results, left_out = _results(first_scores, second_scores)
    notes = list(
        dict.fromkeys(
            [*first_scores.notes, *(() if second_scores is None else second_scores.notes)]
        )
    )
    if left_out:
        notes.append(f"left out: {counted(left_out, 'documents')} without scored bytes")
    outputs = first_scores.outputs
    if second_scores is not None:
        pairs = zip(first_scores.outputs, second_scores.outputs, strict=True)
        outputs = tuple(
            {**first_output, "against": {k: v for k, v in second_output.items() if k != "item"}}
            for first_output, second_output in pairs
        )
    items = max(result.items for result in results)
    other_name = None if against is None else against.name
    report = TaskReport(task, kind, model.name, other_name, items, results, outputs, tuple(notes))
    return _recorded(report, model, weights)


def _results(
    first_scores: TaskScores, second_scores: TaskScores | None
) -> tuple[tuple[Result, ...], int]:
    """The results, and how many items were left out because they weigh nothing."""
    results = []
    left_out = 0
    pairs = zip(first_scores.scores, (second_scores or first_scores).scores, strict=True)
    for model_scores, against_scores in pairs:
        if isinstance(model_scores, CorpusScores):
            results.append(
                _corpus_result(model_scores, None if second_scores is None else against_scores)
            )
            continue
        assert isinstance(against_scores, Scores), "both models have the same metrics"
        if len(model_scores.values) != len(against_scores.values):
            counts = f"{len(model_scores.values):,} and {len(against_scores.values):,}"
            raise UserError(
                f"the models read different documents: {counts}",
                where="--data",
                fix="use --template, or data without a chat template",
            )

        # Both models are judged by the same items: those that have a weight for both.
        weighs = (model_scores.weights > 0) & (against_scores.weights > 0)
        items = int(weighs.sum())
        left_out += int((~weighs).sum())
        if not items:
            raise UserError(
                "no item to score", where="--data", fix="use a text of at least two tokens"
            )
        model = Scores(
            model_scores.metric, model_scores.values[weighs], model_scores.weights[weighs]
        )
        if second_scores is None:
            results.append(Result(model.metric, items, model.estimate()))
            continue
        against = Scores(
            against_scores.metric, against_scores.values[weighs], against_scores.weights[weighs]
        )
        difference = compare_scores(model, against)
        results.append(
            Result(model.metric, items, model.estimate(), against.estimate(), difference)
        )
    return tuple(results), left_out


def _corpus_result(model: CorpusScores, against: Scores | CorpusScores | None) -> Result:
    """Of a metric of all items together."""
    if against is None:
        return Result(model.metric, len(model.items), model.estimate())
    assert isinstance(against, CorpusScores), "both models have the same metrics"
    return Result(
        model.metric,
        len(model.items),
        model.estimate(),
        against.estimate(),
        compare_corpora(model, against),
    )


def _recorded(report: TaskReport, model: Named, weights: Path) -> TaskReport:
    """The report; a run gets an event per metric."""
    path = model.folder / "events.jsonl"
    if weights.parent != model.folder / "checkpoints" or not path.is_file():
        return report
    try:
        with EventLog(path) as log:
            for result in report.results:
                log(_event(report, result, step=int(weights.name.rpartition("-")[2])))
    except (OSError, UserError) as error:
        problem = error.strerror if isinstance(error, OSError) else error.problem
        notes = (*report.notes, f"not recorded in the run: {problem}")
        return TaskReport(**{**vars(report), "notes": notes})
    return report


def _event(report: TaskReport, result: Result, *, step: int) -> TaskDone:
    against = result.against
    difference = result.difference
    comparison: dict[str, Any] = {}
    if against is not None and difference is not None:
        comparison = {
            "against": report.against,
            "against_value": against.value,
            "against_low": against.low,
            "against_high": against.high,
            "difference": difference.value,
            "difference_low": difference.low,
            "difference_high": difference.high,
            "p_value": difference.p_value,
            "test": difference.test,
        }
    estimate = result.model
    return TaskDone(
        step=step,
        task=report.task,
        kind=report.kind,
        metric=result.metric,
        items=result.items,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        interval=estimate.interval,
        **comparison,
    )
