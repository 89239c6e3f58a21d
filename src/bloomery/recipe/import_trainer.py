"""What the arguments of transformers' Trainer mean together, for every tool that is built on it.

Single keys have rows in aliases.toml; here are those of which one decides what another means.
"""

from collections.abc import Sequence

from bloomery.facts.objectives import OBJECTIVES
from bloomery.recipe.aliases import look_up
from bloomery.recipe.import_draft import Draft, as_number

_WITH_RATE_ZERO = {"polynomial": 1e-7}  # transformers' lr_end


def samples(draft: Draft) -> bool:
    """Whether the objective trains on completions that the model samples."""
    spec = OBJECTIVES.get(draft.value("objective.kind"))
    return spec is not None and spec.samples


def divergence(draft: Draft, name: str, usual: float) -> None:
    """TRL's and ms-swift's `beta` of a distillation: 0 the forward KL divergence, 1 the reverse, between them JSD."""
    beta = draft.number(name)
    beta = usual if beta is None else beta
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    draft.set("objective.divergence", kind, name)
    if kind == "jsd":
        draft.set("objective.jsd_beta", beta, name)


def trainer_arguments(draft: Draft) -> None:
    """Length, batch, optimizer, schedule, evaluation, saving and precision."""
    length(draft)
    batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps")
    optimizer(draft, "optim")
    schedule(draft, "lr_scheduler_type", "lr_scheduler_kwargs")
    warmup(draft)
    saving(draft)
    precision(draft)


def length(draft: Draft, epochs: str = "num_train_epochs") -> None:
    """A number of steps wins over a number of epochs (TrainingArguments.max_steps)."""
    max_steps = draft.number("max_steps")
    num_epochs = draft.number(epochs)
    if max_steps is not None and max_steps >= 1:
        draft.set("train.max_steps", int(max_steps), "max_steps")
        draft.leave(epochs, "train.max_steps sets the length")
    elif num_epochs is not None and num_epochs > 0:
        draft.set("train.epochs", num_epochs, epochs)
        if max_steps is not None:
            draft.leave("max_steps", f"{epochs} sets the length")


def batch(draft: Draft, micro_batch: str, accumulation: str, default: int = 1) -> None:
    """Sequences per optimizer step on one device, and of one forward pass."""
    micro_batch_size = draft.number(micro_batch)
    steps = draft.number(accumulation)
    if not draft.given(accumulation) and steps is None:
        steps = float(default)
    if micro_batch_size is None or micro_batch_size < 1 or steps is None or steps < 1:
        return
    draft.set("train.micro_batch_size", int(micro_batch_size), micro_batch)
    reason = (
        f"sequences per step: {int(micro_batch_size)} x {int(steps)}, times the number of devices"
    )
    draft.set(
        "train.batch_size",
        int(micro_batch_size * steps),
        accumulation,
        reason=reason,
    )


def optimizer(draft: Draft, name: str) -> None:
    """The optimizer by its name; Adafactor's learning rate has another meaning here."""
    if draft.word(name) in ("adafactor", "torch.optim.adafactor"):
        draft.set("optimizer.kind", "adafactor", name)
        reason = (
            "transformers' Adafactor has scale_parameter=False; here the rate is relative to the size of the weights,"
            " and about 25 times as much does the same: set it yourself"
        )
        rate = draft.number("learning_rate")
        if rate is not None and rate > 0:
            draft.set("optimizer.learning_rate", rate, "learning_rate", reason=reason)
            draft.left[name] = (
                f"optimizer.learning_rate={rate:g} means another size of step here: {reason}"
            )

    # transformers hands them to other optimizers alone (trainer_optimizer.py).
    if draft.word(name).startswith("adam"):
        reason = (
            "transformers does not read it for AdamW: adam_beta1, adam_beta2, adam_epsilon count"
        )
        draft.leave("optim_args", reason)


def schedule(draft: Draft, name: str, arguments: str) -> None:
    """The shape of the learning rate with its arguments (transformers.optimization.get_scheduler)."""
    shape = draft.word(name)
    values = draft.mapping(arguments)
    learning_rate = draft.number("learning_rate")
    text_arguments = isinstance(draft.get(arguments), str)

    def argument(key: str) -> float | None:
        return as_number(values.get(key))

    def named(*keys: str) -> tuple[str, ...]:
        given = [f"{arguments}.{key}" for key in keys if values.get(key) is not None]
        return ((arguments,) if text_arguments else tuple(given)) if given else ()

    min_lr_names = ("min_lr_rate", "min_lr_ratio", "min_lr", "lr_end")
    if shape in ("", "none"):
        return
    if shape in ("warmup_stable_decay", "wsd"):
        draft.set("optimizer.schedule.kind", "wsd", name, reason=_shape_of_decay(draft, arguments))
        decay = argument("num_decay_steps")
        if decay is not None and decay >= 1:
            draft.set("optimizer.schedule.decay", f"{int(decay)} steps", *named("num_decay_steps"))
        floor = argument("min_lr_ratio")
        draft.set("optimizer.schedule.min_lr_ratio", floor or 0, *named("min_lr_ratio"))
    elif shape in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        draft.set("optimizer.schedule", "cosine", name)
        floor = argument("min_lr_rate")
        lowest = argument("min_lr")
        if floor is None and lowest is not None and learning_rate:
            floor = float(f"{lowest / learning_rate:.6g}")
        if floor is not None and 0 <= floor < 1:
            draft.set("optimizer.min_lr_ratio", floor, *named("min_lr_rate", "min_lr"))
    elif shape in ("cosine", "linear", "cosine_with_restarts"):
        ours = "linear" if shape == "linear" else "cosine"
        cycles = argument("num_cycles")
        is_plain = cycles in (None, 1.0 if shape == "cosine_with_restarts" else 0.5)
        reason = "" if is_plain else f"num_cycles={values['num_cycles']} is not supported"
        draft.set("optimizer.schedule", ours, name, reason=reason)
        draft.set_default("optimizer.min_lr_ratio", 0)
        if is_plain and cycles is not None:
            for key in named("num_cycles"):
                draft.leave(key, "as here: the rate falls once")
    elif shape == "polynomial":
        power = argument("power")
        reason = "" if power in (None, 1.0) else "a power of 1, the only one that is supported"
        draft.set("optimizer.schedule", "linear", name, reason=reason)
        end = argument("lr_end")
        end = _WITH_RATE_ZERO["polynomial"] if end is None else end
        floor = end / learning_rate if learning_rate else 0.0
        if 0 <= floor < 1:
            draft.set("optimizer.min_lr_ratio", float(f"{floor:.4g}"), *named("lr_end"))
    elif shape in ("constant", "constant_with_warmup"):
        draft.set("optimizer.schedule", "constant", name)
    else:
        answer = look_up((name,), draft.get(name), {}, program=draft.file.tool)
        if answer is not None and any("=" in edit for edit in answer.edits):
            return  # the table has it
        draft.set("optimizer.schedule", "linear", name, reason=f"set it: {shape} is not supported")
        draft.left[name] = (
            f"not supported: {shape}; optimizer.schedule is cosine, linear, constant or wsd"
        )

    # What else stands among the arguments.
    reasons = {
        "num_cycles": "not supported: the rate falls once",
        "power": "not supported: a power of 1",
        "decay_type": "optimizer.schedule.kind=wsd falls linearly",
        "warmup_type": "the warmup is linear",
        "num_stable_steps": "the steps between the warmup and optimizer.schedule.decay",
        "num_training_steps": "the length of the run",
        "warmup_lr_rate": "the warmup begins at 0",
    }
    for key in values if isinstance(draft.get(arguments), dict) else ():
        full_name = f"{arguments}.{key}"
        if full_name not in draft.answered:
            draft.leave(
                full_name,
                reasons.get(key)
                or (
                    f"not used by {shape}" if key in min_lr_names else f"no such setting of {shape}"
                ),
            )
    if text_arguments and arguments not in draft.answered:
        draft.leave(arguments, f"not used by {shape}")


def _shape_of_decay(draft: Draft, arguments: str) -> str:
    decay_type = str(draft.mapping(arguments).get("decay_type") or "cosine")
    if decay_type == "linear":
        return ""
    return f"the decay is linear here; transformers' is of the type {decay_type}"


def warmup(draft: Draft, names: Sequence[str] = ("warmup_steps", "warmup_ratio")) -> None:
    """Steps win over a share (TrainingArguments.get_warmup_steps); `constant` has no warmup in transformers."""
    steps_name, ratio_name = names
    steps = draft.number(steps_name)
    ratio = draft.number(ratio_name)
    given = [name for name in names if draft.given(name)]
    if draft.word("lr_scheduler_type") == "constant" and draft.file.tool != "Axolotl":
        draft.set("optimizer.warmup", "0 steps", reason="the schedule `constant` has no warmup")
        for name in given:
            draft.leave(
                name, "transformers' schedule `constant` ignores it; constant_with_warmup does not"
            )
        return
    if steps is not None and steps > 0:
        text = f"{int(steps)} steps" if steps >= 1 else f"{100 * steps:.6g}%"
        draft.set("optimizer.warmup", text, steps_name)
        draft.leave(ratio_name, f"{steps_name} wins")
    elif ratio is not None and 0 < ratio < 1:
        draft.set("optimizer.warmup", f"{100 * ratio:.6g}%", ratio_name)
        draft.leave(steps_name, f"{ratio_name} sets the warmup")
    elif steps is not None or ratio == 0 or not given:
        draft.set("optimizer.warmup", "0 steps", *names)


def intervals(draft: Draft, name: str) -> str:
    """A number of steps, or a share of the run; "" for none."""
    steps = draft.number(name)
    if steps is None or steps <= 0:
        return ""
    return f"{int(steps)} steps" if steps >= 1 else f"{100 * steps:.6g}%"


def evaluation(draft: Draft, *, has_validation: bool = True) -> bool:
    """How often the validation set is evaluated. Returns whether it is."""
    name = "evaluation_strategy" if draft.given("evaluation_strategy") else "eval_strategy"
    strategy = draft.word(name)
    every = intervals(draft, "eval_steps")
    if strategy in ("no", "false", "none", "") or not has_validation:
        reason = "" if has_validation else "there is no validation set"
        draft.set("eval.every", "none", name, reason=reason)
        reason = f"{name} is no: nothing is evaluated" if has_validation else reason
        draft.leave_all(("eval_steps", "do_eval"), reason)
        return False
    if strategy == "epoch":
        draft.set("eval.every", "1 epochs", name)
        draft.leave("eval_steps", f"{name} is epoch")
    elif every:
        draft.set("eval.every", every, name, "eval_steps")
    elif logged := intervals(draft, "logging_steps"):
        draft.set("eval.every", logged, name, reason="logging_steps, as eval_steps is not set")
    return True


def saving(draft: Draft) -> None:
    """How often a checkpoint is saved, and how many are kept."""
    strategy = draft.word("save_strategy")
    every = intervals(draft, "save_steps")
    if strategy == "epoch":
        draft.set("checkpoint.every", "1 epochs", "save_strategy")
        draft.leave("save_steps", "save_strategy is epoch")
    elif strategy in ("no", "false", "none"):
        draft.set(
            "checkpoint.every", "100%", "save_strategy", reason="the end of a run is always saved"
        )
        draft.leave("save_steps", "save_strategy is no")
    elif strategy == "best":
        draft.leave("save_strategy", "the best weights are always kept")
        draft.leave("save_steps", "save_strategy is best")
    elif every:
        draft.set("checkpoint.every", every, "save_steps", "save_strategy")
    keep = draft.number("save_total_limit")
    if keep is not None and keep >= 1:
        draft.set("checkpoint.keep", int(keep), "save_total_limit")


def precision(draft: Draft) -> None:
    """bf16 and fp16 are mixed precision; the type of the weights has a key of its own."""
    if draft.is_on("pure_bf16"):
        draft.set("train.precision", "bfloat16-pure", "pure_bf16")
        draft.leave_all(("bf16", "fp16"), "pure_bf16 wins")
    elif draft.word("bf16") == "auto":
        draft.set("train.precision", "auto", "bf16", reason="bfloat16 where the GPU has it")
        draft.leave("fp16", "bf16 is auto")
    elif draft.is_on("bf16"):
        draft.set("train.precision", "bfloat16", "bf16")
        draft.leave("fp16", "bf16 is on")
    elif draft.is_on("fp16"):
        draft.set("train.precision", "float16", "fp16")
        draft.leave("bf16", "fp16 is on")
