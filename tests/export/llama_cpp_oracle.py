"""What llama.cpp itself computes from a GGUF file, by llama-cpp-python. Keys and values are kept in float32 there."""

from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np


class Oracle:
    def __init__(self, path: Path, context: int, lora: Path | None = None) -> None:
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_threads=1,
            n_threads_batch=1,
            logits_all=True,
            verbose=False,
            type_k=0,
            type_v=0,
            n_gpu_layers=0,
            lora_path=None if lora is None else str(lora),
            flash_attn=False,
        )

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        self.model.reset()
        self.model.eval(list(tokens))
        return np.array(self.model.scores[: len(tokens)], dtype=np.float32)

    def tokens(self, text: str) -> list[int]:
        return self.model.tokenize(text.encode(), add_bos=False, special=True)
