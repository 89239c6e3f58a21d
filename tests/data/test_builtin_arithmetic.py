"""The built-in sums: one right answer to each prompt, and three to train a base model on."""

from bloomery.data.prepare.prepare import prepare
from bloomery.data.prompts import Prompts
from bloomery.data.sources.documents import ReadStats, open_datasets, read_documents
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Data


def rows(required_format):
    (dataset,) = open_datasets(Data(builtin="arithmetic"), required_format)
    documents = list(read_documents(dataset, on_error="stop", stats=ReadStats()))
    wires = sum(len(document.wire) for document in documents)
    assert dataset.text_bytes == wires
    return [document.example for document in documents]


def total(prompt):
    first, second = prompt.removesuffix("=").split("+")
    return int(first) + int(second)


def test_every_prompt_has_its_sum():
    prompts = rows("prompts")
    assert len({example.prompt for example in prompts}) == len(prompts) == 400
    for example in prompts:
        assert example.columns == {"answer": str(total(example.prompt))}


def test_one_of_three_answers_is_right():
    examples = rows("sft")
    answers = {}
    for example in examples:
        answers.setdefault(example.prompt, []).append(int(example.responses[0]))
    assert len(answers) == 400
    for prompt, numbers in answers.items():
        assert len(numbers) == 3
        assert total(prompt) in numbers


def test_prompts_are_prepared_with_a_token_for_each_digit(tmp_path):
    base_recipe = load_recipe("demo-rl-base")
    prepare(base_recipe, tmp_path / "base")
    loaded_recipe = load_recipe(
        "demo-rl", [f"model.from={tmp_path / 'base'}", f"tokenizer.from={tmp_path / 'base'}"]
    )
    prepare(loaded_recipe, tmp_path / "prompts")
    prompts = Prompts(tmp_path / "prompts", seed=0)
    held_out = Prompts(tmp_path / "prompts", seed=0, split="validation")
    assert len(prompts) + len(held_out) == 400
    assert not {prompt.text for prompt in prompts} & {prompt.text for prompt in held_out}
    for prompt in held_out:
        assert len(prompt.ids) == len(prompt.text) + 1  # the token that begins each text
