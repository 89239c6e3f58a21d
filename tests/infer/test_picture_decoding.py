"""Prompts with pictures are decoded as by transformers: alone, beside others, continued, and as rollouts."""

import base64

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from bloomery.core.errors import UserError
from bloomery.data.chat.render import chat_format
from bloomery.data.examples import PICTURE, Message
from bloomery.data.pictures.prompts import PicturePrompt
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.completions import sample_completions
from bloomery.infer.decode import RunningBatch
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import find_model
from bloomery.infer.past import Past
from bloomery.infer.picture_prompts import open_eyes
from bloomery.infer.sampling import Sampling
from bloomery.model.compiled_step import compile_step
from pictures_for_tests import png, save_base

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "smolvlm", "mistral3", "internvl")
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


def reference(color: str, width: int = 40, height: int = 60) -> str:
    content = base64.b64encode(png(width, height, color)).decode()
    return "data:image/png;base64," + content


def question(*references: str, text: str = "Color?") -> Message:
    return Message("user", PICTURE * len(references) + text, pictures=references)


class Seeing:
    """A tiny model with open eyes: `prompt` encodes a conversation for it."""

    def __init__(self, folder, stack):
        files = find_model(folder)
        self.decoder = load_used(files, Use("cpu"), decodes=True)
        self.encoder = open_eyes(self.decoder, files)
        self.form = stack(chat_format(load_tokenizer(folder), None, self.encoder))

    def prompt(self, *messages: Message) -> list[int]:
        return self.form.encode(messages)


@pytest.fixture
def stack():
    from contextlib import ExitStack

    with ExitStack() as opened:
        yield opened.enter_context


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, tmp_path):
    save_base(kind, tmp_path / "base", weights=True)
    return tmp_path / "base"


def theirs(kind, folder, prompt, count):
    """The tokens of transformers, and the logits after the prompt."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    token = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    ids = torch.tensor([list(prompt)])
    of_pictures = (ids == token).long()
    inputs = {}
    for name in prompt.pictures[0].inputs:
        each = [picture.inputs[name] for picture in prompt.pictures]
        if kind == "smolvlm":  # all squares of a prompt are one list
            inputs[name] = torch.cat(each, 1)
        elif name == "pixel_values" and kind == "mistral3":
            sides = [max(one.shape[axis] for one in each) for axis in (2, 3)]
            inputs[name] = torch.cat(
                [
                    torch.nn.functional.pad(
                        one, (0, sides[1] - one.shape[3], 0, sides[0] - one.shape[2])
                    )
                    for one in each
                ]
            )
        else:
            inputs[name] = torch.cat(each)
    for name in ("num_soft_tokens_per_image", "num_patches", "num_crops", "rows", "cols"):
        inputs.pop(name, None)
    if kind.startswith(("qwen", "gemma4")):
        inputs["mm_token_type_ids"] = of_pictures
    if kind == "gemma3":
        inputs["token_type_ids"] = of_pictures
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **inputs,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences[0, ids.shape[1] :].tolist(), torch.cat(made.logits)


def greedy(batch, prompts, count):
    """The tokens of each prompt, which are decoded together."""
    sampling = Sampling(max_new_tokens=count, temperature=0.0)
    texts = [batch.add(prompt, sampling) for prompt in prompts]
    while batch.texts:
        list(batch.step())
    return [text.new for text in texts]


def logits_along(past, prompt, tokens):
    """[count, V]: after the prompt and after each token but the last."""
    unread = past.reuse(prompt, len(prompt) + len(tokens))
    rows = [past.read([unread])]
    rows += [past.read([[token]]) for token in tokens[:-1]]
    return torch.cat(rows)


def test_tokens_and_logits_are_those_of_transformers(kind, folder, stack):
    seeing = Seeing(folder, stack)
    prompt = seeing.prompt(
        question(reference("red"), reference("blue", 90, 50)),
        Message("assistant", "red"),
        question(reference("green", 33, 33), text="And this?"),
    )
    assert isinstance(prompt, PicturePrompt) and len(prompt.pictures) == 3
    tokens, logits = theirs(kind, folder, prompt, 5)
    assert_close(logits_along(Past(seeing.decoder), prompt, tokens), logits, rtol=0, atol=1e-4)


@pytest.mark.sampled(3)
def test_slots_pieces_and_what_was_read_before_change_nothing(kind, folder, stack):
    seeing = Seeing(folder, stack)
    compile_step(seeing.decoder, lambda _: None)
    first = question(reference("red"), text="What?")
    prompts = [
        seeing.prompt(first),
        seeing.prompt(question(reference("blue"), text="What?")),
        seeing.prompt(Message("user", "No picture at all.")),
        seeing.prompt(first, Message("assistant", "red"), question(reference("blue"))),
    ]
    alone = [greedy(RunningBatch(Past(seeing.decoder)), [prompt], 5)[0] for prompt in prompts]
    past = Past(seeing.decoder, 4, 512)
    batch = RunningBatch(past, piece=7)
    assert greedy(batch, prompts, 5) == alone
    # Again in used slots: what is equal is not read twice, and another picture in the same place is no equal one.
    assert greedy(batch, [*prompts[1:], prompts[0]], 5) == [*alone[1:], alone[0]]
    single = Past(seeing.decoder)
    for prompt, tokens in zip([*prompts, prompts[0]], [*alone, alone[0]], strict=True):
        assert greedy(RunningBatch(single), [prompt], 5) == [tokens]


@pytest.mark.sampled(3)
def test_completions_do_not_depend_on_slots(kind, folder, stack):
    seeing = Seeing(folder, stack)
    compile_step(seeing.decoder, lambda _: None)
    prompts = [
        seeing.prompt(question(reference("red"))),
        seeing.prompt(Message("user", "Text.")),
        seeing.prompt(question(reference("blue"))),
    ]

    def uniforms(completions):
        numbers = [
            (7 * each.prompt + 3 * each.number + len(each.ids)) % 11 / 11 for each in completions
        ]
        return torch.tensor(numbers, dtype=torch.float64)

    sampling = Sampling(max_new_tokens=5, temperature=1.0)
    by_slots = [
        sample_completions(seeing.decoder, prompts, 2, sampling, uniforms, slots=slots)
        for slots in (1, 4)
    ]
    assert [each.ids for each in by_slots[0]] == [each.ids for each in by_slots[1]]
    # The log-probabilities of the first token are those of the prompt with its own picture.
    past = Past(seeing.decoder)
    for completion in by_slots[0]:
        prompt = prompts[completion.prompt]
        logits = past.read([past.reuse(prompt, len(prompt))])
        logp = logits.log_softmax(-1)[0, completion.ids[0]]
        assert float(logp) == pytest.approx(completion.logps[0], abs=1e-5)


@pytest.mark.sampled(3)
def test_the_picture_matters(folder, stack):
    seeing = Seeing(folder, stack)
    rows = []
    for color in ("red", "blue"):
        prompt = seeing.prompt(question(reference(color)))
        past = Past(seeing.decoder)
        rows.append(past.read([past.reuse(prompt, len(prompt))]))
    assert float((rows[0] - rows[1]).abs().max()) > 1e-3


def test_a_model_that_reads_text_says_so(tmp_path, stack):
    save_base("qwen3_vl", tmp_path / "base", weights=True)
    (tmp_path / "base" / "preprocessor_config.json").unlink()
    (tmp_path / "base" / "processor_config.json").unlink(missing_ok=True)
    files = find_model(tmp_path / "base")
    decoder = load_used(files, Use("cpu"), decodes=True)
    with pytest.raises(UserError, match="reads text, and no pictures"):
        open_eyes(decoder, files)
    form = stack(chat_format(load_tokenizer(tmp_path / "base"), None))
    with pytest.raises(UserError, match="the model reads text alone"):
        form.encode([question(reference("red"))])


def test_a_damaged_picture_is_named(tmp_path, stack):
    save_base("qwen3_vl", tmp_path / "base", weights=True)
    seeing = Seeing(tmp_path / "base", stack)
    with pytest.raises(UserError, match="holds a picture that is none of JPEG"):
        seeing.prompt(question("data:image/png;base64,aGVsbG8="))
