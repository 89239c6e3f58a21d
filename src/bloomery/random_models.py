"""Small vision-language models with random weights, made on this machine: what tiny twins and `bloomery demo vision`
start from. `random:NAME` names one where a folder or an id of the Hub would name another.

Their tokenizers have a token for each byte, and those that a picture of their kind needs.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.core.files import cache_folder

PREFIX = "random:"
WEIGHTS = "model.safetensors"
Json = dict[str, Any]

# Each is a token of its own in all of these vocabularies.
_TURNS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
# ChatML, with MARK for a picture.
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class _RandomModel:
    """`config`: config.json without the ids of tokens. `ids`: the token of each id in it. `processor`: of images.

    `picture`: the token that stands where a picture's features do. `mark`: what the chat template writes instead,
    between `before` and `after`. `others`: further special tokens. `words`: a text whose words are tokens, too.
    """

    config: Json
    picture: str
    ids: Mapping[str, str]
    processor: Json
    mark: str = ""
    others: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    words: str = ""


_TEXT: Json = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_SMOLVLM = _RandomModel(
    config={
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        "scale_factor": 2,
        "tie_word_embeddings": True,
    },
    picture="<image>",
    ids={"image_token_id": "<image>", "pad_token_id": "<pad>"},
    processor={
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    others=("<fake_token_around_image>", "<global-img>"),
)
# For a language model that stays frozen: with weights as small as those of a new model it would hardly pass on what the
# projector gives it.
_SMOLVLM_LARGE_INIT = replace(
    _SMOLVLM,
    config=_SMOLVLM.config
    | {"text_config": _SMOLVLM.config["text_config"] | {"initializer_range": 0.15}},
)
# Of `bloomery demo vision`, which trains all of its two million weights: large ones at first, and short texts.
_SMOLVLM_2M = replace(
    _SMOLVLM,
    config=_SMOLVLM.config
    | {
        "text_config": _TEXT
        | {
            "model_type": "llama",
            "hidden_size": 160,
            "intermediate_size": 448,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "initializer_range": 0.06,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "initializer_range": 0.08,
        },
    },
    words="user assistant Which shape? Which color? circle square triangle red green blue",
)
_QWEN_TOWER: Json = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "depth": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_AXES = {"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True}
_QWEN_PROCESSOR: Json = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _qwen(kind: str, architecture: str, text: Json, tower: Json) -> _RandomModel:
    return _RandomModel(
        config={
            "model_type": kind,
            "architectures": [architecture],
            "text_config": _TEXT | {"model_type": f"{kind}_text"} | text,
            "vision_config": _QWEN_TOWER | {"model_type": f"{kind}_vision"} | tower,
            "tie_word_embeddings": True,
        },
        picture="<|image_pad|>",
        before="<|vision_start|>",
        after="<|vision_end|>",
        others=("<|video_pad|>",),
        ids=_QWEN_IDS,
        processor=_QWEN_PROCESSOR,
    )


_QWEN3_VL = _qwen(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    {"rope_parameters": _QWEN_AXES | {"mrope_section": [6, 5, 5]}},
    {"deepstack_visual_indexes": [0]},
)
_QWEN3_5 = _qwen(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    {
        "num_hidden_layers": 4,  # three with a delta net, one with attention
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": _QWEN_AXES | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    },
    {},
)
# As Gemma 4 12B: no tower, patches are projected into the language model. Its processor scales every picture to some 70
# tokens.
_GEMMA4 = _RandomModel(
    config={
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": _TEXT
        | {
            "model_type": "gemma4_unified_text",
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 64,
            "sliding_window": 128,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 128,
            "mm_posemb_size": 70,
            "output_proj_dims": 128,
        },
        "audio_config": None,
        "tie_word_embeddings": True,
    },
    picture="<|image|>",
    ids={"image_token_id": "<|image|>", "video_token_id": "<|video|>"},
    processor={
        "image_processor_type": "Gemma4UnifiedImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    },
    others=("<|image>", "<image|>", "<|video|>"),
)
MODELS: Mapping[str, _RandomModel] = MappingProxyType(
    {
        "smolvlm": _SMOLVLM,
        "smolvlm-2m": _SMOLVLM_2M,
        "qwen3-vl": _QWEN3_VL,
        "qwen3.5": _QWEN3_5,
        "gemma4": _GEMMA4,
        "smolvlm-large-init": _SMOLVLM_LARGE_INIT,
    }
)


def is_random(name: str | Path) -> bool:
    return str(name).startswith(PREFIX)


def folder_of(name: str, *, weights: bool = False) -> Path:
    """The folder of `random:NAME` in this user's cache, made where it is missing: its config, tokenizer and image
    processor, and with `weights` these, too.

    Raises UserError for a name that is not known, and without transformers for weights.
    """
    model = MODELS.get(name.removeprefix(PREFIX))
    if model is None:
        known = ", ".join(PREFIX + each for each in MODELS)
        raise UserError("no random model has this name", where=name, fix=f"use {known}", code=2)
    digest = hashlib.sha256(repr(model).encode()).hexdigest()[:8]
    folder = cache_folder() / "models" / f"{name.removeprefix(PREFIX)}-{digest}"
    if not (folder / "config.json").is_file():
        _write_config(model, folder)
    if weights and not (folder / WEIGHTS).is_file():
        _write_weights(folder)
    return folder


def _write_config(model: _RandomModel, folder: Path) -> None:
    """All at once: a folder with a config.json is complete but for the weights."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    try:
        ids = _write_tokenizer(model, draft)
        config = json.loads(json.dumps(model.config))
        config |= {key: ids[token] for key, token in model.ids.items()}
        config["text_config"] |= {"vocab_size": len(ids), "pad_token_id": ids["<pad>"]}
        config["text_config"] |= {"bos_token_id": ids["<bos>"], "eos_token_id": ids["<|im_end|>"]}
        _write_json(draft / "config.json", config)
        _write_json(draft / "preprocessor_config.json", model.processor)
        # Another process may have made the same meanwhile.
        with suppress(OSError):
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_tokenizer(model: _RandomModel, folder: Path) -> dict[str, int]:
    """The ids of all tokens: one for each byte, then the special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    named = (model.before, model.after, *model.others, model.picture)
    special = [*_TURNS, *dict.fromkeys(token for token in named if token)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = models.BPE(vocab={token: id for id, token in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(bytes_alone)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if model.words:
        # Merged until each word is one token; each stands alone, too, as an answer does.
        trainer = trainers.BpeTrainer(
            initial_alphabet=alphabet, show_progress=False, vocab_size=2**16
        )
        tokenizer.train_from_iterator([model.words, *model.words.split(" ")], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    mark = model.before + (model.mark or model.picture) + model.after
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<|im_end|>",
        "chat_template": _TEMPLATE.replace("MARK", mark),
    }
    _write_json(folder / "tokenizer_config.json", settings)
    ids: dict[str, int] = tokenizer.get_vocab()
    return ids


def _write_weights(folder: Path) -> None:
    """As transformers draws those of a new model, from a fixed seed."""
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
    except ImportError as error:
        raise UserError(
            "transformers, which has the vision tower, is not installed", fix=install_extra("hf")
        ) from error

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    build: Any = AutoModelForImageTextToText.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = build(CONFIG_MAPPING[settings["model_type"]].from_dict(settings))
    # The head is the embedding, as in published files of such models.
    tensors = {name: t for name, t in whole.state_dict().items() if name != "lm_head.weight"}
    draft = folder / f".tmp-{os.getpid()}"
    save_file(tensors, draft, metadata={"format": "pt"})
    draft.replace(folder / WEIGHTS)


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
