"""Everything that a plan reads, once: configs, tokenizer, dataset, tables.

A prepared dataset is counted. Before, its size is estimated from its files, and their first rows are checked as
`prepare` checks them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from bloomery import hub
from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.data.chat.render import EncodedExample, Renderer
from bloomery.data.chat.written import notes as left_out_notes
from bloomery.data.examples import BadRow, Example
from bloomery.data.packing import count_sequences
from bloomery.data.pictures.encoder import encoder_of
from bloomery.data.prepare.kinds import Kinds, checked_tokens, kinds_among, refuse_mixture, train_on
from bloomery.data.prepare.pipeline import no_documents, streams, untokenised
from bloomery.data.prepare.prepare import finished_manifest, refuse_layout
from bloomery.data.prepare.split import validation_datasets
from bloomery.data.shards import Manifest, Texts, open_split
from bloomery.data.sources.documents import (
    ReadStats,
    column_use,
    read_documents,
    sources_of,
)
from bloomery.data.sources.files import unread_files
from bloomery.data.sources.formats import ROW_FORMATS
from bloomery.data.sources.task_sets import runs_code
from bloomery.data.tokenizer.templates import find_template
from bloomery.data.tokenizer.tokenizer import (
    TOKENIZER_FILES,
    Tokenizer,
    load_tokenizer,
    new_ids,
    new_tokens,
    tokenizer_spec,
)
from bloomery.data.tokenizer.training import refuse_few_tokens
from bloomery.facts.columns import ColumnUse
from bloomery.facts.config import ModelConfig
from bloomery.facts.families import architecture_of
from bloomery.facts.hf_config import text_part
from bloomery.facts.limits import refuse_teacher_length
from bloomery.facts.pictures import could_see, is_projector, vision_of
from bloomery.facts.published import published_config, similar_names
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, build_profile
from bloomery.hub import PREFIX, cached_model, data_place, is_hub_id
from bloomery.model.configs import (
    build_config,
    headers_of,
    known_config,
    quantized_as,
    read_config,
    stated_config,
)
from bloomery.model.io.stored import find_tensors, is_bare, stored_parameters, vision_tensors
from bloomery.plan.dataset_size import (
    OF_BYTES,
    DatasetSize,
    RowSample,
    dataset_size,
    sample_rows,
)
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.pictures import pictures_of_prepared, pictures_of_rows, tower_in
from bloomery.plan.store import read_plan
from bloomery.plan.teacher_tokenizer import (
    alignment_of,
    prepared_alignment,
    stored_scores,
    teacher_folder,
)
from bloomery.plan.types import DatasetFacts, PictureFacts, TextAlignment
from bloomery.plan.unsupported import refuse_misfits, refuse_recipe
from bloomery.plan.vision import refuse_without_pictures
from bloomery.random_models import is_random
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.objectives import Rollouts
from bloomery.recipe.rewards import ModelReward
from bloomery.recipe.schema import Model, NoAdapter, Recipe, Source


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a recipe on a machine. `dataset`: None where it is unknown.

    `known_vocabulary`: of the model that training starts from, None for a fresh one; `new_tokens`: those added to its
    tokenizer, of which `new_ids` are known; `teacher`: of distillation; `unrun`: warnings about code of the model
    that is never run, and about weights that are read in another way than their files say; `reward_models`: those
    whose shapes are known, each once.
    """

    machine: Machine
    profile: Profile
    model: TrainedModel
    dataset: DatasetFacts | None
    prepared: Path
    source: Path | None
    known_vocabulary: int | None
    new_tokens: int
    new_ids: tuple[int, ...]
    teacher: ModelConfig | None
    unrun: tuple[str, ...]
    reward_models: tuple[ModelConfig, ...] = ()

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def on(self, machine: Machine) -> "Facts":
        """The same on another machine."""
        return replace(self, machine=machine, profile=build_profile(machine))

    def edited(self, recipe: Recipe, config: ModelConfig) -> "Facts":
        """The same for an edited recipe. Raises UserError for one that no machine can train."""
        refuse_recipe(recipe)
        refuse_misfits(
            recipe,
            config,
            self.dataset,
            known_vocabulary=self.known_vocabulary,
            added=self.new_tokens,
        )
        return replace(self, model=TrainedModel.of(recipe, config))


def gather(loaded_recipe: LoadedRecipe, machine: Machine, *, prepared: Path) -> Facts:
    """With the dataset of `prepared`, or an estimate of the one that `prepare` would write there from its files.

    Raises UserError, also for a folder with another recipe's dataset.
    """
    refuse_recipe(loaded_recipe.recipe)  # before the dataset is read for it
    manifest = finished_manifest(loaded_recipe, prepared)
    dataset = (
        guessed(loaded_recipe.recipe)
        if manifest is None
        else prepared_facts(manifest, loaded_recipe.recipe, prepared)
    )
    return facts_of(loaded_recipe, machine, prepared=prepared, dataset=dataset)


def facts_of(
    loaded_recipe: LoadedRecipe,
    machine: Machine,
    *,
    prepared: Path | None = None,
    dataset: DatasetFacts | None = None,
) -> Facts:
    """With the dataset of these facts. Raises UserError for a recipe that no machine can train."""
    recipe = loaded_recipe.recipe
    start = loaded_recipe.recipe.model.from_
    refuse_recipe(recipe)
    if dataset is None or dataset.vocab_size is None:
        config = build_config(recipe.model, vocab_size=planned_vocabulary(recipe))
    else:
        config = build_config(
            recipe.model,
            vocab_size=dataset.vocab_size,
            bos_token_id=dataset.bos_id,
            eos_token_id=dataset.eos_id,
            pad_token_id=dataset.pad_id,
        )
    trained = replace(config, head="values") if recipe.objective.spec.values else config
    # The folder of the model; its name where it is not on this disk and the table stands in for its config.
    source = None
    if start is not None:
        in_table = cached_model(start) is None and published_config(start) is not None
        source = Path(start) if in_table else hub.local_model(start)
    if start is not None:
        refuse_training_codes(recipe, start)
    known_vocabulary = None if start is None else known_config(start).vocab_size
    added = 0 if start is None else new_tokens(recipe)
    ids = () if start is None else new_ids(recipe)
    taught_by = recipe.objective.taught_by
    teacher = None if taught_by is None else known_config(taught_by.model)
    names = [reward.model for reward in recipe.rewards if isinstance(reward, ModelReward)]
    reward_models = [_reward_model(name) for name in dict.fromkeys(names)]
    refuse_misfits(recipe, trained, dataset, known_vocabulary=known_vocabulary, added=added)
    return Facts(
        machine=machine,
        profile=build_profile(machine),
        model=TrainedModel.of(recipe, trained),
        dataset=dataset,
        prepared=prepared or Path("prepared") / loaded_recipe.name,
        source=source,
        known_vocabulary=known_vocabulary,
        new_tokens=added,
        new_ids=ids,
        teacher=teacher,
        unrun=()
        if start is None
        else (
            *_unrun_programs(start, config, sees=sees_pictures(dataset)),
            *_reading_notes(start, config, sees=sees_pictures(dataset)),
        ),
        reward_models=tuple(config for config in reward_models if config is not None),
    )


def refuse_training_codes(recipe: Recipe, start: str) -> None:
    """Raises UserError for full training of weights that are stored quantized: codes are a frozen base."""
    if not isinstance(recipe.adapter, NoAdapter):
        return
    folder = cached_model(start, weights=hub.is_hub_id(start)) or cached_model(start)
    if (
        folder is None
        or not (folder / "config.json").is_file()
        or not (label := quantized_as(folder))
    ):
        return
    raise UserError(
        f"the weights of {folder.name if Path(start).exists() else start} are quantized ({label}): "
        "they are a frozen base for an adapter, and not trained themselves",
        where="model.from",
        fix=f"set adapter.kind=lora; or `bloomery export {start} --to hf --out DIR`, which writes them as numbers, "
        "and train DIR; or use the unquantized model",
        code=2,
    )


def _reward_model(name: str) -> ModelConfig | None:
    """The shape of a reward model; None for an adapter alone, and for a model that is in no table and not here yet.

    Raises UserError for a folder or a run that has no values.
    """
    folder = cached_model(name)
    if folder is None:
        return published_config(name)
    config: ModelConfig | None = None
    if (folder / "config.json").is_file():
        config = read_config(folder)
    elif (folder / "plan.json").is_file():
        config = read_plan(folder / "plan.json").model.config
    elif not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"neither a model nor a run: {folder.name}",
            where=f"rewards, model: {name}",
            fix="name a run of objective.kind=reward, or a folder with config.json and model.safetensors",
            code=2,
        )
    if config is not None and config.head != "values":
        raise UserError(
            f"not a reward model: {folder.name} gives text and no values",
            where=f"rewards, model: {name}",
            fix="train one on preference pairs: objective.kind=reward",
            code=2,
        )
    return config


def sees_pictures(dataset: DatasetFacts | None) -> bool:
    """Whether the model's tower is read: for a dataset with pictures."""
    return dataset is not None and dataset.tower_weights > 0


def _unrun_programs(start: str, config: ModelConfig, *, sees: bool) -> Iterator[str]:
    """Parts of a model that are left out: code, which is never run, and vision; and the architecture used instead."""
    folder = cached_model(start)
    if folder is None:
        return
    raw_config = stated_config(folder)
    architecture = architecture_of(config)
    kind = raw_config.get("model_type")
    name = folder.name if Path(start).exists() else start
    if text_part(raw_config) is not raw_config:
        if sees:
            if raw_config.get("audio_config"):
                yield f"{name} also hears: its audio weights have no use"
            return
        left_out = (
            "vision and audio weights" if raw_config.get("audio_config") else "vision weights"
        )
        line = f"{name} is multimodal: its language model is trained as {architecture}, {left_out} are left out"
        yield f"{line} where the dataset has no pictures" if could_see(raw_config) else line
    elif raw_config.get("auto_map"):
        yield f"{name} has remote code (auto_map), which is never run: loaded as {architecture}"
    elif isinstance(kind, str) and config.transformers_backend is None and kind != config.family:
        yield f"{name} has an unknown model_type ({kind[:60]}): loaded as {architecture}, as in its architectures"


def _reading_notes(start: str, config: ModelConfig, *, sees: bool) -> Iterator[str]:
    """What is read in another way than the files of the weights say, where they are here."""
    folder = hub.cached_model(start, weights=hub.is_hub_id(start))
    backend = config.transformers_backend
    is_loaded_by_transformers = backend is not None and backend.safe_reason
    if folder is None or is_loaded_by_transformers or is_bare(folder):
        return
    if (folder / "config.json").is_file():
        for note in headers_of(folder, sees=sees).notes:
            yield f"{folder.name if Path(start).exists() else start}: {note}"


def fetch(recipe: Recipe, *, weights: bool) -> None:
    """Downloads model, tokenizer, teacher and dataset of a recipe. Raises UserError.

    Without `weights`, as for a plan: config and tokenizer of models outside the table. Weights on this disk are checked
    by the headers of their files; a plan takes a local folder with a config alone.
    """
    models = [] if recipe.model.from_ is None else [(recipe.model, recipe.objective.spec.values)]
    if (teacher := recipe.objective.taught_by) is not None:
        models.append((Model(**{"from": teacher.model}), False))
    # A folder or a run is read as it is; a reward model of the Hub has its values in its weights. A plan needs neither.
    if weights:
        models += [(Model(**{"from": name}), False) for name in reward_models_of_hub(recipe)]
    for model, reward in models:
        if weights or published_config(str(model.from_)) is None:
            _fetch_model(str(model.from_), weights=weights)
        _refuse_bad_weights(model, weights=weights, reward=reward)
    if weights and recipe.tokenizer.from_ not in (None, "same"):
        hub.fetch_tokenizer(str(recipe.tokenizer.from_))
    if weights:
        fetch_text(recipe)


def _fetch_model(name: str, *, weights: bool) -> None:
    """Raises UserError; without the Hub, with the names of the table that resemble this one."""
    try:
        hub.fetch_model(name, weights=weights)
    except UserError as error:
        if weights or not (similar := similar_names(name)):
            raise
        fix = f"{error.fix}; shapes that are known without it: {', '.join(similar)}"
        raise UserError(error.problem, where=error.where, fix=fix, code=error.code) from error


def _refuse_bad_weights(model: Model, *, weights: bool, reward: bool) -> None:
    """Raises UserError for what `model.io.weights.read_model` would refuse: files that are missing, damaged or pickles,
    tensors of another shape than in config.json, integer weights.
    """
    name = str(model.from_)
    of_hub = hub.is_hub_id(name)
    folder = hub.cached_model(name, weights=of_hub)
    if folder is None or (not weights and not of_hub and is_bare(folder)):
        return
    if (folder / "config.json").is_file():
        find_tensors(folder)  # errors of the files themselves come first
    config = read_config(folder, model.implementation)
    if config.transformers_backend is not None and (
        model.load_with == "transformers" or config.transformers_backend.safe_reason
    ):
        return  # transformers itself checks the tensors
    stored_parameters(folder, replace(config, head="values") if reward else config, headless=reward)


def models_of(recipe: Recipe) -> list[str]:
    """Models that the recipe loads weights from."""
    start = [] if recipe.model.from_ is None else [recipe.model.from_]
    start += reward_models_of_hub(recipe)
    teacher = recipe.objective.taught_by
    return start if teacher is None else [*start, teacher.model]


def reward_models_of_hub(recipe: Recipe) -> list[str]:
    return [
        reward.model
        for reward in recipe.rewards
        if isinstance(reward, ModelReward) and hub.is_hub_id(reward.model)
    ]


def fetch_text(recipe: Recipe) -> None:
    """The datasets of `hub:ORG/NAME`, or the part that a glob names. Raises UserError."""
    data = recipe.data
    places = [(data.path, data.glob), *((source.path, source.glob) for source in data.sources)]
    held_out = data.validation if isinstance(data.validation, str) else None
    for path, glob in (*places, (held_out, data.glob)):
        if path is not None and path.startswith(hub.PREFIX):
            hub.fetch_dataset(path, glob=glob)


ROWS = 16  # of each source, checked for a plan
SKIPPED = 1000  # invalid rows after which a plan stops reading, with data.on_error=skip
FILES = 20  # of a built-in dataset


def prepared_facts(manifest: Manifest, recipe: Recipe, prepared: Path) -> DatasetFacts:
    """The facts of a prepared dataset in the recipe's layout.

    Raises UserError where the recipe trains what reads pictures, and the dataset has none.
    """
    data = recipe.data
    if not manifest.has_pictures:
        refuse_without_pictures(recipe)
    tower_weights, projector_weights = (
        _vision_weights(recipe.model.from_) if manifest.has_pictures else (0, 0)
    )
    learned = manifest.train.loss_tokens
    tokens = manifest.train.tokens
    laid = count_sequences(
        prepared, manifest, sequence_length=data.sequence_length, layout=data.layout
    )
    pictures = pictures_of_prepared(prepared, manifest, recipe, sequences=sum(laid.counts))
    rows = [
        count * part.weight for count, part in zip(laid.counts, manifest.train.parts, strict=True)
    ]
    has_prompts = manifest.kind == "prompts"
    return DatasetFacts(
        sequences_per_epoch=sum(map(round, rows)) * sequences_per_row(recipe),
        left_out=sum(source.dropped_units + source.all_masked_units for source in laid.packed),
        cut_short=sum(source.truncated_units for source in laid.packed),
        template=manifest.template,
        texts=manifest.texts,
        tokens=tokens,
        loss_share=1.0 if learned is None or not tokens else learned / tokens,
        prompts=sum(map(round, rows)) if has_prompts else 0,
        longest_prompt=longest_document(prepared, manifest) if has_prompts else 0,
        vocab_size=manifest.vocab_size,
        bos_id=manifest.bos_id,
        eos_id=manifest.eos_id,
        pad_id=manifest.pad_id,
        digest=manifest.tokens_digest,
        tower_weights=tower_weights,
        projector_weights=projector_weights,
        teacher_tower_weights=_teacher_tower_weights(recipe) if tower_weights else 0,
        pictures=pictures,
        alignment=prepared_alignment(recipe, manifest, prepared),
        teacher_scores=stored_scores(recipe, load_tokenizer(prepared)),
    )


def _vision_weights(name: str | None) -> tuple[int, int]:
    """The numbers of all that reads pictures in a model, and of its projector: by its files, or without weights by its
    config.json; 0 where it is not here.
    """
    folder = None if name is None else hub.cached_model(name)
    vision = None if folder is None else vision_of(stated_config(folder))
    if folder is None or vision is None:
        return 0, 0
    if is_bare(folder):
        tower = tower_in(vision.raw_config)
        return (0, 0) if tower is None else (tower.parameters, tower.projector_parameters)
    sizes = {name: math.prod(tensor.shape) for name, tensor in vision_tensors(folder).items()}
    of_projector = [size for name, size in sizes.items() if is_projector(vision.kind, name)]
    return sum(sizes.values()), sum(of_projector)


def _teacher_tower_weights(recipe: Recipe) -> int:
    """Those of the recipe's teacher, if it has one."""
    teacher = recipe.objective.taught_by
    return 0 if teacher is None else _vision_weights(teacher.model)[0]


def longest_document(prepared: Path, manifest: Manifest) -> int:
    """In tokens, of the training split."""
    bounds = open_split(prepared, "train", manifest).bounds
    return int(max(bounds[1:] - bounds[:-1], default=0))


def sequences_per_row(recipe: Recipe) -> int:
    """How many sequences are trained on for each that the dataset has: a prompt becomes several completions."""
    objective = recipe.objective
    if isinstance(objective, Rollouts):
        return objective.num_generations * objective.num_iterations
    return 1


def absent(recipe: Recipe) -> list[str]:
    """Paths of the recipe's dataset that do not exist on this disk."""
    held_out = recipe.data.validation
    fetched = [held_out] if isinstance(held_out, str) and held_out.startswith(PREFIX) else []
    paths = [recipe.data.path, *(source.path for source in recipe.data.sources), *fetched]
    return [path for path in paths if path is not None and not data_place(path).exists()]


def unread_data_notes(recipe: Recipe) -> list[str]:
    """Files of the recipe's folders that may be data and are not read, each with the key that reads it."""
    data = recipe.data
    rows = recipe.objective.spec.data_kind in ROW_FORMATS
    lines = [
        unread_files(source, rows=rows, key="in data.sources glob: ") for source in data.sources
    ]
    if data.path is not None:
        lines.append(
            unread_files(Source(path=data.path, glob=data.glob, format=data.format), rows=rows)
        )
    return [line for line in lines if line is not None]


def unread_columns(recipe: Recipe, manifest: Manifest | None = None) -> list[str]:
    """Columns that hold something, and keys of turns, that nothing reads: of all rows where `manifest` has them, else
    of the first rows of each source. A source that is not here, or whose rows cannot be read, has none: reading it
    reports that.
    """
    if manifest is not None:
        columns = dict.fromkeys(manifest.unread_columns)
        return ColumnUse({}, columns, dict.fromkeys(manifest.unread_turn_keys)).notes()
    kind = recipe.objective.spec.data_kind
    notes = list[str]()
    for source in sources_of(recipe.data):
        if not data_place(source.path).exists() or runs_code([source]):
            continue
        notes += [
            f"{Path(source.path).name}: {note}"
            for note in column_use(source, kind, rows=ROWS).notes()
        ]
    return notes


def left_out_parts(recipe: Recipe, manifest: Manifest | None = None) -> list[str]:
    """What the chat template leaves out of the conversations: of all where `manifest` has it, else of the first rows of
    each source, with a tokenizer that is on this disk. Rows that cannot be read or formatted have none: `prepare`
    reports that.
    """
    if manifest is not None:
        return left_out_notes(dict(manifest.template_parts))
    try:
        is_unread = bool(absent(recipe)) or runs_code(sources_of(recipe.data))
        tokenizer = None if is_unread else local_tokenizer(recipe)
        if tokenizer is None:
            return []
        rows = [
            row
            for source in streams(recipe)
            for row in islice(read_documents(source, on_error="skip", stats=_BadRowLimit()), ROWS)
        ]
        examples = [row.example for row in rows if row.example is not None]
        with Renderer(
            tokenizer,
            template=recipe.data.chat.template,
            train_on=train_on(recipe),
            verbatim=recipe.objective.spec.reads_text,
            variables=recipe.data.chat.template_kwargs,
            pictures=encoder_of(recipe),
        ) as renderer:
            renderer.encode_batch(examples)
            return left_out_notes(renderer.take_parts())
    except (UserError, _TooManyBadRows):
        return []


def guessed(recipe: Recipe) -> DatasetFacts | None:
    """From the files, as far as a plan reads them (`dataset_size`); None where they are not here.

    Raises UserError, also for what `prepare` would refuse of the first rows.
    """
    data = recipe.data
    refuse_layout(recipe)
    if absent(recipe) or runs_code(sources_of(recipe.data)):
        return None
    checked = _checked_rows(recipe)
    size = checked.size
    rows = max(1, size.sequences)
    longest_prompt = 0
    if isinstance(recipe.objective, Rollouts):
        room = data.sequence_length - recipe.objective.max_completion_length
        longest_prompt = max(1, min(size.longest, room))
    tower_weights, projector_weights = (
        _vision_weights(recipe.model.from_) if checked.pictures else (0, 0)
    )
    return DatasetFacts(
        sequences_per_epoch=rows * sequences_per_row(recipe),
        tokens=max(1, size.tokens),
        prompts=rows if longest_prompt else 0,
        longest_prompt=longest_prompt,
        vocab_size=planned_vocabulary(recipe),
        spread=size.spread,
        loss_share=size.loss_share if recipe.objective.spec.data_kind != "prompts" else 1.0,
        # Rows that are named must be counted, not estimated.
        left_out=sum(source.left_out for source in size.sources) if size.is_counted else 0,
        cut_short=sum(source.cut_short for source in size.sources) if size.is_counted else 0,
        template=checked.template,
        texts=checked.texts,
        tower_weights=tower_weights,
        projector_weights=projector_weights,
        teacher_tower_weights=_teacher_tower_weights(recipe) if tower_weights else 0,
        pictures=checked.pictures,
        alignment=checked.alignment,
        teacher_scores=stored_scores(recipe, local_tokenizer(recipe)),
        unreadable=checked.unreadable,
    )


class _TooManyBadRows(Exception):
    """Too many invalid rows: a plan stops reading."""


@dataclass
class _BadRowLimit(ReadStats):
    def skip(self, bad_row: BadRow) -> None:
        super().skip(bad_row)
        if self.skipped >= SKIPPED:
            raise _TooManyBadRows


class _CheckedRows(NamedTuple):
    """`template`: where the chat template comes from. `size`: of the training split, with its `pictures`. `unreadable`:
    rows that are left out, as a sentence.
    """

    template: str
    texts: Texts
    size: DatasetSize
    pictures: PictureFacts | None = None
    alignment: TextAlignment | None = None
    unreadable: str = ""


def _unreadable(counters: Sequence[ReadStats], samples: Sequence[RowSample]) -> str:
    """The rows among those that were read which data.on_error=skip leaves out, as a sentence."""
    skipped = sum(counter.skipped for counter in counters)
    if not skipped:
        return ""
    first = next(counter.first_skipped for counter in counters if counter.skipped)
    read = skipped + sum(len(sample.documents) for sample in samples)
    part = "" if all(sample.is_whole for sample in samples) else "the first "
    verb = "is" if skipped == 1 else "are"
    return f"{skipped:,} of {part}{counted(read, 'rows')} {verb} left out, the first at {first}"


def _checked_rows(recipe: Recipe) -> _CheckedRows:
    """By the first rows of each source.

    Raises the UserError that `prepare` would raise for them.
    """
    data = recipe.data
    corpora = streams(recipe)

    # The first rows, as documents. A source has one kind.
    counters = [_BadRowLimit() for _ in corpora]
    try:
        samples = [
            sample_rows(corpus, files=FILES, on_error=data.on_error, stats=counter)
            for corpus, counter in zip(corpora, counters, strict=True)
        ]
    except _TooManyBadRows:
        return _CheckedRows("", "none", DatasetSize((), (), OF_BYTES))
    first_documents = [sample.documents[:ROWS] for sample in samples]
    kinds = kinds_among([rows[0] if rows else None for rows in first_documents])
    for kind, rows in zip(kinds.sources, first_documents, strict=True):
        for document in rows:
            refuse_mixture(document, kind)
    num_trained = len(corpora) - len(validation_datasets(data, recipe.objective.spec.data_kind))
    trained = first_documents[:num_trained]
    if all(
        len(rows) < ROWS and not any(row.content or row.tokens for row in rows) for rows in trained
    ):
        raise no_documents(corpora, 0, "")
    documents = [document for rows in first_documents for document in rows]

    # The tokenizer, and that of the teacher, must know their tokens.
    spec = recipe.tokenizer.train
    if spec is not None:
        refuse_few_tokens(spec)
    tokenizer = local_tokenizer(recipe) or _expected(recipe)
    if (
        tokenizer is None
        and "train" in tokenizer_spec(recipe)
        and all(row.tokens is not None for row in documents)
    ):
        raise untokenised()
    for document in documents:
        if document.tokens and tokenizer is not None:
            checked_tokens(document, tokenizer)
    # The chat template must format the conversations among them.
    examples = [row.example for row in documents if row.example is not None]
    alignment = None
    teacher = teacher_folder(recipe)
    if tokenizer is not None and teacher is not None:
        refuse_teacher_length(read_config(teacher), recipe.data.sequence_length, where=str(teacher))
        alignment = alignment_of(recipe, teacher, tokenizer, map(_prompt_text, examples))
    measured = [
        {
            number: example
            for number in sample.encoded_rows
            if (example := sample.documents[number].example) is not None
        }
        for sample in samples[:num_trained]
    ]
    template, encoded = _template(recipe, kinds, examples, measured, tokenizer)
    size = dataset_size(
        recipe,
        samples[:num_trained],
        kinds.sources[:num_trained],
        kinds.shard_kind,
        tokenizer,
        encoded,
    )

    # Rows that were not looked at have pictures like these.
    num_rows = sum(source.rows for source in size.sources)
    pictures = pictures_of_rows(
        recipe,
        [
            (len(text.ids), text.pictures)
            for of_source in encoded
            for example in of_source.values()
            for text in example
        ],
        kind=kinds.shard_kind,
        rows_per_document=num_rows / max(1, sum(map(len, encoded))),
        sequences=size.sequences,
    )
    unreadable = _unreadable(counters, samples)
    return _CheckedRows(template, kinds.texts, size, pictures, alignment, unreadable)


def _prompt_text(example: Example) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    return "\n".join(message.content for message in example.prompt)


def _template(
    recipe: Recipe,
    kinds: Kinds,
    examples: list[Example],
    measured: Sequence[Mapping[int, Example]],
    tokenizer: Tokenizer | None,
) -> tuple[str, list[dict[int, EncodedExample]]]:
    """The origin of the chat template, "" where unknown, and the tokens of the `measured` examples, by their number.

    Raises UserError for conversations without a template, for a template that cannot be used, and for those of
    `examples` that it refuses. With a tokenizer that is not trained yet nothing is rendered.
    """
    template = recipe.data.chat.template
    stays = recipe.objective.spec.reads_text
    config = {} if tokenizer is None else tokenizer.config
    unknown = tokenizer is None and "train" not in tokenizer_spec(recipe)
    is_formatted = not unknown and kinds.formatted(template, config, verbatim=stays)
    encoded: list[dict[int, EncodedExample]] = [{} for _ in measured]
    if tokenizer is not None and examples:
        with Renderer(
            tokenizer,
            template=template,
            train_on=train_on(recipe),
            verbatim=stays,
            variables=recipe.data.chat.template_kwargs,
            pictures=encoder_of(recipe),
        ) as renderer:
            for checked in renderer.encode_batch(examples):
                if isinstance(checked, BadRow) and recipe.data.on_error == "stop":
                    raise checked
            # A row that `prepare` refuses later is not measured.
            for of_source, rows in zip(encoded, measured, strict=True):
                for number, result in zip(
                    rows, renderer.encode_batch([*rows.values()]), strict=True
                ):
                    if not isinstance(result, BadRow):
                        of_source[number] = result
    origin = find_template(template, config).description if is_formatted else ""
    return origin, encoded


def local_tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The recipe's tokenizer, where it is on this disk. Raises UserError for one that cannot be read."""
    spec = tokenizer_spec(recipe)
    folder = _folder_of(spec)
    if folder is None:
        return None
    files = sorted(folder.glob("*")) if folder.is_dir() else [folder]
    if folder.is_dir() and not any(
        path.name in TOKENIZER_FILES or path.suffix == ".model" for path in files
    ):
        return None
    stamps = tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return _loaded(folder, stamps, tuple(spec.get("additional_special_tokens", ())))


def _folder_of(spec: dict[str, Any]) -> Path | None:
    name = spec.get("from")
    return (
        cached_model(name)
        if name is not None and (is_hub_id(name) or is_random(name) or Path(name).exists())
        else None
    )


def _expected(recipe: Recipe) -> Tokenizer | None:
    """Raises UserError for a folder without a tokenizer; a folder with a config alone needs none."""
    spec = tokenizer_spec(recipe)
    folder = _folder_of(spec)
    if folder is None and "from" in spec and recipe.model.vocab_size is None:
        cached_model(spec["from"])  # its error
    if folder is None or (spec["from"] == recipe.model.from_ and is_bare(folder)):
        return None
    return load_tokenizer(folder)


@lru_cache(maxsize=2)  # a plan and its suggestions ask many times
def _loaded(
    folder: Path, stamps: tuple[tuple[str, int, int], ...], added: tuple[str, ...]
) -> Tokenizer:
    del stamps
    return load_tokenizer(folder).with_tokens(added)


def planned_vocabulary(recipe: Recipe) -> int | None:
    """The vocabulary size before the dataset is prepared; None where only the Hub has the tokenizer."""
    spec = tokenizer_spec(recipe)
    if "train" in spec:
        return int(spec["train"]["vocab_size"])
    # planned from our table
    if recipe.model.from_ is not None and cached_model(recipe.model.from_) is None:
        added = len(recipe.tokenizer.additional_special_tokens)
        return known_config(recipe.model.from_).vocab_size + added if added else None
    if recipe.model.from_ is None and recipe.model.vocab_size is None:
        refuse_absent(spec["from"])
    tokenizer = local_tokenizer(recipe)
    return None if tokenizer is None else tokenizer.vocab_size


def refuse_absent(name: str) -> None:
    """Raises UserError for a tokenizer that a new model takes its vocabulary from and that is not on this disk."""
    path = Path(name)
    if path.exists():
        return
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(
            "the tokenizer does not exist, and the model takes its vocabulary from it",
            where=f"tokenizer.from: {name}",
            fix="correct the path, or set model.vocab_size to plan without the tokenizer",
            code=2,
        )
