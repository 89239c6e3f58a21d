"""Machines on which nothing is refused and nothing trains, and some that look ill and are well."""

import subprocess

from bloomery.hardware.doctor.diagnose import diagnose, ready
from bloomery.hardware.machine import Display
from changed_machines import changed_part, ids, machine, only


def test_a_driver_that_has_hung_is_no_ready_machine():
    card = machine().accelerators[0].model_copy(update={"access": "hung"})
    for one in (
        machine(accelerators=(card,)),
        machine(host__access__kfd="hung"),
        machine(host__access__kfd="hung", accelerators=()),
    ):
        assert only(one, "driver-hung").fix[-1] == "sudo reboot"
        assert not ready(diagnose(one))


def test_a_card_that_the_kernel_does_not_offer_for_computing():
    assert only(machine(accelerators=()), "gpu-without-compute").level == "blocks"
    on_the_cpu = machine(accelerators=(), software__build="cpu")
    assert only(on_the_cpu, "gpu-without-compute").level == "note"
    assert "gpu-without-compute" not in ids(machine())


def test_a_container_with_the_cards_node_and_without_kfd():
    """`docker run --device=/dev/dri` alone: the kernel lists the card, and nothing computes."""
    one = machine(host__access__kfd="absent", host__around__container="docker")
    assert only(one, "container-without-gpu").fix[0].startswith("bloomery doctor --docker")
    # a record in which nobody looked
    older = one.accelerators[0].model_copy(update={"access": None})
    assert "container-without-gpu" not in ids(changed_part(one, ["accelerators"], (older,)))


def test_nomodeset_is_taken_out():
    waiting = (Display(address="0000:03:00.0", vendor=0x1002, device_id=0x73DF),)
    one = machine(
        accelerators=(),
        host__displays=waiting,
        host__driver__amdgpu=False,
        host__driver__boot="quiet nomodeset",
        host__access__kfd="absent",
    )
    assert ids(one)[0] == "driver-switched-off"
    changed = subprocess.run(
        [
            "bash",
            "-c",
            only(one, "driver-switched-off")
            .fix[0]
            .replace("sudo sed -i.bak", "sed")
            .rpartition(" ")[0],
        ],
        input='GRUB_CMDLINE_LINUX="quiet nomodeset"\n',
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert changed == 'GRUB_CMDLINE_LINUX="quiet"\n'


def test_of_two_makers_cards_the_build_decides():
    """A ROCm build beside both trains on AMD's card: nothing is wrong with it."""
    other = machine("h200").accelerators[0].model_copy(update={"index": 1})
    both = changed_part(machine(), ["accelerators"], (*machine().accelerators, other))
    assert ids(both) == ["two-vendors"]
    cuda = both.model_copy(update={"software": machine("h200").software})
    assert "wrong-build" not in ids(cuda)
    assert ids(machine("h200", software__build="rocm"))[0] == "wrong-build"


def test_a_python_without_rocm_wheels_is_said():
    one = machine(software__python="3.15.0", software__torch=None, software__build=None)
    assert only(one, "no-torch").fix[0].endswith("  # for the CPU: no ROCm wheels for Python 3.15")
    assert not only(one, "no-torch").run


def test_an_nvidia_card_that_nvidia_smi_does_not_list():
    card = (Display(address="0000:01:00.0", vendor=0x10DE, device_id=0x2684, driver="nvidia"),)
    silent = machine("h200", accelerators=(), host__displays=card)
    assert ids(silent) == ["nvidia-silent"]
    assert not ready(diagnose(silent))
    in_docker = machine(
        "h200", accelerators=(), host__displays=card, host__around__container="docker"
    )
    assert only(in_docker, "container-without-gpu").fix[0].startswith("docker run --gpus all")
    windows = machine("wsl", software=machine("h200").software)
    assert only(windows, "wsl-nvidia").level == "blocks"
    assert ids(machine("h200", host__displays=card)) == []


def test_a_container_for_the_cpu_on_a_machine_with_a_card_is_ready():
    """`bloomery:cpu` was asked for: that the card is not in it is worth a note."""
    card = (Display(address="0000:01:00.0", vendor=0x10DE, device_id=0x2684, driver="nvidia"),)
    nvidia = machine("h200", accelerators=(), host__displays=card, host__around__container="docker")
    for one in (machine("container-without-kfd"), nvidia):
        cpu = changed_part(one, ["software", "build"], "cpu")
        assert only(cpu, "container-without-gpu").level == "note"
        assert ready(diagnose(cpu))
