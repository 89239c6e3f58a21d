"""A decoder that is cut into the stages of a pipeline, against the whole one."""

import copy

import pytest
import torch
from plans_for_tests import tiny_config

from bloomery.model.heads import Logits, Values
from bloomery.model.io.weights import fresh_decoder
from bloomery.parallel.stage import keep_stage
from bloomery.plan.pipeline import even_groups, stage_of

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


class Passed:
    """A link of stages in one process, which run in turn: what one sends is what the next receives."""

    def __init__(self):
        self.stream = None

    def receive(self, group, tokens_BT):
        return self.stream

    def send(self, group, x_BTD):
        self.stream = x_BTD
        return x_BTD.new_zeros(())


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (3, 1), (5, 1), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_stages_in_turn_compute_what_the_whole_decoder_does(case, stages, chunks):
    config = tiny_config(num_layers=5, **CASES[case])
    whole = fresh_decoder(config, seed=0, attention="mask")
    head = Values() if config.head == "values" else Logits()
    inputs = {"positions_BT": POSITIONS, "documents_BT": DOCUMENTS, "head": head}
    expected = whole(TOKENS, **inputs).head
    expected.square().sum().backward()

    link = Passed()
    models = []
    for index in range(stages):
        model = copy.deepcopy(whole)
        model.zero_grad()
        keep_stage(model, stage_of(config, index, stages, even_groups(5, stages * chunks)))
        model.model.link = link
        models.append(model)
    for chunk in range(chunks):
        for model in models:
            model.model.group = chunk
            output = model(TOKENS, **inputs).head
    assert torch.equal(output, expected)
    output.square().sum().backward()

    # Every weight is in one stage under its own name; a tied one at both ends, where gradients add up.
    gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            gradients.setdefault(name, []).append(parameter.grad)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(sum(gradients.pop(name)), parameter.grad, atol=1e-5, rtol=1e-5)
    assert not gradients
    layers = [layer for model in models for layer in model.stage.layers]
    assert sorted(layers) == list(range(5))
