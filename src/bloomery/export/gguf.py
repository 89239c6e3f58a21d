"""A model as one GGUF file for llama.cpp, Ollama and other programs on ggml, written tensor by tensor.

Names, shapes and metadata are those of llama.cpp's conversion scripts; what its graph of an architecture cannot compute
is refused before anything is written.
"""

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.data.chat.render import chat_format
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.export import K_TYPES
from bloomery.export.card import license_of
from bloomery.export.gguf_experts import describe_experts, mlp_width
from bloomery.export.gguf_format import (
    ELSEWHERE,
    GgufTensor,
    attention_interval,
    computed_tensors,
    encoded,
    fallbacks,
    first_with_heads,
    gguf_library,
    gguf_tensors,
    graph_differences,
    supported_graph,
    type_of,
    unsupported,
    vocabulary,
)
from bloomery.export.gguf_import import read_gguf
from bloomery.export.gguf_writing import FILE_TYPES, PlannedTensor, write_file
from bloomery.export.layouts import (
    Exported,
    adapter_without_base,
    draft_of,
    merged_state,
    open_merged,
)
from bloomery.export.merge_proof import proof_of_changes
from bloomery.export.mmproj import (
    Mmproj,
    num_deep_layers,
    plan_mmproj,
    text_graph_name,
    verify_mmproj,
    write_mmproj,
)
from bloomery.export.verify import verify_gguf
from bloomery.facts.config import DeltaNet, LatentAttention, ModelConfig
from bloomery.facts.counting import (
    expert_parts,
    expert_stacks,
    is_expert_stack,
    is_in_layer,
    layers,
    smallest_window,
    unstacked_shapes,
)
from bloomery.facts.hf_config import config_to_hf
from bloomery.facts.pictures import Vision, vision_of
from bloomery.infer.load import Use
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.adapters.base_changes import changes_of_base
from bloomery.model.adapters.lora import stack_adapter
from bloomery.model.adapters.peft_reading import base_tensors, read_adaptation, tower_changes
from bloomery.model.adapters.settings import base_of, has_stacks, read_settings
from bloomery.model.adapters.tower import merged_tower
from bloomery.model.configs import read_config, stated_config
from bloomery.model.decoder import Decoder
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import tensor_locations
from bloomery.model.io.weights import StoredModel, load_decoder, parts_of_stacks
from bloomery.model.rope import table_scale

# Metadata


def _describe_model(writer: Any, config: ModelConfig, library: Any) -> None:
    """The keys that llama.cpp reads its hyperparameters from."""
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    first_layer = first_with_heads(config)
    graph = supported_graph(config)
    if config.experts is not None and graph.experts is not None:
        writer.add_feed_forward_length(mlp_width(config, graph.experts))
        describe_experts(writer, config, graph.experts)
    else:
        mlp_widths = [layer.intermediate_size for layer in layers(config)]
        has_one_width = len(set(mlp_widths)) == 1
        writer.add_feed_forward_length(mlp_widths[0] if has_one_width else mlp_widths)
    writer.add_head_count(first_layer.num_heads)
    heads_by_layer = [layer.num_kv_heads for layer in layers(config)]
    is_hybrid = len(set(heads_by_layer)) > 1 and not graph.has_delta_nets
    if config.latent_attention is not None:
        _describe_latent(writer, config.latent_attention)
    else:
        writer.add_head_count_kv(heads_by_layer if is_hybrid else first_layer.num_kv_heads)
        writer.add_key_length(first_layer.head_dim)
        writer.add_value_length(first_layer.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if config.norm.startswith("layer"):
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.attention_softcap is not None:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.final_softcap is not None:
        writer.add_final_logit_softcapping(config.final_softcap)
    if config.delta_net is not None:
        _describe_delta_nets(writer, config, config.delta_net)
    if graph.states_windows:
        _describe_windows(writer, config)
    stated = config_to_hf(config)
    for key, name in graph.keys.items():
        add = writer.add_uint32 if isinstance(stated[key], int) else writer.add_float32
        add(f"{writer.arch}.{name}", stated[key])
    if config.logit_scale != 1.0 and not {"logits_scaling", "logit_scale"} & graph.keys.keys():
        writer.add_logit_scale(config.logit_scale)
    window = smallest_window(config)
    if graph.window_period and window is not None:
        writer.add_sliding_window(window)
    elif graph.states_no_window:
        writer.add_sliding_window(0)

    # Rotary positions and their scaling.
    if config.positions != "rotary":
        return
    rotation = first_layer.rotation or next(
        layer.rotation for layer in layers(config) if layer.rotation is not None
    )
    writer.add_rope_dimension_count(rotation.width)
    writer.add_rope_freq_base(config.rope_theta)
    if config.local_rope_theta is not None and not graph.plain_window_rotation:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", config.local_rope_theta)
    if config.query_scale is not None:
        writer.add_attn_temperature_scale(config.query_scale.beta)
    scaling = config.rope_scaling
    if scaling is None:
        return
    original_context = scaling.original_max_positions or config.max_positions
    if scaling.kind == "linear":
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    elif scaling.kind == "yarn":
        writer.add_rope_scaling_type(library.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(original_context)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
        if graph.rounds_yarn:  # a key of ours, for the way back
            writer.add_bool(f"{writer.arch}.rope.scaling.yarn_truncate", scaling.truncate)
        if scaling.mscale_all_dim is not None and config.latent_attention is not None:
            # A tenth of it, as llama.cpp's conversion writes it: it divides by 0.1.
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling.mscale_all_dim)
        elif scaling.attention_factor is not None:  # llama.cpp multiplies it by YaRN's own
            own_factor = 0.1 * math.log(scaling.factor) + 1.0
            writer.add_rope_scaling_attn_factors(scaling.attention_factor / own_factor)
    elif scaling.kind == "longrope":
        writer.add_rope_scaling_type(library.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original_context)
        writer.add_rope_scaling_attn_factors(table_scale(config, scaling))


def _describe_latent(writer: Any, latent: LatentAttention) -> None:
    """llama.cpp multiplies the matrices of keys and values into those around them: all heads then share one key, the
    vector of the latent with the part that rotates.
    """
    writer.add_head_count_kv(1)
    writer.add_key_length(latent.rank + latent.rotary_width)
    writer.add_value_length(latent.rank)
    writer.add_key_length_mla(latent.plain_width + latent.rotary_width)
    writer.add_value_length_mla(latent.value_width)
    writer.add_kv_lora_rank(latent.rank)
    writer.add_q_lora_rank(latent.query_rank or 0)  # required, and 0 where queries have one matrix


def _describe_windows(writer: Any, config: ModelConfig) -> None:
    """Which layers have a window, and what they have of their own; shared keys, and inputs of each layer."""
    windowed = next(layer for layer in layers(config) if layer.window is not None)
    assert windowed.window is not None and windowed.rotation is not None
    writer.add_sliding_window(windowed.window)
    writer.add_sliding_window_pattern([layer.window is not None for layer in layers(config)])
    writer.add_key_length_swa(windowed.head_dim)
    writer.add_value_length_swa(windowed.head_dim)
    writer.add_rope_dimension_count_swa(windowed.rotation.width)
    if config.local_rope_theta is None:  # llama.cpp assumes another base where none is stated
        writer.add_rope_freq_base_swa(config.rope_theta)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.per_layer_input_size)


def _describe_delta_nets(writer: Any, config: ModelConfig, sizes: DeltaNet) -> None:
    interval = attention_interval(config)
    assert interval is not None, "`unsupported` refuses other orders of layers"
    writer.add_full_attention_interval(interval)
    writer.add_ssm_conv_kernel(sizes.kernel)
    writer.add_ssm_state_size(sizes.key_head_dim)
    writer.add_ssm_group_count(sizes.num_key_heads)
    writer.add_ssm_time_step_rank(sizes.num_value_heads)
    writer.add_ssm_inner_size(sizes.value_width)


def _describe_axes(writer: Any, config: ModelConfig, vision: Vision | None) -> None:
    """Pairs of a head that turn with the time, the height and the width of a position: in a text all three are the
    same. The graphs of delta nets need them of every model.
    """
    if vision is not None and vision.axes is not None:
        writer.add_rope_dimension_sections([*vision.axes.sections, 0])
    elif config.delta_net is not None:
        rotation = first_with_heads(config).rotation
        assert rotation is not None, "the family rotates every head"
        pairs = rotation.width // 2
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    deep_layers = 0 if vision is None else num_deep_layers(vision)
    if deep_layers:
        writer.add_uint32(f"{writer.arch}.n_deepstack_layers", deep_layers)


def _describe_vocabulary(writer: Any, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Tokens, special tokens and the chat template."""
    # llama.cpp puts BOS before each text where it reads SentencePiece's merges, whatever the file states.
    merged = supported_graph(config).states_merges and tokenizer.bos_id in tokenizer.prefix
    known = vocabulary(
        tokenizer.description, config.vocab_size, where="tokenizer.json", merged=merged
    )
    if known.model != "llama" and not known.merges:
        raise UserError(
            "the tokenizer has no merges, and llama.cpp opens no file without them",
            where="tokenizer.json",
            fix="use --to hf or --to merged; models of random: have such a tokenizer, published ones do not",
        )
    writer.add_tokenizer_model(known.model)
    writer.add_tokenizer_pre(known.pre)
    writer.add_token_list(known.tokens)
    if known.model in ("llama", "gemma4"):
        writer.add_token_scores(known.scores)
        writer.add_add_space_prefix(known.space_prefix)
    writer.add_token_types(known.types)
    if known.merges:
        writer.add_token_merges(known.merges)

    # The tokenizer's special tokens, else those of the config.
    ids = {
        "bos": (tokenizer.bos_id, config.bos_token_id),
        "eos": (tokenizer.eos_id, config.eos_token_id),
        "unk": (tokenizer.unk_id, None),
        "pad": (tokenizer.pad_id, config.pad_token_id),
    }
    for role, (tokenizer_id, config_id) in ids.items():
        index = config_id if tokenizer_id is None else tokenizer_id
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(tokenizer.bos_id in tokenizer.prefix)
    writer.add_add_eos_token(False)

    templates = own_templates(tokenizer.config)
    if not templates:
        return
    if len(templates) > 1:
        writer.add_chat_template(
            [{"name": name, "template": text} for name, text in templates.items()]
        )
    else:
        writer.add_chat_template(templates.get("default", ""))
    # The end of a turn ends the answer, also where it is not EOS.
    with chat_format(tokenizer, None) as form:
        turn_ends = [index for index in form.stop_ids if index != tokenizer.eos_id]
    if turn_ends:
        writer.add_eot_token_id(turn_ends[0])


def _model_name(name: str, description: Mapping[str, Any]) -> str:
    """llama.cpp strips white space after the special tokens of every model named Phi-3, and looks for its tokens."""
    phi3 = re.compile("phi(-?)3", re.IGNORECASE)
    added_tokens = description.get("added_tokens") or []
    contents = {token["content"] for token in added_tokens}
    has_phi3_tokens = {"<|endoftext|>", "<unk>", "<s>", "</s>"} <= contents
    if not has_phi3_tokens or not any(token.get("rstrip") for token in added_tokens):
        return phi3.sub("phi_3", name)
    return name if phi3.search(name) else f"{name} (phi-3)"


# Export


@dataclass(frozen=True)
class ParameterSource:
    """A model to export, read by `parameter(name)` or a few `rows(name)` at a time, in any float dtype; of stacks of
    experts by the names of their parts (`counting.expert_parts`).

    Rows may only be read until the next are taken.
    """

    config: ModelConfig
    rows: Callable[[str], Iterator[Tensor]]

    def parameter(self, name: str) -> Tensor:
        return torch.cat([rows.clone() for rows in self.rows(name)])


@contextmanager
def open_source(files: ModelFiles, use: Use) -> Iterator[ParameterSource]:
    """A stored model, or an adapter merged into its base in float32. Raises UserError as `load_decoder` does."""
    with ExitStack() as stack:
        if files.base is None:
            config = read_config(files.weights)
            _refuse(config, files.weights)
            stored = stack.enter_context(StoredModel(config, files.weights))
            yield ParameterSource(config, lambda name: _stored_rows(stored, name))
        elif read_settings(files.weights)["peft_type"] == "LORA":
            _refuse(read_config(files.base), files.base)
            merged = open_merged(files.weights, files.base, torch.float32, use.device)
            read_parameter, config = stack.enter_context(merged)
            _refuse(config, files.weights)
            read_part = parts_of_stacks(read_parameter, config)
            yield ParameterSource(config, lambda name: iter((read_part(name).cpu(),)))
        else:
            decoder = load_decoder(files.weights, base=files.base, dtype=torch.float32)
            _refuse(decoder.config, files.base)
            state = merged_state(decoder, torch.float32)
            state_part = parts_of_stacks(state.__getitem__, decoder.config)
            yield ParameterSource(decoder.config, lambda name: iter((state_part(name),)))


def _refuse(config: ModelConfig, where: Path) -> None:
    if (problem := unsupported(config)) is not None:
        raise UserError(problem, where=str(where), fix=ELSEWHERE)


def _stored_rows(stored: StoredModel, name: str) -> Iterator[Tensor]:
    """A parameter, a few rows at a time as they are stored; of those that are stored transposed, all in float32."""
    location = stored.locations[name]
    shape = unstacked_shapes(stored.config)[name]
    if len(shape) > 1 and not location.transposed and not location.stacked:
        pieces = stored.reader.pieces(
            stored.tensors[name], location.first, shape[0], device=torch.device("cpu")
        )
        for _, rows in pieces:
            yield rows
        return
    parameter = torch.empty(shape)
    stored.fill(name, parameter)
    yield parameter


def _draft_file(out: Path) -> AbstractContextManager[Path]:
    if out.suffix != ".gguf":
        fix = f"use --out {out.name}.gguf"
        raise UserError("the name of a GGUF file ends in .gguf", where=str(out), fix=fix, code=2)
    return draft_of(out, "file")


def export_gguf(
    files: ModelFiles, out: Path, *, kind: str = "f16", verify: bool = True, use: Use | None = None
) -> Exported:
    """Writes the model as the new file `out`, completely or not at all; an adapter is merged into its base.

    The tower of a model that sees pictures becomes a second file, `mmproj-` with the same name; where llama.cpp has no
    such tower, a sentence says so. `kind`: one of GGUF_TYPES or K_TYPES. The same model gives the same bytes. A few
    rows at a time are in memory, of q, k, transposed weights and towers one tensor. What an adapter changes must differ
    from the base in the file; of K types in the float32 file that is rounded to them. Verification compares every
    tensor of the files, the token ids of some texts and the chat template with the model's. Raises UserError.
    """
    use = use or Use("cpu")
    library = gguf_library()
    vision = vision_of(stated_config(files.base or files.weights))
    mmproj_out = out.with_name(f"mmproj-{out.name}")
    mmproj: Mmproj | None = None
    with ExitStack() as stack:
        draft = stack.enter_context(_draft_file(out))
        tokenizer = load_tokenizer(files.tokenizer)
        with open_source(files, use) as source:
            config = source.config
            notes = [*graph_differences(config, tokenizer.description), *fallbacks(config, kind)]

            # What reads pictures is planned before anything is written.
            if vision is not None:
                reader = stack.enter_context(TensorReader())
                embedding = partial(_embedding, source)
                changed = {}
                if files.base is not None:
                    changed = merged_tower(files.base, files.weights, config)
                planned = plan_mmproj(
                    files, vision, kind, reader, tokenizer, embedding, changed=changed
                )
                if isinstance(planned, str):
                    notes.append(f"no mmproj file, so llama.cpp sees no pictures: {planned}")
                else:
                    mmproj = planned
                    notes += mmproj.notes
                    mmproj_draft = stack.enter_context(_draft_file(mmproj_out))
            with _to_write(draft, kind) as (path, written):
                write_gguf(
                    path,
                    source,
                    written,
                    library,
                    tokenizer,
                    name=out.stem,
                    license_=license_of(files.weights, files.base),
                    vision=vision,
                )
                if files.base is not None:
                    proof = proof_of_change_in_file(path, config, files, written, use)
            if mmproj is not None:
                write_mmproj(mmproj_draft, mmproj, library)
            proofs = tuple(f"differs    {note}" for note in notes)
            if files.base is not None:
                proofs += (proof,)
            if verify:
                proofs += verify_gguf(draft, config, source.rows, tokenizer, where=out)
                if mmproj is not None:
                    proofs += (verify_mmproj(mmproj_draft, mmproj, where=mmproj_out),)
    size = out.stat().st_size
    if mmproj is None:
        return Exported(out, size, proofs)
    size += mmproj_out.stat().st_size
    both = f"-m {shlex.quote(str(out))} --mmproj {shlex.quote(str(mmproj_out))}"
    commands = f"llama-mtmd-cli {both} --image PICTURE -p TEXT\nllama-server {both}"
    return Exported(out, size, proofs, commands, mmproj=mmproj_out)


def _embedding(source: ParameterSource, token: int) -> Tensor:
    """Of one token, float32 [hidden size]."""
    before = 0
    for rows in source.rows("model.embed_tokens.weight"):
        if token < before + len(rows):
            return rows[token - before].float().clone()
        before += len(rows)
    raise AssertionError(f"{token} is no row of the embeddings")


def proof_of_change_in_file(
    path: Path, config: ModelConfig, files: ModelFiles, kind: str, use: Use
) -> str:
    """`proof_of_changes` of a merged model in a GGUF file, whose bytes are compared with those of the base.

    `kind`: the type that the file was written in. Raises UserError.
    """
    assert files.base is not None
    _, tensors = read_gguf(path)
    sizes = {name: math.prod(shape) for name, shape in unstacked_shapes(config).items()}
    # Where a part begins in each tensor of the file that has it, in numbers; tensors with moved rows are whole ones.
    places: dict[str, list[tuple[GgufTensor, int]]] = {}
    for piece in gguf_tensors(config):
        before = 0
        for part in piece.parts:
            place = (piece, 0) if piece.moves_rows else (replace(piece, parts=(part,)), before)
            places.setdefault(part, []).append(place)
            before += sizes[part]

    with open_source(ModelFiles(files.base, None, files.tokenizer), use) as base:
        base_shapes = unstacked_shapes(base.config)

        def differs_at(piece: GgufTensor, before: int) -> bool:
            stored = tensors[piece.name].data.reshape(-1).view(np.uint8)
            at = before * len(stored) // math.prod(piece.shape)
            for chunk in _encoded_rows(piece, base, type_of(piece.name, piece.shape, kind)):
                expected = np.frombuffer(chunk, np.uint8)
                if not np.array_equal(stored[at : at + len(expected)], expected):
                    return True
                at += len(expected)
            return False

        def differs(name: str) -> bool:
            # A part that the base lacks, as a head that was tied, is new.
            is_new = name in places and name not in base_shapes
            return is_new or any(differs_at(*place) for place in places.get(name, ()))

        return proof_of_changes(differs, files.base, files.weights, finer="--type f32")


def write_gguf(
    path: Path,
    source: ParameterSource,
    kind: str,
    library: Any,
    tokenizer: Tokenizer,
    *,
    name: str,
    license_: str | None,
    vision: Vision | None = None,
) -> None:
    """The file, tensor by tensor. Raises UserError for a model that llama.cpp cannot run, or that is not finite."""
    config = source.config
    writer = library.GGUFWriter(path, text_graph_name(supported_graph(config).name, vision))
    writer.add_type("model")
    writer.add_name(_model_name(name, tokenizer.description))
    if license_ is not None:
        writer.add_license(license_)
    writer.add_string("general.exported_by", f"bloomery {__version__}")
    _describe_model(writer, config, library)
    _describe_axes(writer, config, vision)
    writer.add_file_type(library.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(library.GGML_QUANT_VERSION)
    _describe_vocabulary(writer, tokenizer, config)

    # Tensors of parameters, then those that follow from the config.
    tensors = []
    for piece in gguf_tensors(config):
        stored_as = type_of(piece.name, piece.shape, kind)
        chunks = partial(_encoded_rows, piece, source, stored_as)
        tensors.append(PlannedTensor(piece.name, piece.shape, stored_as, chunks))
    for tensor, values in computed_tensors(config).items():
        chunks = partial(iter, (values.tobytes(),))
        tensors.append(PlannedTensor(tensor, values.shape, "f32", chunks))
    write_file(writer, path, tensors, library)


def _encoded_rows(piece: GgufTensor, source: ParameterSource, kind: str) -> Iterator[memoryview]:
    """The bytes of a tensor of the file, a few rows at a time; where rows are reordered, as of q and k, all at once."""
    if piece.moves_rows:
        parameters = [source.parameter(part) for part in piece.parts]
        all_rows: Iterator[Tensor] = iter((torch.cat(parameters),))
    else:
        all_rows = chain.from_iterable(map(source.rows, piece.parts))
    for rows in all_rows:
        yield encoded(piece.apply(rows).contiguous(), kind, piece.name).data


@contextmanager
def _to_write(draft: Path, kind: str) -> Iterator[tuple[Path, str]]:
    """The file to write, and its type: for a K type one in float32, which llama-quantize turns into `draft`."""
    if kind not in K_TYPES:
        yield draft, kind
        return
    program = shutil.which("llama-quantize")
    if program is None:
        fix = "install llama.cpp (brew install llama.cpp, or https://github.com/ggml-org/llama.cpp), or use --type q8_0"
        raise UserError(
            f"{kind} needs llama-quantize, which is not installed", where="--type", fix=fix
        )
    plain = draft.with_name(draft.name.replace(".gguf-", ".gguf-plain-"))
    try:
        yield plain, "f32"
        done = subprocess.run(
            [program, str(plain), str(draft), kind.upper()],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not draft.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"llama-quantize failed: {last[:200]}", where=program, fix="use --type q8_0"
            )
    finally:
        plain.unlink(missing_ok=True)


def export_gguf_adapter(files: ModelFiles, out: Path, *, kind: str = "f16") -> Exported:
    """Writes a LoRA adapter as the new file `out` for `llama-cli --lora`. Raises UserError for what llama.cpp's LoRA
    cannot hold.
    """
    if files.base is None:
        problem = "cannot export an adapter: this is a full model"
        fix = "use --to gguf"
        raise UserError(problem, where=str(files.weights), fix=fix, code=2)
    if kind not in ("f32", "f16", "bf16"):
        raise UserError(
            f"an adapter is not stored as {kind}",
            where="--type",
            fix="use --type f16 or f32",
            code=2,
        )
    base = read_config(files.base)
    settings = read_settings(files.weights)
    _refuse(base, files.base)
    merge = "use --to gguf, which merges it into its base"
    if settings["peft_type"] != "LORA":
        raise UserError(
            f"llama.cpp has no {settings['peft_type']} adapters",
            where=str(files.weights),
            fix=merge,
        )
    adaptation, config = read_adaptation(files.weights, base, base=files.base)
    features = ["DoRA"] if adaptation.dora else []
    features += ["whole modules"] if adaptation.modules_to_save else []
    features += ["changes of what reads pictures"] if tower_changes(files.weights, base) else []
    features += ["new tokens"] if config.vocab_size != base.vocab_size else []
    if any(not is_in_layer(module) for module in adaptation.pairs):
        features += ["matrices for per_layer_model_projection, where it adds none"]
    unadapted = supported_graph(base).unadapted
    if any(module.endswith(unadapted) for module in adaptation.pairs):
        names = ", ".join(name.rpartition(".")[2] for name in unadapted)
        features += [f"matrices of latent attention ({names}), where it adds none"]
    features += changes_of_base(adaptation)
    if features:
        problem = (
            "llama.cpp's adapters hold LoRA matrices of linear layers alone; this one has "
            + ", ".join(features)
        )
        raise UserError(problem, where=str(files.weights), fix=merge)
    library = gguf_library()
    stored = base_tensors(files.weights, config).by_name
    locations = tensor_locations(config)
    shapes = unstacked_shapes(config)
    pairs_by_stored_name = {
        locations[f"{module}.weight"].name.removesuffix(".weight"): pair
        for module, pair in adaptation.pairs.items()
        if not is_expert_stack(module)
    }
    stack_pairs = {}
    if has_stacks(adaptation):
        stack_pairs = _pairs_of_stacks(
            adapter_without_base(adaptation, config, files.weights, "cpu")
        )
    with _draft_file(out) as draft, TensorReader() as reader:
        vision = vision_of(stated_config(files.base))
        graph_name = text_graph_name(supported_graph(config).name, vision)
        writer = library.GGUFWriter(draft, graph_name)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_name(out.stem)
        writer.add_string("general.base_model.0.name", _base_name(files.base))
        writer.add_float32("adapter.lora.alpha", 1.0)
        tensors: list[PlannedTensor] = []
        for piece in gguf_tensors(config):
            if piece.parts and piece.parts[0] in stack_pairs:
                tensors += _planned_pair(piece.name, stack_pairs[piece.parts[0]].of(piece), kind)
                continue
            target = locations[piece.parts[0]].name.removesuffix(".weight") if piece.parts else ""
            A_name = f"{target}.lora_A.weight"
            if not piece.name.endswith(".weight") or A_name not in stored:
                continue
            stored_pair = stored[A_name], stored[f"{target}.lora_B.weight"]
            A, B = (reader.read(matrix).float() for matrix in stored_pair)
            # llama.cpp multiplies by alpha / rank, where alpha is 1 here and the rank is that of the stored pair.
            B = B * (pairs_by_stored_name[target].scale * A.shape[0])
            # A matrix of the adapter may hold several of the file's, as gate and up of Granite 4.
            first_row = locations[piece.parts[0]].first
            num_rows = sum(shapes[part][0] for part in piece.parts)
            B = B[first_row : first_row + num_rows]
            tensors += _planned_pair(piece.name, piece.apply_to_pair(A, B), kind)
        assert tensors, "an adapter has matrices"
        write_file(writer, draft, tensors, library)
        size = draft.stat().st_size
    num_pairs = len(tensors) // 2
    proof = f"{num_pairs} pairs of LoRA matrices for {_base_name(files.base)}"
    return Exported(out, size, (proof,))


@dataclass(frozen=True)
class _StackPair:
    """The LoRA of a stack of experts, A [E, R, I] and B [E, O, R], times its scale and R: llama.cpp divides by it."""

    A: Tensor
    B: Tensor
    rows_by_part: Mapping[str, slice]

    def of(self, piece: GgufTensor) -> tuple[Tensor, Tensor]:
        """Of a tensor of the file, which may have the rows of gate or of up alone."""
        names = piece.parts[: len(piece.parts) // piece.shape[0]]
        B = torch.cat([self.B[:, self.rows_by_part[name]] for name in names], dim=1)
        return self.A, B


def _pairs_of_stacks(model: Decoder) -> dict[str, _StackPair]:
    """By the name of each part of the stacks that an adapter changes."""
    pairs: dict[str, _StackPair] = {}
    for stack, shape in expert_stacks(model.config).items():
        lora = stack_adapter(model, stack)
        if lora is None:
            continue
        parts = expert_parts(stack, shape)
        rows = {part.name: slice(part.first, part.first + part.rows) for part in parts}
        B = lora.lora_B.detach() * (lora.scale * lora.rank)
        pair = _StackPair(lora.lora_A.detach(), B, rows)
        pairs |= dict.fromkeys(rows, pair)
    return pairs


def _planned_pair(name: str, pair: tuple[Tensor, Tensor], kind: str) -> Iterator[PlannedTensor]:
    for suffix, matrix in zip(("lora_a", "lora_b"), pair, strict=True):
        content = encoded(matrix.contiguous(), kind, name).data
        yield PlannedTensor(
            f"{name}.{suffix}", tuple(matrix.shape), kind, partial(iter, (content,))
        )


def _base_name(folder: Path) -> str:
    """The Hub id, or the last part of the path: a whole path could identify the author."""
    name = base_of(folder).name
    return Path(name).name if name.startswith("/") else name
