"""A measurement of a run, for tests of what is kept of them and of what plans make of it."""

from bloomery.hardware.calibration import Point

POINT = Point(
    sequence_length=128,
    micro_batch_size=4,
    accumulation=2,
    precision="bfloat16",
    attention="mask",
    compiled=False,
    activation_checkpointing="none",
    optimizer="adamw",
    tokens_per_second=1000.0,
    peak_gib=0.5,
)
