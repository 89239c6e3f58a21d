"""Trees in the kernel's format for detection tests: topology nodes, DRM devices, the PCI bus."""

from pathlib import Path

CPU = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\nvendor_id 0\n"

# A real dump of an RX 7900 XTX: tinygrad, test/mockgpu/amd/amdgpu.py, `gpu_props`.
GFX1100 = """cpu_cores_count 0
simd_count 192
mem_banks_count 1
caches_count 206
io_links_count 1
p2p_links_count 5
cpu_core_id_base 0
simd_id_base 2147488032
max_waves_per_simd 16
lds_size_in_kb 64
gds_size_in_kb 0
num_gws 64
wave_front_size 32
array_count 12
simd_arrays_per_engine 2
cu_per_simd_array 8
simd_per_cu 2
max_slots_scratch_cu 32
gfx_target_version 110000
vendor_id 4098
device_id 29772
location_id 34304
domain 0
drm_render_minor 128
hive_id 0
num_sdma_engines 2
num_sdma_xgmi_engines 0
num_sdma_queues_per_engine 6
num_cp_queues 8
max_engine_clk_fcompute 2482
local_mem_size 0
fw_version 2140
capability 671588992
debug_prop 1495
sdma_fw_version 20
unique_id 11673270660693242239
num_xcc 1
max_engine_clk_ccompute 2400
"""

# An MI300X: the fixture of a public test of ROCm/rocm-cli; location and minor are set per node below.
GFX942 = """cpu_cores_count 0
simd_count 1216
mem_banks_count 1
caches_count 626
max_waves_per_simd 8
lds_size_in_kb 64
wave_front_size 64
array_count 32
simd_arrays_per_engine 1
simd_per_cu 4
gfx_target_version 90402
vendor_id 4098
device_id 29857
domain 0
num_sdma_engines 2
num_sdma_xgmi_engines 14
num_sdma_queues_per_engine 8
num_cp_queues 24
local_mem_size 0
fw_version 192
num_xcc 8
"""

# Constructed: no public dump of a gfx1031 node is known. 40 compute units of two SIMDs each.
GFX1031 = (
    "cpu_cores_count 0\nsimd_count 80\nlds_size_in_kb 64\nwave_front_size 32\nsimd_per_cu 2\n"
    "gfx_target_version 100301\nvendor_id 4098\ndevice_id 29663\nlocation_id 768\ndomain 0\n"
    "drm_render_minor 128\nlocal_mem_size 0\nnum_xcc 1\n"
)
GFX1036 = (
    GFX1031.replace("100301", "100306").replace("29663", "5710").replace("minor 128", "minor 129")
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def topology_node(root: Path, number: int, properties: str, *, bank_bytes: int = 0) -> None:
    """A node of the topology; `bank_bytes` is its local memory as the kernel's memory banks say it."""
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    write(folder / "gpu_id", "0\n" if "simd_count 0\n" in properties else "50414\n")
    write(folder / "name", "ip discovery\n")
    write(folder / "properties", properties)
    if bank_bytes:
        bank = f"heap_type 1\nsize_in_bytes {bank_bytes}\nflags 0\nwidth 192\nmem_clk_max 1000\n"
        write(folder / "mem_banks/0/properties", bank)


def drm_device(root: Path, minor: int, **files: str) -> None:
    """/sys/class/drm/renderD<minor>/device with one file per keyword, and its node in /dev."""
    write(root / f"dev/dri/renderD{minor}", "")
    for name, text in files.items():
        write(root / f"sys/class/drm/renderD{minor}/device/{name}", text + "\n")


def pci_device(
    root: Path, address: str, *, kind: str, vendor: str, device: str, driver: str = ""
) -> None:
    folder = root / f"sys/bus/pci/devices/{address}"
    for name, text in (("class", kind), ("vendor", vendor), ("device", device)):
        write(folder / name, text + "\n")
    if driver:
        target = root / f"sys/bus/pci/drivers/{driver}"
        target.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(target)
