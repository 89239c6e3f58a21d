"""Recipes: what is read, what is refused, and where each value came from."""

import shlex
from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.core.units import Duration
from bloomery.recipe.aliases import all_keys
from bloomery.recipe.load import dump_recipe, json_schema, load_recipe, packaged
from bloomery.recipe.schema import Recipe
from bloomery.recipe.yaml import read_yaml

SMALL = "model: {preset: go-coder-tiny}\ndata: {path: corpus}\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refused(source, overrides=()):
    with pytest.raises(UserError) as caught:
        load_recipe(source, overrides)
    assert caught.value.code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", packaged())
def test_packaged_recipes_load_and_survive_a_dump(name, tmp_path):
    loaded = load_recipe(name)
    assert loaded.name == name
    copy = tmp_path / "recipe.yaml"
    copy.write_text(dump_recipe(loaded))
    again = load_recipe(copy)
    assert again.recipe == loaded.recipe
    assert again.name == name


def test_the_recipe_of_everything_names_every_key():
    text = packaged()["everything"].read_text()
    missing = [".".join(path) for path in all_keys() if f"{path[-1]}:" not in text]
    assert missing == []


def test_the_recipe_of_everything_shows_the_defaults():
    loaded = load_recipe("everything").recipe
    for section in (
        "optimizer",
        "train",
        "parallel",
        "checkpoint",
        "objective",
        "adapter",
        "quantize",
    ):
        default = type(getattr(loaded, section))()
        assert getattr(loaded, section) == default, section


def test_the_go_coder_says_what_its_guide_says():
    recipe = load_recipe("go-coder-125m").recipe
    assert recipe.train.length == Duration(195_000, "steps")
    assert recipe.train.tokens_per_step == 16 * 1024
    assert recipe.claims.tokens == (10e9, 10e9)
    assert recipe.claims.memory == (10e9, 11e9)
    assert recipe.claims.duration == (5 * 86400, 7 * 86400)
    assert recipe.claims.perplexity[Duration(195_000, "steps")] == (8, 15)
    assert recipe.tokenizer.train is not None
    assert recipe.tokenizer.train.special_tokens == ["<PR_TITLE>", "<PR_BODY>"]


def test_yaml_is_version_1_2(write):
    loaded = load_recipe(
        write(SMALL + "optimizer: {learning_rate: 1e-4}\nsample: {prompts: [on, no, 2024-01-01]}\n")
    )
    assert loaded.recipe.optimizer.learning_rate == 1e-4
    assert loaded.recipe.sample.prompts == ["on", "no", "2024-01-01"]


@pytest.mark.parametrize("ends", ["\r\n", "\n"])
def test_byte_order_mark_and_line_ends_do_not_matter(tmp_path, ends):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", ends).encode())
    assert load_recipe(path).recipe.model.preset == "go-coder-tiny"


def test_all_mistakes_at_once_each_with_its_line(write):
    text = "model: {preset: go-coder-tyny}\ndata: {path: y}\ntrain:\n  max_step: 3\n  max_grad_norm: -1\noptimizr: {}\n"
    said = refused(write(text))
    assert "4 mistakes" in said
    assert "line 1: model.preset: must be go-coder-tiny, go-coder-small or go-coder-medium" in said
    assert "did you mean go-coder-tiny?" in said
    assert "line 4: train.max_step: no such key; did you mean train.max_steps?" in said
    assert "line 5: train.max_grad_norm: must be above 0, not -1" in said
    assert "line 6: optimizr: no such key; did you mean optimizer?" in said


def test_a_key_of_another_section_is_found(write):
    assert "use `optimizer.learning_rate=1`" in refused(
        write(SMALL + "train: {learning_rate: 1}\n")
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {compile: on}", "true or false, not 'on'"),
        ("train: {precision: half}", "not 'half'"),
        ("train: {max_steps: soon}", "'soon' is not a number of steps; write 2000"),
        ("train: {epochs: two}", "'two' is not a number of epochs; write 3 or 0.5"),
        (
            "checkpoint: {every: often}",
            "'often' is not a number with a unit; write 2000 steps, 10B tokens, 3 epochs",
        ),
        (
            "data: {sequence_length: 128k}",
            "'128k' may be 128000 or 131072 tokens; write the number",
        ),
        (
            "data: {sequence_length: long}",
            "'long' is not a number of tokens; write a whole number such as 1024",
        ),
        ("train: {max_steps: 0}", "must be above 0"),
        ("train: {max_steps: 0.0000001}", "must be above 0"),
        ("train: {max_tokens: 0.4}", "must be above 0"),
        ("train: {max_steps: 20%}", "is not a number of steps"),
        ("train: {max_steps: 1.5}", "1.5 is not a whole number of steps; write 1 or 2 steps"),
        ("checkpoint: {every: 0.5}", "0.5 is not a whole number of steps; write 1 step"),
        ("train: {seed: true}", "a whole number, not true"),
        ('optimizer: {learning_rate: "5e-4"}', "remove the quotes"),
        ("optimizer: {learning_rate: 1e}", "shows every key"),
        (
            "train: {tokens_per_step: 4Ki}",
            "'4Ki' is not a count; write a number such as 195000, 1.5M or 10B, or auto",
        ),
        ("optimizer: {learning_rate: .nan}", "not a usable number"),
        ("optimizer: {learning_rate: 1e400}", "not a usable number"),
        ("optimizer: {betas: [0.9]}", "a value is missing in this list"),
        ("optimizer: {betas: [0.9, 0.95, 0.99]}", "a list of 2 values"),
        ("optimizer: {schedule: {kind: wsd, decy: 10%}}", "did you mean optimizer.schedule.decay?"),
        ("optimizer: {schedule: cosin}", "did you mean cosine?"),
        ("model: {family: lama}", "did you mean llama?"),
        ("adapter: {kind: lorra}", "did you mean lora?"),
        ("adapter: {rank: 3}", "adapter.kind: must be none, lora, dora or peft"),
        ("adapter: {target_modules: [q_proj]}", "adapter.kind=lora"),
        ("eval: 3", "must be keys with values, not 3"),
        ("logging: {trackers: [tensorbord]}", "did you mean tensorboard?"),
        ("claims: {tokens: 7 to 5 B}", "write the smaller value first"),
        ("claims: {duration: 100 steps}", "is not a time"),
        ("name: ../escape", "letters, digits, dots and dashes"),
        ("train: {activation_checkpointing: every-0}", "every-N"),
        ("train: {max_grad_norm: 1}\ntrain: {max_grad_norm: 2}", "duplicate key"),
        ("train: !!python/object/apply:os.system [ls]", "is not allowed"),
        ("extends: 3", "must be the name"),
        ("logging: {token: abc}", "secrets do not belong"),
        (
            "sample: {prompts: [hf_abcdefghijklmnopqrstuvwxyzABCDEFGH]}",
            "looks like an access token",
        ),
        ("data: &a [*a]", "grows without end"),
    ],
)
def test_refused(write, text, said):
    section = text.partition(":")[0]
    model, data = SMALL.splitlines(keepends=True)
    base = {"model": data, "data": model}.get(section, SMALL)
    assert said in refused(write(base + text + "\n"))


def test_a_word_that_ends_like_a_token_begins_is_no_secret(write):
    load_recipe(write(SMALL), ["data.path=/data/disk_that_is_almost_full"])


def test_a_secret_is_not_repeated_in_the_error(write):
    secret = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"
    assert secret not in refused(write(SMALL + f"logging: {{token: {secret}}}\n"))
    assert secret not in refused(write(SMALL), [f"data.path={secret}"])


@pytest.mark.parametrize(
    "path", ["/data/hf_datasets_processed_go_code_v2", "task-management-of-many-small-things"]
)
def test_ordinary_names_are_no_secrets(write, path):
    assert load_recipe(write(SMALL), [f"data.path={path}"]).recipe.data.path.endswith(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model:\n\tpreset: x\n", "line 2"),
        ("data: {path: x, glob: *.go}\n", "needs quotes"),
        ("a: b: c\n", "second colon"),
        ("", "holds no keys"),
        ("- 1\n", "made of sections"),
        ("%YAML 1.1\n---\na: 1\n", "YAML 1.2"),
        ("---\na: 1\n---\nb: 1\n", "one document"),
        ("a: " + "[" * 3000, "32 levels"),
        ("a: x" + "y" * 2_000_000, "larger than 1 MB"),
        ("a: &a 1\nb: [" + ", ".join(["*a"] * 70) + "]\n", "64 aliases"),
    ],
)
def test_what_is_no_recipe_is_one_sentence(write, text, said):
    assert said in refused(write(text))


def test_a_bomb_of_aliases_is_refused_before_it_unfolds(write):
    rows = ["a0: &a0 [x, x, x, x, x, x, x]"]
    rows += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 7)}]" for level in range(1, 9)]
    assert "grows without end" in refused(write("\n".join(rows)))


def test_other_encodings_and_missing_files(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("model: {preset: é}".encode("latin-1"))
    assert "not UTF-8" in refused(path)
    assert "is a folder" in refused(tmp_path)
    assert "did you mean go-coder-tiny?" in refused("go-coder-tinny")


def test_overrides_are_yaml_and_win(write):
    path = write(SMALL)
    overrides = [
        "train.epochs=2",
        "data.glob=*.go",
        "optimizer.betas=[0.8, 0.9]",
        "claims.tokens=10B",
    ]
    loaded = load_recipe(path, overrides)
    assert loaded.recipe.train.length == Duration(2, "epochs")
    assert loaded.recipe.data.glob == "*.go"
    assert loaded.recipe.optimizer.betas == (0.8, 0.9)
    assert loaded.provenance["train.epochs"] == "command line"
    assert loaded.provenance["train.max_grad_norm"] == "default"
    assert loaded.provenance["model.preset"].endswith("mine.yaml line 1")


def test_a_wrong_override_is_named(write):
    assert "train.max_step" in refused(write(SMALL), ["train.max_step=3"])
    assert "command line" in refused(write(SMALL), ["train.max_step=3"])
    assert "never closed" in refused(write(SMALL), ['data.path="x']) or "not YAML" in refused(
        write(SMALL), ['data.path="x']
    )


def test_one_way_to_say_it_replaces_the_other(write):
    recipe = load_recipe(
        write(SMALL), ["data.builtin=stdlib-code", "model.from=someone/model"]
    ).recipe
    assert (recipe.data.path, recipe.data.builtin) == (None, "stdlib-code")
    assert (recipe.model.preset, recipe.model.from_) == (None, "someone/model")
    assert "only one of them" in refused(write("model: {preset: x, family: y}\ndata: {path: x}\n"))
    assert "needs one of path, builtin, sources" in refused(
        write("model: {preset: go-coder-tiny}\n")
    )


def test_extends_a_file_and_a_packaged_recipe(write, tmp_path):
    write(SMALL + "train: {seed: 1, max_grad_norm: 2.0}\n", "base.yaml")
    loaded = load_recipe(write("extends: base.yaml\ntrain: {seed: 7}\n", "child.yaml"))
    assert (loaded.recipe.train.seed, loaded.recipe.train.max_grad_norm, loaded.name) == (
        7,
        2.0,
        "child",
    )
    assert loaded.provenance["train.max_grad_norm"].endswith("base.yaml line 3")
    assert (
        load_recipe(write("extends: go-coder-125m\n"))
        .provenance["train.max_steps"]
        .startswith("packaged recipe")
    )
    assert load_recipe(write("extends: go-coder-125m\nclaims: {}\n")).recipe.claims.tokens is None


def test_circles_and_missing_parents_are_refused(write):
    write("extends: b.yaml\n", "a.yaml")
    path = write("extends: a.yaml\n", "b.yaml")
    assert "in a circle" in refused(path)
    assert "line 1" in refused(write("extends: nothing.yaml\n"))


def test_another_kind_starts_over(write):
    write(SMALL + "adapter: {kind: lora, rank: 8}\n", "base.yaml")
    assert (
        load_recipe(write("extends: base.yaml\nadapter: {kind: none}\n")).recipe.adapter.kind
        == "none"
    )


def test_paths_start_where_they_are_written(write, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "my-model").mkdir()
    text = (
        "model: {from: my-model}\ntokenizer: {from: same}\ndata: {path: corpus, validation: 5%}\n"
    )
    recipe = load_recipe(write(text)).recipe
    assert recipe.data.path == str(tmp_path / "corpus")
    assert recipe.model.from_ == str(tmp_path / "my-model")
    assert (recipe.tokenizer.from_, recipe.data.validation) == ("same", "5%")
    assert load_recipe(write(text), ["data.path=corpus"]).recipe.data.path == str(
        elsewhere / "corpus"
    )
    assert load_recipe("go-coder-tiny").recipe.data.path == str(elsewhere / "corpus")
    assert load_recipe(write(text), ["data.path=~/code"]).recipe.data.path == str(
        Path.home() / "code"
    )
    sources = "model: {preset: go-coder-tiny}\ndata: {sources: [{path: one}, {path: two}], validation: held-out}\n"
    data = load_recipe(write(sources)).recipe.data
    assert [source.path for source in data.sources] == [
        str(tmp_path / "one"),
        str(tmp_path / "two"),
    ]
    # a split of the data set, where nothing of that name is here
    assert data.validation == "held-out"
    (tmp_path / "held-out").mkdir()
    assert load_recipe(write(sources)).recipe.data.validation == str(tmp_path / "held-out")


def test_a_model_that_is_no_folder_is_a_name_on_the_hub(write):
    recipe = load_recipe(write("model: {from: Qwen/Qwen2.5-1.5B}\ndata: {path: x}\n")).recipe
    assert recipe.model.from_ == "Qwen/Qwen2.5-1.5B"


def test_every_leaf_has_a_provenance():
    loaded = load_recipe("demo")
    keys = {".".join(path) for path in all_keys()}
    assert {key for key in loaded.provenance if key not in keys} == set()
    assert {"train.seed", "optimizer.kind", "adapter.kind", "sample.prompts"} <= set(
        loaded.provenance
    )


@pytest.mark.parametrize("word", ["none", "null"])
def test_no_clipping_is_none_or_null(word, write):
    assert (
        load_recipe(write(SMALL + f"train: {{max_grad_norm: {word}}}\n")).recipe.train.max_grad_norm
        is None
    )
    assert (
        load_recipe(write(SMALL), [f"train.max_grad_norm={word}"]).recipe.train.max_grad_norm
        is None
    )
    allowed = json_schema()["$defs"]["Train"]["properties"]["max_grad_norm"]["anyOf"]
    assert {"const": "none", "type": "string"} in allowed


def test_paged_is_another_name_of_offload(write, tmp_path):
    loaded = load_recipe(write(SMALL + "optimizer: {paged: true}\n"))
    assert loaded.recipe.optimizer.offload
    assert not load_recipe(write(SMALL), ["optimizer.paged=false"]).recipe.optimizer.offload
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "again.yaml").recipe == loaded.recipe


def test_the_schema_knows_the_keys_and_refuses_others():
    schema = json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
    assert "from" in schema["$defs"]["Model"]["properties"]


def test_a_misspelt_file_gets_its_neighbour(tmp_path, monkeypatch):
    (tmp_path / "bad.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    for name, meant in (
        ("bda.yaml", "bad.yaml"),
        ("go-coder-tinny", "go-coder-tiny"),
        # The number of a version is no suffix of a file.
        ("llama3.1-8b-lra", "llama3.1-8b-lora"),
        ("qwen2.5-7b-lora", "qwen2.5-7b-qlora"),
        ("qwen2.5-7b-qlra.yaml", "qwen2.5-7b-qlora"),
        ("bad", "bad.yaml"),
    ):
        with pytest.raises(UserError, match="there is no recipe") as caught:
            load_recipe(name)
        assert caught.value.fix == f"did you mean {meant}?"
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "nosuch.yaml")
    assert "bad.yaml" not in caught.value.fix, "a common folder makes no two names alike"


def test_a_hook_is_looked_for_where_the_recipe_lies(write, tmp_path):
    """It runs in the run's folder, where the documented ./hook.sh does not lie."""
    path = write(
        SMALL
        + "logging: {trackers: [{command: ./hook.sh --fast ./my file}, {command: curl -d @- x/y}]}\n"
    )
    first, second = (sink.command for sink in load_recipe(path).recipe.logging.trackers)
    assert shlex.split(first) == [str(tmp_path / "hook.sh"), "--fast", str(tmp_path / "my"), "file"]
    assert second == "curl -d @- x/y"
    typed = (
        load_recipe(path, ["logging.trackers=[{command: hooks/tell.sh}]"])
        .recipe.logging.trackers[0]
        .command
    )
    assert typed == str(Path.cwd() / "hooks/tell.sh")


def test_one_key_sets_the_length(write):
    assert load_recipe(write(SMALL)).recipe.train.length == Duration(1, "epochs")
    lengths = {
        "epochs: 0.5": Duration(0.5, "epochs"),
        "epochs: 3 epochs": Duration(3, "epochs"),
        "max_steps: 1.5k": Duration(1500, "steps"),
        "max_tokens: 10B tokens": Duration(1e10, "tokens"),
        "max_tokens: 2M": Duration(2e6, "tokens"),
        "max_time: 8h": Duration(28800, "seconds"),
    }
    for text, length in lengths.items():
        path = write(SMALL + f"train: {{{text}}}\n")
        assert load_recipe(path).recipe.train.length == length
        loaded = load_recipe(path, ["train.max_steps=7"])
        assert loaded.recipe.train.length == Duration(7, "steps")
        (path.parent / "copy.yaml").write_text(dump_recipe(loaded))
        assert load_recipe(path.parent / "copy.yaml").recipe == loaded.recipe
    assert "epochs and max_steps" in refused(write(SMALL + "train: {epochs: 1, max_steps: 2}\n"))
    assert "train.max_tokens" in refused(write(SMALL + "train: {max_tokens: 3 epochs}\n"))
    assert "is not a time" in refused(write(SMALL + "train: {max_time: 3 epochs}\n"))


def test_a_batch_is_given_in_tokens_or_in_sequences(write):
    path = write(SMALL + "train: {tokens_per_step: 4096}\n")
    assert load_recipe(path).recipe.tokens_per_step == 4096
    loaded = load_recipe(path, ["train.batch_size=16"])
    assert loaded.recipe.tokens_per_step == 16 * 1024
    # a run's recipe.yaml, which training reads
    (path.parent / "copy.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(path.parent / "copy.yaml").recipe == loaded.recipe
    assert (
        load_recipe(
            path, ["train.batch_size=16", "train.tokens_per_step=auto"]
        ).recipe.tokens_per_step
        == "auto"
    )
    assert "tokens_per_step and batch_size" in refused(
        write(SMALL + "train: {tokens_per_step: 4096, batch_size: 4}\n")
    )


def test_a_kind_stands_for_its_section(write):
    text = (
        SMALL
        + "adapter: lora\nobjective: dpo\noptimizer: muon\nquantize: nf4\ntokenizer: {train: unigram}\n"
    )
    recipe = load_recipe(write(text)).recipe
    kinds = (
        recipe.adapter.kind,
        recipe.objective.kind,
        recipe.optimizer.kind,
        recipe.quantize.kind,
    )
    assert kinds == ("lora", "dpo", "muon", "nf4") and recipe.tokenizer.train.kind == "unigram"
    changed = load_recipe(
        write(text), ["adapter.rank=4", "objective.beta=0.5", "quantize=int8"]
    ).recipe
    assert (changed.adapter.rank, changed.objective.beta, changed.quantize.kind) == (4, 0.5, "int8")
    assert load_recipe(write(SMALL), ["adapter=dora"]).recipe.adapter.kind == "dora"
    assert load_recipe("llama3.1-8b-lora", ["adapter=none"]).recipe.adapter.kind == "none"
    without = load_recipe("llama3.1-8b-lora", ["adapter=null", "quantize=null"]).recipe
    assert (without.adapter.kind, without.quantize.kind) == ("none", "none")
    assert "did you mean lora?" in refused(write(SMALL + "adapter: lorra\n"))


def test_short_spellings(write):
    text = "train: {precision: bf16, activation_checkpointing: true}\nlogging: {trackers: wandb}\n"
    recipe = load_recipe(
        write(SMALL + text + "adapter: {kind: lora, target_modules: all-linear}\n")
    ).recipe
    assert (recipe.train.precision, recipe.train.activation_checkpointing) == ("bfloat16", "full")
    assert recipe.logging.trackers == ["wandb"] and recipe.adapter.target_modules == ["all-linear"]
    hook = load_recipe(
        write(SMALL), ["logging.trackers={command: ./hook.sh}"]
    ).recipe.logging.trackers
    assert hook[0].command == str(Path.cwd() / "hook.sh")
    layouts = {
        "packing: false": "padded",
        "document_masking: false": "fixed",
        "packing: true": "packed",
    }
    for text, layout in layouts.items():
        path = write(f"model: {{preset: go-coder-tiny}}\ndata: {{path: x, {text}}}\n")
        assert load_recipe(path).recipe.data.layout == layout


def test_org_and_name_are_a_data_set_on_the_hub_where_no_such_folder_is(write, tmp_path):
    path = write("model: {preset: go-coder-tiny}\ndata: {path: org/rows}\n")
    assert load_recipe(path).recipe.data.path == "hub:org/rows"
    assert load_recipe(path, ["data.path=corpora/rows.jsonl"]).recipe.data.path.endswith(
        "/corpora/rows.jsonl"
    )
    (tmp_path / "org").mkdir()
    assert load_recipe(path).recipe.data.path == str(tmp_path / "org/rows")


def test_another_path_forgets_how_the_files_of_the_first_are_read():
    data = load_recipe("llama2-7b-lora-qa", ["data.path=mine"]).recipe.data
    assert (data.glob, data.format, data.columns) == (None, "auto", {})
    data = load_recipe("llama2-7b-lora-qa", ["data.format=alpaca", "data.path=mine"]).recipe.data
    assert (data.glob, data.format) == (None, "alpaca")


def test_a_text_that_is_read_again_is_not_the_one_that_somebody_changed():
    first, second = (read_yaml("a: {b: [1]}", source="a.yaml", folder=Path()) for _ in range(2))
    first.data["a"]["b"].append(2)
    first.origins.clear()
    third = read_yaml("a: {b: [1]}", source="a.yaml", folder=Path())
    assert second == third and third.data == {"a": {"b": [1]}}


def test_a_micro_batch_of_the_recipe_yields_to_a_batch_size_that_it_does_not_divide(tmp_path):
    packaged = "qwen2.5-1.5b-lora-tiny"
    assert load_recipe(packaged).recipe.train.micro_batch_size == 4
    assert load_recipe(packaged, ["train.batch_size=2"]).recipe.train.micro_batch_size == "auto"
    assert load_recipe(packaged, ["train.batch_size=8"]).recipe.train.micro_batch_size == 4
    typed = ["train.micro_batch_size=4", "train.batch_size=2"]
    for words in (typed, typed[::-1]):  # what was typed is refused, and not replaced
        assert load_recipe(packaged, words).recipe.train.micro_batch_size == 4
    (tmp_path / "mine.yaml").write_text(f"extends: {packaged}\ntrain: {{batch_size: 6}}\n")
    assert load_recipe(tmp_path / "mine.yaml").recipe.train.micro_batch_size == "auto"


SECTIONS = [
    name for name in Recipe.model_fields if name not in ("version", "extends", "name", "rewards")
]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("value", ["2", "[1]", "some-text"])
def test_a_value_in_the_place_of_a_section_is_answered_with_more_than_its_name(section, value):
    with pytest.raises(UserError) as refused:
        load_recipe("demo", [f"{section}={value}"])
    fix = refused.value.fix
    assert fix and not fix.endswith(f"use `{section}`"), fix
    assert f"{section} or" not in fix and f"or {section}?" not in fix, fix


@pytest.mark.parametrize("key", ["replicate", "shard", "pipeline", "context", "pipeline_chunks"])
@pytest.mark.parametrize("number", [2**17 + 1, 300_000_000, 2**63, 10**20])
def test_more_devices_than_there_are_on_earth_are_refused_at_once(key, number):
    with pytest.raises(UserError, match="at most 131072"):
        load_recipe("demo", [f"parallel.{key}={number}"])
