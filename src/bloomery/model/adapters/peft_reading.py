"""Adapters that PEFT wrote: which modules their tensors and settings change, and how. Unsupported settings are refused.

R rank of a pair. The tensors define the modules, the settings the scale of each; what does not agree with the base is
an error.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import Shape, expert_stacks, parameter_shapes
from bloomery.facts.pictures import vision_of
from bloomery.model.adapters import mlx_files
from bloomery.model.adapters.mlx_files import peft_tensors
from bloomery.model.adapters.patterns import first_matches
from bloomery.model.adapters.peft_experts import (
    expert_names,
    is_swapped,
    modules_of_stacks,
    pair_of_experts,
    targets_of_settings,
    wrapped_names,
)
from bloomery.model.adapters.peft_names import (
    AGAIN,
    MERGE,
    TOKEN_ROWS,
    AdapterTensors,
    names_of_base,
    refuse_vision,
    without_ties,
)
from bloomery.model.adapters.settings import (
    CONFIG,
    EMBEDDING,
    HEAD,
    TENSORS,
    VALUES,
    Adaptation,
    Pair,
    VocabularyChange,
    adapter_file,
    linear_modules,
    read_settings,
    right_base,
    shares_head,
    stacks_in_memory,
    stored_modules,
)
from bloomery.model.configs import grown, stated_config
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import (
    VISION,
    WEIGHTS,
    StoredTensor,
    as_saved,
    refuse_whole_numbers,
    stored_in,
    tensor_locations,
)

WHOLE = "model."  # before the names of all parts of transformers' whole model
MAGNITUDE = "lora_magnitude_vector"
# Keys that do not change what the adapter computes, or whose meaning is read from the tensors.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",  # what is tied is stored under both names
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "lora_bias",
        "init_lora_weights",
        "target_parameters",
        "trainable_token_indices",
    }
)
# Starts that leave the base as it was published; the others replace it: pissa, olora, corda, ... by a residual, loftq
# by its quantized weight (PEFT 0.21, LoraLayer.loftq_init).
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
RESIDUAL_FIX = f"{MERGE}, or save it with its path_initial_model_for_weight_conversion"
# Residuals that follow from the weight alone, which PEFT computes again whenever it loads the adapter.
RESIDUALS = ("pissa", "olora")
PAIR = re.compile(r"(.+)\.(lora_A|lora_B)\.weight")
VOCABULARY_PAIR = re.compile(r"(.+)\.(lora_embedding_A|lora_embedding_B)")
LORA_BIAS = re.compile(r"(.+)\.lora_B\.bias")


def adapter_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of an adapter_model.safetensors of another program, by their stored names.

    All of their values are finite: an adapter is small, and one of NaN makes every output noise. Raises UserError.
    """
    if not (folder / TENSORS).is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(
            "adapter_model.bin is a pickle: opening it could run anything",
            where=str(folder),
            fix="ask its author for safetensors, or save it again with PEFT's save_pretrained",
        )
    tensors = stored_in(folder, adapter_file(folder))
    with TensorReader() as reader:
        for name, tensor in tensors.items():
            if tensor.kind not in WEIGHTS:
                continue
            flat = replace(tensor, shape=(math.prod(tensor.shape),))
            pieces = reader.pieces(flat, 0, *flat.shape, device=torch.device("cpu"))
            if not all(bool(piece.isfinite().all()) for _, piece in pieces):
                problem = f"{name[:120]} of the adapter holds values that are not finite (NaN or infinity)"
                fix = f"{AGAIN}; of a run, name an earlier checkpoint with --step"
                raise UserError(problem, where=str(folder / TENSORS), fix=fix)
    return tensors


def base_tensors(folder: Path, config: ModelConfig, *, is_tied: bool = True) -> AdapterTensors:
    """The adapter's tensors by names of a base with this config. Raises UserError as `names_of_base` does.

    `is_tied`: a tensor that PEFT loads into the embedding or the head itself counts for both.
    """
    modules = dict.fromkeys([*stored_modules(config), *sorted(modules_of_stacks(config)), HEAD])
    file = adapter_file(folder)
    stored = stored_in(folder, file)
    if file == mlx_files.TENSORS:
        stored = peft_tensors(stored)
    tensors = names_of_base(stored, modules, where=str(folder / file))
    # PEFT's files differ in whether the magnitude's name ends with ".weight".
    by_name = {
        name.removesuffix(".weight") if name.endswith(f".{MAGNITUDE}.weight") else name: tensor
        for name, tensor in tensors.by_name.items()
    }
    # Whole modules have the names of transformers' memory, as their pairs do, and are found under those of files.
    by_name = {
        name if ".lora_" in name else as_saved(name, config): tensor
        for name, tensor in by_name.items()
    }
    tensors = replace(tensors, by_name=_by_parameter(by_name, folder, config))
    if not is_tied:
        return tensors
    embedding = tensor_locations(config)[f"{EMBEDDING}.weight"].name
    head = f"{HEAD}.weight"
    return without_ties(tensors, {embedding: head, head: embedding})


def _by_parameter(
    tensors: Mapping[str, StoredTensor], folder: Path, config: ModelConfig
) -> dict[str, StoredTensor]:
    """The tensors, those of stacks of experts by the names of parameters, as their ranks and alphas are."""
    stacks, _ = targets_of_settings(read_settings(folder), config, where=str(folder / CONFIG))
    in_memory = stacks_in_memory(config)
    renamed = {
        f"{wrapped}.{part}.weight": f"{in_memory[stack]}.{part}.weight"
        for stack, wrapped in wrapped_names(config, stacks).items()
        for part in ("lora_A", "lora_B")
    }
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def read_adaptation(
    folder: Path, config: ModelConfig, *, base: Path | None = None
) -> tuple[Adaptation, ModelConfig]:
    """The adaptation of a model with this config, and the config with the adapter's vocabulary and head.

    `base`: the folder of that model, for messages. Raises UserError when the adapter is for another base, is damaged,
    or is unsupported.
    """
    settings = _settings(folder, config)
    where = str(folder / adapter_file(folder))
    adapter_tensors(folder)  # refuses what is missing, damaged, a pickle or not finite
    tensors = base_tensors(folder, config, is_tied=shares_head(config))
    # What reads pictures is no part of the decoder: `tower_changes` has it, of a base that sees them.
    if base is not None and vision_of(stated_config(base), where=str(base)) is not None:
        of_text = {n: each for n, each in tensors.by_name.items() if not n.startswith(VISION)}
        tensors = replace(tensors, by_name=of_text)
    for name, tensor in tensors.by_name.items():
        refuse_vision(name, where=where)
        refuse_whole_numbers(name, tensor)
    reading = _Reading(settings, config, tensors, folder, base)

    # The tensors decide which modules have a pair, and the settings its rank: the shapes must agree.
    config = reading.config_of_adapter()
    vocabulary = reading.vocabulary(config)
    pairs, lora_biases = reading.pairs(config)

    # Every other tensor replaces one of the base.
    saved_modules, biases = reading.replaced(config)
    if not pairs and not saved_modules and not vocabulary and not biases:
        raise UserError("the adapter changes nothing", where=where, fix=AGAIN)

    is_bfloat16 = all(str(tensor.dtype) == "torch.bfloat16" for tensor in tensors.by_name.values())
    adaptation = Adaptation(
        pairs=pairs,
        modules_to_save=saved_modules,
        vocabulary=vocabulary,
        biases=biases,
        lora_biases=lora_biases,
        residual=settings.residual,
        dora=settings.dora,
        rslora=settings.rslora,
        dtype="bfloat16" if is_bfloat16 else "float32",
    )
    return adaptation, config


@dataclass(frozen=True)
class TowerChanges:
    """What an adapter changes of what reads pictures, by names of transformers' whole model: `pairs` of LoRA by module,
    and `tensors` of parameters, A and B of the pairs included.
    """

    pairs: Mapping[str, Pair]
    tensors: Mapping[str, StoredTensor]


def tower_changes(folder: Path, config: ModelConfig) -> TowerChanges | None:
    """None where the adapter changes the language model alone. Raises UserError where it is no LoRA.

    `config`: of the language model.
    """
    if read_settings(folder)["peft_type"] != "LORA":
        return None
    tensors = {
        name if name.startswith(WHOLE) else WHOLE + name: tensor
        for name, tensor in base_tensors(folder, config).by_name.items()
        if name.startswith(VISION)
    }
    if not tensors:
        return None
    settings = _settings(folder, config)
    modules = [match[1] for name in tensors if (match := PAIR.fullmatch(name))]
    odd = [name for name in tensors if ".lora_" in name and not PAIR.fullmatch(name)]
    if odd or settings.dora or settings.residual:
        refuse_vision((odd or [*tensors])[0], where=str(folder / TENSORS))
    return TowerChanges(settings.pairs(list(dict.fromkeys(modules))), tensors)


class _Reading:
    """One adapter's tensors and settings beside the config of its base."""

    def __init__(
        self,
        settings: "_Settings",
        config: ModelConfig,
        tensors: AdapterTensors,
        folder: Path,
        base: Path | None,
    ) -> None:
        self.settings = settings
        self.base_config = config
        self.tensors = tensors.by_name
        self.folder = folder
        self.base = base
        self.where = str(folder / adapter_file(folder))
        self.is_of_mlx = adapter_file(folder) == mlx_files.TENSORS
        self.merge = mlx_files.FUSE if self.is_of_mlx else MERGE
        self.embedding = tensor_locations(config)[f"{EMBEDDING}.weight"].name
        self.head = f"{HEAD}.weight"
        # The names of the files: those of embedding and head are the vocabulary's, the others' are layers'.
        self.vocabulary_modules = {
            self.embedding.removesuffix(".weight"): EMBEDDING,
            HEAD: HEAD,
        }
        pair_modules = [
            match[1]
            for name in self.tensors
            if (match := PAIR.fullmatch(name) or VOCABULARY_PAIR.fullmatch(name))
        ]
        # PEFT's patterns of ranks mean the names of modules, and of what it adapts as a parameter that name.
        keys = {
            module: f"{module}.weight" if module in settings.parameters else module
            for module in sorted(set(pair_modules))
        }
        pairs_by_key = settings.pairs(list(keys.values()))
        self.pair_of_module = {module: pairs_by_key[key] for module, key in keys.items()}

    def config_of_adapter(self) -> ModelConfig:
        """The base's config with the adapter's vocabulary and head: weights that it changes apart are not tied."""
        config = self.base_config
        if f"{VALUES}.weight" in self.tensors:
            config = replace(config, head="values")
        tables = [
            self.tensors[name] for name in (self.embedding, self.head) if name in self.tensors
        ]
        vocab_size = max([table.shape[0] for table in tables if len(table.shape) == 2], default=0)
        config = grown(config, vocab_size)
        if not shares_head(config) or not self._changes_apart():
            return config
        if config.transformers_backend is not None:
            raise UserError(
                "the adapter changes the embedding apart from the head, which this model shares with it",
                where=self.where,
                fix=self.merge,
            )
        return replace(config, tie_embeddings=False)

    def _changes_apart(self) -> bool:
        """Whether embedding and head differ once the adapter is applied to weights that are tied."""
        modules = self.vocabulary_modules
        if any(module in self.pair_of_module for module in modules):
            return True
        rows = {modules[name]: ids for name, ids in self.token_ids().items()}
        if HEAD in rows and not (
            rows.get(EMBEDDING) == rows[HEAD] and self._are_equal(*map(self._rows_name, modules))
        ):
            return True
        present = [name for name in (self.embedding, self.head) if name in self.tensors]
        return len(present) == 1 or (len(present) == 2 and not self._are_equal(*present))

    def _rows_name(self, stored_module: str) -> str:
        return f"{stored_module}.token_adapter.{TOKEN_ROWS}"

    def _are_equal(self, first: str, second: str) -> bool:
        with TensorReader() as reader:
            first_tensor, second_tensor = (
                reader.read(self.tensors[name]) for name in (first, second)
            )
        return first_tensor.shape == second_tensor.shape and first_tensor.equal(second_tensor)

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """The tokens whose rows the adapter stores, by the stored module. Raises UserError for what does not agree."""
        token_ids = {}
        for stored_module in self.vocabulary_modules:
            rows = self.tensors.get(self._rows_name(stored_module))
            if rows is None:
                continue
            ids = self.settings.ids_of(stored_module)
            if len(rows.shape) != 2 or rows.shape[0] != len(ids) or len(set(ids)) < len(ids):
                raise UserError(
                    f"trainable_token_indices names {len(ids)} tokens of {stored_module[:60]}, and the "
                    f"adapter stores {list(rows.shape)}",
                    where=self.where,
                    fix=AGAIN,
                )
            token_ids[stored_module] = ids
        return token_ids

    def vocabulary(self, config: ModelConfig) -> dict[str, VocabularyChange]:
        """What the adapter does to the embedding and the head, besides replacing them."""
        shapes = parameter_shapes(config)
        token_ids = self.token_ids()
        changes: dict[str, VocabularyChange] = {}
        for stored_module, module in self.vocabulary_modules.items():
            pair = self.pair_of_module.get(stored_module)
            ids = token_ids.get(stored_module, ())
            if pair is None and not ids:
                continue
            shape = shapes.get(f"{module}.weight")
            if shape is None and not pair:  # the rows of a tied head are those of the embedding
                continue
            if shape is None:
                raise self._not_in_base(stored_module)
            if f"{stored_module}.lora_B.bias" in self.tensors:
                raise UserError(
                    f"lora_bias gives {stored_module} a bias, which it cannot have here",
                    where=self.where,
                    fix=self.merge,
                )
            if pair is not None and token_ids:
                raise UserError(
                    "the adapter has LoRA matrices and trained tokens of the embedding or the head",
                    where=self.where,
                    fix=self.merge,
                )
            rows, width = shape
            if pair is not None and module == EMBEDDING:
                self._expect(f"{stored_module}.lora_embedding_A", (pair.rank, rows))
                self._expect(f"{stored_module}.lora_embedding_B", (width, pair.rank))
            elif pair is not None:
                self._expect(f"{stored_module}.lora_A.weight", (pair.rank, width))
                self._expect(f"{stored_module}.lora_B.weight", (rows, pair.rank))
            if pair is not None and self.settings.dora and module == EMBEDDING and self.is_of_mlx:
                raise UserError(
                    "mlx-lm scales the rows of an embedding with DoRA, PEFT its columns",
                    where=self.where,
                    fix=self.merge,
                )
            if pair is not None and self.settings.dora:
                magnitudes = width if module == EMBEDDING else rows
                self._expect(f"{stored_module}.{MAGNITUDE}", (magnitudes,))
            if ids:
                self._expect(self._rows_name(stored_module), (len(ids), width))
                if max(ids) >= rows:
                    raise UserError(
                        f"trainable_token_indices holds {max(ids)}, and this base has {rows:,} tokens",
                        where=str(self.folder / CONFIG),
                        fix=right_base(self.folder, self.base),
                    )
            changes[module] = VocabularyChange(pair=pair, token_ids=ids)
        return changes

    def pairs(self, config: ModelConfig) -> tuple[dict[str, Pair], tuple[str, ...]]:
        """The pairs of the linear layers by module, and the modules whose B has a bias."""
        modules_by_stored_module = stored_modules(config)
        shapes = parameter_shapes(config)
        locations = tensor_locations(config)
        pairs: dict[str, Pair] = {}
        lora_biases: list[str] = []
        adaptable_modules = set(linear_modules(config))
        pairs |= self.pairs_of_stacks(config)
        of_stacks = {module for stack in pairs for module in self._modules_of_stack(config, stack)}
        for stored_module, pair in self.pair_of_module.items():
            if stored_module in self.vocabulary_modules or stored_module in of_stacks:
                continue
            modules = modules_by_stored_module.get(stored_module, ())
            if not modules or modules[0] not in adaptable_modules:
                raise self._not_in_base(stored_module)
            outputs = locations[f"{modules[0]}.weight"].stored_rows
            inputs = shapes[f"{modules[0]}.weight"][1]
            self._expect(f"{stored_module}.lora_A.weight", (pair.rank, inputs))
            self._expect(f"{stored_module}.lora_B.weight", (outputs, pair.rank))
            if self.settings.dora:
                self._expect(f"{stored_module}.{MAGNITUDE}", (outputs,))
            if f"{stored_module}.lora_B.bias" in self.tensors:
                self._expect(f"{stored_module}.lora_B.bias", (outputs,))
                lora_biases += modules
            if self.settings.residual and len(modules) > 1:
                raise UserError(
                    f"init_lora_weights {self.settings.residual!r} took its start out of {stored_module}, which "
                    "is several layers here",
                    where=str(self.folder / CONFIG),
                    fix=RESIDUAL_FIX,
                )
            pairs |= dict.fromkeys(modules, pair)
        return pairs, tuple(lora_biases)

    def pairs_of_stacks(self, config: ModelConfig) -> dict[str, Pair]:
        """The pairs of stacks of experts, given as such or for each expert."""
        pairs: dict[str, Pair] = {}
        for stack, shape in expert_stacks(config).items():
            parameter = stacks_in_memory(config)[stack]
            modules = [
                module
                for module in self._modules_of_stack(config, stack)
                if module in self.pair_of_module
            ]
            if not modules:
                continue
            if self.settings.dora or self.settings.residual:
                raise UserError(
                    f"the adapter has DoRA or {self.settings.residual or 'a residual'} on experts, which PEFT does not "
                    "compute",
                    where=str(self.folder / CONFIG),
                    fix=self.merge,
                )
            _, outputs, inputs = shape
            if parameter in modules:
                pair = self.pair_of_module[parameter]
                self._expect_stack(stack, pair, config)
                pairs[stack] = pair
                continue
            names = expert_names(config, stack)
            pairs[stack] = pair_of_experts(self.pair_of_module, names, where=self.where)
            rows = outputs // len(names[0])
            for module in (module for modules in names for module in modules):
                rank = self.pair_of_module[module].rank
                self._expect(f"{module}.lora_A.weight", (rank, inputs))
                self._expect(f"{module}.lora_B.weight", (rows, rank))
        return pairs

    def _modules_of_stack(self, config: ModelConfig, stack: str) -> list[str]:
        """Every name that a pair of it may have."""
        if stack not in stacks_in_memory(config):
            return []
        of_experts = [module for modules in expert_names(config, stack) for module in modules]
        return [stacks_in_memory(config)[stack], *of_experts]

    def _expect_stack(self, stack: str, pair: Pair, config: ModelConfig) -> None:
        """Raises UserError unless both matrices of a stack have one of the two layouts."""
        experts, outputs, inputs = expert_stacks(config)[stack]
        parameter = stacks_in_memory(config)[stack]
        A_name, B_name = f"{parameter}.lora_A.weight", f"{parameter}.lora_B.weight"
        columns = pair.rank * experts
        A, B = self.tensors.get(A_name), self.tensors.get(B_name)
        if (
            A is not None
            and B is not None
            and is_swapped(
                A.shape,
                B.shape,
                config,
                stack,
                version=self.settings.version,
                where=str(self.folder / CONFIG),
            )
        ):
            self._expect(A_name, (columns, outputs))
            self._expect(B_name, (inputs, columns))
            return
        self._expect(A_name, (columns, inputs))
        self._expect(B_name, (outputs, columns))

    def replaced(self, config: ModelConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The modules that the adapter replaces, and the biases that it replaces alone.

        Raises UserError where the base has no such tensor, or another shape.
        """
        shapes = parameter_shapes(config)
        locations = tensor_locations(config)
        rows_names = set(map(self._rows_name, self.vocabulary_modules))
        replacements = {
            name
            for name in self.tensors
            if not any(pattern.fullmatch(name) for pattern in (PAIR, VOCABULARY_PAIR, LORA_BIAS))
            and not name.endswith(f".{MAGNITUDE}")
            and name not in rows_names
        }
        known_names = {location.name for location in locations.values()}
        if shares_head(config):
            known_names.add(self.head)
        if unknown_names := sorted(replacements - known_names):
            raise self._not_in_base(unknown_names[0])

        # A module is replaced in full: with its weight, its bias must be there. A bias may come alone.
        replaced_modules = {
            name.rpartition(".")[0]
            for name, location in locations.items()
            if location.name in replacements and name.endswith(".weight")
        }
        replaced_parameters = []
        biases = []
        for name, location in locations.items():
            module = name.rpartition(".")[0]
            if module in replaced_modules:
                replaced_parameters.append(name)
            elif location.name in replacements:
                biases.append(name)
            else:
                continue
            self._expect(location.name, location.stored_shape(shapes[name]))
        saved_modules = dict.fromkeys(name.rpartition(".")[0] for name in replaced_parameters)
        return tuple(saved_modules), tuple(biases)

    def _not_in_base(self, name: str) -> UserError:
        config = self.base_config
        return UserError(
            f"the adapter changes {name[:80]!r}, which this base does not have "
            f"({config.family}, layers 0 to {config.num_layers - 1})",
            where=self.where,
            fix=right_base(self.folder, self.base),
        )

    def _expect(self, name: str, shape: Shape) -> None:
        """Raises UserError when a tensor is missing or has another shape."""
        if name not in self.tensors:
            raise UserError(f"the adapter lacks {name[:120]}", where=self.where, fix=AGAIN)
        adapter_shape = self.tensors[name].shape
        if adapter_shape != shape:
            raise UserError(
                f"{name[:120]} is {list(adapter_shape)}; this base and {CONFIG} make it {list(shape)}",
                where=self.where,
                fix=right_base(self.folder, self.base),
            )


@dataclass(frozen=True)
class _Settings:
    """adapter_config.json, as far as it decides the numbers."""

    where: str
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    residual: str
    token_ids: object  # trainable_token_indices: a list, or a list by module
    parameters: frozenset[
        str
    ]  # stored linear modules whose weight PEFT adapts as a target parameter
    version: object  # of PEFT, as it wrote it

    def pairs(self, stored_modules: Sequence[str]) -> dict[str, Pair]:
        """The pair of each module, by PEFT's rule for rank_pattern and alpha_pattern."""
        rank_patterns = first_matches(list(self.ranks), stored_modules, where=self.where)
        alpha_patterns = first_matches(list(self.alphas), stored_modules, where=self.where)
        pairs = {}
        for module in stored_modules:
            rank_pattern = rank_patterns[module]
            alpha_pattern = alpha_patterns[module]
            rank = self.rank if rank_pattern is None else self.ranks[rank_pattern]
            alpha = self.alpha if alpha_pattern is None else self.alphas[alpha_pattern]
            pairs[module] = Pair(rank, alpha / (math.sqrt(rank) if self.rslora else rank))
        return pairs

    def ids_of(self, stored_module: str) -> tuple[int, ...]:
        """The tokens that trainable_token_indices names for a module: of a list, the embedding's."""
        ids = self.token_ids
        if isinstance(ids, dict):
            names = [name for name in ids if f".{stored_module}".endswith(f".{name}")]
            # Rows of a tied head are stored under its name, too.
            ids = ids[names[0]] if names else next(iter(ids.values()), None)
        if not isinstance(ids, list) or not all(
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31
            for token in ids
        ):
            raise UserError(
                f"trainable_token_indices is {str(self.token_ids)[:40]!r}, no list of tokens",
                where=self.where,
                fix=AGAIN,
            )
        return tuple(ids)


def _settings(folder: Path, config: ModelConfig) -> _Settings:
    """Raises UserError for a setting that could change the numbers in an unsupported way."""
    config_json = read_settings(folder)
    where = str(folder / CONFIG)
    if config_json["peft_type"] != "LORA":
        raise UserError(
            f"{config_json['peft_type'][:40]!r} is another method than LoRA and DoRA",
            where=where,
            fix=MERGE,
        )

    # A setting that is unknown here is harmless while it is off.
    unsupported = [
        f"{key[:40]!r} ({str(value)[:40]!r})"
        for key, value in config_json.items()
        if key not in HARMLESS | READ
        and value not in (None, False, 0)
        and value != {}
        and value != []
    ]
    if unsupported:
        problem = f"unsupported adapter setting: {unsupported[0]}"
        raise UserError(problem, where=where, fix=MERGE)

    _, parameters = targets_of_settings(config_json, config, where=where)

    # An initialization that replaced the base's weights makes the published base the wrong one.
    initialization = config_json.get("init_lora_weights", True)
    residual = initialization if initialization in RESIDUALS else ""
    if not residual and initialization not in KEEPS_BASE:
        raise UserError(
            "its base is not the published model but what init_lora_weights "
            f"{str(initialization)[:40]!r} left of it, which cannot be computed again",
            where=where,
            fix=RESIDUAL_FIX,
        )

    def number(value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise UserError(
                f"{key} is {str(value)[:40]!r}, not a number above 0", where=where, fix=AGAIN
            )
        return float(value)

    def numbers_by_pattern(key: str) -> dict[str, float]:
        raw_patterns = config_json.get(key) or {}
        if not isinstance(raw_patterns, dict):
            raise UserError(f"{key} is no object", where=where, fix=AGAIN)
        return {
            pattern: number(value, f"{key}[{pattern[:60]!r}]")
            for pattern, value in raw_patterns.items()
        }

    return _Settings(
        where=where,
        rank=int(number(config_json.get("r", 8), "r")),
        alpha=number(config_json.get("lora_alpha", 8), "lora_alpha"),
        rslora=config_json.get("use_rslora") is True,
        dora=config_json.get("use_dora") is True,
        ranks={key: int(value) for key, value in numbers_by_pattern("rank_pattern").items()},
        alphas=numbers_by_pattern("alpha_pattern"),
        residual=str(residual),
        token_ids=config_json.get("trainable_token_indices"),
        parameters=frozenset(parameters),
        version=config_json.get("peft_version"),
    )
