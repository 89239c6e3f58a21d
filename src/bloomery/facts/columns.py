"""The table of what other tools' datasets call their columns and the keys of their turns, and what each becomes here.

A name is read (it is one of a role's), refused (pictures and sound, marks of single tokens), or listed as not read.
Names were taken from the documentation and the readers of: OpenAI fine-tuning, ShareGPT, Alpaca, Axolotl
(`chatml.intel`, `argilla`, `icr`, `ultra`, `chat_template`), LLaMA-Factory (`dataset_info.json`), ms-swift (standard
format), TRL, torchtune, LLaVA, and from public sets of preferences (UltraFeedback, Orca pairs, HH, StackExchange).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bloomery.core.errors import one_line

# Lists of turns: OpenAI's, ShareGPT's, and other usual names.
# `texts`: of The Cauldron and FineVision.
LISTS = (
    "messages",
    "conversations",
    "conversation",
    "dialogue",
    "dialog",
    "turns",
    "chat",
    "texts",
)

# The usual names of each role, in any case. The first one that a row has is read.
COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    # What is asked: Alpaca's instruction, ms-swift's query, Intel's question, FLAN's inputs.
    "instruction": (
        "instruction",
        "question",
        "query",
        "prompt",
        "input",
        "human",
        "user",
        "problem",
        "task",
        "inputs",
    ),
    "output": (
        "output",
        "response",
        "answer",
        "completion",
        "assistant",
        "target",
        "reply",
        "solution",
        "bot",
        "gpt",
        "targets",
    ),
    "input": ("input", "context", "passage"),
    "system": ("system", "system_prompt", "system_message", "system_instruction"),
    "history": ("history",),
    # Of a picture: what describes it. `text` is plain text without a picture.
    "caption": ("caption", "captions", "text", "description"),
    "tools": ("tools", "functions"),
    # Of one response, whether it is desirable: TRL's and ms-swift's label, LLaMA-Factory's kto_tag.
    "label": ("label", "kto_tag", "desirable", "is_desirable"),
    # Chosen and rejected: DPO's, argilla's, LLaMA-Factory's, torchtune's, OpenAI's, StackExchange's.
    "chosen": (
        "chosen",
        "chosen_response",
        "chosen_messages",
        "chosen_conversations",
        "chosen_answer",
        "preferred_output",
        "preferred",
        "response_j",
    ),
    "rejected": (
        "rejected",
        "rejected_response",
        "rejected_messages",
        "rejected_conversations",
        "rejected_answer",
        "non_preferred_output",
        "dispreferred",
        "response_k",
    ),
}

# The prompt of other formats has the usual names of an instruction, its completion those of an output.
SAME_ROLE = {"prompt": "instruction", "completion": "output"}
_SAME_ROLES = SAME_ROLE | {role: name for name, role in SAME_ROLE.items()}

# Columns and keys of turns that hold pictures, or where they are.
PICTURES = (
    "images",
    "image",
    "image_path",
    "image_paths",
    "image_url",
    "image_urls",
    "picture",
    "pictures",
    "img",
)
# Of `datasets`' folders of pictures: in a table beside them. Elsewhere a file may be of any kind.
PICTURE_FILES = ("file_name", "file_names")
# HEIC is not read: a photo of a phone is named, so that it is refused rather than passed over.
PICTURE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".heic", ".heif"),
)
# Those of sound and video, and of pictures that a rejected response alone would see: no model trains on them here.
UNREAD_MEDIA = ("videos", "video", "audios", "audio", "rejected_images")
MEDIA = (*PICTURES, *UNREAD_MEDIA)
MARKERS = ("<image>", "<video>", "<audio>")  # where LLaVA, LLaMA-Factory and ms-swift insert them

# Columns that another tool uses, and no objective here: the note on unread columns says for what.
UNUSED = {
    "chat_template_kwargs": "TRL's settings of the chat template",
    "margin": "the margin of a pair",
    "score_chosen": "scores of a pair",
    "score_rejected": "scores of a pair",
    "channel": "ms-swift's name of a dataset in logs",
    "objects": "places in pictures",
    "position_ids": "positions of tokens",
    "loss_scale": "weights of tokens",
    "weight": "the weight of a row",
    "sample_weight": "the weight of a row",
}

# Keys of a turn.
ROLE_KEYS = ("role", "from")
TEXT_KEYS = ("content", "value", "parts")  # Gemini's parts
THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")  # transformers takes the same three
# Whether the turn is trained on: OpenAI's weight, ms-swift's loss and loss_scale, Axolotl's train and training,
# LLaMA-Factory's loss_weight.
TRAINED_KEYS = (
    "weight",
    "loss",
    "train",
    "training",
    "trainable",
    "loss_weight",
    "loss_scale",
)
MASKED_KEYS = ("masked", "mask")  # torchtune's: true masks the turn
# Marks of parts of a turn (Axolotl's message_field_training_detail): a list of spans.
DETAIL_KEYS = ("train_detail", "training_detail")
# A turn with both sides: ms-swift's, Capybara's.
SIDES_OF_TURNS = (
    ("human", "assistant"),
    ("user", "assistant"),
    ("input", "output"),
    ("instruction", "output"),
    ("prompt", "response"),
    ("question", "answer"),
)


def is_empty(value: object) -> bool:
    """Whether a value says nothing: null, or a text, a list or an object without content."""
    return value is None or value in ("", [], {})


def named_column(role: str, named: Mapping[str, str]) -> str | None:
    """The column that data.columns names for a role, also by the role's name in another format."""
    return named.get(role) or named.get(_SAME_ROLES.get(role, role))


def first_name(names: Iterable[str], cells: Mapping[str, Any]) -> str | None:
    """The first of these names, in any case, whose column is not empty; else the first that is a column."""
    columns = {column.lower(): column for column in cells if isinstance(column, str)}
    present = [columns[name] for name in names if name in columns]
    filled = [column for column in present if not is_empty(cells[column])]
    return next(iter([*filled, *present]), None)


def is_boolean(value: object) -> bool:
    """Whether a value is true or false, also as 0 or 1, or as text, which tables have alone."""
    if isinstance(value, str):
        return value.strip().lower() in _TRUTH
    return type(value) in (bool, int, float) and value in (0, 1)


_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def truth(value: object) -> object:
    """A text such as "true" as its truth; every other value as it is."""
    return _TRUTH.get(value.strip().lower(), value) if isinstance(value, str) else value


def known_columns() -> set[str]:
    """Every name of the table, in lower case: those that a reader of rows may need."""
    return {
        *LISTS,
        *MEDIA,
        *PICTURE_FILES,
        *COLUMN_NAMES,
        *SAME_ROLE,
        *(name for names in COLUMN_NAMES.values() for name in names),
    }


_MOST_NAMED = 12  # columns in a note


@dataclass
class ColumnUse:
    """What became of the columns of some rows. `roles`: the column of each role that was read; `unread_columns`: those
    that hold something and that nothing reads; `unread_turn_keys`: such keys of turns. All in the order of the rows.
    """

    roles: dict[str, str] = field(default_factory=dict)
    unread_columns: dict[str, None] = field(default_factory=dict)
    unread_turn_keys: dict[str, None] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """ "id, margin (the margin of a pair)", and "in turns: tool_plan"."""
        columns = [
            f"{one_line(name)} ({UNUSED[name]})" if name in UNUSED else one_line(name)
            for name in self.unread_columns
        ]
        notes = [_listed(columns)] if columns else []
        if self.unread_turn_keys:
            keys = [one_line(key) for key in self.unread_turn_keys]
            notes.append(f"in turns: {_listed(keys)}")
        return notes


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
