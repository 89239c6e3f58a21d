"""Where the ranks run: each compares its CPUs with those next to its GPU before the first step."""

import os
from dataclasses import asdict

from bloomery.core.device import current_index, is_accelerator, properties_of
from bloomery.hardware.binding import Binding, BindingReport, binding_report, read_binding
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import visible_devices
from bloomery.hardware.sites import local_site
from bloomery.parallel.environment import node_name, rank_environment
from bloomery.parallel.mesh import Mesh


def check_binding(mesh: Mesh) -> BindingReport | None:
    """Prints where this rank runs; on every rank the verdict on all of them. None for one rank alone."""
    if mesh.world == 1:
        return None
    gpu = _gpu_address(mesh.device)
    binding = read_binding(node_name(), rank_environment().local_rank, gpu)
    print(f"binding: rank {mesh.rank} on {binding}", flush=True)
    bindings = [Binding(**entry) for entry in mesh.all_gather_json(asdict(binding))]
    return binding_report(bindings, site=local_site(), is_slurm="SLURM_JOB_ID" in os.environ)


def _gpu_address(device: str) -> str:
    """The PCI address of this rank's GPU; "" on a CPU, and where neither torch nor the kernel gives it."""
    if not is_accelerator(device):
        return ""
    pci_address = properties_of(device).pci_address
    if pci_address:
        return pci_address
    # An older torch counts the devices as `visible_devices` does.
    index = current_index(device)
    devices = visible_devices(detect())
    return devices[index].pci_address if index < len(devices) else ""
