"""Several devices: replicate, shard, shard inside nodes, or a pipeline: what each takes, and which to choose."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bloomery.model.counting import parameter_count
from bloomery.plan.batch import Cut, cut_step
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.speed import Rate, step_parts, total, work_of
from bloomery.plan.estimate.states import learning_bytes
from bloomery.plan.estimate.step_shape import Occupancy
from bloomery.plan.mesh.links import Fabric, across_seconds, exposed, gather_seconds, reduce_seconds
from bloomery.plan.mesh.memory import Split, mesh_memory
from bloomery.plan.types import Estimate, MemoryEstimate
from bloomery.recipe.schema import Train

NEARLY = 1.03  # a simpler layout is worth so much time
Seconds = dict[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class Laid:
    """One layout, planned: `cut` is one device's, `parts` are seconds of a step."""

    name: str
    split: Split
    cut: Cut
    parts: Seconds | None  # None: nothing is known of the device's speed

    @property
    def seconds(self) -> Estimate | None:
        return None if self.parts is None else total(self.parts)

    @property
    def fits(self) -> bool:
        return self.cut.memory.fits


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every layout is planned from. `limit`: bytes of one device that a plan may use."""

    load: Occupancy
    train: Train
    rows_per_step: int
    fabric: Fabric
    rate: Rate | None
    vendor: str
    limit: float

    def memory(self, split: Split) -> Callable[[Occupancy], MemoryEstimate]:
        rows = self.rows_per_step // split.data_parallel
        return lambda load: mesh_memory(
            load, split, vendor=self.vendor, limit=self.limit, micro_batches=rows // load.micro_batch
        )


def layouts(job: Job) -> list[Laid]:
    """Every layout that the devices and the batch allow, the best micro-batch of each."""
    return [laid for name, split in _splits(job) if (laid := _lay(job, name, split)) is not None]


def _splits(job: Job) -> Iterator[tuple[str, Split]]:
    fabric = job.fabric
    yield "replicate", Split(replicate=fabric.devices)
    yield "shard", Split(shard=fabric.devices)
    if fabric.nodes > 1 and fabric.per_node > 1:
        yield "shard in nodes", Split(replicate=fabric.nodes, shard=fabric.per_node)
    stages = 2
    while stages <= min(fabric.per_node, job.load.config.num_layers):
        if fabric.devices % stages == 0:
            yield "pipeline", Split(replicate=fabric.devices // stages, pipeline=stages)
        stages *= 2


def _lay(job: Job, name: str, split: Split) -> Laid | None:
    """None where some device would have no row of the step."""
    if job.rows_per_step % split.data_parallel:
        return None
    rows = job.rows_per_step // split.data_parallel
    best: Laid | None = None
    for train in _micro_batches(job.train, rows, split):
        cut = cut_step(train, job.load, rows_per_step=rows, measure=job.memory(split))
        laid = Laid(name=name, split=split, cut=cut, parts=layout_parts(job, split, cut.load, rows))
        if best is None or _order(laid) < _order(best):
            best = laid
        if not laid.fits:  # nor will a larger one
            break
    return best


def _micro_batches(train: Train, rows: int, split: Split) -> Iterator[Train]:
    """A pipeline wants many small micro-batches, everything else the largest that fits."""
    if split.pipeline == 1 or train.micro_batch != "auto":
        if train.micro_batch == "auto" or rows % train.micro_batch == 0:
            yield train
        return
    size = 1
    while size <= rows and rows % size == 0:
        yield train.model_copy(update={"micro_batch": size})
        size *= 2


def _order(laid: Laid) -> tuple[bool, float]:
    seconds = laid.seconds
    return not laid.fits, seconds.value if laid.fits and seconds is not None else laid.cut.memory.total


def choose(found: list[Laid]) -> tuple[Laid, str]:
    """The fastest layout that fits, a simpler one where it costs less than 3%; the smallest where none fits."""
    best = min(found, key=_order)
    if not best.fits:
        return best, "no layout fits; this one needs the least memory"
    if best.seconds is None:
        return best, "nothing is known of this device's speed: the one that needs the least memory"
    for laid in found:  # simplest first
        if laid.fits and laid.seconds is not None and laid.seconds.value <= best.seconds.value * NEARLY:
            fitting = {other.name for other in found if other.fits}
            others = [other.name for other in found if other.name not in fitting]
            because = (
                "the fastest that fits" if laid is best else f"simpler, and within {NEARLY - 1:.0%} of the fastest"
            )
            return laid, because + (f"; {', '.join(dict.fromkeys(others))} would not fit" if others else "")
    raise AssertionError("the best layout is one of those found")


def layout_parts(
    job: Job, split: Split, load: Occupancy, rows: int, *, work: speed.Work | None = None
) -> Seconds | None:
    """Seconds of a step over `rows` rows of each data-parallel rank, by what takes them."""
    if job.rate is None:
        return None
    tokens = rows * load.sequence_length
    whole = work or work_of(load, tokens=tokens)
    parts = step_parts(_share_of(whole, split), job.rate)
    passes = max(1, rows // load.micro_batch)
    computing = total({name: part for name, part in parts.items() if name != "optimizer"})
    parts["exposed communication"] = _exposed(job, split, load, passes, computing)
    if split.pipeline > 1:
        parts["pipeline bubble"] = computing.scaled((split.pipeline - 1) / passes)
    return parts


def _share_of(work: speed.Work, split: Split) -> speed.Work:
    """One device's part: of the layers with a pipeline, of the optimizer with sharding too."""
    stages = split.pipeline
    return replace(
        work,
        products=work.products / stages,
        attention=work.attention / stages,
        between=work.between / stages,
        launches=work.launches / stages,
        update=work.update / (stages * split.shard),
    )


def _exposed(job: Job, split: Split, load: Occupancy, passes: int, computing: Estimate) -> Estimate:
    """Communication that computing does not hide; what cannot overlap at all, a pipeline's hand-over, counts whole."""
    hidden, bare, window = _communication(job, split, load, passes, computing.value)
    low, typical, high = (exposed(hidden, window, index) + bare for index in (2, 1, 0))
    return Estimate(value=typical, low=low, high=high, origin="table")


def _communication(
    job: Job, split: Split, load: Occupancy, passes: int, computing: float
) -> tuple[float, float, float]:
    """Seconds that may hide, seconds that may not, and the computing that they may hide behind."""
    fabric, config = job.fabric, load.config
    count, learning = _parameters(load), learning_bytes(config, load.way, load.precision)
    layers = config.num_layers
    if split.shard > 1:
        nodes = fabric.nodes if split.shard > fabric.per_node else 1
        gathered = gather_seconds(count * load.element, fabric, nodes=nodes, calls=layers)
        scattered = gather_seconds(learning, fabric, nodes=nodes, calls=layers)  # in the weights' precision
        seconds = passes * (2 * gathered + scattered)
        if split.replicate > 1:
            seconds += across_seconds(learning, fabric)
        return seconds, 0.0, computing
    if split.pipeline > 1:
        hand_over = 4 * load.rows * config.hidden_size * load.element / (fabric.inside.gbs * 1e9)
        stage = learning / split.pipeline
        reduced = reduce_seconds(stage, replace(fabric, per_node=max(1, fabric.per_node // split.pipeline)))
        return (reduced if split.replicate > 1 else 0.0), passes * hand_over, computing / max(1, passes)
    return reduce_seconds(learning, fabric), 0.0, computing * 2 / 3 / passes  # behind the last backward


def _parameters(load: Occupancy) -> int:
    return parameter_count(load.config)
