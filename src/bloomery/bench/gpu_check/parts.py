"""The parts of the check of a GPU, in their order: what each does, leaves in the file, and may take. No torch.

What proves that the numbers are right comes first: whoever has a card for ten minutes learns that much.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.plan.resolve import DETERMINISM


@final
@dataclass(frozen=True, kw_only=True)
class Part:
    """One child process. `seconds`, `tiny_seconds`: after so many it is killed; they count from its start."""

    name: str
    function: str  # module of this package : generator of rows
    does: str
    keeps: str  # what its rows hold
    seconds: float
    tiny_seconds: float
    tiny_does: str = ""  # where `--tiny` does something else
    environment: dict[str, str] = field(default_factory=dict)

    def limit(self, *, tiny: bool) -> float:
        return self.tiny_seconds if tiny else self.seconds

    def what(self, *, tiny: bool) -> str:
        return self.tiny_does if tiny and self.tiny_does else self.does


PARTS = (
    Part(
        name="probes",
        function="probing:probed",
        does="the probes of `bloomery doctor --probe`: products, copies, attention, the compiler",
        keeps="outcome, error and rate of each",
        seconds=100,
        tiny_seconds=60,
        tiny_does="two of the probes of `bloomery doctor --probe`: the device, products in float32",
    ),
    Part(
        name="step",
        function="probing:stepped",
        does="one training step of three recipes in each precision, against float32 on the CPU",
        keeps="the part that differs by more than rounding",
        seconds=240,
        tiny_seconds=120,
        tiny_does="one training step of two small recipes in float32, against the CPU",
    ),
    Part(
        name="same",
        function="agreement:same_losses",
        does="short runs in every memory mode, quantization, objective and attention backend, and on the CPU",
        keeps="the largest difference of losses and gradient norms; whether bits are equal",
        seconds=160,
        tiny_seconds=120,
        tiny_does="short runs in some memory modes, with NF4, DPO and each attention backend, and on the CPU",
        environment=DETERMINISM,
    ),
    Part(
        name="races",
        function="streams:races",
        does="activations and optimizer states in host memory, with the sanitizer of PyTorch and without",
        keeps="reads and writes that nothing orders; whether bits are equal to those of a plain run",
        seconds=60,
        tiny_seconds=50,
        environment=DETERMINISM,
    ),
    Part(
        name="waits",
        function="streams:waits",
        does="counts where the host waits for the device, in steps of one and of four micro-batches",
        keeps="waits of a step by line of code",
        seconds=40,
        tiny_seconds=30,
    ),
    Part(
        name="resume",
        function="endurance:resumed",
        does="stops a run, kills another one with SIGKILL, and resumes both",
        keeps="whether losses and checkpoints are equal to the bit",
        seconds=80,
        tiny_seconds=60,
        environment=DETERMINISM,
    ),
    Part(
        name="rollout",
        function="agreement:rollouts",
        does="GRPO, RLOO and PPO on completions that the device samples, and on the CPU",
        keeps="completions that are the CPU's, and the difference of log-probabilities and losses",
        seconds=70,
        tiny_seconds=60,
        tiny_does="GRPO on completions that the device samples, and on the CPU",
        environment=DETERMINISM,
    ),
    Part(
        name="kernels",
        function="kernels:right_kernels",
        does="each attention backend against float64, and Triton's kernels for decoding against SDPA",
        keeps="error and time of each",
        seconds=90,
        tiny_seconds=60,
        tiny_does="three attention backends against float64, and Triton's kernels for decoding against SDPA",
    ),
    Part(
        name="ranks",
        function="ranks:two_ranks",
        does="two processes on one card: the vendor's collectives where they allow it, a pipeline through the host",
        keeps="sums, losses next to one rank's, or the refusal",
        seconds=60,
        tiny_seconds=90,
    ),
    Part(
        name="memory",
        function="endurance:memory_as_planned",
        does="the peak of the allocator next to the plan, in every memory mode",
        keeps="GiB, measured and planned",
        seconds=80,
        tiny_seconds=40,
        tiny_does="the peak of the allocator next to the plan, in three memory modes",
    ),
    Part(
        name="out-of-memory",
        function="endurance:short_of_memory",
        does="caps the allocator below what a run needs; the run must go on with less",
        keeps="what the run changed, and its losses next to those with enough memory",
        seconds=60,
        tiny_seconds=40,
    ),
    Part(
        name="stream",
        function="streamed:streamed",
        does="weights that stream from host memory next to weights that stay; 8B in full under a cap of 12 GiB",
        keeps="whether bits are equal, rates of the link, how much longer a step takes, GiB",
        seconds=140,
        tiny_seconds=50,
        tiny_does="weights of small models that stream from host memory next to weights that stay, and the link",
        environment=DETERMINISM,
    ),
    Part(
        name="use",
        function="use:used",
        does="the commands on a QLoRA run: train, eval, generate, chat, report, export, a GGUF file, serve",
        keeps="exit codes, losses, completions next to the CPU's, memory of the loaded model, tokens per second",
        seconds=130,
        tiny_seconds=150,
    ),
    Part(
        name="attention",
        function="kernels:timed_kernels",
        does="times each attention backend and the candidate tiles of Triton's kernels",
        keeps="milliseconds by length and backend",
        seconds=120,
        tiny_seconds=30,
        tiny_does="times each attention backend on short rows",
    ),
    Part(
        name="qlora",
        function="speed:qlora",
        does="steps of Llama-3.1-8B with QLoRA, random weights, under a cap of 7.5 GiB",
        keeps="tokens per second and GiB, measured and planned",
        seconds=80,
        tiny_seconds=30,
        tiny_does="a few steps of a small model with QLoRA, which must learn",
    ),
    Part(
        name="lora",
        function="speed:lora",
        does="steps of Llama-3.1-8B with LoRA, random weights, under a cap of 17 GiB",
        keeps="tokens per second and GiB, measured and planned",
        seconds=75,
        tiny_seconds=30,
        tiny_does="a few steps of a small model with LoRA, which must learn",
    ),
    Part(
        name="full",
        function="speed:full",
        does="steps of Llama-2-7B, every weight, random, under a cap of 22 GiB",
        keeps="tokens per second and GiB, measured and planned",
        seconds=80,
        tiny_seconds=30,
        tiny_does="a few steps of a small model, every weight, which must learn",
    ),
    Part(
        name="theirs-qlora",
        function="theirs:qlora",
        does="the same steps with TRL (else transformers) and PEFT, where they are installed",
        keeps="tokens per second and GiB",
        seconds=45,
        tiny_seconds=30,
    ),
    Part(
        name="theirs-lora",
        function="theirs:lora",
        does="the same steps with TRL (else transformers) and PEFT, where they are installed",
        keeps="tokens per second and GiB",
        seconds=45,
        tiny_seconds=30,
    ),
    Part(
        name="theirs-full",
        function="theirs:full",
        does="the same steps with TRL (else transformers), where they are installed",
        keeps="tokens per second and GiB",
        seconds=45,
        tiny_seconds=30,
    ),
)


def chosen_parts(names: Sequence[str]) -> tuple[Part, ...]:
    """The named parts in the order of the table; all without a name. Raises UserError (code 2) for an unknown one."""
    known_names = [part.name for part in PARTS]
    for name in names:
        if name not in known_names:
            fix = did_you_mean(name, known_names, f"parts are {', '.join(known_names)}")
            raise UserError(f"no such part: {name}", where="--only", fix=fix, code=2)
    return tuple(part for part in PARTS if not names or part.name in names)


def limits(
    parts: Sequence[Part], *, tiny: bool, total_seconds: float | None = None
) -> dict[str, float]:
    """Seconds that each part may take. Their sum is `total_seconds`, where that is given."""
    own_limits = {part.name: part.limit(tiny=tiny) for part in parts}
    if total_seconds is None:
        return own_limits
    scale = total_seconds / sum(own_limits.values())
    return {name: seconds * scale for name, seconds in own_limits.items()}
