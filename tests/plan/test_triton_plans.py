"""Where `auto` takes the Triton kernels, and what a plan says of their speed."""

import json
import sys
from importlib.resources import files

import pytest
from plan_help import gpu_machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.hardware.profile import build_profile
from bloomery.hardware.wheels import triton_of, wheel_table
from bloomery.infer.load import Use, _use_decoding_kernel
from bloomery.model.attention import triton_attention
from bloomery.model.attention.tiles import KERNELS, KernelRun, kernel_figures, reason_against
from bloomery.model.io.weights import fresh_decoder
from bloomery.plan.choices import decodes_with_kernel
from bloomery.plan.estimate.kernels import TiledScores, kernel_seconds, score_seconds
from bloomery.recipe.load import load_recipe

# On a GPU that is only planned for, the recommended PyTorch decides: 2.13 with Triton 3.7; 2.9 with 3.5 for gfx906.
TINY = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)
HALF = "train.precision=float16"
CHOICES = [
    ("RX 6700 XT", "go-coder-125m", (), "triton", "not yet run on this card"),
    ("MI100", "go-coder-125m", (), "triton", "no flash attention for gfx908"),
    ("MI50 32GB", "go-coder-125m", (HALF,), "blockwise", "Triton 3.5 cannot compile for gfx906"),
    ("RX 5700 XT", "go-coder-125m", (), "blockwise", "do not fit into registers"),
    ("RX 5500 XT 8GB", "go-coder-125m", (HALF,), "blockwise", "do not fit into registers"),
    ("RX 6700 XT", "go-coder-125m", ("train.precision=float32",), "blockwise", "float32"),
    ("RX 6700 XT", "gemma2-2b-lora", (HALF,), "triton", "not yet run on this card"),
    ("RX 6700 XT", "gemma2-2b-lora", ("train.precision=float32",), "blockwise", "heads of 256"),
    ("MI300X", "go-coder-125m", (), "triton", "varlen_attn has no dropout"),
    ("MI300X", "qwen2.5-1.5b-lora", (), "varlen", ""),
    ("T4", "qwen2.5-1.5b-lora", (), "flex", ""),
    ("GTX 1080 Ti", "go-coder-125m", (), "blockwise", "Triton begins at sm_70"),
]


@pytest.mark.parametrize(("gpu", "recipe", "edits", "backend", "words"), CHOICES)
def test_what_auto_takes(gpu, recipe, edits, backend, words):
    if recipe == "gemma2-2b-lora":
        # The shape of Gemma 2 without its name: wide heads.
        loaded = load_recipe("go-coder-125m", ["model.num_heads=3", *edits])
    else:
        loaded = load_recipe(recipe, edits)
    plan = planned(loaded, gpu_machine(gpu))
    assert plan.model.attention == backend
    reason = next(choice.reason for choice in plan.choices if choice.key == "train.attention")
    assert words in reason


def with_triton(gpu, version):
    machine = gpu_machine(gpu)
    software = machine.software.model_copy(update={"triton": version, "torch_folder": "/torch"})
    return machine.model_copy(update={"software": software})


@pytest.mark.parametrize(
    ("gpu", "version", "backend", "words"),
    [
        ("MI50 32GB", "3.8.0", "triton", "not yet run"),
        ("MI50 32GB", "3.7.1", "blockwise", "3.8 can (torch 2.14)"),
        ("RX 6700 XT", "3.8.0", "triton", "not yet run"),
        ("RX 6700 XT", "3.9.0", "blockwise", "those before 3.9 can (torch 2.14)"),
        ("RX 5500 XT 8GB", "3.7.1", "blockwise", "do not fit into registers"),
        ("RX 5500 XT 8GB", "3.8.0", "triton", "not yet run"),
        ("RX 5700 XT", "3.8.0", "blockwise", "LLVM aborts the process"),
        ("RX 6700 XT", None, "blockwise", "Triton is not installed"),
        ("RX 6700 XT", "4.0.0", "blockwise", "those before 3.9 can"),
        ("MI100", "4.0.0", "blockwise", "never compiled for gfx908"),
    ],
)
def test_the_installed_triton_decides(gpu, version, backend, words):
    plan = planned(load_recipe("go-coder-125m", [HALF]), with_triton(gpu, version))
    assert plan.model.attention == backend
    reason = next(choice.reason for choice in plan.choices if choice.key == "train.attention")
    assert words in reason


@pytest.mark.parametrize(("version", "backend"), [("3.7.1", "flex"), (None, "blockwise")])
def test_flex_attention_needs_triton(version, backend):
    plan = planned(
        load_recipe("qwen2.5-1.5b-lora", ["train.precision=float32"]), with_triton("T4", version)
    )
    assert plan.model.attention == backend
    reason = next(choice.reason for choice in plan.choices if choice.key == "train.attention")
    assert ("FlexAttention is compiled by Triton, which is not installed" in reason) == (
        version is None
    )


@pytest.mark.parametrize(
    ("heads", "words"),
    [(24, "heads of 32"), (2, "at most 256 numbers, not 384"), (32, "no multiple of 16")],
)
def test_widths_that_the_kernels_were_never_compiled_for(heads, words):
    """768 numbers in so many heads."""
    recipe = load_recipe("go-coder-125m", [f"model.num_heads={heads}", HALF])
    plan = planned(recipe, gpu_machine("RX 6700 XT"))
    reason = next(choice.reason for choice in plan.choices if choice.key == "train.attention")
    assert plan.model.attention == ("triton" if heads == 24 else "blockwise")
    assert heads == 24 or words in reason


def test_heads_that_are_too_wide_are_refused():
    asked = load_recipe("go-coder-125m", ["train.attention=triton", "model.num_heads=2", HALF])
    with pytest.raises(UserError, match="at most 256 numbers, not 384"):
        planned(asked, gpu_machine("RX 6700 XT"))


@pytest.mark.parametrize(
    ("gpu", "version", "precision", "is_used"),
    [
        ("RX 6700 XT", "3.8.0", "float16", True),
        ("RX 6700 XT", "3.8.0", "float32", False),  # spills
        ("RX 6700 XT", "3.9.0", "float16", False),
        ("MI100", "3.7.1", "bfloat16", True),
        ("MI300X", "3.8.0", "bfloat16", False),  # has SDPA with flash attention
        ("H100 SXM", "3.8.0", "bfloat16", False),
    ],
)
def test_what_decodes(gpu, version, precision, is_used, monkeypatch):
    """The kernel where training would take Triton's; here its launch fails, and SDPA decodes."""
    machine = with_triton(gpu, version)
    decoder = fresh_decoder(TINY, seed=0).eval()
    assert is_used == decodes_with_kernel(
        decoder.config, build_profile(machine), precision=precision, torch="2.13.0"
    )
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "bloomery.model.attention.triton_kernels", None)
    triton_attention._kernels.cache_clear()
    lines = []
    _use_decoding_kernel(decoder, Use("cuda", machine=machine), precision, lines.append)
    assert len(lines) == is_used
    assert all("SDPA, as the Triton kernel cannot be used" in line for line in lines)
    assert not decoder.model.layers[0].self_attn.decodes_with_kernel


def test_another_triton_can_be_planned_for_but_not_run():
    asked = load_recipe("qwen2.5-1.5b-lora", ["train.attention=triton", HALF])
    plan = planned(asked, gpu_machine("MI50 32GB"))
    assert plan.model.attention == "triton"
    with pytest.raises(UserError, match=r"3\.8 can"):
        planned(asked, with_triton("MI50 32GB", "3.7.1"))


def test_a_compiler_that_aborts_is_never_called():
    """LLVM ends the process when Triton 3.8 compiles products for gfx1010: refused on request, too."""
    asked = load_recipe("go-coder-125m", ["train.attention=triton", HALF])
    with pytest.raises(UserError, match="LLVM aborts"):
        planned(asked, with_triton("RX 5700 XT", "3.8.0"))
    planned(asked, with_triton("RX 5500 XT 8GB", "3.8.0"))


def test_a_wheel_has_the_triton_of_its_release():
    assert triton_of("2.13.0+rocm7.2") == "3.7"
    assert triton_of("2.8.0") is None
    assert set(wheel_table().pytorch_rocm) == set(wheel_table().triton)


def test_what_auto_takes_keeps_every_number_in_registers():
    """Of all rows of the table: within registers and shared memory, and products of an instruction of their own."""
    rows = json.loads(
        files("bloomery.model.attention").joinpath("compiled_tiles.json").read_text("utf-8")
    )
    precisions = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    taken = 0
    for row in rows:
        if "problem" in row:
            continue
        for options in ({}, {"dropout": True}, {"dropout": True, "window": True, "softcap": True}):
            run = KernelRun(
                row["triton"], row["arch"], row["width"], precisions[row["dtype"]], **options
            )
            if reason_against(run) is None:
                taken += 1
                for figures in kernel_figures(run).values():
                    assert figures.spilled == 0, row
                    assert figures.dot, row
                    limit = 65536 if row["arch"].startswith("gfx") else 99 * 1024
                    assert figures.shared_bytes <= limit, row
    assert taken > 50


def test_seconds_of_kernels_by_hand():
    """RX 6700 XT: 40 units of 64 lanes at 2.581 GHz; 1,024 registers for the waves of a lane."""
    profile = build_profile(gpu_machine("RX 6700 XT"))
    run = KernelRun("3.7", "gfx1031", 64, "float16", dropout=True)
    rates = score_seconds(profile, run)
    lanes = 40 * 64 * 2.581e9
    scores = TiledScores(forward=2e9, forward_queries=2e6, backward=1e9, backward_queries=1e6)
    low = typical = high = 0.0
    for kernel, figures in kernel_figures(run).items():
        amount = (2 if kernel == "forward" else 1) * (
            1e9 + 1e6 * max(figures.tile.rows, figures.tile.keys) / 2
        )
        waves = 1024 // figures.registers
        low += amount * figures.vector / lanes
        typical += amount * (figures.vector + figures.beside / waves) / lanes
        high += 2 * amount * (figures.vector + figures.beside) / lanes
    assert kernel_seconds(scores, rates) == pytest.approx((low, typical, high), rel=2e-3)


def test_products_of_matrix_units_take_time_beside_instructions():
    """MI100: float16 at 184.6 TFLOP/s; forward of a head of 128 numbers makes 512 FLOPs a score."""
    profile = build_profile(gpu_machine("MI100"))
    run = KernelRun("3.7", "gfx908", 128, "float16")
    forward = score_seconds(profile, run)["forward"]
    vector = kernel_figures(run)["forward"].vector / (120 * 64 * 1.502e9)
    assert forward.seconds[0] == pytest.approx(max(vector, 512 / 184.6e12), rel=2e-3)
    assert forward.seconds[1] > vector + 512 / 184.6e12


def test_a_plan_counts_the_scores_of_its_kernels():
    """GPT-2 124M, 16 sequences of 1,024: twelve layers of twelve heads, half of 1,024 keys for each query."""
    report = reported(load_recipe("go-coder-125m"), gpu_machine("RX 6700 XT"))
    rates = score_seconds(
        build_profile(gpu_machine("RX 6700 XT")),
        KernelRun("3.7", "gfx1031", 64, "float16", dropout=True),
    )
    queries = 16384 * 12 * 12
    scores = TiledScores(
        forward=queries * 512,
        forward_queries=queries,
        backward=queries * 512,
        backward_queries=queries,
    )
    low, typical, high = kernel_seconds(scores, rates)
    attention = report.step_parts["attention"]
    assert (attention.low, attention.value, attention.high) == pytest.approx((low, typical, high))
    assert set(rates) == set(KERNELS)
