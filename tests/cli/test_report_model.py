"""`bloomery report` of models that no run here made: a plain folder, an adapter and its base, one of PEFT's methods."""

import html
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bloomery.cli.common import text_flags
from bloomery.cli.eval import command as eval_command
from bloomery.cli.generate import command as generate_command
from bloomery.cli.report import command as report_command
from bloomery.core.errors import UserError
from bloomery.model.adapters.lora import adapt, init_adapters, trained_state
from bloomery.model.adapters.peft_files import write_adapter
from bloomery.model.adapters.settings import adaptation
from bloomery.model.io.weights import load_decoder
from bloomery.recipe.schema import Lora
from models_for_tests import make_model

TEXT = "def f(x):\n    return x + 1  # naïve\n" * 12
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}\n{% else %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """base/, adapter/ with random numbers and without a tokenizer, text.py, talks.jsonl."""
    root = tmp_path_factory.mktemp("made")
    base = make_model(root / "base")
    ours = load_decoder(base)
    lora = Lora(kind="dora", rank=4, alpha=8.0, target_modules=["q_proj", "up_proj"])
    adapt(ours, lora)
    init_adapters(ours, 0)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(
                    0, 2.0, generator=torch.Generator().manual_seed(0)
                )
    (root / "adapter").mkdir()
    write_adapter(
        trained_state(ours),
        adaptation(ours.config, lora),
        ours.config,
        root / "adapter",
        base=str(base),
    )
    (root / "text.py").write_text(TEXT, encoding="utf-8")
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "return x"}]
    (root / "talks.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return root


@pytest.fixture
def here(made, monkeypatch, tmp_path):
    """Whatever is made lies beside what is asked for by its short name."""
    for name in ("base", "adapter", "text.py", "talks.jsonl"):
        (tmp_path / name).symlink_to(made / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*words, command=report_command):
    return CliRunner().invoke(command, list(words), catch_exceptions=False).stdout


def page(*words):
    """The text of report.html, a cell or a paragraph a piece."""
    assert said(*words).strip().endswith("/report.html")
    text = Path("report.html").read_text(encoding="utf-8")
    body = text[text.index("<body>") :]
    return [html.unescape(piece) for piece in re.split(r"<[^>]+>", body) if piece.strip()], text


def row(pieces, title, count):
    at = max(number for number, piece in enumerate(pieces) if piece == title)
    return pieces[at + 1 : at + 1 + count]


def test_figures_equal_those_of_eval_and_the_base_stands_beside(here):
    pieces, _ = page("adapter", "--data", "text.py")
    told = [
        json.loads(said(name, "--data", "text.py", "--json", command=eval_command))
        for name in ("base", "base+adapter")
    ]
    assert told[0]["loss"] != told[1]["loss"]
    assert row(pieces, "bits per byte", 2) == [f"{each['bits_per_byte']:.4f}" for each in told]
    assert row(pieces, "loss, nats per token", 2) == [f"{each['loss']:.4f}" for each in told]
    assert row(pieces, "perplexity", 2) == [f"{each['perplexity']:.4g}" for each in told]
    assert row(pieces, "tokens", 2) == [f"{told[0]['tokens']:,}"] * 2
    assert row(pieces, "bytes", 2) == [f"{len(TEXT.encode()):,}"] * 2
    assert f"{told[1]['bits_per_byte']:.3f}" in pieces
    assert f"bits per byte; base {told[0]['bits_per_byte']:.3f}" in pieces
    assert (
        "The text is longer than the context of 128 tokens and scored in half-overlapping windows."
        in pieces
    )
    assert pieces.count("Loss per token") == 1 and pieces.count("base") >= 2
    assert not any("--data" in piece and "adds" in piece for piece in pieces)


def test_prices_of_a_short_text_add_up_to_its_loss(here):
    (here / "short.txt").write_text("return x + 1")
    _, text = page("base", "--data", "short.txt")
    prices = [float(each) for each in re.findall(r'title="([\d.]+) nats"', text)]
    told = json.loads(said("base", "--data", "short.txt", "--json", command=eval_command))
    assert sum(prices) == pytest.approx(told["loss"] * told["tokens"], abs=0.006 * len(prices))


def test_facts_of_an_adapter_and_its_base(here, made):
    pieces, text = page("base+adapter")
    ours = load_decoder(made / "adapter")
    assert pieces[:2] == ["adapter", "DoRA, rank 4, alpha 8, base model base"]
    stored = sum(parameter.numel() for parameter in trained_state(ours).values())
    whole = sum(parameter.numel() for parameter in load_decoder(made / "base").parameters())
    assert row(pieces, "trainable parameters", 1) == [f"{stored:,}"]
    assert row(pieces, "parameters", 1)[0].startswith(f"{whole:,}")
    assert row(pieces, "target modules", 1) == ["up_proj, q_proj"] and "LlamaForCausalLM" in pieces
    size = (made / "base/model.safetensors").stat().st_size
    assert f"{size / 1024:.1f} KiB in 1 file, float32" in pieces and "128" in pieces
    assert "--data FILE" in pieces and any("adds the loss on a text" in piece for piece in pieces)
    assert (
        pieces[pieces.index("Reproduce") + 1] == "bloomery report base+adapter"
        and "<script" not in text
    )


def test_answers_are_those_of_each_model_and_prompts_are_no_markup(here):
    shutil.copytree(here / "base", here / "chatty")
    config = json.loads((here / "chatty/tokenizer_config.json").read_text()) | {
        "chat_template": TEMPLATE
    }
    (here / "chatty/tokenizer_config.json").write_text(json.dumps(config))
    pieces, text = page("chatty+adapter", "--prompt", "return", "--prompt", "<script>")
    assert "<script" not in text and "<script>" in pieces
    assert "formatted with" in pieces[pieces.index("Responses") + 1]
    asked = (
        "--chat",
        "--max-new-tokens",
        "100",
        "--temperature",
        "0.6",
        "--top-p",
        "0.95",
        "--seed",
        "0",
    )
    at = pieces.index("return")
    for name, answer in (("chatty", pieces[at + 2]), ("chatty+adapter", pieces[at + 4])):
        whole = said(name, "--prompt", "return", *asked, command=generate_command).removeprefix(
            "return\n"
        )
        assert answer.removesuffix(" …").strip().startswith(whole.strip()[:60])
    assert (
        pieces[at + 1] == "base"
        and pieces[at + 3] == "with the adapter"
        and pieces[at + 2] != pieces[at + 4]
    )


def test_of_conversations_the_assistant_is_priced_by_the_template_that_is_named(here):
    with pytest.raises(UserError, match="no chat template") as refused:
        said("base", "--data", "talks.jsonl")
    assert refused.value.where == "--template"
    pieces, text = page("base", "--data", "talks.jsonl", "--template", "chatml")
    told = json.loads(
        said(
            "base", "--data", "talks.jsonl", "--template", "chatml", "--json", command=eval_command
        )
    )
    assert (
        row(pieces, "loss, nats per token", 1) == [f"{told['loss']:.4f}"] and 'class="read"' in text
    )
    assert (
        pieces[pieces.index("Reproduce") + 1]
        == "bloomery report base --data talks.jsonl --template chatml"
    )


def test_a_method_of_peft(here):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("base")
    wrapped = peft.get_peft_model(model, peft.VeraConfig(r=3, target_modules=["q_proj"]))
    wrapped.save_pretrained("vera")
    pieces, _ = page("base+vera")
    assert "VERA of PEFT, rank 3, base model base" in pieces and "parameters in its file" in pieces


def test_a_run_is_examined_as_a_model_when_something_is_asked_of_it(here):
    (here / "runs" / "one" / "checkpoints").mkdir(parents=True)
    (here / "runs" / "one" / "recipe.yaml").write_text("")
    with pytest.raises(UserError, match="no checkpoint yet"):
        said("last", "--prompt", "x")


@pytest.mark.parametrize(
    ("words", "problem", "code"),
    [
        (["no-such"], "no run 'no-such'", 2),
        (["pickled"], "pytorch_model.bin is a pickle", 1),
        (["empty"], "neither a model nor a run", 1),
        (["base", "--data", "nothing.txt"], "no token to score", 1),
        (["base", "--data", "no-such.txt"], "no such file or folder", 1),
        (["base", "--prompt", " "], "the prompt is empty", 2),
        (["base", "--prompt", "x" * 600], "prompt too long", 1),
        (["base", "--template", "chatml"], "--template needs", 2),
        (["base", "--out", "text.py"], "is no Bloomery report", 2),
        (["base", "--out", "no/where.html"], "folder not found", 2),
        (["base", "--out", "empty"], "--out is a folder", 2),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(here, words, problem, code):
    (here / "empty").mkdir()
    (here / "pickled").mkdir()
    shutil.copy(here / "base/config.json", here / "pickled")
    (here / "pickled/pytorch_model.bin").write_bytes(b"x")
    (here / "nothing.txt").write_text("")
    with pytest.raises(UserError, match=re.escape(problem)) as refused:
        said(*words)
    assert refused.value.code == code and refused.value.fix
    assert "data.path" not in str(refused.value) and not (here / "report.html").exists()


def test_a_page_is_replaced_and_nothing_else(here):
    said("base", "--out", "mine.html")
    first = (here / "mine.html").read_text()
    assert said("base+adapter", "--out", "mine.html").strip() == str(here / "mine.html")
    assert (here / "mine.html").read_text() != first and "--out mine.html" in (
        here / "mine.html"
    ).read_text()
    assert sorted(path.name for path in here.iterdir()) == [
        "adapter",
        "base",
        "mine.html",
        "talks.jsonl",
        "text.py",
    ]


def test_a_device_or_pipe_is_never_replaced(here):
    os.mkfifo(here / "pipe")
    with pytest.raises(UserError, match="device, a pipe"):
        said("base", "--out", "pipe")
    assert (here / "pipe").is_fifo()


def test_a_page_of_somebody_in_a_run_s_folder_is_kept(here):
    (here / "run").mkdir()
    (here / "run/recipe.yaml").touch()
    (here / "run/events.jsonl").touch()
    (here / "run/report.html").write_text("mine")
    with pytest.raises(UserError, match="no Bloomery report"):
        said("run")
    assert (here / "run/report.html").read_text() == "mine"


def test_a_near_name_of_a_text_is_said_as_a_flag(here):
    with pytest.raises(UserError) as refused, text_flags():
        raise UserError("no", where="data.path: txet.py", fix="did you mean data.path=text.py?")
    assert (refused.value.where, refused.value.fix) == ("txet.py", "did you mean --data text.py?")


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (
            "leave it out, set data.on_error to skip, or set data.chat.template to another",
            "leave it out, or use another --template",
        ),
        ("mend it, or set data.on_error to skip", "mend it"),
        ("name it: data.columns={messages: NAME}", "rename its column to messages"),
    ],
)
def test_rows_and_templates_are_mended_without_a_recipe(recipe, flags):
    with pytest.raises(UserError) as refused, text_flags():
        raise UserError("no", where="a.jsonl:1", fix=recipe)
    assert (refused.value.where, refused.value.fix, refused.value.code) == ("a.jsonl:1", flags, 1)
