"""What a script or notebook of Unsloth means: FastLanguageModel, get_peft_model and a trainer of TRL."""

from bloomery.recipe.import_draft import Draft
from bloomery.recipe.import_rules import trl

_IN_FULL = ("embed_tokens", "lm_head")  # Unsloth trains these target modules in full


def unsloth(draft: Draft) -> None:
    """TRL's rules with Unsloth's defaults: 4 bits, the length of from_pretrained, its own checkpointing."""
    trl(draft)
    kind = draft.value("objective.kind")
    model = draft.get("model_name_or_path")
    if isinstance(model, str):
        draft.set("model.from", model, "model_name_or_path")

    # Unsloth has templates of its own for many models; those of the same name are the tokenizer's.
    template = draft.word("chat_template")
    known = {"llama-3": "llama3", "llama-3.1": "llama3", "llama-3.2": "llama3", "qwen-2.5": "qwen"}
    known |= {name: name for name in ("chatml", "llama2", "llama3", "mistral", "gemma")}
    if template in known:
        draft.set("data.chat.template", known[template], "chat_template")
    elif template:
        draft.leave(
            "chat_template", f"the tokenizer's own template, which may differ from {template}"
        )

    # Without get_peft_model, or with full_finetuning, every weight is trained.
    if draft.is_on("full_finetuning") or not draft.is_on("use_peft"):
        draft.set("adapter.kind", "none", "full_finetuning", reason="no adapter is added")
    elif draft.is_on("load_in_4bit"):
        draft.set("quantize.kind", "nf4", "load_in_4bit")
        draft.set("quantize.double_quant", True, "bnb_4bit_use_double_quant")
    targets = draft.get("lora_target_modules")
    if isinstance(targets, list) and any(name in _IN_FULL for name in targets):
        modules = [name for name in targets if name not in _IN_FULL]
        draft.set("adapter.target_modules", modules, "lora_target_modules")
        in_full = [name for name in targets if name in _IN_FULL]
        reason = "Unsloth trains these in full"
        draft.set("adapter.modules_to_save", in_full, "lora_target_modules", reason=reason)

    # The trainer of SFT takes the length of the model.
    if kind == "sft" and not draft.given("max_length"):
        length = draft.number("max_seq_length") or 2048
        draft.set("data.sequence_length", int(length), "max_seq_length")
    if draft.given("responses_only"):
        draft.set("data.chat.train_on", "assistant", "responses_only")
        # Only conversations say which tokens are responses; of a text every token is trained on.
        draft.settings.pop("data.columns", None)
        reason = "the script makes this text of conversations: give the conversations to data.path"
        draft.leave("dataset_text_field", reason)
    checkpointing = draft.word("gradient_checkpointing")
    if checkpointing == "unsloth":
        draft.set("train.activation_checkpointing", "full", "gradient_checkpointing")
        draft.set("train.offload_activations", True, "gradient_checkpointing")
