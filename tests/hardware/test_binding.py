"""The CPUs of each rank against those next to its GPU."""

import os
from dataclasses import replace

import pytest

from bloomery.hardware.binding import Binding, binding_report, cpu_list, parse_cpus, read_binding
from bloomery.hardware.sites import SITE_VARIABLE, find_site, local_site

# OLCF's output of `srun -N1 -n8 -c7 --gpus-per-task=1 --gpu-bind=closest hello_jobstep` (frontier_user_guide.rst): for
# each rank its first and last hardware thread and the bus of its GPU; and the NUMA node of the guide's note.
OLCF = (
    (1, 7, "d1", 0),
    (9, 15, "d6", 0),
    (17, 23, "c9", 1),
    (25, 31, "ce", 1),
    (33, 39, "d9", 2),
    (41, 47, "de", 2),
    (49, 55, "c1", 3),
    (57, 63, "c6", 3),
)
NUMA = ("0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127")
RANKS = tuple(
    Binding(f"frontier{node:05}", rank, f"{first}-{last}", f"0000:{bus}:00.0", numa, NUMA[numa])
    for node in (256, 257)
    for rank, (first, last, bus, numa) in enumerate(OLCF)
)


def test_cpu_lists_as_linux_writes_them() -> None:
    assert parse_cpus("0-2,64,70-71") == {0, 1, 2, 64, 70, 71}
    assert cpu_list({71, 0, 1, 2, 64, 70}) == "0-2,64,70-71"
    assert cpu_list(set()) == "" and parse_cpus("") == set()


def test_olcfs_own_example_is_as_the_table() -> None:
    report = binding_report(RANKS, site=find_site("frontier"), is_slurm=True)
    assert report.lines == (
        "16 ranks, each on the CPUs next to its GPU, all as the table of Frontier",
    )
    assert not report.warning
    with_threads = [replace(rank, cpus=f"{rank.cpus},64") for rank in RANKS[:1]]
    assert not binding_report(with_threads * 2, site=find_site("frontier"), is_slurm=True).warning


def test_ranks_in_the_order_of_gpu_numbers_are_all_wrong() -> None:
    """What happens without --gpu-bind=closest: rank 0 gets cores 1-7 and GPU 0, which is next to 48-55."""
    by_number = sorted(RANKS[:8], key=lambda rank: rank.gpu)
    swapped = [replace(gpu, cpus=rank.cpus) for gpu, rank in zip(by_number, RANKS[:8], strict=True)]
    report = binding_report(swapped, site=find_site("frontier"), is_slurm=True)
    # by chance GPUs 2 and 3 are next to the cores of ranks 2 and 3
    assert report.lines[0] == "6 of 8 ranks do not run on the CPUs next to their GPU"
    assert len(report.lines) == 1 + 1 + 6 and "0000:c1:00.0" in report.lines[2]
    assert "srun --gpus-per-task=1 --gpu-bind=closest --cpus-per-task=7" in report.warning
    assert "rank 0 on frontier00256 has CPUs 1-7" in report.warning and "48-55" in report.warning


def test_the_table_is_finer_than_numa_nodes() -> None:
    """GPUs 4 and 5 belong to one NUMA node and to two groups of cores."""
    swapped = [replace(RANKS[0], cpus=RANKS[1].cpus), replace(RANKS[1], cpus=RANKS[0].cpus)]
    assert not binding_report(swapped, is_slurm=True).warning
    assert binding_report(swapped, site=find_site("frontier"), is_slurm=True).warning


def test_lumis_masks_put_each_rank_next_to_its_gpu() -> None:
    """LUMI: rank n takes GPU n; NUMA nodes by GPU as rocm-smi prints them (distribution-binding.md)."""
    site = find_site("lumi")
    (option,) = [word for word in site.step_options if "mask_cpu" in word]
    masks = [int(mask, 16) for mask in option.partition(":")[2].split(",")]
    buses = ("c1", "c6", "c9", "ce", "d1", "d6", "d9", "de")
    ranks = [
        Binding(
            "nid005000",
            rank,
            cpu_list({cpu for cpu in range(64) if mask >> cpu & 1}),
            f"0000:{bus}:00.0",
            numa,
            NUMA[numa],
        )
        for rank, (mask, bus, numa) in enumerate(
            zip(masks, buses, (3, 3, 1, 1, 0, 0, 2, 2), strict=True)
        )
    ]
    assert all(len(parse_cpus(rank.cpus)) == site.cpus_per_gpu == 7 for rank in ranks)
    assert binding_report(ranks, site=site, is_slurm=True) == binding_report(ranks, is_slurm=True)
    assert not binding_report(ranks, is_slurm=True).warning
    # the same nodes as Frontier's
    assert not binding_report(ranks, site=find_site("frontier"), is_slurm=True).warning


def test_a_launcher_that_binds_all_ranks_to_one_core() -> None:
    crowded = [replace(rank, cpus="1") for rank in RANKS]
    report = binding_report(crowded, site=find_site("frontier"), is_slurm=True)
    assert report.warning.startswith("8 ranks of frontier00256 share the CPUs 1: start ranks with")


def test_ranks_that_are_not_bound() -> None:
    free = [replace(rank, cpus="0-127") for rank in RANKS[:8]]
    local = binding_report(free)
    assert local.lines == ("8 ranks, not bound to CPUs",) and not local.warning
    assert "--gpu-bind=closest" in binding_report(free, is_slurm=True).warning
    # bound to the wrong ones is wrong anywhere
    assert "numactl" in binding_report([replace(rank, cpus="16-31") for rank in RANKS[:2]]).warning


def test_many_wrong_ranks_are_counted_and_the_first_listed() -> None:
    wrong = [replace(rank, cpus="0-127") for rank in RANKS] * 4
    report = binding_report(wrong, site=find_site("frontier"), is_slurm=True)
    assert report.lines[-1] == "and 48 more" and len(report.lines) == 1 + 1 + 16 + 1


def test_without_gpus_or_numa_nodes_nothing_is_wrong() -> None:
    on_cpus = [Binding("here", rank, "0-1") for rank in range(2)]
    assert binding_report(on_cpus, is_slurm=True).lines == ("2 ranks without a GPU",)
    unknown = [replace(rank, numa=None, near_cpus="") for rank in RANKS[:2]]
    report = binding_report(unknown, is_slurm=True)
    assert "unknown" in report.lines[0] and not report.warning


@pytest.mark.parametrize("numa", ["3", "-1", "absent"])
def test_the_kernel_says_what_is_next_to_a_gpu(tmp_path, numa) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    device.mkdir(parents=True)
    if numa != "absent":
        (device / "numa_node").write_text(f"{numa}\n")
    node = tmp_path / "sys/devices/system/node/node3"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("48-63,112-127\n")
    cpus = {49, 50, 51}
    binding = read_binding("frontier00256", 6, "0000:c1:00.0", cpus=cpus, root=tmp_path)
    known = (3, "48-63,112-127") if numa == "3" else (None, "")
    assert (binding.numa, binding.near_cpus) == known and binding.cpus == "49-51"
    assert "frontier00256, local rank 6: CPUs 49-51; GPU 0000:c1:00.0" in str(binding)
    assert binding_report([binding, binding], is_slurm=True).warning == ""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity here")
def test_the_cpus_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        binding = read_binding("here", 0, "")
    finally:
        os.sched_setaffinity(0, before)
    assert binding == Binding("here", 0, str(min(before)))


def test_a_job_script_names_its_site_to_the_ranks(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(SITE_VARIABLE, "frontier")
    assert local_site() == find_site("frontier")
    mine = tmp_path / "mine.toml"
    mine.write_text('gpu = "MI210"\nbinding = [{ bus = "c1", cpus = "0-7" }]\n')
    monkeypatch.setenv(SITE_VARIABLE, str(mine))
    site = local_site()
    assert site is not None and site.binding[0].cpus == "0-7"
    mine.unlink()
    assert local_site() is None
