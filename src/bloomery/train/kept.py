"""What checkpoints keep of a model, and how: the whole of it, the pairs of an adapter, or a method of PEFT"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from bloomery.errors import UserError
from bloomery.model.adapter_files import read_trained, write_adapter, write_named
from bloomery.model.adapter_names import Adaptation
from bloomery.model.adapters import init_adapters, note_base, trained_state
from bloomery.model.base import Base, digest
from bloomery.model.decoder import Decoder
from bloomery.model.peft_methods import PeftAdapter
from bloomery.model.weights import init_weights, read_model, write_model
from bloomery.plan.head import note_model
from bloomery.train.checkpoint import MODEL, Parts, Write, read_part, read_state
from bloomery.train.sealed import MANIFEST, damage

METHOD = "method"  # the part, and the key of the state, of what a method of PEFT needs to go on


class Kept(Protocol):
    """What training changes of one model: its way into checkpoints, and back out of them."""

    def parts(self) -> Parts:
        """The live tensors; `writer` is for those of MODEL."""

    def scalars(self) -> dict[str, Any]:
        """What else must be remembered, for the state of a checkpoint."""

    def writer(self) -> Write:
        """For the model as it is now: training goes on while the result is called."""

    def begin(self) -> None:
        """Everything as it is before the first step."""

    def read_frozen(self) -> None:
        """What no checkpoint holds, before the first `read`."""

    def read(self, folder: Path) -> None:
        """Everything else as the checkpoint in `folder` has it."""


@dataclass(frozen=True)
class Start:
    """The weights that training starts from: those of a folder, with rows of `new_ids` made anew, or fresh ones."""

    source: Path | None
    seed: int
    new_ids: tuple[int, ...] = ()
    run_dir: Path | None = None

    def fill(self, model: Decoder) -> None:
        """Raises UserError when the weights in the folder are no longer those that the run in `run_dir` began with."""
        if self.source is not None:
            if (self.source / MANIFEST).is_file() and (wrong := damage(self.source)) is not None:
                remedy = f"choose another checkpoint; delete {MANIFEST} where you changed the folder yourself"
                problem = f"the checkpoint that training starts from is damaged: {wrong}"
                raise UserError(problem, where=str(self.source), remedy=remedy)
            if self.run_dir is not None:
                note_model(self.run_dir, "base", digest(self.source))
            read_model(model, self.source, seed=self.seed, new=self.new_ids)
        else:
            init_weights(model, self.seed)


@final
@dataclass(frozen=True)
class Whole:
    """Every parameter, as a model's folder."""

    model: Decoder
    start: Start

    def parts(self) -> Parts:
        return {MODEL: dict(self.model.named_parameters())}

    def scalars(self) -> dict[str, Any]:
        return {}

    def writer(self) -> Write:
        return lambda tensors, folder: write_model(tensors, self.model.config, folder)

    def begin(self) -> None:
        self.start.fill(self.model)

    def read_frozen(self) -> None:
        """Nothing is frozen."""

    def read(self, folder: Path) -> None:
        read_model(self.model, folder)


@final
@dataclass(frozen=True)
class Pairs:
    """The low-rank pairs of `adapters`, and modules that are trained in full beside them."""

    model: Decoder
    start: Start
    settings: Adaptation
    base: Base | None

    def parts(self) -> Parts:
        return {MODEL: trained_state(self.model)}

    def scalars(self) -> dict[str, Any]:
        return {}

    def writer(self) -> Write:
        assert self.base is not None, "an adapter that is saved names the model that it adapts"
        settings, config, name = self.settings, self.model.config, self.base.name
        return lambda tensors, folder: write_adapter(tensors, settings, config, folder, base=name)

    def begin(self) -> None:
        self.start.fill(self.model)
        init_adapters(self.model, self.start.seed)

    def read_frozen(self) -> None:
        self.start.fill(self.model)
        note_base(self.model)

    def read(self, folder: Path) -> None:
        read_trained(self.model, self.settings, self.model.config, folder)


@final
@dataclass(frozen=True)
class Injected:
    """What a method of PEFT added; the base was read before it came in."""

    method: PeftAdapter
    base: Base | None

    def parts(self) -> Parts:
        return {MODEL: self.method.file_tensors(), METHOD: self.method.resume_tensors()}

    def scalars(self) -> dict[str, Any]:
        return {METHOD: self.method.resume_scalars()}

    def writer(self) -> Write:
        assert self.base is not None, "an adapter that is saved names the model that it adapts"
        said = self.method.file_settings(self.base.name)  # AdaLoRA's ranks change with every step
        return lambda tensors, folder: write_named(tensors, said, folder)

    def begin(self) -> None:
        self.method.begin_again()

    def read_frozen(self) -> None:
        """It is there already."""

    def read(self, folder: Path) -> None:
        self.method.load(read_part(folder, METHOD), read_state(folder)[METHOD])
