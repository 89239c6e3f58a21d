"""Gradients are the same wherever activations wait, whatever is computed again, and whatever is frozen."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from bloomery.facts.config import ModelConfig
from bloomery.model.adapters.lora import adapt, init_adapters
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import init_weights, quantize_model
from bloomery.parallel import offload
from bloomery.parallel.apply import checkpoint_block
from bloomery.parallel.offload import offload_activations
from bloomery.recipe.schema import Lora, Quantize

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=64,
    qk_norm="head",
    tie_embeddings=True,
    family="qwen3",
    residual_dropout=0.1,
)
MODES = ["none", "selective", "full", "every-2"]
LORA = Lora(kind="lora", rank=4, dropout=0.2, target_modules=["q_proj", "v_proj", "down_proj"])


def model(*, adapted: bool = False) -> Decoder:
    decoder = Decoder(CONFIG, attention="mask")
    if adapted:
        adapt(decoder, LORA)
    init_weights(decoder, 0)
    init_adapters(decoder, 0)
    if adapted:  # lora_B begins at zero, and would hide every gradient of lora_A
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_B"):
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return decoder


def gradients(decoder: Decoder, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        logits = decoder(tokens, documents_BT=torch.zeros_like(tokens)).head
    torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_are_the_same_bit_for_bit(mode, adapted, away, dtype):
    plain, changed = model(adapted=adapted), model(adapted=adapted)
    for index, block in enumerate(changed.model.layers):
        checkpoint_block(block, mode, index=index)
    if away:
        offload_activations(changed.model, threshold=1)
    expected, found = gradients(plain, dtype), gradients(changed, dtype)
    assert expected.keys() == found.keys()
    assert len(expected) == (18 if adapted else len(list(plain.parameters())))
    assert all(bool(value.any()) for value in expected.values())
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def counted(monkeypatch) -> list[Tensor]:
    gone: list[Tensor] = []
    to_host = offload._OffloadHooks._to_host

    def noted(self, tensor, number):
        gone.append(tensor)
        return to_host(self, tensor, number)

    monkeypatch.setattr(offload._OffloadHooks, "_to_host", noted)
    return gone


def test_of_checkpointed_blocks_their_inputs_go_and_weights_never(monkeypatch):
    gone, decoder = counted(monkeypatch), model()
    for index, block in enumerate(decoder.model.layers):
        checkpoint_block(block, "full", index=index)
    offload_activations(decoder.model, threshold=2 * 24 * 32 * 4)  # the residual stream's size
    gradients(decoder)
    assert len(gone) == 4  # three blocks and the last norm
    assert {tuple(tensor.shape) for tensor in gone} == {(2, 24, 32)}
    places = {p.data_ptr() for p in decoder.parameters()}
    assert not any(tensor.data_ptr() in places for tensor in gone)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = x.tanh()
        return self.q(inner) + self.k(inner)


def test_what_several_keep_goes_once_and_comes_once(monkeypatch):
    gone = counted(monkeypatch)
    layer = Twice()
    offload_activations(layer, threshold=1)
    x = torch.randn(5, 8, requires_grad=True)
    layer(x).sum().backward()
    shared = [tensor for tensor in gone if torch.equal(tensor, x.detach().tanh())]
    assert len(shared) == 1  # tanh itself and both products keep it


def test_memory_of_activations_is_free_between_forward_and_backward():
    class Inner(nn.Module):
        def forward(self, x):
            inner = x.exp()
            Inner.seen = weakref.ref(inner.untyped_storage())
            return inner.square()

    for away in (False, True):
        module = Inner()
        if away:
            offload_activations(module, threshold=1)
        out = module(torch.randn(9, requires_grad=True))
        gc.collect()
        assert (Inner.seen() is None) == away
        out.sum().backward()


def test_evaluation_keeps_nothing(monkeypatch):
    gone, decoder = counted(monkeypatch), model()
    offload_activations(decoder.model, threshold=1)
    with torch.no_grad():
        decoder(torch.zeros(1, 4, dtype=torch.int64))
    assert gone == []


def test_a_forward_that_fails_leaves_no_hooks(monkeypatch):
    gone, decoder = counted(monkeypatch), model()
    offload_activations(decoder.model, threshold=1)
    with pytest.raises(IndexError):
        decoder(torch.full((1, 4), 99))
    gone.clear()
    torch.randn(3, requires_grad=True).exp().sum().backward()
    assert gone == []
    gradients(decoder)
    assert gone != []


def test_a_quantised_base_stays_where_it_is(monkeypatch):
    """Its bits are kept for backward by every product, and are no activation."""
    decoder = model(adapted=True)
    quantize_model(decoder, Quantize(kind="nf4"))
    expected = gradients(decoder)
    decoder.zero_grad()
    sent: list[int] = []
    to_host = offload._OffloadHooks._to_host
    monkeypatch.setattr(
        offload._OffloadHooks,
        "_to_host",
        lambda self, x, number: (sent.append(x.data_ptr()), to_host(self, x, number))[1],
    )
    offload_activations(decoder.model, threshold=1)
    found = gradients(decoder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sent and not {buffer.data_ptr() for buffer in decoder.buffers() if buffer.numel()} & set(
        sent
    )
