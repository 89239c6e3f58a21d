"""Which tokens begin and end texts, pad them and stand for unknown ones: as transformers reads a tokenizer's folder.

A role is a key of tokenizer_config.json or special_tokens_map.json, or a default of the tokenizer class that
transformers opens the folder with. A name alone, such as `<s>` in a vocabulary, gives a token no role.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.core.units import MIB
from bloomery.data.tokenizer import templates

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
MAX_FILE = 512 * MIB  # bytes; a larger tokenizer is refused without reading it
ANOTHER = "download or save the tokenizer again"
Json = dict[str, Any]

_CLASS = "tokenizer_class"
_SAME = "<|endoftext|>"
_GPT2 = {"bos_token": _SAME, "eos_token": _SAME, "unk_token": _SAME}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_QWEN = {"eos_token": _SAME, "pad_token": _SAME, "unk_token": _SAME}
_PADDED = {**_LLAMA, "pad_token": "<pad>"}
# Tokens that a class of transformers 5 has where the folder names none (models/*/tokenization_*.py); other classes that
# read causal models have none.
_DEFAULTS: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "XGLMTokenizer": _PADDED,
    "RobertaTokenizer": _PADDED,
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    },
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "pad_token": "<PAD>",
        "unk_token": "<UNK>",
    },
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
    "BertTokenizer": {"pad_token": "[PAD]", "unk_token": "[UNK]"},
    "T5Tokenizer": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
}
# The class of a model type (transformers' TOKENIZER_MAPPING_NAMES); the beginning of a type stands for its variants.
_CLASS_OF_MODEL = {
    "GPT2Tokenizer": ("gpt2", "gpt_neo", "gptj", "codegen", "opt", "phi", "starcoder2", "dbrx"),
    "GPTNeoXTokenizer": ("gpt_neox", "mamba", "mamba2", "falcon_mamba", "mpt", "olmo", "olmoe"),
    "CodeLlamaTokenizer": ("code_llama",),
    "GemmaTokenizer": ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "recurrent_gemma"),
    "CohereTokenizer": ("cohere", "cohere2"),
    "Qwen2Tokenizer": (
        "qwen2",
        "qwen2_moe",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
    ),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    "XGLMTokenizer": ("xglm",),
    "BertTokenizer": ("bert", "distilbert", "electra"),
    "RobertaTokenizer": ("roberta",),
}
# Model types that transformers opens with its generic class, whatever class the folder names.
_GENERIC_MODELS = (
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_bigcode",
    "jamba",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmo3",
    "phi3",
    "phimoe",
    "smolvlm",
    "stablelm",
    "ernie4_5",
    "kimi_linear",
)
# Model types whose folders name a wrong class, which transformers replaces.
_CLASS_REPLACED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")


def read_json(path: Path) -> Json:
    """The JSON object in an untrusted file. Raises UserError when it has none."""
    try:
        value = json.loads(read_input(path, MAX_FILE).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            "file is not JSON, or truncated", where=str(path), fix="copy or download it again"
        ) from error
    if not isinstance(value, dict):
        raise UserError("file is not a JSON object", where=str(path), fix=ANOTHER)
    return value


def name_of(token: object) -> str | None:
    """The text of a token, which configurations write as a string or as the settings of an added token."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def named_tokens(config: Json) -> dict[str, str]:
    """The tokens that a chat template can name, such as bos_token, sep_token and image_token: all that a configuration
    names, also in `extra_special_tokens`, as in transformers.
    """
    extra = config.get("extra_special_tokens")
    settings = {**config, **(extra if isinstance(extra, Mapping) else {})}
    names = {key: name_of(value) for key, value in settings.items() if key.endswith("_token")}
    return {key: name for key, name in names.items() if name}


def roles(description: Json, config: Json) -> dict[str, str | None]:
    """The BOS, EOS, padding and unknown tokens: those of the configuration, else of the tokenizer's class."""
    defaults = dict(_DEFAULTS.get(_class_of(description, config), {}))
    padding = description.get("padding")
    if isinstance(padding, Mapping) and (pad_token := name_of(padding.get("pad_token"))):
        defaults.setdefault("pad_token", pad_token)
    # A role that the configuration sets to null has no token.
    return {role: name_of(config[role]) if role in config else defaults.get(role) for role in ROLES}


def _class_of(description: Json, config: Json) -> str:
    """The tokenizer class that transformers opens a folder with."""
    name = str(config.get(_CLASS) or "").removesuffix("Fast")
    # A class that writes spaces as "▁" cannot open a byte-level vocabulary: transformers takes its generic one.
    steps = [description.get(key) for key in ("pre_tokenizer", "decoder")]
    if name == "LlamaTokenizer" and '"ByteLevel"' in json.dumps(steps):
        return ""
    return name


def _folder_class(folder: Path, stated: object) -> str:
    """The tokenizer class of a folder: the stated one, else that of its model's type; "" for a generic one."""
    config_file = folder / "config.json"
    model = read_json(config_file) if config_file.is_file() else {}
    model_type = str(model.get("model_type") or "")
    registered = next((name for name, types in _CLASS_OF_MODEL.items() if model_type in types), "")
    class_name = str(stated or model.get(_CLASS) or registered).removesuffix("Fast")
    if model_type in _CLASS_REPLACED:
        class_name = registered
    is_generic = model_type in _GENERIC_MODELS or class_name in _GENERIC_CLASSES
    return "" if is_generic else class_name


def configuration(folder: Path) -> Json:
    """What a folder says of its tokenizer, next to the vocabulary: tokenizer_config.json, special_tokens_map.json of
    older folders, and chat templates in files; empty without any.
    """
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    # transformers reads the older file where the newer one does not list the added tokens, and prefers it there.
    older_file = folder / "special_tokens_map.json"
    if older_file.is_file() and not isinstance(config.get("added_tokens_decoder"), Mapping):
        config |= read_json(older_file)
    # null says nothing, except for a role: that it has no token.
    merged = {key: value for key, value in config.items() if value is not None or key in ROLES}
    merged[_CLASS] = _folder_class(folder, merged.get(_CLASS))

    template_files = templates.templates_in(folder)
    if not template_files:
        return merged
    # Files take precedence over the configuration, as in transformers. One template is a text,
    # several are a list.
    all_templates = {**templates.own_templates(merged), **template_files}
    if list(all_templates) == ["default"]:
        merged[templates.KEY] = all_templates["default"]
    else:
        merged[templates.KEY] = [
            {"name": name, "template": text} for name, text in all_templates.items()
        ]
    return merged


def added_around(before: Mapping[str, int], after: Mapping[str, int]) -> Json:
    """The post-processor of a tokenizer.json that adds tokens, by name with their ids, before and after a text."""

    def special(names: Mapping[str, int]) -> list[Json]:
        return [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]

    def around(text: str) -> list[Json]:
        return [*special(before), {"Sequence": {"id": text, "type_id": 0}}, *special(after)]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": [*around("A"), *around("B")],
        "special_tokens": {
            name: {"id": name, "ids": [index], "tokens": [name]}
            for name, index in {**before, **after}.items()
        },
    }
