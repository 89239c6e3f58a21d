"""PEFT's other methods inside our decoder: they learn, resume bitwise, and their files open in PEFT."""

import warnings
from dataclasses import fields, replace

import pytest
import torch
from opened_in_peft import assert_opens_in_peft
from peft import AdaLoraConfig, get_peft_model
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import CONFIG, Run, crossed, resumed_bitwise
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from autograd_for_tests import kept_bytes
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.launch import worker
from bloomery.model.adapters import settings as peft_names
from bloomery.model.adapters.lora import adapt
from bloomery.model.adapters.peft_methods import PeftAdapter, method_config
from bloomery.model.adapters.settings import (
    NATIVE,
    NATIVE_ONLY,
    PROMPTS,
    linear_modules,
)
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.io.weights import fresh_decoder, load_decoder, model_state, write_model
from bloomery.plan.estimate.activations import activation_bytes
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.recipe.schema import Lora, Peft
from bloomery.train.objectives.build import build_objective
from bloomery.train.state import build_state
from bloomery.train.step import train_step

ADALORA = {
    "method": "adalora",
    "init_r": 6,
    "target_r": 2,
    "tinit": 1,
    "tfinal": 1,
    "deltaT": 1,
    "total_step": 5,
}
METHODS = {
    "adalora": ADALORA,
    "oft": {"method": "oft", "oft_block_size": 8},
    "vera": {"method": "vera", "r": 4},
    "ia3": {
        "method": "ia3",
        "target_modules": ["k_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "loha": {"method": "loha", "r": 2, "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, folder)
    return folder


def method_plan(prepared, base, said, **sections):
    if CONFIG.tie_embeddings:
        said = {key: value for key, value in said.items() if key != "modules_to_save"}
    plan = tiny_plan(prepared, config=CONFIG, model={"source": base}, **sections)
    return plan.model_copy(update={"adapter": Peft(kind="peft", **said)})


@pytest.mark.parametrize(("name",), crossed({name: name for name in METHODS}, quick="adalora ia3"))
def test_a_resumed_method_equals_the_undisturbed_one_bitwise(prepared, base, tmp_path, name):
    plan = method_plan(prepared, base, METHODS[name], train={"steps": 5})
    resumed_bitwise(plan, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", METHODS)
def test_peft_opens_what_a_method_saved_and_merged_is_the_same(prepared, base, tmp_path, name):
    # so that AdaLoRA, which prunes four of six ranks meanwhile, moves the logits
    faster = {"learning_rate": 0.02}
    run = Run(
        method_plan(prepared, base, METHODS[name], train={"steps": 5}, optimizer=faster), tmp_path
    )
    # PEFT's own of AdaLoRA's own ranks
    with warnings.catch_warnings(action="error", category=RuntimeWarning):
        load_decoder(run.checkpoint(5))
    assert_opens_in_peft(base, run.checkpoint(5), torch.arange(60).view(2, 30), merged_within=1e-5)


def test_adalora_takes_the_steps_that_peft_takes(prepared, tmp_path):
    """The same batches through transformers, PEFT and torch's AdamW, orthogonality and rank schedule included."""
    dry = replace(CONFIG, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)
    write_model(model_state(fresh_decoder(dry, seed=3)), dry, base := tmp_path)
    plan = method_plan(
        prepared,
        base,
        ADALORA,
        train={"steps": 5, "max_grad_norm": None, "accumulation": 1},
        optimizer={"weight_decay": 0.0, "warmup_steps": 0, "schedule": "constant", "eps": 0.01},
    )
    state = build_state(
        plan.model_copy(update={"model": plan.model.model_copy(update={"config": dry})})
    )
    config = AdaLoraConfig(
        **{k: v for k, v in ADALORA.items() if k != "method"}, target_modules=["q_proj", "v_proj"]
    )
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"), config
    )
    mine = {
        name: p for name, p in state.model_and_optimizer.model.named_parameters() if p.requires_grad
    }
    named = {
        name.removeprefix("base_model.model."): p
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    assert mine.keys() == named.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(mine[name])
    optimizer = torch.optim.AdamW(
        named.values(),
        lr=plan.optimizer.learning_rate,
        betas=plan.optimizer.betas,
        eps=plan.optimizer.eps,
        weight_decay=0.0,
    )
    loader = Loader(prepared, sequence_length=32, layout="padded", seed=0)
    for step in range(1, 5):
        batch = loader.batch(Cursor(0, 2 * step), 2)
        objective = build_objective(plan)
        train_step(state.model_and_optimizer, [batch], objective, plan=plan.train, lr_scale=1.0)
        labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
        logits = theirs(batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for matrix in (p for name, p in named.items() if "lora_A" in name or "lora_B" in name):
            gram = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
            count = sum("lora_A" in name or "lora_B" in name for name in named)
            loss = loss + 0.5 / count * (gram - torch.eye(len(gram))).norm()
        loss.backward()
        optimizer.step()
        theirs.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        for name in named:
            assert_close(
                mine[name],
                named[name],
                atol=2e-5,
                rtol=1e-3,
                msg=lambda m, name=name: f"{name}: {m}",
            )
    left = [float((p != 0).sum()) for name, p in mine.items() if "lora_E" in name]
    assert sum(left) == 2 * len(left), "the ranks are those of the target"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"method": "adalora", "traget_r": 4}, "did you mean target_r"),
        ({"method": "adalorra"}, "did you mean adapter.method=adalora?"),
        ({"method": "vera", "target_modules": ["q_prj"]}, "did you mean q_proj? known: "),
        ({"method": "prefix_tuning"}, "adapter.kind=lora"),
        ({"method": "lora"}, "adapter.kind=lora"),
        ({"method": "trainable_tokens"}, "adapter.modules_to_save"),
        ({"method": "adalora", "total_step": 3, "tinit": 5}, "AdaLoraConfig"),
    ],
)
def test_what_peft_does_not_know_is_refused_with_a_remedy(said, words):
    with pytest.raises(UserError) as caught:
        method_config(Peft(kind="peft", **said), CONFIG, steps=10)
    assert words in caught.value.fix


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("{kind: peft, method: adalora, traget_r: 4}", "adalora has no key traget_r"),
        ("{kind: peft, method: adalora, init_r: 2, total_step: 3, tinit: 5}", "PEFT refuses"),
    ],
)
def test_peft_is_asked_before_the_dataset_is_prepared(
    base, tmp_path, monkeypatch, settings, problem
):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 50)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{from: {base}}}\ndata: {{path: {tmp_path}/text.txt}}\nadapter: {settings}\n"
        "tokenizer: {train: {vocab_size: 270}}\ntrain: {epochs: 1}\n"
    )
    monkeypatch.setattr("bloomery.data.prepare.prepare.prepare", lambda *_, **__: pytest.fail())
    with pytest.raises(UserError, match=problem):
        worker._prepare(RunFolder(tmp_path), tmp_path / "prepared", lambda _: None)


def test_the_methods_that_are_known_without_peft_are_those_that_it_has():
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    assert {
        kind.value for kind in PEFT_TYPE_TO_TUNER_MAPPING
    } - PROMPTS - NATIVE.keys() == peft_names.METHODS
    for kind, theirs in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if kind.value not in peft_names.METHODS:
            continue
        names = {field.name for field in fields(theirs)}
        assert names > {"target_modules", *NATIVE_ONLY}, kind
        assert ("feedforward_modules" in names) == (kind.value == "IA3")
        assert ("total_step" in names) == (kind.value == "ADALORA")


def test_all_linear_maps_are_found_where_peft_would_look_for_them_in_its_own_models_alone(
    prepared, base
):
    model = build_state(
        method_plan(prepared, base, {"method": "vera", "target_modules": "all-linear"})
    ).model_and_optimizer.model
    changed = {
        name.rpartition(".vera_lambda")[0]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert changed == set(linear_modules(CONFIG))


def test_a_wall_time_length_has_no_steps_for_a_schedule_of_ranks():
    with pytest.raises(UserError, match=r"PEFT refuses these settings of adalora: .*total_step"):
        method_config(Peft(kind="peft", method="adalora"), CONFIG, steps=None)


@pytest.mark.parametrize(
    ("name", "leaves"),
    [("ia3", {"k_proj", "v_proj", "down_proj"}), ("ln_tuning", {"norm", "layernorm"})],
)
def test_a_method_that_is_not_about_queries_and_values_finds_its_own_modules(
    prepared, base, name, leaves
):
    model = build_state(method_plan(prepared, base, {"method": name})).model_and_optimizer.model
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(any(leaf in key for leaf in leaves) for key in trained)
    assert all(any(leaf in key for key in trained) for leaf in leaves)
    if name == "ia3":  # what the down projection reads is scaled, not what it gives
        scaled = next(
            p for key, p in model.named_parameters() if "down_proj" in key and p.requires_grad
        )
        assert scaled.numel() == CONFIG.intermediate_size


def test_a_method_whose_library_is_missing_is_a_sentence(prepared, base, monkeypatch):
    def missing(*_args, **_more):
        raise ImportError(
            "scikit-learn is required. Please install it with: pip install scikit-learn"
        )

    monkeypatch.setattr("peft.PeftModel.__init__", missing)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        build_state(method_plan(prepared, base, {"method": "vera"}))


@pytest.mark.parametrize(
    "targets", [["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["o_proj", "down_proj"]]
)
def test_the_plan_counts_the_inputs_that_peft_casts_for_each_layer(targets):
    """What autograd keeps beyond a LoRA of ours of that rank, in bfloat16: nothing where no layers share an input."""
    config = tiny_config(hidden_size=64)
    lora = Lora(kind="lora", rank=8, alpha=8, target_modules=targets)
    theirs = Peft(kind="peft", method="adalora", init_r=8, target_modules=targets)

    def counted(adapter):
        load = StepShape(
            model=TrainedModel.of(
                tiny_plan(config=config).model_copy(update={"adapter": adapter}), config
            ),
            sequence_length=128,
            micro_batch_size=4,
            precision="bfloat16",
            optimizer="adamw",
            attention="sdpa",
            checkpointing="none",
            compiled=False,
            score_chunk=64,
            context_bytes=0.0,
            on_gpu=False,
        )
        return activation_bytes(load)

    def measured(change):
        model = fresh_decoder(config, seed=1).train()
        change(model)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        tokens = torch.randint(0, config.vocab_size, (4, 128))
        with torch.autocast("cpu", torch.bfloat16):
            return kept_bytes(
                model,
                lambda: (
                    model(
                        tokens,
                        head=LabelScores(tokens, torch.ones(4, 128), ScoreSettings(chunk=64)),
                    ).head
                ),
            )

    ours = measured(lambda model: adapt(model, lora))
    beyond = (
        measured(lambda model: PeftAdapter(model, method_config(theirs, config, steps=100), seed=0))
        - ours
    )
    assert counted(theirs) - counted(lora) == pytest.approx(beyond, abs=0.05 * ours)
