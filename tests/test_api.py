"""The Python interface with a tiny model: train, load, generate, chat, resume."""

import json
from xml.etree import ElementTree

import pytest

import bloomery
from bloomery.core.errors import UserError
from bloomery.monitor.events import RunEnded, StepDone

TINY = {
    "model": {
        "family": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 64,
    },
    "tokenizer": {"train": {"vocab_size": 300}},
    "data": {"path": "text", "glob": "*.txt", "sequence_length": 64, "validation": "20%"},
    "train": {"max_steps": 3, "tokens_per_step": 128, "compile": False},
    "eval": {"every": "2 steps"},
}


def test_a_dict_is_trained_loaded_by_name_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / f"text/{number}.txt").write_text(
            " ".join(f"the cat {number} sat on mat {n}" for n in range(30))
        )
    received = []
    each, two = {"every": "1 steps"}, "train.max_steps=2"
    run = bloomery.train(
        TINY, two, devices="cpu", quiet=True, on_event=received.append, checkpoint=each
    )
    assert run.code == 0 and run.folder.parent == tmp_path / "runs"
    events = run.events()
    assert [event for event in received if isinstance(event, StepDone)] == [
        event for event in events if isinstance(event, StepDone)
    ]
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2]
    assert isinstance(events[-1], RunEnded) and events[-1].status == "done"
    assert run.metrics() == json.loads((run.folder / "metrics.json").read_text())

    text = run.model().generate("the", max_new_tokens=4, temperature=0.0)
    model = bloomery.load("last", device="cpu")
    assert text == model.generate("the", max_new_tokens=4, temperature=0.0)
    assert text == bloomery.generate(
        run.folder, "the", max_new_tokens=4, temperature=0.0, device="cpu"
    )
    assert model.tokenizer.vocab_size <= 300 and not model.decoder.training
    conversation = [{"role": "user", "content": "the"}]
    reply = model.chat(conversation, template="chatml", max_new_tokens=4, temperature=0.0)
    assert reply == model.chat("the", template="chatml", max_new_tokens=4, temperature=0.0)
    with pytest.raises(UserError, match="no chat template"):
        model.chat("the")

    chart = run.plot()
    chart.save("loss.svg")
    image = ElementTree.fromstring((tmp_path / "loss.svg").read_text())
    drawn = {text.text for text in image.iter("{http://www.w3.org/2000/svg}text")}
    assert {"training loss, smoothed", "validation loss", "step"} <= drawn
    assert repr(chart).startswith("training loss, nats per token") and "│" in repr(chart)

    steps = []
    note = lambda event: steps.append(event.step)  # noqa: E731
    longer = run.resume("eval.every=1 steps", train={"max_steps": 3}, quiet=True, on_event=note)
    assert longer.folder == run.folder and max(steps) == 3
    assert [event.step for event in longer.events() if isinstance(event, StepDone)] == [1, 2, 3]


def test_overrides_are_sections_or_their_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = bloomery.plan(
        "go-coder-tiny", gpu="RX 6700 XT", adapter="lora", train={"max_steps": 5}, optimizer="adamw"
    )
    assert report.plan.train.steps == 5 and report.plan.adapter.kind == "lora"
    with pytest.raises(UserError, match="max_stepz"):
        bloomery.plan("go-coder-tiny", train={"max_stepz": 5})
