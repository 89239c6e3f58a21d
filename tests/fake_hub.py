"""A Hub of some files on 127.0.0.1: what huggingface_hub asks for is answered as the real one does."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`files`: repository -> name -> content. `cut_after`: bytes of a file after which the
    connection is cut, once; where `hold` is set nothing more comes instead, and `stalled` tells that this is so."""

    files: dict[str, dict[str, bytes]]
    url: str = ""
    gated: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)
    hold: bool = False
    stalled: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    # repository -> name -> content
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created: dict[str, str] = field(default_factory=dict)  # repository -> visibility
    writer: str = "hf_writer"  # the token that may write
    # method, path, Range, token
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        token = self.headers.get("Authorization")
        self.hub.asked.append((self.command, path, self.headers.get("Range"), token))
        if match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+?)(/revision/(.+))?(/tree/(.+))?", path
        ):
            return self.api(match[1], match[2], match[4], match[6] is not None, token)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.file(match[2], match[4], token)
        return self.refuse(404, "EntryNotFound")

    def do_POST(self):
        """What `create_repo` and `upload_folder` ask for, with every file in the commit itself."""
        path, token = self.path.split("?")[0], self.headers.get("Authorization")
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append((self.command, path, None, token))
        if token != f"Bearer {self.hub.writer}":
            return self.refuse(403 if token else 401, "Forbidden")
        json_ = {"Content-Type": "application/json"}
        if path == "/api/repos/create":
            wanted = json.loads(content)
            repo = f"{wanted['organization']}/{wanted['name']}"
            self.hub.created.setdefault(repo, wanted.get("visibility", "public"))
            return self.answer(
                200, json.dumps({"url": f"{self.hub.url}/{repo}", "name": repo}).encode(), json_
            )
        if path == "/api/validate-yaml":
            return self.answer(200, b'{"warnings": [], "errors": []}', json_)
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", path):
            rows = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(content)["files"]
            ]
            return self.answer(200, json.dumps({"files": rows}).encode(), json_)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            held = self.hub.pushed.setdefault(match[1], {})
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    held[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            done = {"commitUrl": f"{self.hub.url}/{match[1]}/commit/{COMMIT}", "commitOid": COMMIT}
            return self.answer(200, json.dumps(done).encode(), json_)
        return self.refuse(404, "EntryNotFound")

    def refuse(self, status, code):
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "X-Request-Id": "test",
            **dict(headers),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def known(self, repo, token):
        if repo not in self.hub.files:
            self.refuse(401, "RepoNotFound")
        elif repo in self.hub.gated and token is None:
            self.refuse(403, "GatedRepo")
        else:
            return True
        return False

    def api(self, kind, repo, revision, tree, token):
        if not self.known(repo, token):
            return None
        if revision not in (None, "main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        files = self.hub.files[repo]
        if tree:
            rows = [
                {"type": "file", "path": n, "size": len(c), "oid": _etag(c)}
                for n, c in files.items()
            ]
            return self.answer(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
        rows = [{"rfilename": n, "size": len(c), "blobId": _etag(c)} for n, c in files.items()]
        info = {
            "id": repo,
            "_id": "x",
            "sha": COMMIT,
            "private": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": rows,
        }
        return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def file(self, repo, name, token):
        content = self.hub.files.get(repo, {}).get(name)
        if not self.known(repo, token):
            return
        if content is None:
            self.refuse(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        cut = self.hub.cut_after.pop(name, None) if self.command == "GET" else None
        self.send_response(206 if asked else 200)
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        for key, value in {"Content-Length": str(len(content) - start), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[start:] if cut is None else content[start : start + cut])
        if cut is not None:
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.over.wait(60 if self.hub.hold else 0)
            self.close_connection = True


def _etag(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def fake_hub(files: dict[str, dict[str, bytes]], **rest) -> Iterator[FakeHub]:
    hub = FakeHub(files, **rest)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
