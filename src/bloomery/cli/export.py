"""`bloomery export MODEL --to hf|adapter|merged|gguf|gguf-adapter|ollama|vllm --out PATH`"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import NewPath, devices_option, numbers, show_export, step_option
from bloomery.export import DTYPES, GGUF_TYPES, INTEGERS, K_TYPES

if TYPE_CHECKING:
    from bloomery.api import Layout


@click.command()
@click.argument("model")
@click.option(
    "--to", "layout", required=True,
    type=click.Choice(["hf", "adapter", "merged", "gguf", "gguf-adapter", "ollama", "vllm"]),
    help="Format of the export.",
)  # fmt: skip
@click.option("--out", metavar="PATH", type=NewPath(), required=True, help="Write to this new folder, or GGUF file.")
@click.option(
    "--type", "dtype", type=click.Choice([*DTYPES, *INTEGERS, *GGUF_TYPES, *K_TYPES]),
    help="Type of the weights [default: as in the model; GGUF: f16].",
)  # fmt: skip
@click.option("--weights", callback=numbers, metavar="LIST", help="Weights of the adapters of BASE+ADAPTER+ADAPTER.")
@click.option("--vocabulary", metavar="DATA", help="Keep only the tokens of this text dataset (hf).")
@step_option
@click.option("--verify/--no-verify", default=True, help="Read the export back, compare and run it.")
@devices_option
def command(
    model: str, layout: "Layout", out: Path, dtype: str | None, weights: tuple[float, ...] | None,
    vocabulary: str | None, step: str, verify: bool, devices: str,
) -> None:  # fmt: skip
    """Export MODEL in Hugging Face format or as GGUF.

    hf: a full model for transformers and vLLM. adapter: an adapter for PEFT. merged: adapters merged into their base
    model, computed in float32. gguf: one file for llama.cpp and Ollama, adapters merged. gguf-adapter: a LoRA adapter
    for llama.cpp. ollama: a folder for `ollama create`. vllm: a full or merged model in bfloat16. hf, merged and vllm
    also take --type int8 or int4, which transformers opens with compressed-tensors.

    Example: bloomery export last --to hf --out my-model

    Example: bloomery export base+adapter-a+adapter-b --to merged --weights 0.7,0.3 --out my-model

    Example: bloomery export last --to gguf --type q8_0 --out my-model.gguf
    """
    from bloomery.api import export

    show_export(export(
        model, out, layout=layout, dtype=dtype, weights=weights, vocabulary=vocabulary, step=step, verify=verify,
        device=devices,
    ))  # fmt: skip
