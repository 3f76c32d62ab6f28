"""A model hub on this machine: the paths of its API that huggingface_hub asks for, and no more."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    files: dict[str, bytes]
    branch: str = "main"
    is_gated: bool = False
    older: list["Repo"] = field(default_factory=list)
    """Its earlier commits, if they can be asked for."""

    def commit_more(self, **files: bytes) -> None:
        self.older.append(replace(self, files=dict(self.files)))
        self.files |= files

    def at(self, revision: str) -> "Repo | None":
        if revision in ("", self.commit, self.branch):
            return self
        return next((repo for repo in self.older if repo.commit == revision), None)

    @property
    def commit(self) -> str:
        content = repr(sorted(self.files.items()))
        return hashlib.sha1(content.encode()).hexdigest()


@dataclass
class Hub:
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    """By name; of data sets with datasets/ before it."""
    requests: list[str] = field(default_factory=list)
    """Method and path."""
    stalls_at: str = ""
    """A file of which half is sent, and no more."""
    has_stalled: Event = field(default_factory=Event)

    def add_model(self, name: str, folder: Path, **more: bytes) -> Repo:
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        self.repos[name] = Repo(files | more)
        return self.repos[name]

    def add_data(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> Repo:
        self.repos[f"datasets/{name}"] = Repo(dict(files), branch)
        return self.repos[f"datasets/{name}"]

    @property
    def downloads(self) -> list[str]:
        """Names of files that were asked for, in order."""
        return [path.rpartition("/")[2] for path in self.requests if path.startswith("GET /")
                and "/resolve/" in path]  # fmt: skip

    def answer(self, method: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers."""
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        is_api = parts[0] == "api"
        parts = [part for part in parts[is_api:] if part != "models"]
        num = 3 if parts[0] == "datasets" else 2
        repo = self.repos.get("/".join(parts[:num]))
        if repo is None:
            return 401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}
        kind, revision, *rest = [*parts[num:], "", ""][: len(parts) - num + 2]
        if (repo := repo.at(revision)) is None:
            return 404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": revision}
        if is_api:
            return 200, json.dumps(self._about(repo, kind)).encode(), {}
        if repo.is_gated:
            return 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask for access"}
        content = repo.files.get("/".join(filter(None, rest)))
        if content is None:
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no file"}
        etag = hashlib.sha1(content).hexdigest()
        return 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": repo.commit}

    def _about(self, repo: Repo, kind: str) -> object:
        if kind == "tree":
            return [
                {"type": "file", "path": name, "size": len(content),
                 "oid": hashlib.sha1(content).hexdigest()}
                for name, content in repo.files.items()
            ]  # fmt: skip
        siblings = [{"rfilename": name} for name in repo.files]
        return {"id": "x/y", "sha": repo.commit, "siblings": siblings, "private": False}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            hub.requests.append(f"{self.command} {self.path}")
            status, body, headers = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET" and hub.stalls_at and self.path.endswith(hub.stalls_at):
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                hub.has_stalled.set()
                self.rfile.read(1)  # until the other end is closed
                self.close_connection = True
            elif self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield hub
        finally:
            server.shutdown()
