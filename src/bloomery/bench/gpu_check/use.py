"""Part `use`: a QLoRA run through the command line, then all that one does with it, on the device that trained it.

Each command is a process of its own, as users start it.
"""

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.results import Row
from bloomery.core.child import python_module
from bloomery.core.device import is_accelerator, multiplies_bfloat16
from bloomery.core.run_folder import RunFolder
from bloomery.core.units import GIB
from bloomery.hardware.detect import detect
from bloomery.monitor.events import EvalDone, StepChecked, read_events

if TYPE_CHECKING:
    from bloomery.data.tokenizer.tokenizer import Tokenizer
    from bloomery.infer.decode import TextUpdate
    from bloomery.model.decoder import Decoder

SHAPE = (
    "hidden_size: 2048, intermediate_size: 5632, num_layers: 8, num_heads: 16, max_positions: 1024"
)
TINY_SHAPE = (
    "hidden_size: 128, intermediate_size: 256, num_layers: 2, num_heads: 2, max_positions: 256"
)
FIRST = """
model: {family: llama, %s}
tokenizer: {train: {kind: bpe, vocab_size: 2048}}
data: {builtin: stdlib-code, sequence_length: 128, validation: 2%%}
optimizer: {kind: adafactor}
train: {max_steps: 1, tokens_per_step: 256, compile: false}
eval: {every: 1 steps, tokens: 256}
sample: {prompts: []}
"""
SECOND = """
model: {from: base}
tokenizer: {from: same}
data: {builtin: stdlib-code, sequence_length: 128, validation: 2%}
adapter: {kind: lora, rank: 8, target_modules: [all-linear]}
quantize: {kind: nf4}
optimizer: {learning_rate: 1e-3}
train: {max_steps: 10, tokens_per_step: 2048, compile: false}
eval: {every: 5 steps, tokens: 2048}
sample: {prompts: []}
"""
PROMPT = "def f("
NEW_TOKENS = 16
GREEDY = ("--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--temperature", "0")
START_SECONDS = 60.0  # of a server
ANSWER_SECONDS = 60.0
# The CPU's loss of the same quantized model, relative; the file in float32 loses nothing.
CPU_TOLERANCE = 0.02
RUN_TOLERANCE = 1e-3
# Nats by which a token's log-probability may differ from the CPU's, and by which the CPU may prefer another token.
LOGP_TOLERANCE = 0.1
LOADING_EXTRA = 0.25  # of the model's bytes, that loading may hold beside it
LEAST_EXTRA_GIB = 0.1


def used(job: PartJob) -> Iterator[Row]:
    """A row for each command, for the server, and for what a loaded model holds and computes."""
    folder = job.folder
    (folder / "first.yaml").write_text(FIRST % (TINY_SHAPE if job.tiny else SHAPE))
    (folder / "second.yaml").write_text(SECOND)
    # PyTorch may see a card that no driver's file describes; the commands then train on the CPU.
    chosen_device = "0" if detect().accelerators else "cpu"
    commands = _Commands(folder, ("-d", chosen_device))
    first = "runs/first"
    run = "runs/second"
    evaluation = (run, "--step", "last", "--json", "--data", "second.yaml")
    to_base = ("--to", "hf", "--out", "base", "--step", "last")
    trained = f"{run}/checkpoints/step-*"
    # The name, what it computes from, and its row.
    cases: list[tuple[str, str, Callable[[], Row]]] = [
        ("train first.yaml", "first.yaml", partial(commands.train_row, "first.yaml", first)),
        (
            "export hf",
            f"{first}/checkpoints/step-*",
            partial(commands.row, "export", first, *to_base),
        ),
        ("train second.yaml", "base", partial(commands.train_row, "second.yaml", run)),
        ("eval", trained, partial(commands.eval_row, evaluation)),
        ("loaded model", trained, partial(commands.loaded_row, run, job.device)),
        ("generate", trained, partial(commands.generate_row, run)),
        ("serve", trained, partial(commands.serve_row, run)),
        ("chat", trained, partial(commands.row, "chat", run, "--template", "chatml")),
        ("report", trained, partial(commands.row, "report", run)),
        (
            "export merged",
            trained,
            partial(commands.row, "export", run, "--to", "merged", "--out", "merged"),
        ),
        ("gguf", "base", commands.gguf_row),
    ]
    yield from rows_of(
        job,
        [
            (name, partial(commands.if_there, name, needed, compute))
            for name, needed, compute in cases
        ],
    )


@final
@dataclass
class _Commands:
    """Runs `bloomery` in a folder. `completion`: the greedy one of the run, and who gave it."""

    folder: Path
    device: tuple[str, ...]
    completion: tuple[str, str] | None = None

    def if_there(self, case: str, needed: str, compute: Callable[[], Row]) -> Row:
        """The row, unless an earlier command left nothing to compute from: the earlier row says why."""
        if any(self.folder.glob(needed)):
            return compute()
        return Row(case=case, outcome="skipped", message=f"no {needed}: an earlier command failed")

    def run(
        self, *arguments: str, device: tuple[str, ...] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """A command that takes a device gets that of the part."""
        takes_device = arguments[0] not in ("report", "import")
        words = (*arguments, *((self.device if device is None else device) if takes_device else ()))
        return subprocess.run(
            python_module("bloomery", *words),
            cwd=self.folder,
            capture_output=True,
            text=True,
            input="Hello there\n",
            check=False,
        )

    def row(self, *arguments: str) -> Row:
        case = f"{arguments[0]} {arguments[1]}"
        done = self.run(*arguments)
        if done.returncode:
            return Row(case=case, outcome="failed", message=_last_line(done))
        return Row(case=case)

    def train_row(self, recipe: str, run: str) -> Row:
        """A run whose own check finds the device wrong is wrong, whether it ended or went on with other settings."""
        row = self.row("train", recipe, "--run-dir", run)
        checks = [
            event
            for event in read_events(RunFolder(self.folder / run).events)
            if isinstance(event, StepChecked) and event.problem
        ]
        if not checks:
            return row
        message = f"{checks[0].problem} ({checks[0].detail})"
        return row.model_copy(update={"outcome": "wrong", "message": message})

    def eval_row(self, evaluation: tuple[str, ...]) -> Row:
        """Losses of the quantized base on the device and on the CPU, and of the one that is not quantized."""
        losses = {}
        quantized = ("eval", *evaluation)
        runs: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "nf4": (quantized, self.device),
            "not_quantized": ((*quantized, "--quantize", "none"), self.device),
            "cpu": (quantized, ("-d", "cpu")),
        }
        for name, (arguments, device) in runs.items():
            done = self.run(*arguments, device=device)
            if done.returncode:
                return Row(case="eval", outcome="failed", message=f"{name}: {_last_line(done)}")
            losses[name] = float(json.loads(done.stdout)["loss"])
        problem = ""
        if losses["nf4"] == losses["not_quantized"]:
            problem = "--quantize none has the loss of nf4"
        elif abs(losses["nf4"] - losses["cpu"]) > CPU_TOLERANCE * losses["cpu"]:
            problem = "the CPU gives another loss"
        numbers: dict[str, Any] = dict(losses)
        return Row(
            case="eval", outcome="wrong" if problem else "ok", message=problem, numbers=numbers
        )

    def loaded_row(self, run: str, device: str) -> Row:
        """In a process of its own, so that the peak is that of loading. The commands must give its completion."""
        command = python_module(__name__, str(self.folder / run), device)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return Row(case="loaded model", outcome="failed", message=_last_line(done))
        numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        problem = _problem_of_completion(numbers)
        # Of two tokens that are as likely the device may take another one than the CPU.
        self.completion = (numbers["on_the_cpu" if problem else "completion"], "the CPU")
        return Row(
            case="loaded model",
            outcome="wrong"
            if (problem := _problem_of_loading(numbers, device) or problem)
            else "ok",
            message=problem,
            numbers=numbers,
        )

    def generate_row(self, run: str) -> Row:
        """A greedy completion."""
        done = self.run("generate", run, *GREEDY)
        if done.returncode:
            return Row(case="generate", outcome="failed", message=_last_line(done))
        text = done.stdout.removeprefix(PROMPT).removesuffix("\n")
        problem = self._problem_of_text(text, "generate")
        return Row(case="generate", outcome="wrong" if problem else "ok", message=problem)

    def _problem_of_text(self, text: str, command: str) -> str:
        """What is wrong with a greedy completion; "" where nothing is. The first one stands where there is no other."""
        if self.completion is None:
            self.completion = (text, command)
        expected, source = self.completion
        # A pipe has lines as this system ends them.
        if text.splitlines() == expected.splitlines():
            return ""
        return f"it completed {text!r}, {source} {expected!r}"

    def serve_row(self, run: str) -> Row:
        """A greedy completion of the server is that of the model, and SIGTERM ends it well."""
        words = (
            "serve",
            run,
            "--port",
            "0",
            "--template",
            "chatml",
            "--step",
            "last",
            *self.device,
        )
        # In the session of the part: a part that is killed at its limit leaves no server on the card.
        server = subprocess.Popen(
            python_module("bloomery", *words),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            url = _url_of(server)
            if url is None:
                return Row(case="serve", outcome="failed", message="it did not begin to listen")
            begin_seconds = time.perf_counter()
            text = _completion(url)
            seconds = time.perf_counter() - begin_seconds
            server.send_signal(signal.SIGTERM)
            code = server.wait(ANSWER_SECONDS)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
        numbers = {"tokens_per_second": NEW_TOKENS / seconds, "exit_code": code}
        if problem := self._problem_of_text(text, "serve"):
            return Row(case="serve", outcome="wrong", message=problem, numbers=numbers)
        if code:
            message = f"exit code {code} after SIGTERM"
            return Row(case="serve", outcome="failed", message=message, numbers=numbers)
        return Row(case="serve", numbers=numbers)

    def gguf_row(self) -> Row:
        """A GGUF file in float32, read back, completes as the model that it was made of."""
        texts = []
        for arguments in (
            ("export", "base", "--to", "gguf", "--type", "f32", "--out", "base.gguf"),
            ("import", "base.gguf", "--out", "read-back"),
            ("generate", "base", *GREEDY),
            ("generate", "read-back", *GREEDY),
        ):
            done = self.run(*arguments)
            if done.returncode:
                message = f"{arguments[0]}: {_last_line(done)}"
                return Row(case="gguf", outcome="failed", message=message)
            texts.append(done.stdout)
        if texts[-1] != texts[-2]:
            message = f"read back it completes {texts[-1]!r}, before {texts[-2]!r}"
            return Row(case="gguf", outcome="wrong", message=message)
        return Row(case="gguf")


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1][:300]


def _url_of(server: "subprocess.Popen[bytes]") -> str | None:
    """The address that a server prints once it listens; None where it does not within START_SECONDS."""
    assert server.stderr is not None
    deadline = time.monotonic() + START_SECONDS
    printed = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([server.stderr], [], [], left)
        if not ready:
            return None
        piece = os.read(server.stderr.fileno(), 4096)
        printed += piece
        if match := re.search(rb"(http://127\.0\.0\.1:\d+)", printed):
            return match[1].decode()
        if not piece:
            return None
    return None


def _completion(url: str) -> str:
    """Of this machine's own server: no proxy is asked."""
    body = {"prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_SECONDS) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return str(answer["choices"][0]["text"])


def _problem_of_loading(numbers: dict[str, Any], device: str) -> str:
    """Of the loaded model's loss and memory; "" where nothing is wrong."""
    loss_error = abs(numbers["loss"] - numbers["loss_of_the_run"])
    if not loss_error <= RUN_TOLERANCE * numbers["loss_of_the_run"]:
        return "its loss is not the one that the run had"
    allowed_gib = numbers["held_gib"] + max(LOADING_EXTRA * numbers["held_gib"], LEAST_EXTRA_GIB)
    if is_accelerator(device) and numbers["peak_gib"] > allowed_gib:
        return "loading held more than the model and a quarter"
    return ""


def _problem_of_completion(numbers: dict[str, Any]) -> str:
    """Of the greedy completion of the loaded model, next to what the CPU says of its tokens."""
    completion, on_the_cpu = numbers["completion"], numbers["on_the_cpu"]
    if numbers["logp_error"] is None:
        return f"it completed {completion!r}, then logits were not finite"
    if numbers["logp_loss"] > LOGP_TOLERANCE:
        return f"it completed {completion!r}, the CPU {on_the_cpu!r}"
    if numbers["logp_error"] > LOGP_TOLERANCE:
        error = numbers["logp_error"]
        return f"log-probabilities of {completion!r} differ from the CPU's by up to {error:.2g}"
    return ""


def measure(run: Path, device: str) -> dict[str, Any]:
    """The loaded model's bytes, the peak while it was loaded, its evaluation next to the run's, tokens per second, and
    its greedy completion next to the CPU's.
    """
    from bloomery.data.loader import Loader
    from bloomery.infer.generate import generate, load_model
    from bloomery.infer.load import Use
    from bloomery.infer.sampling import Sampling
    from bloomery.plan.store import read_plan
    from bloomery.train.evaluation.evaluation import validation_result
    from bloomery.train.objectives.build import build_objective
    from bloomery.train.process import peak_memory_gib

    plan = read_plan(run / "plan.json")
    use = Use(device, bfloat16=is_accelerator(device) and multiplies_bfloat16(device))
    decoder, tokenizer = load_model(run, step="last", use=use)
    peak_gib = peak_memory_gib(device)
    held_gib = sum(each.nbytes for each in (*decoder.parameters(), *decoder.buffers())) / GIB
    decoder.use_attention(plan.model.attention)
    rows = Loader(
        plan.data.prepared,
        sequence_length=plan.data.sequence_length,
        layout=plan.data.layout,
        seed=plan.train.seed,
        split="validation",
    )
    result = validation_result(
        decoder,
        rows,
        build_objective(plan),
        plan=plan.eval,
        precision="float32",
        token_bytes=tokenizer.token_bytes(),
        limit=plan.eval.sequences,
    )
    assert result is not None
    decoder.use_attention("sdpa")
    list(generate(decoder, tokenizer, PROMPT, Sampling(max_new_tokens=4)))
    begin_seconds = time.perf_counter()
    list(generate(decoder, tokenizer, PROMPT, Sampling(max_new_tokens=32)))
    seconds = time.perf_counter() - begin_seconds
    evaluations = [e for e in read_events(run / "events.jsonl") if isinstance(e, EvalDone)]
    return {
        "held_gib": held_gib,
        "peak_gib": peak_gib,
        "loss": result.loss,
        "loss_of_the_run": evaluations[-1].loss,
        "tokens_per_second": 32 / seconds,
        "precision": plan.train.precision,
        "quantized_by": plan.quantized_by,
        **_compared_completions(
            decoder, load_model(run, step="last", use=Use("cpu"))[0], tokenizer
        ),
    }


def _compared_completions(
    decoder: "Decoder", on_cpu: "Decoder", tokenizer: "Tokenizer"
) -> dict[str, Any]:
    """Greedy completions of both. Where they part, both may be right: the CPU also reads the device's tokens.

    `logp_loss`: nats by which the CPU prefers its own token to that of the device, at most. `logp_error`: how far apart
    log-probabilities of the device's tokens are, at most; None where logits are not finite.
    """
    import torch

    from bloomery.infer.generate import beginning
    from bloomery.infer.text import OutputText, text_pieces

    prompt = beginning(tokenizer, PROMPT)
    updates = _greedy_updates(decoder, tokenizer)
    tokens = [update.token for update in updates if update.token is not None]
    with torch.inference_mode():
        logits_TV = on_cpu(torch.tensor([[*prompt, *tokens]])).head[0, len(prompt) - 1 : -1]
    logprobs_TV = logits_TV.float().log_softmax(-1)
    losses, errors = [0.0], [0.0]
    for update, logprobs_V in zip(updates, logprobs_TV, strict=False):
        assert update.token is not None and update.logprob is not None
        logprob = float(logprobs_V[update.token])
        losses.append(float(logprobs_V.max()) - logprob)
        errors.append(abs(update.logprob - logprob))
    is_finite = not isinstance(updates[-1].ended, Exception) and math.isfinite(max(errors))

    def completion(updates: "list[TextUpdate]") -> str:
        tokens = (update.token for update in updates if update.token is not None)
        return "".join(text_pieces(tokens, OutputText(tokenizer, prompt)))

    return {
        "completion": completion(updates),
        "on_the_cpu": completion(_greedy_updates(on_cpu, tokenizer)),
        "logp_loss": max(losses),
        "logp_error": max(errors) if is_finite else None,
    }


def _greedy_updates(decoder: "Decoder", tokenizer: "Tokenizer") -> "list[TextUpdate]":
    """The tokens of the greedy completion, each with its log-probability, and its end."""
    from bloomery.infer.decode import RunningBatch
    from bloomery.infer.generate import beginning
    from bloomery.infer.past import Past
    from bloomery.infer.sampling import Sampling, known_ids

    ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id)
    batch = RunningBatch(Past(decoder))
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0, stop_ids=ends)
    batch.add(beginning(tokenizer, PROMPT), sampling, logprobs=1)
    updates: list[TextUpdate] = []
    while batch.texts:
        updates += batch.step()
    return updates


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])))
