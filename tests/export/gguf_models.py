"""Tiny models with a tokenizer, as folders that can be exported to GGUF."""

import json
import shutil
from pathlib import Path

import tiny_models
import torch

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
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)})
    )
    return folder


def saved_expert_adapter(base: Path, folder: Path, prefix: str = "mlp.experts") -> Path:
    """PEFT's LoRA of stacks of experts, with random matrices that show in the logits."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = [f"{prefix}.gate_up_proj", f"{prefix}.down_proj"]
    settings = LoraConfig(r=2, lora_alpha=6, target_modules=[], target_parameters=targets)
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(folder)
    return folder


def tokens(length: int = 24) -> list[int]:
    return torch.randint(
        0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(3)
    ).tolist()


def saved_pieces(
    folder: Path,
    vocab_size: int,
    *,
    case: str = "llama2",
    changed: dict | None = None,
    files: str = "[a-b]*.py",
    **settings,
):
    """A model with a SentencePiece model as Llama 2's, and no tokenizer.json; returns its folder, the model file and
    the lines that it was trained on. `settings`: of the trainer.
    """
    import os

    import sentencepiece

    lines = [
        line
        for path in sorted(Path(os.__file__).parent.glob(files))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=vocab_size,
        model_type="bpe",
        **{"split_digits": True} | settings,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    model = saved_case(case, folder / "model", vocab_size=vocab_size, **changed or {})
    for path in model.glob("token*"):
        path.unlink()
    shutil.copy(folder / "m.model", model / "tokenizer.model")
    return model, folder / "m.model", lines


def saved_gemma4_pieces(folder: Path):
    """The same of a Gemma 4: no space before a text, but BOS."""
    model, _, lines = saved_pieces(folder, 420, case="gemma4-12b", add_dummy_prefix=False)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps(roles | {"add_bos_token": True}))
    return model, lines
