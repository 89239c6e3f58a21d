"""Verification of a GGUF file against the model that it was made from: every tensor, the token ids and the template.

What llama.cpp computes from such a file is compared in `tests/export/gguf_graph_oracle.py`, for every family and type.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.data.chat.render import Renderer
from bloomery.data.examples import Message
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.export.gguf_format import GgufTensor, composes, computed_tensors, gguf_tensors
from bloomery.export.gguf_import import (
    StoredGgufTensor,
    dequantized_tensor,
    read_gguf,
    tokenizer_of,
)
from bloomery.facts.config import ModelConfig

# Texts that tokenizers are known to split in different ways. The last one is not normalized (NFC).
TEXTS = (
    "",
    " ",
    "Hello world",
    "def f(x):\n    return x + 1\n",
    "  two  spaces\tand tabs\n\n\n",
    "größer naïve café",
    "東京 世界 カタカナ 한국어",
    "🙂🙃 👩‍💻",
    "I'll see YOU'RE 2026 12345 3.14e-5",
    "<s> </s> <unk> <|x|>",
    "x==y && !z || a_b->c[0];",
    " leading and trailing ",
    "\r\n\r\n mixed\r line\n ends",
    "العربية हिन्दी ไทย",
    "https://example.com/a?b=c#d",
    "½ ² Ⅷ «quoted» … — $5",
    "A" * 70,
    "\x00\x7f\x1b",
    "ﬁ e\u0301 Å",
)
CHAT = (
    Message("user", "Hello! What's 2 + 2?"),
    Message("assistant", "4"),
    Message("user", " And\n3?"),
)

# Rounding to nearest with 11 and 8 significant bits; below them float16 has steps of 2^-24.
ROUNDING = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8}
SMALLEST_STEP = {"F32": 0.0, "F16": 2.0**-24, "BF16": 0.0}
# Of the largest magnitude in a block of numbers that share a scale: the block's size, and the largest error. q8_0 has
# 127 levels on each side; q4_0 and q5_0 have one level less on the side away from the largest number; q5_1 has 31 steps
# from the smallest to the largest. Scales are float16. llama-quantize fits the scales of K types by least squares,
# which moves a number by two of its 2^bits steps at most.
BLOCK_ERRORS = {
    "Q8_0": (32, 1 / 254 + 2.0**-11),
    "Q4_0": (32, 1 / 8 + 2.0**-11),
    "Q5_0": (32, 1 / 16 + 2.0**-11),
    "Q5_1": (32, 1 / 31 + 3 * 2.0**-11),
    "Q4_K": (256, 1 / 4),
    "Q5_K": (256, 1 / 8),
    "Q6_K": (256, 1 / 16),
}


def verify_gguf(
    path: Path,
    config: ModelConfig,
    source_rows: Callable[[str], Iterator[Tensor]],
    tokenizer: Tokenizer,
    *,
    where: Path,
) -> tuple[str, ...]:
    """One sentence per check that passed. Raises UserError for the first that does not; `where` is its place.

    `source_rows`: a parameter of the model by name, a few rows at a time, as it was given to the writer.
    """
    metadata, tensors = read_gguf(path)
    file_tokenizer = tokenizer_of(metadata, path)
    return (
        _check_tensors(tensors, config, source_rows, where),
        _check_tokens(file_tokenizer, tokenizer, where),
        *_check_template(file_tokenizer, tokenizer, where),
    )


def error_bound(values: Tensor, tensor_type: str) -> Tensor:
    """The largest error of each number when float32 `values` [..., columns] are stored as a type of GGUF.

    Raises UserError for a type that no export writes.
    """
    magnitudes = values.abs()
    if tensor_type in ROUNDING:
        return magnitudes * ROUNDING[tensor_type] + SMALLEST_STEP[tensor_type]
    if tensor_type not in BLOCK_ERRORS:
        raise UserError(
            f"no error bound is known for the type {tensor_type}",
            where="--type",
            fix="add --no-verify to export without this check",
        )
    block_size, share = BLOCK_ERRORS[tensor_type]
    blocks = magnitudes.reshape(-1, block_size)
    # A scale below float16's normal numbers is rounded to a step of 2^-24, and multiplies up to 127 levels.
    bounds = blocks.amax(1, keepdim=True) * share + 127 * 2.0**-25
    return bounds.expand_as(blocks).reshape(values.shape)


def _check_tensors(
    tensors: dict[str, StoredGgufTensor],
    config: ModelConfig,
    source_rows: Callable[[str], Iterator[Tensor]],
    where: Path,
) -> str:
    """Compares every tensor of the file, dequantized_tensor, with the numbers that it was made from."""
    pieces = gguf_tensors(config)
    computed = {name: torch.from_numpy(values) for name, values in computed_tensors(config).items()}
    names = {piece.name for piece in pieces} | computed.keys()
    if names != tensors.keys():
        name = min(names ^ tensors.keys())
        problem = (
            f"{name} is missing in the file" if name in names else f"{name} is not the model's"
        )
        raise UserError(problem, where=str(where), fix="report this bug")

    for number, piece in enumerate(pieces, 1):
        progress(f"comparing tensor {number:,} of {len(pieces):,}")
        block = tensors[piece.name]
        shape = tuple(reversed(block.shape))
        if shape != piece.shape:
            problem = (
                f"{piece.name} of the file is {list(shape)}, and the model's {list(piece.shape)}"
            )
            raise UserError(problem, where=str(where), fix="report this bug")
        start = 0
        for expected in _expected_rows(piece, source_rows):
            stored = dequantized_tensor(block.rows(start, start + len(expected)))
            start += len(expected)
            share = error_share(stored, expected, block.tensor_type.name)
            if not share <= 1.0:
                raise UserError(
                    f"{piece.name} of the file is not the model's: its error is "
                    f"{share:.2g} times the bound of {block.tensor_type.name.lower()}",
                    where=str(where),
                    fix="add --no-verify to export without this check; report this bug",
                )
    for name, expected in computed.items():
        if not torch.equal(dequantized_tensor(tensors[name]), expected):
            raise UserError(
                f"{name} of the file is not the model's", where=str(where), fix="report this bug"
            )
    types = ", ".join(sorted({block.tensor_type.name.lower() for block in tensors.values()}))
    return f"tensors     all {len(tensors)} equal the model's within the rounding of {types}"


def _expected_rows(
    piece: GgufTensor, source_rows: Callable[[str], Iterator[Tensor]]
) -> Iterator[Tensor]:
    """The numbers of a tensor in the file's order: where rows are reordered, as of q and k, all at once."""
    if piece.moves_rows:
        # The source reuses the memory of its rows, so that they are copied before the next are taken.
        all_rows = [rows.float().clone() for part in piece.parts for rows in source_rows(part)]
        yield piece.apply(torch.cat(all_rows))
        return
    for part in piece.parts:
        for rows in source_rows(part):
            yield piece.as_rows(piece.apply(rows.float()))


def error_share(stored: Tensor, expected: Tensor, tensor_type: str) -> float:
    """The largest error as a share of its bound; 0 where both are 0."""
    errors = (stored - expected).abs()
    # float32 rounds the sums above: a bound may be missed by its last bits.
    bounds = error_bound(expected, tensor_type) * (1 + 1e-5)
    shares = torch.where(errors == 0, 0.0, errors / bounds)
    return float(shares.max())


def _check_tokens(file_tokenizer: Tokenizer, tokenizer: Tokenizer, where: Path) -> str:
    # llama.cpp does not normalize Unicode, so that the text that is not normalized has other tokens there.
    texts = TEXTS[:-1] if composes(tokenizer.description) else TEXTS
    for text in texts:
        (expected_ids, _) = tokenizer.encode_places([text])[0]
        (ids, _) = file_tokenizer.encode_places([text])[0]
        if ids != expected_ids:
            raise UserError(
                f"the tokenizer of the file gives other tokens for {text[:40]!r}: {ids[:8]} and {expected_ids[:8]}",
                where=str(where),
                fix="add --no-verify to export without this check",
            )
    return f"token ids   equal for {len(texts)} texts"


def _check_template(file_tokenizer: Tokenizer, tokenizer: Tokenizer, where: Path) -> Iterator[str]:
    """The template in the file, with the special tokens of the file, writes the same prompt, of the same tokens."""
    if "default" not in own_templates(tokenizer.config):
        return
    if "default" not in own_templates(file_tokenizer.config):
        raise UserError(
            "the chat template is not in the file", where=str(where), fix="report this bug"
        )
    prompts = []
    for one in (file_tokenizer, tokenizer):
        with Renderer(one, template=None, train_on="assistant") as renderer:
            prompts.append(renderer.prompt(CHAT))
    if prompts[0] != prompts[1]:
        raise UserError(
            "the chat template of the file writes another prompt than the tokenizer's",
            where=str(where),
            fix="add --no-verify to export without this check",
        )
    yield f"template    writes the same prompt, {len(prompts[1])} tokens"
