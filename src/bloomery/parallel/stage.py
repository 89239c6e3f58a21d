"""Cutting a decoder into the stages of a pipeline."""

from torch import nn

from bloomery.facts.config import Stage
from bloomery.model.decoder import Backbone, Decoder


def keep_stage(model: Decoder, stage: Stage) -> None:
    """Keeps one stage of a whole decoder, in place; what remains has the names that it had.

    Cut on the meta device, the weights of other stages never take memory. A stage needs a link to the others before
    its first forward (`Backbone.link`).
    """
    backbone = model.model
    assert isinstance(backbone, Backbone), "the transformers implementation supports one device"

    # Layers keep their numbers, by which checkpoints, optimizers and adapters know them.
    layers = nn.ModuleList()
    for number in stage.layers:
        layers.add_module(str(number), backbone.layers[number])
    backbone.layers = layers
    backbone.stage = stage

    # A tied matrix is at both ends of a pipeline; what is added to embedded tokens is at its beginning.
    if not stage.has_embedding:
        backbone.register_module("embed_tokens", None)
    if not stage.embeds and model.config.positions == "learned":
        backbone.register_module("embed_positions", None)
    if not stage.has_head:
        backbone.register_module("norm", None)
        model.register_module("score" if model.config.head == "values" else "lm_head", None)
        model.value_head = None
