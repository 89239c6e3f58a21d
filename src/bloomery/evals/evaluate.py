"""Evaluation: loss, perplexity and bits per byte of a model on text, accuracy of a reward model on preference pairs"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.data.chat.render import Renderer
from bloomery.data.examples import Example
from bloomery.data.packing import truncated_lengths
from bloomery.data.prepare.kinds import KINDS
from bloomery.data.shards import DOCUMENTS_PER_UNIT, ShardKind, open_split, read_manifest
from bloomery.data.sources.documents import (
    Dataset,
    ReadStats,
    open_dataset,
    read_documents,
    read_file,
    unpadded,
)
from bloomery.data.sources.files import DATA, TABLES, suffix_of
from bloomery.data.sources.formats import NAMES, RequiredFormat
from bloomery.data.sources.picture_columns import holds_pictures
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, refuse_unknown_ids
from bloomery.evals.picture_scores import PictureScores, score_pictures
from bloomery.evals.rewards import RewardScores, evaluate_rewards
from bloomery.facts.config import refuse_values
from bloomery.infer.held_model import held_model
from bloomery.infer.load import OnText, Use, load_used
from bloomery.infer.model_folder import ModelFiles
from bloomery.infer.picture_prompts import open_eyes
from bloomery.model.decoder import Decoder
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Source
from bloomery.train.batch_source import open_loader
from bloomery.train.evaluation.evaluation import validation_result as evaluate_validation
from bloomery.train.evaluation.scoring import PairMetrics, score_documents, score_pairs
from bloomery.train.objectives.build import pretraining
from bloomery.train.state import add_tuned_vision

ROWS_TO_LOOK_AT = 1000  # for pictures
KINDS_OF_ROWS: tuple[RequiredFormat, ...] = ("sft", "pairs", "kto")  # the first takes text, too


@dataclass(frozen=True)
class TextScores:
    """`loss` is nats per scored token; `bytes` are those of the scored tokens; None where no byte was scored."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int


@dataclass(frozen=True)
class TokenizedText:
    """One tokenized document. Scored are the tokens after the first, with a `loss_mask` (bool [len(tokens)]) only
    those in it; `bytes` are those of the scored tokens. `kind`: of the examples.
    """

    tokens: list[int]
    bytes: int
    loss_mask: np.ndarray | None = None
    kind: ShardKind = "text"

    @property
    def scored(self) -> int:
        return (
            max(len(self.tokens) - 1, 0)
            if self.loss_mask is None
            else int(self.loss_mask[1:].sum())
        )


def evaluate_model(
    model: Path,
    data: Path | None,
    *,
    step: str = "best",
    bos: bool = True,
    template: str | None = None,
    use: Use | None = None,
    on_load: OnText = lambda _: None,
    trust_code: bool = False,
) -> tuple[TextScores | PictureScores | PairMetrics | RewardScores, list[str]]:
    """The scores on `data` (None: the validation set of a run), and notes that explain them. Raises UserError.

    Conversations with pictures are scored with them, and with those of others as a control.

    A run that trains with rewards is judged by them, also on `data` with prompts.

    `model`: an argument of `find_model`.
    """
    plan = None
    if data is None:
        if not (model / "plan.json").is_file():
            fix = "add --data PATH (a text; preference pairs for a reward model)"
            raise UserError(
                "no validation set: this model is not a run", where=str(model), fix=fix, code=2
            )
        plan = read_plan(model / "plan.json")
        data = plan.data.prepared
    with held_model(model, step) as files:
        return _evaluated(
            files,
            model,
            data,
            plan,
            bos=bos,
            template=template,
            use=use,
            on_load=on_load,
            trust_code=trust_code,
        )


def _evaluated(
    files: ModelFiles,
    model: Path,
    data: Path,
    plan: RunPlan | None,
    *,
    bos: bool,
    template: str | None,
    use: Use | None,
    on_load: OnText,
    trust_code: bool,
) -> tuple[TextScores | PictureScores | PairMetrics | RewardScores, list[str]]:
    """`evaluate_model` of the model that was found in `files`. `plan`: of the run whose validation set `data` is."""
    decoder, tokenizer = load_files(files, use, on_load)
    rewarded = _plan_with_rewards(model)
    if rewarded is not None and (plan is not None or is_prompts(data)):
        rows = None if plan is not None else data
        add_tuned_vision(decoder, rewarded, files.weights)
        return evaluate_rewards(
            decoder, tokenizer, rewarded, model, rows, template=template, trust_code=trust_code
        )
    if decoder.config.head == "values":
        length = None if plan is None else plan.data.sequence_length
        return evaluate_pairs(decoder, tokenizer, data, template=template, sequence_length=length)
    if plan is None and not (data / "manifest.json").is_file():
        examples = examples_with_pictures(data, tokenizer)
        if examples is not None:
            encoder = open_eyes(decoder, files)
            return score_pictures(
                decoder, tokenizer, encoder, examples, where=str(data), template=template
            )
    if plan is not None and bos and template is None:
        as_trained = evaluate_as_trained(decoder, tokenizer, plan, files.weights)
        if as_trained is not None:
            return as_trained
    result, notes = evaluate(decoder, tokenizer, data, bos=bos, template=template)
    if plan is not None:
        notes.append(
            f"the loss differs from the training log: there, packed sequences of {plan.data.sequence_length:,} tokens;"
            f" here, whole texts with a context of up to {decoder.config.max_positions:,} tokens"
        )
    return result, notes


def _plan_with_rewards(model: Path) -> RunPlan | None:
    """Of a run that trains on completions; None of any other model."""
    if not (model / "plan.json").is_file():
        return None
    plan = read_plan(model / "plan.json")
    return plan if plan.rewards or plan.episodes else None


def is_prompts(data: Path) -> bool:
    """Whether the rows of a dataset are prompts without answers to imitate."""
    if not data.exists() or (data.is_file() and suffix_of(data) not in DATA | TABLES):
        return False
    try:
        dataset = open_dataset(Source(path=str(data), format="prompts"), "prompts")
        return next(read_documents(dataset, on_error="stop", stats=ReadStats()), None) is not None
    except UserError:  # what it is instead, the evaluation of texts says
        return False


def load_to_evaluate(
    model: Path, *, step: str = "best", use: Use | None = None, on_load: OnText = lambda _: None
) -> tuple[Decoder, Tokenizer]:
    """Decoder and tokenizer of a run's checkpoint in the run's precision, or of a model folder: float32 on the CPU,
    the stored dtype on a GPU.

    Raises UserError when there is none, or when it is damaged.
    """
    with held_model(model, step) as files:
        return load_files(files, use, on_load)


def load_found(
    files: ModelFiles,
    *,
    where: str,
    use: Use | None = None,
    on_load: OnText = lambda _: None,
) -> tuple[Decoder, Tokenizer]:
    """`load_to_evaluate` from `files`. Raises UserError for a reward model."""
    decoder, tokenizer = load_files(files, use, on_load)
    refuse_values(decoder.config, where=where)
    return decoder, tokenizer


def load_files(
    files: ModelFiles, use: Use | None = None, on_load: OnText = lambda _: None
) -> tuple[Decoder, Tokenizer]:
    """`load_to_evaluate` from `files`, also of a reward model. Raises UserError."""
    use = use or Use.local()
    dtype = torch.float32 if use.device == "cpu" else None
    decoder = load_used(files, use, dtype=dtype, on_load=on_load)
    return decoder, load_tokenizer(files.tokenizer)


def evaluate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    data: Path,
    *,
    bos: bool = True,
    context: int | None = None,
    template: str | None = None,
) -> tuple[TextScores, list[str]]:
    """The scores, and notes that explain them.

    `data`: a text file (one document), a data file or folder as in recipes, or a prepared folder (its validation set).
    `bos`: add a BOS token to each text, so that its first token is scored too. Scores assistant tokens of conversations
    (in `template` or the tokenizer's own), the chosen response of pairs, and desirable KTO responses. `context` limits
    the tokens that attention covers (default: the model's own). Raises UserError when nothing can be scored, and for a
    reward model (see evaluate_pairs).
    """
    refuse_values(decoder.config, where="the model")
    context = min(context or decoder.config.max_positions, decoder.config.max_positions)
    texts = list(read_texts(data, tokenizer, bos=bos, template=template))
    refuse_unknown_ids(
        chain.from_iterable(text.tokens for text in texts), decoder.config.vocab_size
    )
    result = evaluate_texts(decoder, texts, where=str(data), context=context)
    return result, notes_of(texts, tokenizer, bos=bos, context=context)


def evaluate_as_trained(
    decoder: Decoder, tokenizer: Tokenizer, plan: RunPlan, weights: Path
) -> tuple[TextScores, list[str]] | None:
    """The scores of the run's own evaluation: the same packed sequences of its validation set.

    `weights`: the folder of the decoder's, which has what was trained of the parts that read pictures, too.
    None where the loss is not per token, or without a validation set. Raises UserError when no token can be scored.
    """
    tokens = read_manifest(plan.data.prepared).validation.tokens
    if (
        plan.objective.spec.loss_unit != "token"
        or decoder.config.transformers_backend is not None
        or not tokens
    ):
        return None
    on_own_device = plan.train.device == decoder.device.type
    # The block mask is supported by every device.
    decoder.use_attention(plan.model.attention if on_own_device else "mask")
    add_tuned_vision(decoder, plan, weights)
    loader = open_loader(plan.data, "validation", seed=plan.train.seed)
    sizes = tokenizer.token_bytes()
    objective = pretraining(score_chunk=plan.model.score_chunk)
    result = evaluate_validation(
        decoder,
        loader,
        objective,
        plan=plan.eval,
        precision="float32",
        token_bytes=sizes,
        limit=plan.eval.sequences,
    )  # the decoder already computes in the run's precision
    where = str(plan.data.prepared)
    if result is None:
        raise UserError("no token to score", where=where, fix="add --data PATH")
    if not math.isfinite(result.loss) or result.perplexity is None:
        fix = "evaluate an earlier checkpoint with --step"
        raise UserError(
            "the loss is not a finite number: the weights are damaged", where=where, fix=fix
        )
    count = min(plan.eval.sequences or loader.sequences, loader.sequences)
    note = f"same as in training: {count:,} of {loader.sequences:,} sequences of {plan.data.sequence_length:,} tokens"
    if decoder.vision is None:
        note += f"; --data {where} scores whole texts"
    return TextScores(
        result.loss, result.perplexity, result.bits_per_byte, result.tokens, result.bytes or 0
    ), [note]


def evaluate_pairs(
    decoder: Decoder,
    tokenizer: Tokenizer,
    data: Path,
    *,
    template: str | None = None,
    sequence_length: int | None = None,
) -> tuple[PairMetrics, list[str]]:
    """The metrics of a reward model on the preference pairs in `data`, and notes that explain them.

    `data`: as in `evaluate`. `sequence_length`: shared by both responses, as in training; None: each response can fill
    the context. Truncates the end of longer ones; leaves out a pair with a side without loss tokens after that. Raises
    UserError for data of another kind, and when no pair is left.
    """
    sides = list(_sides_of(data, tokenizer, template))
    refuse_unknown_ids(chain.from_iterable(ids for ids, _ in sides), decoder.config.vocab_size)
    full_lengths = np.array([len(ids) for ids, _ in sides], np.int64).reshape(-1, 2)
    first_labels = np.array([first_labels for _, first_labels in sides], np.int64).reshape(-1, 2)
    lengths = (
        full_lengths
        if sequence_length is None
        else truncated_lengths(full_lengths, sequence_length)
    )
    lengths = np.minimum(lengths, decoder.config.max_positions)
    scorable = np.all(first_labels < lengths, axis=1)
    if not scorable.any():
        fix = "use pairs of a chosen and a rejected response: --data PATH"
        raise UserError("no pair to score", where=str(data), fix=fix)
    cut_sides = [
        (ids[:count], is_scorable)
        for (ids, _), count, is_scorable in zip(
            sides, lengths.ravel(), scorable.repeat(2), strict=True
        )
    ]
    metrics = score_pairs(decoder, [ids for ids, is_scorable in cut_sides if is_scorable])
    if not math.isfinite(metrics.loss):
        problem = "the values of the reward model are not finite numbers: the weights are damaged"
        raise UserError(problem, where=str(data), fix="evaluate an earlier checkpoint with --step")
    notes = []
    if cut := int(np.any(lengths < full_lengths, axis=1)[scorable].sum()):
        notes.append(
            f"{cut:,} of {counted(len(full_lengths), 'pairs')} are truncated to the context"
        )
    if num_left_out := int((~scorable).sum()):
        notes.append(f"left out: {counted(num_left_out, 'pairs')} with a side without loss tokens")
    return metrics, notes


def _sides_of(
    data: Path, tokenizer: Tokenizer, template: str | None
) -> Iterator[tuple[list[int], int]]:
    """The chosen and the rejected side of each pair in turn, each with the index of its first loss token."""
    if (data / "manifest.json").is_file():
        _refuse_stored_pictures(data)
        split = open_split(data, "validation")
        if split.kind != "pairs" or split.first_loss_tokens is None:
            raise _no_pairs(
                {"text": "plain text", "kto": NAMES["kto"]}.get(split.kind, NAMES["chat"]),
                str(data),
            )
        for index in range(len(split)):
            yield split.document(index).tolist(), int(split.first_loss_tokens[index])
        return
    with Renderer(tokenizer, template=template, train_on="assistant") as renderer:
        for content in _contents(data, tokenizer):
            if not isinstance(content, Example):
                raise _no_pairs(
                    "plain text" if isinstance(content, str) else "token ids", str(data)
                )
            if content.kind != "pair":
                raise _no_pairs(NAMES[content.kind], content.source)
            for side in renderer.encode(content):
                yield (
                    side.ids,
                    next((i for i, flag in enumerate(side.loss_mask) if flag and i), len(side.ids)),
                )


def _no_pairs(kind: str, where: str) -> UserError:
    problem = (
        f"a reward model requires pairs of a chosen and a rejected response; this data is {kind}"
    )
    return UserError(problem, where=where, fix="use preference pairs: --data PATH")


def evaluate_texts(
    decoder: Decoder, texts: Iterable[TokenizedText], *, where: str, context: int | None = None
) -> TextScores:
    """The mean over all scored tokens of all documents."""
    texts = list(texts)
    scores = score_documents(decoder, [text.tokens for text in texts], context=context)
    nats = 0.0
    tokens = 0
    size = 0
    for text, nats_of_text in zip(texts, scores, strict=True):
        scored = nats_of_text if text.loss_mask is None else nats_of_text[text.loss_mask[1:]]
        nats += float(scored.sum(dtype=np.float64))
        tokens += text.scored
        size += text.bytes
    if tokens == 0:
        raise UserError("no token to score", where=where, fix="use a text of at least two tokens")
    if not math.isfinite(nats):
        problem = "the loss is not a finite number: the weights are damaged or have diverged"
        raise UserError(problem, where=where, fix="evaluate an earlier checkpoint with --step")
    # Bits per byte = nats / ln 2 / bytes (independent of the tokenizer); perplexity = exp(nats / tokens).
    bits = nats / math.log(2) / size if size else None
    loss = nats / tokens
    return TextScores(loss, math.exp(min(loss, 700.0)), bits, tokens, size)


def read_texts(
    data: Path, tokenizer: Tokenizer, *, bos: bool = True, template: str | None = None
) -> Iterator[TokenizedText]:
    """The documents of `data`, tokenized. Raises UserError when it is missing or unreadable, and for pictures."""
    if (data / "manifest.json").is_file():
        _refuse_stored_pictures(data)
        yield from _prepared(data, tokenizer, bos=bos)
        return
    sizes = tokenizer.token_bytes()
    start = tokenizer.prefix if bos else []
    with Renderer(tokenizer, template=template, train_on="assistant") as renderer:
        for content in _contents(data, tokenizer):
            if isinstance(content, Example):
                if content.desirable is not False:
                    encoded = renderer.encode(content)[0]
                    yield _masked(
                        encoded.ids, np.array(encoded.loss_mask), sizes, KINDS[content.kind]
                    )
                continue
            ids = tokenizer.encode(content) if isinstance(content, str) else list(content)
            ids = ids if ids[: len(start)] == start else start + ids
            yield TokenizedText(ids, _bytes(content, ids, sizes, has_bos=bool(start)))


def _refuse_stored_pictures(prepared: Path) -> None:
    if read_manifest(prepared).has_pictures:
        raise _without_pictures("the dataset", str(prepared))


def _without_pictures(subject: str, where: str) -> UserError:
    return UserError(
        f"{subject} has pictures, and would be scored without them",
        where=where,
        fix="run `bloomery eval RUN` alone for its validation set, or with --data ROWS for conversations with pictures",
    )


def examples_with_pictures(data: Path, tokenizer: Tokenizer) -> Iterator[Example] | None:
    """The rows of a dataset, where any of the first has pictures. Raises UserError, also for a text among them."""
    first = (content for content, _ in islice(_rows(data, tokenizer), ROWS_TO_LOOK_AT))
    if not any(isinstance(content, Example) and holds_pictures(content) for content in first):
        return None
    return _conversations(data, tokenizer)


def _conversations(data: Path, tokenizer: Tokenizer) -> Iterator[Example]:
    for content, source in _rows(data, tokenizer):
        if not isinstance(content, Example):
            problem = "the row is a text among conversations with pictures"
            raise UserError(problem, where=source, fix="give rows with messages")
        yield content


def _masked(
    ids: list[int], loss_mask: np.ndarray, sizes: np.ndarray, kind: ShardKind
) -> TokenizedText:
    scored = np.asarray(ids[1:], dtype=np.int64)[loss_mask[1:]]
    return TokenizedText(ids, int(sizes[scored].sum()), loss_mask, kind)


def _contents(data: Path, tokenizer: Tokenizer) -> Iterator[str | tuple[int, ...] | Example]:
    """Raises UserError for pictures."""
    for content, source in _rows(data, tokenizer):
        if isinstance(content, Example) and holds_pictures(content):
            raise _without_pictures("the row", source)
        yield content


def _rows(
    data: Path, tokenizer: Tokenizer
) -> Iterator[tuple[str | tuple[int, ...] | Example, str]]:
    """Each with where it is from."""
    root = data
    glob = None
    wildcard_parts = [
        index for index, part in enumerate(data.parts) if any(mark in part for mark in "*?[")
    ]
    # the folder before the first wildcard, and the pattern after it
    if wildcard_parts and not data.exists():
        root = Path(*data.parts[: wildcard_parts[0]])
        glob = str(Path(*data.parts[wildcard_parts[0] :]))
    if root.is_file() and suffix_of(root) not in DATA | TABLES:
        yield read_file(root), str(root)
        return
    dataset = _open_any(Source(path=str(root), glob=glob))
    files = tuple(
        replace(file, format="code" if file.format == "text" else file.format)
        for file in dataset.files
    )
    ends = (tokenizer.bos_id, tokenizer.eos_id)
    for document in read_documents(
        replace(dataset, files=files), on_error="stop", stats=ReadStats()
    ):
        document = unpadded(document, pad_id=tokenizer.pad_id, ends=ends)
        yield document.content if document.tokens is None else document.tokens, document.source


def _open_any(source: Source) -> Dataset:
    """The dataset in the first format that its rows have. Raises UserError."""
    failed: UserError | None = None
    for required_format in KINDS_OF_ROWS:
        try:
            dataset = open_dataset(source, required_format)
            next(read_documents(dataset, on_error="stop", stats=ReadStats()), None)
            return dataset
        except UserError as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _bytes(
    content: str | tuple[int, ...], ids: list[int], sizes: np.ndarray, *, has_bos: bool
) -> int:
    """UTF-8 bytes of the tokens after the first; of the whole text after a BOS."""
    if isinstance(content, tuple):
        return int(sizes[np.asarray(ids[1:], dtype=np.int64)].sum())
    size = len(content.encode())
    return size if has_bos or not ids else max(size - int(sizes[ids[0]]), 0)


def _prepared(folder: Path, tokenizer: Tokenizer, *, bos: bool) -> Iterator[TokenizedText]:
    """The validation set as in training, [bos] text [eos]; the EOS is scored and has no bytes."""
    split = open_split(folder, "validation")
    sizes = tokenizer.token_bytes()
    for index in range(0, len(split), DOCUMENTS_PER_UNIT[split.kind]):
        ids: list[int] = split.document(index).tolist()
        if split.loss_mask is not None and not split.is_plain(index):
            if split.kto_labels is None or split.kto_labels[index]:
                flags = split.loss_mask[int(split.bounds[index]) : int(split.bounds[index + 1])]
                yield _masked(ids, flags.astype(bool), sizes, split.kind)
            continue
        ids = ids[1:] if not bos and ids[:1] == [tokenizer.bos_id] else ids
        yield TokenizedText(ids, int(sizes[np.asarray(ids[1:], dtype=np.int64)].sum()))


def notes_of(
    texts: list[TokenizedText], tokenizer: Tokenizer, *, bos: bool, context: int
) -> list[str]:
    """Sentences that explain the scores."""
    notes = []
    longer = sum(len(text.tokens) > context for text in texts)
    if longer:
        count = f"{longer:,} of {len(texts):,} texts are" if len(texts) > 1 else "the text is"
        notes.append(
            f"{count} longer than the context of {context:,} tokens and scored in half-overlapping windows"
        )
    masked = [text for text in texts if text.loss_mask is not None]
    if masked:
        scored = sum(text.scored for text in masked)
        num_tokens = sum(len(text.tokens) for text in masked)
        part = {
            "pairs": f"the chosen response of {counted(len(masked), 'pairs')}",
            "kto": f"{counted(len(masked), 'desirable responses')}",
        }.get(masked[0].kind, f"assistant tokens of {counted(len(masked), 'conversations')}")
        notes.append(f"scored: {part}, {scored:,} of {num_tokens:,} tokens")
    if bos and not tokenizer.prefix and len(masked) < len(texts):
        notes.append("the tokenizer adds no BOS token: the first token of each text is not scored")
    return notes
