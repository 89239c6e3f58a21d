"""The bytes that a device sends in the collectives of a simulated step, by axis of its mesh."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.parallel import experts  # noqa: F401  # it registers an operator
from bloomery.parallel.context import exchange_size

_c10d = torch.ops.c10d
# By collective: where its largest tensor is among the arguments, and how often a ring sends nearly all of it.
_COLLECTIVES: dict[object, tuple[int, int]] = {
    _c10d._allgather_base_.default: (0, 1),
    _c10d._reduce_scatter_base_.default: (1, 1),
    _c10d.allreduce_.default: (0, 2),
}
_EXCHANGE = torch.ops.bloomery.all_to_all.default
_ROWS = torch.ops.bloomery.all_to_all_rows.default


class TrafficCounter(TorchDispatchMode):
    """Counts `bytes_by_axis`: what each device sends in a ring of `n` devices, (n - 1) / n of the gathered or reduced
    bytes, twice that for an all-reduce, and in an all-to-all all but its own part. Collectives outside the mesh are not
    counted, apart from those of ranks that share sequences or divide experts.
    """

    supports_higher_order_operators = True

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._axes: dict[str, str] = {}  # by the name of its process group
        if mesh is not None:
            names = mesh.mesh_dim_names or ("shard",)
            self._axes = {
                mesh.get_group(number).group_name: name for number, name in enumerate(names)
            }
        self.bytes_by_axis = dict.fromkeys(self._axes.values(), 0.0)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _COLLECTIVES:
            position, times = _COLLECTIVES[func]
            group = dist.ProcessGroup.unbox(args[2 if position or times == 1 else 1])
            tensors = args[position]
            size = sum(
                tensor.nbytes for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)
            )
            axis = self._axes.get(group.group_name)
            if axis is not None:
                self.bytes_by_axis[axis] += times * size * (group.size() - 1) / group.size()
        if func is _EXCHANGE:
            size = exchange_size(args[1])
            self.bytes_by_axis.setdefault("context", 0.0)
            self.bytes_by_axis["context"] += args[0].nbytes * (size - 1) / size
        if func is _ROWS:
            # Evenly: each device keeps its own part.
            rows, sent = args[0], args[1]
            self.bytes_by_axis.setdefault("expert", 0.0)
            self.bytes_by_axis["expert"] += rows.nbytes * (len(sent) - 1) / len(sent)
        return func(*args, **(kwargs or {}))
