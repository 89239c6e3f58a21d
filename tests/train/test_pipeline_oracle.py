"""A pipeline has the gradients of PyTorch's own schedules. Oracle: `torch.distributed.pipelining`.

PyTorch cuts the model, orders the passes, moves the activations and takes the loss of plain logits; the layers, their
weights and the batches are ours.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from plans_for_tests import tiny_config, tiny_plan
from safetensors.torch import load_file, save_file
from test_ranks_features import gradients_in, train_noting_gradients
from torch import Tensor, nn

from bloomery.data.order import Cursor
from bloomery.model.attention.attend import layout_of
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.train.batch_source import open_loader
from ranks import losses, on_ranks, ranks

MICRO_BATCHES = 8


class Part(nn.Module):
    """Some layers of a decoder; the first part embeds, the last one gives logits."""

    def __init__(self, decoder: Decoder, layers: range) -> None:
        super().__init__()
        self.decoder = decoder
        self.layers = layers
        # Only these are parameters of this part.
        self.own = nn.ModuleList(decoder.model.layers[number] for number in layers)

    def forward(self, x: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        backbone = self.decoder.model
        layout = layout_of(documents_BT, backend=backbone.backend)
        rotary = backbone.rotary(positions_BT)
        if self.layers.start == 0:
            x = backbone.embed_tokens(x)
        for number, block in zip(self.layers, self.own, strict=True):
            x = block(x, rotary[number], layout)
        if self.layers.stop == self.decoder.config.num_layers:
            x = self.decoder.lm_head(backbone.norm(x))
        return x


def first_step_of_pytorch(plan_json: str, folder: str) -> float:
    """On every rank: the loss of the plan's first step by PyTorch's schedule; its gradients go into `folder`."""
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    loader = open_loader(plan.data, "train", seed=plan.train.seed)
    batches = [loader.batch(Cursor(plan.train.seed, number), 1) for number in range(MICRO_BATCHES)]
    tokens, labels, loss_mask, positions, documents = (
        torch.cat([getattr(batch, field) for batch in batches])
        for field in ("tokens", "labels", "loss_mask", "positions", "documents")
    )

    # Groups of layers, each with the shapes of what it takes and gives, and of their gradients: without all four lists
    # PyTorch runs a forward and a backward to find them.
    config = plan.model.config
    decoder = fresh_decoder(config, seed=plan.train.seed, attention=plan.model.attention)
    num_groups = mesh.stages * plan.train.pipeline_chunks
    layers_per_group = config.num_layers // num_groups
    stream = torch.empty(1, tokens.shape[1], config.hidden_size)
    logits = torch.empty(1, tokens.shape[1], config.vocab_size)
    stages = []
    for group in range(mesh.rank, num_groups, mesh.stages):
        layers = range(group * layers_per_group, (group + 1) * layers_per_group)
        is_first = group == 0
        is_last = group == num_groups - 1
        input_example = tokens[:1] if is_first else stream.clone().requires_grad_()
        output_example = (logits if is_last else stream).clone().requires_grad_()
        stages.append(
            pipelining.PipelineStage(
                Part(decoder, layers),
                group,
                num_groups,
                torch.device("cpu"),
                input_args=(input_example,),
                output_args=(output_example,),
                input_grads=(None if is_first else stream,),
                output_grads=(logits if is_last else stream,),
            )
        )

    num_targets = loss_mask.sum()
    masked_labels = torch.where(loss_mask > 0, labels, -100)

    def mean_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        total = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")
        return total / num_targets

    schedules = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
    }
    schedule = schedules[plan.train.pipeline_schedule](
        stages if len(stages) > 1 else stages[0],
        n_microbatches=MICRO_BATCHES,
        loss_fn=mean_loss,
        scale_grads=False,
    )
    losses_of_micro_batches: list[Tensor] = []
    inputs = (tokens,) if mesh.rank == 0 else ()
    is_last_rank = mesh.rank == mesh.stages - 1
    schedule.step(
        *inputs,
        target=masked_labels if is_last_rank else None,
        losses=losses_of_micro_batches if is_last_rank else None,
        positions_BT=positions,
        documents_BT=documents,
    )

    gradients = {
        name: parameter.grad.contiguous()
        for name, parameter in decoder.named_parameters()
        if parameter.grad is not None
    }
    save_file(gradients, Path(folder) / f"pytorch-{mesh.rank}.safetensors")
    return sum(loss.item() for loss in losses_of_micro_batches)


@pytest.mark.parametrize(
    ("stages", "schedule", "chunks"),
    [
        (2, "1f1b", 1),
        (2, "interleaved", 2),
        pytest.param(2, "gpipe", 1, marks=pytest.mark.soak),
        pytest.param(4, "1f1b", 1, marks=pytest.mark.soak),
    ],
)
def test_the_first_step_is_that_of_pytorchs_schedule(
    prepared, tmp_path, stages, schedule, chunks
) -> None:
    config = tiny_config(vocab_size=512, num_layers=4, tie_embeddings=False)
    train = {
        "steps": 1,
        "tokens_per_step": 256,
        "micro_batch_size": 1,
        "accumulation": MICRO_BATCHES,
        "max_grad_norm": None,  # gradients are noted when they are clipped
    }
    plan = tiny_plan(prepared, config=config, train=train)
    several = on_ranks(plan, pipeline=stages, schedule=schedule, chunks=chunks)
    arguments = (several.model_dump_json(), str(tmp_path))
    events = ranks(stages).call(train_noting_gradients, *arguments)[0]
    losses_by_rank = ranks(stages).call(first_step_of_pytorch, *arguments)
    assert losses(events)[1] == pytest.approx(losses_by_rank[-1], rel=0, abs=1e-5)

    expected: dict[str, Tensor] = {}
    for rank in range(stages):
        of_rank = load_file(tmp_path / f"pytorch-{rank}.safetensors")
        assert not expected.keys() & of_rank.keys(), "a parameter is on one rank"
        expected |= of_rank
    gradients = gradients_in(tmp_path)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= 1e-6 * gradient.abs().max(), name
