"""Exports that a browser downloads: exactly their files, of known exports alone, behind the token."""

import io
import json
import os
import time
import tracemalloc
import zipfile
from pathlib import Path

import httpx
import pytest
from studio_for_tests import PATIENCE, TOKEN, studio_process

from browser import Browser
from models_for_tests import make_model

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

from bloomery.studio.command_progress import export_of
from bloomery.studio.downloads import address_of_download, files_of, zip_bytes, zipped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an export of two levels, a GGUF file, an export whose link leads out, and a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("downloads")
    for place in ("exports/möbius", "exports/leaky", "runs/r/checkpoints/step-00000002"):
        (folder / place).mkdir(parents=True)
        (folder / place / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "exports/möbius/model.safetensors").write_bytes(os.urandom(3_000_000))
    (folder / "exports/möbius/adapter").mkdir()
    (folder / "exports/möbius/adapter/ü.bin").write_bytes(b"inner")
    (folder / "exports/möbius/.cache").mkdir()
    (folder / "exports/möbius/.cache/x").touch()
    (folder / "exports/small.gguf").write_bytes(b"GGUF" + os.urandom(100_000))
    (folder / "secret").write_text("secret")
    (folder / "exports/leaky/model.safetensors").symlink_to(folder / "secret")
    (folder / "exports/out.gguf").symlink_to(folder / "secret")
    (folder / "runs/r/recipe.yaml").write_text("model: {preset: go-coder-tiny}\n")
    (folder / "runs/r/events.jsonl").touch()
    return folder


@pytest.fixture(scope="module")
def client(folder: Path):
    with studio_process(folder) as url:
        headers = {"Authorization": f"Bearer {TOKEN}", "Accept-Encoding": "gzip"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            yield client


def test_a_folder_is_one_zip_of_exactly_its_files(client: httpx.Client, folder: Path) -> None:
    answer = client.get(address_of_download("./exports/möbius"))
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["content-disposition"].endswith("m%C3%B6bius.zip")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        read = {name: archive.read(name) for name in archive.namelist()}
    inside = folder / "exports/möbius"
    files = ("adapter/ü.bin", "config.json", "model.safetensors")
    assert read == {f"möbius/{name}": (inside / name).read_bytes() for name in files}


def test_a_file_comes_as_it_is_and_goes_on_where_it_broke_off(
    client: httpx.Client, folder: Path
) -> None:
    content = (folder / "exports/small.gguf").read_bytes()
    answer = client.get(address_of_download("./exports/small.gguf"))
    assert answer.content == content
    assert answer.headers["content-disposition"] == 'attachment; filename="small.gguf"'
    assert int(answer.headers["content-length"]) == len(content)
    rest = client.get(
        address_of_download("./exports/small.gguf"), headers={"Range": "bytes=50000-"}
    )
    assert (rest.status_code, rest.content) == (206, content[50000:])


@pytest.mark.parametrize(
    "model",
    [
        "",
        "secret",
        "./secret",
        "../../etc/passwd",
        "./exports/../secret",
        "./exports/möbius/../../secret",
        "exports/möbius",
        "/etc/passwd",
        "runs/r@2",
        "./exports/leaky",
        "./exports/out.gguf",
    ],
)
def test_nothing_else_is_sent(client: httpx.Client, model: str) -> None:
    answer = client.get(address_of_download(model))
    assert answer.status_code == 404
    assert "fix: " in answer.text
    assert "secret" not in answer.text.partition("\n")[2]


def test_a_download_needs_the_token_and_a_page_of_studio(client: httpx.Client) -> None:
    address = f"{client.base_url}{address_of_download('./exports/small.gguf').lstrip('/')}"
    assert httpx.get(address).status_code == 401
    for site in ("cross-site", "same-site"):
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
        assert client.get(address, headers=headers).status_code == 403


def test_a_zip_beyond_four_gib_has_the_length_that_was_told(tmp_path: Path) -> None:
    """Of holes: neither disk nor memory holds them."""
    for name, size in (("a.bin", 10), ("b.bin", 2**32 + 5), ("c.bin", 7)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    files = files_of(tmp_path)
    tracemalloc.start()
    length, end = 0, b""
    for piece in zipped(tmp_path, files):
        length += len(piece)
        end = (end + piece)[-2000:]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length == zip_bytes(tmp_path, files)
    assert end.endswith(b"PK\x05\x06" + end[-18:])
    assert peak < 20 * 2**20


@pytest.mark.soak
def test_a_model_is_exported_and_downloaded_by_touch(browser: Browser, tmp_path: Path) -> None:
    """On a phone: mark a model at the end of a list, GGUF, q8_0, start, download."""
    for number in range(8):
        make_model(tmp_path / "exports" / f"model-{number}")
    oldest = tmp_path / "exports" / "model-0"
    os.utime(oldest, (1.7e9, 1.7e9))

    def named(text: str, kinds: str) -> str:
        words = json.dumps(text)
        every = f"[...document.querySelectorAll({json.dumps(kinds)})]"
        return f"{every}.find(one => one.offsetParent && !one.disabled && one.innerText.includes({words}))"

    with studio_process(tmp_path) as url:
        browser.look(width=390, height=844, touch=True)
        browser.keep_downloads(tmp_path)
        browser.open(f"{url}models?token={TOKEN}")
        try:
            last = f"{named('model-0', '.q-card')}?.querySelector('.q-checkbox')"
            browser.until(f"!!{last}", PATIENCE)
            browser.value(f"{last}.scrollIntoView({{block: 'center'}})")
            browser.tap(last)
            browser.tap(named("Export", ".acts.on button"))  # in sight, where the finger is
            for choice in ("GGUF file", "q8_0"):
                browser.tap(named(choice, ".choice"))
            assert browser.small_targets() == []
            browser.tap(named("Start the export", "button"))
            browser.value("scrollTo(0, 0)")
            browser.tap(named("Download model-0-q8_0.gguf", "button"), PATIENCE)
            made = tmp_path / "exports" / "model-0-q8_0.gguf"
            got = tmp_path / made.name
            end = time.monotonic() + 30
            while not got.exists() or got.stat().st_size < made.stat().st_size:
                assert time.monotonic() < end
                time.sleep(0.1)
            assert got.read_bytes() == made.read_bytes()
            assert browser.overflow() == []
        finally:
            browser.look(width=1400)


def test_the_export_that_a_command_has_made_is_that_of_the_list() -> None:
    assert export_of(("export", "--to=gguf", "--out=exports/a.gguf", "--", "r")) == "./exports/a.gguf"
    assert export_of(("export", "--out=/tmp/a", "--", "r")) == "/tmp/a"
    assert export_of(("push", "--", "--out=exports/a")) == ""
    assert export_of(("download", "--to=models/x", "--", "o/x")) == ""
