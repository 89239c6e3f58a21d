"""TRL's trainers on rows with pictures: transformers' own processors, as far as they need no package for videos."""

import os
from pathlib import Path
from typing import Any

import torch
from PIL import Image

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when one of these is imported

# TRL tells by them which tokens are the assistant's.
MARKED_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>{% endgeneration %}\n"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def processor_of(kind: str, base: Path) -> Any:
    """Of a tiny model that `save_base` saved."""
    import transformers

    class WithoutVideos(transformers.Qwen3VLProcessor):
        """Its processor of videos needs torchvision, and no row has videos: the check that there is one is left out."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    images = transformers.AutoImageProcessor.from_pretrained(base, backend="pil")
    template = tokenizer.chat_template
    if kind == "gemma3":
        return transformers.Gemma3Processor(
            images, tokenizer, chat_template=template, image_seq_length=4
        )
    assert kind == "qwen3_vl"
    return WithoutVideos(images, tokenizer, None, chat_template=template)


def marked(kind: str) -> str:
    picture = {
        "gemma3": "<start_of_image>",
        "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    }[kind]
    return MARKED_TEMPLATE.replace("PICTURE", picture)


def with_loaded(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A row with the pictures of its column, as `datasets` gives them."""
    pictures = [Image.open(folder / name).convert("RGB") for name in row["images"]]
    return {**row, "images": pictures}


def model_of(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def settings(config: Any, folder: Path, *, rows: int, **more: Any) -> Any:
    if config.__name__ != "GRPOConfig":
        more["max_length"] = None
    return config(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        **more,
    )
