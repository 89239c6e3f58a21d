"""Merges of whole models and of adapters, against PEFT's formulas and hand-computed tensors."""

import json
import math
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.export.layouts import export, open_model
from bloomery.export.merge import export_several, merge
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import load_decoder
from models_for_tests import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A base and two models that were changed from it."""
    folder = tmp_path_factory.mktemp("models")
    base = make_model(folder / "base")
    weights = load_file(base / "model.safetensors")
    for seed, name in enumerate(("a", "b", "c")):
        shutil.copytree(base, folder / name)
        random = torch.Generator().manual_seed(seed)
        changed = {
            key: each + 0.02 * torch.randn(each.shape, generator=random)
            for key, each in weights.items()
        }
        save_file(changed, folder / name / "model.safetensors", metadata={"format": "pt"})
    return {name: folder / name for name in ("base", "a", "b", "c")}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def found(models, *names):
    return [find_model(models[name]) for name in names]


def test_a_linear_merge_is_the_weighted_mean(models, tmp_path):
    done = merge(found(models, "a", "b", "c"), tmp_path / "out", weights=[2, 1, 1])
    a, b, c, mine = (stored(folder) for folder in (*(models[name] for name in "abc"), done.folder))
    for name, value in mine.items():
        assert_close(value, 0.5 * a[name] + 0.25 * b[name] + 0.25 * c[name], atol=1e-7, rtol=0)
    assert any("transformers" in proof for proof in done.proofs)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(done.folder).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert_close(
            theirs(tokens).logits, load_decoder(done.folder)(tokens).head, atol=1e-4, rtol=0
        )


def test_the_same_models_give_the_same_bytes(models, tmp_path):
    for out in ("first", "second"):
        merge(found(models, "a", "b"), tmp_path / out / "m", weights=[0.7, 0.4], verify=False)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / out / "m").iterdir()}
        for out in ("first", "second")
    )
    assert first == second


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory) -> list[Path]:
    """Two adapters of other ranks and target modules."""
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for seed, (rank, targets) in enumerate(
        ((4, ["q_proj", "down_proj"]), (8, ["q_proj", "v_proj"]))
    ):
        torch.manual_seed(seed)
        base = transformers.AutoModelForCausalLM.from_pretrained(models["base"])
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=targets, init_lora_weights=False
        )
        peft.get_peft_model(base, config).save_pretrained(folder / f"adapter{seed}")
        made.append(folder / f"adapter{seed}")
    return made


def test_adapters_with_weights_are_those_of_peft(models, adapters, tmp_path):
    """`cat` of PEFT is the sum of updates; its `linear` multiplies a sum of A by a sum of B, and needs equal ranks."""
    both = Path("+".join(map(str, (models["base"], *adapters))))
    done = export_several(both, tmp_path / "out", weights=[0.7, 0.4])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Method: task-arithmetic; base: base." in card
    base = transformers.AutoModelForCausalLM.from_pretrained(models["base"])
    theirs = peft.PeftModel.from_pretrained(base, adapters[0], adapter_name="a")
    theirs.load_adapter(adapters[1], adapter_name="b")
    theirs.add_weighted_adapter(["a", "b"], [0.7, 0.4], "both", combination_type="cat")
    theirs.set_adapter("both")
    expected, mine = theirs.merge_and_unload().state_dict(), stored(done.folder)
    for name, value in mine.items():
        assert_close(value, expected[name], atol=1e-6, rtol=0)
    assert not torch.equal(
        mine["model.layers.0.self_attn.v_proj.weight"],
        stored(models["base"])["model.layers.0.self_attn.v_proj.weight"],
    )


def test_the_command_merges_and_the_card_tells(models, tmp_path):
    words = [
        "merge",
        str(models["a"]),
        str(models["b"]),
        "--weights",
        "1,0.5",
        "--type",
        "bfloat16",
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    card = (tmp_path / "out" / "README.md").read_text()
    for text in ("Method: linear.", "| a | 1 |", "| b | 0.5 |", "- merge"):
        assert text in card
    assert str(tmp_path) not in card
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "names", "problem"),
    [
        ({}, "a", "two models"),
        ({"weights": [1.0]}, "ab", "1 weights for 2 models"),
        ({"weights": [1.0, -1.0]}, "ab", "not usable as weights"),
        ({"weights": [math.nan, 1.0]}, "ab", "not usable as weights"),
        ({"weights": [1e308, 1e308]}, "ab", "sum of the weights is too large"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(models, tmp_path, settings, names, problem):
    with pytest.raises(UserError, match=problem) as caught:
        merge(found(models, *names), tmp_path / "out", **settings)
    assert caught.value.code == 2
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_are_refused(models, tmp_path):
    other = make_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UserError, match="differ in family"):
        merge([*found(models, "a"), find_model(other)], tmp_path / "out")
    changed = shutil.copytree(models["b"], tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(
        json.dumps(config | {"rope_theta": 5e5, "rope_parameters": None})
    )
    with pytest.raises(UserError, match=r"differ in rope_theta: 500000\.0 instead of 10000\.0"):
        merge([*found(models, "a"), find_model(changed)], tmp_path / "out")
    renamed = shutil.copytree(models["b"], tmp_path / "renamed")
    text = (renamed / "tokenizer.json").read_text()
    description = json.loads(text)
    one, two = (
        token for token, index in description["model"]["vocab"].items() if index in (300, 301)
    )
    vocab = description["model"]["vocab"]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (renamed / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=r"tokenizers differ: .* has the id 30"):
        merge([*found(models, "a"), find_model(renamed)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_not_a_number_is_found(models, tmp_path):
    broken = shutil.copytree(models["b"], tmp_path / "broken")
    weights = stored(broken)
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(UserError, match=r"norm\.weight .* not finite") as caught:
        merge([*found(models, "a"), find_model(broken)], tmp_path / "out", verify=False)
    assert caught.value.where == str(broken)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_export_casts_every_weight_once(tmp_path, family, dtype):
    source = make_model(tmp_path / "source", family)
    done = export(source, tmp_path / "out", dtype=dtype)
    assert len(done.proofs) == 2
    before, after = stored(source), stored(done.folder)
    assert before.keys() == after.keys()
    assert all(after[name].equal(before[name].to(getattr(torch, dtype))) for name in before)
    assert json.loads((done.folder / "config.json").read_text())["torch_dtype"] == dtype
    theirs = transformers.AutoModelForCausalLM.from_pretrained(done.folder, dtype="auto")
    assert theirs.dtype == getattr(torch, dtype)


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path):
    source = make_model(tmp_path / "source")
    weights = stored(source)
    weights["model.norm.weight"][0] = 70000.0
    save_file(weights, source / "model.safetensors")
    with pytest.raises(UserError, match="65,504"):
        export(source, tmp_path / "out", dtype="float16")
    with open_model(source, torch.bfloat16) as (piece, _):
        assert piece("model.norm.weight").isfinite().all()


def test_a_merge_that_float16_cannot_hold_is_refused(models, tmp_path):
    with pytest.raises(UserError, match="65,504"):
        merge(
            found(models, "a", "b"),
            tmp_path / "out",
            base=find_model(models["base"]),
            weights=[1.0, 1e9],
            dtype="float16",
            verify=False,
        )
