"""Pictures with captions: archives of WebDataset, folders of `datasets`, texts beside pictures, tables."""

import gzip
import io
import json
import tarfile

import pytest

from bloomery.core.errors import UserError
from bloomery.core.units import MIB
from bloomery.data.examples import PICTURE, BadRow, pictures_of
from bloomery.data.sources import picture_files
from bloomery.data.sources.documents import ReadStats, open_dataset, read_documents
from bloomery.data.sources.files import unread_files
from bloomery.data.sources.picture_files import read_webdataset
from bloomery.recipe.schema import Source
from pictures_for_tests import png

RED = png(color="red")
BLUE = png(color="blue")
CONVERSATION = [
    {"from": "human", "value": "<image>\nColor?"},
    {"from": "gpt", "value": "red"},
]


def archive(members: dict[str, bytes | str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            encoded = content.encode() if isinstance(content, str) else content
            info.size = len(encoded)
            tar.addfile(info, io.BytesIO(encoded))
    return stream.getvalue()


def examples(folder, required_format="sft", **settings):
    """The conversations of a folder, each with the texts of its turns and how many pictures it has."""
    dataset = open_dataset(Source(path=str(folder), **settings), required_format)
    found = []
    for document in read_documents(dataset, on_error="stop", stats=ReadStats()):
        assert document.example is not None, document.text
        [turns] = document.example.responses
        found.append(([turn.content for turn in turns], len(pictures_of(turns))))
    return found


@pytest.fixture
def folder(tmp_path):
    """A function that writes files into an empty folder."""

    def write(files: dict[str, bytes | str]):
        for name, content in files.items():
            path = tmp_path / "rows" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / "rows"

    return write


ROW = json.dumps({"file_name": "a.png", "text": "A red box."})
CAPTIONED = {
    "datasets' folder": {"a.png": RED, "metadata.jsonl": ROW},
    "datasets' folder, a table": {
        "a.png": RED,
        "metadata.csv": "file_name,text\na.png,A red box.\n",
    },
    "in a folder below": {"x/a.png": RED, "x/metadata.jsonl": ROW},
    "a caption": {"a.png": RED, "rows.jsonl": '{"image": "a.png", "caption": "A red box."}'},
    "a list of one": {"a.png": RED, "rows.jsonl": '{"image": "a.png", "captions": ["A red box."]}'},
    "texts beside pictures": {"a.PNG": RED, "a.txt": "A red box.\n", "README.md": "# Boxes"},
    "webdataset": {"0.tar": archive({"a.png": RED, "a.txt": "A red box."})},
    "webdataset, json": {"0.tar": archive({"a.png": RED, "a.json": '{"caption": "A red box."}'})},
    "webdataset, both": {
        "0.tar": archive({"a.txt": "A red box.", "a.json": '{"caption": "B"}', "a.jpg": RED})
    },
    "webdataset, packed": {
        "0.tar.gz": gzip.compress(archive({"a.png": RED, "a.txt": "A red box."}))
    },
}


@pytest.mark.parametrize("name", CAPTIONED)
def test_a_caption_answers_its_picture(folder, name):
    assert examples(folder(CAPTIONED[name])) == [([PICTURE, "A red box."], 1)]


def test_samples_of_an_archive_are_conversations(folder):
    named = {"images": ["sub/b.2.png", "b.1.png"], "conversations": CONVERSATION}
    named["conversations"] = [{"from": "human", "value": "<image><image>"}, CONVERSATION[1]]
    parts = [{"type": "image", "image": "c.png"}, {"type": "text", "text": "Color?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "blue"}]
    members = {
        "sub/._a.png": b"of another program",
        "sub/a.png": RED,
        "sub/a.json": json.dumps({"conversations": CONVERSATION, "image": "elsewhere.png"}),
        "sub/b.1.png": RED,
        "sub/b.2.png": BLUE,
        "sub/b.json": json.dumps(named),
        "sub/c.json": json.dumps({"messages": turns}),
        "sub/c.png": BLUE,
        "sub/d.json": json.dumps(
            {"conversations": [{"from": "human", "value": "?"}, CONVERSATION[1]]}
        ),
    }
    path = folder({"0.tar": archive(members)}) / "0.tar"
    assert examples(path) == [
        ([f"{PICTURE}\nColor?", "red"], 1),
        ([PICTURE * 2, "red"], 2),
        ([f"{PICTURE}Color?", "blue"], 1),
        (["?", "red"], 0),
    ]
    # Pictures have the order in which the JSON names them.
    rows = [value.content for value in read_webdataset(path, "0.tar")]
    assert [picture["bytes"] for picture in rows[1]["images"]] == [BLUE, RED]


def test_what_an_archive_holds_besides_is_noted_or_refused(folder):
    path = folder({"0.tar": archive({"a.png": RED, "a.txt": "A", "a.cls": "3"})}) / "0.tar"
    stats = ReadStats()
    list(read_documents(open_dataset(Source(path=str(path)), "sft"), on_error="stop", stats=stats))
    assert list(stats.use.unread_columns) == ["cls"]
    path.write_bytes(archive({"a.png": RED, "a.txt": "A", "a.mp4": "3"}))
    with pytest.raises(BadRow, match="has 'video'"):
        examples(path)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"a.png": RED, "a.txt": "A", "b.txt": "B"}, "has a caption and no picture"),
        ({"a.png": RED, "a.txt": " "}, "is empty"),
        ({"a.png": RED, "a.json": "[1]"}, "no object with columns"),
        ({"a.png": RED, "a.json": "{"}, "JSON that is damaged"),
        ({"a.png": RED, "a.txt": b"\xff\xfe\x00"}, "not UTF-8"),
    ],
)
def test_bad_samples_are_named(folder, members, problem):
    with pytest.raises(UserError, match=problem) as caught:
        examples(folder({"0.tar": archive(members)}))
    assert "0.tar" in caught.value.where and caught.value.fix


def read(content: bytes, tmp_path) -> list:
    path = tmp_path / "0.tar"
    path.write_bytes(content)
    return list(read_webdataset(path, "0.tar"))


def test_an_archive_is_read_within_bounds(tmp_path, monkeypatch):
    good = archive({"a.png": RED, "a.txt": "A", "b.png": BLUE, "b.txt": "B"})
    assert len(read(good, tmp_path)) == 2
    # Cut anywhere, it is read up to there or named.
    for end in range(0, len(good), 512):
        values = read(good[:end], tmp_path)
        assert len(values) <= 3
    assert isinstance(read(b"no archive at all" * 99, tmp_path)[-1], BadRow)

    link = tarfile.TarInfo("a.png")
    link.type = tarfile.SYMTYPE
    link.linkname = "/etc/passwd"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(link)
    [refused] = read(stream.getvalue(), tmp_path)
    assert "link" in refused.reason

    # A name of megabytes would be kept in memory.
    longest = tarfile.TarInfo("a" * (3 * MIB))
    [refused] = read(longest.tobuf(tarfile.GNU_FORMAT) + bytes(1024), tmp_path)
    assert "headers are too large" in refused.reason

    monkeypatch.setattr(picture_files, "MAX_BYTES", len(RED) + 10)
    [fits, too_large] = read(archive({"a.png": RED, "b.png": RED, "b.txt": "x" * 20}), tmp_path)
    assert fits.content["images"][0]["bytes"] == RED
    assert "more than" in too_large.reason


def test_a_folder_of_pictures_alone_is_named_with_the_two_ways_out(folder):
    with pytest.raises(UserError, match="no file that says what is in them") as caught:
        examples(folder({"a.png": RED, "b.jpg": BLUE}))
    assert "metadata.jsonl" in caught.value.fix and "a.txt" in caught.value.fix


def test_texts_beside_pictures_stay_texts_where_a_model_is_pretrained(folder):
    path = folder({"a.png": RED, "a.txt": "A red box."})
    dataset = open_dataset(Source(path=str(path)), "text")
    stats = ReadStats()
    assert [doc.text for doc in read_documents(dataset, on_error="stop", stats=stats)] == [
        "A red box."
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"image": "a.png", "captions": ["A", "B"]}, "has 2 texts for one picture"),
        ({"image": "https://a.b/c.png", "caption": "A"}, "on the network"),
    ],
)
def test_captions_that_are_refused(folder, row, problem):
    with pytest.raises(BadRow, match=problem):
        examples(folder({"a.png": RED, "rows.jsonl": json.dumps(row)}))


def test_a_photo_of_a_phone_beside_a_text_is_not_passed_over(folder):
    files = {"a.png": RED, "a.txt": "A red box.", "b.HEIC": b"photo", "b.txt": "A cat."}
    assert [answer for (_, answer), _ in examples(folder(files))] == ["A red box.", "A cat."]


def test_a_picture_without_a_text_among_captions_is_told(folder):
    path = folder({"a.png": RED, "a.txt": "A red box.", "x/b.jpg": BLUE})
    told = unread_files(Source(path=str(path)), rows=True)
    assert (
        told == "1 picture without a text, not trained on, the first x/b.jpg: write b.txt beside it"
    )
    (path / "x" / "b.txt").write_text("A blue box.")
    assert unread_files(Source(path=str(path)), rows=True) is None


def test_a_link_beside_a_text_leaves_it_a_text(folder):
    row = {"image": "https://a.b/c.png", "text": "An article."}
    path = folder({"rows.jsonl": json.dumps(row)})
    documents = read_documents(
        open_dataset(Source(path=str(path)), "sft"), on_error="stop", stats=ReadStats()
    )
    assert next(documents).text == "An article."
