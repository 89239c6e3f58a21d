"""Runs with LoRA on experts: on ranks as on one, resumed, recomputed, by every optimizer, with a reference model."""

from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import assert_resumes_bitwise, saved_base
from safetensors.torch import load_file
from structured_runs import write_answers
from test_expert_ranks import mixture
from test_optimizers import PLAN
from torch.testing import assert_close

from bloomery.export.layouts import export_merged, merged_state
from bloomery.infer.load import Use
from bloomery.infer.model_folder import find_model
from bloomery.model import experts as experts_module
from bloomery.model.adapters.lora import ExpertLora, adapt, init_adapters
from bloomery.model.decoder import Decoder
from bloomery.model.experts import sorted_by_expert
from bloomery.model.io.weights import fresh_decoder, load_decoder, quantize_model
from bloomery.parallel.apply import checkpoint_block
from bloomery.plan.estimate.mode import mode_of
from bloomery.plan.estimate.states import TrainedModel
from bloomery.recipe.objectives import Preference
from bloomery.recipe.schema import Lora, Quantize
from bloomery.train.optim.build import build_optimizer
from ranks import fields, losses, on_ranks, ranks, train, train_here

MIXTURE = mixture(vocab_size=512)
ALL = Lora(kind="lora", rank=4, target_modules=["all-linear"])
TOKENS = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def base(prepared, tmp_path_factory) -> Path:
    return saved_base(MIXTURE, prepared, tmp_path_factory.mktemp("base"))


def plan_of(data: Path, base: Path, *, steps: int = 4, **fields):
    train = {"steps": steps, "tokens_per_step": 128, "micro_batch_size": 1, "accumulation": 4}
    return tiny_plan(
        data,
        config=MIXTURE,
        train=train,
        checkpoint={"every_steps": 2},
        eval={"every_steps": 2},
        model={"source": base},
    ).model_copy(update={"adapter": ALL, "source": base} | fields)


def adapted_decoder(adapter: Lora = ALL) -> Decoder:
    """Whose adapters have moved away from where they begin."""
    decoder = fresh_decoder(MIXTURE, seed=0)
    adapt(decoder, adapter)
    init_adapters(decoder, 0)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter += torch.empty(parameter.shape).normal_(0, 0.05, generator=numbers)
    return decoder


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    decoder(TOKENS).head.square().mean().backward()
    return {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("quantize", "mesh"),
    [
        ("nf4", {"shard": 2}),
        ("nf4", {"replicate": 2, "expert": 2}),
        ("nf4", {"shard": 2, "expert": 2}),
        pytest.param("none", {"shard": 2}, marks=pytest.mark.soak),
        pytest.param("none", {"replicate": 2, "expert": 2}, marks=pytest.mark.soak),
        pytest.param("int8", {"replicate": 2, "expert": 2}, marks=pytest.mark.soak),
    ],
)
def test_ranks_train_as_one_rank(prepared, base, tmp_path, quantize, mesh) -> None:
    plan = plan_of(prepared, base, quantize=Quantize(kind=quantize))
    several = on_ranks(plan, **mesh)
    one = train_here(plan.model_dump_json(), str(tmp_path / "one"), None, None)
    arguments = (several.model_dump_json(), str(tmp_path / "many"), None, None)
    many = ranks(several.train.ranks).call(train_here, *arguments)[0]
    assert losses(many).keys() == {1, 2, 3, 4}
    assert losses(many) == pytest.approx(losses(one), rel=0, abs=1e-5)
    files = [
        load_file(tmp_path / name / "checkpoints/step-00000004/adapter_model.safetensors")
        for name in ("one", "many")
    ]
    assert any(".experts.base_layer.lora_B" in name for name in files[0])
    for name, tensor in files[0].items():
        assert_close(files[1][name], tensor, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("quantize", ["none", pytest.param("int8", marks=pytest.mark.soak)])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(prepared, base, tmp_path, quantize) -> None:
    assert_resumes_bitwise(plan_of(prepared, base, quantize=Quantize(kind=quantize)), tmp_path)


def test_a_run_on_4_bits_is_merged_into_its_base(prepared, base, tmp_path) -> None:
    """The base of files, and not what 4 bits left of it."""
    plan = plan_of(prepared, base, steps=2, quantize=Quantize(kind="nf4"))
    train(plan, tmp_path / "run")
    files = find_model(tmp_path / "run")
    export_merged(files, tmp_path / "merged", use=Use("cpu"))
    merged = load_decoder(tmp_path / "merged")
    for name, parameter in load_decoder(base).named_parameters():
        is_adapted = ".mlp.experts." in name or (".self_attn." in name and "_proj" in name)
        assert torch.equal(merged.get_parameter(name), parameter) != is_adapted, name
    expected = merged_state(load_decoder(files.weights), torch.float32)
    for name, parameter in merged.named_parameters():
        assert_close(parameter.detach(), expected[name], atol=1e-6, rtol=0, msg=name)


def test_a_kind_without_a_gradient_is_named_after_the_first_step(
    prepared, base, tmp_path, monkeypatch
) -> None:
    plan = plan_of(prepared, base, steps=2)
    sound = [event["reason"] for event in fields(train(plan, tmp_path / "sound"), "Warned")]
    assert not any("no gradient" in reason for reason in sound)
    forward = ExpertLora.forward

    def detached(self, y_SO, x, pairs, *, is_sorted):
        updated = forward(self, y_SO, x, pairs, is_sorted=is_sorted)
        return updated if not is_sorted else y_SO + (updated - y_SO).detach()

    monkeypatch.setattr(ExpertLora, "forward", detached)
    run = train(plan, tmp_path / "run")
    (warning,) = (e for e in fields(run, "Warned") if "no gradient" in e["reason"])
    assert warning["step"] == 1
    assert "adapter of experts.down_proj (2 tensors):" in warning["reason"]


def test_preferences_are_learned_against_the_base(prepared, base, tmp_path) -> None:
    """The reference is the model without its adapters, so that the first loss is that of equal models."""
    answers = write_answers(tmp_path / "prepared", prepared, "pairs")
    dpo = {"objective": Preference(kind="dpo", beta=0.5)}
    run = train(plan_of(answers, base, steps=8, **dpo), tmp_path / "run")
    assert losses(run)[1] == pytest.approx(0.6931, abs=1e-3)
    assert losses(run)[8] < losses(run)[1]
    assert fields(run, "StepDone")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_have_the_same_gradients(mode) -> None:
    expected = gradients(adapted_decoder())
    assert sum(".experts.lora." in name for name in expected) == 8
    decoder = adapted_decoder()
    for index, block in enumerate(decoder.model.layers):
        checkpoint_block(block, mode, index=index)
    recomputed = gradients(decoder)
    assert recomputed.keys() == expected.keys()
    for name, gradient in recomputed.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_products_compile_without_a_graph_break(kind) -> None:
    torch.compiler.reset()
    decoder = adapted_decoder()
    if kind != "none":
        quantize_model(decoder, Quantize(kind=kind))
    mlp = decoder.model.layers[0].mlp
    x_ND = torch.randn(50, MIXTURE.hidden_size, generator=torch.Generator().manual_seed(2))
    pairs = sorted_by_expert(mlp.gate(x_ND).experts_NK, 4)

    def product(x_ND: torch.Tensor) -> torch.Tensor:
        return mlp.experts.product(x_ND, "gate_up_proj", pairs, is_sorted=False)

    results = []
    for function in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        mlp.zero_grad()
        inputs = x_ND.clone().requires_grad_()
        function(inputs).square().sum().backward()
        lora = mlp.experts.lora["gate_up_proj"]
        results.append((inputs.grad, lora.lora_A.grad, lora.lora_B.grad))
    for compiled, eager in zip(results[1], results[0], strict=True):
        assert_close(compiled, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision_stays_near_float32(dtype, bound) -> None:
    """With the same experts chosen: rounding would choose others of nearly equal scores."""
    mlp = adapted_decoder().model.layers[0].mlp
    x_ND = torch.randn(50, MIXTURE.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        choice = mlp.gate(x_ND)
    results = []
    for precision in (torch.float32, dtype):
        mlp.zero_grad()
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            y_ND = mlp.experts(x_ND, choice)
        y_ND.float().square().sum().backward()
        grads = {name: p.grad for name, p in mlp.experts.lora.named_parameters()}
        assert len(grads) == 4 and all(grad.dtype == torch.float32 for grad in grads.values())
        results.append({"y": y_ND.detach().float()} | grads)
    for name, value in results[0].items():
        assert (results[1][name] - value).norm() / value.norm() < bound, name


@pytest.mark.parametrize("rank", [4, 8])
def test_one_kernel_for_all_experts_computes_the_same(rank, monkeypatch) -> None:
    """Matrices in float32 over rows in bfloat16: the kernel takes copies of LoRA's; of rank 4 rows are no 16 bytes."""
    mlp = (
        adapted_decoder(Lora(kind="lora", rank=rank, target_modules=["experts"]))
        .model.layers[0]
        .mlp
    )
    mlp.experts.requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        setattr(mlp.experts, name, torch.nn.Parameter(getattr(mlp.experts, name).bfloat16(), False))
    mlp.experts.lora.requires_grad_()
    x_ND = torch.randn(50, MIXTURE.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        choice = mlp.gate(x_ND)
    calls = []
    results = []
    product = experts_module.group_product
    monkeypatch.setattr(
        experts_module, "group_product", lambda *given: calls.append(1) or product(*given)
    )
    for one_kernel in (False, True):
        monkeypatch.setattr(experts_module, "multiplies_groups", lambda _, it=one_kernel: it)
        mlp.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y_ND = mlp.experts(x_ND, choice)
        y_ND.float().square().sum().backward()
        grads = {name: p.grad for name, p in mlp.experts.lora.named_parameters()}
        assert len(grads) == 4 and all(grad.dtype == torch.float32 for grad in grads.values())
        results.append({"y": y_ND.detach().float()} | grads)
    # Forward and the gradient of rows of two stacks; with rank 8 those of their LoRA, too.
    assert len(calls) >= (8 if rank == 8 else 3)
    for name, value in results[0].items():
        assert (results[1][name] - value).norm() / value.norm() < 2e-2, name


def test_a_plan_counts_the_parameters_that_train() -> None:
    decoder = adapted_decoder()
    trained = {name: p.shape for name, p in decoder.named_parameters() if p.requires_grad}
    recipe = tiny_plan(Path("none"), config=MIXTURE).model_copy(update={"adapter": ALL})
    planned = TrainedModel(MIXTURE, mode_of(recipe, MIXTURE)).trainable
    assert {name: tuple(shape) for name, shape in trained.items()} == planned


def test_muon_updates_each_matrix_of_each_expert() -> None:
    """As torch's on each by itself."""
    decoder = adapted_decoder(Lora(kind="lora", rank=4, target_modules=["experts"]))
    trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
    matrices = {
        (name, expert): torch.nn.Parameter(matrix.detach().clone())
        for name, parameter in trained.items()
        for expert, matrix in enumerate(parameter)
    }
    assert len(matrices) == 2 * 2 * 2 * 4  # A and B of two stacks of four experts in two layers
    reference = torch.optim.Muon(
        list(matrices.values()),
        lr=0.02,
        momentum=0.95,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    optimizer = build_optimizer(decoder, PLAN.model_copy(update={"kind": "muon"}))
    for step in range(2):
        numbers = torch.Generator().manual_seed(step)
        for name, parameter in trained.items():
            parameter.grad = torch.empty(parameter.shape).normal_(generator=numbers)
            for expert, gradient in enumerate(parameter.grad):
                matrices[name, expert].grad = gradient.clone()
        optimizer.step(1.0)
        reference.step()
    for (name, expert), matrix in matrices.items():
        assert_close(trained[name][expert], matrix, atol=2e-3, rtol=0, msg=name)


@pytest.mark.parametrize(
    "changes", [{"kind": "adafactor"}, {"fused": True}, {"state_dtype": "int8"}]
)
def test_other_optimizers_move_every_expert_with_a_gradient_alone(changes) -> None:
    decoder = adapted_decoder()
    before = {n: p.detach().clone() for n, p in decoder.named_parameters() if ".lora." in n}
    optimizer = build_optimizer(decoder, PLAN.model_copy(update=changes | {"weight_decay": 0.0}))
    grads = gradients(decoder)
    optimizer.step(1.0)
    for name, old in before.items():
        moved = (decoder.get_parameter(name) != old).flatten(1).any(1)
        assert torch.equal(moved, grads[name].flatten(1).any(1)), name
