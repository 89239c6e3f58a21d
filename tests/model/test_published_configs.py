"""config.json of the models that packaged recipes start from, as published: each loads, and a small model of it agrees
with transformers. published_configs.json: copies of the files; tests/model/test_multimodal.py has Gemma 3 4B's.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import tokens
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.facts.counting import parameter_count
from bloomery.facts.hf_config import config_from_hf
from bloomery.facts.published import published_config
from bloomery.model.configs import stated_config
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import load_decoder

CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())
# Left out of the table: token ids, factors of longrope, and what has no effect on a plan.
NOT_IN_THE_TABLE = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "rope_scaling",
    "norm_eps",
    "sliding_window",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_has_the_shape_of_the_table(name):
    config = config_from_hf(CONFIGS[name])
    table_config = published_config(name)
    facts = {key: value for key, value in vars(config).items() if key not in NOT_IN_THE_TABLE}
    assert facts == {
        key: value for key, value in vars(table_config).items() if key not in NOT_IN_THE_TABLE
    }
    with torch.device("meta"):
        decoder = Decoder(config)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == parameter_count(
        table_config
    )


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_small_model_of_each_config_gives_the_logits_of_transformers(name, tmp_path):
    """Heads, rotation, windows, layers without rotation and tying are those of the file; width and depth are small."""
    raw_config = dict(CONFIGS[name])
    width = (
        raw_config.get("head_dim") or raw_config["hidden_size"] // raw_config["num_attention_heads"]
    )
    small_sizes = {
        "hidden_size": 2 * width,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    raw_config |= small_sizes
    if "no_rope_layers" in raw_config:
        raw_config["no_rope_layers"] = raw_config["no_rope_layers"][:6]
    if "layer_types" in raw_config:
        raw_config["layer_types"] = raw_config["layer_types"][:6]
    if raw_config.get("sliding_window"):
        raw_config["sliding_window"] = 8
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**raw_config)
    their_model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    for parameter in their_model.parameters():
        parameter.data.normal_(0, 0.12)
    their_model.save_pretrained(tmp_path)
    # as published, not as transformers 5 writes it
    (tmp_path / "config.json").write_text(json.dumps(raw_config))
    is_tied = (
        their_model.get_output_embeddings().weight is their_model.get_input_embeddings().weight
    )
    our_model = load_decoder(tmp_path)
    assert our_model.config.tie_embeddings == is_tied
    expected = their_model(tokens()).logits
    assert float(expected.std()) > 0.1
    assert_close(our_model(tokens()).head, expected, atol=1e-4, rtol=0)


def test_a_run_folder_is_refused_with_the_folder_of_its_models(tmp_path):
    with pytest.raises(UserError) as refused:
        stated_config(tmp_path)
    assert refused.value.fix == "give the folder of a saved model"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError) as refused:
        stated_config(tmp_path)
    assert str(tmp_path / "checkpoints") in refused.value.fix
