"""What compilation changes of a step's memory, without a compiler.

torch.compile cuts the graph of a block's forward and backward where the fewest bytes cross (the partitioner of
AOTAutograd, which Inductor uses too). Here the same two graphs run operator by operator, and a result takes memory only
where a kernel of a library reads it or the graph hands it out: the rest Inductor keeps in registers.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Node

from bloomery.model import heads
from bloomery.model.attention.attend import Layout
from bloomery.model.decoder import Block
from bloomery.model.rope import Rotary

Unseen = Callable[[], AbstractContextManager[None]]
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


def compile_blocks(blocks: Iterable[Block], unseen: Unseen) -> None:
    """In place: blocks that are alike share a pair of graphs, traced when the first of them runs.

    `unseen`: inside it, what is made takes no memory.
    """
    shared: dict[object, _Graphs] = {}
    for block in blocks:
        graphs = shared.setdefault(block.self_attn.window, _Graphs(block, block.forward, unseen))
        block.forward = _Call(block, graphs)  # type: ignore[method-assign, assignment]


@dataclass
class _Call:
    """A block's forward through graphs that take its parameters, and the buffers of a quantised base."""

    block: Block
    graphs: "_Graphs"

    def __call__(self, x_BTD: Tensor, rotary: Rotary | None, layout: Layout, cache: None = None) -> Tensor:
        assert cache is None, "training has no cache"
        return self.graphs.run([*self.block.parameters(), *self.block.buffers()], x_BTD, rotary, layout)


@contextmanager
def fused_head() -> Iterator[None]:
    """What lies between the head's products is one kernel each way, which holds nothing of its own."""

    def fused(function: Callable[..., Any]) -> Callable[..., Any]:
        return _log_sums if function is heads._log_sums else lambda *_: None

    with mock.patch.object(heads, "_compiled", fused):
        yield


def _log_sums(logits_CV: Tensor, _softcap: float | None) -> Tensor:
    return logits_CV.new_empty(len(logits_CV), dtype=torch.promote_types(logits_CV.dtype, torch.float32))


class _Graphs:
    """One block as two graphs of tensors alone; one pair with rotation and one without."""

    def __init__(self, block: Block, forward: Callable[..., Tensor], unseen: Unseen) -> None:
        self._block, self._forward, self._unseen = block, forward, unseen
        self._names = [name for name, _ in (*block.named_parameters(), *block.named_buffers())]
        self._traced: dict[bool, Callable[..., Tensor]] = {}

    def run(self, parameters: list[Tensor], x_BTD: Tensor, rotary: Rotary | None, layout: Layout) -> Tensor:
        turns = rotary is not None
        if turns not in self._traced:
            self._traced[turns] = self._trace(layout, turns=turns)
        tables = [] if rotary is None else list(rotary)
        return self._traced[turns](parameters, tables, _tensors(layout), x_BTD)

    def _trace(self, layout: Layout, *, turns: bool) -> Callable[..., Tensor]:
        from functorch.compile import (  # type: ignore[import-untyped]  # part of torch
            aot_function,
            min_cut_rematerialization_partition,
        )
        from torch._inductor.decomposition import select_decomp_table
        from torch.nn.utils.stateless import _reparametrize_module

        names = [field.name for field in fields(layout) if getattr(layout, field.name) is not None]

        def whole(parameters: list[Tensor], tables: list[Tensor], seen: list[Tensor], x_BTD: Tensor) -> Tensor:
            given = Layout(**dict(zip(names, seen, strict=True)))
            with _reparametrize_module(self._block, dict(zip(self._names, parameters, strict=True))):
                return self._forward(x_BTD, Rotary(*tables) if turns else None, given)

        traced: Callable[..., Any] = aot_function(
            whole, fw_compiler=self._compile, partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )  # fmt: skip
        return traced

    def _compile(self, graph: torch.fx.GraphModule, _inputs: object) -> Callable[[list[Tensor]], Any]:
        def run(inputs: list[Tensor]) -> Any:
            return _Fused(graph, self._unseen).boxed_run(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]  # read by aot_function
        return run


class _Fused(torch.fx.Interpreter):
    """Runs a graph and lets go of each tensor, inputs included, after its last use, as Inductor's code does."""

    def __init__(self, graph: torch.fx.GraphModule, unseen: Unseen) -> None:
        super().__init__(graph)
        self._unseen = unseen
        self._stored = {node for node in graph.graph.nodes if _library(node) or _is_read(node)}

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or n in self._stored:
            return super().run_node(n)
        with self._unseen():
            return super().run_node(n)


def _library(node: Node) -> bool:
    """Whether Inductor calls somebody else's kernel for it: a matrix product, an attention."""
    return (
        node.target in _PRODUCTS
        or getattr(node.target, "namespace", "aten") not in ("aten", "prims")
        or "attention" in str(node.target)
    )


def _is_read(node: Node) -> bool:
    """Whether a library's kernel, or whoever called the graph, reads it, straight or through views."""
    users = [user for user in node.users if user.op == "call_function"]
    views = [user for user in users if getattr(user.target, "is_view", False) or user.target is operator.getitem]
    return (
        any(user.op == "output" or _library(user) for user in node.users)
        or any(_is_read(view) for view in views)
    )  # fmt: skip


def _tensors(layout: Layout) -> list[Tensor]:
    found = (getattr(layout, field.name) for field in fields(layout))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
