"""Selective checkpointing keeps what each attention backend computed: counted on fake tensors of a CPU and a GPU."""

from collections import Counter
from typing import Any

import pytest
import torch
from plans_for_tests import tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.facts.attention import BACKENDS
from bloomery.facts.counting import layers
from bloomery.model.attention import attend
from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.decoder import Block
from bloomery.parallel.apply import PRODUCTS, checkpoint_block

CONFIG = tiny_config(num_heads=2, num_kv_heads=2)


class Calls(TorchDispatchMode):
    """Counts operators by the names that `BACKENDS` has for them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


def calls_of_a_step(backend: str, checkpointing: str) -> Counter[str]:
    # PyTorch picks a kernel of a CPU for the two that run anywhere.
    device = "cuda" if BACKENDS[backend].needs in ("varlen", "flex", "triton") else "cpu"
    with FakeTensorMode(allow_non_fake_inputs=True), Calls() as calls:
        with torch.device(device):
            block = Block(CONFIG, layers(CONFIG)[0], backend)
            x_BTD = torch.randn(1, 128, CONFIG.hidden_size, requires_grad=True)
        checkpoint_block(block, checkpointing, index=0)
        with torch.autocast(device, torch.bfloat16):
            block(x_BTD, None, DocumentLayout()).sum().backward()
    return calls.counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_not_computed_again(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_compiled_flex", lambda: flex_attention)
    with torch.compiler.set_stance("force_eager"):  # flex_attention has its mask compiled, too
        plain = calls_of_a_step(backend, "none")
        selective = calls_of_a_step(backend, "selective")
    operators = BACKENDS[backend].operators
    # Of `math` the products are kept. Of the others one operator computes all, and a table that lacks it keeps nothing.
    assert bool(operators) == (backend != "math")
    assert sum(plain[name] for name in operators) == bool(operators)
    assert {name: selective[name] for name in (*operators, *PRODUCTS)} == {
        name: plain[name] for name in (*operators, *PRODUCTS)
    }
