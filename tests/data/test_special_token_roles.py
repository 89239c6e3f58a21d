"""What a tokenizer adds to a text, and which of its tokens have a role: as transformers says for the same folder."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bloomery.data.chat.render import Renderer, continuation
from bloomery.data.examples import Example, Message
from bloomery.data.prepare.prepare import prepare
from bloomery.data.prepare.split import size_warnings
from bloomery.data.shards import open_split, read_manifest
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.facts.families import FAMILIES
from bloomery.recipe.schema import TrainTokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: E402

NAMES = ["<unk>", "<s>", "</s>", "<pad>", "<|endoftext|>", "<bos>", "<eos>", "[gMASK]", "<sop>"]
TEXTS = ["The quick brown fox", " leading space", "x", "<|endoftext|>y</s>", "größer\n"]


def _template(single: str) -> Any:
    names = [(name, NAMES.index(name)) for name in single.split() if name in NAMES]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=names)


POST_PROCESSORS = {
    "SmolLM2 and Qwen, none": None,
    "GPT-2": processors.ByteLevel(trim_offsets=True),
    "Llama 2": _template("<s> $A"),
    "Llama 3": processors.Sequence([processors.ByteLevel(trim_offsets=True), _template("<s> $A")]),
    "Gemma": _template("<bos> $A"),
    "GLM-4": _template("[gMASK] <sop> $A"),
    "OLMo, EOS at the end": _template("$A <|endoftext|>"),
}


@pytest.fixture(scope="module")
def library() -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=NAMES,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox leads"] * 4, trainer)
    return tokenizer


def folder_of(
    folder: Path,
    library: Any,
    config: dict[str, Any] | None,
    *,
    post_processor: Any = None,
    model_type: str | None = None,
    special_tokens_map: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    description = json.loads(library.to_str())
    if post_processor is not None:
        description["post_processor"] = json.loads(post_processor.__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps(description))
    files = {"tokenizer_config.json": config, "special_tokens_map.json": special_tokens_map}
    files["config.json"] = None if model_type is None else {"model_type": model_type}
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def roles_of_transformers(folder: Path) -> tuple[int | None, ...]:
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = [
        library_tokenizer.bos_token,
        library_tokenizer.eos_token,
        library_tokenizer.pad_token,
        library_tokenizer.unk_token,
    ]
    # A role that names no token of the vocabulary gets a new id there, which no model has a row for.
    return tuple(NAMES.index(name) if name in NAMES else None for name in names)


def roles_of_tokenizer(folder: Path) -> tuple[int | None, ...]:
    tokenizer = load_tokenizer(folder)
    return tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id


@pytest.mark.parametrize("kind", POST_PROCESSORS)
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_a_prompt_gets_what_transformers_adds_before_it(tmp_path, library, kind, add_bos):
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    folder = folder_of(tmp_path, library, config, post_processor=POST_PROCESSORS[kind])
    tokenizer = load_tokenizer(folder)
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = library_tokenizer.encode(text)
        assert (
            [*tokenizer.encode_prompt(text), *tokenizer.suffix]
            == tokenizer.encode_whole(text)
            == ids
        )
    # Prompts without a chat template, of chats and of rollouts, begin alike.
    chat_ids = continuation(tokenizer)([Message("user", TEXTS[0])])
    with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
        (rollout,) = renderer.encode(Example("a.jsonl:1", "prompt", TEXTS[0], ()))
    assert chat_ids == rollout.ids == tokenizer.encode_prompt(TEXTS[0])
    # A saved tokenizer says the same.
    tokenizer.save(tmp_path / "saved")
    saved_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [saved_tokenizer.encode(text) for text in TEXTS] == [
        library_tokenizer.encode(text) for text in TEXTS
    ]


def test_a_prompt_that_begins_with_bos_gets_no_second_one(tmp_path, library):
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = load_tokenizer(
        folder_of(tmp_path, library, config, post_processor=POST_PROCESSORS["Llama 2"])
    )
    assert (
        tokenizer.encode_prompt("<s>a")
        == tokenizer.encode_prompt("a")
        == [1, *tokenizer.encode("a")]
    )


CONFIGS: dict[str, dict[str, Any] | None] = {
    "no file": None,
    "empty": {},
    "EOS alone, as transformers saves a tokenizer of `tokenizers`": {"eos_token": "<|endoftext|>"},
    "all": dict(zip(["unk_token", "bos_token", "eos_token", "pad_token"], NAMES, strict=False)),
    "null": {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": None},
    "as settings": {
        "bos_token": {"__type": "AddedToken", "content": "<bos>", "lstrip": False, "special": True},
        "eos_token": "<eos>",
    },
    "not in the vocabulary": {"bos_token": "<|startoftext|>", "eos_token": "</s>"},
    "added tokens listed": {
        "bos_token": "<s>",
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
    },
    "extra tokens": {"eos_token": "</s>", "extra_special_tokens": ["<bos>", "<sop>"]},
    "named extra tokens": {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<sop>"}},
}
SPECIAL_TOKENS_MAPS = {
    "no map": None,
    "a map": {"bos_token": "<bos>", "unk_token": {"content": "<unk>", "lstrip": False}},
    "a map of null": {"bos_token": None},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("map_name", SPECIAL_TOKENS_MAPS)
def test_roles_are_those_of_transformers(tmp_path, library, config, map_name):
    folder = folder_of(
        tmp_path, library, CONFIGS[config], special_tokens_map=SPECIAL_TOKENS_MAPS[map_name]
    )
    assert roles_of_tokenizer(folder) == roles_of_transformers(folder)


CLASSES = [
    None, "PreTrainedTokenizerFast", "GPT2TokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GemmaTokenizer",
    "CohereTokenizerFast", "GPTNeoXTokenizerFast",
]  # fmt: skip
MODELS = [None, "llama", "gpt2", "gpt_neox", "qwen2", "qwen3", "gemma2", "mistral", "olmo2", "phi3"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tokenizer_class", "model_type"), itertools.product(CLASSES, MODELS))
def test_roles_that_a_class_has_by_default(tmp_path, library, tokenizer_class, model_type):
    for number, config in enumerate([{}, {"eos_token": "</s>", "bos_token": None}]):
        class_setting = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
        folder = folder_of(
            tmp_path / str(number), library, {**config, **class_setting}, model_type=model_type
        )
        assert roles_of_tokenizer(folder) == roles_of_transformers(folder)


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_the_configuration_decides_the_prefix_of_a_sentencepiece_model(tmp_path, add_bos):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(["hello world, the river is cold"] * 40))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, model_type="bpe",
    )  # fmt: skip
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    begins_with_bos = library_tokenizer.encode("hello")[:1] == [library_tokenizer.bos_token_id]
    assert (tokenizer.prefix == [tokenizer.bos_id]) == begins_with_bos == (add_bos is True)
    # So does the tokenizer.json that is written next to it.
    tokenizer.save(tmp_path / "saved")
    saved_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved_tokenizer.encode("hello") == tokenizer.encode_prompt("hello")


@pytest.mark.parametrize(
    ("config", "added_ids"), [({}, ([], [])), ({"eos_token": "</s>"}, ([], [2]))]
)
def test_plain_text_gets_the_tokens_that_have_a_role(
    tmp_path, library, recipe_of, config, added_ids
):
    """A tokenizer without BOS or EOS adds none to documents, whatever its vocabulary holds, and `prepare` says so."""
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the quick brown fox {number}")
    folder = folder_of(tmp_path / "tokenizer", library, config)
    recipe = recipe_of(
        tokenizer={"from": str(folder)}, path=str(tmp_path / "texts"), validation="0%"
    )
    prepare(recipe, tmp_path / "prepared")
    manifest = read_manifest(tmp_path / "prepared")
    assert (manifest.bos_id, manifest.eos_id) == (None, added_ids[1][0] if added_ids[1] else None)
    document = open_split(tmp_path / "prepared", "train", manifest).document(0).tolist()
    text_ids = transformers.AutoTokenizer.from_pretrained(folder).encode("the quick brown fox 0")
    assert document == [*added_ids[0], *text_ids, *added_ids[1]]
    warnings = [*size_warnings(manifest, sequence_length=16)]
    assert any("no EOS token" in warning for warning in warnings) == (not added_ids[1])


# transformers 5 replaces how tokenizers of these split texts by how Qwen's do (docs/how-to/prepare-data.md).
SPLIT_AS_QWENS = {"qwen2", "qwen3_5_moe_text"}


def test_transformers_splits_a_trained_tokenizers_texts_as_we_do_for_all_families_but_two(tmp_path):
    texts = ["from 0 to 6", "from 10 to 16", "def f(x): return 6"] * 20
    trained = train_tokenizer(iter(texts), TrainTokenizer(vocab_size=300), tmp_path)
    expected = trained.encode("from 0 to 6")
    others = set[str]()
    for family in FAMILIES:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        if theirs.encode("from 0 to 6", add_special_tokens=False) != expected:
            others.add(family)
    assert others == SPLIT_AS_QWENS
