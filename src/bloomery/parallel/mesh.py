"""The ranks of a run: who this process is, and the few numbers that ranks exchange.

A rank decides only from numbers that were reduced here: they have the same bits on every rank. Whatever else goes
wrong on one rank ends it, and the launcher ends the others. One rank alone has no process group.
"""

import ctypes
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bloomery.model.adapters.settings import shares_head
from bloomery.model.decoder import Decoder
from bloomery.model.io.parameters import full, is_split
from bloomery.model.norms import LayerNorm, RMSNorm
from bloomery.plan.types import TrainPlan

# variable: a file on this machine where ranks meet; without it, MASTER_ADDR
RENDEZVOUS = "BLOOMERY_RENDEZVOUS"
# float32 numbers of one all-reduce; DistributedDataParallel's bucket
BUCKET_NUMBERS = 25 * 2**20 // 4
# larger float32 gradients are summed where they are: two copies cost more than a call
ALONE_NUMBERS = {"cpu": 2**18}
SHARED_BYTES = 2**24  # of what a CPU gathers or sums at once; larger buffers are not kept
# of mallopt(3); larger tensors of a shard are mappings of their own
M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 65536
TEXT_BYTES = 1024
# a backstop: the deadline of the worker ends a hang much earlier
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# for all ranks to arrive: they start together, but may import torch from a slow file system
JOIN_SECONDS = 600.0


@final
class Clock:
    """Seconds in collectives since the last `reset`: those the host waited, and those of each axis.

    A device's collectives run behind the host: their seconds are between events, read once they are over.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._ended = 0.0
        self._axes = dict[str, float]()
        self._behind: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """At the start of a step."""
        self.waited = 0.0
        self._axes.clear()
        self._behind.clear()

    @contextmanager
    def around(self, axis: str = "", device: str = "cpu") -> Iterator[None]:
        """Count a collective of gradients or weights over `axis`; "": of a few numbers, on the host."""
        if device == "cuda":
            first = torch.cuda.Event(enable_timing=True)
            last = torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            self._behind.append((axis, first, last))
            return
        self._ended = time.perf_counter()
        yield
        self._count(axis)

    def after(self, axis: str, device: str) -> None:
        """Count what followed the last collective over `axis`: FSDP2 sums between replicas by itself."""
        if device == "cuda":
            last = torch.cuda.Event(enable_timing=True)
            last.record()
            self._behind.append((axis, self._behind[-1][2], last))
        else:
            self._count(axis)

    def _count(self, axis: str) -> None:
        began = self._ended
        self._ended = time.perf_counter()
        self.waited += self._ended - began
        if axis:
            self._axes[axis] = self._axes.get(axis, 0.0) + self._ended - began

    def of_axes(self) -> dict[str, float]:
        """By axis; call after the host has waited for the device."""
        found = dict(self._axes)
        for axis, first, last in self._behind:
            if last.query():
                found[axis] = found.get(axis, 0.0) + first.elapsed_time(last) / 1e3
        return found


@final
@dataclass(frozen=True)
class Mesh:
    """`replicate` x `shard` ranks; this process is `rank`. Ranks of one replica are consecutive."""

    rank: int = 0
    replicate: int = 1
    shard: int = 1
    device: str = "cpu"
    devices: DeviceMesh | None = field(default=None, compare=False)
    clock: "Clock" = field(default_factory=lambda: Clock(), compare=False, repr=False)

    @property
    def world(self) -> int:
        return self.replicate * self.shard

    @property
    def first(self) -> bool:
        """Whether this rank writes: events, checkpoints, the plan."""
        return self.rank == 0

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over all ranks, in float64."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def most(self, *numbers: float) -> list[float]:
        """The largest of each number over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def any(self, condition: bool) -> bool:
        """Whether it holds on at least one rank."""
        return bool(self.most(condition)[0])

    def each(self, *numbers: float) -> list[list[float]]:
        """The numbers of every rank, by rank."""
        own = torch.tensor(numbers, dtype=torch.float64)
        if self.world == 1:
            return [list(numbers)]
        found = [torch.empty_like(own) for _ in range(self.world)]
        with self.clock.around():
            dist.all_gather(found, own)
        return [numbers.tolist() for numbers in found]

    def _reduced(self, numbers: Iterable[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        """Over all ranks, in float64 on the CPU."""
        found = torch.tensor(list(numbers), dtype=torch.float64)
        if self.world > 1:
            with self.clock.around():
                dist.all_reduce(found, operation)  # on the CPU: gloo
        result: list[float] = found.tolist()
        return result

    def summed(self, tensor: Tensor) -> Tensor:
        """In place: the sum over all ranks of a tensor on the training device; the tensor."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """By rank: a CPU tensor of every rank.

        A collective; the tensors are of one shape and dtype on all ranks.
        """
        if self.world == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(found, tensor.contiguous())
        return found

    def texts(self, own: str) -> list[str]:
        """The texts of all ranks, by rank, each cut to TEXT_BYTES."""
        content = own.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)
        found = self.gathered(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return [bytes(each.numpy()).decode(errors="replace").rstrip() for each in found]

    def text(self, own: str) -> str:
        """The text of the first rank, on every rank."""
        if self.world == 1:
            return own
        words: list[str] = [own]
        content = torch.frombuffer(bytearray(own.encode() or b"\0"), dtype=torch.uint8)
        size = torch.tensor([len(own.encode())])
        dist.broadcast(size, 0)
        content = content if self.first else torch.empty(max(1, int(size)), dtype=torch.uint8)
        dist.broadcast(content, 0)
        words[0] = bytes(content.numpy()[: int(size)]).decode()
        return words[0]

    def number(self, own: float) -> float:
        """The number of the first rank, on every rank."""
        return self.total(own if self.first else 0.0)[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.total(0.0)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """In place, of parameters that every rank has whole: the sum over all ranks, in float32 buckets.

        FSDP2 has summed those of shards already. A gradient that no rank has stays None.
        """
        whole = (
            [parameter for parameter in parameters if not is_split(parameter)]
            if self.world > 1
            else []
        )
        if whole:
            with self.clock.around("shard" if self.shard > 1 else "replicate", self.device):
                self._sum_in_buckets(whole)

    def _sum_in_buckets(self, known: list[nn.Parameter]) -> None:
        here = torch.tensor([parameter.grad is not None for parameter in known], dtype=torch.uint8)
        dist.all_reduce(here, dist.ReduceOp.MAX)
        bucket = list[Tensor]()
        size = 0
        under_way = list[dist.Work]()
        for parameter, exists in zip(known, here.tolist(), strict=True):
            if not exists:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # By what is equal on every rank: the layout of a gradient may differ, where one of them had none.
            large = parameter.numel() >= ALONE_NUMBERS.get(self.device, BUCKET_NUMBERS)
            if large and parameter.dtype == torch.float32:
                parameter.grad = parameter.grad.contiguous()
                # one travels while another is added
                under_way.append(dist.all_reduce(parameter.grad, async_op=True))
                continue
            bucket.append(parameter.grad)
            size += parameter.numel()
            if size >= BUCKET_NUMBERS:
                _sum_bucket(bucket)
                bucket = []
                size = 0
        if bucket:
            _sum_bucket(bucket)
        for work in under_way:
            work.wait()

    def norm_over_shards(self, norm: Tensor) -> Tensor:
        """The norm of whole gradients from that of this rank's rows; without shards, the norm itself."""
        if self.shard == 1 or self.devices is None:
            return norm
        return self.sum_over_shards(norm.square()).sqrt()

    @property
    def shard_rank(self) -> int:
        """The place of this rank among those that share a replica."""
        return self.rank % self.shard

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """In place: the sum over the ranks of a replica; the tensor."""
        if self.shard > 1 and self.devices is not None:
            dist.all_reduce(tensor, group=self.devices.get_group(self.devices.ndim - 1))
        return tensor

    def exchange(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """An all-to-all over the ranks of a replica: so many numbers to each, and so many from each, in their order."""
        assert self.devices is not None, "shards exchange rows"
        found = flat.new_empty(sum(received))
        dist.all_to_all_single(
            found, flat, received, sent, group=self.devices.get_group(self.devices.ndim - 1)
        )
        return found

    def whole(
        self, parts: Mapping[str, Mapping[str, Tensor]], is_split: Callable[[str], bool]
    ) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint, whole and on the CPU of the first rank; {} on the others.

        `is_split`: whether a plain tensor of that name is this rank's rows. Tensor by tensor: a rank holds one whole
        tensor at a time, the first rank's host all of them.
        """
        if self.shard == 1:
            return {name: dict(tensors) for name, tensors in parts.items()} if self.first else {}
        kept: dict[str, dict[str, Tensor]] = {}
        for name, tensors in parts.items():
            for key, tensor in tensors.items():
                entire = self._joined(tensor) if is_split(key) else full(tensor.detach())
                if self.first:
                    kept.setdefault(name, {})[key] = entire.cpu()
                del entire
        return kept

    def _joined(self, rows: Tensor) -> Tensor:
        """The tensor whose rows the ranks of a replica hold in turn, not all of them equally many."""
        assert self.devices is not None, "only shards are joined"
        group = self.devices.get_group(self.devices.ndim - 1)
        rows = rows.detach().contiguous()
        counts = [torch.zeros((), dtype=torch.int64, device=rows.device) for _ in range(self.shard)]
        dist.all_gather(counts, torch.tensor(len(rows), device=rows.device), group=group)
        found = [rows.new_empty(max(map(int, counts)), *rows.shape[1:]) for _ in counts]
        padded = rows.new_zeros(found[0].shape)
        padded[: len(rows)] = rows
        dist.all_gather(found, padded, group=group)
        return torch.cat([part[: int(count)] for part, count in zip(found, counts, strict=True)])


ALONE = Mesh()


@final
class NotArrived(RuntimeError):
    """`ranks`: those that did not come to the meeting within JOIN_SECONDS."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"not arrived: {ranks}")
        self.ranks = ranks


def _meeting(rank: int, ranks: int) -> Any:
    """The torch.distributed.Store of all ranks, once each of them has arrived. Raises NotArrived."""
    store: Any
    if meeting := os.environ.get(RENDEZVOUS):
        store = dist.FileStore(meeting, ranks)  # type: ignore[attr-defined]  # torch exports it, unannotated
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # as above
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            ranks,
            is_master=rank == 0,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
        )
    store.set(f"arrived {rank}", "1")
    store.add("arrived", 1)
    deadline = time.monotonic() + JOIN_SECONDS
    pause = 0.005
    while store.add("arrived", 0) < ranks:
        if time.monotonic() > deadline:
            raise NotArrived(
                [each for each in range(ranks) if not store.check([f"arrived {each}"])]
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return store


def return_freed_memory() -> None:
    """From here on glibc returns each freed tensor to the system: it would keep what FSDP2 frees between layers.

    Fresh memory costs a page fault every 4 KiB, a quarter of a step: not for copies. The variable overrides it.
    """
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # musl has none
        library.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


def join(plan: TrainPlan) -> Mesh:
    """This process among the ranks of the plan, by the variables of the launcher; alone, it needs none.

    Raises NotArrived when a rank does not come.
    """
    if plan.ranks == 1:
        return ALONE
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    backend = "gloo"
    if plan.device == "cuda":
        # one visible device under some launchers
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    store = _meeting(rank, plan.ranks)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=plan.ranks, timeout=COLLECTIVE_TIMEOUT
    )
    devices = None
    if plan.shard > 1:
        if plan.device == "cpu":
            return_freed_memory()
        sizes = (plan.shard,) if plan.replicate == 1 else (plan.replicate, plan.shard)
        devices = init_device_mesh(
            plan.device, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]
        )
    return Mesh(rank, plan.replicate, plan.shard, plan.device, devices)


def leave() -> None:
    """End the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@final
@dataclass(frozen=True)
class _Timed:
    """A collective of FSDP2 (its `Comm`), timed. `room`: where its tensors lie."""

    clock: Clock
    work: Callable[..., dist.Work | None]
    room: Callable[..., Tensor] = torch.empty

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.room(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, **settings: Any
    ) -> dist.Work | None:
        with self.clock.around("shard", input_tensor.device.type):
            return self.work(output_tensor, input_tensor, **settings)


@final
class _OnHost:
    """FSDP2's collectives on a CPU, where they are over when the call returns.

    Layers are gathered and reduced in turn, so that small ones share one buffer: fresh memory costs a page fault every
    4 KiB. Large inputs are freed at once; FSDP2 keeps them a layer longer, for devices that still read them.
    """

    def __init__(self) -> None:
        self._shared = torch.empty(0, dtype=torch.uint8)
        self._reducing = False

    def room(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """For gathered weights, which FSDP2 copies out before anything else is gathered.

        Uninitialized [size]: up to SHARED_BYTES in memory that all layers share, above in memory of its own.
        """
        if (count := size * dtype.itemsize) > SHARED_BYTES:
            return torch.empty(size, dtype=dtype, device=device)
        if count > len(self._shared):
            self._shared = torch.empty(count, dtype=torch.uint8)
        return self._shared[:count].view(dtype)

    def reducing_room(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for room for the gradients of a layer, then for this rank's rows of the sums, which are kept."""
        self._reducing = not self._reducing
        if self._reducing:
            return self.room(size, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, device=device)

    def scatter(self, output: Tensor, source: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """gloo's reduce-scatter sums a copy of its input; this one the input itself.

        `source` is overwritten; memory of its own is freed, shared memory stays.
        """
        assert not self._reducing, "the rows of the sums have memory of their own"
        dist.all_reduce(source, op=op, group=group)
        output.copy_(source.chunk(group.size())[group.rank()])
        if source.untyped_storage().nbytes() > SHARED_BYTES:
            source.untyped_storage().resize_(0)


def shard(model: Decoder, plan: TrainPlan, mesh: DeviceMesh, clock: Clock | None = None) -> None:
    """In place, after checkpointing and compilation, before weights are read: FSDP2 per block and for the rest.

    Weights compute as on one device. Matrices of blocks are gathered in the dtype of matmuls; embeddings, head and last
    norm in their own; norms of blocks are whole on every rank, and their gradients are summed like those of copies.
    The residual stream keeps the dtype of the embeddings. Gradients are summed in float32. A model with frozen weights
    has these in the dtype of matmuls already, and its adapters are gathered as they are. `clock` counts collectives.
    """
    trains_all = all(parameter.requires_grad for parameter in model.parameters())
    half = (
        {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(plan.precision)
        if trains_all
        else None
    )
    own = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    matrices = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    on_host = _OnHost() if clock is not None and plan.device == "cpu" else None
    last = model.model.layers[-1]  # backward begins with it: it stays gathered
    for block in model.model.layers:
        norms = {
            weight
            for module in block.modules()
            if isinstance(module, RMSNorm | LayerNorm)
            for weight in module.parameters()
        }
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=matrices,
            ignored_params=norms,
            reshard_after_forward=block is not last,
        )
    embedding: Any = model.model.embed_tokens
    if not shares_head(model.config):
        fully_shard(embedding, mesh=mesh, mp_policy=own)
        embedding.set_unshard_in_backward(False)  # its gradient does not depend on it
    fully_shard(model, mesh=mesh, mp_policy=own, reshard_after_forward=False)
    # The output of a head is a view, and nothing writes into it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # renamed in torch 2.13
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # The loss is divided by the count of all ranks before backward; gloo has no pre-multiplied sums.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if clock is None:
            continue
        timed: tuple[Any, Any] = _Timed(clock, gather), _Timed(clock, scatter)
        if on_host is not None:
            timed = (
                _Timed(clock, gather, on_host.room),
                _Timed(clock, on_host.scatter, on_host.reducing_room),
            )
            # nothing overlaps: a layer ahead would cost memory
            module.set_modules_to_backward_prefetch([module])
        module.set_custom_all_gather(timed[0])
        module.set_custom_reduce_scatter(timed[1])
        if mesh.ndim > 1:
            module.set_all_reduce_hook(
                lambda reduced: clock.after("replicate", reduced.device.type)
            )


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1).to(torch.float32) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(
        gradients, flat.split([each.numel() for each in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))
