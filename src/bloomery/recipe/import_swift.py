"""What keys of ms-swift mean together: `swift sft`, `pt` and `rlhf` (swift/arguments of ms-swift 4.0)."""

import math

from bloomery.recipe.import_draft import Draft
from bloomery.recipe.import_rules import (
    lora,
    objective_kind,
    sequence_length,
    unsupported_loss,
    validation_size,
    vision_parts,
)
from bloomery.recipe.import_trainer import divergence, evaluation, samples, trainer_arguments

_METHODS = {
    "dpo": "dpo",
    "orpo": "orpo",
    "simpo": "simpo",
    "kto": "kto",
    "rm": "reward",
    "ppo": "ppo",
    "grpo": "grpo",
    "gkd": "distill",
}


def swift(draft: Draft) -> None:
    _objective(draft)
    kind = draft.value("objective.kind")
    if kind != "distill" and not samples(draft):
        names = ("temperature", "top_p", "top_k", "max_new_tokens", "num_beams")
        draft.leave_all(names, "of generation: `bloomery generate` has options")

    draft.leave("model_name", "the texts of the dataset are used as they are")

    # The model and its adapter.
    tuner_name = "train_type" if draft.given("train_type") else "tuner_type"
    if draft.given("sft_type"):  # of version 2
        tuner_name = "sft_type"
    tuner = draft.word(tuner_name) or "lora"
    if tuner == "lora":
        is_dora = draft.is_on("use_dora")
        draft.set("adapter.kind", "dora" if is_dora else "lora", "use_dora", tuner_name)
        lora(draft, {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout"})
        draft.set("adapter.use_rslora", draft.is_on("use_rslora"), "use_rslora")
        for name in ("target_modules", "lora_target_modules"):
            if draft.given(name):
                targets = draft.get(name)
                modules = targets if isinstance(targets, list) else str(targets).split()
                renamed = [_module(module) for module in modules]
                draft.set("adapter.target_modules", renamed, name)
    elif tuner == "full":
        draft.set("adapter.kind", "none", tuner_name)
    vision_parts(draft, tower="freeze_vit", projector="freeze_aligner", language_model="freeze_llm")
    if draft.given("quant_bits") and draft.word("quant_method") in ("", "bnb"):
        kinds = {"4": "nf4", "8": "int8"}
        quantization = kinds.get(str(draft.get("quant_bits")))
        if quantization:
            draft.set("quantize.kind", quantization, "quant_bits", "quant_method")
        if quantization == "nf4":
            nested = draft.is_on("bnb_4bit_use_double_quant")
            draft.set("quantize.double_quant", nested, "bnb_4bit_use_double_quant")

    # The dataset: rows of a share of it are held out only where the file says so.
    _datasets(draft)
    if not samples(draft):
        sequence_length(draft, "max_length")
        reason = "set it: max_length is not set, which is the model's own limit"
        draft.set_default("data.sequence_length", 2048, reason=reason)
    if kind == "pretrain" and not draft.given("use_chat_template"):
        draft.set("data.chat.template", "none", reason="of `swift pt`: texts are not formatted")
    if draft.given("val_dataset"):
        value = draft.get("val_dataset")
        path = value[0] if isinstance(value, list) and value else value
        draft.set("data.validation", str(path).partition("#")[0], "val_dataset")
        draft.leave("split_dataset_ratio", "val_dataset is the validation set")
        has_validation = True
    else:
        has_validation = validation_size(draft, "split_dataset_ratio")
    draft.set_default("data.validation", "0%")
    draft.set_default("router.loss", "none", reason="of ms-swift without router_aux_loss_coef")
    if kind in ("sft", "distill"):
        _loss_tokens(draft)
    is_packed = draft.is_on("packing") and kind in ("sft", "pretrain")
    draft.set("data.packing", is_packed, "packing")
    if is_packed:
        draft.set("data.document_masking", True, "packing")

    # Training.
    if not draft.given("gradient_accumulation_steps"):
        size = int(draft.number("per_device_train_batch_size") or 1)
        steps = 1 if kind == "grpo" else max(1, math.ceil(16 / max(1, size)))
        draft.defaults = {**draft.defaults, "gradient_accumulation_steps": steps}
    rate = 1e-5 if draft.value("adapter.kind") == "none" else 1e-4
    draft.defaults = {**draft.defaults, "learning_rate": rate}
    draft.set("optimizer.learning_rate", draft.number("learning_rate") or rate, "learning_rate")
    trainer_arguments(draft)
    if not draft.given("eval_strategy") and not draft.given("evaluation_strategy"):
        strategy = draft.get("save_strategy")
        steps_name = draft.get("eval_steps") or draft.get("save_steps")
        draft.defaults = {**draft.defaults, "eval_strategy": strategy, "eval_steps": steps_name}
    evaluation(draft, has_validation=has_validation)
    draft.set(
        "train.activation_checkpointing",
        "full" if draft.is_on("gradient_checkpointing") else "none",
        "gradient_checkpointing",
    )
    dtype = draft.word("torch_dtype") or draft.word("dtype")
    dtype_names = ("torch_dtype", "dtype")
    if "train.precision" in draft.settings:
        draft.leave_all(
            dtype_names, "bf16 or fp16 sets the type of the matmuls; weights stay in float32"
        )
    elif dtype in ("bfloat16", "bf16", "torch.bfloat16"):
        draft.set("train.precision", "bfloat16", *dtype_names, reason="weights stay in float32")
    elif dtype in ("float16", "fp16", "float32"):
        draft.set("train.precision", "float16", *dtype_names, reason="ms-swift turns fp16 on")
    else:
        reason = "of the model's own type: bf16 where that is bfloat16"
        draft.set_default("train.precision", "auto", reason=reason)


def _module(name: object) -> str:
    return "all-linear" if str(name) in ("all-linear", "ALL", "AUTO", "DEFAULT") else str(name)


def _objective(draft: Draft) -> None:
    """`rlhf_type` with its own defaults of beta (RLHFArguments._init_simpo and _set_default)."""
    command = draft.file.command
    method = draft.word("rlhf_type") or ("dpo" if command == "rlhf" else "")
    loss = draft.word("loss_type")
    task = draft.word("task_type")
    if method == "cpo" and loss == "simpo":
        method = "simpo"
    if task not in ("", "causal_lm"):
        draft.settings.clear()
        reason = f"set it: task_type={task} is not supported"
        objective_kind(draft, "sft", reason=reason)
        draft.left["task_type"] = f"not supported: {task}; models are causal language models"
        draft.answered.add("task_type")
        return
    if not method:
        kind = "pretrain" if command == "pt" else "sft"
        objective_kind(draft, kind, reason=f"of `swift {command or 'sft'}`")
        if draft.is_on("enable_dft_loss"):
            draft.set("objective.loss", "dft", "enable_dft_loss")
        return
    kind = _METHODS.get(method, "")
    if method == "dpo" and loss in ("ipo",):
        objective_kind(draft, "ipo", "loss_type", "rlhf_type")
    elif method == "dpo" and loss not in ("", "sigmoid"):
        unsupported_loss(draft, "dpo", "loss_type", loss)
        draft.leave("rlhf_type", f"with loss_type={loss}")
    elif method == "gkd" and draft.number("lmbda") == 1:
        objective_kind(draft, "on_policy_distill", "rlhf_type", "lmbda")
    elif kind:
        objective_kind(draft, kind, "rlhf_type", reason=f"of `swift {command or 'rlhf'}`")
        if loss in ("sigmoid", "simpo", "kto"):
            draft.leave("loss_type", f"the loss of {method}")
    else:
        unsupported_loss(draft, "dpo", "rlhf_type", method)
    kind = draft.value("objective.kind")

    beta = draft.number("beta")
    usual = {"simpo": 2.0, "grpo": 0.04}.get(kind, 0.1)
    if kind in ("dpo", "ipo", "simpo", "orpo", "kto", "grpo"):
        draft.set("objective.beta", usual if beta is None else beta, "beta")
    if kind == "simpo":
        gamma = draft.number("simpo_gamma")
        draft.set("objective.gamma", 1.0 if gamma is None else gamma, "simpo_gamma")
        alpha = draft.number("cpo_alpha")
        if alpha is None or alpha > 0:
            draft.left["cpo_alpha"] = (
                f"{1.0 if alpha is None else alpha:g}: the cross-entropy of the chosen response is added; not"
                " supported: objective.kind=simpo has no such term (orpo has one)"
            )
        draft.answered.add("cpo_alpha")
    if kind == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            weight = draft.number(name)
            draft.set(f"objective.{name}", 1.0 if weight is None else weight, name)
    if kind == "grpo":
        _grpo(draft)
    if kind == "ppo":
        _ppo(draft)
    if kind in ("distill", "on_policy_distill"):
        teacher = draft.get("teacher_model")
        draft.set("objective.teacher", teacher or "TEACHER", "teacher_model")
        temperature = draft.number("temperature")
        value = 0.9 if temperature is None else temperature
        draft.set("objective.temperature", value, "temperature")
    if kind == "on_policy_distill":
        divergence(draft, "beta", 0.5)
        longest = int(draft.number("max_completion_length") or 512)
        draft.set("objective.max_completion_length", longest, "max_completion_length")
    if kind == "distill":
        share = draft.number("sft_alpha") or 0.0
        draft.set("objective.kd_ratio", 1 / (1 + share), "sft_alpha")
        draft.left["beta"] = (
            "the forward KL divergence, as beta=0; beta interpolates to the reverse one"
        )
        draft.left["lmbda"] = (
            "the share of text that the student samples; here none of it (objective.kind=distill) or all of it"
            " (on_policy_distill)"
        )
        draft.answered |= {"beta", "lmbda"}
    if draft.given("label_smoothing"):
        draft.leave(
            "label_smoothing",
            "TRL ignores it with the sigmoid loss; objective.label_smoothing would smooth it (cDPO)",
        )


def _grpo(draft: Draft) -> None:
    loss = draft.word("loss_type") or "grpo"
    if loss == "bnpo":
        reason = "bnpo divides each micro-batch by its own tokens, dapo the step by all of them"
        draft.set("objective.loss_type", "dapo", "loss_type", reason=reason)
    elif loss in ("grpo", "dapo", "dr_grpo", "cispo"):
        draft.set("objective.loss_type", loss, "loss_type")
    numbers = {
        "num_generations": 8,
        "max_completion_length": 512,
        "temperature": 0.9,
        "epsilon": 0.2,
        "num_iterations": 1,
    }
    for name, usual in numbers.items():
        value = draft.number(name)
        draft.set(f"objective.{name}", usual if value is None else value, name)
    # A teacher beside rewards judges the tokens that were sampled.
    if draft.given("teacher_model"):
        weight = draft.number("teacher_kl_coef")
        draft.set("objective.teacher", draft.get("teacher_model"), "teacher_model")
        draft.set("objective.teacher_kl_coef", 1.0 if weight is None else weight, "teacher_kl_coef")
        if draft.number("num_iterations") in (None, 1):
            draft.set("objective.estimator", "sampled", reason="of teacher_kl_coef")


def _ppo(draft: Draft) -> None:
    """PPOArguments, in the words of TRL's PPOConfig."""
    numbers = {
        "num_iterations": ("num_ppo_epochs", 4),
        "steps_per_generation": ("num_mini_batches", 1),
        "kl_coef": ("kl_coef", 0.05),
        "cliprange": ("cliprange", 0.2),
        "cliprange_value": ("cliprange_value", 0.2),
        "vf_coef": ("vf_coef", 0.1),
        "gamma": ("gamma", 1.0),
        "lam": ("lam", 0.95),
        "temperature": ("temperature", 0.9),
    }
    for key, (name, usual) in numbers.items():
        value = draft.number(name)
        draft.set(f"objective.{key}", usual if value is None else value, name)
    longest = "response_length" if draft.given("response_length") else "max_completion_length"
    tokens = draft.number(longest)
    draft.set("objective.max_completion_length", int(512 if tokens is None else tokens), longest)
    draft.set("objective.whiten_rewards", draft.is_on("whiten_rewards"), "whiten_rewards")


def _loss_tokens(draft: Draft) -> None:
    """`loss_scale`: every response, the last one, or every token; others weigh parts of the text."""
    usual = "last_round" if draft.value("objective.kind") == "distill" else "default"
    scale = draft.word("loss_scale") or usual
    strategy = scale.partition("+")[0]
    trained = {"default": "assistant", "last_round": "last", "all": "all"}.get(strategy)
    if trained is None:
        draft.set_default("data.chat.train_on", "assistant")
        draft.leave(
            "loss_scale", f"not supported: {scale}; data.chat.train_on is assistant, all or last"
        )
        return
    draft.set("data.chat.train_on", trained, "loss_scale")
    if "+" in scale:
        draft.left["loss_scale"] = (
            f"not supported: {scale.partition('+')[2]}; a turn is trained on as a whole"
        )


def _datasets(draft: Draft) -> None:
    """Names with a hub (`hf::`, `ms::`), a subset (`:name`) and a number of rows (`#500`)."""
    value = draft.get("dataset")
    entries = value if isinstance(value, list) else [value] if value else []
    sources: list[dict[str, object]] = []
    notes = []
    for entry in entries:
        name, _, count = str(entry).partition("#")
        hub, separator, rest = name.partition("::")
        name = rest if separator else hub
        name, _, subset = name.partition(":")
        sources.append({"path": name})
        if count:
            notes.append(f"{name}: {count} rows, here all of them")
        if subset:
            notes.append(f"{name}: the subset {subset}, a folder of the dataset: data.glob")
        if hub == "ms" or (not separator and "/" in name):
            notes.append(f"{name}: a name of ModelScope, unless use_hf is set")
    if not sources:
        return
    if len(sources) == 1:
        draft.set("data.path", sources[0]["path"], "dataset")
    else:
        draft.set("data.sources", sources, "dataset")
    if notes:
        draft.left["dataset"] = "; ".join(dict.fromkeys(notes))
