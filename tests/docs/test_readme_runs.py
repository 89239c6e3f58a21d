"""The fine-tuning commands of the README run as printed, with a tiny model in place of the one on the Hub."""

import json
import os
import re
import shlex
import subprocess
import sys

from words_of_docs import ROOT

import preloaded

TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def commands_of(page: str, heading: str) -> list[str]:
    """The lines of the last `bash` block below a heading."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[-1].splitlines()


def tiny_qwen(folder) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {
        letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letters.pre_tokenizer, letters.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token=TOKENS[1], pad_token=TOKENS[2]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS[:1]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def test_the_fine_tuning_commands_run_and_the_exports_open(tmp_path):
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    tiny_qwen(tmp_path / "tiny")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}?"},
                {"role": "assistant", "content": f"Number {n}."},
            ]
        }
        for n in range(50)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = commands_of((ROOT / "README.md").read_text(encoding="utf-8"), "Fine-tune a model")
    assert [shlex.split(line)[1] for line in lines] == [
        "prepare",
        "plan",
        "train",
        "chat",
        "export",
    ]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    for line in [*lines, "bloomery export last --to adapter --out my-adapter"]:
        words = shlex.split(line)
        tiny = ["model.from=tiny"] if "qwen3.5-0.8b-lora" in words else []
        command = [sys.executable, "-m", *words, *tiny]
        # The training starts as yours does; the other commands are forked.
        popen = subprocess.Popen if words[1] == "train" else preloaded.Popen
        done = preloaded.run(
            command, popen=popen, cwd=tmp_path, env=env, input="What is 7?\n", text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "my-model").eval()
    os.chdir(tmp_path)  # the adapter names its base as the recipe does
    adapted = AutoPeftModelForCausalLM.from_pretrained("my-adapter").eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, atol=1e-4, rtol=0)
