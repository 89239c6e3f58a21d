"""Host memory that a rank pins while it trains: offloaded states and activations, and a reference model on the host.

Not counted, as they are small: batches (a few kB each), two stages of 16 MiB through which files are read, and what a
link of a pipeline without a network of its devices copies (one micro-batch's residual stream in each direction).
"""

from bloomery.facts.limits import pinned_chunks, pinned_together
from bloomery.plan.estimate.activations import kept_by_layer, last_norm_bytes
from bloomery.plan.estimate.reference import layer_sizes
from bloomery.plan.estimate.step import StepShape


def pinned_parts(
    step: StepShape, *, shard: int = 1, pipeline: int = 1, accumulation: int = 1
) -> dict[str, int]:
    """Bytes by purpose, as PyTorch pins them. Empty for a step on a CPU.

    `shard`: ranks that share the states. Of a pipeline: a stage with an equal part of the model.
    """
    parts = dict[str, int]()
    if not step.on_gpu:
        return parts
    model = step.model
    if step.mode.offload:
        sizes = model.state_sizes(step.optimizer, step.precision, shard)
        parts["optimizer states"] = pinned_together(sizes) // pipeline
    if step.offload_activations:
        kept_bytes = sum(kept_by_layer(step)) + last_norm_bytes(step)
        if (
            step.checkpointing == "selective"
        ):  # what it keeps of a block beside its input stays on the device
            inputs = step.tokens_per_micro_batch * step.config.hidden_size * step.residual_bytes
            kept_bytes = inputs * len(model.layers) + last_norm_bytes(step)
        # The first stage has as many micro-batches under way as there are stages.
        parts["activations"] = min(pipeline, accumulation) * pinned_chunks(kept_bytes / pipeline)
    if step.reference == "host" and step.stream != "layers":
        _rest, by_layer = layer_sizes(step)
        parts["reference model"] = sum(pinned_together(sizes) for sizes in by_layer.values())
    return parts
