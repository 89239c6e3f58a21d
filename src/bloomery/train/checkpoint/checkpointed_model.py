"""How the weights of a model go into checkpoints and come back: all of them, LoRA matrices, or a method of PEFT."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.infer.model_folder import MANIFEST, damage
from bloomery.model.adapters.lora import init_adapters, note_base, trained_state
from bloomery.model.adapters.peft_files import read_trained, write_adapter, write_named
from bloomery.model.adapters.peft_methods import PeftAdapter
from bloomery.model.adapters.settings import Adaptation, Base, digest
from bloomery.model.adapters.tower import inside_whole, read_tower_adapter
from bloomery.model.decoder import VALUE_HEAD, Decoder, trained_parameters
from bloomery.model.io.stored import tensor_locations
from bloomery.model.io.weights import init_weights, read_model, write_config, write_model
from bloomery.model.io.whole_models import make_whole, write_changed
from bloomery.model.vision import names_in_files, read_trained_tower
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.store import note_model
from bloomery.train.checkpoint.rank_writers import PartLayout
from bloomery.train.checkpoint.saver import ModelWriter, Parts, read_part, read_state

# Draws all weights of a model that has none, from a seed.
DrawWeights = Callable[[Decoder, int], None]

METHOD = "method"  # part and state key of what a PEFT method needs to resume


class CheckpointedModel(Protocol):
    """The trained weights of a model as checkpoints store them."""

    def weights(self) -> Mapping[str, Tensor]:
        """The live tensors that `writer` writes, in the format of transformers or PEFT."""

    def resume_parts(self) -> Parts:
        """Further live tensors that training resumes from."""

    def resume_scalars(self) -> dict[str, Any]:
        """JSON that training resumes from, besides the tensors."""

    def writer(self) -> ModelWriter:
        """A function that writes the weights as configured now; training continues while it runs."""

    def stored_model(self) -> PartLayout | None:
        """How several ranks write the weights, tensor by tensor; None: one of them writes all, with `writer`."""

    def initialize(self) -> None:
        """Set every weight as before the first step."""

    def read_frozen(self) -> None:
        """Read the frozen base weights, once before the first `read`."""

    def read(self, folder: Path) -> None:
        """Read the trained weights of a checkpoint."""


def shared_damage(mesh: Mesh, folder: Path) -> str | None:
    """The problem with a sealed folder (`model_folder.damage`), the same on all ranks, which share out its hashing."""
    if mesh.world == 1:
        return damage(folder)
    problem = damage(folder, worker=mesh.rank, workers=mesh.world)
    for rank, problem_of_rank in enumerate(mesh.all_gather_json(problem)):
        if problem_of_rank is not None:
            return f"{problem_of_rank} (rank {rank})"
    return None


@dataclass(frozen=True)
class InitialWeights:
    """The weights before the first step: a folder's, with new embeddings for `new_ids`, or random ones of `draw`."""

    source: Path | None
    seed: int
    new_ids: tuple[int, ...] = ()
    run_dir: Path | None = None
    mesh: Mesh = SINGLE_RANK
    draw: DrawWeights = init_weights

    def fill(self, model: Decoder) -> None:
        """Raises UserError when the folder is damaged or its weights changed since the run in `run_dir` started.

        Every rank of the mesh takes part.
        """
        if self.source is None:
            with self._filling(model):
                self.draw(model, self.seed)
            return
        problem = None
        if self.mesh.any_rank((self.source / MANIFEST).is_file()):
            problem = shared_damage(self.mesh, self.source)
        if problem is not None:
            raise UserError(
                f"damaged checkpoint in model.from: {problem}",
                where=str(self.source),
                fix=f"choose another checkpoint; delete {MANIFEST} where you changed the folder yourself",
            )
        if self.run_dir is not None:
            note_model(self.run_dir, "base", digest(self.source))
        with self._filling(model):
            read_model(model, self.source, seed=self.seed, new=self.new_ids)

    @staticmethod
    def _filling(model: Decoder) -> AbstractContextManager[None]:
        """Inside, this rank reads the weights that are its own, or that it reads for others."""
        stream = model.weight_stream
        return nullcontext() if stream is None else stream.filling()


@final
@dataclass(frozen=True)
class FullWeights:
    """Every parameter, as a model of transformers. `trains_text`: whether the language model is trained; else what
    reads pictures alone, and the rest of a checkpoint is the base, bit for bit.
    """

    model: Decoder
    initial: InitialWeights
    trains_text: bool = True

    def weights(self) -> Mapping[str, Tensor]:
        if not self.trains_text:
            return dict(trained_parameters(self.model))
        parameters = dict(self.model.named_parameters()) | trained_parameters(self.model)
        parameters.pop(VALUE_HEAD, None)
        return parameters

    def resume_parts(self) -> Parts:
        return {}

    def resume_scalars(self) -> dict[str, Any]:
        return {}

    def writer(self) -> ModelWriter:
        config = self.model.config
        base = self.initial.source
        vision = self.model.vision
        if vision is None:
            return lambda tensors, folder: write_model(tensors, config, folder)

        assert base is not None, "a tower is a folder's"
        names = {} if not vision.trained else names_in_files(vision, base)
        trains_text = self.trains_text

        def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
            changed = {names[name]: tensor for name, tensor in tensors.items() if name in names}
            if not trains_text:
                write_changed(folder, base, changed)
                return
            text = {name: tensor for name, tensor in tensors.items() if name not in names}
            write_model(text, config, folder)
            make_whole(folder, base, changed)

        return write

    def stored_model(self) -> PartLayout | None:
        config = self.model.config
        backend = config.transformers_backend
        if backend is not None and backend.conversions:
            return None  # transformers makes the tensors of files of whole parameters
        if self.model.vision is not None:
            return None  # one rank writes the tower, too
        return PartLayout(
            tensor_locations(config), lambda dtype, folder: write_config(config, dtype, folder)
        )

    def initialize(self) -> None:
        self.initial.fill(self.model)
        _read_tower(self.model, self.initial.source)

    def read_frozen(self) -> None:
        if not self.trains_text:
            self.initial.fill(self.model)

    def read(self, folder: Path) -> None:
        if self.trains_text:
            read_model(self.model, folder)
        _read_tower(self.model, folder)


@final
@dataclass(frozen=True)
class LoraWeights:
    """LoRA matrices and modules to save, as an adapter of PEFT. The weights of `base` are frozen."""

    model: Decoder
    initial: InitialWeights
    settings: Adaptation
    base: Base | None  # None: an adapter that is never written

    def weights(self) -> Mapping[str, Tensor]:
        return trained_state(self.model)

    def resume_parts(self) -> Parts:
        return {}

    def resume_scalars(self) -> dict[str, Any]:
        return {}

    def writer(self) -> ModelWriter:
        base = _name_of(self.base)
        settings = self.settings
        config = self.model.config
        inside = None if self.model.vision is None else inside_whole(self.model.vision)
        return lambda tensors, folder: write_adapter(
            tensors, settings, config, folder, base=base, inside=inside
        )

    def stored_model(self) -> None:
        """PEFT opens an adapter in one file alone."""

    def initialize(self) -> None:
        self.initial.fill(self.model)
        _read_tower(self.model, self.initial.source)
        init_adapters(self.model, self.initial.seed)

    def read_frozen(self) -> None:
        self.initial.fill(self.model)
        note_base(self.model)

    def read(self, folder: Path) -> None:
        read_trained(self.model, self.settings, self.model.config, folder)
        if self.model.vision is not None:
            read_tower_adapter(self.model.vision, folder)


@final
@dataclass(frozen=True)
class PeftWeights:
    """The parameters that a method of PEFT added, and its schedule. The method has read its frozen base already."""

    peft_adapter: PeftAdapter
    base: Base | None  # None: an adapter that is never written

    def weights(self) -> Mapping[str, Tensor]:
        return self.peft_adapter.file_tensors()

    def resume_parts(self) -> Parts:
        return {METHOD: self.peft_adapter.resume_tensors()}

    def resume_scalars(self) -> dict[str, Any]:
        return {METHOD: self.peft_adapter.resume_scalars()}

    def writer(self) -> ModelWriter:
        # AdaLoRA's ranks change with every step: the file has those of now.
        settings = self.peft_adapter.file_settings(_name_of(self.base))
        return lambda tensors, folder: write_named(tensors, settings, folder)

    def stored_model(self) -> None:
        """PEFT opens an adapter in one file alone."""

    def initialize(self) -> None:
        self.peft_adapter.begin_again()

    def read_frozen(self) -> None:
        """The method reads its base when it is built."""

    def read(self, folder: Path) -> None:
        self.peft_adapter.load(read_part(folder, METHOD), read_state(folder)[METHOD])


def _read_tower(model: Decoder, folder: Path | None) -> None:
    """What is trained in full of what reads pictures."""
    if model.vision is not None and model.vision.trained:
        assert folder is not None, "a tower is a folder's"
        read_trained_tower(model.vision, folder)


def _name_of(base: Base | None) -> str:
    assert base is not None, "a saved adapter names its base model"
    return base.name
