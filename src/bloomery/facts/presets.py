"""The models that a recipe can name, with random weights. No torch."""

from dataclasses import dataclass

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.table import OpenTable


@dataclass(frozen=True)
class Preset:
    config: ModelConfig
    description: str


def _go_coder(width: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        vocab_size=50_000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        max_positions=1024,
        norm="layer",
        norm_eps=1e-5,
        activation="gelu",
        gated_mlp=False,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        positions="learned",
        tie_embeddings=True,
        embedding_dropout=0.1,
        residual_dropout=0.1,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )


PRESETS = OpenTable(
    {
        "go-coder-tiny": Preset(_go_coder(512, 8, 8), "GPT-2 shape, 51M parameters"),
        "go-coder-small": Preset(_go_coder(768, 12, 12), "GPT-2 shape, 124M parameters"),
        "go-coder-medium": Preset(
            _go_coder(1024, 16, 16),
            "GPT-2 shape, 254M parameters (the Go coder guide calls it 350M)",
        ),
    }
)


def preset(name: str) -> ModelConfig:
    """The config of a preset. Raises UserError for an unknown name."""
    if name not in PRESETS:
        fix = f"these are: {', '.join(PRESETS)}"
        raise UserError(f"{name!r} is no preset", where="model.preset", fix=fix, code=2)
    return PRESETS[name].config
