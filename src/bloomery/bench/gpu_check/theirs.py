"""Parts `theirs-*`: the steps of `speed` with TRL's SFTTrainer, or transformers' Trainer without TRL.

The same shapes, rows and micro-batches, random weights. None of these packages is needed by Bloomery: they are imported
where they are installed, and typed as Any.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.results import Row
from bloomery.bench.gpu_check.speed import capped_plan
from bloomery.core.device import (
    is_accelerator,
    memory_stats,
    release_cached_memory,
    reset_peak_memory,
    synchronize,
)
from bloomery.core.units import GIB
from bloomery.facts.hf_config import config_to_hf
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora
from bloomery.train.process import peak_memory_gib

NEEDED = {
    "full": ("transformers", "accelerate"),
    "lora": ("transformers", "accelerate", "peft"),
    "qlora": ("transformers", "accelerate", "peft", "bitsandbytes"),
}
CALM_STEPS = 2
MEASURED_STEPS = 3
# Random weights know nothing of random tokens: their loss is the logarithm of the vocabulary. So far from it, relative,
# steps compute something else, and how fast they do it says nothing.
LOSS_TOLERANCE = 0.1


def qlora(job: PartJob) -> Iterator[Row]:
    yield from rows_of(job, [("qlora", lambda: _their_row("qlora", job))])


def lora(job: PartJob) -> Iterator[Row]:
    yield from rows_of(job, [("lora", lambda: _their_row("lora", job))])


def full(job: PartJob) -> Iterator[Row]:
    yield from rows_of(job, [("full", lambda: _their_row("full", job))])


def _their_row(method: str, job: PartJob) -> Row:
    absent = [package for package in NEEDED[method] if find_spec(package) is None]
    if absent:
        message = f"not installed: {', '.join(absent)}"
        return Row(case=method, outcome="skipped", message=message)
    if not is_accelerator(job.device) and not job.tiny:
        return Row(case=method, outcome="skipped", message="no GPU that PyTorch can use")
    os.environ["HF_HUB_OFFLINE"] = "1"
    plan = capped_plan(method, job)
    model = _model(plan, method)
    release_cached_memory()
    reset_peak_memory(plan.train.device)
    job.begin(f"{method}: training")
    step_seconds, loss = _trained(model, plan, method)
    measured = step_seconds[CALM_STEPS:] or step_seconds
    reserved = memory_stats(plan.train.device).get("reserved_bytes.all.peak")
    numbers = {
        "tokens_per_second": plan.train.tokens_per_step / statistics.median(measured),
        "peak_gib": peak_memory_gib(plan.train.device),
        "held_gib": None if reserved is None else reserved / GIB,
        "micro_batch_size": plan.train.micro_batch_size,
        "accumulation": plan.train.accumulation,
        "loss": loss if math.isfinite(loss) else None,
    }
    numbers = {name: value for name, value in numbers.items() if value is not None}
    expected_loss = math.log(plan.model.config.vocab_size)
    if not abs(loss - expected_loss) <= LOSS_TOLERANCE * expected_loss:
        message = f"a loss of {loss:.4f}; of random weights it is {expected_loss:.4f}"
        return Row(case=method, outcome="wrong", message=message, numbers=numbers)
    return Row(case=method, message=_settings(method), numbers=numbers)


def _settings(method: str) -> str:
    trainer = f"TRL {version('trl')}" if find_spec("trl") else "Trainer"
    optimizer = "adafactor" if method == "full" else "fused AdamW"
    return (
        f"{trainer}, transformers {version('transformers')}, bf16, sdpa, gradient checkpointing, "
        f"{optimizer}, no cap of memory"
    )


def _model(plan: RunPlan, method: str) -> Any:
    """bfloat16 weights, drawn on the device by transformers itself; LoRA as the plan's."""
    transformers: Any = import_module("transformers")
    stated = config_to_hf(plan.model.config)
    config = transformers.AutoConfig.for_model(
        **{str(name): value for name, value in stated.items()}
    )
    config.use_cache = False
    with torch.device(plan.train.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if method == "full":
        return model
    if method == "qlora":
        _quantize(model)
    peft: Any = import_module("peft")
    assert isinstance(plan.adapter, Lora)
    lora_config = peft.LoraConfig(
        r=plan.adapter.rank,
        lora_alpha=plan.adapter.alpha,
        target_modules=list(plan.adapter.target_modules),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, lora_config)


def _quantize(model: Any) -> None:
    """What loading with BitsAndBytesConfig does, on weights that are there."""
    bitsandbytes: Any = import_module("bitsandbytes")
    for path, linear in list(model.named_modules()):
        if not isinstance(linear, torch.nn.Linear) or path == "lm_head":
            continue
        weight = linear.weight.data
        quantized = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        # `to` leaves alone what is on a GPU already.
        quantized.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True
        )._quantize(weight.device)
        if linear.bias is not None:
            quantized.bias = linear.bias
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, quantized)
    model.is_loaded_in_4bit = True


def _trained(model: Any, plan: RunPlan, method: str) -> tuple[list[float], float]:
    """Seconds of each optimizer step, between the trainer's own hooks, and the loss of all."""
    transformers: Any = import_module("transformers")
    times: list[float] = []

    def clock() -> float:
        synchronize(plan.train.device)
        return time.perf_counter()

    def on_step_begin(*_args: Any, **_kwargs: Any) -> None:
        times.append(-clock())

    def on_step_end(*_args: Any, **_kwargs: Any) -> None:
        times[-1] += clock()

    hooks = {"on_step_begin": staticmethod(on_step_begin), "on_step_end": staticmethod(on_step_end)}
    timed = type("Timed", (transformers.TrainerCallback,), hooks)
    train = plan.train
    length = plan.data.sequence_length
    num_steps = CALM_STEPS + MEASURED_STEPS
    with tempfile.TemporaryDirectory() as place:
        arguments: dict[str, Any] = {
            "output_dir": place,
            "per_device_train_batch_size": train.micro_batch_size,
            "max_steps": num_steps,
            "gradient_accumulation_steps": train.accumulation,
            "learning_rate": 1e-6,
            "bf16": True,
            "optim": "adafactor" if method == "full" else "adamw_torch_fused",
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "logging_steps": 1000,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "remove_unused_columns": False,
            "use_cpu": train.device == "cpu",
        }
        num_rows = train.micro_batch_size * train.accumulation * num_steps
        rows = _random_rows(num_rows, length, plan.model.config.vocab_size)
        given = {"model": model, "train_dataset": rows, "callbacks": [timed()]}
        if find_spec("trl"):
            trl: Any = import_module("trl")
            more = {"max_length": length, "dataset_kwargs": {"skip_prepare_dataset": True}}
            trainer = trl.SFTTrainer(
                args=_on_one_card(trl.SFTConfig(**arguments, **more)),
                processing_class=_tokenizer(),
                **given,
            )
        else:
            trainer = transformers.Trainer(
                args=_on_one_card(transformers.TrainingArguments(**arguments)), **given
            )
        trainer.data_collator = _collate
        loss = float(trainer.train().training_loss)
    return times, loss


def _on_one_card(arguments: Any) -> Any:
    """Of several cards a trainer would take all, by DataParallel, which TRL refuses; no public setting takes one."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


def _random_rows(count: int, length: int, vocab_size: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (count, length), generator=generator)
    if find_spec("trl") is None:
        return [{"input_ids": row} for row in tokens]
    datasets: Any = import_module("datasets")
    return datasets.Dataset.from_dict({"input_ids": tokens.tolist()})


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = torch.stack([torch.as_tensor(row["input_ids"]) for row in rows])
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
    }


def _tokenizer() -> Any:
    """The trainer wants one; the rows are numbers already."""
    tokenizers: Any = import_module("tokenizers")
    transformers: Any = import_module("transformers")
    vocabulary = {"<pad>": 0, "</s>": 1}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<pad>",
    )
