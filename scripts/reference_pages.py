"""Write the generated pages of docs/reference: `python scripts/reference_pages.py`.

commands.md comes from click, dataset-formats.md from the code that reads rows, events.md from the event classes,
hardware.md from gpus.toml, recipe.md (scripts/recipe_page.py) and the table of objectives.md from the schema,
python-api.md (scripts/python_page.py) from docstrings. A test compares each with this output.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import python_page
import recipe_page

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.data.examples import Example
from bloomery.data.sources.detection import detect_format
from bloomery.data.sources.formats import FORMATS, PROMPTS, documents_of, read_example
from bloomery.data.sources.rows import MEDIA_ROLES
from bloomery.facts.columns import (
    COLUMN_NAMES,
    DETAIL_KEYS,
    LISTS,
    MARKERS,
    MASKED_KEYS,
    PICTURE_FILES,
    PICTURES,
    THINKING_KEYS,
    TRAINED_KEYS,
    UNREAD_MEDIA,
    UNUSED,
)
from bloomery.facts.objectives import OBJECTIVES
from bloomery.hardware.specs import GpuSpec, gpu_table
from bloomery.hardware.vendors import VENDORS
from bloomery.monitor import events
from bloomery.recipe.load import json_schema

HOME = recipe_page.ROOT / "docs" / "reference"
NOTE = "<!-- `python scripts/reference_pages.py` writes this page from the code. -->"


# Commands


def commands_page() -> str:
    return "\n".join(
        [
            "# Commands",
            "",
            "Every command, argument and option. `--help` after a command prints the same text.",
            NOTE,
            "",
            "- RECIPE is a YAML file or the name of a packaged recipe. `section.key=value` after it overrides a key.",
            "- RUN is a path, a name below `runs/`, or `last`.",
            "- MODEL is a RUN, a Hugging Face folder, a Hub id, or `BASE+ADAPTER`.",
            "- [Exit codes](exit-codes.md) lists what each command returns.",
            "",
            *_command(cli, []),
        ]
    )


def _command(command: click.Command, path: list[str]) -> Iterator[str]:
    """The section of a command, then those of its subcommands."""
    context = click.Context(command, info_name=" ".join(["bloomery", *path]))
    if path:
        yield f"{'#' * (1 + len(path))} {' '.join(path)}\n"
        if not isinstance(command, click.Group):
            usage = " ".join(
                command.get_usage(context).removeprefix("Usage: ").replace("[OPTIONS] ", "").split()
            )
            yield f"```text\n{usage}\n```\n"
        about, *examples = re.split(r"Example: ", (command.help or "").replace("\b", ""))
        lines = [line.strip() for example in examples for line in example.strip().split("\n")]
        # options of the line above
        shown = re.sub(r"\n(?=--)", " \\\\\n    ", "\n".join(lines)).rstrip(".")
        yield f"{_text(about)}\n" + (f"\n```bash\n{shown}\n```\n" if shown else "")
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if options:
        yield "| option | value | default | effect |\n|---|---|---|---|"
        yield from (_option(one) for one in options)
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _command(inner, [*path, name])


def _option(option: click.Option) -> str:
    """A row of the table; a default that is written in the help moves into its column."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    about, shown = option.help or "", ""
    if found := re.search(r" ?\[default: (.*?)\]", about):
        about, shown = about.replace(found[0], ""), found[1]
    elif (
        not option.is_flag
        and isinstance(option.default, str | int | float)
        and option.default != ""
    ):
        shown = f"`{option.default}`"
    elif option.secondary_opts:
        shown = f"`{option.opts[0] if option.default else option.secondary_opts[0]}`"
    value = "" if option.is_flag else option.metavar or _kind(option.type)
    value += ", repeatable" if option.multiple else ""
    return f"| {names} | {_text(value)} | {_text(shown)} | {_text(about)} |"


def _kind(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{one}`" for one in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        limits = [
            f"{sign}{'' if opened else '='} {limit:g}"
            for sign, limit, opened in (
                (">", kind.min, kind.min_open),
                ("<", kind.max, kind.max_open),
            )
            if limit is not None and limit < 2**31
        ]
        return " ".join([kind.name.removesuffix(" range"), *limits])
    return kind.name


def _text(words: str) -> str:
    """Markdown: one paragraph for each of click's, with bars escaped."""
    paragraphs = [" ".join(part.split()) for part in words.replace("\b", "").split("\n\n")]
    return "\n\n".join(paragraphs).replace("|", "\\|").strip()


# Dataset formats

TURNS = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SAMPLES: dict[str, list[dict[str, Any]]] = {  # of each format of FORMATS
    "messages": [
        {"messages": [{"role": "system", "content": "Answer briefly."}, *TURNS]},
        {
            "tools": [TOOL],
            "messages": [
                {"role": "user", "content": "How warm is Oslo?"},
                {"role": "assistant", "tool_calls": [WEATHER]},
                {"role": "tool", "content": "21 C"},
                {"role": "assistant", "content": "21 degrees."},
            ],
        },
    ],
    "sharegpt": [
        {
            "conversations": [
                {"from": "human", "value": "What is 2 + 2?"},
                {"from": "gpt", "value": "4"},
            ]
        }
    ],
    "alpaca": [
        {"instruction": "Translate to German.", "input": "Good morning", "output": "Guten Morgen"},
        {
            "instruction": "And in French?",
            "output": "Bonjour",
            "history": [["Translate hello to German.", "Hallo"]],
        },
    ],
    "captions": [
        {"file_name": "scans/0001.png", "caption": "A receipt of a bakery, 23.50."},
        {"image": "scans/0002.png", "caption": "A parking ticket."},
    ],
    "completion": [
        {"prompt": "The capital of Norway is", "completion": " Oslo."},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
    ],
    "kto": [
        {"prompt": "What is 2 + 2?", "completion": "4", "label": True},
        {"prompt": "What is 2 + 2?", "completion": "5", "label": False},
    ],
    "preference": [
        {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5"},
        {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "5"}]},
    ],
    "prompts": [
        {"prompt": "What is 2 + 2?", "answer": "4", "level": 3},
        {"prompt": TURNS[:1], "answer": "4"},
    ],
}
ABOUT = {
    "messages": "A chat dataset in OpenAI's and TRL's format. The chat template formats it. "
    "`weight: 0` masks an assistant turn, as [other keys](#column-names) do. `tool_calls` and `tool` turns hold calls "
    "and results.",
    "sharegpt": "A chat dataset with `from` and `value`. A column `system` may hold the system message.",
    "alpaca": "An instruction dataset: a prompt and its response. `input` follows `instruction` on a line of its own. "
    "`system` and `history` are LLaMA-Factory's.",
    "captions": "A picture and the text that describes it: the user shows the picture, and the text is the answer. "
    "`prompt` may hold a question, else the picture stands alone. Folders of `datasets` (`metadata.jsonl`), WebDataset "
    "archives and texts beside pictures are read so: [Train on pictures](../how-to/pictures.md).",
    "completion": "TRL's prompt-completion dataset, as text or as messages. Labels of the prompt are masked.",
    "kto": "A KTO dataset: each response has a label, true for desirable, false for undesirable. A conversation with a "
    "label, of which the last response is meant, is read, too.",
    "preference": "A preference dataset for DPO, IPO, SimPO, ORPO and reward models: a chosen and a "
    "rejected response, as text, as messages or as one message. Without `prompt`, the prompt is the conversation "
    "before them, or the beginning that both share.",
    "prompts": "Prompts for reinforcement learning, as text or as messages: the model generates the completions. "
    "`rewards` get every other column, with its JSON types. A prompt may have `data.sequence_length` - "
    "`objective.max_completion_length` tokens.",
}
HEAD_OF_FORMATS = f"""# Dataset formats: chat, instruction, preference, KTO, pretraining

Set `data.path` to a dataset: a file, a folder or a Hub id. `bloomery prepare RECIPE --preview 3` prints how it is read.
[Prepare a dataset](../how-to/prepare-data.md) has file types, splits and validation. {NOTE}

| your dataset | other names of the format | `data.format` |
|---|---|---|
| chat dataset | OpenAI messages, ChatML conversations, Axolotl's `chat_template` | [`messages`](#messages) |
| chat dataset with `from` and `value` | ShareGPT, Vicuna | [`sharegpt`](#sharegpt) |
| instruction dataset | Alpaca, LLaMA-Factory's Alpaca with `history` | [`alpaca`](#alpaca) |
| pictures with captions | imagefolder, WebDataset, LLaVA's pretraining | [`captions`](#captions) |
| prompt-completion dataset | TRL's prompt-completion | [`completion`](#completion) |
| preference dataset | DPO, ORPO, IPO, SimPO and reward pairs; UltraFeedback | [`preference`](#preference) |
| KTO dataset | unpaired preference, binary labels | [`kto`](#kto) |
| prompt dataset | TRL's prompt-only; GRPO, RLOO | [`prompts`](#prompts) |
| pretraining dataset | raw text, code, FineWeb | [`text`](#text) |
| pre-tokenized dataset | `input_ids`, `labels`, `attention_mask` | [`tokens`](#tokens) |

`data.format: auto` detects the dataset format by the columns of the first row, `prompts` by the objective.
Otherwise set `data.format` to a name of this page.
`data.columns` maps a role to your column's name:

```yaml
data: {{path: chats.jsonl, format: messages, columns: {{messages: dialogue}}}}
```
"""
PLAIN = """
## text

A pretraining dataset: plain text, for `pretrain`; `sft` on text is continued pretraining. The loss covers every token.
The column is `text`, `content`, `code`, `body` or `document`, or the only text column.
`data.columns={text: NAME}` sets another.

```json
{"text": "def add(a, b):\\n    return a + b"}
```

## tokens

A pre-tokenized dataset: token ids from another program, in `input_ids`, `tokens` or `token_ids`.
Set `tokenizer.from` to the tokenizer that made them.
Padding (`attention_mask` 0) is removed.
`labels` (masked: -100), `assistant_masks`, `completion_mask` or `loss_mask` set the loss mask.
With `labels` that mask tokens, a generated recipe has `objective.kind: sft`; `pretrain` masks them, too.

```json
{"input_ids": [464, 3139, 286, 2159, 318, 18065], "loss_mask": [0, 0, 0, 0, 0, 1]}
```

## Scores of a teacher

`bloomery generate TEACHER --data PATH --out answers.jsonl --top-scores K` writes rows of [`tokens`](#tokens), the
prompt masked, and `answers.jsonl.scores`: at each token of
an answer the teacher's K likeliest tokens, for `objective.teacher_scores` of [`distill`](objectives.md#distill).
Binary, little-endian, no pickle:

| bytes | what it is |
|---|---|
| 16 | the letters "bloomery scores" and a byte 1, the version |
| 4 | uint32: K |
| 4 | uint32: entries of the teacher's output layer |
| 32 | SHA-256 of its tokenizer |
| 8 | zeros |
| then of each answer: 16 | BLAKE2b of all ids of the row as int64, prompt included |
| 4 | uint32: place of the first token of the answer in the row |
| 4 | uint32: N, tokens of the answer |
| 4 x N x K | uint32: ids, the likeliest first |
| 4 x N x K | float32: their log-probabilities in nats, at temperature 1 |

That is 8 x K bytes per token of an answer: 512 with K = 64, 256 KiB for an answer of 512 tokens. Rows are found by
their ids: files of several shards may be named together
(`teacher_scores: part-*.jsonl.scores`), and rows may be shuffled or split, but not changed.
"""


NAMES_OF_COLUMNS = """
## Column names

Every column is read, refused, or listed as `not read` by `prepare`, `plan` and `train`. No column is dropped silently.
A name in upper case counts, too. `data.columns` sets another name for a role; usual names are then not looked for.

| role | usual names |
|---|---|
| conversation | {lists}, or the only column with turns |
{roles}

- `prompt` has the usual names of `instruction`, and `completion` those of `output`.
- The input follows its prompt on a line of its own.
- The system message and the history come before the prompt, in every format.
- `label` next to a conversation or a response makes a KTO dataset. `sft` never trains on a response labeled false.
- `rejected` next to a conversation or a response makes preference pairs. The conversation ends with the chosen one.
- One message may stand for a list of messages: `"chosen": {{"role": "assistant", "content": "4"}}`.
- Keys that are null are left out of turns, calls and tools: Parquet and Arrow give each row the keys of all rows.
- A table with several text columns of other names is refused with the line that says which one is the prompt.

Keys of a turn, besides its role and its text:

| key | effect |
|---|---|
| {trained} | false or 0 masks the turn |
| {masked} | true or 1 masks the turn |
| {thinking} | the reasoning before the response |
| `tool_calls`, `function_call` | calls; `function_call` is OpenAI's older form |
| `name`, `tool_call_id` | of the result of a call |
| {detail} | refused: a turn is trained on as a whole |
| another key | listed: `not read   in turns: tool_plan` |

Pictures are in parts of turns, or in a column ({pictures}; {files} where it names pictures).
[Train on pictures](../how-to/pictures.md) has the forms.
They need a model that sees them. Sound and video are refused, as columns ({media}) and as markers ({markers}).
Set `data.on_error=skip` to leave such rows out.

These columns have a meaning in other tools, and are listed as not read:

| column | what other tools use |
|---|---|
{unused}
"""


def formats_page() -> str:
    rows = []
    for name, row_format in FORMATS.items():
        required_roles = row_format.required_roles
        hidden_roles = {*required_roles, *MEDIA_ROLES}  # pictures, in every format
        optional_roles = [role for role in row_format.roles if role not in hidden_roles]
        cells = (_names(required_roles), _names(optional_roles), _names(takers(name)))
        rows.append(f"| [`{name}`](#{name}) | {' | '.join(cells)} |")
    sections = [
        "\n".join(
            [
                f"\n## {name}\n",
                f"{ABOUT[name]}\n",
                "```json",
                *map(json.dumps, SAMPLES[name]),
                "```",
            ]
        )
        for name in FORMATS
    ]
    head = "| `data.format` | required columns | optional roles | objectives |\n|---|---|---|---|"
    plain = f"| [`text`](#text) | one text column | | {_names(k for k in OBJECTIVES if _reads_text(k))} |"
    tokens = "| [`tokens`](#tokens) | one column of token ids | a loss mask | `pretrain`, `sft`, `distill` |"
    formats = "\n".join([HEAD_OF_FORMATS, head, *rows, plain, tokens, *sections])
    return f"{formats}\n{PLAIN}{names_of_columns()}"


def names_of_columns() -> str:
    """The table by which every format decides what becomes of a column, and of a key of a turn."""
    roles = [f"| {role} | {_names(names)} |" for role, names in COLUMN_NAMES.items()]
    unused = [f"| `{name}` | {use} |" for name, use in UNUSED.items()]
    return NAMES_OF_COLUMNS.format(
        roles="\n".join(roles),
        lists=_names(LISTS),
        trained=_names(TRAINED_KEYS),
        masked=_names(MASKED_KEYS),
        thinking=_names(THINKING_KEYS),
        detail=_names(DETAIL_KEYS),
        pictures=_names(PICTURES),
        files=_names(PICTURE_FILES),
        media=_names(UNREAD_MEDIA),
        markers=_names(MARKERS[1:]),
        unused="\n".join(unused),
    )


def example_of(name: str, row: dict[str, Any]) -> Example:
    """The sample as the data pipeline reads it."""
    found = read_example(row, format=name, columns={}, where=name)
    detected = None if name == PROMPTS else name  # by the objective, not by the row
    assert isinstance(found, Example) and detect_format(row) == detected, (name, found)
    return found


def takers(name: str) -> list[str]:
    """The objectives that train on rows of a format; `pretrain` trains on all tokens of conversations."""
    example = example_of(name, SAMPLES[name][0])
    turns = example.kind in ("chat", "completion")
    return [
        kind
        for kind in OBJECTIVES
        if _takes(kind, example) and (turns or OBJECTIVES[kind].data_kind != "any")
    ]


def _takes(kind: str, example: Example) -> bool:
    try:
        return bool(list(documents_of(example, OBJECTIVES[kind].data_kind)))
    except UserError:
        return False


def _reads_text(kind: str) -> bool:
    return OBJECTIVES[kind].data_kind in ("any", "sft")


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


# Objectives

BLOCK = re.compile(r"<!-- objectives -->\n.*?<!-- end -->", re.DOTALL)


def objectives_page() -> str:
    """The page with a new table; its other text is written by hand."""
    text = (HOME / "objectives.md").read_text(encoding="utf-8")
    return BLOCK.sub(
        "<!-- objectives -->\n" + "\n".join(objectives_table()) + "\n<!-- end -->", text
    )


def objectives_table() -> Iterator[str]:
    schema = json_schema()
    sections = recipe_page.sections_of(schema, schema["properties"]["objective"])
    yield "| `objective.kind` | dataset formats | loss per | reference model | keys and defaults |"
    yield "|---|---|---|---|---|"
    for kind, spec in OBJECTIVES.items():
        section = next(one for one in sections if recipe_page.takes(one, kind))
        keys = {
            key: part.get("default") for key, part in section["properties"].items() if key != "kind"
        }
        words = (
            f"`{key}`" + ("" if value is None else f" {recipe_page.value(value)}")
            for key, value in keys.items()
        )
        formats = [name for name in FORMATS if kind in takers(name)]
        formats += ["text", "tokens"] if _reads_text(kind) else []
        unit = {"answer": "response", "token": "loss token", "label": "loss token"}.get(
            spec.loss_unit, spec.loss_unit
        )
        reference = "yes" if spec.reference else "teacher" if spec.extra_forwards else "no"
        if spec.source == "rollouts" and not spec.extra_forwards:
            reference = f"with `{'kl_coef' if 'kl_coef' in keys else 'beta'}`"
        yield f"| [`{kind}`](#{kind}) | {_names(formats)} | {unit} | {reference} | {', '.join(words)} |"


# Events

HEAD_OF_EVENTS = f"""# Events

Read `events.jsonl` in the run folder: one JSON object per line.
[Logging](../how-to/logging.md) lists what else a run writes.
{NOTE}

```python
from pathlib import Path
from bloomery.monitor.events import last_per_step, read_events

for event in last_per_step(read_events(Path("runs/demo/events.jsonl"))):
    print(event.step, type(event).__name__)
```

Every event has `event` (its name), `step` (finished optimizer steps) and `time` (seconds since 1970).

- The schema is {events.SCHEMA} (`RunStarted.schema`). Readers refuse another schema.
- A number that is not finite is `null`.
- `crc32` ends each line: the CRC-32 of the bytes before it. Readers skip a truncated or changed line.
- After a resume, the last event of a step counts (`last_per_step`).
- Secrets are replaced by `[hidden]`.
"""


def events_page() -> str:
    source = Path(events.__file__).read_text(encoding="utf-8")
    lines = source.splitlines()
    parts = [HEAD_OF_EVENTS]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in events.KINDS:
            about = " ".join((ast.get_docstring(node) or "").replace("None", "null").split())
            parts += [
                f"## {node.name}\n\n{about}\n",
                "| field | type | default | meaning |\n|---|---|---|---|",
            ]
            parts += [_field(one, lines) for one in node.body if isinstance(one, ast.AnnAssign)]
            parts.append("")
    return "\n".join(parts)


def _field(node: ast.AnnAssign, lines: list[str]) -> str:
    """A row of the table: the comment behind a field, or alone on the line above it, is its meaning."""
    kind = ast.unparse(node.annotation).replace(" | None", " or null").replace("None", "null")
    default = (
        ""
        if node.value is None
        else "`{}`"
        if isinstance(node.value, ast.Call)
        else _as_json(node.value)
    )
    line_above = lines[node.lineno - 2].strip()
    above = line_above.removeprefix("# ") if line_above.startswith("# ") else ""
    about = (lines[node.lineno - 1].partition("  # ")[2] or above).replace("None", "null")
    return f"| `{ast.unparse(node.target)}` | {kind} | {default} | {about} |"


def _as_json(value: ast.expr) -> str:
    return f"`{json.dumps(ast.literal_eval(value))}`"


# Hardware

HEAD_OF_HARDWARE = f"""# Supported hardware

Run `bloomery doctor` to check your GPU, or `bloomery plan RECIPE --gpu all` to compare GPUs.
{NOTE}

Supported: AMD GPUs (ROCm), NVIDIA GPUs (CUDA), Intel's Arc A and B and Data Center GPU Max (XPU), and x86 CPUs.
Planned for, not trained on: Apple's chips. Not supported: graphics in Intel's processors.
Several GPUs train together, also of two models: [how](../how-to/several-gpus.md).

| | status |
|---|---|
| CPU | tested: training, resume, evaluation and export run in the tests |
| AMD, NVIDIA | not yet run; figures come from the table and [published runs](../explanation/plan-accuracy.md) |
| Intel | not run on this hardware; a simulated device behind `torch.xpu` trains in the tests; speeds are assumed |
| Apple | a plan of memory: M3 and later have no published rate |

A GPU that is not listed is reported as unknown. Bloomery never substitutes a similar GPU's figures.

- **Precision**: what `train.precision: auto` can use. float16 needs loss scaling, which is automatic.
- **Attention**: the kernel of [`train.attention: auto`](../how-to/attention.md).
- **Speed**: the share of the peak that matmuls of a training step reach (low, typical, high), and its source.

## Architectures
"""


def hardware_page() -> str:
    columns = (
        "architecture",
        "precision",
        "matrix units",
        "flash attention",
        "`torch.compile`",
        "speed",
    )
    lines = [HEAD_OF_HARDWARE, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for arch in sorted(gpu_table().arch, key=lambda one: one.vendor):
        share = (
            " to ".join(f"{100 * one:.0f}" for one in arch.efficiency[::2])
            if arch.efficiency
            else "unknown"
        )
        typical = f" ({100 * arch.efficiency[1]:.0f})" if arch.efficiency else ""
        flash = "no" if arch.fused_attention == "none" else arch.fused_attention
        flash = flash if arch.varlen_attention else "memory-efficient instead"
        lines.append(
            f"| {arch.family}: {', '.join(arch.names)} | {_precision(arch)} | {arch.matrix_units or 'none'} "
            f"| {flash} | {'yes' if arch.compile else 'no'} "
            f"| {share}{'%' * bool(arch.efficiency)}{typical}: {arch.efficiency_source} |"
        )
    lines += [
        "",
        "## GPUs",
        "",
        "Peaks are dense TFLOP/s in the precision named. `~`: computed from units, clock and rate per clock. "
        "Other peaks are the vendor's.",
        "",
    ]
    for vendor, facts in VENDORS.items():
        title = facts.name
        head = "| GPU | architecture | memory, GB | bandwidth, GB/s | peak |\n|---|---|--:|--:|--:|"
        lines += [f"### {title}\n", head]
        archs = {name for arch in gpu_table().arch if arch.vendor == vendor for name in arch.names}
        lines += [_gpu(spec) for spec in gpu_table().gpu if spec.arch in archs]
        lines.append("")
    head = "| instruction set | bfloat16 | GFLOP/s per core: float32 | bfloat16 | source |\n|---|---|--:|--:|---|"
    lines += ["## CPUs\n", head]
    lines += [
        f"| {cpu.name} | {'yes' if cpu.bf16 else 'no'} | {cpu.gflops['float32']:g} | {cpu.gflops.get('bfloat16', 0):g} "
        f"| {cpu.source} |".replace("| 0 |", "| |")
        for cpu in gpu_table().cpu
    ]
    return "\n".join(lines) + "\n"


def _precision(arch: Any) -> str:
    if arch.bf16 != "none":
        return "bfloat16" if arch.bf16 == "full" else "bfloat16 (half rate)"
    return "float32" if arch.float16_rate or arch.cautious else "float16"


def _gpu(spec: GpuSpec) -> str:
    kind = next(
        (name for name in ("bfloat16", "float16", "float32") if name in spec.peak_tflops), ""
    )
    peak = (
        f"{'~' if spec.peaks_estimated else ''}{spec.peak_tflops[kind]:g} {kind}"
        if kind
        else "unknown"
    )
    memory = " or ".join(map(str, spec.memory_gib)) or "shared"
    return f"| {spec.name} | {spec.arch} | {memory} | {spec.bandwidth_gbs:,g} | {peak} |"


PAGES: dict[Path, Callable[[], str]] = {
    HOME / "commands.md": commands_page,
    HOME / "dataset-formats.md": formats_page,
    HOME / "events.md": events_page,
    HOME / "objectives.md": objectives_page,
    HOME / "hardware.md": hardware_page,
    recipe_page.PAGE: recipe_page.page,
    recipe_page.EVERYTHING: recipe_page.everything,
    python_page.PAGE: python_page.page,
}

if __name__ == "__main__":
    for path, made in PAGES.items():
        text = made().rstrip() + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(recipe_page.ROOT)} is rewritten\n")
