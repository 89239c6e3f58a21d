"""The parts of gpu_check.py, each a process: `gpu_check_parts.py PART RESULT.json [--tiny]`."""

import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_check import TARGETS
from gpu_check_pipeline import pipelined
from gpu_check_use import used

from bloomery.core.units import GIB
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import child_environment, resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

RECIPES = {"full": "llama2-7b-full-24gb", "lora": "llama3.1-8b-lora", "qlora": "llama3.1-8b-lora"}
QLORA = ("quantize.kind=nf4", "quantize.double_quant=true")
WORDS = {"qlora": QLORA}
STEP = ("data.sequence_length=2048", "train.tokens_per_step=8192")
TINY_STEP = (
    "data.sequence_length=64",
    "train.tokens_per_step=128",
    "train.micro_batch_size=auto",
    "train.compile=false",
)
SECONDS, TINY_SECONDS = 8.0, 0.1  # of measuring
CALM, MEASURED = 2, 3  # steps of theirs
PROBES = ("device", "matmul", "bandwidth", "attention", "bitsandbytes", "flash-attn", "compile")
TINY_PROBES = ("device", "matmul-float32")
# The recipe, the precision, whether layers are compiled, and what else: the cheapest first.
STEPS = (
    ("go-coder-125m", "float32", False, ()),
    ("go-coder-125m", "float16", False, ()),
    ("go-coder-125m", "bfloat16", False, ()),
    ("qwen2.5-1.5b-lora", "float16", False, ()),
    ("qwen2.5-1.5b-lora", "bfloat16", False, ()),
    ("llama3.1-8b-lora", "float16", False, QLORA),
    ("llama3.1-8b-lora", "bfloat16", False, QLORA),
    ("go-coder-125m", "bfloat16", True, ()),
    ("go-coder-125m", "float16", True, ()),
)
TINY_STEPS = (
    ("qwen2.5-1.5b-lora-tiny", "float32", False, ()),
    ("llama3.1-8b-lora-tiny", "float32", False, QLORA),
)
TINY_BACKENDS = ("backend-sdpa", "backend-math", "backend-blockwise")
Found = dict[str, Any]


def plan_of(method: str, *, tiny: bool) -> RunPlan:
    """The recipe on this machine as if its card had the target's memory, with random weights and the cap as limit."""
    machine = detect()
    recipe = RECIPES[method] + ("-tiny" if tiny else "")
    words = (*(TINY_STEP if tiny else STEP), *WORDS.get(method, ()))
    loaded, there = (
        load_recipe(recipe, words),
        machine if tiny else capped(machine, TARGETS[method]),
    )
    plan = resolve(loaded, facts_of(loaded, there))
    update: Found = {"model": plan.model.model_copy(update={"source": None})}
    if plan.train.device == "cuda":
        update["memory"] = plan.memory.model_copy(update={"limit": TARGETS[method] * GIB})
    return plan.model_copy(update=update)


def capped(machine: Machine, gib: float) -> Machine:
    """The machine with so much memory on each card, and as much as its cards have where that is less."""
    cards = [
        card.model_copy(
            update={"memory_bytes": min(card.memory_bytes, int(gib * GIB)), "memory_used_bytes": 0}
        )
        for card in machine.accelerators
    ]
    return machine.model_copy(update={"accelerators": tuple(cards)})


def ours(method: str, *, tiny: bool) -> Found:
    """Steps of the real loop on random tokens, as `bloomery bench` measures them."""
    plan = plan_of(method, tiny=tiny)
    os.environ.update(child_environment(plan, os.environ))
    if plan.train.device == "cpu" and not tiny:
        return {"outcome": "skipped", "message": "no GPU that PyTorch can use"}
    from bloomery.bench import rig
    from bloomery.train.checkpoint.checkpointed_model import InitialWeights

    assert callable(InitialWeights.fill)
    # the seeded draw of 8 billion numbers on the processor would take the whole time
    InitialWeights.fill = drawn_here
    job = {
        "plan": plan.model_dump(mode="json"),
        "seconds": TINY_SECONDS if tiny else SECONDS,
        "text": "random",
        "learns": True,
    }
    told = rig.measure(job, on_phase=lambda name: print(name, flush=True))
    seconds = statistics.median(told["step_seconds"])
    planned = plan.step_seconds
    on_gpu = plan.train.device == "cuda"
    return {
        "outcome": "ok",
        "message": "compiled" if plan.train.compile else "not compiled",
        "tokens_per_second": plan.train.tokens_per_step / seconds,
        "step_seconds": told["step_seconds"],
        "learning": told["learning"],
        "peak_gib": told["peak_gib"],
        "reserved_gib": told["reserved_gib"],
        "planned_gib": (plan.memory.allocated if on_gpu else plan.memory.total) / GIB,
        "planned_parts_gib": {
            name: round(size / GIB, 3) for name, size in plan.memory.parts.items()
        },
        "planned_tokens_per_second": planned.inverse(plan.train.tokens_per_step).value
        if planned
        else None,
        "cap_gib": plan.memory.limit / GIB if on_gpu else None,
        "micro_batch_size": plan.train.micro_batch_size,
        "accumulation": plan.train.accumulation,
        "checkpointing": plan.train.activation_checkpointing,
        "attention": plan.model.attention,
        "precision": plan.train.precision,
        "optimizer": plan.optimizer.kind,
        "quantized_by": plan.quantized_by,
    }


def drawn_here(_start: Any, model: Any) -> None:
    """Random weights, drawn where they lie and in pieces: the numbers do not matter, their sizes and places do."""
    import torch

    from bloomery.model.adapters.lora import is_added
    from bloomery.model.io.weights import quantized_weights

    std = model.config.initializer_range
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_added(name):
                continue
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std)
        for name, weight in quantized_weights(model):
            weight.fill(pieces(weight, std), name=name)


def pieces(weight: Any, std: float) -> Iterator[Any]:
    import torch

    rows = math.ceil(512 / weight.rows_at_once) * weight.rows_at_once
    for first in range(0, weight.outputs, rows):
        shape = min(rows, weight.outputs - first), weight.inputs
        yield torch.empty(shape, device=weight.codes.device).normal_(0.0, std)


# The same methods by others


def theirs(method: str, *, tiny: bool) -> Found:
    """TRL's SFTTrainer, or transformers' Trainer without TRL: random weights of the same shape, the same rows."""
    needed = ["transformers", "accelerate", *(["peft"] if method != "full" else [])]
    needed += ["bitsandbytes"] if method == "qlora" else []
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        return {"outcome": "skipped", "message": f"not installed: {', '.join(lacking)}"}
    plan = plan_of(method, tiny=tiny)
    if plan.train.device == "cpu" and not tiny:
        return {"outcome": "skipped", "message": "no GPU that PyTorch can use"}
    import torch

    model = their_model(plan, method)
    if plan.train.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print("training", flush=True)
    times = their_steps(model, plan, method)
    measured = times[CALM:] or times
    reserved = torch.cuda.max_memory_reserved() / GIB if plan.train.device == "cuda" else None
    from bloomery.train.process import peak_memory_gib

    return {
        "outcome": "ok",
        "message": described(method),
        "step_seconds": times,
        "tokens_per_second": plan.train.tokens_per_step / statistics.median(measured),
        "peak_gib": peak_memory_gib(plan.train.device),
        "reserved_gib": reserved,
        "micro_batch_size": plan.train.micro_batch_size,
        "accumulation": plan.train.accumulation,
    }


def described(method: str) -> str:
    from importlib.metadata import version

    trainer = f"TRL {version('trl')}" if importlib.util.find_spec("trl") else "Trainer"
    optimizer = "adafactor" if method == "full" else "fused AdamW"
    return f"{trainer}, transformers {version('transformers')}, bf16, sdpa, layers computed again, {optimizer}, no cap"


def their_model(plan: RunPlan, method: str) -> Any:
    """bfloat16 weights, drawn on the device by transformers itself; LoRA as the plan's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from bloomery.facts.hf_config import config_to_hf

    stated = config_to_hf(plan.model.config)
    config = AutoConfig.for_model(**{str(name): value for name, value in stated.items()})
    config.use_cache = False
    with torch.device(plan.train.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if method == "full":
        return model
    if method == "qlora":
        to_four_bits(model)
    from peft import LoraConfig, get_peft_model

    given = plan.adapter.model_dump()
    lora = LoraConfig(
        r=given["rank"],
        lora_alpha=given["alpha"],
        target_modules=list(given["target_modules"]),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def to_four_bits(model: Any) -> None:
    """What loading with BitsAndBytesConfig does, on weights that are there."""
    import bitsandbytes
    import torch

    for path, linear in list(model.named_modules()):
        if not isinstance(linear, torch.nn.Linear) or path == "lm_head":
            continue
        weight = linear.weight.data
        four = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        four.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True
        )._quantize(weight.device)  # `to` leaves alone what is on a GPU already
        if linear.bias is not None:
            four.bias = linear.bias
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, four)
    model.is_loaded_in_4bit = True


def their_steps(model: Any, plan: RunPlan, method: str) -> list[float]:
    """Seconds of each optimizer step, between the trainer's own hooks."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    times: list[float] = []

    def wait() -> float:
        if plan.train.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    class Timed(TrainerCallback):
        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            times.append(-wait())

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            times[-1] += wait()

    train, length, steps = plan.train, plan.data.sequence_length, CALM + MEASURED
    with tempfile.TemporaryDirectory() as place:
        said = {
            "output_dir": place,
            "per_device_train_batch_size": train.micro_batch_size,
            "max_steps": steps,
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
        rows = random_rows(
            train.micro_batch_size * train.accumulation * steps,
            length,
            plan.model.config.vocab_size,
        )
        given = {"model": model, "train_dataset": rows, "callbacks": [Timed()]}
        if importlib.util.find_spec("trl"):
            from trl import SFTConfig, SFTTrainer

            said |= {"max_length": length, "dataset_kwargs": {"skip_prepare_dataset": True}}
            trainer = SFTTrainer(args=SFTConfig(**said), processing_class=any_tokenizer(), **given)
        else:
            trainer = Trainer(args=TrainingArguments(**said), **given)
        trainer.data_collator = collated
        trainer.train()
    return times


def random_rows(count: int, length: int, vocabulary: int) -> Any:
    import torch

    tokens = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
    if importlib.util.find_spec("trl") is None:
        return [{"input_ids": row} for row in tokens]
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": tokens.tolist()})


def collated(rows: list[Found]) -> Found:
    import torch

    tokens = torch.stack([torch.as_tensor(row["input_ids"]) for row in rows])
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
    }


def any_tokenizer() -> Any:
    """The trainer wants one; the rows are numbers already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<pad>"
    )


# What PyTorch and the device can do


def probed(names: tuple[str, ...]) -> Found:
    """The doctor's own probes; they are remembered, and the later parts are planned by them."""
    from bloomery.check import attention_probes
    from bloomery.hardware.probes import run_probes

    here = detect()
    extra = attention_probes.attention_probe_specs(here)
    found = run_probes(
        here, extra=extra, only=names, on_progress=lambda name, _done, _of: print(name, flush=True)
    )
    bad = [f"{each.name} {each.outcome}" for each in found if each.outcome not in ("ok", "absent")]
    good = sum(each.outcome == "ok" for each in found)
    message = f"{good} of {len(found)} ok" + (f"; {', '.join(bad)}" if bad else "")
    return {
        "outcome": "ok" if found else "failed",
        "message": message,
        "probes": [each.model_dump() for each in found],
    }


def attended(*, tiny: bool) -> Found:
    """Each backend against float64 in a process of its own; those that are right are timed in turns, in this one."""
    found = probed(TINY_BACKENDS if tiny else ("backend",))
    names = [
        probe["name"].removeprefix("backend-")
        for probe in found["probes"]
        if probe["outcome"] == "ok" and probe["name"].startswith("backend-")
    ]
    import torch
    from gpu_check_attention import arch_of, timed_backends, timed_tiles, use_fastest

    profile = build_profile(detect())
    device = profile.device.value
    dtype = getattr(torch, profile.dtype.value)
    found["dtype"] = profile.dtype.value
    found["tiles"] = timed_tiles(dtype, device) if "triton" in names else []
    use_fastest(found["tiles"], arch_of(torch.device(device)))
    found["lengths"] = timed_backends(names, dtype, device, tiny=tiny)
    return found


def stepped(*, tiny: bool) -> Found:
    """One step of each recipe in each precision against the CPU; a part that is wrong is named, with the way out."""
    from bloomery.check.step_probes import examined, recipe_plan

    machine = detect()
    rows = []
    for recipe, precision, compiled, words in TINY_STEPS if tiny else STEPS:
        overrides = (
            f"train.precision={precision}",
            f"train.compile={str(compiled).lower()}",
            *words,
        )
        plan = recipe_plan(recipe, overrides, machine)
        print(f"{recipe} {precision}", flush=True)
        told = examined(plan)
        facts = told["facts"]
        rows.append(
            {
                "recipe": recipe + (" nf4" if words else ""),
                "precision": precision,
                "compiled": compiled,
                "attention": facts["attention"],
                "outcome": told["outcome"],
                "message": told.get("message", ""),
                "detail": facts.get("detail", ""),
                "unrepeatable": facts["unrepeatable"],
                "seconds": round(told["seconds"], 2),
            }
        )
    wrong = [row["message"] for row in rows if row["outcome"] != "ok"]
    return {
        "outcome": "failed" if wrong else "ok",
        "message": "; ".join(wrong) or f"{len(rows)} steps equal the CPU's",
        "steps": rows,
    }


def part(name: str, *, tiny: bool) -> Found:
    if name == "probes":
        return probed(TINY_PROBES if tiny else PROBES)
    if name == "use":
        return used(tiny=tiny)
    if name == "pipeline":
        return pipelined(tiny=tiny)
    if name == "attention":
        return attended(tiny=tiny)
    if name == "step":
        return stepped(tiny=tiny)
    who: Callable[..., Found] = theirs if name.startswith("theirs-") else ours
    return who(name.removeprefix("theirs-"), tiny=tiny)


def main() -> None:
    name, out, tiny = sys.argv[1], Path(sys.argv[2]), "--tiny" in sys.argv
    out.write_text(json.dumps(part(name, tiny=tiny)))


if __name__ == "__main__":
    main()
