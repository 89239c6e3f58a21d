"""A recipe and a machine become a plan in which nothing is "auto" any more."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

from bloomery.core.choice import Choice
from bloomery.core.units import MIB
from bloomery.data.tokenizer.tokenizer import new_ids
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, build_profile
from bloomery.hardware.specs.calibration import Card, calibration, threads
from bloomery.model.config import ModelConfig
from bloomery.model.families.presets import build_config
from bloomery.model.quantization.sizes import backend
from bloomery.plan import batch, lengths, sections
from bloomery.plan.advice import claims
from bloomery.plan.advice import suggestions as remedies
from bloomery.plan.advice import warnings as doubts
from bloomery.plan.advice.suggestions import arithmetic_choices
from bloomery.plan.batch import longest_rows
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.calibrated import compile_gain, corrected, corrected_memory
from bloomery.plan.estimate.memory import estimate_memory
from bloomery.plan.estimate.states import learning_bytes, optimizer_bytes, way_of
from bloomery.plan.estimate.step_shape import Occupancy
from bloomery.plan.gather import place_of, planned_vocabulary
from bloomery.plan.mesh import choose as mesh_plan
from bloomery.plan.rules import objective as aims
from bloomery.plan.rules import unsupported as refuse
from bloomery.plan.rules.backend import (
    foreign_choices,
    quantised_choices,
    refuse_foreign_misfits,
    refuse_quantised_misfits,
)
from bloomery.plan.rules.choices import choose_attention, choose_compile, choose_deterministic, choose_precision
from bloomery.plan.rules.optimizer import lean_choices, refuse_lean_misfits
from bloomery.plan.rules.peft import adapter_choices, method_choices, refuse_method_misfits, refuse_settings
from bloomery.plan.sections import Settled, decision
from bloomery.plan.types import CorpusFacts, Decision, Estimate, MemoryEstimate, MeshPlan, ModelPlan, Plan, TrainPlan
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe

Precision = Literal["float32", "bfloat16", "float16", "bfloat16-pure"]


def resolve(
    loaded: LoadedRecipe,
    machine: Machine,
    *,
    prepared: Path | None = None,
    corpus: CorpusFacts | None = None,
    gpus: int = 1,
    nodes: int = 1,
    brief: bool = False,
) -> Plan:
    """The plan of a training run on `machine`, or on `nodes` nodes with `gpus` devices like its own each.

    `prepared`: where the tokenised text is or will be; `corpus`: its facts; `brief`: without remedies and the longest
    row. Raises UserError for what this version cannot do and for what contradicts itself; that a run does not fit is
    part of the plan.
    """
    folder = prepared or Path("prepared") / loaded.name

    def plan_of(other: LoadedRecipe) -> Plan:
        return _resolution(other, machine, corpus, gpus, nodes).plan(folder)[0]

    resolution = _resolution(loaded, machine, corpus, gpus, nodes)
    plan, cut = resolution.plan(folder)
    if brief:
        return resolution.judged(plan, cut, brief=True)
    advised = plan.model_copy(update={"remedies": remedies.remedies(loaded, plan, plan_of)})
    return resolution.judged(advised, cut)


def _resolution(
    loaded: LoadedRecipe, machine: Machine, corpus: CorpusFacts | None, gpus: int, nodes: int
) -> "_Resolution":
    profile = build_profile(machine)
    refuse.refuse_mesh(profile, gpus=gpus, nodes=nodes)
    config = checked_config(loaded.recipe, corpus, devices=gpus * nodes)
    return _Resolution(loaded, machine, profile, config, corpus, gpus, nodes)


def checked_config(recipe: Recipe, corpus: CorpusFacts | None, *, devices: int = 1) -> ModelConfig:
    """The model's config. Raises UserError for what no machine could train."""
    refuse.refuse_unbuilt(recipe)
    refuse_lean_misfits(recipe)
    refuse_method_misfits(recipe)
    refuse_quantised_misfits(recipe)
    config = model_config(recipe, corpus)
    refuse.refuse_misfits(recipe, config, corpus)
    refuse_foreign_misfits(recipe, config, devices=devices)
    length = recipe.train.length
    refuse_settings(recipe, config, steps=round(length.amount) if length.unit == "steps" else None)
    return config


def model_config(recipe: Recipe, corpus: CorpusFacts | None) -> ModelConfig:
    """The recipe's model with the vocabulary of its text or of the tokenizer to be trained. Raises UserError."""
    if corpus is None or corpus.vocab_size is None:
        config = build_config(recipe.model, vocab_size=planned_vocabulary(recipe))
    else:
        config = build_config(
            recipe.model,
            vocab_size=corpus.vocab_size,
            bos_token_id=corpus.bos_id,
            eos_token_id=corpus.eos_id,
            pad_token_id=corpus.pad_id,
        )
    return replace(config, head="values") if recipe.objective.spec.values else config


@dataclass(frozen=True)
class _Resolution:
    """What every part of the plan is decided from."""

    loaded: LoadedRecipe
    machine: Machine
    profile: Profile
    config: ModelConfig
    corpus: CorpusFacts | None
    gpus: int
    nodes: int

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def torch(self) -> str | None:
        return self.machine.software.torch

    def plan(self, prepared: Path) -> tuple[Plan, batch.Cut]:
        """The plan without what is said of it: claims, doubts, remedies."""
        recipe, settled = self.recipe, self.settle()
        scale, cut = settled.scale, settled.cut
        if not (scale.guessed and recipe.train.length.unit == "epochs"):
            refuse_settings(recipe, self.config, steps=scale.steps)
        train = self.train(settled)
        plan = Plan(
            name=self.loaded.name,
            model=ModelPlan(
                config=self.config,
                source=None if recipe.model.from_ is None else place_of(recipe.model.from_),
                attention=settled.attention.value,
                score_chunk=cut.score_chunk.value,
                new_ids=new_ids(recipe) if recipe.model.from_ is not None else (),
            ),
            data=sections.data(recipe, self.profile, prepared),
            optimizer=sections.optimizer(recipe, self.profile, scale),
            train=train,
            checkpoint=sections.checkpoint(recipe, scale),
            eval=sections.evaluation(recipe, scale, cut.micro_batch.value),
            monitor=sections.monitor(recipe, scale),
            objective=recipe.objective,
            adapter=recipe.adapter,
            quantize=recipe.quantize,
            quantised_by=settled.reader.value,
            torch=self.torch or "",
            memory=cut.memory,
            step_seconds=settled.seconds,
            step_parts=settled.parts or {},
            mesh=settled.mesh,
            total_tokens=None if train.steps is None else train.steps * settled.tokens.value,
            decisions=self.decided(settled),
            contradictions=(),
            claims=(),
            remedies=(),
            lengths=sections.own_lengths(recipe, self.corpus),
            corpus=self.corpus,
            environment=self.profile.environment.value,
        )
        return plan, cut

    def settle(self) -> Settled:
        """The choices that depend on each other, in the order in which they do."""
        recipe, config = self.recipe, self.config
        tokens = batch.choose_tokens_per_step(
            recipe.train.tokens_per_step, config, recipe.data.sequence_length,
            rows_per_epoch=self.corpus.rows_per_epoch if self.corpus else None,
            tuning=not recipe.objective.spec.reads_text or recipe.adapter.kind != "none",
        )  # fmt: skip
        precision = choose_precision(recipe, self.profile)
        attention = choose_attention(recipe, config, self.profile, precision=precision.value, torch=self.torch)
        scale = self.scale(tokens.value)
        compiled = self.compiled(precision.value, attention.value, scale)
        device, base = self.profile.device.value, recipe.quantize.base
        load = self.occupancy(precision.value, attention.value, compiled.value)
        cut, parts, mesh = self.laid(load, scale.rows_per_step)
        free = recipe.train.tokens_per_step == "auto"
        if load.way.in_backward and free and cut.micro_batch.value < scale.rows_per_step:
            tokens = batch.one_micro_batch(cut)
            scale = self.scale(tokens.value)
            cut, parts, mesh = self.laid(load, scale.rows_per_step)
        return Settled(
            tokens=tokens,
            precision=precision,
            attention=attention,
            compiled=compiled,
            reader=backend(self.machine, base, device=device, compiled=compiled.value),
            scale=self.timed(scale, speed.total(parts) if parts else None),
            cut=cut,
            parts=parts,
            mesh=mesh,
        )

    def decided(self, settled: Settled) -> tuple[Decision, ...]:
        """Every choice with its reason, in the order in which they are told."""
        fused = self.profile.attention.value != "plain"
        return (
            decision("train.precision", settled.told_precision),
            decision("train.attention", settled.attention if fused else settled.priced_attention),
            decision("train.compile", settled.told_compile),
            decision("train.tokens_per_step", settled.tokens),
            *self.length(settled.scale),
            *self.decisions(settled.cut),
            *(decision(*told) for told in quantised_choices(self.recipe, settled.reader)),
            *self.lean(settled.precision.value),
        )

    def laid(
        self, load: Occupancy, rows_per_step: int
    ) -> tuple[batch.Cut, dict[str, Estimate] | None, MeshPlan | None]:
        """How the step is cut and how long it takes: on one device, or in the best layout over several."""
        rate = self.rate(load)
        if self.gpus * self.nodes == 1:
            cut = batch.cut_step(self.recipe.train, load, rows_per_step=rows_per_step, measure=self.measure)
            return cut, self.parts(cut.load, rows_per_step * load.sequence_length), None
        found = mesh_plan.plan_mesh(
            self.recipe.train, self.profile, load, rate,
            rows_per_step=rows_per_step, gpus=self.gpus, nodes=self.nodes, limit=self.limit,
        )  # fmt: skip
        return found.laid.cut, found.laid.parts, found.plan

    def length(self, scale: lengths.Scale) -> tuple[Decision, ...]:
        """Epochs rarely end with a whole step, and what is left out is said."""
        rows = lengths.left_out(self.recipe.train.length, scale)
        if not rows or scale.steps is None:
            return ()
        because = f"the last {rows:,} rows of {self.recipe.train.length} fill no step and are left out"
        return (decision("train.length", Choice(f"{scale.steps:,} steps", because)),)

    def lean(self, precision: str) -> tuple[Decision, ...]:
        gpu = self.profile.accelerator is not None
        told = [*foreign_choices(self.recipe, self.config), *adapter_choices(self.recipe, self.config)]
        told += method_choices(self.recipe, self.config)
        told += aims.objective_choices(self.recipe, self.corpus)
        told += arithmetic_choices(self.recipe, self.config, precision=precision)
        told += lean_choices(self.recipe, accelerator=gpu, precision=precision)
        return tuple(decision(*each) for each in told)

    def decisions(self, cut: batch.Cut) -> tuple[Decision, ...]:
        environment = self.profile.environment
        words = " ".join(f"{key}={value}" for key, value in environment.value.items())
        return (
            decision("train.micro_batch", cut.micro_batch),
            decision("train.activation_checkpointing", cut.checkpointing),
            decision("train.deterministic", choose_deterministic(self.recipe, self.profile)),
            decision("train.device", self.profile.device),
            decision("model.score_chunk", cut.score_chunk),
            decision("data.workers", sections.workers(self.recipe, self.profile)),
            decision("data.pin_memory", sections.pin_memory(self.recipe, self.profile)),
            decision("data.prefetch", sections.prefetch(self.recipe, self.profile)),
            decision("optimizer.fused", sections.fused(self.recipe, self.profile)),
            *([decision("environment", Choice(words, environment.because))] if words else []),
        )

    def train(self, settled: Settled) -> TrainPlan:
        asked, cut, scale, mesh = self.recipe.train, settled.cut, settled.scale, settled.mesh
        timed = asked.length.unit == "seconds"
        accumulation = scale.rows_per_step // cut.micro_batch.value
        return TrainPlan(
            steps=None if timed else scale.steps,
            seconds=asked.length.amount if timed else None,
            min_steps=asked.min_steps,
            tokens_per_step=settled.tokens.value,
            micro_batch=cut.micro_batch.value,
            accumulation=accumulation if mesh is None else mesh.layouts[mesh.chosen].accumulation,
            precision=cast(Precision, settled.precision.value),
            compile=settled.compiled.value,
            activation_checkpointing=cut.checkpointing.value,
            clip=asked.clip,
            seed=asked.seed,
            deterministic=choose_deterministic(self.recipe, self.profile).value,
            threads=threads(self.machine),
            device=self.profile.device.value,
            offload_activations=asked.offload_activations,
        )

    def judged(self, plan: Plan, cut: batch.Cut, *, brief: bool = False) -> Plan:
        """The plan with what follows from its figures: disk, energy, longest row, claims, contradictions."""
        gpu, recipe = self.profile.gpu, self.recipe
        disk = speed.disk_bytes(
            self.config,
            tokens=self.corpus_tokens(plan),
            trained_bytes=learning_bytes(self.config, cut.load.way, cut.load.precision),
            optimizer_bytes=optimizer_bytes(self.config, cut.load.way, recipe.optimizer.kind, cut.load.precision),
            keep=recipe.checkpoint.keep,
        ) | aims.reference_bytes(recipe, self.corpus)
        watts = gpu.board_watts * self.gpus * self.nodes if gpu and gpu.board_watts else None
        judged = plan.model_copy(
            update={
                "disk": disk,
                "energy_kwh": speed.energy_kwh(watts, plan.seconds),
                "longest": longest_rows(cut.load, cut.measure) if self.profile.accelerator and not brief else None,
                "claims": claims.judge(recipe.expect, plan, corpus=self.corpus, need=self.need(cut)),
            }
        )
        found = tuple(doubts.doubts(recipe, judged, self.profile, self.machine))
        return judged.model_copy(update={"contradictions": found})

    def need(self, cut: batch.Cut) -> "claims.Need":
        """Bytes as a function of the micro-batch, everything else as planned."""
        return lambda rows: cut.measure(replace(cut.load, micro_batch=rows)).total

    def corpus_tokens(self, plan: Plan) -> int | None:
        """Tokens of the text: counted, or what the claimed epochs make of the run's length."""
        if self.corpus is not None:
            return self.corpus.tokens
        epochs = self.recipe.expect.epochs
        return round(plan.total_tokens / epochs[0]) if plan.total_tokens and epochs and epochs[0] else None

    def scale(self, tokens_per_step: int) -> lengths.Scale:
        scale = lengths.Scale(
            tokens_per_step=tokens_per_step,
            rows_per_step=tokens_per_step // self.recipe.data.sequence_length,
            rows_per_epoch=self.corpus.rows_per_epoch if self.corpus else None,
            guessed=bool(self.corpus and self.corpus.spread),
            steps=None,
            step_seconds=None,
        )
        return replace(scale, steps=lengths.total_steps(self.recipe.train.length, scale))

    def timed(self, scale: lengths.Scale, seconds: Estimate | None) -> lengths.Scale:
        """With the seconds of a step, and for a wall-time length about how many steps it holds."""
        typical = seconds.value if seconds else None
        steps = scale.steps or lengths.provisional_steps(self.recipe.train.length, typical)
        return replace(scale, steps=steps, step_seconds=typical)

    def compiled(self, precision: str, attention: str, scale: lengths.Scale) -> Choice[bool]:
        length = self.recipe.train.length
        if self.config.foreign is not None:
            return Choice(False, "transformers' layers are not compiled here")
        eager = self.occupancy(precision, attention, False)
        gain = compile_gain(self.cards, model=self.config, precision=precision, setting=eager.setting)
        if length.unit == "seconds":
            return choose_compile(self.recipe, self.profile, length.amount, gain=gain)
        parts = self.parts(eager, scale.tokens_per_step)
        step = speed.total(parts) if parts else None
        seconds = step.value * scale.steps if step is not None and scale.steps is not None else None
        return choose_compile(self.recipe, self.profile, seconds, gain=gain)

    def occupancy(self, precision: str, attention: str, compiled: bool) -> Occupancy:
        arch = self.profile.arch
        return Occupancy(
            config=self.config,
            sequence_length=self.recipe.data.sequence_length,
            micro_batch=1,
            precision=precision,
            optimizer=self.recipe.optimizer.kind,
            attention=attention,
            checkpointing="none",
            compiled=compiled,
            score_chunk=batch.SMALL_CHUNK,
            context_bytes=arch.context_mib * MIB if arch else 0.0,
            on_gpu=self.profile.accelerator is not None,
            expandable=expandable(self.profile),
            way=way_of(self.recipe, self.config),
            offloading=self.recipe.train.offload_activations,
            teacher=aims.teacher_of(self.recipe),
            looks=aims.looks(self.recipe),
            learned=1.0 if self.corpus is None else self.corpus.learned,
        )

    @property
    def limit(self) -> float:
        device = self.profile.accelerator
        share = self.profile.memory_share.value
        return share * device.usable_bytes if device else float(self.machine.host.memory_free_bytes)

    def measure(self, load: Occupancy) -> MemoryEstimate:
        """From shapes, corrected by what was measured of this model on this device."""
        return corrected_memory(self.table_memory(load), load, self.cards, memory=self.table_memory)

    def table_memory(self, load: Occupancy) -> MemoryEstimate:
        return estimate_memory(load, limit=self.limit)

    def rate(self, load: Occupancy) -> speed.Rate | None:
        width = load.config.hidden_size
        return speed.device_rate(
            self.profile, self.machine, precision=load.precision, width=width, compiled=load.compiled
        )

    def parts(self, load: Occupancy, tokens: int) -> dict[str, Estimate] | None:
        """From the table, corrected by what was measured of this device."""
        parts = self.table_parts(load, tokens)
        return None if parts is None else corrected(parts, load, self.cards, seconds=self.table_seconds)

    def table_parts(self, load: Occupancy, tokens: int) -> dict[str, Estimate] | None:
        rate = self.rate(load)
        clips = self.recipe.train.clip is not None
        return None if rate is None else speed.step_parts(speed.work_of(load, tokens=tokens, clips=clips), rate)

    def table_seconds(self, load: Occupancy, tokens: int) -> float | None:
        parts = self.table_parts(load, tokens)
        return None if parts is None else speed.total(parts).value

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        return calibration(self.machine)


def expandable(profile: Profile) -> bool:
    """Whether the run's allocator joins what was freed."""
    return any("expandable_segments:True" in value for value in profile.environment.value.values())
