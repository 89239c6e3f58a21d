"""Folders with tiny vision-language models, and conversations about colored pictures."""

import io
import json
import struct
import zlib
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.recipe.load import load_recipe
from tiny_composites import CONFIGS
from tiny_processors import MARKS, save_processor

RECIPE = """
objective: {kind: OBJECTIVE}
model: {from: base}
data:
  {path: rows, sequence_length: 512, validation: VALIDATION, num_proc: 1, on_error: ON_ERROR,
   chat: {train_on: TRAIN_ON}}
"""
RED = {"type": "image", "image": "red.png"}
BLUE = {"type": "image_url", "image_url": {"url": "blue.png"}}
TEXT = {"type": "text", "text": "Color?"}


def png(width: int = 40, height: int = 60, color: str = "red") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), color).save(stream, "PNG")
    return stream.getvalue()


def receipt() -> bytes:
    """What people photograph: words on paper."""
    picture = Image.new("RGB", (360, 480), "#efe9dc")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((40, 24, 320, 460), fill="white", outline="#b9b2a3")
    lines = ("FORGE & SONS", "", "2 x nails   4.00", "1 x hammer 19.50", "", "TOTAL      23.50")
    for number, line in enumerate(lines):
        draw.text((64, 56 + 60 * number), line, fill="#222222", font_size=24)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def bomb(side: int) -> bytes:
    """A PNG whose header says side x side, of a few bytes."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    rows = zlib.compress(b"\0" * 100)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def row(*parts: dict, answer: str = "red") -> dict:
    return {
        "messages": [
            {"role": "user", "content": list(parts)},
            {"role": "assistant", "content": answer},
        ]
    }


def save_base(
    kind: str, folder: Path, *, weights: bool = False, seed: int = 0, **sections: dict
) -> None:
    """The config, the tokenizer and the processor of a tiny model, and its weights where asked for.

    `sections`: what changes in parts of the config, such as vision_config.
    """
    folder.mkdir(exist_ok=True)
    processor = "qwen" if kind.startswith("qwen") else kind
    save_processor(processor, folder)
    tokenizer = load_tokenizer(folder)
    settings = json.loads(json.dumps(CONFIGS[kind]))
    for key in ("image_token_id", "image_token_index"):
        if key in settings:
            settings[key] = tokenizer.id_of(MARKS[processor][0])
    if kind == "qwen2_5_vl":
        settings["vision_config"] |= {"patch_size": 16, "window_size": 64}  # the processor's
    settings["text_config"]["vocab_size"] = tokenizer.vocab_size
    settings["text_config"]["max_position_embeddings"] = 512
    for name, changes in sections.items():
        settings[name] |= changes
    config = AutoConfig.for_model(kind, **settings)
    if not weights:
        config.save_pretrained(folder)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if (
                parameter.ndim > 1 and not parameter.any()
            ):  # Gemma 3's projector: nothing would be seen
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder)


def prepared_rows(
    folder: Path,
    rows: list[dict],
    *,
    kind: str = "qwen3_vl",
    on_error: str = "stop",
    validation: float = 0.0,
    weights: bool = False,
    objective: str = "sft",
    train_on: str = "assistant",
    blue: str = "blue",
) -> Path:
    """The prepared dataset of rows about two pictures, for a model in `folder/base`. `blue`: the color of blue.png."""
    save_base(kind, folder / "base", weights=weights)
    (folder / "rows").mkdir(exist_ok=True)
    (folder / "rows" / "red.png").write_bytes(png(color="red"))
    (folder / "rows" / "blue.png").write_bytes(png(color=blue))
    lines = "".join(json.dumps(each) + "\n" for each in rows)
    (folder / "rows" / "train.jsonl").write_text(lines)
    text = RECIPE.replace("ON_ERROR", on_error).replace("VALIDATION", str(validation))
    text = text.replace("OBJECTIVE", objective).replace("TRAIN_ON", train_on)
    (folder / "recipe.yaml").write_text(text)
    prepared = folder / f"prepared-{on_error}"
    prepare(load_recipe(folder / "recipe.yaml"), prepared)
    return prepared


def answer_of_transformers(
    folder: Path, turns: list[dict], pictures: list[bytes], max_new_tokens: int, *, least: int = 3
) -> str:
    """What transformers' generate answers with the image processor and the template of a tiny Qwen3-VL.

    `turns`: with lists of parts as content; an image part is `{"type": "image"}`.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    images = [Image.open(io.BytesIO(picture)) for picture in pictures]
    inputs = processor(images, return_tensors="pt")
    for _, rows, columns in inputs["image_grid_thw"].tolist():
        prompt = prompt.replace("<|image_pad|>", "PAD" * (rows * columns // 4), 1)
    prompt = prompt.replace("PAD", "<|image_pad|>")
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ends = [2, tokenizer.eos_token_id]
    answer = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **inputs,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=ends,
    )
    new = [token for token in answer[0, ids.shape[1] :].tolist() if token not in ends]
    assert len(new) >= least, "choose another question"
    return tokenizer.decode(new)
