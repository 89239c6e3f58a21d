"""Several LoRA adapters on one base: each text of a batch uses the adapter that it names, or none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.model.adapters.lora import LoraLinear, adapt_as
from bloomery.model.adapters.peft_files import read_adaptation, read_trained
from bloomery.model.adapters.settings import is_adapter_folder, read_settings
from bloomery.model.decoder import Decoder

ALONE = "serve it alone: bloomery serve BASE+ADAPTER"


@final
class Rows:
    """Which rows of the current batch use which adapter; shared by all layers. None: every row."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor | None] = {}


class ManyLora(nn.Module):
    """y = W x + b, plus scale B A x for the rows of each adapter. `base`: a linear map, quantized or not."""

    def __init__(self, base: nn.Module, rows: Rows) -> None:
        super().__init__()
        self.base = base
        self.rows = rows
        self.pairs: dict[str, tuple[Tensor, Tensor, float]] = {}

    def forward(self, x_BTD: Tensor) -> Tensor:
        y: Tensor = self.base(x_BTD)
        for name, rows in self.rows.of.items():
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
        """In place: the layers that an adapter changes become ManyLora. Raises UserError for one that is not LoRA."""
        self._rows = Rows()
        self._device = decoder.model.embed_tokens.weight.device
        self.names = tuple(folders)
        for name, folder in folders.items():
            self._add(decoder, name, folder)

    def choose(self, names: Sequence[str | None]) -> None:
        """The adapter of each row of the next forward."""
        self._rows.of = {
            name: None
            if all(each == name for each in names)
            else torch.tensor(
                [row for row, each in enumerate(names) if each == name], device=self._device
            )
            for name in names
            if name is not None
        }

    @torch.no_grad()
    def _add(self, decoder: Decoder, name: str, folder: Path) -> None:
        if not is_adapter_folder(folder):
            problem = f"not an adapter: {folder.name}"
            fix = "name a folder with adapter_config.json"
            raise UserError(problem, where=f"--adapter {name}={folder}", fix=fix, code=2)
        if read_settings(folder)["peft_type"] != "LORA":
            raise UserError(
                "several adapters at once must be LoRA", where=str(folder), fix=ALONE, code=2
            )
        settings, config = read_adaptation(folder, decoder.config)
        changed = [
            word
            for word, used in (
                ("DoRA", settings.dora),
                ("modules_to_save", settings.modules_to_save),
            )
            if used
        ]
        if changed or config.vocab_size != decoder.config.vocab_size:
            what = (
                f"an adapter with {' and '.join(changed) or 'new tokens'} does not share its base"
            )
            raise UserError(what, where=str(folder), fix=ALONE, code=2)
        with torch.device("meta"):
            like = Decoder(config)
            adapt_as(like, settings)
        wanted = {
            path: module for path, module in like.named_modules() if isinstance(module, LoraLinear)
        }
        for module in wanted.values():
            for leaf in ("lora_A", "lora_B"):
                held = getattr(module, leaf)
                setattr(
                    module,
                    leaf,
                    nn.Parameter(torch.empty_like(held, device=self._device), requires_grad=False),
                )
        read_trained(like, settings, config, folder, shared=True)
        dtype = decoder.model.embed_tokens.weight.dtype
        for path, module in wanted.items():
            present = decoder.get_submodule(path)
            if not isinstance(present, ManyLora):
                parent, _, leaf = path.rpartition(".")
                present = ManyLora(present, self._rows)
                setattr(decoder.get_submodule(parent), leaf, present)
            present.pairs[name] = (*module.pair(dtype), module.scale)
