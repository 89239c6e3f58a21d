"""Tiny tokenizers, templates and image processors by kind of multimodal model."""

import json
from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Of each kind: the token where a picture is, what its template writes around it, and further special tokens.
MARKS = {
    "qwen": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", ("<|video_pad|>",)),
    "gemma3": ("<image_soft_token>", "", "", ("<start_of_image>", "<end_of_image>")),
    "smolvlm": ("<image>", "", "", ("<fake_token_around_image>", "<global-img>")),
    "mistral3": ("[IMG]", "", "", ("[IMG_BREAK]", "[IMG_END]")),
    "internvl": ("<IMG_CONTEXT>", "", "", ("<img>", "</img>", "<video>")),
    "gemma4": ("<|image|>", "", "", ("<|image>", "<image|>", "<|video|>")),
    "lfm2_vl": ("<image>", "", "", ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")),
    "gemma4_unified": ("<|image|>", "", "", ("<|image>", "<image|>", "<|video|>")),
}
SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}BEFOREPICTUREAFTER{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """One id for each byte, then the special tokens; the picture's is `vocab_size - 1`."""
    picture, before, after, others = MARKS[kind]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tile = {"smolvlm": "<row_{}_col_{}>", "lfm2_vl": "<|img_row_{}_col_{}|>"}.get(kind)
    tiles = [(row, column) for row in range(1, 4) for column in range(1, 4)]
    special = [*SPECIAL, *others, *(tile.format(*place) for place in tiles if tile)]
    special += [name for name in (before, after) if name]
    special = [*dict.fromkeys(special), picture]
    # One merge: a GGUF file must state some, and llama.cpp writes this one before a picture of SmolVLM.
    newline = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n")[0][0]
    vocab = {name: index for index, name in enumerate([*alphabet, newline * 2])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    named = {"image_token": picture}
    if kind.startswith("gemma"):
        named |= {"boi_token": others[0], "eoi_token": others[1]}
    if kind == "internvl":
        named = {"start_image_token": "<img>", "end_image_token": "</img>"}
        named |= {"context_image_token": picture, "video_token": "<video>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        extra_special_tokens=named,
    )


def save_processor(kind: str, folder: Path, **unified: int) -> None:
    """A tokenizer with a template, and an image processor that makes a few tokens of a picture. `unified`: further
    settings of Gemma 4 12B's.
    """
    picture, before, after, others = MARKS[kind]
    written = others[0] if kind == "gemma3" else picture
    template = (
        TEMPLATE.replace("BEFORE", before).replace("PICTURE", written).replace("AFTER", after)
    )
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if kind == "gemma4_unified":  # its own class needs torchvision
        settings = {"image_processor_type": "Gemma4UnifiedImageProcessor", "max_soft_tokens": 70}
        settings |= {"patch_size": 8, "pooling_kernel_size": 2, **unified}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return
    IMAGES[kind]().save_pretrained(folder)


class Lfm2Images:
    """The file alone: without torchvision, transformers' own image processor cannot be made."""

    def save_pretrained(self, folder: Path) -> None:
        settings = {"image_processor_type": "Lfm2VlImageProcessor", "tile_size": 64}
        settings |= {"min_image_tokens": 1, "max_image_tokens": 4, "max_tiles": 4}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


IMAGES = {
    "lfm2_vl": Lfm2Images,
    "qwen": lambda: transformers.Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1024, max_pixels=8192
    ),
    "gemma3": lambda: transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
    "smolvlm": lambda: transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
    ),
    "mistral3": lambda: transformers.PixtralImageProcessorPil(
        patch_size={"height": 28, "width": 28}, size={"longest_edge": 112}
    ),
    "internvl": lambda: transformers.GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}),
    "gemma4": lambda: transformers.Gemma4ImageProcessorPil(
        patch_size=16, max_soft_tokens=70, pooling_kernel_size=2
    ),
}
