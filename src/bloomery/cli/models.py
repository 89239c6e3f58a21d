"""Commands that make and move models: `export`, `merge`, `import`, `convert`, and the Hub's `download` and `push`"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from bloomery.cli.common import (
    NewPath,
    devices_option,
    echo,
    numbers,
    progress_line,
    show_export,
    step_option,
)
from bloomery.core.units import format_bytes
from bloomery.export import DTYPES, GGUF_TYPES, K_TYPES

if TYPE_CHECKING:
    from bloomery.api import Layout


@click.command()
@click.argument("model")
@click.option(
    "--to",
    "layout",
    required=True,
    type=click.Choice(["hf", "adapter", "merged", "gguf", "gguf-adapter", "ollama", "vllm"]),
    help="Format of the export.",
)
@click.option(
    "--out",
    "out_path",
    metavar="PATH",
    type=NewPath(),
    required=True,
    help="Write to this new folder, or GGUF file.",
)
@click.option(
    "--type",
    "--quantize",
    "--quant",
    "dtype",
    metavar="TYPE",
    type=click.Choice([*DTYPES, *GGUF_TYPES, *K_TYPES], case_sensitive=False),
    help="Type of the weights [default: as in the model; GGUF: f16].",
)
@click.option(
    "--weights",
    callback=numbers,
    metavar="LIST",
    help="Weights of the adapters of BASE+ADAPTER+ADAPTER.",
)
@step_option
@click.option(
    "--verify/--no-verify", default=True, help="Read the export back, compare and run it."
)
@devices_option
def command(
    model: str,
    layout: "Layout",
    out_path: Path,
    dtype: str | None,
    weights: tuple[float, ...] | None,
    step: str,
    verify: bool,
    devices: str,
) -> None:
    """Export MODEL in Hugging Face format or as GGUF.

    hf: a full model for transformers and vLLM. adapter: a LoRA adapter for PEFT. merged: adapters merged into their
    base model, computed in float32. gguf: one file for llama.cpp and Ollama, adapters merged; a second one
    (mmproj-NAME) for the pictures of a model that sees them. gguf-adapter: a LoRA adapter for llama.cpp.
    ollama: a folder for `ollama create`. vllm: a full or merged model in bfloat16.

    Types of hf and merged: float32, bfloat16, float16. Of GGUF files: f32, f16, bf16, q8_0, q4_0, q4_K_M, q5_K_M,
    q6_K.

    Example: bloomery export last --to hf --out my-model

    Example: bloomery export base+adapter-a+adapter-b --to merged --weights 0.7,0.3 --out my-model

    Example: bloomery export last --to gguf --type q8_0 --out my-model.gguf
    """
    from bloomery.api import export

    with progress_line("export"):
        exported = export(
            model,
            out_path,
            layout=layout,
            dtype=dtype,
            weights=weights,
            step=step,
            verify=verify,
            device=devices,
        )
    show_export(exported)


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--weights", callback=numbers, metavar="LIST", help="One weight per model [default: 1 each]."
)
@click.option(
    "--out",
    "out_path",
    metavar="PATH",
    type=NewPath(),
    required=True,
    help="Write to this new folder.",
)
@click.option(
    "--type",
    "dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the weights [default: as in the first model].",
)
@click.option("--verify/--no-verify", default=True, help="Read the merged model back and run it.")
@devices_option
def merge_command(
    models: tuple[str, ...],
    weights: tuple[float, ...] | None,
    out_path: Path,
    dtype: str | None,
    verify: bool,
    devices: str,
) -> None:
    """Merge models of one architecture and tokenizer into a new one.

    Each weight is the mean of the models' weights, weighted by --weights. They are read one tensor at a time and
    computed in float32.

    Example: bloomery merge model-a model-b --weights 0.7,0.3 --out merged
    """
    from bloomery.api import merge

    with progress_line("merge"):
        merged = merge(
            models,
            out_path,
            weights=weights,
            dtype=dtype,
            verify=verify,
            device=devices,
        )
    show_export(merged)


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--out",
    "out_path",
    metavar="PATH",
    type=NewPath(),
    required=True,
    help="Write to this new folder.",
)
@click.option(
    "--type",
    "dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Store weights as [default: as in the file, quantized ones as bfloat16].",
)
def import_command(file: Path, out_path: Path, dtype: str | None) -> None:
    """Convert a GGUF file to Hugging Face format.

    The weights are dequantized. Writes a folder with config, tokenizer and chat template to train, chat with and
    export.

    Example: bloomery import model-Q8_0.gguf --out my-model
    """
    from bloomery.export.gguf_import import import_gguf

    with progress_line("import"):
        imported = import_gguf(file, out_path, dtype=dtype)
    for proof in imported.proofs:
        echo(f"read       {proof}", err=True)
    echo(f"import     {imported.folder} ({format_bytes(imported.bytes)})")


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("out_path", metavar="DST", type=NewPath())
@click.option(
    "--to", "layout", type=click.Choice(["hf", "gguf"]), help="Format [default: by the end of DST]."
)
@click.option(
    "--dtype",
    type=click.Choice([*DTYPES, *GGUF_TYPES, *K_TYPES]),
    help="Type of the weights [default: as in SRC; GGUF: f16].",
)
@click.option(
    "--max-length",
    metavar="N",
    type=click.IntRange(1),
    help="Context length in the config, in tokens.",
)
@click.option(
    "-t",
    "--template",
    metavar="TEMPLATE",
    help="Chat template to store: a file, chatml, llama3 and so on.",
)
@click.option(
    "--enable-checkpoint", is_flag=True, help="Turn on gradient checkpointing in config.json."
)
@click.option(
    "--add-tokens", multiple=True, metavar="TOKEN", help="Add a special token; can be repeated."
)
@step_option
@click.option(
    "--verify/--no-verify", default=True, help="Read the result back, compare and run it."
)
@devices_option
def convert_command(
    source: str,
    out_path: Path,
    layout: Literal["hf", "gguf"] | None,
    dtype: str | None,
    max_length: int | None,
    template: str | None,
    enable_checkpoint: bool,
    add_tokens: tuple[str, ...],
    step: str,
    verify: bool,
    devices: str,
) -> None:
    """Convert a model between Hugging Face format and GGUF, and change it on the way.

    SRC is a MODEL or a GGUF file; DST is new: a folder to train (model.from), chat with and export, or a GGUF file.
    Adapters are merged into their base model. Embeddings of new tokens are the mean of the others. In training,
    `train.activation_checkpointing` counts, not --enable-checkpoint.

    Example: bloomery convert llama-2-7b-hf llama-2-7b-chat --dtype bfloat16 --max-length 4096 -t chatml
    --add-tokens "<|im_start|>" --add-tokens "<|im_end|>"

    Example: bloomery convert model-Q8_0.gguf my-model --dtype bfloat16

    Example: bloomery convert last my-model.gguf --dtype q8_0
    """
    from bloomery.api import convert

    with progress_line("convert"):
        converted = convert(
            source,
            out_path,
            layout=layout,
            dtype=dtype,
            max_length=max_length,
            template=template,
            add_tokens=add_tokens,
            checkpointing=enable_checkpoint,
            step=step,
            verify=verify,
            device=devices,
        )
    show_export(converted)


@click.command()
@click.argument("name", metavar="ID")
@click.option("--dataset", is_flag=True, help="Download a dataset instead of a model.")
@click.option(
    "--to",
    "target_folder",
    metavar="DIR",
    type=NewPath(file_okay=False),
    help="Download to DIR [default: the Hub's cache].",
)
def download_command(name: str, dataset: bool, target_folder: Path | None) -> None:
    """Download a model or dataset from the Hugging Face Hub.

    ID is ORG/NAME or ORG/NAME@REVISION. Prints the folder. Weights are safetensors only. Run again to resume a
    download. A private or gated repository needs a token in HF_TOKEN.

    Example: bloomery download Qwen/Qwen3.5-0.8B-Base
    """
    from bloomery.hub import download

    # A local folder is never taken for an id, as in recipes.
    if target_folder is None and name and Path(name).is_dir():
        note = "is a local folder: recipes can use this path; nothing was downloaded"
        click.echo(f"{name} {note}", err=True)
        click.echo(name)
        return
    try:
        # On a terminal the library of the Hub has bars of its own.
        with nullcontext() if sys.stderr.isatty() else progress_line("download"):
            folder = download(name, part="dataset" if dataset else "model", to=target_folder)
    except KeyboardInterrupt:
        click.echo("interrupted: run the same command again to resume the download", err=True)
        raise
    click.echo(folder)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("repo", metavar="ORG/NAME")
@click.option("--public", is_flag=True, help="Create a public repository [default: private].")
@click.option("--dry-run", is_flag=True, help="List the files, then exit.")
def push_command(folder: Path, repo: str, public: bool, dry_run: bool) -> None:
    """Upload an exported model to the Hugging Face Hub.

    FOLDER is an export, not a run. The repository is created if it is missing; files of the same name are replaced,
    others stay. Needs a token with write access in HF_TOKEN. Run again to resume an upload.

    Example: bloomery push my-model my-name/my-model --dry-run
    """
    from bloomery.hub import push

    with nullcontext() if sys.stderr.isatty() else progress_line("push"):
        upload = push(folder, repo, public=public, dry_run=dry_run)
    # The list of files is the result of a dry run, and a log of an upload.
    verb = "would upload" if dry_run else "upload"
    for name, num_bytes in upload.files.items():
        echo(f"{verb:<12} {name} ({format_bytes(num_bytes)})", err=not dry_run)
    for warning in upload.warnings:
        echo(f"warning: {warning}", err=True)
    echo(f"{'repository' if dry_run else 'pushed':<12} {upload.page}")
