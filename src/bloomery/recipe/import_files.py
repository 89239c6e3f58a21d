"""Reads files of other tools as keys: YAML and JSON, shell scripts and command lines, Python scripts and notebooks.

Nothing of them runs: a script's calls are read as data, and what is computed is listed as not read.
"""

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.recipe.yaml import MAX_BYTES, read_yaml

_NOTEBOOK_BYTES = 32_000_000  # with the pictures of its outputs
_SHELLS = (".sh", ".bash", ".zsh", ".txt", ".slurm", ".sbatch")
_PROGRAMS = r"swift|megatron|llamafactory-cli|trl|axolotl|tune|mlx_lm\.lora|accelerate|torchrun|python3?|deepspeed"


# Commands of these tools that train nothing, and what does the same here.
_NO_TRAINING = {
    "infer": "bloomery chat MODEL",
    "chat": "bloomery chat MODEL",
    "inference": "bloomery chat MODEL",
    "generate": "bloomery generate MODEL --prompt TEXT",
    "export": "bloomery export MODEL --to merged --out DIR",
    "merge-lora": "bloomery export BASE+ADAPTER --to merged --out DIR",
    "fuse": "bloomery export BASE+ADAPTER --to merged --out DIR",
    "deploy": "bloomery serve MODEL",
    "rollout": "bloomery serve MODEL",
    "api": "bloomery serve MODEL",
    "webchat": "bloomery serve MODEL --open",
    "vllm-serve": "bloomery serve MODEL",
    "eval": "bloomery eval MODEL --lm-eval TASKS",
    "evaluate": "bloomery eval MODEL",
    "eleuther_eval": "bloomery eval MODEL --lm-eval TASKS",
    "quantize": "bloomery export MODEL --to gguf --type q4_K_M --out FILE",
    "preprocess": "bloomery prepare RECIPE",
}


@dataclass
class Reading:
    """The keys of a file. `program`: words that name the tool and its command, "" for a file of keys alone.

    `unread`: names with the reason, of what was not read.
    """

    keys: dict[str, Any]
    program: str = ""
    unread: dict[str, str] = field(default_factory=dict)


def read_foreign_file(path: Path) -> Reading:
    """The keys of a file of another tool. Raises UserError (code 2)."""
    limit = _NOTEBOOK_BYTES if path.suffix == ".ipynb" else MAX_BYTES
    text = read_input(path, limit, code=2).decode("utf-8-sig", errors="replace")
    if path.suffix == ".ipynb":
        return _read_python(_cells(text, path), path)
    if path.suffix == ".py":
        return _read_python([text], path)
    if path.suffix in _SHELLS or text.startswith("#!"):
        return _read_shell(text, path)
    return Reading(_read_keys(text, path))


def _read_keys(text: str, path: Path) -> dict[str, Any]:
    document = read_yaml(text, source=path.name, folder=path.parent)
    if document.mistakes:
        mistake = document.mistakes[0]
        raise UserError(mistake.problem, where=mistake.place, fix=mistake.fix, code=2)
    keys = document.data if isinstance(document.data, dict) else {}
    return {name: _interpolated(value, keys) for name, value in keys.items()}


def _interpolated(value: Any, keys: Mapping[str, Any]) -> Any:
    """`${output_dir}` and `${a.b}` of OmegaConf, where they name a value of the same file."""

    def replaced(match: re.Match[str]) -> str:
        section: Any = keys
        for part in match[1].split("."):
            section = section.get(part) if isinstance(section, dict) else None
        return match[0] if section is None or isinstance(section, dict | list) else str(section)

    if isinstance(value, str):
        return re.sub(r"\$\{([\w.]+)\}", replaced, value) if "${" in value else value
    if isinstance(value, dict):
        return {name: _interpolated(part, keys) for name, part in value.items()}
    if isinstance(value, list):
        return [_interpolated(part, keys) for part in value]
    return value


# Shell scripts and command lines


def _read_shell(text: str, path: Path) -> Reading:
    """The first command of a training tool: its options, over those of the file that it names."""
    variables: dict[str, str] = {}
    others: list[tuple[str, str]] = []
    for line in _lines(text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if all(re.match(r"(export|local|readonly|declare)$|\w+=", word) for word in words):
            for word in words:
                name, equals, value = word.partition("=")
                if equals:
                    variables[name] = _expanded(value, variables)
            continue
        start = next(
            (
                number
                for number, word in enumerate(words)
                if re.fullmatch(rf"(?:.*/)?(?:{_PROGRAMS})", word)
            ),
            None,
        )
        if start is None:
            continue
        reading = _read_command(words[start:], variables, path)
        if reading is not None:
            return reading
        others += [
            (" ".join(words[start : start + 2]), command)
            for word, command in _NO_TRAINING.items()
            if any(
                part in (word, f"{word}.py", f"mlx_lm.{word}") for part in words[start : start + 4]
            )
        ]
    if others:
        shown, command = others[0]
        problem = f"this is no training file: {path.name} runs `{shown}`"
        raise UserError(problem, where=str(path), fix=f"`{command}`", code=2)
    problem = f"no command of a training tool was found: {path.name}"
    fix = "give a script with `swift sft`, `llamafactory-cli train`, `trl sft`, `axolotl train`, `tune run`,"
    fix += " `mlx_lm.lora` or `accelerate launch`"
    raise UserError(problem, where=str(path), fix=fix, code=2)


def _lines(text: str) -> Iterator[str]:
    """Lines of a script without comments, joined where one ends in a backslash or within quotes."""
    pending = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        pending += line
        if re.search(r"\\\s*$", pending):
            pending = re.sub(r"\\\s*$", " ", pending)
            continue
        try:
            shlex.split(pending, comments=True)
        except ValueError:
            pending += "\n"
            continue
        yield pending
        pending = ""
    if pending.strip():
        yield pending


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """A word with the variables that the script sets to a plain text."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, default if default is not None else match[0])

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, text)


def _read_command(words: Sequence[str], variables: Mapping[str, str], path: Path) -> Reading | None:
    """The options of a command line; None where it is no command that trains."""
    words = [_expanded(word, variables) for word in words]
    program, rest = _program(words)
    if not program:
        return None
    reading = Reading({}, program)
    file_name = None
    options: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in rest:
        if word in ("|", "&&", ";", "&", ">", ">>", "2>&1", "||"):
            break
        option = re.match(r"--?([A-Za-z][\w.-]*)(?:=(.*))?$", word, re.DOTALL)
        assignment = re.match(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)$", word, re.DOTALL)
        if option:
            current = options.setdefault(_option_name(option[1], program), [])
            current.clear()
            if option[2] is not None:
                current.append(option[2])
                current = None
        elif assignment and program.split()[0] in ("tune", "llamafactory"):
            options[assignment[1]] = [assignment[2]]
            current = None
        elif re.search(r"\.(ya?ml|json)$", word) and not current and file_name is None:
            if current is not None:
                current.append(word)
            else:
                file_name = word
        elif current is not None:
            current.append(word)

    # The file first, then the options of the command line, which win.
    for name in ("config", "config_path"):
        if options.get(name) and file_name is None:
            file_name = options.pop(name)[0]
    if file_name is not None:
        reading.keys.update(_named_file(file_name, path, reading))
    for name, values in options.items():
        unset = [value for value in values if re.search(r"\$[\w{(]|`", value)]
        if unset:
            reading.unread[name] = f"not read: {unset[0]} is computed"
            continue
        typed = [_typed(value) for value in values]
        _put(reading.keys, name, True if not typed else typed[0] if len(typed) == 1 else typed)
    return reading


def _program(words: Sequence[str]) -> tuple[str, list[str]]:
    """The tool with its command, such as "swift rlhf", and the words behind it; "" for no training command."""
    rest = list(words)
    name = Path(rest[0]).name
    if name == "swift" and len(rest) > 1 and rest[1] in ("sft", "pt", "rlhf"):
        return f"swift {rest[1]}", rest[2:]
    if name == "llamafactory-cli" and len(rest) > 1:
        return (f"llamafactory {rest[1]}", rest[2:]) if rest[1] == "train" else ("", [])
    if name == "trl" and len(rest) > 1 and not rest[1].startswith("-"):
        return f"trl {rest[1]}", rest[2:]
    if name == "axolotl" and len(rest) > 1:
        return ("axolotl train", rest[2:]) if rest[1] == "train" else ("", [])
    if name == "tune" and len(rest) > 2 and rest[1] == "run":
        recipe = next(
            (word for word in rest[2:] if not word.startswith("-") and "=" not in word), ""
        )
        behind = rest[rest.index(recipe) + 1 :] if recipe in rest else rest[2:]
        return f"tune {recipe}", behind
    if name == "mlx_lm.lora":
        return "mlx_lm lora", rest[1:]
    if name in ("accelerate", "torchrun", "python", "python3", "deepspeed"):
        return _launched(rest)
    return "", []


def _launched(words: Sequence[str]) -> tuple[str, list[str]]:
    """What a launcher starts: a module (-m axolotl.cli.train), or a script (sft.py)."""
    for number, word in enumerate(words[1:], 1):
        behind = list(words[number + 1 :])
        if word in ("-m", "--module") and behind:
            module = behind[0]
            if module == "axolotl.cli.train":
                return "axolotl train", behind[1:]
            if module == "mlx_lm.lora":
                return "mlx_lm lora", behind[1:]
            if module == "mlx_lm" and behind[1:2] == ["lora"]:
                return "mlx_lm lora", behind[2:]
            if module.startswith("swift.cli."):
                return f"swift {module.rpartition('.')[2]}", behind[1:]
            if module in ("trl", "trl.cli") and len(behind) > 1:
                return f"trl {behind[1]}", behind[2:]
        if word.endswith(".py"):
            return f"script {Path(word).stem}", behind
        if re.fullmatch(r"(?:.*/)?(swift|llamafactory-cli|trl|axolotl)", word):
            return _program(words[number:])
    return "", []


def _option_name(name: str, program: str) -> str:
    """--per-device-train-batch-size is per_device_train_batch_size."""
    del program
    return name.replace("-", "_")


def _typed(text: str) -> Any:
    document = read_yaml(text, source="", folder=Path())
    return text if document.mistakes or isinstance(document.data, dict) else document.data


def _put(keys: dict[str, Any], name: str, value: Any) -> None:
    """A dotted option is a key of a section where the file has that section."""
    outer, _, inner = name.partition(".")
    if inner:
        section = keys.setdefault(outer, {})
        if isinstance(section, dict):
            _put(section, inner, value)
            return
    keys[name] = value


def _named_file(name: str, path: Path, reading: Reading) -> dict[str, Any]:
    """The keys of the file that a command names, relative to the script or to the working folder."""
    for folder in (path.parent, Path.cwd()):
        file = folder / name
        if file.is_file():
            text = read_input(file, MAX_BYTES, code=2).decode("utf-8-sig", errors="replace")
            return _read_keys(text, file)
    reading.unread[f"file {name}"] = "not read: there is no such file next to the script"
    return {}


# Python scripts and notebooks

# Calls that are read, and the names of their arguments in TRL's terms.
_MODEL_NAMES = {
    "model_name": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
    "torch_dtype": "dtype",
}
_LORA_NAMES = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_gradient_checkpointing": "gradient_checkpointing",
}
_TRAINERS = {
    "SFTTrainer": "sft",
    "UnslothTrainer": "sft",
    "Trainer": "sft",
    "DPOTrainer": "dpo",
    "ORPOTrainer": "orpo",
    "KTOTrainer": "kto",
    "CPOTrainer": "cpo",
    "RewardTrainer": "reward",
    "GRPOTrainer": "grpo",
    "RLOOTrainer": "rloo",
    "PPOTrainer": "ppo",
    "GKDTrainer": "gkd",
    "DistillationTrainer": "distillation",
}
# Arguments of trainers that are models beside the trained one, and the key of each.
_OTHER_MODELS = {
    "teacher_model": "teacher_model_name_or_path",
    "ref_model": "",
    "reward_model": "",
    "value_model": "",
}
_CONFIGS = {name.replace("Trainer", "Config"): command for name, command in _TRAINERS.items()} | {
    "TrainingArguments": "",
    "UnslothTrainingArguments": "sft",
}
_NO_SETTINGS = (  # arguments that are objects of the script
    "model",
    "tokenizer",
    "processing_class",
    "args",
    "peft_config",
    "data_collator",
    "callbacks",
    "ref_model",
    "token",
)


def _cells(text: str, path: Path) -> list[str]:
    """The code cells of a notebook, without the lines that are commands of the shell or of IPython."""
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"this is no notebook: {path.name}"
        raise UserError(problem, where=str(path), fix="save it again", code=2) from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    sources = []
    for cell in cells if isinstance(cells, list) else []:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source")
        text = "".join(map(str, source)) if isinstance(source, list) else str(source or "")
        lines = [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in text.splitlines()]
        sources.append("\n".join(lines))
    return sources


def _read_python(sources: Sequence[str], path: Path) -> Reading:
    """The keyword arguments of the calls that make a model, its adapter, a trainer and a dataset; the first of each."""
    reading = Reading({})
    trees = []
    for number, source in enumerate(sources, 1):
        try:
            trees.append(ast.parse(source))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            where = f"cell {number}" if len(sources) > 1 else path.name
            reading.unread[where] = "not read: this is not Python"
    script = _Script(reading, dict(_beside_the_trained(trees)))
    for tree in trees:
        for node in _statements(tree.body):
            script.read(node)
    if not script.has_trainer and not script.has_model:
        problem = f"no training was found in this script: {path.name}"
        fix = "give a script that calls a trainer of TRL (SFTTrainer, DPOTrainer) or FastLanguageModel of Unsloth"
        raise UserError(problem, where=str(path), fix=fix, code=2)
    tool = "unsloth" if script.is_unsloth else "trl"
    reading.program = f"{tool} {script.command or 'sft'}"
    return reading


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in order, those inside of functions and branches, too; but those of `if False:`."""
    for node in body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value:
            yield from _statements(node.orelse)
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from _statements([part for part in inner if isinstance(part, ast.stmt)])


def _beside_the_trained(trees: Sequence[ast.Module]) -> Iterator[tuple[str, str]]:
    """The variables of models that a trainer takes beside the one it trains, and the key of each ("": it has none)."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] in _TRAINERS:
                for keyword in node.keywords:
                    if keyword.arg in _OTHER_MODELS and isinstance(keyword.value, ast.Name):
                        yield keyword.value.id, _OTHER_MODELS[keyword.arg]


class _NotLiteral(Exception):
    """An expression whose value is known only when the script runs."""


class _Script:
    """What has been read of a script so far. `variables`: names that were given a literal value; `other_models`: those
    of models that are not trained.
    """

    def __init__(self, reading: Reading, other_models: Mapping[str, str]) -> None:
        self.reading = reading
        self.other_models = other_models
        self.variables: dict[str, Any] = {}
        self.is_unsloth = False
        self.has_model = False
        self.has_trainer = False
        self.has_config = False
        self.command = ""

    def read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    if target.id in self.other_models and isinstance(node.value, ast.Call):
                        self.other_model(self.other_models[target.id], node.value)
                        return
                    try:
                        self.variables[target.id] = self.value(node.value)
                    except _NotLiteral:
                        self.variables.pop(target.id, None)
        fields = [
            value
            for name, value in ast.iter_fields(node)
            if name not in ("body", "orelse", "finalbody", "handlers")
        ]
        for value in fields:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    for inner in ast.walk(part):
                        if isinstance(inner, ast.Call):
                            self.call(inner)

    def call(self, node: ast.Call) -> None:
        name = _dotted(node.func)
        owner, _, last = name.rpartition(".")
        if last == "from_pretrained" and re.match(r"Fast\w*Model", owner.rpartition(".")[2]):
            self.is_unsloth = True
            self.model(node)
        elif last == "from_pretrained" and "CausalLM" in owner:
            self.model(node)
        elif last == "get_peft_model" or last == "LoraConfig":
            if "use_peft" not in self.reading.keys:
                self.reading.keys["use_peft"] = True
                self.arguments(node, _LORA_NAMES, unread={"random_state", "max_seq_length"})
        elif last in _TRAINERS:
            if self.has_trainer:
                self.reading.unread[last] = "not read: the script trains a second time"
                return
            self.has_trainer = True
            self.command = _TRAINERS[last]
            self.trained(node)
            self.arguments(node, {"teacher_model": _OTHER_MODELS["teacher_model"]})
        elif last in _CONFIGS and not self.has_config:
            self.has_config = True
            self.command = self.command or _CONFIGS[last]
            self.arguments(node, {})
        elif last == "load_dataset":
            self.dataset(node)
        elif last == "train_on_responses_only":
            self.reading.keys["responses_only"] = True
        elif last == "get_chat_template":
            self.arguments(node, {}, only={"chat_template"})
        elif last == "BitsAndBytesConfig":
            self.arguments(node, {})

    def model(self, node: ast.Call) -> None:
        """The first model that is loaded is the one that is trained."""
        if self.has_model:
            return
        self.has_model = True
        if node.args:
            self.put("model_name_or_path", node.args[0])
        self.arguments(node, _MODEL_NAMES)

    def trained(self, node: ast.Call) -> None:
        """The model of a trainer, where it is the name of one: `SFTTrainer("Qwen/Qwen3-0.6B", ...)`."""
        named = [keyword.value for keyword in node.keywords if keyword.arg == "model"]
        for value in [*node.args[:1], *named]:
            with suppress(_NotLiteral):
                name = self.value(value)
                if isinstance(name, str) and not self.has_model:
                    self.has_model = True
                    self.reading.keys.setdefault("model_name_or_path", name)

    def other_model(self, key: str, node: ast.Call) -> None:
        """A model that is loaded, and not to be trained."""
        if key and node.args and key not in self.reading.keys:
            self.put(key, node.args[0])
            if any(keyword.arg == "quantization_config" for keyword in node.keywords):
                self.reading.unread["quantization_config"] = (
                    "of the teacher, not read: set objective.teacher_quantize to nf4 or int8"
                )

    def dataset(self, node: ast.Call) -> None:
        if "dataset_name" in self.reading.keys or not node.args:
            return
        self.put("dataset_name", node.args[0])
        if len(node.args) > 1:
            self.put("dataset_config", node.args[1])
        self.arguments(
            node,
            {
                "split": "dataset_train_split",
                "name": "dataset_config",
                "data_files": "dataset_files",
            },
        )
        self.reading.unread.setdefault(
            "dataset",
            "read as it is on the Hub: what the script maps, filters or splits is not read",
        )

    def arguments(
        self,
        node: ast.Call,
        names: Mapping[str, str],
        *,
        only: set[str] | None = None,
        unread: set[str] | frozenset[str] = frozenset(),
    ) -> None:
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in _NO_SETTINGS or keyword.arg in unread:
                continue
            if only is not None and keyword.arg not in only:
                continue
            self.put(names.get(keyword.arg, keyword.arg), keyword.value)

    def put(self, name: str, node: ast.expr) -> None:
        """The value of an argument, unless an earlier call has set it."""
        if name in self.reading.keys:
            return
        if name in ("train_dataset", "eval_dataset"):
            return
        if name in ("bf16", "fp16") and "bfloat16_supported" in ast.dump(node):
            self.reading.keys["bf16"] = "auto"
            return
        if name in ("reward_funcs", "tools"):
            functions = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
            usual = "score" if name == "reward_funcs" else "tool"
            self.reading.keys[name] = [_dotted(function) or usual for function in functions]
            return
        if name == "environment_factory" and _dotted(node):
            self.reading.keys[name] = _dotted(node)
            return
        try:
            value = self.value(node)
        except _NotLiteral:
            self.reading.unread[name] = f"not read: {ast.unparse(node)[:60]} is computed"
            return
        self.reading.keys[name] = value

    def value(self, node: ast.expr) -> Any:
        """A literal, a name that was given one, a type of torch, or arithmetic of such numbers. Raises _NotLiteral."""
        if isinstance(node, ast.Constant):
            if node.value is None or isinstance(node.value, bool | int | float | str):
                return node.value
            raise _NotLiteral
        if isinstance(node, ast.Name):
            if node.id in self.variables:
                return self.variables[node.id]
            raise _NotLiteral
        if isinstance(node, ast.Attribute) and _dotted(node).startswith("torch."):
            return node.attr
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(part) for part in node.elts]
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {
                str(self.value(key)): self.value(part) for key, part in pairs if key is not None
            }
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -_number(self.value(node.operand))
        if isinstance(node, ast.BinOp):
            return _computed(
                node.op, _number(self.value(node.left)), _number(self.value(node.right))
            )
        raise _NotLiteral


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e15:
        raise _NotLiteral
    return value


def _computed(operator: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if right != 0 and isinstance(operator, ast.FloorDiv):
        return left // right
    if right != 0 and isinstance(operator, ast.Div):
        return left / right
    raise _NotLiteral


def _dotted(node: ast.expr) -> str:
    """ "FastLanguageModel.from_pretrained" of the node of that name; "" for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        outer = _dotted(node.value)
        return f"{outer}.{node.attr}" if outer else node.attr
    return ""
