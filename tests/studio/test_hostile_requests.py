"""Requests that no page of studio sends, to one studio: each is answered, nothing is executed, no log has the token."""

import html
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from studio_for_tests import TOKEN, make_run, studio_process

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

AS_USER = f"Authorization: Bearer {TOKEN}"
AS_BROWSER = f"Cookie: bloomery_studio_PORT={TOKEN}"
STATIC = "/_nicegui/VERSION/static"
ELSEWHERE = "Origin: http://evil.example"
LIVE = "/_nicegui_ws/socket.io/?EIO=4&transport="
UPGRADE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Its port, and the file with what it printed."""
    folder = tmp_path_factory.mktemp("studio")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_run("demo")
        make_run("a?b#c%41")
        (folder / "outside").mkdir()
        (folder / "outside" / "recipe.yaml").write_text("secret: 1", encoding="utf-8")
        # Its files are links to what no run may show.
        linked = make_run("linked")
        for name in ("events.jsonl", "log.txt", "plan.json"):
            (linked / name).unlink(missing_ok=True)
            (linked / name).symlink_to("/etc/passwd")
    output = folder / "studio.log"
    with studio_process(folder, output=output) as url:
        yield int(url.rpartition(":")[2].strip("/")), output


def answer_to(port: int, line: str, *headers: str, body: str = "") -> str:
    """The whole answer, to a request of which the lines are sent as they are."""
    from nicegui import __version__

    lines = [line, *headers]
    if not any(header.lower().startswith("host:") for header in headers):
        lines.append(f"Host: 127.0.0.1:{port}")
    if not any(header.lower().startswith("connection:") for header in headers):
        lines.append("Connection: close")
    request = "\r\n".join([*lines, "", body])
    request = request.replace("PORT", str(port)).replace("VERSION", __version__)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request.encode("latin-1"))
        received = b""
        while piece := connection.recv(2**16):
            received += piece
            if b" 101 " in received[:20]:
                break  # a websocket stays open
    return received.decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    "status, request_line, headers",
    [
        # Without the token, or from elsewhere: nothing, whatever is asked.
        (401, "GET / HTTP/1.1", ()),
        (401, f"GET {STATIC}/nicegui.js HTTP/1.1", ()),
        (401, "POST /serve/v1/completions HTTP/1.1", ()),
        (401, f"GET {LIVE}polling HTTP/1.1", ()),
        (403, f"GET {LIVE}websocket HTTP/1.1", UPGRADE),
        (401, "GET /?token=wrong HTTP/1.1", (AS_USER,)),
        (403, "GET / HTTP/1.1", (AS_USER, "Host: evil.example")),
        (403, "GET / HTTP/1.0", (AS_USER, "Host:")),
        (400, "GET / HTTP/1.1", (AS_USER, "Host: 127.0.0.1", "Host: evil.example")),
        (403, "POST /serve/v1/completions HTTP/1.1", (AS_BROWSER, ELSEWHERE)),
        (403, f"POST {LIVE}polling HTTP/1.1", (AS_BROWSER, ELSEWHERE)),
        (403, f"GET {LIVE}websocket HTTP/1.1", (*UPGRADE, AS_BROWSER, ELSEWHERE)),
        (101, f"GET {LIVE}websocket HTTP/1.1", (*UPGRADE, AS_BROWSER)),
        # An image on a page of another port sends the cookie; a link does, too, and is followed.
        (
            403,
            "GET / HTTP/1.1",
            (AS_BROWSER, "Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors"),
        ),
        (
            200,
            "GET / HTTP/1.1",
            (AS_BROWSER, "Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: navigate"),
        ),
        # No file but those of the pages, and no run but those of runs/.
        (404, f"GET {STATIC}/../../../../../etc/passwd HTTP/1.1", (AS_USER,)),
        (404, f"GET {STATIC}/%2e%2e/nicegui.py HTTP/1.1", (AS_USER,)),
        (404, f"GET {STATIC}/..%2f..%2fnicegui.py HTTP/1.1", (AS_USER,)),
        (404, f"GET {STATIC}//etc/passwd HTTP/1.1", (AS_USER,)),
        (404, "GET /_nicegui/VERSION/components/..%2f..%2fetc%2fpasswd HTTP/1.1", (AS_USER,)),
        (404, "GET /serve/../outside HTTP/1.1", (AS_USER,)),
        (404, "GET /run/../../outside HTTP/1.1", (AS_USER,)),
        # What no server of files or messages does.
        (405, "POST / HTTP/1.1", (AS_USER, "Content-Length: 99999999999")),
        (405, "DELETE /run/demo HTTP/1.1", (AS_USER,)),
        (405, "PUT /run/demo HTTP/1.1", (AS_USER,)),
        (404, "GET http://evil.example/ HTTP/1.1", (AS_USER,)),
        (404, "GET /openapi.json HTTP/1.1", (AS_USER,)),
        (400, "GET /\xff HTTP/1.1", (AS_USER,)),
        (400, "\x16\x03\x01\x02", ()),
        (400, f"POST /absent?token={TOKEN} HTTP/1.1", (AS_BROWSER,)),
    ],
)
def test_a_hostile_request_gets_its_status_and_nothing_else(
    studio: tuple[int, Path], status: int, request_line: str, headers: tuple[str, ...]
) -> None:
    port, _ = studio
    text = answer_to(port, request_line, *headers)
    assert text.startswith(f"HTTP/1.1 {status} ")
    assert "root:x:" not in text and "secret: 1" not in text
    assert TOKEN not in text


@pytest.mark.parametrize(
    "path, shown",
    [
        ("/run/..", "no run"),
        ("/run/%2e%2e", "no run"),
        ("/run/..%5coutside", "no run"),
        ("/run/..%2foutside", "no run"),  # the form of SWEEP/RUN
        ("/run/../outside", "no run"),
        ("/run/demo%00", "no run"),
        ("/run/%00", "no run"),
        ("/run/%ff%fe", "no run"),
        (f"/run/{'a' * 300}", "file name too long"),
        (f"/run/{'a' * 50_000}", "file name too long"),
        ("/run/linked", "events.jsonl is a link to /etc/passwd"),
        (f"/compare?runs={'a' * 300}", "file name too long"),
        (f"/compare?runs={'/'.join(f'..{number}' for number in range(5000))}", "at most 20 runs"),
        ("/compare?runs=..%2Fdemo%2F%00&over=%00", "Compare 1 run"),
        (f"/new?run={'a' * 300}", "file name too long"),
        ("/new?run=..%2Foutside", "no run"),
        ("/chat?model=a&model=b&model=c", "cannot chat with 3 models"),
        ("/chat?model=a&model=a", "cannot chat with 2 models"),
        (f"/?{'&'.join(f'a{number}=1' for number in range(5000))}", "Runs"),
    ],
)
def test_a_hostile_address_is_a_page_that_says_what_is_wrong(
    studio: tuple[int, Path], path: str, shown: str
) -> None:
    port, _ = studio
    text = answer_to(port, f"GET {path} HTTP/1.1", AS_USER)
    assert text.startswith("HTTP/1.1 200 ")
    assert shown in text
    assert "root:x:" not in text and "secret: 1" not in text


def test_a_link_on_a_page_of_another_origin_loads_no_model(studio: tuple[int, Path]) -> None:
    port, _ = studio
    navigation = ("Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: navigate")
    text = answer_to(port, "GET /chat?model=evil/model HTTP/1.1", AS_BROWSER, *navigation)
    assert "/chat?model=evil%2Fmodel" in text and "Load it" in text
    assert answer_to(port, "GET /serve/ HTTP/1.1", AS_USER).startswith("HTTP/1.1 503 ")


@pytest.mark.parametrize(
    "path, location",
    [
        ("/run/a%3Fb%23c%2541", "/run/a%3Fb%23c%2541"),  # the name of a run that exists
        ("//evil.example", "/evil.example"),
        ("/\\evil.example", "/evil.example"),
        ("/%0d%0aSet-Cookie:%20a=b", "/%0d%0aSet-Cookie:%20a=b"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_token_leaves_the_address_and_nothing_else_changes(
    studio: tuple[int, Path], method: str, path: str, location: str
) -> None:
    port, _ = studio
    text = answer_to(port, f"{method} {path}?token={TOKEN} HTTP/1.1")
    assert text.startswith("HTTP/1.1 303 ")
    assert re.findall(r"(?im)^location: (.*)\r$", text) == [location]
    assert "referrer-policy: no-referrer" in text.lower()


def test_the_page_behind_an_encoded_name_is_that_of_the_run(studio: tuple[int, Path]) -> None:
    port, _ = studio
    text = answer_to(port, "GET /run/a%3Fb%23c%2541 HTTP/1.1", AS_USER)
    assert "a?b#c%41" in text and "No such run" not in text


def test_silent_connections_keep_nobody_out(studio: tuple[int, Path]) -> None:
    port, _ = studio
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert answer_to(port, "GET /run/demo HTTP/1.1", AS_USER).startswith("HTTP/1.1 200 ")


ODD_MESSAGES = (
    '42["event",{}]',
    '42["event",null]',
    '42["event"]',
    '42["event",{"client_id":"CLIENT"},1]',
    '42["event",{"client_id":"CLIENT"}]',
    '42["event",{"client_id":"CLIENT","id":1,"listener_id":"x","args":["{"]}]',
    '42["event",{"client_id":"CLIENT","id":[1],"listener_id":"x","args":[]}]',
    '42["event",{"client_id":"CLIENT","id":1,"listener_id":"x","args":5}]',
    '42["event",{"client_id":{},"id":1,"listener_id":"x","args":[]}]',
    *(
        f'42["event",{{"client_id":"CLIENT","id":{number},"listener_id":"x"}}]'
        for number in range(9)
    ),
    '42["nosuch",1]',
    '42["connect",{}]',
    '42["handshake",{}]',
    '42["handshake",{"client_id":"CLIENT","tab_id":1,"document_id":[]}]',
    '42["ack",{}]',
    '42["ack",{"client_id":"CLIENT","next_message_id":"x"}]',
    '42["javascript_response",{}]',
    '42["javascript_response",{"client_id":"CLIENT","request_id":[]}]',
    '42["log",{"client_id":"CLIENT","level":"error","message":"\\u001b[31mFAKE \\u001b[2J"}]',
    '42["log",{"client_id":"CLIENT","level":"nosuch","message":"x"}]',
    '42["log",{"client_id":"CLIENT","level":"error","message":{}}]',
    "42[",
    "42[]",
    "42{}",
    "420",
    "4",
    "9",
    "",
    "é",
    "42" + "[" * 100_000,
    '45999-["event",{"_placeholder":true,"num":0}]',
    "40/nosuch,",
    "41",
    "43",
    "43[]",
    "2probe",
    "6",
)


def live_page(port: int) -> tuple[str, Any]:
    """The id of a page of studio, and its websocket, as NiceGUI's script opens it."""
    text = answer_to(port, "GET /run/demo HTTP/1.1", AS_USER)
    query = re.search(r"query: (\{.*?\}),\s*\n", text)
    assert query is not None, text
    fields = dict(re.findall(r"'(\w+)': '?([\w-]+)'?", html.unescape(query[1])))
    fields |= {"implicit_handshake": "true", "document_id": "d", "tab_id": "t", "EIO": "4"}
    address = (
        f"ws://127.0.0.1:{port}/_nicegui_ws/socket.io/?{urlencode(fields)}&transport=websocket"
    )
    live = connect(address, additional_headers={"Authorization": f"Bearer {TOKEN}"})
    live.recv()
    live.send("40")
    return fields["client_id"], live


@pytest.mark.parametrize("query", ["", "&client_id=x", "&client_id=x&tab_id=y&next_message_id=z"])
def test_a_websocket_without_the_fields_of_a_page_is_closed(
    studio: tuple[int, Path], query: str
) -> None:
    port, output = studio
    address = f"ws://127.0.0.1:{port}{LIVE}websocket&implicit_handshake=true{query}"
    with connect(address, additional_headers={"Authorization": f"Bearer {TOKEN}"}) as live:
        live.recv()
        live.send("40")
        assert live.recv(10).startswith("44")  # refused
    assert "Traceback" not in output.read_text("utf-8")


def test_odd_messages_of_a_page_print_nothing_and_harm_no_other_page(
    studio: tuple[int, Path],
) -> None:
    port, output = studio
    _, other = live_page(port)
    with other:
        for message in ODD_MESSAGES:
            client_id, live = live_page(port)
            with live, suppress(ConnectionClosed, TimeoutError):
                live.send(message.replace("CLIENT", client_id))
                live.send('42["log",{"client_id":"CLIENT","level":"error","message":"seen"}]')
                live.recv(0.05)
        # Another page still gets what it asks for: an answer to a ping of the protocol of its own.
        client_id, live = live_page(port)
        with live:
            log = {"client_id": client_id, "level": "error", "message": "a page's own words"}
            live.send(f'42["log",{json.dumps(log)}]')
            deadline = time.monotonic() + 20
            while "a page's own words" not in output.read_text("utf-8"):
                assert time.monotonic() < deadline, output.read_text("utf-8")
                time.sleep(0.02)
    printed = output.read_text("utf-8")
    assert "Traceback" not in printed and "\x1b" not in printed, printed[-3000:]
    assert "FAKE" in printed  # without its control characters


def test_after_all_of_that_studio_answers_and_its_output_has_no_token_and_no_traceback(
    studio: tuple[int, Path],
) -> None:
    port, output = studio
    assert answer_to(port, "GET /run/demo HTTP/1.1", AS_USER).startswith("HTTP/1.1 200 ")
    printed = output.read_text()
    assert printed.count(TOKEN) == 1  # in the address that is printed
    assert "Traceback" not in printed
