"""What a model that no run here made is, from its files' headers: shape, size, tokenizer, adapter. Loads no weights"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.data.chat.templates import own_templates
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.adapters.base_model import TENSORS, Base, read_settings, refuse_other_base
from bloomery.model.adapters.peft_files import read_adaptation
from bloomery.model.adapters.targets import Adaptation
from bloomery.model.config import ModelConfig
from bloomery.model.families.presets import read_config
from bloomery.model.io.stored import Stored, find_tensors, stored_in, stored_parameters
from bloomery.train.model_folder import Found


@dataclass(frozen=True)
class Files:
    """Safetensors: the bytes of all, how many there are, and the dtypes of their tensors, most numbers first."""

    bytes: int
    count: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class AdapterFacts:
    """`base`: an id on the Hub or a folder. `ranks`: those that occur, empty where the method has none. `trained`: of
    the `stored` numbers those that learn, None where the file does not tell.
    """

    method: str
    base: str
    ranks: tuple[int, ...]
    alpha: float | None
    modules: tuple[str, ...]
    in_full: tuple[str, ...]
    trained: int | None
    stored: int
    files: Files


@dataclass(frozen=True)
class ModelFacts:
    """`config` has the vocabulary that an adapter brings. `tokens`, of the tokenizer: None where none is there."""

    config: ModelConfig
    files: Files
    tokens: int | None
    templates: tuple[str, ...]
    adapter: AdapterFacts | None


def read_facts(found: Found) -> ModelFacts:
    """Raises UserError for what is damaged, pickled, or an adapter of another base."""
    source = found.base or found.weights
    config = read_config(source)
    stored_parameters(source, config)
    files, adapter = _files(find_tensors(source).values()), None
    if found.base is not None:
        refuse_other_base(found.weights, found.base)
        config, adapter = _adapter(found.weights, config, base=Base(str(found.base), "").name)
    tokens, templates = _tokenizer(found.tokenizer)
    return ModelFacts(config, files, tokens, templates, adapter)


def _files(tensors: Iterable[Stored]) -> Files:
    sizes, paths = Counter[str](), set[Path]()
    for tensor in tensors:
        sizes[str(tensor.dtype).removeprefix("torch.")] += math.prod(tensor.shape)
        paths.add(tensor.path)
    return Files(sum(path.stat().st_size for path in paths), len(paths), tuple(name for name, _ in sizes.most_common()))


def _adapter(folder: Path, config: ModelConfig, *, base: str) -> tuple[ModelConfig, AdapterFacts]:
    said, tensors = read_settings(folder), stored_in(folder, TENSORS).values()
    stored, files = sum(math.prod(tensor.shape) for tensor in tensors), _files(tensors)
    if said["peft_type"] != "LORA":
        names = said.get("target_modules")
        modules = _short(names) if isinstance(names, list) else ()
        method = f"{said['peft_type'][:40]} of PEFT"
        told = AdapterFacts(method, base, _rank(said), None, modules, (), None, stored, files)
        return config, told
    read, config = read_adaptation(folder, config)
    told = AdapterFacts(
        method=_method(read), base=base, ranks=tuple(sorted({pair.rank for pair in read.pairs.values()})),
        alpha=said.get("lora_alpha", 8), modules=_short(read.pairs), in_full=_short(read.whole),
        trained=read.trained(config), stored=stored, files=files,
    )  # fmt: skip
    return config, told


def _method(read: Adaptation) -> str:
    if not read.pairs:
        return "modules in full"
    return ("DoRA" if read.dora else "LoRA") + (" scaled by the root of its rank (rsLoRA)" if read.rslora else "")


def _rank(said: dict[str, Any]) -> tuple[int, ...]:
    """Of the methods that call it `r`; AdaLoRA's says where training began."""
    rank = said.get("target_r" if said["peft_type"] == "ADALORA" else "r")
    return (rank,) if isinstance(rank, int) and rank > 0 else ()


def _short(names: Iterable[Any]) -> tuple[str, ...]:
    """The last part of each name, once."""
    return tuple(dict.fromkeys(str(name).rpartition(".")[2][:80] for name in names))


def _tokenizer(folder: Path) -> tuple[int | None, tuple[str, ...]]:
    if not any(place.is_file() for place in (folder / "tokenizer.json", *folder.glob("*.model"))):
        return None, ()
    tokenizer = load_tokenizer(folder)
    return tokenizer.vocab_size, tuple(own_templates(tokenizer.config))
