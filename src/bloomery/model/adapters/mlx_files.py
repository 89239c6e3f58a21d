"""Adapters that mlx-lm wrote, as PEFT would have written them: their settings, names and shapes. No torch.

mlx-lm computes y = W x + scale (x A) B with A [inputs, rank] and B [rank, outputs], of an embedding with A [vocabulary,
rank]; DoRA scales the rows of the sum to `m` (mlx_lm/tuner/lora.py and dora.py, 0.32). PEFT stores both matrices the
other way round. `fine_tune_type: full` stores whole parameters by the names of the model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bloomery.core.errors import UserError
from bloomery.model.adapters.peft_names import PREFIX
from bloomery.model.io.lines import Lines
from bloomery.model.io.stored import StoredTensor

TENSORS = "adapters.safetensors"
KINDS = ("lora", "dora", "full")
FUSE = "fuse it with mlx_lm.fuse, and use the fused model"
PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
EMBEDDING_PARTS = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}


def is_of_mlx(config_json: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json is mlx-lm's: the arguments of its training, without a peft_type."""
    return "peft_type" not in config_json and "lora_parameters" in config_json


def peft_settings(config_json: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """PEFT's settings for the same adapter. Raises UserError for values that mlx-lm does not write."""
    kind = config_json.get("fine_tune_type", "lora")
    parameters = config_json["lora_parameters"]
    if kind not in KINDS or not isinstance(parameters, dict):
        problem = f"fine_tune_type is {str(kind)[:40]!r}; mlx-lm has {', '.join(KINDS)}"
        raise UserError(problem, where=where, fix=FUSE)
    rank = parameters.get("rank", 8)
    scale = parameters.get("scale", 20.0)
    numbers = [value for value in (rank, scale) if not isinstance(value, bool)]
    if len(numbers) < 2 or not all(isinstance(value, int | float) for value in numbers):
        problem = f"lora_parameters holds rank {str(rank)[:20]!r} and scale {str(scale)[:20]!r}"
        raise UserError(problem, where=where, fix=FUSE)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": parameters.get("dropout", 0.0),
        "use_dora": kind == "dora",
        "base_model_name_or_path": config_json.get("model"),
    }


def peft_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under PEFT's names, in its shapes."""
    renamed = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if ".switch_" in name:  # SwitchLinear, mlx-lm's stacks of experts
            raise UserError(
                f"mlx-lm's LoRA of experts is not read: {name[:80]}",
                where=str(tensor.path),
                fix=FUSE,
            )
        is_embedding = module.rpartition(".")[2] in ("embed_tokens", "wte")
        peft_parts = PARTS | EMBEDDING_PARTS if is_embedding else PARTS
        if part in ("lora_a", "lora_b") and len(tensor.shape) == 2:
            transposed = replace(
                tensor, shape=tensor.shape[::-1], lines=Lines(tensor.shape[1], are_columns=True)
            )
            renamed[f"{PREFIX}{module}.{peft_parts[part]}"] = transposed
        else:
            renamed[f"{PREFIX}{module}.{peft_parts.get(part, part)}"] = tensor
    return renamed
