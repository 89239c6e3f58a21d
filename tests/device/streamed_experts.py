"""A decoder whose experts are on the host, without a run around it."""

import torch

from bloomery.facts.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import init_weights, quantize_model
from bloomery.parallel.streamed_experts import StreamedExperts
from bloomery.recipe.schema import Quantize


def decoder_of(
    config: ModelConfig, *, quantize: Quantize | None = None, recomputes: bool = False
) -> Decoder:
    """Of random weights, which are frozen."""
    with torch.device("meta"):
        decoder = Decoder(config).requires_grad_(False)
    if quantize is not None:
        quantize_model(decoder, quantize)
    decoder.weight_stream = StreamedExperts(
        decoder, torch.device("cuda"), is_recomputed=lambda _layer: recomputes
    )
    decoder.weight_stream.allocate()
    init_weights(decoder, 0)
    return decoder
