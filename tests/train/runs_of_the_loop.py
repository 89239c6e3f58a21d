"""The loop, called in this process on a corpus of forty small files, after the check of the device."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_config
from safetensors.torch import load_file

from bloomery.check.run_start import checked_plan
from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import StepDone, Warned
from bloomery.recipe.load import load_recipe
from bloomery.train.loop import run
from bloomery.train.run_clock import Timer
from ranks import losses, train

RECIPE = """
model: {preset: go-coder-tiny}
tokenizer: {train: {vocab_size: 300}}
data: {path: text, glob: "*.py", sequence_length: 32, validation: 5%}
"""
CONFIG = tiny_config(vocab_size=300, residual_dropout=0.1)


def prepared_corpus(folder: Path) -> Path:
    """The corpus, prepared by `RECIPE` in the folder."""
    (folder / "text").mkdir()
    for number in range(40):
        lines = [
            f"def function_{number}_{i}(value):\n    return value * {i} + {number}\n"
            for i in range(8)
        ]
        (folder / "text" / f"{number}.py").write_text("\n".join(lines))
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE)
    prepare(load_recipe(recipe), folder / "prepared")
    return folder / "prepared"


class Run:
    """One call of the loop, with what it told."""

    def __init__(
        self,
        plan,
        folder: Path,
        *,
        stop_after: int | None = None,
        resume_from: Path | None = None,
        clock=None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.events = folder, []
        stop = lambda: stop_after is not None and self.steps_done() >= stop_after  # noqa: E731

        def emit(event) -> None:
            self.events.append(event)
            if clock is not None:
                clock.hears(event)

        timer = None if clock is None else Timer(clock.now, lambda: clock.now)
        ready = checked_plan(plan, folder, emit, resumes=resume_from is not None)
        self.outcome = run(
            ready.plan, run_dir=folder, emit=emit, stop=stop, resume_from=resume_from, timer=timer
        )

    def of(self, kind) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def warnings(self) -> list[Warned]:
        """Without the one that the validation set is as small as a test's."""
        return [event for event in self.of(Warned) if "loss tokens, fewer than" not in event.reason]

    def steps_done(self) -> int:
        return max((event.step for event in self.of(StepDone)), default=0)

    def losses(self) -> dict[int, float]:
        return {event.step: event.loss for event in self.of(StepDone)}

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """All that the checkpoint holds, by file and name."""
        files = self.checkpoint(step).glob("*.safetensors")
        return {
            f"{file.stem}/{name}": tensor
            for file in files
            for name, tensor in load_file(file).items()
        }


def assert_same_tensors(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def resumed_bitwise(plan, folder: Path) -> Run:
    """The undisturbed run of five steps, which one that stopped after three and was resumed has been found to equal."""
    whole = Run(plan, folder / "whole")
    first = Run(plan, folder / "halves", stop_after=3)
    torch.manual_seed(99)
    second = Run(plan, folder / "halves", resume_from=first.checkpoint(3))
    assert first.losses() | second.losses() == whole.losses()
    assert_same_tensors(second.tensors(5), whole.tensors(5))
    return whole


def assert_resumes_bitwise(plan, folder: Path) -> list[Path]:
    """A run of four steps, also over ranks, has the bits of one that stopped after two. Its last files of tensors."""
    whole = train(plan, folder / "whole")
    train(plan, folder / "stopped", stop_after=2)
    train(
        plan, folder / "stopped", resume_from=folder / "stopped" / "checkpoints" / "step-00000002"
    )
    assert losses(whole)[4] < losses(whole)[1]
    files, resumed_files = (
        sorted((folder / run / "checkpoints" / "step-00000004").rglob("*.safetensors"))
        for run in ("whole", "stopped")
    )
    assert files and len(files) == len(resumed_files)
    for file, resumed_file in zip(files, resumed_files, strict=True):
        assert_same_tensors(load_file(file), load_file(resumed_file))
    return files


def saved_base(config, prepared: Path, folder: Path) -> Path:
    """The folder, with a model of random weights and the tokenizer of the prepared dataset."""
    write_model(model_state(fresh_decoder(config, seed=3)), config, folder)
    load_tokenizer(prepared).save(folder)
    return folder


def crossed(*axes: Mapping[str, object], quick: str) -> list:
    """Each combination of the axes' values as a parameter; those not named in `quick` are for `make soak`."""
    named = quick.split()
    cases = [
        ("-".join(part[0] for part in each), [part[1] for part in each])
        for each in itertools.product(*(axis.items() for axis in axes))
    ]
    assert {name for name, _ in cases} >= set(named)
    return [
        pytest.param(*values, id=name, marks=[] if name in named else pytest.mark.soak)
        for name, values in cases
    ]
