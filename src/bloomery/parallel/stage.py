"""The stages of a pipeline: which layers and which ends of a decoder each one has."""

from torch import nn

from bloomery.model.config import ModelConfig, Stage
from bloomery.model.decoder import Backbone, Decoder


def stage_of(config: ModelConfig, index: int, stages: int) -> Stage:
    """The stage of that index: layers in order, as many as any other stage has, or one more or less.

    The last stage has the embedding, too, where the head is tied to it.
    """
    first_layer = index * config.num_layers // stages
    end = (index + 1) * config.num_layers // stages
    is_last = index == stages - 1
    tied = config.tie_embeddings and config.head == "tokens"
    return Stage(
        layers=range(first_layer, end),
        has_embedding=index == 0 or (is_last and tied),
        has_head=is_last,
    )


def cut(model: Decoder, stage: Stage) -> None:
    """Keeps one stage of a whole decoder, in place; what remains has the names that it had.

    Cut on the meta device, the weights of other stages never take memory. A later stage reads
    `hidden_BTD`, what the one before gave.
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
    if stage.layers.start > 0 and model.config.positions == "learned":
        backbone.register_module("embed_positions", None)
    if not stage.has_head:
        backbone.register_module("norm", None)
        model.register_module("score" if model.config.head == "values" else "lm_head", None)
