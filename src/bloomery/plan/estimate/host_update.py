"""Seconds of an optimizer's update on the host, where the weights of a model that is trained in full live."""

from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.hardware.host_links import HostLink
from bloomery.plan.estimate.step import StepShape

# Million parameters per second and thread, compiled and in PyTorch alone: benchmarks/host_optimizer.py on a core of an
# Intel Xeon with AMX; by bytes of a weight, and whether states have 8 bits.
ADAMW_RATES = {
    (4, False): (664e6, 141e6),
    (4, True): (354e6, 36e6),
    (2, False): (560e6, 46e6),
    (2, True): (459e6, 40e6),
}
MATMUL_FLOPS = 50e9  # of a core in float32, assumed: Muon's products


def host_update_seconds(step: StepShape, update_bytes: float, link: HostLink) -> float:
    """The longest of computing on all cores, and moving the bytes through the host's memory."""
    compiled, plain = ADAMW_RATES[step.weight_bytes, step.mode.state_dtype == "int8"]
    rate = (compiled if link.host_compiles else plain) * link.host_cores
    products = OPTIMIZERS[step.optimizer].update_flops(step.model.layer_matrices)
    computing = step.model.trainable_count / rate + products / (MATMUL_FLOPS * link.host_cores)
    return max(computing, update_bytes / (link.host_gbs * 1e9))


def device_update_seconds(step: StepShape, link: HostLink) -> float:
    """Seconds of the copies if states, gradients and weights passed through the device instead: not supported yet."""
    weights = step.model.trainable_bytes(step.precision)
    states = step.model.optimizer_bytes(step.optimizer, step.precision)
    to_device = states + 2 * weights
    return to_device / (link.both_gbs * 1e9)
