"""The matrix products of a LoRA step and nothing else, paced: `side_products.py FOLDER OVERRIDE...`.

A lower bound of the time that any step of the folder's recipe takes in the plan's precision, on the tokens of
Bloomery's own steps: forward and input gradients of every frozen matrix over real tokens (no padding), the LoRA
matrices, and the head over
loss tokens. Nothing is computed that a step can do without: the first layer's q, k and v need no input gradients, as
the embeddings are frozen, and behind the keys and values of the last layer only loss tokens count. Of attention
the two products of forward and the four of backward over the pairs of tokens that its causal mask and its documents
leave. Left out: norms, activation functions, softmax, optimizer, and every copy; results are written over memory that
is already there.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from paced import Ended, Pace
from side_bloomery import planned
from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import layers
from bloomery.infer.forward import matmul_dtype
from bloomery.plan.types import RunPlan

CHUNK = 256  # loss tokens that the head takes at once; logits of all would not stay in the cache


@dataclass(frozen=True)
class Linear:
    """y = x W^T, W [outputs, inputs]. `pair`: LoRA's A [R, inputs] and B [outputs, R]."""

    weight: Tensor
    pair: tuple[Tensor, Tensor] | None
    needs_input_grad: bool
    loss_tokens_only: bool


def linears(config: ModelConfig, rank: int, targets: list[str]) -> list[Linear]:
    """Random matrices of the model's shapes: speed does not depend on the numbers."""
    found, stack = [], layers(config)
    for layer in stack:
        for matrix in layer.matrices:
            leaf = matrix.name.rpartition(".")[2]
            shape = (matrix.outputs, matrix.inputs)
            pair = (
                (torch.randn(rank, shape[1]), torch.randn(shape[0], rank))
                if leaf in targets
                else None
            )
            behind = layer is stack[-1] and leaf not in ("k_proj", "v_proj")
            first = layer is stack[0] and leaf in ("q_proj", "k_proj", "v_proj")
            found.append(Linear(torch.randn(shape), pair, not first, behind))
    return found


class Products:
    """One step's products; memory for the results is allocated once."""

    def __init__(
        self, plan: RunPlan, rank: int, targets: list[str], most: int, sequences: int
    ) -> None:
        config = plan.model.config
        torch.set_default_dtype(matmul_dtype(plan.train.precision))  # of every matrix below
        self.linears = linears(config, rank, targets)
        self.head = torch.randn(config.vocab_size, config.hidden_size)
        widths = {size for linear in self.linears for size in linear.weight.shape} | {rank}
        self.inputs = {width: torch.randn(most, width) for width in widths}
        self.outputs = {width: torch.empty(most, width) for width in widths}
        self.logits = torch.randn(CHUNK, config.vocab_size)
        self.layers = config.num_layers
        first_layer = layers(config)[0]  # the plan's layers are alike
        heads = first_layer.num_heads
        width = first_layer.head_dim
        self.queries, self.keys = torch.randn(heads, most, width), torch.randn(heads, most, width)
        self.heads_out, self.scores = (
            torch.empty_like(self.queries),
            torch.randn(heads * most * most // sequences),
        )

    def step(self, tokens: int, loss_tokens: int, pairs: int) -> None:
        for linear in self.linears:
            self.linear(linear, loss_tokens if linear.loss_tokens_only else tokens)
        for _ in range(self.layers):
            self.attention(tokens, pairs // tokens)
        for start in range(0, loss_tokens, CHUNK):
            count = min(CHUNK, loss_tokens - start)
            width = self.head.shape[1]
            torch.mm(self.inputs[width][:count], self.head.T, out=self.logits[:count])
            torch.mm(self.logits[:count], self.head, out=self.outputs[width][:count])

    def attention(self, tokens: int, seen: int) -> None:
        """`seen`: tokens that a token attends to, on average."""
        q, k = self.queries[:, :tokens], self.keys[:, :seen]
        over_q, over_k = self.heads_out[:, :tokens], self.heads_out[:, :seen]
        scores = self.scores[: len(q) * tokens * seen].view(len(q), tokens, seen)
        for _ in range(2):  # scores, and their gradients from those of the output
            torch.bmm(q, k.mT, out=scores)
        for _ in range(2):  # the output, and the gradients of the queries
            torch.bmm(scores, k, out=over_q)
        for _ in range(2):  # the gradients of keys and values
            torch.bmm(scores.mT, q, out=over_k)

    def linear(self, linear: Linear, count: int) -> None:
        """Forward, then the gradients of the input and of the pair."""
        outputs, inputs = linear.weight.shape
        x, dy = self.inputs[inputs][:count], self.inputs[outputs][:count]
        y, dx = self.outputs[outputs][:count], self.outputs[inputs][:count]
        torch.mm(x, linear.weight.T, out=y)
        if linear.needs_input_grad:
            torch.mm(dy, linear.weight, out=dx)
        if linear.pair is not None:
            A, B = linear.pair
            inner = self.outputs[len(A)][:count]
            torch.mm(x, A.T, out=inner)
            y.addmm_(inner, B.T)
            torch.mm(dy.T, inner)  # of B
            torch.mm(dy, B, out=inner)
            torch.mm(inner.T, x)  # of A
            if linear.needs_input_grad:
                dx.addmm_(inner, A)


def counts(batch: Batch) -> tuple[int, int, int]:
    """Tokens of the text, loss tokens, and pairs of a token and one that it attends to."""
    real = batch.documents >= 0
    pairs = 0
    for documents in (row[kept] for row, kept in zip(batch.documents, real, strict=True)):
        lengths = documents.unique_consecutive(return_counts=True)[1]
        pairs += int((lengths * (lengths + 1) // 2).sum())
    return int(real.sum()), int(batch.loss_mask.sum()), pairs


def main() -> None:
    folder = Path(sys.argv[1])
    pace, plan = Pace(), planned(folder, sys.argv[2:])
    asked = json.loads((folder / "bench.json").read_text())
    data, sequences = plan.data, plan.train.accumulation * plan.train.micro_batch_size
    loader = Loader(
        data.prepared,
        sequence_length=data.sequence_length,
        layout=data.layout,
        seed=plan.train.seed,
    )
    cursor = Cursor(plan.train.seed, 0)
    products = Products(
        plan, asked["rank"], asked["target_modules"], sequences * data.sequence_length, sequences
    )
    while True:
        tokens, loss_tokens, pairs = counts(loader.batch(cursor, sequences))
        cursor = Cursor(cursor.seed, cursor.consumed + sequences)
        try:
            pace.begin()
        except Ended:
            return
        products.step(tokens, loss_tokens, pairs)
        pace.stop()
        pace.tell(None, loss_tokens)


if __name__ == "__main__":
    main()
