"""What keys of Axolotl, LLaMA-Factory and TRL mean together; single keys have rows in aliases.toml.

Read from: Axolotl 0.16 (its trainer builders), LLaMA-Factory 0.9.5 (hparams), TRL 1.16 (trainer/*_config.py, scripts).
"""

import json
from collections.abc import Mapping
from pathlib import Path

from bloomery.recipe.aliases import file_of_builder, plain
from bloomery.recipe.import_draft import Draft, Setting
from bloomery.recipe.import_trainer import (
    batch,
    divergence,
    evaluation,
    intervals,
    length,
    optimizer,
    precision,
    samples,
    saving,
    schedule,
    trainer_arguments,
    warmup,
)

ONE_SIDE = ("dpo", "ipo", "simpo", "orpo", "reward")  # a sequence of a recipe holds a pair
REFERENCE_LOSSES = ("dpo", "ipo", "kto")


# Parts that several tools share


def objective_kind(draft: Draft, kind: str, *names: str, reason: str = "") -> None:
    draft.set("objective.kind", kind, *names, reason=reason)


def unsupported_loss(draft: Draft, kind: str, name: str, value: str) -> None:
    """The nearest objective, with a line that says that it is another."""
    draft.set("objective.kind", kind, reason=f"set it: {name}={value} is not supported")
    draft.left[name] = (
        f"not supported: {value}; objective.kind is dpo, ipo, simpo, orpo or kto: choose one"
    )
    draft.answered.add(name)


def sequence_length(draft: Draft, *names: str) -> None:
    """Other tools limit one side of a pair, a recipe both."""
    name = next((name for name in names if draft.given(name)), names[0])
    tokens = draft.number(name)
    if tokens is None or tokens < 2:
        if draft.written(name) and not draft.given(name):
            limit = draft.defaults.get(name, 1024)
            reason = f"set it: {name} is empty in this file, which is no limit"
            draft.set_default("data.sequence_length", limit, reason=reason)
        return
    if draft.value("objective.kind") in ONE_SIDE:
        reason = f"both sides of a pair: {int(tokens)} tokens are the limit of one"
        draft.set("data.sequence_length", int(2 * tokens), name, reason=reason)
    else:
        draft.set("data.sequence_length", int(tokens), name)
    for other in names:
        if other != name:
            draft.leave(other, f"{name} wins")


def validation_size(draft: Draft, name: str) -> bool:
    """A share below 1, or a number of rows, which a recipe has no key for. Returns whether there is a set."""
    size = draft.number(name)
    if size is None or size < 0:
        return False
    if size < 1:
        draft.set("data.validation", f"{100 * size:.6g}%", name)
        return size > 0
    reason = f"set it: {name}={size:.0f} is a number of rows, and a share is wanted, such as 5%"
    draft.set("data.validation", "1%", name, reason=reason)
    draft.left[name] = f"{size:.0f} rows: set data.validation to the share that they are"
    return True


def preference_settings(draft: Draft, beta: str, gamma: str, smoothing: str = "") -> None:
    """The numbers of a preference loss, each with the tool's own default."""
    kind = draft.value("objective.kind")
    if kind in (*REFERENCE_LOSSES, "simpo", "orpo"):
        value = draft.number(beta)
        draft.set("objective.beta", 0.1 if value is None else value, beta)
    else:
        draft.leave(beta, f"{kind} has no such term")
    value = draft.number(gamma)
    if kind == "simpo":
        draft.set("objective.gamma", 0.5 if value is None else value, gamma)
    else:
        draft.leave(gamma, f"{kind} has no target margin")
    if smoothing:
        value = draft.number(smoothing)
        if kind == "dpo" and value is not None and 0 <= value < 0.5:
            draft.set("objective.label_smoothing", value, smoothing)
        else:
            draft.leave(smoothing, f"of the loss of DPO alone: {kind} has none")


def lora(draft: Draft, names: Mapping[str, str]) -> None:
    """The numbers of LoRA. `names`: the tool's name by our key."""
    for key, name in names.items():
        value = draft.number(name)
        if value is not None:
            draft.set(f"adapter.{key}", int(value) if key == "rank" else value, name)


ADAPTER_ALONE = "not supported: an adapter on what reads pictures alone"


def vision_parts(draft: Draft, *, tower: str, projector: str, language_model: str) -> None:
    """The names say which parts are frozen: in full training the others are trained, with LoRA they are targets."""
    names = [name for name in (tower, projector) if draft.given(name)]
    has_tower = not draft.is_on(tower)
    has_projector = not draft.is_on(projector)
    parts = "none"
    if has_tower or has_projector:
        parts = "all" if has_tower and has_projector else "tower" if has_tower else "projector"
    is_adapted = draft.value("adapter.kind") in ("lora", "dora")
    if names:
        draft.set("adapter.vision" if is_adapted else "vision.train", parts, *names)
    if draft.given(language_model) and is_adapted:
        draft.leave(language_model, ADAPTER_ALONE)
    elif draft.given(language_model):
        freezes = draft.is_on(language_model)
        draft.set("vision.freeze_language_model", freezes, language_model)


# LLaMA-Factory

_STAGES = {"pt": "pretrain", "sft": "sft", "rm": "reward", "ppo": "ppo", "kto": "kto"}
_PREFERENCE_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}
_GENERATION = ("temperature", "top_p", "top_k", "max_new_tokens")


def llama_factory(draft: Draft) -> None:
    # The objective: `pref_loss` is a choice within the stage `dpo`.
    stage = draft.word("stage")
    loss = draft.word("pref_loss")
    if stage == "dpo" and loss in _PREFERENCE_LOSSES:
        objective_kind(draft, _PREFERENCE_LOSSES[loss], "pref_loss", "stage")
    elif stage == "dpo":
        unsupported_loss(draft, "dpo", "pref_loss", loss)
        draft.answered.add("stage")
        draft.left["stage"] = f"with pref_loss={loss}"
    elif stage in _STAGES:
        objective_kind(draft, _STAGES[stage], "stage")
        draft.leave("pref_loss", f"of stage dpo; this is {stage}")
    kind = draft.value("objective.kind") or "sft"
    preference_settings(draft, "pref_beta", "simpo_gamma", "dpo_label_smoothing")
    if kind == "kto":
        for key, name in (
            ("desirable_weight", "kto_chosen_weight"),
            ("undesirable_weight", "kto_rejected_weight"),
        ):
            draft.set(f"objective.{key}", draft.number(name), name)
    if kind == "ppo":
        _llama_factory_ppo(draft)
    draft.leave_all(_GENERATION, "of generation: `bloomery generate` has options")

    # The adapter: LoRA where the file names none.
    method = draft.word("finetuning_type")
    if method == "lora":
        ours = "dora" if draft.is_on("use_dora") else "lora"
        names = ("use_dora", "finetuning_type") if ours == "dora" else ("finetuning_type",)
        draft.set("adapter.kind", ours, *names)
        lora(draft, {"rank": "lora_rank", "dropout": "lora_dropout"})
        rank = draft.number("lora_rank") or 8
        alpha = draft.number("lora_alpha") or 2 * rank
        draft.set("adapter.alpha", alpha, "lora_alpha", reason=_twice(draft, "lora_alpha"))
        draft.set("adapter.use_rslora", draft.is_on("use_rslora"), "use_rslora")
        draft.set_default("adapter.init", "pissa" if draft.is_on("pissa_init") else "default")
    elif method == "full":
        draft.set("adapter.kind", "none", "finetuning_type")
    elif method == "freeze":
        reason = "set it: finetuning_type=freeze is not supported, and this trains every weight"
        draft.set("adapter.kind", "none", reason=reason)
    if method == "lora":
        draft.leave("freeze_multi_modal_projector", "of full training: LoRA leaves it out")
        if draft.given("freeze_vision_tower"):
            parts = "none" if draft.is_on("freeze_vision_tower") else "tower"
            draft.set("adapter.vision", parts, "freeze_vision_tower")
        draft.leave("freeze_language_model", ADAPTER_ALONE)
    else:
        vision_parts(
            draft,
            tower="freeze_vision_tower",
            projector="freeze_multi_modal_projector",
            language_model="freeze_language_model",
        )

    # The dataset: `neat_packing` packs, and masks; `packing` alone does not mask; `pt` packs by itself.
    if kind in ("sft", "pretrain"):
        if draft.is_on("neat_packing") and kind == "sft":
            draft.set("data.packing", True, "neat_packing", "packing")
            draft.set("data.document_masking", True, "neat_packing")
        else:
            is_packed = draft.is_on("packing") if draft.given("packing") else kind == "pretrain"
            reason = "" if draft.given("packing") or not is_packed else "of stage pt"
            draft.set("data.packing", is_packed, "packing", reason=reason)
            if is_packed:
                draft.set(
                    "data.document_masking",
                    False,
                    "neat_packing",
                    reason="only neat_packing keeps the documents of a sequence apart",
                )
            else:
                draft.leave("neat_packing", "nothing is packed")
    else:
        draft.set("data.packing", False)
        draft.leave_all(("packing", "neat_packing"), f"pairs and answers are not packed in {stage}")
    sequence_length(draft, "cutoff_len")
    if kind == "sft":
        trained = "assistant"
        names = ("train_on_prompt", "mask_history")
        if draft.is_on("train_on_prompt"):
            trained = "all"
        elif draft.is_on("mask_history"):
            trained = "last"
        draft.set("data.chat.train_on", trained, *names)
    else:
        draft.leave_all(("train_on_prompt", "mask_history"), f"{kind} has labels of its own")
    if draft.given("eval_dataset"):
        names_of_sets = str(draft.get("eval_dataset")).split(",")
        path = f"{draft.get('dataset_dir') or 'data'}/{names_of_sets[0].strip()}.json"
        reason = "name the file: dataset_info.json is not read"
        if len(names_of_sets) > 1:
            reason += f"; a recipe has one validation set, this file has {len(names_of_sets)}"
        draft.set("data.validation", path, "eval_dataset", reason=reason)
        draft.leave("val_size", "eval_dataset is the validation set")
        has_validation = True
    else:
        has_validation = validation_size(draft, "val_size")
    evaluation(draft, has_validation=has_validation)

    # Training: checkpointing of activations is on unless it is turned off.
    if draft.is_on("use_unsloth_gc"):
        draft.set("train.activation_checkpointing", "full", "use_unsloth_gc")
        draft.set("train.offload_activations", True, "use_unsloth_gc")
    is_off = draft.is_on("disable_gradient_checkpointing")
    draft.set_default("train.activation_checkpointing", "none" if is_off else "full")
    draft.set(
        "train.activation_checkpointing",
        draft.value("train.activation_checkpointing"),
        "disable_gradient_checkpointing",
        "use_unsloth_gc",
    )
    if draft.given("quantization_bit") and draft.word("quantization_type") == "nf4":
        double = draft.is_on("double_quantization")
        if str(draft.get("quantization_bit")) == "4":
            draft.set("quantize.double_quant", double, "double_quantization")
    for name in ("use_galore", "use_apollo", "use_badam", "use_adam_mini"):
        if draft.is_on(name):
            draft.set("optimizer.kind", "adamw", reason=f"set it: {name} is not supported")
    trainer_arguments(draft)
    _full_precision(draft)


def _twice(draft: Draft, name: str) -> str:
    return "" if draft.given(name) else "twice the rank"


def _llama_factory_ppo(draft: Draft) -> None:
    """PPOTrainer of TRL 0.9 with LLaMA-Factory's own arguments of generation."""
    reward_model = draft.get("reward_model")
    if isinstance(reward_model, str) and reward_model:
        draft.set("rewards", [{"model": reward_model}], "reward_model")
    iterations = draft.number("ppo_epochs")
    draft.set("objective.num_iterations", int(iterations or 4), "ppo_epochs")
    draft.set("objective.whiten_rewards", draft.is_on("ppo_whiten_rewards"), "ppo_whiten_rewards")
    temperature = draft.number("temperature")
    draft.set("objective.temperature", 0.95 if temperature is None else temperature, "temperature")
    top_p = draft.number("top_p")
    draft.set("objective.top_p", 0.7 if top_p is None else top_p, "top_p")
    top_k = draft.number("top_k")
    draft.set("objective.top_k", int(50 if top_k is None else top_k), "top_k")
    longest = draft.number("max_new_tokens")
    draft.set("objective.max_completion_length", int(longest or 1024), "max_new_tokens")
    reason = "PPOConfig of TRL 0.9 adapts its weight to a target; here it is constant"
    draft.set_default("objective.kl_coef", 0.2, reason=reason)


def _full_precision(draft: Draft) -> None:
    """Neither bf16 nor fp16: no mixed precision."""
    if "train.precision" in draft.settings:
        return
    if draft.value("adapter.kind") == "none" and not draft.given("bf16"):
        draft.set(
            "train.precision", "float32", "bf16", "fp16", reason="neither bf16 nor fp16 is set"
        )
    else:
        draft.set(
            "train.precision",
            "auto",
            "bf16",
            "fp16",
            reason="neither bf16 nor fp16 is on; the base model keeps its own type",
        )


# Axolotl

_AXOLOTL_KINDS = ("dpo", "ipo", "simpo", "orpo", "kto", "grpo")


def axolotl(draft: Draft) -> None:
    # The objective. A reward model and pretraining have keys of their own next to `rl`.
    rl = draft.word("rl")
    if rl == "dpo" and draft.given("dpo_loss_type"):
        losses = {"sigmoid": "dpo", "ipo": "ipo"}
        loss = draft.word("dpo_loss_type") or str(plain(draft.get("dpo_loss_type")))
        if loss in losses:
            objective_kind(draft, losses[loss], "dpo_loss_type", "rl")
        else:
            unsupported_loss(draft, "dpo", "dpo_loss_type", loss)
            draft.leave("rl", f"with dpo_loss_type={loss}")
    elif rl in _AXOLOTL_KINDS:
        objective_kind(draft, rl, "rl")
    elif draft.is_on("reward_model"):
        objective_kind(draft, "reward", "reward_model")
    elif draft.given("pretraining_dataset"):
        objective_kind(draft, "pretrain", reason="of pretraining_dataset")
    elif not rl and _only_texts(draft):
        objective_kind(draft, "pretrain", reason="every dataset has the type completion")
    kind = draft.value("objective.kind") or "sft"
    beta = next(
        (name for name in ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha") if draft.given(name)),
        "rl_beta",
    )
    if kind != "grpo":
        preference_settings(draft, beta, "simpo_gamma")
        for name in ("rl_beta", "dpo_beta", "orpo_alpha"):
            if name != beta:
                draft.leave(name, f"{beta} wins")
    if kind == "simpo":
        alpha = draft.number("cpo_alpha")
        if alpha != 0:
            draft.left["cpo_alpha"] = (
                f"{'1' if alpha is None else f'{alpha:g}'}"
                f"{' by default' if alpha is None else ''}: the cross-entropy of the chosen response is added;"
                " not supported: objective.kind=simpo has no such term (orpo has one)"
            )
        draft.answered.add("cpo_alpha")
    if kind == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            weight = draft.number(f"kto_{name}") or 1.0
            draft.set(f"objective.{name}", weight, f"kto_{name}")
    if draft.given("dpo_label_smoothing"):
        _sigmoid_smoothing(draft, "dpo_label_smoothing")

    _axolotl_adapter(draft)
    _axolotl_data(draft, kind)

    # Training. A file of earlier versions has `batch_size` in place of gradient accumulation.
    length(draft, "num_epochs")
    total = draft.number("batch_size")
    micro_batch_size = draft.number("micro_batch_size")
    if total and micro_batch_size and not draft.given("gradient_accumulation_steps"):
        draft.set("train.micro_batch_size", int(micro_batch_size), "micro_batch_size")
        reason = "sequences per step on one device"
        draft.set("train.batch_size", int(total), "batch_size", reason=reason)
    else:
        batch(draft, "micro_batch_size", "gradient_accumulation_steps")
    optimizer(draft, "optimizer")
    schedule(draft, "lr_scheduler", "lr_scheduler_kwargs")
    _axolotl_warmup(draft)
    floor = draft.number("cosine_min_lr_ratio")
    if floor is not None and 0 <= floor < 1 and draft.word("lr_scheduler") == "cosine":
        draft.set("optimizer.min_lr_ratio", floor, "cosine_min_lr_ratio")
    elif floor == 1 and draft.word("lr_scheduler") == "cosine":
        reason = "the rate falls to all of itself"
        draft.set(
            "optimizer.schedule", "constant", "cosine_min_lr_ratio", "lr_scheduler", reason=reason
        )
        draft.settings.pop("optimizer.min_lr_ratio", None)

    # Checkpoints: `save_steps` wins over the rest, and each epoch is saved where nothing is set.
    saving(draft)
    per_epoch = draft.number("saves_per_epoch")
    if draft.given("save_steps") and intervals(draft, "save_steps"):
        every = intervals(draft, "save_steps")
        draft.set("checkpoint.every", every, "save_steps", "save_strategy")
        draft.left.pop("save_steps", None)
    elif per_epoch and per_epoch > 0:
        draft.set("checkpoint.every", f"{1 / per_epoch:.4g} epochs", "saves_per_epoch")
        draft.leave("save_strategy", "saves_per_epoch is set")

    # bf16 wins over fp16, but `auto` of a file that says neither.
    if draft.word("bf16") == "full":
        draft.set("train.precision", "bfloat16-pure", "bf16")
        draft.leave("fp16", "bf16 is on")
    elif (draft.is_on("fp16") or draft.is_on("float16")) and not draft.given("bf16"):
        draft.set("train.precision", "float16", "fp16", "float16")
    else:
        precision(draft)


def _only_texts(draft: Draft) -> bool:
    datasets = draft.get("datasets")
    types = [
        str(dataset.get("type")).partition(":")[0]
        for dataset in (datasets if isinstance(datasets, list) else [])
        if isinstance(dataset, dict)
    ]
    return bool(types) and all(name in ("completion", "pretrain") for name in types)


def _sigmoid_smoothing(draft: Draft, name: str) -> None:
    """TRL 1.16 has label smoothing in the losses `robust` and `exo_pair` alone."""
    draft.leave(
        name,
        "TRL ignores it with the sigmoid loss; objective.label_smoothing would smooth it (cDPO)",
    )


def _axolotl_warmup(draft: Draft) -> None:
    """Steps, else a share, else 3% of the run."""
    if draft.given("warmup_steps"):
        draft.defaults = {**draft.defaults, "warmup_ratio": None}
    warmup(draft)


def _axolotl_adapter(draft: Draft) -> None:
    adapter = draft.word("adapter")
    if adapter in ("lora", "qlora"):
        is_dora = draft.is_on("peft_use_dora")
        kind_names = ("peft_use_dora", "adapter") if is_dora else ("adapter",)
        draft.set("adapter.kind", "dora" if is_dora else "lora", *kind_names)
        if adapter == "qlora" or draft.is_on("load_in_4bit"):
            draft.set("quantize.kind", "nf4", "load_in_4bit", *["adapter"] * (adapter == "qlora"))
            draft.set_default("quantize.double_quant", True)
        lora(draft, {"dropout": "lora_dropout", "rank": "lora_r", "alpha": "lora_alpha"})
        draft.set_default("adapter.rank", 8, reason="of PEFT: lora_r is not set")
        draft.set_default("adapter.alpha", 8, reason="of PEFT: lora_alpha is not set")
        draft.set("adapter.use_rslora", draft.is_on("peft_use_rslora"), "peft_use_rslora")
        targets = draft.get("lora_target_modules")
        modules = targets if isinstance(targets, list) else [targets] if targets else []
        if draft.is_on("lora_target_linear"):
            draft.set("adapter.target_modules", ["all-linear"], "lora_target_linear")
            draft.leave("lora_target_modules", "lora_target_linear adds every linear layer")
        elif not modules:
            reason = "of PEFT for Llama: no modules are named"
            draft.set_default("adapter.target_modules", ["q_proj", "v_proj"], reason=reason)
    elif not adapter:
        reason = "no adapter is named: every weight is trained"
        draft.set_default("adapter.kind", "none", reason=reason)


def _axolotl_template(draft: Draft) -> None:
    """Types of preferences that bring their own format: chatml.intel, llama3.ultra."""
    datasets = draft.get("datasets")
    if draft.given("chat_template") or draft.given("chat_template_jinja"):
        return
    for number, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        strategy = dataset.get("type") if isinstance(dataset, dict) else None
        template, dot, _ = str(strategy).partition(".")
        if dot and template in ("chatml", "llama3"):
            draft.settings["data.chat.template"] = Setting(template, (f"datasets[{number}].type",))
            return


def _axolotl_data(draft: Draft, kind: str) -> None:
    _axolotl_template(draft)
    sequence_length(draft, "sequence_len", "max_packed_sequence_len")
    datasets = draft.get("datasets")
    roles = [
        dataset.get("roles_to_train")
        for dataset in (datasets if isinstance(datasets, list) else [])
        if isinstance(dataset, dict)
    ]
    if kind == "sft" and any(roles):
        draft.leave("train_on_inputs", "roles_to_train of the datasets wins")
    elif kind == "sft":
        trained = "all" if draft.is_on("train_on_inputs") else "assistant"
        draft.set("data.chat.train_on", trained, "train_on_inputs")
    elif kind == "pretrain":
        draft.leave("train_on_inputs", "pretraining trains on every token")
    else:
        draft.leave("train_on_inputs", f"{kind} has labels of its own")

    # A stream of pretraining texts is concatenated; sample_packing masks, which a stream may turn off.
    is_packed = draft.is_on("sample_packing")
    is_stream = draft.given("pretraining_dataset")
    masks = draft.is_on("pretrain_multipack_attn") if is_stream else True
    if is_packed:
        draft.set("data.packing", True, "sample_packing")
        names = ("pretrain_multipack_attn",) if is_stream else ("sample_packing",)
        draft.set("data.document_masking", masks, *names)
    elif is_stream:
        reason = "texts of a pretraining dataset are concatenated"
        draft.set("data.packing", True, "sample_packing", reason=reason)
        draft.set("data.document_masking", False, reason=reason)
    else:
        draft.set("data.packing", False, "sample_packing")

    # The validation set, and how often it is evaluated: never, where the file does not say so.
    tests = draft.get("test_datasets")
    if isinstance(tests, list) and tests and isinstance(tests[0], dict) and tests[0].get("path"):
        path = str(tests[0]["path"])
        reason = "" if len(tests) == 1 else f"a recipe has one, this file has {len(tests)}"
        draft.set("data.validation", path, "test_datasets", reason=reason)
        has_validation = True
        draft.leave("val_set_size", "test_datasets are the validation set")
    else:
        has_validation = validation_size(draft, "val_set_size")
    per_epoch = draft.number("evals_per_epoch")
    if not has_validation:
        draft.set("eval.every", "none", reason="there is no validation set")
        draft.leave_all(
            ("evals_per_epoch", "eval_steps", "eval_strategy"), "there is no validation set"
        )
    elif draft.given("eval_steps") and intervals(draft, "eval_steps"):
        draft.set("eval.every", intervals(draft, "eval_steps"), "eval_steps", "eval_strategy")
    elif per_epoch and per_epoch > 0:
        draft.set("eval.every", f"{1 / per_epoch:.4g} epochs", "evals_per_epoch")
        draft.leave("eval_strategy", "evals_per_epoch is set")
    else:
        evaluation(draft)
    draft.set_default("data.validation", "0%")


# TRL

_DPO_LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}


def trl(draft: Draft) -> None:
    command = draft.file.command or "sft"
    shown = "PPOTrainer, up to TRL 1.15" if command == "ppo" else f"`trl {command}`"
    if draft.file.tool == "Unsloth":
        shown = f"the trainer of {command}"
    reason = f"of {shown}"
    if draft.file.is_guess:
        reason += ": the file names no trainer; set objective.kind for another"
    _trl_objective(draft, command, reason)
    kind = draft.value("objective.kind")

    # The adapter and the base model.
    uses_peft = draft.is_on("use_peft")
    if uses_peft:
        is_dora = draft.is_on("use_dora")
        names = ("use_dora", "use_peft") if is_dora else ("use_peft",)
        draft.set("adapter.kind", "dora" if is_dora else "lora", *names)
        lora(draft, {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout"})
        draft.set("adapter.use_rslora", draft.is_on("use_rslora"), "use_rslora")
        if not draft.given("lora_target_modules"):
            reason = "of PEFT for Llama: no modules are named"
            draft.set_default("adapter.target_modules", ["q_proj", "v_proj"], reason=reason)
        if draft.is_on("load_in_4bit"):
            nested = draft.is_on("use_bnb_nested_quant")
            draft.set("quantize.kind", "nf4", "load_in_4bit")
            draft.set("quantize.double_quant", nested, "use_bnb_nested_quant")
    else:
        draft.set("adapter.kind", "none", "use_peft", reason="use_peft is not set")

    # The dataset.
    if not samples(draft):
        sequence_length(draft, "max_length", "max_seq_length")
    _trl_datasets(draft)
    if draft.word("dataset_text_field") == "text":
        draft.leave("dataset_text_field", "the usual name of the column")
    if kind == "sft":
        _trl_loss_tokens(draft)
        _trl_packing(draft)
    elif kind == "distill":
        reason = "GKDTrainer masks all but the last response"
        draft.set("data.chat.train_on", "last", "assistant_only_loss", reason=reason)
        draft.set("data.packing", False)
    else:
        draft.set_default("data.packing", False)
    evaluates = draft.word("eval_strategy") or draft.word("evaluation_strategy")
    has_validation = evaluates not in ("no", "false", "none", "")
    if has_validation and "data.validation" not in draft.settings:
        split = str(draft.get("dataset_test_split"))
        draft.set("data.validation", split, "dataset_test_split")
    elif not has_validation:
        draft.leave("dataset_test_split", "nothing is evaluated")
        draft.set("data.validation", "0%", reason="nothing is evaluated")
    evaluation(draft)

    trainer_arguments(draft)
    if "train.precision" not in draft.settings:
        if not draft.given("bf16"):
            reason = "bf16, where the GPU has it"
            draft.set("train.precision", "auto", reason=reason)
        elif draft.word("dtype") in ("bfloat16", "torch.bfloat16"):
            draft.set("train.precision", "bfloat16-pure", "dtype", "bf16")
        else:
            draft.set("train.precision", "float32", "bf16", "fp16")
    checkpointing = draft.get("gradient_checkpointing")
    draft.set(
        "train.activation_checkpointing",
        "full" if checkpointing is True or draft.is_on("gradient_checkpointing") else "none",
        "gradient_checkpointing",
    )


def _trl_objective(draft: Draft, command: str, reason: str) -> None:
    loss = draft.word("loss_type")
    given_loss = str(plain(draft.get("loss_type")))
    if command == "sft":
        objective_kind(draft, "sft", reason=reason)
        if loss in ("nll", "chunked_nll"):
            draft.leave("loss_type", "cross-entropy is the loss of sft")
        elif loss == "dft":
            draft.set("objective.loss", "dft", "loss_type")
    elif command == "dpo":
        if loss in _DPO_LOSSES:
            objective_kind(draft, _DPO_LOSSES[loss], "loss_type", reason=reason)
        else:
            unsupported_loss(draft, "dpo", "loss_type", given_loss)
        if draft.given("label_smoothing"):
            _sigmoid_smoothing(draft, "label_smoothing")
        preference_settings(draft, "beta", "simpo_gamma")
    elif command == "kto":
        if loss == "kto":
            objective_kind(draft, "kto", "loss_type", reason=reason)
        else:
            unsupported_loss(draft, "kto", "loss_type", given_loss)
        preference_settings(draft, "beta", "simpo_gamma")
        for name in ("desirable_weight", "undesirable_weight"):
            weight = draft.number(name)
            draft.set(f"objective.{name}", 1.0 if weight is None else weight, name)
    elif command == "cpo":
        if loss == "simpo":
            objective_kind(draft, "simpo", "loss_type", reason="of CPOTrainer")
        else:
            unsupported_loss(draft, "simpo", "loss_type", given_loss)
            draft.left["loss_type"] = f"not supported: CPO with loss_type={given_loss}"
        preference_settings(draft, "beta", "simpo_gamma")
        alpha = draft.number("cpo_alpha")
        if alpha:
            draft.left["cpo_alpha"] = (
                f"{alpha:g}: the cross-entropy of the chosen response is added; not supported:"
                " objective.kind=simpo has no such term (orpo has one)"
            )
        draft.answered.add("cpo_alpha")
        if alpha == 0:
            draft.leave("cpo_alpha", "as here: SimPO without a term of the chosen response")
    elif command == "orpo":
        objective_kind(draft, "orpo", reason="of ORPOTrainer")
        preference_settings(draft, "beta", "simpo_gamma")
    elif command == "distillation":
        objective_kind(draft, "on_policy_distill", reason=reason)
        divergence(draft, "beta", 1.0)
    elif command == "gkd" and draft.number("lmbda") == 1:
        objective_kind(draft, "on_policy_distill", "lmbda", reason="of GKDTrainer")
        divergence(draft, "beta", 0.5)
        longest = int(draft.number("max_new_tokens") or 128)
        draft.set("objective.max_completion_length", longest, "max_new_tokens")
        temperature = draft.number("temperature")
        draft.set(
            "objective.temperature", 0.9 if temperature is None else temperature, "temperature"
        )
    elif command == "gkd":
        objective_kind(draft, "distill", reason="of GKDTrainer")
        temperature = draft.number("temperature")
        draft.set(
            "objective.temperature", 0.9 if temperature is None else temperature, "temperature"
        )
        draft.set_default("objective.kd_ratio", 1.0, reason="no loss of the labels")
        draft.left["beta"] = (
            "the forward KL divergence, as beta=0; beta interpolates to the reverse one"
        )
        draft.answered.add("beta")
        draft.left["lmbda"] = (
            f"{draft.number('lmbda'):g}: the share of text that the student samples; here none of it"
            " (objective.kind=distill) or all of it (on_policy_distill)"
        )
        draft.answered.add("lmbda")
    elif command == "reward":
        objective_kind(draft, "reward", reason=reason)
    else:
        objective_kind(draft, command, reason=reason)


def _trl_loss_tokens(draft: Draft) -> None:
    """Every token, unless a key masks some; prompts of datasets with a column `completion` are masked by default."""
    if draft.is_on("assistant_only_loss"):
        draft.set("data.chat.train_on", "assistant", "assistant_only_loss")
        draft.leave("completion_only_loss", "assistant_only_loss masks more")
    elif draft.is_on("completion_only_loss"):
        draft.set("data.chat.train_on", "assistant", "completion_only_loss", "assistant_only_loss")
    elif not draft.given("completion_only_loss") and _has_completions(draft):
        reason = "the dataset has completions: their prompts are masked"
        draft.set("data.chat.train_on", "assistant", "assistant_only_loss", reason=reason)
    else:
        reason = "trains on every token"
        if not draft.given("completion_only_loss"):
            reason += "; of a dataset with prompt and completion on the completion: set assistant"
        names = ("assistant_only_loss", "completion_only_loss")
        draft.set("data.chat.train_on", "all", *names, reason=reason)


def _has_completions(draft: Draft) -> bool:
    """Whether the dataset is a file here with a column `completion`."""
    path = Path(str(draft.value("data.path") or draft.get("dataset_name") or ""))
    files = [path] if path.is_file() else sorted(path.glob("*.json*"))[:1] if path.is_dir() else []
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            first_line = lines.readline(1_000_000)
        try:
            row = json.loads(first_line)
        except ValueError:
            return False
        return isinstance(row, dict) and {"prompt", "completion"} <= row.keys()
    return False


def _trl_packing(draft: Draft) -> None:
    is_packed = draft.is_on("packing")
    draft.set("data.packing", is_packed, "packing")
    if is_packed:
        strategy = draft.word("packing_strategy") or "bfd"
        masks = strategy != "wrapped"
        reason = "" if masks else "wrapped packs without regard to the documents"
        draft.set("data.document_masking", masks, "packing_strategy", "packing", reason=reason)
    else:
        draft.leave("packing_strategy", "nothing is packed")
        draft.leave("padding_free", "not needed: no sequence is padded in a micro-batch of one")


def _trl_datasets(draft: Draft) -> None:
    """A mixture of TRL, of alignment-handbook or of open-r1: `datasets`, `dataset_mixture`, `dataset_mixer`."""
    mixture = draft.get("dataset_mixture")
    entries: list[tuple[str, dict[str, object]]] = []
    if isinstance(mixture, dict) and isinstance(mixture.get("datasets"), list):
        entries = [
            (f"dataset_mixture.datasets[{number}]", entry)
            for number, entry in enumerate(mixture["datasets"])
            if isinstance(entry, dict)
        ]
        share = mixture.get("test_split_size")
        share_name = "dataset_mixture.test_split_size"
        draft.leave("dataset_mixture.seed", "train.seed sets the data order too")
        draft.answered.add("dataset_mixture.datasets")
    elif isinstance(draft.get("datasets"), list):
        entries = [
            (f"datasets[{number}]", entry)
            for number, entry in enumerate(draft.get("datasets"))
            if isinstance(entry, dict)
        ]
        share, share_name = draft.get("test_split_size"), "test_split_size"
        if len(entries) == len(draft.get("datasets")):
            draft.answered.add("datasets")
    elif isinstance(draft.get("dataset_mixer"), dict):
        mixer = draft.get("dataset_mixer")
        entries = [
            (f"dataset_mixer.{name}", {"id": name, "weight": weight, "mixer": True})
            for name, weight in mixer.items()
        ]
        share, share_name = None, ""
        draft.answered.add("dataset_mixer")
    else:
        # load_dataset("json", data_files="rows.jsonl") names a builder of datasets.
        file = file_of_builder(draft.get("dataset_name"), draft.get("dataset_files"))
        if file is not None:
            draft.set("data.path", file, "dataset_name", "dataset_files")
        split = draft.get("dataset_train_split")
        if isinstance(split, str) and split != "train" and draft.given("dataset_train_split"):
            reason = "the files of this split"
            draft.set("data.glob", f"*{split}*", "dataset_train_split", reason=reason)
        return
    if not entries:
        return

    # Each dataset with its share of the rows.
    sources = []
    names = []
    for place, entry in entries:
        path = entry.get("path") or entry.get("id")
        file = file_of_builder(path, entry.get("data_files"))
        if file is not None:
            path = file
            names.append(f"{place}.data_files")
        if not isinstance(path, str):
            draft.left[place] = "no dataset: it has no path"
            continue
        source: dict[str, object] = {"path": path}
        is_mixer = entry.get("mixer")
        names.append(place if is_mixer else f"{place}.{'path' if entry.get('path') else 'id'}")
        weight = entry.get("weight")
        if isinstance(weight, int | float) and not isinstance(weight, bool) and weight > 0:
            if weight != 1:
                source["weight"] = weight
            if not is_mixer:
                names.append(f"{place}.weight")
        split = entry.get("split")
        if isinstance(split, str):
            if split != "train":
                source["glob"] = f"*{split}*"
            names.append(f"{place}.split")
        for key, value in entry.items():
            if key in ("path", "id", "mixer", "weight", "split") or value in (None, "", [], {}):
                continue
            if key == "data_files" and file is not None:
                continue
            reasons = {
                "config": f"a subset is a folder of the dataset: choose its files with data.glob={value}/*",
                "name": f"a subset is a folder of the dataset: choose its files with data.glob={value}/*",
                "columns": "the columns that a format does not read are left out",
                "data_files": "data.glob chooses files of the dataset",
                "data_dir": "data.path=PATH/DIR for a local folder; data.glob chooses files of a Hub dataset",
                "fraction": "not supported: a share of the mixture; weight is a share of the dataset's own rows",
            }
            draft.left[f"{place}.{key}"] = reasons.get(key, "no such setting")
            draft.answered.add(f"{place}.{key}")
        sources.append(source)
    if len(sources) == 1 and "weight" not in sources[0]:
        for key, value in sources[0].items():
            draft.set_from(f"data.{key}", value, names)
    elif sources:
        draft.set_from("data.sources", sources, names)
    draft.leave("dataset_name", "the mixture of datasets wins")
    splits = draft.get("dataset_splits")
    if draft.given("dataset_splits"):
        first = splits[0] if isinstance(splits, list) and splits else splits
        draft.leave("dataset_splits", f'choose the files of a split with data.glob="*{first}*"')
    draft.leave(
        "dataset_configs", "a subset is a folder of the dataset: choose its files with data.glob"
    )
    if share_name and draft.given(share_name) and share is not None:
        validation_size(draft, share_name)
