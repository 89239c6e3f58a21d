"""`bloomery import FILE --out FOLDER`"""

from pathlib import Path

import click

from bloomery.cli.common import NewPath, echo
from bloomery.core.units import format_bytes


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--out", metavar="PATH", type=NewPath(), required=True, help="Write to this new folder.")
@click.option(
    "--type", "dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Store weights as [default: as in the file, quantized ones as bfloat16].",
)  # fmt: skip
@click.option("--unsafe-pickle", is_flag=True, help="Open .pth files, which can run code, in a locked process.")
def command(file: Path, out: Path, dtype: str | None, unsafe_pickle: bool) -> None:
    """Convert a GGUF file, or a Llama folder of .pth files, to Hugging Face format.

    A GGUF file is dequantized. A folder as Meta publishes Llama has params.json, consolidated.00.pth and more, and
    tokenizer.model: the files are joined. Writes a folder with config, tokenizer and chat template to train, chat with
    and export.

    Example: bloomery import model-Q8_0.gguf --out my-model

    Example: bloomery import llama-2-7b --unsafe-pickle --out my-llama
    """
    if file.is_dir():
        from bloomery.export.pth import import_meta

        done = import_meta(file, out, trusted=unsafe_pickle, dtype=dtype)
    else:
        from bloomery.export.gguf_import import import_gguf

        done = import_gguf(file, out, dtype=dtype)
    for proof in done.proofs:
        echo(f"read       {proof}", err=True)
    echo(f"import     {done.folder} ({format_bytes(done.bytes)})")
