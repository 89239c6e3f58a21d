"""Weights that stream are quantized on the device, on their way to the host."""

from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, assert_same_tensors, prepared_corpus, saved_base

from bloomery.model.io import quantized
from bloomery.model.io.weights import quantized_weights
from bloomery.recipe.schema import Lora, Quantize
from bloomery.train.state import build_state


@pytest.mark.parametrize("stream_host", ["pinned", "staged"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_base_is_quantized_on_the_device_to_the_same_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stream_host: str
) -> None:
    corpus = prepared_corpus(tmp_path)
    base = saved_base(CONFIG, corpus, tmp_path)
    devices: list[str] = []
    quantize = getattr(quantized, f"quantize_{kind}")

    def noted(values: torch.Tensor) -> object:
        devices.append(values.device.type)
        return quantize(values)

    monkeypatch.setattr(quantized, f"quantize_{kind}", noted)
    codes = {}
    for device, stream in (("cuda", "layers"), ("cpu", "off")):
        train = {
            "device": device,
            "stream": stream,
            "stream_host": stream_host,
            "activation_checkpointing": "full",
        }
        plan = tiny_plan(corpus, config=CONFIG, model={"source": base}, train=train).model_copy(
            update={"adapter": Lora(kind="lora", rank=2), "quantize": Quantize(kind=kind)}
        )
        state = build_state(plan)
        codes[device] = {
            f"{name}.{part}": getattr(weight, part).cpu().clone()
            for name, weight in quantized_weights(state.model)
            for part in ("codes", "scales", "outer")
        }
        assert all(w.codes.device.type == "cpu" for _, w in quantized_weights(state.model))
    assert set(devices[: len(devices) // 2]) == {"cuda"}
    assert set(devices[len(devices) // 2 :]) == {"cpu"}
    assert_same_tensors(codes["cuda"], codes["cpu"])
