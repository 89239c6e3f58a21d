"""What `bloomery demo` says around its run: the machine, the text, the plan, and the exam."""

import gzip
import lzma
import math
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.demo.story import Story
from bloomery.core.units import GIB, format_count, format_seconds
from bloomery.hardware.machine import Machine

if TYPE_CHECKING:
    from bloomery.cli.demo.command import Kill
    from bloomery.data.tokenizer.tokenizer import Tokenizer
    from bloomery.model.decoder import Decoder
    from bloomery.plan.types import RunPlan

BAR = 22  # characters of the longest
SAMPLE_LINES = 8


def introduce(story: Story) -> None:
    from bloomery.hardware.detect.detect import detect

    story.say("Bloomery: a language model of your own, from the Python source on this machine")
    story.say(f"{describe(detect())} · nothing is downloaded")
    story.say()


def describe(machine: Machine) -> str:
    """The machine in a line, as far as it matters to a run."""
    host = machine.host
    bf16 = {"avx512_bf16", "amx_bf16"} & set(host.cpu_flags)
    cpu = f"{host.cpu_cores} CPU cores ({host.cpu_name}{', bf16 in hardware' if bf16 else ''})"
    gpus = [f"{gpu.name} · {gpu.usable_bytes / GIB:.0f} GiB" for gpu in machine.accelerators]
    return " · ".join([*gpus, cpu, f"{host.memory_bytes / GIB:.0f} GiB memory"])


def tell_text(story: Story, plan: "RunPlan", seconds: float) -> None:
    """The corpus and the tokenizer, once the shards are there. `seconds`: what preparing them took."""
    from bloomery.data.shards.format import read_manifest

    manifest = read_manifest(plan.data.prepared)
    train, held_out = manifest.train, manifest.validation
    size = train.bytes + held_out.bytes
    story.say("text", f"{train.documents + held_out.documents} files of Python's own library, {size / 1e6:.1f} MB; "
              f"{held_out.documents} of them, {held_out.bytes / 1e6:.2f} MB, are kept for the exam")  # fmt: skip
    each = size / (train.tokens + held_out.tokens)
    story.say_timed("tokenizer", f"byte-level BPE, {manifest.vocab_size:,} tokens, {each:.1f} bytes each", seconds)


def tell_plan(story: Story, plan: "RunPlan") -> None:
    """The plan of the run whose length has just been fixed."""
    from bloomery.model.counting import parameter_count

    train = plan.train
    reason = next(decision.reason for decision in plan.choices if decision.key == "train.precision")
    size = format_count(parameter_count(plan.model.config))
    memory = f"{plan.memory.total / GIB:.1f} of {plan.memory.limit / GIB:.0f} GiB"
    story.say("plan", f"{size} parameters · {train.steps:,} steps of {train.tokens_per_step:,} tokens",
              f"{train.precision}: {reason}", f"{memory} · about {format_seconds(train.seconds or 0)}")  # fmt: skip


def examine(folder: Path, story: Story, kill: "Kill | None", began: float) -> dict[str, Any]:
    """Exam, sample, comparison, export and report of the finished run; returns the document of `--json`."""
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.export.layouts import export
    from bloomery.model.io.weights import load_decoder
    from bloomery.plan.store import read_plan
    from bloomery.report import Bars, write_report
    from bloomery.train.model_folder import model_folder

    plan = read_plan(folder / "plan.json")
    checkpoint = model_folder(folder, "last")
    decoder, tokenizer = load_decoder(checkpoint), load_tokenizer(checkpoint)
    bits = _exam(story, decoder, tokenizer, plan.data.prepared)
    _sample(story, decoder, tokenizer, plan.sample.prompts[0])
    _compare(story, folder, plan)
    with story.busy("writing the report"):
        if not (folder / "export" / "hf").exists():
            export(checkpoint, folder / "export" / "hf")
        note = "on files it never saw; lower is better"
        bars = Bars("The exam", tuple(bits.items()), unit="bits per byte", note=note, own="this model")
        report = write_report(folder, extras=(bars,))
    story.say("report", f"{folder / 'report.html'!s:<31}curves, samples, the kill, this machine, how to repeat it")
    story.say("model", f"{folder / 'export' / 'hf'!s:<31}opens in transformers and vLLM as it is")
    story.say()
    _next_steps(story, folder)
    return {
        "bits_per_byte": bits["this model"],
        "gzip_bits_per_byte": bits["gzip -9"],
        "xz_bits_per_byte": bits["xz -9"],
        "seconds": time.time() - began,
        "report": str(report),
        "folder": str(folder),
        "killed_at_step": kill.step if kill else None,
        "repeated_steps": len(kill.before) if kill else 0,
        "differing_losses": len(kill.differing) if kill else 0,
    }


def _exam(story: Story, decoder: "Decoder", tokenizer: "Tokenizer", prepared: Path) -> dict[str, float]:
    """Bits per byte on the held-out files, of two compressors and the model, drawn as bars."""
    from bloomery.data.prepare.split import repeated_lines
    from bloomery.data.sources.builtin import stdlib_files
    from bloomery.data.sources.documents import read_file
    from bloomery.runs.evaluate import evaluate

    with story.busy("examining the model on the files it never saw"):
        held_out = held_out_texts(prepared, tokenizer)
        known = set(held_out)
        others = (text for file in stdlib_files() if (text := read_file(file.path)) not in known)
        repeated = repeated_lines(held_out, others)
        whole = "".join(held_out).encode()
        bits = {
            "gzip -9": 8 * len(gzip.compress(whole, 9)) / len(whole),
            "xz -9": 8 * len(lzma.compress(whole, preset=9)) / len(whole),
            "this model": evaluate(decoder, tokenizer, prepared)[0].bits_per_byte or math.nan,
        }
    story.say("exam", f"bits per byte on the {len(held_out)} files it never saw (lower is better; "
              f"{repeated:.0%} of their lines occur elsewhere)")  # fmt: skip
    for name, value in bits.items():
        eighths = round(value / max(bits.values()) * BAR * 8)  # of a character
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        story.say("", f"  {name:<10}{value:>6.2f}  {bar}")
    return bits


def held_out_texts(prepared: Path, tokenizer: "Tokenizer") -> list[str]:
    """The validation documents; decoding gives back what was encoded."""
    from bloomery.data.shards.format import open_split

    split = open_split(prepared, "validation")
    return [tokenizer.decode([int(token) for token in split.document(n)[1:-1]]) for n in range(len(split))]


def _sample(story: Story, decoder: "Decoder", tokenizer: "Tokenizer", prompt: str) -> None:
    from bloomery.model.sampling import Sampling
    from bloomery.runs.generate import generate

    # Small models repeat themselves: what was just written is made less likely.
    sampling = Sampling(max_tokens=96, temperature=0.7, top_p=0.95, repetition_penalty=1.15, seed=0)
    written = "".join(generate(decoder, tokenizer, prompt, sampling))
    story.say("it writes", *(prompt + written).splitlines()[:SAMPLE_LINES])
    story.say()


def _compare(story: Story, folder: Path, plan: "RunPlan") -> None:
    """The plan's figures beside the run's."""
    from bloomery.monitor.events import read_events
    from bloomery.monitor.summary import summary_of

    summary = summary_of(read_events(folder / "events.jsonl"))
    planned_gib, planned = plan.memory.total / GIB, plan.seconds.value if plan.seconds else 0.0
    time_told = f"time {planned:.0f} s / {summary.seconds:.0f} s ({summary.seconds / planned - 1:+.0%})"
    memory_told = f"memory {planned_gib:.2f} / {summary.peak_gib:.2f} GiB ({summary.peak_gib / planned_gib - 1:+.0%})"
    story.say("plan/run", f"{time_told} · {memory_told}")


def _next_steps(story: Story, folder: Path) -> None:
    name = shlex.quote(folder.name if folder.parent == Path("runs") else str(folder))
    script = Path(sys.prefix) / "bin" / "activate"
    near = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    found = shutil.which("bloomery") is not None or not script.is_file()  # after `make demo` the shell does not find it
    advice = {
        **({} if found else {f"source {near}": "so that your shell finds bloomery"}),
        f'bloomery generate {name} --prompt "def read_json(path):"': "",
        "bloomery demo chat": "it learns to answer, two minutes more",
        'bloomery train demo data.path=~/my-code data.glob="*.py"': "your own code, minutes",
        'bloomery plan go-coder-125m --gpu "RX 6700 XT"': "a real one, before you buy",
    }
    story.say("next", *(f"{command:<66}{what}".rstrip() for command, what in advice.items()))
