"""Pictures in requests of three APIs become those of a chat, and what may not be read is refused before it is."""

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest

from bloomery.data.examples import PICTURE, Message
from bloomery.serve.limits import Limits, Refused
from bloomery.serve.messages import MessagesRequest
from bloomery.serve.parameters import parsed
from bloomery.serve.pictures import PictureIntake, picture_reference, refuse_count
from bloomery.serve.requests import ChatRequest
from bloomery.serve.responses import ResponsesRequest
from pictures_for_tests import png

URL = "data:image/png;base64," + b64encode(png()).decode()
OTHER = "data:image/jpeg;base64,AA=="


def chat(*parts: dict | str) -> list[Message]:
    body = {"messages": [{"role": "user", "content": list(parts)}]}
    return [turn.message() for turn in parsed(ChatRequest, json.dumps(body).encode()).messages]


class TestForms:
    def test_chat_completions(self) -> None:
        (message,) = chat(
            {"type": "text", "text": f"Left{PICTURE}:"},
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            {"type": "text", "text": "right:"},
            {"type": "image_url", "image_url": OTHER},
        )
        # The letter that marks a picture is none where a client writes it.
        assert message.content == f"Left:{PICTURE}right:{PICTURE}"
        assert message.pictures == (URL, OTHER)

    def test_the_mark_of_a_picture_is_a_letter_in_turns_without_any(self) -> None:
        (message,) = chat({"type": "text", "text": f"pasted {PICTURE}"})
        assert message == Message("user", f"pasted {PICTURE}")

    def test_responses(self) -> None:
        shown = {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "What is"}, shown]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [shown]},
        ]
        params = parsed(ResponsesRequest, json.dumps({"input": items}).encode())
        user, call, result = (turn.message() for turn in params.chat(params.items).messages)
        assert (user.content, user.pictures) == (f"What is{PICTURE}", (URL,))
        assert (call.content, call.pictures) == ("", ())
        assert (result.content, result.pictures, result.call_id) == (PICTURE, (URL,), "c")

    def test_messages(self) -> None:
        data = URL.partition(",")[2]
        block = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
        }
        result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [block]}
        texts = [{"type": "text", "text": text} for text in ("one", "two")]
        turns = [
            {"role": "user", "content": [block, *texts, block]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
            },
            {"role": "user", "content": [result]},
        ]
        params = parsed(
            MessagesRequest, json.dumps({"max_tokens": 5, "messages": turns}).encode()
        ).chat()
        first, _, last = (turn.message() for turn in params.messages)
        assert (first.content, first.pictures) == (f"{PICTURE}one\ntwo{PICTURE}", (URL, URL))
        assert (last.role, last.content, last.pictures) == ("tool", f"error: {PICTURE}", (URL,))

    @pytest.mark.parametrize(
        ("kind", "body", "words"),
        [
            (ChatRequest, {"messages": [("image", {"image": URL})]}, "type image_url"),
            (ChatRequest, {"messages": [("image_url", {})]}, "image_url"),
            (ChatRequest, {"messages": [("image_url", {"image_url": ""})]}, "image_url"),
            (ResponsesRequest, {"input": [("image_url", {"image_url": URL})]}, "input_image"),
            (
                ResponsesRequest,
                {"input": [("input_image", {"image_url": URL, "file_id": "f"})]},
                "data URL",
            ),
            (MessagesRequest, {"messages": [("image_url", {"image_url": URL})]}, "type image "),
        ],
    )
    def test_other_forms_are_named(self, kind: type, body: dict, words: str) -> None:
        (name, [(part, rest)]) = next(iter(body.items()))
        turns = [{"role": "user", "content": [{"type": part, **rest}]}]
        with pytest.raises(Refused, match=words):
            parsed(kind, json.dumps({name: turns, "max_tokens": 5}).encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "inside").mkdir()
    (folder / "inside" / "red.png").write_bytes(png())
    (folder / "outside.png").write_bytes(png())
    (folder / "inside" / "link.png").symlink_to(folder / "outside.png")
    return folder


def read(address: str, folder: Path | None = None, *, before: int = 0) -> bytes:
    """A picture of a request with others before it."""
    intake = PictureIntake()
    try:
        for number in range(1, before + 1):
            intake.read(picture_reference(URL, number, None), "")
        return intake.read(picture_reference(address, before + 1, folder), "").content
    finally:
        intake.close()


def test_a_server_needs_no_pillow() -> None:
    """Most models read text alone; a picture is refused with the command that installs it."""
    script = f"""
import sys
sys.modules["PIL"] = None
from bloomery.core.errors import UserError
from bloomery.serve.pictures import PictureIntake
try:
    PictureIntake().read({URL!r}, "")
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pillow" in done.stdout and "install" in done.stdout


class TestReading:
    @pytest.mark.parametrize(
        ("address", "words"),
        [
            ("https://example.com/a.png", "fetches nothing: send it as a data URL"),
            ("file:///etc/passwd", "reads none"),
            ("data:image/png,abc", "without base64"),
            (URL.partition(",")[2], "no data URL"),
            ("data:image/png;base64,????", "base64 text is damaged"),
            (OTHER, "is none of JPEG"),
        ],
    )
    def test_what_is_refused(self, address: str, words: str) -> None:
        with pytest.raises(Refused, match=f"image 2 .*{words}") as refused:
            read(address, before=1)
        assert refused.value.status == 400

    def test_files_are_read_in_one_folder_alone(self, folder: Path) -> None:
        inside = folder / "inside"
        named = read(f"file://{inside}/red.png", inside)
        assert named == read(URL) and named.startswith(b"P6")
        for path in ("outside.png", "inside/link.png", "inside/../outside.png", "a\0b", "a" * 5000):
            with pytest.raises(Refused, match="is not in the folder"):
                picture_reference(f"file://{folder}/{path}", 1, inside)
        with pytest.raises(Refused, match=r"image 1 .*not there"):
            read(f"file://{inside}/no.png", inside)

    def test_many_and_large_ones_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(Refused, match="--max-images"):
            refuse_count(17, Limits())
        monkeypatch.setattr("bloomery.serve.pictures.MOST_PIXELS", 3 * 40 * 60 - 1)
        assert read(URL, before=1)
        with pytest.raises(Refused, match=r"first 3 images have 7,200 .* have 7,199"):
            read(URL, before=2)
        monkeypatch.setattr("bloomery.serve.pictures.SECONDS", 0.0)
        with pytest.raises(Refused, match="first 1 images took more than 0 seconds"):
            read(URL, before=1)
