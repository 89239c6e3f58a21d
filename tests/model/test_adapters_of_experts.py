"""LoRA of stacks of experts: the numbers and the files are PEFT's, both ways."""

import json

import peft
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tiny_models import saved_reference, tiny_reference, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.export.layouts import merged_state, open_merged
from bloomery.facts.counting import expert_stacks
from bloomery.facts.hf_config import config_from_hf
from bloomery.model.adapters.lora import (
    adapt,
    adapted_stacks,
    adapters_disabled,
    init_adapters,
    trained_state,
)
from bloomery.model.adapters.many import Adapters
from bloomery.model.adapters.peft_files import write_adapter
from bloomery.model.adapters.settings import adaptation, stacks_in_memory, target_modules
from bloomery.model.io.weights import load_decoder, write_model_piecewise
from bloomery.recipe.schema import Lora

CASES = ("qwen3-moe", "mixtral")
MIXTURE = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def changed(model, size=0.1):
    """The model with random numbers in what trains."""
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.empty(parameter.shape).normal_(0, size, generator=numbers)
    return model


def of_peft(case, folder, **settings):
    """An adapter that PEFT has saved, its base beside it, and PEFT's model."""
    saved_reference(case, folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": STACKS}
    torch.manual_seed(0)
    wrapped = changed(peft.get_peft_model(base, peft.LoraConfig(**config | settings)))
    wrapped.save_pretrained(folder / "adapter")
    return wrapped.eval()


def of_ours(case, folder, **settings):
    """An adapter that we have saved, its base beside it, and our model."""
    saved_reference(case, folder / "base")
    model = load_decoder(folder / "base")
    lora = Lora(**{"kind": "lora", "rank": 4, "alpha": 6.0} | settings)
    adapt(model, lora)
    init_adapters(model, 0)
    changed(model)
    (folder / "adapter").mkdir()
    write_adapter(
        trained_state(model),
        adaptation(model.config, lora),
        model.config,
        folder / "adapter",
        base=str(folder / "base"),
    )
    return model


def rewrite(folder, change, **settings):
    """The adapter with other tensors and settings."""
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@torch.no_grad()
def assert_same(ours, theirs):
    """Logits, in float64, which grouped_mm does not take."""
    theirs.get_base_model().set_experts_implementation("eager")
    logits = ours.double()(tokens()).head
    assert_close(logits, theirs.double()(tokens()).logits, atol=1e-5, rtol=0)


def assert_merged_same(folder, theirs):
    """The weights that a merge writes are those of PEFT's, name by name, in files and in memory."""
    merged_folder = folder / "merged"
    merged_folder.mkdir()
    with open_merged(folder / "adapter", folder / "base", torch.float32, "cpu") as opened:
        read_parameter, config = opened
        write_model_piecewise(read_parameter, config, torch.float32, merged_folder)
        whole = merged_state(load_decoder(folder / "adapter"), torch.float32)
        for name, tensor in whole.items():
            assert_close(tensor, read_parameter(name), atol=1e-6, rtol=0)
    merged = AutoModelForCausalLM.from_pretrained(merged_folder).state_dict()
    theirs = theirs.float().merge_and_unload().state_dict()
    for name, tensor in merged.items():
        assert_close(
            tensor, theirs[name], atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


SETTINGS = {
    "both": {},
    "rslora": {"use_rslora": True},
    "gate_up alone": {"target_parameters": STACKS[:1], "target_modules": []},
    "down alone": {"target_parameters": STACKS[1:]},
    "patterns": {
        "rank_pattern": {"mlp.experts.down_proj": 2, r"layers\.0.mlp.experts.gate_up_proj": 3},
        "alpha_pattern": {"experts.gate_up_proj": 9},
    },
    "one layer": {"target_parameters": ["model.layers.2.mlp.experts.gate_up_proj", STACKS[1]]},
    "router": {"modules_to_save": ["gate"]},
    "granite": {
        "target_parameters": [
            "block_sparse_moe.experts.gate_up_proj",
            "block_sparse_moe.experts.down_proj",
        ]
    },
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *(("qwen3-moe", kind) for kind in SETTINGS if kind != "granite"),
        ("mixtral", "both"),
        ("gpt-oss", "both"),
        ("gpt-oss", "down alone"),
        ("granite-moe", "granite"),
    ],
)
def test_an_adapter_of_peft_computes_and_merges_the_same_here(case, kind, tmp_path):
    theirs = of_peft(case, tmp_path, **SETTINGS[kind])
    ours = load_decoder(tmp_path / "adapter", dtype=torch.float64)
    assert_same(ours, theirs)
    assert (ours(tokens()).head - tiny_reference(case)(tokens()).logits).abs().max() > 0.05

    assert_merged_same(tmp_path, theirs)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("qwen3-moe", {}),
        ("qwen3-moe", {"target_modules": ["experts"], "use_rslora": True}),
        ("qwen3-moe", {"target_modules": ["q_proj", "gate_up_proj"], "dtype": "bfloat16"}),
        ("qwen3-moe", {"target_modules": ["model.layers.1.mlp.up_proj", "v_proj"]}),
        ("qwen3-moe", {"target_modules": ["experts"], "modules_to_save": ["mlp.gate", "norms"]}),
        (
            "qwen3-moe",
            {
                "rank_pattern": {"layers.2.mlp.experts": 3, "experts": 2, "q_proj": 8},
                "alpha_pattern": {"down_proj": 9.0},
                "use_rslora": True,
            },
        ),
        ("mixtral", {"modules_to_save": ["mlp.gate"]}),
        ("mixtral", {"target_modules": ["w1", "w3", "layers.2.mlp.experts.down_proj"]}),
        ("gpt-oss", {}),
        ("granite-moe", {}),
        ("granite4-moe", {"modules_to_save": ["mlp.gate"]}),
        ("qwen2-moe", {}),
        ("lfm2-moe", {}),
        ("ernie4.5-moe", {}),
        ("deepseek-v3", {}),
        ("olmoe", {"target_modules": ["gate_proj", "up_proj"]}),
    ],
)
def test_an_adapter_of_ours_computes_the_same_in_peft(case, settings, tmp_path):
    ours = of_ours(case, tmp_path, **settings)
    theirs = peft.PeftModel.from_pretrained(tiny_reference(case), tmp_path / "adapter").eval()
    assert_same(ours, theirs)
    assert_same(load_decoder(tmp_path / "adapter", dtype=torch.float64), theirs)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("qwen3.5-moe", {"target_modules": ["experts", "shared_expert.up_proj", "out_proj"]}),
        ("gemma4-26b-a4b", {}),
        ("qwen3-next", {}),
    ],
)
def test_an_adapter_of_ours_has_the_same_weights_in_peft(case, settings, tmp_path):
    """Of families that compute in float32 in every precision."""
    of_ours(case, tmp_path, **settings)
    theirs = peft.PeftModel.from_pretrained(tiny_reference(case), tmp_path / "adapter").eval()
    assert_merged_same(tmp_path, theirs)


def test_gradients_are_those_of_peft(tmp_path):
    """Of every matrix of every expert, and none of the frozen base."""
    theirs = of_peft("qwen3-moe", tmp_path)
    ours = load_decoder(tmp_path / "adapter")
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_("lora" in name)
    ours(tokens()).head.square().mean().backward()
    theirs(tokens()).logits.square().mean().backward()
    their_grads = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    num_trained = 0
    for name, stack in adapted_stacks(ours):
        wrapped = name.replace(".lora.gate_up_proj", ".base_layer").removesuffix(".lora.down_proj")
        A = their_grads[f"{wrapped}.lora_A.weight"].unflatten(0, (8, 4))
        B = their_grads[f"{wrapped}.lora_B.weight"].unflatten(1, (4, 8)).permute(2, 0, 1)
        assert_close(stack.lora_A.grad, A, atol=1e-6, rtol=1e-3)
        assert_close(stack.lora_B.grad, B, atol=1e-6, rtol=1e-3)
        # Every expert that a token meets moves.
        assert stack.lora_A.grad.flatten(1).any(1).sum() == A.flatten(1).any(1).sum() > 4
        num_trained += 1
    assert num_trained == 6
    assert all("lora" in name for name, p in ours.named_parameters() if p.grad is not None)


def as_by_older_transformers(case, tensors, names):
    """PEFT's names and shapes of the experts of transformers 4: a pair for each module of each expert."""
    prefix, gate, up, down = names
    numbers = torch.Generator().manual_seed(1)
    config = config_from_hf(tiny_reference(case).config.to_dict())
    experts = config.experts
    changed_tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config.num_layers):
        if experts.layers and not experts.layers[layer]:
            continue
        for expert in range(experts.count):
            for module in (gate, up, down):
                shape = (experts.width, config.hidden_size)
                outputs, inputs = shape[::-1] if module == down else shape
                name = f"base_model.model.model.layers.{layer}.{prefix}.{expert}.{module}"
                for part, size in (("lora_A", (4, inputs)), ("lora_B", (outputs, 4))):
                    values = torch.empty(size).normal_(0, 0.1, generator=numbers)
                    changed_tensors[f"{name}.{part}.weight"] = values
    return changed_tensors


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("qwen3-moe", ("mlp.experts", "gate_proj", "up_proj", "down_proj")),
        ("mixtral", ("block_sparse_moe.experts", "w1", "w3", "w2")),
    ],
)
def test_pairs_of_each_expert_compute_the_same_as_in_peft(case, names, tmp_path):
    of_peft(case, tmp_path, target_parameters=None)
    rewrite(
        tmp_path / "adapter",
        lambda tensors: as_by_older_transformers(case, tensors, names),
        target_modules=["q_proj", *names[1:]],
    )
    theirs = peft.PeftModel.from_pretrained(tiny_reference(case), tmp_path / "adapter").eval()
    assert_same(load_decoder(tmp_path / "adapter", dtype=torch.float64), theirs)

    # An adapter that lacks an expert changes others than it says.
    rewrite(
        tmp_path / "adapter",
        lambda tensors: {
            n: t for n, t in tensors.items() if f".2.{names[0]}.1.{names[2]}." not in n
        },
    )
    with pytest.raises(UserError, match="changes some experts alone"):
        load_decoder(tmp_path / "adapter")


def swap_axes(tensors):
    """As PEFT 0.18 wrote them: A of the outputs, B of the inputs."""
    swapped = {}
    for name, A in tensors.items():
        if ".experts." not in name or "lora_B" in name:
            swapped.setdefault(name, A)
            continue
        B_name = name.replace("lora_A", "lora_B")
        A_ERI = A.unflatten(0, (-1, 4))
        B_EOR = tensors[B_name].unflatten(1, (4, -1)).permute(2, 0, 1)
        swapped[name] = B_EOR.mT.flatten(0, 1).contiguous()
        swapped[B_name] = A_ERI.mT.permute(1, 2, 0).flatten(1).contiguous()
    return swapped


def test_axes_that_an_older_peft_swapped_are_found_by_their_shapes(tmp_path):
    theirs = of_peft("qwen3-moe", tmp_path)
    rewrite(tmp_path / "adapter", swap_axes, peft_version="0.18.0")
    assert_same(load_decoder(tmp_path / "adapter", dtype=torch.float64), theirs)


def test_axes_of_equal_sizes_follow_the_version_or_are_refused(tmp_path):
    """Mixtral's gate and up are 48 by 48 here."""
    theirs = of_peft("mixtral", tmp_path)
    rewrite(tmp_path / "adapter", swap_axes, peft_version="0.18.1.dev0@main")
    assert_same(load_decoder(tmp_path / "adapter", dtype=torch.float64), theirs)
    rewrite(tmp_path / "adapter", dict, peft_version=None)
    with pytest.raises(UserError, match="both ways round") as refused:
        load_decoder(tmp_path / "adapter")
    assert "peft_version" in refused.value.fix


def test_with_adapters_disabled_the_logits_are_those_of_the_base(tmp_path):
    ours = of_ours("qwen3-moe", tmp_path)
    with torch.no_grad(), adapters_disabled(ours):
        expected = tiny_reference("qwen3-moe")(tokens()).logits
        assert_close(ours(tokens()).head, expected, atol=1e-5, rtol=0)
    assert (ours(tokens()).head - expected).abs().max() > 0.05


WITH_EXPERTS = [case for case, (_, keys) in tiny_models.CASES.items() if MIXTURE & keys.keys()]


@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_stacks_have_the_names_of_transformers_memory(case):
    """PEFT finds nothing under another, and says nothing."""
    model = tiny_reference(case)
    config = config_from_hf(model.config.to_dict())
    names = stacks_in_memory(config)
    assert names or config.experts is None
    for name, in_memory in names.items():
        shape = expert_stacks(config)[name]
        assert sorted(model.get_parameter(in_memory).shape) == sorted(shape), in_memory


@pytest.mark.parametrize("case", CASES)
def test_all_linear_means_attention_and_experts_and_never_the_router(case):
    config = config_from_hf(tiny_reference(case).config.to_dict())
    targets = target_modules(config, ["all-linear"])
    leaves = {name.rpartition(".")[2] for name in targets}
    dense = {"gate_proj", "up_proj", "down_proj"} if case == "qwen3-moe" else {"down_proj"}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj"} | dense
    with_experts = 3 if case == "qwen3-moe" else 4
    assert sum(name.endswith("experts.gate_up_proj") for name in targets) == with_experts
    for names in (
        ["gate_proj", "up_proj", "down_proj"],
        ["experts"],
        ["gate_up_proj", "down_proj"],
    ):
        found = [name for name in target_modules(config, names) if ".experts." in name]
        assert found == [name for name in targets if ".experts." in name]


@pytest.mark.parametrize(
    ("settings", "problem", "fix"),
    [
        ({"target_modules": ["q_proj", "gate"]}, "the router is no target", "modules_to_save"),
        ({"target_modules": ["router"]}, "the router is no target", "take it out"),
        ({"target_modules": ["up_proj"]}, "a part of .*gate_up_proj", "add gate_proj"),
        ({"target_modules": ["experts.3.gate_proj"]}, "matches no module", "gate_up_proj"),
        ({"dropout": 0.1}, "dropout of LoRA does not work", "adapter.dropout=0, or leave it out"),
        ({"rank_pattern": {"w9": 2}}, "matches no module", "known"),
        (
            {"target_modules": ["q_proj"], "rank_pattern": {"experts": 2}},
            "'experts' of rank_pattern means no target",
            "target_modules",
        ),
        ({"kind": "dora"}, "DoRA does not work", "q_proj, k_proj, v_proj, o_proj"),
        ({"init": "pissa"}, "PiSSA does not work", "adapter.init=default"),
    ],
)
def test_what_no_adapter_of_experts_can_be_is_refused_with_a_way_out(settings, problem, fix):
    config = config_from_hf(tiny_reference("qwen3-moe").config.to_dict())
    with pytest.raises(UserError, match=problem) as refused:
        adaptation(config, Lora(**{"kind": "lora"} | settings))
    assert fix in refused.value.fix


def test_several_adapters_at_once_are_refused_with_another_way(tmp_path):
    """An expert's rows are tokens of any texts of a batch."""
    of_ours("mixtral", tmp_path)
    with pytest.raises(UserError, match="LoRA of experts does not share its base") as refused:
        Adapters(load_decoder(tmp_path / "base"), {"one": tmp_path / "adapter"})
    assert "serve it alone" in refused.value.fix


def test_dropout_and_dora_of_attention_alone_remain(tmp_path):
    ours = of_ours("qwen3-moe", tmp_path, kind="dora", dropout=0.1, target_modules=["q_proj"])
    theirs = peft.PeftModel.from_pretrained(
        tiny_reference("qwen3-moe"), tmp_path / "adapter"
    ).eval()
    assert_same(ours.eval(), theirs)
