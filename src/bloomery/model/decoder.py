"""The decoder: tokens in, what the head makes of them out. Parameter names are those of transformers' Llama.

From the inside out: a mixer (`model.mixers`) and an MLP, the block of both, the backbone of all blocks, the decoder
with its head. A pipeline cuts the backbone into stages (`parallel.stage`), each on a device of its own; without one
there is one stage, the whole model.

B batch, T time, D width, H query heads, K key/value heads, E head width, S keys that are seen, F width inside the MLP,
V vocabulary.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.facts.config import Mixer, ModelConfig, Stage, whole_model
from bloomery.facts.counting import MIXER_MODULES, Layer, block_norms, layers
from bloomery.facts.pictures import SEES_BOTH_WAYS, PositionAxes
from bloomery.model import compiled_pointwise
from bloomery.model.attention.attend import DocumentBorders, DocumentLayout, layout_of
from bloomery.model.cache import Cache, LayerCache, StateCache, VisiblePast
from bloomery.model.compiled_scores import RowsOf
from bloomery.model.experts import NO_LOADS, MixtureOfExperts, RouterLoad
from bloomery.model.forward_input import ALL_LOGITS, ForwardInput
from bloomery.model.heads import Head
from bloomery.model.mixers.attention import Attention, SequenceExchange, plain_backend
from bloomery.model.mixers.delta_net import GatedDeltaNet
from bloomery.model.mixers.latent_attention import LatentAttention
from bloomery.model.mixers.short_convolution import GatedShortConvolution
from bloomery.model.norms import RMSNorm, build_norm, widened, working_dtype
from bloomery.model.pictures import SeenPictures
from bloomery.model.rope import Frequencies, Rotary, rotary_tables
from bloomery.model.transformers_backend import TransformersBackbone
from bloomery.model.vision import VisionTower
from bloomery.model.xielu import XIELU

VALUE_HEAD = "value_head.weight"  # a parameter that training adds, and no file of a model has


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu2,
}


def build_attention(config: ModelConfig, layer: Layer, backend: str) -> Attention:
    kind = Attention if config.latent_attention is None else LatentAttention
    return kind(config, layer, backend)


# What mixes the tokens of a layer. Each is built of the config, the layer and the name of a backend of attention, and
# computes [B, T, D] from [B, T, D], the layer's rotation, the layout of documents, and the layer's cache.
MIXERS: dict[Mixer, Callable[[ModelConfig, Layer, str], nn.Module]] = {
    "attention": build_attention,
    "delta_net": GatedDeltaNet,
    "short_convolution": GatedShortConvolution,
}


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, inner_width: int, backend: str) -> None:
        super().__init__()
        width = config.hidden_size
        self.gate_proj = (
            nn.Linear(width, inner_width, bias=config.mlp_bias) if config.gated_mlp else None
        )
        self.up_proj = nn.Linear(width, inner_width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner_width, width, bias=config.mlp_bias)
        # The one activation that has numbers of its own.
        is_xielu = config.activation == "xielu"
        self.act_fn = XIELU() if is_xielu else ACTIVATIONS[config.activation]
        self.fuses_gate = backend == "compiled" and config.activation == "silu"

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D]: with a gate as in arXiv:2002.05202, without one a plain two-layer MLP."""
        if self.gate_proj is None:
            inner_BTF = self.act_fn(self.up_proj(x_BTD))
        else:
            gate_BTF = self.gate_proj(x_BTD)
            up_BTF = self.up_proj(x_BTD)
            if self.fuses_gate and compiled_pointwise.can_fuse(gate_BTF, up_BTF):
                inner_BTF = compiled_pointwise.silu_times(gate_BTF, up_BTF)
            else:
                inner_BTF = self.act_fn(gate_BTF) * up_BTF
        projected: Tensor = self.down_proj(inner_BTF)
        return projected


def build_mlp(config: ModelConfig, layer: Layer, backend: str) -> MLP | MixtureOfExperts:
    experts = layer.experts
    if experts is None:
        return MLP(config, layer.intermediate_size, backend)
    shared_expert = None
    if experts.shared_width:
        shared_expert = MLP(config, experts.shared_width, backend)
    activation = ACTIVATIONS[config.activation]
    return MixtureOfExperts(config, experts, activation, shared_expert, backend)


class LayerOutput(NamedTuple):
    """What leaves a layer beside the residual stream: keys and values that it lends, the load of its experts."""

    x_BTD: Tensor
    past: VisiblePast | None = None
    load: RouterLoad | None = None


class Block(nn.Module):
    """One layer. `layer.norm_placement` decides which norms exist; their names are transformers' for each case:

    before (Llama)    input_layernorm, mixer; post_attention_layernorm, MLP
    after (OLMo 2)    mixer, post_attention_layernorm; MLP, post_feedforward_layernorm
    both (Gemma 2)    input_layernorm, mixer, post_attention_layernorm;
                      pre_feedforward_layernorm, MLP, post_feedforward_layernorm
    shared (Cohere)   input_layernorm, of which mixer and MLP both compute

    The mixer is a module of the name that `counting.MIXER_MODULES` gives its kind. With `config.per_layer_input_size`
    a third branch follows, as in Gemma 4: per_layer_input_gate and activation, times what the layer is given of each
    token, per_layer_projection, post_per_layer_input_norm. `config.layer_scalar` then multiplies all of it. "MLP"
    stands for a mixture of experts, too; one with `own_norms` is beside an MLP, and both have norms of their own.
    """

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module
    pre_feedforward_layernorm_2: nn.Module
    post_feedforward_layernorm_1: nn.Module
    post_feedforward_layernorm_2: nn.Module
    self_attn: Attention

    def __init__(self, config: ModelConfig, layer: Layer, backend: str) -> None:
        super().__init__()
        self.kind = layer.kind
        self.placement = layer.norm_placement
        self.dropout = config.residual_dropout
        self.multiplier = config.residual_multiplier
        for name in block_norms(layer.norm_placement, layer.experts):
            self.add_module(name, build_norm(config, config.hidden_size))
        self.has_expert_norms = layer.experts is not None and layer.experts.own_norms
        self.add_module(MIXER_MODULES[layer.mixer], MIXERS[layer.mixer](config, layer, backend))
        self.mlp = build_mlp(config, layer, backend)
        if width := config.per_layer_input_size:
            self.activate = ACTIVATIONS[config.activation]
            self.per_layer_input_gate = nn.Linear(config.hidden_size, width, bias=False)
            self.per_layer_projection = nn.Linear(width, config.hidden_size, bias=False)
            self.post_per_layer_input_norm = build_norm(config, config.hidden_size)
        self.layer_scalar: nn.Parameter | None = None
        if config.layer_scalar:
            self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)

    @property
    def mixer(self) -> nn.Module:
        return self.get_submodule(MIXER_MODULES[self.kind.mixer])

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        layout: DocumentLayout,
        cache: LayerCache | StateCache | None = None,
        input_BTP: Tensor | None = None,
        lent: VisiblePast | None = None,
        is_real_BT: Tensor | None = None,
    ) -> Tensor | LayerOutput:
        """The residual stream that leaves the layer; a LayerOutput of a layer that lends keys or has experts.

        input_BTP: what the layer is given of each token. lent: the keys and values of the layer whose ones it uses.
        is_real_BT: which tokens are no padding, where the load of experts is counted.
        """
        norm_before = self.placement != "after"
        norm_after = self.placement in ("after", "both")

        # What the mixer makes is added to the residual stream x.
        normed_BTD = self.input_layernorm(x_BTD) if norm_before else x_BTD
        lent_keys = () if self.kind.keys_of is None else (lent,)
        mixed = self.mixer(normed_BTD, rotary, layout, cache, *lent_keys)
        y_BTD, past = mixed if self.kind.lends_keys else (mixed, None)
        y_BTD = self.drop(y_BTD)
        if self.placement == "shared":
            x_BTD = self.added(x_BTD, y_BTD)
            y_BTD, load = self.feed_forward(normed_BTD, is_real_BT)
            return self.output(self.added(x_BTD, self.drop(y_BTD)), past, load)
        x_BTD = self.added(x_BTD, self.post_attention_layernorm(y_BTD) if norm_after else y_BTD)

        # So is the MLP. Llama calls the norm before it post_attention_layernorm; with norms on both sides of attention,
        # that name is taken.
        y_BTD = x_BTD
        if norm_before and norm_after:
            y_BTD = self.pre_feedforward_layernorm(x_BTD)
        elif norm_before:
            y_BTD = self.post_attention_layernorm(x_BTD)
        if self.has_expert_norms:
            y_BTD, load = self.feed_forward_apart(y_BTD, x_BTD, is_real_BT)
        else:
            y_BTD, load = self.feed_forward(y_BTD, is_real_BT)
        y_BTD = self.drop(y_BTD)
        x_BTD = self.added(x_BTD, self.post_feedforward_layernorm(y_BTD) if norm_after else y_BTD)

        # What the layer is given of each token comes through a gate that the stream opens.
        if input_BTP is not None:
            gate_BTP = self.activate(self.per_layer_input_gate(x_BTD))
            y_BTD = self.drop(self.per_layer_projection(gate_BTP * input_BTP))
            x_BTD = self.added(x_BTD, self.post_per_layer_input_norm(y_BTD))
        if self.layer_scalar is not None:
            x_BTD = x_BTD * self.layer_scalar.to(x_BTD.dtype)
        return self.output(x_BTD, past, load)

    def feed_forward(
        self, x_BTD: Tensor, is_real_BT: Tensor | None
    ) -> tuple[Tensor, RouterLoad | None]:
        if self.kind.experts is None:
            return self.mlp(x_BTD), None
        y_BTD, load = self.mlp(x_BTD, is_real_BT)
        return y_BTD, load

    def feed_forward_apart(
        self, normed_BTD: Tensor, x_BTD: Tensor, is_real_BT: Tensor | None
    ) -> tuple[Tensor, RouterLoad | None]:
        """The MLP of the normed stream, and the experts of the stream itself, as in Gemma 4."""
        assert isinstance(self.mlp, MixtureOfExperts)
        shared_BTD = self.post_feedforward_layernorm_1(self.mlp.shared(normed_BTD))
        inputs_BTD = self.pre_feedforward_layernorm_2(x_BTD)
        chosen_BTD, load = self.mlp.chosen(inputs_BTD, x_BTD, is_real_BT)
        return shared_BTD + self.post_feedforward_layernorm_2(chosen_BTD), load

    def output(
        self, x_BTD: Tensor, past: VisiblePast | None, load: RouterLoad | None
    ) -> Tensor | LayerOutput:
        is_plain = past is None and self.kind.experts is None
        return x_BTD if is_plain else LayerOutput(x_BTD, past, load)

    def added(self, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        return x_BTD + y_BTD if self.multiplier == 1.0 else x_BTD + y_BTD * self.multiplier

    def drop(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.dropout) if self.dropout and self.training else x_BTD


class StageLink(Protocol):
    """Carries the residual stream between the stages of a pipeline.

    A stage has one group of consecutive layers, or several in an interleaved pipeline, where each micro-batch visits it
    once per group. `group`: the number of one of them, on this stage.
    """

    def receive(self, group: int, tokens_BT: Tensor) -> Tensor:
        """The stream [B, T, D] that enters the group, for tokens of that shape. Backward sends its gradient to the
        stage that it came from.
        """

    def send(self, group: int, x_BTD: Tensor) -> Tensor:
        """Send the stream that leaves the group. Returns a scalar 0 that stands for the loss of a later stage: its
        backward receives the gradient of what was sent.
        """

    def share(self, output: Tensor | None) -> Tensor:
        """On every stage, what the head made: the stage that has the head gives it, the others None."""

    def settle(self) -> None:
        """Wait until everything that was sent has left; a training step does so at its end."""


class WeightStream(Protocol):
    """Weights that live in the host's memory, and reach the device only to compute: `parallel.streamed`."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""

    @property
    def note(self) -> str | None:
        """What people should know about the weights on the host, after `allocate`."""

    def allocate(self, source: Path | None = None, folder: Path | None = None) -> None:
        """Give the model memory, undefined: on the host what lives there, on the device all else.

        Weights that stay in files are in those of the model in `source`, or in a new one in `folder`.
        """

    def filling(self) -> AbstractContextManager[None]:
        """Inside, weights are read or drawn; where ranks share the host's, another one's have no data."""

    def settle(self) -> None:
        """Call after the backward of a step: the host's parameters have their gradients."""

    def weights_changed(self) -> None:
        """Call after every change of the host's weights: what the device has of them is no longer used."""


def blank_embedding(rows: int, width: int) -> nn.Embedding:
    """The weight is undefined: to draw one on the meta device imports torch's compiler, which takes a second."""
    embedding: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return embedding


class Backbone(nn.Module):
    """Everything below the head; of a stage of a pipeline, its own layers."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.stage = whole_model(config)
        self.link: StageLink | None = None  # to the other stages of a pipeline
        # The group of layers that a forward computes, which the schedule of a training step sets; None: all of the
        # stage, one after the other, as in evaluation.
        self.group: int | None = None
        # Seeds dropout from the number of a layer in the whole model, so that its masks do not depend on the stage that
        # it is in. Called before each layer in training; before the head, with the number that a further layer had.
        self.seed_layer: Callable[[int], None] | None = None
        self.embedding_noise = 0.0  # of NEFTune, in training
        self.exchange: SequenceExchange | None = None  # with ranks that share the sequences
        # Of the layers with experts: those of the last forward, until the decoder hands them on.
        self.loads: Mapping[int, RouterLoad] = {}
        # Whether the backward of embeddings adds to `.grad` itself, because autograd's gradient is as large as the
        # weight (`compiled_scores.RowsOf`). No hook sees that gradient: off where somebody waits for one.
        self.adds_rows = False
        self.axes: PositionAxes | None = None  # of a model that sees pictures
        # Whether backward passes all layers where no picture was seen, too: FSDP2 gathers weights for it, on all ranks.
        self.backward_in_full = False
        self.embed_tokens = blank_embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = blank_embedding(config.max_positions, config.hidden_size)
        if width := config.per_layer_input_size:
            all_layers = config.num_layers * width
            self.embed_tokens_per_layer = blank_embedding(config.vocab_size, all_layers)
            self.per_layer_model_projection = nn.Linear(config.hidden_size, all_layers, bias=False)
            self.per_layer_projection_norm = build_norm(config, width)
        self.layers = nn.ModuleList(Block(config, layer, backend) for layer in layers(config))
        self.norm = build_norm(config, config.hidden_size)
        self.frequencies = Frequencies(config)
        if backend == "compiled":
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.operator = compiled_pointwise.rms_norm

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        cache: Cache | None,
        borders: DocumentBorders | None = None,
        is_real_BT: Tensor | None = None,
        pictures: SeenPictures | None = None,
        axes_3BT: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states [B, T, D], normed; where the forward ends before the head, `StageLink.send`'s 0."""
        steps = self.layer_by_layer(
            tokens_BT,
            positions_BT,
            documents_BT,
            cache,
            borders,
            is_real_BT,
            pictures=pictures,
            axes_3BT=axes_3BT,
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                x_BTD, self.loads = end.value
                hidden_BTD: Tensor = x_BTD
                return hidden_BTD

    def forward_all(
        self, inputs: Sequence[ForwardInput]
    ) -> list[tuple[Tensor, Mapping[int, RouterLoad]]]:
        """Of each what `forward` returns, and the loads of its experts: every layer computes all before the next one.

        Within a layer the last input comes first. Autograd runs what was computed last first, so that one backward
        takes the layers in reverse, and in each of them the inputs in their order.
        """
        forwards = {
            number: self.layer_by_layer(
                inputs[number].tokens_BT,
                inputs[number].positions_BT,
                inputs[number].documents_BT,
                None,
                inputs[number].borders,
                inputs[number].is_real_BT,
                inputs[number].begin,
                inputs[number].pictures,
                inputs[number].axes_3BT,
            )
            for number in reversed(range(len(inputs)))
        }
        results = dict[int, tuple[Tensor, Mapping[int, RouterLoad]]]()
        while len(results) < len(inputs):
            for number, steps in forwards.items():
                try:
                    with inputs[number].around():
                        next(steps)
                except StopIteration as end:
                    results[number] = end.value
        return [results[number] for number in range(len(inputs))]

    def layer_by_layer(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        cache: Cache | None,
        borders: DocumentBorders | None,
        is_real_BT: Tensor | None,
        begin: Callable[[], None] | None = None,
        pictures: SeenPictures | None = None,
        axes_3BT: Tensor | None = None,
    ) -> Generator[None, None, tuple[Tensor, Mapping[int, RouterLoad]]]:
        """A forward that pauses after each layer, where others may run. It returns its hidden states, and the loads of
        its experts.
        """
        if begin is not None:
            begin()
        seed_layer = (
            self.seed_layer if self.training else None
        )  # others may set their own meanwhile

        # What depends on positions and documents alone is computed once, for all layers.
        positions = self.positions(tokens_BT, positions_BT, cache)
        layout = layout_of(documents_BT, backend=self.backend, borders=borders)
        rotary_by_layer = self.rotary(positions, axes_3BT)
        # Layers in which tokens of a picture see those after them have a layout of their own.
        both_ways = layout
        if pictures is not None and pictures.both_ways != "none":
            both_ways = replace(layout, pictures_BT=pictures.numbers_of(tokens_BT, documents_BT))

        stage = self.stage
        block_of_layer = dict(zip(stage.layers, self.layers, strict=True))
        inputs_LBTP: Sequence[Tensor | None] = (None,) * self.config.num_layers
        lent_by_layer: dict[int, VisiblePast] = {}
        loads = dict[int, RouterLoad]()
        counted = {} if is_real_BT is None else {"is_real_BT": is_real_BT}
        groups = range(len(stage.groups)) if self.group is None else (self.group,)
        for group in groups:
            # The residual stream begins with the embedded tokens, or comes from the stage before.
            if group == 0 and stage.embeds:
                x_BTD = self.embed(tokens_BT, positions)
                if pictures is not None:
                    x_BTD = pictures.in_place_of_tokens(x_BTD)
                if self.backward_in_full and torch.is_grad_enabled() and not x_BTD.requires_grad:
                    x_BTD = x_BTD.requires_grad_()
                if self.config.per_layer_input_size:
                    inner_BT = tokens_BT
                    if pictures is not None:
                        inner_BT = pictures.tokens_without(tokens_BT, self.config.pad_token_id or 0)
                    inputs_LBTP = self.per_layer_inputs(inner_BT, x_BTD).unbind(2)
            else:
                assert self.link is not None, "a stage has a link to the one before"
                x_BTD = self.link.receive(group, tokens_BT)
            for layer in stage.groups[group]:
                if seed_layer is not None:
                    seed_layer(layer)
                layer_cache = None if cache is None else cache.layers[layer]
                block: Any = block_of_layer[layer]
                has_window = block.kind.window is not None
                is_plain = pictures is None or (pictures.both_ways == "windows" and not has_window)
                output = block(
                    x_BTD,
                    rotary_by_layer[layer],
                    layout if is_plain else both_ways,
                    layer_cache,
                    inputs_LBTP[layer],
                    None if block.kind.keys_of is None else lent_by_layer[block.kind.keys_of],
                    **({} if block.kind.experts is None else counted),
                )
                x_BTD = output
                if isinstance(output, LayerOutput):
                    x_BTD = output.x_BTD
                    if output.past is not None:
                        lent_by_layer[layer] = output.past
                    if output.load is not None:
                        loads[layer] = output.load
                if pictures is not None:
                    x_BTD = pictures.added_after(layer, x_BTD)
                yield

            # It ends at the head, or goes on to the stage that follows.
            if stage.has_head and group == len(stage.groups) - 1:
                if seed_layer is not None:
                    seed_layer(self.config.num_layers)
                x_BTD = self.normed(x_BTD)
            else:
                assert self.link is not None, "a stage has a link to the one after"
                x_BTD = self.link.send(group, x_BTD)
        if cache is not None:
            cache.advance(tokens_BT.shape[1])
        return x_BTD, loads

    def normed(self, x_BTD: Tensor) -> Tensor:
        """What the head reads: the last hidden states, normed, and scaled instead of their logits."""
        scale = self.config.logit_scale
        if scale == 1.0 or self.config.head == "values":
            normed_BTD: Tensor = self.norm(x_BTD)
            return normed_BTD
        wide_BTD: Tensor = self.norm(x_BTD, widened(x_BTD).dtype)
        return (wide_BTD * scale).to(working_dtype(x_BTD))

    def positions(
        self, tokens_BT: Tensor, positions_BT: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """[B, T] as given, else [T] from where the cache ends; [B, 1] where its texts, which get one token each, end at
        different lengths.
        """
        if positions_BT is not None:
            return positions_BT

        # Only learned positions have an end: the planner refuses longer sequences, but generated text grows.
        count = tokens_BT.shape[1]
        end = count if cache is None else cache.length + count
        if self.config.positions == "learned" and end > self.config.max_positions:
            raise UserError(
                f"{end:,} tokens exceed the model's {self.config.max_positions:,} learned positions",
                fix="shorten the text",
            )
        if cache is None:
            return torch.arange(end, device=tokens_BT.device)
        return cache.positions(count, tokens_BT.device)

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        x_BTD: Tensor
        if self.adds_rows and torch.is_grad_enabled():
            x_BTD = RowsOf.apply(self.embed_tokens.weight, tokens_BT)  # type: ignore[no-untyped-call]  # torch's `apply`
        else:
            x_BTD = self.embed_tokens(tokens_BT)
        if self.embedding_noise and self.training:
            # NEFTune (arXiv:2310.05914): uniform in +-alpha / sqrt(T D), as in transformers.
            length = x_BTD.shape[1] * (1 if self.exchange is None else self.exchange.size)
            bound = self.embedding_noise / (length * x_BTD.shape[2]) ** 0.5
            x_BTD = x_BTD + torch.empty_like(x_BTD).uniform_(-bound, bound)
        if self.config.scale_embeddings:
            # Gemma rounds the factor to the weights' precision, and was trained that way.
            x_BTD = x_BTD * torch.tensor(self.config.hidden_size**0.5, dtype=x_BTD.dtype).item()
        if self.config.embedding_multiplier != 1.0:
            x_BTD = x_BTD * self.config.embedding_multiplier
        if self.config.positions == "learned":
            x_BTD = x_BTD + self.embed_positions(positions)

        rate = self.config.embedding_dropout
        return F.dropout(x_BTD, rate) if rate and self.training else x_BTD

    def per_layer_inputs(self, tokens_BT: Tensor, x_BTD: Tensor) -> Tensor:
        """What each layer is given of each token: [B, T, L, P], of its own embedding and of the embedded tokens."""
        width = self.config.per_layer_input_size
        weight = self.embed_tokens_per_layer.weight
        if self.adds_rows and torch.is_grad_enabled() and weight.requires_grad:
            rows = RowsOf.apply(weight, tokens_BT)  # type: ignore[no-untyped-call]  # torch's `apply`
        else:
            rows = self.embed_tokens_per_layer(tokens_BT)
        # Its factor is rounded to the weights' precision, as that of the other embedding.
        rows = rows * torch.tensor(width**0.5, dtype=rows.dtype).item()
        projected = self.per_layer_model_projection(x_BTD) * self.config.hidden_size**-0.5
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (-1, width)))
        inputs_BTLP: Tensor = (projected + rows.unflatten(-1, (-1, width))) * 2.0**-0.5
        return inputs_BTLP.to(working_dtype(inputs_BTLP))

    def rotary(self, positions: Tensor, axes_3BT: Tensor | None = None) -> list[Rotary | None]:
        """The table of every layer of the whole decoder; layers that rotate alike share theirs.

        `axes_3BT`: in place of positions, where the model has three axes of them.
        """
        rotations = [layer.rotation for layer in layers(self.config)]
        tables = {
            rotation: rotary_tables(positions, self.frequencies, rotation)
            if axes_3BT is None
            else rotary_tables(axes_3BT, self.frequencies, rotation, self.axes)
            for rotation in dict.fromkeys(rotations)
            if rotation is not None
        }
        return [None if rotation is None else tables[rotation] for rotation in rotations]


class DecodingStep(Protocol):
    """A forward of few tokens that `infer.past` uses in place of the decoder's own: `model.compiled_step`.

    `tokens`: of each text, those to append to its slot in the cache; the slots are consecutive from `first` on.
    """

    def takes(self, tokens: Sequence[Sequence[int]], first: int, cache: Cache) -> bool:
        """Whether the step supports these tokens."""

    def __call__(
        self, tokens: Sequence[Sequence[int]], first: int, cache: Cache, *, every: bool = False
    ) -> Tensor:
        """Float32 [N, V]: the logits after the last token of each slot, or after `every` token."""


class Output(NamedTuple):
    """What one forward gives."""

    # what the head made; where the forward ends before the head, the 0 of `StageLink.send`
    head: Tensor
    loads: Mapping[int, RouterLoad] = NO_LOADS  # of the layers with experts, where they are counted


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes, by name; what reads pictures has the names of transformers' whole model."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    vision = model.vision if isinstance(model, Decoder) else None
    return trained if vision is None else trained | vision.trained


class Decoder(nn.Module):
    """A language model, or a reward model with one value per token (`config.head`).

    It is built on the meta device, then given weights (`model.io.weights`). `attention` names a backend of
    `model.attention`; None takes the plain one. `value_head`: PPO trains a second output layer of one row, next to the
    language model's, which `heads.ScoresAndValues` uses.
    """

    def __init__(
        self, config: ModelConfig, *, attention: str | None = None, value_head: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False) if value_head else None
        self.step: DecodingStep | None = None  # None: decoding calls `forward`
        self._beside = dict[
            str, VisionTower
        ]()  # in a dict: modules of a module are trained and saved
        self.weight_stream: WeightStream | None = (
            None  # None: all weights are where the model computes
        )
        # Layers of transformers are never cut: their backbone has the same `stage`, `link` and `group`, of one device.
        self.model: Backbone | TransformersBackbone
        backend = attention or plain_backend(config)
        if config.transformers_backend is not None:
            self.model = TransformersBackbone(config, backend)
            self.lm_head = self.model.head
        elif config.head == "values":
            self.model = Backbone(config, backend)
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        else:
            self.model = Backbone(config, backend)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def use_attention(self, backend: str) -> None:
        """From now on the native layers compute with this backend of `model.attention`."""
        for module in self.modules():
            if isinstance(module, Attention | GatedDeltaNet | GatedShortConvolution | Backbone):
                module.backend = backend
        self.decode_with_kernel(backend == "triton")

    def share_sequences(self, exchange: SequenceExchange | None) -> None:
        """From now on each forward without a cache has this rank's part of the tokens of its sequences; None: all.

        A plan refuses it for layers with another mixer than attention.
        """
        for module in self.modules():
            if isinstance(module, Attention | Backbone):
                module.exchange = exchange

    def decode_with_kernel(self, is_used: bool) -> None:
        """Whether new tokens of a cache go to Triton's kernel from now on; sequences keep their backend."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.decodes_with_kernel = is_used

    @property
    def vision(self) -> VisionTower | None:
        """What reads pictures. It is no part of the module: most of its weights stay those of the base, and those that
        are trained have the names of another model (`trained_parameters`).
        """
        return self._beside.get("vision")

    def see(self, vision: VisionTower) -> None:
        """From now on forwards may have pictures. Raises UserError for layers of transformers."""
        if not isinstance(self.model, Backbone):
            raise UserError(
                "layers of transformers are trained on text alone",
                where="data.path",
                fix="remove the pictures, or choose a model with native layers",
            )
        self._beside["vision"] = vision
        self.model.axes = vision.vision.axes
        if vision.vision.both_ways != "none" and self.model.backend not in SEES_BOTH_WAYS:
            self.use_attention("mask")

    @property
    def device(self) -> torch.device:
        """Where the model computes: its weights may be elsewhere."""
        if self.weight_stream is not None:
            return self.weight_stream.device
        return next(self.parameters()).device

    @property
    def stage(self) -> Stage:
        """The part of the model that is here: all of it, unless it was cut."""
        return self.model.stage

    def tie(self) -> None:
        """Tie the head to the embedding if the config does. Must run again after parameters were replaced.

        It then also restores the buffers of transformers' layers, which the meta device does not keep.
        """
        if isinstance(self.model, TransformersBackbone):
            self.model.restore()
        # A pipeline has the two ends on two devices, each with the matrix: `StageParameters` keeps them equal.
        both_ends = self.stage.has_embedding and self.stage.has_head
        if self.config.tie_embeddings and self.config.head == "tokens" and both_ends:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        borders: DocumentBorders | None = None,
        head: Head = ALL_LOGITS,
        cache: Cache | None = None,
        is_real_BT: Tensor | None = None,
        pictures: SeenPictures | None = None,
        axes_3BT: Tensor | None = None,
    ) -> Output:
        """`head` of the last hidden states: by default all logits [B, T, V].

        positions_BT: int64, counted from the start of each document (default: from the start of the row or the cache).
        documents_BT: int64, the document of each token in its sequence, from 0; padding is -1; masks attention. Where
        ranks share the sequences, those of all tokens, and positions those of this rank's. borders: of the documents,
        where the caller knows them. is_real_BT: bool, which of this rank's tokens are no padding: the loads of the
        experts are counted over them, of native layers; None: not counted. pictures: what `vision` made of them.
        axes_3BT: int64, positions in three axes, in place of `positions_BT` where heads rotate.
        """
        optional = {"is_real_BT": is_real_BT, "pictures": pictures, "axes_3BT": axes_3BT}
        counted = {name: value for name, value in optional.items() if value is not None}
        last_BTD = self.model(tokens_BT, positions_BT, documents_BT, cache, borders, **counted)
        loads: Mapping[int, RouterLoad] = NO_LOADS
        if isinstance(self.model, Backbone):
            loads = self.model.loads
            self.model.loads = {}
        head_output = self.head_output(last_BTD, head) if self.ends_here else None

        # With a cache the next tokens depend on the output: every stage needs it.
        if cache is not None and self.model.link is not None:
            head_output = self.model.link.share(head_output)
        # Without a head, `last_BTD` is the 0 of `StageLink.send`, whose backward is that of this stage.
        return Output(last_BTD if head_output is None else head_output, loads=loads)

    def forward_all(self, inputs: Sequence[ForwardInput]) -> list[Output]:
        """What `forward` gives of each, on one device and without a cache: their gradients after one backward of all
        are bitwise those of one forward and backward after the other (`Backbone.forward_all`).

        Two things differ: a matrix that is both embedding and head, where it is trained, has its gradients as head
        first; and layers of transformers compute one input after the other.
        """
        if len(inputs) == 1:  # of one this is a call like any other, with the hooks of the module
            return [self._forward_of(inputs[0])]
        results = self.model.forward_all(inputs)
        outputs = dict[int, Output]()
        for number in reversed(range(len(inputs))):
            last_BTD, loads = results[number]
            with inputs[number].around():
                head_output = self.head_output(last_BTD, inputs[number].head)
            outputs[number] = Output(head_output, loads=loads)
        return [outputs[number] for number in range(len(inputs))]

    def _forward_of(self, forward_input: ForwardInput) -> Output:
        if forward_input.begin is not None:
            forward_input.begin()
        output: Output = self(
            forward_input.tokens_BT,
            positions_BT=forward_input.positions_BT,
            documents_BT=forward_input.documents_BT,
            borders=forward_input.borders,
            head=forward_input.head,
            is_real_BT=forward_input.is_real_BT,
            pictures=forward_input.pictures,
            axes_3BT=forward_input.axes_3BT,
        )
        return output

    def head_output(self, last_BTD: Tensor, head: Head) -> Tensor:
        is_value = self.config.head == "values"
        softcap = None if is_value else self.config.final_softcap
        return head(last_BTD, self.score if is_value else self.lm_head, softcap)

    @property
    def ends_here(self) -> bool:
        """Whether the next forward ends with the head, on this stage."""
        return self.stage.has_head and self.model.group in (None, len(self.stage.groups) - 1)
