"""Commands on conversations with pictures, as a person types them."""

import json
import re

import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.core.errors import UserError
from pictures_for_tests import BLUE, RED, TEXT, png, prepared_rows, row


def typed(*words: str) -> str:
    result = CliRunner().invoke(cli, list(words), catch_exceptions=False, standalone_mode=False)
    return result.output


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """A recipe on rows about pictures, beside the model that it names."""
    monkeypatch.chdir(tmp_path)
    prepared_rows(tmp_path, [row(RED, TEXT, BLUE, answer="red"), row(TEXT, answer="what?")])
    return tmp_path


def test_preview_tells_size_and_tokens_of_each_picture_and_keeps_its_text_short(workshop):
    (workshop / "rows" / "blue.png").write_bytes(png(96, 64, "blue"))
    output = typed("prepare", "recipe.yaml", "--preview", "2")
    lines = output.splitlines()
    # 32 pixels of a side are one token of this processor.
    assert "picture 1  40 x 60 pixels · 2 tokens" in lines
    assert "picture 2  96 x 64 pixels · 6 tokens" in lines
    assert sum(line.startswith("picture ") for line in lines) == 2
    shown = output.replace("¦", "")
    assert "<|vision_start|><|image_pad|> x 2 <|vision_end|>Color?" in shown
    assert "<|vision_start|><|image_pad|> x 6 <|vision_end|>" in shown
    assert output.count("<|image_pad|>") == 2
    assert "⟦red<|im_end|>" in shown
    assert "what?" in shown and shown.count("⟦") == 3  # the legend has one


def test_a_preview_as_a_page_shows_pictures_beside_what_is_trained_on(workshop):
    (workshop / "rows" / "train.jsonl").write_text(
        json.dumps(row(RED, {"type": "text", "text": "<b>Color?</b>"}, answer="red")) + "\n"
    )
    output = typed("prepare", "recipe.yaml", "--preview", "1", "--html", "rows.html")
    assert "page       rows.html: 1 document" in output
    page = (workshop / "rows.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == 1
    assert "40 x 60 pixels · 2 tokens" in page
    # Markup of rows is text, nothing is fetched, and the answer is marked.
    assert "<b>Color?</b>" not in page.replace("</span><span>", "") and "&lt;" in page
    assert "default-src 'none'" in page and "img-src data:" in page and "<script" not in page
    learned = "".join(re.findall(r'<span class="learned">([^<]*)</span>', page))
    assert learned.removeprefix("with a colored background").startswith("red&lt;|im_end|&gt;")
    assert "Color" not in learned


def test_a_page_without_a_preview_is_refused(workshop):
    with pytest.raises(UserError, match="what --preview shows"):
        typed("prepare", "recipe.yaml", "--html", "rows.html")


def test_preview_tells_that_a_text_with_pictures_is_left_out_and_not_cut(workshop):
    output = typed("prepare", "recipe.yaml", "--preview", "2", "data.sequence_length=32")
    assert "left out: longer than 32, and a text with pictures is never cut" in output
    assert "truncated" not in output.splitlines()[0]


def test_preview_has_the_pictures_of_both_sides_of_a_pair(workshop):
    pair = {
        "prompt": [{"role": "user", "content": [RED, TEXT]}],
        "chosen": [{"role": "assistant", "content": "red"}],
        "rejected": [{"role": "assistant", "content": "blue"}],
    }
    (workshop / "rows" / "train.jsonl").write_text(json.dumps(pair) + "\n")
    output = typed("prepare", "recipe.yaml", "--preview", "1", "objective.kind=dpo")
    assert "(chosen)" in output and "(rejected)" in output
    assert output.count("picture 1  40 x 60 pixels · 2 tokens") == 2


def test_prepare_tells_why_a_long_conversation_with_pictures_is_left_out(workshop):
    long = row(RED, {"type": "text", "text": "z" * 200}, answer="red")
    rows = [long, *[row(TEXT, answer=f"what {number}") for number in range(4)]]
    (workshop / "rows" / "train.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in rows)
    )
    output = typed("prepare", "recipe.yaml", "--check", "data.sequence_length=128")
    assert "left out: 1 conversation with pictures, which do not fit" in output
    assert "left out: 1 conversation with pictures, longer than data.sequence_length" in output
    assert "masked" not in output.partition("left out")[2]


def test_preview_shows_a_row_whose_picture_is_missing_and_goes_on(workshop):
    gone = row({"type": "image", "image": "gone.png"}, TEXT)
    (workshop / "rows" / "train.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in (gone, row(RED, TEXT, answer="red")))
    )
    output = typed("prepare", "recipe.yaml", "--preview", "2", "data.on_error=skip")
    assert "left out: names a picture that is not there" in output
    assert "⟦red<|im_end|>" in output.replace("¦", "")


@pytest.mark.parametrize("preview", [(), ("--preview", "1")])
def test_a_dataset_of_which_every_row_is_skipped_names_the_cure_of_the_first(workshop, preview):
    link = row({"type": "image", "image": "https://a.b/c.png"}, TEXT)
    (workshop / "rows" / "train.jsonl").write_text(json.dumps(link) + "\n")
    with pytest.raises(
        UserError, match=r"1 row skipped, the first: .* is on the network"
    ) as caught:
        typed("prepare", "recipe.yaml", "data.on_error=skip", *preview)
    assert caught.value.fix.startswith("download it into the dataset's folder")


def test_check_takes_the_same_question_about_another_picture_for_another_row(workshop):
    rows = [row(picture, TEXT, answer="red") for picture in (RED, BLUE, RED)]
    (workshop / "rows" / "train.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in rows)
    )
    assert "repeated   1 of 3 conversations" in typed("prepare", "recipe.yaml", "--check")
