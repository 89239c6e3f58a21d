"""Crafted weights, indexes, configs and tokenizers: nothing of them runs, nothing hangs, each is one sentence."""

import json
import shutil
import struct

import pytest
import torch
from command_line import assert_clear, here, process
from safetensors.torch import load_file, save_file

PICKLE = b'cos\nsystem\n(S"touch ran"\ntR.'
VERBS = {
    "generate": ("generate", "model", "--prompt", "the", "--max-new-tokens", "3"),
    "eval": ("eval", "model", "--data", "some.txt"),
    "export": ("export", "model", "--to", "hf", "--out", "copy"),
}


def split_header(folder):
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(folder, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(start + text + data)


def raw(header, length=None):
    return lambda folder: write(folder, header, length=length)


def entry(**changes):
    def craft(folder):
        header, data = split_header(folder)
        header["model.norm.weight"] |= changes
        write(folder, header, data)

    return craft


def renamed(folder):
    header, data = split_header(folder)
    header["../../norm"] = header.pop("model.norm.weight")
    write(folder, header, data)


def twice(folder):
    header, data = split_header(folder)
    again = json.dumps({"model.norm.weight": header["model.norm.weight"]})[1:]
    write(folder, (json.dumps(header)[:-1] + "," + again).encode(), data)


def huge_header(folder):
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 101_000_000) + b"{")
        file.truncate(101_000_008)


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(PICKLE)


def link_out(folder):
    shutil.move(folder / "model.safetensors", folder.parent / "outside")
    (folder / "model.safetensors").symlink_to(folder.parent / "outside")


def index(weight_map):
    def craft(folder):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return craft


WEIGHTS = {
    "empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "7 bytes": lambda folder: (folder / "model.safetensors").write_bytes(b"1234567"),
    "a header of 2**64 - 1 bytes": raw(b"{}", length=2**64 - 1),
    "a header of 101 MB": huge_header,
    "a header longer than the file": raw(b"{}", length=1000),
    "no JSON": raw(b"hello wo"),
    "no UTF-8": raw(b"\xff\xfe{}    "),
    "a list": raw([1]),
    "100,000 deep": raw(b'{"a":' * 100_000),
    "no tensors": raw({}),
    "a tensor twice": twice,
    "a name that climbs": renamed,
    "offsets beyond the end": entry(data_offsets=[0, 10**9]),
    "reversed offsets": entry(data_offsets=[100, 0]),
    "negative offsets": entry(data_offsets=[-4, 0]),
    "a shape that overflows": entry(shape=[2**32, 2**32]),
    "half a dimension": entry(shape=[1.5]),
    "an unknown dtype": entry(dtype="Q9"),
    "a pickle": pickled,
    "a pickle by another name": lambda folder: (folder / "model.safetensors").write_bytes(PICKLE),
    "a link out of the folder": link_out,
    "an index that climbs": index({"a": "../a.safetensors"}),
    "an index of /etc": index({"a": "/etc/passwd"}),
    "an index of nothing": index({"a": "b.safetensors"}),
    "an index of endless names": index({"a": "x" * 5000}),
    "an index with NUL": index({"a": "a\0b"}),
    "an index of half characters": index('{"weight_map": {"a": "\\ud800"}}'),
    "an index that is a list": index([1]),
    "an index 100,000 deep": index("[" * 100_000),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(model, case):
    WEIGHTS[case](model)
    assert_clear(here(*VERBS["generate"]), mentions=["model"])
    assert not (model.parent / "ran").exists()


def pretrained(model, **sections):
    """A recipe that trains on from the model's folder."""
    words = {
        "model": {"from": "model"},
        "data": {"path": "text", "sequence_length": 32},
        "train": {"max_steps": 2, "tokens_per_step": 64},
        **sections,
    }
    (model.parent / "pretrained.yaml").write_text(json.dumps(words))
    (model.parent / "text").mkdir()
    (model.parent / "text/some.txt").write_text("the cat sat on the mat. " * 50)
    return "pretrained.yaml"


@pytest.mark.parametrize("case", ["a pickle", "a link out of the folder", "an index of nothing"])
@pytest.mark.parametrize("words", [("plan",), ("train", "--dry-run")], ids=" ".join)
def test_a_plan_does_not_fit_whose_weights_training_would_refuse(model, case, words):
    name = pretrained(model)
    assert here(*words, name).code == 0
    WEIGHTS[case](model)
    assert_clear(here(*words, name), mentions=["model"])


def test_a_shape_alone_is_planned_and_said_to_lack_weights(model):
    name = pretrained(model)
    (model / "model.safetensors").unlink()
    told = here("plan", name)
    assert told.code == 0 and "no weights in" in told.err
    assert_clear(here("train", name), mentions=["model.safetensors"])


@pytest.mark.parametrize("verb", VERBS)
def test_weights_that_are_not_finite(model, verb):
    (model.parent / "some.txt").write_text("the cat sat")
    state = load_file(model / "model.safetensors")
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in state.items()}
    save_file(broken, model / "model.safetensors")
    assert_clear(here(*VERBS[verb]), mentions=["not finite" if verb != "eval" else "finite"])
    assert not (model.parent / "copy").exists()


CONFIGS = {
    "hidden_size": 10**12,
    "num_attention_heads": 0,
    "num_hidden_layers": -3,
    "vocab_size": 2.5,
    "head_dim": "x",
    "rope_theta": float("nan"),
    "rms_norm_eps": -1,
    "num_key_value_heads": 7,
    "intermediate_size": None,
    "max_position_embeddings": 10**30,
    "rope_scaling": {"rope_type": "yarn", "factor": 1e300},
    "tie_word_embeddings": "yes",
    "hidden_act": "eval",
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_config_of_absurd_values(model, key):
    stated = json.loads((model / "config.json").read_text())
    changed = {key: CONFIGS[key]}
    if key in stated.get("rope_parameters", {}):  # the one that is read, as in transformers
        changed = {"rope_parameters": stated["rope_parameters"] | changed}
    (model / "config.json").write_text(json.dumps(stated | changed))
    word = {"num_key_value_heads": "heads", "rope_scaling": "factor"}.get(key, key)
    assert_clear(here(*VERBS["generate"]), mentions=[word, "config.json"])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 100_000, '{"hidden_size": ' + "1" * 5000 + "}", "\ud800"],
    ids=range(6),
)
def test_a_config_that_is_none(model, text):
    (model / "config.json").write_text(text, errors="surrogatepass")
    assert_clear(here(*VERBS["generate"]), mentions=["config.json"])


def test_remote_code_named_by_a_config_does_not_run(model):
    (model / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    (model.parent / "some.txt").write_text("the cat sat")
    for name in ("config.json", "tokenizer_config.json"):
        stated = json.loads((model / name).read_text())
        classes = {"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}
        evil = {
            "auto_map": classes,
            "trust_remote_code": True,
            "_attn_implementation_internal": "evil/kernel",
        }
        (model / name).write_text(json.dumps(stated | evil))
    for words in VERBS.values():
        assert here(*words).code == 0
    assert not (model.parent / "ran").exists()
    assert "evil" not in (model.parent / "copy/config.json").read_text()
    assert "auto_map" not in (model.parent / "copy/tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "has remote code"),
        (
            {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "model_type": "mine"},
            "has remote code",
        ),
        ({"model_type": "mine"}, "unknown model_type (mine)"),
    ],
)
def test_what_a_model_is_taken_for_is_said_where_it_says_otherwise(model, changed, said):
    stated = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(stated | changed))
    told = " ".join(here("plan", pretrained(model), "-v").out.split())
    assert said in told and "loaded as LlamaForCausalLM" in told


def tokenizer(**changes):
    def craft(described):
        return described | changes

    return craft


def vocabulary(**tokens):
    def craft(described):
        described["model"]["vocab"] |= tokens
        return described

    return craft


def pattern(regex):
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer=split)


TOKENIZERS = {
    "an id twice": vocabulary(zzz=5),
    "a negative id": vocabulary(zzz=-5),
    "an id of 2**40": vocabulary(zzz=2**40),
    "half a character": vocabulary(**{"\ud800": 5}),
    "another kind of model": tokenizer(model={"type": "Evil", "vocab": {}}),
    "no vocabulary": tokenizer(model={}),
    "added tokens that are null": tokenizer(added_tokens=[None]),
    "added tokens that are a word": tokenizer(added_tokens="abc"),
    "added tokens of odd ids": tokenizer(added_tokens=[{"id": [], "content": {}}]),
    "a pattern that never ends": pattern("(a|a)*$"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(model, case):
    described = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZERS[case](described)))
    words = ("generate", "model", "--prompt", "a" * 40 + "b", "--max-new-tokens", "3")
    assert_clear(here(*words), mentions=["tokenizer"])


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"model": '], ids=range(4))
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_files_that_are_none(model, name, text):
    (model / name).write_text(text)
    assert_clear(here(*VERBS["generate"]), mentions=[name])


def test_padding_to_2_to_the_40_does_not_abort_the_process(model):
    described = json.loads((model / "tokenizer.json").read_text())
    described["padding"] = {
        "strategy": {"Fixed": 2**40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    (model / "tokenizer.json").write_text(json.dumps(described))
    assert here(*VERBS["generate"]).code == 0


def test_a_token_that_the_model_does_not_know(model):
    described = json.loads((model / "tokenizer.json").read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    described["added_tokens"].append({"id": 300, "content": "NEW", **plain})
    (model / "tokenizer.json").write_text(json.dumps(described))
    (model.parent / "some.txt").write_text("NEW")
    assert_clear(here("generate", "model", "--prompt", "NEW"), mentions=["300", "tokenizer"])
    assert_clear(here(*VERBS["eval"]), mentions=["300", "tokenizer"])


@pytest.mark.parametrize("flag", ["--temperature", "--top-p", "--min-p", "--repetition-penalty"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e-320"])
def test_odd_figures_to_draw_with(model, flag, value):
    drawn = here(*VERBS["generate"], flag, value)
    if drawn.code:
        assert_clear(drawn, code=2, mentions=[flag])
    else:
        assert value == "1e-320"


@pytest.mark.parametrize(
    "words",
    [
        ("export", "model", "--to", "hf", "--out", "model"),
        ("export", "model", "--to", "hf", "--out", "model/config.json/below"),
        ("eval", "model", "--data", "nowhere"),
        ("eval", "model"),
        ("generate", "model", "--prompt", "x" * 100),
        ("generate", "nowhere", "--prompt", "x"),
        ("generate", "model", "--prompts", "model/model.safetensors"),
        ("tokenizer", "inspect", "model/model.safetensors", "--text", "x"),
    ],
)
def test_words_that_mean_nothing(model, words):
    before = sorted(path.name for path in model.iterdir())
    refused = here(*words)
    assert_clear(refused, code=refused.code or 1)
    assert sorted(path.name for path in model.iterdir()) == before


def test_a_name_that_no_file_system_takes(model):
    refused = process("export", "model", "--to", "hf", "--out", "y" * 300, folder=model.parent)
    assert_clear(refused, mentions=["long"])
