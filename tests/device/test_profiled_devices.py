"""torch.profiler on the simulated device: it gets times, and prints nothing."""

import torch
from torch.profiler import ProfilerActivity, profile


def test_an_operator_is_recorded_without_a_stack_for_each(capfd) -> None:
    """A device that has no times makes PyTorch print where it asked, at each operator, for minutes."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        matrix = torch.ones(64, 64, device="cuda")
        (matrix @ matrix).relu()
    times = {event.key: event.device_time_total for event in recorded.key_averages()}
    assert times["aten::mm"] > 0 and times["aten::relu"] > 0
    assert "Failed to record" not in capfd.readouterr().err
