"""A server on this machine: folders as repositories of the hub, and folders as plain files, with faults on demand."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Server:
    """`repos`: name -> [(commit, folder), ...], the newest last. `folders`: first part of the path -> folder.

    Faults hit requests of a path that ends in one of `faulty` only: the next `refuse` are answered 429 with
    Retry-After: `wait`, then of the next `drop` the connection is closed in the middle of the body. Every answer to
    such a request takes `pace` seconds. Without `ranges` a file is given whole, whatever part of it is asked for.
    """

    def __init__(self) -> None:
        self.repos: dict[str, list[tuple[str, Path]]] = {}
        self.folders: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.faulty: tuple[str, ...] = (".parquet", ".zstd", ".gz", ".jsonl")
        self.refuse = 0
        self.refuse_status = 429
        self.drop = 0
        self.wait = 7  # seconds
        self.pace = 0.0
        self.ranges = True
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.url = ""

    def fetched(self, end: str) -> int:
        return sum(method == "GET" and path.endswith(end) for method, path, _ in self.requests)

    def commit(self, repo: str, folder: Path) -> str:
        """A new newest version of `repo`."""
        commit = hashlib.sha1(f"{repo} {folder}".encode()).hexdigest()
        self.repos.setdefault(repo, []).append((commit, folder))
        return commit


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()

    class Handler(_Handler):
        state = server

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        server.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=lambda: listening.serve_forever(poll_interval=0.01), daemon=True)
        thread.start()
        yield server
        listening.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet
    state: Server

    def log_message(self, *args: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.request.settimeout(30)

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path = unquote(urlsplit(self.path).path)
        state = self.state
        state.requests.append((self.command, path, self.headers.get("Range")))
        if path.endswith(state.faulty):
            if state.pace:  # a test may watch what is slept
                time.sleep(state.pace)
            if state.refuse:
                state.refuse -= 1
                return self._answer(state.refuse_status, b"slow down", {"Retry-After": str(state.wait)})
        if path.startswith(("/api/datasets/", "/datasets/")):
            return self._hub(path, body)
        if "/resolve/" in path:  # a model is asked for like a data set
            return self._hub("/datasets" + path, body)
        _, first, *rest = path.split("/")
        if first in state.folders and (file := state.folders[first].joinpath(*rest)).is_file():
            return self._file(file)
        return self._answer(404, b"no such file")

    def _hub(self, path: str, body: str) -> None:
        found = re.fullmatch(r"/(?:api/)?datasets/([^/]+/[^/]+)(?:/([a-z-]+)(?:/([^/]+)(?:/(.*))?)?)?", path)
        assert found, path
        repo, verb, revision, below = found.groups()
        if repo not in self.state.repos:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        versions = dict(self.state.repos[repo])
        commit = self.state.repos[repo][-1][0] if revision in (None, "main") else revision
        if commit not in versions:
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if repo in self.state.gated and verb in ("auth-check", "resolve") and not self.headers.get("Authorization"):
            return self._answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        root = versions[commit]
        if verb in (None, "revision", "auth-check"):
            about = {"id": repo, "sha": commit, "private": False, "gated": False, "tags": [], "siblings": []}
            return self._json(about)
        if verb == "tree":
            where = root / (below or "")
            if not where.is_dir():
                return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("1", "true")
            return self._json([_entry(root, p) for p in sorted(where.rglob("*") if recursive else where.iterdir())])
        if verb == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            return self._json([_entry(root, root / p) for p in asked if (root / p).exists()])
        assert verb == "resolve", path
        if not (root / below).is_file():
            return self._answer(404, b"no such file", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        return self._file(root / below, {"X-Repo-Commit": commit})

    def _file(self, file: Path, headers: dict[str, str] | None = None) -> None:
        data = file.read_bytes()
        tag = f'"{hashlib.sha1(data).hexdigest()}"'
        headers = {"ETag": tag, "Accept-Ranges": "bytes", **(headers or {})}
        start, total, status = 0, len(data), 200
        if (asked := self.state.ranges and self.headers.get("Range")) and self.headers.get("If-Range", tag) == tag:
            low, high = asked.removeprefix("bytes=").split("-")
            start, stop = int(low), min(int(high) + 1 if high else total, total)
            if start >= total:
                return self._answer(416, b"", {"Content-Range": f"bytes */{total}"})
            data, status = data[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
        return self._answer(status, data, headers)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.state.drop and status in (200, 206) and urlsplit(self.path).path.endswith(self.state.faulty):
            self.state.drop -= 1
            data = data[: len(data) // 2]
            self.close_connection = True
        self.wfile.write(data)


def _entry(root: Path, path: Path) -> dict[str, Any]:
    kind = "directory" if path.is_dir() else "file"
    name = path.relative_to(root).as_posix()
    return {"type": kind, "path": name, "size": 0 if path.is_dir() else path.stat().st_size, "oid": name}
