"""A tiny model with its tokenizer, as a folder and as a run with checkpoints."""

from dataclasses import replace
from pathlib import Path

from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.facts.config import ModelConfig
from bloomery.model.configs import build_config
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import EvalDone, EventLog, RunStarted, StepDone
from bloomery.recipe.schema import Model, TrainTokenizer
from bloomery.train.checkpoint.checkpointed_model import FullWeights, InitialWeights
from bloomery.train.checkpoint.saver import MODEL, Saver

TEXT = ["def f(x):\n    return x + 1\n", "für Größe, naïve café, 東京 🙂🙃 and so on\n"] * 20
RECIPE = """
model: {family: llama, hidden_size: 32, num_layers: 2, num_heads: 2, max_positions: 128}
data: {path: /home/somebody/secret/corpus.txt, sequence_length: 64}
tokenizer: {train: {vocab_size: 320}}
"""


def make_tokenizer(folder: Path) -> Tokenizer:
    return train_tokenizer(iter(TEXT), TrainTokenizer(vocab_size=320), folder)


def make_config(tokenizer: Tokenizer, family: str = "llama") -> ModelConfig:
    model = Model(family=family, hidden_size=32, num_layers=2, num_heads=2, max_positions=128)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    return build_config(model, vocab_size=tokenizer.vocab_size, **ids)


def make_model(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    config = make_config(make_tokenizer(folder), family)
    write_model(model_state(fresh_decoder(config, seed=seed)), config, folder)
    return folder


def make_chat_model(folder: Path, *tokens: str, seed: int = 0) -> Path:
    """A model whose end of a turn, <|im_end|>, is not its end of a text; `tokens` are in its vocabulary, too."""
    tokenizer = make_tokenizer(folder).with_tokens(["<|im_start|>", "<|im_end|>", *tokens])
    tokenizer.save(folder)
    config = replace(make_config(tokenizer), max_positions=4096)
    write_model(model_state(fresh_decoder(config, seed=seed)), config, folder)
    return folder


def make_run(folder: Path, *steps: int, best: int | None = None) -> Path:
    """A run whose checkpoint of step n was initialised with seed n."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    tokenizer = make_tokenizer(folder / "tokenizer")
    config = make_config(tokenizer)
    with EventLog(folder / "events.jsonl") as log:
        log(
            RunStarted(
                schema=2,
                version="0",
                parameters=1,
                steps=max(steps, default=0),
                attention="sdpa",
                device="a small CPU",
            )
        )
        for step in steps:
            log(
                StepDone(
                    step=step,
                    loss=5.0 - step / 100,
                    learning_rate=1e-3,
                    grad_norm=1.0,
                    tokens=step * 64,
                    tokens_per_second=64.0,
                    sequences_per_second=1.0,
                    step_seconds=1.0,
                    data_wait_seconds=0.0,
                    memory_gib=0.1,
                )
            )
            log(
                EvalDone(
                    step=step, loss=4.0, perplexity=54.6, bits_per_byte=2.5, tokens=100, seconds=1.0
                )
            )
    for step in steps:
        save_model(
            folder / "checkpoints",
            step,
            fresh_decoder(config, seed=step),
            folder / "tokenizer",
            step == best,
        )
    return folder


def save_model(
    checkpoints: Path, step: int, model: Decoder, tokenizer: Path, best: bool = True
) -> None:
    """A checkpoint that holds the model alone."""
    full = FullWeights(model, InitialWeights(None, 0))
    Saver(checkpoints, 5, False, writer=full.writer, tokenizer=tokenizer).save(
        step, {MODEL: full.weights()}, {}, best=best
    )
