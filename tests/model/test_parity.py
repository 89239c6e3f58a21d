"""Logits of every family against transformers, the same after saving and loading both ways."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import CASES, saved_reference, tokens
from torch.testing import assert_close

from bloomery.facts.families import FAMILIES
from bloomery.model.io.weights import load_decoder, model_state, write_model

TOKENS = tokens()


def test_every_family_has_a_case() -> None:
    heads = ("ForCausalLM", "LMHeadModel")
    classes = {
        family.architecture.removesuffix(heads[0]).removesuffix(heads[1])
        for family in FAMILIES.values()
    }
    missing_classes = classes - {CASES[case][0] for case in CASES}
    assert not missing_classes, f"add a case to tests/model/tiny_models.py: {missing_classes}"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_match_transformers_both_ways(case: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    their_model = saved_reference(case, tmp_path / "theirs")
    expected = their_model(TOKENS).logits
    assert float(expected.std()) > 0.1, "the reference is too flat to show a difference"
    our_model = load_decoder(tmp_path / "theirs")
    assert_close(our_model(TOKENS).head, expected, atol=1e-4, rtol=0)
    write_model(model_state(our_model), our_model.config, tmp_path / "ours")
    reloaded_model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert type(reloaded_model) is type(their_model)
    assert_close(reloaded_model(TOKENS).logits, expected, atol=0, rtol=0)
    assert torch.equal(load_decoder(tmp_path / "ours")(TOKENS).head, our_model(TOKENS).head)
    assert load_decoder(tmp_path / "ours").config == our_model.config


@pytest.mark.parametrize("case", ["llama3-gqa-tied", "gpt2", "gemma3", "olmo2", "qwen3"])
def test_gradients_match_transformers(case: str, tmp_path: Path) -> None:
    their_model = saved_reference(case, tmp_path)
    our_model = load_decoder(tmp_path)
    their_model(TOKENS).logits.square().mean().backward()
    our_model(TOKENS).head.square().mean().backward()
    expected = their_model.get_input_embeddings().weight.grad
    assert_close(our_model.model.embed_tokens.weight.grad, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    "case", ["llama3-gqa-tied", "qwen2.5-window-tied", "gemma3", "phi3-longrope", "llama-yarn"]
)
@torch.no_grad()
def test_older_config_files_mean_the_same(case: str, tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta, rope_scaling (with `type`) and no layer_types."""
    their_model = saved_reference(case, tmp_path)
    path = tmp_path / "config.json"
    raw_config = json.loads(path.read_text())
    rope = raw_config.pop("rope_parameters")
    if local := rope.get("sliding_attention"):
        raw_config["rope_local_base_freq"] = local["rope_theta"]
        rope = rope["full_attention"]
    raw_config["rope_theta"] = rope.pop("rope_theta")
    rope.pop("partial_rotary_factor", None)
    kind = rope.pop("rope_type")
    raw_config["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    raw_config.pop("layer_types", None)
    raw_config.pop("dtype", None)
    path.write_text(json.dumps(raw_config))
    assert_close(load_decoder(tmp_path)(TOKENS).head, their_model(TOKENS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama2", "gpt2", "gemma3", "phi4-partial"])
@torch.no_grad()
def test_positions_restart_where_the_caller_says(case: str, tmp_path: Path) -> None:
    """Two documents in one row, isolated, give the logits that each gives alone."""
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path, attention="mask")
    first_tokens, second_tokens = TOKENS[:1, :15], TOKENS[:1, 15:]
    positions = torch.cat((torch.arange(15), torch.arange(25)))[None]
    documents = (torch.arange(40) >= 15).long()[None]
    packed_logits = decoder(TOKENS[:1], positions_BT=positions, documents_BT=documents).head
    assert_close(
        packed_logits,
        torch.cat((decoder(first_tokens).head, decoder(second_tokens).head), 1),
        atol=1e-5,
        rtol=1e-5,
    )


@torch.no_grad()
def test_the_base_model_of_transformers_loads_with_a_tied_head(tmp_path: Path) -> None:
    """Files saved without the language-modelling head lack the outermost prefix (GPT-2's on the hub do)."""
    their_model = saved_reference("gpt2", tmp_path)
    their_model.transformer.save_pretrained(tmp_path)
    assert_close(load_decoder(tmp_path)(TOKENS).head, their_model(TOKENS).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_autocast_stays_near_float32(tmp_path: Path) -> None:
    saved_reference("qwen3", tmp_path)
    decoder = load_decoder(tmp_path)
    exact_logits = decoder(TOKENS).head
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded_logits = decoder(TOKENS).head
    assert rounded_logits.dtype == torch.bfloat16
    assert float((rounded_logits - exact_logits).abs().mean()) < 0.02 * float(
        exact_logits.abs().mean()
    )
    assert load_decoder(tmp_path, dtype=torch.bfloat16)(TOKENS).head.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("llama3-gqa-tied", "eager"),
        *(
            pytest.param(case, "aot_eager", marks=pytest.mark.soak)
            for case in ("llama3-gqa-tied", "gpt2")
        ),
    ],
)
def test_a_block_compiles_without_a_graph_break(case: str, backend: str, tmp_path: Path) -> None:
    """No graph break inside a block, forward and backward."""
    # torch has seen other lengths in this process, and would make them symbols
    torch.compiler.reset()
    saved_reference(case, tmp_path)
    compiled_model = load_decoder(tmp_path)
    plain_model = load_decoder(tmp_path)
    compiled_model.model.layers[1].compile(fullgraph=True, backend=backend)
    compiled_model(TOKENS).head.square().mean().backward()
    plain_model(TOKENS).head.square().mean().backward()
    for name, parameter in plain_model.named_parameters():
        assert_close(compiled_model.get_parameter(name).grad, parameter.grad, atol=1e-5, rtol=1e-3)
