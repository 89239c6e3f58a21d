"""Where the ranks run: each compares its CPUs with those next to its GPU before the first step."""

import os
from dataclasses import asdict

import torch

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
    gpu = _gpu_address() if mesh.device == "cuda" else ""
    binding = read_binding(node_name(), rank_environment().local_rank, gpu)
    print(f"binding: rank {mesh.rank} on {binding}", flush=True)
    bindings = [Binding(**entry) for entry in mesh.all_gather_json(asdict(binding))]
    return binding_report(bindings, site=local_site(), is_slurm="SLURM_JOB_ID" in os.environ)


def _gpu_address() -> str:
    """The PCI address of this rank's GPU; "" where neither torch nor the kernel gives it."""
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    if hasattr(properties, "pci_bus_id"):
        domain = getattr(properties, "pci_domain_id", 0)
        device = getattr(properties, "pci_device_id", 0)
        return f"{domain:04x}:{properties.pci_bus_id:02x}:{device:02x}.0"
    # An older torch counts the devices as `visible_devices` does.
    devices = visible_devices(detect())
    return devices[index].pci_address if index < len(devices) else ""
