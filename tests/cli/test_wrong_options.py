"""What is typed by users of other programs, and by users in a hurry: an answer, and never a wrong one."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bloomery.cli
from bloomery.cli import COMMANDS, cli, main
from bloomery.cli.wrong_options import usage_error
from bloomery.core.text import letters_apart, misspelled

TABLE = Path(bloomery.cli.__file__).with_name("other_options.toml")
ROWS = [
    (command, program, name, text)
    for commands, programs in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()
    for command in commands.split(", ")
    for program, rows in programs.items()
    for names, text in rows.items()
    for name in names.split(", ")
]
RECORDS = Path(__file__).parents[1] / "recipe" / "tool_fields"
FIELDS = sorted(
    {
        name.rpartition(".")[2]
        for path in RECORDS.glob("*.json")
        for fields in json.loads(path.read_text())["classes"].values()
        for name in fields
    }
)


def command_called(name):
    module, _, attribute = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), attribute)


def options_of(name):
    command = command_called(name)
    names = {each for one in command.params for each in (*one.opts, *one.secondary_opts)}
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            names |= {each for one in inner.params for each in one.opts}
    return names


def said(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def answer(capsys, *words):
    return " ".join(said(capsys, *words).partition("fix:")[2].split())


def test_the_table_has_each_option_of_a_command_once():
    assert len(ROWS) > 400
    named = [(command, name) for command, _, name, _ in ROWS]
    # Of two programs with an option of the same name the first row counts, so both must say the same of it.
    texts = {}
    for command, _, name, text in ROWS:
        texts.setdefault((command, name), set()).add(text.partition("#")[0])
    assert {key: found for key, found in texts.items() if len(found) > 1} == {}
    for command, name in named:
        option = f"-{name}" if len(name) == 1 else f"--{name}"
        assert option not in options_of(command), (command, name)


@pytest.mark.parametrize("command", sorted({row[0] for row in ROWS}))
def test_what_the_table_says_to_type_exists(command):
    for owner, _, name, text in ROWS:
        if owner != command:
            continue
        typed, _, reason = text.partition("#")
        options = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", typed)
        settings = re.match(r"[a-z.]+=", typed.strip())
        assert options or settings or not typed.strip(), (command, name)
        assert set(options) <= options_of(command), (command, name, options)

        # Of a reason: an option behind the name of a command is that command's, another one this command's.
        for other, rest in re.findall(r"`bloomery (\w+)([^`]*)`", reason):
            ours = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest.partition(" -- ")[0]))
            assert ours <= options_of(other), (command, name, other)
        bare = re.sub(r"`[^`]*`", "", reason)
        options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", bare))
        assert options <= options_of(command) | {"--debug"}, (command, name)


SERVED = """
ctx-size --max-context 9
max-model-len --max-context 9
context-length --max-context 9
num-ctx --max-context 9
parallel --max-requests 9
max-num-seqs --max-requests 9
max-running-requests --max-requests 9
max-batch-size --max-requests 9
max-concurrent-requests --max-queue 9
timeout --max-seconds 9
n-predict --max-new-tokens 9
predict --max-new-tokens 9
max-tokens --max-new-tokens 9
max_tokens --max-new-tokens 9
temp --temperature 9
repeat-penalty --repetition-penalty 9
chat-template --template 9
chat-template-file --template 9
lora-modules --adapter 9
lora-paths --adapter 9
payload-limit --max-body 9
quantization --quantize nf4
load-in-4bit --quantize nf4
load_in_8bit --quantize int8
device -d 9
main-gpu -d 9
"""


@pytest.mark.parametrize("row", SERVED.strip().splitlines())
def test_options_of_other_servers_name_ours(row, capsys):
    theirs, _, ours = row.partition(" ")
    assert f": use `{ours}`" in answer(capsys, "serve", "m", f"--{theirs}", "9")


@pytest.mark.parametrize(
    "option",
    """
    n-gpu-layers flash-attn threads batch-size mlock gpu-memory-utilization tensor-parallel-size trust-remote-code
    served-model-name api-key enable-auto-tool-choice tool-call-parser reasoning-parser jinja metrics embeddings
    enable-prefix-caching speculative-config draft-model model-draft alias lora mmproj host-port-nothing model tokenizer
    revision dtype kv-cache-dtype enforce-eager swap-space disable-log-requests ssl-keyfile json-schema grammar
    cont-batching slots no-webui adapter-path mem-fraction-static tp-size dp-size num-shard keepalive task
    """.split(),
)
def test_what_a_server_does_not_have_gets_a_reason_and_no_guess(option, capsys):
    text = answer(capsys, "serve", "m", f"--{option}", "9")
    assert "write --" not in text and ": use `" not in text
    assert text == "bloomery serve --help" if "nothing" in option else text.startswith("`--")


def test_short_options_are_read_as_they_are_typed(capsys):
    text = said(capsys, "serve", "m", "-ngl", "99", "-c", "4096", "-np", "4", "-d", "cpu")
    assert "no such options '-ngl', '-c', '-np'\n" in text
    assert "`-c` (llama.cpp): use `--max-context 4096`" in text
    assert "`-np` (llama.cpp): use `--max-requests 4`" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("train demo --gpu 4090", "`bloomery plan RECIPE --gpu NAME`"),
        ("train demo --nodes 2", "`bloomery slurm RECIPE --nodes N`"),
        ("train demo --nnodes 2 --master_port 1", "`bloomery train RECIPE -- --nnodes 2"),
        ("train demo --dpo", "use `objective.kind=dpo`"),
        ("train demo --quantize nf4", "use `quantize.kind=nf4`"),
        ("train demo --eval-iters 20", "use `eval.tokens`"),
        ("train demo -o out", "use `--run-dir out`"),
        ("train demo --cpu", "use `-d cpu`"),
        ("plan demo --num-gpus 8", "use `--gpus 8`"),
        ("plan demo --learning-rate 1e-4", "use `optimizer.learning_rate=1e-4`"),
        ("export m --outtype q8_0", "use `--type q8_0`"),
        ("export m --export_dir out", "use `--out out`"),
        ("eval m --tasks piqa", "use `--lm-eval piqa`"),
        ("eval m --num_fewshot 5", "use `--shots 5`"),
        ("download m --local-dir d", "use `--to d`"),
        ("slurm demo --partition p", "use `--queue p`"),
        ("generate m --draft-model d", "use `--draft d`"),
        ("runs --type x", "`bloomery export`"),
    ],
)
def test_other_commands_answer_too(words, part, capsys):
    assert part in answer(capsys, *words.split())


def test_no_field_of_another_tool_is_taken_for_a_misspelled_option():
    """Each of some 1,200 fields as an option of `train`: its key, a reason, or no guess."""
    assert len(FIELDS) > 1000
    own = {option.lstrip("-") for option in options_of("train")} | {"debug", "version"}
    rights = {  # the same thing under almost the same name, or in two sections
        "quantize_base": "quantize.kind",
        "temperature": "objective.temperature or sample.temperature",
        "top_p": "objective.top_p or sample.top_p",
        "trl": "objective.kind",
    }
    answered = 0
    for field in FIELDS:
        option = field.replace("_", "-").lstrip("-")
        if option in own:
            continue
        words = ["train", "demo", f"--{option}", "1"]
        with pytest.raises(click.NoSuchOption) as caught:
            cli.main(words, prog_name="bloomery", standalone_mode=False)
        text = usage_error(caught.value, words).fix
        guess = re.findall(r"did you mean ([^?]+)\?", text)
        assert guess == [right for right in [rights.get(field)] if right], (field, text)
        assert "write --" not in text, (field, text)
        answered += text != "bloomery train --help"
    assert answered >= 0.97 * len(FIELDS)


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        ("prot", ("port", "host", "open"), "port"),
        ("quantise", ("quantize", "quant", "type"), "quantize"),
        ("dry-rn", ("dry-run", "debug"), "dry-run"),
        ("max-new-token", ("max-new-tokens", "max-body"), "max-new-tokens"),
        ("temper", ("temperature", "template"), "temperature"),
        ("tem", ("temperature", "template"), None),
        ("lora-rank", ("dry-run", "model", "run-dir"), None),
        ("save-steps", ("smoke-test", "data"), None),
        ("nodes", ("model", "devices"), None),
        ("cuda", ("data",), None),
        ("ctx-size", ("quantize", "step"), None),
        ("to", ("so",), None),
    ],
)
def test_only_what_is_almost_the_same_is_a_misspelling(word, names, meant):
    assert misspelled(word, names) == meant


@given(st.text("abc-", max_size=8), st.text("abc-", max_size=8))
def test_letters_apart_is_a_distance(word, other):
    distance = letters_apart(word, other)
    assert distance == letters_apart(other, word)
    assert (distance == 0) == (word == other)
    assert abs(len(word) - len(other)) <= distance <= max(len(word), len(other))


@given(st.text("abc-", min_size=2, max_size=8), st.integers(0, 6))
def test_one_mistake_is_one_letter_apart(word, at):
    at %= len(word) - 1
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    for other in (
        word[:at] + "x" + word[at:],
        word[:at] + "x" + word[at + 1 :],
        word[:at] + word[at + 1 :],
    ):
        assert letters_apart(word, other) == 1
    assert letters_apart(word, swapped) == (word != swapped)
