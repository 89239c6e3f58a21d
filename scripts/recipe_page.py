"""Write docs/reference/recipe.md and recipes/everything.yaml from the recipe's schema: `python scripts/recipe_page.py`.

Keys, types, defaults and meanings come from `bloomery.recipe.schema`. A test compares both files with what this writes.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.recipe.load import json_schema

ROOT = Path(__file__).resolve().parents[1]
PAGE, EVERYTHING = ROOT / "docs/reference/recipe.md", ROOT / "src/bloomery/recipes/everything.yaml"
SHOWN = {  # examples that everything.yaml sets, as a recipe needs a model and data
    "preset",
    "path",
    "glob",
    "columns",
    "train",
    "tokens",
    "epochs",
    "tokens_per_second",
    "duration",
    "memory",
    "perplexity",
    "prompts",
}
LENGTHS = "2000 steps, 10B tokens, 3 epochs, 20% or 8h"
PAGE_HEAD = f"""# Recipe reference

Every section and key of a recipe. `bloomery recipes show everything` prints them as one recipe.
[Recipes](recipes.md) explains how they are read.
<!-- `python scripts/recipe_page.py` writes this page from the schema. -->

- A length or an interval is one of {LENGTHS} (20% is a share of the run; a bare number counts steps).
- A count takes a suffix: 16384, 1.5M, 10B. A size takes a unit: 12GiB, 500MB.
- `auto` is resolved once by `bloomery plan`, which prints the choice with its reason.
- A section with a `kind` accepts it alone: `adapter: lora`.
- Each key has an anchor, its path: `recipe.md#train.batch_size`. With the kind where there are several:
  `recipe.md#objective.grpo.beta`.
"""
# One for each section of the page. A test loads each, with a model and a dataset where it names none.
EXAMPLES = {
    "claims": """
claims: {tokens: 2 to 4 M, duration: 1h to 8h, memory: 10 to 11 GB, perplexity: {1000 steps: 20 to 60}}
""",
    "model": """
model: {from: Qwen/Qwen3-0.6B}                                  # a folder in Hugging Face format, or a Hub id
""",
    "model.rope_scaling": """
model:
  from: Qwen/Qwen3-8B
  rope_scaling: {kind: yarn, factor: 4, original_max_positions: 32768}
  max_positions: 131072
""",
    "model.delta_net": """
model:
  family: qwen3_5_text
  hidden_size: 512
  intermediate_size: 1408
  num_layers: 8
  num_heads: 8
  num_kv_heads: 2
  head_dim: 64
  delta_net: {num_key_heads: 4, num_value_heads: 8, key_head_dim: 64, value_head_dim: 64}
tokenizer: {train: {kind: bpe, vocab_size: 8000}}
objective: pretrain
""",
    "model.experts": """
model:
  family: qwen3_moe
  hidden_size: 512
  num_layers: 8
  num_heads: 8
  num_kv_heads: 2
  head_dim: 64
  experts: {count: 16, per_token: 2, width: 512}
tokenizer: {train: {kind: bpe, vocab_size: 8000}}
objective: pretrain
""",
    "tokenizer": """
tokenizer: {additional_special_tokens: ["<|im_start|>", "<|im_end|>"]}
adapter: {kind: lora, modules_to_save: [embed_tokens, lm_head]}     # new tokens need trained embeddings
""",
    "tokenizer.train": """
tokenizer: {train: {kind: bpe, vocab_size: 16000}}
model: {preset: go-coder-tiny}
objective: pretrain
""",
    "data": """
data: {path: chats.jsonl, sequence_length: 2048, validation: 5%}
""",
    "data.sources": """
data:
  sources:
    - {path: chats.jsonl, weight: 2}                            # read twice per epoch
    - {path: answers.csv, columns: {prompt: question, completion: answer}}
""",
    "data.chat": """
data: {path: chats.jsonl, chat: {train_on: last, template_kwargs: {enable_thinking: false}}}
""",
    "objective: pretrain": """
objective: pretrain
""",
    "objective: sft": """
objective: {kind: sft, loss: dft}
""",
    "objective: dpo, ipo": """
objective: {kind: dpo, beta: 0.1}
adapter: lora                                                   # the reference model is the base: no second copy
""",
    "objective: simpo": """
objective: {kind: simpo, beta: 2, gamma: 1}
""",
    "objective: orpo": """
objective: {kind: orpo, beta: 0.1}
""",
    "objective: kto": """
objective: {kind: kto, desirable_weight: 1, undesirable_weight: 1.33}
adapter: lora
""",
    "objective: reward": """
objective: reward
adapter: lora
""",
    "objective: distill": """
objective: {kind: distill, teacher: Qwen/Qwen3-8B, teacher_quantize: nf4, temperature: 2}
""",
    "objective: on_policy_distill": """
objective: {kind: on_policy_distill, teacher: Qwen/Qwen3-8B, max_completion_length: 256}
""",
    "objective: grpo": """
objective: {kind: grpo, num_generations: 8, max_completion_length: 256}
rewards: [{verifier: math, column: answer}]
train: {batch_size: 64}                                         # completions: 8 of each of 8 prompts
""",
    "objective: rloo": """
objective: {kind: rloo, num_generations: 4, beta: 0.05}
rewards: [{python: "my_rewards.py:score"}]
adapter: lora
train: {batch_size: 64}
""",
    "objective: ppo": """
objective: {kind: ppo, kl_coef: 0.05}
rewards: [{model: runs/my-reward}]
adapter: lora
train: {batch_size: 64}
""",
    "rewards: python": """
objective: grpo
rewards: [{python: "my_rewards.py:score", timeout: 2m, memory: 8GiB}]
""",
    "rewards: verifier": """
objective: grpo
rewards:
  - {verifier: math, column: answer}
  - {verifier: length, max_characters: 400, weight: 0.2}
""",
    "rewards: model": """
objective: grpo
rewards: [{model: runs/my-reward, weight: 0.5, name: tone}]
""",
    "rewards: function": """
objective: grpo
rewards: [{function: score}]           # with bloomery.train(recipe, rewards=[score])
""",
    "rewards: plugin": """
objective: grpo
rewards: [{plugin: politeness}]
""",
    "tools": """
objective: grpo
tools: [{python: "my_tools.py:calculate"}]
rewards: [{verifier: math, column: answer}]
""",
    "environment": """
objective: grpo
environment: {python: "my_game.py:Game", timeout: 10s, memory: 1GiB}
""",
    "adapter: none": """
adapter: none
""",
    "adapter: lora, dora": """
adapter: {kind: lora, rank: 16, alpha: 32, target_modules: [all-linear]}
""",
    "adapter: peft": """
adapter: {kind: peft, method: IA3, target_modules: [k_proj, v_proj, down_proj], feedforward_modules: [down_proj]}
""",
    "quantize": """
quantize: nf4
adapter: lora                                                   # QLoRA
""",
    "vision": """
model: {from: HuggingFaceTB/SmolVLM2-500M-Video-Instruct}
vision: {train: projector, freeze_language_model: true}
""",
    "optimizer": """
optimizer: {kind: adamw, learning_rate: 2e-4, schedule: cosine, warmup: 3%}
""",
    "optimizer.schedule": """
optimizer: {learning_rate: 3e-4, schedule: {kind: wsd, decay: 20%}, warmup: 200 steps}
""",
    "router": """
model: {from: Qwen/Qwen3-30B-A3B}
adapter: lora
router: {loss: 0.001, counts: step}
""",
    "train": """
train: {epochs: 3, batch_size: 16, precision: auto, activation_checkpointing: full}
""",
    "parallel": """
parallel: {replicate: 2, shard: 4}                              # eight devices
""",
    "checkpoint": """
checkpoint: {every: 30m, keep: 2}
""",
    "eval": """
eval: {every: 10%, early_stopping_patience: 3}
""",
    "sample": """
sample: {prompts: ["What is a bloomery?"], max_new_tokens: 100, temperature: 0}
""",
    "sample.prompts": """
sample: {prompts: [{image: receipt.png, text: "What is the total?"}]}
""",
    "logging": """
logging: {every: 1 steps, trackers: [tensorboard, wandb]}
""",
    "logging.trackers": """
logging: {trackers: [{command: "python send_events.py"}]}
""",
}
HEAD = f"""# Every key that a recipe can have, with its default and its meaning. Copy what you need.
# A line that begins with "# key:" is unset by default, or belongs to another kind.
# Written by `python scripts/recipe_page.py` from the schema; docs/reference/recipe.md has the allowed values.
# Lengths: {LENGTHS} (20% is a share of the run).
"""


def resolved(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part


def sections_of(schema: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections that a value may be, one for each member of a union."""
    if "$ref" in part:
        found = resolved(schema, part)
        return [found] if "properties" in found else []
    members = (
        part.get("anyOf", [])
        + part.get("oneOf", [])
        + [part[key] for key in ("items",) if key in part]
    )
    return list(
        {id(one): one for member in members for one in sections_of(schema, member)}.values()
    )


def allowed(schema: dict[str, Any], part: dict[str, Any]) -> list[str]:
    """The values that a key takes, as text."""
    if "$ref" in part:
        return (
            ["a section"]
            if "properties" in resolved(schema, part)
            else allowed(schema, resolved(schema, part))
        )
    if members := part.get("anyOf", part.get("oneOf")):
        words = list(dict.fromkeys(word for member in members for word in allowed(schema, member)))
        return [word for word in words if word != "null"]
    if "enum" in part or "const" in part:
        return [f"`{value}`" for value in part.get("enum", [part.get("const")])]
    kind = part.get("type")
    if kind in ("integer", "number"):
        bounds = (
            ("exclusiveMinimum", ">"),
            ("minimum", ">="),
            ("exclusiveMaximum", "<"),
            ("maximum", "<="),
        )
        limits = [
            f"{sign} {part[key]:,}" if part[key] >= 10_000 else f"{sign} {part[key]:g}"
            for key, sign in bounds
            if key in part and abs(part[key]) < 2**31
        ]
        return [" ".join([str(kind), *limits])]
    if kind == "array":
        if "prefixItems" in part:
            return ["list of 2 numbers"]
        return ["list of " + " or ".join(allowed(schema, part.get("items", {})))]
    return {
        "string": ["text"],
        "boolean": ["`true`", "`false`"],
        "object": ["keys with values"],
    }.get(str(kind), [])


def value(found: Any) -> str:
    """As YAML in one line; most JSON is."""
    if isinstance(found, str):
        plain = (
            found
            and not set(found) & set("*#:[]{},\"'&!<>")
            and found.lower() not in ("true", "false", "null")
        )
        return found if plain else json.dumps(found)
    if isinstance(found, list):
        return f"[{', '.join(map(value, found))}]"
    if isinstance(found, dict):
        return f"{{{', '.join(f'{key}: {value(one)}' for key, one in found.items())}}}"
    return json.dumps(found) if found is None or isinstance(found, bool) else f"{found:.12g}"


@dataclass(frozen=True)
class Table:
    """A section of the page: one kind of a section of the recipe, or the section itself."""

    path: tuple[str, ...]
    section: dict[str, Any]
    about: str
    kinds: tuple[str, ...] = ()  # of a section that has several forms: grpo, or python for rewards

    @property
    def title(self) -> str:
        return ".".join(self.path) + (": " + ", ".join(self.kinds) if self.kinds else "")


def tables(
    schema: dict[str, Any], path: tuple[str, ...], section: dict[str, Any]
) -> Iterator[Table]:
    """The sections within a section, in the order of its keys. One with several forms comes first by itself."""
    for key, part in section["properties"].items():
        forms = sections_of(schema, part)
        about = part.get("description", "")
        place = (*path, key)
        if len(forms) > 1:
            yield Table(place, {"properties": {}}, about)
        for form in forms:
            kinds = kinds_of(schema, form) if len(forms) > 1 else ()
            yield Table(place, form, about, kinds)
            yield from tables(schema, place, form)


def kinds_of(schema: dict[str, Any], form: dict[str, Any]) -> tuple[str, ...]:
    """The values of `kind`; of forms without one, the key that they need: `python` or `verifier` of rewards."""
    if "kind" in form["properties"]:
        return tuple(word.strip("`") for word in allowed(schema, form["properties"]["kind"]))
    return tuple(form["required"][:1])


def slug(title: str) -> str:
    """The anchor of a heading, on a code host and in the built pages."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title)).strip("-").lower()


def meaning(part: dict[str, Any], words: str, default: str) -> str:
    """What a key does, with an example where a text is expected and the default is none."""
    about: str = part.get("description", "")
    examples = part.get("examples", [])
    needs_one = words.startswith(("text", "list of text")) and not default
    if needs_one and examples and not isinstance(examples[0], dict):
        about += f" Example: `{value(examples[0])}`."
    return about


def rows(schema: dict[str, Any], table: Table, anchored: set[str]) -> Iterator[str]:
    """A row for each key. Its anchor is its path, such as `train.seed`; of a form, also `objective.grpo.beta`."""
    yield "| key | allowed | default | meaning |\n|---|---|---|---|"
    for key, part in table.section["properties"].items():
        names = [".".join((*table.path, key))]
        names += [".".join((*table.path, kind, key)) for kind in table.kinds]
        forms = sections_of(schema, part)
        # A section of the recipe has its heading as its anchor, and its row leads there.
        new = [name for name in names if name not in anchored and not (forms and not table.path)]
        anchored.update(new)
        anchors = "".join(f'<a id="{name}"></a>' for name in new)
        shown = f"[`{key}`](#{slug(names[0])})" if forms else f"`{key}`"

        default = f"`{value(part['default'])}`" if part.get("default") not in (None, [], {}) else ""
        if forms and isinstance(part.get("default"), dict):
            default = ""
        if key in table.section.get("required", []):
            default = "required"
        words = ", ".join(allowed(schema, part)).replace("|", "\\|")
        about = meaning(part, words, default).replace("|", "\\|")
        yield f"| {anchors}{shown} | {words} | {default} | {about} |"


def overview(schema: dict[str, Any], table: Table) -> Iterator[str]:
    """The forms of a section that has several: each with its meaning and a link to its keys."""
    forms = sections_of(schema, _part_at(schema, table.path))
    yield "| form | meaning |\n|---|---|"
    for form in forms:
        kinds = kinds_of(schema, form)
        key = "kind" if "kind" in form["properties"] else kinds[0]
        title = Table(table.path, form, "", kinds).title
        about = form["properties"][key].get("description", "")
        yield f"| [{', '.join(kinds)}](#{slug(title)}) | {about} |"


def _part_at(schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    part = schema
    for key in path:
        form = part if "properties" in part else sections_of(schema, part)[0]
        part = form["properties"][key]
    return part


def page() -> str:
    schema = json_schema()
    anchored = set[str]()
    parts = [PAGE_HEAD]
    recipe = Table((), schema, "")
    parts.append("## Sections\n\n" + "\n".join(rows(schema, recipe, anchored)) + "\n")
    for table in tables(schema, (), schema):
        depth = "##" if len(table.path) == 1 and not table.kinds else "###"
        part = f"{depth} {table.title}\n\n{table.about}\n\n"
        if table.title in EXAMPLES:
            part += f"```yaml\n{EXAMPLES[table.title].strip()}\n```\n\n"
        is_overview = not table.section["properties"]
        part += "\n".join(overview(schema, table) if is_overview else rows(schema, table, anchored))
        parts.append(part + "\n")
    return "\n".join(parts)


HIDDEN = ("rope_scaling", "delta_net", "experts")  # sections that are off by default


def entries(
    schema: dict[str, Any], section: dict[str, Any], indent: str, off: str | None
) -> Iterator[tuple[str, str]]:
    """(line, comment) for each key; `off`: the indentation at which all lines are commented out."""

    def line(text: str, hidden: bool) -> str:
        at = off if off is not None else indent if hidden else None
        return indent + text if at is None else f"{at}# {indent[len(at) :]}{text}"

    for key, part in section["properties"].items():
        examples, default, found = (
            part.get("examples", []),
            part.get("default"),
            sections_of(schema, part),
        )
        words, about = allowed(schema, part), part.get("description", "")
        chosen = [
            word.strip("`")
            for word in words
            if word.startswith("`") and word not in ("`true`", "`false`")
        ]
        about += f" One of {', '.join(chosen)}." if len(chosen) > 1 else ""
        if found and (isinstance(default, dict) or key in ("model", "data", "train", *HIDDEN)):
            first = [
                one
                for one in found
                if not isinstance(default, dict) or takes(one, default.get("kind"))
            ][:1]
            hidden = off if off is not None else indent if key in HIDDEN else None
            yield line(f"{key}:", hidden is not None), part.get("description", "")
            for one in [*first, *(other for other in found if other not in first)]:
                inner = hidden if hidden is not None else None if one in first else indent + "  "
                yield from entries(schema, one, indent + "  ", inner)
            continue
        if default in (None, [], {}) and key == "kind":
            default = part.get("const", part.get("enum", [None])[0])
        if examples and (default in (None, [], {}) or key in SHOWN):
            yield line(f"{key}: {value(examples[0])}", key not in SHOWN), about
            continue
        yield line(f"{key}: {value(default)}", default is None), about
        for example in examples:
            yield line(f"{key}: {value(example)}", True), ""


def takes(section: dict[str, Any], kind: str | None) -> bool:
    stated = section["properties"].get("kind", {})
    return kind is None or kind in stated.get("enum", [stated.get("const")])


def everything() -> str:
    schema, lines = json_schema(), []
    for line, comment in entries(schema, schema, "", None):
        if not line.startswith((" ", "#")) and lines[-1:] != [""]:
            lines.append("")
        lines.append(f"{line:<39} # {comment}" if comment else line)
    return HEAD + "\n" + "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    EVERYTHING.write_text(everything(), encoding="utf-8")
