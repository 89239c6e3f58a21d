"""Tokenizers small enough to see through, with the special tokens that chat templates write."""

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from bloomery.data.tokenizer.tokenizer import JsonBackend
from bloomery.data.tokenizer.tokenizer import Tokenizer as Ours

SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
)
TEXT = "the quick brown fox \n jumps over the lazy dog \n\n hello there my friend what is it, user assistant system\n"


@cache
def description(kind: str) -> str:
    """ "bytes": as Llama 3 and Qwen cut text; "pieces": as Llama 2 does, with a space before every text."""
    library = Tokenizer(
        models.BPE(unk_token=None if kind == "bytes" else "<unk>", byte_fallback=kind != "bytes")
    )
    if kind == "bytes":
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        library.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
    names = (
        SPECIAL
        if kind == "bytes"
        else ("<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)))
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in names],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        if kind == "bytes"
        else list(map(chr, range(32, 127))),
        show_progress=False,
    )
    library.train_from_iterator([TEXT] * 10, trainer)
    tokenizer_json = json.loads(library.to_str())
    tokenizer_json["added_tokens"] = [
        entry for entry in tokenizer_json["added_tokens"] if not entry["content"].startswith("<0x")
    ]
    library = Tokenizer.from_str(json.dumps(tokenizer_json))
    if kind == "bytes":
        library.post_processor = processors.ByteLevel(trim_offsets=True)
    else:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A",
            pair="<s> $A <s> $B",
            special_tokens=[("<s>", library.token_to_id("<s>"))],
        )
    text: str = library.to_str()
    return text


def ours(kind: str = "bytes", template: object = None, eos: str = "</s>") -> Ours:
    config = {
        "bos_token": "<s>",
        "eos_token": eos,
        **({"chat_template": template} if template else {}),
    }
    return Ours(JsonBackend(json.loads(description(kind)), "tokenizer.json", {"<s>", eos}), config)


@cache
def theirs(
    kind: str = "bytes", template: str | None = None, eos: str = "</s>"
) -> PreTrainedTokenizerFast:
    """The same tokenizer in transformers, which loses the flags of a conversation whose answer begins with a space
    where offsets leave spaces out: they do not here.
    """
    library = Tokenizer.from_str(
        description(kind).replace('"trim_offsets":true', '"trim_offsets":false')
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token=eos, chat_template=template
    )
