"""What a teacher's tokenizer means for a plan: texts that both read alike, and scores of a file. No torch."""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer
from bloomery.data.chat.tool_forms import ToolFormat, form_name, tool_format
from bloomery.data.prompts import Prompt, Prompts
from bloomery.data.shards import Manifest
from bloomery.data.tokenizer.alignment import aligned_spans, continuing_ids, token_ends
from bloomery.data.tokenizer.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from bloomery.data.top_scores import KEY, common_header, scores_files
from bloomery.facts.limits import refuse_teacher_tokenizer, tokenizer_difference
from bloomery.hub import cached_model
from bloomery.model.io.stored import is_bare
from bloomery.plan.types import StoredScores, TextAlignment
from bloomery.recipe.objectives import TaughtByDivergence
from bloomery.recipe.schema import Recipe

TEXTS = 200  # of the sample
BY_SPANS = (
    "set objective.estimator=sampled, which compares the probabilities of spans of text, or choose a teacher of the"
    " same family, with the same tokenizer"
)
BY_COMPLETIONS = (
    "choose a teacher of the same family, with the same tokenizer, or set objective.kind=on_policy_distill and"
    " objective.estimator=sampled"
)


def teacher_folder(recipe: Recipe) -> Path | None:
    """Where the teacher's tokenizer is; None without another model as teacher, and for one that is only on the Hub."""
    taught_by = recipe.objective.taught_by
    folder = None if taught_by is None else cached_model(taught_by.model)
    if folder is None or any((folder / name).is_file() for name in TOKENIZER_FILES):
        return folder
    return None if is_bare(folder) else folder


def alignment_of(
    recipe: Recipe, folder: Path, tokenizer: Tokenizer, texts: Iterable[str]
) -> TextAlignment | None:
    """Of the first texts; None where the teacher of this folder has the same tokenizer.

    Raises UserError for another tokenizer where whole vocabularies would be compared, and for one whose chat template
    writes calls of tools in another form.
    """
    teacher = load_tokenizer(folder)
    if tokenizer_difference(teacher, tokenizer) is None:
        return None
    objective = recipe.objective
    if not isinstance(objective, TaughtByDivergence):
        refuse_teacher_tokenizer(teacher, tokenizer, where=str(folder), fix=BY_COMPLETIONS)
    elif objective.estimator == "full":
        refuse_teacher_tokenizer(teacher, tokenizer, where=str(folder), fix=BY_SPANS)
    if recipe.tools:
        assert isinstance(objective, TaughtByDivergence), "others were refused"
        forms = [
            _tool_format(tokenizer, recipe.data.chat.template, {}),
            _tool_format(teacher, None, objective.teacher_template_kwargs),
        ]
        refuse_other_calls(*forms)
    num_tokens = num_aligned = num_alone = 0
    for text in islice(texts, TEXTS):
        ids = continuing_ids(tokenizer, text)
        num_tokens += len(ids)
        teacher_ids = continuing_ids(teacher, text)
        for span in aligned_spans(token_ends(tokenizer, ids), token_ends(teacher, teacher_ids)):
            length = span.end - span.start
            num_aligned += length
            num_alone += length == 1 == span.other_end - span.other_start
    return TextAlignment(tokens=num_tokens, aligned=num_aligned, alone=num_alone)


def _tool_format(
    tokenizer: Tokenizer, template: str | None, variables: Mapping[str, bool | int | float | str]
) -> ToolFormat:
    """How a chat template writes calls. Raises UserError for one without tools."""
    with Renderer(
        tokenizer,
        template=template,
        train_on="assistant",
        variables=variables,
        variables_key="objective.teacher_template_kwargs",
    ) as renderer:
        return tool_format(renderer.rendered)


def refuse_other_calls(model: ToolFormat, teacher: ToolFormat) -> None:
    """Raises UserError where a teacher with another tokenizer would write calls of tools in another form: it would
    teach the model one that nobody reads.
    """
    if teacher != model:
        raise UserError(
            f"the teacher's chat template writes calls of tools as {form_name(teacher)}, and the model's as"
            f" {form_name(model)}",
            where="objective.teacher",
            fix="set data.chat.template to the file of the teacher's chat template, or choose a teacher whose template"
            " writes calls as the model's does",
        )


def prepared_alignment(recipe: Recipe, manifest: Manifest, prepared: Path) -> TextAlignment | None:
    """`alignment_of` the prompts of a prepared dataset; without prompts its tokenizer is refused, or the same."""
    folder = teacher_folder(recipe)
    if folder is None:
        return None
    prompts: Iterable[Prompt] = ()
    if manifest.kind == "prompts":
        prompts = Prompts(prepared, seed=0)
    return alignment_of(recipe, folder, load_tokenizer(prepared), map(_text, prompts))


def stored_scores(recipe: Recipe, tokenizer: Tokenizer | None) -> StoredScores | None:
    """The files of a teacher's scores, if the objective has them. `tokenizer`: of the dataset, None if it is unknown.

    Raises UserError for scores of another tokenizer, and for files that are none.
    """
    pattern = recipe.objective.stored_scores
    if pattern is None:
        return None
    paths = scores_files(pattern)
    header = common_header(paths)
    if tokenizer is not None and tokenizer.hash != header.tokenizer:
        raise UserError(
            "the scores are of another tokenizer than the dataset",
            where=KEY,
            fix="set tokenizer.from to the model that wrote the scores, or train a model of its family",
        )
    size = sum(path.stat().st_size for path in paths)
    return StoredScores(top=header.top, token_bytes=header.token_bytes, bytes=size)


def _text(prompt: Prompt) -> str:
    if prompt.messages is None:
        return prompt.text
    contents = (turn.get("content") for turn in prompt.messages)
    return "\n".join(content for content in contents if isinstance(content, str))
