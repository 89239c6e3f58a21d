"""Each field of other tools' config classes is mapped or has a reason, and each default is written into a recipe.

The records in tool_fields are made of the tools' sources by scripts/tool_fields.py.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from bloomery.recipe.aliases import ROLLOUTS, look_up
from bloomery.recipe.import_draft import ToolFile
from bloomery.recipe.importing import drafted
from bloomery.recipe.tools import tools

RECORDS = {
    record["tool"]: record
    for path in sorted(Path(__file__).with_name("tool_fields").glob("*.json"))
    for record in [json.loads(path.read_text(encoding="utf-8"))]
}
LEAST = {
    "TRL": {"model_name_or_path": "a/b", "dataset_name": "c/d"},
    "Axolotl": {"base_model": "a/b", "learning_rate": 1e-5, "datasets": [{"path": "c/d"}]},
    "LLaMA-Factory": {"model_name_or_path": "a/b", "dataset": "x"},
    "ms-swift": {"model": "a/b", "dataset": "x"},
    "mlx-lm": {"model": "a/b", "data": "c"},
    "torchtune": {"optimizer": {"_component_": "torch.optim.AdamW"}},
}
COMMANDS = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "RewardConfig": "reward",
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "CPOConfig": "cpo",
    "ORPOConfig": "orpo",
    "GKDConfig": "gkd",
    "PretrainArguments": "pt",
}
OF_LISTS = ("SFTDataset", "DPODataset", "KTODataset", "PretrainingDataset", "UserDefined")
# Keys of a recipe that change speed, memory or what is shown, and not what is trained.
NO_MEANING = (
    "train.attention",
    "train.compile",
    "train.deterministic",
    "train.offload_activations",
    "train.activation_checkpointing",
    "data.num_proc",
    "data.pin_memory",
    "data.columns",  # of its usual name
    "data.document_masking",  # of packed sequences, and nothing is packed
    "eval.on_start",
    "logging.",
    "sample.",
)


def classes():
    return [(tool, name) for tool, record in RECORDS.items() for name in record["classes"]]


def with_field(keys, name, value):
    """The keys of a file with a dotted field more."""
    outer, _, inner = name.partition(".")
    section = keys.get(outer)
    if inner:
        return keys | {
            outer: with_field(section if isinstance(section, dict) else {}, inner, value)
        }
    return keys if outer in keys else keys | {outer: value}


def unanswered(tool, keys, names, command):
    draft = drafted(ToolFile(tool, keys, command))
    used = {name for setting in draft.settings.values() for name in setting.names}
    for name in names:
        reason = draft.left.get(name, "")
        inner = [left for left in (*draft.left, *used) if left.startswith((f"{name}.", f"{name}["))]
        if (
            name not in used and not inner and reason in ("", "no such setting")
        ) or reason.startswith("did you mean"):
            yield name


@pytest.mark.parametrize(("tool", "name"), classes())
def test_every_field_is_mapped_or_has_a_reason(tool, name):
    fields = RECORDS[tool]["classes"][name]
    if name.startswith(OF_LISTS):
        pytest.skip("keys of a dataset in a list: test_no_nested_key_is_lost")
    prefix = "trl." if name == "TRLConfig" else ""
    values = {
        f"{prefix}{field}": 1
        if entry.get("default") in (None, "", [], {}) or isinstance(entry.get("default"), dict)
        else entry["default"]
        for field, entry in fields.items()
        if "[0]" not in field and field != "trl"  # a section, whose keys have a class of their own
    }
    # Some at a time: fields that exclude each other are in other files.
    names = sorted(values)
    for start in range(3):
        keys = dict(LEAST[tool]) | ({"rl": "grpo"} if prefix else {})
        some = [field for field in names[start::3] if field not in keys]
        for field in some:
            keys = with_field(keys, field, values[field])
        left = list(unanswered(tool, keys, some, COMMANDS.get(name, "sft")))
        # A field may be one of another's: alone it has its answer.
        for field in left:
            alone = with_field(
                dict(LEAST[tool]) | ({"rl": "grpo"} if prefix else {}), field, values[field]
            )
            assert not list(unanswered(tool, alone, [field], COMMANDS.get(name, "sft"))), field


def defaults_of(tool, name):
    """What tools.toml says of a class: its values are those of the class."""
    entry = tools()[tool]
    values = entry.get("defaults", {}) | entry.get("conditional", {})
    if tool in ("TRL", "ms-swift"):
        values = tools()["Transformers"]["defaults"] | values
    if name == "TrainingArguments":
        values = tools()["Transformers"]["defaults"]
    return values | entry.get("commands", {}).get(COMMANDS.get(name, ""), {})


@pytest.mark.parametrize(("tool", "name"), classes())
def test_the_defaults_are_those_of_the_tool(tool, name):
    expected = defaults_of(tool, name)
    recorded = {
        field: entry["default"]
        for field, entry in RECORDS[tool]["classes"][name].items()
        if "default" in entry and field in expected
    }
    same = {
        field: recorded[field][0]
        if isinstance(recorded[field], list) and not isinstance(expected[field], list)
        else recorded[field]
        for field in recorded
    }
    assert same == {field: expected[field] for field in same}


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        (tool, name)
        for tool, name in classes()
        if tool not in ("torchtune", "mlx-lm")
        and not name.startswith(OF_LISTS)
        and name not in ("TRLConfig", "GenerationArguments", "GeneratingArguments")
    ],
)
def test_every_default_with_a_meaning_is_written(tool, name):
    """What a file leaves out is in its recipe, so that no default of ours decides."""
    command = COMMANDS.get(name, "sft")
    draft = drafted(ToolFile(tool, LEAST[tool], command))
    table = ROLLOUTS if command in ("grpo", "rloo") or "GRPO" in name else tool
    missing = []
    for field, entry in RECORDS[tool]["classes"][name].items():
        default = entry.get("default")
        if default is None or isinstance(default, dict):
            continue
        answer = look_up((field,), default, {}, program=table)
        for edit in answer.edits if answer and not answer.guess else ():
            key, equals, _ = edit.partition("=")
            fits = key.partition(".")[0] not in ("objective", "quantize", "adapter")
            if equals and fits and not key.startswith(NO_MEANING) and key not in draft.settings:
                missing.append((field, edit))
    assert missing == []


@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig", "GRPOConfig"])
def test_the_records_are_of_the_installed_trl(name):
    """A newer TRL with other fields or defaults is seen here: run scripts/tool_fields.py."""
    trl = pytest.importorskip("trl")
    if not RECORDS["TRL"]["version"].startswith(trl.__version__):
        pytest.skip(f"the records are of TRL {RECORDS['TRL']['version']}")
    recorded = RECORDS["TRL"]["classes"]
    fields = {field.name for field in dataclasses.fields(getattr(trl, name))}
    assert fields == recorded[name].keys() | recorded["TrainingArguments"].keys()
