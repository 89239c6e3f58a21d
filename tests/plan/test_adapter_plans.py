"""What a plan says of an adapter, and of tokens that the model does not know yet."""

import json
from dataclasses import replace

import pytest
from plan_help import SMALL, loaded, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import new_tokens
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.facts.hf_config import config_to_hf
from bloomery.model.configs import build_config, known_config
from bloomery.plan.adapters import adapter_choices, refuse_method_misfits, refuse_new_rows
from bloomery.plan.estimate.mode import lora_like
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.unsupported import refuse_misfits
from bloomery.recipe.schema import Model, Peft, Recipe, TokenizerSection, TrainTokenizer

CONFIG = build_config(Model.model_validate(SMALL), vocab_size=None)
GROWN = replace(CONFIG, vocab_size=CONFIG.vocab_size + 3)


def recipe_from(folder, **adapter) -> Recipe:
    (folder / "config.json").write_text(json.dumps(config_to_hf(CONFIG)))
    sections = {
        "model": {"from": str(folder)},
        "data": {"builtin": "stdlib-code"},
        "adapter": adapter,
    }
    return Recipe.model_validate(sections if adapter else sections | {"adapter": {"kind": "none"}})


def test_the_plan_says_how_much_is_trained():
    adapter = {
        "kind": "dora",
        "rank": 4,
        "target_modules": ["q_proj"],
        "use_rslora": True,
        "init": "pissa",
    }
    plan = planned(loaded(adapter=adapter), machine())
    said = next(decision for decision in plan.choices if decision.key == "adapter.kind")
    assert said.value == "DoRA (rsLoRA) from PiSSA, rank 4"
    assert said.reason.startswith("1,152 trainable parameters")  # 2 x 9 x 64
    targets = next(each for each in plan.choices if each.key == "adapter.target_modules")
    assert (targets.value, targets.reason) == ("2 target modules", "q_proj: 2")


@pytest.mark.parametrize(("rank", "doubted"), [(64, False), (65, True)])
def test_a_rank_that_no_matrix_can_have_is_doubted(rank, doubted):
    plan = reported(
        loaded(adapter={"kind": "lora", "rank": rank, "target_modules": ["q_proj", "down_proj"]}),
        machine(),
    )
    found = [
        text for text in plan.warnings if "adapter.rank is 65" in text and "at most rank 64" in text
    ]
    assert len(found) == doubted


def words_of(recipe):
    """What the model of the start knows, and what is added."""
    return {
        "known_vocabulary": known_config(recipe.model.from_).vocab_size,
        "added": new_tokens(recipe),
    }


def test_new_tokens_are_said_and_must_be_learned(tmp_path):
    plain = recipe_from(tmp_path)
    ((key, choice),) = adapter_choices(plain, TrainedModel(GROWN), **words_of(plain))
    assert (key, choice.value) == ("model.vocab_size", "3 new tokens")
    assert list(adapter_choices(plain, TrainedModel(CONFIG), **words_of(plain))) == []
    refuse_new_rows(plain, GROWN, **words_of(plain))
    alone = recipe_from(tmp_path, kind="lora")
    refuse_new_rows(alone, CONFIG, **words_of(alone))
    with pytest.raises(UserError, match="3 tokens"):
        refuse_new_rows(alone, GROWN, **words_of(alone))
    both = recipe_from(tmp_path, kind="lora", modules_to_save=["embed_tokens", "lm_head"])
    refuse_new_rows(both, GROWN, **words_of(both))
    method = recipe_from(tmp_path, kind="peft", method="ia3")
    refuse_new_rows(method, CONFIG, **words_of(method))
    with pytest.raises(UserError, match="3 tokens"):
        refuse_new_rows(method, GROWN, **words_of(method))


def test_new_tokens_in_a_padded_vocabulary_must_be_learned_too(tmp_path):
    """Qwen2.5 has 151,936 rows for 151,665 tokens: what is added takes rows that nobody ever trained."""
    known = train_tokenizer(
        iter(["some text"]), TrainTokenizer(vocab_size=300, special_tokens=["<old>"]), tmp_path
    )
    padded = replace(CONFIG, vocab_size=known.vocab_size + 100)
    alone = recipe_from(tmp_path, kind="lora")
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(padded)))
    for tokens, new in ((["<old>"], 0), (["<old>", "<call>", "<call>"], 1)):
        recipe = alone.model_copy(
            update={"tokenizer": TokenizerSection(additional_special_tokens=tokens)}
        )
        if not new:
            refuse_new_rows(recipe, padded, **words_of(recipe))
            continue
        with pytest.raises(UserError, match="1 token is new"):
            refuse_new_rows(recipe, padded, **words_of(recipe))
        words = alone.model_dump(by_alias=True, include={"model"})
        plan = planned(
            loaded(model=words["model"], tokenizer={"additional_special_tokens": tokens}), machine()
        )
        assert plan.model.new_ids == (known.vocab_size,), (
            "the rows that begin anew are known to the run"
        )
        assert {d.key: d.value for d in plan.choices}["model.vocab_size"] == "1 new token"


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"method": "adalra"}, "did you mean adapter.method=adalora?"),
        ({"method": "vera", "target_modules": ["q_proj", "o_prj"]}, "did you mean o_proj? known: "),
        (
            {"method": "vera", "target_modules": "v_proj"},
            "a text alone is a pattern over full names",
        ),
        ({"method": "vera", "target_modules": "(v_proj"}, "adapter.target_modules=[q_proj]"),
    ],
)
def test_methods_and_modules_that_peft_would_not_find_are_refused_by_the_plan(said, fix):
    with pytest.raises(UserError) as refused:
        planned(loaded(adapter={"kind": "peft", **said}), machine())
    assert fix in refused.value.fix


def test_adalora_is_counted_with_the_rank_that_it_starts_with_and_needs_its_steps():
    assert lora_like(Peft(kind="peft", method="adalora"), CONFIG).rank == 12
    timed = loaded(adapter={"kind": "peft", "method": "adalora"}, train={"max_time": "2h"}).recipe
    with pytest.raises(UserError, match="AdaLoRA needs the number of steps"):
        refuse_method_misfits(timed)


def test_a_method_of_peft_trains_no_reward_model():
    words = {"objective": {"kind": "reward"}, "adapter": {"kind": "peft", "method": "ia3"}}
    with pytest.raises(UserError, match="trainable value head"):
        planned(loaded(**words), machine())


def test_an_adapter_cannot_change_the_context_of_its_base(tmp_path):
    recipe = recipe_from(tmp_path, kind="lora")
    longer = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"max_positions": 512})}
    )
    refuse_misfits(recipe, CONFIG, None, known_vocabulary=CONFIG.vocab_size, added=0)
    with pytest.raises(UserError) as error:
        refuse_misfits(longer, CONFIG, None, known_vocabulary=CONFIG.vocab_size, added=0)
    assert error.value.where == "model.max_positions" and "adapter=none" in error.value.fix
