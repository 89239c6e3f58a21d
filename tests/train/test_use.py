"""A model is used as its run trained it: the same base, the same precision, in the memory that this takes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run
from safetensors.torch import load_file

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.data.loader import Loader
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.evals.evaluate import load_to_evaluate
from bloomery.export.layouts import merged_state
from bloomery.facts.config import ModelConfig
from bloomery.infer.generate import load_model
from bloomery.infer.load import Use, load_fitting, load_used
from bloomery.infer.model_folder import find_model
from bloomery.model.adapters.lora import adapt, init_adapters, trained_state
from bloomery.model.adapters.peft_files import write_adapter
from bloomery.model.adapters.settings import adaptation
from bloomery.model.io.weights import (
    fresh_decoder,
    load_decoder,
    model_state,
    quantized_weights,
    write_model,
)
from bloomery.monitor.events import EvalDone
from bloomery.plan.store import write_plan
from bloomery.recipe.schema import Lora, Quantize
from bloomery.train.evaluation.evaluation import validation_result
from bloomery.train.objectives.build import build_objective
from device_for_tests import DEVICE, SIMULATED

# As commands have it on the device of the tests: a run and what uses its model compute alike there.
USE = Use(DEVICE, bfloat16=SIMULATED)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, folder)
    return folder


def run_of(prepared, base, folder, *, quantize="nf4", precision="float32", adapter=None):
    """A finished run over a quantized base, with its folder's plan, and that plan."""
    lora = Lora(
        **(
            {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["all-linear"]}
            | (adapter or {})
        )
    )
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        model={"source": base},
        train={"steps": 3, "precision": precision},
        optimizer={"learning_rate": 0.03},
    )
    plan = plan.model_copy(update={"adapter": lora, "quantize": Quantize(kind=quantize)})
    run = Run(plan, folder)
    write_plan(plan, folder / "plan.json")
    (folder / "recipe.yaml").write_text("{}")
    return run, plan


def loss_of(decoder, plan):
    """What the run's own evaluation gives for that model."""
    decoder.model.backend = plan.model.attention
    for block in decoder.model.layers:
        block.self_attn.backend = plan.model.attention
    loader = Loader(
        plan.data.prepared, sequence_length=32, layout="packed", seed=0, split="validation"
    )
    sizes = load_tokenizer(plan.data.prepared).token_bytes()
    result = validation_result(
        decoder,
        loader,
        build_objective(plan),
        plan=plan.eval,
        precision="float32",
        token_bytes=sizes,
        limit=None,
    )
    return result.loss


@pytest.mark.parametrize(
    ("quantize", "precision", "adapter"),
    [
        ("nf4", "float32", {}),
        ("nf4", "bfloat16", {"kind": "dora", "target_modules": ["q_proj", "down_proj"]}),
        ("int8", "float16", {"init": "pissa", "modules_to_save": ["norm"]}),
        ("none", "bfloat16", {}),
    ],
    ids=["nf4", "dora", "pissa", "lora"],
)
def test_the_loaded_model_has_the_runs_own_figure(
    prepared, base, tmp_path, quantize, precision, adapter
):
    """To the last bit, through the decoder alone: nobody has to know the precision."""
    run, plan = run_of(
        prepared, base, tmp_path / "run", quantize=quantize, precision=precision, adapter=adapter
    )
    lines = []
    for load in (load_model, load_to_evaluate):
        decoder, _ = load(run.folder, step="last", use=USE, on_load=lines.append)
        assert loss_of(decoder, plan) == run.of(EvalDone)[-1].loss
        assert bool(dict(quantized_weights(decoder))) == (quantize != "none")
    assert not any("differ" in line for line in lines)
    assert all(f"{quantize} base" in line or quantize == "none" for line in lines)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_whole_model_keeps_its_matrices_as_products_read_them(prepared, tmp_path, precision):
    plan = tiny_plan(prepared, config=CONFIG, train={"steps": 3, "precision": precision})
    run = Run(plan, tmp_path / "run")
    write_plan(plan, run.folder / "plan.json")
    (run.folder / "recipe.yaml").write_text("{}")
    decoder, _ = load_model(run.folder, step="last", use=USE)
    assert decoder.model.layers[0].mlp.up_proj.weight.dtype == getattr(torch, precision)
    assert decoder.model.norm.weight.dtype == torch.float32
    assert loss_of(decoder, plan) == run.of(EvalDone)[-1].loss


def test_another_base_is_another_figure_and_said(prepared, base, tmp_path):
    run, plan = run_of(prepared, base, tmp_path / "run")
    run_loss = run.of(EvalDone)[-1].loss
    lines = []
    for quantize in ("none", "int8"):
        decoder, _ = load_to_evaluate(
            run.folder, step="last", use=replace(USE, quantize=quantize), on_load=lines.append
        )
        assert loss_of(decoder, plan) != run_loss
    warnings = [line for line in lines if "results differ" in line]
    assert (
        len(warnings) == 2
        and "nf4 weights" in warnings[0]
        and "not quantized" in warnings[0]
        and "int8" in warnings[1]
    )
    words = [
        str(run.folder),
        "--data",
        str(prepared / "tokenizer.json"),
        "--step",
        "last",
        "--json",
    ]
    results = [
        CliRunner().invoke(cli, ["eval", *words, *flags])
        for flags in ([], ["--quantize", "none"], ["-d", DEVICE])
    ]
    losses = [json.loads(result.stdout)["loss"] for result in results]
    assert losses[0] == losses[2] != losses[1]
    assert ["results differ" in result.stderr for result in results] == [False, True, False]
    assert "nf4 base" in results[0].stderr


def test_a_device_without_the_runs_precision_says_so(prepared, base, tmp_path):
    run, plan = run_of(prepared, base, tmp_path / "run")
    train_plan = plan.train.model_copy(update={"device": "cuda", "precision": "bfloat16"})
    write_plan(plan.model_copy(update={"train": train_plan}), run.folder / "plan.json")
    lines = []
    decoder, _ = load_to_evaluate(run.folder, step="last", use=Use("cpu"), on_load=lines.append)
    assert "bfloat16, which CPU lacks" in lines[0]
    assert decoder.model.embed_tokens.weight.dtype == torch.float32
    load_to_evaluate(run.folder, step="last", use=Use("cpu", bfloat16=True), on_load=lines.append)
    assert sum("lacks" in line for line in lines) == 1


def test_a_whole_model_is_quantized_when_asked(base, tmp_path, prepared):
    for file in prepared.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, tmp_path)
    whole_model, _ = load_model(tmp_path, use=Use("cpu"))
    quantized_model, _ = load_model(tmp_path, use=Use("cpu", "int8"))
    tokens = torch.arange(24)[None] * 7 % CONFIG.vocab_size
    with torch.no_grad():
        difference = float((whole_model(tokens).head - quantized_model(tokens).head).abs().max())
    assert 0 < difference < 0.05
    assert len(dict(quantized_weights(quantized_model))) == 7 * CONFIG.num_layers


def test_what_does_not_fit_is_refused_before_memory_is_taken(prepared, base, tmp_path, monkeypatch):
    run, _ = run_of(prepared, base, tmp_path / "run", quantize="none")
    free_bytes = []
    monkeypatch.setattr(Use, "free_bytes", lambda _: free_bytes[0])
    monkeypatch.setattr(sys.modules[Use.__module__], "WORKSPACE", 0)
    monkeypatch.setattr(
        "bloomery.model.io.weights.give_memory", lambda *_: pytest.fail("memory was taken")
    )
    free_bytes[:] = [90_000]
    with pytest.raises(UserError, match="does not fit") as caught:
        load_model(run.folder, use=Use("cpu"))
    assert "--quantize int8" in caught.value.fix
    free_bytes[:] = [1000]
    with pytest.raises(UserError) as caught:
        load_model(run.folder, use=Use("cpu"))
    assert "a smaller model" in caught.value.fix
    free_bytes[:] = [10**8]
    with pytest.raises(UserError) as caught:
        load_used(find_model(run.folder, "last"), Use("cpu"), cached=(10**6, 4096))
    assert "--max-requests" in caught.value.fix


def test_a_server_plans_the_longest_context_that_fits(prepared, base, tmp_path, monkeypatch):
    run, _ = run_of(prepared, base, tmp_path / "run", quantize="none")
    files = find_model(run.folder, "last")
    module = sys.modules[Use.__module__]
    lines: list[str] = []
    decoder = load_used(files, Use("cpu"))
    config = decoder.config
    weight_bytes = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
    head_numbers = config.num_layers * config.num_kv_heads * config.head_dim
    token_bytes = 4 * 2 * head_numbers * decoder.model.embed_tokens.weight.itemsize
    monkeypatch.setattr(module, "WORKSPACE", 0)
    monkeypatch.setattr(module, "MIN_CONTEXT", 8)
    # Four slots take half of what is free beside the weights; two models a quarter each.
    for parts, context in ((1, 24), (2, 8)):
        monkeypatch.setattr(Use, "free_bytes", lambda _: weight_bytes + 2 * 24 * token_bytes + 10)
        assert (
            load_fitting(files, Use("cpu"), slots=4, parts=parts, on_load=lines.append)[1]
            == context
        )
        assert (
            "--max-context" in lines[-1]
            and f"{context} of the model's {config.max_positions}" in lines[-1]
        )
    monkeypatch.setattr(Use, "free_bytes", lambda _: 10**12)
    assert load_fitting(files, Use("cpu"), slots=4)[1] == config.max_positions
    monkeypatch.setattr(Use, "free_bytes", lambda _: weight_bytes + 8 * token_bytes - 1)
    with pytest.raises(UserError, match="does not fit"):
        load_fitting(files, Use("cpu"), slots=4)


PROBE = """
import sys
from pathlib import Path
from bloomery.infer.model_folder import ModelFiles
from bloomery.infer.load import Use, load_used
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
small, large = (ModelFiles(Path(word), None, Path(word)) for word in sys.argv[1:3])
load_used(small, Use("cpu", "nf4"))  # what torch imports on the way is not the model's
before = peak()
decoder = load_used(large, Use("cpu", "nf4"))
print(peak() - before, sum(each.nbytes for each in (*decoder.parameters(), *decoder.buffers())))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux")
def test_a_quantized_base_is_never_whole_in_memory(tmp_path):
    """180 MB of float32 become 30 MB: what is held meanwhile is a piece of a file and a piece of a matrix."""
    facts = dict(
        hidden_size=512,
        intermediate_size=2048,
        num_layers=10,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
    )
    config = ModelConfig(vocab_size=1000, max_positions=64, **facts)
    small = replace(
        config, num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=2
    )
    for name, model_config in (("large", config), ("small", small)):
        (tmp_path / name).mkdir()
        write_model(model_state(fresh_decoder(model_config, seed=0)), model_config, tmp_path / name)
    file_bytes = (tmp_path / "large/model.safetensors").stat().st_size
    words = [sys.executable, "-c", PROBE, str(tmp_path / "small"), str(tmp_path / "large")]
    output = subprocess.run(words, capture_output=True, text=True)
    peak, model_bytes = map(int, output.stdout.split())
    assert model_bytes < 0.17 * file_bytes
    assert peak < model_bytes + 60e6 < 0.6 * file_bytes


@pytest.mark.parametrize("verb", ["chat", "generate", "eval"])
def test_devices_that_are_not_here_are_refused(base, verb):
    prompts = {"generate": ["--prompt", "x"], "eval": ["--data", str(base / "config.json")]}
    for devices, problem in (
        ("0,1", "no such device: '0'"),
        ("cuda:7", "no such device: 'cuda:7'"),
    ):
        words = [verb, str(base), "-d", devices, *prompts.get(verb, [])]
        result = CliRunner().invoke(cli, words)
        assert isinstance(result.exception, UserError) or problem in result.output
        assert problem in (result.output + str(result.exception))


def test_a_checkpoint_outside_its_run_or_of_another_version_is_a_plain_model(
    prepared, base, tmp_path
):
    run, _ = run_of(prepared, base, tmp_path / "run")
    assert find_model(run.checkpoint(3)).trained.quantize.kind == "nf4"
    (run.folder / "plan.json").write_text("{}")
    assert find_model(run.checkpoint(3)).trained is None


MERGE = """
import sys
from pathlib import Path
from bloomery.export.layouts import export_merged
from bloomery.infer.model_folder import ModelFiles
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
for name in ("small", "large"):
    folder = Path(sys.argv[1]) / name
    before = peak()
    export_merged(ModelFiles(folder / "adapter", folder, folder), folder / "merged", verify=False)
print(peak() - before)
"""


def adapter_on(config: ModelConfig, folder: Path, tokenizer: Path) -> None:
    """A base and a random adapter beside it."""
    lora = Lora(kind="dora", rank=4, target_modules=["all-linear"], modules_to_save=["norm"])
    model = fresh_decoder(config, seed=0)
    (folder / "adapter").mkdir(parents=True)
    write_model(model_state(model), config, folder)
    for file in tokenizer.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    adapt(model, lora)
    init_adapters(model, 0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(0.0, 0.02)
    write_adapter(
        trained_state(model), adaptation(config, lora), config, folder / "adapter", base=str(folder)
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux")
@pytest.mark.soak
def test_a_merged_export_holds_one_tensor_at_a_time_and_the_same_numbers(prepared, tmp_path):
    facts = dict(
        hidden_size=512,
        intermediate_size=2048,
        num_layers=10,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
    )
    config = ModelConfig(vocab_size=300, max_positions=64, **facts)
    adapter_on(config, tmp_path / "large", prepared)
    adapter_on(CONFIG, tmp_path / "small", prepared)
    command = [sys.executable, "-c", MERGE, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True)
    assert int(output.stdout) < 0.35 * (tmp_path / "large/model.safetensors").stat().st_size
    for name in ("small", "large"):
        folder = tmp_path / name
        expected = merged_state(
            load_decoder(folder / "adapter", base=folder, dtype=torch.float32), torch.float32
        )
        stored_tensors = load_file(folder / "merged/model.safetensors")
        assert stored_tensors.keys() == expected.keys()
        assert all(torch.equal(stored_tensors[name], expected[name]) for name in stored_tensors)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_eval_of_a_run_gives_the_loss_that_the_run_logged(prepared, base, tmp_path, precision):
    run, _ = run_of(prepared, base, tmp_path / "run", precision=precision)
    words = ["eval", str(run.folder), "--step", "last", "-d", DEVICE, "--json"]
    flag_lists = ([], ["--no-bos"], ["--data", str(prepared)])
    validation, without_bos, named_data = (
        CliRunner().invoke(cli, [*words, *flags]) for flags in flag_lists
    )
    assert validation.exit_code == without_bos.exit_code == named_data.exit_code == 0, (
        validation.output
    )
    logged = run.of(EvalDone)[-1]
    figures = json.loads(validation.stdout)
    assert (figures["loss"], figures["tokens"], figures["bits_per_byte"]) == (
        logged.loss,
        logged.tokens,
        logged.bits_per_byte,
    )
    assert "sequences of 32 tokens" in validation.stderr
    assert "whole texts with a context of up to 64 tokens" in without_bos.stderr
    assert json.loads(without_bos.stdout)["loss"] != logged.loss
    assert "packed sequences" not in named_data.stderr
