"""What a torchtune config means: components with their arguments (torchtune 0.6; recipes/configs, datasets, rlhf/loss).

Defaults are those of the functions that `_component_` names.
"""

from typing import Any

from bloomery.recipe.aliases import optimizer_kinds
from bloomery.recipe.import_draft import Draft, as_number
from bloomery.recipe.import_rules import ONE_SIDE, objective_kind
from bloomery.recipe.import_trainer import batch

_ATTENTION = {"output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
# Dataset builders: the Hub id, the format, the columns of other names, and whether prompts are trained on.
_DATASETS: dict[str, tuple[str, str, dict[str, str], bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", {}, True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", {}, True),
    "chat_dataset": ("", "", {}, False),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", "text", {"text": "article"}, True),
    "grammar_dataset": ("liweili/c4_200m", "alpaca", {"instruction": "input"}, False),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", "preference", {}, False),
    "instruct_dataset": ("", "completion", {"prompt": "input", "completion": "output"}, False),
    "preference_dataset": ("", "preference", {}, False),
    "samsum_dataset": (
        "Samsung/samsum",
        "completion",
        {"prompt": "dialogue", "completion": "summary"},
        False,
    ),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt", {}, False),
    "stack_exchange_paired_dataset": (
        "lvwerra/stack-exchange-paired",
        "preference",
        {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        False,
    ),
    "text_completion_dataset": ("", "text", {}, True),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "text", {"text": "page"}, True),
}


def torchtune(draft: Draft) -> None:
    _objective(draft)
    kind = draft.value("objective.kind")
    _adapter(draft)
    if draft.given("checkpointer.checkpoint_dir"):
        folder = draft.get("checkpointer.checkpoint_dir")
        draft.set("model.from", str(folder), "checkpointer.checkpoint_dir")
    draft.leave("tokenizer.path", "the tokenizer is that of model.from")
    draft.leave("tokenizer.merges_file", "the tokenizer is that of model.from")

    # The dataset, and the longest sequence: null is no limit.
    _dataset(draft, kind)
    length = draft.number("tokenizer.max_seq_len")
    if length is not None and length >= 2:
        is_pair = kind in ONE_SIDE
        reason = (
            f"both sides of a pair: {length:.0f} tokens are the limit of one" if is_pair else ""
        )
        tokens = int(length) * (2 if is_pair else 1)
        draft.set("data.sequence_length", tokens, "tokenizer.max_seq_len", reason=reason)
    else:
        reason = "set it: tokenizer.max_seq_len is not set, which is no limit"
        draft.set_default("data.sequence_length", 2048, reason=reason)
    draft.set_default("data.validation", "0%", reason="torchtune holds no rows out")

    # Training.
    epochs = draft.number("epochs") or 1
    most = draft.number("max_steps_per_epoch")
    if most is not None and most >= 1:
        reason = f"an epoch ends after {most:.0f} steps; a smaller dataset would be repeated"
        draft.set(
            "train.max_steps", int(most * epochs), "max_steps_per_epoch", "epochs", reason=reason
        )
    else:
        draft.set("train.epochs", epochs, "epochs")
    if kind != "ppo":
        batch(draft, "batch_size", "gradient_accumulation_steps")
        draft.leave("temperature", "of generation: `bloomery generate` has options")
    clip = draft.number("clip_grad_norm")
    draft.set("train.max_grad_norm", clip if clip and clip > 0 else "none", "clip_grad_norm")
    _optimizer(draft)
    _precision(draft)
    for key, name in (
        ("activation_checkpointing", "enable_activation_checkpointing"),
        ("offload_activations", "enable_activation_offloading"),
    ):
        on = draft.is_on(name)
        value = on if key == "offload_activations" else "full" if on else "none"
        draft.set(f"train.{key}", value, name)
    draft.set_default(
        "checkpoint.every", "1 epochs", reason="a checkpoint is saved after each epoch"
    )
    if draft.given("dataset_val") and draft.given("run_val_every_n_steps"):
        return
    draft.set_default("eval.every", "none", reason="there is no validation set")
    draft.leave("run_val_every_n_steps", "there is no validation set")


def _component(draft: Draft, name: str) -> str:
    """The last part of the name of a component: lora_llama3_2_1b of torchtune.models.llama3_2.lora_llama3_2_1b."""
    value = draft.get(f"{name}._component_")
    return value.rpartition(".")[2] if isinstance(value, str) else ""


def _objective(draft: Draft) -> None:
    loss = _component(draft, "loss")
    dataset = _component(draft, "dataset")
    if (
        draft.given("teacher_model")
        or draft.given("kd_loss")
        or draft.given("teacher_checkpointer")
    ):
        objective_kind(draft, "distill", "teacher_model", "kd_loss")
        teacher = draft.get("teacher_checkpointer.checkpoint_dir") or "TEACHER"
        draft.set("objective.teacher", str(teacher), "teacher_checkpointer.checkpoint_dir")
        ratio = draft.number("kd_ratio")
        draft.set("objective.kd_ratio", 0.5 if ratio is None else ratio, "kd_ratio")
    elif loss == "DPOLoss":
        objective_kind(draft, "dpo", "loss._component_")
        _number(draft, "objective.beta", "loss.beta", 0.1)
        _number(draft, "objective.label_smoothing", "loss.label_smoothing", 0.0)
    elif loss == "SimPOLoss":
        objective_kind(draft, "simpo", "loss._component_")
        _number(draft, "objective.beta", "loss.beta", 2.0)
        _number(draft, "objective.gamma", "loss.gamma", 0.5)
    elif loss == "IPOLoss":
        objective_kind(draft, "ipo", "loss._component_")
        tau = draft.number("loss.tau")
        draft.set("objective.beta", 0.1 if tau is None else tau, "loss.tau")
    elif loss == "PPOLoss":
        _ppo(draft)
    elif loss == "RSOLoss":
        draft.set("objective.kind", "dpo", reason=f"set it: {loss} is not supported")
        draft.left["loss._component_"] = (
            "not supported: RSO; objective.kind is dpo, ipo, simpo, orpo or kto"
        )
    else:
        is_text = dataset in (
            "text_completion_dataset",
            "wikitext_dataset",
            "cnn_dailymail_articles_dataset",
        )
        kind = "pretrain" if is_text else "sft"
        names = ("dataset._component_",) if is_text else ("loss._component_",)
        objective_kind(draft, kind, *names)
        for key in ("num_output_chunks", "ignore_index"):
            draft.leave(f"loss.{key}", "not needed: the plan sets the chunks of the loss")


def _ppo(draft: Draft) -> None:
    """recipes/ppo_full_finetune_single_device.py: a rollout of `batch_size`, trained on in parts of ppo_batch_size."""
    objective_kind(draft, "ppo", "loss._component_")
    numbers = {
        "max_completion_length": ("max_generated_tokens", 58),
        "temperature": ("temperature", 1.0),
        "num_iterations": ("ppo_epochs", 1),
        "kl_coef": ("kl_coeff", 0.01),
        "cliprange": ("loss.epsilon", 0.1),
        "cliprange_value": ("loss.value_clip_range", 0.2),
        "vf_coef": ("loss.value_coeff", 0.5),
        "gamma": ("gamma", 1.0),
        "lam": ("lmbda", 0.95),
    }
    for key, (name, default) in numbers.items():
        _number(draft, f"objective.{key}", name, default)
    draft.set("objective.whiten_rewards", draft.is_on("whiten_rewards"), "whiten_rewards")
    model = draft.get("reward_checkpointer.checkpoint_dir")
    if isinstance(model, str):
        draft.set("rewards", [{"model": model}], "reward_checkpointer.checkpoint_dir")
    rollout = draft.number("batch_size")
    part = draft.number("ppo_batch_size") or rollout
    if rollout and part and rollout % part == 0:
        steps = int(rollout / part)
        draft.set("objective.steps_per_generation", steps, "batch_size", "ppo_batch_size")
        draft.set("train.batch_size", int(part), "ppo_batch_size", "batch_size")
    draft.leave("num_steps", "train.max_steps counts optimizer steps")


def _number(draft: Draft, key: str, name: str, default: float) -> None:
    value = draft.number(name)
    draft.set(key, default if value is None else value, name)


def _adapter(draft: Draft) -> None:
    name = _component(draft, "model")
    is_quantized = name.startswith("qlora_") or draft.is_on("model.quantize_base")
    if not name.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        draft.set("adapter.kind", "none", "model._component_")
        return
    is_dora = draft.is_on("model.use_dora") or "dora_" in name
    draft.set("adapter.kind", "dora" if is_dora else "lora", "model._component_", "model.use_dora")
    if is_quantized or name.startswith("qdora_"):
        draft.set("quantize.kind", "nf4", "model._component_", "model.quantize_base")
        draft.set_default("quantize.double_quant", True)
    _number(draft, "adapter.rank", "model.lora_rank", 8)
    _number(draft, "adapter.alpha", "model.lora_alpha", 16)
    _number(draft, "adapter.dropout", "model.lora_dropout", 0.0)
    rank = as_number(draft.value("adapter.rank")) or 8
    draft.set("adapter.rank", int(rank), "model.lora_rank")
    asked = draft.get("model.lora_attn_modules")
    modules = [
        _ATTENTION.get(str(module), str(module))
        for module in (asked if isinstance(asked, list) else ["q_proj", "v_proj"])
    ]
    if draft.is_on("model.apply_lora_to_mlp"):
        modules += _MLP
    if draft.is_on("model.apply_lora_to_output"):
        modules.append("lm_head")
    names = ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output")
    draft.set("adapter.target_modules", modules, *[f"model.{name}" for name in names])


def _dataset(draft: Draft, kind: str) -> None:
    value = draft.get("dataset")
    entries = value if isinstance(value, list) else [value]
    sources = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        place = f"dataset[{number}]" if isinstance(value, list) else "dataset"
        sources.append(_source(draft, entry, place, kind))
    if isinstance(value, list):
        draft.answered.add("dataset")
    sources = [source for source in sources if "path" in source]
    if len(sources) == 1:
        for key, (part, names) in sources[0].items():
            draft.set_from(f"data.{key}", part, names)
    elif sources:
        parts = [{key: part for key, (part, _) in source.items()} for source in sources]
        names = [name for source in sources for _, origins in source.values() for name in origins]
        draft.set_from("data.sources", parts, list(dict.fromkeys(names)))
    packed = any(isinstance(entry, dict) and entry.get("packed") is True for entry in entries)
    if kind in ("sft", "pretrain", "distill"):
        names = [] if isinstance(value, list) else ["dataset.packed"]
        draft.set("data.packing", packed, *names)
        if packed:
            draft.set("data.document_masking", True, *names)
    else:
        draft.set_default("data.packing", False)


def _source(
    draft: Draft, entry: dict[str, Any], place: str, kind: str
) -> dict[str, tuple[Any, list[str]]]:
    """The keys of a source with the names that they come from; what has no counterpart is listed."""
    component = str(entry.get("_component_") or "").rpartition(".")[2]
    hub_id, data_format, columns, trains_on_input = _DATASETS.get(component, ("", "", {}, False))
    name = f"{place}._component_"
    if component and component not in _DATASETS:
        draft.left[name] = (
            f"not known: {component}; data.format=auto finds the format by the columns"
        )
    source: dict[str, tuple[Any, list[str]]] = {}

    # A builder of files (json, csv) names them in data_files.
    path = entry.get("source") or hub_id
    path_names = [f"{place}.source"] if entry.get("source") else [name]
    if path in ("json", "csv", "parquet", "text") and isinstance(entry.get("data_files"), str):
        path = entry["data_files"]
        path_names = [f"{place}.source", f"{place}.data_files"]
    if path:
        source["path"] = (path, path_names)
    style = str(entry.get("conversation_style") or "")
    if component == "chat_dataset":
        data_format = "sharegpt" if style == "sharegpt" else "messages"
        column = entry.get("conversation_column")
        if isinstance(column, str):
            columns = {"messages": column}
    names = [name]
    for key in ("conversation_style", "conversation_column", "column_map", "column"):
        if isinstance(entry.get(key), str | dict) and entry[key]:
            names.append(f"{place}.{key}")
    if data_format:
        source["format"] = (data_format, names[:2] if style else [name])
    mapped = entry.get("column_map")
    if isinstance(mapped, dict):
        roles = {"input": "prompt", "output": "completion"} if data_format == "completion" else {}
        columns = columns | {
            roles.get(str(role), str(role)): str(column) for role, column in mapped.items()
        }
    if isinstance(entry.get("column"), str):
        columns = {"text": entry["column"]}
    if kind == "ppo":
        data_format = "prompts"
        columns = {"prompt": columns.get("text", "prompt")}
        source["format"] = (data_format, [name])
    renamed = {role: column for role, column in columns.items() if role != column}
    if renamed:
        source["columns"] = (renamed, names)
    split = entry.get("split")
    if isinstance(split, str) and split != "train":
        source["glob"] = (f"*{split.partition('[')[0]}*", [f"{place}.split"])
        if "[" in split:
            draft.left[f"{place}.split"] = (
                f"not supported: a part of a split ({split}); give a smaller dataset"
            )

    # The tokens that are trained on belong to the whole recipe.
    asked = entry.get("train_on_input")
    trains = trains_on_input if asked is None else asked is True
    if kind in ("sft", "distill"):
        names = [f"{place}.train_on_input"] if asked is not None else []
        setting = "all" if trains else "assistant"
        reason = "" if names else f"of {component}"
        draft.set("data.chat.train_on", setting, reason=reason)
        if names:
            draft.set_from("data.chat.train_on", setting, names)

    used = {name for _, names in source.values() for name in names} | {name, f"{place}.packed"}
    used |= {f"{place}.train_on_input", *names}
    used |= {f"{place}.split"} if isinstance(split, str) else set()
    for key, value in entry.items():
        full_name = f"{place}.{key}"
        draft.answered.add(full_name)
        if full_name not in used and value not in (None, "", [], {}):
            reasons = {
                "new_system_prompt": "not supported: put a system message into the dataset",
                "prompt_template": "data.chat.template formats the prompts",
                "column": "data.columns={text: NAME} names the column",
                "column_map": "data.columns names the columns by role",
                "conversation_column": "data.columns={messages: NAME} names the column",
                "conversation_style": "data.format is messages or sharegpt",
                "partition": "not supported: a part of a dataset; give a smaller dataset",
                "subset": "a subset is a folder of the dataset: choose its files with data.glob",
                "split": "data.glob chooses the files of a split",
                "add_eos": "documents end with the end token",
                "split_across_pack": "documents longer than a sequence are cut",
                "name": "a subset is a folder of the dataset: choose its files with data.glob",
                "data_files": "data.glob chooses files of the dataset",
                "data_dir": "data.path=PATH/DIR for a local folder",
            }
            draft.left[full_name] = reasons.get(key, "no such setting")
    draft.answered.add(f"{place}._component_")
    return source


def _optimizer(draft: Draft) -> None:
    """torch's and bitsandbytes' AdamW have a weight decay of 0.01 and a rate of 1e-3 by default."""
    rate = draft.number("optimizer.lr")
    draft.set("optimizer.learning_rate", 1e-3 if rate is None else rate, "optimizer.lr")
    _number(draft, "optimizer.weight_decay", "optimizer.weight_decay", 0.01)
    _number(draft, "optimizer.eps", "optimizer.eps", 1e-8)
    betas = draft.get("optimizer.betas")
    is_pair = isinstance(betas, list) and len(betas) == 2
    draft.set("optimizer.betas", betas if is_pair else [0.9, 0.999], "optimizer.betas")
    component = str(draft.get("optimizer._component_") or "torch.optim.AdamW")
    if component == "torch.optim.SGD":
        draft.left["optimizer._component_"] = (
            f"not supported: SGD; optimizer.kind is {optimizer_kinds()}"
        )
    if draft.word("optimizer._component_").startswith("torch.optim.sgd"):
        draft.answered.add("optimizer._component_")
    schedule = _component(draft, "lr_scheduler")
    if schedule == "get_cosine_schedule_with_warmup":
        draft.set("optimizer.schedule", "cosine", "lr_scheduler._component_")
        draft.set_default("optimizer.min_lr_ratio", 0)
        steps = draft.number("lr_scheduler.num_warmup_steps") or 0
        draft.set("optimizer.warmup", f"{int(steps)} steps", "lr_scheduler.num_warmup_steps")
    elif not schedule:
        draft.set("optimizer.schedule", "constant", reason="no lr_scheduler: the rate is constant")
        draft.set("optimizer.warmup", "0 steps")
    else:
        draft.set("optimizer.schedule", "cosine", reason=f"set it: {schedule} is not supported")
        draft.leave("lr_scheduler._component_", f"not supported: {schedule}")
    for key in ("fused", "foreach", "amsgrad"):
        draft.leave(f"optimizer.{key}", "the fused implementation is chosen where it exists")


def _precision(draft: Draft) -> None:
    """torchtune keeps the weights in `dtype`."""
    dtype = draft.word("dtype")
    if dtype in ("bf16", "bfloat16"):
        if draft.value("adapter.kind") == "none":
            reason = "the weights are kept in it"
            draft.set("train.precision", "bfloat16-pure", "dtype", reason=reason)
        else:
            draft.set("train.precision", "bfloat16", "dtype")
    elif dtype in ("fp32", "float32"):
        draft.set("train.precision", "float32", "dtype")
