"""A vocabulary that grows: ids in the tokenizer, mean rows in the model, learned, saved and loaded."""

import shutil

import pytest
import torch
import transformers
from peft import PeftModel
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import find_tokenizer, load_tokenizer
from bloomery.facts.config import ModelConfig
from bloomery.infer.generate import load_model
from bloomery.model.adapters.settings import refuse_untrained_rows
from bloomery.model.configs import build_config
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.recipe import schema
from bloomery.recipe.load import load_recipe
from bloomery.train.state import build_state

NEW = ["<call>", "</call>", "<note>"]
GROWN = CONFIG.vocab_size + len(NEW)
TOKENS = torch.tensor([[5, 40, CONFIG.vocab_size, 7, GROWN - 1, 9]])


def saved_base(prepared, folder, *, tied):
    config = tiny(tied)
    folder.mkdir()
    write_model(model_state(fresh_decoder(config, seed=3)), config, folder)
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def tiny(tied: bool) -> ModelConfig:
    return ModelConfig(**{**vars(CONFIG), "tie_embeddings": tied})


def test_added_tokens_have_ids_of_their_own_here_and_in_transformers(prepared, tmp_path):
    base = saved_base(prepared, tmp_path / "base", tied=True)
    recipe = tmp_path / "r.yaml"
    added = "['<call>', '</s>', '</call>', '<note>']"
    recipe.write_text(
        f"model: {{from: {base}}}\ntokenizer: {{additional_special_tokens: {added}}}\n"
        "data: {path: .}\n"
    )
    before = load_tokenizer(base)
    tokenizer = find_tokenizer(load_recipe(recipe).recipe)
    assert tokenizer.vocab_size == before.vocab_size + 3
    text = "x = 1 <call>y</call>"
    ids = tokenizer.encode(text)
    assert [tokenizer.id_of(token) for token in NEW] == [before.vocab_size + n for n in range(3)]
    assert before.vocab_size in ids and tokenizer.decode(ids) == text
    assert tokenizer.hash != before.hash
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.encode(text) == theirs(text, add_special_tokens=False).input_ids == ids
    assert "<call>" not in theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_begin_as_the_mean_of_the_old_ones(prepared, tmp_path, tied):
    base = saved_base(prepared, tmp_path / "base", tied=tied)
    config = build_config(schema.Model(**{"from": str(base)}), vocab_size=GROWN)
    assert config.vocab_size == GROWN
    state = build_state(tiny_plan(prepared, config=config, model={"source": base}))
    model, old = state.model_and_optimizer.model, fresh_decoder(tiny(tied), seed=3)
    for mine, theirs in (
        (model.model.embed_tokens, old.model.embed_tokens),
        (model.lm_head, old.lm_head),
    ):
        assert torch.equal(mine.weight[: CONFIG.vocab_size], theirs.weight)
        assert_close(mine.weight[CONFIG.vocab_size :], theirs.weight.mean(0).expand(3, -1))


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_the_base_never_trained_begin_as_the_mean_when_a_token_takes_them(
    prepared, tmp_path, tied
):
    """A vocabulary padded by 7 rows: two tokens take the fourth and third last, and what lies beyond stays as it is."""
    base, first = saved_base(prepared, tmp_path / "base", tied=tied), CONFIG.vocab_size - 4
    plan = tiny_plan(
        prepared, config=tiny(tied), model={"source": base, "new_ids": (first, first + 1)}
    )
    model, old = build_state(plan).model_and_optimizer.model, fresh_decoder(tiny(tied), seed=3)
    for mine, theirs in (
        (model.model.embed_tokens, old.model.embed_tokens),
        (model.lm_head, old.lm_head),
    ):
        assert_close(mine.weight[first : first + 2], theirs.weight[:first].mean(0).expand(2, -1))
        kept = [*range(first), *range(first + 2, CONFIG.vocab_size)]
        assert torch.equal(mine.weight[kept], theirs.weight[kept])


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_keeps_its_vocabulary_here_and_in_peft(prepared, tmp_path, tied):
    base = saved_base(prepared, tmp_path / "base", tied=tied)
    config = build_config(schema.Model(**{"from": str(base)}), vocab_size=GROWN)
    also = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    lora = schema.Lora(kind="lora", rank=4, modules_to_save=also)
    refuse_untrained_rows(config, lora, new=config.vocab_size - CONFIG.vocab_size)
    plan = tiny_plan(prepared, config=config, model={"source": base}, train={"steps": 3})
    plan = plan.model_copy(update={"adapter": lora})
    run = Run(plan, tmp_path / "run")
    again = build_state(plan, resume_from=run.checkpoint(3)).model_and_optimizer.model.eval()
    loaded, _ = load_model(run.checkpoint(3))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    theirs.resize_token_embeddings(GROWN)
    theirs = PeftModel.from_pretrained(theirs, run.checkpoint(3)).eval()
    with torch.no_grad():
        assert loaded(TOKENS).head.shape[-1] == GROWN
        assert_close(loaded(TOKENS).head, again(TOKENS).head, atol=1e-6, rtol=0)
        assert_close(loaded(TOKENS).head, theirs(TOKENS).logits, atol=1e-5, rtol=0)


def test_rows_that_nothing_would_learn_are_refused():
    config = ModelConfig(**{**vars(tiny(False)), "vocab_size": GROWN})
    with pytest.raises(UserError, match="3 tokens are new") as refused:
        refuse_untrained_rows(config, schema.Lora(kind="lora", modules_to_save=["norm"]), new=3)
    assert "adapter.modules_to_save=[norm, embed_tokens, lm_head]" in refused.value.fix


def test_an_adapter_of_a_fresh_model_keeps_its_base_in_the_run(prepared, tmp_path):
    plan = tiny_plan(prepared, config=CONFIG, train={"steps": 4})
    plan = plan.model_copy(update={"adapter": schema.Lora(kind="lora", rank=4)})
    whole = Run(plan, tmp_path / "whole")
    assert (tmp_path / "whole" / "base" / "config.json").is_file()
    decoder, _ = load_model(whole.checkpoint(4))
    assert decoder(TOKENS % CONFIG.vocab_size).head.shape[-1] == CONFIG.vocab_size
    Run(plan, tmp_path / "run", stop_after=2)
    resumed = Run(plan, tmp_path / "run", resume_from=tmp_path / "run/checkpoints/step-00000002")
    assert resumed.losses()[4] == whole.losses()[4]
