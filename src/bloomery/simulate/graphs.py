"""Compiled blocks of a simulated step.

torch.compile cuts the graph of a block's forward and backward where the fewest bytes cross (the partitioner of
AOTAutograd, which Inductor uses too). The same two graphs run here operator by operator.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.cache import VisiblePast
from bloomery.model.decoder import Block
from bloomery.model.rope import Rotary
from bloomery.parallel.apply import selective_contexts
from bloomery.simulate.tracker import MemoryTracker

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


# Each part of a rotation that is no tensor, with its name; None in place of a tensor.
_Rotation = tuple[tuple[str, Any] | None, ...]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def compile_blocks(blocks: Iterable[Block], tracker: MemoryTracker, *, selective: bool) -> None:
    """In place: blocks that are alike share a pair of graphs, traced when the first of them runs.

    `selective`: selective activation checkpointing is a part of the graphs, and decides where they are cut.
    """
    shared: dict[object, _Graphs] = {}
    for block in blocks:
        graphs = shared.setdefault(block.kind, _Graphs(block, tracker, selective=selective))
        block.forward = graphs.forward_of(block)  # type: ignore[method-assign]  # a seam of nn.Module


class _Graphs:
    """A block as two graphs of tensors: parameters, buffers of quantized weights, arguments of forward."""

    def __init__(self, block: Block, tracker: MemoryTracker, *, selective: bool) -> None:
        self._tracker = tracker
        self._inside = nn.Module()
        self._inside.block = block
        self._inside.forward = (
            partial(_selectively_checkpointed, block.forward) if selective else block.forward
        )
        self._names = [
            name for name, _ in (*self._inside.named_parameters(), *self._inside.named_buffers())
        ]
        self._traced: dict[_Rotation | None, Callable[..., Any]] = {}  # None: without a rotation

    def forward_of(self, block: Block) -> Callable[..., Tensor]:
        """What stands for the compiled block."""

        def forward(
            x_BTD: Tensor,
            rotary: Rotary | None,
            layout: DocumentLayout,
            cache: None = None,
            input_BTP: Tensor | None = None,
            lent: VisiblePast | None = None,
        ) -> Any:
            assert cache is None, "training has no cache"
            layout_names = [
                field.name for field in fields(layout) if getattr(layout, field.name) is not None
            ]
            layout_tensors = [getattr(layout, name) for name in layout_names]
            # Of a rotation the tensors go into the graphs; what else it is, the graphs are traced with.
            parts = {} if rotary is None else rotary._asdict()
            tables = [part for part in parts.values() if isinstance(part, Tensor)]
            settings = (
                None
                if rotary is None
                else tuple(
                    None if isinstance(part, Tensor) else (name, part)
                    for name, part in parts.items()
                )
            )
            # Of layers alike all have them, or none.
            own = [] if input_BTP is None else [input_BTP]
            shared = [] if lent is None else [lent.keys, lent.values]
            weights = [*block.parameters(), *block.buffers()]
            inputs = weights, tables, layout_tensors, x_BTD, own, shared
            # The first call traces, which makes tensors that a compiled block does not. What it saves for backward is
            # kept from the hooks of activation checkpointing, which would miss it in the recomputation.
            if settings not in self._traced:
                self._traced[settings] = self._trace(layout_names, settings)
                with self._tracker.unseen(), saved_tensors_hooks(_itself, _itself):
                    self._traced[settings](*inputs)
            return self._traced[settings](*inputs)

        return forward

    def _trace(self, layout_names: list[str], settings: _Rotation | None) -> Callable[..., Any]:
        """The block as a function of tensors whose forward and backward run as two graphs."""
        from functorch.compile import aot_function, min_cut_rematerialization_partition  # type: ignore[import-untyped]  # part of torch
        from torch._inductor.decomposition import select_decomp_table

        # Graphs take tensors alone: the block's arguments are built from them inside.
        def pure(
            weights: list[Tensor],
            tables: list[Tensor],
            layout_tensors: list[Tensor],
            x_BTD: Tensor,
            own: list[Tensor],
            shared: list[Tensor],
        ) -> Any:
            remaining = iter(tables)
            rotary = None
            if settings is not None:
                parts: list[Any] = [
                    next(remaining) if part is None else part[1] for part in settings
                ]
                rotary = Rotary(*parts)
            arguments = (
                x_BTD,
                rotary,
                DocumentLayout(**dict(zip(layout_names, layout_tensors, strict=True))),
                None,
                own[0] if own else None,
                VisiblePast(shared[0], shared[1], None) if shared else None,
            )
            named_weights = dict(zip(self._names, weights, strict=True))
            return torch.func.functional_call(self._inside, named_weights, arguments)

        # In place of Inductor, each graph is run operator by operator. A boxed call gives the graph
        # its inputs to free.
        def compiled(graph: torch.fx.GraphModule, _inputs: object) -> Callable[[list[Tensor]], Any]:
            def run(inputs: list[Tensor]) -> Any:
                return _Fused(graph, self._tracker).boxed_run(inputs)

            run._boxed_call = True  # type: ignore[attr-defined]  # read by aot_function
            return run

        traced: Callable[..., Any] = aot_function(
            pure,
            fw_compiler=compiled,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        return traced


def _selectively_checkpointed(forward: Callable[..., Any], *args: Any) -> Any:
    """As torch.compile traces it, with a number of the checkpointed region, which its partitioner reads."""

    def contexts() -> Any:
        in_forward, in_backward = selective_contexts()
        in_forward.ac_graph_id = 0
        return in_forward, in_backward

    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        early_stop=False,
        context_fn=contexts,
    )


class _Fused(torch.fx.Interpreter):
    """Runs a graph and lets go of each tensor, inputs included, after its last use, as Inductor's code does.

    A result takes memory only where a kernel of a library reads it, straight or through views, or the graph hands it
    out: the rest Inductor keeps in registers.
    """

    def __init__(self, graph: torch.fx.GraphModule, tracker: MemoryTracker) -> None:
        super().__init__(graph)
        self._tracker = tracker
        self._stored = {node for node in graph.graph.nodes if _library(node) or _is_read(node)}

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or n in self._stored:
            return super().run_node(n)
        with self._tracker.unseen():
            return super().run_node(n)


def _library(node: Node) -> bool:
    """Whether Inductor calls a library kernel for it: a matmul, an attention, an operator of ours."""
    registered_elsewhere = getattr(node.target, "namespace", "aten") not in ("aten", "prims")
    return node.target in _PRODUCTS or registered_elsewhere or "attention" in str(node.target)


def _is_read(node: Node) -> bool:
    """Whether memory is read: by a library kernel or as an output, straight or through a view."""
    for user in node.users:
        if user.op == "output" or _library(user):
            return True
        is_view = getattr(user.target, "is_view", False) or user.target is operator.getitem
        if is_view and _is_read(user):
            return True
    return False
