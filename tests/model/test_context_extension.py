"""A pretrained model with a longer context: rope_scaling, rope_theta and max_positions next to model.from."""

import pytest
import torch
import transformers
from tiny_models import saved_reference
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.model.configs import build_config
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder, model_state, read_model, write_model
from bloomery.recipe.schema import Model

LONGER = {
    "yarn": {
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_positions": 64},
        "max_positions": 256,
    },
    "llama3": {
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_positions": 32},
        "max_positions": 256,
    },
    "theta": {"rope_theta": 5e5, "max_positions": 256},
}


def load_extended(base, changes) -> Decoder:
    decoder = fresh_decoder(
        build_config(Model.model_validate({"from": str(base)} | changes), vocab_size=131), seed=0
    )
    read_model(decoder, base)
    return decoder.eval()


@pytest.mark.parametrize("case", LONGER)
@torch.no_grad()
def test_transformers_opens_the_extended_model_and_computes_the_same(case, tmp_path):
    base = saved_reference("llama2", tmp_path / "base")
    our_model = load_extended(tmp_path / "base", LONGER[case])
    assert our_model.config.max_positions == 256
    (tmp_path / "out").mkdir()
    write_model(model_state(our_model), our_model.config, tmp_path / "out")
    their_model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    assert their_model.config.max_position_embeddings == 256
    tokens = torch.randint(131, (2, 200), generator=torch.Generator().manual_seed(1))
    assert_close(our_model(tokens).head, their_model(tokens).logits, atol=1e-4, rtol=0)
    # the extension changes what is computed
    assert (their_model(tokens).logits - base(tokens).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("case", "changes"), [("gpt2", {"max_positions": 128}), ("llama2", {"hidden_size": 64})]
)
def test_other_changes_of_a_pretrained_model_are_refused(case, changes, tmp_path):
    saved_reference(case, tmp_path)
    with pytest.raises(UserError, match="cannot be changed with") as error:
        load_extended(tmp_path, changes)
    assert next(iter(changes)) in error.value.problem
