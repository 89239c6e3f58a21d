"""An export is whole, equal, opens elsewhere, and says what it is."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from gguf_models import saved_adapter
from huggingface_hub import ModelCard
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.export import layouts as hf
from bloomery.export.card import Merge, model_card, training_of
from bloomery.export.layouts import export
from bloomery.infer.model_folder import find_model
from bloomery.model.configs import read_config
from bloomery.model.io.weights import load_decoder, model_state
from bloomery.monitor.events import DeviceStats, EventLog
from models_for_tests import make_model, make_run

TOKENS = torch.arange(40)[None]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_export_opens_in_transformers_with_equal_logits(family: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", family)
    done = export(source, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        done.folder, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(TOKENS).logits, load_decoder(source)(TOKENS).head, atol=1e-4, rtol=0
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.folder)
    assert (
        tokenizer.decode(tokenizer("def f(x):", add_special_tokens=False).input_ids) == "def f(x):"
    )
    assert theirs.generation_config.eos_token_id == 2
    assert len(done.proofs) == 2
    assert transformers.__version__ in done.proofs[1]
    assert done.bytes == sum(path.stat().st_size for path in done.folder.iterdir())


def test_an_export_of_a_run_tells_where_it_comes_from(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny", 10, 20, best=10)
    done = export(run / "checkpoints" / "step-00000010", tmp_path / "out", verify=False)
    assert done.proofs == ()
    assert {path.name for path in done.folder.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "loss.svg",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = (done.folder / "README.md").read_text()
    for told in (
        "corpus.txt",
        "10 steps",
        "640",
        "a small CPU",
        "| 4.000 | 54.60 | 2.500 |",
        "4.900 nats",
    ):
        assert told in card
    assert "secret" not in card, "a path tells more of its owner than the reader needs"
    assert "{" not in card.split("```")[0]
    first, second = (
        model_state(load_decoder(folder))
        for folder in (run / "checkpoints/step-00000010", done.folder)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("lines", "limit"),
    [
        ("", "not trained to follow instructions"),
        ("objective: {kind: sft}\n", "answers like its training data"),
        ("model: {from: org/base}\n", "catastrophic forgetting"),
    ],
)
def test_a_card_promises_no_less_and_no_more_than_was_trained(
    tmp_path: Path, lines: str, limit: str
) -> None:
    run = make_run(tmp_path / "tiny", 10)
    data = "data: {path: corpus.txt}\n"
    (run / "recipe.yaml").write_text(
        data + (lines if "model" in lines else lines + "model: {preset: go-coder-tiny}\n")
    )
    training = training_of(run / "checkpoints" / "step-00000010")
    card = model_card("tiny", read_config(run / "checkpoints" / "step-00000010"), training)
    assert limit in card.partition("## Limitations")[2]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    (tmp_path / "out").mkdir()
    export(source, tmp_path / "out", verify=False)
    with pytest.raises(UserError, match="output folder exists"):
        export(source, tmp_path / "out", verify=False)


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_model(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer"):
        export(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch
) -> None:
    flushed: list[str] = []

    def flush(path: Path) -> None:
        assert path == tmp_path or not (tmp_path / "out").exists()
        flushed.append(path.name)

    monkeypatch.setattr(hf, "flush_to_disk", flush)
    done = export(make_model(tmp_path / "model"), tmp_path / "out", verify=False)
    assert {path.name for path in done.folder.iterdir()} < set(flushed) and flushed[
        -1
    ] == tmp_path.name


def test_the_draft_of_an_export_that_was_killed_goes_with_the_next(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    for name in (".tmp-out-4194999", ".tmp-other-4194999"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    export(source, tmp_path / "out", verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".tmp-other-4194999",
        "out",
        "source",
    ]


def test_a_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_model(tmp_path / "source")
    copy = shutil.copyfile

    def careless(origin: Path, target: Path) -> None:
        copy(origin, target)
        tensors = load_file(target)
        tensors["model.norm.weight"][0] += 1e-6
        save_file(tensors, target)

    monkeypatch.setattr(hf.shutil, "copyfile", careless)
    with pytest.raises(UserError, match=r"model\.norm\.weight changed"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_diverged_model_is_refused(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserError, match="not finite"):
        export(source, tmp_path / "out")


def test_remote_code_does_not_travel(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    for name in ("config.json", "tokenizer_config.json"):
        stated = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps(stated | {"auto_map": {"AutoModel": "evil.Evil"}}))
    (source / "evil.py").write_text("raise SystemExit")
    export(source, tmp_path / "out", verify=False)
    assert not any(b"evil" in path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert not (tmp_path / "out" / "evil.py").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "runs" / "tiny", 10)
    monkeypatch.chdir(tmp_path)
    words = ["export", "tiny", "--to", "hf", "--out", "taken/here", "--devices", "cpu"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.stdout.startswith("export     taken/here (")
    assert done.stderr.count("verified") == 2
    again = CliRunner().invoke(cli, words).exception
    assert isinstance(again, UserError) and again.code == 1


@pytest.mark.parametrize(
    ("layout", "kind", "fix"),
    [
        ("adapter", "bfloat16", "hf or merged"),
        ("hf", "q8_0", "gguf"),
    ],
)
def test_a_type_of_another_format_is_refused(
    tmp_path: Path, layout: str, kind: str, fix: str
) -> None:
    words = ["export", "any", "--to", layout, "--type", kind, "--out", str(tmp_path / "out.gguf")]
    refused = CliRunner().invoke(cli, words).exception
    assert (
        isinstance(refused, UserError)
        and refused.where == "--type"
        and refused.fix.endswith(f"--to {fix}")
    )


def test_generation_settings_that_are_no_object_are_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match="holds no object"):
        export(folder, tmp_path / "out", verify=False)


def test_a_folder_for_vllm_is_bfloat16_and_readable(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    done = hf.export_vllm(find_model(source), tmp_path / "out")
    assert len(done.proofs) == 2 and done.next == f"vllm serve {tmp_path / 'out'}"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (done.folder, source))
    assert all(torch.equal(values, theirs[name].bfloat16()) for name, values in ours.items())
    assert {path.stat().st_mode & 0o777 for path in done.folder.iterdir()} == {0o644}
    assert "generation_config.json" in {path.name for path in done.folder.iterdir()}


def test_a_card_has_license_plot_energy_and_recipe(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny", 10, 20)
    checkpoint = run / "checkpoints" / "step-00000020"
    done = export(checkpoint, tmp_path / "plain", verify=False)
    card = (done.folder / "README.md").read_text()
    assert (
        "energy: not measured" in card
        and "license:" not in card.split("---")[1]
        and "Not stated" in card
    )
    assert "](loss.svg)" in card and (done.folder / "loss.svg").read_text().startswith("<svg")
    recipe = card.partition("```yaml")[2].partition("```")[0]
    assert yaml_of(recipe)["data"] == {"path": "corpus.txt", "sequence_length": 64}
    with EventLog(run / "events.jsonl") as log:
        for seconds in (10.0, 20.0):
            log(DeviceStats(step=10, device=0, name="a GPU", seconds=seconds, power=120.0))
        # after the checkpoint
        log(DeviceStats(step=30, device=0, name="a GPU", seconds=1e6, power=120.0))
    with (run / "recipe.yaml").open("a") as file:
        file.write("logging: {trackers: {command: /home/ada/hook.sh}}\n")
    (checkpoint / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    card = (export(checkpoint, tmp_path / "told", verify=False).folder / "README.md").read_text()
    assert "energy: 1 Wh, measured over 30" in card
    assert "license: apache-2.0" in card.split("---")[1]
    assert "hook.sh" in card and "/ada" not in card


@pytest.mark.parametrize(
    ("base", "merge", "relation"),
    [
        ("org/base", None, "adapter"),
        (None, Merge("linear", (("org/a", 1.0), ("b", 1.0))), "merge"),
        (None, None, None),
    ],
)
def test_a_card_names_the_models_that_it_comes_from(tmp_path: Path, base, merge, relation) -> None:
    card = model_card(
        "x", read_config(make_model(tmp_path / "m")), None, base=base, merge=merge, license_="mit"
    )
    head = yaml_of(card.split("---")[1])
    assert head["license"] == "mit" and head.get("base_model_relation") == relation
    assert head.get("base_model") == ({"adapter": ["org/base"], "merge": ["org/a"]}.get(relation))


# lines of the recipe, whether the tokenizer has a chat template, what an export is, words of its card
CARDS = {
    "pretrained": (
        "",
        False,
        "hf",
        "Language model, pretrained.",
        "bloomery generate",
        {"pretrain"},
    ),
    "chat": (
        "model: {from: org/base}\nobjective: {kind: sft}\ndata: {path: 'hub:org/chats'}\n",
        True,
        "hf",
        "Chat model, fine-tuned, from org/base.",
        "bloomery chat out",
        {"sft", "conversational"},
    ),
    "preferences": (
        "model: {from: org/base}\nobjective: {kind: dpo}\nadapter: {kind: lora}\n",
        True,
        "hf",
        "Chat model, trained with DPO, from org/base.",
        "bloomery chat out",
        {"dpo", "lora"},
    ),
    "continued": (
        "model: {from: org/base}\nobjective: {kind: pretrain}\n",
        False,
        "hf",
        "Language model, pretrained, from org/base.",
        "bloomery generate out",
        {"pretrain"},
    ),
    "adapter": (
        "model: {from: org/base}\nobjective: {kind: sft}\nadapter: {kind: lora}\n",
        True,
        "adapter",
        "LoRA adapter that makes a chat model, of org/base.",
        "bloomery chat org/base+out",
        {"sft", "lora"},
    ),
    "reward": (
        "model: {from: org/base}\nobjective: {kind: reward}\n",
        True,
        "reward",
        "Reward model, trained on preferences, from org/base.",
        "bloomery eval out",
        {"reward"},
    ),
}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"


@pytest.mark.parametrize("name", CARDS)
def test_a_card_says_what_was_trained_and_its_program_runs(
    name, tmp_path, monkeypatch, capsys
) -> None:
    """The first words, the metadata and the command; the Python of the card runs, the base from a folder."""
    lines, chat, kind, first, command, tags = CARDS[name]
    run = make_run(tmp_path / "tiny", 10)
    data = "" if "data:" in lines else "data: {path: corpus.txt}\n"
    data += "" if "model:" in lines else "model: {preset: go-coder-tiny}\n"
    (run / "recipe.yaml").write_text(data + lines)
    checkpoint = run / "checkpoints" / "step-00000010"
    config = read_config(checkpoint)
    monkeypatch.chdir(tmp_path)
    if kind == "reward":
        theirs = transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(
                vocab_size=320,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_labels=1,
                pad_token_id=0,
            )
        )
        theirs.save_pretrained("out")
        config = replace(config, head="values")
    elif kind == "adapter":
        saved_adapter(make_model(Path("base")), Path("out"), ["q_proj"])
    else:
        export(checkpoint, Path("out"), verify=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATE if chat else None
    tokenizer.save_pretrained("out")
    base = "org/base" if kind == "adapter" else None
    card = model_card("out", config, training_of(checkpoint), base=base, chat=chat)
    assert first in card.partition("# out\n\n")[2].partition("\n")[0]
    assert f"`{command}" in card.partition("## Use")[2]
    head = ModelCard(card).data
    assert head.base_model == (["org/base"] if "org/base" in lines else None)
    assert (
        head.base_model_relation == ("adapter" if base else "finetune") if head.base_model else True
    )
    assert head.datasets == (["org/chats"] if "hub:" in lines else None)
    assert head.library_name == ("peft" if base else "transformers") and {"bloomery"} | tags <= set(
        head.tags
    )
    program = card.partition("```python\n")[2].partition("```")[0]
    assert ("apply_chat_template" in program) == chat and ("PeftModel" in program) == bool(base)
    program = program.replace("org/base", "base").replace("max_new_tokens=200", "max_new_tokens=3")
    exec(compile(program, "card", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_card_of_a_converted_model_knows_its_new_template(tmp_path: Path) -> None:
    words = [
        "convert",
        str(make_model(tmp_path / "m")),
        str(tmp_path / "out"),
        "-t",
        "chatml",
        "--no-verify",
    ]
    words += ["--add-tokens", "<|im_start|>", "--add-tokens", "<|im_end|>"]
    assert CliRunner().invoke(cli, words, catch_exceptions=False).exit_code == 0
    assert "`bloomery chat out`" in (tmp_path / "out" / "README.md").read_text()


def yaml_of(text: str):
    return YAML(typ="safe").load(text)
