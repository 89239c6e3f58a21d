"""A model whose layers differ in heads, their width, rotation, windows and MLPs. Oracle: a plain torch model."""

import ast
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import bloomery
from bloomery.core.errors import UserError
from bloomery.export.gguf_format import unsupported
from bloomery.facts.config import LayerSizes, ModelConfig, checked_config
from bloomery.facts.counting import head_widths, layers, parameter_shapes
from bloomery.facts.families import FAMILIES
from bloomery.facts.family import Family
from bloomery.facts.hf_config import config_from_hf, config_to_hf
from bloomery.model.adapters.lora import LoraLinear, adapt, init_adapters
from bloomery.model.cache import Cache
from bloomery.model.compiled_step import CompiledStep
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import (
    fresh_decoder,
    load_decoder,
    model_state,
    quantize_model,
    quantized_weights,
    read_model,
    write_model,
)
from bloomery.model.native import Uncompiled
from bloomery.recipe.schema import Lora, Quantize

NARROW = LayerSizes(
    num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, rotary_share=0.5
)
WIDE = LayerSizes(num_heads=2, num_kv_heads=1, head_dim=64, intermediate_size=160)
SINGLE = LayerSizes(num_heads=3, num_kv_heads=3, head_dim=8, intermediate_size=64)
CONFIG = ModelConfig(
    family="uneven",
    vocab_size=61,
    hidden_size=48,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm="head",
    rope_theta=500.0,
    local_rope_theta=100.0,
    sliding_window=(None, 5, None, 5),
    layer_sizes=(NARROW, WIDE, SINGLE, NARROW),
)
TOKENS = torch.arange(20)[None] * 7 % 61
LORA = Lora(kind="lora", rank=4, alpha=8, target_modules=["all-linear"])


def read_sizes(fields, _facts):
    return {"layer_sizes": tuple(LayerSizes(**sizes) for sizes in fields.get("layer_sizes"))}


@pytest.fixture(autouse=True)
def family_of_uneven_models(monkeypatch):
    """A family whose config.json states sizes, windows and frequencies as a ModelConfig does."""
    family = Family(
        "UnevenForCausalLM",
        "Uneven",
        {"qk_norm": "head"},
        defaults={"hidden_act": "silu"},
        windows=lambda fields, _count: tuple(fields.get("windows")),
        extra=read_sizes,
        write=lambda config: {
            "windows": list(config.sliding_window),
            "layer_sizes": [vars(sizes) for sizes in config.layer_sizes],
        },
        has_local_rope=True,
    )
    monkeypatch.setitem(FAMILIES, "uneven", family)


def expected_logits(decoder: Decoder) -> Tensor:
    """Every score of every layer, written down for these four layers alone."""
    state = model_state(decoder)
    sizes = CONFIG.layer_sizes

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).rsqrt() * state[name]

    def rotated(x_BHTE: Tensor, width: int, theta: float) -> Tensor:
        angles = torch.arange(20)[:, None] * theta ** (-torch.arange(0, width, 2) / width)
        first, second = x_BHTE[..., : width // 2], x_BHTE[..., width // 2 : width]
        cos, sin = angles.cos(), angles.sin()
        rotated_part = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((rotated_part, x_BHTE[..., width:]), -1)

    x_BTD = state["model.embed_tokens.weight"][TOKENS]
    for number, layer in enumerate(sizes):
        prefix = f"model.layers.{number}."

        def product(x: Tensor, module: str, prefix: str = prefix) -> Tensor:
            return x @ state[f"{prefix}{module}.weight"].T

        y_BTD = norm(x_BTD, f"{prefix}input_layernorm.weight")
        q, k, v = (
            product(y_BTD, f"self_attn.{name}_proj").unflatten(-1, (-1, layer.head_dim))
            for name in "qkv"
        )
        q = norm(q, f"{prefix}self_attn.q_norm.weight").transpose(1, 2)
        k = norm(k, f"{prefix}self_attn.k_norm.weight").transpose(1, 2)
        has_window = number in (1, 3)
        theta = 100.0 if has_window else 500.0
        width = int(layer.head_dim * layer.rotary_share)
        q, k = rotated(q, width, theta), rotated(k, width, theta)
        copies = layer.num_heads // layer.num_kv_heads
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v.transpose(1, 2)))
        distance = torch.arange(20)[:, None] - torch.arange(20)
        is_hidden = (distance < 0) | (has_window & (distance >= 5))
        scores = q @ k.transpose(-1, -2) / layer.head_dim**0.5
        probabilities = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        y_BTD = (probabilities @ v).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + product(y_BTD, "self_attn.o_proj")

        y_BTD = norm(x_BTD, f"{prefix}post_attention_layernorm.weight")
        inner = F.silu(product(y_BTD, "mlp.gate_proj")) * product(y_BTD, "mlp.up_proj")
        x_BTD = x_BTD + product(inner, "mlp.down_proj")
    return norm(x_BTD, "model.norm.weight") @ state["lm_head.weight"].T


def decoder_of_uneven_layers() -> Decoder:
    return fresh_decoder(CONFIG, seed=0, dtype=torch.float32).eval()


def test_logits_are_those_of_a_plain_model() -> None:
    decoder = decoder_of_uneven_layers()
    with torch.no_grad():
        assert_close(decoder(TOKENS).head, expected_logits(decoder), atol=2e-6, rtol=1e-5)
    assert head_widths(CONFIG) == (64, 16, 8)


def test_shapes_are_those_of_the_decoder() -> None:
    decoder = decoder_of_uneven_layers()
    shapes = [(name, tuple(p.shape)) for name, p in decoder.named_parameters()]
    assert list(parameter_shapes(CONFIG).items()) == shapes
    assert [layer.total_parameters for layer in layers(CONFIG)] == [
        sum(parameter.numel() for parameter in block.parameters()) for block in decoder.model.layers
    ]


def test_a_cache_of_several_widths_continues_a_text() -> None:
    decoder = decoder_of_uneven_layers()
    cache = Cache(CONFIG, 20)
    with torch.no_grad():
        expected = decoder(TOKENS).head
        parts = [decoder(tokens, cache=cache).head for tokens in TOKENS.split((9, 1, 1, 9), 1)]
    assert_close(torch.cat(parts, 1), expected, atol=2e-6, rtol=1e-5)
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert cached == sum(layer.cached_bytes(20, 1) for layer in layers(CONFIG))


def test_a_written_folder_is_read_with_its_config_and_tensors(tmp_path: Path) -> None:
    decoder = decoder_of_uneven_layers()
    write_model(model_state(decoder), CONFIG, tmp_path)
    loaded_decoder = load_decoder(tmp_path, dtype=torch.float32)
    assert loaded_decoder.config == CONFIG
    for name, tensor in model_state(loaded_decoder).items():
        assert torch.equal(tensor, model_state(decoder)[name]), name
    assert config_from_hf(config_to_hf(CONFIG)) == CONFIG


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_lora_learns_in_every_layer(base: str, tmp_path: Path) -> None:
    write_model(model_state(decoder_of_uneven_layers()), CONFIG, tmp_path)
    with torch.device("meta"):
        decoder = Decoder(CONFIG)
        adapt(decoder, LORA)
    if base != "none":
        quantize_model(decoder, Quantize(kind=base))
    decoder.to_empty(device="cpu")
    read_model(decoder, tmp_path)
    init_adapters(decoder, 0)
    num_matrices = sum(len(layer.matrices) for layer in layers(CONFIG))
    assert len(dict(quantized_weights(decoder))) == (num_matrices if base != "none" else 0)
    assert sum(isinstance(module, LoraLinear) for module in decoder.modules()) == num_matrices
    trained_parameters = {n: p for n, p in decoder.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained_parameters.values(), lr=0.02)
    losses = []
    for _ in range(12):
        logits = decoder(TOKENS).head
        loss = F.cross_entropy(logits[0, :-1], TOKENS[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
    assert all(parameter.grad.abs().sum() > 0 for parameter in trained_parameters.values())


def test_the_compiled_step_refuses_odd_widths_and_llama_cpp_differing_layers() -> None:
    """The step computes layers of several sizes where vectors divide them: tests/model/test_compiled_step.py."""
    with pytest.raises(Uncompiled, match="not multiples of 64"):
        CompiledStep(decoder_of_uneven_layers())
    assert "for Uneven is not known" in str(unsupported(CONFIG))
    # The same layers, in a family whose graph is known.
    one_frequency = replace(CONFIG, family="qwen3", local_rope_theta=None)
    assert "layers of one size" in str(unsupported(one_frequency))


def test_a_family_without_such_layers_does_not_store_them() -> None:
    with pytest.raises(UserError, match="cannot have layer_sizes"):
        config_to_hf(replace(CONFIG, family="qwen3", sliding_window=(), local_rope_theta=None))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_sizes": (NARROW,)}, "1 entries for 4 layers"),
        ({"layer_sizes": (replace(WIDE, num_heads=3, num_kv_heads=2),) * 4}, "do not divide"),
        ({"layer_sizes": (replace(WIDE, rotary_share=0.02),) * 4}, "must be even"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, problem) -> None:
    with pytest.raises(UserError, match=problem):
        checked_config(replace(CONFIG, **changes), where="config.json")


# Facts that hold for some layers only: `counting.layers` answers for each.
OF_SOME_LAYERS = {
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "rotary_share",
    "rotary_layers",
    "sliding_window",
    "layer_sizes",
    "local_rope_theta",
    "attention_scale",
    "keys_are_values",
    "num_kv_shared_layers",
}
# What states a whole model: reads and writes config files, or makes one config of another.
STATES_A_MODEL = {
    "facts/config.py",
    "facts/counting.py",
    "facts/families.py",
    "facts/family_entries/*",
    "facts/family_rules*.py",
    "facts/hf_config.py",
    "facts/config_fields.py",
    "model/configs.py",
    "check/small_model.py",
    "export/gguf.py",
    "export/gguf_experts.py",
    "export/gguf_format.py",
    "plan/types.py",
}


def test_only_the_named_modules_read_facts_that_differ_between_layers() -> None:
    root = Path(bloomery.__file__).parent
    reads = re.compile(rf"(config|teacher)\s*\.\s*({'|'.join(OF_SOME_LAYERS)})\b")
    readers = set()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # Parsing all of the source takes seconds.
        if not reads.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in OF_SOME_LAYERS:
                owner = ast.unparse(node.value)
                if owner == "config" or owner.endswith(("_config", ".config", "teacher")):
                    readers.add(f"{path.relative_to(root).as_posix()}: {ast.unparse(node)}")

    def states_a_model(reader: str) -> bool:
        path = PurePosixPath(reader.partition(":")[0])
        return any(path.match(pattern) for pattern in STATES_A_MODEL)

    assert {reader for reader in readers if not states_a_model(reader)} == set()
