"""Samples of prompts with images: what they see at each step, and how the run's pages show them."""

import re

import pytest
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import find_model
from bloomery.infer.picture_prompts import open_eyes
from bloomery.model.configs import read_config
from bloomery.monitor.events import EventLog, Sampled
from bloomery.plan.types import VisionPlan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.objectives import Sft
from bloomery.recipe.schema import ImagePrompt, NoAdapter
from bloomery.report import write_report
from bloomery.train.evaluation.answers import open_prompts
from bloomery.train.evaluation.answers import samples as samples_of
from pictures_for_tests import BLUE, RED, TEXT, answer_of_transformers, png, prepared_rows, row

ROWS = [row(RED, TEXT, answer="red"), row(BLUE, TEXT, answer="blue")] * 8
SAMPLE = {"max_new_tokens": 6, "temperature": 0.0, "top_p": 1.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains all of the model, and answers in the middle and at the end."""
    folder = tmp_path_factory.mktemp("samples")
    prepared = prepared_rows(folder, ROWS, weights=True)
    (folder / "a photo.png").write_bytes(png(600, 900, "red"))
    prompts = (
        "Text?",
        ImagePrompt(image=str(folder / "a photo.png"), text="Color?"),
        ImagePrompt(image=str(folder / "rows" / "blue.png"), text="Color?"),
    )
    base = folder / "base"
    plan = tiny_plan(
        prepared,
        config=read_config(base),
        model={"source": base},
        data={"sequence_length": 256, "layout": "padded"},
        train={"steps": 32, "micro_batch_size": 4, "accumulation": 1, "tokens_per_step": 1024},
        eval={"every_steps": 16},
        checkpoint={"every_steps": 16},
        sample={"prompts": prompts, **SAMPLE},
    )
    rates = {"learning_rate": 0.01, "projector_learning_rate": 0.01}
    plan = plan.model_copy(
        update={
            "objective": Sft(kind="sft"),
            "adapter": NoAdapter(),
            "vision": VisionPlan(train="all", **rates),
        }
    )
    run = Run(plan, folder / "run")
    with EventLog(run.folder / "events.jsonl") as log:
        for event in run.events:
            log(event)
    run.plan = plan
    return run


def test_samples_see_their_image_with_the_tower_of_their_step(run):
    samples = run.of(Sampled)
    assert [(sample.step, sample.prompt) for sample in samples] == [
        (step, text) for step in (16, 32) for text in ("Text?", "Color?", "Color?")
    ]
    assert [sample.completion for sample in samples[4:]] == ["red", "blue"]
    folder = run.folder.parent
    pictures = [(folder / "a photo.png").read_bytes(), (folder / "rows/blue.png").read_bytes()]
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Color?"}]}]
    for step, first in ((16, 1), (32, 4)):
        checkpoint = run.folder / "checkpoints" / f"step-{step:08d}"
        for sample, picture in zip(samples[first : first + 2], pictures, strict=True):
            answer = answer_of_transformers(checkpoint, turns, [picture], 6, least=0)
            assert sample.chat and sample.completion == answer


def test_the_tower_reads_an_image_again_at_each_step(run):
    """It may have been trained in between."""
    prepared = run.folder.parent / "prepared-stop"
    tokenizer = load_tokenizer(prepared)
    plan = run.plan
    prompts = open_prompts(
        plan.sample.prompts, tokenizer, prepared, reads_text=False, run_dir=run.folder
    )
    files = find_model(run.folder / "checkpoints" / "step-00000032")
    model = load_used(files, Use("cpu"))
    open_eyes(model, files).close()
    calls = []
    model.vision.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        list(samples_of(model, tokenizer, prompts, sample=plan.sample, train=plan.train))
    assert len(calls) == 4


def test_the_report_shows_each_image_once(run):
    samples = run.of(Sampled)
    assert samples[0].image == "" and re.fullmatch(
        r"samples/a-photo-320x480-[0-9a-f]{8}\.jpg", samples[1].image
    )
    page = write_report(run.folder).read_text()
    for image in (samples[1].image, samples[2].image):
        assert page.count(f'id="{image}"') == 1 and page.count(f'href="#{image}"') == 2
    assert page.count("data:image/jpeg;base64,") == 2
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in page
    # Pages show what the run wrote, and nothing else that an event names.
    (run.folder / samples[2].image).unlink()
    page = write_report(run.folder).read_text()
    assert page.count("data:image/jpeg;base64,") == 1 and f"{samples[2].image} is missing" in page


def test_images_that_would_not_be_seen_are_refused(tmp_path):
    prepared = prepared_rows(tmp_path, [row(TEXT, answer="a"), row(TEXT, answer="b")])
    blind = [ImagePrompt(image="a.png", text="Color?")]
    tokenizer = load_tokenizer(prepared)

    def refused(prompts, prepared) -> UserError:
        with pytest.raises(UserError) as caught:
            open_prompts(prompts, tokenizer, prepared, reads_text=False, run_dir=tmp_path)
        return caught.value

    assert "no conversations with pictures" in refused(blind, prepared).problem
    (tmp_path / "seeing").mkdir()
    seeing = prepared_rows(tmp_path / "seeing", ROWS)
    missing = refused([ImagePrompt(image="none.png", text="Color?")], seeing)
    assert "sample.prompts, none.png" in missing.where and "cannot be read" in missing.problem


def test_paths_begin_at_the_recipe(tmp_path):
    text = (
        "model: {from: base}\ndata: {path: rows, pictures: scans}\nobjective: {kind: sft}\n"
        "sample: {prompts: [a, {image: b.png, text: c}]}\n"
    )
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert recipe.data.pictures == str(tmp_path / "scans")
    first, second = recipe.sample.prompts
    assert first == "a" and second == ImagePrompt(image=str(tmp_path / "b.png"), text="c")
