"""Several LoRA adapters on one base: each text of a batch uses the adapter that it names, or none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.device import sent
from bloomery.core.errors import UserError
from bloomery.model.adapters.base_changes import changes_of_base
from bloomery.model.adapters.lora import LoraLinear, adapt_as
from bloomery.model.adapters.peft_files import read_trained
from bloomery.model.adapters.peft_reading import read_adaptation
from bloomery.model.adapters.settings import has_stacks, is_adapter_folder, read_settings
from bloomery.model.decoder import Decoder

ALONE = "serve it alone: bloomery serve BASE+ADAPTER"


@final
class Rows:
    """The rows of the current batch that use each adapter, int64, shared by all layers; None: every row."""

    def __init__(self) -> None:
        self.by_adapter: dict[str, Tensor | None] = {}


class ManyLora(nn.Module):
    """y = W x + b, plus scale B A x for the rows of each adapter. `base`: a linear map, quantized or not."""

    def __init__(self, base: nn.Module, rows: Rows) -> None:
        super().__init__()
        self.base = base
        self.rows = rows
        self.pairs: dict[str, tuple[Tensor, Tensor, float]] = {}

    def forward(self, x_BTD: Tensor) -> Tensor:
        y: Tensor = self.base(x_BTD)
        for name, rows in self.rows.by_adapter.items():
            if name not in self.pairs:
                continue
            A, B, scale = self.pairs[name]
            inner = x_BTD if rows is None else x_BTD[rows]
            update = F.linear(F.linear(inner, A.to(inner.dtype)) * scale, B.to(inner.dtype))
            y = y + update if rows is None else y.index_add(0, rows, update.to(y.dtype))
        return y


@final
class Adapters:
    """The adapters of a decoder, by name."""

    def __init__(self, decoder: Decoder, folders: Mapping[str, Path]) -> None:
        """Replaces the layers that an adapter changes by ManyLora. Raises UserError for an adapter that is not LoRA."""
        self._rows = Rows()
        self._device = decoder.model.embed_tokens.weight.device
        self.names = tuple(folders)
        for name, folder in folders.items():
            self._add(decoder, name, folder)

    def choose(self, names: Sequence[str | None]) -> None:
        """Sets the adapter of each row of the next forward; None: the base alone."""
        self._rows.by_adapter = {}
        for adapter in dict.fromkeys(names):
            if adapter is None:
                continue
            rows = [row for row, name in enumerate(names) if name == adapter]
            uses_all_rows = len(rows) == len(names)
            self._rows.by_adapter[adapter] = (
                None if uses_all_rows else sent(torch.tensor(rows), self._device)
            )

    @torch.no_grad()
    def _add(self, decoder: Decoder, name: str, folder: Path) -> None:
        # Only LoRA matrices can be added for some rows of a batch: what changes the base is refused.
        if not is_adapter_folder(folder):
            problem = f"not an adapter: {folder.name}"
            fix = "name a folder with adapter_config.json"
            raise UserError(problem, where=f"--adapter {name}={folder}", fix=fix, code=2)
        if read_settings(folder)["peft_type"] != "LORA":
            raise UserError(
                "several adapters at once must be LoRA", where=str(folder), fix=ALONE, code=2
            )
        settings, config = read_adaptation(folder, decoder.config)
        features = ["DoRA"] if settings.dora else []
        features += ["modules_to_save"] if settings.modules_to_save else []
        # The rows of an expert are tokens of any texts of the batch.
        features += ["LoRA of experts"] if has_stacks(settings) else []
        features += changes_of_base(settings)
        if features or config.vocab_size != decoder.config.vocab_size:
            problem = (
                f"an adapter with {' and '.join(features) or 'new tokens'} does not share its base"
            )
            raise UserError(problem, where=str(folder), fix=ALONE, code=2)

        # The matrices are read into a decoder that has no memory for anything else.
        with torch.device("meta"):
            meta_decoder = Decoder(config)
            adapt_as(meta_decoder, settings)
        lora_modules = {
            path: module
            for path, module in meta_decoder.named_modules()
            if isinstance(module, LoraLinear)
        }
        for module in lora_modules.values():
            for leaf in ("lora_A", "lora_B"):
                matrix = torch.empty_like(getattr(module, leaf), device=self._device)
                setattr(module, leaf, nn.Parameter(matrix, requires_grad=False))
        read_trained(meta_decoder, settings, config, folder, shared=True)

        # A layer that several adapters change is wrapped once, and holds a pair of each.
        dtype = decoder.model.embed_tokens.weight.dtype
        for path, module in lora_modules.items():
            layer = decoder.get_submodule(path)
            if not isinstance(layer, ManyLora):
                parent, _, leaf = path.rpartition(".")
                layer = ManyLora(layer, self._rows)
                setattr(decoder.get_submodule(parent), leaf, layer)
            layer.pairs[name] = (*module.pair(dtype), module.scale)
