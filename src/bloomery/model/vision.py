"""The vision tower and the projector of a multimodal model: transformers' modules, whose output takes the place of
embedded tokens. They run as published, or are trained with the language model.

N tokens of pictures, D hidden size of the language model.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from bloomery.core.device import sent
from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.facts.pictures import Vision, is_projector
from bloomery.model.io.parameters import put
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import StoredTensor, vision_tensors
from bloomery.model.transformers_model import MatricesOnMeta, decoded
from bloomery.recipe.schema import VisionParts

WHOLE = (
    "model."  # before the names of the tower's parameters, in those of transformers' whole model
)
UNREAD = ".vision_tower.head."  # SigLIP's pooled picture, which no language model is given
LORA_NAMES = (".lora_A", ".lora_B")
LANGUAGE_MODELS = ("language_model", "text_model")


class PictureFeatures(NamedTuple):
    """What the tower makes of the pictures of a batch, in their order: `features_ND` in place of embedded tokens, and
    `deep_features`, each [N, D], which are added to what leaves the first layers (Qwen3-VL's deepstack).
    """

    features_ND: Tensor
    deep_features: tuple[Tensor, ...] = ()

    def take(self, tokens: Tensor | slice) -> "PictureFeatures":
        """Some of them. `tokens`: int64 [M]."""
        deep_features = tuple(each[tokens] for each in self.deep_features)
        return PictureFeatures(self.features_ND[tokens], deep_features)


def is_of(parts: VisionParts, name: str, vision: Vision) -> bool:
    """Whether a parameter or module of these parts has the name, in transformers' whole model or in the tower's."""
    if parts == "none" or UNREAD in f".{name}":
        return False
    if parts == "all":
        return True
    return is_projector(vision.kind, name) == (parts == "projector")


@final
class VisionTower(nn.Module):
    """Everything of a multimodal model that is no language model.

    Its parameters have the names of transformers' model, below `tower`. `language_model`: what that calls the other
    part of it. `autocast_dtype`: of products, where weights that are trained have more digits; None: that of weights.
    """

    def __init__(self, vision: Vision, train: VisionParts = "none") -> None:
        """`train`: the parts that are trained, the others are frozen. Parameters have no memory yet: `load_tower`
        gives it. Raises UserError where transformers cannot build it.
        """
        super().__init__()
        self.vision = vision
        self.tower, self.language_model = blank_tower(vision)
        self.autocast_dtype: torch.dtype | None = None
        for name, parameter in self.tower.named_parameters():
            parameter.requires_grad_(is_of(train, name, vision))
        self.eval()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """By the names of transformers' whole model."""
        return {
            WHOLE + name: parameter
            for name, parameter in self.tower.named_parameters()
            if parameter.requires_grad
        }

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers of the tower, in order: those that transformers can recompute in backward."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [
            each for each in self.tower.modules() if isinstance(each, GradientCheckpointingLayer)
        ]

    def train(self, mode: bool = True) -> "VisionTower":
        """No dropout in training either: published towers have none. That of LoRA is where gradients are."""
        del mode
        return super().train(False)

    def forward(self, inputs: Mapping[str, Tensor]) -> PictureFeatures:
        """`inputs`: what the model's image processor makes of pictures, by its names."""
        tower_weight = next(
            parameter
            for name, parameter in self.tower.named_parameters()
            if not is_projector(self.vision.kind, name)
        )
        taken = inspect.signature(self.tower.get_image_features).parameters
        given = {
            name: tensor.to(tower_weight.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in inputs.items()
            if name in taken
        }
        given |= of_grids(self.tower, given, tower_weight.device)
        autocast = torch.autocast(
            tower_weight.device.type,
            dtype=self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
        )
        with autocast:
            made = self.tower.get_image_features(**given, return_dict=True)
        features_ND = torch.cat([features.flatten(0, -2) for features in made.pooler_output])
        by_layer = getattr(made, "deepstack_features", None) or ()
        deep_features = tuple(
            each if isinstance(each, Tensor) else torch.cat(list(each)) for each in by_layer
        )
        return PictureFeatures(features_ND, deep_features)


def of_grids(tower: Any, given: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """What Qwen's towers make of `image_grid_thw`, the patches of each picture in time, rows and columns.

    transformers computes it where that tensor is, and asks for the lengths of pictures in every layer. So it is
    computed on the host, where lengths stay; what is multiplied with the patches goes to `device`. An older
    transformers, which takes none of it, and one that changed get the sizes on the device.
    """
    grids = given.get("image_grid_thw")
    if grids is None or device.type == "cpu":
        return {}
    try:
        from transformers import vision_utils
        from transformers.utils.generic import accepts_precomputed_kwargs

        del accepts_precomputed_kwargs  # this one passes them on
        reader = tower.visual
        positions = vision_utils.get_vision_position_ids(grids, reader.spatial_merge_size)
        made = {"image_position_ids": positions}
        if hasattr(reader, "window_size"):
            made["image_window_index"], lengths = vision_utils.get_vision_window_index(
                grids, reader.spatial_merge_size, reader.window_size, reader.patch_size
            )
        else:
            made["image_interp_indices"], made["image_interp_weights"] = (
                vision_utils.get_vision_interpolation_indices_and_weights(
                    grids,
                    num_grid_per_side=reader.num_grid_per_side,
                    mode=reader.interpolation_mode,
                    align_corners=reader.interpolation_align_corners,
                    spatial_merge_size=reader.config.spatial_merge_size,
                )
            )
            lengths = None
    except (ImportError, AttributeError):
        return {"image_grid_thw": grids.to(device)}
    on_device = {name: sent(each, device) for name, each in made.items()}
    return on_device if lengths is None else on_device | {"image_cu_window_seqlens": lengths}


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


def tower_dtype(dtype: torch.dtype) -> torch.dtype:
    """Beside a language model of this dtype: float16 overflows in some towers, as in residual streams."""
    return torch.float32 if dtype == torch.float16 else dtype


def load_tower(
    vision: Vision,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    train: VisionParts = "none",
    trained_dtype: torch.dtype = torch.float32,
) -> VisionTower:
    """The tower with the weights of a folder. `train`: parts that are trained, in `trained_dtype`.

    Raises UserError where weights are missing or of another shape.
    """
    tower = VisionTower(vision, train)
    stored = vision_tensors(folder)
    with TensorReader() as reader:
        for name, parameter in list(tower.tower.named_parameters()):
            tensor = _stored_tensor(name, parameter, stored, folder)
            owner, _, leaf = name.rpartition(".")
            is_trained = parameter.requires_grad
            values = reader.read(tensor).to(dtype=trained_dtype if is_trained else dtype)
            # A copy: what is trained may not be the file's own memory.
            loaded = nn.Parameter(values.to(device, copy=is_trained), requires_grad=is_trained)
            tower.tower.get_submodule(owner)._parameters[leaf] = loaded
        # What files have beside parameters: limits of linear layers, and what standardizes features (Gemma 4).
        in_files = tower.tower.state_dict().keys()
        for name, buffer in list(tower.tower.named_buffers()):
            if name in in_files:
                owner, _, leaf = name.rpartition(".")
                values = reader.read(_stored_tensor(name, buffer, stored, folder))
                tower.tower.get_submodule(owner)._buffers[leaf] = values.to(device, dtype)
    if tower.trained and dtype != trained_dtype:
        tower.autocast_dtype = dtype
    return tower.to(device)


@torch.no_grad()
def read_trained_tower(tower: VisionTower, folder: Path) -> None:
    """Fills what is trained from a folder with a whole model, but for LoRA. Raises UserError as `load_tower` does."""
    stored = vision_tensors(folder)
    with TensorReader() as reader:
        for name, parameter in tower.trained.items():
            if not name.endswith(LORA_NAMES):
                inside = name.removeprefix(WHOLE)
                put(reader.read(_stored_tensor(inside, parameter, stored, folder)), parameter)


def names_in_files(tower: VisionTower, folder: Path) -> dict[str, str]:
    """The names that a folder's files have for the parameters, by those of transformers' whole model."""
    stored = vision_tensors(folder)
    by_tensor = {id(tensor): name for name, tensor in stored.items()}
    return {
        WHOLE + name: by_tensor[id(_stored_tensor(name, parameter, stored, folder))]
        for name, parameter in tower.tower.named_parameters()
        if not name.endswith(LORA_NAMES)
    }


def _stored_tensor(
    name: str, parameter: Tensor, stored: Mapping[str, StoredTensor], folder: Path
) -> StoredTensor:
    """Files of different years put "model." in front, or a module between the tower and its parts; those of Gemma 4 12B
    have names of before transformers put its modules together.
    """
    own_names = (f"model.{name}", name)
    older = (each.replace("vision_tower.", "vision_tower.vision_model.") for each in own_names)
    apart = f"model.{name}".replace("embed_vision.multimodal_embedder.", "embed_vision.")
    names = (*own_names, *older, apart, apart.replace("embed_vision.", "vision_embedder."))
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
