"""Tasks of lm-evaluation-harness (extra `lm-eval`) on our decoder: its three kinds of requests, in batches."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.data.tokenizer.tokenizer import Tokenizer, refuse_unknown_ids
from bloomery.evals.items import TaskScores, complete_prompts
from bloomery.evals.statistics import CorpusScores, Scores
from bloomery.infer.generate import TextRequest
from bloomery.infer.sampling import Sampling
from bloomery.model.decoder import Decoder
from bloomery.train.evaluation.scoring import score_continuations

NEW_TOKENS = 256  # of a request that sets no limit, as in the harness's own `hf` model
_GREEDY = {"do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks"}


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """`tasks`: names, groups or YAML files of the harness. `include_path`: a folder of more task files."""

    tasks: tuple[str, ...]
    include_path: Path | None = None
    shots: int | None = None
    limit: int | None = None


def refuse_without_harness() -> None:
    """Raises UserError when lm-evaluation-harness is not installed."""
    if find_spec("lm_eval") is None:
        fix = install_extra("lm-eval")
        raise UserError("lm-evaluation-harness is not installed", where="--lm-eval", fix=fix)


def adapter(decoder: Decoder, tokenizer: Tokenizer) -> Any:
    """The model as `lm_eval.api.model.LM`. Results equal those of the harness's `hf` model on the same weights."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

    context_length = decoder.config.max_positions
    start = tokenizer.bos_id
    end = tokenizer.eos_id if tokenizer.eos_id is not None else decoder.config.eos_token_id
    start_text = "" if start is None else tokenizer.decode([start])
    marks = [
        tokenizer.decode([token])
        for token in (start, tokenizer.eos_id, tokenizer.pad_id)
        if token is not None
    ]
    marks += tokenizer.control_tokens()

    class Adapter(TemplateLM):  # type: ignore[misc]  # the harness has no types
        eot_token_id = end
        prefix_token_id = start if start is not None else end
        max_length = context_length
        max_gen_toks = NEW_TOKENS
        tokenizer_name = "bloomery"

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            has_start = start is not None and string.startswith(start_text)
            prefix = (
                tokenizer.prefix
                if add_special_tokens or (add_special_tokens is None and not has_start)
                else []
            )
            return [*prefix, *tokenizer.encode(string, special=True)]

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], **_: Any
        ) -> list[tuple[float, bool]]:
            refuse_unknown_ids(
                (token for _, *pair in requests for ids in pair for token in ids),
                decoder.config.vocab_size,
            )
            scores = score_continuations(
                decoder, [(context, continuation) for _, context, continuation in requests]
            )
            results = [(score.logprob, score.greedy) for score in scores]
            for (text, *_), result in zip(requests, results, strict=True):
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, result)
            return results

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            del disable_tqdm
            pieces = [
                [
                    (None, *utils.make_disjoint_window(window))
                    for window in utils.get_rolling_token_windows(
                        self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
                    )
                ]
                for request in requests
            ]
            scores = iter(
                self._loglikelihood_tokens([piece for windows in pieces for piece in windows])
            )
            return [sum(next(scores)[0] for _ in windows) for windows in pieces]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            completions = []
            ends = []
            for number, request in enumerate(requests):
                context, kwargs = request.args
                settings = normalize_gen_kwargs(kwargs, self.max_gen_toks)
                if unknown := settings.keys() - _GREEDY:
                    problem = (
                        f"generation settings that are not supported: {', '.join(sorted(unknown))}"
                    )
                    raise UserError(
                        problem,
                        where="--lm-eval",
                        fix="remove them from generation_kwargs of the task",
                    )
                new_tokens = settings["max_gen_toks"]
                if new_tokens >= context_length:
                    problem = f"the task samples up to {new_tokens:,} tokens, and the context is {context_length:,}"
                    raise UserError(
                        problem, where="--lm-eval", fix="use a model with a longer context"
                    )
                sampling = Sampling(
                    max_new_tokens=new_tokens,
                    temperature=settings["temperature"] if settings["do_sample"] else 0.0,
                    top_p=settings.get("top_p", 1.0),
                    top_k=settings.get("top_k") or None,
                    seed=number,
                )
                ends.append(tuple(settings["until"]))
                completions.append(
                    TextRequest(
                        self.tok_encode(context)[-(context_length - new_tokens) :],
                        sampling,
                        ends[-1],
                    )
                )
            texts = complete_prompts(decoder, tokenizer, completions)
            for mark in marks:  # which the harness leaves out, too
                texts = [text.replace(mark, "") for text in texts]
            texts = [
                postprocess_generated_text(text, list(stop), None)
                for text, stop in zip(texts, ends, strict=True)
            ]
            for request, text in zip(requests, texts, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, text)
            return texts

    return Adapter()


def run_harness(decoder: Decoder, tokenizer: Tokenizer, *, settings: HarnessSettings) -> TaskScores:
    """The metrics of all tasks, each named TASK.METRIC. Raises UserError."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model = adapter(decoder, tokenizer)
    folder = settings.include_path
    files = [] if folder is None else [folder / f"{task}.yaml" for task in settings.tasks]
    are_own = bool(files) and all(
        file.is_file() and "group:" not in file.read_text("utf-8") for file in files
    )
    # Its own thousands of task files take half a minute to index.
    manager = TaskManager(
        include_path=None if folder is None else str(folder), include_defaults=not are_own
    )
    try:
        evaluation = simple_evaluate(
            model=model,
            tasks=list(settings.tasks),
            num_fewshot=settings.shots,
            limit=settings.limit,
            task_manager=manager,
            bootstrap_iters=0,
        )
    except (KeyError, ValueError, OSError) as error:
        problem = f"lm-evaluation-harness failed: {str(error)[:300]}"
        fix = "`lm_eval ls tasks` lists the tasks; files of your own need --include-path"
        raise UserError(problem, where="--lm-eval", fix=fix) from error
    scores = list[Scores | CorpusScores]()
    outputs = []
    notes = []
    for task, samples in evaluation["samples"].items():
        scores += _scores_of(
            task,
            samples,
            evaluation["results"].get(task, {}),
            evaluation["configs"].get(task, {}).get("metric_list") or [],
        )
        outputs += [
            {"item": f"{task}.{sample['doc_id']}"}
            | {metric: _as_json(sample[metric]) for metric in sample["metrics"]}
            for sample in samples
        ]
    if not scores:
        raise UserError("these tasks have no metric", where="--lm-eval", fix="name other tasks")
    unknown = [
        score.metric
        for score in scores
        if isinstance(score, CorpusScores) and score.aggregate is None
    ]
    if unknown:
        notes.append(f"no interval, how documents are aggregated is unknown: {', '.join(unknown)}")
    return TaskScores(tuple(scores), tuple(outputs), tuple(notes))


def _scores_of(
    task: str,
    samples: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    metric_list: Sequence[Mapping[str, Any]],
) -> Iterator[Scores | CorpusScores]:
    """Every metric of the harness's own results. `metric_list`: of the task's configuration.

    A metric that is a mean of figures of documents, as the harness's result confirms, has a score per document; any
    other is one of all documents together.
    """
    keys = [
        key
        for key, value in results.items()
        if "," in key
        and not key.partition(",")[0].endswith("_stderr")
        and isinstance(value, int | float)
    ]
    metrics = [key.partition(",")[0] for key in keys]
    for key, metric in zip(keys, metrics, strict=True):
        filter_name = key.partition(",")[2]
        items = [
            sample[metric]
            for sample in samples
            if metric in sample and sample.get("filter", filter_name) == filter_name
        ]
        if not items:
            continue
        # Two filters of the same answers, such as a strict and a lenient one, are two metrics.
        name = f"{task}.{metric}" + (f".{filter_name}" if metrics.count(metric) > 1 else "")
        figure = float(results[key])
        score = _mean_score(name, items, figure)
        if score is not None:
            yield score
        else:
            yield CorpusScores(
                name, tuple(items), figure, _aggregation(metric, items, figure, metric_list)
            )


def _mean_score(name: str, items: Sequence[Any], figure: float) -> Scores | None:
    """The items as figures per document whose mean is the metric; None where it is not."""

    def are_numbers(values: Sequence[Any]) -> bool:
        return all(isinstance(value, bool | int | float | np.number) for value in values)

    if are_numbers(items):
        score = Scores(name, np.array(items, np.float64), np.ones(len(items)))
    elif all(
        isinstance(item, tuple | list) and len(item) == 2 and are_numbers(item) for item in items
    ):
        nats, weights = np.array(items, np.float64).T  # a log-likelihood and its weight
        score = Scores(name, -nats / math.log(2), weights)
    else:
        return None
    total = score.weights.sum()
    if not total:
        return None
    is_mean = math.isclose(score.values.sum() / total, figure, rel_tol=1e-6, abs_tol=1e-9)
    return score if is_mean else None


def _aggregation(
    metric: str, items: Sequence[Any], figure: float, metric_list: Sequence[Mapping[str, Any]]
) -> Callable[[Sequence[Any]], float] | None:
    """The function that made the harness's figure of the items: the task's own, else the metric's; None if unknown."""
    from lm_eval.api.registry import get_aggregation, get_metric_aggregation

    named = [entry.get("aggregation") for entry in metric_list if entry.get("metric") == metric]
    candidates = [
        aggregation if callable(aggregation) else get_aggregation(str(aggregation))
        for aggregation in named
        if aggregation is not None
    ]
    candidates.append(get_metric_aggregation(metric))
    for aggregate in candidates:
        if aggregate is not None and math.isclose(
            float(aggregate(list(items))), figure, rel_tol=1e-9, abs_tol=1e-12
        ):
            function: Callable[[Sequence[Any]], float] = aggregate
            return function
    return None


def _as_json(value: Any) -> Any:
    """A metric's item of a document: numbers of numpy, and tuples of them, have no JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_as_json(item) for item in value]
    return value
