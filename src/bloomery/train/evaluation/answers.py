"""Completions of the recipe's sample prompts and of prompts from the validation set."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bloomery.core.errors import UserError
from bloomery.data.chat.render import chat_format
from bloomery.data.examples import Message, with_pictures_before
from bloomery.data.pictures.encoder import PictureEncoder, saved_vision
from bloomery.data.pictures.prompts import PicturePrompt
from bloomery.data.pictures.references import encoded_bytes
from bloomery.data.pictures.thumbnails import write_thumbnail
from bloomery.data.shards import DOCUMENTS_PER_UNIT, Split, open_split, read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.decode import sample_tokens
from bloomery.infer.forward import eval_mode, precision_context
from bloomery.infer.sampling import Sampling, known_ids
from bloomery.model.decoder import Decoder
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import SamplePlan, TrainPlan
from bloomery.recipe.schema import ImagePrompt

CHARACTERS_SHOWN = 2000
# Greedy decoding repeats itself in small models.
ANSWER_SAMPLING = Sampling(temperature=0.6, top_p=0.95, seed=0)


@dataclass(frozen=True)
class PromptAndResponse:
    """Token ids up to the first response; the ids of that response with its end token."""

    prompt: list[int]
    reference: list[int]


@dataclass(frozen=True)
class SampledAnswer:
    """Sampled ids, and whether an end token came before the length limit."""

    ids: list[int]
    ended: bool


def validation_prompts(prepared: Path, max_prompts: int) -> list[PromptAndResponse]:
    """SamplePrompts spread over the validation set, with chosen responses of pairs and desirable ones of KTO data.

    Empty for plain text. Raises UserError.
    """
    split = open_split(prepared, "validation")
    if split.loss_mask is None:
        return []

    # Of a pair only the chosen response is shown, which is its first document; of KTO data only desirable ones.
    documents = list[int]()
    for document in range(0, len(split), DOCUMENTS_PER_UNIT[split.kind]):
        is_desirable = split.kto_labels is None or split.kto_labels[document]
        if is_desirable and not split.is_plain(document):
            documents.append(document)
    if len(documents) > max_prompts:
        num_documents = len(documents)
        documents = [documents[i * num_documents // max_prompts] for i in range(max_prompts)]

    items = [_prompt_and_response(split, document) for document in documents]
    return [item for item in items if item.prompt and item.reference]


def _prompt_and_response(split: Split, number: int) -> PromptAndResponse:
    """The first run of loss tokens is the response, the tokens before it are the prompt."""
    ids = split.document(number)
    assert split.loss_mask is not None
    bounds = slice(int(split.bounds[number]), int(split.bounds[number + 1]))
    loss_mask = split.loss_mask[bounds].astype(bool)
    loss_positions = np.flatnonzero(loss_mask)
    if not len(loss_positions):
        return PromptAndResponse([], [])
    start = loss_positions[0]
    masked_offsets = np.flatnonzero(~loss_mask[start:])
    end = int(start + masked_offsets[0]) if len(masked_offsets) else len(ids)
    return PromptAndResponse(ids[:start].tolist(), ids[start:end].tolist())


def sample_answer(
    decoder: Decoder, tokenizer: Tokenizer, item: PromptAndResponse, *, max_new_tokens: int
) -> SampledAnswer:
    """Sample with ANSWER_SAMPLING up to an end token of reference or tokenizer, at most `max_new_tokens`."""
    # A reference that was truncated ends with a token of text, which ends nothing.
    last_token = item.reference[-1]
    end_tokens = [last_token] if tokenizer.token_bytes()[last_token] == 0 else []
    stop_ids = known_ids(tokenizer.eos_id, decoder.config.eos_token_id, *end_tokens)
    limit = min(max_new_tokens, decoder.config.max_positions - len(item.prompt))
    sampling = replace(ANSWER_SAMPLING, max_new_tokens=limit, stop_ids=stop_ids)
    ids = list(sample_tokens(decoder, item.prompt, sampling))
    return SampledAnswer(ids, len(ids) < limit)


def readable_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The ids as text, without special tokens and those of a padded vocabulary."""
    token_bytes = tokenizer.token_bytes()
    text_ids = [token for token in ids if token < len(token_bytes) and token_bytes[token]]
    return tokenizer.decode(text_ids).strip()[:CHARACTERS_SHOWN]


@dataclass(frozen=True)
class SamplePrompts:
    """`sample.prompts` with their ids; `ends`, `stops`: tokens and texts that end a completion; `answers`: a chat.

    `images`: of each prompt the small copy of its image in the run folder, "" without one; empty where none has one.
    """

    texts_and_ids: tuple[tuple[str, list[int]], ...]
    images: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    answers: bool = False


def open_prompts(
    prompts: Sequence[str | ImagePrompt],
    tokenizer: Tokenizer,
    prepared: Path,
    *,
    reads_text: bool,
    run_dir: Path,
) -> SamplePrompts:
    """Encode the prompts: as user turns with the chat template where the run trains on conversations, else as text.

    `reads_text`: whether the objective trains on plain text. Small copies of images are written into `run_dir`. Raises
    UserError for a prompt that the template rejects, and for an image that cannot be read, or that the model would not
    see.
    """
    is_chat = bool(prompts) and not reads_text and read_manifest(prepared).turns
    has_images = any(isinstance(prompt, ImagePrompt) for prompt in prompts)
    source = saved_vision(prepared) if has_images and is_chat else None
    if has_images and source is None:
        raise UserError(
            "a prompt has an image, and the run trains on no conversations with pictures: its model reads text alone",
            where="sample.prompts",
            fix="remove the image, or train a vision-language model on conversations with pictures",
        )
    if not is_chat:
        texts = [_text_of(prompt) for prompt in prompts]
        return SamplePrompts(tuple((text, tokenizer.encode_prompt(text)) for text in texts))
    encoder = None if source is None else PictureEncoder(source)
    try:
        with chat_format(tokenizer, None, encoder) as form:
            questions = list[tuple[str, list[int]]]()
            images = list[str]()
            for prompt in prompts:
                if isinstance(prompt, str):
                    message = Message("user", prompt)
                    images.append("")
                else:
                    assert encoder is not None
                    reference = encoder.reference(Path(prompt.image))
                    content = encoded_bytes(reference, prompt.image)
                    images.append(write_thumbnail(content, prompt.image, run_dir))
                    message = with_pictures_before(Message("user", prompt.text), [reference])
                questions.append((_text_of(prompt), form.encode([message])))
            return SamplePrompts(
                tuple(questions),
                tuple(images) if has_images else (),
                form.stop_ids,
                form.stop_strings,
                answers=True,
            )
    except UserError as error:
        fix = "set sample.prompts to questions that the template accepts, or to []"
        raise UserError(error.problem, where=f"sample.prompts, {error.where}", fix=fix) from error


def _text_of(prompt: str | ImagePrompt) -> str:
    return prompt if isinstance(prompt, str) else prompt.text


def samples(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: SamplePrompts,
    *,
    sample: SamplePlan,
    train: TrainPlan,
    mesh: Mesh = SINGLE_RANK,
) -> Iterator[tuple[str, str]]:
    """(prompt, completion) for each prompt, with a generator of its own and the same seed at every step.

    The first rank chooses each token: logits of other ranks may differ by rounding.
    """
    sampling = Sampling(
        max_new_tokens=sample.max_new_tokens,
        temperature=sample.temperature,
        top_p=sample.top_p,
        seed=train.seed,
        stop_ids=known_ids(tokenizer.eos_id, model.config.eos_token_id, *prompts.ends),
    )
    agree = mesh.broadcast_float if mesh.world > 1 else None
    # Compiled, each new length would be recompiled.
    eager = torch.compiler.set_stance("force_eager")
    with eval_mode(model), precision_context(train.precision, train.device), eager:
        for prompt, prompt_ids in prompts.texts_and_ids:
            # What the tower made of a picture at an earlier step is not what it makes of it now.
            ids = prompt_ids.unread() if isinstance(prompt_ids, PicturePrompt) else prompt_ids
            completion = list(sample_tokens(model, ids, sampling, agree=agree))
            yield prompt, text_until(tokenizer.decode(completion), prompts.stops)


def text_until(text: str, stops: Iterable[str]) -> str:
    """`text` up to the first of `stops`."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
