"""How well a model predicts text: nats per token, perplexity, bits per byte; how well a reward model judges pairs"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.data.chat.examples import Example
from bloomery.data.chat.formats import NAMES, RequiredFormat
from bloomery.data.chat.render import Renderer
from bloomery.data.loading.packing import truncated_lengths
from bloomery.data.prepare.kinds import KINDS
from bloomery.data.shards.format import DOCUMENTS_PER_UNIT, ShardKind, open_split, read_manifest
from bloomery.data.sources.documents import Dataset, ReadStats, open_dataset, read_documents, read_file, unpadded
from bloomery.data.sources.files import DATA, TABLES, suffix_of
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, refuse_unknown_ids
from bloomery.model.config import refuse_values
from bloomery.model.decoder import Attention, Backbone, Decoder
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Source
from bloomery.train.context import open_loader
from bloomery.train.evaluation.evaluation import evaluate as evaluate_validation
from bloomery.train.evaluation.scoring import PairMetrics, score_documents, score_pairs
from bloomery.train.model_folder import ModelFiles, find_model
from bloomery.train.objectives.build import pretraining
from bloomery.train.use import OnText, Use, load_used

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
class Text:
    """One document as the model sees it. `bytes` belong to the tokens that are scored: those after the first, of them
    only the `learned` ones where that is said (bool [len(tokens)]), of examples of this `kind`.
    """

    tokens: list[int]
    bytes: int
    learned: np.ndarray | None = None
    kind: ShardKind = "text"

    @property
    def scored(self) -> int:
        return max(len(self.tokens) - 1, 0) if self.learned is None else int(self.learned[1:].sum())


def evaluate_model(
    model: Path, data: Path | None, *, step: str = "best", bos: bool = True, template: str | None = None,
    use: Use | None = None, on_load: OnText = lambda _: None,
) -> tuple[TextScores | PairMetrics, list[str]]:  # fmt: skip
    """How a model predicts `data`, or a reward model judges the pairs in it, and what a reader of that must know.

    `model`: what `find_model` takes. `data`: None means a run's own validation split. Raises UserError.
    """
    plan = None
    if data is None:
        if not (model / "plan.json").is_file():
            fix = "name a text, or pairs for a reward model: --data PATH"
            raise UserError("this is no run with a text of its own", where=str(model), fix=fix, code=2)
        plan = read_plan(model / "plan.json")
        data = plan.data.prepared
    decoder, tokenizer = load_to_evaluate(model, step=step, use=use, on_load=on_load)
    if decoder.config.head == "values":
        row = None if plan is None else plan.data.sequence_length
        return judge(decoder, tokenizer, data, template=template, row=row)
    if plan is not None and bos and template is None:
        same = evaluate_as_trained(decoder, tokenizer, plan)
        if same is not None:
            return same
    result, found = evaluate(decoder, tokenizer, data, bos=bos, template=template)
    if plan is not None:
        found.append(
            f"the run evaluates packed sequences of {plan.data.sequence_length:,} tokens while it trains; here each"
            f" text is scored whole, with up to {decoder.config.max_positions:,} tokens of context: the two losses"
            " differ"
        )
    return result, found


def load_to_evaluate(
    model: Path, *, step: str = "best", use: Use | None = None, on_load: OnText = lambda _: None
) -> tuple[Decoder, Tokenizer]:
    """Decoder and tokenizer of a run's checkpoint, computing as the run did, or of a model's folder, in float32 on the
    CPU and as stored on a GPU.

    Raises UserError when there is none, or when it is damaged.
    """
    return _load(find_model(model, step), 0, use, on_load)


def load_found(
    found: ModelFiles, *, where: str, vocab_size: int = 0, use: Use | None = None, on_load: OnText = lambda _: None
) -> tuple[Decoder, Tokenizer]:
    """`load_to_evaluate` of what was found, with at least `vocab_size` tokens. Raises UserError for a reward model."""
    decoder, tokenizer = _load(found, vocab_size, use, on_load)
    refuse_values(decoder.config, where=where)
    return decoder, tokenizer


def _load(found: ModelFiles, vocab_size: int, use: Use | None, on_load: OnText) -> tuple[Decoder, Tokenizer]:
    use = use or Use.local()
    dtype = torch.float32 if use.device == "cpu" else None
    decoder = load_used(found, use, dtype=dtype, vocab_size=vocab_size, on_load=on_load)
    return decoder, load_tokenizer(found.tokenizer)


def evaluate(
    decoder: Decoder, tokenizer: Tokenizer, data: Path, *, bos: bool = True, context: int | None = None,
    template: str | None = None,
) -> tuple[TextScores, list[str]]:  # fmt: skip
    """The evaluation, and what a reader of it must know.

    `data`: a text file (one document), a data file or folder as recipes know them, or a prepared folder, whose
    validation split is meant. With `bos` the tokenizer's BOS goes before each text, so that its first token is
    scored too. Of conversations, written by `template` or the tokenizer's own, what the assistant wrote is scored; of
    pairs the chosen answer, of marked answers the desirable ones. `context` bounds what a token sees (default: the
    model's own). Raises UserError when nothing can be scored, and for a reward model: see judge.
    """
    refuse_values(decoder.config, where="the model")
    context = min(context or decoder.config.max_positions, decoder.config.max_positions)
    texts = list(texts_of(data, tokenizer, bos=bos, template=template))
    refuse_unknown_ids(chain.from_iterable(text.tokens for text in texts), decoder.config.vocab_size)
    result = evaluate_texts(decoder, texts, where=str(data), context=context)
    return result, notes(texts, tokenizer, bos=bos, context=context)


def evaluate_as_trained(decoder: Decoder, tokenizer: Tokenizer, plan: RunPlan) -> tuple[TextScores, list[str]] | None:
    """What the run's own evaluation gives: the same sequences of its validation split, packed as in training.

    None where that is no loss of text, or nothing is held out. Raises UserError when no token can be scored.
    """
    held_out = read_manifest(plan.data.prepared).validation.tokens
    if plan.objective.spec.loss_unit != "token" or decoder.config.transformers_backend is not None or not held_out:
        return None
    own = plan.train.device == next(decoder.parameters()).device.type
    for module in decoder.modules():
        if isinstance(module, Backbone | Attention):
            module.backend = plan.model.attention if own else "mask"  # which every device has
    loader, sizes = open_loader(plan, "validation"), tokenizer.token_bytes()
    objective = pretraining(score_chunk=plan.model.score_chunk)
    found = evaluate_validation(
        decoder, loader, objective, plan=plan.eval, precision="float32", token_bytes=sizes, limit=plan.eval.sequences
    )  # the decoder computes in the run's precision by itself
    where = str(plan.data.prepared)
    if found is None:
        raise UserError("there is no token to score", where=where, fix="name a text: --data PATH")
    if not math.isfinite(found.loss) or found.perplexity is None:
        fix = "evaluate an earlier checkpoint with --step"
        raise UserError("the model's loss is not a finite number: its weights are damaged", where=where, fix=fix)
    rows = min(plan.eval.sequences or loader.sequences, loader.sequences)
    note = (
        f"as the run evaluates: {rows:,} of {loader.sequences:,} sequences of {plan.data.sequence_length:,} tokens;"
        f" --data {where} scores each validation text whole"
    )
    return TextScores(found.loss, found.perplexity, found.bits_per_byte, found.tokens, found.bytes or 0), [note]


def judge(
    decoder: Decoder, tokenizer: Tokenizer, data: Path, *, template: str | None = None, row: int | None = None
) -> tuple[PairMetrics, list[str]]:
    """How a reward model judges the pairs in `data`, and what a reader of that must know.

    `data` is what it is to evaluate. `row`: both answers share so many tokens, as in training; without it each may fill
    the model's context. What is longer keeps its start, and a pair of which then nothing learned is left on one side
    is left out. Raises UserError for data of another kind, and when no pair is left.
    """
    sides = list(_sides_of(data, tokenizer, template))
    refuse_unknown_ids(chain.from_iterable(ids for ids, _ in sides), decoder.config.vocab_size)
    whole = np.array([len(ids) for ids, _ in sides], np.int64).reshape(-1, 2)
    first = np.array([first for _, first in sides], np.int64).reshape(-1, 2)
    lengths = np.minimum(whole if row is None else truncated_lengths(whole, row), decoder.config.max_positions)
    good = np.all(first < lengths, axis=1)
    if not good.any():
        fix = "name pairs of a chosen and a rejected answer: --data PATH"
        raise UserError("there is no pair to judge", where=str(data), fix=fix)
    kept = [(ids[:count], fits) for (ids, _), count, fits in zip(sides, lengths.ravel(), good.repeat(2), strict=True)]
    found = score_pairs(decoder, [ids for ids, fits in kept if fits])
    if not math.isfinite(found.loss):
        fix = "evaluate an earlier checkpoint with --step"
        raise UserError("the model's values are not finite numbers: its weights are damaged", where=str(data),
                        fix=fix)  # fmt: skip
    return found, _notes_of_pairs(whole, lengths, good)


def _notes_of_pairs(whole: np.ndarray, lengths: np.ndarray, good: np.ndarray) -> list[str]:
    cut, out = int(np.any(lengths < whole, axis=1)[good].sum()), int((~good).sum())
    notes = [f"{cut:,} of {counted(len(whole), 'pairs')} are longer than there is room and judged by their beginnings"]
    return notes[: bool(cut)] + [f"left out: {counted(out, 'pairs')} with nothing to judge on a side"][: bool(out)]


def _sides_of(data: Path, tokenizer: Tokenizer, template: str | None) -> Iterator[tuple[list[int], int]]:
    """The chosen and the rejected side of each pair in turn, and where in each the first learned token is."""
    if (data / "manifest.json").is_file():
        split = open_split(data, "validation")
        if split.kind != "pairs" or split.first is None:
            raise _no_pairs({"text": "plain text", "kto": NAMES["kto"]}.get(split.kind, NAMES["chat"]), str(data))
        yield from ((split.document(index).tolist(), int(split.first[index])) for index in range(len(split)))
        return
    with Renderer(tokenizer, template=template, train_on="assistant") as renderer:
        for content in _contents(data, tokenizer):
            if not isinstance(content, Example):
                raise _no_pairs("plain text" if isinstance(content, str) else "token ids", str(data))
            if content.kind != "pair":
                raise _no_pairs(NAMES[content.kind], content.source)
            for side in renderer.encode(content):
                yield side.ids, next((i for i, flag in enumerate(side.loss_mask) if flag and i), len(side.ids))


def _no_pairs(kind: str, where: str) -> UserError:
    problem = f"a reward model judges pairs of a chosen and a rejected answer, and these are {kind}"
    return UserError(problem, where=where, fix="name such pairs: --data PATH")


def evaluate_texts(decoder: Decoder, texts: Iterable[Text], *, where: str, context: int | None = None) -> TextScores:
    """Sums over all documents, divided once: a long document weighs as much as its tokens."""
    texts = list(texts)
    scores = score_documents(decoder, (text.tokens for text in texts), context=context)
    nats, tokens, size = 0.0, 0, 0
    for text, nats_of_text in zip(texts, scores, strict=True):
        learned = nats_of_text if text.learned is None else nats_of_text[text.learned[1:]]
        nats += float(learned.sum(dtype=np.float64))
        tokens += text.scored
        size += text.bytes
    if tokens == 0:
        raise UserError("there is no token to score", where=where, fix="evaluate on a text of two tokens or more")
    if not math.isfinite(nats):
        raise UserError(
            "the model's loss on this text is not a finite number: its weights are damaged or have diverged",
            where=where,
            fix="evaluate an earlier checkpoint with --step",
        )
    return from_nats(nats, tokens, size)


def from_nats(nats: float, tokens: int, size: int) -> TextScores:
    """Bits per byte = nats / ln 2 / bytes, which does not depend on the tokenizer; perplexity = exp(nats / tokens)."""
    loss = nats / tokens
    return TextScores(loss, math.exp(min(loss, 700.0)), nats / math.log(2) / size if size else None, tokens, size)


def texts_of(data: Path, tokenizer: Tokenizer, *, bos: bool = True, template: str | None = None) -> Iterator[Text]:
    """The documents of `data`, tokenised. Raises UserError when it is missing or unreadable."""
    if (data / "manifest.json").is_file():
        yield from _prepared(data, tokenizer, bos=bos)
        return
    sizes = tokenizer.token_bytes()
    start = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    with Renderer(tokenizer, template=template, train_on="assistant") as renderer:
        for content in _contents(data, tokenizer):
            if isinstance(content, Example):
                if content.desirable is not False:
                    answer = renderer.encode(content)[0]
                    yield _learned(answer.ids, np.array(answer.loss_mask), sizes, KINDS[content.kind])
                continue
            ids = tokenizer.encode(content) if isinstance(content, str) else list(content)
            ids = ids if start and ids[:1] == start else start + ids
            yield Text(ids, _bytes(content, ids, sizes, whole=bool(start)))


def _learned(ids: list[int], learned: np.ndarray, sizes: np.ndarray, kind: ShardKind) -> Text:
    scored = np.asarray(ids[1:], dtype=np.int64)[learned[1:]]
    return Text(ids, int(sizes[scored].sum()), learned, kind)


def _contents(data: Path, tokenizer: Tokenizer) -> Iterator[str | tuple[int, ...] | Example]:
    root, glob = _split_glob(data)
    if root.is_file() and suffix_of(root) not in DATA | TABLES:
        yield read_file(root)
        return
    corpus = _corpus(Source(path=str(root), glob=glob))
    whole = tuple(replace(file, format="code" if file.format == "text" else file.format) for file in corpus.files)
    ends = (tokenizer.bos_id, tokenizer.eos_id)
    for document in read_documents(replace(corpus, files=whole), on_error="stop", stats=ReadStats()):
        document = unpadded(document, pad_id=tokenizer.pad_id, ends=ends)
        yield document.content if document.tokens is None else document.tokens


def _corpus(source: Source) -> Dataset:
    """Read for whatever its rows are. Raises UserError."""
    failed: UserError | None = None
    for required_format in KINDS_OF_ROWS:
        try:
            corpus = open_dataset(source, required_format)
            next(read_documents(corpus, on_error="stop", stats=ReadStats()), None)
            return corpus
        except UserError as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _split_glob(data: Path) -> tuple[Path, str | None]:
    """The folder before the first wildcard, and the pattern from there on."""
    if data.exists():
        return data, None
    for index, part in enumerate(data.parts):
        if any(mark in part for mark in "*?["):
            return Path(*data.parts[:index]), str(Path(*data.parts[index:]))
    return data, None


def _bytes(content: str | tuple[int, ...], ids: list[int], sizes: np.ndarray, *, whole: bool) -> int:
    """UTF-8 bytes of the tokens after the first; of all the text when a BOS stands before it."""
    if isinstance(content, tuple):
        return int(sizes[np.asarray(ids[1:], dtype=np.int64)].sum())
    size = len(content.encode())
    return size if whole or not ids else max(size - int(sizes[ids[0]]), 0)


def _prepared(folder: Path, tokenizer: Tokenizer, *, bos: bool) -> Iterator[Text]:
    """The validation split as training saw it, [bos] text [eos]; the EOS is scored and has no bytes."""
    split, sizes = open_split(folder, "validation"), tokenizer.token_bytes()
    for index in range(0, len(split), DOCUMENTS_PER_UNIT[split.kind]):
        ids: list[int] = split.document(index).tolist()
        if split.loss_mask is not None and not split.is_plain(index):
            if split.kto_labels is None or split.kto_labels[index]:
                flags = split.loss_mask[int(split.bounds[index]) : int(split.bounds[index + 1])]
                yield _learned(ids, flags.astype(bool), sizes, split.kind)
            continue
        ids = ids[1:] if not bos and ids[:1] == [tokenizer.bos_id] else ids
        yield Text(ids, int(sizes[np.asarray(ids[1:], dtype=np.int64)].sum()))


def notes(texts: list[Text], tokenizer: Tokenizer, *, bos: bool, context: int) -> list[str]:
    """What the figures depend on, as sentences."""
    found = []
    longer = sum(len(text.tokens) > context for text in texts)
    if longer:
        count = f"{longer:,} of {len(texts):,} texts are" if len(texts) > 1 else "the text is"
        found.append(f"{count} longer than the context of {context:,} tokens and scored in half-overlapping windows")
    judged = [text for text in texts if text.learned is not None]
    if judged:
        scored, whole = sum(text.scored for text in judged), sum(len(text.tokens) for text in judged)
        found.append(f"{_what_is_scored(judged)}: {scored:,} of {whole:,} tokens")
    if bos and tokenizer.bos_id is None and len(judged) < len(texts):
        found.append("the tokenizer has no BOS: the first token of each text is not scored")
    return found


def _what_is_scored(judged: list[Text]) -> str:
    match judged[0].kind:
        case "pairs":
            return f"of {counted(len(judged), 'pairs')} the chosen side is scored"
        case "kto":
            return f"of marked answers the desirable ones are scored, {len(judged):,} of them"
        case _:
            return f"of {counted(len(judged), 'conversations')} what the assistant wrote is scored"
