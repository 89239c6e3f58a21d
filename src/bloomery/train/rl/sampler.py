"""Sampling the completions of a rollout on all ranks: what each samples, how they agree to stop, out of memory.

Ranks take different numbers of forwards, as completions have different lengths. So a forward has no collective: where
ranks hold shards, stages or some experts of the model, each gathers a whole copy first, and samples as many prompts as
the others.
"""

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from bloomery.core.device import release_cached_memory
from bloomery.data.order import uniform_numbers
from bloomery.data.prompts import Prompt
from bloomery.facts.limits import ROLLOUT_SLOTS
from bloomery.infer.completions import Completion, Episode, Uniforms, sample_completions
from bloomery.infer.forward import eval_mode, precision_context
from bloomery.infer.sampling import NotFinite, Sampling
from bloomery.model.compiled_step import CompiledStep
from bloomery.model.decoder import Decoder
from bloomery.model.io.parameters import full
from bloomery.model.native import Uncompiled
from bloomery.monitor.events import Emit, Phase, Recovered
from bloomery.parallel.mesh import Mesh
from bloomery.plan.pipeline import stage_of
from bloomery.plan.types import RunPlan
from bloomery.train.failures import Diverged, OutOfMemory, Stopped, TimeIsUp
from bloomery.train.process import out_of_memory
from bloomery.train.rl.episodes import EpisodeSampler
from bloomery.train.rl.rollout_pictures import PromptsInTurn
from bloomery.train.rl.tools import RecordedCalls
from bloomery.train.state import TrainState, empty_model

FORWARDS_PER_CHECK = 16  # of one of several ranks, from one agreement to the next
REPORT_SECONDS = 1.0


@final
class Agreement:
    """Whether a rollout goes on, and how far it is, the same on all ranks.

    Each rank asks at every `FORWARDS_PER_CHECK`th of its forwards, and one that is done asks on until all are: so all
    ask equally often. One rank alone asks at every forward. Raises Stopped and TimeIsUp.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        total: int,
        phase: Phase,
        emit: Emit,
        stop: Callable[[], bool],
        time_is_up: Callable[[], bool],
    ) -> None:
        self._mesh = mesh
        self._total = total
        self._phase = phase
        self._emit = emit
        self._stop = stop
        self._time_is_up = time_is_up
        self._num_forwards = 0
        self._last_report = time.monotonic()

    def before_forward(self, num_done: int) -> None:
        """`num_done`: the completions of this rank that are over."""
        self._num_forwards += 1
        if self._mesh.world == 1 or self._num_forwards % FORWARDS_PER_CHECK == 0:
            self._ask(num_done, is_done=False)

    def wait_for_others(self, num_done: int) -> None:
        """Until all ranks have sampled all of their completions."""
        while not self._ask(num_done, is_done=True):
            pass

    def _ask(self, num_done: int, *, is_done: bool) -> bool:
        """Whether all ranks are done."""
        if self._stop():
            raise Stopped
        done_of_all, num_waiting, time_is_up = self._mesh.all_reduce_sum(
            num_done, is_done, self._mesh.first_rank and self._time_is_up()
        )
        if time_is_up:
            raise TimeIsUp
        if time.monotonic() - self._last_report > REPORT_SECONDS:
            self._last_report = time.monotonic()
            phase = replace(self._phase, done=done_of_all, total=self._total, time=time.time())
            self._emit(phase)
        return num_waiting == self._mesh.world


@final
class JointWait:
    """All ranks wait for what the first one waits for, and any of them may be asked to stop meanwhile.

    The first rank asks as often as it likes; the others ask with it until it is done. Raises Stopped on all of them.
    """

    def __init__(self, mesh: Mesh, stop: Callable[[], bool]) -> None:
        self._mesh = mesh
        self._stop = stop

    def go_on(self) -> bool:
        """For the first rank, as an answer to whether it is to stop: it raises instead."""
        return self._ask(is_done=False)

    def finish(self) -> None:
        """The first rank is done; the others return when it is."""
        if self._mesh.first_rank:
            self._ask(is_done=True)
            return
        while not self._ask(is_done=False):
            pass

    def _ask(self, *, is_done: bool) -> bool:
        """Whether the first rank is done."""
        if self._mesh.broadcast_bool(is_done):
            return True
        if self._stop():
            raise Stopped
        return False


def keyed_uniforms(keys: Mapping[tuple[int, int], int]) -> Uniforms:
    """Random numbers by the key of a completion and the position of its token. `keys`: by prompt and number."""

    def uniforms(texts: Sequence[Completion]) -> Tensor:
        states = np.array([keys[text.prompt, text.number] for text in texts], dtype=np.uint64)
        positions = np.array([len(text.ids) for text in texts], dtype=np.uint64)
        return torch.from_numpy(uniform_numbers(states, positions))

    return uniforms


@final
class Sampler:
    """Samples completions from the model that trains."""

    def __init__(
        self,
        state: TrainState,
        sampling: Sampling,
        *,
        read_prompt: Callable[[Prompt], list[int]],
        episodes: EpisodeSampler | None = None,
        calls: Path | None = None,
        emit: Emit,
        stop: Callable[[], bool],
    ) -> None:
        """`read_prompt`: what is decoded of a prompt, with its pictures. `episodes`: of several turns with tools, whose
        calls are recorded in the folder `calls`.
        """
        self._state = state
        self._episodes = episodes
        self._calls = calls
        self._sampling = sampling
        self._read_prompt = read_prompt
        self._emit = emit
        self._stop = stop
        self._slots = ROLLOUT_SLOTS

    @property
    def _mesh(self) -> Mesh:
        return self._state.model_and_optimizer.mesh

    def completions(
        self,
        plan: RunPlan,
        prompts: Sequence[Prompt],
        num_generations: int,
        key: Callable[[int, int], int],
        *,
        time_is_up: Callable[[], bool] = lambda: False,
        phase: str = "rollout",
    ) -> list[Completion]:
        """`num_generations` of each prompt, in order, on every rank; all completions of a prompt are of one rank.

        `key`: of the random numbers of a completion, by its prompt's place and its own. `time_is_up`: asked on the
        first rank. `phase`: the name of its progress. Raises Stopped, TimeIsUp, Diverged and OutOfMemory.
        """
        mesh = self._mesh
        own_places = range(mesh.rank, len(prompts), mesh.world)
        agreement = Agreement(
            mesh,
            total=len(prompts) * num_generations,
            phase=Phase(step=self._state.progress.step, name=phase),
            emit=self._emit,
            stop=self._stop,
            time_is_up=time_is_up,
        )

        uniforms = keyed_uniforms(
            {
                (index, number): key(place, number)
                for index, place in enumerate(own_places)
                for number in range(num_generations)
            }
        )

        own_prompts = [prompts[place] for place in own_places]

        def sample(model: Decoder) -> list[Completion]:
            in_turn = PromptsInTurn(own_prompts, self._read_prompt)
            try:
                if self._episodes is not None:
                    return self._episodes.sample(
                        model,
                        own_prompts,
                        num_generations,
                        self._sampling,
                        lambda index, number: key(own_places[index], number),
                        slots=self._slots,
                        recorded=self._recorded(phase),
                        on_step=agreement.before_forward,
                    )
                return sample_completions(
                    model,
                    in_turn,
                    num_generations,
                    self._sampling,
                    uniforms,
                    slots=self._slots,
                    longest=in_turn.longest,
                    on_step=agreement.before_forward,
                )
            except NotFinite as error:
                step = self._state.progress.step
                raise Diverged(
                    f"non-finite logits after step {step}, while completions are sampled",
                    where=f"step {step}",
                    fix="start again with a lower optimizer.learning_rate; older checkpoints are untouched",
                ) from error

        slots_before = self._slots
        completions: list[Completion] = []
        with generating(self._state, plan) as model:
            if own_places:
                completions = self._with_fewer_slots(lambda: sample(model))
            agreement.wait_for_others(len(completions))
        self._agree_on_slots(slots_before)
        return self._of_all_ranks(completions, own_places)

    def _recorded(self, phase: str) -> RecordedCalls:
        """What tools answered in this rollout, before the run was killed."""
        if self._calls is None or phase != "rollout":
            return RecordedCalls(None)
        step = self._state.progress.step
        return RecordedCalls(self._calls, f"step-{step + 1:08d}", self._mesh.rank)

    def _with_fewer_slots(self, sample: Callable[[], list[Completion]]) -> list[Completion]:
        """What `sample` returns; out of memory, it is called again with half as many slots, down to one."""
        while True:
            try:
                return sample()
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if self._slots == 1:
                    raise OutOfMemory(
                        f"out of memory at step {self._state.progress.step + 1} while sampling one completion",
                        where="objective.max_completion_length",
                        fix="start a new run with a smaller objective.max_completion_length, or a smaller model",
                    ) from error
            # Outside the handler: the traceback holds the cache of all slots.
            self._slots //= 2
            gc.collect()
            release_cached_memory()

    def _agree_on_slots(self, slots_before: int) -> None:
        """All ranks sample as many completions at once as the one with the least memory."""
        (most_halvings,) = self._mesh.all_reduce_max(-self._slots)
        self._slots = round(-most_halvings)
        if self._slots < slots_before:
            self._emit(
                Recovered(
                    step=self._state.progress.step,
                    reason=f"out of memory while sampling {slots_before} completions at once",
                    action=f"samples {self._slots} at once",
                )
            )

    def _of_all_ranks(
        self, completions: Sequence[Completion], own_places: Sequence[int]
    ) -> list[Completion]:
        """In the order of the prompts."""
        own = [
            [
                own_places[text.prompt],
                text.number,
                text.ids,
                text.logps,
                text.truncated,
                None if text.episode is None else asdict(text.episode),
            ]
            for text in completions
        ]
        gathered = [
            Completion(
                prompt,
                number,
                ids,
                logps,
                truncated,
                None if episode is None else Episode(**episode),
            )
            for of_rank in self._mesh.all_gather_json(own)
            for prompt, number, ids, logps, truncated, episode in of_rank
        ]
        return sorted(gathered, key=lambda text: (text.prompt, text.number))


@contextmanager
def generating(state: TrainState, plan: RunPlan) -> Iterator[Decoder]:
    """The model that decodes, in evaluation mode: on a CPU with the compiled step where there is one.

    Where a rank has a part of the model, it is a whole copy of it, for the length of the block: all ranks must enter.
    """
    mesh = state.model_and_optimizer.mesh
    model = state.model if mesh.holders * mesh.stages == 1 else whole_copy(state, plan)
    if plan.train.device == "cpu":
        try:
            model.step = CompiledStep(model)
        except Uncompiled:
            model.step = None  # PyTorch decodes, too
    # The compiled step has no float16 cache: it and the prompt's forward then compute in the weights' float32.
    precision = plan.train.precision
    if model.step is not None and precision == "float16":
        precision = "float32"
    # Compiled, each new length would be recompiled.
    eager = torch.compiler.set_stance("force_eager")
    try:
        with eval_mode(model), precision_context(precision, plan.train.device), eager:
            yield model
    finally:
        model.step = None
        return_sampling_memory()


def return_sampling_memory() -> None:
    """Give the system what malloc keeps of sampling: keys, values and logits of other sizes than those of training."""
    gc.collect()
    if sys.platform == "linux":
        c_library = ctypes.CDLL(None)
        if hasattr(c_library, "malloc_trim"):  # musl has none
            c_library.malloc_trim(0)


@torch.no_grad()
def whole_copy(state: TrainState, plan: RunPlan) -> Decoder:
    """The model in one piece, with its weights of now in their dtypes. All ranks gather, tensor by tensor."""
    mesh = state.model_and_optimizer.mesh
    stages = [
        stage_of(plan.model.config, stage, mesh.stages, plan.train.pipeline_layers)
        for stage in range(mesh.stages)
    ]
    copy = empty_model(plan)
    copy.tie()
    copy.to_empty(device=torch.device(plan.train.device))
    copy.tie()
    # A quantized weight is buffers here, and parameters where it is split.
    sources = dict(state.model.named_parameters()) | dict(state.model.named_buffers())
    for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
        owner = next(number for number, stage in enumerate(stages) if stage.has(name))
        if mesh.stage == owner:
            tensor.copy_(full(sources[name].detach()))
        if mesh.stages > 1:
            mesh.broadcast_from_stage(tensor.detach(), owner)
    if state.model.vision is not None:
        copy.see(state.model.vision)  # each rank has all of it
    return copy
