"""Adapters of PEFT on our decoder, and ours on transformers' models."""

import json
import math
from collections import Counter
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import saved_reference, tiny_reference, tokens
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from bloomery.core.errors import UserError
from bloomery.facts.hf_config import config_from_hf
from bloomery.model.adapters.lora import adapt, adapted, init_adapters, trained_state
from bloomery.model.adapters.peft_files import write_adapter
from bloomery.model.adapters.settings import adaptation, counted_by_kind, target_modules
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Values
from bloomery.model.io.weights import load_decoder, read_model
from bloomery.recipe.schema import Lora

LLAMA = ["q_proj", "v_proj", "down_proj"]
THEIRS = {
    "gpt2": ["c_attn", "mlp.c_proj"],
    "phi3": ["qkv_proj", "down_proj"],
    "lfm2": ["q_proj", "in_proj", "out_proj", "w2"],
    "lfm3": ["v_proj", "g_proj", "in_proj"],
    "granite4": ["q_proj", "input_linear", "output_linear"],
}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "^model.layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {"v_proj": 3, r"layers\.[01]\.mlp.down_proj": 5},
    },
    "all-linear": {"target_modules": "all-linear"},
    "whole": {"modules_to_save": ["lm_head", "model.norm"]},
}


def trained_by_peft(case, folder, **settings):
    """Random numbers in an adapter that PEFT has saved, and the base beside it."""
    model = saved_reference(case, folder / "base")
    model.name_or_path = str(folder / "base")
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": LLAMA} | settings))
    config.base_model_name_or_path = str(folder / "base")
    wrapped = peft.get_peft_model(model, config)
    numbers = torch.Generator().manual_seed(0)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter += torch.empty_like(parameter).normal_(0, 0.1, generator=numbers)
    wrapped.save_pretrained(folder / "adapter")
    return wrapped.eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *(("llama2", kind) for kind in KINDS if kind != "all-linear"),
        ("llama3-gqa-tied", "dora"),
        ("gpt2", "lora"),
        ("gpt2", "dora"),
        ("phi3", "rslora"),
        ("qwen2", "dora"),
        ("gemma2", "lora"),
        ("lfm2", "dora"),
        ("lfm3", "lora"),
        ("granite4", "lora"),
    ],
)
def test_an_adapter_of_peft_computes_the_same_here(case, kind, tmp_path):
    targets = {"target_modules": THEIRS[case]} if case in THEIRS else {}
    their_model = trained_by_peft(case, tmp_path, **KINDS[kind] | targets)
    # float32 rounds the logits by more than 1e-5
    our_model = load_decoder(tmp_path / "adapter", dtype=torch.float64)
    with torch.no_grad():
        assert_close(
            our_model(tokens()).head, their_model.double()(tokens()).logits, atol=1e-5, rtol=0
        )
        assert (our_model(tokens()).head - tiny_reference(case)(tokens()).logits).abs().max() > 0.1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("llama2", {}),
        ("llama2", {"kind": "dora", "use_rslora": True, "alpha": 5.0}),
        ("llama2", {"init": "pissa"}),
        ("llama2", {"init": "pissa", "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"*": 5.0}}),
        (
            "llama2",
            {
                "modules_to_save": ["embed_tokens", "lm_head", "norms", "k_proj"],
                "target_modules": ["q_proj"],
            },
        ),
        ("llama3-gqa-tied", {"modules_to_save": ["lm_head"]}),
        ("llama2", {"dtype": "bfloat16", "target_modules": ["all-linear"]}),
        ("gpt2", {"target_modules": ["q_proj", "v_proj", "c_proj"], "modules_to_save": ["norms"]}),
        ("gpt2", {"kind": "dora", "target_modules": ["c_attn", "mlp.up_proj"]}),
        ("phi3", {"target_modules": ["v_proj", "up_proj", "down_proj"], "init": "pissa"}),
        (
            "phi3",
            {
                "target_modules": ["q_proj", "v_proj"],
                "rank_pattern": {"v_proj": 2},
                "alpha_pattern": {"v_proj": 4.0},
            },
        ),
        ("lfm2", {"target_modules": ["all-linear"]}),
        ("lfm3", {"target_modules": ["all-linear"]}),
        ("lfm2", {"kind": "dora", "target_modules": ["out_proj", "w1"]}),
        ("granite4", {"target_modules": ["all-linear"]}),
        ("starcoder2", {"target_modules": ["all-linear"]}),
        ("cohere2", {"kind": "dora", "target_modules": ["all-linear"]}),
        ("glm4", {"target_modules": ["q_proj", "gate_proj", "up_proj"]}),
    ],
)
def test_an_adapter_of_ours_computes_the_same_in_peft(case, settings, tmp_path):
    saved_reference(case, tmp_path / "base")
    our_model = load_decoder(tmp_path / "base")
    lora = Lora(**({"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": LLAMA} | settings))
    adapt(our_model, lora)
    init_adapters(our_model, 0)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in our_model.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 0.1, generator=numbers)
    (tmp_path / "adapter").mkdir()
    write_adapter(
        trained_state(our_model),
        adaptation(our_model.config, lora),
        our_model.config,
        tmp_path / "adapter",
        base=str(tmp_path / "base"),
    )
    their_model = peft.PeftModel.from_pretrained(tiny_reference(case), tmp_path / "adapter").eval()
    loaded_model = load_decoder(tmp_path / "adapter", dtype=torch.float64)
    with torch.no_grad():
        logits = our_model.double()(tokens()).head
        assert_close(logits, their_model.double()(tokens()).logits, atol=1e-5, rtol=0)
        assert_close(logits, loaded_model(tokens()).head, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["gemma4-e2b", "gemma4-12b"])
def test_all_linear_means_what_it_means_to_peft(case):
    """Also the projection outside the layers that makes their inputs."""
    model = tiny_reference(case)
    config = config_from_hf(model.config.to_dict())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    theirs = {
        name.removeprefix("base_model.model.")
        for name, module in wrapped.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }
    targets = target_modules(config, ["all-linear"])
    assert set(targets) == theirs
    counts = Counter(name.rpartition(".")[2] for name in theirs)
    named = {
        name: int(group.partition(": ")[2].split()[0])
        for group in counted_by_kind(targets).split("; ")
        for name in group.partition(":")[0].split(", ")
    }
    assert named == counts


def test_modules_of_one_name_and_different_kinds_are_counted_apart():
    layers = [f"model.layers.{layer}.mlp" for layer in range(3)]
    experts = [f"{mlp}.experts.{expert}.up_proj" for mlp in layers for expert in range(4)]
    shared = [f"{mlp}.shared_expert.up_proj" for mlp in layers]
    queries = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(3)]
    assert counted_by_kind([*queries, *experts, *shared]) == (
        "experts.up_proj: 12; q_proj, shared_expert.up_proj: 3 each"
    )


@pytest.mark.parametrize("case", ["llama2", "llama3-gqa-tied"])
def test_an_adapter_of_a_reward_model_brings_its_values(case, tmp_path):
    saved_reference(case, tmp_path / "base")
    config = replace(read_config(tmp_path / "base"), head="values")
    our_model = Decoder(config)
    read_model(our_model, tmp_path / "base", seed=0)
    lora = Lora(kind="lora", rank=4, target_modules=LLAMA, modules_to_save=["embed_tokens"])
    adapt(our_model, lora)
    init_adapters(our_model, 0)
    with torch.no_grad():
        for parameter in our_model.parameters():
            if parameter.requires_grad:
                parameter += 0.05
    (tmp_path / "adapter").mkdir()
    settings = adaptation(config, lora)
    write_adapter(
        trained_state(our_model),
        settings,
        config,
        tmp_path / "adapter",
        base=str(tmp_path / "base"),
    )
    loaded_model = load_decoder(tmp_path / "adapter")
    assert loaded_model.config.head == "values"
    base = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=1, pad_token_id=0
    )
    their_model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        values = our_model.double()(tokens(), head=Values()).head
        assert_close(loaded_model.double()(tokens(), head=Values()).head, values, atol=1e-5, rtol=0)
        assert_close(values[:, -1:], their_model.double()(tokens()).logits, atol=1e-5, rtol=0)


def damage(folder, kind):
    """Puts one error of this kind into a good adapter."""
    config_file = folder / "adapter_config.json"
    tensor_file = folder / "adapter_model.safetensors"
    raw_config = json.loads(config_file.read_text())
    tensors = load_file(tensor_file)
    first_name = next(iter(tensors))
    if kind == "missing":
        tensors.pop(first_name)
    elif kind == "shape":
        tensors[first_name] = torch.zeros(4, 7)
    elif kind == "layers":
        tensors = {
            name.replace("layers.1.", "layers.31."): tensor for name, tensor in tensors.items()
        }
    elif kind == "name":
        tensors["../../etc/passwd"] = torch.zeros(1)
    elif kind == "rank":
        raw_config["r"] = 5
    elif kind == "residual":
        raw_config["init_lora_weights"] = "pissa_niter_4"
    elif kind == "unknown":
        raw_config["use_qalora"] = True
    elif kind == "pattern":
        raw_config["alpha_pattern"] = {"a" * 2000: 2}
    elif kind == "alpha":
        raw_config["lora_alpha"] = "much"
    elif kind == "base":
        raw_config["base_model_name_or_path"] = "/nowhere/at/all"
    elif kind == "empty":
        tensors = {}
    save_file(tensors, tensor_file)
    config_file.write_text("{" if kind == "json" else json.dumps(raw_config))
    if kind == "pickle":
        tensor_file.rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("missing", "lacks"),
        ("shape", r"\[4, 7\]"),
        ("layers", "does not have"),
        ("name", "no name that PEFT"),
        ("rank", r"make it \[5"),
        ("residual", "pissa_niter_4"),
        ("unknown", "use_qalora"),
        ("pattern", "is longer than"),
        ("alpha", "lora_alpha"),
        ("base", "not here"),
        ("json", "not JSON"),
        ("pickle", "pickle"),
        ("empty", "changes nothing"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_its_problem_and_a_fix(
    kind, problem, tmp_path
):
    trained_by_peft("llama2", tmp_path)
    damage(tmp_path / "adapter", kind)
    with pytest.raises(UserError, match=problem) as refused:
        load_decoder(tmp_path / "adapter")
    assert refused.value.fix
    assert len(refused.value.problem) < 250


def test_an_adapter_of_another_base_is_refused(tmp_path):
    trained_by_peft("llama2", tmp_path)
    saved_reference("llama3-gqa-tied", tmp_path / "other")
    with pytest.raises(UserError, match="this base"):
        load_decoder(tmp_path / "adapter", base=tmp_path / "other")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_and_a_step_of_adamw_are_those_of_peft(kind, tmp_path):
    their_model = trained_by_peft("llama2", tmp_path, use_dora=kind == "dora")
    our_model = load_decoder(tmp_path / "adapter")
    batch = tokens()
    for model, logits in (
        (their_model, their_model(batch).logits),
        (our_model, our_model(batch).head),
    ):
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        ).backward()
        trained_parameters = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained_parameters)
        torch.optim.AdamW(trained_parameters, lr=0.01).step()
    state = peft.get_peft_model_state_dict(their_model)
    for name, module in adapted(our_model):
        stored_name = f"base_model.model.{name}"
        assert_close(module.lora_A, state[f"{stored_name}.lora_A.weight"], atol=1e-5, rtol=1e-5)
        assert_close(module.lora_B, state[f"{stored_name}.lora_B.weight"], atol=1e-5, rtol=1e-5)
        their_module = their_model.base_model.model.get_submodule(name)
        assert_close(
            module.lora_A.grad, their_module.lora_A["default"].weight.grad, atol=1e-6, rtol=1e-4
        )
        assert_close(
            module.lora_B.grad, their_module.lora_B["default"].weight.grad, atol=1e-6, rtol=1e-4
        )
        if kind == "dora":
            gradient = their_module.lora_magnitude_vector["default"].weight.grad
            assert_close(module.lora_magnitude.grad, gradient, atol=1e-6, rtol=1e-4)


def test_pissa_begins_where_peft_begins(tmp_path):
    reference = saved_reference("llama2", tmp_path)
    our_model = load_decoder(tmp_path)
    logits_before = our_model(tokens()).head
    adapt(our_model, Lora(kind="lora", init="pissa", rank=4, alpha=8.0, target_modules=["q_proj"]))
    init_adapters(our_model, 0)
    assert_close(our_model(tokens()).head, logits_before, atol=1e-5, rtol=1e-5)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights="pissa"
    )
    their_model = peft.get_peft_model(reference, config)
    for name, module in adapted(our_model):
        their_module = their_model.base_model.model.get_submodule(name)
        product = their_module.lora_B["default"].weight @ their_module.lora_A["default"].weight
        assert_close(module.lora_B @ module.lora_A, product, atol=1e-5, rtol=1e-5)
        residual = module.weight - module.scale * module.first_B @ module.first_A
        assert_close(residual, their_module.base_layer.weight, atol=1e-5, rtol=1e-5)


def test_the_randomised_decomposition_finds_the_largest_singular_values():
    from bloomery.model.adapters import lora as adapters

    numbers = torch.Generator().manual_seed(0)
    W = torch.linalg.qr(torch.randn(600, 600, generator=numbers))[0] * torch.logspace(1, -1, 600)
    W = W @ torch.linalg.qr(torch.randn(600, 600, generator=numbers))[0]
    U, S, V = adapters._largest(W, 8, numbers)
    exact_svd = torch.linalg.svd(W)
    assert_close(S, exact_svd.S[:8], atol=1e-3, rtol=1e-3)
    assert_close(
        U * S @ V.T, exact_svd.U[:, :8] * exact_svd.S[:8] @ exact_svd.Vh[:8], atol=0.02, rtol=0
    )


@pytest.mark.parametrize("case", ["llama2", "gpt2"])
def test_names_and_patterns_choose_modules(case, tmp_path):
    saved_reference(case, tmp_path)
    config = load_decoder(tmp_path).config
    num_layers = config.num_layers

    def chosen_pairs(*targets):
        return adaptation(config, Lora(kind="lora", target_modules=list(targets))).pairs

    assert len(chosen_pairs("q_proj")) == num_layers
    assert len(chosen_pairs("all-linear")) == num_layers * (7 if case == "llama2" else 6)
    assert list(chosen_pairs("model.layers.[01].*.q_proj")) == [
        f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)
    ]
    assert len(chosen_pairs("mlp.*")) == num_layers * (3 if case == "llama2" else 2)
    if case == "gpt2":
        assert len(chosen_pairs("c_attn")) == 3 * num_layers
    assert math.isclose(chosen_pairs("q_proj")["model.layers.0.self_attn.q_proj"].scale, 2.0)


@pytest.mark.parametrize(
    ("settings", "suggestion"),
    [
        ({"target_modules": ["q_porj"]}, "q_proj"),
        ({"target_modules": ["model.layers.9.mlp.up_proj"]}, "layers 0 to"),
        ({"target_modules": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": []}, "q_proj"),
        ({"modules_to_save": ["lm_haed"]}, "lm_head"),
        ({"modules_to_save": ["q_proj"]}, "one of the two"),
        ({"init": "pissa", "rank": 64}, "adapter.rank=48"),
    ],
)
def test_impossible_settings_are_refused_with_a_suggestion(settings, suggestion, tmp_path):
    saved_reference("llama2", tmp_path)
    config = load_decoder(tmp_path).config
    with pytest.raises(UserError) as refused:
        adaptation(config, Lora(**({"kind": "lora"} | settings)))
    assert suggestion in f"{refused.value.problem} {refused.value.fix}"


def test_parts_of_fused_modules_are_refused_where_files_cannot_hold_them(tmp_path):
    saved_reference("phi3", tmp_path)
    config = load_decoder(tmp_path).config
    for settings in (
        {"kind": "dora", "target_modules": ["q_proj"]},
        {"kind": "lora", "target_modules": ["q_proj"], "modules_to_save": ["gate_proj"]},
        {"kind": "lora", "rank_pattern": {"k_proj": 4}},
    ):
        with pytest.raises(UserError, match="fused"):
            adaptation(config, Lora(**settings))
