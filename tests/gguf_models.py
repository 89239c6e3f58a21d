"""Tiny models with a tokenizer, as folders that can be exported to GGUF."""

import json
import shutil
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "model"))

import tiny_models

from models_for_tests import make_tokenizer

VOCABULARY = 320


def saved_case(case: str, folder: Path, **changed) -> Path:
    """A case of tiny_models with the byte-level tokenizer of models_for_tests."""
    prefix, settings = tiny_models.CASES[case]
    tiny_models.CASES["changed"] = (prefix, settings | {"vocab_size": VOCABULARY} | changed)
    try:
        tiny_models.saved_reference("changed", folder)
    finally:
        del tiny_models.CASES["changed"]
    (folder / "tokenizer").mkdir()
    make_tokenizer(folder / "tokenizer")
    for path in (folder / "tokenizer").iterdir():
        shutil.move(path, folder / path.name)
    (folder / "tokenizer").rmdir()
    return folder


def saved_adapter(base: Path, folder: Path, targets: list[str]) -> Path:
    """A LoRA of PEFT with random matrices that show in the logits."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=12, target_modules=targets)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))
    return folder


def tokens(length: int = 24) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(3)).tolist()
