"""Files of other tools mean the same as recipes: the expected values are those of the tools' own sources."""

import json
import tempfile
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import UserError
from bloomery.recipe.importing import import_recipe
from bloomery.recipe.load import load_recipe
from bloomery.recipe.rewards import VerifierReward

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
    "trl_arguments_of_adamw": (
        TRL + "optim_args: eps=1e-7\nadam_epsilon: 1.0e-6\n",
        {"optimizer.eps": 1e-6},
        {"optim_args"},
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
    "axolotl_builder": (
        AX + "datasets: [{path: json, data_files: [rows.jsonl], ds_type: json, type: alpaca}]\n",
        {"data.format": "alpaca"},
        {},
    ),
    "axolotl_roles_of_a_dataset": (
        AX + "datasets: [{path: c.jsonl, type: chat_template, roles: {system: [x]}}]\n",
        {},
        {"datasets[0].roles.system"},
    ),
    "revision": (
        TRL + "model_revision: v2\n",
        {"model.from_": "a/b@v2"},
        {},
    ),
    "main_revision": (TRL + "model_revision: main\n", {"model.from_": "a/b"}, {"model_revision"}),
    "optimizer_that_is_not_here": (
        TRL + "optim: lion_8bit\n",
        {"optimizer.kind": "adamw"},
        {"optim"},
    ),
    "lf_galore": (
        LF + "finetuning_type: full\nuse_galore: true\n",
        {"optimizer.kind": "adamw"},
        {"use_galore"},
    ),
    "axolotl_constant_by_its_ratio": (
        AX + CHATS + "cosine_min_lr_ratio: 1.0\n",
        {"optimizer.schedule": "constant"},
        {},
    ),
    # ms-swift: swift/arguments
    "swift": (
        "model: a/b\ndataset: ['c/d#500']\ntuner_type: lora\n",
        {
            "objective.kind": "sft",
            "adapter.rank": 8,
            "adapter.alpha": 32.0,
            "adapter.dropout": 0.05,
            "adapter.target_modules": ["all-linear"],
            "optimizer.learning_rate": 1e-4,
            "optimizer.weight_decay": 0.1,
            "optimizer.betas": (0.9, 0.95),
            "optimizer.schedule": "cosine",
            "train.batch_size": 16,
            "train.micro_batch_size": 1,
            "data.path": "hub:c/d",
            "data.validation": "0%",
            "eval.every": "none",
        },
        {"dataset"},
    ),
    "swift_full": (
        "model: a/b\ndataset: c/d\ntuner_type: full\nloss_scale: last_round\n",
        {
            "adapter.kind": "none",
            "optimizer.learning_rate": 1e-5,
            "data.chat.train_on": "last",
        },
        {},
    ),
    "swift_simpo": (
        "model: a/b\ndataset: c/d\nrlhf_type: simpo\nmax_length: 1000\n",
        {
            "objective.kind": "simpo",
            "objective.beta": 2.0,
            "objective.gamma": 1.0,
            "data.sequence_length": 2000,
        },
        {"cpo_alpha"},
    ),
    "swift_cpo": (
        "model: a/b\ndataset: c/d\nrlhf_type: cpo\n",
        {},
        {"rlhf_type"},
    ),
    "swift_grpo_teacher": (
        "model: a/b\ndataset: c/d\nrlhf_type: grpo\nreward_funcs: [accuracy]\nteacher_model: x/y\n"
        "teacher_kl_coef: 0.5\n",
        {
            "objective.kind": "grpo",
            "objective.teacher": "x/y",
            "objective.teacher_kl_coef": 0.5,
            "objective.estimator": "sampled",
        },
        set(),
    ),
    "swift_grpo": (
        "model: a/b\ndataset: c/d\nrlhf_type: grpo\nreward_funcs: [accuracy]\n",
        {
            "objective.kind": "grpo",
            "objective.beta": 0.04,
            "objective.loss_type": "grpo",
            "objective.temperature": 0.9,
            "train.batch_size": 1,
        },
        {},
    ),
    "swift_dapo": (
        "model: a/b\ndataset: c/d\nrlhf_type: grpo\nreward_funcs: [accuracy, soft_overlong]\n"
        "soft_max_length: 100\nsoft_cache_length: 20\ndynamic_sample: true\nmax_resample_times: 4\n",
        {
            "objective.dynamic_sampling": True,
            "objective.max_resample_times": 4,
            "rewards": [
                VerifierReward(verifier="math", column="solution"),
                VerifierReward(
                    verifier="soft_overlong", max_completion_len=100, soft_punish_cache=20
                ),
            ],
        },
        {"soft_max_length", "soft_cache_length"},
    ),
    "swift_embedding": (
        "model: a/b\ndataset: c/d\ntuner_type: lora\ntask_type: embedding\n",
        {},
        {"task_type"},
    ),
    # mlx-lm: mlx_lm/lora.py
    "mlx": (
        "model: a/b\ndata: folder\niters: 600\nlora_parameters: {rank: 16, scale: 10.0, dropout: 0.1}\n",
        {
            "adapter.rank": 16,
            "adapter.alpha": 160.0,
            "adapter.dropout": 0.1,
            "adapter.target_modules": ["all-linear"],
            "train.max_steps": 600,
            "train.batch_size": 4,
            "train.max_grad_norm": None,
            "optimizer.schedule": "constant",
            "optimizer.weight_decay": 0.0,
            "optimizer.learning_rate": 1e-5,
            "data.chat.train_on": "all",
            "data.sequence_length": 2048,
            "data.packing": False,
        },
        {"num_layers"},
    ),
    "mlx_accumulation": (
        "model: a/b\ndata: folder\niters: 600\ngrad_accumulation_steps: 4\nmask_prompt: true\n"
        "lr_schedule: {name: cosine_decay, warmup: 10, arguments: [1e-4, 600, 1e-5]}\nnum_layers: -1\n",
        {
            "train.max_steps": 150,
            "train.batch_size": 16,
            "optimizer.schedule": "cosine",
            "optimizer.learning_rate": 1e-4,
            "optimizer.min_lr_ratio": pytest.approx(0.1),
            "data.chat.train_on": "last",
        },
        {"lr_schedule.arguments"},
    ),
    # torchtune: recipes, datasets, rlhf/loss
    "torchtune": (
        """
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_alpha: 128
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: t.model, max_seq_len: 2048}
checkpointer: {checkpoint_dir: models/base, output_dir: "${output_dir}/c"}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: True}
batch_size: 4
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
epochs: 2
dtype: bf16
""",
        {
            "objective.kind": "sft",
            "adapter.rank": 64,
            "adapter.alpha": 128.0,
            "adapter.target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "data.path": "hub:yahma/alpaca-cleaned",
            "data.format": "alpaca",
            "data.chat.train_on": "all",
            "data.packing": True,
            "data.document_masking": True,
            "data.sequence_length": 2048,
            "train.batch_size": 32,
            "train.epochs": 2.0,
            "train.max_grad_norm": None,
            "optimizer.weight_decay": 0.01,
            "optimizer.learning_rate": 3e-4,
            "train.precision": "bfloat16",
        },
        {"tokenizer.path", "output_dir"},
    ),
    "torchtune_dpo": (
        """
model: {_component_: torchtune.models.llama3_1.qlora_llama3_1_8b}
tokenizer: {_component_: x.y, max_seq_len: 1024}
dataset: {_component_: torchtune.datasets.stack_exchange_paired_dataset}
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.2}
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 5e-4}
max_steps_per_epoch: 1000
epochs: 1
batch_size: 4
""",
        {
            "objective.kind": "dpo",
            "objective.beta": 0.2,
            "quantize.kind": "nf4",
            "adapter.rank": 8,
            "adapter.alpha": 16.0,
            "adapter.target_modules": ["q_proj", "v_proj"],
            "data.columns": {
                "prompt": "question",
                "chosen": "response_j",
                "rejected": "response_k",
            },
            "data.sequence_length": 2048,
            "train.max_steps": 1000,
            "optimizer.schedule": "constant",
            "optimizer.state_dtype": "int8",
            "optimizer.paged": True,
        },
        {},
    ),
    "torchtune_full": (
        "model: {_component_: torchtune.models.qwen2_5.qwen2_5_0_5b}\ndtype: bf16\nbatch_size: 2\n"
        "dataset: {_component_: torchtune.datasets.text_completion_dataset, source: c/d, column: body}\n"
        "optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}\n",
        {
            "objective.kind": "pretrain",
            "adapter.kind": "none",
            "train.precision": "bfloat16-pure",
            "data.columns": {"text": "body"},
        },
        {},
    ),
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


# Scripts

SWIFT = """#!/bin/bash
# a comment
MODEL=a/b
export STEPS=7
CUDA_VISIBLE_DEVICES=0 \\
swift rlhf \\
    --rlhf_type dpo \\
    --model $MODEL \\
    --dataset 'c/d#50' e/f \\
    --learning_rate 5e-5 \\
    --warmup_steps ${STEPS} \\
    --gradient_accumulation_steps $(expr 16 / 4) \\
    --packing
echo done
"""
COMMANDS = {
    "swift": (SWIFT, "ms-swift", {"objective.kind": "dpo", "model.from_": "a/b"}),
    "trl": (
        "trl orpo --model_name_or_path a/b --dataset_name c/d --beta 0.2 --use_peft --bf16 false\n",
        "TRL",
        {"objective.kind": "orpo", "objective.beta": 0.2, "adapter.kind": "lora"},
    ),
    "accelerate": (
        "accelerate launch --num_processes 8 examples/scripts/dpo.py --model_name_or_path a/b"
        " --dataset_name=c/d --max_length 512\n",
        "TRL",
        {"objective.kind": "dpo", "data.sequence_length": 1024},
    ),
    "llamafactory": (
        "FORCE_TORCHRUN=1 llamafactory-cli train theirs.yml learning_rate=1e-5 lora_rank=4\n",
        "LLaMA-Factory",
        {"optimizer.learning_rate": 1e-5, "adapter.rank": 4, "objective.kind": "simpo"},
    ),
    "axolotl": (
        "accelerate launch -m axolotl.cli.train ax.yml --learning_rate 1e-3\n",
        "Axolotl",
        {"optimizer.learning_rate": 1e-3, "data.sequence_length": 512},
    ),
    "axolotl_cli": (
        "axolotl train ax.yml --micro-batch-size 8\n",
        "Axolotl",
        {"train.micro_batch_size": 8},
    ),
    "tune": (
        "tune run --nproc_per_node 2 lora_finetune_distributed --config tune.yaml batch_size=3"
        " optimizer.lr=1e-3\n",
        "torchtune",
        {"train.micro_batch_size": 3, "optimizer.learning_rate": 1e-3},
    ),
    "mlx": (
        "mlx_lm.lora --model a/b --train --data folder --iters 5 --mask-prompt --batch-size 2\n",
        "mlx-lm",
        {"train.max_steps": 5, "data.chat.train_on": "last", "train.batch_size": 2},
    ),
    "mlx_module": (
        "python -m mlx_lm lora --model a/b --train --data folder --iters 5\n",
        "mlx-lm",
        {"train.max_steps": 5},
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_a_command_line_are_keys(name, tmp_path):
    text, tool, expected = COMMANDS[name]
    (tmp_path / "theirs.yml").write_text(LF + "stage: dpo\npref_loss: simpo\nlearning_rate: 1\n")
    (tmp_path / "ax.yml").write_text(AX + CHATS)
    (tmp_path / "tune.yaml").write_text(CASES["torchtune"][0])
    _, recipe, found = imported(text, tmp_path, "run.sh")
    assert found == tool
    assert values(recipe, expected) == expected


def test_what_a_script_computes_is_not_read(tmp_path):
    written, recipe, _ = imported(SWIFT, tmp_path, "run.sh")
    assert listed(written)["gradient_accumulation_steps"].startswith("not read")
    assert "set it: gradient_accumulation_steps is computed" in written
    assert recipe.optimizer.warmup.amount == 7
    assert [source.path for source in recipe.data.sources] == ["hub:c/d", "hub:e/f"]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("swift infer --adapters out\n", "bloomery chat"),
        ("swift export --adapters out --merge_lora true\n", "bloomery export"),
        ("llamafactory-cli export merge.yaml\n", "bloomery export"),
        ("axolotl merge-lora ax.yml\n", "bloomery export"),
        ("python -m mlx_lm generate --model x\n", "bloomery generate"),
        ("echo nothing\n", "swift sft"),
    ],
)
def test_a_script_that_trains_nothing_is_refused(text, command, tmp_path):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(UserError) as caught:
        import_recipe(tmp_path / "run.sh")
    assert command in caught.value.fix


UNSLOTH = """
import os
from unsloth import FastLanguageModel, is_bfloat16_supported
os.system("touch executed")
open("executed", "w").write("")
max_seq_length = 1024 * 2
rank = 32
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/llama-3-8b-bnb-4bit", max_seq_length=max_seq_length, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(
    model, r=rank, lora_alpha=rank // 2, lora_dropout=0, bias="none", random_state=3407,
    target_modules=["q_proj", "v_proj", "embed_tokens"], use_gradient_checkpointing="unsloth",
    use_rslora=True)
from datasets import load_dataset
dataset = load_dataset("org/chats", split="train")
dataset = dataset.map(lambda row: row)
trainer = SFTTrainer(
    model=model, train_dataset=dataset, dataset_text_field="text", packing=False,
    args=SFTConfig(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_steps=5, max_steps=60,
        learning_rate=2e-4, optim="adamw_8bit", weight_decay=0.01, lr_scheduler_type="linear",
        fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(), seed=3407,
        save_steps=len(dataset)))
trainer = train_on_responses_only(trainer, instruction_part="a", response_part="b")
trainer.train()
if False:
    model, tokenizer = FastLanguageModel.from_pretrained(model_name="other", load_in_4bit=False)
"""
FROM_UNSLOTH = {
    "objective.kind": "sft",
    "model.from_": "unsloth/llama-3-8b",
    "data.path": "hub:org/chats",
    "data.sequence_length": 2048,
    "data.chat.train_on": "assistant",
    "data.columns": {},  # not the text that the script makes: every token of it would be trained on
    "data.packing": False,
    "adapter.rank": 32,
    "adapter.alpha": 16.0,
    "adapter.use_rslora": True,
    "adapter.target_modules": ["q_proj", "v_proj"],
    "adapter.modules_to_save": ["embed_tokens"],
    "quantize.kind": "nf4",
    "train.batch_size": 8,
    "train.max_steps": 60,
    "train.seed": 3407,
    "train.precision": "auto",
    "train.offload_activations": True,
    "optimizer.learning_rate": 2e-4,
    "optimizer.state_dtype": "int8",
    "optimizer.schedule": "linear",
}


@pytest.mark.parametrize("kind", ["py", "ipynb"])
def test_a_script_of_unsloth_is_read_and_never_run(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = UNSLOTH
    if kind == "ipynb":
        lines = ["!pip install unsloth\n", "%%capture\n", *UNSLOTH.splitlines(keepends=True)]
        cells = [
            {"cell_type": "markdown", "source": ["# Title"]},
            {"cell_type": "code", "source": lines, "outputs": []},
            {"cell_type": "code", "source": "this is no python ("},
        ]
        text = json.dumps({"cells": cells, "nbformat": 4})
    written, recipe, tool = imported(text, tmp_path, f"theirs.{kind}")
    assert tool == "Unsloth" and values(recipe, FROM_UNSLOTH) == FROM_UNSLOTH
    assert "is computed" in listed(written)["save_steps"]
    assert "dataset_text_field" in listed(written)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("trainer", "kind"),
    [
        ("DPOTrainer(args=DPOConfig(beta=0.3), max_length=512)", "dpo"),
        ("ORPOTrainer(args=ORPOConfig(beta=0.3, max_length=512))", "orpo"),
        ("KTOTrainer(args=KTOConfig(beta=0.3, max_length=1024))", "kto"),
    ],
)
def test_the_trainer_of_a_script_names_the_objective(trainer, kind, tmp_path):
    text = 'model = AutoModelForCausalLM.from_pretrained("a/b", torch_dtype=torch.bfloat16)\n'
    text += f'data = load_dataset("c/d")\ntrainer = {trainer}\n'
    _, recipe, tool = imported(text, tmp_path, "theirs.py")
    assert (tool, recipe.objective.kind, recipe.objective.beta) == ("TRL", kind, 0.3)
    assert (recipe.model.from_, recipe.data.sequence_length) == ("a/b", 1024)


@pytest.mark.parametrize(
    "call",
    [
        'SFTTrainer("a/b", args=SFTConfig(max_length=1024))',
        'SFTTrainer(model="a/b", args=SFTConfig(max_length=1024))',
        'name = "a/b"\ntrainer = SFTTrainer(model=name, args=SFTConfig(max_length=1024))',
    ],
)
def test_a_trainer_that_is_given_the_name_of_a_model_trains_it(call, tmp_path):
    _, recipe, _ = imported(f'data = load_dataset("c/d")\n{call}\n', tmp_path, "theirs.py")
    assert (recipe.model.from_, recipe.data.sequence_length) == ("a/b", 1024)


STUDENT = 'student = AutoModelForCausalLM.from_pretrained("a/small")\n'
TEACHER = 'teacher = AutoModelForCausalLM.from_pretrained("a/large")\n'


@pytest.mark.parametrize(
    ("lines", "models"),
    [
        (TEACHER + STUDENT, "student, teacher_model=teacher"),
        (STUDENT + TEACHER, "model=student, teacher_model=teacher"),
        ("", 'model="a/small", teacher_model="a/large"'),
    ],
)
@pytest.mark.parametrize(
    ("trainer", "settings", "expected"),
    [
        ("GKD", "lmbda=0.0", {"kind": "distill", "temperature": 0.9, "kd_ratio": 1}),
        (
            "GKD",
            "lmbda=1.0, max_new_tokens=64",
            {"kind": "on_policy_distill", "divergence": "jsd", "max_completion_length": 64},
        ),
        (
            "Distillation",
            "max_completion_length=64",
            {"kind": "on_policy_distill", "divergence": "reverse_kl", "max_completion_length": 64},
        ),
        (
            "Distillation",
            "beta=0.3",
            {"kind": "on_policy_distill", "divergence": "jsd", "jsd_beta": 0.3},
        ),
        ("Distillation", "beta=0", {"kind": "on_policy_distill", "divergence": "forward_kl"}),
    ],
)
def test_the_teacher_of_a_script_is_the_teacher(
    lines, models, trainer, settings, expected, tmp_path
):
    text = f'{lines}data = load_dataset("c/d")\n'
    text += f"trainer = {trainer}Trainer({models}, args={trainer}Config({settings}))\n"
    _, recipe, _ = imported(text, tmp_path, "theirs.py")
    assert (recipe.model.from_, recipe.objective.teacher) == ("a/small", "a/large")
    found = recipe.objective.model_dump()
    assert {name: found[name] for name in expected} == expected
    assert not recipe.rewards


def test_the_quantization_of_a_teacher_is_not_that_of_the_model(tmp_path):
    text = 'teacher = AutoModelForCausalLM.from_pretrained("a/large", quantization_config=config)\n'
    text += f'{STUDENT}data = load_dataset("c/d")\n'
    text += "trainer = DistillationTrainer(student, teacher_model=teacher)\n"
    written, recipe, _ = imported(text, tmp_path, "theirs.py")
    assert recipe.quantize.kind == "none" and recipe.objective.teacher == "a/large"
    assert "objective.teacher_quantize" in listed(written)["quantization_config"]


def test_rewards_of_a_script_are_functions_of_a_file(tmp_path):
    text = 'model = AutoModelForCausalLM.from_pretrained("a/b")\n'
    text += "trainer = GRPOTrainer(reward_funcs=[short, mine.right], args=GRPOConfig(num_generations=4))\n"
    _, recipe, _ = imported(text, tmp_path, "theirs.py")
    assert recipe.objective.kind == "grpo"
    assert [reward.python.rpartition("/")[2] for reward in recipe.rewards] == [
        "rewards.py:short",
        "mine.py:right",
    ]


def test_tools_and_environments_of_a_script_are_names_of_a_file(tmp_path):
    text = (
        'trainer = GRPOTrainer("a/b", tools=[add, mine.search], environment_factory=games.Guess,\n'
    )
    text += "    args=GRPOConfig(num_generations=4, max_tool_calling_iterations=3))\n"
    _, recipe, _ = imported(text, tmp_path, "theirs.py")
    assert [tool.python.rpartition("/")[2] for tool in recipe.tools] == [
        "tools.py:add",
        "mine.py:search",
    ]
    assert recipe.environment.python.rpartition("/")[2] == "games.py:Guess"
    assert recipe.objective.max_turns == 4 and not recipe.rewards


WORDS = st.sampled_from(
    [
        "swift",
        "sft",
        "rlhf",
        "trl",
        "--model",
        "a/b",
        "--dataset",
        "=",
        "'",
        '"',
        "\\",
        "\n",
        "$X",
        "$(ls)",
        "--",
        "-m",
        "accelerate",
        "launch",
        "x.py",
        "axolotl",
        "train",
        "x.yml",
        "--lr=1e-3",
        "FastLanguageModel.from_pretrained(",
        "SFTTrainer(",
        ")",
        "args=SFTConfig(",
        "r=",
        "1",
        "**x",
        "def f(",
        "if False:",
        "{",
        "}",
        "(",
        "# c",
        "\t",
        "é",
        "\0",
    ]
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    words=st.lists(WORDS, max_size=30), suffix=st.sampled_from([".sh", ".py", ".ipynb", ".yaml"])
)
def test_any_text_is_read_or_refused(words, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"theirs{suffix}"
        text = " ".join(words)
        if suffix == ".ipynb":
            text = json.dumps({"cells": [{"cell_type": "code", "source": [text]}]})
        path.write_text(text)
        try:
            written, _ = import_recipe(path)
        except UserError as error:
            assert error.problem and error.fix
            return
        (Path(folder) / "mine.yaml").write_text(written)
        load_recipe(Path(folder) / "mine.yaml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.yml", AX + "datasets: [{path: json, data_files: rows.jsonl, type: alpaca}]\n"),
        (
            "t.yml",
            "model_name_or_path: a/b\nuse_peft: true\ndatasets: [{path: json, data_files: rows.jsonl}]\n",
        ),
        (
            "t.py",
            'd = load_dataset("json", data_files="rows.jsonl")\nSFTTrainer(args=SFTConfig())\n',
        ),
    ],
)
def test_a_builder_of_datasets_is_no_dataset(name, text, tmp_path):
    """`path: json` with `data_files` is the file."""
    _, recipe, _ = imported(text, tmp_path, name)
    assert Path(recipe.data.path).name == "rows.jsonl"
