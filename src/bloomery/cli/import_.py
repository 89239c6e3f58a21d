"""`bloomery import FILE.gguf --out FOLDER`"""

from pathlib import Path

import click

from bloomery.cli.common import NewPath, echo
from bloomery.core.units import format_bytes


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", metavar="PATH", type=NewPath(), required=True, help="Write to this new folder.")
@click.option(
    "--type", "dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Store weights as [default: as in the file, quantized ones as bfloat16].",
)  # fmt: skip
def command(file: Path, out: Path, dtype: str | None) -> None:
    """Convert a GGUF file to Hugging Face format.

    Dequantizes the weights, and writes config, tokenizer and chat template: a folder to train, chat with and export.

    Example: bloomery import model-Q8_0.gguf --out my-model
    """
    from bloomery.export.gguf_import import import_gguf

    done = import_gguf(file, out, dtype=dtype)
    for proof in done.proofs:
        echo(f"read       {proof}", err=True)
    echo(f"import     {done.folder} ({format_bytes(done.bytes)})")
