"""Weights go from a model's files to the host's copy without a second copy on the way."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bloomery.facts.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import give_memory, model_state, write_model

PROBE = """
import sys
from pathlib import Path
import torch
from bloomery.facts.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.configs import read_config
from bloomery.model.io.weights import quantize_model, quantized_weights, read_model
from bloomery.parallel.streamed import StreamedWeights
from bloomery.recipe.schema import Quantize
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
def load(folder, dtype, kind, placement):
    with torch.device("meta"):
        decoder = Decoder(read_config(folder))
    decoder.to(getattr(torch, dtype))
    if kind != "none":
        decoder.requires_grad_(False)
        quantize_model(decoder, Quantize(kind=kind))
    stream = StreamedWeights(decoder, torch.device("cpu"), placement=placement)
    stream.allocate()
    read_model(decoder, folder)
    return sum(layer.num_bytes for layer in stream._layers), decoder
torch.set_num_threads(1)
large, small, *how = sys.argv[1:]
load(Path(small), *how)  # what torch imports on the way is not the model's
before = peak()
size, decoder = load(Path(large), *how)
print(peak() - before, size)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB of bfloat16 in layers, and a small model."""
    folder = tmp_path_factory.mktemp("models")
    for name, num_layers, width in (("large", 8, 1024), ("small", 1, 64)):
        config = ModelConfig(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_layers=num_layers,
            num_heads=8,
            num_kv_heads=8,
            head_dim=width // 8,
            max_positions=64,
        )
        with torch.device("meta"):
            decoder = Decoder(config)
        decoder.to(torch.bfloat16)
        give_memory(decoder, "cpu")
        for parameter in decoder.parameters():
            nn.init.constant_(parameter, 0.01)
        (folder / name).mkdir()
        write_model(model_state(decoder), config, folder / name)
    return folder


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux")
@pytest.mark.parametrize("placement", ["pinned", "staged"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "nf4")]
)
def test_the_peak_of_loading_is_the_copy_and_little_more(
    models: Path, dtype: str, kind: str, placement: str
) -> None:
    command = [sys.executable, "-c", PROBE, *(str(models / name) for name in ("large", "small"))]
    process = subprocess.run(
        [*command, dtype, kind, placement], cwd=models, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    more, size = map(int, process.stdout.split())
    assert size > (50 if kind == "nf4" else 200) * 1e6
    # Embedding and head stay beside; a file passes through 16 MiB, and nf4 through a million weights.
    assert more < size + 48 * 2**20, f"{more / 1e6:.0f} MB for {size / 1e6:.0f}"
    print(f"{dtype} {kind} {placement}: {more / 1e6:.0f} MB for {size / 1e6:.0f}")
