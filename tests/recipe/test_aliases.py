"""What users of other programs type: the answer has the right key and value, and never a wrong one."""

import dataclasses
import json
import re
import tempfile
from functools import reduce
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel import yaml

from bloomery.cli import cli, main
from bloomery.core.errors import UserError
from bloomery.recipe import aliases
from bloomery.recipe.importing import import_recipe
from bloomery.recipe.load import load_recipe, load_text
from bloomery.recipe.schema import Recipe
from bloomery.recipe.tools import tools

BASE = "model: {preset: go-coder-tiny}\ndata: {path: corpus}\n"
GUESSES = [
    line.rpartition(" -> ")[::2]
    for line in Path(__file__).with_name("guesses.txt").read_text().splitlines()
    if " -> " in line and not line.startswith("#")
]


def message(*overrides, text=BASE):
    with pytest.raises(UserError) as caught:
        load_text(text, name="mine", source="mine.yaml", overrides=overrides)
    return caught.value


def answered(error):
    """The edits that an error proposes, and whether it answers at all."""
    text = f"{error.problem}\n{error.fix}"
    edits = re.findall(r"`([a-z_.]+(?:=[^`]*)?)`", " ".join(re.findall(r": use (.*)", text)))
    near = re.findall(r"[\w.]+", " ".join(re.findall(r"did you mean ([^?]+)\?", text)))
    near = [name for name in near if name != "or"]
    reason = re.search(r"`[^`]+`(?: \([^)]*\))?: (?!use )", text)
    return [edit.replace('"', "") for edit in edits], near, bool(reason)


def verdict(typed, expected):
    edits, near, reason = answered(message(typed))
    if expected == "none":  # several keys of that name are an answer, too
        return "wrong" if edits or len(near) == 1 else "right" if reason or near else "silent"
    wanted = expected.split("; ")
    keys = {edit.partition("=")[0] for edit in wanted}
    if near:
        word = typed.partition("=")[0]
        values = {f"{word}={one}" for one in near}
        return "right" if keys & set(near) or values & set(wanted) else "wrong"
    if {edit.partition("=")[0] for edit in edits} - keys - {key.partition(".")[0] for key in keys}:
        return "wrong"
    missing = [
        one
        for one in wanted
        if not any(edit == one or edit.partition("=")[0] == one for edit in edits)
    ]
    return "silent" if missing else "right"


def test_guesses_are_answered():
    judged = [(typed, expected, verdict(typed, expected)) for typed, expected in GUESSES]
    assert len(judged) >= 150
    assert [row for row in judged if row[2] == "wrong"] == []
    silent = [row for row in judged if row[2] == "silent"]
    assert len(silent) <= 0.05 * len(judged), silent


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("learning_rate: 1e-4\n", ["mine.yaml line 3"]),
        ("train:\n  num_train_epochs: 2\n", ["mine.yaml line 4"]),
        (
            "training_args:\n  max_steps: 10\n  bf16: true\n",
            ["mine.yaml line 4", "mine.yaml line 5"],
        ),
        ("adapter: {kind: lora, r: 8}\n", ["mine.yaml line 3"]),
        ("objective: {type: dpo, loss_type: ipo}\n", ["mine.yaml line 3"]),
    ],
)
def test_answers_name_the_line(text, places):
    """At the top, in a section, nested, and in a section that only another program has."""
    error = message(text=BASE + text)
    assert answered(error)[0]
    assert all(place in f"{error.problem} {error.where}" for place in places)


def test_the_answer_of_the_command_line():
    error = message("num_train_epochs=3")
    assert (error.problem, error.where) == ("no such key: num_train_epochs", "command line")
    assert error.fix == "`num_train_epochs` (Transformers): use `train.epochs=3`"


@pytest.mark.parametrize(
    ("words", "edit"),
    [
        (["--learning-rate", "1e-4"], "optimizer.learning_rate=1e-4"),
        (["--lora_r=8", "eval.every=none"], "adapter.rank=8"),
        (["--bf16"], "train.precision=bfloat16"),
    ],
)
def test_options_of_other_programs_are_answered(words, edit, capsys):
    with pytest.raises(SystemExit):
        main(["train", "demo", *words])
    assert f"use `{edit}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("ScheduleGPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved"),
        ("torch.distributed.pipelining:ScheduleInterleaved1F1B", "interleaved"),
    ],
)
def test_schedules_of_pytorch_have_a_name_here(theirs, ours):
    error = message(f"parallel.pipeline_schedule={theirs}")
    assert answered(error)[0] == [f"parallel.pipeline_schedule={ours}"]


def test_a_zero_bubble_schedule_is_refused_with_its_reason():
    assert "not supported: zero-bubble" in message("parallel.pipeline_schedule=ZBVZeroBubble").fix


def test_a_kind_is_found_under_another_name():
    assert answered(message(text=BASE + "objective: {type: dpo}\n"))[0] == ["objective.kind=dpo"]
    assert "ipo, simpo, orpo" in str(message(text=BASE + "objective: {kind: dpp}\n"))


def test_the_keys_of_a_section_are_listed_once():
    error = message(text=BASE + "train: {qqqq: 1, zzzz: 2}\n")
    assert str(error).count("max_grad_norm") == 1
    assert "\\n" not in str(error), "each mistake has a line of its own"


def test_claims_are_never_suggested():
    for word in (
        "tokens",
        "epochs",
        "duration",
        "memory",
        "perplexity",
        "tokens_per_second",
        "claim_tokens",
    ):
        edits, near, _ = answered(message(f"{word}=3"))
        assert not any(edit.startswith("claims") for edit in edits + near)


def every_row():
    for program, rows in aliases._table().items():
        if program == "families":
            continue
        for name, row in rows.items():
            for text in row.values() if isinstance(row, dict) else [row]:
                yield program, name, text


def test_the_table_names_real_keys():
    keys = {".".join(key) for key in aliases.known_keys()}
    entries = list(every_row())
    assert len([1 for program, *_ in entries if program != "values"]) >= 200
    written = re.compile(rf"\b((?:{'|'.join(Recipe.model_fields)})\.[a-z_.]*[a-z])\b")
    for program, name, text in entries:
        assert any(aliases._split(text)), name
        for key in [*re.findall(r"([a-z_.]+)=", text.partition("#")[0]), *written.findall(text)]:
            assert key in keys | {"adapter.method"} or key.endswith((".yaml", ".jsonl")), (
                program,
                name,
                key,
            )
    assert set(aliases._table()["values"]) <= keys


def test_values_of_the_table_are_accepted():
    for key, rows in aliases._table()["values"].items():
        for name in rows:
            for edit in (aliases._translated(f"{key}={name}") or ((), ""))[0]:
                assert aliases.accepted(edit), edit


def test_no_name_stands_twice_in_the_table():
    """Except where the kind of file decides: those of GRPOConfig may mean something else elsewhere."""
    table = {
        program: rows
        for program, rows in aliases._table().items()
        if program not in ("values", "families", aliases.ROLLOUTS)
    }
    names = [aliases._normal(name) for rows in table.values() for name in rows]
    assert sorted({name for name in names if names.count(name) > 1}) == []


FOREIGN = Path(__file__).parent / "foreign"
IMPORTED = {
    "axolotl_qlora.yml": (
        "Axolotl",
        {
            "model.from_": "Qwen/Qwen2.5-1.5B-Instruct",
            "data.format": "messages",
            "data.columns": {"messages": "dialog"},
            "data.validation": "2%",
            "data.sequence_length": 2048,
            "data.packing": True,
            "objective.kind": "sft",
            "adapter.kind": "lora",
            "adapter.rank": 32,
            "adapter.alpha": 64.0,
            "adapter.target_modules": ["all-linear"],
            "quantize.kind": "nf4",
            "optimizer.state_dtype": "int8",
            "optimizer.paged": True,
            "optimizer.learning_rate": 2e-4,
            "optimizer.weight_decay": 0.0,
            "optimizer.betas": (0.9, 0.999),
            "train.epochs": 3.0,
            "train.batch_size": 16,
            "train.micro_batch_size": 2,
            "train.precision": "auto",
            "train.activation_checkpointing": "full",
            "checkpoint.keep": 2,
            "logging.trackers": ["wandb"],
        },
        {
            "strict",
            "output_dir",
            "tf32",
            "eval_sample_packing",
            "gradient_checkpointing_kwargs",
            "special_tokens",
        },
    ),
    "axolotl_dpo.yml": (
        "Axolotl",
        {
            "objective.kind": "dpo",
            "objective.beta": 0.2,
            "adapter.use_rslora": True,
            "train.max_steps": 600,
            "train.epochs": None,
            "train.batch_size": 4,
            "train.offload_activations": True,
            "train.seed": 7,
            "train.max_grad_norm": 0.5,
            "optimizer.schedule": "constant",
            "data.chat.template": "llama3",
        },
        {"num_epochs", "plugins", "liger_rope", "some_key_of_a_later_version", "model_type"},
    ),
    "llama_factory_lora_sft.yaml": (
        "LLaMA-Factory",
        {
            "objective.kind": "sft",
            "adapter.kind": "lora",
            "adapter.rank": 16,
            "adapter.alpha": 32.0,
            "data.packing": False,
            "data.validation": "10%",
            "data.chat.template": "qwen",
            "train.batch_size": 16,
            "train.precision": "bfloat16",
            "train.epochs": 3.0,
            "logging.trackers": ["tensorboard"],
        },
        {
            "max_samples",
            "plot_loss",
            "output_dir",
            "overwrite_cache",
            "do_train",
            "per_device_eval_batch_size",
        },
    ),
    "llama_factory_full_pt.yaml": (
        "LLaMA-Factory",
        {
            "objective.kind": "pretrain",
            "adapter.kind": "none",
            "train.precision": "bfloat16-pure",
            "train.max_steps": 2000,
            "train.micro_batch_size": 8,
            "train.batch_size": 8,
            "data.path": "/data/notes",
            "optimizer.state_dtype": "int8",
            "optimizer.schedule": "linear",
            "train.activation_checkpointing": "none",
        },
        {"use_badam", "badam_mode", "swanlab_project", "lora_rank", "template"},
    ),
    "trl_sft.yaml": (
        "TRL",
        {
            "model.from_": "Qwen/Qwen2.5-0.5B",
            "data.path": "hub:trl-lib/Capybara",
            "objective.kind": "sft",
            "adapter.kind": "lora",
            "adapter.rank": 32,
            "adapter.alpha": 16.0,
            "adapter.dropout": 0.05,
            "adapter.target_modules": ["q_proj", "v_proj"],
            "data.packing": True,
            "data.sequence_length": 1024,
            "train.batch_size": 16,
            "train.micro_batch_size": 2,
            "optimizer.schedule": "linear",
            "train.activation_checkpointing": "full",
            "optimizer.learning_rate": 2e-4,
        },
        {"eos_token", "output_dir", "dataset_config"},
    ),
    "trl_grpo.yaml": (
        "TRL",
        {
            "objective.kind": "grpo",
            "objective.num_generations": 8,
            "objective.loss_type": "dapo",
            "objective.epsilon_high": 0.28,
            "objective.num_iterations": 2,
            "objective.steps_per_generation": 2,
            "objective.scale_rewards": "none",
            "objective.temperature": 0.9,
            "objective.top_k": None,
            "objective.importance_sampling_mode": "token_truncate",
            "objective.importance_sampling_clip_max": 2.0,
            "objective.max_completion_length": 256,
            "data.sequence_length": 768,
            "train.batch_size": 16,
            "train.micro_batch_size": 4,
            "adapter.rank": 32,
            "logging.completions": "shown",
        },
        {"use_vllm", "vllm_mode", "delta", "top_k", "reward_weights"},
    ),
    "axolotl_grpo.yml": (
        "Axolotl",
        {
            "objective.kind": "grpo",
            "objective.beta": 0.001,
            "objective.num_generations": 4,
            "objective.loss_type": "dr_grpo",
            "objective.epsilon": 0.15,
            "objective.steps_per_generation": 2,
            "objective.max_completion_length": 128,
            "train.batch_size": 8,
        },
        {"trl.use_vllm", "trl.vllm_mode", "trl.sync_ref_model", "trl.reward_weights"},
    ),
    "trl_dpo.yaml": (
        "TRL",
        {
            "objective.kind": "dpo",
            "objective.beta": 0.2,
            "adapter.kind": "none",
            "optimizer.learning_rate": 1e-6,
            "train.micro_batch_size": 8,
            "train.batch_size": 8,
            "train.epochs": 3.0,
            "data.sequence_length": 1024,  # 512 of each side
        },
        {"lora_r"},
    ),
}


@pytest.mark.parametrize("name", IMPORTED)
def test_files_of_other_programs_become_recipes(name, tmp_path):
    program, expected, left = IMPORTED[name]
    text, found = import_recipe(FOREIGN / name)
    assert found == program
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    loaded = load_recipe(recipe).recipe
    assert {key: reduce(getattr, key.split("."), loaded) for key in expected} == expected
    source = yaml.YAML(typ="safe").load((FOREIGN / name).read_text())
    for key, value in source.items():
        assert re.search(rf"# {key}\b|^#   {key}(\.\w+)? |[ ,]{key}\b", text, re.MULTILINE), (
            f"{key}: {value} is lost"
        )
    assert left <= {line.split()[1] for line in text.splitlines() if line.startswith("#   ")}


NESTED = """
base_model: Qwen/Qwen2.5-0.5B
rope_scaling: {type: yarn, factor: 4.0, original_max_position_embeddings: 8192, mscale: 1}
datasets:
  - path: org/chats
    revision: main
    type: chat_template
    split: train
    roles_to_train: [user, assistant]
    train_on_eos: none
    train_on_eot: turn
    data_files: [x.json]
    ds_type: json
    field_messages: dialog
    message_property_mappings: {role: from, content: value, tools: t}
    roles: {user: [human], assistant: [gpt]}
    later: {deep: {deeper: 1}}
sequence_len: 4096
num_epochs: 2
fsdp_config: {offload_params: true, state: {kind: full}}
rl: ebft
trl: {num_generations: 4, reward_funcs: [f]}
tensor_parallel_size: 2
context_parallel_size: 1
sequence_parallel_degree: 4
float8: true
"""


def imported(text, folder):
    """The text of the recipe, and the recipe."""
    (folder / "theirs.yml").write_text(text)
    written, _ = import_recipe(folder / "theirs.yml")
    (folder / "mine.yaml").write_text(written)
    return written, load_recipe(folder / "mine.yaml").recipe


def test_no_nested_key_is_lost(tmp_path):
    text, recipe = imported(NESTED, tmp_path)
    source = yaml.YAML(typ="safe").load(NESTED)
    for path, _ in aliases.leaves(
        {f"datasets[{n}]": one for n, one in enumerate(source.pop("datasets"))} | source
    ):
        assert re.search(rf"[# ,]{re.escape('.'.join(path))}\b", text), path
    assert (
        recipe.model.rope_scaling.kind == "yarn"
        and recipe.model.rope_scaling.original_max_positions == 8192
    )
    assert recipe.data.path == "hub:org/chats@main" and recipe.data.chat.train_on == "all"
    assert recipe.data.columns == {"messages": "dialog", "role": "from", "content": "value"}
    assert "rl=ebft is not supported" in text and recipe.objective.kind == "sft"
    assert recipe.parallel.pipeline == "auto"


def test_a_context_that_an_adapter_cannot_store_is_listed(tmp_path):
    text, recipe = imported(NESTED + "adapter: lora\n", tmp_path)
    assert (
        recipe.adapter.kind == "lora"
        and recipe.model.rope_scaling is None
        and recipe.model.max_positions is None
    )
    assert (
        len(
            re.findall(r"^#   rope_scaling\.\w+ +not supported with an adapter", text, re.MULTILINE)
        )
        == 3
    )


def test_what_training_refuses_is_never_the_answer():
    """Of a key or value that no table may lead to: `train` would refuse it next."""
    refused = re.compile(r"parallel\.tensor=")
    for program, name, text in every_row():
        # `plan` takes them
        assert program == "recipe version 1" or not refused.search(text), (program, name)
    for name in ("remax", "ebft", "online_dpo"):
        assert aliases.look_up(("rl",), name, {}, program="Axolotl").edits == ()
    for value in ("float8", "fp8", "mxfp8"):
        answer = aliases.look_up_value(("train", "precision"), value)
        assert answer.edits == () and "not supported" in answer.reason


NAMES = sorted({name for program, name, _ in every_row() if program in tools() and "." not in name})
LEAVES = st.one_of(
    st.booleans(),
    st.integers(-2, 2**40),
    st.floats(allow_nan=False),
    st.sampled_from(
        [
            "",
            None,
            "auto",
            "yarn",
            "none",
            "grpo",
            "lora",
            "a/b",
            "a: b",
            "train",
            "3%",
            "[",
            "#",
            "é\n",
            "1e5",
            "{x}",
            "@x",
        ]
    ),
)
DEEP = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*NAMES[::9], "type", "factor", "path", "kind", "new_key"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
FILES = {
    "Axolotl": {"base_model": "a/b", "sequence_len": 512, "micro_batch_size": 1},
    "LLaMA-Factory": {
        "model_name_or_path": "a/b",
        "stage": "sft",
        "finetuning_type": "lora",
        "cutoff_len": 512,
    },
    "TRL": {
        "model_name_or_path": "a/b",
        "dataset_name": "c/d",
        "use_peft": True,
        "max_length": 512,
    },
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    program=st.sampled_from(sorted(FILES)),
    more=st.dictionaries(st.sampled_from(NAMES), DEEP, max_size=8),
)
def test_every_import_loads_and_names_every_key(program, more):
    with tempfile.TemporaryDirectory() as folder:
        data = {**more, **FILES[program]}
        try:
            text, _ = imported(json.dumps(data), Path(folder))
        except UserError as error:
            assert "not a file of" in error.problem, error
            return
        for path, _ in aliases.leaves(data):
            assert re.search(rf"[# ,]{re.escape('.'.join(path))}\b", text), (path, text)


# PPOConfig of TRL 1.4 with its defaults: TRL 1.16 has no such trainer.
PPO_CONFIG = """
num_mini_batches: 1
total_episodes: 10000
local_rollout_forward_batch_size: 64
num_sample_generations: 10
response_length: 53
stop_token: eos
stop_token_id: 2
temperature: 0.7
missing_eos_penalty: 1.0
sft_model_path: a/b
reward_model_path: org/reward-model
model_adapter_name: policy
ref_adapter_name: reference
num_ppo_epochs: 4
whiten_rewards: false
kl_coef: 0.05
kl_estimator: k3
cliprange: 0.2
vf_coef: 0.1
cliprange_value: 0.2
gamma: 1.0
lam: 0.95
ds3_gather_for_generation: true
num_total_batches: 100
local_batch_size: 8
local_mini_batch_size: 8
mini_batch_size: 8
"""


def test_a_file_of_trls_ppo_trainer_becomes_a_recipe(tmp_path):
    config = dict(yaml.YAML(typ="safe").load(PPO_CONFIG))
    for name, value in config.items():
        answer = aliases.look_up((name,), value, {}, program=aliases.ROLLOUTS)
        assert answer is not None and not answer.guess and (answer.edits or answer.reason), name
    more = "dataset_name: c/d\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
    more += "use_peft: true\n"
    text, recipe = imported(PPO_CONFIG + more, tmp_path)
    for name in config:
        assert re.search(rf"[# ,]{name}\b", text), name
    ours = recipe.objective
    assert (ours.kind, ours.num_iterations, ours.max_completion_length) == ("ppo", 4, 53)
    same = {"temperature", "missing_eos_penalty", "whiten_rewards", "kl_coef", "kl_estimator"}
    same |= {"cliprange", "cliprange_value", "vf_coef", "gamma", "lam"}
    assert {name: getattr(ours, name) for name in same} == {name: config[name] for name in same}
    assert recipe.rewards[0].model == "org/reward-model"
    assert (recipe.model.from_, recipe.train.batch_size) == ("a/b", 8)
    assert recipe.optimizer.learning_rate == 3e-6


def test_rewards_of_trl_are_functions_verifiers_and_models(tmp_path):
    _, recipe = imported((FOREIGN / "trl_grpo.yaml").read_text(), tmp_path)
    verifier, function, model = recipe.rewards
    assert (verifier.verifier, verifier.column, verifier.weight) == ("math", "solution", 1.0)
    assert (function.python, function.weight) == (f"{tmp_path}/my_rewards.py:short", 0.5)
    assert (model.model, model.weight) == ("org/reward-model", 0.25)


@pytest.mark.parametrize(
    ("micro_batches", "accumulation", "expected"),
    [(8, 4, 2), (4, 4, 1), (2, 4, 1), (1, 1, 1), (6, 4, None)],
)
def test_micro_batches_of_a_rollout_become_optimizer_steps(
    tmp_path, micro_batches, accumulation, expected
):
    keys = f"steps_per_generation: {micro_batches}\ngradient_accumulation_steps: {accumulation}\n"
    text, recipe = imported(
        f"model_name_or_path: a/b\ndataset_name: c/d\nnum_generations: 4\n{keys}", tmp_path
    )
    assert recipe.objective.steps_per_generation == (expected or 1)
    assert ("no whole number" in text) == (expected is None)
    size = micro_batches * 8  # of TRL's default micro-batch
    keys = keys.replace(f"steps_per_generation: {micro_batches}", f"generation_batch_size: {size}")
    _, same = imported(
        f"model_name_or_path: a/b\ndataset_name: c/d\nnum_generations: 4\n{keys}", tmp_path
    )
    assert same.objective.steps_per_generation == recipe.objective.steps_per_generation


@pytest.mark.parametrize(
    ("key", "value", "edit"),
    [
        ("trl.epsilon", 0.2, "objective.epsilon=0.2"),
        ("trl.temperature", 0.7, "objective.temperature=0.7"),
        ("trl.num_iterations", 2, "objective.num_iterations=2"),
        ("epsilon", 1e-6, "optimizer.eps=1e-06"),
        ("num_iterations", 1000, "train.max_steps=1000"),
    ],
)
def test_a_key_of_the_trl_section_is_one_of_completions(key, value, edit):
    """Elsewhere the same name means another key."""
    assert aliases.look_up(tuple(key.split(".")), value, {}).edits == (edit,)


@pytest.mark.parametrize("kind", ["GRPOConfig", "RLOOConfig"])
def test_every_field_of_trls_configs_is_answered(kind, tmp_path):
    """Of the installed TRL: each is a key of the recipe, or has a reason that is no guess."""
    trl = pytest.importorskip("trl")
    config = {
        field.name: value
        for field in dataclasses.fields(getattr(trl, kind))
        for value in [field.default if field.default is not dataclasses.MISSING else 1]
    }
    for name, default in config.items():
        value = 1 if default in (None, "", [], {}) else default
        answer = aliases.look_up((name,), value, {}, program=aliases.ROLLOUTS)
        assert answer is not None and not answer.guess, name
        assert answer.edits or answer.reason, name
    # All of them in one file.
    given = {name: value for name, value in config.items() if value not in (None, "", [], {})}
    given |= {"model_name_or_path": "a/b", "dataset_name": "c/d", "loss_type": "dapo"}
    text, recipe = imported(json.dumps(given, default=str), tmp_path)
    for name in given:
        assert re.search(rf"[# ,]{name}\b", text), name
    ours = recipe.objective
    names = {"num_generations", "max_completion_length", "temperature", "top_p", "beta", "epsilon"}
    names |= {"num_iterations", "mask_truncated_completions"} & given.keys()
    assert {name: getattr(ours, name) for name in names} == {name: given[name] for name in names}


def test_datasets_that_are_a_mapping_are_named_as_they_are_written(tmp_path):
    data = {**FILES["Axolotl"], "datasets": {"activation_dtype": False}}
    text, _ = imported(json.dumps(data), tmp_path)
    assert re.search(r"[# ,]datasets\.activation_dtype\b", text), text


def test_what_is_no_training_file_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(BASE)
    with pytest.raises(UserError, match="not a file of") as caught:
        import_recipe(path)
    assert caught.value.code == 2


def test_import_prints_or_writes(tmp_path, monkeypatch):
    out = tmp_path / "mine.yaml"
    printed = CliRunner().invoke(
        cli, ["recipes", "import", str(FOREIGN / "axolotl_qlora.yml")], catch_exceptions=False
    )
    written = CliRunner().invoke(
        cli, ["recipes", "import", str(FOREIGN / "axolotl_qlora.yml"), "--out", str(out)]
    )
    assert (printed.exit_code, written.exit_code) == (0, 0)
    assert out.read_text() == printed.stdout
    with pytest.raises(UserError, match="nothing was overwritten"):
        cli.main(
            ["recipes", "import", str(FOREIGN / "axolotl_qlora.yml"), "--out", str(out)],
            standalone_mode=False,
        )


OF_THE_GUIDES = """
output_dir overwrite_output_dir per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size
learning_rate lr_scheduler_type warmup_steps weight_decay num_train_epochs max_steps fp16 bf16 fp16_opt_level
logging_steps eval_steps save_steps save_total_limit adam_beta1 adam_beta2 adam_epsilon max_grad_norm
dataloader_num_workers dataloader_pin_memory report_to dataloader_prefetch_factor load_best_model_at_end
evaluation_strategy logging_dir optim gradient_checkpointing resume_from_checkpoint torch_dtype attn_implementation
use_4bit use_8bit batch_size max_sequence_length lora_rank lora_alpha target_modules vocab_size n_positions n_embd
n_layer n_head n_inner activation_function resid_pdrop embd_pdrop attn_pdrop layer_norm_epsilon initializer_range
bos_token_id eos_token_id pad_token_id mixed_precision distributed_type num_processes gpu_ids compute_environment
mlm padding truncation model_max_length dataset_config dataset_proj models_dir model_name safe_load log_peak_memory
chat_template train_epochs n_microbatches num_stages
"""


@pytest.mark.parametrize("name", OF_THE_GUIDES.split())
def test_every_setting_of_the_guides_is_answered_as_an_option(name, capsys):
    """click would guess at an option of its own: --lora-rank is not --dry-run."""
    with pytest.raises(SystemExit):
        main(["train", "demo", f"--{name.replace('_', '-')}", "1"])
    message = capsys.readouterr().err
    answer = aliases.look_up((name,), 1, {})
    assert f"fix:   {answer}" in message and "Did you mean" not in message


def test_all_options_of_other_programs_are_answered_at_once(capsys):
    line = "--models-dir m --lr 1e-4 --dry-run --report-to wandb tensorboard --nosuch=3 --fp16"
    with pytest.raises(SystemExit):
        main(["train", "demo", *line.split(), "train.seed=1", "--", "--nnodes", "2"])
    message = capsys.readouterr().err
    assert "'--models-dir', '--lr', '--report-to', '--nosuch', '--fp16'" in message
    for edit in (
        "optimizer.learning_rate=1e-4",
        "logging.trackers=[wandb, tensorboard]",
        "train.precision=float16",
    ):
        assert f"use `{edit}`" in message
    assert "--nosuch: bloomery train --help" in message and "nnodes" not in message


def test_a_misspelled_option_of_the_command_is_found(capsys):
    with pytest.raises(SystemExit):
        main(["train", "demo", "--dry-rn"])
    assert "--dry-run" in capsys.readouterr().err


def test_every_key_of_the_pages_that_users_come_from_is_answered():
    """docs/guides: the settings in the five documents."""
    answers = {name: aliases.look_up((name,), 0.1, {}) for name in OF_THE_GUIDES.split()}
    assert [name for name, answer in answers.items() if answer is None or answer.guess] == []
    assert answers["resid_pdrop"].edits == ("model.dropout=0.1",)


def _values_of_other_tools():
    """Every value that the libraries and tools name for a key of kinds."""
    training_args = pytest.importorskip("transformers.training_args")
    trainer_utils = pytest.importorskip("transformers.trainer_utils")
    peft = pytest.importorskip("peft")
    yield "optimizer.kind", [name.value for name in training_args.OptimizerNames]
    # Axolotl's, utils/schemas/enums.py, and names of papers
    axolotl = (
        "optimi_adamw ao_adamw_4bit ao_adamw_8bit ao_adamw_fp8 adopt_adamw came_pytorch muon dion"
    )
    axolotl += " sinkgd flash_adamw flash_adam flash_sgd flash_sgdw flash_lion q_galore_adamw8bit"
    axolotl += " galore apollo badam adam_mini lisa sophia prodigy soap shampoo lamb adan"
    yield "optimizer.kind", axolotl.split()
    yield "optimizer.schedule", [name.value for name in trainer_utils.SchedulerType]
    yield "adapter.kind", [name.value.lower() for name in peft.PeftType]
    yield "quantize.kind", "qat hqq eetq aqlm gptq awq fp8 mxfp4 nvfp4 torchao bnb int4".split()
    losses = "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired"
    losses += " discopop apo_zero apo_down kto_pair orpo simpo cpo gkd nash_md xpo online_dpo"
    losses += (
        " dft eaft asft rm prm pt sft embedding seq_cls dapo dr_grpo bnpo cispo sapo vespo gspo"
    )
    yield "objective.kind", losses.split()
    kinds = "pretrain sft dpo ipo simpo orpo kto reward distill grpo rloo ppo nll sigmoid hinge"
    yield "objective.loss", kinds.split()


def test_every_value_of_other_tools_is_answered():
    text = BASE.replace("{preset: go-coder-tiny}", "{from: a/b}") + "objective: sft\n"
    for key, names in _values_of_other_tools():
        for name in names:
            if aliases.accepted(
                f"{key}={name}", *["objective.kind=sft"] * (key != "objective.kind")
            ):
                continue
            error = message(f"{key}={name}", text=text)
            edits, near, reason = answered(error)
            assert edits or reason, (key, name, error.fix)
            assert not near, (key, name)


def test_methods_of_peft_that_are_answers_train_here():
    methods = pytest.importorskip("bloomery.model.adapters.settings").METHODS
    for _, name, text in every_row():
        for method in re.findall(r"adapter\.method=(\w+)", text.partition("#")[0]):
            assert method.upper() in methods, name


@pytest.mark.parametrize("kind", ["dpo", "simpo", "kto", "grpo"])
@pytest.mark.parametrize("objective", ["", "objective: sft\n", "objective: {kind: pretrain}\n"])
def test_a_loss_that_is_an_objective_names_the_kind(kind, objective):
    error = message(f"objective.loss={kind}", text=BASE + objective)
    assert f"objective.kind={kind}" in error.fix or f"objective.kind={kind}" in error.problem
