"""The vision tower and the projector of a multimodal model: transformers' modules, whose output takes the place of
embedded tokens.

N tokens of pictures, D hidden size of the language model.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.facts.pictures import Vision
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import StoredTensor, vision_tensors
from bloomery.model.transformers_model import MatricesOnMeta, decoded

LANGUAGE_MODELS = ("language_model", "text_model")


class PictureFeatures(NamedTuple):
    """What the tower makes of the pictures of a batch, in their order: `features_ND` in place of embedded tokens, and
    `deep_features`, each [N, D], which are added to what leaves the first layers (Qwen3-VL's deepstack).
    """

    features_ND: Tensor
    deep_features: tuple[Tensor, ...] = ()


@final
class VisionTower(nn.Module):
    """Everything of a multimodal model that is no language model, frozen.

    Its parameters have the names of transformers' model, below `tower`. `language_model`: what that calls the other
    part of it.
    """

    def __init__(self, vision: Vision) -> None:
        """Parameters have no memory yet: `load_tower` gives it. Raises UserError where transformers cannot build it."""
        super().__init__()
        self.vision = vision
        self.tower, self.language_model = blank_tower(vision)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "VisionTower":
        """A frozen tower has no dropout in training either."""
        del mode
        return super().train(False)

    @torch.no_grad()
    def forward(self, inputs: Mapping[str, Tensor]) -> PictureFeatures:
        """`inputs`: what the model's image processor makes of pictures, by its names."""
        parameter = next(self.parameters())
        taken = inspect.signature(self.tower.get_image_features).parameters
        given = {
            name: tensor.to(parameter.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in inputs.items()
            if name in taken
        }
        with torch.autocast(parameter.device.type, enabled=False):
            made = self.tower.get_image_features(**given, return_dict=True)
        features_ND = torch.cat([features.flatten(0, -2) for features in made.pooler_output])
        by_layer = getattr(made, "deepstack_features", None) or ()
        deep_features = tuple(
            each if isinstance(each, Tensor) else torch.cat(list(each)) for each in by_layer
        )
        return PictureFeatures(features_ND, deep_features)


def blank_tower(vision: Vision) -> tuple[Any, str]:
    """transformers' model of a multimodal config.json without its language model, and the name that this had.

    Matrices have no memory.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
    except ImportError as error:
        raise UserError(
            "transformers, which has the vision tower, is not installed", fix=install_extra("hf")
        ) from error

    settings = decoded(json.loads(vision.raw_config))
    config = CONFIG_MAPPING[vision.kind].from_dict(settings)
    build: Any = AutoModelForImageTextToText.from_config
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), MatricesOnMeta():
        whole = build(config, dtype=torch.float32)
    tower = whole.model
    language_model = next(name for name in LANGUAGE_MODELS if hasattr(tower, name))
    delattr(tower, language_model)
    return tower, language_model


def load_tower(
    vision: Vision, folder: Path, *, dtype: torch.dtype, device: torch.device
) -> VisionTower:
    """The tower with the weights of a folder. Raises UserError where some are missing or of another shape."""
    tower = VisionTower(vision)
    stored = vision_tensors(folder)
    with TensorReader() as reader:
        for name, parameter in list(tower.tower.named_parameters()):
            tensor = _stored_tensor(name, parameter, stored, folder)
            owner, _, leaf = name.rpartition(".")
            values = reader.read(tensor).to(dtype=dtype, device=device)
            loaded = nn.Parameter(values, requires_grad=False)
            tower.tower.get_submodule(owner)._parameters[leaf] = loaded
    return tower.to(device)


def _stored_tensor(
    name: str, parameter: Tensor, stored: Mapping[str, StoredTensor], folder: Path
) -> StoredTensor:
    """Files of different years put "model." in front, or a module between the tower and its parts."""
    own_names = (f"model.{name}", name)
    older = (each.replace("vision_tower.", "vision_tower.vision_model.") for each in own_names)
    names = (*own_names, *older)
    found = next((stored[each] for each in names if each in stored), None)
    if found is None:
        raise UserError(
            f"{names[0]} of the vision tower is missing",
            where=str(folder),
            fix="download the whole model again: text and vision weights",
        )
    if tuple(found.shape) != tuple(parameter.shape):
        raise UserError(
            f"{names[0]} is {list(found.shape)}; config.json makes it {list(parameter.shape)}",
            where=str(found.path),
            fix="put the config.json there that was saved with these weights",
        )
    return found
