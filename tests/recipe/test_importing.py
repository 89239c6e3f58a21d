"""Files of other tools mean the same as recipes: the expected values are those of the tools' own sources."""

from functools import reduce

import pytest

from bloomery.core.errors import UserError
from bloomery.recipe.importing import import_recipe
from bloomery.recipe.load import load_recipe

LF = "model_name_or_path: a/b\ndataset: pairs\n"
AX = "base_model: a/b\nmicro_batch_size: 2\nlearning_rate: 1e-5\n"
CHATS = "datasets: [{path: chats.jsonl, type: chat_template}]\n"
TRL = "model_name_or_path: a/b\ndataset_name: c/d\n"


def imported(text, folder, name="theirs.yml"):
    """The text of the recipe, the recipe, and the tool."""
    (folder / name).write_text(text)
    written, tool = import_recipe(folder / name)
    (folder / "mine.yaml").write_text(written)
    return written, load_recipe(folder / "mine.yaml").recipe, tool


def values(recipe, keys):
    return {key: reduce(getattr, key.split("."), recipe) for key in keys}


def listed(text):
    """The keys without a counterpart, with their reasons."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    return {line.split()[0]: line.partition(" ")[2].strip() for line in lines}


CASES = {
    # LLaMA-Factory: hparams/finetuning_args.py, data_args.py, parser.py
    "lf_simpo": (
        LF + "stage: dpo\npref_loss: simpo\n",
        {"objective.kind": "simpo", "objective.beta": 0.1, "objective.gamma": 0.5},
        {},
    ),
    "lf_simpo_with_numbers": (
        LF + "pref_loss: simpo\nstage: dpo\npref_beta: 2.5\nsimpo_gamma: 1.2\n",
        {"objective.kind": "simpo", "objective.beta": 2.5, "objective.gamma": 1.2},
        {},
    ),
    "lf_orpo": (LF + "stage: dpo\npref_loss: orpo\n", {"objective.kind": "orpo"}, {}),
    "lf_ipo": (
        LF + "stage: dpo\npref_loss: ipo\ndpo_label_smoothing: 0.1\n",
        {"objective.kind": "ipo"},
        {"dpo_label_smoothing"},
    ),
    "lf_dpo": (
        LF + "stage: dpo\ndpo_label_smoothing: 0.1\ncutoff_len: 512\n",
        {
            "objective.kind": "dpo",
            "objective.label_smoothing": 0.1,
            "data.sequence_length": 1024,
            "data.packing": False,
        },
        {},
    ),
    "lf_hinge": (LF + "stage: dpo\npref_loss: hinge\n", {"objective.kind": "dpo"}, {"pref_loss"}),
    "lf_kto_pair": (
        LF + "stage: dpo\npref_loss: kto_pair\n",
        {"objective.kind": "dpo"},
        {"pref_loss"},
    ),
    "lf_kto": (
        LF + "stage: kto\nkto_rejected_weight: 1.3\n",
        {
            "objective.kind": "kto",
            "objective.undesirable_weight": 1.3,
            "data.sequence_length": 2048,
        },
        {},
    ),
    "lf_loss_of_another_stage": (
        LF + "stage: sft\npref_loss: simpo\npref_beta: 0.2\n",
        {"objective.kind": "sft"},
        {"pref_loss", "pref_beta"},
    ),
    "lf_lora_by_default": (
        LF + "stage: sft\n",
        {
            "adapter.kind": "lora",
            "adapter.rank": 8,
            "adapter.alpha": 16.0,
            "adapter.target_modules": ["all-linear"],
            "data.sequence_length": 2048,
            "data.packing": False,
            "data.chat.train_on": "assistant",
            "data.validation": "0%",
            "train.batch_size": 8,
            "train.epochs": 3.0,
            "train.max_grad_norm": 1.0,
            "train.seed": 42,
            "quantize.kind": "none",
            "optimizer.learning_rate": 5e-5,
            "optimizer.schedule": "linear",
            "optimizer.betas": (0.9, 0.999),
            "eval.every": "none",
            "train.activation_checkpointing": "full",
        },
        {},
    ),
    "lf_alpha_of_the_rank": (
        LF + "lora_rank: 32\nuse_dora: true\n",
        {"adapter.kind": "dora", "adapter.rank": 32, "adapter.alpha": 64.0},
        {},
    ),
    "lf_full": (
        LF + "finetuning_type: full\nlora_rank: 8\n",
        {"adapter.kind": "none", "train.precision": "float32"},
        {"lora_rank"},
    ),
    "lf_freeze": (LF + "finetuning_type: freeze\n", {"adapter.kind": "none"}, {"finetuning_type"}),
    "lf_pretrain_packs": (
        LF + "stage: pt\nfinetuning_type: full\n",
        {"objective.kind": "pretrain", "data.packing": True, "data.document_masking": False},
        {},
    ),
    "lf_pretrain_without_packing": (
        LF + "stage: pt\npacking: false\n",
        {"data.packing": False},
        {},
    ),
    "lf_packing": (
        LF + "packing: true\n",
        {"data.packing": True, "data.document_masking": False},
        {},
    ),
    "lf_neat_packing": (
        LF + "packing: false\nneat_packing: true\n",
        {"data.packing": True, "data.document_masking": True},
        {},
    ),
    "lf_mask_history": (LF + "mask_history: true\n", {"data.chat.train_on": "last"}, {}),
    "lf_train_on_prompt": (LF + "train_on_prompt: true\n", {"data.chat.train_on": "all"}, {}),
    "lf_evaluation": (
        LF + "val_size: 0.1\neval_strategy: steps\neval_steps: 100\n",
        {"data.validation": "10%"},
        {},
    ),
    "lf_no_evaluation": (
        LF + "val_size: 0.1\neval_steps: 100\n",
        {"eval.every": "none"},
        {"eval_steps"},
    ),
    "lf_eval_dataset": (LF + "eval_dataset: held\n", {}, {}),
    "lf_quantized": (
        LF + "quantization_bit: 4\ndouble_quantization: false\n",
        {"quantize.kind": "nf4", "quantize.double_quant": False},
        {},
    ),
    "lf_pure": (
        LF + "bf16: true\npure_bf16: true\n",
        {"train.precision": "bfloat16-pure"},
        {},
    ),
    # Axolotl: utils/schemas, core/builders, prompt_strategies
    "axolotl_defaults": (
        AX + CHATS,
        {
            "adapter.kind": "none",
            "data.sequence_length": 512,
            "data.packing": False,
            "data.chat.train_on": "assistant",
            "train.epochs": 1.0,
            "train.batch_size": 2,
            "train.precision": "auto",
            "optimizer.schedule": "cosine",
            "optimizer.weight_decay": 0.0,
            "checkpoint.keep": 4,
            "eval.every": "none",
        },
        {},
    ),
    "axolotl_simpo": (
        AX + "rl: simpo\nsequence_len: 512\n" + CHATS,
        {
            "objective.kind": "simpo",
            "objective.beta": 0.1,
            "objective.gamma": 0.5,
            "data.sequence_length": 1024,
        },
        {"cpo_alpha"},
    ),
    "axolotl_pure_simpo": (
        AX + "rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 1.0\ncpo_alpha: 0\n" + CHATS,
        {"objective.beta": 2.0, "objective.gamma": 1.0},
        {},
    ),
    "axolotl_orpo": (
        AX + "rl: orpo\norpo_alpha: 0.3\n" + CHATS,
        {"objective.kind": "orpo", "objective.beta": 0.3},
        {},
    ),
    "axolotl_ipo": (
        AX + "rl: dpo\ndpo_loss_type: [ipo]\n" + CHATS,
        {"objective.kind": "ipo"},
        {},
    ),
    "axolotl_hinge": (
        AX + "rl: dpo\ndpo_loss_type: [hinge]\n" + CHATS,
        {"objective.kind": "dpo"},
        {"dpo_loss_type"},
    ),
    "axolotl_kto": (
        AX + "rl: kto\nsequence_len: 512\ndatasets: [{path: k.jsonl, type: chatml.intel}]\n",
        {
            "objective.kind": "kto",
            "data.format": "kto",
            "data.columns": {"prompt": "question"},
            "data.sequence_length": 512,
            "data.chat.template": "chatml",
        },
        {},
    ),
    "axolotl_dpo_default_fields": (
        AX + "rl: dpo\ndatasets: [{path: p.jsonl, type: chat_template.default}]\n",
        {
            "data.format": "preference",
            "data.columns": {"prompt": "messages"},
            "objective.beta": 0.1,
        },
        {},
    ),
    "axolotl_dpo_fields": (
        AX
        + "rl: dpo\ndatasets:\n  - {path: p.jsonl, type: chat_template.default, field_messages: talk,"
        + " field_chosen: good, field_rejected: bad}\n",
        {"data.columns": {"prompt": "talk", "chosen": "good", "rejected": "bad"}},
        {},
    ),
    "axolotl_dpo_argilla": (
        AX + "rl: dpo\ndatasets: [{path: p.jsonl, type: chat_template.argilla_chat}]\n",
        {"data.format": "preference", "data.columns": {}},
        {},
    ),
    "axolotl_dpo_intel": (
        AX + "rl: dpo\ndatasets: [{path: p.jsonl, type: chatml.intel}]\n",
        {"data.columns": {"prompt": "question"}, "data.chat.template": "chatml"},
        {},
    ),
    "axolotl_reward": (
        AX
        + "reward_model: true\nsequence_len: 2048\n"
        + "datasets: [{path: p.jsonl, type: bradley_terry.chat_template}]\n",
        {
            "objective.kind": "reward",
            "data.format": "preference",
            "data.columns": {"prompt": "input"},
            "data.sequence_length": 4096,
        },
        {},
    ),
    "axolotl_label_smoothing": (
        AX + "rl: dpo\ndpo_label_smoothing: 0.1\n" + CHATS,
        {"objective.label_smoothing": 0.0},
        {"dpo_label_smoothing"},
    ),
    "axolotl_pretraining": (
        AX + "pretraining_dataset: [{path: c/d}]\nmax_steps: 100\n",
        {"objective.kind": "pretrain", "data.packing": True, "data.document_masking": False},
        {},
    ),
    "axolotl_count": (
        AX + "val_set_size: 200\nevals_per_epoch: 4\n" + CHATS,
        {"data.validation": "1%"},
        {"val_set_size"},
    ),
    "axolotl_warmup_steps": (
        AX + "warmup_ratio: 0.1\nwarmup_steps: 20\n" + CHATS,
        {},
        {"warmup_ratio"},
    ),
    "axolotl_dora": (
        AX + "adapter: lora\npeft_use_dora: true\nlora_r: 4\n" + CHATS,
        {"adapter.kind": "dora", "adapter.rank": 4, "adapter.alpha": 8.0},
        {},
    ),
    "axolotl_batch_size_of_earlier_versions": (
        AX + "batch_size: 16\n" + CHATS,
        {"train.batch_size": 16, "train.micro_batch_size": 2},
        {},
    ),
    # TRL: trainer/*_config.py, scripts/utils.py
    "trl_sft": (
        TRL,
        {
            "objective.kind": "sft",
            "data.chat.train_on": "all",
            "data.sequence_length": 1024,
            "data.packing": False,
            "adapter.kind": "none",
            "optimizer.learning_rate": 2e-5,
            "train.batch_size": 8,
            "train.seed": 42,
            "eval.every": "none",
        },
        {},
    ),
    "trl_assistant": (
        TRL + "assistant_only_loss: true\n",
        {"data.chat.train_on": "assistant"},
        {},
    ),
    "trl_completion": (
        TRL + "completion_only_loss: true\n",
        {"data.chat.train_on": "assistant"},
        {},
    ),
    "trl_not_completion": (
        TRL + "completion_only_loss: false\n",
        {"data.chat.train_on": "all"},
        {},
    ),
    "trl_packing": (
        TRL + "packing: true\n",
        {"data.packing": True, "data.document_masking": True},
        {},
    ),
    "trl_packing_wrapped": (
        TRL + "packing: true\npacking_strategy: wrapped\n",
        {"data.packing": True, "data.document_masking": False},
        {},
    ),
    "trl_dpo": (
        TRL + "beta: 0.3\nmax_length: 256\nlabel_smoothing: 0.1\nloss_type: sigmoid\n",
        {
            "objective.kind": "dpo",
            "objective.beta": 0.3,
            "objective.label_smoothing": 0.0,
            "data.sequence_length": 512,
            "optimizer.learning_rate": 1e-6,
        },
        {"label_smoothing"},
    ),
    "trl_dpo_hinge": (TRL + "loss_type: [hinge]\n", {"objective.kind": "dpo"}, {"loss_type"}),
    "trl_dpo_mixed": (TRL + "loss_type: [sigmoid, sft]\n", {}, {"loss_type"}),
    "trl_ipo": (TRL + "loss_type: ipo\n", {"objective.kind": "ipo", "objective.beta": 0.1}, {}),
    "trl_simpo": (
        TRL + "loss_type: simpo\nmax_length: 512\n",
        {
            "objective.kind": "simpo",
            "objective.beta": 0.1,
            "objective.gamma": 0.5,
            "data.sequence_length": 1024,
        },
        {"cpo_alpha"},
    ),
    "trl_kto": (
        TRL + "desirable_weight: 1.5\nmax_length: 512\n",
        {"objective.kind": "kto", "data.sequence_length": 512, "objective.desirable_weight": 1.5},
        {},
    ),
    "trl_reward": (
        TRL + "center_rewards_coefficient: 0.01\nmax_length: 512\n",
        {
            "objective.kind": "reward",
            "data.sequence_length": 1024,
            "optimizer.learning_rate": 1e-4,
        },
        {"center_rewards_coefficient"},
    ),
    "trl_dora": (
        TRL + "use_peft: true\nuse_dora: true\n",
        {"adapter.kind": "dora", "adapter.rank": 16, "adapter.dropout": 0.05},
        {},
    ),
    "trl_qlora": (
        TRL + "use_peft: true\nload_in_4bit: true\n",
        {"quantize.kind": "nf4", "quantize.double_quant": False},
        {},
    ),
    "trl_evaluation": (
        TRL + "eval_strategy: epoch\n",
        {"data.validation": "test"},
        {},
    ),
    "trl_split": (
        TRL + "dataset_train_split: train_sft\n",
        {"data.glob": "*train_sft*"},
        {},
    ),
    "trl_datasets": (
        "model_name_or_path: a/b\ndatasets: [{path: c/d, split: train_x, name: sub}]\nuse_peft: true\n"
        "test_split_size: 0.1\n",
        {"data.path": "hub:c/d", "data.glob": "*train_x*", "data.validation": "0%"},
        {"datasets[0].name"},
    ),
    "handbook_mixer": (
        "model_name_or_path: a/b\ndataset_mixer:\n  c/d: 1.0\ndataset_splits: [train_sft, test_sft]\n"
        "max_seq_length: 2048\n",
        {"data.path": "hub:c/d", "data.sequence_length": 2048},
        {"dataset_splits"},
    ),
    "handbook_mixture": (
        "model_name_or_path: a/b\ndataset_mixture:\n  datasets:\n    - {id: c/d, weight: 0.5}\n"
        "    - {id: e/f, split: train_x, config: all, weight: 1.0}\n  test_split_size: 0.02\n"
        "eval_strategy: steps\neval_steps: 10\n",
        {"data.validation": "2%"},
        {"dataset_mixture.datasets[1].config"},
    ),
    # transformers: TrainingArguments, optimization.py
    "warmup_steps_win": (TRL + "warmup_ratio: 0.1\nwarmup_steps: 20\n", {}, {"warmup_ratio"}),
    "constant": (
        TRL + "lr_scheduler_type: constant\nwarmup_ratio: 0.1\n",
        {"optimizer.schedule": "constant"},
        {"warmup_ratio"},
    ),
    "min_lr_rate": (
        TRL + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n",
        {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.1},
        {},
    ),
    "min_lr": (
        TRL
        + "learning_rate: 2e-5\nlr_scheduler_type: cosine_with_min_lr\n"
        + "lr_scheduler_kwargs: {min_lr: 2e-6}\n",
        {"optimizer.min_lr_ratio": pytest.approx(0.1)},
        {},
    ),
    "min_lr_in_json": (
        TRL
        + "lr_scheduler_type: cosine_with_min_lr\n"
        + "lr_scheduler_kwargs: '{\"min_lr_rate\": 0.25}'\n",
        {"optimizer.min_lr_ratio": 0.25},
        {},
    ),
    "wsd": (
        TRL
        + "max_steps: 400\nlr_scheduler_type: warmup_stable_decay\n"
        + "lr_scheduler_kwargs: {num_decay_steps: 100, min_lr_ratio: 0.1, decay_type: linear}\n",
        {"optimizer.schedule.kind": "wsd", "optimizer.schedule.min_lr_ratio": 0.1},
        {"lr_scheduler_kwargs.decay_type"},
    ),
    "restarts": (
        TRL + "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}\n",
        {"optimizer.schedule": "cosine"},
        {"lr_scheduler_kwargs.num_cycles"},
    ),
    "inverse_sqrt": (
        TRL + "lr_scheduler_type: inverse_sqrt\n",
        {},
        {"lr_scheduler_type"},
    ),
    "adafactor": (
        TRL + "optim: adafactor\nlearning_rate: 0.001\n",
        {"optimizer.kind": "adafactor"},
        {"optim"},
    ),
    "save_no": (TRL + "save_strategy: 'no'\n", {}, {}),
    "max_steps_win": (
        TRL + "num_train_epochs: 2\nmax_steps: 10\n",
        {"train.max_steps": 10, "train.epochs": None},
        {"num_train_epochs"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_means_the_same(name, tmp_path):
    text, expected, left = CASES[name]
    written, recipe, _ = imported(text, tmp_path)
    assert values(recipe, expected) == expected
    assert set(left) <= listed(written).keys()


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (TRL + "warmup_ratio: 0.1\nwarmup_steps: 20\n", (20, "steps")),
        (TRL + "warmup_ratio: 0.1\n", (10, "percent")),
        (TRL + "warmup_steps: 0.05\n", (5, "percent")),
        (TRL + "lr_scheduler_type: constant\nwarmup_steps: 20\n", (0, "steps")),
        (TRL + "lr_scheduler_type: constant_with_warmup\nwarmup_steps: 20\n", (20, "steps")),
        (LF + "warmup_steps: 0\nwarmup_ratio: 0.1\n", (10, "percent")),
        (AX + CHATS, (3, "percent")),
        (AX + CHATS + "warmup_steps: 7\n", (7, "steps")),
    ],
)
def test_warmup_steps_win_over_a_share(text, length, tmp_path):
    _, recipe, _ = imported(text, tmp_path)
    warmup = recipe.optimizer.warmup
    assert (warmup.amount, warmup.unit) == length


def test_sources_have_the_shares_of_a_mixture(tmp_path):
    _, recipe, _ = imported(CASES["handbook_mixture"][0], tmp_path)
    sources = [(source.path, source.weight, source.glob) for source in recipe.data.sources]
    assert sources == [("hub:c/d", 0.5, None), ("hub:e/f", 1.0, "*train_x*")]


def test_prompts_of_completions_are_masked_as_trl_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    text = "model_name_or_path: a/b\ndataset_name: rows.jsonl\nmax_length: 64\n"
    _, recipe, _ = imported(text, tmp_path)
    assert recipe.data.chat.train_on == "assistant"


@pytest.mark.parametrize(
    ("folder", "kind", "rate"), [("dpo", "dpo", 1e-6), ("orpo", "orpo", 1e-6), ("sft", "sft", 2e-5)]
)
def test_the_folder_of_a_file_names_its_command(folder, kind, rate, tmp_path):
    """recipes/zephyr-7b-beta/dpo/config_full.yaml has no key that names the trainer."""
    (tmp_path / folder).mkdir()
    _, recipe, _ = imported("model_name_or_path: a/b\nnum_train_epochs: 1\n", tmp_path / folder)
    assert (recipe.objective.kind, recipe.optimizer.learning_rate) == (kind, rate)


NO_TRAINING = {
    "export": (
        "model_name_or_path: m\nadapter_name_or_path: a\ntemplate: default\nexport_dir: out\n",
        "bloomery export m+a --to merged --out out",
    ),
    "chat": ("model_name_or_path: m\ntemplate: qwen\ninfer_backend: vllm\n", "bloomery chat m"),
    "chat_of_earlier_versions": (
        "model_name_or_path: m\nadapter_name_or_path: a\ntemplate: llama3\nfinetuning_type: lora\n",
        "bloomery chat m+a",
    ),
    "predict": (
        "model_name_or_path: m\nstage: sft\ndo_predict: true\neval_dataset: x\ntemplate: qwen\n",
        "bloomery eval m",
    ),
    "benchmark": (
        "model_name_or_path: m\ntask: mmlu_test\nn_shot: 5\ntemplate: fewshot\n",
        "bloomery eval m --lm-eval",
    ),
}


@pytest.mark.parametrize("name", NO_TRAINING)
def test_what_trains_nothing_is_refused_with_the_command(name, tmp_path):
    text, command = NO_TRAINING[name]
    (tmp_path / "theirs.yml").write_text(text)
    with pytest.raises(UserError) as caught:
        import_recipe(tmp_path / "theirs.yml")
    assert caught.value.code == 2 and command in caught.value.fix


@pytest.mark.parametrize("name", ["axolotl_defaults", "lf_simpo", "trl_sft", "handbook_mixer"])
def test_a_recipe_that_is_another_tools_file_names_the_command(name, tmp_path):
    """As `bloomery train axolotl.yml`, `plan`, `prepare` and `slurm`, which all load recipes."""
    path = tmp_path / "theirs.yml"
    path.write_text(CASES[name][0])
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    _, _, tool = imported(CASES[name][0], tmp_path)
    assert caught.value.problem.startswith(f"this is a file of {tool}")
    assert f"bloomery recipes import {path} --out mine.yaml" in caught.value.fix


def test_a_recipe_with_keys_of_another_tool_is_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {from: a/b}\ndata: {path: c}\nbase_model: x\nmicro_batch_size: 1\n")
    with pytest.raises(UserError, match="2 mistakes"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["train.py", "notebook.ipynb", "run.sh"])
def test_a_script_in_place_of_a_recipe_names_the_command(name, tmp_path):
    (tmp_path / name).write_text("trl sft")
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / name)
    assert f"bloomery recipes import {tmp_path / name}" in caught.value.fix
