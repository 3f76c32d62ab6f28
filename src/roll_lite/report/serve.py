"""The page, live: a server for this machine alone, which reads the folders again as they grow.

Its address has a random word, so that other users and other pages cannot read the runs.
"""

import secrets
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from roll_lite.report.overview import overview
from roll_lite.report.page import clip, columns, html, page_data, run_data, to_json
from roll_lite.report.reader import Row, RunFolder
from roll_lite.report.tokens import TokenTexts


class LiveRuns:
    """What the page asks for."""

    def __init__(self, runs: Sequence[RunFolder]):
        self.runs, self._lock = runs, Lock()
        self._texts = [TokenTexts(run) for run in runs]

    def page(self) -> str:
        with self._lock:
            parts = list(map(self._run, self.runs, self._texts))
            return html(page_data(self.runs, parts, live=True))

    def _run(self, run: RunFolder, texts: TokenTexts) -> Row:
        run.refresh()
        whole = {"metrics": columns(run, range(len(run.rows))), "restarts": run.num_restarts}
        return run_data(run, texts.note) | whole | {"texts": {}}

    def news(self, run: int, rows: int) -> Row:
        """What was recorded since the first `rows` rows."""
        folder = self.runs[run]
        with self._lock:
            folder.refresh()
            return {
                "restarts": folder.num_restarts,
                "metrics": columns(folder, range(rows, len(folder.rows))),
                "overview": overview(folder),
                "notes": [note for note in (*folder.notes, self._texts[run].note) if note],
                "events": clip(folder.events[-200:]),
                "names": folder.names,
            }

    def samples(self, run: int, name: str, start: int) -> Row:
        with self._lock:
            page, total = self.runs[run].samples(name, start), self.runs[run].count_samples(name)
            return page | {"total": total, "texts": self._texts[run].of(page["samples"])}


def make_server(runs: Sequence[RunFolder], port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server on loopback, and the address of its page."""
    live, word = LiveRuns(runs), secrets.token_urlsafe(16)

    def news(query: dict[str, str]) -> str:
        return to_json(live.news(int(query["run"]), int(query["rows"])))

    def samples(query: dict[str, str]) -> str:
        return to_json(live.samples(int(query["run"]), query["name"], int(query["start"])))

    answers: dict[str, Callable[[dict[str, str]], str]] = {
        f"/{word}/": lambda query: live.page(), f"/{word}/news": news, f"/{word}/samples": samples,
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            url = urlsplit(self.path)
            if (answer := answers.get(url.path)) is None:
                return self.send_error(404)
            try:
                text = answer({name: values[0] for name, values in parse_qs(url.query).items()})
            except (ValueError, KeyError, IndexError, OSError) as error:
                return self.send_error(400, type(error).__name__)
            self._send(text.encode(), "text/html" if url.path.endswith("/") else "application/json")

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args) -> None:
            """Requests are not worth a line."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    return server, f"http://127.0.0.1:{server.server_address[1]}/{word}/"


def serve(runs: Sequence[RunFolder], port: int) -> None:
    server, address = make_server(runs, port)
    print(f"open {address} in a browser on this machine; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
