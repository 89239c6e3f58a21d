"""What a file of `mlx_lm.lora --config` means (mlx_lm/lora.py and tuner/utils.py of mlx-lm 0.31)."""

from bloomery.recipe.import_draft import Draft, as_number
from bloomery.recipe.import_trainer import batch

_SCHEDULES = {"cosine_decay": "cosine", "linear_schedule": "linear"}
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "muon": "muon", "adafactor": "adafactor"}


def mlx_lm(draft: Draft) -> None:
    draft.set("objective.kind", "sft", reason="of `mlx_lm.lora`")
    _adapter(draft)

    # The dataset is a folder with train.jsonl and valid.jsonl, or of the Hub.
    data = draft.get("data")
    if isinstance(data, str):
        draft.set("data.path", data, "data")
    hub = draft.mapping("hf_dataset")
    if hub.get("path") or hub.get("name"):
        key = "path" if hub.get("path") else "name"
        draft.set("data.path", hub[key], f"hf_dataset.{key}")
        draft.leave("data", f"hf_dataset.{key} is the dataset")
        roles = {"prompt_feature": "prompt", "completion_feature": "completion"}
        roles |= {"text_feature": "text", "chat_feature": "messages"}
        columns = {
            role: hub[name] for name, role in roles.items() if isinstance(hub.get(name), str)
        }
        if columns:
            names = [f"hf_dataset.{name}" for name in roles if hub.get(name)]
            draft.set_from("data.columns", columns, names)
        for name in ("train_split", "valid_split", "test_split"):
            reason = (
                "not supported: a part of a split; give a smaller dataset, and set data.validation"
            )
            draft.leave(f"hf_dataset.{name}", reason)
    masks = draft.is_on("mask_prompt")
    reason = "the last response" if masks else "trains on every token"
    draft.set("data.chat.train_on", "last" if masks else "all", "mask_prompt", reason=reason)
    length = draft.number("max_seq_length")
    if length is not None and length >= 2:
        draft.set("data.sequence_length", int(length), "max_seq_length")
    draft.set_default("data.packing", False)
    draft.set_default("data.validation", "auto", reason="the file valid of the folder")

    # Training: no clipping, and no schedule unless there is one.
    iterations = draft.number("iters")
    steps_name = "grad_accumulation_steps"
    accumulation = draft.number(steps_name) or 1
    if iterations is not None and iterations >= 1:
        steps = max(1, int(iterations / max(1, accumulation)))
        reason = (
            ""
            if accumulation == 1
            else f"{iterations:.0f} micro-batches, {accumulation:.0f} a step"
        )
        draft.set("train.max_steps", steps, "iters", reason=reason)
    batch(draft, "batch_size", steps_name)
    draft.set_default("train.max_grad_norm", "none")
    is_on = draft.is_on("grad_checkpoint")
    draft.set("train.activation_checkpointing", "full" if is_on else "none", "grad_checkpoint")
    _optimizer(draft, accumulation)
    for key, name in (
        ("eval.every", "steps_per_eval"),
        ("checkpoint.every", "save_every"),
        ("logging.every", "steps_per_report"),
    ):
        interval = draft.number(name)
        if interval is not None and interval >= 1:
            steps = max(1, int(interval / max(1, accumulation)))
            draft.set(key, f"{steps} steps", name)


def _adapter(draft: Draft) -> None:
    method = draft.word("fine_tune_type")
    if method == "full":
        draft.set("adapter.kind", "none", "fine_tune_type")
        draft.leave("lora_parameters", "every weight is trained")
        return
    draft.set("adapter.kind", "dora" if method == "dora" else "lora", "fine_tune_type")
    rank = draft.number("lora_parameters.rank")
    rank = 8 if rank is None else rank
    draft.set("adapter.rank", int(rank), "lora_parameters.rank")

    # mlx multiplies the update by `scale` itself; earlier versions by alpha / rank.
    scale = draft.number("lora_parameters.scale")
    if draft.given("lora_parameters.alpha") and scale is None:
        alpha = draft.number("lora_parameters.alpha")
        draft.set("adapter.alpha", alpha, "lora_parameters.alpha")
    else:
        scale = 20.0 if scale is None else scale
        reason = f"mlx multiplies by scale = {scale:g}, which is alpha / rank"
        draft.set("adapter.alpha", scale * rank, "lora_parameters.scale", reason=reason)
    dropout = draft.number("lora_parameters.dropout")
    draft.set("adapter.dropout", 0.0 if dropout is None else dropout, "lora_parameters.dropout")
    keys = draft.get("lora_parameters.keys")
    if isinstance(keys, list) and keys:
        modules = [str(key).rpartition(".")[2] for key in keys]
        draft.set("adapter.target_modules", modules, "lora_parameters.keys")
    else:
        draft.set_default("adapter.target_modules", ["all-linear"])
    name = "lora_layers" if draft.given("lora_layers") else "num_layers"
    layers = draft.number(name)
    if layers is not None and layers != -1:
        draft.left[name] = (
            f"{layers:.0f}: LoRA on the last {layers:.0f} layers; here on all of them, unless"
            " adapter.target_modules names the layers with patterns"
        )
    draft.answered.add(name)


def _optimizer(draft: Draft, accumulation: float) -> None:
    """mlx' Adam has no bias correction unless it is set; AdamW a weight decay of 0.01."""
    name = draft.word("optimizer")
    arguments = draft.mapping("optimizer_config").get(name)
    arguments = arguments if isinstance(arguments, dict) else {}
    place = f"optimizer_config.{name}"
    if name in _OPTIMIZERS:
        draft.set("optimizer.kind", _OPTIMIZERS[name], "optimizer")
        decay = as_number(arguments.get("weight_decay"))
        usual = 0.01 if name in ("adamw", "muon") else 0.0
        draft.set(
            "optimizer.weight_decay", usual if decay is None else decay, f"{place}.weight_decay"
        )
    betas = arguments.get("betas")
    is_pair = isinstance(betas, list) and len(betas) == 2
    draft.set("optimizer.betas", betas if is_pair else [0.9, 0.999], f"{place}.betas")
    eps = as_number(arguments.get("eps"))
    draft.set("optimizer.eps", 1e-8 if eps is None else eps, f"{place}.eps")
    draft.leave(f"{place}.bias_correction", "always: the averages are corrected")
    if name in ("adam", "adamw") and arguments.get("bias_correction") is not True:
        draft.left.setdefault(
            "optimizer",
            "mlx does not correct the averages of the first steps; here they are corrected",
        )

    # [name, warmup, arguments of the function: initial rate, steps, end]
    shape = draft.mapping("lr_schedule")
    function = str(shape.get("name") or "")
    numbers = shape.get("arguments")
    numbers = numbers if isinstance(numbers, list) else []
    if function in _SCHEDULES and len(numbers) >= 2:
        start = as_number(numbers[0])
        end = as_number(numbers[2]) if len(numbers) > 2 else 0.0
        if function == "linear_schedule":
            end = as_number(numbers[1])
        draft.set("optimizer.schedule", _SCHEDULES[function], "lr_schedule.name")
        if start:
            draft.set("optimizer.learning_rate", start, "lr_schedule.arguments")
            draft.leave("learning_rate", "lr_schedule.arguments has the rate")
            if end is not None and 0 <= end < start:
                ratio = float(f"{end / start:.4g}")
                draft.set("optimizer.min_lr_ratio", ratio, "lr_schedule.arguments")
        draft.left["lr_schedule.arguments"] = (
            "the rate falls over the whole run, not over a number of steps"
        )
        warmup = as_number(shape.get("warmup")) or 0
        draft.set("optimizer.warmup", f"{int(warmup)} steps", "lr_schedule.warmup")
        draft.leave("lr_schedule.warmup_init", "the warmup begins at 0")
    else:
        if function:
            draft.leave("lr_schedule", f"not supported: {function}")
        draft.set("optimizer.schedule", "constant", reason="no lr_schedule: the rate is constant")
        draft.set("optimizer.warmup", "0 steps")
    del accumulation
