"""Record the config classes of other training tools as test data: names, types and defaults, with the tool's version.

    python scripts/tool_fields.py FOLDER     FOLDER holds checkouts: axolotl, LLaMA-Factory, ms-swift, mlx-lm, torchtune

TRL and transformers are read from the installed packages; the others are parsed, never imported.
"""

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "tests" / "recipe" / "tool_fields"
# Files of each tool with config classes, and the classes whose fields a user's file may hold.
PARSED = {
    "Axolotl": (
        "axolotl",
        "src/axolotl/utils/schemas/*.py",
        "VERSION",
        (
            "AxolotlInputConfig ModelInputConfig ModelOutputConfig SpecialTokensConfig LoraConfig PeftConfig"
            " LoftQConfig ReLoRAConfig HyperparametersConfig JaggedLRConfig WandbConfig MLFlowConfig TrackioConfig"
            " MultiModalConfig RemappedParameters DeprecatedParameters TRLConfig SFTDataset DPODataset KTODataset"
            " PretrainingDataset UserDefinedDPOType UserDefinedKTOType UserDefinedPrompterType"
        ).split(),
    ),
    "LLaMA-Factory": (
        "LLaMA-Factory",
        "src/llamafactory/hparams/*.py",
        "src/llamafactory/extras/env.py",
        (
            "DataArguments FinetuningArguments SwanLabArguments BAdamArgument ApolloArguments GaloreArguments"
            " RLHFArguments LoraArguments OFTArguments FreezeArguments BaseModelArguments ProcessorArguments"
            " ExportArguments VllmArguments SGLangArguments KTransformersArguments QuantizationArguments"
            " ModelArguments RayArguments ProfilerArguments Fp8Arguments GeneratingArguments EvaluationArguments"
        ).split(),
    ),
    "ms-swift": (
        "ms-swift",
        "swift/**/*.py",
        "swift/version.py",
        (
            "BaseArguments DataArguments ModelArguments TemplateArguments QuantizeArguments GenerationArguments"
            " TunerArguments SwanlabArguments SftArguments RLHFArguments RewardModelArguments TeacherModelArguments"
            " PPOArguments GRPOArguments GRPOArgumentsMixin PretrainArguments TrainArgumentsMixin RayArguments"
            " RolloutTrainerArgumentsMixin VllmArguments"
        ).split(),
    ),
}


def parsed(folder: Path, pattern: str, classes: list[str]) -> dict[str, dict[str, Any]]:
    """The annotated fields of the classes, by name; a default that is no literal as its text."""
    fields: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in classes:
                fields.setdefault(node.name, {}).update(_fields(node))
    return {name: fields[name] for name in classes if name in fields}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            entry = {"type": ast.unparse(statement.annotation)[:120]}
            default = _default(statement.value)
            yield statement.target.id, entry | ({} if default is None else {"default": default})


def _default(value: ast.expr | None) -> Any:
    """The default of a field: a literal, or that of `field(default=...)` and `Field(...)`."""
    if value is None:
        return None
    if isinstance(value, ast.Call):
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        inner = named.get("default", value.args[0] if value.args else None)
        factory = named.get("default_factory")
        if inner is None and isinstance(factory, ast.Lambda):
            inner = factory.body
        return None if inner is None else _default(inner)
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)


def of_trl() -> dict[str, dict[str, Any]]:
    """The config classes of the installed TRL, with the fields of TrainingArguments on their own."""
    import trl
    from transformers import TrainingArguments
    from trl.experimental import cpo, gkd, orpo

    shared = _dataclass(TrainingArguments)
    names = "SFTConfig DPOConfig KTOConfig RewardConfig GRPOConfig RLOOConfig".split()
    classes = {name: getattr(trl, name) for name in [*names, "ModelConfig", "ScriptArguments"]}
    classes |= {
        "CPOConfig": cpo.CPOConfig,
        "ORPOConfig": orpo.ORPOConfig,
        "GKDConfig": gkd.GKDConfig,
    }
    own = {
        name: {
            field: entry
            for field, entry in _dataclass(config).items()
            if shared.get(field) != entry
        }
        for name, config in classes.items()
    }
    return {"TrainingArguments": shared} | own


def _dataclass(config: type) -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(config):
        entry: dict[str, Any] = {"type": re.sub(r"typing\.", "", str(field.type))[:120]}
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is not dataclasses.MISSING and default is not None:
            simple = isinstance(default, bool | int | float | str | list | dict)
            entry["default"] = default if simple else str(default)
        fields[field.name] = entry
    return fields


def of_mlx(folder: Path) -> dict[str, dict[str, Any]]:
    """CONFIG_DEFAULTS of mlx_lm/lora.py."""
    tree = ast.parse((folder / "mlx_lm" / "lora.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONFIG_DEFAULTS":
            defaults = ast.literal_eval(node.value)
            return {
                "CONFIG_DEFAULTS": {
                    name: {"default": value} if value is not None else {}
                    for name, value in defaults.items()
                }
            }
    raise SystemExit("mlx_lm/lora.py has no CONFIG_DEFAULTS")


def of_torchtune(folder: Path) -> dict[str, dict[str, Any]]:
    """The keys that torchtune's own configs use, as it has no config classes, and the defaults of its components."""
    from ruamel.yaml import YAML

    keys: dict[str, Any] = {}

    def walk(section: dict[str, Any], path: str) -> None:
        for name, value in section.items():
            full_name = f"{path}{name}"
            if isinstance(value, dict):
                walk(value, f"{full_name}.")
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                walk(value[0], f"{full_name}[0].")
            else:
                keys.setdefault(full_name, {})

    for path in sorted((folder / "recipes" / "configs").rglob("*.yaml")):
        config = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
        if isinstance(config, dict) and "optimizer" in config:
            walk(config, "")
    return {"configs": keys}


def _version_line(file: Path) -> str:
    """The line that names the version, else the whole file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if re.match(r"(__version__|VERSION)\b", line)), lines[0])


def version_of(text: str) -> str:
    found = re.search(r"(\d+\.\d+[.\w]*)", text)
    return found[1] if found else "unknown"


def main(checkouts: Path) -> None:
    import transformers
    import trl

    OUT.mkdir(exist_ok=True)
    records = {"TRL": (f"{trl.__version__}, transformers {transformers.__version__}", of_trl())}
    for tool, (name, pattern, version_file, classes) in PARSED.items():
        folder = checkouts / name
        file = folder / version_file
        version = version_of(_version_line(file)) if file.is_file() else "unknown"
        records[tool] = (version, parsed(folder, pattern, list(classes)))
    mlx_version = checkouts / "mlx-lm" / "mlx_lm" / "_version.py"
    records["mlx-lm"] = (
        version_of(mlx_version.read_text(encoding="utf-8")) if mlx_version.is_file() else "unknown",
        of_mlx(checkouts / "mlx-lm"),
    )
    torchtune_version = checkouts / "torchtune" / "version.txt"
    records["torchtune"] = (
        torchtune_version.read_text(encoding="utf-8").strip()
        if torchtune_version.is_file()
        else "unknown",
        of_torchtune(checkouts / "torchtune"),
    )
    for tool, (version, classes) in records.items():
        record = {"tool": tool, "version": version, "classes": classes}
        text = json.dumps(record, indent=1, sort_keys=False) + "\n"
        (OUT / f"{tool}.json").write_text(text, encoding="utf-8")
        print(f"{tool} {version}: {sum(map(len, classes.values()))} fields")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
