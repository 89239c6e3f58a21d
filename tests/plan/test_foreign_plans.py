"""What a plan says of architectures that transformers computes: whose layers, how they are loaded, what they lack."""

import pytest
from plan_help import SMALL, loaded, machine, planned, reported

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
    assert "safe load transformers loads the weights" in told(model={**phi, "load_with": "transformers"})


def test_our_decoder_says_that_every_load_is_safe():
    assert "safe load" in told(model={"load_with": "transformers"})


@pytest.mark.parametrize(("sections", "fix"), [
    ({"objective": {"kind": "reward"}}, "docs/reference/models.md"),
    ({"train": {"compile": True}}, "train.compile=auto"),
    ({"adapter": {"kind": "peft", "method": "ia3", "modules_to_save": ["lm_head"]}}, "remove it"),
])  # fmt: skip
def test_what_they_lack_is_refused_with_a_remedy(phi, sections, fix):
    with pytest.raises(UserError) as refused:
        planned(loaded(model=phi, **sections), machine())
    assert fix in refused.value.fix
