"""Gated delta nets: chunks against single tokens, packed documents against each alone in transformers, the cache."""

from pathlib import Path

import pytest
import torch
from tiny_models import saved_reference
from torch import Tensor
from torch.testing import assert_close

from bloomery.model.attention.attend import layout_of
from bloomery.model.cache import Cache
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import load_decoder
from bloomery.model.mixers.delta_rule import chunked_delta_rule, delta_rule_step
from bloomery.parallel.apply import checkpoint_block

LENGTHS = (37, 1, 64, 90, 5)


def drawn(length: int, *, alike: bool = False) -> list[Tensor]:
    """Queries, keys, values, decays, strengths of two texts and three heads; `alike`: one key, written whole."""
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(2, 3, length, 8, generator=generator) for _ in range(2))
    if alike:
        k = k[:, :, :1].expand_as(k)
    v = torch.randn(2, 3, length, 12, generator=generator)
    decay = -torch.rand(2, 3, length, generator=generator)
    beta = torch.ones(2, 3, length) if alike else torch.rand(2, 3, length, generator=generator)
    return [q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v, decay, beta]


def stepwise(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.zeros(2, 3, 8, 12)
    outputs = [
        delta_rule_step(q[:, :, t], k[:, :, t], v[:, :, t], decay[:, :, t], beta[:, :, t], state)
        for t in range(q.shape[2])
    ]
    return torch.stack(outputs, 2), state


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_chunks_compute_what_single_tokens_do(length: int, alike: bool) -> None:
    inputs = drawn(length, alike=alike)
    outputs, state = chunked_delta_rule(*inputs)
    expected_outputs, expected_state = stepwise(*inputs)
    assert_close(outputs, expected_outputs, atol=2e-5, rtol=0)
    assert_close(state, expected_state, atol=2e-5, rtol=0)


def packed(decoder: Decoder, rows: list[Tensor]) -> Tensor:
    """The logits of documents in one row."""
    documents = torch.cat([torch.full_like(row, number) for number, row in enumerate(rows)], 1)
    positions = torch.cat([torch.arange(row.shape[1])[None] for row in rows], 1)
    logits: Tensor = decoder(
        torch.cat(rows, 1), positions_BT=positions, documents_BT=documents
    ).head
    return logits


def packed_and_alone(folder: Path) -> tuple[Decoder, list[Tensor]]:
    saved_reference("qwen3.5", folder)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 131, (1, length), generator=generator) for length in LENGTHS]
    return load_decoder(folder, attention="mask"), rows


def gradients_of(model: torch.nn.Module, logits: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def test_packed_documents_are_each_alone_to_the_last_digits_of_float64(tmp_path: Path) -> None:
    decoder, rows = packed_and_alone(tmp_path)
    decoder.double()
    alone = torch.cat([decoder(row).head for row in rows], 1)
    logits = packed(decoder, rows)
    assert_close(logits, alone, atol=1e-12, rtol=0)
    expected = gradients_of(decoder, alone)
    for name, gradient in gradients_of(decoder, logits).items():
        assert_close(gradient, expected[name], atol=1e-9, rtol=1e-9, msg=name)


def test_packed_documents_are_each_alone_in_transformers(tmp_path: Path) -> None:
    """Transformers without flash-linear-attention cannot pack: its second document sees the first one. Its own
    float32 is 6e-5 from float64 on these logits, whose deviation is 1.4."""
    their_model = saved_reference("qwen3.5", tmp_path)
    decoder, rows = packed_and_alone(tmp_path)
    expected = torch.cat([their_model(row).logits for row in rows], 1)
    logits = packed(decoder, rows)
    assert_close(logits, expected, atol=2e-4, rtol=0)
    their_gradients = gradients_of(their_model, expected)
    for name, gradient in gradients_of(decoder, logits).items():
        error = (gradient - their_gradients[name]).norm() / their_gradients[name].norm()
        assert float(error) < 1e-4, name


def test_a_convolution_over_a_border_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would miss if documents of a random model hardly saw each other."""
    decoder, rows = packed_and_alone(tmp_path)
    with torch.no_grad():
        expected = packed(decoder, rows)
        leaks = []
        for name in ("convolution._inside_document", "delta_net.chunked_delta_rule"):
            with monkeypatch.context() as patch:
                if name.startswith("convolution"):
                    patch.setattr(f"bloomery.model.mixers.{name}", lambda tap, _first, _n: tap)
                else:

                    def leaky(*inputs: Tensor, first_BT: Tensor):
                        del first_BT
                        return chunked_delta_rule(*inputs)

                    patch.setattr(f"bloomery.model.mixers.{name}", leaky)
                leaks.append(float((packed(decoder, rows) - expected).abs().max()))
    assert min(leaks) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(40,), (1,) * 40, (3, 1, 1, 30, 5), (64, 1, 65, 1)])
def test_the_cache_continues_a_text(tmp_path: Path, pieces: tuple[int, ...]) -> None:
    saved_reference("qwen3.5", tmp_path)
    decoder = load_decoder(tmp_path).double()
    tokens = torch.randint(3, 131, (2, sum(pieces)), generator=torch.Generator().manual_seed(2))
    cache = Cache(decoder.config, tokens.shape[1], slots=2)
    cache.rows = range(2)
    logits = torch.cat(
        [decoder(piece, cache=cache).head for piece in tokens.split(list(pieces), 1)], 1
    )
    assert_close(logits, decoder(tokens).head, atol=1e-12, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen3.5", "lfm2"])
def test_a_used_slot_begins_a_new_text(tmp_path: Path, case: str) -> None:
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path)
    first, second = torch.randint(3, 131, (2, 1, 20), generator=torch.Generator().manual_seed(3))
    cache = Cache(decoder.config, 64)
    decoder(first, cache=cache)
    assert not cache.cut(10), "a state has no token to take out"
    assert cache.cut(0)
    assert_close(decoder(second, cache=cache).head, decoder(second).head, atol=2e-5, rtol=0)


def test_heads_in_groups_compute_what_all_at_once_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key heads one by one, each with the two value heads that share it."""
    decoder, rows = packed_and_alone(tmp_path)
    decoder.double()
    logits = packed(decoder, rows)
    expected = gradients_of(decoder, logits)
    monkeypatch.setattr("bloomery.facts.limits.CPU_DELTA_VALUES", 1)
    grouped_logits = packed(decoder, rows)
    assert_close(grouped_logits, logits, atol=1e-12, rtol=0)
    for name, gradient in gradients_of(decoder, grouped_logits).items():
        assert_close(gradient, expected[name], atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("mode", ["full", "selective", "every-2"])
def test_recomputed_layers_have_the_same_gradients(tmp_path: Path, mode: str) -> None:
    """Bit for bit, and products inside a delta net are not kept where the results of matmuls are."""
    decoder, rows = packed_and_alone(tmp_path)
    expected = gradients_of(decoder, packed(decoder, rows))
    for index, block in enumerate(decoder.model.layers):
        checkpoint_block(block, mode, index=index)
    for name, gradient in gradients_of(decoder, packed(decoder, rows)).items():
        assert torch.equal(gradient, expected[name]), name


def test_backward_keeps_the_projections_alone(tmp_path: Path) -> None:
    """Of what is between a delta net's projections: nothing that is larger than one of them."""
    decoder, _ = packed_and_alone(tmp_path)
    mixer = decoder.model.layers[0].mixer
    row_BTD = torch.randn(1, 200, decoder.config.hidden_size)
    kept = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layout = layout_of(None, backend="math")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mixer(row_BTD, None, layout, None)
    parameters = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
    sizes = mixer.sizes
    projected = 2 * sizes.key_width + 2 * sizes.value_width + 2 * sizes.num_value_heads
    width = decoder.config.hidden_size + projected + sizes.value_width
    assert (
        sum(size for pointer, size in kept.items() if pointer not in parameters) == 4 * 200 * width
    )
