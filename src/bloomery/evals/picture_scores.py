"""Conversations with pictures: their loss and right answers, and the same with the pictures of others as a control.

B conversations, T tokens of each, N tokens that are scored.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch

from bloomery.core.device import sent
from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.units import counted
from bloomery.data.chat.render import Renderer
from bloomery.data.examples import BadRow, Example, Message, pictures_of
from bloomery.data.pictures.encoder import PictureEncoder
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.forward import eval_mode
from bloomery.infer.picture_prompts import axes_in_piece, seen_in_piece
from bloomery.model.decoder import Decoder, Output
from bloomery.model.pictures import SeenPictures
from bloomery.train.evaluation.scoring import ScoresAt, forward_batches

TOKENS_A_FORWARD = 2048
ENCODED_AT_ONCE = 256  # conversations, of which the control exchanges the pictures


@dataclass(frozen=True)
class PictureScores:
    """`loss`: nats per scored token. `right`: the share of conversations that greedy decoding would write as they are.

    `control_loss`, `control_right`: with the pictures of other conversations, whose answers they do not show; None
    where no conversation has another's. `bits_per_byte`: None where no byte was scored.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int
    right: float
    conversations: int
    control_loss: float | None
    control_right: float | None


class Scored(NamedTuple):
    """Sums over conversations. `right`: how many have no token but the likeliest."""

    nats: float
    tokens: int
    right: int
    conversations: int


class _Conversation(NamedTuple):
    """`pictures`: their files. `scored`: places of the tokens that are scored."""

    ids: list[int]
    pictures: Sequence[bytes]
    scored: list[int]


def score_pictures(
    decoder: Decoder,
    tokenizer: Tokenizer,
    encoder: PictureEncoder,
    examples: Iterable[Example],
    *,
    where: str,
    template: str | None = None,
    control: bool = True,
) -> tuple[PictureScores, list[str]]:
    """The scores of chats, some of which have pictures, and notes that explain them. Closes the encoder.

    `control`: also with the pictures of others. A conversation longer than the model's context is left out, as in
    training. Raises UserError for a damaged picture, for other kinds of examples, and where no token can be scored.
    """
    seen = Scored(0.0, 0, 0, 0)
    of_others = Scored(0.0, 0, 0, 0)
    num_bytes = 0
    num_long = 0
    num_texts = 0
    sizes = tokenizer.token_bytes()
    longest = decoder.config.max_positions
    with Renderer(tokenizer, template=template, train_on="assistant", pictures=encoder) as renderer:
        remaining = iter(examples)
        while group := list(islice(remaining, ENCODED_AT_ONCE)):
            conversations = list[_Conversation]()
            with_pictures = list[Example]()
            for example, conversation in _encoded(renderer, group):
                if len(conversation.ids) > longest:
                    num_long += 1
                    continue
                conversations.append(conversation)
                num_bytes += sum(int(sizes[conversation.ids[at]]) for at in conversation.scored)
                if _pictures(example):
                    with_pictures.append(example)
                else:
                    num_texts += 1
            seen = _added(seen, _scores(decoder, encoder, conversations))

            if control:
                others = _encoded(renderer, _exchanged(with_pictures))
                fitting = [each for _, each in others if len(each.ids) <= longest]
                of_others = _added(of_others, _scores(decoder, encoder, fitting))
            progress(counted(seen.conversations, "conversations"))

    if not seen.tokens:
        raise UserError("no token to score", where=where, fix="use conversations with an answer")
    if not math.isfinite(seen.nats):
        raise UserError(
            "the loss is not a finite number: the weights are damaged or have diverged",
            where=where,
            fix="evaluate an earlier checkpoint with --step",
        )
    loss = seen.nats / seen.tokens
    scores = PictureScores(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=seen.nats / math.log(2) / num_bytes if num_bytes else None,
        tokens=seen.tokens,
        bytes=num_bytes,
        right=seen.right / seen.conversations,
        conversations=seen.conversations,
        control_loss=of_others.nats / of_others.tokens if of_others.tokens else None,
        control_right=of_others.right / of_others.conversations if of_others.tokens else None,
    )
    notes = _notes(num_long, num_texts)
    if control and not of_others.conversations:
        notes.append("no control: it takes two conversations with different pictures")
    return scores, notes


def _notes(num_long: int, num_texts: int) -> list[str]:
    notes = []
    if num_long:
        left_out = counted(num_long, "conversations")
        notes.append(f"left out: {left_out} longer than the model's context, as in training")
    if num_texts:
        notes.append(f"{counted(num_texts, 'conversations')} without pictures have no control")
    return notes


def _added(sums: Scored, more: Scored) -> Scored:
    return Scored(
        nats=sums.nats + more.nats,
        tokens=sums.tokens + more.tokens,
        right=sums.right + more.right,
        conversations=sums.conversations + more.conversations,
    )


def _pictures(example: Example) -> list[str]:
    return pictures_of(example.prompt) + pictures_of(example.responses[0])


def _exchanged(examples: Sequence[Example]) -> list[Example]:
    """Each with pictures of another, in a random order that is the same every time. Those that would keep their own
    are left out.
    """
    own = [_pictures(example) for example in examples]
    references = [reference for each in own for reference in each]
    in_order = list(references)
    draw = random.Random(0)
    while references == in_order and len(set(references)) > 1:
        draw.shuffle(references)
    exchanged = []
    start = 0
    for example, before in zip(examples, own, strict=True):
        after = references[start : start + len(before)]
        start += len(before)
        if after == before:
            continue
        remaining = iter(after)
        turns = _with_pictures(example.prompt, remaining)
        responses = tuple(_with_pictures(each, remaining) for each in example.responses[:1])
        exchanged.append(replace(example, prompt=turns, responses=responses))
    return exchanged


def _with_pictures(
    turns: str | tuple[Message, ...], references: Iterator[str]
) -> str | tuple[Message, ...]:
    if isinstance(turns, str):
        return turns
    return tuple(
        replace(turn, pictures=tuple(next(references) for _ in turn.pictures)) for turn in turns
    )


def _encoded(
    renderer: Renderer, examples: Sequence[Example]
) -> Iterator[tuple[Example, _Conversation]]:
    """Raises UserError for an example that is no conversation, and for a damaged picture."""
    for example in examples:
        if example.kind not in ("chat", "completion"):
            raise UserError(
                f"scored with pictures are conversations, and this is a {example.kind}",
                where=example.source,
                fix="give rows with messages, or with a prompt and a completion",
            )
    for example, encoded in zip(examples, renderer.encode_batch(list(examples)), strict=True):
        if isinstance(encoded, BadRow):
            raise encoded
        text = encoded[0]
        scored = [at for at, is_scored in enumerate(text.loss_mask) if is_scored and at]
        yield example, _Conversation(text.ids, text.pictures, scored)


def _scores(
    decoder: Decoder, encoder: PictureEncoder, conversations: Sequence[_Conversation]
) -> Scored:
    sums = Scored(0.0, 0, 0, 0)
    conversations = [each for each in conversations if each.scored]
    lengths = [len(each.ids) for each in conversations]
    with eval_mode(decoder):
        for numbers in forward_batches(lengths, TOKENS_A_FORWARD):
            batch = [conversations[number] for number in numbers]
            sums = _added(sums, _forward(decoder, encoder, batch))
    return sums


def _forward(decoder: Decoder, encoder: PictureEncoder, batch: Sequence[_Conversation]) -> Scored:
    """Padding is at the end, outside causal attention; the first is the longest."""
    width = len(batch[0].ids)
    tokens_BT = torch.zeros(len(batch), width, dtype=torch.int64)
    axes_3BT = torch.arange(width).expand(3, len(batch), -1).clone()
    seen = list[SeenPictures]()
    positions = list[int]()
    labels = list[int]()
    for row, conversation in enumerate(batch):
        # What the tower is given of a picture is large: it lives as long as its batch.
        ids = encoder.prompt(conversation.ids, conversation.pictures)
        tokens_BT[row, : len(ids)] = torch.tensor(list(ids))
        axes_3BT[:, row, : len(ids)] = axes_in_piece(ids, 0, len(ids))
        of_row = seen_in_piece(decoder, ids, 0, len(ids))
        if of_row is not None:
            seen.append(replace(of_row, places_N=of_row.places_N + row * width))
        # The logits of a position are of the token after it.
        positions += [row * width + at - 1 for at in conversation.scored]
        labels += [ids[at] for at in conversation.scored]

    vision = decoder.vision
    device = decoder.device
    output: Output = decoder(
        sent(tokens_BT, device),
        pictures=_together(seen),
        axes_3BT=sent(axes_3BT, device) if vision and vision.vision.axes else None,
        head=ScoresAt.of(positions, labels, decoder),
    )
    scores_2N = output.head.double().cpu()
    by_row = scores_2N.split([len(each.scored) for each in batch], 1)
    return Scored(
        nats=-float(scores_2N[0].sum()),
        tokens=len(labels),
        right=sum(bool(each_2C[1].all()) for each_2C in by_row),
        conversations=len(batch),
    )


def _together(seen: Sequence[SeenPictures]) -> SeenPictures | None:
    """Those of all rows."""
    if not seen:
        return None
    deep = zip(*(each.deep_features for each in seen), strict=True)
    return SeenPictures(
        torch.cat([each.places_N for each in seen]),
        torch.cat([each.features_ND for each in seen]),
        tuple(torch.cat(of_layer) for of_layer in deep),
        both_ways=seen[0].both_ways,
    )
