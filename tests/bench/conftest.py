import pytest

from bloomery.bench import measuring
from bloomery.bench.measuring import Bench
from bloomery.hardware.detect import detect

TINY = """
model: {family: llama, hidden_size: 64, num_layers: 2, num_heads: 4, max_positions: 128, vocab_size: 512}
tokenizer: {train: {vocab_size: 512}}
data: {builtin: stdlib-code, sequence_length: 128}
train: {max_steps: 100, tokens_per_step: 2048, compile: false}
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(measuring, "SECONDS", 0.5)
    monkeypatch.setattr(measuring, "SEARCH_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)

    def made(*overrides: str, limit: float | None = None) -> Bench:
        return Bench(recipe="tiny.yaml", overrides=overrides, machine=detect(), memory_limit=limit)

    return made
