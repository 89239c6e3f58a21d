"""A decoder that is cut into the stages of a pipeline, against the whole one."""

import copy

import pytest
import torch
from plans_for_tests import tiny_config

from bloomery.model.heads import Logits, Values
from bloomery.model.io.weights import fresh_decoder
from bloomery.parallel.stage import cut, stage_of

TOKENS = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
DOCUMENTS = (torch.arange(24) >= 10).long().expand(2, -1)
POSITIONS = torch.where(DOCUMENTS == 1, torch.arange(24) - 10, torch.arange(24))
CASES = {
    "tied": {"tie_embeddings": True},
    "a head of its own": {"tie_embeddings": False},
    "learned positions": {"positions": "learned", "max_positions": 64},
    "windows": {"sliding_window": (4, None, 4, None, 4)},
    "values": {"head": "values"},
}


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_stages_in_turn_compute_what_the_whole_decoder_does(case, stages):
    config = tiny_config(num_layers=5, **CASES[case])
    whole = fresh_decoder(config, seed=0, attention="mask")
    head = Values() if config.head == "values" else Logits()
    inputs = {"positions_BT": POSITIONS, "documents_BT": DOCUMENTS, "head": head}
    expected = whole(TOKENS, **inputs).head
    expected.square().sum().backward()

    hidden = None
    models = []
    for index in range(stages):
        model = copy.deepcopy(whole)
        model.zero_grad()
        cut(model, stage_of(config, index, stages))
        hidden = model(TOKENS, **inputs, hidden_BTD=hidden).head
        models.append(model)
    assert torch.equal(hidden, expected)
    hidden.square().sum().backward()

    # Every weight is in one stage under its own name; a tied one at both ends, where gradients add up.
    gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            gradients.setdefault(name, []).append(parameter.grad)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(sum(gradients.pop(name)), parameter.grad, atol=1e-5, rtol=1e-5)
    assert not gradients
    layers = [layer for model in models for layer in model.stage.layers]
    assert layers == list(range(5))
