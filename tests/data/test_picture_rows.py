"""Pictures of rows as other tools write them: where each is, and the sentence for what is none."""

import os
from base64 import b64encode
from pathlib import Path

import pytest

from bloomery.core.units import MIB
from bloomery.data.examples import PICTURE, BadRow
from bloomery.data.pictures import references
from bloomery.data.pictures.references import OWN_DATA, encoded_bytes, located
from bloomery.data.sources.detection import format_of_row
from bloomery.data.sources.formats import read_example
from bloomery.facts.columns import ColumnUse
from pictures_for_tests import png

CONTENT = png(96, 64, "green")
BASE64 = b64encode(CONTENT).decode()
TEXT = {"type": "text", "text": "Color?"}
ANSWER = {"role": "assistant", "content": "red"}


def asked(*parts: object, **columns: object) -> dict:
    """A row with one question; a single text stays a text."""
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    return {"messages": [{"role": "user", "content": content}, ANSWER], **columns}


def read(row: dict, use: ColumnUse | None = None):
    format, columns = format_of_row(row, {}, required_format="sft", plain=False)
    return read_example(row, format=format, columns=columns, where="a.jsonl:1", use=use)


def pictures_of(row: dict) -> tuple[str, list[str]]:
    """The text of the question, and its pictures."""
    example = read(row)
    prompt = example.prompt if isinstance(example.prompt, tuple) else ()
    turn = next(turn for turn in (*prompt, *example.responses[0]) if turn.pictures)
    return turn.content, list(turn.pictures)


OF_PARTS = {
    "transformers": {"type": "image", "image": "a.png"},
    "a path": {"type": "image", "path": "a.png"},
    "a url": {"type": "image", "url": "a.png"},
    "openai": {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
    "openai, short": {"type": "image_url", "image_url": "a.png"},
    "openai's responses": {"type": "input_image", "image_url": "a.png"},
    "qwen": {"image": "a.png"},
    "a struct": {"type": "image", "image": {"path": "a.png", "bytes": None}},
    "keys of arrow": {"type": "image", "image": "a.png", "text": None, "index": None},
    "ollama's name of a file": {"type": "image", "image": {"file_name": "a.png"}},
}


@pytest.mark.parametrize("name", OF_PARTS)
def test_parts_name_paths(name):
    assert pictures_of(asked(OF_PARTS[name], TEXT)) == (PICTURE + "Color?", ["a.png"])


OF_CONTENTS = {
    "a data url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
    "in capitals": {"type": "image", "image": f"DATA:image/PNG;BASE64,{BASE64}"},
    "in lines": {"type": "image", "image": f"data:;base64,{BASE64[:76]}\r\n{BASE64[76:]}\n"},
    "with a charset": {"type": "image", "image": f"data:image/png;charset=utf-8;base64,{BASE64}"},
    "base64": {"type": "image", "base64": BASE64},
    "bare base64": {"type": "image", "image": BASE64},
    "bytes": {"type": "image", "bytes": CONTENT},
    "bytes as a text": {"type": "image", "image": {"bytes": BASE64, "path": None}},
    "anthropic": {"type": "image", "source": {"type": "base64", "data": BASE64}},
    "gemini": {"inline_data": {"mime_type": "image/png", "data": BASE64}},
}


@pytest.mark.parametrize("name", OF_CONTENTS)
def test_parts_hold_pictures(name):
    assert len(BASE64) > 255
    _, [reference] = pictures_of(asked(OF_CONTENTS[name], TEXT))
    assert located(reference, [Path("/rows")], "row") == reference
    assert encoded_bytes(reference, "row") == CONTENT


OF_ROWS = {
    "llama-factory": asked("<image>Color?", images=["a.png"]),
    "llama-factory's alpaca": {
        "instruction": "<image>Color?",
        "input": "",
        "output": "red",
        "images": ["a.png"],
    },
    "trl": asked("Color?", images=["a.png"]),
    "trl, parts": asked({"type": "image"}, TEXT, images=[{"bytes": None, "path": "a.png"}]),
    "trl, prompt": {
        "prompt": [{"role": "user", "content": "Color?"}],
        "completion": [ANSWER],
        "images": ["a.png"],
    },
    "ms-swift": {"query": "<image>Color?", "response": "red", "images": ["a.png"]},
    "ms-swift's turns": {
        "messages": [{"role": "user", "content": "Color?", "images": ["a.png"]}, ANSWER]
    },
    "llava": {
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": "<image>Color?"},
            {"from": "gpt", "value": "red"},
        ],
    },
    "the cauldron": {"images": ["a.png"], "texts": [{"user": "Color?", "assistant": "red"}]},
    "a folder of pictures": {"file_name": "a.png", "question": "Color?", "answer": "red"},
    "a table": {"image": "a.png", "question": "Color?", "answer": "red"},
    "llava-instruct-mix": asked(
        {"type": "image", "index": 0, "text": None}, {**TEXT, "index": None}, images=["a.png"]
    ),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_of_other_tools_name_their_pictures(name):
    assert pictures_of(OF_ROWS[name]) == (PICTURE + "Color?", ["a.png"])


def test_frames_of_a_video_are_pictures():
    content, frames = pictures_of(asked({"type": "video", "video": ["1.png", "2.png"]}, TEXT))
    assert (content, frames) == (PICTURE * 2 + "Color?", ["1.png", "2.png"])


def test_keys_of_a_part_that_nothing_reads_are_noted():
    use = ColumnUse()
    read(asked({"type": "image", "image": "a.png", "max_pixels": 9}, TEXT), use)
    assert list(use.unread_turn_keys) == ["content.max_pixels"]


def test_a_file_of_another_kind_beside_a_conversation_is_no_picture():
    example = read({"file_name": "main.py", "question": "Color?", "answer": "red"})
    assert example.responses[0][0].content == "Color?"


REFUSED = {
    "the network": ({"type": "image", "url": "https://a.b/c.png"}, "on the network"),
    "a bucket": ({"type": "image", "image": "s3://a/c.png"}, "on the network"),
    "an upload": ({"type": "input_image", "file_id": "file-1"}, "that a service stores"),
    "another machine": ({"type": "image", "image": "file://a.png"}, "of another machine"),
    "another encoding": ({"type": "image", "image": "data:image/svg+xml,%3C"}, "without base64"),
    "a number": ({"type": "image", "image": 5}, "is a number"),
    "nothing": ({"type": "image", "image": " "}, "is an empty text"),
    "a mark alone": ({"type": "image"}, "marks 1 place of pictures, and names no picture"),
    "a video": ({"type": "video", "video": "a.mp4"}, "part of type 'video'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_named_with_a_way_out(name):
    part, problem = REFUSED[name]
    with pytest.raises(BadRow, match=problem) as caught:
        read(asked(part, TEXT))
    assert caught.value.where.startswith("a.jsonl:1") and caught.value.fix


@pytest.mark.parametrize(
    ("text", "images", "problem"),
    [
        ("<image><image>?", ["a.png"], "marks 2 places of pictures, and has 1 picture in 'images'"),
        ("<image>?", ["a.png", "b.png"], "marks 1 place of pictures, and has 2 pictures"),
    ],
)
def test_places_and_pictures_are_counted(text, images, problem):
    with pytest.raises(BadRow, match=problem):
        read(asked(text, images=images))


def test_paths_stay_in_their_folder_whatever_they_are(tmp_path):
    folder = tmp_path / "rows"
    (folder / "Ä b").mkdir(parents=True)
    picture = folder / "Ä b" / "C.PNG"
    picture.write_bytes(CONTENT)
    (tmp_path / "secret.png").write_bytes(CONTENT)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "inner.png").symlink_to(picture)
    (folder / "circle.png").symlink_to(folder / "circle.png")
    for reference in ("Ä b/C.PNG", r"Ä b\C.PNG", str(picture), "./x/../Ä b/C.PNG", "inner.png"):
        assert located(reference, [folder], "row") == str(picture)
    outside = ("link.png", "../secret.png", "/etc/hostname", "~/../../secret.png")
    for reference in outside:
        with pytest.raises(BadRow, match="outside of the dataset's folder"):
            located(reference, [folder], "row")
    for reference in ("a\0b.png", "a" * 5000, "circle.png"):
        with pytest.raises(BadRow, match="what is no path") as caught:
            located(reference, [folder], "row")
        assert len(str(caught.value)) < 400


def test_a_picture_is_a_plain_file_of_bounded_size(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", Path("/dev/zero")):
        with pytest.raises(BadRow, match="not a file"):
            encoded_bytes(str(path), "row")
    with pytest.raises(BadRow, match="a folder, not a file"):
        encoded_bytes(str(tmp_path), "row")
    (tmp_path / "a.JPG").write_bytes(CONTENT)
    with pytest.raises(BadRow, match="not there") as caught:
        encoded_bytes(str(tmp_path / "a.png"), "row")
    assert caught.value.fix.startswith("a.JPG is there")
    monkeypatch.setattr(references, "MAX_BYTES", len(CONTENT) - 1)
    with pytest.raises(BadRow, match="picture of more than"):
        encoded_bytes(str(tmp_path / "a.JPG"), "row")
    with pytest.raises(BadRow, match="picture of more than"):
        references.reference_of(CONTENT, "row")
    assert references.MAX_BYTES < MIB


def test_a_reference_in_a_message_is_short():
    with pytest.raises(BadRow) as caught:
        encoded_bytes("/" + "b" * 200 + "/c.png", "row")
    assert len(str(caught.value)) < 400
    assert OWN_DATA not in str(caught.value)
