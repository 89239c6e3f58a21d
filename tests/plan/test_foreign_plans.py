"""What a plan says of architectures that transformers computes: whose layers, how they are loaded, what they lack."""

import pytest
from plan_help import SMALL, gpu_machine, loaded, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.plan.page import page
from foreign_models import saved_model


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi")
    saved_model("phi", folder, max_position_embeddings=128)
    return {**dict.fromkeys(SMALL), "from": str(folder)}


def told(**sections):
    plan = reported(loaded(**sections), machine())
    return " ".join(" ".join(page(plan, machine(), source="r", commands=["train"])).split())


def test_the_page_names_the_architecture_and_a_safe_load(phi):
    said = told(model=phi)
    assert "Phi architecture" in said
    assert "no native implementation of PhiForCausalLM" in said and "safe load" not in said
    assert "safe load transformers loads the weights" in told(
        model={**phi, "load_with": "transformers"}
    )


def test_our_decoder_says_that_every_load_is_safe():
    assert "safe load" in told(model={"load_with": "transformers"})


@pytest.mark.parametrize(
    ("sections", "fix"),
    [
        ({"objective": {"kind": "reward"}}, "docs/reference/models.md"),
        ({"train": {"compile": True}}, "train.compile=auto"),
        (
            {"adapter": {"kind": "peft", "method": "ia3", "modules_to_save": ["lm_head"]}},
            "remove it",
        ),
    ],
)
def test_what_they_lack_is_refused_with_a_remedy(phi, sections, fix):
    with pytest.raises(UserError) as refused:
        planned(loaded(model=phi, **sections), machine())
    assert fix in refused.value.fix


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_several_devices_hold_copies_or_shards_of_layers_of_transformers(phi, where):
    computer = machine() if where == "cpu" else gpu_machine("RX 7900 XTX")
    plan = planned(loaded(model=phi), computer, gpus=2)
    assert plan.parallel is not None
    assert {layout.name for layout in plan.parallel.layouts} == {"replicate", "shard"}
    assert (plan.train.replicate, plan.train.shard) == (2, 1)
    # Whatever `model.load_with` says: it is about reading the weights.
    for load_with in ("native", "transformers"):
        sections = {"model": {**phi, "load_with": load_with}}
        plan = planned(loaded(**sections, parallel={"replicate": 1, "shard": 2}), computer)
        assert (plan.train.replicate, plan.train.shard) == (1, 2)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_stages_of_layers_of_transformers_are_refused_with_keys_that_plan(phi, where):
    computer = machine() if where == "cpu" else gpu_machine("RX 7900 XTX")
    with pytest.raises(UserError, match="layers of transformers") as refused:
        planned(loaded(model=phi, parallel={"replicate": 1, "pipeline": 2}), computer)
    edits = dict(word.split("=") for word in refused.value.fix.removeprefix("set ").split())
    parallel = {key.removeprefix("parallel."): int(value) for key, value in edits.items()}
    assert planned(loaded(model=phi, parallel=parallel), computer).train.ranks == 2


def test_a_safe_load_of_a_native_model_is_sharded(tmp_path):
    saved_model("llama", tmp_path, max_position_embeddings=128)
    model = {**dict.fromkeys(SMALL), "from": str(tmp_path), "load_with": "transformers"}
    plan = planned(
        loaded(model=model, parallel={"replicate": 1, "shard": 2}), gpu_machine("RX 7900 XTX")
    )
    assert (plan.train.replicate, plan.train.shard) == (1, 2)
