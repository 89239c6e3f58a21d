"""Strangers at the door of studio: no token, a wrong one, another host, another origin."""

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect
from studio_for_tests import TOKEN

from bloomery.serve.listen import hosts_of
from bloomery.studio.guard import StudioGuard

LIVE = "ws://127.0.0.1:8100/live"


async def page(_: object) -> PlainTextResponse:
    return PlainTextResponse("secret")


async def socket(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("secret")


def client(host: str = "127.0.0.1") -> TestClient:
    routes = [Route("/{rest:path}", page, methods=["GET", "POST"]), WebSocketRoute("/live", socket)]
    guard = StudioGuard(Starlette(routes=routes), TOKEN, hosts_of(host), 8100)
    return TestClient(guard, base_url="http://127.0.0.1:8100", follow_redirects=False)


def test_the_printed_address_opens_the_page_and_leaves_no_token_in_it() -> None:
    with client() as browser:
        answer = browser.get(f"/run/demo?token={TOKEN}&zoom=2")
        assert (answer.status_code, answer.headers["location"]) == (303, "/run/demo?zoom=2")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert browser.get("/run/demo").text == "secret"


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"cookie": "bloomery_studio_8100=wrong"}, 401),
        ({"cookie": f"bloomery_studio_8101={TOKEN}"}, 401),
        ({"cookie": "\x00=;;;,"}, 401),
        ({"authorization": f"Bearer {TOKEN}", "host": "evil.example:8100"}, 403),
        ({"authorization": f"Bearer {TOKEN}", "host": "127.0.0.1.evil.example"}, 403),
        ({"authorization": f"Bearer {TOKEN}", "host": ""}, 403),
        ({"authorization": f"Bearer {TOKEN}", "origin": "http://evil.example"}, 403),
        ({"authorization": f"Bearer {TOKEN}", "origin": "http://127.0.0.1:8101"}, 403),
        ({"authorization": f"Bearer {TOKEN}", "origin": "null"}, 403),
        ({"authorization": f"Bearer {TOKEN}"}, 200),
        ({"authorization": f"Bearer {TOKEN}", "origin": "http://127.0.0.1:8100"}, 200),
        ({"authorization": f"Bearer {TOKEN}", "host": "localhost:8100"}, 200),
    ],
)
def test_who_gets_an_answer(headers: dict[str, str], status: int) -> None:
    with client() as stranger:
        for method in ("GET", "POST"):
            answer = stranger.request(method, "/runs", headers=headers)
            assert answer.status_code == status
            assert ("secret" in answer.text) == (status == 200)
            assert TOKEN not in answer.text


def test_a_link_of_another_site_gets_a_page_that_goes_on_by_itself() -> None:
    """After a redirect from there a browser would not send the cookie."""
    with client() as browser:
        headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        answer = browser.get(f"/run/%22%3E%3Cb%3E?token={TOKEN}&a=%22%3E", headers=headers)
        assert answer.status_code == 200
        assert 'content="0; url=/run/%22%3E%3Cb%3E?a=%22%3E"' in answer.text
        assert TOKEN not in answer.text
        assert browser.get("/run/demo").text == "secret"


def test_a_wrong_token_in_the_address_sets_no_cookie() -> None:
    with client() as stranger:
        answer = stranger.get("/?token=wrong")
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers


def test_the_key_of_the_opened_address_is_good_once() -> None:
    guard = StudioGuard(Starlette(routes=[Route("/", page)]), TOKEN, hosts_of("127.0.0.1"), 8100)
    key = guard.new_key()
    options = {"base_url": "http://127.0.0.1:8100", "follow_redirects": False}
    with TestClient(guard, **options) as browser, TestClient(guard, **options) as neighbor:
        assert neighbor.head(f"/?token={key}").status_code == 401
        assert browser.get(f"/?token={key}").headers["location"] == "/"
        assert browser.get("/").text == "secret"
        assert key not in str(browser.cookies)
        # Who reads the arguments of the browser's process comes too late.
        assert neighbor.get(f"/?token={key}").status_code == 401
        assert neighbor.get("/", headers={"authorization": f"Bearer {key}"}).status_code == 401


def test_the_redirect_stays_on_this_host() -> None:
    with client() as browser:
        location = browser.get(f"http://127.0.0.1:8100//evil.example/?token={TOKEN}").headers[
            "location"
        ]
        assert location.startswith("/")
        assert not location.startswith("//")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {TOKEN}", "origin": "http://evil.example"},
        {"authorization": f"Bearer {TOKEN}", "host": "evil.example"},
    ],
)
def test_a_websocket_of_a_stranger_is_refused(headers: dict[str, str]) -> None:
    with client() as stranger:
        live = stranger.websocket_connect(LIVE, headers=headers)
        with pytest.raises(WebSocketDisconnect):
            live.__enter__()


def test_a_websocket_with_the_token_is_served() -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "origin": "http://127.0.0.1:8100"}
    with client() as browser, browser.websocket_connect(LIVE, headers=headers) as live:
        assert live.receive_text() == "secret"


def test_an_open_address_takes_any_host_but_still_needs_the_token() -> None:
    with client("0.0.0.0") as browser:
        assert browser.get("/", headers={"host": "gpu-box:8100"}).status_code == 401
        bearer = {"host": "gpu-box:8100", "authorization": f"Bearer {TOKEN}"}
        assert browser.get("/", headers=bearer).status_code == 200
        bearer["origin"] = "http://evil.example"
        assert browser.get("/", headers=bearer).status_code == 403


def test_nothing_on_a_page_may_load_from_another_host() -> None:
    with client() as browser:
        policy = browser.get("/", headers={"authorization": f"Bearer {TOKEN}"}).headers[
            "content-security-policy"
        ]
        assert "default-src 'self'" in policy
        assert "http:" not in policy and "https:" not in policy and "*" not in policy
