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
    config, table = config_from_hf(CONFIGS[name]), published_config(name)
    ours = {key: value for key, value in vars(config).items() if key not in NOT_IN_THE_TABLE}
    assert ours == {key: value for key, value in vars(table).items() if key not in NOT_IN_THE_TABLE}
    with torch.device("meta"):
        decoder = Decoder(config)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == parameter_count(table)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_small_model_of_it_gives_the_logits_of_transformers(name, tmp_path):
    """Heads, rotation, windows, layers without rotation and tying are those of the file; width and depth are small."""
    raw = dict(CONFIGS[name])
    width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    small = {
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
    raw |= small
    if "no_rope_layers" in raw:
        raw["no_rope_layers"] = raw["no_rope_layers"][:6]
    if raw.get("sliding_window"):
        raw["sliding_window"] = 8
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**raw)
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path)
    # as published, not as transformers 5 writes it
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    ours = load_decoder(tmp_path)
    assert ours.config.tie_embeddings == tied
    expected = theirs(tokens()).logits
    assert float(expected.std()) > 0.1
    assert_close(ours(tokens()).head, expected, atol=1e-4, rtol=0)


def test_the_folder_of_a_run_names_where_its_models_are(tmp_path):
    with pytest.raises(UserError) as caught:
        stated_config(tmp_path)
    assert caught.value.fix == "give the folder of a saved model"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError) as caught:
        stated_config(tmp_path)
    assert str(tmp_path / "checkpoints") in caught.value.fix
