"""Asks the planner for runs that others have published, as if they were ahead of us."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bloomery.core.units import GIB
from bloomery.facts.counting import Layer, layers
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.hardware.profile import MEMORY_SHARE, build_profile, with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.model.configs import build_config
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.activations import layer_bytes_per_token
from bloomery.plan.estimate.fabric import fabric_of
from bloomery.plan.estimate.memory import FRAGMENTATION, tensors_at
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.estimate.moments import StepMoment, moments
from bloomery.plan.estimate.speed import Recompute, recompute, step_parts, total, work_of
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.gather import planned_vocabulary
from bloomery.plan.mesh import MeshWorkload, layout_parts
from bloomery.plan.types import Estimate
from bloomery.recipe.load import load_recipe

HERE = Path(__file__).parent
# half logits and their gradient, float32 logits, softmax: what eager cross entropy holds
PLAIN_LOGIT_BYTES = 12
# every other product is kept, and attention's output
OPERATORS = Recompute(products=0.5, attention=0.0, between=1.0)
CHUNKS = 8
SPREAD = 0.2


@dataclass(frozen=True)
class Answer:
    """One published figure and the planner's interval, in the same unit."""

    row: dict[str, Any]
    what: str  # speed, memory, compile_gain
    published: float
    planned: Estimate

    @property
    def error(self) -> float:
        return self.planned.value / self.published - 1

    @property
    def inside(self) -> bool:
        return self.planned.low <= self.published <= self.planned.high


@cache
def table() -> dict[str, Any]:
    return tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))


def answers() -> list[Answer]:
    """Every figure of published.toml, asked."""
    found = []
    for row in table()["row"]:
        if "speed" in row:
            found.append(Answer(row, "speed", row["speed"], planned_speed(row)))
        if "memory_gib" in row:
            found.append(Answer(row, "memory", row["memory_gib"], planned_memory(row)))
        if "compile_gain" in row:
            found.append(Answer(row, "compile_gain", row["compile_gain"], planned_gain(row)))
    return found


@dataclass(frozen=True)
class Asked:
    recipe: Any
    load: StepShape
    job: MeshWorkload
    split: MeshSplit
    rows: int  # of a device and step
    work: speed.Work
    operators: bool
    loss: str


def asked(row: dict[str, Any], *, compiled: bool | None = None) -> Asked:
    recipe = load_recipe(
        HERE / "base.yaml", [*table()["models"][row["model"]], *row["recipe"]]
    ).recipe
    program, precision = row["program"], recipe.train.precision
    machine = with_gpu(_host(), find_gpu(row["gpu"]))
    profile = build_profile(machine)
    config = build_config(recipe.model, vocab_size=planned_vocabulary(recipe))
    compiled = recipe.train.compile if compiled is None else compiled
    micro, length = recipe.train.micro_batch_size, recipe.data.sequence_length
    mode = (
        "none"
        if recipe.train.activation_checkpointing == "auto"
        else recipe.train.activation_checkpointing
    )
    tokens = micro * length
    expandable = any(
        "expandable_segments:True" in value for value in profile.environment.value.values()
    )
    load = StepShape(
        model=TrainedModel.of(recipe, config),
        sequence_length=length,
        micro_batch_size=micro,
        precision=precision,
        optimizer=recipe.optimizer.kind,
        attention="math" if program["attention"] == "math" else "sdpa",
        checkpointing=mode,
        compiled=bool(compiled),
        score_chunk=min(1024, tokens) if program["loss"] == "chunked" else tokens,
        context_bytes=profile.arch.context_mib * 2**20,
        on_gpu=True,
        expandable=expandable,
    )
    rate = speed.device_rate(
        profile, machine, precision=precision, width=config.hidden_size, compiled=bool(compiled)
    )
    if "bandwidth_gbs" in row.get("card", {}):
        rate = replace(rate, bandwidth=row["card"]["bandwidth_gbs"] * 1e9)
    nodes = row.get("nodes", 1)
    devices = row["gpus"] * nodes
    fabric = fabric_of(
        profile.gpu.link,
        per_node=row["gpus"],
        nodes=nodes,
        assumed_network="tcp" if program.get("network") == "sockets" else "auto",
    )
    split = MeshSplit(shard=devices) if row["layout"] == "fsdp" else MeshSplit(replicate=devices)
    rows = recipe.tokens_per_step // length // devices
    operators = program.get("checkpointing") == "operators"
    again = OPERATORS if operators else recompute(load)
    loss = {"fused": "kept", "plain": "plain", "chunked": "chunked"}[program["loss"]]
    job = MeshWorkload(
        step=load,
        sequences_per_step=rows * devices,
        fabric=fabric,
        rate=rate,
        vendor=profile.arch.vendor,
        limit=MEMORY_SHARE * profile.accelerator.memory_bytes,
    )
    work = work_of(
        load,
        tokens=rows * length,
        recomputed=again,
        loss=loss,
        clips=recipe.train.max_grad_norm is not None,
    )
    return Asked(recipe, load, job, split, rows, work, operators, program["loss"])


def parts_of(one: Asked) -> dict[str, Estimate]:
    if one.split.data_parallel == 1:
        return step_parts(one.work, one.job.rate)
    return layout_parts(one.job, one.split, one.load, one.rows, work=one.work)


def planned_speed(row: dict[str, Any]) -> Estimate:
    one = asked(row)
    return total(parts_of(one)).inverse(one.rows * one.load.sequence_length)


def planned_gain(row: dict[str, Any]) -> Estimate:
    """Products and bytes of both sides move together; each may be fast or slow for itself."""
    eager, compiled = (parts_of(asked(row, compiled=way)) for way in (False, True))
    ends = [
        _mixed(eager, products, between) / _mixed(compiled, products, between)
        for products in ("low", "high")
        for between in ("low", "high")
    ]
    value = _mixed(eager, "value", "value") / _mixed(compiled, "value", "value")
    return Estimate(value=value, low=min(ends), high=max(ends), origin="table")


def _mixed(parts: dict[str, Estimate], products: str, between: str) -> float:
    by_share = ("matmul", "attention")
    return sum(
        getattr(part, products if name in by_share else between) for name, part in parts.items()
    )


def planned_memory(row: dict[str, Any]) -> Estimate:
    """GiB of one device in the row's own way of counting."""
    one = asked(row)
    load, shard = one.load, one.split.shard
    peak = max(
        (their_moment(one, moment) for moment in moments(load)), key=lambda moment: moment.total
    )
    parts = tensors_at(load, peak)
    if not load.mode.fused_backward:
        parts["gradients"] = load.model.trainable_bytes(load.precision)
    for name in parts.keys() & {"weights", "gradients", "optimizer", "adapter"}:
        parts[name] /= shard
    if shard > 1:
        parts.pop("half-precision copies", None)
        layer_values = [layer.layer.total_parameters for layer in load.model.layers]
        layer, root = layer_values[0], load.model.weight_count - sum(layer_values)
        reduced = 0 if one.recipe.adapter.kind == "lora" else layer * load.weight_bytes
        parts["gathered layers"] = (2 * layer + root) * load.element_bytes + reduced
    counted = sum(parts.values())
    if row["memory_is"] != "allocated":
        counted *= 1 + FRAGMENTATION[load.expandable]
    if row["memory_is"] == "card":
        counted += load.context_bytes
    value = counted / GIB
    return Estimate(
        value=value, low=value * (1 - SPREAD), high=value * (1 + SPREAD), origin="table"
    )


def their_moment(one: Asked, moment: StepMoment) -> StepMoment:
    """A moment of a step with what another program keeps for its layers and its scores."""
    load, config = one.load, one.load.config
    scores, activations = moment.logits, moment.activations
    if one.operators and activations:
        # of the layer that is computed again
        inside = load.tokens_per_micro_batch * layer_bytes_per_token(load, load.model.layers[0])
        activations = (
            sum(
                load.tokens_per_micro_batch * operator_bytes(load, layer)
                for layer in layers(config)
            )
            + inside
        )
    if one.loss != "fused" and scores:
        chunks = CHUNKS if one.loss == "chunked" else 1
        scores = PLAIN_LOGIT_BYTES * float(load.tokens_per_micro_batch) * config.vocab_size / chunks
    return moment._replace(logits=scores, activations=activations)


def operator_bytes(load: StepShape, layer: Layer) -> float:
    """Per token: the layer's input, attention's output, and every other product's."""
    width = load.config.hidden_size
    products = layer.query_width + 2 * layer.key_width + 2 * width
    products += (2 if layer.gated_mlp else 1) * layer.intermediate_size
    return load.element_bytes * (width + layer.query_width + products / 2) + 4 * layer.num_heads


def _host() -> Machine:
    host = Host(
        system="Linux",
        cpu_name="",
        cpu_cores=1,
        memory_bytes=0,
        memory_free_bytes=0,
        disk_free_bytes=0,
    )
    return Machine(accelerators=(), host=host, software=Software(python="3.12.4"))
